"""What malloc keeps of freed gradients, and when it gives that back."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from lightning_hetero.runtime import process_memory
from lightning_hetero.runtime.process_memory import Heap
from lightning_hetero.store.capacity import resident_bytes
from lightning_hetero.units import MIB

DECIDED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2") or any(name in os.environ for name in DECIDED),
    reason="malloc is not glibc's own, or told what to keep",
)

HOLE = 128 * MIB


@pytest.fixture
def heap() -> Iterator[Heap]:
    """A budget of 192 MiB beside what the process has."""
    heap = Heap(192 * MIB, present_bytes=0)
    yield heap
    heap.close()


def make_hole() -> torch.Tensor:
    """Allocates and frees a tensor; the one that is returned lies above it, so that its pages stay
    with the process.
    """
    hole = torch.ones(HOLE, dtype=torch.uint8)
    above = torch.ones(MIB, dtype=torch.uint8)
    del hole
    return above


@pytest.mark.parametrize(("coming", "kept"), [(0, True), (32 * MIB, True), (128 * MIB, False)])
def test_free_pages_go_back_if_the_next_allocation_may_not_fit(heap: Heap, coming: int, kept: bool) -> None:
    above = make_hole()
    before = resident_bytes()
    heap.check(coming)
    assert (resident_bytes() > before - HOLE // 2) == kept
    del above


def test_weights_fetched_during_forward_are_no_activations(heap: Heap) -> None:
    heap.forward_begins()
    staging = mmap.mmap(-1, 256 * MIB)
    for _ in range(256):
        staging.write(bytes(MIB))
    heap.backward_begins()
    staging.close()
    above = make_hole()
    before = resident_bytes()
    heap.check(128 * MIB)
    assert resident_bytes() < before - HOLE // 2
    del above


def test_activations_come_on_top_of_the_budget(heap: Heap) -> None:
    heap.forward_begins()
    saved = torch.ones(128 * MIB, dtype=torch.uint8)
    heap.backward_begins()
    above = make_hole()
    before = resident_bytes()
    heap.check()
    assert resident_bytes() > before - HOLE // 2, "128 of activations and 128 of the hole are within 192 and 128"
    del saved, above


def test_memory_that_is_not_free_is_looked_for_once(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(heap, "_trim", lambda pad: trims.append(pad))
    held = torch.ones(256 * MIB, dtype=torch.uint8)
    heap.check()
    heap.check()
    assert len(trims) == 1
    more = torch.ones(64 * MIB, dtype=torch.uint8)
    heap.check()
    assert len(trims) == 2
    del held, more


@pytest.mark.parametrize(("free", "counted", "asks"), [(8, 0, 0), (1, 0, 4), (1, 1, 2)])
def test_malloc_is_asked_how_much_forwards_and_blocks_add_only_if_memory_may_end(
    free: int, counted: int, asks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "available_memory_bytes", lambda: free * resident_bytes())
    heap = Heap(None, present_bytes=0)
    heap.counted_bytes = counted
    asked: list[int] = []

    def allocated() -> int:
        asked.append(0)
        return 0

    monkeypatch.setattr(heap, "_allocated", allocated)
    heap.forward_begins()
    for _ in range(2):
        assert heap.missing(in_forward=True) == 0
    heap.backward_begins()
    heap.close()
    assert len(asked) == asks


def test_a_block_that_adds_more_than_is_left_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free = resident_bytes()
    monkeypatch.setattr(process_memory, "available_memory_bytes", lambda: free)
    heap = Heap(None, present_bytes=0)
    heap.forward_begins()
    free = 0
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    monkeypatch.setattr(heap, "_limit", resident_bytes())
    assert heap.missing(in_forward=True) >= 64 * MIB
    heap.close()
    del block
