"""Copies of what a session has: kept steps under other paths, and state for background saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from lightning_hetero._native.process import Owner
from lightning_hetero.runtime.budgets import Budgets
from lightning_hetero.runtime.construction import Construction
from lightning_hetero.runtime.directories import Directories
from lightning_hetero.runtime.initialize import Content
from lightning_hetero.runtime.linked_steps import link_step
from lightning_hetero.runtime.options import SessionOptions
from lightning_hetero.runtime.state_snapshot import StateSnapshot, take_snapshot
from lightning_hetero.store.format.earlier_runs import aside, refusal


class Copies(Budgets):
    """See :class:`Budgets` for its arguments."""

    def __init__(
        self, root: nn.Module, options: SessionOptions, content: Content | None = None, built: Construction | None = None,
        alignment_bytes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(root, options, content, built, alignment_bytes)
        self._owner = Owner()
        self.directories = Directories(root, self.blocks, options)
        self._state_snapshot: StateSnapshot | None = None  # a thread reads the store
        self._last_steps = self.steps  # of the last fit; a parked model may have been evaluated since

    def _check_process(self) -> None:
        if self.store is not None:
            self._owner.check("the offloaded model")

    def disk_root(self) -> Path:
        """An existing directory on the disk where files are or would be."""
        return self.directories.disk_root(self.store)

    def disk_roots(self) -> tuple[Path, ...]:
        """The same on each disk that has files of blocks."""
        return self.directories.disk_roots(self.store)

    def drain(self) -> None:
        """Waits for all updates under way."""
        self._check_process()
        if self.executor is not None:
            self.executor.drain()

    def commit(self) -> None:
        """Commits the writes of a checkpoint load, so that they survive."""
        if self.store is not None:
            self.store.commit()

    def snapshot(self, path: Path, leaving: Sequence[Path] = ()) -> None:
        """Links the last kept step to another path; see :func:`link_step`.

        Checkpoints ``leaving`` are removed before training goes on.
        """
        names = self.running.store.files.committed()
        link_step(self.disk_root(), path, names, leaving=(path, *leaving), collectives=self.options.collectives)

    def make_way(self) -> None:
        """Moves the last fit's kept step aside: the parked model will be trained anew in its store.

        Raises:
            ConfigError: There is a kept step, and ``new_run`` is false.
            StoreError: A system call failed.
        """
        steps, store = self._last_steps, self.store
        if store is None or store.files.directory is None or not steps.last_kept:
            return
        path = store.files.directory.path
        if not self.options.new_run:
            raise refusal(path, steps.last_kept)
        steps.put_aside(aside(path))

    def snapshot_state(self) -> StateSnapshot:
        """A snapshot of model and optimizers, for a thread that reads while training goes on.

        The caller closes it. Until then the store's directory stays.

        Raises:
            StoreError: A transfer or a system call failed.
        """
        self._check_process()
        self._end_snapshot()  # one at a time: linked files take space as training goes on
        self.drain()
        parts = [part for block in self.blocks for part in block.parts]
        slices = None if self.executor is None else self.executor.slices
        self._state_snapshot = take_snapshot(
            self.store, parts, self.disk_root(), room_bytes=self.directories.room_bytes(self.store),
            reads=None if slices is None else slices.reads,
        )  # fmt: skip
        return self._state_snapshot

    def _end_snapshot(self) -> None:
        if self._state_snapshot is not None:
            self._state_snapshot.wait()
            self._state_snapshot = None
