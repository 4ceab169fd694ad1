"""Sets of stores: those that the ranks of a run have made together, below one directory.

Rank ``r`` of ``n`` has the store ``rank-r-of-n`` in it, or ``rank-r-of-n-on-m-nodes`` if they are
on ``m`` nodes, which may have the same directory or a disk each. A run of one process has its store
in the directory itself, as a set of one. Which set counts and at which step its ranks go on is
decided in ``store.common_steps``; here it is read and written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lightning_hetero.errors import ConfigError
from lightning_hetero.store.common_steps import CommonStep, RankStore, common_step, has_all_of
from lightning_hetero.store.format.audit import StoreFiles, repeat_record
from lightning_hetero.store.format.directory import OF_RANK, remove_store
from lightning_hetero.store.format.manifest import MANIFEST, Member, manifest_at, member_of
from lightning_hetero.store.format.pins import unpin
from lightning_hetero.store.format.stored_model import last_kept


def place_of(root: Path, rank: int, ranks: int, nodes: int = 1) -> Path:
    """Where a rank has its store."""
    return root if ranks == 1 else root / f"rank-{rank}-of-{ranks}{'' if nodes == 1 else f'-on-{nodes}-nodes'}"


def root_of(place: Path, ranks: int) -> Path:
    """The inverse of :func:`place_of`: what a user passes as ``disk_path`` and ``ckpt_path``."""
    return place if ranks == 1 else place.parent


def stores_in(root: Path) -> list[Path]:
    """The stores of a directory: its own, and those of ranks."""
    if not root.is_dir():
        return []
    places = [root, *(entry for entry in sorted(root.iterdir()) if OF_RANK.fullmatch(entry.name) and not entry.is_symlink())]
    return [place for place in places if (place / MANIFEST).is_file()]


def members_in(root: Path) -> dict[tuple[str, int], Path]:
    """The stores of a directory by set and rank.

    Raises:
        ConfigError: One of them is none of ours.
    """
    found = {}
    for path in stores_in(root):
        member = _member_at(path, root, manifest_at(path))
        found[member.set_id, member.rank] = path
    return found


def _member_at(path: Path, root: Path, manifest: Mapping[str, Any]) -> Member:
    """The place of a store in its set, which its directory's name says, too."""
    member = member_of(path, manifest)
    own = place_of(root, member.rank, member.ranks, member.nodes)
    if path not in (own, root):
        raise ConfigError(
            f"{str(path)!r} is the store of rank {member.rank} of {member.ranks}, which belongs into {str(own)!r}. Give it its own "
            f"name again."
        )
    return member


def has_ranks(root: Path) -> bool:
    """Whether a directory has stores of several ranks."""
    return any(place != root for place in stores_in(root))


def last_step(path: Path, opened: ExitStack) -> list[StoreFiles]:
    """The stores that have the last kept step of a directory, by rank, each at that step.

    Args:
        path: A store, or the directory of those of ranks.
        opened: Closes them.

    Raises:
        ConfigError: A store cannot be read, or is missing.
        StoreBusyError: A living process uses one of them.
        StoreCorruptError: They are not of the same time.
    """
    if not has_ranks(path):
        return [last_kept(opened.enter_context(StoreFiles(path)), opened)]
    stores = opened.enter_context(Stores(path))
    step = stores.common()
    if step is None:
        raise ConfigError(f"the stores in {str(path)!r} have no commit record: no step was written.")
    return stores.at(step)


class Stores:
    """All stores of a directory, locked against their next users until they are closed.

    Args:
        root: The directory.
        owned: Those that are locked, and may be removed; ``None``: all. Another rank has the rest.

    Attributes:
        all: Each store, and its place in its set.

    Raises:
        ConfigError: One of them cannot be read.
        StoreBusyError: A living process uses one of them.
    """

    def __init__(self, root: Path, *, owned: Collection[Path] | None = None) -> None:
        self.root, places = root, stores_in(root)
        self.owned = places if owned is None else owned
        self._opened = ExitStack()
        self.all: list[tuple[Member, StoreFiles]] = []
        with ExitStack() as undo:
            undo.callback(self._opened.close)
            for path in places:
                store = self._opened.enter_context(StoreFiles(path, locks=path in self.owned))
                self.all.append((_member_at(path, root, store.manifest), store))
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Gives the stores free; a second call does nothing."""
        self._opened.close()

    def common(self) -> CommonStep | None:
        """The step from which a run goes on; see :func:`common_step`."""
        return common_step(self.rows())

    def rows(self) -> list[RankStore]:
        """What each store says of itself."""
        return [
            RankStore(
                set_id=m.set_id, set_number=m.set_number, ranks=m.ranks, rank=m.rank, nodes=m.nodes,
                numbers=tuple(record.step for record in store.records),
            )
            for m, store in self.all
        ]  # fmt: skip

    def of_set(self, step: CommonStep) -> list[StoreFiles]:
        """The stores of a step's set by rank, those that have the step.

        Their ``record`` is that of the step. If that is not of a kept step, they are pins.
        """
        found = {}
        for member, store in self.all:
            records = [record for record in store.records if record.step == step.number]
            if member.set_id == step.set_id and records:
                store.record = records[-1]
                found[member.rank] = last_kept(store, self._opened)
        return [store for _, store in sorted(found.items())]

    def at(self, step: CommonStep, node: int = 0) -> list[StoreFiles]:
        """The same of one node that has all of the model: ``node``, or the first one that has.

        Raises:
            ConfigError: Of no node all stores are here.
        """
        rows = [row for row in self.rows() if row.set_id == step.set_id and step.number in row.numbers]
        nodes = [other for other in range(step.nodes) if has_all_of(other, rows)]
        if not nodes:
            raise ConfigError(
                f"{str(self.root)!r} does not have the step from which the other nodes go on. Copy the directory of one of them "
                f"here."
            )
        chosen = node if node in nodes else nodes[0]
        ranks = sorted((row.rank, row.node) for row in rows)
        return [store for store, (_, other) in zip(self.of_set(step), ranks, strict=True) if other == chosen]

    def places(self, step: CommonStep) -> list[Path]:
        """The directories of the stores of a step's set which this process may remove."""
        return [store.path for member, store in self.all if member.set_id == step.set_id and store.path in self.owned]

    def remove_all(self, *, root: bool) -> None:
        """Removes all stores; ``root``: also the one that is no rank's."""
        for _, store in self.all:
            if root or store.path != self.root:
                remove(store.path, self.root)


def remove(path: Path, root: Path) -> None:
    """Removes a store, which nobody uses, with its pins."""
    unpin(path)
    remove_store(path)
    if path != root:
        os.rmdir(path)


def remove_but(set_id: str, owned: Collection[Path], root: Path) -> None:
    """Removes those stores that belong to other sets; see :func:`_remove_where`."""
    _remove_where(lambda other: other != set_id, owned, root)


def remove_sets(set_ids: Collection[str], owned: Collection[Path], root: Path) -> None:
    """Removes those stores that belong to these sets; see :func:`_remove_where`."""
    _remove_where(lambda other: other in set_ids, owned, root)


def _remove_where(goes: Callable[[str], bool], owned: Collection[Path], root: Path) -> None:
    """Removes stores by their set.

    It opens no other store, since another rank may be removing that one.

    Raises:
        ConfigError: One of them cannot be read.
        StoreBusyError: A living process uses one of them.
    """
    for path in sorted(owned):
        with StoreFiles(path) as store:
            if goes(member_of(path, store.manifest).set_id):
                remove(path, root)


def take_back(store: StoreFiles, number: int) -> None:
    """Makes the record with this number the last one again, by a copy behind those after it.

    Raises:
        StoreError: It cannot be written.
    """
    if store.records[-1].step != number:
        chosen = next(record for record in reversed(store.records) if record.step == number)
        repeat_record(store.path, chosen.sequence, store.records[-1].sequence + 1)
