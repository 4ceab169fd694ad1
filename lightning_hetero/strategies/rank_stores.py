"""Which stores a fit begins or goes on with, where several ranks have some below one directory.

The first rank of each node looks at what is there, and they tell each other: nodes may have the
same directory, or a disk each. A store that several of them see belongs to the first of these. Then
all decide the same.
"""

from __future__ import annotations

import logging
import uuid
import zlib
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_hetero.errors import ConfigError
from lightning_hetero.runtime.directories import existing
from lightning_hetero.runtime.of_each import of_each, of_first
from lightning_hetero.store.common_steps import CommonStep, RankStore, common_step, has_begun
from lightning_hetero.store.format import sets
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.earlier_runs import make_way, name_of
from lightning_hetero.store.format.manifest import MANIFEST, Member, manifest_at
from lightning_hetero.store.format.sets import Stores, members_in, remove_but, remove_sets, take_back
from lightning_hetero.store.format.stripes import check_is_no_copy, find_stripes
from lightning_hetero.store.live.blocks import Slice
from lightning_hetero.store.live.spread_step import SpreadStep
from lightning_hetero.untyped import Options

if TYPE_CHECKING:
    from lightning_hetero.lanes.collectives import Collectives
    from lightning_hetero.runtime.options import SessionOptions

log = logging.getLogger(__name__)


def root_of(place: Path, own: Slice) -> Path:
    """The directory below which all ranks have their stores, by that of one of them."""
    return place if own.ranks == 1 else place.parent


def begin(place: Path, own: Slice, collectives: Collectives | None, *, new_run: bool) -> Member | None:
    """A fit begins anew: sees to it that its stores write over no kept step.

    Returns the place of this rank's store in the set; ``None`` if it is the only one.

    Raises:
        ConfigError: There is a kept step, and ``new_run`` is false.
        StoreBusyError: A living process uses a store there.
        StoreError: It cannot be renamed.
    """
    root = _same_root(place, own, collectives)
    _clear(root, own, collectives, new_run=new_run)
    return None if own.ranks == 1 else _member(collectives, 1)


def find_disks(source: Path, collectives: Collectives | None, further: Sequence[Path]) -> None:
    """Looks for what stores below ``source`` have on further disks, in this run's directories.

    Raises:
        StoreBusyError: A living process uses a store there.
    """
    owned = _owned(source, collectives)

    def find() -> None:
        for path in sorted(owned):
            find_stripes(path, further)

    of_each(collectives, find)


def go_on(
    place: Path, own: Slice, collectives: Collectives | None, source: Path, *, new_run: bool
) -> tuple[SpreadStep, Member] | None:
    """A fit resumes from what the ranks of an earlier run have kept below ``source``.

    Returns the step and the place of this rank's new store. ``None`` if there were as many ranks
    and nodes as now, and they go on where their stores are: then the last record of this rank's
    store is that of the step.

    Raises:
        ConfigError: No step has been kept, or stores are missing. Or ``source`` is not this run's
            own directory, this has a kept step, and ``new_run`` is false.
        StoreBusyError: A living process uses a store there.
        StoreCorruptError: A store cannot be read, or is not of the same time as the others.
    """
    root = _same_root(place, own, collectives)
    if not (root.is_dir() and source.samefile(root)):
        return _begin_at(source, place, own, collectives, new_run=new_run)
    owned = _owned(root, collectives)
    rows = _rows(root, owned, collectives)
    step, last = _common(root, rows), max(row.set_number for row in rows)
    member = _member(collectives, 1 + last, next(origin for row, origin in rows.items() if row.set_id == step.set_id))
    goes_on = (step.ranks, step.nodes) == (member.ranks, member.nodes)

    def clear() -> bool:
        if goes_on and not (step.is_whole and (place / MANIFEST).is_file()):
            raise ConfigError(
                f"of {step.nodes} nodes that hold the model, one does not have its stores below {str(root)!r}. Go on with another "
                f"number of nodes, such as num_nodes=1 on one that has them, and with {step.nodes} nodes later."
            )
        for path in owned:
            check_is_no_copy(path, manifest_at(path))
        remove_but(step.set_id, owned, root)
        return True

    of_each(collectives, clear)
    if goes_on:
        with StoreFiles(place) as store:
            take_back(store, step.number)
        return None
    return SpreadStep(Stores(root, owned=owned), step, member.rank, _node(collectives)), member


def _begin_at(
    source: Path, place: Path, own: Slice, collectives: Collectives | None, *, new_run: bool
) -> tuple[SpreadStep, Member] | None:
    """Begins a set at the step of stores elsewhere, unless an earlier run has: then it goes on."""
    root, owned = root_of(place, own), _owned(source, collectives)
    step = _common(source, _rows(source, owned, collectives))

    def name() -> str:
        with Stores(source, owned=owned) as stores:
            first = stores.at(step)[0]
            return "" if first.record is None else name_of(first, first.record)

    origin = of_first(collectives, name)
    begun = (
        [] if new_run else [row for row, other in _rows(root, _owned(root, collectives), collectives).items() if other == origin]
    )
    if has_begun(begun):
        log.warning(
            "disk_path %r holds what an earlier run with this ckpt_path has kept: training goes on from there. To begin again at "
            "ckpt_path, pass new_run=True to the strategy.", str(root),
        )  # fmt: skip
        return go_on(place, own, collectives, root, new_run=False)
    _clear(root, own, collectives, new_run=new_run, source=source, unfinished={row.set_id for row in begun})
    member = _member(collectives, 1, origin)
    return SpreadStep(Stores(source, owned=owned), step, member.rank, _node(collectives), stays=True), member


def last_step(root: Path, collectives: Collectives | None, opened: ExitStack) -> list[StoreFiles]:
    """The stores that have the last kept step below a directory, which is only read.

    ``opened`` closes them. Nodes with a disk each read the same step, each from its own.

    Raises:
        ConfigError: No step has been kept, or stores are missing.
        StoreBusyError: A living process of another run uses one of them.
        StoreCorruptError: They are not of the same time.
    """
    if collectives is None:
        return sets.last_step(root, opened)
    owned, found = _owned(root, collectives), list[StoreFiles]()
    step = _common(root, _rows(root, owned, collectives))
    of_each(collectives, lambda: found.extend(opened.enter_context(Stores(root, owned=owned)).at(step, collectives.node)))
    return found


def _clear(
    root: Path, own: Slice, collectives: Collectives | None, *, new_run: bool, source: Path | None = None,
    unfinished: Collection[str] = (),
) -> None:  # fmt: skip
    """Sees to it that a new set writes over no kept step. Sets that are ``unfinished`` go."""
    owned = _owned(root, collectives)

    def clear() -> None:
        remove_sets(unfinished, owned, root)
        if owned:
            make_way(root, new_run=new_run, source=source, keeps_own=own.ranks == 1)

    of_each(collectives, clear)


def _rows(root: Path, owned: Collection[Path], collectives: Collectives | None) -> dict[RankStore, str | None]:
    """All stores that any rank sees below a directory, and what their sets have begun from."""

    def look() -> list[tuple[RankStore, str | None]]:
        with Stores(root, owned=owned) as stores:
            return list(zip(stores.rows(), (member.origin for member, _ in stores.all), strict=True))

    return {row: origin for seen in of_each(collectives, look) for row, origin in seen}


def _common(root: Path, rows: Collection[RankStore]) -> CommonStep:
    step = common_step(sorted(rows, key=lambda row: (row.set_id, row.rank)))
    if step is None:
        raise ConfigError(f"store {str(root)!r} cannot be resumed from: no step has been committed yet. Start without ckpt_path.")
    return step


def _node(collectives: Collectives | None) -> int:
    return 0 if collectives is None else collectives.node


def _member(collectives: Collectives | None, number: int, origin: str | None = None) -> Member:
    """The place of this rank's store in a new set."""
    rank, ranks, nodes = (0, 1, 1) if collectives is None else (collectives.rank, collectives.ranks, collectives.nodes)
    set_id = of_first(collectives, lambda: uuid.uuid4().hex)
    return Member(set_id=set_id, set_number=number, ranks=ranks, rank=rank, nodes=nodes, origin=origin)


def _owned(root: Path, collectives: Collectives | None) -> frozenset[Path]:
    """The stores that this rank locks and removes, for all ranks."""
    every = of_each(collectives, lambda: members_in(root) if collectives is None or collectives.shard == 0 else {})
    rank = 0 if collectives is None else collectives.rank
    return frozenset(path for key, path in every[rank].items() if not any(key in others for others in every[:rank]))


def disk_rates(options: SessionOptions) -> tuple[float, ...]:
    """How fast each disk of a run is, relative to the others. The first rank measures, alone.

    Raises:
        ConfigError: One of them cannot be a disk tier.
        StoreError: A transfer failed.
    """
    disks, engine = options.disk_paths, options.engine
    if len(disks) < 2 or engine.emulated_bytes_per_s:
        return ()

    def measure() -> Options:
        from lightning_hetero.profiling.disks import measure_disks

        each = measure_disks(
            tuple(map(existing, disks)), replace(engine, num_disks=1), allow_tmpfs=options.allow_tmpfs,
            allow_rotational=options.allow_rotational,
        )  # fmt: skip
        log.info("blocks are dealt to %d disks by what each moves: %s.", len(disks), "; ".join(map(str, each)))
        return {"rates": [disk.both_bytes_per_s for disk in each]}

    return tuple(of_first(options.collectives, measure)["rates"])


def _same_root(place: Path, own: Slice, collectives: Collectives | None) -> Path:
    root = root_of(place, own)
    if collectives is not None:
        first = collectives.node * collectives.shards
        rows = collectives.agree([zlib.crc32(str(root).encode())])[first : first + collectives.shards]
        if len({number for (number,) in rows}) > 1:
            raise ConfigError(
                f"disk_path is {str(root)!r} on rank {collectives.rank}, and another path on other ranks of its node. Give all of "
                f"them the same one."
            )
    return root
