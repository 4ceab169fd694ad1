"""Saves and loads ``torch.save`` files tensor by tensor.

[Note: Streaming save]
A ``torch.save`` file is a zip archive: ``data.pkl`` names storages by key, ``data/<key>`` holds the
bytes of each. The pickle needs only shapes, so it is written first; then each offloaded tensor is
read, written as its record and dropped. The records, their order and the pickle are those that
``torch.save`` would write for the materialized object.

[Note: Reading ahead]
Reading small tensors one by one from a slow disk is mostly waiting. So the next tensors are read
ahead. Together they take at most the memory of the largest tensor, which is needed in any case.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import sys
import zipfile
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_hetero.checkpoint.files import Place
from lightning_hetero.handles.offloaded_parameter import OffloadedParameter
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor, begin_contents

_PICKLE_PROTOCOL = 2  # torch.serialization.DEFAULT_PROTOCOL, which weights_only=True reads
_MADV_DONTNEED = 4
_Location = Any  # map_location of torch.load


def save(checkpoint: Any, path: str | os.PathLike[str]) -> None:
    """Saves ``checkpoint`` like ``torch.save``, in the memory of its largest offloaded tensor.

    A local file appears complete or not at all: it is written beside its final name, synced and
    renamed. Other file systems are written as a stream through fsspec. Missing directories are
    made.

    Args:
        checkpoint: Any object that ``torch.save`` takes. Offloaded tensors and parameters in it
            become ordinary ones; those of equal sources share one storage in the file.
        path: A local path, or a URL that fsspec opens.

    Raises:
        OSError: The file cannot be written; no partial local file is left.
    """
    with Place.of(path).appears_whole() as stream:
        _write(checkpoint, stream)


def load(path: str | os.PathLike[str], map_location: _Location = None, *, weights_only: bool | None = None) -> Any:
    """Loads a ``torch.save`` file by mapping it: its tensors occupy memory only once they are read.

    A remote file is first copied to a temporary local one, which is removed with the last of its
    tensors.

    Args:
        path: A local path, or a URL that fsspec opens.
        map_location: As in ``torch.load``.
        weights_only: As in ``torch.load``.

    Returns:
        The saved object. Its tensors are private copies of the file's pages: writing to them does
        not change the file.

    Raises:
        FileNotFoundError: There is no such file.
    """
    place = Place.of(path)
    if not place.is_file():
        raise FileNotFoundError(f"checkpoint {str(place)!r} is not a file. Give the path of a saved checkpoint.")
    with place.copied() as local:
        # Files in the format before torch 1.6 are not zip archives and cannot be mapped.
        return torch.load(str(local), map_location, weights_only=weights_only, mmap=zipfile.is_zipfile(local))


def release_pages(tensor: Tensor) -> int:
    """Frees the memory of a tensor that ``load`` mapped, after it has been copied.

    It frees only whole pages inside the tensor that are mapped from a file. Later reads get the
    file's values again, without earlier writes to the tensor.

    Args:
        tensor: A dense CPU tensor.

    Returns:
        Freed bytes; 0 on systems that cannot identify mapped files (not Linux).
    """
    if isinstance(tensor, (OffloadedTensor, OffloadedParameter)) or tensor.device.type != "cpu" or tensor.numel() == 0:
        return 0
    page = os.sysconf("SC_PAGESIZE")
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + span * tensor.element_size()) // page * page
    if end <= begin or not _is_mapped_file(begin, end):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"madvise of {end - begin} mapped bytes: {os.strerror(errno)}")
    return end - begin


class StreamingIO:
    """A mixin with the methods of Lightning's ``CheckpointIO``."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None) -> None:
        """Saves a checkpoint; see ``save``.

        Raises:
            TypeError: ``storage_options`` was given; none are supported.
        """
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r} was given; streaming checkpoints take none. Leave it out.")
        save(checkpoint, path)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: _Location = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint; see ``load``."""
        checkpoint: dict[str, Any] = load(path, map_location, weights_only=weights_only)
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint file or directory; one that does not exist is not an error."""
        Place.of(path).remove()


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A storage whose bytes are read when its record is written."""

    tensor: OffloadedTensor
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: OffloadedTensor) -> _Deferred:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        # The strides of a copy: the tensor's if it is dense, contiguous for an expanded or sliced
        # view.
        return cls(tensor, tensor.shape, torch.empty_like(meta).stride())

    @property
    def is_untyped(self) -> bool:
        """Whether the file names the storage without a dtype: newer dtypes than typed storages."""
        return self.tensor.dtype in torch.storage._new_dtypes()

    def begin(self) -> Callable[[], torch.UntypedStorage]:
        contents = begin_contents(self.tensor)

        def storage() -> torch.UntypedStorage:
            content = contents()
            if content.stride() != self.stride or content.untyped_storage().nbytes() != content.nbytes:
                content = torch.empty_strided(self.shape, self.stride, dtype=content.dtype).copy_(content)
            return content.untyped_storage()

        return storage


class _Pickler(pickle.Pickler):
    """Writes the pickle of a checkpoint and collects the storages that it refers to, by key."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream, protocol=_PICKLE_PROTOCOL)
        self.storages: dict[str, torch.UntypedStorage | _Deferred] = {}
        self._keys: dict[Any, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def reducer_override(self, value: Any) -> Any:
        """Pickles offloaded tensors as ordinary tensors with their contents."""
        hooks: OrderedDict[int, Any] = OrderedDict()  # never saved
        if isinstance(value, OffloadedParameter):
            state = {key: item for key, item in value.__dict__.items() if key != "_hetero"}
            parameter = (value.detach(), value.requires_grad, hooks)
            if state:
                return torch._utils._rebuild_parameter_with_state, (*parameter, state)
            return torch._utils._rebuild_parameter, parameter
        if isinstance(value, OffloadedTensor):
            deferred = _Deferred.of(value)
            tensor = (deferred, 0, tuple(value.shape), deferred.stride, value.requires_grad, hooks)
            if deferred.is_untyped:
                return torch._utils._rebuild_tensor_v3, (*tensor, value.dtype)
            return torch._utils._rebuild_tensor_v2, tensor
        return NotImplemented

    def persistent_id(self, value: Any) -> tuple[str, Any, str, str, int] | None:
        """Names a storage as torch.save does: kind, type, key, location, number of elements."""
        if isinstance(value, _Deferred):
            key = self._key((value.tensor.source, value.stride), value)
            if value.is_untyped:
                return "storage", torch.UntypedStorage, key, "cpu", value.tensor.nbytes
            return "storage", _storage_type(value.tensor.dtype), key, "cpu", value.tensor.numel()
        if isinstance(value, torch.TypedStorage):
            storage = value._untyped_storage
            self._check_dtype(storage, value.dtype)
            numel = storage.nbytes() // value.dtype.itemsize
            return "storage", _storage_type(value.dtype), self._key(storage._cdata, storage), _location(storage), numel
        if isinstance(value, torch.UntypedStorage):
            self._check_dtype(value, torch.uint8)
            return "storage", torch.UntypedStorage, self._key(value._cdata, value), _location(value), value.nbytes()
        return None

    def _key(self, identity: Any, storage: torch.UntypedStorage | _Deferred) -> str:
        key = self._keys.setdefault(identity, str(len(self._keys)))
        self.storages.setdefault(key, storage)
        return key

    def _check_dtype(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        if storage.device.type == "meta" or storage.data_ptr() == 0:
            return
        if self._dtypes.setdefault(storage.data_ptr(), dtype) != dtype:
            raise RuntimeError(
                f"two tensors of the checkpoint view the same memory, as {self._dtypes[storage.data_ptr()]} and as {dtype}; "
                "a file can hold one dtype per storage. Save a .clone() of one of them."
            )


class _Stream:
    """A writable file that keeps the first error; torch's archive writer hides it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            return self._stream.write(data)
        except BaseException as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._stream.flush()


def _write(checkpoint: Any, stream: IO[bytes]) -> None:
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(checkpoint)
    guarded: Any = _Stream(stream)
    try:
        with torch.serialization._open_zipfile_writer(guarded) as archive:
            _write_records(archive, pickled.getvalue(), pickler.storages)
    except Exception:
        if guarded.error is not None:
            raise guarded.error from None
        raise


def _write_records(archive: Any, pickled: bytes, storages: dict[str, torch.UntypedStorage | _Deferred]) -> None:
    alignment = str(torch.serialization._get_storage_alignment())
    for name, text in (
        ("data.pkl", pickled),
        (".format_version", "1"),
        (".storage_alignment", alignment),
        ("byteorder", sys.byteorder),
    ):
        archive.write_record(name, text, len(text))
    for key, storage in _in_turn(storages):
        archive.write_record(f"data/{key}", storage if storage.device.type == "cpu" else storage.cpu(), storage.nbytes())
        del storage  # before the next ones are read


def _in_turn(storages: dict[str, torch.UntypedStorage | _Deferred]) -> Iterator[tuple[str, Any]]:
    """Storages in their order, by key; see [Note: Reading ahead]."""
    ahead = deque(entry for entry in storages.values() if isinstance(entry, _Deferred))
    most = max((entry.tensor.nbytes for entry in ahead), default=0)
    begun: deque[Callable[[], torch.UntypedStorage]] = deque()
    held = 0  # bytes of begun reads that are not written yet
    for key, entry in storages.items():
        if not isinstance(entry, _Deferred):
            yield key, entry
            continue
        while ahead and held + ahead[0].tensor.nbytes <= most:
            held += ahead[0].tensor.nbytes
            begun.append(ahead.popleft().begin())
        yield key, begun.popleft()()
        held -= entry.tensor.nbytes


def _storage_type(dtype: torch.dtype) -> type:
    """The class whose name stands for ``dtype`` in a file, such as ``torch.FloatStorage``."""
    typed: Any = torch.TypedStorage
    kind: type = getattr(torch, typed(0, dtype=dtype, _internal=True)._pickle_storage_type())
    return kind


def _location(storage: torch.UntypedStorage) -> str:
    location: str = torch.serialization.location_tag(storage)
    return location


def _is_mapped_file(begin: int, end: int) -> bool:
    """Whether the addresses are in one mapping of a file; other pages would lose their content."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return False
    for line in maps.read_text().splitlines():
        bounds, _, _, _, inode = line.split(maxsplit=5)[:5]
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if low <= begin < high:
            return end <= high and inode != "0"
    return False
