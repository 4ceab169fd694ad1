"""Device memory for sums of gradients is taken with the plan, so weights cannot have it later."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.errors import DeviceMemoryError, HeteroError
from lightning_hetero.lanes.emulated import EmulatedDevice, EmulatedLanes
from lightning_hetero.runtime import sum_rooms
from lightning_hetero.runtime.sum_rooms import SumRooms, alignment_bytes

RANKS, CAPACITY = 3, 64 * 1024


@pytest.fixture
def lanes() -> Iterator[EmulatedLanes]:
    lanes = EmulatedLanes(EmulatedDevice(memory=CAPACITY), poison=True)
    yield lanes
    lanes.close()


def block(*slices: int, trains: bool = True) -> Any:
    """With a part of so many elements for each rank."""
    param = nn.Parameter(torch.zeros(1), requires_grad=trains)
    return SimpleNamespace(parts=[SimpleNamespace(params=[param], slice_elements=n, dtype=torch.bfloat16) for n in slices])


BLOCKS = [block(1000, 300), block(200), block(90_000, trains=False), block(0)]


def test_two_blocks_have_places_however_full_the_device_is(lanes: EmulatedLanes) -> None:
    rooms, memory = SumRooms(lanes, RANKS, BLOCKS), lanes.memory()
    counted = 2 * 2 * 1000 * RANKS + 8 * 1000 + 2 * 2 * 1300
    assert memory.used_bytes <= counted + alignment_bytes([one.parts for one in BLOCKS[:2]])
    while memory.capacity_bytes > memory.used_bytes:  # as where batches use other blocks than the plan knows
        memory.take(512, "weights")
    sent, received = rooms.exchanging(1000 * RANKS, torch.bfloat16)
    places = rooms.place(), rooms.place()
    taken = [sent, received, rooms.total, *places]
    begins = sorted((one.data_ptr(), one.nbytes) for one in taken)
    assert all(begin + size <= later for (begin, size), (later, _) in itertools.pairwise(begins))
    assert (len(rooms.total), *map(len, places)) == (1000, 2 * (1000 + 24) + 2 * 512, 2 * (1000 + 24) + 2 * 512)
    with pytest.raises(HeteroError, match="more than 2 blocks' gradients wait on the device"):
        rooms.place()
    rooms.give(places[0])
    assert rooms.place() is places[0]


def test_what_is_taken_goes_back(lanes: EmulatedLanes) -> None:
    rooms = SumRooms(lanes, RANKS, BLOCKS)
    rooms.give_back()
    assert lanes.memory().used_bytes == 0
    lanes.memory().take(CAPACITY - 13 * 1024, "weights")
    with pytest.raises(DeviceMemoryError, match="sums of gradients needs"):
        SumRooms(lanes, RANKS, BLOCKS)
    assert lanes.memory().used_bytes == CAPACITY - 13 * 1024


def test_slices_land_and_are_sent_in_pieces(lanes: EmulatedLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_rooms, "EXCHANGE_BYTES", 100)
    monkeypatch.setattr(sum_rooms, "PEER_EXCHANGE_BYTES", 1200)
    rooms = SumRooms(lanes, RANKS, BLOCKS)
    assert (rooms.landing.nbytes, len(rooms.total), *map(len, rooms.exchanging(600, torch.bfloat16))) == (100, 200, 600, 600)
