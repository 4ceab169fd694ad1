"""Lightning's checkpoint IO, streaming tensor by tensor while weights or state are on disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lightning_hetero import checkpoint as streaming
from lightning_hetero.checkpoint.files import Place
from lightning_hetero.errors import CheckpointMissingError, CheckpointWriteError, ConfigError, HeteroError, did_you_mean
from lightning_hetero.strategies.namespaces import Lightning, lightning_of
from lightning_hetero.untyped import Options, Value

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.plugins.io import TorchCheckpointIO as _Base
else:
    _Base = object  # the namespace's class comes second among the bases

_TORCH_WRITES = "PytorchStreamWriter"  # in torch.save's error if it cannot write


def make(name: str) -> CheckpointIO:
    """A checkpoint IO for the namespace of that name."""
    return Lightning(name).subclass(_HeteroCheckpointIO, "plugins.io.TorchCheckpointIO", name="HeteroCheckpointIO", home=__name__)()


def instead(given: CheckpointIO, lightning: Lightning) -> CheckpointIO:
    """Replaces Lightning's default checkpoint IO, also inside a wrapper, by a streaming one."""
    plain = lightning.module("plugins.io").TorchCheckpointIO
    if type(given) is plain:
        return make(lightning.name)
    if type(getattr(given, "checkpoint_io", None)) is plain:  # AsyncCheckpointIO and its like wrap another
        wrapper: Value = given
        wrapper.checkpoint_io = make(lightning.name)
    return given


def check_file(path: object) -> None:
    """Refuses a local directory, which is not a checkpoint file.

    Raises:
        ConfigError: It says what the directory holds.
    """
    place = Place.of(path).local if isinstance(path, str | os.PathLike) else None
    if place is None or not place.is_dir():
        return
    names = sorted(entry.name for entry in place.iterdir())
    more = " and more" if len(names) > 3 else ""
    holds = f"a directory with {', '.join(names[:3])}{more}" if names else "an empty directory"
    if ".metadata" in names:
        holds += ", a distributed checkpoint: the strategy that has saved it loads it"
    raise ConfigError(
        f"ckpt_path {str(path)!r} is {holds}. Allowed: a checkpoint file, a store (the disk_path of a run that keeps its steps), "
        f"or a checkpoint that link_checkpoints has made. A run that died before its store was laid out has kept nothing: start "
        f"without ckpt_path."
    )


def _check_presence(path: object) -> None:
    """Refuses a local path at which there is nothing.

    Raises:
        CheckpointMissingError: It names what is near.
    """
    place = Place.of(path).local if isinstance(path, str | os.PathLike) else None
    if place is None or place.exists():
        return
    beside = [str(other) for other in place.parent.iterdir()] if place.parent.is_dir() else []
    raise CheckpointMissingError(
        f"Checkpoint file not found: {path}.{did_you_mean(path, beside)} Allowed: a checkpoint file, or a store: the "
        f"disk_path of a run that keeps its steps. To begin anew, leave ckpt_path out."
    )


class _HeteroCheckpointIO(_Base):
    """Writes ``torch.save`` files; with ``streams`` one offloaded tensor is in memory at a time."""

    streams = False

    def save_checkpoint(self, checkpoint: Options, path: Value, storage_options: object | None = None) -> None:
        try:
            if self.streams and storage_options is None:
                streaming.save(checkpoint, path)
            else:
                super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        except (OSError, RuntimeError) as error:
            if isinstance(error, HeteroError) or (isinstance(error, RuntimeError) and _TORCH_WRITES not in str(error)):
                raise
            raise CheckpointWriteError(
                f"the checkpoint {str(path)!r} cannot be written: {error}. Make room there, or save to another place; the steps of "
                f"a run that keeps them are in its store."
            ) from error

    def load_checkpoint(self, path: Value, map_location: Value = None, weights_only: bool | None = None) -> Value:
        check_file(path)
        _check_presence(path)
        if self.streams and Place.of(path).is_file():
            return streaming.load(path, map_location, weights_only=weights_only)
        # With Lightning's default, a function, torch cannot load tensor subclasses.
        where: Value = "cpu" if map_location is None else map_location
        return super().load_checkpoint(path, where, weights_only=weights_only)

    def __reduce__(self) -> tuple[object, ...]:
        return make, (lightning_of(self).name,), self.__dict__
