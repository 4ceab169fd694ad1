"""A kept step under another path, by links: of one process, or of all ranks that share a model.

Each rank's snapshot is whole before the directory with all of them gets its name. So a kill leaves
the checkpoint of all ranks or none, and one that was there before stays until then.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from lightning_hetero.ir.schedule import NO_BLOCK
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.runtime.of_each import of_each, of_first
from lightning_hetero.store.format.sets import place_of
from lightning_hetero.store.format.snapshots import check_room, check_target, put, remove_unfinished, room_for, snapshot
from lightning_hetero.store.volume import disk_error


def link_step(
    source: Path, target: Path, names: Collection[str], *, leaving: Iterable[Path], collectives: Collectives | None
) -> None:
    """Makes a snapshot of the last step of a store, and of those of the other ranks.

    It replaces a checkpoint at ``target``. All ranks call it, with the same paths.

    Args:
        source: The store of this rank.
        target: Where the snapshot goes.
        names: The slot and state files that the last record names.
        leaving: Checkpoints that are removed before training goes on.
        collectives: Those of the ranks; ``None``: there is one.

    Raises:
        ConfigError: Something else is at ``target``.
        OutOfDiskError: A disk has no room for it, or for the fresh files that training then needs.
        StoreBusyError: A process uses the checkpoint at ``target``.
        StoreError: A system call failed.
    """
    if collectives is None:
        check_room(target, [room_for(source, target, names, leaving=leaving)])
        remove_unfinished(target)
        snapshot(source, target, names, may_replace=True)
        return
    collectives.meet("CHECKPOINT", NO_BLOCK)
    first = collectives.node * collectives.shards

    def own(path: Path) -> Path:
        return place_of(path, collectives.rank, collectives.ranks, collectives.nodes)

    def refuse() -> None:
        check_target(target, may_replace=True)
        check_room(target, rooms[first : first + collectives.shards])
        remove_unfinished(target)

    rooms = of_each(collectives, lambda: room_for(source, own(target), names, leaving=map(own, leaving)))
    _node_by_node(collectives, refuse)
    fresh = target.with_name(f".{target.name}.{of_first(collectives, lambda: uuid.uuid4().hex)[:8]}.partial")
    try:
        of_each(collectives, lambda: snapshot(source, own(fresh), names))
        _node_by_node(collectives, lambda: _put(fresh, target))
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _node_by_node(collectives: Collectives, action: Callable[[], None]) -> None:
    """What the first rank of each node does, one after the other: they may have one directory."""
    for node in range(collectives.nodes):
        is_here = (node, 0) == (collectives.node, collectives.shard)
        of_each(collectives, action if is_here else _nothing)


def _nothing() -> None:
    """Of the other ranks."""


def _put(fresh: Path, target: Path) -> None:
    try:
        if fresh.is_dir():
            put(fresh, target)
    except OSError as error:
        raise disk_error(error, f"the checkpoint {str(target)!r} cannot be made: {error}. Choose another path.") from error
