"""The papers' ablations as plans, each without one idea, for any model and machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.planners.deep_optimizer_states.search import emit
from lightning_hetero.planners.lohan import formulas as lohan_formulas
from lightning_hetero.planners.lohan.search import walk
from lightning_hetero.planners.protrain.formulas import interleave

Build = Callable[[ModelProfile, HardwareProfile, Tier], Plan]
Rule = Callable[[int, int], BlockPlan]  # of a repeated block: its number, and how many there are; the name is filled in


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One bar of a paper's figure.

    Attributes:
        name: What is done or left out.
        build: The plan, for a model, a machine, and the tier on which the optimizer state lives.
        paper: The paper's speed relative to the reference; ``None`` where it has no figure.
    """

    name: str
    build: Build
    paper: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One ablation.

    Attributes:
        name: Of the experiment.
        source: Where the paper has it.
        machine: The preset of the paper's machine.
        model: The preset of its model.
        batch: Sequences of 1024 tokens of one step and device.
        state: The tier of the optimizer state in the paper.
        emulated_state: The same on the emulated machine. A disk is what takes updates in the order
            of their urgency there.
        reference: The variant whose speed is 1.
        variants: All of them.
        share: Of the compute time that is asked for; less where updates take many times as long.
    """

    name: str
    source: str
    machine: str
    model: str
    batch: int
    state: Tier
    emulated_state: Tier
    reference: str
    variants: tuple[Variant, ...]
    share: float = 1.0


def _plan(model: ModelProfile, rule: Rule, **options: object) -> Plan:
    """Repeated blocks by the rule.

    The others compute on the device, with their state in host memory.
    """
    repeated = [b.name for b in model.blocks if not b.pinned]
    rows = []
    for block in model.blocks:
        if block.pinned:
            rows.append(BlockPlan(name=block.name, weights=Tier.DEVICE, state=Tier.HOST))
        else:
            rows.append(replace(rule(repeated.index(block.name), len(repeated)), name=block.name))
    return Plan(name="ablation", blocks=tuple(rows), **options)  # type: ignore[arg-type]


# ---- LoHan: when updates run ---------------------------------------------------------------------


def _offloading(order: UpdateOrder) -> Build:
    def build(model: ModelProfile, hardware: HardwareProfile, state: Tier) -> Plan:
        row = BlockPlan(name="", weights=state, state=state, saved=Saved.RECOMPUTE, boundary=Saved.SWAP_HOST)
        return _plan(model, lambda i, n: row, update_order=order, priority=False, host_cache_bytes=0)

    return build


# ---- LoHan: what is swapped ----------------------------------------------------------------------


def _swapping(saved: Saved, boundary: Saved) -> Build:
    def build(model: ModelProfile, hardware: HardwareProfile, state: Tier) -> Plan:
        row = BlockPlan(name="", weights=state, state=state, saved=saved, boundary=boundary)
        return _plan(model, lambda i, n: row, priority=False, host_cache_bytes=0)

    return build


def _by_traffic(*, holistic: bool) -> Build:
    """The amount that is best by LoHan's formulas.

    Capuchin's knows of no traffic but the activations' own (section III-D).
    """

    def build(model: ModelProfile, hardware: HardwareProfile, state: Tier) -> Plan:
        q = lohan_formulas.quantities(model, hardware, host_bytes=float(hardware.host_memory_bytes))
        compute_s = sum(b.forward_s for b in model.blocks)
        q = replace(q, flop_per_s=q.forward_flop / compute_s)  # the model's own speed on this machine
        if not holistic:
            q = replace(q, weight_bytes=0.0, gradient_bytes=0.0, read_bytes=0.0, written_bytes=0.0)
        elif state is not Tier.DISK:
            q = replace(q, read_bytes=0.0, written_bytes=0.0)
        order = lohan_formulas.swap_order(model)
        chosen = {(layer.block, layer.operator) for layer in walk(q, order).layers}
        names = [b.name for b in model.blocks if not b.pinned]

        def rule(index: int, count: int) -> BlockPlan:
            operators = {o: Saved.SWAP_HOST for b, o in chosen if b == names[index]}
            return BlockPlan(
                name="", weights=state, state=state, saved=Saved.RECOMPUTE, boundary=Saved.SWAP_HOST, operators=operators
            )

        return _plan(model, rule, priority=False, host_cache_bytes=0)

    return build


def _by_inactive_time(model: ModelProfile, hardware: HardwareProfile, state: Tier) -> Plan:
    """G10: nothing is recomputed.

    Tensors that rest longest leave, as many as device memory asks for: those of the first blocks.
    """
    kept = _fitting(model, hardware)

    def rule(index: int, count: int) -> BlockPlan:
        away = Saved.SWAP_DISK if index < count - kept else Saved.KEEP
        return BlockPlan(name="", weights=state, state=state, saved=away, boundary=away)

    return _plan(model, rule, priority=False, host_cache_bytes=0)


def _fitting(model: ModelProfile, hardware: HardwareProfile) -> int:
    """Blocks whose activations a fifth of the device's memory holds, at most a quarter of all."""
    blocks = [b.activation_bytes for b in model.blocks if not b.pinned]
    return min(len(blocks) // 4, int(hardware.device_memory_bytes / 5 / max(blocks)))


# ---- AutoHete ------------------------------------------------------------------------------------


def _priority(priority: bool) -> Build:
    def build(model: ModelProfile, hardware: HardwareProfile, state: Tier) -> Plan:
        row = BlockPlan(name="", weights=Tier.DEVICE, state=state, saved=Saved.RECOMPUTE)
        return _plan(model, lambda i, n: row, priority=priority, gradient_depth=_ALL)

    return build


_ALL = 1000  # gradients never wait for an update


# ---- ProTrain ------------------------------------------------------------------------------------


def _protrain(*, dual: bool = True, interleaved: bool = True, overlapped: bool = True) -> Build:
    """The first blocks are persistent, as many as a fifth of the device holds.

    Half of the others have a buffer.
    """

    def build(model: ModelProfile, hardware: HardwareProfile, state: Tier) -> Plan:
        repeated = [b for b in model.shape().blocks if not b.pinned]
        largest = max(b.weight_bytes + b.state_bytes + b.gradient_bytes for b in repeated)
        persistent = min(len(repeated) // 4, int(hardware.device_memory_bytes / 5 / largest))
        kept = _fitting(model, hardware)

        def rule(index: int, count: int) -> BlockPlan:
            swap = max(1, count // 8)
            kinds = interleave(count, swap=swap, checkpoint=count - swap - kept, interval=max(2, count // 4))
            saved = kinds[index] if interleaved else Saved.RECOMPUTE
            boundary = Saved.SWAP_HOST if saved is Saved.SWAP_HOST else Saved.KEEP
            if dual and index < persistent:
                return BlockPlan(
                    name="", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE, saved=saved, boundary=boundary
                )
            return BlockPlan(name="", weights=Tier.HOST, state=state, saved=saved, boundary=boundary)

        buffers = len(repeated) // 2 if dual else 3  # "replaced by three chunk buffers" (section 4.2)
        order = UpdateOrder.OVERLAPPED if overlapped else UpdateOrder.AFTER_BACKWARD
        cache = buffers * max(b.weight_bytes for b in repeated)
        return _plan(model, rule, priority=False, update_order=order, device_cache_bytes=cache, gradient_depth=_ALL)

    return build


# ---- Deep Optimizer States -----------------------------------------------------------------------


def _stride(stride: int | None) -> Build:
    def build(model: ModelProfile, hardware: HardwareProfile, state: Tier) -> Plan:
        return replace(
            emit(model, hardware, stride=stride, static_residents=0, saved=Saved.RECOMPUTE),
            name="ablation",
            gradient_depth=_ALL,
        )

    return build


EXPERIMENTS = (
    Experiment(
        name="gradient offloading",
        source="LoHan, figure 7: 13B, there batch 64, here 32, where an update takes as long as its block's backward",
        machine="lohan-rtx4090",
        model="lohan-13b",
        batch=32,
        state=Tier.DISK,
        emulated_state=Tier.DISK,
        reference="after backward",
        variants=(
            Variant(name="after backward", build=_offloading(UpdateOrder.AFTER_BACKWARD), paper=1.0),
            Variant(name="naive", build=_offloading(UpdateOrder.NAIVE), paper=1.09),
            Variant(name="overlapped", build=_offloading(UpdateOrder.OVERLAPPED), paper=1.33),
        ),
    ),
    Experiment(
        name="activations",
        source="LoHan, figure 9a, there 70B, here 13B; the text has no figures, the optimum is best",
        machine="lohan-rtx4090",
        model="lohan-13b",
        batch=32,
        state=Tier.DISK,
        emulated_state=Tier.DISK,
        reference="boundary only",
        variants=(
            Variant(name="boundary only", build=_swapping(Saved.RECOMPUTE, Saved.SWAP_HOST), paper=1.0),
            Variant(name="all", build=_swapping(Saved.SWAP_HOST, Saved.SWAP_HOST)),
            Variant(name="convex optimum", build=_by_traffic(holistic=True)),
            Variant(name="G10-like", build=_by_inactive_time),
            Variant(name="Capuchin-like", build=_by_traffic(holistic=False)),
        ),
    ),
    Experiment(
        name="priority",
        source="AutoHete, section 4.2: up to 1.24, 1.16 on average",
        machine="autohete-a100",
        model="autohete-12b",
        batch=8,
        state=Tier.HOST,
        emulated_state=Tier.DISK,
        reference="without priority",
        variants=(
            Variant(name="without priority", build=_priority(False), paper=1.0),
            Variant(name="with priority", build=_priority(True), paper=1.24),
        ),
    ),
    Experiment(
        name="chunks, layout, updates",
        source="ProTrain, figure 5a: 10B; what is left out slows it down by 1.10, 1.04, 1.22",
        machine="protrain-rtx3090",
        model="protrain-gpt2-10b",
        batch=4,
        state=Tier.HOST,
        emulated_state=Tier.HOST,
        reference="all of it",
        variants=(
            Variant(name="all of it", build=_protrain(), paper=1.0),
            Variant(name="no dual chunks", build=_protrain(dual=False), paper=1 / 1.10),
            Variant(name="no interleaving", build=_protrain(interleaved=False), paper=1 / 1.04),
            Variant(name="no overlapped update", build=_protrain(overlapped=False), paper=1 / 1.22),
        ),
    ),
    Experiment(
        name="stride",
        source="Deep Optimizer States, section 5.4: 7B on four V100; updates at 1.67, 1.62, 1.28 G/s for 3, 4, 5, best at 2",
        machine="dos-v100",
        model="dos-7b",
        batch=1,
        state=Tier.HOST,
        emulated_state=Tier.HOST,
        reference="CPU only",
        share=0.2,
        variants=(
            Variant(name="CPU only", build=_stride(None), paper=1.0),
            *(Variant(name=f"every {s}", build=_stride(s)) for s in (1, 2, 3, 4, 5)),
        ),
    ),
)
