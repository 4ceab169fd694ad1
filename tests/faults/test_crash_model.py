"""The commit protocol on a model of a disk: power fails at any moment, and any part of what no
flush has covered may be lost.

The model is small, and the protocol's steps are those of docs/store-format.md. Mutants leave one of
them out. Each has to be caught, or the model proves nothing. The native engine itself runs on such
a disk in native/tests/engine_power_test.cc.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

BLOCKS, CHUNKS, RING, STEPS, CRASHES = 3, 3, 4, 9, 1500


@dataclass
class Disk:
    """Sectors by name; writes that no flush has covered may be there or not after a crash, each on
    its own.
    """

    durable: dict[Any, Any] = field(default_factory=dict)
    volatile: list[tuple[Any, Any]] = field(default_factory=list)

    def write(self, place: Any, content: Any) -> None:
        self.volatile.append((place, content))

    def flush(self, file: Any) -> None:
        """What was written to the file is durable now."""
        for place, content in self.volatile:
            if place[0] == file:
                self.durable[place] = content
        self.volatile = [w for w in self.volatile if w[0][0] != file]

    def crash(self, draw: random.Random) -> dict[Any, Any]:
        """What is there after a power cut. Writes to one sector keep their order."""
        after = dict(self.durable)
        for place, content in self.volatile:
            if draw.random() < 0.5:
                after[place] = content
        return after


@dataclass(frozen=True)
class Protocol:
    """The steps that make it safe; a mutant lacks one."""

    sync_data: bool = True
    sync_record: bool = True
    two_slots: bool = True
    record_after_data: bool = True
    next_after_record: bool = True
    checksum: bool = True
    ring: int = RING
    every: int = 1  # one of so many steps is kept
    third_slot: bool = True  # for the blocks of the step that was kept last
    sync_pin: bool = True
    same_slot: bool = True  # for a block that a step writes a second time
    sync_state: bool = True  # the file of a state that is too large for the record
    state_before_record: bool = True
    old_state_after_record: bool = True  # it is removed when the next one's record is there


def train(disk: Disk, protocol: Protocol, draw: random.Random) -> Iterator[int]:
    """Steps; yields the last acknowledged one whenever power may fail."""
    newest = dict.fromkeys(range(BLOCKS), (0, 0))  # block -> slot, step
    for block in range(BLOCKS):
        for chunk in range(CHUNKS):
            disk.durable[(block, 0), chunk] = 0
    disk.durable["STATE", 0] = 0
    for place in ("COMMIT", "PIN"):
        disk.durable[place, 0, 0] = disk.durable[place, 0, 1] = (0, dict(newest), True)
    pinned = {block: slot for block, (slot, _) in newest.items()}
    pending: list[tuple[Any, Any]] = []
    acknowledged = 0
    for step in range(1, STEPS):
        touched = [b for b in range(BLOCKS) if draw.random() < 0.8]
        again = [b for b in touched if draw.random() < 0.3]  # two optimizers have it, or a callback changes it
        writes = _shuffled(touched, draw) + _shuffled(again, draw)
        first = len(touched) * CHUNKS
        spares = protocol.every > 1 and protocol.third_slot
        used = {b: {newest[b][0], pinned[b]} if spares else {newest[b][0]} for b in touched}
        target = {b: min({0, 1, 2} - used[b]) if protocol.two_slots else 0 for b in touched}
        second = {b: target[b] if protocol.same_slot else newest[b][0] for b in again}
        kept = step % protocol.every == 0
        after = {**newest, **{b: ({**target, **second}[b], step) for b in touched}}
        if not protocol.old_state_after_record:
            disk.write(("STATE", step - 1), None)
        if protocol.state_before_record:
            disk.write(("STATE", step), step)
            yield acknowledged
            if protocol.sync_state:
                disk.flush("STATE")
        # A record is two sectors; without a checksum the first of them alone makes it count.
        record = [(("COMMIT", step % protocol.ring, half), (step, dict(after), kept)) for half in (0, 1)]
        if not protocol.record_after_data:
            for write in record:
                disk.write(*write)
        for number, (block, chunk) in enumerate(writes):
            is_last = number >= first or block not in again
            disk.write(((block, (second if number >= first else target)[block]), chunk), step if is_last else -step)
            if pending and number == len(writes) // 2:  # the last step's record follows data of this one
                for write in pending:
                    disk.write(*write)
                disk.flush("COMMIT")
                pending = []
            yield acknowledged
        if protocol.sync_data:
            for block in touched:
                disk.flush((block, after[block][0]))
        yield acknowledged
        if not protocol.next_after_record:
            pending = record
            newest = after
            continue
        if protocol.record_after_data:
            for write in record:
                disk.write(*write)
                yield acknowledged
        if protocol.sync_record:
            disk.flush("COMMIT")
        acknowledged, newest = step if kept else acknowledged, after
        if not protocol.state_before_record:
            disk.write(("STATE", step), step)
        if protocol.old_state_after_record:
            disk.write(("STATE", step - 1), None)
        if kept and protocol.every > 1:  # a pin of its own, beside the one before
            for half in (0, 1):
                disk.write(("PIN", step // protocol.every % 2, half), (step, dict(after), True))
                yield acknowledged
            if protocol.sync_pin:
                disk.flush("PIN")
            pinned = {block: slot for block, (slot, _) in newest.items()}
        yield acknowledged


def _shuffled(blocks: list[int], draw: random.Random) -> list[tuple[int, int]]:
    writes = [(block, chunk) for block in blocks for chunk in range(CHUNKS)]
    draw.shuffle(writes)
    return writes


def newest_of(content: dict[Any, Any], file: str, places: int, *, checksum: bool) -> tuple[int, dict[int, tuple[int, int]], bool]:
    """The newest record that counts: its step, slots, and whether the step is kept."""
    best: tuple[int, dict[int, tuple[int, int]], bool] = (-1, {}, True)
    for place in range(places):
        first, second = content.get((file, place, 0)), content.get((file, place, 1))
        if first is None or (checksum and first != second):
            continue
        blocks = dict(first[1]) if checksum or second is None else {**first[1], 0: second[1][0]}
        best = max(best, (first[0], blocks, first[2]), key=lambda b: b[0])
    return best


def recovered(content: dict[Any, Any], protocol: Protocol) -> tuple[int, bool]:
    """The newest step that counts, and whether every chunk that it names is the one that it
    names.
    """
    best = newest_of(content, "COMMIT", protocol.ring, checksum=protocol.checksum)
    if not best[2]:  # a step that is not kept
        best = newest_of(content, "PIN", 2, checksum=protocol.checksum)
    whole = all(content.get(((b, slot), chunk)) == step for b, (slot, step) in best[1].items() for chunk in range(CHUNKS))
    whole &= protocol.every > 1 or content.get(("STATE", best[0])) == best[0]  # a pin has links to what its step names
    return best[0], whole and best[0] >= 0


def survives(protocol: Protocol, seed: int) -> bool:
    """Whether no crash at a random moment loses or tears a step."""
    draw = random.Random(seed)
    for _ in range(CRASHES):
        disk, last = Disk(), 0
        moments = draw.randrange(1, STEPS * (BLOCKS * CHUNKS + 3))
        for _, acknowledged in zip(range(moments), train(disk, protocol, draw), strict=False):
            last = acknowledged
        step, whole = recovered(disk.crash(draw), protocol)
        if not whole or step < last:
            return False
    return True


def test_the_protocol_survives_every_crash() -> None:
    assert survives(Protocol(), seed=1)


def test_every_nth_step_survives_every_crash() -> None:
    for every in (2, 3):
        assert survives(Protocol(every=every), seed=every)


MUTANTS = {
    "no data sync": {"sync_data": False},
    "no record sync": {"sync_record": False},
    "one slot": {"two_slots": False},
    "record before data": {"record_after_data": False},
    "next step before record": {"next_after_record": False},
    "record without checksum": {"checksum": False},
    "a single record": {"ring": 1},
    "few kept, no third slot": {"every": 3, "third_slot": False},
    "few kept, no sync of the pin": {"every": 3, "sync_pin": False},
    "another slot for a second write": {"same_slot": False},
    "no sync of the state's file": {"sync_state": False},
    "record before the state's file": {"state_before_record": False},
    "the old state's file goes before the record": {"old_state_after_record": False},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_protocol_that_lacks_a_step_is_caught(mutant: str) -> None:
    assert not survives(replace(Protocol(), **MUTANTS[mutant]), seed=2)  # type: ignore[arg-type]
