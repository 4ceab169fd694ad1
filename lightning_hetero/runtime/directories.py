"""The directories of a run's files: one for blocks, one for activations that go to the disk."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from lightning_hetero._native import file_bytes
from lightning_hetero.lowering import num_slots
from lightning_hetero.runtime.activations.files import SwapFiles
from lightning_hetero.runtime.options import SessionOptions
from lightning_hetero.runtime.placement import Placement
from lightning_hetero.store.file_limits import make_room
from lightning_hetero.store.format.audit import ring_bytes
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.store.format.manifest import MANIFEST
from lightning_hetero.store.format.places import DiskLimits
from lightning_hetero.store.live.blocks import Block, modules_of
from lightning_hetero.store.live.mirrors import mirror_files
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.raw_memory import PAGE as _PAGE
from lightning_hetero.store.volume import Volume

_FEWER_SWAPS = "swap fewer activations to the disk"
_SWAPS_OF_BLOCK = 4  # most files of activations that a block has at the same time


@dataclass(eq=False, repr=False)
class Directories:
    """The directories of one run."""

    root: nn.Module
    blocks: list[Block]
    options: SessionOptions
    default_root: Path = Path()  # where files go by default
    disk_bytes: int = 0  # of the store under the plan in force, with commit rings and manifests
    overhead_bytes: int = 0  # of its commit rings and manifests
    ring: dict[str, int] = field(default_factory=dict)  # ``num_blocks`` and ``user_bytes`` of the commit ring
    _open_files: int = 0
    _swaps: SwapFiles | None = None

    def of_blocks(
        self, placement: Placement, *, trains: bool, kept: bool, layout: dict[str, object] | None = None, resume: bool = False
    ) -> StoreDirectory | None:
        """The directory of block files; ``None`` if the plan needs none.

        Evaluation does not touch a store at ``disk_path``. ``layout`` has parts and commit records
        for a new manifest; ``resume``: the directory holds an earlier run's store.

        Raises:
            OutOfDiskError: There is too little room.
            ConfigError: The directory cannot be used.
        """
        self._note(placement, kept=kept)
        if not placement.uses_disk and not kept:
            return None
        # Only the model: plan, optimizer and frozen parameters may differ the next time.
        rows = [{"block": own[-1].name, "params": {n: _row(p) for n, p in _params(own)}} for own in modules_of(self.blocks)]
        manifest: dict[str, object] = {"model": type(self.root).__name__, "blocks": rows}
        make_room(self._open_files)
        path = self.options.disk_path if trains else self._scratch_path()
        needed, remedy = self.disk_bytes + placement.later_bytes, _remedy(placement, kept=kept)
        return self._make(path, manifest, needed, layout=layout, resume=resume, remedy=remedy)

    def make_ready(self, store: TierStore, placement: Placement, *, trains: bool, kept: bool) -> None:
        """Checks the room for another plan's files, before anything moves."""
        if store.files.directory is None:
            directory = self.of_blocks(placement, trains=trains, kept=kept)
            if directory is not None:
                store.files.attach(directory)
            return
        self._note(placement, kept=kept)
        make_room(self._open_files - store.files.num_open)
        states = 0 if store.files.states is None else store.files.states.num_bytes
        limits = DiskLimits(
            needed_bytes=self.disk_bytes + placement.later_bytes + states, capacity_bytes=self.options.disk_share,
            allow_tmpfs=True, allow_rotational=True, sharers=self.options.own.ranks, remedy=_remedy(placement, kept=kept),
        )  # fmt: skip  # the directory is in use already
        store.files.directory.check_room(limits)
        store.files.added_bytes = 0

    def _note(self, placement: Placement, *, kept: bool) -> None:
        parts = [part for block in self.blocks for part in block.parts]
        files = [geometry for part, geometry in placement.geometries.items() if part.in_place is None]
        if kept:  # files for what the plan keeps in memory
            copied = [part for part in parts if part.in_place is None]
            files += [mirror for part in copied for mirror in mirror_files(part, placement.geometries.get(part))]
        every = self.options.keep_every if kept else 0
        slots, rings = num_slots(every), 1 + min(every, 2)
        sizes = [file_bytes(g) for g in files]
        of_each = [slots if g.num_slots > 1 else 1 for g in files]
        swaps = _SWAPS_OF_BLOCK * len(self.blocks) if placement.swaps_to_disk else 0
        self._open_files = sum(g.num_slots for g, size in zip(files, sizes, strict=True) if size)
        self._open_files += sum(len(part.in_place.files) for part in parts if part.in_place is not None)
        self._open_files += 2 * (placement.num_blobs + swaps)
        # With a page for the file system.
        in_files = sum(n * (size + _PAGE) for n, size in zip(of_each, sizes, strict=True) if size)
        # A pin has its own ring and manifest. A new one is whole before the old one goes.
        self.overhead_bytes = rings * (ring_bytes(**self.ring) + 2 * self._manifest_bytes())
        self.disk_bytes = in_files + self.overhead_bytes if placement.uses_disk or kept else 0

    def _manifest_bytes(self) -> int:
        rows = [[*b.spec.params, *map(_row, b.spec.params.values())] for b in self.blocks]
        return 2 * len(json.dumps(rows, indent=1)) + 256 * len(self.blocks) + 4 * _PAGE  # names are there twice

    def of_swaps(self, store: TierStore, placement: Placement) -> SwapFiles | None:
        """Files for activations on disk, in a directory of their own: no commit names them."""
        if placement.swaps_to_disk and self._swaps is None:
            directory = store.files.directory
            path = directory.path / "activations" if self.options.disk_path is not None and directory is not None else None
            manifest: dict[str, object] = {"model": type(self.root).__name__, "holds": "activations"}
            self._swaps = SwapFiles(store.engine, self._make(path, manifest, placement.swapped_bytes, remedy=_FEWER_SWAPS))
        return self._swaps

    def close_swaps(self) -> None:
        """Removes the files of activations."""
        if self._swaps is not None:
            self._swaps.close()
            self._swaps = None

    def room_bytes(self, store: TierStore | None) -> int:
        """Bytes that may be written on the disk beside the files of the plan in force."""
        free = sum(volume.free_bytes for volume in self._volumes(store))
        states = None if store is None else store.files.states
        return int(min(free // self.options.own.ranks, self.beside_bytes() - (0 if states is None else states.num_bytes)))

    def _volumes(self, store: TierStore | None) -> list[Volume]:
        """The disks with files of blocks, each once."""
        places = {place.stat().st_dev: place for place in self.disk_roots(store)}
        return [Volume.of(place) for place in places.values()]

    def allowed(self, store: TierStore | None) -> tuple[int, int]:
        """Bytes of the plan's files, and the most that they may take; nothing without files."""
        files = self.disk_bytes
        return (files, files + self.room_bytes(store)) if files else (0, 0)

    def beside_bytes(self) -> float:
        """Bytes that ``disk_capacity`` allows beside the files of the plan in force."""
        capacity = self.options.disk_share
        return math.inf if capacity is None else capacity - self.disk_bytes

    def disk_root(self, store: TierStore | None) -> Path:
        """An existing directory on the disk where files are or would be."""
        return self.disk_roots(store)[0]

    def disk_roots(self, store: TierStore | None) -> tuple[Path, ...]:
        """The same on each disk; the first is the store's."""
        if store is not None and store.files.directory is not None:
            return store.files.directory.places
        return tuple(map(existing, self.options.disk_paths or (self.default_root,)))

    def _make(
        self,
        path: Path | None,
        manifest: dict[str, object],
        needed_bytes: int,
        *,
        remedy: str,
        layout: dict[str, object] | None = None,
        resume: bool = False,
    ) -> StoreDirectory:
        self.default_root.mkdir(parents=True, exist_ok=True)
        striped = path is not None and path == self.options.disk_path
        return StoreDirectory.create_or_adopt(
            path, default_root=self.default_root, manifest=manifest, needed_bytes=needed_bytes,
            capacity_bytes=self.options.disk_share, allow_tmpfs=self.options.allow_tmpfs,
            allow_rotational=self.options.allow_rotational, sharers=self.options.own.ranks, remedy=remedy,
            layout=layout, member=self.options.member, resume=resume,
            further=self.options.further_disks if striped else (), balance=self.options.balance if striped else None,
        )  # fmt: skip

    def _scratch_path(self) -> Path | None:
        path = self.options.disk_path
        return None if path is not None and (path / MANIFEST).exists() else path


def existing(path: Path) -> Path:
    """The path, or the first above it that is a directory."""
    wanted = path.expanduser().absolute()
    return next(p for p in (wanted, *wanted.parents) if p.is_dir())


def _params(own: Sequence[Block]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of one module's blocks, in the order of registration."""
    found = {name: param for block in own for name, param in block.spec.params.items()}
    return ((name, found[name]) for name in own[-1].spec.order or found)


def _row(param: nn.Parameter) -> list[object]:
    """A parameter in a manifest; with strides if it is not contiguous."""
    row: list[object] = [str(param.dtype), list(param.shape)]
    return row if param.is_contiguous() else [*row, list(param.stride())]


def _remedy(placement: Placement, *, kept: bool) -> str:
    """How a run can write less: kept steps have copies of what the plan has in memory."""
    ways = ['keep no steps (durability="none")'] if kept else []
    return ", or ".join([*ways, *(["place fewer blocks on 'disk'"] if placement.uses_disk else [])])
