"""Which stores a fit begins or goes on with, where several ranks have some below one directory.

The first rank looks and decides, since all of them are on one machine; the others do the same.
"""

from __future__ import annotations

import json
import logging
import uuid
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_hetero import errors
from lightning_hetero.errors import ConfigError, HeteroError
from lightning_hetero.runtime.directories import existing
from lightning_hetero.store.common_steps import CommonStep
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.earlier_runs import make_way
from lightning_hetero.store.format.manifest import Member
from lightning_hetero.store.format.sets import Stores, place_of, take_back
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

    def clear() -> Options:
        make_way(root, new_run=new_run, keeps_own=own.ranks == 1)
        return {"id": uuid.uuid4().hex}

    chosen = _of_first(collectives, clear)
    return None if own.ranks == 1 else Member(set_id=str(chosen["id"]), set_number=1, ranks=own.ranks, rank=own.rank)


def go_on(place: Path, own: Slice, collectives: Collectives | None) -> tuple[SpreadStep, Member] | None:
    """A fit resumes from what the ranks of an earlier run have kept.

    Returns the step and the place of this rank's new store, if there were as many ranks as now:
    ``None``. Then the last record of this rank's store is that of the step.

    Raises:
        ConfigError: No step has been kept, or stores are missing.
        StoreBusyError: A living process uses a store there.
        StoreCorruptError: A store cannot be read, or is not of the same time as the others.
    """
    root = _same_root(place, own, collectives)

    def find() -> Options:
        with Stores(root) as stores:
            step = stores.common()
            if step is None:
                raise ConfigError(
                    f"store {str(root)!r} cannot be resumed from: no step has been committed yet. Start without ckpt_path."
                )
            stores.remove_but(step.set_id)
            row = asdict(step) | {"taken_back": sorted(step.taken_back)}
            return {"step": row, "id": uuid.uuid4().hex, "number": stores.next_number}

    found = _of_first(collectives, find)
    step = CommonStep(**{**found["step"], "taken_back": frozenset(found["step"]["taken_back"])})
    if step.ranks == own.ranks:
        with StoreFiles(place_of(root, own.rank, own.ranks)) as store:
            take_back(store, step.number)
        return None
    member = Member(set_id=found["id"], set_number=found["number"], ranks=own.ranks, rank=own.rank)
    return SpreadStep(Stores(root, locks=own.rank == 0), step, own.rank), member


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

    return tuple(_of_first(options.collectives, measure)["rates"])


def _same_root(place: Path, own: Slice, collectives: Collectives | None) -> Path:
    root = root_of(place, own)
    if collectives is not None and len({row[0] for row in collectives.agree([zlib.crc32(str(root).encode())])}) > 1:
        raise ConfigError(f"disk_path is {str(root)!r} on rank {own.rank}, and another path on other ranks. Give all the same one.")
    return root


def _of_first(collectives: Collectives | None, decide: Callable[[], Options]) -> Options:
    """What the first rank decides. Its errors are those of all."""
    if collectives is None:
        return decide()
    told, raised = "", None
    if collectives.rank == 0:
        try:
            told = json.dumps(["", decide()])
        except HeteroError as error:
            told, raised = json.dumps([type(error).__name__, str(error)]), error
    kind, value = json.loads(collectives.text_of_first(told))
    if raised is not None:
        raise raised
    if kind:
        raise getattr(errors, kind, HeteroError)(value)
    return dict(value)
