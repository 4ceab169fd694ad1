"""ProTrain's formulas: chunk size, interleaving, run time and memory, each a function of its own.

Equation numbers and sections are those of "ProTrain: Efficient LLM Training via Automatic Memory
Management". What the paper leaves open is marked [inferred] and discussed in
docs/planners/protrain.md.

[Note: Chunks]
Parameters are grouped in chunks of one size, in the order of execution; a block never straddles two
chunks. The first ``persistent_chunks`` live on the device with their optimizer state. The others
live on the host; ``chunk_buffers`` device buffers cache their weights, so the last that many need
no second upload in backward. Formulas count chunks from 1, as the paper does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_hetero.ir.model import BackwardOperator, BlockProfile, ModelProfile
from lightning_hetero.ir.plan import Saved

# ------------------------------------------------------------------ chunk size (B.1)


def pack(sizes: Sequence[int], chunk_params: int) -> tuple[tuple[int, ...], ...]:
    """Groups blocks into chunks in the order of execution.

    A block that does not fit the open chunk begins the next one.

    Args:
        sizes: Elements of each block. A shared parameter is counted by the block that uses it
            first.
        chunk_params: Elements of one chunk; at least those of the largest block.

    Returns:
        For each chunk the indices of its blocks.
    """
    chunks: list[list[int]] = [[]]
    room = chunk_params
    for index, size in enumerate(sizes):
        if size > room and chunks[-1]:
            chunks.append([])
            room = chunk_params
        chunks[-1].append(index)
        room -= size
    return tuple(tuple(c) for c in chunks)


def weight_elements(model: ModelProfile) -> list[int]:
    """Elements of each block's weights; quantized ones as so many of the compute dtype."""
    return [-(-model.weight_bytes(b) // model.compute_itemsize) for b in model.blocks]


def wasted_params(sizes: Sequence[int], chunk_params: int) -> int:
    """Elements of all chunks that hold no parameter (B.1)."""
    return len(pack(sizes, chunk_params)) * chunk_params - sum(sizes)


def best_chunk_params(sizes: Sequence[int], *, interval: int = 1024, span: int = 32 * 2**20) -> int:
    """The chunk size of least waste (B.1), by a grid search; the smallest of equals.

    The grid begins at the largest block and goes on for ``span`` elements, though not beyond twice
    that block: one chunk for everything would waste nothing and leave nothing to decide [inferred;
    span and interval are the defaults of Colossal-AI's search, whose chunks the paper builds on].
    Waste grows with the size until a chunk takes one more block, so only grid points where that
    happens are tried; the result is that of the whole grid.

    Args:
        sizes: Elements of each block.
        interval: Elements between two points of the grid.
        span: Elements between its first and its last point.
    """
    largest = max(max(sizes), 1)
    start = math.ceil(largest / interval) * interval
    end = start + min(span, largest)
    points = {start}
    for first in range(len(sizes)):
        for total in accumulate(sizes[first:]):
            point = start + max(0, math.ceil((total - start) / interval)) * interval
            if point > end:
                break
            points.add(point)
    return min(sorted(points), key=lambda p: wasted_params(sizes, p))


# ------------------------------------------------------------------ activations (section 3.1.1)


def swap_interval(blocks: Sequence[BlockProfile], link_d2h_bytes_per_s: float) -> int:
    """The number of forwards that hide one block's swap-out (section 3.1.1); 0: no swaps.

    Blocks that differ: their mean.
    """
    forward_s = sum(b.forward_s for b in blocks)
    if not link_d2h_bytes_per_s or not forward_s:
        return 0
    return max(1, math.ceil(sum(b.activation_bytes for b in blocks) / link_d2h_bytes_per_s / forward_s))


def interleave(num_blocks: int, *, swap: int, checkpoint: int, interval: int) -> tuple[Saved, ...]:
    """What becomes of each transformer block's activations (section 3.1.1, Figure 2).

    Every interval begins with a block that is swapped, until there are ``swap``; recomputed blocks
    fill the places after them, earliest first; blocks that keep their activations come last.
    """
    swapped = {i * interval for i in range(swap)}
    free = [i for i in range(num_blocks) if i not in swapped]
    recomputed = set(free[:checkpoint])
    kinds = (Saved.SWAP_HOST if i in swapped else Saved.RECOMPUTE if i in recomputed else Saved.KEEP for i in range(num_blocks))
    return tuple(kinds)


# ------------------------------------------------------------------ run time (A.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTimes:
    """Seconds of each chunk, in the order of execution.

    Attributes:
        forward: Its blocks' forward.
        backward: Their backward without recomputation.
        gather: All-gather of its weights; 0 on one device.
        reduce: Reduce-scatter of its gradients.
        upload: Its weights to the device, in forward.
        upload_again: The same in backward: another set of chunks shares the link with activations.
        offload: Its gradients to the host.
        gpu_update: Its optimizer update on the device.
        cpu_update: The same on the CPU.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    gather: tuple[float, ...]
    reduce: tuple[float, ...]
    upload: tuple[float, ...]
    upload_again: tuple[float, ...]
    offload: tuple[float, ...]
    gpu_update: tuple[float, ...]
    cpu_update: tuple[float, ...]


def forward_prefetch_s(times: ChunkTimes, i: int, *, persistent: int) -> float:
    """Seconds until chunk ``i`` is there for its forward (eq. 4)."""
    if i > len(times.forward):
        return 0.0
    return times.gather[i - 1] if i <= persistent else times.gather[i - 1] + times.upload[i - 1]


def reduce_offload_s(times: ChunkTimes, i: int, *, persistent: int) -> float:
    """Seconds until the gradients of chunk ``i`` are where they are used (eq. 6)."""
    if i > len(times.forward):
        return 0.0
    return times.reduce[i - 1] if i <= persistent else times.reduce[i - 1] + times.offload[i - 1]


def backward_prefetch_s(times: ChunkTimes, i: int, *, persistent: int, buffers: int) -> float:
    """Seconds until chunk ``i`` is there for its backward (eq. 7)."""
    if i <= persistent or i > len(times.forward) - buffers:
        return 0.0
    return times.gather[i - 1] + times.upload_again[i - 1]


def forward_s(times: ChunkTimes, *, persistent: int) -> float:
    """Seconds of forward (eq. 3)."""
    compute = (0.0, *times.forward)
    return sum(max(compute[i - 1], forward_prefetch_s(times, i, persistent=persistent)) for i in range(1, len(compute) + 1))


def backward_term_s(times: ChunkTimes, recompute: Sequence[float], i: int, *, persistent: int, buffers: int) -> float:
    """One term of eq. 5: chunk ``i`` computes, ``i - 1`` arrives, gradients of ``i + 1`` leave.

    The indices 0 and N+1 take no time [inferred].
    """
    compute = times.backward[i - 1] + recompute[i - 1] if i <= len(times.backward) else 0.0
    prefetch = backward_prefetch_s(times, i - 1, persistent=persistent, buffers=buffers)
    return max(compute, prefetch, reduce_offload_s(times, i + 1, persistent=persistent))


def backward_s(times: ChunkTimes, recompute: Sequence[float], *, persistent: int, buffers: int) -> float:
    """Seconds of backward (eq. 5), with the first chunk's gradients [inferred].

    Args:
        times: The chunks.
        recompute: Seconds of forward that each chunk repeats.
        persistent: Chunks that live on the device.
        buffers: Chunk buffers.
    """
    n = len(times.backward)
    terms = (backward_term_s(times, recompute, i, persistent=persistent, buffers=buffers) for i in range(1, n + 2))
    return sum(terms) + reduce_offload_s(times, 1, persistent=persistent)


def iteration_s(times: ChunkTimes, recompute: Sequence[float], *, persistent: int, buffers: int) -> float:
    """Seconds of one step (eq. 2); arguments as for :func:`backward_s`."""
    on_device = backward_s(times, recompute, persistent=persistent, buffers=buffers) + sum(times.gpu_update[:persistent])
    return forward_s(times, persistent=persistent) + max(on_device, sum(times.cpu_update[persistent:]))


# ------------------------------------------------------------------ memory (A.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorMemory:
    """Device memory around one operator of backward, static memory taken out, bytes.

    Attributes:
        cur_prior: Change of memory since the hookable operator before it.
        peak_prior: The most above the start of that time.
        cur_op: Change during the operator.
        peak_op: The most above its start.
        act: Activations that it frees.
    """

    cur_prior: int = 0
    peak_prior: int = 0
    cur_op: int = 0
    peak_op: int = 0
    act: int = 0


def peak_base_bytes(forward_bytes: int, operators: Sequence[OperatorMemory]) -> int:
    """The peak of backward with all activations on the device and no model states (eqs. 8 and 9).

    Args:
        forward_bytes: Memory as forward ends, without activations.
        operators: In the order of backward.
    """
    peak = current = forward_bytes + sum(o.act for o in operators)
    for o in operators:
        peak = max(peak, current + o.peak_prior, current + o.cur_prior + o.peak_op)  # eq. 9
        current += o.cur_prior + o.cur_op - o.act  # eq. 8
    return peak


def backward_operators(model: ModelProfile) -> tuple[OperatorMemory, ...]:
    """A profile as the memory estimator reads it: the operators of the last block first.

    What a block saves beyond what its operators free, its input above all, is freed as its backward
    ends.
    """
    rows: list[OperatorMemory] = []
    current = 0  # beside what is saved, as the operator before ended
    for block in reversed(model.blocks):
        unfreed = block.activation_bytes
        for o in block.backward or _unrecorded(block):
            freed = min(o.freed_bytes, unfreed)
            unfreed -= freed
            rows.append(
                OperatorMemory(
                    cur_prior=o.before_bytes - current,
                    peak_prior=o.gap_peak_bytes - current,
                    cur_op=o.after_bytes - o.before_bytes,
                    peak_op=o.peak_bytes - o.before_bytes,
                    act=freed,
                )
            )
            current = o.after_bytes
        rows[-1] = replace(rows[-1], act=rows[-1].act + unfreed)
    return tuple(rows)


def _unrecorded(block: BlockProfile) -> tuple[BackwardOperator, ...]:
    """The backward operators of a block without a record, as of a preset: its operators reversed.

    It has one figure for what is neither weight nor saved, ``transient_bytes``: each of its
    operators may need it [inferred].
    """
    return tuple(
        BackwardOperator(
            name=name, gap_peak_bytes=0, before_bytes=0, peak_bytes=block.transient_bytes, after_bytes=0, freed_bytes=freed
        )
        for name, freed in (*((o.name, o.bytes) for o in reversed(block.operators)), ("input", 0))
    )


def peak_bytes(base: int, *, persistent: int, buffers: int, blocks: Sequence[BlockProfile], kinds: Sequence[Saved]) -> int:
    """Peak device memory of a configuration (eq. 10), as sums over blocks that may differ.

    The paper multiplies it by a fragmentation factor; the planner divides the memory that it may
    use by that instead.

    Args:
        base: :func:`peak_base_bytes`.
        persistent: Bytes of all persistent chunks.
        buffers: Bytes of all chunk buffers.
        blocks: The transformer blocks.
        kinds: What becomes of their activations.
    """
    saved = [b.activation_bytes - (b.boundary_bytes if k is Saved.RECOMPUTE else 0) for b, k in zip(blocks, kinds, strict=True)]
    peak = base + persistent + buffers - sum(s for s, k in zip(saved, kinds, strict=True) if k is not Saved.KEEP)
    if Saved.KEEP not in kinds:
        peak += max((b.activation_bytes - b.boundary_bytes for b in blocks), default=0)
    return peak
