"""From shares to whole blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.holistic import DEVICE, MB, MODEL, model_of
from support.machines import ROOMY

from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.plan import BlockPlan, Saved, Tier, UpdateLane
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.holistic.block_choices import INPUT
from lightning_hetero.planners.holistic.evaluator import Evaluator
from lightning_hetero.planners.holistic.relaxation import Relaxation, Relaxed
from lightning_hetero.planners.holistic.rounding import Demotion, rounded, rule

CPU = (Tier.HOST, Tier.HOST, UpdateLane.CPU)


def _shares(relaxation: Relaxation, share: float) -> Relaxed:
    """A share of all blocks is resident, the others' weights and state are on the host; everything
    that is saved is kept.
    """
    shares = []
    for place in range(len(relaxation.segments)):
        mine: dict[str | None, dict[object, float]] = {}
        for column in relaxation.columns:
            if column.segment == place:
                wanted = {DEVICE: share, CPU: 1 - share, Saved.KEEP: 1.0}
                mine.setdefault(column.what, {})[column.choice] = wanted.get(column.choice, 0.0)
        shares.append(mine)
    busy = dict.fromkeys(("compute", "h2d", "d2h", "cpu", "disk_read", "disk_write", "net"), 0.1)
    return Relaxed(seconds=1.0, busy_s=busy, shares=tuple(shares), waiting_bytes=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.5, 10), (0.25, 5), (1.0, 20)])
def test_rounding_keeps_the_shares_of_a_run(share: float, count: int, grouped: bool) -> None:
    relaxation = Relaxation(model_of(20), ROOMY)
    chosen = rounded(_shares(relaxation, share), relaxation.segments, grouped=grouped)
    layers = [choices[None] for choices in chosen[1:]]
    assert layers.count(DEVICE) == count
    if grouped:
        assert layers == [DEVICE] * count + [CPU] * (20 - count)


def test_the_first_block_is_rounded_towards_the_device() -> None:
    relaxation = Relaxation(replace(MODEL, blocks=MODEL.blocks[1:]), ROOMY)  # without the one that is pinned
    assert rounded(_shares(relaxation, 0.3), relaxation.segments, grouped=False)[0][None] == DEVICE
    assert rounded(_shares(relaxation, 0.1), relaxation.segments, grouped=False)[0][None] == CPU


def test_a_rule_covers_every_saved_tensor() -> None:
    block = MODEL.blocks[1]
    found = rule(block, {None: CPU, "cheap": Saved.RECOMPUTE, "dear": Saved.SWAP_HOST, INPUT: Saved.SWAP_DISK})
    assert (found.weights, found.state, found.update) == CPU
    totals = saved_bytes(block, found)
    assert (totals.kept, totals.to_host, totals.to_disk, totals.recomputed) == (0, 40 * MB, 10 * MB, 50 * MB)
    assert found == BlockPlan(name=block.name, saved=Saved.RECOMPUTE, boundary=Saved.SWAP_DISK, operators={"dear": Saved.SWAP_HOST})


def test_a_rule_does_not_recompute_bytes_without_an_operator() -> None:
    block = replace(MODEL.blocks[1], forward_flop=200.0)  # half of it belongs to no operator
    found = rule(block, {None: CPU, "cheap": Saved.RECOMPUTE, "dear": Saved.RECOMPUTE})
    assert found.saved is Saved.KEEP
    assert found.operators == {"cheap": Saved.RECOMPUTE, "dear": Saved.RECOMPUTE}


def test_demotion_frees_the_requested_memory_and_never_fills_the_device() -> None:
    relaxation = Relaxation(model_of(20), ROOMY)
    relaxed = _shares(relaxation, 0.5)
    for tier in (Tier.DEVICE, Tier.HOST):
        chosen = rounded(relaxed, relaxation.segments, grouped=True)
        before = _held(relaxation, chosen)
        assert Demotion(relaxation, relaxed).demote(chosen, tier, 300 * MB)
        after = _held(relaxation, chosen)
        assert before[tier] - after[tier] >= 300 * MB
        assert after[Tier.DEVICE] <= before[Tier.DEVICE]


def test_demotion_never_moves_data_to_a_full_tier() -> None:
    relaxation = Relaxation(model_of(20), ROOMY)
    relaxed = _shares(relaxation, 0.0)
    chosen = rounded(relaxed, relaxation.segments, grouped=True)
    for block in chosen:
        block |= {"cheap": Saved.SWAP_HOST, "dear": Saved.SWAP_DISK}
    demotion = Demotion(relaxation, relaxed)
    assert demotion.demote(chosen, Tier.HOST, 500 * MB)
    before = _held(relaxation, chosen)
    assert demotion.demote(chosen, Tier.DISK, 200 * MB)  # the host would be the cheapest place
    after = _held(relaxation, chosen)
    assert before[Tier.DISK] - after[Tier.DISK] >= 200 * MB
    assert after[Tier.HOST] <= before[Tier.HOST]


def _held(relaxation: Relaxation, chosen: list[dict[str | None, object]]) -> dict[Tier, float]:
    held = dict.fromkeys(Tier, 0.0)
    for column in relaxation.columns:
        segment = relaxation.segments[column.segment]
        count = sum(chosen[i][column.what] == column.choice for i in range(segment.start, segment.stop))
        for tier, size in relaxation.held_bytes(column).items():
            held[tier] += size * count / len(segment)
    return held


def test_an_evaluator_simulates_each_plan_once_and_no_more_than_allowed() -> None:
    evaluator = Evaluator(MODEL, ROOMY, updates=Updates.IN_BACKWARD, evaluations=1)
    first = PLANNERS["host"](MODEL, ROOMY)
    assert evaluator.seconds(first) == evaluator.seconds(replace(first, name="another name")) == first.objective_s
    assert evaluator.evaluations == 1
    other = replace(first, gradient_depth=1)
    assert evaluator.exhausted
    assert evaluator.seconds(other) == float("inf")
    assert evaluator.seconds(other, always=True) < float("inf")
