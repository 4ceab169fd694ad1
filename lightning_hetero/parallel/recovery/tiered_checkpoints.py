"""Saves in the background and loads from the nearest place, independent of Lightning."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_hetero._native.process import Owner
from lightning_hetero.errors import CheckpointMissingError, CheckpointWriteError, ConfigError, HeteroError
from lightning_hetero.parallel.recovery.agreement import agree, maps_in
from lightning_hetero.parallel.recovery.layer_map import MAP, METADATA, REST, LayerMap, is_save
from lightning_hetero.parallel.recovery.peers import PeerTransfers
from lightning_hetero.parallel.recovery.reader import TieredReader
from lightning_hetero.parallel.recovery.tiers import CheckpointTier
from lightning_hetero.parallel.recovery.writer import REMOTE, LayerPlanner, LayerWriter, SaveWork, own_name
from lightning_hetero.units import MIB, format_bytes

log = logging.getLogger(__name__)

_ALONE = "torch.distributed is disabled, unavailable or uninitialized"  # torch's warning; a single process is fine

_Path = str | os.PathLike[str]
Target = Callable[[tuple[Any, ...], Tensor], Tensor | None]
"""The target of a tensor, by its path in the state and a meta tensor; ``None``: not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The result of a load.

    Attributes:
        state: Nested dictionaries of tensors and other saved objects.
        rest: The object saved as ``rest``.
        own: The object that this rank saved as ``own``; ``None`` if there was no such rank.
        layer_map: The save's map.
    """

    state: dict[str, Any]
    rest: bytes
    own: bytes | None
    layer_map: LayerMap


class TieredCheckpoints:
    """Saves a state on several tiers, in the background, and loads it from the nearest.

    :meth:`save`, :meth:`load` and :meth:`remove` are called by all ranks of the default process
    group, in the same order, from one thread. Background work uses a group of its own. The next
    call raises an error of it, on every rank.

    Args:
        memory: A folder in memory, such as one in ``/dev/shm``; ``None``: no such tier.
        disk: A folder on the local disk; ``None``: no such tier.
        keep: Number of saves that the local tiers keep; at least 1.
        piece_bytes: Bytes under one checksum, and so the least that is read.
    """

    def __init__(self, *, memory: _Path | None = None, disk: _Path | None = None, keep: int = 2, piece_bytes: int = MIB) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep={keep!r}; allowed: a whole number of saves, at least 1.")
        if isinstance(piece_bytes, bool) or not isinstance(piece_bytes, int) or piece_bytes < 1:
            raise ConfigError(f"piece_bytes={piece_bytes!r}; allowed: a whole number of bytes, at least 1.")
        if memory is not None and memory == disk:
            raise ConfigError(f"memory and disk are both {str(disk)!r}; allowed: two folders, or one of them.")
        self._local: list[CheckpointTier] = []
        if memory is not None:
            self._local.append(CheckpointTier("memory", memory, durable=False))
        if disk is not None:
            self._local.append(CheckpointTier("disk", disk))
        for tier in self._local:
            if not tier.is_local:
                raise ConfigError(f"{tier}; allowed: a folder of this machine. Remote copies are at the paths of the checkpoints.")
        self._keep, self._piece_bytes = keep, piece_bytes
        self._newest = 0.0  # order of the newest known save
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._owner = Owner()  # the process with the background thread
        self._world: Any = None
        self._peers: PeerTransfers | None = None
        self._group: Any = None
        self.bytes_read: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Drops objects of this process: strategies are sent to the processes that they start."""
        self.wait()
        return self.__dict__ | {"_executor": None, "_jobs": [], "_world": None, "_peers": None, "_group": None}

    # ---- saving ----------------------------------------------------------------------------------

    def save(
        self,
        state: dict[str, Any],
        path: _Path,
        *,
        step: int,
        rest: bytes = b"",
        own: bytes = b"",
        done: Callable[[], None] | None = None,
    ) -> None:
        """Copies the state, and writes the copy in the background.

        Args:
            state: Nested dictionaries; tensors may be sharded, and each rank may have other ones.
            path: The remote copy's path or fsspec URL, which all ranks reach.
            step: The optimizer step.
            rest: Other objects; rank 0's counts.
            own: An object that only this rank needs.
            done: Called after the last read, in any case. With it the state is not copied and must
                not change; its tensors may be handles (``handles.offloaded_tensor``), which are
                read one by one.

        Raises:
            CheckpointWriteError: An earlier save failed.
        """
        with ExitStack() as undo:
            if done is not None:
                undo.callback(done)
            self.wait()  # one save at a time: the next one reuses the memory of its copy
            self._connect()
            remote = CheckpointTier(REMOTE, path)
            warnings.filterwarnings("ignore", _ALONE)
            # A stager for each save: torch 2.11 closes it after the first.
            staged: Any = DefaultStager(StagingOptions(False, False, False, False)).stage(state) if done is None else state
            self._submit(f"step {step} to {remote}", self._write, staged, remote, step, rest, own, done=done)
            undo.pop_all()

    def _write(self, state: dict[str, Any], remote: CheckpointTier, step: int, rest: bytes, own: bytes) -> None:
        planner = LayerPlanner()
        writer = LayerWriter(
            planner,
            self._local,
            path=_url(remote),
            step=step,
            rest=rest,
            own=own,
            after=self._newest,
            piece_bytes=self._piece_bytes,
        )
        metadata: Any = save(state, storage_writer=writer, planner=planner, process_group=self._group)
        layer_map: LayerMap = metadata.__dict__.pop("layer_map")
        content = pickle.dumps(metadata)
        layer_map = dataclasses.replace(layer_map, metadata_crc32=zlib.crc32(content))
        work = writer.work
        self._publish_locally(writer, work, layer_map, content)
        self._newest = layer_map.order
        self._together(lambda: writer.upload(remote))
        self._together(lambda: _publish(remote, work, layer_map, content))
        for tier in self._local:
            if tier.name in work.leads:
                self._retain(tier)

    def _publish_locally(self, writer: LayerWriter, work: SaveWork, layer_map: LayerMap, metadata: bytes) -> None:
        for name, _, tiers in work.files:
            if writer.sums[name] != layer_map.files[name].crc32:  # for example a buffer that differs between replicas
                for tier in self._local:
                    if tier.name in tiers:
                        tier.remove(work.save, name)
        for tier in self._local:
            if tier.name in work.leads:
                tier.publish(f"{work.save}/{METADATA}", [metadata])
                tier.publish(f"{work.save}/{MAP}", [layer_map.encode()])

    def _together(self, action: Any) -> None:
        """Runs work on every rank and waits for all; raises on all ranks if it failed on one."""
        failed = ""
        try:
            action()
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        reports = [failed] if self._peers is None else self._peers.gather(failed)
        errors = [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report]
        if errors:
            raise CheckpointWriteError("; ".join(errors))

    def _retain(self, tier: CheckpointTier) -> None:
        kept = sorted(maps_in(tier).values(), key=lambda m: m.order)[-self._keep :]
        names = {layer_map.save for layer_map in kept}
        for name in filter(is_save, tier.list()):
            if name not in names:
                tier.remove(name, MAP)  # from here on it is no save
                tier.remove(name)

    def remove(self, path: _Path) -> None:
        """Removes a checkpoint from all tiers after the current write, unless that fails."""
        self._connect()
        self._submit(f"the removal of {os.fspath(path)}", self._remove, CheckpointTier(REMOTE, path))

    def _remove(self, remote: CheckpointTier) -> None:
        url = _url(remote)
        for tier in self._local:
            for name, layer_map in maps_in(tier).items():
                if layer_map.path == url:
                    tier.remove(name, MAP)
                    tier.remove(name)
        if self._peers is None or self._peers.rank == 0:
            remote.remove()

    def _submit(self, what: str, job: Any, *arguments: Any, done: Callable[[], None] | None = None) -> None:
        if self._executor is None:
            self._owner = Owner()
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._owner.check("the writer of checkpoints")
        before = self._jobs[-1] if self._jobs else None

        def run() -> None:
            with ExitStack() as ends:
                if done is not None:
                    ends.callback(done)
                if before is not None and before.exception() is not None:
                    return  # the earlier error is raised; a checkpoint stays if its successor failed
                try:
                    job(*arguments)
                except CheckpointException as error:  # it is no Exception
                    failed = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())
                    raise CheckpointWriteError(f"writing {what} failed: {failed}") from error
                except Exception as error:
                    raise CheckpointWriteError(f"writing {what} failed: {error}") from error

        self._jobs.append(self._executor.submit(run))

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            CheckpointWriteError: A write failed.
        """
        if self._jobs:
            self._owner.check("the writer of checkpoints")
        jobs, self._jobs = self._jobs, []
        errors = [error for job in jobs if (error := job.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Waits and ends the background thread, which starts again on demand."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
            self._executor = None

    # ---- loading ---------------------------------------------------------------------------------

    def load(
        self,
        path: _Path | None,
        state: dict[str, Any] | None = None,
        *,
        place: Target | None = None,
        filled: Callable[[Tensor], object] | None = None,
        strict: bool = True,
        folders: Sequence[_Path] = (),
        required: bool = True,
    ) -> Loaded | None:
        """Loads a save, each chunk from the nearest place that has it complete.

        Args:
            path: The path of the checkpoint; ``None``: the newest complete save of all.
            state: Tensors to load into, possibly sharded; ``None``: everything, into new tensors.
            place: Without ``state``: returns the target of each tensor. A tensor without a target
                is not read and is on the meta device in the result.
            filled: Called for each tensor that has its content. With it one file at a time is in
                memory.
            strict: Whether to refuse a state with entries that were not saved.
            folders: For ``path=None``: other folders with checkpoints, beside the local tiers.
            required: Whether to raise without a save; otherwise the result is ``None``.

        Raises:
            CheckpointMissingError: There is no such save, or it is incomplete.
            CheckpointWriteError: An earlier save failed.
        """
        self.wait()
        self._connect()
        if self._peers is not None:
            self._peers.gather(None)  # another rank's writer may still remove saves in a shared folder
        warnings.filterwarnings("ignore", _ALONE)
        rank = 0 if self._peers is None else self._peers.rank
        target = None if path is None else CheckpointTier(REMOTE, path)
        remotes = [_url(target)] if target is not None else _children(folders) if rank == 0 else []
        agreed = agree(
            self._local,
            remotes,
            path=None if target is None else _url(target),
            rank=rank,
            gather=(lambda value: [value]) if self._peers is None else self._peers.gather,
            make=lambda url: CheckpointTier(REMOTE, url),
        )
        if agreed is None:
            if not required:
                return None
            where = ", ".join([*map(str, self._local), *(map(str, [target] if target is not None else folders))])
            raise CheckpointMissingError(
                f"there is no complete save {'' if target is None else f'of {_url(target)} '}in {where or 'no place at all'}. "
                f"Pass the path of another checkpoint, or ckpt_path='newest' for the newest complete one."
            )
        layer_map = agreed.layer_map
        self._newest = max(self._newest, agreed.newest)  # later saves are newer than saves after the loaded one
        extra = [name for name in (REST, own_name(rank)) if name in layer_map.files]
        metadata = pickle.loads(agreed.metadata)
        reader = TieredReader(
            metadata,
            layer_map,
            local=self._local,
            remote=CheckpointTier(REMOTE, layer_map.path),
            peers=self._peers,
            holders=agreed.holders,
            extra=extra,
            filled=filled,
        )
        elsewhere: dict[Any, Tensor] = {}
        if state is None:
            state, elsewhere = _places(metadata, place or (lambda path, saved: torch.empty_like(saved, device="cpu")))
        planner = DefaultLoadPlanner(allow_partial_load=not strict)
        try:
            load(state, storage_reader=reader, planner=planner, process_group=self._group)
        except CheckpointException as error:  # every rank's errors in one
            causes = [e for e, _ in error.failures.values()]
            raise next((e for e in causes if isinstance(e, HeteroError)), causes[0]) from None
        for where, stand_in in elsewhere.items():
            set_element(state, where, stand_in)
        self.bytes_read = reader.bytes
        sources = ", ".join(f"{format_bytes(n)} from {source}" for source, n in reader.bytes.items() if n) or "nothing"
        log.info("Rank %d loaded step %d of %s: %s.", rank, layer_map.step, layer_map.path, sources)
        return Loaded(state=state, rest=reader.extra[REST], own=reader.extra.get(own_name(rank)), layer_map=layer_map)

    def _connect(self) -> None:
        """A CPU process group of our own: training's may be NCCL, and in use during writing."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is None or dist.get_world_size() == 1:
            self._world = self._group = self._peers = None
        elif world is not self._world:
            self.wait()
            self._world, self._group = world, dist.new_group(backend="gloo")
            self._peers = PeerTransfers(self._group)


def _places(metadata: Metadata, place: Target) -> tuple[dict[str, Any], dict[Any, Tensor]]:
    """A state to load into, and stand-ins of the tensors without a target by path."""
    state: dict[str, Any] = {}
    elsewhere: dict[Any, Tensor] = {}
    for key, entry in metadata.state_dict_metadata.items():
        path: Any = (metadata.planner_data or {}).get(key, (key,))
        value: Any = entry
        if isinstance(entry, TensorStorageMetadata):
            saved = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            value = place(path, saved)
            if value is None:
                elsewhere[path] = saved
                continue
        set_element(state, path, value)
    return state, elsewhere


def _url(tier: CheckpointTier) -> str:
    url: str = tier.fs.unstrip_protocol(tier.root)
    return url.rstrip("/")


def _children(folders: Sequence[_Path]) -> list[str]:
    """Checkpoints that these folders may have."""
    found = []
    for folder in folders:
        tier = CheckpointTier(REMOTE, folder)
        found += [f"{_url(tier)}/{name}" for name in tier.list()]
    return found


def _publish(remote: CheckpointTier, work: SaveWork, layer_map: LayerMap, metadata: bytes) -> None:
    """Completes the remote copy: its map for us, ``.metadata`` for torch's own readers."""
    if REMOTE not in work.leads:
        return
    remote.publish(f"{work.save}/{METADATA}", [metadata])
    remote.publish(f"{work.save}/{MAP}", [layer_map.encode()])
    remote.publish(REST, [work.blobs[REST]])
    remote.publish(METADATA, [metadata])
    for name in filter(is_save, remote.list()):
        if name != work.save:  # an earlier checkpoint of the same path
            remote.remove(name)
