"""The options of a session: the user's choices, and how the training loop uses gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.lanes import Device
from lightning_hetero.lowering.needs import NOTHING, Constant
from lightning_hetero.store.capacity import available_memory_bytes, total_memory_bytes
from lightning_hetero.store.format.manifest import Member
from lightning_hetero.store.format.stripes import Balance
from lightning_hetero.store.live.blocks import WHOLE, Slice
from lightning_hetero.store.live.engine_options import EngineOptions
from lightning_hetero.store.partition import BlockCls
from lightning_hetero.units import MIB, format_bytes

if TYPE_CHECKING:
    from lightning_hetero.lanes.collectives import Collectives

_PROCESS_BYTES = 64 * MIB  # torch, its threads, malloc and a planner, from the first batch on
_BATCH_SHARE = 8  # this part of the free memory is for activations until they are known


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """The user's choices; see ``HeteroOffloadStrategy``."""

    plans: tuple[Callable[[ModelShape], Plan], ...]  # functions that make a plan. The first plan that fits the budget counts
    block_cls: BlockCls | None = None
    host_memory: int | None = None
    sharers: int = 1  # processes that share the host's memory equally, if no budget is given
    collectives: Collectives | None = None  # of the ranks that share the model; None: this process has all of it
    device_memory: int | None = None
    device: Device | None = None  # with memory of its own; None: the device is the host
    disk_paths: tuple[Path, ...] = ()  # a directory on each disk; the first one is the store's
    disk_rates: tuple[float, ...] = ()  # what each of them moves, relative to the others; empty: all the same
    disk_capacity: int | None = None
    allow_tmpfs: bool = False
    allow_rotational: bool = False
    member: Member | None = None  # the place of a new store at `disk_path` in a set
    new_run: bool = False  # a store with a kept step at `disk_path` is put aside
    trace: bool = False
    poison: bool = False
    keep_every: int = 1  # of the steps that could be kept, keep every N-th
    on_patched: Callable[[Tensor], object] = id  # called with values that were copied from a checkpoint
    engine: EngineOptions = field(default_factory=EngineOptions)

    @property
    def own(self) -> Slice:
        """Which slice of the model this process has."""
        return WHOLE if self.collectives is None else Slice(self.collectives.shard, self.collectives.shards)

    @property
    def disk_path(self) -> Path | None:
        """The directory of the store, if the user names one."""
        return self.disk_paths[0] if self.disk_paths else None

    @property
    def further_disks(self) -> tuple[Path, ...]:
        """Directories on further disks, which have a part of the blocks."""
        return self.disk_paths[1:]

    @property
    def balance(self) -> Balance:
        """Deals blocks to the disks; on each rank to another one first."""
        return Balance(self.disk_rates or [1.0] * max(1, len(self.disk_paths)), ahead=self.own.rank)

    @property
    def disk_share(self) -> int | None:
        """What this process may have of ``disk_capacity``, which is for all ranks of a node."""
        return None if self.disk_capacity is None else self.disk_capacity // self.own.ranks

    @property
    def is_unified(self) -> bool:
        """Whether ``host_memory`` is for the host and for a device in its memory."""
        return self.device is not None and self.device.is_unified

    @property
    def wants_steps(self) -> bool:
        """Whether steps of a fit shall survive in the store."""
        return self.disk_path is not None and self.engine.durability != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """How the training loop uses gradients, which decides when updates may run."""

    deferred: str = ""  # why updates wait until ``optimizer.step()``; empty: they run during backward
    accumulates: bool = False  # gradients live through several batches
    keep_gradients: bool = False  # ``param.grad`` stays after the step
    waits: bool = False  # ``optimizer.step()`` waits for the updates
    clip_value: float | None = None  # clip by value at this, during backward
    norms: bool = False  # gradients may be clipped by norm, so a device computes norms as gradients leave it
    speculates: bool = False  # only clipping by norm or loss scaling defers updates, so they may speculate
    buckets: Constant = NOTHING  # memory in which ranks average gradients, beside the gradients


def host_budget(options: SessionOptions, present_bytes: int, *, profiled: bool = False) -> int:
    """The budget of host memory in bytes.

    Where a device has its memory in the host's, the budget is for both together, less what the
    device takes beside plans.

    It is ``host_memory`` if that is given. Otherwise it is the memory that this run already holds,
    plus the free memory, minus a reserve: without one, a run could fill its control group, and the
    kernel would kill it. The reserve is 64 MiB for the process, and an eighth of the free memory
    for a batch until one has been ``profiled``.

    Raises:
        ConfigError: ``host_memory`` exceeds the memory of the machine or of the control group.
    """
    given, most = options.host_memory, total_memory_bytes()
    if given is not None and given > most:
        raise ConfigError(
            f"host_memory={format_bytes(given)}; this machine, or the control group of this process, has {format_bytes(most)}. "
            f"Give at most that, or leave host_memory out: the budget is then the free memory."
        )
    apart = options.device.apart_bytes if options.is_unified and options.device is not None else 0
    if given is not None:
        return max(0, given // options.own.ranks - apart)
    free = available_memory_bytes() // max(options.sharers, options.own.ranks)
    reserve = _PROCESS_BYTES + (0 if profiled else free // _BATCH_SHARE)
    return max(0, present_bytes + free - reserve - apart)
