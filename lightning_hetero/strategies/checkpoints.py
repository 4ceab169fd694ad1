"""Checkpoints of a model that may not be in memory: written and read tensor by tensor, or linked to the store."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_hetero.checkpoint import release_pages
from lightning_hetero.checkpoint.landing import Landing
from lightning_hetero.errors import ConfigError
from lightning_hetero.planners import BUILTIN_PLANS
from lightning_hetero.runtime.frozen import Frozen
from lightning_hetero.store.format.earlier_runs import bring, comes_from, make_way
from lightning_hetero.store.format.pins import roll_back
from lightning_hetero.strategies import checkpoint_io
from lightning_hetero.strategies.core import Core
from lightning_hetero.strategies.resume import (
    as_checkpoint,
    check_loops,
    check_use,
    is_fit,
    is_store,
    last_kept,
    read_for_evaluation,
    read_state,
)

log = logging.getLogger(__name__)


class Checkpoints(Core):
    """Lightning's checkpoint methods."""

    @property
    def checkpoint_io(self) -> Any:
        """Lightning's checkpoint IO, streaming while something lives on disk; one that the user gave stays."""
        base: Any = super().checkpoint_io
        plain = checkpoint_io.plain_class(self.namespace)
        if type(base) is plain:
            self._checkpoint_io = base = checkpoint_io.make(self.namespace)
        elif type(getattr(base, "checkpoint_io", None)) is plain:  # AsyncCheckpointIO and its like wrap another
            base.checkpoint_io = checkpoint_io.make(self.namespace)
        ours = getattr(base, "checkpoint_io", base)
        if hasattr(ours, "streams"):
            # ckpt_path is loaded before setup.
            ours.streams = self._may_use_disk if self.session is None else self.session.on_disk
        return base

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        if (attach := getattr(io, "attach", None)) is not None:
            if self._choices.link_checkpoints:
                raise ConfigError(
                    "link_checkpoints=True with LocalFirst: a checkpoint's path would have to be a directory of links and a remote "
                    "copy at once. Leave one of them out; the store is kept in either case."
                )
            attach(self)
        self._checkpoint_io = io

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Writes a checkpoint file; with ``link_checkpoints``, where steps are kept, links the store's last step instead.

        Within a batch that ends in a step the links are made when its last hook has run.
        """
        self._tunes = begins_tuning = _is_of_tuner(filepath)
        if begins_tuning or not self._choices.link_checkpoints or self.session is None or not self.session.keeps_steps:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(filepath)
        path.parent.mkdir(parents=True, exist_ok=True)  # a symbolic link may be put beside it before it is made
        self._link_later(partial(self._link, path), path)

    def _link(self, path: Path) -> None:
        if self.session is not None:
            self.session.snapshot(path, [gone for gone, _, saves in self._links if not saves])

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint: after those that were saved in the same batch, so that one is there whenever the process dies."""
        if self._choices.link_checkpoints:
            self._link_later(partial(self._remove, filepath), Path(filepath), saves=False)
        else:
            self._remove(filepath)

    def _remove(self, filepath: Any) -> None:
        if os.path.islink(filepath):  # of save_last="link": what it names is removed by its own name
            os.unlink(filepath)
        else:
            super().remove_checkpoint(filepath)

    def _link_later(self, action: Callable[[], object], path: Path, *, saves: bool = True) -> None:
        if self._step_ended and self._state is not None:
            self._links.append((path, action, saves))
        else:
            action()

    def make_links(self) -> None:
        """The batch is over and its step is kept: checkpoints that were asked for in it are made and removed, in that order."""
        while self._links:
            self._links[0][1]()
            del self._links[0]

    def drop_links(self) -> None:
        """The fit is over: checkpoints of a batch that did not end are not made, and none is removed for them."""
        missing = [str(path) for path, _, saves in self._links if saves]
        self._links, self._step_ended = [], False
        for path in missing:
            log.warning(
                "The checkpoint %r was not made: links are made when a batch has ended, and this one has not. Go on from the "
                "store, which has the last step that was kept.", path,
            )  # fmt: skip

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """A checkpoint file, or a store: a fit goes on in it, :meth:`setup` takes over what is there; else its weights are read."""
        self._resumed = None
        self._evaluated.close()
        self._tunes &= not _is_of_tuner(checkpoint_path)
        if not is_store(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        path, own = Path(checkpoint_path).resolve(), self.options.disk_path
        assert self.lightning_module is not None
        if not is_fit(self.lightning_module, self.namespace):
            return read_for_evaluation(path, self.lightning_module, self.precision_plugin, self._evaluated)
        check_use(path, own)
        assert own is not None
        self._drop_session()  # a parked model's: the store's weights count now, and nobody else may have it open
        own = own.absolute()
        if not own.exists() or not path.samefile(own):
            path = self._brought(path, own)
        elif self.options.new_run:
            log.warning(
                "new_run=True has no effect: ckpt_path is the store at disk_path, %r, and training resumes from its last kept "
                "step. To start a new run, leave ckpt_path out.", str(own),
            )  # fmt: skip
        kept = last_kept(path)
        self._resumed = self._state_of(kept)
        if kept != path:
            roll_back(path, kept)
        return as_checkpoint(self._resumed, self.precision_plugin)

    def _state_of(self, kept: Path) -> dict[str, Any]:
        assert self.lightning_module is not None
        state = read_state(kept)
        check_loops(state, kept, self.lightning_module.trainer)
        return state

    def _brought(self, path: Path, own: Path) -> Path:
        """The run's own store, made of another one's last step; or as it is, where an earlier run has made it of that very step."""
        kept = last_kept(path)
        self._state_of(kept)  # what cannot be gone on from is refused while nothing has changed
        new_run = self.options.new_run
        if not new_run and comes_from(own, kept):
            log.warning(
                "disk_path %r holds what an earlier run with this ckpt_path has kept: training goes on from there. To begin again "
                "at ckpt_path, pass new_run=True to the strategy.", str(own),
            )  # fmt: skip
        else:
            make_way(own, new_run=new_run, source=path)
            bring(kept, own)
        return own

    def freeze(self) -> Frozen | None:
        """For who saves in the background: what a state has to be read from; ``None`` where all of it is in ordinary memory."""
        return None if self.session is None else self.session.freeze()

    def landing(self) -> Landing:
        """Where a checkpoint is loaded to, or a model built, so that it need not fit memory."""
        if self.session is not None:
            return Landing(self.session.disk_root())
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        wanted = (self.options.disk_path or (Path.cwd() if trainer is None else local_root(trainer))).expanduser().absolute()
        return Landing(next(path for path in (wanted, *wanted.parents) if path.is_dir()))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights on disk appear as lazy tensors."""
        if self.session is not None:
            self.session.drain()
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Writes weights to where they live; :meth:`setup` does it for a model on the meta device or in a file."""
        assert self.lightning_module is not None
        if self._resumed is not None:
            return
        built = self._built
        away = (p.is_meta or (built is not None and p in built) for p in self.lightning_module.parameters())
        if self.session is None and any(away):
            self._waiting_checkpoint = (checkpoint, strict)
            return
        super().load_model_state_dict(checkpoint, strict=strict)
        if self.session is not None:
            self.session.commit()
        for value in checkpoint["state_dict"].values():
            if isinstance(value, torch.Tensor):
                release_pages(value)
        self._evaluated.close()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """State goes to the tier that the plan chose; nothing is moved to a device."""
        if self._resumed is not None and self.session is not None and self._state is not None:
            self._state.changes.restore()
            for binding, books in zip(self.session.bindings, checkpoint["optimizer_states"], strict=True):
                binding.take_over(books)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    @property
    def _may_use_disk(self) -> bool:
        return self.options.plans[-1] not in (BUILTIN_PLANS["resident"], BUILTIN_PLANS["host"])


def _is_of_tuner(path: Any) -> bool:
    """Whether Lightning's tuners save to the path before they try steps, and load from it when they take these back."""
    return os.path.basename(str(path)).startswith((".lr_find_", ".scale_batch_size_"))


def local_root(trainer: Any) -> Path:
    """Where a Trainer's files go on this machine; a remote root holds checkpoints, not this process's scratch files."""
    return Path.cwd() if "://" in str(trainer.default_root_dir) else Path(trainer.default_root_dir)
