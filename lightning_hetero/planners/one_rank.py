"""One machine with several devices, as one of them sees it, and back.

Ranks that train one model together do the same at the same time. So each has an equal share of what
belongs to the machine: host memory and its bandwidth, disks, and CPU updates. Each has its own
device, and a slice of every block (``ModelProfile.slice_of``).
"""

from __future__ import annotations

from dataclasses import replace

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.lowering.rank_rules import rules_of

_CAPACITIES = ("host_memory_bytes", "disk_capacity_bytes")
_RATES = (
    "host_dram_bytes_per_s",
    "cpu_update_params_per_s",
    "cpu_downcast_params_per_s",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
)
_OF_THE_CPU = ("device_flop_per_s", "device_update_params_per_s")  # where the device is the host's own CPU


def one_rank(model: ModelProfile, hardware: HardwareProfile) -> tuple[ModelProfile, HardwareProfile]:
    """What one rank has: its slices of the model, and its share of the machine.

    The same if there is one device, or if the arguments are those of one rank already.
    """
    ranks = hardware.world_size
    if ranks == 1:
        return model, hardware
    return _scaled(model.slice_of(ranks), float(ranks) if hardware.shared_memory else 1.0), share_of(hardware)


def share_of(hardware: HardwareProfile) -> HardwareProfile:
    """What one rank has of a machine; the same as of :func:`one_rank`."""
    ranks, shared = hardware.world_size, hardware.shared_memory
    if ranks == 1:
        return hardware
    capacities = (*_CAPACITIES, "device_memory_bytes") if shared else _CAPACITIES
    values = {key: getattr(hardware, key) // ranks for key in capacities}
    rates = {key: getattr(hardware, key) / ranks for key in (*_RATES, *(_OF_THE_CPU if shared else ()))}
    return replace(hardware, world_size=1, ranks=ranks, **values, **rates)


def all_ranks(model: ModelProfile, hardware: HardwareProfile) -> tuple[ModelProfile, HardwareProfile]:
    """The inverse of :func:`one_rank`; slices that were rounded up stay as long."""
    ranks = hardware.ranks
    if ranks == 1:
        return model, hardware
    shared = hardware.shared_memory
    keys = (*_CAPACITIES, *_RATES, *(("device_memory_bytes", *_OF_THE_CPU) if shared else ()))
    values = {key: getattr(hardware, key) * ranks for key in keys}
    return _scaled(model.whole_of(ranks), 1 / ranks if shared else 1.0), replace(hardware, world_size=ranks, ranks=1, **values)


def as_run(plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> tuple[ModelProfile, HardwareProfile]:
    """What one rank has under a resolved plan: see :func:`one_rank`.

    A plan that ranks cannot run is that of one device alone, with all of the machine, without
    collectives.
    """
    runs = rules_of(share_of(hardware)).allows_all(plan, model)
    return one_rank(model, hardware if runs else replace(hardware, world_size=1))


def _scaled(model: ModelProfile, factor: float) -> ModelProfile:
    """The same with other times of compute."""
    if factor == 1.0:
        return model
    blocks = (replace(b, forward_s=b.forward_s * factor, backward_s=b.backward_s * factor) for b in model.blocks)
    return replace(model, blocks=tuple(blocks))
