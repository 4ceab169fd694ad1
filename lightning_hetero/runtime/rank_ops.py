"""What ops do on one of several ranks that share a model; part of ``runtime.handlers``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from lightning_hetero._native import Ticket
from lightning_hetero.ir.schedule import Op
from lightning_hetero.lanes import Event
from lightning_hetero.runtime.batch import Batch
from lightning_hetero.runtime.context import RunContext
from lightning_hetero.runtime.slices import Slices
from lightning_hetero.store.live.blocks import Block

Run = Callable[[], Iterable[Ticket]]


class RankOps:
    """Gives collectives what they do, and updates the gradients that these leave.

    Args:
        context: The run.
        slices: What this rank has of the model.
        batch: The batch under way.
    """

    def __init__(self, context: RunContext, slices: Slices, batch: Batch) -> None:
        run = context.run
        self.slices, self._batch, self._side = slices, batch, run.side
        self._updater, self._files = run.updater, run.store.files

    def gather(self, block: Block) -> Run | None:
        """GATHER: slices of all ranks become whole weights, unless a FETCH had no room."""
        if self._side is None and block.weights_on_disk and not block.resident:
            return None
        if self._side is not None and self.slices.on_devices:
            return done(self.slices.gather_on_device(block, self._side.weights))
        return done(self.slices.gather(block))

    def release(self, block: Block) -> Run | None:
        """RELEASE of what is not the rank's slice."""
        return None if self._side is None and block.uses else done(self.slices.release(block))

    def reduce(self, op: Op, block: Block, *, may_change: bool, all_wait: bool) -> Run | None:
        """REDUCE; of the schedule's, those after backward have been submitted as it ended."""
        is_late, gradients = op.id < 0, self.slices.gradients
        if not (self._batch.in_backward or is_late):
            return None
        work = gradients.reduce(block, early=not is_late and may_change)
        if self._batch.armed is not None and self._updater.verdict is None and not (is_late or all_wait):
            self._updater.show_taken(block, gradients.ids())
        return done(work)

    def await_reduced(self, block: Block, reduced: Event | None) -> Sequence[Event]:
        """An update looks at the block's gradients: see [Note: REDUCE on its lane].

        Returns what it waits for in addition, if they still leave a device.
        """
        if reduced is not None:
            reduced.wait()
        if self._updater.verdict is not None and not self.slices.gradients.are_complete(block):
            self.slices.collectives.settle()
        return self.slices.gradients.arriving(block) if self.slices.on_devices else ()

    def agree(self, op: Op) -> Run:
        """AGREE: all ranks have come here, and have the record of the step before."""
        collectives, files = self.slices.collectives, self._files
        meeting, others = partial(collectives.met, collectives.announce(str(op.kind), op.block)), files.others
        return done(meeting if others is None else partial(others.agree, meeting, files.step, files.last_commit))


def done(work: Callable[[], object]) -> Run:
    """Does all of an op, which leaves nothing to wait for."""

    def run() -> Sequence[Ticket]:
        work()
        return ()

    return run
