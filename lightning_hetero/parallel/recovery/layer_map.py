"""The map of a save: its files with checksums and holders, and the place of each tensor."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

MAP = "map.json"
METADATA = ".metadata"  # torch's name
REST = "meta.pt"  # Lightning's name
SUFFIX = ".distcp"  # torch's
_SAVE = re.compile(r"\d{12}-[0-9a-f]{8}")
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a save.

    Attributes:
        bytes: Its size.
        crc32: Checksum of each piece, in order; the last piece may be shorter.
        ranks: The ranks that hold its content.
    """

    bytes: int
    crc32: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMap:
    """The map of one save, the same on every tier.

    Attributes:
        save: Its name: the step and a random part.
        step: The optimizer step.
        order: Increases with every save; the newest one has the largest.
        path: The URL that the checkpoint was saved to.
        ranks: The number of ranks.
        piece_bytes: Bytes under one checksum, and so the least that is read.
        files: The files by name.
        starts: The first byte of a chunk's numbers in its file, by :func:`chunk_key`.
        metadata_crc32: Checksum of the file ``.metadata``.
    """

    save: str
    step: int
    order: float
    path: str
    ranks: int
    piece_bytes: int
    files: dict[str, StoredFile]
    starts: dict[str, int] = field(default_factory=dict)
    metadata_crc32: int = 0

    def encode(self) -> bytes:
        """As a file: a line with the checksum of the rest, and JSON."""
        text = json.dumps({"version": _VERSION, **asdict(self)}).encode()
        return b"%08x\n%s" % (zlib.crc32(text), text)

    @classmethod
    def decode(cls, content: bytes) -> LayerMap:
        """Reads the result of :meth:`encode`.

        Raises:
            ValueError: It is damaged, or of another version.
        """
        line, _, text = content.partition(b"\n")
        if line != b"%08x" % zlib.crc32(text):
            raise ValueError("checksum differs")
        fields: dict[str, Any] = json.loads(text)
        if (version := fields.pop("version")) != _VERSION:
            raise ValueError(f"version {version}; known: {_VERSION}")
        files = {
            name: StoredFile(bytes=f["bytes"], crc32=tuple(f["crc32"]), ranks=tuple(f["ranks"]))
            for name, f in fields.pop("files").items()
        }
        return cls(files=files, **fields)

    def span(self, name: str, first: int, last: int) -> tuple[int, int]:
        """The bytes of pieces ``first`` to ``last`` of a file, the latter included."""
        return first * self.piece_bytes, min((last + 1) * self.piece_bytes, self.files[name].bytes)

    def is_whole(self, name: str, piece: int, content: bytes | memoryview) -> bool:
        """Whether these bytes are the written ones."""
        start, end = self.span(name, piece, piece)
        return len(content) == end - start and zlib.crc32(content) == self.files[name].crc32[piece]


def is_save(name: str) -> bool:
    """Whether a folder's name is the name of a save."""
    return _SAVE.fullmatch(name) is not None


def chunk_key(name: str, offsets: Sequence[int] | None) -> str:
    """The key of a chunk: its tensor's name and its offsets."""
    return f"{name}@{','.join(map(str, offsets or ()))}"


def layer_of(name: str) -> str:
    """A tensor's layer: its name up to the first number, otherwise without its last part.

    ``state_dict.model.layers.3.mlp.weight`` and
    ``optimizer_0.state.model.layers.3.mlp.weight.exp_avg`` are both of ``model.layers.3``.
    """
    parts = name.split(".")
    if parts[0] == "state_dict":
        parts = parts[1:]
    elif parts[0].startswith("optimizer_") and parts[1:2] == ["state"]:
        parts = parts[2:-1]
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1]) or "model"


def checksums(content: Sequence[bytes | memoryview], piece_bytes: int) -> tuple[int, ...]:
    """Checksums of every piece of a file with these parts."""
    sums, current, filled = [], 0, 0
    for buffer in content:
        part, begin = memoryview(buffer), 0
        while begin < len(part):
            taken = part[begin : begin + piece_bytes - filled]
            current, filled = zlib.crc32(taken, current), filled + len(taken)
            begin += len(taken)
            if filled == piece_bytes:
                sums.append(current)
                current = filled = 0
    return (*sums, current) if filled else tuple(sums)


def pieces_of(
    start: int, sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], itemsize: int, piece_bytes: int
) -> list[int]:
    """The pieces of a file that hold a part of a chunk.

    Args:
        start: The byte of the file at which the chunk's numbers begin.
        sizes: The chunk's shape; it is contiguous.
        offsets: The begin of the part in the chunk.
        lengths: The part's shape.
        itemsize: Bytes of a number.
        piece_bytes: Bytes of a piece.
    """
    if 0 in lengths:
        return []
    inner = max((d for d, (size, length) in enumerate(zip(sizes, lengths, strict=True)) if size != length), default=0)
    strides = [1] * len(sizes)
    for d in reversed(range(len(sizes) - 1)):
        strides[d] = strides[d + 1] * sizes[d + 1]
    begins = torch.tensor([sum(o * s for o, s in zip(offsets, strides, strict=True))])
    for d in range(inner):
        begins = (begins[:, None] + torch.arange(lengths[d]) * strides[d]).flatten()
    run = lengths[inner] * strides[inner] if sizes else 1
    first = (start + begins * itemsize) // piece_bytes
    last = (start + (begins + run) * itemsize - 1) // piece_bytes
    lowest = int(first[0])
    edges = torch.zeros(int(last[-1]) - lowest + 2, dtype=torch.long)
    edges.index_add_(0, first - lowest, torch.ones_like(first))
    edges.index_add_(0, last - lowest + 1, -torch.ones_like(last))
    found: Tensor = torch.nonzero(edges.cumsum(0)).flatten() + lowest
    return [int(p) for p in found.tolist()]


def runs_of(pieces: Iterable[int], longest: int | None = None) -> list[tuple[int, int]]:
    """Sorted pieces as inclusive ranges of at most ``longest`` pieces."""
    runs: list[tuple[int, int]] = []
    for piece in sorted(pieces):
        if runs and runs[-1][1] == piece - 1 and (longest is None or piece - runs[-1][0] < longest):
            runs[-1] = (runs[-1][0], piece)
        else:
            runs.append((piece, piece))
    return runs
