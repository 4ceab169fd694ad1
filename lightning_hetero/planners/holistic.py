"""Ours: the joint space of all the others. A linear programme gives a start and a lower bound; the simulator judges a search.

What is decided together: for each block the tiers of its weights and state, the lane of its update, and what becomes of each
operator's output and of its input; for the plan the depths of prefetching and of waiting gradients, and how a batch is split.
Caches take what is left. The other planners' plans are candidates too, so the result is never slower than theirs by simulation.

See docs/planners/holistic.md.
"""

from __future__ import annotations

import importlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan, Tier
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.planners.baselines import BASELINES, disk, variants
from lightning_hetero.planners.bounds import Room, Use, uses
from lightning_hetero.planners.judge import proved
from lightning_hetero.planners.relaxation import Relaxation
from lightning_hetero.planners.search import NAME, Referee, Search, Start
from lightning_hetero.units import MIB, format_bytes

OTHERS = ("autohete", "deep_optimizer_states", "protrain", "lohan")
_WITHOUT_DISK = ("autohete", "deep_optimizer_states", "protrain")  # all weights and state are in memory
_SECONDS = 20.0
_SIMULATED_BLOCKS = 400  # blocks of all simulations of one search together, so that a large model gets fewer of them
_EVALUATIONS = (4, 40)
_MARGIN, _OWN_CPU_MARGIN = 0.01, 0.05  # see prefer_resident
_TIE = 1e-9


def plan(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    micro_batches: Sequence[int] = (1,),
    updates: Updates = Updates.IN_BACKWARD,
    prefer_resident: float | None = None,
    evaluations: int | None = None,
    seconds: float = _SECONDS,
) -> Plan:
    """The fastest plan found by simulation.

    ``objective_s`` is its simulated step. ``decisions`` say what is where: counts of blocks by tier of ``weights`` and ``state``
    and by lane of the ``update``; ``kept_bytes``, ``recomputed_bytes``, ``swapped_host_bytes`` and ``swapped_disk_bytes`` of
    activations in one micro-batch; the depths. And how good that is: ``lower_bound_s`` (no plan is faster), ``gap`` to it,
    ``start`` (the planner whose plan it is, or that it grew from) and ``evaluations`` (simulations of the search).

    Args:
        model: The model; the batch of its profile is the batch of one step.
        hardware: The machine.
        micro_batches: Allowed splits of that batch. Where the best is not 1, the plan is for a profile of so many times smaller
            micro-batches: :func:`split`.
        updates: When updates may run: during backward, or only once all gradients are known.
        prefer_resident: How much slower than the fastest plan found, relatively, the resident one may be and still be chosen, as it
            depends least on the profile. ``None``: what cannot be told apart (docs/adr/0008-resident-or-fastest.md): 0.01, or 0.05
            where the device is the host's own CPU.
        evaluations: Simulations that the search may use; ``None``: as many as a second allows on two cores.
        seconds: Wall time after which the search ends whatever is left: a backstop that no ordinary case reaches, since a result
            that depends on it depends on the machine that plans.

    Raises:
        PlanError: Nothing fits: names the tightest tier, what is missing there and the cheapest remedy.
        ConfigError: A split that is not positive, or none that this machine runs.
    """
    import cvxpy  # noqa: F401  takes a second to import, which is none of planning

    deadline_s = time.monotonic() + seconds
    margin = prefer_resident if prefer_resident is not None else _OWN_CPU_MARGIN if hardware.shared_memory else _MARGIN
    budget = evaluations if evaluations is not None else _evaluations(model)
    found: list[_Joint] = []
    for parts in _splits(micro_batches, model, hardware):
        referee = Referee(split(model, parts), hardware, updates=updates, evaluations=budget, deadline_s=deadline_s)
        found.append(_Joint(referee, parts, margin=margin))
        found[-1].run(min((j.referee.best_s for j in found[:-1]), default=math.inf))
    best = min(found, key=lambda j: j.referee.best_s)
    if best.referee.best is None:
        request = _Request(model=model, hardware=hardware, parts=found[-1].parts, updates=updates)
        raise infeasible(request, found[-1].referee.refusal)
    return best.described()


def split(model: ModelProfile, parts: int) -> ModelProfile:
    """The profile of one of ``parts`` equal micro-batches.

    Times, FLOP and activations shrink by ``parts`` [assumed: small micro-batches compute less efficiently, which only another
    profile could tell]; constants and parameters stay.
    """
    if parts == 1:
        return model

    def less(size: int) -> int:
        return -(-size // parts)

    blocks = (
        replace(
            b,
            forward_s=b.forward_s / parts,
            backward_s=b.backward_s / parts,
            forward_flop=b.forward_flop / parts,
            activation_bytes=less(b.activation_bytes),
            boundary_bytes=less(b.boundary_bytes),
            transient_bytes=less(b.transient_bytes),
            operators=tuple(replace(o, flop=o.flop / parts, bytes=less(o.bytes)) for o in b.operators),
        )
        for b in model.blocks
    )
    return replace(model, tokens=less(model.tokens), blocks=tuple(blocks))


def _splits(allowed: Sequence[int], model: ModelProfile, hardware: HardwareProfile) -> list[int]:
    """The allowed splits that this machine runs and the batch has, smallest first."""
    if not allowed or not all(isinstance(m, int) and not isinstance(m, bool) and 1 <= m <= 1024 for m in allowed):
        raise ConfigError(f"micro_batches={allowed!r}; allowed: integers from 1 to 1024, such as (1, 2, 4).")
    found = [m for m in sorted(set(allowed)) if m == 1 or (model.tokens % m == 0 and not hardware.shared_memory)]
    if not found:
        where = "the host's own CPU splits no batch" if hardware.shared_memory else f"a batch has {model.tokens} tokens"
        raise ConfigError(f"micro_batches={allowed!r}: {where}. Allow 1 too.")
    return found


def _evaluations(model: ModelProfile) -> int:
    least, most = _EVALUATIONS
    return max(least, min(most, _SIMULATED_BLOCKS // len(model.blocks)))


class _Joint:
    """The search for one split of the batch.

    Args:
        referee: Who judges; its model is that of one micro-batch.
        parts: Micro-batches of a step.
        margin: As ``prefer_resident`` of :func:`plan`.
    """

    def __init__(self, referee: Referee, parts: int, *, margin: float) -> None:
        self.referee, self.parts, self.margin = referee, parts, margin
        self.relaxation = Relaxation(referee.model, referee.hardware, micro_batches=parts)
        self.bound_s = self.relaxation.bound_s()

    def run(self, rival_s: float) -> None:
        """Looks for the fastest plan, unless there is none, or none that can be faster than ``rival_s``."""
        if self.bound_s is None or self.bound_s >= rival_s:
            return
        resident = self._other("resident")
        if resident is not None and self.referee.best_s <= self.bound_s * (1 + self.margin):
            return
        resident_s = self.referee.best_s
        search = Search(relaxation=self.relaxation, referee=self.referee, bound_s=self.bound_s)
        search.first()
        for name in (*BASELINES, *OTHERS):
            if name != "resident":
                self._other(name)
        search.run()
        if resident is not None and resident_s <= self.referee.best_s * (1 + self.margin + _TIE):
            self.referee.best, self.referee.best_s, self.referee.proved = resident, resident_s, self.parts == 1

    def _other(self, name: str) -> Plan | None:
        """Another planner's plan, admitted; ``None`` if it has none, or none that could be the fastest."""
        referee = self.referee
        if self._floor_s(name) >= referee.best_s:
            return None
        planner: Callable[..., Plan] = BASELINES.get(name) or importlib.import_module(f"{__package__}.{name}").plan
        try:
            found = planner(referee.model, referee.hardware, updates=referee.updates)
        except PlanError as error:
            referee.refusal = referee.refusal or error
            return None
        if self.parts == 1:
            referee.admit(found, proved=True)
            return found
        found = replace(found, micro_batches=self.parts)
        return None if math.isinf(referee.seconds(found, always=True)) else found

    def _floor_s(self, name: str) -> float:
        """What another planner's plan takes at least, as far as it is known before it plans; infinite if it cannot have one."""
        h, shape = self.referee.hardware, self.referee.model.shape()
        if name in _WITHOUT_DISK:
            memory = h.host_memory_bytes + (0 if h.shared_memory else h.device_memory_bytes)
            return math.inf if sum(b.weight_bytes + b.state_bytes for b in shape.blocks) > memory else 0.0
        plans: tuple[Plan, ...] = ()
        if name == "lohan":  # places weights and state as disk does; whatever becomes of activations takes longer than keeping them
            plans = (disk(shape),)
        elif name in BASELINES:
            plans = variants(name, shape, shared_memory=h.shared_memory)
        return min((self._bound_s(p) for p in plans), default=0.0)

    def _bound_s(self, plan: Plan) -> float:
        """The bound of one plan with all the memory that its weights and state leave."""
        model, h, m = self.referee.model, self.referee.hardware, self.relaxation.micro_batches
        taken = np.array([uses(block, rule, model, h, m) for block, rule in zip(model.blocks, plan.blocks, strict=True)])
        total = taken.sum(axis=0)
        left = np.zeros(len(Room))
        device = max(0.0, h.device_memory_bytes - total[Use.DEVICE_HELD])
        left[[Room.PASSED_CPU, Room.PASSED_DEVICE]] = np.minimum(device, total[[Use.PASSED_CPU, Use.PASSED_DEVICE]])
        left[Room.PASSED_DISK] = min(max(0.0, h.host_memory_bytes - total[Use.HOST_HELD]), total[Use.PASSED_DISK])
        left[Room.WAITING] = h.host_memory_bytes
        return self.relaxation.matrices.largest(taken, left)

    def described(self) -> Plan:
        """The best plan, proved and with its decisions."""
        referee, best = self.referee, self.referee.best
        assert best is not None
        assert best.predicted is not None
        model, hardware = referee.model, referee.hardware
        placed = replace(best, name=NAME, objective_s=None, decisions={})
        found = placed if referee.proved else proved(placed, model, hardware, updates=referee.updates)
        step_s = best.predicted.iteration_s
        saved = Counter[str]()
        for block, rule in zip(model.blocks, found.blocks, strict=True):
            saved.update(asdict(saved_bytes(block, rule)))
        bound_s = self.bound_s or 0.0
        decisions: dict[str, Any] = {
            key: dict(Counter(getattr(rule, key).value for rule in found.blocks)) for key in ("weights", "state", "update")
        }
        decisions |= {
            "kept_bytes": saved["kept"],
            "recomputed_bytes": saved["recomputed"],
            "swapped_host_bytes": saved["to_host"],
            "swapped_disk_bytes": saved["to_disk"],
            "prefetch_depth": found.prefetch_depth,
            "gradient_depth": found.gradient_depth,
            "micro_batches": found.micro_batches,
            "lower_bound_s": bound_s,
            "gap": step_s / bound_s - 1 if bound_s else None,
            "start": best.name,
            "evaluations": referee.evaluations,
        }
        return replace(found, objective_s=step_s, decisions=decisions)


# ---- nothing fits ------------------------------------------------------------------------------------------------------------

_CHEAPEST_FIRST = {Tier.DISK: "disk", Tier.HOST: "host memory", Tier.DEVICE: "device memory"}
_ANY_RATE = 1e9  # bytes/s of a disk that is not there yet: whether it would be large enough does not depend on it
_GROWTH = (1.0, 1.1, 1.5, 2.0, 4.0)  # of what the programme asks for, until whole blocks fit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What was asked for, in so many micro-batches."""

    model: ModelProfile
    hardware: HardwareProfile
    parts: int
    updates: Updates

    def fits(self) -> bool:
        """Whether a plan is found whose rooms suffice, however slow it is."""
        part, count = split(self.model, self.parts), 1 if self.hardware.shared_memory else self.parts
        relaxation = Relaxation(part, self.hardware, micro_batches=count)
        search = Search(relaxation=relaxation, referee=self._referee(part), bound_s=0.0)
        return any(True for _ in search.frugal()) or search.start(Start(slots=1)) is not None

    def refusal(self) -> PlanError | None:
        """Why the plan that takes least memory does not fit."""
        part = split(self.model, self.parts)
        referee = self._referee(part)
        relaxation = Relaxation(part, self.hardware, micro_batches=self.parts)
        fitting = any(True for _ in Search(relaxation=relaxation, referee=referee, bound_s=0.0).frugal())
        return None if fitting else referee.refusal

    def _referee(self, part: ModelProfile) -> Referee:
        return Referee(part, self.hardware, updates=self.updates, evaluations=0)

    def lacking(self, tier: Tier, least: int) -> int | None:
        """Bytes that make a plan possible if they are added on one tier alone, ``least`` or more; ``None`` if none do."""
        h = self.hardware
        if tier is Tier.DEVICE and h.shared_memory:
            return None
        if tier is Tier.DISK and not h.disk_capacity_bytes:
            h = replace(h, disk_capacity_bytes=1, disk_read_bytes_per_s=_ANY_RATE, disk_write_bytes_per_s=_ANY_RATE)
        short = Relaxation(split(self.model, self.parts), h, micro_batches=self.parts).shortfall_bytes(tier)
        key = {Tier.DISK: "disk_capacity_bytes", Tier.HOST: "host_memory_bytes", Tier.DEVICE: "device_memory_bytes"}[tier]
        for factor in _GROWTH if short is not None else ():
            size = int(factor * max(short or 0, least))
            if replace(self, hardware=replace(h, **{key: getattr(h, key) + size})).fits():
                return size
        return None


def infeasible(request: _Request, refusal: PlanError | None) -> PlanError:
    """Why nothing fits, and what would change that, cheapest first.

    The tightest tier is the one that lacks least, were it alone to grow; of equals the cheaper one. Smaller micro-batches cost
    nothing, then come disk, host memory and device memory. Each remedy is one with which a plan was found.
    """
    model, hardware, parts = request.model, request.hardware, request.parts
    refusal = refusal or request.refusal()
    least = {tier: refusal.shortfall_bytes if refusal is not None and refusal.tier == tier else 0 for tier in _CHEAPEST_FIRST}
    lacking = {tier: size for tier in _CHEAPEST_FIRST if (size := request.lacking(tier, max(least[tier], MIB))) is not None}
    remedies = [f"{format_bytes(size)} more {_CHEAPEST_FIRST[tier]}" for tier, size in lacking.items()]
    smaller = (n for n in (2 * parts, 4 * parts, 8 * parts) if model.tokens % n == 0)
    enough = next((n for n in smaller if replace(request, parts=n).fits()), None)
    if enough is not None:
        what = "a batch" if hardware.shared_memory else f"micro_batches=({enough},), micro-batches"
        remedies.insert(0, f"{what} {enough // parts} times smaller")
    tier = min(lacking, key=lambda t: lacking[t]) if lacking else Tier((refusal and refusal.tier) or Tier.DEVICE)
    short = lacking.get(tier, least[tier])
    return PlanError(
        f"no plan fits model {model.name!r} on {hardware.name!r}, not with everything on the lowest tier and all activations "
        f"recomputed: {_CHEAPEST_FIRST[tier]} lacks {format_bytes(short)}. Cheapest remedy: "
        f"{'; else '.join(remedies) if remedies else 'smaller blocks'}.",
        tier=tier.value,
        shortfall_bytes=short,
    )
