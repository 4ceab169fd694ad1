"""The callback of an elastic run: commits steps, resumes from the newest, leaves when told to."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from lightning_hetero.parallel.elastic import LEFT, RESTARTS, CommittedSteps, Elastic, Notice
from lightning_hetero.runtime.method_patches import Patches
from lightning_hetero.strategies.namespaces import Lightning
from lightning_hetero.strategies.training_state import after_batch, call_after

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch import Callback as _Base
else:
    _Base = object  # the namespace's class comes second among the bases

log = logging.getLogger(__name__)


class Restarted(Protocol):
    """An object whose state survives a restart."""

    def state(self) -> dict[str, Any]:
        """The state, to be saved with a step."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues with a saved state."""


class ElasticCallback(_Base):
    """Commits steps as ordinary checkpoints, and restores the newest one.

    A ``ckpt_path`` begins a run that has no committed step yet. Every restart passes it again, and
    then the newest committed step counts. The strategy adds this callback to a fit as the last one.

    Args:
        restarted: Its state is saved with each step. It gets it back before data is loaded.
        elastic: The options of the run.

    Attributes:
        resumed: The committed step that this process resumes from, if there is one.
    """

    def __init__(self, restarted: Restarted, elastic: Elastic) -> None:
        self._restarted, self._elastic = restarted, elastic
        self._steps = CommittedSteps(elastic.path)
        self._notice = Notice(elastic.grace_s)
        self._seen = 0  # optimizer steps at the end of the batch before
        self._patches = Patches()
        self._committing = False
        self.resumed: int | None = None

    # ---- the newest step -------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """All ranks agree on the newest committed step."""
        if stage != "fit":
            return
        found = self._steps.steps() if trainer.is_global_zero else []
        newest = trainer.strategy.broadcast(found[-1] if found else -1)
        self.resumed = None if newest < 0 else newest
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._restore(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Strategies that load into what they have set up load now."""
        if trainer.strategy.restore_checkpoint_after_setup:
            self._restore(trainer)

    def _restore(self, trainer: pl.Trainer) -> None:
        if self.resumed is None:
            return
        # Lightning restores everything from the checkpoint that this loads, at its own moments.
        connector, step = trainer._checkpoint_connector, self.resumed
        connector.resume_start(self._steps.checkpoint(step))
        if trainer.is_global_zero:
            log.info("Training goes on after step %d, with %d ranks.", step, trainer.world_size)

        def resume_start(checkpoint_path: str | None = None, weights_only: bool | None = None) -> None:
            """Lightning comes here next, with the ckpt_path that began the run."""
            self._patches.restore()
            connector.resume_start(None)
            if checkpoint_path and trainer.is_global_zero:
                log.info("ckpt_path %r is not loaded: the run goes on from its own step %d.", str(checkpoint_path), step)

        self._patches.replace(connector, "resume_start", resume_start)

    def state_dict(self) -> dict[str, Any]:
        """The state that a restart continues with."""
        return self._restarted.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives the state of before the restart back."""
        self._restarted.load_state(state_dict)

    # ---- steps -----------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Handles the signal from here on, which is before the first collective of training."""
        self._notice.begin()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Commits steps when the last hook of a batch has run."""
        self._notice.begin()
        self._seen = trainer.global_step
        call_after(self._patches, pl_module, "on_train_batch_end", functools.partial(self._batch_ends, trainer))

    def _batch_ends(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        if step == self._seen:  # gradients are still accumulating
            return
        self._seen = step
        leaves = self._notice.anyone()
        if leaves or step % self._elastic.every_n_steps == 0:
            self._commit(trainer, step)
        if leaves:
            log.info("Step %d is committed; %s.", step, "this rank leaves" if self._notice.received else "another rank leaves")
            sys.exit(LEFT if self._notice.received else RESTARTS)

    def _commit(self, trainer: pl.Trainer, step: int) -> None:
        self._committing = True
        try:
            trainer.save_checkpoint(self._steps.checkpoint(step), weights_only=False)  # waits for all ranks
        finally:
            self._committing = False
        strategy, lead = trainer.strategy, trainer.is_global_zero
        getattr(strategy.checkpoint_io, "wait", lambda: None)()  # LocalFirst writes in the background
        if lead:
            self._steps.commit(step)
        for old in strategy.broadcast(self._steps.steps()[: -self._elastic.keep] if lead else []):
            if lead:
                self._steps.forget(old)
            strategy.remove_checkpoint(self._steps.checkpoint(old))

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Counts a committed step's batch as ended. Lightning does so after the hooks."""
        if self._committing:
            checkpoint["loops"]["fit_loop"] = after_batch(checkpoint["loops"]["fit_loop"])

    def end(self) -> None:
        """Takes signal handler and hook off. The strategy calls it also after an error."""
        self._notice.end()
        self._patches.restore()


def class_for(lightning: Lightning) -> type[ElasticCallback]:
    """The class for Trainers of a namespace. Its name is the key of its state in checkpoints."""
    return lightning.subclass(ElasticCallback, "callbacks.Callback", name="Elastic", home=__name__)
