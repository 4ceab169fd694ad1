"""Where a run's files go: the directory of its blocks, and the one of activations that go to the disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import nn

from lightning_hetero.lowering import num_slots
from lightning_hetero.runtime.activations.files import NativeSwapFiles
from lightning_hetero.runtime.options import SessionOptions
from lightning_hetero.runtime.placement import Placement
from lightning_hetero.store.blocks import Block
from lightning_hetero.store.directory import DiskLimits, StoreDirectory
from lightning_hetero.store.manifest import MANIFEST
from lightning_hetero.store.mirrors import mirror_bytes
from lightning_hetero.store.tiers import TierStore
from lightning_hetero.store.volume import Volume


class Directories:
    """The directories of one run.

    Args:
        root: The model.
        blocks: Its blocks.
        options: The user's choices.

    Attributes:
        default_root: Where files go by default.
        disk_bytes: What files take under the plan in force.
    """

    def __init__(self, root: nn.Module, blocks: list[Block], options: SessionOptions) -> None:
        self.default_root = Path()
        self.disk_bytes = 0
        self._root, self._blocks, self._options = root, blocks, options
        self._swaps: NativeSwapFiles | None = None

    def of_blocks(
        self, placement: Placement, *, trains: bool, kept: bool, layout: dict[str, Any] | None = None, resume: bool = False
    ) -> StoreDirectory | None:
        """The directory of block files; ``None`` if the plan needs none.

        Args:
            placement: The plan.
            trains: It is a fit; evaluation leaves a store alone that training has left at ``disk_path``.
            kept: Steps are kept.
            layout: What a new manifest says of parts and commit records.
            resume: It holds an earlier run's store.

        Raises:
            OutOfDiskError: Too little room.
            ConfigError: It cannot be used.
        """
        self._note(placement, kept=kept)
        if not placement.uses_disk and not kept:
            return None
        # The model alone: the same one may come with another plan, without an optimizer, or with frozen parameters.
        rows = [{"block": b.name, "params": {n: _row(p) for n, p in b.spec.params.items()}} for b in self._blocks]
        manifest = {"model": type(self._root).__name__, "blocks": rows}
        path = self._options.disk_path if trains else self._scratch_path()
        return self._make(path, manifest, self.disk_bytes + placement.later_bytes, layout=layout, resume=resume)

    def make_ready(self, store: TierStore, placement: Placement, *, trains: bool, kept: bool) -> None:
        """Room for another plan's files, before anything moves.

        Raises:
            OutOfDiskError: There is too little.
        """
        if store.files.directory is None:
            directory = self.of_blocks(placement, trains=trains, kept=kept)
            if directory is not None:
                store.files.attach(directory)
            return
        self._note(placement, kept=kept)
        states = 0 if store.files.states is None else store.files.states.num_bytes
        limits = DiskLimits(
            needed_bytes=self.disk_bytes + placement.later_bytes + states, capacity_bytes=self._options.disk_capacity,
            allow_tmpfs=True, allow_rotational=True,
        )  # fmt: skip  # the directory is in use already
        store.files.directory.check_room(limits)

    def _note(self, placement: Placement, *, kept: bool) -> None:
        self.disk_bytes = placement.disk_bytes
        if kept:  # files for what the plan keeps in memory
            parts = [part for block in self._blocks for part in block.parts]
            self.disk_bytes += 2 * sum(mirror_bytes(part, placement.geometries.get(part)) for part in parts)
            self.disk_bytes = self.disk_bytes * num_slots(self._options.keep_every) // 2

    def of_swaps(self, store: TierStore, placement: Placement) -> NativeSwapFiles | None:
        """Files for activations that go to the disk, in a directory of their own: no commit names them."""
        if placement.swaps_to_disk and self._swaps is None:
            directory = store.files.directory
            path = directory.path / "activations" if self._options.disk_path is not None and directory is not None else None
            manifest = {"model": type(self._root).__name__, "holds": "activations"}
            self._swaps = NativeSwapFiles(store.engine, self._make(path, manifest, placement.swapped_bytes))
        return self._swaps

    def close_swaps(self) -> None:
        """Removes the files of activations."""
        if self._swaps is not None:
            self._swaps.close()
            self._swaps = None

    def room_bytes(self, store: TierStore | None) -> int:
        """Bytes that may be written on the disk beside what the plan in force has there."""
        free = Volume.of(self.disk_root(store)).free_bytes
        states = None if store is None else store.files.states
        return int(min(free, self.beside_bytes() - (0 if states is None else states.num_bytes)))

    def beside_bytes(self) -> float:
        """Bytes that ``disk_capacity`` allows beside what the plan in force has on the disk."""
        capacity = self._options.disk_capacity
        return math.inf if capacity is None else capacity - self.disk_bytes

    def disk_root(self, store: TierStore | None) -> Path:
        """An existing directory on the disk where files are or would be."""
        if store is not None and store.files.directory is not None:
            return store.files.directory.path
        wanted = (self._options.disk_path or self.default_root).expanduser().absolute()
        return next(p for p in (wanted, *wanted.parents) if p.is_dir())

    def _make(self, path: Path | None, manifest: dict[str, Any], needed_bytes: int, **more: Any) -> StoreDirectory:
        self.default_root.mkdir(parents=True, exist_ok=True)
        return StoreDirectory.create_or_adopt(
            path, default_root=self.default_root, manifest=manifest, needed_bytes=needed_bytes,
            capacity_bytes=self._options.disk_capacity, allow_tmpfs=self._options.allow_tmpfs,
            allow_rotational=self._options.allow_rotational, **more,
        )  # fmt: skip

    def _scratch_path(self) -> Path | None:
        path = self._options.disk_path
        return None if path is not None and (path / MANIFEST).exists() else path


def _row(param: nn.Parameter) -> list[Any]:
    """What a manifest says of a parameter; strides where they are not the usual ones."""
    row = [str(param.dtype), list(param.shape)]
    return row if param.is_contiguous() else [*row, list(param.stride())]
