"""Clocks find what nothing orders, whoever comes first."""

from __future__ import annotations

import random

from support.happens_before import Actor, Clock, Memory, Use


class World:
    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self.memory = Memory(lambda earlier, later: self.found.append((earlier.name, later.name)))

    def use(self, actor: Actor, start: int, end: int, name: str, *, writes: bool) -> None:
        self.memory.use(start, end, Use(actor, actor.clock[actor.number], name, writes), actor.clock)


def test_uses_that_overlap_and_write_need_an_order() -> None:
    for first, second, conflict in [(True, True, 1), (True, False, 1), (False, True, 1), (False, False, 0)]:
        world, a, b = World(), Actor("a"), Actor("b")
        world.use(a, 0, 8, "first", writes=first)
        world.use(b, 8, 16, "beside it", writes=True)
        world.use(b, 4, 12, "second", writes=second)
        assert len(world.found) == conflict


def test_who_joins_a_clock_comes_after_what_it_has_and_not_after_what_follows() -> None:
    world, a, b = World(), Actor("a"), Actor("b")
    world.use(a, 0, 8, "before", writes=True)
    b.join(a.hand_on())
    world.use(b, 0, 8, "after", writes=True)
    assert not world.found
    world.use(a, 8, 16, "later", writes=True)
    world.use(b, 8, 16, "beside", writes=False)
    assert world.found == [("later", "beside")]


def test_a_write_comes_after_all_reads_since_the_last_one() -> None:
    world, actors = World(), [Actor(name) for name in "abc"]
    for actor in actors[:2]:
        world.use(actor, 0, 8, actor.name, writes=False)
    actors[2].join(actors[0].hand_on())
    world.use(actors[2], 4, 6, "c", writes=True)
    assert world.found == [("b", "c")]
    actors[2].join(actors[1].hand_on())
    world.use(actors[2], 0, 4, "c", writes=True)
    assert len(world.found) == 1


def test_freed_memory_has_no_history() -> None:
    world, a, b = World(), Actor("a", is_stream=True), Actor("b")
    world.use(a, 0, 8, "a", writes=True)
    world.use(b, 8, 16, "b", writes=True)
    world.memory.end(0, 16, Use(b, 0, "end", writes=True), {}, matters=lambda use: use.actor.is_stream)
    assert world.found == [("a", "end")]
    world.use(b, 0, 16, "again", writes=True)
    assert len(world.found) == 1


def test_random_uses_conflict_as_a_list_of_all_uses_says() -> None:
    chance, conflicts = random.Random(0), 0
    for _ in range(60):
        world, actors = World(), [Actor(name) for name in "abc"]
        history: list[tuple[int, int, Use]] = []
        for number in range(25):
            actor = chance.choice(actors)
            if chance.random() < 0.4:
                clock: Clock = chance.choice(actors).hand_on()
                actor.join(clock)
            start = chance.randrange(12)
            end, writes = start + chance.randrange(1, 6), chance.random() < 0.5
            use = Use(actor, actor.clock[actor.number], str(number), writes)
            expected = any(
                (writes or old.writes) and begin < end and start < stop and not old.is_before(actor.clock)
                for begin, stop, old in history
            )
            world.found.clear()
            world.memory.use(start, end, use, actor.clock)
            assert bool(world.found) == expected
            history.append((start, end, use))
            if expected:
                conflicts += 1
                break
    assert conflicts > 20
