"""ProTrain's search for the best configuration (section 3.1.2).

Source: "ProTrain: Efficient LLM Training via Automatic Memory Management"; the configurations are
in ``search_space.py``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from lightning_hetero.planners.protrain.formulas import ChunkTimes
from lightning_hetero.planners.protrain.search_space import Configuration, Space

_TIE = 1e-9  # times that differ by less, relatively, are equal: the smaller configuration is kept


class Best(NamedTuple):
    """The best configuration so far, and its seconds."""

    config: Configuration
    seconds: float


class _Costs:
    """Eq. 2 in constant time for all counts of chunks and buffers, at fixed activations.

    A term of eq. 5 has one of three values: its neighbours are persistent; gradients leave; or
    weights arrive too. Terms of one kind follow each other, so sums over them are differences of
    running sums.

    Args:
        times: The chunks.
        recompute: Seconds of forward that each chunk repeats.
        forward: Eq. 3 for 0, 1, ... N persistent chunks.
    """

    def __init__(self, times: ChunkTimes, recompute: Sequence[float], forward: Sequence[float]) -> None:
        n = self._n = len(times.forward)
        compute = [b + r for b, r in zip(times.backward, recompute, strict=True)] + [0.0]
        reduced, leaving = [*times.reduce, 0.0, 0.0], [r + o for r, o in zip(times.reduce, times.offload, strict=True)] + [0.0, 0.0]
        arriving = [0.0, *(g + u for g, u in zip(times.gather, times.upload_again, strict=True))]
        # Sums of the terms 1 to i, which compute chunk i, at index i.
        self._stay = (0.0, *accumulate(map(max, compute, reduced[1:])))
        self._leave = (0.0, *accumulate(map(max, compute, leaving[1:])))
        self._arrive = (0.0, *accumulate(map(max, compute, leaving[1:], arriving)))
        self._uploads = (0.0, 0.0, *accumulate(times.upload_again))
        on_device, on_cpu = (0.0, *accumulate(times.gpu_update)), (0.0, *accumulate(reversed(times.cpu_update)))
        self._on_cpu = tuple(f + on_cpu[n - p] for p, f in enumerate(forward))
        # All but the terms between the first upload and the last, which depend on the buffers.
        tail = [times.reduce[0] if p else leaving[0] for p in range(n + 1)]
        self._fixed = tuple(
            forward[p]
            + self._stay[max(0, p - 1)]
            + self._leave[p + 1 if p < n else n + 1]
            - self._leave[max(0, p - 1)]
            + tail[p]
            + on_device[p]
            - self._arrive[min(p + 1, n + 1)]
            + self._leave[n + 1]
            for p in range(n + 1)
        )
        self._late = tuple(a - b for a, b in zip(self._arrive, self._leave, strict=True))

    def iteration_s(self, persistent: int, buffers: int) -> float:
        """Eq. 2."""
        last = max(self._n - buffers, persistent) + 1
        return max(self._fixed[persistent] + self._late[last], self._on_cpu[persistent])

    def idle_s(self, persistent: int, buffers: int, first: int) -> float:
        """What uploads leave of the link in the terms of eq. 5 from ``first`` on."""
        last = max(self._n - buffers, persistent) + 1  # term of the last upload

        def over(sums: Sequence[float], begin: int, end: int) -> float:
            return sums[end] - sums[max(begin, first) - 1] if end >= max(begin, first) else 0.0

        return (
            over(self._stay, 1, persistent - 1)
            + over(self._leave, max(persistent, 1), min(persistent, self._n) + 1)
            + over(self._arrive, persistent + 2, last)
            - over(self._uploads, persistent + 2, last)
            + over(self._leave, max(last, persistent + 1) + 1, self._n + 1)
        )


class _Swaps:
    """The search among all configurations with the same blocks swapped.

    It skips only what cannot win:

    - activations that overflow with no persistent chunk are discarded at once (section 3.1.2);
    - more buffers never make a configuration slower (eq. 7), so the most that fit decide, and then
      the fewest that are as fast;
    - more recomputed blocks never make it faster. So of a range of such counts none is better than
      the time of its first in the memory of its last, and where that is no better than what is
      known, the range is skipped.
    """

    def __init__(self, space: Space, swap: int, best: Best | None) -> None:
        self.space, self.swap, self.best = space, swap, best
        self.times, self.forward, self.returns = space.timing(swap)
        self.room, self.free = space.rooms_and_order(swap)
        self.chunk_of = {block: number for number, chunk in enumerate(space.chunks) for block in chunk}
        states = [0] * (len(space.chunks) + 1) if space.hardware.shared_memory else space.persistent_bytes
        host_room = space.host_bytes_allowed - space.swapped_bytes(swap)
        self.rows = [  # persistent chunks, their bytes, and the fewest and the most buffers
            (p, states[p], space.least_buffers(p), space.most_buffers(p))
            for p in space.persistent_counts()
            if space.least_host_bytes[p] <= host_room
        ]

    def run(self) -> Best | None:
        """The best of the configurations before and of these."""
        self._range(0, len(self.room), self._costs(0))
        return self.best

    def _range(self, first: int, end: int, costs: _Costs) -> None:
        """Tries ``first`` to ``end - 1`` recomputed blocks; ``costs`` are those of the first."""
        room = max(self.room[max(first, end - 2) : end])  # eq. 10: the last may need more
        bound = min((costs.iteration_s(p, most) for p, _, most in self._fitting(room)), default=math.inf)
        if not self._better(bound):
            return
        if end - first == 1:
            self._chunks(first, costs)
            return
        middle = (first + end) // 2
        self._range(first, middle, costs)
        self._range(middle, end, self._costs(middle))

    def _costs(self, checkpoint: int) -> _Costs:
        recompute = [0.0] * len(self.space.chunks)
        for block in self.free[:checkpoint]:
            recompute[self.chunk_of[block]] += self.space.model.blocks[block].forward_s
        return _Costs(self.times, recompute, self.forward)

    def _fitting(self, room: int) -> list[tuple[int, int, int]]:
        """Counts of persistent chunks that fit, each with its fewest and most buffers."""
        size = self.space.buffer_bytes
        rows = ((p, fewest, min(most, (room - states) // size)) for p, states, fewest, most in self.rows)
        return [row for row in rows if row[2] >= row[1]]

    def _better(self, seconds: float) -> bool:
        return seconds < (self.best.seconds * (1 - _TIE) if self.best else math.inf)

    def _chunks(self, checkpoint: int, costs: _Costs) -> None:
        """Tries all counts of chunks."""

        def in_time(persistent: int, buffers: int) -> bool:
            return all(costs.idle_s(persistent, buffers, chunk + 1) >= s * (1 - _TIE) for chunk, s in self.returns)

        for p, fewest, most in self._fitting(self.room[checkpoint]):
            seconds = costs.iteration_s(p, most)
            if not self._better(seconds) or not in_time(p, most):
                continue
            buffers = range(fewest, most + 1)
            enough = bisect_left(buffers, True, key=lambda b: costs.iteration_s(p, b) <= seconds * (1 + _TIE) and in_time(p, b))
            config = Configuration(
                persistent_chunks=p, chunk_buffers=buffers[enough], swap_blocks=self.swap, checkpoint_blocks=checkpoint
            )
            self.best = Best(config, seconds)


def search(space: Space) -> Configuration | None:
    """The fastest allowed configuration by eq. 2 (section 3.1.2); ``None`` if there is none."""
    best: Best | None = None
    for swap in range(space.most_swaps + 1):
        best = _Swaps(space, swap, best).run()
    return best.config if best else None
