"""Host memory of a fit on a device with memory of its own: gradients, and the weights that live on
disk, share it.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
from support.models import Recipe, Shape, assert_same, run

from lightning_hetero import EmulatedDevice
from lightning_hetero.lanes import EmulatedLanes
from lightning_hetero.lowering import Purpose
from lightning_hetero.lowering.needs import total_bytes
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.strategies import HeteroOffloadStrategy

HOST_MEMORY = 700_000


def test_all_gradients_of_a_first_batch_come_beside_fewer_weights_and_their_memory_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates of a batch that may not fit the device wait for all gradients."""
    recipe = Recipe(shape=Shape(layers=8, counting=False), steps=5)
    strategy = HeteroOffloadStrategy("disk", device=EmulatedDevice("4MiB"), host_memory=HOST_MEMORY)
    alive: dict[int, int] = {}  # buffers of gradients: bytes
    seen: list[tuple[bool, int, int]] = []  # whether updates wait, bytes of gradients, bytes of weights
    lend, begin = EmulatedLanes.host_buffer, Executor.backward_begins
    room = 0  # for both

    def host_buffer(lanes: Any, num_bytes: int) -> Any:
        buffer = lend(lanes, num_bytes)
        storage = buffer.untyped_storage()
        alive[storage._cdata] = num_bytes
        weakref.finalize(storage, alive.pop, storage._cdata)
        return buffer

    def begins(executor: Executor, block: Any) -> None:
        nonlocal room
        begin(executor, block)
        rows = strategy.session._placer().needs(executor.plan).host
        fixed = total_bytes(rows) - rows[Purpose.GRADIENTS] - rows[Purpose.STAGING]
        room = HOST_MEMORY - fixed - executor.context.placement.staging_bytes
        held = [part for one in executor.residency.weights.held() for part in one.parts]
        buffers = executor.residency.weights._buffers.num_bytes  # of weights, lent or free
        weights = max(buffers, sum(part.weight_bytes for part in held))
        seen.append((executor.handlers.all_wait, sum(alive.values()) - buffers, weights))

    monkeypatch.setattr(EmulatedLanes, "host_buffer", host_buffer)
    monkeypatch.setattr(Executor, "backward_begins", begins)
    got = run(recipe, strategy, tmp_path)
    first, later = seen[:8], seen[8:]
    assert [waits for waits, *_ in seen] == [True] * 8 + [False] * 32
    all_gradients = max(gradients for _, gradients, _ in first)
    padding = 12 * 2048  # of buffers, beyond the gradients' own bytes
    assert all(gradients + weights <= room + padding for _, gradients, weights in seen)
    assert max(weights for *_, weights in first) < max(weights for *_, weights in later)
    assert later[-1][1] < all_gradients
    assert_same(got, run(recipe, "auto", tmp_path))
