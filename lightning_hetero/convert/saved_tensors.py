"""Weights that ``torch.save`` has written: ``pytorch_model.bin`` and the like, read one by one.

The files are mapped, and pages that were read are given back. Nothing in them is executed. Frozen
weights of such files are copied to the store: only safetensors files are read in place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hetero.checkpoint.files import Place
from lightning_hetero.checkpoint.streaming import release_pages
from lightning_hetero.convert.exporting import load_checkpoint
from lightning_hetero.convert.safetensors import INDEX, SINGLE, StoredTensor, WeightFiles, read_index
from lightning_hetero.errors import ConfigError
from lightning_hetero.store.raw_memory import check_has_memory

SAVED = "pytorch_model.bin"
SAVED_INDEX = "pytorch_model.bin.index.json"

_ENDS = (".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class PickledTensor(StoredTensor):
    """One tensor of a ``torch.save`` file.

    Attributes:
        value: It, in pages of the file.
    """

    value: Tensor

    def read(self) -> Tensor:
        """A new tensor with the content."""
        return self.value.clone(memory_format=torch.contiguous_format)

    def read_into(self, memory: Tensor) -> None:
        """Reads into a CPU tensor of the same shape, converting dtypes like ``copy_``."""
        memory.copy_(self.value)
        release_pages(self.value)


def open_weights(path: str | os.PathLike[str] | Place) -> WeightFiles:
    """The tensors of a safetensors or ``torch.save`` file, or of a directory of Hugging Face.

    Args:
        path: As in ``WeightFiles.open``; or a file whose name ends in ``.bin``, ``.pt`` or
            ``.pth`` with a ``state_dict``; or a directory with ``pytorch_model.bin``, or with its
            index and the files that it names. Safetensors files come first.

    Raises:
        ConfigError: There is no such file, or it cannot be read without executing code in it.
        UnsupportedError: A tensor in it consists of several, as torchao quantizes.
    """
    place = Place.of(path)
    tensors: dict[str, StoredTensor] = {}
    for file in _saved_files(place):
        for name, value in _tensors_of(file).items():
            check_has_memory(name, value)
            if name in tensors:
                raise ConfigError(f"{str(place)!r}: {name!r} is in {tensors[name].path.name} and in {file.name}. Remove one.")
            tensors[name] = PickledTensor(name, file, value.dtype, value.shape, 0, value)
    return WeightFiles(place, tensors, {}) if tensors else WeightFiles.open(place)


def _saved_files(place: Place) -> list[Place]:
    if place.name.endswith(_ENDS) and place.is_file():
        return [place]
    if not place.is_dir() or (place / SINGLE).is_file() or (place / INDEX).is_file():
        return []
    if (place / SAVED).is_file():
        return [place / SAVED]
    if (place / SAVED_INDEX).is_file():
        return [place / name for name in sorted(set(read_index(place, SAVED_INDEX).values()))]
    return []


def _tensors_of(file: Place) -> Mapping[str, Tensor]:
    content = load_checkpoint(str(file))
    inner = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(inner, dict) or not all(isinstance(value, Tensor) for value in inner.values()):
        raise ConfigError(f"{str(file)!r} is not a state_dict: it has other values than tensors. Save model.state_dict().")
    return inner
