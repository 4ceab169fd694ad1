"""Saves in the background, loads from the nearest place; without Lightning."""

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
from lightning_hetero.parallel.recovery.peers import Peers
from lightning_hetero.parallel.recovery.reader import TieredReader
from lightning_hetero.parallel.recovery.tiers import Tier
from lightning_hetero.parallel.recovery.writer import REMOTE, LayerPlanner, LayerWriter, Work, own_name
from lightning_hetero.units import MIB, format_bytes

log = logging.getLogger(__name__)

_ALONE = "torch.distributed is disabled, unavailable or uninitialized"  # torch warns of it; a single process is as good

_Path = str | os.PathLike[str]
Place = Callable[[tuple[Any, ...], Tensor], Tensor | None]
"""Where a tensor is loaded to, by its path in the state and one of its shape on the meta device; ``None``: it is not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a load gave.

    Attributes:
        state: Nested dictionaries of tensors, and of what else was saved with them.
        rest: What was saved as ``rest``.
        own: What this rank saved as ``own``; ``None`` if there was no such rank.
        layer_map: The save's map.
    """

    state: dict[str, Any]
    rest: bytes
    own: bytes | None
    layer_map: LayerMap


class TieredCheckpoints:
    """Saves a state on several tiers, in the background, and loads it from the nearest.

    :meth:`save`, :meth:`load` and :meth:`remove` are called by all ranks of the default process group, in the same order, from one
    thread. What goes on in the background uses a group of its own. An error there is raised by the next call, on every rank.

    Args:
        memory: A folder in memory, such as one in ``/dev/shm``; ``None``: no such tier.
        disk: A folder on the local disk; ``None``: no such tier.
        keep: How many saves the local tiers keep; at least 1.
        piece_bytes: What one checksum covers, and so the least that is read.
    """

    def __init__(self, *, memory: _Path | None = None, disk: _Path | None = None, keep: int = 2, piece_bytes: int = MIB) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep={keep!r}; allowed: a whole number of saves, at least 1.")
        if isinstance(piece_bytes, bool) or not isinstance(piece_bytes, int) or piece_bytes < 1:
            raise ConfigError(f"piece_bytes={piece_bytes!r}; allowed: a whole number of bytes, at least 1.")
        if memory is not None and memory == disk:
            raise ConfigError(f"memory and disk are both {str(disk)!r}; allowed: two folders, or one of them.")
        self._local: list[Tier] = []
        if memory is not None:
            self._local.append(Tier("memory", memory, durable=False))
        if disk is not None:
            self._local.append(Tier("disk", disk))
        for tier in self._local:
            if not tier.is_local:
                raise ConfigError(f"{tier}; allowed: a folder of this machine. Remote copies lie where checkpoints are saved to.")
        self._keep, self._piece_bytes = keep, piece_bytes
        self._newest = 0.0  # order of the newest save that is known
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._owner = Owner()  # where the background thread is
        self._world: Any = None
        self._peers: Peers | None = None
        self._group: Any = None
        self.bytes_read: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what lives in this process: strategies are sent to the processes that they start."""
        self.wait()
        return self.__dict__ | {"_executor": None, "_jobs": [], "_world": None, "_peers": None, "_group": None}

    # ---- saving -------------------------------------------------------------------------------------------------------------

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
            path: Where the remote copy goes: a path or an fsspec URL that all ranks reach.
            step: The optimizer step.
            rest: What is no tensor; rank 0's counts.
            own: What only this rank needs.
            done: Called when nothing is read any more, in any case. With it the state is not copied, because it stays as it is; its
                tensors may be handles (``runtime.handles``), which are read one by one.

        Raises:
            CheckpointWriteError: An earlier save failed.
        """
        with ExitStack() as undo:
            if done is not None:
                undo.callback(done)
            self.wait()  # one save at a time: its copy is the memory that this one takes
            self._connect()
            remote = Tier(REMOTE, path)
            warnings.filterwarnings("ignore", _ALONE)
            # A stager for each save: torch 2.11 closes it behind the first.
            staged: Any = DefaultStager(StagingOptions(False, False, False, False)).stage(state) if done is None else state
            self._submit(f"step {step} to {remote}", self._write, staged, remote, step, rest, own, done=done)
            undo.pop_all()

    def _write(self, state: dict[str, Any], remote: Tier, step: int, rest: bytes, own: bytes) -> None:
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

    def _publish_locally(self, writer: LayerWriter, work: Work, layer_map: LayerMap, metadata: bytes) -> None:
        for name, _, tiers in work.files:
            if writer.sums[name] != layer_map.files[name].crc32:  # a buffer that differs between replicas, say
                for tier in self._local:
                    if tier.name in tiers:
                        tier.remove(work.save, name)
        for tier in self._local:
            if tier.name in work.leads:
                tier.publish(f"{work.save}/{METADATA}", [metadata])
                tier.publish(f"{work.save}/{MAP}", [layer_map.encode()])

    def _together(self, action: Any) -> None:
        """Does it on every rank, and goes on when all have; raises on all if it failed on one."""
        failed = ""
        try:
            action()
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        reports = [failed] if self._peers is None else self._peers.gather(failed)
        errors = [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report]
        if errors:
            raise CheckpointWriteError("; ".join(errors))

    def _retain(self, tier: Tier) -> None:
        kept = sorted(maps_in(tier).values(), key=lambda m: m.order)[-self._keep :]
        names = {layer_map.save for layer_map in kept}
        for name in filter(is_save, tier.list()):
            if name not in names:
                tier.remove(name, MAP)  # from here on it is none
                tier.remove(name)

    def remove(self, path: _Path) -> None:
        """Removes a checkpoint from all tiers, once what is being written is written, and unless that fails."""
        self._connect()
        self._submit(f"the removal of {os.fspath(path)}", self._remove, Tier(REMOTE, path))

    def _remove(self, remote: Tier) -> None:
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
                    return  # what came before is raised; a checkpoint is not removed when its successor failed
                try:
                    job(*arguments)
                except Exception as error:
                    raise CheckpointWriteError(f"writing {what} failed: {error}") from error

        self._jobs.append(self._executor.submit(run))

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            CheckpointWriteError: Something could not be.
        """
        if self._jobs:
            self._owner.check("the writer of checkpoints")
        jobs, self._jobs = self._jobs, []
        errors = [error for job in jobs if (error := job.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Waits, and ends the background thread; it starts again when it is needed."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
            self._executor = None

    # ---- loading ------------------------------------------------------------------------------------------------------------

    def load(
        self,
        path: _Path | None,
        state: dict[str, Any] | None = None,
        *,
        place: Place | None = None,
        filled: Callable[[Tensor], object] | None = None,
        strict: bool = True,
        folders: Sequence[_Path] = (),
        required: bool = True,
    ) -> Loaded | None:
        """Loads a save, each chunk from the nearest place that has it whole.

        Args:
            path: The checkpoint that was saved there; ``None``: the newest complete save of all.
            state: Tensors to load into, sharded as they may be; ``None``: everything, into new ones.
            place: Without ``state``: which tensors to load, and into what. What has no place is not read; in what is returned it
                stays on the meta device.
            filled: Told of each tensor that has its content. With it one file at a time is in memory.
            strict: Refuse a state with entries that were not saved.
            folders: For ``path=None``: where else to look for checkpoints, beside the local tiers.
            required: Without a save, raise; else return ``None``.

        Raises:
            CheckpointMissingError: There is no such save, or it is incomplete.
            CheckpointWriteError: An earlier save failed.
        """
        self.wait()
        self._connect()
        if self._peers is not None:
            self._peers.gather(None)  # ranks that share a folder: another one's writer may still be removing saves there
        warnings.filterwarnings("ignore", _ALONE)
        rank = 0 if self._peers is None else self._peers.rank
        target = None if path is None else Tier(REMOTE, path)
        remotes = [_url(target)] if target is not None else _children(folders) if rank == 0 else []
        agreed = agree(
            self._local,
            remotes,
            path=None if target is None else _url(target),
            rank=rank,
            gather=(lambda value: [value]) if self._peers is None else self._peers.gather,
            make=lambda url: Tier(REMOTE, url),
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
        self._newest = max(self._newest, agreed.newest)  # what is saved from here on is newer than what came after this one
        extra = [name for name in (REST, own_name(rank)) if name in layer_map.files]
        metadata = pickle.loads(agreed.metadata)
        reader = TieredReader(
            metadata,
            layer_map,
            local=self._local,
            remote=Tier(REMOTE, layer_map.path),
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
            causes = [e for e, _ in error.failures.values() if isinstance(e, HeteroError)]
            raise (causes[0] if causes else error) from None
        for where, stand_in in elsewhere.items():
            set_element(state, where, stand_in)
        self.bytes_read = reader.bytes
        sources = ", ".join(f"{format_bytes(n)} from {source}" for source, n in reader.bytes.items() if n) or "nothing"
        log.info("Rank %d loaded step %d of %s: %s.", rank, layer_map.step, layer_map.path, sources)
        return Loaded(state=state, rest=reader.extra[REST], own=reader.extra.get(own_name(rank)), layer_map=layer_map)

    def _connect(self) -> None:
        """A process group of our own, for the CPU: training's may be NCCL, and may be in use while we write."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is None or dist.get_world_size() == 1:
            self._world = self._group = self._peers = None
        elif world is not self._world:
            self.wait()
            self._world, self._group = world, dist.new_group(backend="gloo")
            self._peers = Peers(self._group)


def _places(metadata: Metadata, place: Place) -> tuple[dict[str, Any], dict[Any, Tensor]]:
    """A state to load into, and, by their paths in it, stand-ins of the tensors that have no place."""
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


def _url(tier: Tier) -> str:
    url: str = tier.fs.unstrip_protocol(tier.root)
    return url.rstrip("/")


def _children(folders: Sequence[_Path]) -> list[str]:
    """Checkpoints that may lie in these folders."""
    found = []
    for folder in folders:
        tier = Tier(REMOTE, folder)
        found += [f"{_url(tier)}/{name}" for name in tier.list()]
    return found


def _publish(remote: Tier, work: Work, layer_map: LayerMap, metadata: bytes) -> None:
    """The remote copy is complete: by its map for us, by ``.metadata`` for torch's own readers."""
    if REMOTE not in work.leads:
        return
    remote.publish(f"{work.save}/{METADATA}", [metadata])
    remote.publish(f"{work.save}/{MAP}", [layer_map.encode()])
    remote.publish(REST, [work.blobs[REST]])
    remote.publish(METADATA, [metadata])
    for name in filter(is_save, remote.list()):
        if name != work.save:  # an earlier checkpoint of the same path
            remote.remove(name)
