"""One rank of several whose every use of memory is ordered: compute, lane ``net``, the engine, and
the other ranks, which do the same at their pace.

A rank sees the others only where all meet. So each is followed alone, in its own process, and *the
others* are actors there that do what the rank does, as early as nothing forbids it:

- they update their slices of a block once its REDUCE has ended, in memory that they share with this
  rank, or read them from the disk once all have met for its RELEASE, and tell of it no earlier than
  at their GATHER of the block;
- they read this rank's slice from the GATHER on, and tell of it no earlier than at the next REDUCE
  of the block, or as they announce its RELEASE.

Each collective brings both sides what the other one knew as it began.

Some things are no memory, and are followed as if they were. Who uses the group of ranks writes it,
since no two threads may. What a REDUCE decides about a block is written by its op, and read by who
asks whether the block's gradients are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from lightning_hetero.lanes import engine
from lightning_hetero.lanes.collectives import Announced, Collectives
from lightning_hetero.lanes.engine import EngineLanes
from lightning_hetero.runtime.slice_gradients import SliceGradient, SliceGradients
from lightning_hetero.runtime.slices import Slices, _other_ranges
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.shared_memory import SharedArena
from support.checked_streams import _checked_op, checking
from support.checker import Checker
from support.happens_before import Actor, Clock


class _Others:
    """The other ranks, as this one may know them."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self.net = Actor("the collectives of other ranks")
        self._updates: dict[int, Actor] = {}  # by block
        self._reads: dict[int, Actor] = {}
        self._done: set[int] = set()  # blocks whose RELEASE they have announced, and none has done

    def meet(self) -> None:
        """A collective ends: each side knows what the other one did before."""
        host = self._checker.host()
        mine, theirs = host.hand_on(), self.net.hand_on()
        host.join(theirs)
        self.net.join(mine)

    def read(self, block: Block) -> None:
        """GATHER has ended on them, and they use the block, unless they have left it out."""
        if block.index in self._done:
            return
        actor = self._reads.setdefault(block.index, Actor(f"other ranks that use block {block.index}"))
        actor.join(self.net.hand_on())
        for part in _shared(block):
            self._use(actor, part, [part.slice_range], "a forward or a backward", writes=False)

    def have_read(self, *blocks: Block | int) -> None:
        """They begin REDUCE, or GATHER once more."""
        for block in blocks:
            index = block if isinstance(block, int) else block.index
            if index in self._reads:
                self.net.join(self._reads[index].hand_on())

    def announce_release(self, block: int) -> None:
        """They use the block no more."""
        self.have_read(block)
        self._done.add(block)

    def have_read_all(self) -> None:
        """Their backward has ended."""
        self.have_read(*self._reads)

    def renew(self, block: Block, what: str) -> None:
        """REDUCE has ended on them, or RELEASE: their slices may change."""
        self._done.discard(block.index)
        actor = self._updates.setdefault(block.index, Actor(f"other ranks' update of block {block.index}"))
        actor.join(self.net.hand_on())
        for part in _shared(block):
            self._use(actor, part, _other_ranges(part), what, writes=True)

    def have_updated(self, block: Block) -> None:
        """They begin GATHER."""
        if block.index in self._updates:
            self.net.join(self._updates[block.index].hand_on())

    def _use(self, actor: Actor, part: Part, ranges: Sequence[tuple[int, int]], what: str, *, writes: bool) -> None:
        for first, length in ranges:
            start = part.arena.address + first
            self._checker.use(actor, start, start + length, what, writes=writes)


def _shared(block: Block) -> list[Part]:
    return [part for part in block.parts if isinstance(part.arena, SharedArena)]


class _Things:
    """What is no memory, and is used like memory."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self._kept: list[object] = []  # whose addresses must not be used again

    def use(self, thing: object, offset: int, what: str, *, writes: bool) -> None:
        self._kept.append(thing)
        self._checker.use(self._checker.host(), id(thing) + offset, id(thing) + offset + 1, what, writes=writes)

    def miss(self, use: str, after: str) -> None:
        """Nothing has written yet what is used."""
        self._checker.found[f"nothing orders the {use} after {after}"] = None


@contextmanager
def checked_rank(*, prompt: bool = False) -> Iterator[Checker]:
    """Inside, a training of this rank is checked; raises what was found."""
    with checking(prompt=prompt) as checker, pytest.MonkeyPatch.context() as patch:
        others, things = _Others(checker), _Things(checker)
        _check_lane(checker, patch)
        _check_collectives(checker, others, things, patch)
        _check_slices(others, patch)
        _check_sums(things, patch)
        _check_decisions(checker, things, patch)
        yield checker


def _check_lane(checker: Checker, patch: pytest.MonkeyPatch) -> None:
    drain = EngineLanes.drain

    def drains(lanes: EngineLanes) -> None:
        try:
            drain(lanes)
        finally:
            checker.host().join(checker.settled.clock)  # it looks at no op that was found ended before

    patch.setattr(engine, "QueuedOp", _checked_op(checker))
    patch.setattr(EngineLanes, "drain", drains)


def _check_collectives(checker: Checker, others: _Others, things: _Things, patch: pytest.MonkeyPatch) -> None:
    naming, announce, met, meet = Collectives._naming, Collectives.announce, Collectives.met, Collectives._meet
    announced = dict[Announced, Clock]()

    def use(tensor: Tensor, what: str, *, writes: bool) -> None:
        checker.use(checker.host(), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, what, writes=writes)

    def use_group(collectives: Collectives, what: str) -> None:
        things.use(collectives, 0, f"{what} of the group of ranks", writes=True)
        checker.check()  # the other ranks may wait for ever for what comes

    def meeting(name: str, reads: Sequence[int], writes: Sequence[int]) -> None:
        """Torch's collectives do not say which of their arguments they write."""
        real = getattr(Collectives, name)

        def call(collectives: Collectives, *args: Any, **options: Any) -> Any:
            for index in reads:
                use(args[index], f"{name} of all ranks", writes=False)
            found = real(collectives, *args, **options)
            for index in writes:
                use(args[index], f"{name} of all ranks", writes=True)
            others.meet()
            return found

        patch.setattr(Collectives, name, call)

    @contextmanager
    def names(collectives: Collectives, what: str, tensor: Tensor, ranks: int = 0, **options: Any) -> Iterator[None]:
        with naming(collectives, what, tensor, ranks, **options):
            use_group(collectives, what)
            yield

    def meets(collectives: Collectives, op: Announced) -> list[bool]:
        use_group(collectives, f"the meeting for {op.what}")
        return met(collectives, op)

    def announces(collectives: Collectives, what: str, block: int, *flags: bool, barrier: bool = False) -> Announced:
        op = announce(collectives, what, block, *flags, barrier=barrier)
        announced[op] = checker.host().hand_on()
        return op

    def meets_ahead(collectives: Collectives) -> None:
        """All have announced these ops, some of which come later."""
        meet(collectives)
        for op in list(collectives._coming)[: len(collectives._met)]:
            checker.host().join(announced[op])
            if op.what == "RELEASE":
                others.announce_release(op.block)
        others.meet()

    patch.setattr(Collectives, "_naming", names)
    patch.setattr(Collectives, "announce", announces)
    patch.setattr(Collectives, "_meet", meets_ahead)
    patch.setattr(Collectives, "met", meets)
    meeting("gather", [1], [0])
    meeting("reduce", [1], [0, 2])
    meeting("broadcast", [], [0])
    meeting("agree", [], [])
    meeting("tell_all", [], [])


def _check_slices(others: _Others, patch: pytest.MonkeyPatch) -> None:
    gather, release, reduce, sums = Slices.gather, Slices.release, SliceGradients.reduce, SliceGradients._reduce

    def gathers(slices: Slices, block: Block) -> Callable[[], None]:
        run = gather(slices, block)

        def checked() -> None:
            others.have_read(block)
            others.have_updated(block)
            run()
            others.read(block)

        return checked

    def releases(slices: Slices, block: Block) -> Callable[[], None]:
        is_left = block.weights_on_disk and any(part.is_whole for part in block.parts)
        run = release(slices, block)

        def checked() -> None:
            run()
            others.renew(block, "FETCH, of weights")

        return checked if is_left else run

    def reduces(gradients: SliceGradients, block: Block, *, early: bool) -> Callable[[], None]:
        run, is_late = reduce(gradients, block, early=early), gradients._backward.has_ended

        def checked() -> None:
            others.have_read(block)
            if is_late:
                others.have_read_all()
            run()

        return checked

    def summed(gradients: SliceGradients, backward: Any, block: Block, left: Any, *, some_lack: bool) -> None:
        sums(gradients, backward, block, left, some_lack=some_lack)
        others.renew(block, "update, of weights")

    patch.setattr(Slices, "gather", gathers)
    patch.setattr(Slices, "release", releases)
    patch.setattr(SliceGradients, "reduce", reduces)
    patch.setattr(SliceGradients, "_reduce", summed)


def _check_decisions(checker: Checker, things: _Things, patch: pytest.MonkeyPatch) -> None:
    """A REDUCE decides whether the block's gradients are complete. A block that it left for the end
    is complete as soon as another REDUCE has summed it: who asks then finds only what is ordered.
    """
    reduce, sums, complete = SliceGradients.reduce, SliceGradients._reduce, SliceGradients.are_complete
    ends = dict[tuple[int, int], Clock]()

    def reduces(gradients: SliceGradients, block: Block, *, early: bool) -> Callable[[], None]:
        run, backward = reduce(gradients, block, early=early), gradients._backward

        def checked() -> None:
            run()
            things.use(backward, block.index, "deciding whether gradients are complete", writes=True)

        return checked

    def summed(gradients: SliceGradients, backward: Any, block: Block, left: Any, *, some_lack: bool) -> None:
        sums(gradients, backward, block, left, some_lack=some_lack)
        ends[id(backward), block.index] = checker.host().hand_on()

    def are_complete(gradients: SliceGradients, block: Block) -> bool:
        things.use(gradients._backward, block.index, "asking whether gradients are complete", writes=False)
        return complete(gradients, block) and checker.learns_all(ends[id(gradients._backward), block.index])

    patch.setattr(SliceGradients, "reduce", reduces)
    patch.setattr(SliceGradients, "_reduce", summed)
    patch.setattr(SliceGradients, "are_complete", are_complete)


def _check_sums(things: _Things, patch: pytest.MonkeyPatch) -> None:
    """What the lane says of a gradient is memory, too: whose sum there is, its norm, and which
    gradients there are at all. Of the last, :meth:`SliceGradients.expose` needs to know all.
    """

    def follow(offset: int, name: str) -> None:
        slot = vars(SliceGradient)[name]

        def get(held: SliceGradient) -> Any:
            things.use(held, offset, f"looking at {name.strip('_')}", writes=False)
            return slot.__get__(held)

        def put(held: SliceGradient, value: object) -> None:
            things.use(held, offset, f"setting {name.strip('_')}", writes=True)
            slot.__set__(held, value)

        patch.setattr(SliceGradient, name, property(get, put))

    def run(held: SliceGradient) -> Tensor:
        if held._run is None:
            things.miss(f"look at the sum of {held.part.names[held.index]}", "the REDUCE that makes it")
        return whole.__get__(held)

    whole = vars(SliceGradient)["run"]
    for offset, name in enumerate(("norm", "_run")):
        follow(offset, name)
    patch.setattr(SliceGradient, "run", property(run))
    sums, expose = SliceGradients._reduce_part, SliceGradients.expose

    def summed(gradients: SliceGradients, part: Part, indices: Sequence[int], whole: Any) -> None:
        if any(id(part.params[index]) not in whole for index in indices):
            things.use(gradients._held, 0, "adding a gradient that only other ranks have", writes=True)
        sums(gradients, part, indices, whole)

    def exposes(gradients: SliceGradients) -> None:
        expose(gradients)
        things.use(gradients._held, 0, "showing all gradients", writes=False)

    patch.setattr(SliceGradients, "_reduce_part", summed)
    patch.setattr(SliceGradients, "expose", exposes)
