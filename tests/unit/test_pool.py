"""Host buffers and files that are used again and again, also where every batch wants other
sizes.
"""

from __future__ import annotations

import random
import weakref

import pytest

from lightning_hetero.runtime.pool import LeasePool, Pool, size_class

KIB = 1024


class Thing:
    def __init__(self, size: int) -> None:
        self.size = size


class Shop:
    """Makes things, and knows those that are alive."""

    def __init__(self) -> None:
        self.made = 0
        self.alive: weakref.WeakSet[Thing] = weakref.WeakSet()

    def make(self, size: int) -> Thing:
        self.made += 1
        thing = Thing(size)
        self.alive.add(thing)
        return thing

    @property
    def num_bytes(self) -> int:
        return sum(thing.size for thing in self.alive)


def batch(pool: LeasePool[Thing], sizes: list[int]) -> None:
    """As many blocks as there are sizes lend one each; all come back at the end."""
    leases = [pool.lend(size) for size in sizes]
    assert all(lease.value.size >= size for lease, size in zip(leases, sizes, strict=True))
    leases.clear()
    pool.trim()


def test_size_classes_are_pages_and_waste_at_most_a_sixteenth() -> None:
    for num_bytes in (0, 1, 4096, 4097, 65536, 65537, 100_000, 1 << 20, (1 << 20) + 1, 123_456_789):
        size = size_class(num_bytes)
        assert size % 4096 == 0
        assert num_bytes <= size <= max(num_bytes + num_bytes // 16 + 1, num_bytes + 4095)
        assert size_class(size) == size


def test_lengths_that_vary_need_no_new_buffer_once_they_have_been_seen() -> None:
    """With buffers of exact sizes every batch makes its own, and page-locks it."""
    shop, order = Shop(), random.Random(3)
    pool = LeasePool(shop.make)
    lengths = [order.randrange(64, 1024) for _ in range(12)]
    for number in range(5):
        before = shop.made
        for length in order.sample(lengths, len(lengths)):
            batch(pool, [length * KIB] * 10)
        if number:
            assert shop.made == before
    assert shop.num_bytes <= 10 * size_class(max(lengths) * KIB) * 5 // 4


def test_blocks_of_different_sizes_settle_on_a_buffer_each() -> None:
    shop = Shop()
    pool = LeasePool(shop.make)
    for number in range(6):
        batch(pool, [64 * KIB, 256 * KIB, 64 * KIB, 1024 * KIB, 0, 64 * KIB])
        if number == 1:
            made = shop.made
    assert shop.made == made
    assert shop.num_bytes <= sum(map(size_class, [64 * KIB] * 3 + [256 * KIB, 1024 * KIB])) * 5 // 4


def test_memory_does_not_grow_while_lengths_do() -> None:
    shop = Shop()
    pool = LeasePool(shop.make)
    for length in range(64, 640, 16):
        batch(pool, [length * KIB] * 4)
        assert shop.num_bytes <= 4 * size_class(length * KIB) * 5 // 4


def test_what_no_batch_has_used_for_a_while_ends() -> None:
    shop = Shop()
    ended: list[int] = []
    pool = LeasePool(shop.make, lambda thing: ended.append(thing.size))
    batch(pool, [1024 * KIB] * 2)
    for _ in range(10):
        batch(pool, [64 * KIB])  # in a larger one, as long as there is one
    assert not ended
    for _ in range(10):
        batch(pool, [64 * KIB])
    assert ended == [1024 * KIB] * 2
    assert shop.num_bytes == 64 * KIB
    pool.close()
    assert not shop.alive


def test_only_the_same_class_will_do_where_all_of_a_thing_is_used() -> None:
    shop = Shop()
    pool = LeasePool(shop.make, larger=False)
    batch(pool, [1024 * KIB])
    lease = pool.lend(512 * KIB)
    assert lease.value.size == 512 * KIB
    assert shop.made == 2


@pytest.mark.parametrize("late", [False, True])
def test_a_pool_of_exact_sizes_drops_what_it_had(late: bool) -> None:
    shop = Shop()
    pool = Pool(shop.make)
    first, second = pool.take(100), pool.take(100)
    pool.give(100, first)
    if not late:
        pool.give(100, second)
        del second
    pool.renew()
    del first
    assert len(shop.alive) == late
    if late:
        pool.give(100, second)
        del second
    assert not shop.alive
    third = pool.take(100)
    pool.give(100, third)
    assert pool.take(100) is third
