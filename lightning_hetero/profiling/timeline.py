"""Divides a training batch into stretches of compute, on a clock that stops while compute waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from lightning_hetero.ir.schedule import NO_BLOCK, Phase
from lightning_hetero.store.live.blocks import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment.

    Attributes:
        seconds: Compute so far, without waits for the runtime.
        operators: Operators recorded so far.
        events: Storages made or freed so far.
        heap_bytes: Bytes that malloc (on a device with memory of its own: torch) has allocated; 0
            if it is not known.
        peak_bytes: Peak of torch's allocation on such a device since the mark before; 0 if it is
            not known.
    """

    seconds: float
    operators: int = 0
    events: int = 0
    heap_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Compute of one block without interruption.

    Attributes:
        phase: Forward or backward.
        block: The block's index; ``None``: no block yet, see :func:`attributed`.
        begin: Its begin.
        end: Its end.
        inside: Whether it ran in the block itself, not before or after it.
        again: Whether it repeated a forward during backward, for tensors that the block had
            dropped.
    """

    phase: Phase
    block: int
    begin: Mark
    end: Mark
    inside: bool = True
    again: bool = False

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end.seconds - self.begin.seconds


class Timeline:
    """Follows the anchors of one batch (a ``Watcher`` of the executor).

    Blocks may contain each other: compute between two inner blocks belongs to the outer one. A
    block's backward ends where the next one begins. A recomputed block computes from there on.

    Args:
        now: Makes marks.
        on_inputs: Called with the arguments of each block's first forward.

    Attributes:
        phase: What is under way.
    """

    def __init__(self, now: Callable[[], Mark], on_inputs: Callable[[Block, Any], None] = lambda block, inputs: None) -> None:
        self._now, self._on_inputs = now, on_inputs
        self.stretches: list[Stretch] = []
        self.phase = Phase.FORWARD
        self._inside: list[int] = []  # blocks whose forward is under way, outermost first
        self._current = NO_BLOCK
        self._begin: Mark | None = None
        self._outer: list[int] = []  # whose compute recomputations interrupt, outermost first

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Context of compute of one phase; a nested phase interrupts the outer one."""
        outer = self.phase, self._current, self._begin
        self._cut(NO_BLOCK)
        self.phase, self._current, self._begin = phase, NO_BLOCK, self._now()
        try:
            yield
        finally:
            self._cut(NO_BLOCK)
            self.phase, self._current = outer[:2]
            self._begin = None if outer[2] is None else self._now()

    def forward_begins(self, block: Block, inputs: Any) -> None:
        """Watcher."""
        if self._begin is None:
            return
        if self.phase is Phase.FORWARD:
            self._on_inputs(block, inputs)
            self._inside.append(block.index)
        self._cut(block.index)

    def forward_ends(self, block: Block) -> None:
        """Watcher."""
        if self._begin is None or self.phase is not Phase.FORWARD:
            return
        if self._inside and self._inside[-1] == block.index:
            self._inside.pop()
        self._cut(self._inside[-1] if self._inside else NO_BLOCK)

    def backward_begins(self, block: Block) -> None:
        """Watcher."""
        if self.phase is Phase.BACKWARD:
            self._cut(block.index)

    @contextmanager
    def again(self, block: int) -> Iterator[None]:
        """Context of a repeated forward; the interrupted stretch continues after it."""
        if self._begin is None:
            yield
            return
        outer = self._current
        self._cut(block)
        self._outer.append(outer)
        try:
            yield
        finally:
            self._cut(outer)
            self._outer.pop()

    def _cut(self, following: int) -> None:
        """Ends the current stretch, if any, and begins a stretch of another block."""
        if self._begin is None:
            return
        mark = self._now()
        again = bool(self._outer)
        self.stretches.append(Stretch(phase=self.phase, block=self._current, begin=self._begin, end=mark, again=again))
        self._current, self._begin = following, mark


def attributed(stretches: list[Stretch]) -> list[Stretch]:
    """Gives each stretch without a block to the next block of its phase, or else to the last.

    So code before a block's forward (masks, positions) belongs to the block, and so does its
    backward, which follows the block's own. The loss belongs to the last block in both phases.
    """
    last: dict[Phase, int] = {}
    for stretch in stretches:
        if stretch.block != NO_BLOCK:
            last[stretch.phase] = stretch.block
    rows: list[Stretch] = []
    following = {phase: last.get(phase, last.get(Phase.FORWARD, 0)) for phase in Phase}
    for stretch in reversed(stretches):
        if stretch.block != NO_BLOCK:
            following[stretch.phase] = stretch.block
        rows.append(replace(stretch, block=following[stretch.phase], inside=stretch.block != NO_BLOCK))
    return rows[::-1]
