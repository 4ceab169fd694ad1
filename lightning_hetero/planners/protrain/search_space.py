"""ProTrain's configurations: what each costs, and which are allowed (section 3.1.2).

Source: "ProTrain: Efficient LLM Training via Automatic Memory Management"; see [Note: Chunks] in
``formulas.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import Saved
from lightning_hetero.lowering.needs import DEVICE_GRADIENTS
from lightning_hetero.planners.protrain import formulas
from lightning_hetero.planners.protrain.formulas import ChunkTimes

LEAST_BUFFERS = 3  # compute, arrival, gradients: eq. 5, Table 4 [inferred]
LEAST_GRADIENTS = 4  # blocks whose gradients may wait on the host, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The four counts of eq. 1."""

    persistent_chunks: int
    chunk_buffers: int
    swap_blocks: int
    checkpoint_blocks: int


class Timing(NamedTuple):
    """The chunks' seconds, eq. 3 for all persistent counts, and :meth:`Space.returns`."""

    times: ChunkTimes
    forward: tuple[float, ...]
    returns: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Space:
    """All configurations of one model on one machine: what each costs, and which are allowed.

    Attributes:
        model: The model.
        hardware: The machine.
        chunk_params: Elements of one chunk.
        device_bytes_allowed: Device memory that a configuration may use; less than the machine has,
            by the fragmentation factor.
        host_bytes_allowed: The same for host memory.
        timings: What :meth:`timing` has worked out; copies that differ in memory alone share it.
    """

    model: ModelProfile
    hardware: HardwareProfile
    chunk_params: int
    device_bytes_allowed: int
    host_bytes_allowed: int
    timings: dict[int, Timing] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The blocks of each chunk."""
        return formulas.pack(self._elements, self.chunk_params)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The blocks that may be swapped or recomputed; none if the device is the host."""
        return () if self.hardware.shared_memory else tuple(i for i, b in enumerate(self.model.blocks) if not b.pinned)

    @cached_property
    def blocks(self) -> tuple[BlockProfile, ...]:
        """The same, as profiles."""
        return tuple(self.model.blocks[i] for i in self.layers)

    @cached_property
    def swap_interval(self) -> int:
        """Blocks of one interval; 0 where nothing can be swapped."""
        return formulas.swap_interval(self.blocks, self.hardware.link_d2h_bytes_per_s)

    @cached_property
    def most_swaps(self) -> int:
        """The most blocks whose swaps forward can hide (section 3.1.2)."""
        return len(self.layers) // self.swap_interval if self.swap_interval and self.copies else 0

    @cached_property
    def prefetch_depth(self) -> int:
        """Blocks that are brought ahead: those of the next chunk, however many they are."""
        return min(1024, max(len(chunk) for chunk in self.chunks))

    # ------------------------------------------------------------------ memory

    @cached_property
    def peak_base_bytes(self) -> int:
        """The peak of backward with all activations and no model states (eqs. 8 and 9)."""
        return formulas.peak_base_bytes(self.model.constant_device_bytes, formulas.backward_operators(self.model))

    @property
    def buffer_bytes(self) -> int:
        """One chunk buffer."""
        return self.chunk_params * self.model.compute_itemsize

    @cached_property
    def persistent_bytes(self) -> tuple[int, ...]:
        """Device bytes of the first 0, 1, ... N chunks as persistent ones.

        Weights are gathered once a step and stay (eq. 7), state is sharded over the devices
        [inferred].
        """
        m, world = self.model, self.hardware.world_size
        sizes = (p * m.compute_itemsize + state / world for p, state in zip(self._params, self._states, strict=True))
        return (0, *(math.ceil(total) for total in accumulate(sizes)))

    @cached_property
    def _elements(self) -> tuple[int, ...]:
        return tuple(formulas.weight_elements(self.model))

    @cached_property
    def _params(self) -> tuple[int, ...]:
        return tuple(sum(self._elements[b] for b in chunk) for chunk in self.chunks)

    @cached_property
    def _trained(self) -> tuple[int, ...]:
        return tuple(sum(self.model.blocks[b].num_trainable_params for b in chunk) for chunk in self.chunks)

    @cached_property
    def _states(self) -> tuple[int, ...]:
        return tuple(sum(self.model.state_bytes(self.model.blocks[b]) for b in chunk) for chunk in self.chunks)

    @cached_property
    def _leaving(self) -> tuple[float, ...]:
        """Gradients of each chunk, as elements of the compute dtype."""
        return tuple(sum(self._gradients[b] for b in chunk) / self.model.compute_itemsize for chunk in self.chunks)

    @cached_property
    def _gradients(self) -> tuple[int, ...]:
        return tuple(map(self.model.gradient_bytes, self.model.blocks))

    @cached_property
    def least_host_bytes(self) -> tuple[int, ...]:
        """Host bytes without activations for 0, 1, ... N persistent chunks."""
        m, shared = self.model, self.hardware.shared_memory
        sizes = [p * m.compute_itemsize + state for p, state in zip(self._params, self._states, strict=True)]
        fixed = m.constant_host_bytes + (self.peak_base_bytes + sum(sizes) if shared else 0)
        rows = []
        for persistent in range(len(self.chunks) + 1):
            first = self.chunks[persistent][0] if persistent < len(self.chunks) else len(m.blocks)
            waiting = sum(sorted(self._gradients[first:])[-LEAST_GRADIENTS:])
            rows.append(fixed + waiting + (sum(self._gradients[:first]) if shared else sum(sizes[persistent:])))
        return tuple(rows)

    @cached_property
    def passing_bytes(self) -> int:
        """Gradients on the device: of the block that computes, and of one whose gradients leave.

        The paper writes them over the weights in the chunk buffers; the runtime here gives them
        memory of their own.
        """
        return sum(sorted(self._gradients)[-DEVICE_GRADIENTS:])

    def kinds(self, config: Configuration) -> tuple[Saved, ...]:
        """What becomes of the transformer blocks' activations."""
        swap, checkpoint = config.swap_blocks, config.checkpoint_blocks
        return formulas.interleave(len(self.layers), swap=swap, checkpoint=checkpoint, interval=self.swap_interval)

    def device_bytes(self, config: Configuration) -> int:
        """Peak device memory (eq. 10) with the runtime's transfers; 0 if the device is the host."""
        if self.hardware.shared_memory:
            return 0
        kinds = self.kinds(config)
        peak = formulas.peak_bytes(
            self.peak_base_bytes,
            persistent=self.persistent_bytes[config.persistent_chunks],
            buffers=config.chunk_buffers * self.buffer_bytes,
            blocks=self.blocks,
            kinds=kinds,
        )
        swapped = sorted(b.activation_bytes for b, kind in zip(self.blocks, kinds, strict=True) if kind is Saved.SWAP_HOST)
        return peak + self.passing_bytes + sum(swapped[-self.prefetch_depth :])

    def rooms_and_order(self, swap: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Device bytes left for chunks if 0, 1, ... blocks are recomputed, and these blocks.

        The same as :meth:`device_bytes` gives, for all counts at once.
        """
        kinds = formulas.interleave(len(self.layers), swap=swap, checkpoint=0, interval=self.swap_interval)
        free = tuple(i for i, kind in zip(self.layers, kinds, strict=True) if kind is not Saved.SWAP_HOST)
        least = Configuration(persistent_chunks=0, chunk_buffers=0, swap_blocks=swap, checkpoint_blocks=0)
        everything = replace(least, checkpoint_blocks=len(free))
        spared = (self.model.blocks[i].activation_bytes - self.model.blocks[i].boundary_bytes for i in free[:-1])
        room = self.device_bytes_allowed - self.device_bytes(least)
        rooms = (*accumulate(spared, initial=room), self.device_bytes_allowed - self.device_bytes(everything))
        return rooms[: len(free) + 1], free

    def swapped_bytes(self, swap: int) -> int:
        """Host bytes of the activations of ``swap`` blocks, of all devices."""
        blocks = (self.blocks[n * self.swap_interval] for n in range(swap))
        return sum(b.activation_bytes for b in blocks) * self.hardware.world_size

    def host_bytes(self, config: Configuration) -> int:
        """Peak host memory: weights, state, gradients on their way, swapped activations.

        The paper states no such bound; its Table 1 ends where host memory does.
        """
        return self.least_host_bytes[config.persistent_chunks] + self.swapped_bytes(config.swap_blocks)

    def gradient_depth(self, config: Configuration) -> int:
        """Blocks whose gradients may wait on the host: as many as fit.

        The paper writes gradients over the 16-bit weights on the host, so that backward never waits
        for updates (eq. 2).
        """
        first = sum(len(chunk) for chunk in self.chunks[: config.persistent_chunks])
        waiting = sorted(self._gradients[first:], reverse=True)
        spare = self.host_bytes_allowed - self.host_bytes(config) + sum(waiting[:LEAST_GRADIENTS])
        fitting = sum(1 for size in accumulate(waiting) if size <= spare)
        return min(max(fitting, LEAST_GRADIENTS), 1024)

    def least_buffers(self, persistent: int) -> int:
        """The fewest buffers for the other chunks; none if they are used in place."""
        return 0 if self.hardware.shared_memory else min(LEAST_BUFFERS, len(self.chunks) - persistent)

    def most_buffers(self, persistent: int) -> int:
        """Buffers that hold all other chunks."""
        return 0 if self.hardware.shared_memory else len(self.chunks) - persistent

    # ------------------------------------------------------------------ time

    def recompute(self, kinds: Sequence[Saved]) -> tuple[float, ...]:
        """Seconds of forward that each chunk repeats in backward (A.1)."""
        again = {i for i, kind in zip(self.layers, kinds, strict=True) if kind is Saved.RECOMPUTE}
        return tuple(sum(self.model.blocks[b].forward_s for b in chunk if b in again) for chunk in self.chunks)

    def times(self, swap: int) -> ChunkTimes:
        """The chunks' seconds while the first block of each of ``swap`` intervals is swapped (A.1).

        A block's activations leave while the next blocks compute, as many as an interval has, and
        come back beside the same blocks' backward; transfers of chunks beside them run at the
        reduced bandwidth [inferred: which those are].
        """
        m, h = self.model, self.hardware
        beside = {i for n in range(swap) for i in self.layers[n * self.swap_interval + 1 :][: self.swap_interval]}
        busy = {number for number, chunk in enumerate(self.chunks) if not beside.isdisjoint(chunk)}
        up, down = _both_directions(h)
        ring = m.compute_itemsize * (h.world_size - 1) / h.world_size
        shard = m.compute_itemsize / h.world_size if self.copies else 0.0

        def copies(params: Sequence[float], alone: float, reduced: float, then: int) -> tuple[float, ...]:
            """``then``: distance from the copied chunk to the one that computes meanwhile."""
            return tuple(_seconds(p * shard, reduced if i + then in busy else alone) for i, p in enumerate(params))

        return ChunkTimes(
            forward=tuple(sum(m.blocks[b].forward_s for b in chunk) for chunk in self.chunks),
            backward=tuple(sum(m.blocks[b].backward_s for b in chunk) for chunk in self.chunks),
            gather=tuple(_seconds(p * ring, h.between_devices_bytes_per_s) for p in self._params),
            reduce=tuple(_seconds(g * ring, h.between_devices_bytes_per_s) for g in self._leaving),
            upload=copies(self._params, h.link_h2d_bytes_per_s, up, -1),
            upload_again=copies(self._params, h.link_h2d_bytes_per_s, up, 1),
            offload=copies(self._leaving, h.link_d2h_bytes_per_s, down, -1),
            gpu_update=tuple(_seconds(t / h.world_size, h.device_update_params_per_s) for t in self._trained),
            cpu_update=tuple(_seconds(t, h.cpu_update_params_per_s) for t in self._trained),
        )

    def timing(self, swap: int) -> Timing:
        """What the search needs of :meth:`times`, worked out once."""
        if swap not in self.timings:
            times = self.times(swap)
            self.timings[swap] = Timing(times, _forwards(times), self.returns(swap))
        return self.timings[swap]

    def iteration_s(self, config: Configuration) -> float:
        """Seconds of one step (eq. 2)."""
        return formulas.iteration_s(
            self.times(config.swap_blocks),
            self.recompute(self.kinds(config)),
            persistent=config.persistent_chunks,
            buffers=config.chunk_buffers,
        )

    # ------------------------------------------------------------------ what is allowed

    def fits(self, config: Configuration) -> bool:
        """Both memories suffice (eq. 1)."""
        return self.device_bytes(config) <= self.device_bytes_allowed and self.host_bytes(config) <= self.host_bytes_allowed

    def returns(self, swap: int) -> tuple[tuple[int, float], ...]:
        """For each swapped block, last one first: its chunk, and when it is back, seconds."""
        chunk_of = {block: number for number, chunk in enumerate(self.chunks, 1) for block in chunk}
        rows, seconds = [], 0.0
        for block in (self.layers[n * self.swap_interval] for n in reversed(range(swap))):
            seconds += _seconds(self.model.blocks[block].activation_bytes, self.hardware.link_h2d_bytes_per_s)
            rows.append((chunk_of[block], seconds))
        return tuple(rows)

    def swaps_return_in_time(self, config: Configuration) -> bool:
        """Whether swapped blocks come back in time for their backward (section 3.1.2)."""
        n, persistent, buffers = len(self.chunks), config.persistent_chunks, config.chunk_buffers
        times, recompute = self.times(config.swap_blocks), self.recompute(self.kinds(config))

        def idle_s(i: int) -> float:
            uploads = times.upload_again[i - 2] if persistent < i - 1 <= n - buffers else 0.0
            return formulas.backward_term_s(times, recompute, i, persistent=persistent, buffers=buffers) - uploads

        return all(sum(idle_s(i) for i in range(chunk + 1, n + 2)) >= s for chunk, s in self.returns(config.swap_blocks))

    @property
    def copies(self) -> bool:
        """Whether anything moves between host and device."""
        h = self.hardware
        return not h.shared_memory and h.link_h2d_bytes_per_s > 0 and h.link_d2h_bytes_per_s > 0

    def persistent_counts(self) -> range:
        """Possible numbers of persistent chunks: all of them where nothing can be copied."""
        n = len(self.chunks)
        return range(0 if self.copies or self.hardware.shared_memory else n, n + 1)


def _seconds(amount: float, rate: float) -> float:
    """``amount / rate``; never, where the machine cannot do it."""
    return 0.0 if not amount else amount / rate if rate else math.inf


def _both_directions(hardware: HardwareProfile) -> tuple[float, float]:
    """Bytes/s to and from the device while both directions run.

    As measured, and at most their fair shares of host DRAM.
    """
    up, down, dram = hardware.link_h2d_bytes_per_s, hardware.link_d2h_bytes_per_s, hardware.host_dram_bytes_per_s
    slower = max(1.0, hardware.contention.get("copy|copy", 1.0))
    return min(up / slower, max(dram / 2, dram - down)), min(down / slower, max(dram / 2, dram - up))


def _forwards(times: ChunkTimes) -> tuple[float, ...]:
    """Eq. 3 for 0, 1, ... N persistent chunks."""
    n = len(times.forward)
    before = (0.0, *times.forward)
    gathered = (0.0, *accumulate(map(max, before, times.gather)))
    loads = [g + u for g, u in zip(times.gather, times.upload, strict=True)]
    uploaded = (0.0, *accumulate(map(max, before, loads)))
    return tuple(gathered[p] + uploaded[n] - uploaded[p] + before[n] for p in range(n + 1))
