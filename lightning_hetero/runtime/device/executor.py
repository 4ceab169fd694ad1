"""Executes a schedule for a device that has memory of its own: the same steps, with ops that run on lanes beside compute.

[Note: Strays]
A use of a block that the schedule does not foresee ends the schedule for the rest of the batch: lanes drain, and from then on each
use brings its weights, and each block's update follows the verdict. Gradients stay on the device, unless the host has those of a
batch before: sums are made in the order in which autograd makes them, and whoever clips or looks sees them whole. The next batch is
expected to use the blocks as this one did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lightning_hetero.errors import DeviceMemoryError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan, Tier, UpdateLane
from lightning_hetero.ir.schedule import NO_BLOCK, Lane, Op, OpKind, Payload, Phase, Schedule
from lightning_hetero.lowering import DeviceRoom
from lightning_hetero.runtime.device import HostGradient
from lightning_hetero.runtime.device.ops import All, DeviceOps, Key
from lightning_hetero.runtime.lanes import Event
from lightning_hetero.runtime.optimizers import OptimizerBinding
from lightning_hetero.store.live.blocks import Block


class DeviceExecutor(DeviceOps):
    """The runtime of one model on a device with memory of its own.

    Args:
        blocks: As for :class:`DeviceOps`.
        device_cache_bytes: Device memory for weights that live below it.
        **common: As for :class:`DeviceOps`.

    Attributes:
        may_defer: The host has room for all gradients at once.
    """

    def __init__(self, blocks: Sequence[Block], *, device_cache_bytes: int, **common: Any) -> None:
        super().__init__(blocks, **common)
        self.device_cache_bytes = device_cache_bytes
        self.may_defer = False
        self._events: dict[int, Event] = {}  # op -> its end
        self._carried: dict[Key, Event] = {}  # the latest op of each kind and block, of the steps before
        self._held_after: tuple[frozenset[int], frozenset[int]] | None = None  # what host and device hold once all lanes are empty
        self._at: Block | None = None  # whose anchor was the last one

    @property
    def where(self) -> str:
        """What compute is at, for errors."""
        phase = "in backward" if self._in_backward else "in forward"
        return phase if self._at is None else f"{phase}, at block {self._at.name!r}"

    # ---- the step ---------------------------------------------------------------------------------------------------------

    def begin_step(self, *, training: bool) -> None:
        """As for :class:`Executor`; also what the ops before this step are known by."""
        schedule = self._schedule
        whole = schedule is not None and self._issued == len(schedule.ops)
        self._held_after = (schedule.resident_after, schedule.device_after) if schedule is not None and whole else None
        if not whole:
            self.lanes.drain()
            self.side.updates.give_back()
        self._carried |= self._ends
        self._updating = [end for end in self._updating if not end.settled()]
        self._events, self._ends, self._marked = {}, {}, (-1, All(()))
        self._at = None
        self._in_batch, self._evaluates = True, not training
        self._tries.clear()
        super().begin_step(training=training)
        self.activations.begin_batch()

    def _cancel_opened(self) -> None:
        """As for :class:`Executor`; what a whole schedule has opened it has updated, or will."""
        if self._held_after is None:
            super()._cancel_opened()

    def _held_now(self) -> tuple[frozenset[int], DeviceRoom]:
        written = [b for b in self.blocks if self.weights.is_written(b)]
        for block in written:  # whoever wrote has waited for all lanes
            self.weights.free(block)
        if self._held_after is not None:
            resident, device = self._held_after
            device -= {b.index for b in written}
        else:
            resident, _ = super()._held_now()
            current = [b for b in self.blocks if self.weights.holds(b) and not self.weights.is_outdated(b)]
            device = frozenset(b.index for b in current if self._comes_from_below(b))
        return resident, DeviceRoom(resident=device, capacity_bytes=self.device_cache_bytes)

    def forward_begins(self, block: Block, inputs: Any = ((), {})) -> None:
        """As for :class:`Executor`; then what the forward saves is followed."""
        super().forward_begins(block, inputs)
        if not _is_followed():
            self._saved[block.index].enter(*inputs)

    def forward_ends(self, block: Block, output: Any = None) -> None:
        """As for :class:`Executor`."""
        self._saved[block.index].leave(output)
        super().forward_ends(block, output)

    def backward_starts(self, loss: torch.Tensor | None = None) -> None:
        """As for :class:`Executor`: gradients of a batch before that are still shown become ordinary ones of this one."""
        self.side.gradients.conceal()
        self._at = None
        super().backward_starts()

    def check_gradients(self) -> None:
        """As for :class:`Executor`; then gradients on the host are shown to whoever clips or looks."""
        super().check_gradients()
        for block in self.blocks:  # their GRAD never came, or came before all gradients had
            if any(p in self.side.gradients for p in block.params()):
                self._take_rest(block)
        self.side.gradients.expose()

    def handover(self, binding: OptimizerBinding, scale: float) -> None:
        """``optimizer.step()``: issues what is left, and returns without waiting for it."""
        self.backward_ends()
        self._handed_over = True
        self.side.gradients.conceal()
        self.updater.begin_verdict(binding, scale)
        self._verdict(scale)
        committed = self._schedule is not None and self._schedule.ops and self._schedule.ops[-1].kind is OpKind.COMMIT
        if self._schedule is not None:
            self._issue_through(len(self._schedule.anchors) - 1)
        for block in self.blocks:  # what no op could update, or none speaks of
            if self.updater.has_work(block, binding) or self.speculation.is_due(block):
                self._update_now(block, binding)
                committed = False
        if not committed and self.commits:
            self._submit(Op(id=-1, kind=OpKind.COMMIT, block=NO_BLOCK, lane=Lane.DISK_WRITE, at=-1), ())
        self.side.gradients.expose()  # what is kept, and what another optimizer's step will use
        self.updater.begin_step()
        self.recorder.end_step()
        if self.serial or self.updater.waits:
            self.lanes.drain()
            self.store.files.wait_for_commit()

    def _room_before(self, schedule: Schedule) -> DeviceRoom:
        return DeviceRoom(resident=schedule.device_before, capacity_bytes=self.device_cache_bytes)

    @property
    def has_begun(self) -> bool:
        """Whether the step under way has made an update that cannot be taken back."""
        return self.updater.has_begun and not self.speculation.trying  # before the verdict only what is tried runs

    def _update_now(self, block: Block, binding: OptimizerBinding) -> None:
        """The update of a block for which the schedule has none."""

        def issue(kind: OpKind, lane: Lane, payload: Payload, after: Sequence[Event] = ()) -> Event:
            return self._submit(Op(id=-1, kind=kind, block=block.index, lane=lane, at=-1, payload=payload), after)

        plan = block.plan
        self._renewed.add(block.index)
        if plan.update is UpdateLane.CPU:
            last = self._ends.get((OpKind.UPLOAD, block.index))  # it reads what the update writes
            issue(OpKind.UPDATE, Lane.CPU, Payload.STATE, [*self.side.gradients.arriving(block), *([last] if last else [])])
            return
        self._provide(block)
        arrived = (issue(OpKind.SWAP_IN, Lane.H2D, Payload.STATE),) if plan.state is Tier.HOST else ()
        updated = issue(OpKind.UPDATE, Lane.COMPUTE, Payload.STATE, arrived)
        if plan.state is Tier.HOST:
            updated = issue(OpKind.SWAP_OUT, Lane.D2H, Payload.STATE, (updated,))
        if plan.weights is Tier.HOST:
            issue(OpKind.SWAP_OUT, Lane.D2H, Payload.WEIGHTS, (updated,))

    # ---- ops --------------------------------------------------------------------------------------------------------------

    def _issue_through(self, index: int) -> None:
        assert self._schedule is not None
        ops = self._schedule.ops
        while self._issued < len(ops) and ops[self._issued].at <= index:
            op = ops[self._issued]
            self._issued += 1
            carried = [self._carried[key] for key in op.carried if key in self._carried]
            self._events[op.id] = end = self._submit(op, [*(self._events[i] for i in op.after), *carried])
            if self.serial:
                end.wait()

    # ---- anchors ----------------------------------------------------------------------------------------------------------

    def _reach(self, phase: Phase, block: Block) -> None:
        """Issues the ops up to this anchor; what compute is given from now on comes after what it needs."""
        if self._in_backward:  # also where a forward is repeated: the block's backward follows
            phase = Phase.BACKWARD
            if block is self._at:
                return
        index = self._find(phase, block.index)
        self._at = block
        if index is None or self._schedule is None:
            self._schedule = None  # [Note: Strays]
        else:
            passed = self._schedule.anchors[self._cursor : index + 1]
            self._issue_through(index)
            self._cursor = index + 1
            carried = [self._carried[key] for anchor in passed for key in anchor.carried if key in self._carried]
            needs = [self._events[i] for i in passed[-1].needs]
            if self.recorder.enabled:
                self.recorder.needs = self.recorder.names([*needs, *carried])
            self.lanes.compute_waits([*needs, *carried])
            self.activations.sweep(needs)
        if block.index in self._renewed or not self.weights.holds(block):
            self._provide(block)

    # ---- rest -------------------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Throws away what the batches since the last update have left: gradients, activations, ops under way.

        Weights and state are those of the last update, which may still be under way and is waited for.
        """
        for _ in range(2):  # the second time raises what has nothing to do with memory
            try:
                self.lanes.drain()
            except (DeviceMemoryError, torch.OutOfMemoryError):
                continue
            break
        self._schedule, self._held_after, self._seen = None, None, []
        self._events, self._ends, self._carried = {}, {}, {}
        self.activations.begin_batch()
        self._close_all()
        for block in self.blocks:
            for param in block.params():
                param.grad = None
        self.side.gradients.drop()

    def rest(self) -> None:
        """As for :class:`Executor`."""
        self.lanes.drain()
        super().rest()

    def drain(self) -> None:
        """Waits for everything under way."""
        self.lanes.drain()
        super().drain()

    def finish(self) -> None:
        """As for :class:`Executor`."""
        self.lanes.drain()
        super().finish()

    @contextmanager
    def handed(self, *, whole: bool) -> Iterator[None]:
        """As for :class:`Executor`: of what is under way only that is waited for which a record names (see [Note: Whose turn])."""
        for end in self._updating:
            end.handed()
        behind = False
        for block in self.blocks:
            if block.plan.update is UpdateLane.CPU:
                behind |= whole and self.weights.changed(block)
            elif whole or block.weights_on_disk:
                key = OpKind.SWAP_OUT, block.index
                last = self._ends.get(key) or self._carried.get(key)
                if last is not None:
                    last.wait()
        if behind:  # user code has written to weights that the CPU has updated
            self.lanes.drain()
        with self._turn:
            yield

    # ---- begin and end ----------------------------------------------------------------------------------------------------

    def enter(self, block: Block) -> None:
        """As for :class:`Executor`; the schedule that knew what the device holds has ended."""
        self._schedule = None
        self._enter()

    def adopt(self, plan: Plan, *, model: ModelShape, capacity_bytes: int, deferred: bool, device_cache_bytes: int = 0) -> None:
        """As for :class:`Executor`; blocks that have left the device get their new place there."""
        super().adopt(plan, model=model, capacity_bytes=capacity_bytes, deferred=deferred)
        self.device_cache_bytes = device_cache_bytes
        self._ends, self._carried, self._held_after = {}, {}, None
        self.activations.close()
        self._follow_activations()
        self.move_in()

    def stop(self) -> None:
        """As for :class:`Executor`; the lanes end, and the device's memory is free for others if everything has left it."""
        for block in self.blocks:  # what a step has kept lies in memory of the lanes
            for param in block.params():
                if type(param.grad) is HostGradient:
                    param.grad = None
        self.side.gradients.drop()
        self.activations.close()
        if not self.lanes.memory().used_bytes:
            with suppress(RuntimeError):  # a device that has failed
                self.lanes.resize(0)
        self.lanes.close()


def _is_followed() -> bool:
    """Whether somebody else decides what becomes of saved tensors: user code that checkpoints around its blocks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
