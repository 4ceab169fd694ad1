"""The safetensors format, read and written one piece at a time.

A file is eight bytes with the length of a JSON header (little-endian), the header, and the tensors'
bytes without gaps. The header maps each name to dtype, shape and first and last byte. A directory
of Hugging Face holds one file, or several with an index of their tensors. Source: the format
section of the safetensors project's README.

The safetensors package maps files into memory, where pages that were read count for the process,
and it writes only tensors that are all in memory. Here bytes go directly from the file to their
target, through 16 MiB if the dtype changes. Headers are untrusted: everything is checked against
the file's size before use.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.checkpoint.files import PIECE_BYTES, Place
from lightning_hetero.errors import ConfigError, HeteroError, OutOfDiskError
from lightning_hetero.store.raw_memory import memory_of, own_memory
from lightning_hetero.store.volume import Volume, disk_error
from lightning_hetero.units import format_bytes

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16, "I32": torch.int32,
    "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_BYTES_MAX = 100_000_000  # the safetensors package's limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file.

    Attributes:
        name: Its name in the file.
        path: The file.
        dtype: Its dtype in the file.
        shape: Its shape.
        start: Its first byte in the file.
    """

    name: str
    path: Place
    dtype: torch.dtype
    shape: torch.Size
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.shape.numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """A new tensor with the content.

        Raises:
            ConfigError: The file is shorter than its header said.
        """
        out = own_memory(self.shape.numel(), self.dtype).view(self.shape)
        self.read_into(out)
        return out

    def read_into(self, memory: Tensor) -> None:
        """Reads into ``memory``, a CPU tensor of the same shape, converting dtypes like ``copy_``.

        Raises:
            ConfigError: The file is shorter than its header said.
        """
        if not memory.is_contiguous():
            memory.copy_(self.read())
            return
        with self.path.open() as file:
            flat, width = memory.view(-1), self.dtype.itemsize
            if memory.dtype == self.dtype:
                self._read(file, 0, flat)
                return
            step = max(1, PIECE_BYTES // width)
            piece = torch.empty(min(step, flat.numel()), dtype=self.dtype)
            for begin in range(0, flat.numel(), step):
                part = piece[: min(step, flat.numel() - begin)]
                self._read(file, begin * width, part)
                flat[begin : begin + part.numel()].copy_(part)

    def _read(self, file: Any, offset: int, out: Tensor) -> None:
        if not out.numel():
            return
        view = memory_of(out)
        done = 0
        file.seek(self.start + offset)
        while done < len(view):
            got = file.readinto(view[done : done + PIECE_BYTES]) or 0
            if got <= 0:
                at = self.start + offset + done
                raise ConfigError(f"{str(self.path)!r} ends at byte {at}, inside {self.name!r}. Get the file again.")
            done += got


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The tensors of a safetensors file, or of a directory of Hugging Face.

    Attributes:
        path: The file or directory.
        tensors: Its tensors, by name.
        metadata: The metadata in the files' headers.
    """

    path: Place
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]

    @classmethod
    def open(cls, path: str | os.PathLike[str] | Place) -> WeightFiles:
        """Reads the headers.

        Args:
            path: A ``.safetensors`` file, or a directory with ``model.safetensors``, or with
                ``model.safetensors.index.json`` and the files that it names, or with one file of
                another name; or the URL of one, such as ``"s3://bucket/model"``.

        Raises:
            ConfigError: There is no such file, or a header or the index is damaged.
        """
        place = Place.of(path)
        tensors: dict[str, StoredTensor] = {}
        metadata: dict[str, str] = {}
        for file in weight_files(place):
            found, more = read_header(file)
            if both := sorted(tensors.keys() & found.keys()):
                raise ConfigError(f"{str(place)!r}: {both[0]!r} is in {tensors[both[0]].path.name} and in {file.name}. Remove one.")
            tensors |= found
            metadata |= more
        if place.is_dir() and not (place / SINGLE).is_file() and (place / INDEX).is_file():
            missing = [(n, f) for n, f in read_index(place).items() if n not in tensors or tensors[n].path.name != f]
            if missing:
                name, file_name = missing[0]
                raise ConfigError(
                    f"{str(place / INDEX)!r} says that {name!r} is in {file_name}, where it is not. Get the files again."
                )
        return cls(place, tensors, metadata)

    @property
    def files(self) -> list[Place]:
        """The files, in the order of their names."""
        return sorted({t.path for t in self.tensors.values()})


def weight_files(path: Place) -> list[Place]:
    """The files that together hold the weights of ``path``.

    Raises:
        ConfigError: There is none, or there are several candidates.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(
            f"{str(path)!r} is neither a file nor a directory; allowed: a safetensors file, or a directory with {SINGLE}."
        )
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if (path / INDEX).is_file():
        return [path / name for name in sorted(set(read_index(path).values()))]
    found = path.names(".safetensors")
    if len(found) != 1:
        got = ", ".join(found[:3]) or "no safetensors file"
        raise ConfigError(
            f"{str(path)!r} holds {got}; allowed: {SINGLE}, or {INDEX} and its files, or one file. Name the file itself."
        )
    return [path / found[0]]


def read_index(directory: Place, index: str = INDEX) -> dict[str, str]:
    """The file of the directory that holds each tensor.

    Raises:
        ConfigError: The index is damaged, or names files elsewhere.
    """
    path = directory / index
    try:
        with path.open() as file:
            names = json.loads(file.read(_HEADER_BYTES_MAX))["weight_map"]
        assert isinstance(names, dict)
        assert all(isinstance(f, str) and f == os.path.basename(f) and f not in ("", ".", "..") for f in names.values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AssertionError) as error:
        raise ConfigError(f"{str(path)!r} is not an index of files with weights ({error!r}). Get the file again.") from error
    return names


def read_header(path: Place) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of one file, and its metadata.

    Raises:
        ConfigError: It cannot be read, or the header is damaged; the message says how.
    """
    try:
        size = path.num_bytes()
        with path.open() as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_BYTES_MAX):
                raise _HeaderError(f"its {size} bytes have no room for a header of {length}")
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        return _parse(path, header, data=8 + length, size=size)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is not a complete safetensors file: {error}. Get the file again.") from error


class _HeaderError(ValueError):
    """The fault of a header."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise _HeaderError("its header has a key twice")
    return out


def _parse(path: Place, header: Any, *, data: int, size: int) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    if not isinstance(header, dict):
        raise _HeaderError("its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _HeaderError("its metadata is not text")
    tensors, spans = {}, []
    for name, entry in header.items():
        tensor, end = _entry(path, name, entry, data)
        tensors[name] = tensor
        spans.append((tensor.start, end))
    at = data
    for start, end in sorted(spans):
        if start != at:
            raise _HeaderError(f"its tensors leave a gap or overlap at byte {min(at, start)}")
        at = end
    if at != size:
        raise _HeaderError(f"its tensors end at byte {at}, the file at byte {size}")
    return tensors, metadata


def _entry(path: Place, name: str, entry: Any, data: int) -> tuple[StoredTensor, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _HeaderError(f"{name!r} has no dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if kind not in DTYPES if isinstance(kind, str) else True:
        raise _HeaderError(f"{name!r} has dtype {kind!r}; known: {', '.join(DTYPES)}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _HeaderError(f"{name!r} has shape {shape!r} and data_offsets {offsets!r}")
    if math.prod(shape) * DTYPES[kind].itemsize != offsets[1] - offsets[0]:
        raise _HeaderError(f"{name!r} of shape {shape} and dtype {kind} has {offsets[1] - offsets[0]} bytes")
    return StoredTensor(name, path, DTYPES[kind], torch.Size(shape), data + offsets[0]), data + offsets[1]


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


# ---- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor that is read when it is written.

    Attributes:
        name: Its name in the file.
        dtype: Its dtype there; the result of ``read`` is converted.
        shape: Its shape.
        read: Returns the content: a CPU tensor of that shape.
        ties: Further names that a model has for it, under which it is not written.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    read: Callable[[], Tensor]
    ties: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.shape.numel() * self.dtype.itemsize


def write_directory(
    directory: str | os.PathLike[str] | Place, tensors: Sequence[TensorToWrite], *, max_shard_bytes: int
) -> list[Place]:
    """Writes a directory like Hugging Face's ``save_pretrained``: one file, or several with index.

    Args:
        directory: Made if it is missing; may hold other files, but no weights. Or a URL.
        tensors: The tensors to write, in this order; at most one is in memory at a time.
        max_shard_bytes: No file holds more bytes of tensors, unless a single tensor does.

    Returns:
        The files.

    Raises:
        ConfigError: There are weights in the directory, or a dtype is not in the format.
        OutOfDiskError: The disk has too little room.
        StoreError: A file cannot be written; none is left half written.
    """
    directory = Place.of(directory)
    directory.make_directory()
    if there := [*directory.names(".safetensors"), *directory.names(INDEX)]:
        raise ConfigError(f"{str(directory)!r} already holds {there[0]}. Choose another directory, or remove it.")
    directory.remove_leftovers()  # they may take the room
    needed, free = sum(t.num_bytes for t in tensors), math.inf if directory.local is None else Volume.of(directory.local).free_bytes
    if needed > free:
        raise OutOfDiskError(
            f"the weights for {str(directory)!r} take {format_bytes(needed)}, and the disk has {format_bytes(int(free))} free. "
            f"Make room there, or write to another place."
        )
    shards: list[list[TensorToWrite]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.num_bytes for t in shards[-1]) + tensor.num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        write_file(directory / SINGLE, shards[0])
        return [directory / SINGLE]
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_file(directory / name, shard)
    index = {
        "metadata": {"total_size": sum(t.num_bytes for t in tensors)},
        "weight_map": {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard},
    }
    with (directory / INDEX).appears_whole() as file:
        file.write(json.dumps(index, indent=2).encode() + b"\n")
    return [directory / name for name in names]


def write_file(path: str | os.PathLike[str] | Place, tensors: Iterable[TensorToWrite]) -> None:
    """Writes one file, which appears complete or not at all.

    Raises:
        ConfigError: A dtype is not in the format.
        OutOfDiskError: The disk is full.
        StoreError: It cannot be written.
    """
    ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize)  # stable; the widest dtype first, so that all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise ConfigError(
                f"{tensor.name!r} is {tensor.dtype}; safetensors holds {', '.join(DTYPES)}. Convert it, or leave it out."
            )
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with Place.of(path).appears_whole() as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in ordered:
                content = tensor.read()
                assert content.shape == tensor.shape, tensor.name
                content = content.detach().to(tensor.dtype).contiguous()
                if content.numel():
                    file.write(memory_of(content))
                del content  # before the next one is read
    except OSError as error:
        if isinstance(error, HeteroError):
            raise
        raise disk_error(
            error, f"{str(path)!r} of {format_bytes(end)} cannot be written: {error}. Make room there, or write to another place."
        ) from error
