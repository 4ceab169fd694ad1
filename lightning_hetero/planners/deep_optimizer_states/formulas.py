"""Deep Optimizer States' formulas: the rates of one rank, equation 1, and the update phase.

Source: "Deep Optimizer States: Towards Scalable Training of Transformer Models Using Interleaved
Offloading", equation 1 and Algorithm 1. What the paper leaves open is marked [inferred] and
discussed in docs/planners/deep_optimizer_states.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import UpdateLane


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRates:
    """The rates in eq. 1, elements/s. 0: impossible on this machine; infinity: takes no time.

    Attributes:
        cpu: Updates on the CPU, ``U_c``.
        device: Updates on the device, ``U_g``.
        downcast: fp32 to 16 bit on the CPU, ``D_c``.
        link: fp32 elements between host and device, each way, ``B``.
        state_words: fp32 words of state an element, moved each way for an update on the device: 3
            with a master copy, else 2.
        weight_words: fp32 words of one new weight, moved to the device after an update on the CPU:
            1/2 or 1.
    """

    cpu: float
    device: float
    downcast: float
    link: float
    state_words: float = 3.0
    weight_words: float = 0.5


def update_rates(model: ModelProfile, hardware: HardwareProfile) -> UpdateRates:
    """The rates of one of ``world_size`` ranks, which share the machine's CPU [inferred].

    In full precision there is no master copy to move and nothing to downcast. Where the device is
    the host, nothing moves.
    """
    h = hardware
    return UpdateRates(
        cpu=h.cpu_update_params_per_s / h.world_size,
        device=h.device_update_params_per_s,
        downcast=h.cpu_downcast_params_per_s / h.world_size if model.compute_itemsize == 2 else math.inf,
        link=math.inf if h.shared_memory else h.link_h2d_bytes_per_s / 4,
        state_words=model.state_itemsize / 4,
        weight_words=model.compute_itemsize / 4,
    )


def update_ratio(rates: UpdateRates) -> float:
    """``k``, the CPU updates for each device update that keep both sides and the link busy (eq. 1).

    Infinite where device updates do not pay: the link cannot even follow the CPU's updates (a
    denominator of 0 or less), or there is no link or no update on the device [inferred]. 0 where
    the CPU cannot update.
    """
    if not rates.link or not rates.device:
        return math.inf
    if not rates.cpu or not rates.downcast:
        return 0.0
    spared = 1 / rates.cpu + 1 / rates.downcast - rates.weight_words / rates.link
    return (rates.state_words / rates.link + 1 / rates.device) / spared if spared > 0 else math.inf


def strides(k: float) -> tuple[int | None, ...]:
    """The paper's strides: ``k`` as stride (Algorithm 1) and as ratio (eq. 1) [inferred].

    A ratio of ``k`` CPU updates for each device update is a stride of ``k + 1``. ``None`` is the
    infinite stride.
    """
    if math.isinf(k):
        return (None,)
    whole = {math.floor(k), math.ceil(k)}
    return tuple(sorted(s for s in whole | {w + 1 for w in whole} if s >= 1))


def share_of_updates(model: ModelProfile, hardware: HardwareProfile) -> tuple[ModelProfile, HardwareProfile]:
    """The model and machine of one rank: its share of updates and of the host, its own device."""
    world = hardware.world_size
    if world == 1:
        return model, hardware
    blocks = (replace(b, num_trainable_params=-(-b.num_trainable_params // world)) for b in model.blocks)
    shared = ("cpu_update_params_per_s", "cpu_downcast_params_per_s", "host_dram_bytes_per_s")
    rates = {key: getattr(hardware, key) / world for key in shared}
    rank = replace(hardware, **rates, host_memory_bytes=hardware.host_memory_bytes // world, world_size=1)
    return replace(model, blocks=tuple(blocks)), rank


def lanes(num_subgroups: int, *, stride: int | None, static_residents: int) -> tuple[UpdateLane, ...]:
    """Where each subgroup is updated. Source: Algorithm 1, line 4, and section 4.1.

    The last ``static_residents`` subgroups live on the device.
    """

    def on_device(i: int) -> bool:
        return i >= num_subgroups - static_residents or (stride is not None and (i + 1) % stride == 0)

    return tuple(UpdateLane.DEVICE if on_device(i) else UpdateLane.CPU for i in range(num_subgroups))


def update_s(rates: UpdateRates, sizes: Sequence[float], *, stride: int | None, static_residents: int) -> float:
    """Seconds of the update phase: the slower side of eq. 1, summed over all subgroups.

    Args:
        rates: Those of one rank.
        sizes: Elements that it has of each subgroup.
        stride: Every how many subgroups one is updated on the device.
        static_residents: Subgroups at the end whose state lives there.
    """
    placed = lanes(len(sizes), stride=stride, static_residents=static_residents)
    moving = len(sizes) - static_residents
    resident = sum(sizes[moving:])
    visiting = sum(s for s, lane in zip(sizes[:moving], placed, strict=False) if lane is UpdateLane.DEVICE)
    on_cpu = sum(sizes) - resident - visiting
    cpu_s = _seconds(on_cpu, rates.cpu) + _seconds(on_cpu, rates.downcast)
    link_s = _seconds(rates.state_words * visiting + rates.weight_words * on_cpu, rates.link)
    return max(cpu_s, link_s + _seconds(visiting + resident, rates.device))


def _seconds(amount: float, rate: float) -> float:
    return 0.0 if not amount else amount / rate if rate else math.inf
