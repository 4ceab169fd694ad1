"""What a session is given: what the user chose, and how the training loop uses gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.lowering.needs import NOTHING, Constant
from lightning_hetero.runtime.lanes import Device
from lightning_hetero.store.capacity import available_memory_bytes, total_memory_bytes
from lightning_hetero.store.live.engine_options import EngineOptions
from lightning_hetero.store.partition import BlockCls
from lightning_hetero.units import MIB, format_bytes

_PROCESS_BYTES = 64 * MIB  # what torch, its threads, malloc and a planner take beyond what is counted, from the first batch on
_BATCH_SHARE = 8  # of what is free, this part is for a batch's activations until they are known


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What the user may choose; see ``HeteroOffloadStrategy``.

    Attributes:
        plans: What makes the plan: the first one whose plan fits the budget counts.
        sharers: Processes that share the host's memory alike, where no budget is given.
    """

    plans: tuple[Callable[[ModelShape], Plan], ...]
    block_cls: BlockCls | None = None
    host_memory: int | None = None
    sharers: int = 1
    device_memory: int | None = None
    device: Device | None = None  # with memory of its own; None: the device is the host
    disk_path: Path | None = None
    disk_capacity: int | None = None
    allow_tmpfs: bool = False
    allow_rotational: bool = False
    new_run: bool = False  # a store with a kept step at `disk_path` is put aside
    trace: bool = False
    poison: bool = False
    keep_every: int = 1  # where steps are kept, every so many steps
    on_patched: Callable[[Tensor], object] = id  # told of values that were copied from a checkpoint
    engine: EngineOptions = field(default_factory=EngineOptions)

    @property
    def wants_steps(self) -> bool:
        """Whether every step of a fit is to survive in the store."""
        return self.disk_path is not None and self.engine.durability != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """How the training loop uses gradients, which decides when updates may run.

    Attributes:
        deferred: Why updates wait until ``optimizer.step()`` knows all gradients; empty: they run during backward.
        accumulates: Gradients live through several batches.
        keep_gradients: ``param.grad`` stays after the step.
        waits: ``optimizer.step()`` waits for the updates.
        clip_value: Clip by value at this, during backward.
        norms: Gradients are clipped by their norm, or may be: a device computes norms as gradients leave it.
        speculates: Nothing but clipping by norm and loss scaling defers updates, so they may be tried during backward.
        buckets: Memory in which ranks average gradients, beside all of them.
    """

    deferred: str = ""
    accumulates: bool = False
    keep_gradients: bool = False
    waits: bool = False
    clip_value: float | None = None
    norms: bool = False
    speculates: bool = False
    buckets: Constant = NOTHING


def host_budget(options: SessionOptions, present_bytes: int, *, profiled: bool = False) -> int:
    """The budget of host memory in bytes.

    It is ``host_memory`` if that is given. Else it is what this run already holds, plus the free memory, less a reserve: without
    one, a run could fill its control group, and the kernel would kill it. The process gets 64 MiB, and a batch an eighth of the
    free memory until a profiled batch has shown what it needs.

    Args:
        options: The user's choices.
        present_bytes: What this run already holds of its budget.
        profiled: Activations are known, and plans count them.

    Raises:
        ConfigError: ``host_memory`` is more than the machine, or the process's control group, has.
    """
    given, most = options.host_memory, total_memory_bytes()
    if given is not None and given > most:
        raise ConfigError(
            f"host_memory={format_bytes(given)}; this machine, or the control group of this process, has {format_bytes(most)}. "
            f"Give at most that, or leave host_memory out: the budget is then the free memory."
        )
    if given is not None:
        return given
    free = available_memory_bytes() // options.sharers
    reserve = _PROCESS_BYTES + (0 if profiled else free // _BATCH_SHARE)
    return max(0, present_bytes + free - reserve)
