"""The contents of a path: a store, weights in safetensors, a checkpoint, or a plan.

Read without loading it.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.plan import Plan
from lightning_hetero.store.format.manifest import MANIFEST

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_hetero.convert.safetensors import WeightFiles
    from lightning_hetero.store.format.audit import CommitRecord, StoreFiles

_ARCHIVE = b"PK\x03\x04"  # of a zip archive's first record
STORE, SAFETENSORS, CHECKPOINT, PLAN = "store", "safetensors", "checkpoint", "plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor.

    Attributes:
        name: Its name.
        dtype: Its dtype, such as ``"float32"``.
        shape: Its shape.
        num_bytes: Its bytes.
        place: The file, or the part of the checkpoint.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    place: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The contents of a path.

    Attributes:
        kind: ``"store"``, ``"safetensors"``, ``"checkpoint"`` or ``"plan"``.
        path: The path.
        facts: Other facts, by name.
        tensors: Its tensors.
        blocks: A store's blocks.
    """

    kind: str
    path: Path
    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[TensorRow, ...] = ()
    blocks: tuple[Mapping[str, Any], ...] = ()


def kind_of(path: Path) -> str:
    """The kind of a path, by its first bytes and names.

    Raises:
        ConfigError: It is of no known kind.
    """
    if path.is_dir():
        if (path / MANIFEST).exists() or any(path.glob(f"rank-*-of-*/{MANIFEST}")):
            return STORE
        if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
            return SAFETENSORS
        raise ConfigError(f"{str(path)!r} holds neither a store's {MANIFEST} nor safetensors. Give a store, a file, or weights.")
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} does not exist. Give a store's directory, weights, a checkpoint or a plan file.")
    if path.suffix == ".safetensors":
        return SAFETENSORS
    with open(path, "rb") as file:
        head = file.read(64)
    # A truncated archive has its first bytes, and not the directory at its end.
    if path.suffix == ".ckpt" or head.startswith(_ARCHIVE) or zipfile.is_zipfile(path):
        return CHECKPOINT
    if head.lstrip()[:1] == b"{":
        return PLAN
    raise ConfigError(
        f"{str(path)!r} is no safetensors file, no checkpoint (a zip archive, as torch.save writes since 1.6) and no plan (JSON)."
    )


def contents_of(path: Path) -> Contents:
    """The contents of a path; reads headers only.

    Raises:
        ConfigError: It is of no known kind, or incomplete.
        StoreBusyError: A process uses the store.
    """
    kind = kind_of(path)
    if kind == STORE:
        from lightning_hetero.store.format.audit import StoreFiles
        from lightning_hetero.store.format.sets import has_ranks, last_step

        with ExitStack() as opened:
            if has_ranks(path):
                return _of_set(path, last_step(path, opened))
            return _of_store(opened.enter_context(StoreFiles(path)))
    if kind == SAFETENSORS:
        from lightning_hetero.convert.safetensors import WeightFiles

        return _of_weights(WeightFiles.open(path))
    if kind == CHECKPOINT:
        return _of_checkpoint(path)
    plan = Plan.load(path)
    return Contents(kind=PLAN, path=path, facts={"name": plan.name, "plan": json.loads(plan.to_json())})


def grouped(tensors: Iterable[TensorRow]) -> list[tuple[str, int, TensorRow]]:
    """Groups tensors whose names differ only in numbers.

    Returns:
        For each group the name with ``*`` for each number, the number of tensors, and the first
        one.
    """
    groups: dict[tuple[Any, ...], list[TensorRow]] = {}
    for row in tensors:
        groups.setdefault((re.sub(r"\d+", "*", row.name), row.dtype, row.shape), []).append(row)
    return [(key[0] if len(rows) > 1 else rows[0].name, len(rows), rows[0]) for key, rows in groups.items()]


def _of_set(path: Path, stores: Sequence[StoreFiles]) -> Contents:
    """The stores of ranks at the step that all of them have."""
    each = [_of_store(store) for store in stores]
    blocks = [{**row, "file": f"{one.path.relative_to(path)}/{row['file']}"} for one in each for row in one.blocks]
    facts = {"ranks": len(stores), **each[0].facts, "notes": [note for one in each for note in one.facts["notes"]]}
    return Contents(kind=STORE, path=path, facts=facts, tensors=each[0].tensors, blocks=tuple(blocks))


def _of_store(store: StoreFiles) -> Contents:
    from lightning_hetero.errors import StoreCorruptError
    from lightning_hetero.store.format.audit import DTYPE_NAMES
    from lightning_hetero.store.format.stored_model import block_names

    record, names = store.record, block_names(store)
    geometry = store.manifest.get("geometry", {})
    tensors = tuple(
        TensorRow(
            name=name,
            dtype=dtype.removeprefix("torch."),
            shape=tuple(shape),
            num_bytes=_num_bytes(dtype, shape),
            place=row["block"],
        )
        for row in geometry.get("blocks", [])
        for name, (dtype, shape, *_) in row["params"].items()
    )
    blocks: list[Mapping[str, Any]] = []
    for block in () if record is None else record.blocks:
        row: dict[str, Any] = {"id": block.id, "name": names.get(block.id, ""), "step": block.step, "file": block.file}
        try:
            with store.slot(block) as slot:
                g = slot.geometry
                row |= {
                    "weights": DTYPE_NAMES[g.weight_dtype] if g.weights_on_disk_file else None,
                    "state_arrays": g.num_state if g.state_on_disk_file else 0,
                    "elements": g.num_elements,
                    "has_digests": slot.has_digests,
                }
        except StoreCorruptError as error:
            row["fault"] = str(error)
        blocks.append(row)
    facts = {
        "model": geometry.get("model"),
        "uuid": store.manifest.get("uuid"),
        "temporary": store.manifest.get("temporary"),
        "global_step": None if record is None else training_step(record),
        "step": None if record is None else record.step,
        "state_files": {} if record is None else dict(record.states),
        "notes": [str(note) for note in store.notes],
    }
    return Contents(kind=STORE, path=store.path, facts=facts, tensors=tensors, blocks=tuple(blocks))


def training_step(record: CommitRecord) -> int | None:
    """Lightning's ``global_step`` of a commit; ``None`` if it stands for no kept step."""
    from lightning_hetero.store.format.record import global_step_of

    try:
        return global_step_of(record.user)
    except ConfigError:  # of another version: the rest of the store can be shown
        return None


def _num_bytes(dtype: str, shape: Iterable[int]) -> int:
    import torch

    return torch.Size(shape).numel() * int(getattr(torch, dtype.removeprefix("torch.")).itemsize)


def _of_weights(files: WeightFiles) -> Contents:
    rows = tuple(
        TensorRow(
            name=t.name, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape), num_bytes=t.num_bytes, place=t.path.name
        )
        for t in files.tensors.values()
    )  # fmt: skip
    facts = {"files": [file.name for file in files.files], "metadata": dict(files.metadata)}
    return Contents(kind=SAFETENSORS, path=Path(files.path), facts=facts, tensors=rows)


def _of_checkpoint(path: Path) -> Contents:
    from lightning_hetero.convert.exporting import load_checkpoint

    if foreign := unsafe_globals(path):
        # Its pickle needs code to be executed. Report that and read no further.
        return Contents(kind=CHECKPOINT, path=path, facts={"needs_to_execute": foreign})
    content = load_checkpoint(path)
    facts: dict[str, Any] = {}
    if isinstance(content, dict):
        facts = {k: v for k, v in content.items() if isinstance(v, int | float | str) and not isinstance(v, bool)}
        facts["entries"] = sorted(map(str, content))
    return Contents(kind=CHECKPOINT, path=path, facts=facts, tensors=tuple(_rows("", content)))


def unsafe_globals(path: Path) -> list[str]:
    """Classes and functions that a checkpoint names and ``torch.load(weights_only=True)`` refuses.

    Raises:
        ConfigError: It is not a checkpoint.
    """
    import torch

    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception as error:  # any error of a reader on a damaged file
        raise ConfigError(
            f"{str(path)!r} is not a checkpoint: {str(error).strip() or type(error).__name__}. Get it again."
        ) from error


def _rows(where: str, value: Any) -> Iterator[TensorRow]:
    import torch

    if isinstance(value, torch.Tensor):
        yield _row(where, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _rows(f"{where}/{key}" if where else str(key), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _rows(f"{where}/{index}", item)


def _row(where: str, tensor: Tensor) -> TensorRow:
    place, _, name = where.partition("/")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorRow(name=name or place, dtype=dtype, shape=tuple(tensor.shape), num_bytes=tensor.nbytes, place=place)
