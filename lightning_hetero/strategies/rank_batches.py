"""Sees to it that ranks which share a model have equally many batches, and stop together.

[Note: Ranks that part]
Lightning's loop decides on each rank by itself whether another batch follows. Where one rank goes
on and another does not, both would wait in different collectives, until the group's timeout. So
ranks tell each other what comes next: after the last hook of a training batch and of a validation,
and before each batch that is evaluated. Lightning has collectives of its own before the next batch,
so that would be too late.
"""

from __future__ import annotations

from enum import Enum

from lightning_hetero.errors import HeteroError
from lightning_hetero.lanes.decisions import ALIKE, Decisions, Topic
from lightning_hetero.runtime.method_patches import Patches
from lightning_hetero.strategies.training_state import call_after
from lightning_hetero.untyped import Trainer

_HOOKS = ("on_train_batch_end", "on_validation_end")  # at an epoch's end a progress bar reduces metrics first, on one rank
_STOP = "To stop all, set it on all: trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop, all=False)."


class _Next(Enum):
    """What comes next on a rank, as the error says it."""

    BATCH = "goes on"
    END = "has no more batches"
    STOP = "has trainer.should_stop set"


_NEXT = tuple(_Next)


class RankBatches:
    """One rank's side; see [Note: Ranks that part]."""

    def __init__(self, decisions: Decisions) -> None:
        self._decisions, self._patches = decisions, Patches()

    def follow(self, trainer: Trainer) -> None:
        """Training begins: compares after its hooks, until :meth:`leave`."""

        def compare() -> None:
            loop = trainer.fit_loop
            stops, ends = trainer.should_stop and loop._can_stop_early, loop.epoch_loop._num_ready_batches_reached()
            self._compare(Topic.TRAINED, _Next.STOP if stops else _Next.END if ends else _Next.BATCH, trainer)

        for name in _HOOKS:
            call_after(self._patches, trainer.lightning_module, name, compare)

    def leave(self) -> None:
        """Training has ended."""
        self._patches.restore()

    def evaluates(self, trainer: Trainer) -> None:
        """A batch of validation, test or prediction begins."""
        loop = trainer._active_loop
        is_last = not trainer.training and loop is not None and loop.batch_progress.is_last_batch
        self._compare(Topic.EVALUATE, _Next.END if is_last else _Next.BATCH, trainer)

    def _compare(self, topic: Topic, own: _Next, trainer: Trainer) -> None:
        each = [_NEXT[int(row[0])] for row in self._decisions.numbers(_NEXT.index(own), about=topic)]
        if len(set(each)) > 1:
            what = ", ".join(f"rank {rank} {one.value}" for rank, one in enumerate(each))
            remedy = f"{ALIKE} {_STOP}" if _Next.STOP in each else ALIKE
            where = "as they evaluate" if topic is Topic.EVALUATE else f"after step {trainer.global_step}"
            raise HeteroError(f"the ranks part {where}: {what}. {remedy}")
