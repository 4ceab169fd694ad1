"""What a report shows, as data. The command line fills it; a page is drawn from it alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hetero.ir.plan import BlockPlan
from lightning_hetero.ir.run_record import RecordedStep, RecordedTensor
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.report.bars import Bar


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownBlock:
    """One block, where it is, and how large.

    Attributes:
        placed: Its rule in the plan.
        weight_bytes: Of its weights; ``None``: not known, as without a model profile.
        state_bytes: Of its optimizer state; the same.
        activations: What happens to its activations, in words.
        mostly_in: Where most bytes of its activations are: a tier, or ``"recomputed"``; empty: not
            known.
        tensors: Its parameters, if a run has recorded them.
    """

    placed: BlockPlan
    weight_bytes: int | None = None
    state_bytes: int | None = None
    activations: str = ""
    mostly_in: str = ""
    tensors: Sequence[RecordedTensor] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """One step on a clock that begins at 0.

    Attributes:
        title: Such as ``"predicted"`` or ``"measured, step 12"``.
        seconds: Its length.
        lanes: Its bars by lane.
        forward_s: When its first backward begins; ``None``: not known.
        sentences: What compute waits for, one sentence each.
    """

    title: str
    seconds: float
    lanes: Mapping[Lane, Sequence[Bar]]
    forward_s: float | None = None
    sentences: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Memory of one tier over a predicted step.

    Attributes:
        tier: Its name.
        points: Seconds since the step began, and bytes from then on.
        capacity_bytes: What the machine has.
        peak_bytes: The most of the step.
    """

    tier: str
    points: Sequence[tuple[float, int]]
    capacity_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Another model or machine, with its best plan.

    Attributes:
        change: What is other.
        step_s: Seconds of a step; ``None``: no plan fits.
        tokens_per_s: Tokens per second; ``None`` without a plan.
        gain: By how much more tokens per second it has, relative to the plan; ``None`` likewise.
        remark: Such as why no plan fits.
    """

    change: str
    step_s: float | None = None
    tokens_per_s: float | None = None
    gain: float | None = None
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContent:
    """Everything on the page. What is empty is left out.

    Attributes:
        title: The page's title.
        facts: Names and values at the top.
        summary: One sentence on what bounds the step.
        blocks: The blocks in the model's order.
        tiers: Bytes by what they are (``"weights"``) and by tier.
        strips: Steps to compare on one clock: predicted, then measured.
        curves: Memory by tier over the predicted step.
        steps: Recorded steps of a run.
        traffic: Rows on bytes: lane, bytes of a step, busy seconds, rate.
        wear: A sentence on the disk's wear.
        what_ifs: Other models and machines.
        remedy: A sentence on the cheapest of them that helps.
        alternatives: Other placements of single blocks: block, change, effect.
    """

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""
    blocks: Sequence[ShownBlock] = ()
    tiers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    strips: Sequence[Strip] = ()
    curves: Sequence[Curve] = ()
    steps: Sequence[RecordedStep] = ()
    traffic: Sequence[tuple[str, str, str, str]] = ()
    wear: str = ""
    what_ifs: Sequence[WhatIf] = ()
    remedy: str = ""
    alternatives: Sequence[tuple[str, str, str]] = ()
