"""The user blob of a commit record: where each part's arrays are, and the training state.

[Note: Resumable records]
A record stands for a step if it has a ``state``: the training loop's, written at the end of the
batch that made the step. Moves of a part between tiers commit too; the contents do not change, so
they repeat the last state. Any other commit (weights were loaded, nothing was trained yet, blocks
move in the middle of a step) has no state, and says ``why``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_hetero._native.geometry import PartGeometry
from lightning_hetero._native.library import U8
from lightning_hetero.errors import ConfigError
from lightning_hetero.store.format import in_place, value_shapes
from lightning_hetero.store.format.directory import STATE_FILE
from lightning_hetero.store.format.encoding import DTYPES, loads
from lightning_hetero.store.format.in_place import InPlace
from lightning_hetero.store.format.state_files import read_value

VERSION = 1
USER_BYTES_WITHOUT_STATE = 256  # largest user blob of a record in a run that keeps no steps
SCRATCH_KEYS = {"step"}  # of the user blob of runs that keep no steps
_GEOMETRY_FIELDS = 8


@dataclass(frozen=True, slots=True)
class BlobRow:
    """One tensor in a blob.

    Attributes:
        index: Position of its parameter in the part.
        key: What the optimizer calls it.
        dtype: Its dtype.
        shape: Its shape.
        offset: Its first byte.
    """

    index: int
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class BlobEntry:
    """Optimizer state of a part that only the optimizer's own code knows.

    Attributes:
        geometry: The block of bytes that holds it.
        optimizer: Number of the optimizer.
        rows: What is where in it.
    """

    geometry: PartGeometry
    optimizer: int
    rows: tuple[BlobRow, ...]


@dataclass(frozen=True, slots=True)
class PartEntry:
    """Where one part's arrays are.

    Attributes:
        home: Its native part; ``None`` where the engine has none, and the weights are in memory.
        stepped: The state is no longer all zeros.
        weights: The mirror of weights in memory; ``None`` where they live in the home's files.
        state: The same for state arrays.
        blobs: State that the engine does not know.
        in_place: Files of somebody else that have the weights, which then are nowhere else.
    """

    home: PartGeometry | None
    stepped: bool
    weights: PartGeometry | None
    state: PartGeometry | None
    blobs: tuple[BlobEntry, ...] = ()
    in_place: InPlace | None = None

    def to_json(self) -> str:
        """As it stands in a record."""
        row: list[Any] = [_to_list(self.home), self.stepped, _to_list(self.weights), _to_list(self.state)]
        if self.blobs:
            row.append([[_to_list(b.geometry), b.optimizer, [_row_to_list(r) for r in b.rows]] for b in self.blobs])
        if self.in_place is None:
            return json.dumps(row, separators=(",", ":"))
        if not self.blobs:
            row.append([])
        return f"{json.dumps(row, separators=(',', ':'))[:-1]},{self.in_place.text}]"

    @property
    def files(self) -> list[PartGeometry]:
        """The blocks of the part that have files."""
        blocks = (self.home, self.weights, self.state, *(b.geometry for b in self.blobs))
        return [b for b in blocks if b is not None and (b.weights_on_disk_file or b.state_on_disk_file)]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A record that was read back.

    Attributes:
        parts: One entry for each part, in the order of the manifest.
        state: The training state as text, see ``store.format.encoding``; empty where the record
            stands for no step.
        why: Why it does not.
        files: Bytes of each state file that the state names.
        owners: The numbers of each part's optimizers; ``None`` in older stores, which do not say.
    """

    parts: tuple[PartEntry, ...]
    state: str
    why: str
    files: Mapping[str, int] = field(default_factory=dict)
    owners: tuple[tuple[int, ...], ...] | None = None


_MOMENT = {"at": int, "random": dict, "generators": value_shapes.DictOf(object)}
_DATA = {
    "started": value_shapes.Either((None, value_shapes.Fields(_MOMENT))),
    "samplers_know_epoch": bool,
    "moments": value_shapes.ListOf(value_shapes.Fields({**_MOMENT, "drawn_by": value_shapes.ListOf(int)})),
    "memory": value_shapes.Fields({"states": value_shapes.DictOf(object), "attributes": value_shapes.DictOf(dict)}),
    "generators": value_shapes.DictOf(object),
    **dict.fromkeys(("drawn", "calls", "fetched", "held"), int),
    **dict.fromkeys(("done", "is_lost"), bool),
    "reloaded": value_shapes.ListOf(value_shapes.Either((None, int))),
}

# The training state that `strategies.training_state` takes.
STATE: dict[str, Any] = {
    "version": str,
    "epoch": int,
    "global_step": int,
    "fit_loop": value_shapes.DictOf(dict),
    "optimizers": value_shapes.ListOf(
        value_shapes.Fields({"name": str, "sizes": value_shapes.ListOf(int), "groups": value_shapes.ListOf(dict)})
    ),
    "changes": dict,
    "lr_schedulers": value_shapes.ListOf(dict),
    "precision": dict,
    "buffers": value_shapes.DictOf(torch.Tensor),
    "random": value_shapes.DictOf(dict),
    "data": value_shapes.Fields(
        _DATA, {"loaders": value_shapes.ListOf(value_shapes.DictOf(value_shapes.Either((None, bool, int, float, str))))}
    ),
    "validation": value_shapes.Either(
        (None, value_shapes.Fields({"generators": value_shapes.DictOf(object), "started": value_shapes.ListOf(bool)}))
    ),
    "callbacks": value_shapes.DictOf(object),
    "datamodule": value_shapes.Either((None, value_shapes.Row((str, object)))),
    "hyper_parameters": value_shapes.DictOf(object),
}


def compose(parts: Sequence[str], state: str, why: str, owners: Sequence[Sequence[int]] | None = None) -> bytes:
    """The user blob of a record.

    Args:
        parts: Each part's :meth:`PartEntry.to_json`.
        state: The training state; empty if there is none.
        why: Why there is none.
        owners: The numbers of each part's optimizers; ``None``: nobody knows.
    """
    said = {} if owners is None else {"owners": owners}
    head = json.dumps({"version": VERSION, "why": why} | said)[:-1]
    return f'{head},"parts":[{",".join(parts)}],"state":{state or "null"}}}'.encode()


def parse(blob: bytes) -> StepRecord:
    """Reads a user blob; nothing in it is trusted.

    Raises:
        ConfigError: It is not one of this version.
    """
    try:
        value = json.loads(blob)
        if value["version"] != VERSION:
            raise ConfigError(f"the commit record has version {value['version']!r}; this package reads {VERSION}.")
        parts = tuple(_entry(row) for row in value["parts"])
        why, state = value["why"], value["state"]
        if not isinstance(why, str) or not isinstance(state, dict | None):
            raise ValueError("fields of another type")
        files = dict(_files(state))
        owners = None if "owners" not in value else tuple(tuple(row) for row in value["owners"])
        if owners is not None and (len(owners) != len(parts) or not all(_counts(*row) for row in owners)):
            raise ValueError("optimizers of other parts")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the commit record cannot be read ({error}); it was written by another program or version.") from error
    ids = [block.id for part in parts for block in part.files]
    if len(ids) != len(set(ids)):
        raise ConfigError("the commit record gives the same files to two parts; it was written by another program.")
    return StepRecord(parts, "" if state is None else json.dumps(state), why, files, owners)


def files_of(blob: bytes) -> Mapping[str, int]:
    """Bytes of each state file that a user blob names; none if the run keeps no steps."""
    try:
        return parse(blob).files
    except ConfigError:
        return {}


def global_step_of(blob: bytes) -> int | None:
    """Lightning's ``global_step`` of the kept step that a user blob stands for.

    Returns:
        The number; ``None`` where the blob stands for no step, or is one of a run that keeps none.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        if json.loads(blob).keys() == SCRATCH_KEYS:
            return None
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"the commit record cannot be read ({error}); it was written by another program or version.") from error
    record = parse(blob)
    step = json.loads(record.state).get("global_step") if record.state else None
    if record.state and type(step) is not int:
        raise ConfigError(f"the commit record has global_step {step!r}; allowed: an integer.")
    return step


def state_of(record: StepRecord, path: str | os.PathLike[str], *only: str) -> dict[str, Any]:
    """The training state of a record.

    Args:
        record: The record.
        path: The store, where its state files are.
        only: The fields that are wanted; all where none is named.

    Raises:
        ConfigError: The record stands for no step, or its state cannot be read.
        StoreCorruptError: A state file is missing, or not what the record names.
    """
    if not record.state:
        raise ConfigError(
            f"store {str(path)!r} cannot be resumed from: {record.why}. Load a checkpoint, or start without ckpt_path."
        )
    tree = json.loads(record.state)
    wanted = {key: value for key, value in tree.items() if not only or key in only}
    state: dict[str, Any] = loads(json.dumps(wanted), partial(read_value, Path(path)))
    check_state(state, path, value_shapes.Fields({key: STATE[key] for key in only if key in STATE}, STATE))
    return state


def check_state(state: Any, path: str | os.PathLike[str], shape: Any) -> None:
    """Refuses a state that does not look like ours, whatever its checksum says.

    Raises:
        ConfigError: Names the first place that differs.
    """
    if what := value_shapes.fault(state, shape, "state"):
        raise ConfigError(
            f"the training state in the last record of {str(path)!r} cannot be used: {what}. Another program or version has "
            f"written it. Go on from a checkpoint, or with the version that training began with."
        )


def _files(tree: Any) -> Iterator[tuple[str, int]]:
    """The state files that a state names, see [Note: Encoding] in ``encoding.py``."""
    if isinstance(tree, list):
        for item in tree:
            yield from _files(item)
    elif isinstance(tree, dict):
        row = tree.get("$")
        if isinstance(row, list) and row[:1] == ["file"]:
            _, name, size = row
            if not (isinstance(name, str) and STATE_FILE.fullmatch(name) and _counts(size)):
                raise ValueError("a state file of another kind")
            yield name, size
        for item in tree.values():
            yield from _files(item)


def _to_list(geometry: PartGeometry | None) -> list[int] | None:
    if geometry is None:
        return None
    g = geometry
    on_file = (int(g.weights_on_disk_file), int(g.state_on_disk_file))
    return [g.id, g.weight_dtype, g.num_elements, g.num_state, *on_file, g.num_slots, g.chunk_elements]


def _entry(row: Any) -> PartEntry:
    home, stepped, weights, state, *blobs = row
    if not isinstance(stepped, bool) or len(blobs) > 2:
        raise ValueError("an entry of another type")
    found = tuple(_blob(*blob) for blob in (blobs[0] if blobs else ()))
    source = in_place.parse(blobs[1]) if len(blobs) > 1 else None
    return PartEntry(_geometry(home), stepped, _geometry(weights), _geometry(state), found, source)


def _row_to_list(row: BlobRow) -> list[Any]:
    return [row.index, row.key, str(row.dtype).removeprefix("torch."), list(row.shape), row.offset]


def _blob(geometry: Any, optimizer: Any, rows: Any) -> BlobEntry:
    block = _geometry(geometry)
    if block is None or not _counts(optimizer) or block.weight_dtype != U8 or not block.weights_on_disk_file:
        raise ValueError("a blob of another type")
    found = []
    for index, key, dtype, shape, offset in rows:
        if not (_counts(index, offset, *shape) and isinstance(key, str)):
            raise ValueError("a tensor of another type")
        found.append(BlobRow(index, key, DTYPES[dtype], tuple(shape), offset))
        if offset + math.prod(shape) * DTYPES[dtype].itemsize > block.num_elements:
            raise ValueError("a tensor that leaves its blob")
    return BlobEntry(block, optimizer, tuple(found))


def _counts(*values: Any) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _geometry(row: Any) -> PartGeometry | None:
    if row is None:
        return None
    if not isinstance(row, list) or len(row) != _GEOMETRY_FIELDS or any(type(v) is not int for v in row):
        raise ValueError("a geometry of another type")
    number, dtype, num_elements, num_state, weights, state, slots, chunk = row
    return PartGeometry(
        id=number, weight_dtype=dtype, num_elements=num_elements, num_state=num_state, weights_on_disk_file=bool(weights),
        state_on_disk_file=bool(state), num_slots=slots, chunk_elements=chunk,
    )  # fmt: skip
