"""The memory of each block in a recorded batch: saved and temporary bytes, and operators."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat

from lightning_hetero.ir.model import BackwardOperator, OperatorProfile
from lightning_hetero.ir.schedule import Phase
from lightning_hetero.profiling.operators import RecordedOperator, RecordedStorage
from lightning_hetero.profiling.timeline import Stretch
from lightning_hetero.runtime.activations.names import OperatorNames
from lightning_hetero.units import MIB

_HEAP_SAYS_MORE = 1.25  # malloc counts more than activations, so only a far larger figure replaces the operators'


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The observations of one batch.

    Attributes:
        stretches: Its compute, in order, every stretch with its block.
        tokens: Its tokens, or samples if there are no tokens.
        ran: Its operators, in order; empty if they were not recorded.
        made: The storages that they made.
        live_bytes: Bytes of storages after each event, parameters' gradients and ``casts`` left
            out.
        saved_live_bytes: The bytes of these that forward saves.
        peak_bytes: Peak bytes of storages, parameters' gradients included.
        saved: Numbers of the storages that forward saves, in any place until backward.
        again: Numbers of the storages that a recomputed forward saved, because the block had
            dropped them.
        casts: Numbers of the saved storages that are 16-bit casts of weights of blocks that are not
            pinned.
        hidden_bytes: For each stretch, memory of the device's allocator beyond the storages; empty
            if it is not known.
        inputs: Numbers of the storages that came with the arguments of each block's forward, by the
            block's index.
    """

    stretches: tuple[Stretch, ...]
    tokens: int = 1
    ran: tuple[RecordedOperator, ...] = ()
    made: tuple[RecordedStorage, ...] = ()
    live_bytes: tuple[int, ...] = ()
    saved_live_bytes: tuple[int, ...] = ()
    peak_bytes: int = 0
    saved: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()
    casts: frozenset[int] = frozenset()
    hidden_bytes: tuple[int, ...] = ()
    inputs: Mapping[int, tuple[int, ...]]

    def seconds(self, phase: Phase, block: int) -> float:
        """Compute of one phase of one block, without recomputation."""
        return sum(s.seconds for s in self.stretches if s.phase is phase and s.block == block and not s.again)

    def grown_bytes(self, block: int) -> int:
        """Bytes that malloc allocated during one block's forward and that were not freed."""
        forward = (s for s in self.stretches if s.phase is Phase.FORWARD and s.block == block and not s.again)
        return sum(s.end.heap_bytes - s.begin.heap_bytes for s in forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorMeasure:
    """One operator of the recorded batch, with the memory around it.

    Attributes:
        block: Index of its block.
        phase: Forward or backward.
        name: As in :class:`~lightning_hetero.ir.model.OperatorProfile`.
        seconds: Its duration.
        flop: Its FLOP.
        gap_s: Seconds since the previous operator ended.
        gap_bytes: Change of live bytes in that gap, by autograd and Python.
        before_bytes: Live bytes when it began.
        peak_bytes: Peak of live bytes while it ran, as far as storages show it.
        after_bytes: Live bytes when it ended.
    """

    block: int
    phase: Phase
    name: str
    seconds: float
    flop: float
    gap_s: float
    gap_bytes: int
    before_bytes: int
    peak_bytes: int
    after_bytes: int


def measures(observed: Observed) -> tuple[OperatorMeasure, ...]:
    """The operators of a recorded batch one by one, in order."""
    labels = _labels(observed)
    rows: list[OperatorMeasure] = []
    end_s, left = 0.0, 0
    for op, stretch, label in zip(observed.ran, _stretches(observed), labels, strict=True):
        before = observed.live_bytes[op.events]
        after = observed.live_bytes[op.events + len(op.made)]
        first = not rows or rows[-1].phase is not stretch.phase
        rows.append(
            OperatorMeasure(
                block=stretch.block,
                phase=stretch.phase,
                name=label,
                seconds=op.end_s - op.start_s,
                flop=op.flop,
                gap_s=op.start_s - (stretch.begin.seconds if first else end_s),
                gap_bytes=before - left,
                before_bytes=before,
                peak_bytes=max(before, after),
                after_bytes=after,
            )
        )
        end_s, left = op.end_s, after
    return tuple(rows)


def kept_bytes(observed: Observed, grown_bytes: int) -> int:
    """Memory of malloc beyond a step's peak: holes.

    See [Note: Fragmentation] in ``runtime.process_memory``.

    Args:
        observed: The recorded batch.
        grown_bytes: Growth of the heap since before that batch; 0 if the C library does not say.
    """
    return max(0, grown_bytes - observed.peak_bytes)


class RecordedMemory:
    """The memory and the FLOP of each block, from one recorded batch.

    [Note: Whose activation]
    A saved storage is the boundary of the first block that got it as an argument; otherwise it
    belongs to the block whose operator made it. So a tensor that one block makes and the next one
    uses is counted once, at the start of a recomputation.

    [Note: Any plan will do]
    A block saves the same tensors under any plan. Kept tensors exist when backward begins. Tensors
    that leave the device are recorded when they leave. Dropped tensors are seen when the forward is
    repeated; the repetition counts neither as forward nor as backward. So a batch can be recorded
    under a plan that fits the device (LoHan section IV-B, ProTrain section 3.2).

    Args:
        observed: The batch.
        num_blocks: The number of the model's blocks.
    """

    def __init__(self, observed: Observed, num_blocks: int) -> None:
        self._observed = observed
        self._stretches = _stretches(observed)
        self.forward_flop = [0.0] * num_blocks
        self.activation_bytes = [0] * num_blocks
        self.boundary_bytes = [0] * num_blocks
        self.transient_bytes = [0] * num_blocks
        self.cast_bytes = [0] * num_blocks
        for op, stretch in zip(observed.ran, self._stretches, strict=True):
            if stretch.phase is Phase.FORWARD and not stretch.again:
                self.forward_flop[stretch.block] += op.flop
        boundary: dict[int, int] = {}
        for block, numbers in observed.inputs.items():
            for number in numbers:
                if boundary.setdefault(number, block) == block:
                    self.boundary_bytes[block] += observed.made[number].num_bytes
        self._labels = _labels(observed)
        again = self._again(boundary)
        self._own = sorted((observed.saved | again) - boundary.keys() - observed.casts)
        for number in sorted(observed.saved | again | boundary.keys()):
            block = boundary.get(number, self._stretches[observed.made[number].operator].block)
            counted = self.cast_bytes if number in observed.casts else self.activation_bytes
            counted[block] += observed.made[number].num_bytes
        recomputed = {stretch.block for stretch in observed.stretches if stretch.again}
        for stretch, hidden in zip(observed.stretches, observed.hidden_bytes or repeat(0), strict=False):
            block = stretch.block
            if block in recomputed and stretch.phase is Phase.FORWARD and stretch.inside:
                continue  # dropped tensors are temporary memory here; the repetition shows the rest
            self.transient_bytes[block] = max(self.transient_bytes[block], self._beside(stretch) + hidden)

    def backward(self) -> list[tuple[BackwardOperator, ...]]:
        """Backward operators that free saved tensors, and the last one of each stretch, by block.

        [Note: Memory of backward]
        Everything between two of these counts as the gap before the second one: operators that free
        nothing, autograd, and Python. A repeated forward inside is left out. Memory that is freed
        after the last operator of a stretch counts for that operator.
        """
        seen, rows = self._observed, [list[BackwardOperator]() for _ in self.activation_bytes]
        rest = [live - saved for live, saved in zip(seen.live_bytes, seen.saved_live_bytes, strict=True)]
        for stretch, hidden in zip(seen.stretches, seen.hidden_bytes or repeat(0), strict=False):
            if stretch.phase is not Phase.BACKWARD or stretch.again:
                continue
            first, last = stretch.begin.operators, stretch.end.operators
            begin, most = stretch.begin.events, 0
            for number in range(first, last):
                op = seen.ran[number]
                end = op.events + len(op.made)
                freed = self._freed(begin, stretch.end.events if number == last - 1 else end)
                most = max(most, *rest[begin : op.events + 1])
                peak = hidden + max(rest[op.events : end + 1])
                begin = end
                if not freed and number < last - 1:
                    most = max(most, peak)
                    continue
                row = BackwardOperator(
                    name=self._labels[number],
                    gap_peak_bytes=most,
                    before_bytes=rest[op.events],
                    peak_bytes=peak,
                    after_bytes=rest[end],
                    freed_bytes=freed,
                )
                rows[stretch.block].append(row)
                begin, most = end, 0
        return [tuple(row) for row in rows]

    def _freed(self, begin: int, end: int) -> int:
        """Bytes of saved tensors that are freed between two events."""
        return sum(max(0, a - b) for a, b in pairwise(self._observed.saved_live_bytes[begin : end + 1]))

    def _beside(self, stretch: Stretch) -> int:
        """A stretch's peak beyond the saved tensors: those at forward's end or backward's begin."""
        live, saved = self._observed.live_bytes, self._observed.saved_live_bytes
        forward = stretch.phase is Phase.FORWARD or stretch.again
        most = max(live[stretch.begin.events : stretch.end.events + 1])
        return max(0, most - saved[stretch.end.events if forward else stretch.begin.events])

    def _again(self, boundary: Mapping[int, int]) -> set[int]:
        """Tensors that recomputations have restored, without block outputs: these are boundaries.

        Args:
            boundary: The block of each boundary storage.
        """
        returned: Counter[tuple[int, str]] = Counter()
        for number in boundary:
            stretch = self._stretches[self._observed.made[number].operator]
            returned[stretch.block, self._labels[self._observed.made[number].operator]] += stretch.inside
        found: set[int] = set()
        for number in sorted(self._observed.again):
            operator = self._observed.made[number].operator
            key = self._stretches[operator].block, self._labels[operator]
            if returned[key] > 0:
                returned[key] -= 1
            else:
                found.add(number)
        return found

    def correct(self, grown: Sequence[int]) -> None:
        """Takes malloc's figure if it is far above the operators', as for compiled code.

        Args:
            grown: Growth of each block, bytes.
        """
        if sum(grown) > _HEAP_SAYS_MORE * (sum(self.activation_bytes) + sum(self.cast_bytes)) + MIB:
            rows = zip(self.activation_bytes, grown, self.cast_bytes, strict=True)
            self.activation_bytes = [max(known, more - casts) for known, more, casts in rows]

    def operators(self, block: int) -> tuple[OperatorProfile, ...]:
        """A block's forward operators with saved outputs, in the order of their first run."""
        flop: defaultdict[str, float] = defaultdict(float)
        saved: Counter[str] = Counter()
        labels = self._labels
        for op, stretch, label in zip(self._observed.ran, self._stretches, labels, strict=True):
            if stretch.block == block and stretch.phase is Phase.FORWARD and stretch.inside and not stretch.again:
                flop[label] += op.flop
        for number in self._own:
            operator = self._observed.made[number].operator
            stretch = self._stretches[operator]
            if stretch.block == block and stretch.inside:
                saved[labels[operator]] += self._observed.made[number].num_bytes
        return tuple(OperatorProfile(name=name, flop=flop[name], bytes=saved[name]) for name in flop if saved[name])


def _stretches(observed: Observed) -> list[Stretch]:
    """The stretch in which each operator ran."""
    begins = [s.begin.operators for s in observed.stretches]
    return [observed.stretches[bisect_right(begins, number) - 1] for number in range(len(observed.ran))]


def _labels(observed: Observed) -> list[str]:
    """A name for each operator: see [Note: Names of operators] in ``runtime.activations.names``."""
    names: defaultdict[tuple[int, Phase, bool, bool], OperatorNames] = defaultdict(OperatorNames)
    return [
        names[stretch.block, stretch.phase, stretch.inside, stretch.again].name(op.name, op.param, made=bool(op.made))
        for op, stretch in zip(observed.ran, _stretches(observed), strict=True)
    ]
