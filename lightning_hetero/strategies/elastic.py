"""Elastic training under torchrun: commits steps, goes on from the newest one, leaves when told to."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

from lightning_hetero.parallel.elastic import LEFT, RESTARTS, CommittedSteps, Elastic, Notice
from lightning_hetero.strategies.training_state import after_batch, call_after

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Base
else:
    _Base = object  # the namespace's class comes second among the bases

log = logging.getLogger(__name__)


def make(namespace: str, elastic: Elastic) -> Any:
    """The callback for one fit.

    Args:
        namespace: ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
        elastic: What the run was told.
    """
    return _callback_class(namespace)(elastic)


@functools.cache
def _callback_class(namespace: str) -> type[Any]:
    return type("Elastic", (_Elastic, importlib.import_module(namespace).Callback), {})


class _Elastic(_Base):
    """Commits steps with ordinary checkpoints, and restores the newest one.

    The strategy installs it, last in the list of callbacks. What the strategy wants to know after a restart it gives as
    ``elastic_state()``, and gets back with ``load_elastic_state(state)`` before data is loaded.
    """

    def __init__(self, elastic: Elastic) -> None:
        self._elastic = elastic
        self._steps = CommittedSteps(elastic.path)
        self._notice = Notice(elastic.grace_s)
        self._strategy: Any = None
        self._seen = 0  # optimizer steps at the end of the batch before
        self._hooked: Any = None
        self._committing = False
        self.resumed: int | None = None  # the committed step that this process goes on from

    # ---- the newest step --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """All ranks agree on the newest committed step."""
        if stage != "fit":
            return
        self._strategy = trainer.strategy
        found = self._steps.steps() if trainer.is_global_zero else []
        newest = trainer.strategy.broadcast(found[-1] if found else -1)
        self.resumed, self._seen = (None, 0) if newest < 0 else (newest, newest)
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._restore(trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Strategies that load into what they have set up load now."""
        if trainer.strategy.restore_checkpoint_after_setup:
            self._restore(trainer)

    def _restore(self, trainer: Any) -> None:
        if self.resumed is None:
            return
        # Lightning restores everything from what this loads, at its own moments, unless a ckpt_path is loaded over it.
        trainer._checkpoint_connector.resume_start(self._steps.checkpoint(self.resumed))
        if trainer.is_global_zero:
            log.info("Training goes on after step %d, with %d ranks.", self.resumed, trainer.world_size)

    def state_dict(self) -> dict[str, Any]:
        """What the strategy wants to know after a restart."""
        state: dict[str, Any] = self._strategy.elastic_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives it back."""
        self._strategy.load_elastic_state(state_dict)

    # ---- steps ------------------------------------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """The signal is handled before the first collective of training."""
        self._notice.begin()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Steps are committed when the last hook of a batch has run."""
        self._notice.begin()
        self._hooked = pl_module
        call_after(pl_module, "on_train_batch_end", functools.partial(self._batch_ends, trainer))

    def _batch_ends(self, trainer: Any) -> None:
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

    def _commit(self, trainer: Any, step: int) -> None:
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

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """A committed step's batch is over; Lightning would count it once its hooks have run."""
        if self._committing:
            checkpoint["loops"]["fit_loop"] = after_batch(checkpoint["loops"]["fit_loop"])

    def end(self) -> None:
        """Gives signal and hook back; the strategy calls it when the fit is over, also after an error."""
        self._notice.end()
        if self._hooked is not None:
            vars(self._hooked).pop("on_train_batch_end", None)
            self._hooked = None
