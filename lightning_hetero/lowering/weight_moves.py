"""Prefetches weights: from disk to the host, and from the host to the device."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence

from lightning_hetero.ir.schedule import Lane, OpKind, Payload
from lightning_hetero.lowering.chains import Issue
from lightning_hetero.lowering.placed_blocks import PlacedBlock
from lightning_hetero.lowering.weight_cache import Cache, Uses


class WeightMoves:
    """Brings the weights of blocks to where they compute.

    Args:
        placed: The blocks.
        issue: Issues ops.
        uses: When weights are used.
        host: Host memory for weights that live on disk.
        device: Device memory for weights that live below the device, and which of the weights that
            live on the device are valid there; ``None`` where the device is the host.
        depth: Blocks whose weights are brought ahead of their use, on each tier.
        absent: ``depth`` counts only blocks that the tier does not hold, as a step without backward
            brings them; see [Note: Residency].
        ranks: Ranks that share the model: whole weights come to the device from all of them.
        shared_memory: The devices of several ranks are the host's own CPU.
        gathers_in_place: Whole weights are in host memory where the slices of all ranks are.
        on_devices: Devices gather whole weights, each from its own slice and those of the others.
    """

    def __init__(
        self,
        placed: Sequence[PlacedBlock],
        issue: Issue,
        uses: Uses,
        *,
        host: Cache,
        device: Cache | None,
        depth: int,
        absent: bool = False,
        ranks: int = 1,
        shared_memory: bool = False,
        gathers_in_place: bool = False,
        on_devices: bool = False,
    ) -> None:
        self.host, self.device, self._absent = host, device, absent
        self._placed, self._issue, self._uses, self._depth = placed, issue, uses, depth
        self._ranks, self._on_host = ranks, shared_memory
        self._gathered = 0 if gathers_in_place else ranks  # slices that a GATHER moves
        self._copies = self._gathered if shared_memory else ranks  # for which the device has memory
        # Devices read slices of all ranks where these are.
        self._shares = ranks > 1 and gathers_in_place and not shared_memory and not on_devices
        # Of weights on their way to where they compute, each with the slices that it moves.
        if on_devices:
            self._hops = [(OpKind.UPLOAD, Lane.H2D, 1), (OpKind.GATHER, Lane.PEER, ranks)]
        else:
            uploads = [(OpKind.UPLOAD, Lane.H2D, ranks)] * (not shared_memory)
            self._hops = [*[(OpKind.GATHER, Lane.NET, self._gathered)] * (ranks > 1), *uploads]
        self._takes_memory = OpKind.UPLOAD if not shared_memory else OpKind.GATHER
        self._on_disk = uses.of({b for b, p in enumerate(placed) if p.on_disk})
        self._higher = 0  # up to this place in there, weights of uses to come are on the device
        self._below_device = uses.of({b for b, p in enumerate(placed) if p.below_device})
        self._outdated = deque(b for b in dict.fromkeys(uses.anchors) if b is not None and placed[b].renewed)

    def need(self, index: int, block: int) -> int | None:
        """Brings the weights for anchor ``index``. Returns the op to wait for, if there is one."""
        if self.device is not None:
            self._up(self.device, index, block, keep=(block,))
            return self.device.arriving.get(block)
        if self._placed[block].on_disk:
            self._fetch(index, block, keep=(block,))
        return self.host.arriving.get(block)

    def prefetch(self, index: int, block: int) -> None:
        """Prefetches weights for the uses after anchor ``index`` of ``block``."""
        if self.device is None:
            self._prefetch_to_host(index, keep={block})
        else:
            self._prefetch_to_device(self.device, index, keep={block})
            self._prefetch_to_host(index, keep=set() if self._copies else {block})

    def _prefetch_to_device(self, device: Cache, index: int, *, keep: set[int]) -> None:
        """Brings the next ``depth`` blocks to the device.

        Weights that live on the device take no memory there: outdated ones are renewed on the way,
        all of them if none that take memory come between.
        """
        left = self._depth
        for at, block in self._uses.after(index, self._below_device):
            self._renew_before(device, at)
            keep.add(block)
            left -= not (self._absent and block in device.held)
            if not self._up(device, index, block, keep=keep.union(device.stays), spare=self.host.stays) or not left:
                return
        self._renew_before(device, len(self._uses.anchors))

    def _renew_before(self, device: Cache, index: int) -> None:
        """Uploads outdated weights that are used before anchor ``index``."""
        while self._outdated and self._uses.following(0, self._outdated[0]) < index:
            if (block := self._outdated.popleft()) not in device.held:
                self.renew(device, block)

    def _prefetch_to_host(self, index: int, *, keep: set[int]) -> None:
        """Brings the next ``depth`` blocks from disk to the host that are not higher up yet."""
        higher, uses = self._copied(), self._on_disk
        while self._higher < len(uses) and (uses[self._higher] <= index or self._uses.anchors[uses[self._higher]] in higher):
            self._higher += 1
        left = self._depth
        for _, block in self._uses.after(index, uses, place=self._higher):
            if block in higher:
                continue
            keep.add(block)
            left -= not (self._absent and block in self.host.held)
            if not self._fetch(index, block, keep=keep.union(self.host.stays)) or not left:
                return

    def _up(self, device: Cache, index: int, block: int, *, keep: Collection[int], spare: Collection[int] = ()) -> bool:
        """Brings weights to the device. Returns false, and issues nothing, if there is no room.

        ``keep`` stay on the device, ``spare`` on the host.
        """
        placed = self._placed[block]
        if block in device.held or not (placed.below_device or placed.renewed):
            return True
        victims = device.victims(index, block, keep=keep)
        on_host = (block, *spare) if self._copies else {block, *spare, *keep}
        if victims is None or (placed.on_disk and not self._fetch(index, block, keep=on_host)):
            return False
        for victim in victims:
            self.release(device, victim)
            self._higher = min(self._higher, bisect_left(self._on_disk, self._uses.following(index, victim)))
        self._upload(device, block, after=device.after_release() if placed.below_device else ())
        return True

    def _copied(self) -> Collection[int]:
        """The blocks of whose weights the device has copies, so that the host's are not in use."""
        return () if self.device is None or not self._copies else self.device.held

    def _upload(self, device: Cache, block: int, *, after: Sequence[int] = ()) -> None:
        size, last = self._placed[block].shape.weight_bytes, -1
        for kind, lane, slices in self._hops:
            room = after if kind is self._takes_memory else ()
            last = self._issue(kind, block, lane, Payload.WEIGHTS, size * slices, after=room)
        device.add(block, last)
        self.host.touch(block)

    def renew(self, device: Cache, block: int) -> None:
        """Brings the weights that an UPDATE of this step has made to their place on the device."""
        self._upload(device, block)

    def restore(self, block: int) -> None:
        """Reads weights from disk again, over those that a discarded update has made in memory."""
        if self._placed[block].on_disk and block in self.host.held:
            size = self._placed[block].shape.weight_bytes
            self._issue(OpKind.FETCH, block, Lane.DISK_READ, Payload.WEIGHTS, size, after=self.host.after_release())

    def outdate(self, block: int) -> None:
        """The block's last use is over, and its update will outdate the device's copy."""
        if self.device is None or block not in self.device.held or not self._placed[block].through_host:
            return
        if self._placed[block].below_device:
            self.release(self.device, block)
        else:
            self.device.remove(block)

    def _fetch(self, index: int, block: int, *, keep: Collection[int]) -> bool:
        """Brings weights from disk to the host; false, and nothing issued, if there is no room."""
        if block in self.host.held:
            return True
        served = self._copied()
        victims = self.host.victims(index, block, keep=keep, served=served)
        if victims is None:
            return False
        for victim in victims:
            if self.device is not None and not self._copies and victim in self.device.held:
                self.release(self.device, victim)
            self.release(self.host, victim)
        size, after = self._placed[block].shape.weight_bytes, self.host.after_release()
        self.host.add(block, self._issue(OpKind.FETCH, block, Lane.DISK_READ, Payload.WEIGHTS, size, after=after))
        return True

    def release(self, cache: Cache, block: int) -> None:
        """Gives the memory of a block's weights on one tier back.

        Before a rank's slice leaves memory from which the devices of all ranks read it, they meet.
        """
        if cache is self.host and self._shares:
            self._issue(OpKind.RELEASE, block, Lane.NET, Payload.WEIGHTS)
        size, lane = self._placed[block].shape.weight_bytes, Lane.DISK_READ
        if cache is not self.host:
            size, lane = size * self._copies, Lane.NET if self._on_host else Lane.H2D
        cache.remove(block, self._issue(OpKind.RELEASE, block, lane, Payload.WEIGHTS, size, after=cache.after_release()))
