"""Plans without a search: resident, host, disk, and those that the papers compare with.

Each is a function of the blocks alone, so the strategy may use it before anything is measured.
:data:`BASELINES` are planners made of them: of a system's variants the first one that fits the
machine, evaluated by the simulator. Variants come in the order in which a user would turn the
switches: activations stay on the device as long as they fit, then all are recomputed.

The papers give no formula for these systems, so ``objective_s`` is the simulator's iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile, ModelShape
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering.rank_rules import rules_of
from lightning_hetero.planners.one_rank import one_rank


def resident(model: ModelShape) -> Plan:
    """Nothing is offloaded: weights and state on the device, updates after backward."""
    rows = (BlockPlan(name=b.name, weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE) for b in model.blocks)
    return Plan(name="resident", blocks=tuple(rows))


def host(model: ModelShape) -> Plan:
    """State and weights in host memory; updates on CPU threads while backward runs."""
    return Plan(name="host", blocks=tuple(BlockPlan(name=b.name) for b in model.blocks))


def disk(model: ModelShape) -> Plan:
    """State and repeated blocks' weights on disk; other weights stay in host memory.

    So does what an optimizer needs in memory, if other blocks can be on disk.
    """
    others = any(not b.pinned and not b.in_memory for b in model.blocks)
    rows = (
        BlockPlan(name=b.name)
        if b.in_memory and others
        else BlockPlan(name=b.name, weights=Tier.HOST if b.pinned else Tier.DISK, state=Tier.DISK if b.state_bytes else Tier.HOST)
        for b in model.blocks
    )
    return Plan(name="disk", blocks=tuple(rows))


def full_recompute(model: ModelShape) -> Plan:
    """Resident, but only the blocks' inputs are saved; backward computes everything else again."""
    return replace(_recomputing(resident(model)), name="full_recompute")


def zero_offload(model: ModelShape) -> Plan:
    """ZeRO-Offload: weights on the device, gradients and updates on the CPU after backward.

    Without its one-step delayed update, which would train on stale weights.

    Source: Ren et al. (USENIX ATC 2021), as AutoHete section 4.1 and LoHan section V-A run it.
    """
    rows = (BlockPlan(name=b.name, weights=Tier.DEVICE) for b in model.blocks)
    return _after_backward(Plan(name="zero_offload", blocks=tuple(rows)))


def zero_infinity(model: ModelShape, tier: Tier = Tier.DISK) -> Plan:
    """ZeRO-Infinity: weights and state below the device, only inputs saved, updates after backward.

    Inputs wait in host memory, everything else is recomputed.

    Args:
        model: The blocks.
        tier: Where weights and state live, ``HOST`` or ``DISK``; weights used outside repeated
            blocks stay in host memory.

    Source: Rajbhandari et al. (SC 2021), as LoHan section V-A runs it.
    """
    placed = _after_backward(_recomputing(disk(model) if tier is Tier.DISK else host(model)))
    rows = (replace(b, boundary=Saved.SWAP_HOST) for b in placed.blocks)
    return replace(placed, name="zero_infinity", blocks=tuple(rows))


BUILTIN_PLANS: dict[str, Callable[[ModelShape], Plan]] = {"resident": resident, "host": host, "disk": disk}


def _recomputing(plan: Plan) -> Plan:
    """The same plan, which keeps only the inputs of blocks and recomputes the rest in backward."""
    return replace(plan, blocks=tuple(replace(b, saved=Saved.RECOMPUTE) for b in plan.blocks))


def _keeping(plan: Plan) -> Plan:
    """The same with all that forward saves kept."""
    rows = (replace(b, saved=Saved.KEEP, boundary=Saved.KEEP) for b in plan.blocks)
    return replace(plan, blocks=tuple(rows))


def _after_backward(plan: Plan) -> Plan:
    """The same with all updates in one phase after backward, which the next forward waits for."""
    return replace(plan, update_order=UpdateOrder.AFTER_BACKWARD, priority=False)


# ---- planners ------------------------------------------------------------------------------------


def _keep_or_recompute(place: Callable[[ModelShape], Plan], model: ModelShape, shared_memory: bool) -> tuple[Plan, ...]:
    return (place(model),) if shared_memory else (place(model), _recomputing(place(model)))


def _full_recompute(model: ModelShape, shared_memory: bool) -> tuple[Plan, ...]:
    return () if shared_memory else (full_recompute(model),)


def _zero_infinity(model: ModelShape, shared_memory: bool) -> tuple[Plan, ...]:
    plans = tuple(zero_infinity(model, tier) for tier in (Tier.HOST, Tier.DISK))
    return tuple(_keeping(p) for p in plans) if shared_memory else plans


_NEEDS_DEVICE = frozenset({"full_recompute"})  # with memory of its own

_VARIANTS: dict[str, Callable[[ModelShape, bool], tuple[Plan, ...]]] = {
    "resident": lambda model, _: (resident(model),),
    "full_recompute": _full_recompute,
    "host": partial(_keep_or_recompute, host),
    "disk": partial(_keep_or_recompute, disk),
    "zero_offload": partial(_keep_or_recompute, zero_offload),
    "zero_infinity": _zero_infinity,
}


def check_machine(planner: str, machine: str, *, shared_memory: bool) -> None:
    """Refuses a planner that has no plan for a kind of machine, whatever the model.

    Args:
        planner: Its name.
        machine: The machine's name.
        shared_memory: The device is the host's own CPU.

    Raises:
        PlanError: It has none.
    """
    if shared_memory and planner in _NEEDS_DEVICE:
        raise PlanError(
            f"baseline {planner!r} recomputes activations, and {machine!r} computes in host memory, where they stay. Use "
            f"'resident', 'host' or 'disk'."
        )


def variants(name: str, model: ModelShape, hardware: HardwareProfile) -> tuple[Plan, ...]:
    """A baseline's plans before they are evaluated, the one that a user would try first first.

    Where the device is the host's own CPU, nothing is recomputed or swapped. Several ranks have
    what they can run in the place of what they cannot (``RankRules.nearest``).

    Args:
        name: A name in :data:`BASELINES`.
        model: The blocks.
        hardware: The machine, or one rank's share of it.
    """
    return tuple(rules_of(hardware).nearest(plan) for plan in _VARIANTS[name](model, hardware.shared_memory))


def plan(model: ModelProfile, hardware: HardwareProfile, *, baseline: str, updates: Updates = Updates.IN_BACKWARD) -> Plan:
    """The first of a baseline's variants that fits the machine.

    ``decisions`` name the tiers of ``weights`` and ``state`` of most blocks, the lane of the
    ``update``, whether updates overlap with backward, and what becomes of ``activations`` and block
    ``inputs``.

    Args:
        model: The model.
        hardware: The machine.
        baseline: A name in :data:`BASELINES`.
        updates: When updates may run: during backward, or only once all gradients are known.

    Raises:
        PlanError: No variant fits; the message is that of the last one, which needs least.
    """
    from lightning_hetero.planners.evaluation import evaluated  # brings the simulator, which the plans alone do not need

    check_machine(baseline, hardware.name, shared_memory=hardware.shared_memory)
    model, hardware = one_rank(model, hardware)
    *earlier, last = variants(baseline, model.shape(), hardware)
    found = None
    for variant in earlier:
        with suppress(PlanError):
            found = evaluated(variant, model, hardware, updates=updates)
            break
    if found is None:
        found = evaluated(last, model, hardware, updates=updates)
    return replace(found, objective_s=found.require_predicted().iteration_s, decisions=_decisions(found))


def _decisions(plan: Plan) -> Mapping[str, object]:
    def most(key: str) -> str:
        return Counter(str(getattr(b, key)) for b in plan.blocks).most_common(1)[0][0]

    keys = {"weights": "weights", "state": "state", "update": "update", "activations": "saved", "inputs": "boundary"}
    named: dict[str, object] = {name: most(key) for name, key in keys.items()}
    return named | {"update_order": plan.update_order.value, "priority": plan.priority}


BASELINES: dict[str, Callable[..., Plan]] = {name: partial(plan, baseline=name) for name in _VARIANTS}
"""The baselines as planners, by name."""
