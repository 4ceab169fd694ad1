"""All orders in which several ranks can write, and a kill between any two of their writes.

The ranks do what ``store.common_steps`` decides: the same code as in training. Disks are modelled:
stores with two slots and a ring of records. A search visits every state that can be reached. In
each of them all ranks are killed, and every way to start again is tried.

A rank that dies while others go on for a while is among these orders: it is the rank that writes
nothing more before the kill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_hetero.errors import ConfigError
from lightning_hetero.store import common_steps
from lightning_hetero.store.common_steps import Membership, RankStore

Label = tuple[int, ...]  # the content of a step: which run made each of its commits
TORN: Label = (-1,)
RING = 3  # records


class Lost(Exception):
    """A resume would not go on from the last step that all ranks hold."""


@dataclass(frozen=True)
class SetOfStores:
    number: int
    ranks: int


@dataclass(frozen=True)
class Disk:
    """One store: two slots, and records of (number of the commit, slot)."""

    slots: tuple[Label, Label] = (TORN, TORN)
    records: tuple[tuple[int, int], ...] = ()

    def written(self, slot: int, content: Label) -> Disk:
        return replace(self, slots=(content, self.slots[1]) if slot == 0 else (self.slots[0], content))

    def recorded(self, number: int, slot: int) -> Disk:
        return replace(self, records=(*self.records, (number, slot))[-RING:])

    def slot_of(self, number: int) -> int:
        slots = [slot for n, slot in self.records if n == number]
        if not slots:
            raise Lost(f"commit {number} is not in the ring: {self}")
        return slots[-1]


@dataclass(frozen=True)
class Rank:
    """What a process knows.

    ``doing`` is its next write, ``told`` the numbers that it has told, ``due`` how often it has to,
    and ``heard`` the answers that it has had.
    """

    doing: str
    membership: Membership
    told: tuple[int, ...] = ()
    due: int = 1
    heard: int = 0


Key = tuple[int, int]  # set, rank


@dataclass(frozen=True)
class World:
    """Disks, and the processes of the run under way.

    ``held`` is what the last step that all ranks hold has to be.
    """

    sets: tuple[SetOfStores, ...]
    disks: tuple[tuple[Key, Disk], ...]
    current: int
    run: int
    ranks: tuple[Rank, ...]
    held: Label | None
    kills: int

    def disk(self, key: Key) -> Disk | None:
        return next((disk for k, disk in self.disks if k == key), None)

    def put(self, key: Key, disk: Disk | None) -> World:
        disks = dict(self.disks) | ({} if disk is None else {key: disk})
        if disk is None:
            del disks[key]
        return replace(self, disks=tuple(sorted(disks.items(), key=lambda item: item[0])))

    def with_rank(self, place: int, rank: Rank) -> World:
        return replace(self, ranks=(*self.ranks[:place], rank, *self.ranks[place + 1 :]))


@dataclass(frozen=True)
class Start:
    """A way to start: so many ranks, where stores of ranks from ``sees`` on are out of sight."""

    ranks: int
    sees: int


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs to try.

    Attributes:
        starts: Ways to start; the first one is how training begins.
        in_turn: After each kill the next one of them, instead of any.
        commits: The number of the last commit.
        kills: Kills one after the other.
        early: How often a rank may tell its number without need.
        removes_others: The ranks follow rule 5; false breaks the protocol.
    """

    starts: tuple[Start, ...]
    commits: int
    kills: int
    early: int = 0
    in_turn: bool = False
    removes_others: bool = True

    def check(self) -> int:
        """Visits every state that can be reached, and kills in each. Returns how many there are.

        Raises:
            Lost: After some kill.
        """
        empty = World(sets=(), disks=(), current=-1, run=-1, ranks=(), held=None, kills=self.kills)
        seen = {world for start in self.starts[:1] for world in self._started(empty, start)}
        todo = list(seen)
        while todo:
            world = todo.pop()
            for then in (*self._writes(world), *self._killed(world)):
                if then not in seen:
                    seen.add(then)
                    todo.append(then)
        return len(seen)

    # ---- starting --------------------------------------------------------------------------------

    def _killed(self, world: World) -> Iterator[World]:
        killed = replace(world, ranks=(), kills=world.kills - 1)
        turn = self.kills - killed.kills
        for start in self.starts[turn : turn + 1] if self.in_turn else self.starts:
            for then in self._started(killed, start):
                if world.kills:
                    yield then

    def _started(self, world: World, start: Start) -> Iterator[World]:
        """The processes have started, and have looked for stores; none where they refuse to."""
        stores = [
            RankStore(
                set_id=str(key[0]), set_number=world.sets[key[0]].number, ranks=world.sets[key[0]].ranks, rank=key[1],
                numbers=tuple(number for number, _ in disk.records),
            )
            for key, disk in world.disks
            if key[1] < start.sees
        ]  # fmt: skip
        hidden = any(key[1] >= start.sees for key, _ in world.disks)
        try:
            found = common_steps.common_step(stores)
        except ConfigError:
            if not hidden and world.held is not None:
                raise Lost(f"refused, with all stores in sight: {world}") from None
            if not hidden:  # killed as training began: it begins again
                yield self._new_set(replace(world, run=world.run + 1), start, ())
            return
        world = replace(world, run=world.run + 1)
        if found is None:
            if world.held is not None and not hidden:
                raise Lost(f"no step is found: {world}")
            if not hidden:
                yield self._new_set(world, start, ())
            return
        content = self._content(world, int(found.set_id), found.number, found.ranks)
        if found.ranks != start.ranks:
            yield self._new_set(world, start, content)
            return
        ranks = tuple(
            Rank(doing="take back" if place in found.taken_back else "train", membership=found.membership())
            for place in range(found.ranks)
        )
        yield replace(world, current=int(found.set_id), ranks=ranks)

    def _content(self, world: World, chosen: int, number: int, ranks: int) -> Label:
        contents = set()
        for rank in range(ranks):
            disk = world.disk((chosen, rank))
            assert disk is not None
            contents.add(disk.slots[disk.slot_of(number)])
        content = contents.pop()
        if contents or len(content) != number or TORN[0] in content:
            raise Lost(f"step {number} of set {chosen} is {content} and {contents}: {world}")
        if world.held is not None and content[: len(world.held)] != world.held:
            raise Lost(f"goes on from {content}; all ranks held {world.held}: {world}")
        return content

    def _new_set(self, world: World, start: Start, content: Label) -> World:
        seen = [world.sets[key[0]].number for key, _ in world.disks if key[1] < start.sees]
        new = SetOfStores(number=max(seen, default=0) + 1, ranks=start.ranks)
        rank = Rank(doing="create", membership=Membership(recorded=len(content)))
        made = replace(world, sets=(*world.sets, new), current=len(world.sets), ranks=(rank,) * start.ranks)
        for place in range(start.ranks):
            made = made.put((made.current, place), Disk(slots=(TORN, content)))  # the copy is slot 1, once it is whole
        return made

    # ---- what processes do -----------------------------------------------------------------------

    def _writes(self, world: World) -> Iterator[World]:
        for place, rank in enumerate(world.ranks):
            yield from self._next(world, place, rank)

    def _next(self, world: World, place: int, rank: Rank) -> Iterator[World]:
        key = world.current, place
        disk = world.disk(key)
        assert disk is not None
        number = rank.membership.recorded
        match rank.doing:
            case "create":
                yield self._recorded(world.put(key, disk.recorded(number, 1)), place, replace(rank, doing="train"))
            case "take back":
                yield world.put(key, disk.recorded(number, disk.slot_of(number))).with_rank(place, replace(rank, doing="train"))
            case "train":
                yield from self._train(world, place, rank, disk)
            case "finish":
                content = (*disk.slots[disk.records[-1][1]], world.run)
                yield world.put(key, disk.written(1 - disk.records[-1][1], content)).with_rank(place, replace(rank, doing="record"))
            case "record":
                then = replace(rank, doing="train", membership=rank.membership.after_record(), due=rank.due + 1)
                yield self._recorded(world.put(key, disk.recorded(number + 1, 1 - disk.records[-1][1])), place, then)

    def _train(self, world: World, place: int, rank: Rank, disk: Disk) -> Iterator[World]:
        if len(rank.told) < rank.due + self.early:
            yield world.with_rank(place, replace(rank, told=(*rank.told, rank.membership.recorded)))
        if all(len(other.told) > rank.heard for other in world.ranks):
            numbers = [other.told[rank.heard] for other in world.ranks]
            then = replace(rank, membership=rank.membership.after_exchange(numbers), heard=rank.heard + 1)
            yield world.with_rank(place, then)
        if rank.membership.may_write and rank.membership.recorded < self.commits:
            others = self._others(world, place) if self.removes_others else []
            for other in others:
                yield world.put(other, None)
            if not others:
                torn = disk.written(1 - disk.records[-1][1], TORN)
                yield world.put((world.current, place), torn).with_rank(place, replace(rank, doing="finish"))

    def _others(self, world: World, place: int) -> list[Key]:
        """What the rank has of other sets."""
        return [key for key, _ in world.disks if key[1] == place and key[0] != world.current]

    def _recorded(self, world: World, place: int, rank: Rank) -> World:
        """Where all ranks of the set hold a step now, that is the one to come back to."""
        world = world.with_rank(place, rank)
        disks = [world.disk((world.current, place)) for place in range(len(world.ranks))]
        if any(disk is None or not disk.records for disk in disks):
            return world
        number = min(disk.records[-1][0] for disk in disks if disk is not None)
        first = disks[0]
        assert first is not None
        held = first.slots[first.slot_of(number)]
        return replace(world, held=held if world.held is None or len(held) > len(world.held) else world.held)
