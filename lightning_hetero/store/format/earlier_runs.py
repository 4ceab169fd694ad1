"""Stores of earlier runs at a ``disk_path``: continued or put aside, never overwritten."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lightning_hetero.errors import ConfigError, StoreError
from lightning_hetero.store.format.audit import CommitRecord, StoreFiles
from lightning_hetero.store.format.manifest import MANIFEST
from lightning_hetero.store.format.record import global_step_of
from lightning_hetero.store.format.sets import Stores, stores_in
from lightning_hetero.store.format.snapshots import remove_unfinished, snapshot, sync
from lightning_hetero.store.format.stored_model import has_lost_records, last_kept
from lightning_hetero.store.format.stripes import Balance

log = logging.getLogger(__name__)

_UNREADABLE = "commit records that cannot be read"
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}


def make_way(path: Path, *, new_run: bool, source: Path | None = None, keeps_own: bool = True) -> None:
    """Sees to it that a new store at ``path`` writes over no kept step.

    Args:
        path: The run's ``disk_path``; it may be missing.
        new_run: Put a store that has a kept step aside: it is renamed, and a warning names its new
            path.
        source: The store or snapshot that the new store begins as. It needs an empty directory, so
            files of a store without a kept step are removed, too.
        keeps_own: The store of one process that is there without a kept step is left, for the run
            to take it over.

    Raises:
        ConfigError: A store with a kept step is there and ``new_run`` is false, or it is of another
            version.
        StoreBusyError: A living process uses it.
        StoreError: It cannot be renamed.
    """
    if path.is_symlink() or not stores_in(path):
        return  # whether it may be used at all is looked at when it is opened
    with Stores(path) as stores:  # their locks are held until they have another name
        if kept := _kept_in(stores):
            if not new_run:
                raise refusal(path, kept, source)
            log.warning("disk_path %r held %s. It has been put aside: %r.", str(path), kept, str(_put_aside(path)))
        else:
            stores.remove_all(root=source is not None or not keeps_own)


def _kept_in(stores: Stores) -> str:
    """What would be lost with all stores of a directory, in words; empty if nothing would."""
    try:
        step = None if len(stores.all) == 1 else stores.common()
    except ConfigError:
        step = None  # not all of a set are here
    if step is None:
        return next(filter(None, (what_is_kept(store) for _, store in stores.all)), "")
    kept = {what_is_kept(store) for store in stores.at(step)}
    return kept.pop() if len(kept) == 1 else ""


def refusal(path: Path, kept: str, source: Path | None = None) -> ConfigError:
    """The refusal to write over a store.

    Args:
        path: The store.
        kept: What it keeps; see :func:`what_is_kept`.
        source: The store or snapshot that the run begins at.
    """
    begin = "begin anew" if source is None else f"begin at ckpt_path {str(source)!r}"
    if kept == _UNREADABLE:
        go_on = "No run can go on from them: to do so, bring the file COMMIT back from a copy of the store."
    else:
        go_on = f"To go on from it, pass ckpt_path={str(path)!r} to trainer.fit."
    return ConfigError(
        f"disk_path {str(path)!r} holds {kept} of an earlier run, which this run would write over. {go_on} To {begin}, pass "
        f"new_run=True to the strategy: the store is then renamed, and stays. Or choose another disk_path."
    )


def what_is_kept(store: StoreFiles) -> str:
    """What would be lost with a store, in words. Unreadable records count as kept steps."""
    try:
        with ExitStack() as opened:
            kept = last_kept(store, opened)
            step = None if kept.record is None else global_step_of(kept.record.user)
    except ConfigError:
        return "a commit record that cannot be read"
    if step is not None:
        return f"step {step}"
    return _UNREADABLE if has_lost_records(store) else ""


def aside(path: Path) -> Path:
    """A free path beside ``path`` for what is put aside."""
    number = 1
    while os.path.lexists(found := path.with_name(f"{path.name}.earlier-{number}")):
        number += 1
    return found


def _put_aside(path: Path) -> Path:
    """Renames a store's directory, in one step; a process that dies leaves it under either name."""
    while True:
        target = aside(path)
        try:
            os.rename(path, target)
            sync(path.parent)
        except OSError as error:
            if error.errno in _TAKEN:
                continue
            raise StoreError(
                f"disk_path {str(path)!r}, which an earlier run has left, cannot be renamed to {str(target)!r}: {error.strerror}. "
                f"Move what it holds elsewhere yourself, or choose another disk_path, such as a directory below it."
            ) from error
        return target


def bring(source: Path, target: Path, further: Sequence[Path] = (), balance: Balance | None = None) -> None:
    """Copies the last step of an unused store to ``target``, whose manifest names the origin.

    With ``further`` directories it is dealt to several disks.

    Raises:
        ConfigError: ``source`` has no step, or ``target`` is not empty.
        StoreBusyError: A process uses ``source``.
        StoreError: A system call failed.
    """
    remove_unfinished(target)
    with StoreFiles(source) as store:
        if store.record is None:
            raise ConfigError(f"store {str(source)!r} has no valid record: {'; '.join(map(str, store.notes))}.")
        origin = name_of(store, store.record)
        snapshot(source, target, store.record.files, origin=origin, further=further, balance=balance)


def comes_from(path: Path, source: Path) -> bool:
    """Whether :func:`bring` made ``path`` of the present step of ``source``, and it keeps a step.

    Raises:
        ConfigError: One of them cannot be read.
        StoreBusyError: A living process uses one of them.
    """
    if not (path / MANIFEST).is_file():
        return False
    with StoreFiles(source) as theirs, StoreFiles(path) as ours:
        record = theirs.record
        return record is not None and ours.manifest.get("origin") == name_of(theirs, record) and bool(what_is_kept(ours))


def name_of(store: StoreFiles, record: CommitRecord) -> str:
    """A name for a record of a store: another record has another one."""
    blocks = [(b.id, b.step, b.write_id, b.slot, b.has_state) for b in record.blocks]
    rest = json.dumps([store.uuid.hex(), record.sequence, record.step, blocks]).encode()
    return hashlib.sha256(rest + record.user).hexdigest()
