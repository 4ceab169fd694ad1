"""The reader for torch.distributed.checkpoint: each piece from the nearest complete copy."""

from __future__ import annotations

import io
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lightning_hetero.errors import CheckpointMissingError
from lightning_hetero.parallel.recovery.layer_map import REST, LayerMap, chunk_key, pieces_of, runs_of
from lightning_hetero.parallel.recovery.peers import PeerTransfers, Want
from lightning_hetero.parallel.recovery.tiers import CheckpointTier
from lightning_hetero.store.raw_memory import own_memory
from lightning_hetero.units import MIB

log = logging.getLogger(__name__)

PEER = "peer"
_BATCH_BYTES = 256 * MIB  # of files in memory at once during reading
_READ_BYTES = 64 * MIB  # of one read


class TieredReader(StorageReader):
    """Reads each piece from the first complete copy: memory, disk, another rank, remote tier.

    Every piece has a checksum; if it differs, the piece is read from the next place, with a
    warning. Only needed pieces are read.

    Args:
        metadata: The save's metadata.
        layer_map: The save's map.
        local: Local tiers, fastest first.
        remote: The remote tier.
        peers: The ranks that load together; ``None``: this process loads alone.
        holders: For each file, the ranks that have it on a local tier.
        extra: Files that are needed completely, beside those of tensors.
        filled: Called for each tensor that has its content. With it one file at a time is in
            memory.
    """

    def __init__(
        self,
        metadata: Metadata,
        layer_map: LayerMap,
        *,
        local: Sequence[CheckpointTier],
        remote: CheckpointTier,
        peers: PeerTransfers | None,
        holders: Mapping[str, Sequence[int]],
        extra: Sequence[str] = (REST,),
        filled: Callable[[Tensor], object] | None = None,
    ) -> None:
        self._metadata, self._map = metadata, layer_map
        self._local, self._remote, self._peers, self._holders = local, remote, peers, holders
        self._wanted, self._filled = tuple(extra), filled
        self.extra: dict[str, bytes] = {}
        self.bytes: dict[str, int] = dict.fromkeys([*(t.name for t in local), PEER, remote.name], 0)

    # ---- torch.distributed.checkpoint's protocol, in order ---------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a reader is used once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata that all ranks have agreed on."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Reports the number of batches of files that this rank needs."""
        return replace(plan, storage_data=len(self._batches(plan)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Makes all ranks take part in as many exchanges as the rank with the most batches."""
        most = max(plan.storage_data for plan in plans)
        return [replace(plan, storage_data=most) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads batch by batch, and copies into the tensors of the planner.

        Raises:
            CheckpointMissingError: No place has a piece.
        """
        batches = self._batches(plan)
        missing: list[str] = []
        for number in range(plan.storage_data):
            batch = batches[number] if number < len(batches) else {}
            found = self._fetch({name: needed for name, (needed, _) in batch.items()}, missing)
            for name, (_, items) in batch.items():
                if name in found:
                    for item in items:
                        self._hand_over(item, found[name], planner)
                    if name in self._wanted:
                        self.extra[name] = found[name].numpy().tobytes()
        if missing:  # raised only now, because other ranks wait for this one's pieces
            raise CheckpointMissingError(_describe(missing, self._map))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any."""
        return True

    # ---- needed pieces ---------------------------------------------------------------------------

    def _batches(self, plan: LoadPlan) -> list[dict[str, tuple[set[int], list[ReadItem]]]]:
        needs: dict[str, tuple[set[int], list[ReadItem]]] = defaultdict(lambda: (set(), []))
        for name in self._wanted:
            needs[name][0].update(range(len(self._map.files[name].crc32)))
        for item in plan.items:
            name, pieces = self._need(item)
            needs[name][0].update(pieces)
            needs[name][1].append(item)
        batches: list[dict[str, tuple[set[int], list[ReadItem]]]] = []
        room = 0
        for name, need in sorted(needs.items()):
            size = len(need[0]) * self._map.piece_bytes
            if not batches or size > room:
                batches.append({})
                room = _BATCH_BYTES if self._filled is None else 0
            batches[-1][name] = need
            room -= size
        return batches

    def _need(self, item: ReadItem) -> tuple[str, list[int]]:
        info = self._metadata.storage_data[item.storage_index]
        name = info.relative_path.rpartition("/")[2]
        if item.type is LoadItemType.BYTE_IO:
            return name, pieces_of(info.offset, [info.length], [0], [info.length], 1, self._map.piece_bytes)
        start, sizes, dtype = self._chunk(item)
        return name, pieces_of(start, sizes, item.storage_offsets, item.lengths, dtype.itemsize, self._map.piece_bytes)

    def _chunk(self, item: ReadItem) -> tuple[int, torch.Size, torch.dtype]:
        index = item.storage_index
        tensor: Any = self._metadata.state_dict_metadata[index.fqn]
        sizes = next(c.sizes for c in tensor.chunks if index.offset is None or c.offsets == index.offset)
        return self._map.starts[chunk_key(index.fqn, index.offset)], sizes, tensor.properties.dtype

    def _hand_over(self, item: ReadItem, content: Tensor, planner: LoadPlanner) -> None:
        if item.type is LoadItemType.BYTE_IO:
            info = self._metadata.storage_data[item.storage_index]
            planner.load_bytes(item, io.BytesIO(content[info.offset : info.offset + info.length].numpy().tobytes()))
            return
        start, sizes, dtype = self._chunk(item)
        chunk = content[start : start + sizes.numel() * dtype.itemsize].view(dtype).view(sizes)
        part = chunk[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
        target: Any = planner.resolve_tensor(item).detach()
        target.copy_(part)
        planner.commit_tensor(item, target)
        if self._filled is not None:
            self._filled(target)

    # ---- sources ---------------------------------------------------------------------------------

    def _fetch(self, needs: Mapping[str, set[int]], missing: list[str]) -> dict[str, Tensor]:
        files = {name: own_memory(self._map.files[name].bytes, torch.uint8) for name in needs}
        open_: dict[str, set[int]] = {name: set(pieces) for name, pieces in needs.items()}
        tried: dict[str, list[str]] = defaultdict(list)
        for tier in self._local:
            self._from_tier(tier, open_, files, tried)
        if self._peers is not None:
            self._from_peers(self._peers, open_, files, tried)
        self._from_tier(self._remote, open_, files, tried)
        for name, pieces in open_.items():
            if pieces:
                del files[name]
                missing.append(f"{name} (piece {min(pieces)}; tried {'; '.join(tried[name])})")
        return files

    def _from_tier(
        self, tier: CheckpointTier, open_: dict[str, set[int]], files: dict[str, Tensor], tried: dict[str, list[str]]
    ) -> None:
        for name, pieces in open_.items():
            if not pieces:
                continue
            try:
                for first, last in runs_of(pieces, max(1, _READ_BYTES // self._map.piece_bytes)):
                    start, end = self._map.span(name, first, last)
                    content = tier.read(f"{self._map.save}/{name}", start, end)
                    self.bytes[tier.name] += self._take(name, range(first, last + 1), content, files[name], pieces)
            except FileNotFoundError:
                tried[name].append(f"{tier}: not there")
                continue
            except OSError as error:
                tried[name].append(f"{tier}: {error}")
            if pieces:
                log.warning("%s of save %s is damaged or unreadable in %s; trying the next place.", name, self._map.save, tier)
                tried[name].append(f"{tier}: damaged")

    def _from_peers(
        self, peers: PeerTransfers, open_: dict[str, set[int]], files: dict[str, Tensor], tried: dict[str, list[str]]
    ) -> None:
        asked: dict[str, tuple[int, ...]] = defaultdict(tuple)
        while True:
            wants = {name: Want(tuple(sorted(pieces)), asked[name]) for name, pieces in open_.items() if pieces}
            round_ = peers.exchange(wants, self._holders, self._map, self._read_for_peer)
            if round_ is None:
                return
            got, senders = round_
            for name, content in got.items():
                pieces = open_[name]
                asked[name] += (senders[name],)
                self.bytes[PEER] += self._take(name, wants[name].pieces, content.numpy().tobytes(), files[name], pieces)
                if pieces:
                    log.warning("%s of save %s is damaged on rank %d; trying the next place.", name, self._map.save, senders[name])
                    tried[name].append(f"rank {senders[name]}: damaged")

    def _read_for_peer(self, name: str, pieces: tuple[int, ...]) -> Tensor:
        """Pieces for another rank.

        Zeros if they cannot be read: it detects that and asks another rank.
        """
        whole = {name: torch.zeros(self._map.files[name].bytes, dtype=torch.uint8)}
        open_ = {name: set(pieces)}
        own = dict(self.bytes)
        for tier in self._local:
            self._from_tier(tier, open_, whole, defaultdict(list))
        self.bytes = own  # the receiver counts them
        return torch.cat([whole[name][slice(*self._map.span(name, piece, piece))] for piece in pieces])

    def _take(self, name: str, pieces: Sequence[int], content: bytes, file: Tensor, open_: set[int]) -> int:
        """Keeps the undamaged pieces; returns their bytes."""
        view, at, taken = memoryview(content), 0, 0
        for piece in pieces:
            start, end = self._map.span(name, piece, piece)
            part = view[at : at + end - start]
            at += end - start
            if self._map.is_whole(name, piece, part):
                file[start:end] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                open_.discard(piece)
                taken += len(part)
        return taken


def _describe(missing: Sequence[str], layer_map: LayerMap) -> str:
    more = f", and {len(missing) - 5} more files" if len(missing) > 5 else ""
    return (
        f"save {layer_map.save} of step {layer_map.step} ({layer_map.path}) is incomplete: {', '.join(missing[:5])}{more}. "
        f"Bring back a node or a folder that has them, or pass ckpt_path='newest' for the newest complete save."
    )
