"""Checkpoints of a model that may not be in memory: written and read tensor by tensor, or linked to the store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_hetero.checkpoint import release_pages
from lightning_hetero.checkpoint.landing import Landing
from lightning_hetero.errors import ConfigError
from lightning_hetero.planners import BUILTIN_PLANS
from lightning_hetero.runtime.frozen import Frozen
from lightning_hetero.store.pins import roll_back
from lightning_hetero.store.snapshots import bring
from lightning_hetero.strategies import checkpoint_io
from lightning_hetero.strategies.core import Core
from lightning_hetero.strategies.resume import as_checkpoint, check_use, is_store, last_kept, read_state


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
        if not self._choices.link_checkpoints or self.session is None or not self.session.keeps_steps:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self._step_ended:
            self._snapshots.append(Path(filepath))
        else:
            self.session.snapshot(Path(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """A checkpoint file, or a store, whose weights and state stay where they are until :meth:`setup` takes them over."""
        self._resumed = None
        if not is_store(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        path, own = Path(checkpoint_path).absolute(), self.options.disk_path
        check_use(self.lightning_module, path, own, self.namespace)
        assert own is not None
        kept = last_kept(path)
        self._resumed = read_state(kept)
        if not own.exists() or not path.samefile(own):
            bring(kept, own.absolute())
        elif kept != path:
            roll_back(path, kept)
        return as_checkpoint(self._resumed, self.precision_plugin)

    def freeze(self) -> Frozen | None:
        """For who saves in the background: what a state has to be read from; ``None`` where all of it is in ordinary memory."""
        return None if self.session is None else self.session.freeze()

    def landing(self) -> Landing:
        """Where a checkpoint is loaded to, so that it need not fit memory."""
        if self.session is not None:
            return Landing(self.session.disk_root())
        assert self.lightning_module is not None
        wanted = (self.options.disk_path or local_root(self.lightning_module.trainer)).expanduser().absolute()
        return Landing(next(path for path in (wanted, *wanted.parents) if path.is_dir()))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights on disk appear as lazy tensors."""
        if self.session is not None:
            self.session.drain()
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Writes weights through to where they live; those of a model on the meta device once :meth:`setup` has given it memory."""
        assert self.lightning_module is not None
        if self._resumed is not None:
            return
        if self.session is None and any(p.is_meta for p in self.lightning_module.parameters()):
            self._waiting_checkpoint = (checkpoint, strict)
            return
        super().load_model_state_dict(checkpoint, strict=strict)
        if self.session is not None:
            self.session.commit()
        for value in checkpoint["state_dict"].values():
            if isinstance(value, torch.Tensor):
                release_pages(value)

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


def local_root(trainer: Any) -> Path:
    """Where a Trainer's files go on this machine; a remote root holds checkpoints, not this process's scratch files."""
    return Path.cwd() if "://" in str(trainer.default_root_dir) else Path(trainer.default_root_dir)
