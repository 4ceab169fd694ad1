"""Any model, any machine and any plan of the two, for properties of planners."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile, OperatorProfile
from lightning_hetero.ir.plan import TRAINED, BlockPlan, Plan, Saved, UpdateOrder
from lightning_hetero.planners.holistic.block_choices import placements, policies

MB = 10**6


@st.composite
def block_profiles(draw: st.DrawFn, name: str, *, pinned: bool = False) -> BlockProfile:
    params, saved = draw(st.integers(1, 20)) * MB, draw(st.integers(0, 20)) * 10 * MB
    trained = params if draw(st.integers(0, 7)) else 0
    seconds, flop = draw(st.integers(1, 40)) * 1e-3, 100.0
    shares = draw(st.lists(st.integers(1, 10), max_size=3))
    operators = tuple(
        OperatorProfile(name=f"op{i}", flop=flop * draw(st.integers(0, 30)) / 100, bytes=saved * share // 40)
        for i, share in enumerate(shares)
    )
    own = draw(st.booleans())  # bytes of its own: quantized where it is frozen, fp32 where it trains
    return BlockProfile(
        name=name,
        num_params=params,
        num_trainable_params=trained,
        forward_s=seconds,
        backward_s=2 * seconds,
        forward_flop=flop,
        activation_bytes=saved,
        boundary_bytes=saved // 10,
        transient_bytes=draw(st.integers(0, 5)) * 10 * MB,
        operators=operators,
        pinned=pinned,
        weight_bytes=(4 * params if trained else params * 9 // 16) * own,
        gradient_bytes=4 * trained * own,
        state_bytes=8 * trained * own,
    )


def divided(layer: BlockProfile, percent: int) -> tuple[BlockProfile, BlockProfile]:
    """A frozen layer behind a part of it that trains: so many parameters, in percent of the
    layer's.
    """
    params = layer.num_params * percent // 100
    part = BlockProfile(
        name=f"{layer.name}{TRAINED}", num_params=params, num_trainable_params=params, forward_s=0.0, backward_s=0.0,
        forward_flop=0.0, activation_bytes=0, boundary_bytes=0, transient_bytes=0, pinned=True,
    )  # fmt: skip
    return part, replace(layer, num_trainable_params=0)


@st.composite
def models(draw: st.DrawFn) -> ModelProfile:
    count = draw(st.integers(1, 6))
    if draw(st.booleans()):
        layer = draw(block_profiles("layer"))
        layers = [replace(layer, name=f"layers.{i}") for i in range(count)]
    else:
        layers = [draw(block_profiles(f"layers.{i}")) for i in range(count)]
    if not draw(st.integers(0, 2)):
        percent = draw(st.integers(1, 20))
        layers = [half for layer in layers for half in divided(layer, percent)]
    ends = [draw(block_profiles(name, pinned=True)) for name in ("embedding", "head")] if draw(st.booleans()) else []
    return ModelProfile(
        name="m",
        tokens=8,
        compute_itemsize=draw(st.sampled_from([2, 4])),
        constant_device_bytes=draw(st.integers(0, 3)) * 10 * MB,
        constant_host_bytes=draw(st.integers(0, 3)) * 10 * MB,
        blocks=(*ends[:1], *layers, *ends[1:]),
    )


@st.composite
def machines(draw: st.DrawFn) -> HardwareProfile:
    def rate(lowest: float) -> float:
        return lowest * 2 ** draw(st.integers(0, 7))

    shared, disk = draw(st.integers(0, 3)) == 0, draw(st.integers(0, 3)) > 0
    unified = not shared and draw(st.integers(0, 3)) == 0
    device = draw(st.integers(2, 40)) * 50 * MB
    pairs = st.sampled_from(["compute|update", "update|compute", "compute|copy", "copy|compute", "disk|update", "update|disk"])
    return HardwareProfile(
        name="h",
        device_memory_bytes=device,
        host_memory_bytes=(device if shared or unified else 0) + draw(st.integers(1, 40)) * 50 * MB,
        disk_capacity_bytes=draw(st.integers(1, 40)) * 100 * MB if disk else 0,
        device_flop_per_s=1e12,
        link_h2d_bytes_per_s=0.0 if shared else rate(1e9),
        link_d2h_bytes_per_s=0.0 if shared else rate(1e9),
        disk_read_bytes_per_s=rate(2e8) if disk else 0.0,
        disk_write_bytes_per_s=rate(2e8) if disk else 0.0,
        disk_duplex=draw(st.booleans()),
        host_dram_bytes_per_s=rate(2e9),
        cpu_update_params_per_s=rate(5e7),
        device_update_params_per_s=rate(5e8),
        cpu_downcast_params_per_s=1e9,
        shared_memory=shared,
        unified_memory=unified,
        contention=draw(st.dictionaries(pairs, st.floats(1, 3), max_size=3)),
    )


@st.composite
def plans(draw: st.DrawFn, model: ModelProfile, hardware: HardwareProfile) -> Plan:
    """Anything that the machine can do, whether it fits or not."""
    allowed = policies(hardware)
    inputs = [policy for policy in allowed if policy is not Saved.RECOMPUTE]
    rows = []
    for block in model.blocks:
        weights, state, update = draw(st.sampled_from(placements(block, hardware)))
        rows.append(
            BlockPlan(
                name=block.name,
                weights=weights,
                state=state,
                update=update,
                saved=draw(st.sampled_from(allowed)),
                boundary=draw(st.sampled_from(inputs)),
                operators={o.name: draw(st.sampled_from(allowed)) for o in block.operators if draw(st.booleans())},
            )
        )
    return Plan(
        name="random",
        blocks=tuple(rows),
        prefetch_depth=draw(st.integers(1, 4)),
        gradient_depth=draw(st.integers(1, 6)),
        update_order=draw(st.sampled_from(UpdateOrder)),
        priority=draw(st.booleans()),
        micro_batches=1 if hardware.shared_memory else draw(st.integers(1, 3)),
    )
