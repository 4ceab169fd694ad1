"""Lightning's checkpoint IO, streaming once weights or state live on disk."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from lightning_hetero import checkpoint as streaming
from lightning_hetero.checkpoint.files import Place

if TYPE_CHECKING:
    from lightning.pytorch.plugins.io import TorchCheckpointIO as _Base
else:
    _Base = object  # the namespace's class comes second among the bases


def make(namespace: str) -> Any:
    """A checkpoint IO for the given namespace."""
    return _io_class(namespace)()


@functools.cache
def plain_class(namespace: str) -> type[Any]:
    """Lightning's default checkpoint IO, which ours replaces."""
    plain: type[Any] = importlib.import_module(f"{namespace}.plugins.io").TorchCheckpointIO
    return plain


@functools.cache
def _io_class(namespace: str) -> type[Any]:
    return type("HeteroCheckpointIO", (_HeteroCheckpointIO, plain_class(namespace)), {"namespace": namespace})


class _HeteroCheckpointIO(_Base):
    """Writes ordinary ``torch.save`` files; with ``streams`` neither saving nor loading holds more than one offloaded tensor."""

    namespace = ""
    streams = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if self.streams and storage_options is None:
            streaming.save(checkpoint, path)
        else:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if self.streams and Place.of(path).is_file():
            return streaming.load(path, map_location, weights_only=weights_only)
        options = {} if map_location is None else {"map_location": map_location}
        return super().load_checkpoint(path, weights_only=weights_only, **options)

    def __reduce__(self) -> Any:
        return make, (self.namespace,), self.__dict__
