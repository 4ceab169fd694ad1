"""``lightning-hetero verify``: checks that a store, weights or a checkpoint is undamaged."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_hetero.cli.contents import CHECKPOINT, PLAN, STORE, kind_of, training_step, unsafe_globals
from lightning_hetero.cli.output import console, pairs, print_json, working
from lightning_hetero.errors import ConfigError, StoreCorruptError
from lightning_hetero.ir import cluster_plan, hardware, model
from lightning_hetero.ir.cluster_plan import ClusterPlan
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan

if TYPE_CHECKING:
    from lightning_hetero.store.format.audit import CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of a check.

    Attributes:
        kind: What the path is.
        path: The path.
        checked: What was looked at, in words.
        faults: What is wrong, each with its place.
        notes: What is worth knowing.
    """

    kind: str
    path: Path
    checked: str
    faults: tuple[str, ...]
    notes: tuple[str, ...] = ()


def run(path: Path, *, as_json: bool) -> bool:
    """Checks and prints.

    Returns:
        Whether a fault was found.

    Raises:
        ConfigError: The path is nothing that we know.
        StoreBusyError: A process uses the store.
    """
    kind = kind_of(path)
    with working(f"reading {path}"):
        report = {STORE: _stores, CHECKPOINT: _checkpoint, PLAN: _plan}.get(kind, _weights)(path)
    if as_json:
        print_json(report)
        return bool(report.faults)
    screen = console()
    screen.print(
        pairs("", {"path": str(path), "kind": report.kind, "checked": report.checked, "faults": str(len(report.faults) or "none")})
    )
    for title, lines in (("fault", report.faults), ("note", report.notes)):
        for line in lines:
            screen.print(f"{title}: {line}", markup=False)
    return bool(report.faults)


def _stores(path: Path) -> VerifyReport:
    """A store, or those of several ranks and whether they have a step in common."""
    from lightning_hetero.store.format.sets import has_ranks, last_step, stores_in

    if not has_ranks(path):
        return _store(path)
    each, faults, step = [_store(place) for place in stores_in(path)], list[str](), "no common step"
    with ExitStack() as opened:
        try:
            stores = last_step(path, opened)
            step = f"{len(stores)} ranks have {_step(stores[0].record)}" if stores[0].record is not None else step
        except (ConfigError, StoreCorruptError) as error:
            faults.append(str(error))
    faults += [f"{one.path.name}: {fault}" for one in each for fault in one.faults]
    notes = [f"{one.path.name}: {note}" for one in each for note in one.notes]
    checked = "; ".join([step, *(f"{one.path.name}, {one.checked}" for one in each)])
    return VerifyReport(kind=STORE, path=path, checked=checked, faults=tuple(faults), notes=tuple(notes))


def _store(path: Path) -> VerifyReport:
    from lightning_hetero.store.format.audit import StoreFiles
    from lightning_hetero.store.format.pins import pins
    from lightning_hetero.store.format.stored_model import block_names, source_faults

    with StoreFiles(path) as store:
        names = block_names(store)
        faults = tuple(f"{name}: {fault}" if (name := names.get(fault.block)) else str(fault) for fault in store.check())
        faults += tuple(source_faults(store))
        kept = [_store(pin) for pin in pins(path)]
        faults += tuple(f"{report.path.name}: {fault}" for report in kept for fault in report.faults)
        blocks = () if store.record is None else store.record.blocks
        states = 0 if store.record is None else len(store.record.states)
        step = "no step" if store.record is None else _step(store.record)
        notes = [] if store.record is None else [f"an older record is in use: {note}" for note in store.notes]
        without = sum(not store.has_digests(block) for block in blocks) if not faults else 0
    if without:
        notes.append(
            f"{without} of {len(blocks)} blocks have no digests: their stamps are right, their contents could not be checked."
        )
    notes += [f"{report.path.name}: {note}" for report in kept for note in report.notes]
    what = f"stamps and digests of {len(blocks)} blocks" + (f" and {states} state files" if states else "")
    checked = "; ".join([f"{step}: {what}", *(f"{r.path.name}, {r.checked}" for r in kept)])
    return VerifyReport(kind=STORE, path=path, checked=checked, faults=faults, notes=tuple(notes))


def _step(record: CommitRecord) -> str:
    """The training step, and the commit's own number, which counts every commit."""
    step = training_step(record)
    return f"commit {record.step}, no training step" if step is None else f"training step {step} (commit {record.step})"


def _weights(path: Path) -> VerifyReport:
    from lightning_hetero.convert.safetensors import WeightFiles

    checked = "headers against the files' sizes; the format has no checksums"
    try:
        files = WeightFiles.open(path)
    except ConfigError as error:
        return VerifyReport(kind="safetensors", path=path, checked=checked, faults=(str(error),))
    return VerifyReport(kind="safetensors", path=path, checked=f"{checked}; {len(files.tensors)} tensors", faults=())


def _checkpoint(path: Path) -> VerifyReport:
    faults = tuple(_archive_faults(path))
    notes: tuple[str, ...] = ()
    if not faults:
        try:
            foreign = unsafe_globals(path)
        except ConfigError as error:
            faults = (str(error),)
        else:
            notes = (f"loading it would execute {', '.join(foreign)}",) if foreign else ()
    return VerifyReport(kind=CHECKPOINT, path=path, checked="checksums of all records of the archive", faults=faults, notes=notes)


def _archive_faults(path: Path) -> Iterator[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                try:
                    with archive.open(info) as record:
                        while record.read(1 << 24):
                            pass
                except (zipfile.BadZipFile, zlib.error, OSError, RuntimeError, NotImplementedError) as error:
                    yield f"{path.name} at offset {info.header_offset}, record {info.filename!r}: {error}"
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        yield f"{path.name}: {error}"


_Reader = tuple[str, Callable[[Path], object]]  # what it reads, and how
_PLAN: _Reader = (PLAN, Plan.load)
_READERS: dict[str, _Reader] = {  # of JSON files, by their format
    cluster_plan.FORMAT: ("cluster plan", ClusterPlan.load),
    model.FORMAT: ("model profile", ModelProfile.load),
    hardware.FORMAT: ("hardware profile", HardwareProfile.load),
}


def _plan(path: Path) -> VerifyReport:
    kind, load = _PLAN
    checked = "the plan's rules"
    try:
        form = json.loads(path.read_bytes()).get("format")
    except (ValueError, AttributeError, RecursionError):
        form = None  # the reader says what is wrong
    if form in _READERS:
        kind, load = _READERS[form]
        checked = f"the {kind}'s keys and values"
    try:
        load(path)
    except ConfigError as error:
        return VerifyReport(kind=kind, path=path, checked=checked, faults=(str(error),))
    return VerifyReport(kind=kind, path=path, checked=checked, faults=())
