"""The target of loading a checkpoint larger than memory: an unnamed file, mapped piece by piece."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.checkpoint.streaming import release_pages
from lightning_hetero.errors import OutOfDiskError
from lightning_hetero.units import KIB, MIB, format_bytes, round_up

_SMALL_BYTES = 4 * KIB  # smaller tensors stay in memory
_REGION_BYTES = 256 * MIB
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class _Region:
    """A range of the file, mapped twice: to fill it, and to read private copies of its pages."""

    shared: mmap.mmap
    private: mmap.mmap

    def tensor(self, pages: mmap.mmap, offset: int, like: Tensor) -> Tensor:
        return torch.frombuffer(pages, dtype=like.dtype, count=like.numel(), offset=offset).view(like.shape)


class Landing:
    """Makes tensors in the memory of a file.

    A tensor that was filled and released takes no memory until it is read again.

    The file is removed with the last of its tensors.

    Args:
        folder: An existing directory for the file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None
        self._region: _Region | None = None
        self._used = self._size = 0
        self._places: dict[int, tuple[_Region, int]] = {}  # by the address of the tensor to fill

    def place(self, like: Tensor) -> Tensor:
        """A contiguous CPU tensor with shape and dtype of ``like``, to be filled.

        Raises:
            OutOfDiskError: There is no space for it.
        """
        if like.nbytes <= _SMALL_BYTES:
            return torch.empty_like(like, device="cpu")
        if self._region is None or self._used + like.nbytes > self._size:
            self._region = self._open(round_up(max(like.nbytes, _REGION_BYTES), mmap.ALLOCATIONGRANULARITY))
        offset, self._used = self._used, round_up(self._used + like.nbytes, _ALIGN)
        tensor = self._region.tensor(self._region.shared, offset, like)
        self._reserve(offset, like.nbytes)
        self._places[tensor.data_ptr()] = self._region, offset
        return tensor

    def filled(self, tensor: Tensor) -> None:
        """A tensor of :meth:`place` has its content: frees the memory.

        The file keeps the content.
        """
        release_pages(tensor)

    def with_private_copies(self, value: Any) -> Any:
        """The nested object with its filled tensors as private copies of the file's pages."""
        if isinstance(value, dict):
            return {key: self.with_private_copies(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.with_private_copies(item) for item in value]
        found = self._places.get(value.data_ptr()) if isinstance(value, Tensor) and value.device.type == "cpu" else None
        if found is None:
            return value
        region, offset = found
        return region.tensor(region.private, offset, value)

    def _open(self, size: int) -> _Region:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            self._begin = 0
        else:
            self._begin += self._size
        self._used, self._size = 0, size
        number = self._file.fileno()
        os.ftruncate(number, self._begin + size)
        shared = mmap.mmap(number, size, flags=mmap.MAP_SHARED, offset=self._begin)
        private = mmap.mmap(number, size, flags=mmap.MAP_PRIVATE, offset=self._begin)
        return _Region(shared, private)

    def _reserve(self, offset: int, num_bytes: int) -> None:
        """Raises if the disk is full: writing to mapped memory without space ends the process."""
        try:
            os.posix_fallocate(self._file.fileno(), self._begin + offset, num_bytes)
        except OSError as error:
            raise OutOfDiskError(
                f"{str(self._folder)!r} has no room for the checkpoint that is loaded ({format_bytes(self._begin + offset)} so far)"
                f": {error.strerror}. Free some, or choose another disk_path or default_root_dir."
            ) from error
