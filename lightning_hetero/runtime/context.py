"""The objects that one run consists of. Every part of the runtime takes what it needs from here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import RLock

from lightning_hetero._native import Ticket
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.lanes import Lanes
from lightning_hetero.runtime.activations.files import SwapFiles
from lightning_hetero.runtime.device import DeviceSide
from lightning_hetero.runtime.placement import Placement
from lightning_hetero.runtime.process_memory import Heap
from lightning_hetero.runtime.recorder import Recorder
from lightning_hetero.runtime.slices import Slices
from lightning_hetero.runtime.updates import Updater
from lightning_hetero.store.live.blocks import Block
from lightning_hetero.store.live.tier_store import TierStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One model on one machine, under any plan."""

    blocks: list[Block]  # bound to memory
    store: TierStore
    lanes: Lanes
    # Weights, gradients and updates on a device with memory of its own. ``None`` if the device is
    # the host.
    side: DeviceSide | None
    # Slices of weights and gradients, where several ranks share the model.
    slices: Slices | None
    updater: Updater
    recorder: Recorder
    heap: Heap  # gives free memory back when the process exceeds its budget
    # Writes the files of a block at the end of a kept step, after native tickets. ``None`` if steps
    # are not kept.
    mirror: Callable[[Block, Sequence[Ticket]], Sequence[Ticket]] | None = None
    poison: bool = False  # fill memory that is free or not yet filled with NaN (tests)
    # The thread that uses the store holds it. See [Note: One user of the store] in
    # ``runtime.handlers``.
    turn: AbstractContextManager[bool | None] = field(default_factory=RLock)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """A run under one plan. Another plan makes another context of the same run."""

    run: Run
    placement: Placement  # the plan, as it fits
    model: ModelShape
    files: SwapFiles | None  # for activations that go to the disk; ``None`` if none do
