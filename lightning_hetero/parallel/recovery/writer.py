"""The writer for torch.distributed.checkpoint: files, their ranks and their tiers.

[Note: Files]
The chunks of a layer that the same ranks hold go into one file, so any of these ranks can write it.
Every node keeps a replica of the layers of its ranks: replicas of data parallelism survive a lost
node. One rank of every node writes the file to the local tiers, and a single rank to the remote
tier. A chunk has the form of ``torch.save``, as torch's own readers expect. Objects that are no
tensors (groups of optimizers, loops) are written by every node, with rank 0's content.
"""

from __future__ import annotations

import dataclasses
import io
import math
import mmap
import os
import struct
import time
import uuid
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from lightning_hetero.handles.offloaded_tensor import OffloadedTensor, contents_of
from lightning_hetero.handles.pieces import TensorPiece
from lightning_hetero.parallel.recovery.layer_map import REST, SUFFIX, LayerMap, StoredFile, checksums, chunk_key, layer_of
from lightning_hetero.parallel.recovery.tiers import CheckpointTier
from lightning_hetero.units import KIB, MIB

REMOTE = "remote"
_ARCHIVE_BYTES = 64 * KIB  # more than the overhead of torch.save for one tensor
_OWN_PAGES = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_ALIGNMENT = 64  # of chunks, as torch.save aligns numbers, so that they can be viewed in place


@dataclass(frozen=True, slots=True)
class _Offer:
    """A rank's report to the coordinator beside its plan."""

    nodes: dict[str, str]  # tier: identity of its folder
    blobs: dict[MetadataIndex, bytes]
    own: bytes


@dataclass(frozen=True, slots=True)
class SaveWork:
    """The coordinator's order for a rank.

    Attributes:
        save: The save's name.
        order: Its order.
        files: Name, chunks in order, tiers to write to.
        blobs: Files that every node keeps, with their content.
        leads: Tiers for which this rank writes the blobs and the map of its node.
    """

    save: str
    order: float
    files: list[tuple[str, tuple[MetadataIndex, ...], tuple[str, ...]]]
    blobs: dict[str, bytes]
    leads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Written:
    """The place of a chunk and of its numbers.

    For a file's first chunk also the file's size and checksums.
    """

    info: _StorageInfo
    start: int
    file: tuple[int, tuple[int, ...]] | None


def own_name(rank: int) -> str:
    """The file with objects that only this rank needs, such as its random numbers."""
    return f"rank_{rank}.pt"


class LayerPlanner(DefaultSavePlanner):
    """Keeps every rank's whole plan: replicas are wanted, and the writer chooses among them.

    Handles (``handles.offloaded_tensor``) are planned by shape and read when they are written, and
    so are pieces of tensors (``handles.pieces``), of which each rank has another one.
    """

    def set_up_planner(self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False) -> None:
        """Sets handles aside."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._pieces = {name: value for name, value in self.state_dict.items() if isinstance(value, TensorPiece)}
        self._handles = {name: value for name, value in self.state_dict.items() if isinstance(value, OffloadedTensor)}
        self.state_dict = {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta") if name in self._handles else value
            for name, value in self.state_dict.items()
            if name not in self._pieces
        }

    def create_local_plan(self) -> SavePlan:
        """Also plans this rank's pieces."""
        plan = super().create_local_plan()
        items = [item for name, piece in self._pieces.items() for item in _items_of(name, piece)]
        self.plan = dataclasses.replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The object to write; for a handle or a piece its content."""
        piece = self._pieces.get(index.fqn)
        if piece is not None:
            return piece.content(tuple(index.offset or ()))
        handle = self._handles.get(index.fqn)
        return super().lookup_object(index) if handle is None else contents_of(handle)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans unchanged, and metadata with every chunk once."""
        _, metadata = super().create_global_plan(all_plans)
        return all_plans, metadata


def _items_of(name: str, piece: TensorPiece) -> Iterator[WriteItem]:
    for box in piece.boxes():
        offsets = torch.Size(box.offsets)
        yield WriteItem(
            index=MetadataIndex(name, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box.sizes)),
                properties=TensorProperties(dtype=piece.dtype),
                size=piece.shape,
            ),
        )


class LayerWriter(StorageWriter):
    """Writes the files of a save to the local tiers and to the remote tier.

    :meth:`write_data` writes the local ones, :meth:`upload` the remote one.

    Args:
        planner: The planner of the same save.
        tiers: The local tiers, fastest first.
        path: The checkpoint's URL.
        step: The optimizer step.
        rest: Other objects of rank 0; those of other ranks are ignored.
        own: An object that only this rank needs.
        after: The order of the newest save so far.
        piece_bytes: Bytes under one checksum.
        timer: Returns seconds since the epoch.
    """

    work: SaveWork  # this rank's, from write_data on

    def __init__(
        self,
        planner: LayerPlanner,
        tiers: Sequence[CheckpointTier],
        *,
        path: str,
        step: int,
        rest: bytes,
        own: bytes,
        after: float,
        piece_bytes: int,
        timer: Callable[[], float] = time.time,
    ) -> None:
        self._planner, self._tiers = planner, {tier.name: tier for tier in tiers}
        self._path, self._step, self._rest, self._own = path, step, rest, own
        self._after, self._piece_bytes, self._timer = after, piece_bytes, timer
        self._files: dict[str, tuple[int, ...]] = {}  # of the coordinator: holders
        self._blobs: dict[str, bytes] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}  # of objects that are no tensors
        self._save, self._order, self._ranks = "", 0.0, 1
        self.sums: dict[str, tuple[int, ...]] = {}  # of files that this rank wrote

    # ---- torch.distributed.checkpoint's protocol, in order ---------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds objects that are no tensors, and the identities of this rank's folders."""
        blobs = {}
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                content: Any = self._planner.resolve_data(item)
                blobs[item.index] = content.getvalue()
        nodes = {name: tier.node() for name, tier in self._tiers.items()}
        return dataclasses.replace(plan, storage_data=_Offer(nodes, blobs, self._own))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assigns files to ranks; runs on the coordinator."""
        offers: list[_Offer] = [plan.storage_data for plan in plans]
        self._order, self._ranks = max(self._timer(), math.nextafter(self._after, math.inf)), len(plans)
        self._save = f"{self._step:012d}-{uuid.uuid4().hex[:8]}"
        self._blobs = {REST: self._rest, **{own_name(rank): offer.own for rank, offer in enumerate(offers)}}
        self._blobs["other" + SUFFIX] = self._pack(offers)
        files = _files(plans)
        self._files = {name: holders for name, (holders, _) in files.items()}
        writers = _assign(files, [offer.nodes for offer in offers], list(self._tiers))
        leads: list[list[str]] = [[] for _ in plans]
        for tier in self._tiers:
            for rank in {nodes[tier]: r for r, nodes in reversed(list(enumerate(o.nodes for o in offers)))}.values():
                leads[rank].append(tier)
        leads[0].append(REMOTE)
        return [
            dataclasses.replace(
                plan,
                storage_data=SaveWork(
                    self._save,
                    self._order,
                    [(name, files[name][1], tuple(tiers)) for name, of_ranks in writers.items() if (tiers := of_ranks.get(rank))],
                    self._blobs if leads[rank] else {},
                    tuple(leads[rank]),
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files to the local tiers, if there are any."""
        self.work = work = plan.storage_data
        items = {item.index: item for item in plan.items}
        results: list[WriteResult] = []
        for name, chunks, tiers in work.files:
            content, written = self._content(name, [items[c] for c in chunks])
            self.sums[name] = written[0].storage_data.file[1]
            results += written
            for tier in tiers:
                if tier != REMOTE:
                    self._tiers[tier].publish(f"{work.save}/{name}", content)
            del content  # before the next file's is made
        for name, blob in work.blobs.items():
            for tier in work.leads:
                if tier != REMOTE:
                    self._tiers[tier].publish(f"{work.save}/{name}", [blob])
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Completes the metadata; the map is an attribute sent to every rank.

        Runs on the coordinator.
        """
        metadata.version = CURRENT_DCP_VERSION
        storage, starts = dict(self._places), {}
        files = {
            name: StoredFile(bytes=len(b), crc32=checksums([b], self._piece_bytes), ranks=tuple(range(self._ranks)))
            for name, b in self._blobs.items()
        }
        for of_rank in results:
            for result in of_rank:
                written: _Written = result.storage_data
                name = written.info.relative_path.rpartition("/")[2]
                if written.file is not None and name not in files:  # the lowest rank's replica counts
                    files[name] = StoredFile(bytes=written.file[0], crc32=written.file[1], ranks=self._files[name])
                if result.index not in storage:
                    storage[result.index] = written.info
                    starts[chunk_key(result.index.fqn, result.index.offset)] = written.start
        metadata.storage_data = storage
        metadata.storage_meta = StorageMeta(checkpoint_id=self._path, save_id=self._save)
        travelling: Any = metadata
        travelling.layer_map = LayerMap(
            save=self._save,
            step=self._step,
            order=self._order,
            path=self._path,
            ranks=self._ranks,
            piece_bytes=self._piece_bytes,
            files=files,
            starts=starts,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any."""
        return True

    # ---- afterwards ------------------------------------------------------------------------------

    def upload(self, remote: CheckpointTier) -> None:
        """Writes this rank's files to the remote tier."""
        work = self.work
        items: dict[MetadataIndex, WriteItem] = {item.index: item for item in self._planner.plan.items}
        for name, chunks, tiers in work.files:
            if REMOTE in tiers:
                content, _ = self._content(name, [items[c] for c in chunks])
                remote.publish(f"{work.save}/{name}", content)
                del content
        if REMOTE in work.leads:
            for name, blob in work.blobs.items():
                remote.publish(f"{work.save}/{name}", [blob])

    # ---- parts -----------------------------------------------------------------------------------

    def _pack(self, offers: Sequence[_Offer]) -> bytes:
        """Objects that are no tensors as one file, each from its lowest rank."""
        content = bytearray()
        for offer in offers:
            for index, blob in offer.blobs.items():
                if index not in self._places:
                    self._places[index] = _StorageInfo(f"{self._save}/other{SUFFIX}", len(content), len(blob))
                    content += blob
        return bytes(content)

    def _content(self, name: str, items: Sequence[WriteItem]) -> tuple[list[memoryview], list[WriteResult]]:
        parts: list[memoryview] = []
        places: list[tuple[WriteItem, int, int, int]] = []
        offset = 0
        for item in items:
            value: Any = self._planner.resolve_data(item)
            chunk, start = _serialise(value)
            padding = -len(chunk) % _ALIGNMENT
            parts += [chunk, memoryview(bytes(padding))]
            places.append((item, offset, len(chunk), start))
            offset += len(chunk) + padding
        sums = checksums(parts, self._piece_bytes)
        path = f"{self.work.save}/{name}"
        return parts, [
            WriteResult(item.index, length, _Written(_StorageInfo(path, at, length), at + start, None if i else (offset, sums)))
            for i, (item, at, length, start) in enumerate(places)
        ]


def _serialise(tensor: torch.Tensor) -> tuple[memoryview, int]:
    """A tensor in the form of ``torch.save``, and the first byte of its numbers."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    # A mapping of its own gives the memory of large tensors back at once, see [Note: Memory of its
    # own] in store.raw_memory.
    file: Any = mmap.mmap(-1, tensor.nbytes + _ARCHIVE_BYTES, flags=_OWN_PAGES) if tensor.nbytes >= MIB else io.BytesIO()
    torch.save(tensor, file)
    if isinstance(file, mmap.mmap):
        file.resize(file.tell())
    content = memoryview(file.getbuffer() if isinstance(file, io.BytesIO) else file)
    with zipfile.ZipFile(file) as archive:
        header = next(e.header_offset for e in archive.infolist() if e.filename.endswith("/data/0"))
    name, extra = struct.unpack_from("<HH", content, header + 26)
    return content, header + 30 + name + extra


def _files(plans: Sequence[SavePlan]) -> dict[str, tuple[tuple[int, ...], tuple[MetadataIndex, ...]]]:
    """For each file name the ranks that hold its content, and its chunks in order."""
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.type is not WriteItemType.BYTE_IO:
                holders[item.index].append(rank)
    groups: dict[tuple[str, tuple[int, ...]], list[MetadataIndex]] = defaultdict(list)
    for index, ranks in holders.items():
        groups[layer_of(index.fqn), tuple(ranks)].append(index)
    files: dict[str, tuple[tuple[int, ...], tuple[MetadataIndex, ...]]] = {}
    counts: dict[str, int] = defaultdict(int)
    for (layer, all_of_them), chunks in sorted(groups.items()):
        name = f"{layer.replace('/', '_')}.{counts[layer]}{SUFFIX}"
        counts[layer] += 1
        files[name] = all_of_them, tuple(sorted(chunks, key=lambda c: (c.fqn, tuple(c.offset or ()))))
    return files


def _assign(
    files: dict[str, tuple[tuple[int, ...], tuple[MetadataIndex, ...]]], nodes: Sequence[dict[str, str]], tiers: Sequence[str]
) -> dict[str, dict[int, list[str]]]:
    """For each file, its writers and their tiers: one holder per node, one of them also remote."""
    loads: dict[tuple[str, int], int] = defaultdict(int)
    assigned: dict[str, dict[int, list[str]]] = {}
    for name, (holders, chunks) in files.items():
        of_ranks: dict[int, list[str]] = defaultdict(list)
        for tier in tiers:
            by_node: dict[str, list[int]] = defaultdict(list)
            for rank in holders:
                by_node[nodes[rank][tier]].append(rank)
            for ranks in by_node.values():
                chosen = min(ranks, key=lambda r: (loads[tiers[0], r], r))
                of_ranks[chosen].append(tier)
        for rank in of_ranks:
            loads[tiers[0], rank] += len(chunks)
        uploader = min(of_ranks or holders, key=lambda r: (loads[REMOTE, r], r))
        of_ranks[uploader].append(REMOTE)
        loads[REMOTE, uploader] += len(chunks)
        assigned[name] = dict(of_ranks)
    return assigned
