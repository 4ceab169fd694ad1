"""The training state in a commit record, besides weights and optimizer state.

:meth:`TrainingState.take` shows what is carried, docs/durability.md what is not.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_hetero.convert import adapter_settings, merges
from lightning_hetero.errors import ConfigError
from lightning_hetero.runtime.method_patches import Patches
from lightning_hetero.store.format.encoding import dumps
from lightning_hetero.store.format.state_files import StateFiles
from lightning_hetero.strategies.data import TrainingData, random_state, validation_state
from lightning_hetero.strategies.model_changes import ModelChanges
from lightning_hetero.strategies.namespaces import lightning_of
from lightning_hetero.untyped import Function, Options, Trainer

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)


class TrainingState:
    """Takes the state of one fit."""

    def __init__(self, trainer: Trainer, changes: ModelChanges) -> None:
        self._trainer, self.changes = trainer, changes
        self._lightning = lightning_of(trainer)
        self._calls = self._lightning.module("trainer.call")
        self._patches = Patches()
        self._warned: set[str] = set()
        self.data = TrainingData(trainer, self._warn)
        self._adapters = adapter_settings.configurations(trainer.lightning_module)
        self._settings = adapter_settings.settings_of(trainer.lightning_module)
        self._adapted = merges.layers_of(trainer.lightning_module)

    def attach(self, after_batch: Callable[[], None]) -> None:
        """Calls ``after_batch`` after each training batch's last hook, until :meth:`detach`."""
        module = self._trainer.lightning_module

        def batch_ends() -> None:
            self.data.batch_ended()
            after_batch()

        for name, then in (("on_train_batch_end", batch_ends), ("on_train_epoch_start", self.data.follow)):
            call_after(self._patches, module, name, then)
        for owner in (module, *self._trainer.callbacks):
            if self._lightning.is_overridden("on_save_checkpoint", owner):
                self._warn(f"what {type(owner).__name__}.on_save_checkpoint adds to checkpoints is not kept with the steps")

    def detach(self) -> None:
        """Removes the hooks."""
        self._patches.restore()

    @property
    def is_training(self) -> bool:
        """Whether dataloaders that are made now are for training."""
        return bool(self._trainer.training)

    @property
    def may_be_last(self) -> bool:
        """Whether the batch whose hooks have just run may end the last step.

        Hooks of a validation that is due, or of the epoch's end, can stop training before the next
        step. When they run it is too late to take this step's state.
        """
        trainer = self._trainer
        steps = trainer.max_steps is not None and 0 <= trainer.max_steps <= trainer.global_step
        epoch_ends = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        return bool(trainer.should_stop or steps or epoch_ends or self._validates_before_next_step)

    @property
    def _validates_before_next_step(self) -> bool:
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop
        if loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
            return True
        every, more = trainer.val_check_batch, trainer.accumulate_grad_batches - 1  # batches that do not step
        if not more or not isinstance(every, int) or not loop._should_check_val_epoch():
            return False
        batch = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx
        return bool((batch + 1) % every + more >= every)

    def take(self, books: Callable[[], list[dict[str, object]]], files: StateFiles) -> str:
        """The state as text (see ``store.format.encoding``) after the hooks of a training batch.

        It is empty, with a warning, if a value that a resume needs cannot be encoded safely.

        Raises:
            StoreError: A file cannot be written; :class:`OutOfDiskError` if there is no room.
        """
        trainer = self._trainer
        try:
            fields = {
                "version": files.put(self._lightning.version, "version"),
                "epoch": files.put(trainer.current_epoch, "epoch"),
                "global_step": files.put(trainer.global_step, "global_step"),
                "fit_loop": files.put(self._loops(), "loops"),
                "optimizers": files.put(books(), "optimizers"),
                "changes": files.put(self.changes.take(), "changes"),
                "lr_schedulers": files.put([c.scheduler.state_dict() for c in trainer.lr_scheduler_configs], "lr_schedulers"),
                "precision": files.put(trainer.precision_plugin.state_dict(), "precision"),
                "buffers": files.put(dict(persistent_buffers(trainer.lightning_module)), "the model's buffers"),
                "random": files.put({str(trainer.global_rank): random_state()}, "random"),
                "data": files.put(self.data.state(), "data"),
                "validation": files.put(validation_state(trainer), "validation"),
            }
            if self._settings:
                fields[adapter_settings.KEY] = files.put(self._settings, "the settings of adapters")
            if merged := merges.merges_of(self._adapted):
                fields[merges.KEY] = files.put(merged, "merged adapters")
        except ConfigError as error:
            self._warn(f"{error} Steps of this run cannot be resumed from")
            return ""
        fields["callbacks"] = self._callbacks(files)
        fields["datamodule"] = self._datamodule(files)
        fields["hyper_parameters"] = self._hyper(files)
        if self._adapters:
            fields["adapters"] = self._optional(files, self._adapters, "the configuration of adapters") or "{}"
        return "{" + ",".join(f'"{key}":{text}' for key, text in fields.items()) + "}"

    def _loops(self) -> dict[str, object]:
        loops = after_batch(self._trainer.fit_loop.state_dict())
        if states := loops["state_dict"].get("combined_loader"):
            return {**loops, "state_dict": {**loops["state_dict"], "combined_loader": self.data.loader_states(states)}}
        return loops

    def _callbacks(self, files: StateFiles) -> str:
        fields = {}
        for key, state in self._calls._call_callbacks_state_dict(self._trainer).items():
            fields[key] = self._optional(files, state, f"the state of callback {key}")
        return "{" + ",".join(f"{dumps(k, 'key')}:{text}" for k, text in fields.items() if text) + "}"

    def _datamodule(self, files: StateFiles) -> str:
        module = self._trainer.datamodule
        state = None if module is None else self._calls._call_lightning_datamodule_hook(self._trainer, "state_dict")
        return self._optional(files, [type(module).__qualname__, state], "the datamodule's state") or "null" if state else "null"

    def _hyper(self, files: StateFiles) -> str:
        fields: dict[str, object] = {}
        for owner in (self._trainer.lightning_module, self._trainer.datamodule):
            if owner is not None and owner.hparams:
                fields[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
                if hasattr(owner, "_hparams_name"):
                    fields[owner.CHECKPOINT_HYPER_PARAMS_NAME] = owner._hparams_name
        return self._optional(files, fields, "hyper_parameters") or "{}"

    def _optional(self, files: StateFiles, value: object, what: str) -> str:
        try:
            return files.put(value, what)
        except ConfigError as error:
            self._warn(f"{error} It is not kept with the steps")
            return ""

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s.", text)


def call_after(patches: Patches, module: pl.LightningModule, name: str, then: Callable[[], None]) -> None:
    """Calls ``then`` after a module's hook, until the patches are restored.

    Lightning runs the module's hook after those of all callbacks, and has no later hook.
    """
    hook: Function = getattr(module, name)

    @functools.wraps(hook)
    def wrapped(*args: object, **kwargs: object) -> object:
        result = hook(*args, **kwargs)
        then()
        return result

    patches.replace(module, name, wrapped)


def after_batch(loops: Options) -> Options:
    """The loops' state with the batch counted as completed; Lightning does so after the hooks."""
    progress = loops["epoch_loop.batch_progress"]
    counts = {key: {**progress[key], "completed": progress[key]["completed"] + 1} for key in ("total", "current")}
    return {**loops, "epoch_loop.batch_progress": {**progress, **counts}}


def persistent_buffers(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Names and values of the buffers in a ``state_dict``."""
    for prefix, owner in module.named_modules():
        for name, value in owner._buffers.items():
            if value is not None and name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, value
