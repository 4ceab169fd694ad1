"""Sees to it that ranks which share a model have equally many batches, and stop together.

[Note: Ranks that part]
Lightning's loop decides on each rank by itself whether another batch follows. Where one rank goes
on and another does not, or validates first, both would wait in different collectives, until the
group's timeout. So ranks tell each other what comes next: after the last hook of a training batch
and of a validation, and before each batch that is evaluated. Lightning has collectives of its own
before the next batch, so that would be too late. Where dataloaders know how many batches are
evaluated, ranks compare that with the first one, before anything that they compute is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from zlib import crc32

from torch.utils.data import IterableDataset

from lightning_hetero.errors import HeteroError
from lightning_hetero.lanes.decisions import ALIKE, Decisions, Topic
from lightning_hetero.runtime.method_patches import Patches
from lightning_hetero.strategies.training_state import call_after
from lightning_hetero.untyped import Trainer, Value

_STOP = "To stop all, set it on all: trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop, all=False)."
_EVALUATED = "All have equally many batches of each dataloader. Leave the Trainer's distributed sampler in place, or set {}."
_PREDICTED = (
    "All have equally many batches. Lightning's sampler repeats no sample in prediction, so ranks have that if their number "
    "divides the number of samples: add some, and leave out what is predicted of them. Or set {}, and later samples are left out."
)


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
        """Training begins: compares after its hooks, until :meth:`leave`.

        Not at an epoch's end: there a progress bar reduces metrics first, on one rank.
        """

        def trained() -> None:
            loop = trainer.fit_loop
            self._trained(trainer, validates=loop.epoch_loop._should_check_val_fx(loop._data_fetcher))

        call_after(self._patches, trainer.lightning_module, "on_train_batch_end", trained)
        call_after(self._patches, trainer.lightning_module, "on_validation_end", partial(self._trained, trainer, validates=False))

    def leave(self) -> None:
        """Training has ended."""
        self._patches.restore()

    def _trained(self, trainer: Trainer, *, validates: bool) -> None:
        loop = trainer.fit_loop
        stops, ends = trainer.should_stop and loop._can_stop_early, loop.epoch_loop._num_ready_batches_reached()
        own = _Next.STOP if stops else _Next.END if ends else _Next.BATCH
        is_over = 0 <= trainer.max_steps <= trainer.global_step or (ends and 0 <= loop.max_epochs <= trainer.current_epoch + 1)
        rows = self._decisions.numbers(_NEXT.index(own), validates, is_over, about=Topic.TRAINED)
        each, where = [_NEXT[int(row[0])] for row in rows], f"after step {trainer.global_step}"
        remedy = f"{ALIKE} {_STOP}" if _Next.STOP in each else ALIKE
        if not all(row[2] for row in rows):  # else all end, also one that is told to
            _check([one.value for one in each], where, remedy)
        _check(["validates next" if row[1] else "does not validate" for row in rows], where, remedy)

    def evaluates(self, trainer: Trainer) -> None:
        """A batch of validation, test or prediction begins."""
        loop = None if trainer.training else trainer._active_loop
        own = _Next.END if loop is not None and loop.batch_progress.is_last_batch else _Next.BATCH
        count = "" if loop is None else _count(loop, adds=trainer.predicting)
        rows = self._decisions.numbers(_NEXT.index(own), crc32(count.encode()), about=Topic.EVALUATE)
        stage = trainer.state.stage
        limit = f"limit_{stage.dataloader_prefix if stage else 'val'}_batches"
        remedy = (_PREDICTED if trainer.predicting else _EVALUATED).format(limit)
        if len({row[1] for row in rows}) > 1:
            each = [f"has {text or 'an unknown number of'} batches" for text in self._decisions.texts(count)]
            _check(each, "as they evaluate", remedy)
        _check([_NEXT[int(row[0])].value for row in rows], "as they evaluate", remedy)


def seconds_between_validations(trainer: Trainer) -> float | None:
    """How often a fit validates, if each rank decides that by its own clock."""
    every: float | None = trainer._val_check_time_interval
    return every if trainer.enable_validation else None


def _count(loop: Value, *, adds: bool) -> str:
    """How many batches an evaluation has, of each dataloader unless it ``adds``; empty if unknown.

    Iterable datasets may have fewer than they say, and a step may take several from an iterator.
    """
    fetcher = loop._data_fetcher
    loaders = fetcher.combined_loader.flattened
    is_iterable = any(isinstance(getattr(loader, "dataset", None), IterableDataset) for loader in loaders)
    if fetcher.length is None or is_iterable or hasattr(fetcher, "iterator_wrapper"):
        return ""
    is_one_by_one = fetcher.length == sum(loop.max_batches)
    return " + ".join(map(str, loop.max_batches)) if is_one_by_one and not adds else str(fetcher.length)


def _check(each: Sequence[str], where: str, remedy: str) -> None:
    """Refuses ranks that do not all do the same."""
    if len(set(each)) > 1:
        what = ", ".join(f"rank {rank} {one}" for rank, one in enumerate(each))
        raise HeteroError(f"the ranks part {where}: {what}. {remedy}")
