"""Predictions of what runs without backward: bytes, and times at known rates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.cli import HARDWARE, MODEL

from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.lowering import WINDOW, staying
from lightning_hetero.planners.forward_only import forward_only

WEIGHTS = MODEL.shape().blocks[-1].weight_bytes


def _plan(tier: Tier, *, host: int | None = None, device: int | None = None) -> Plan:
    rule = BlockPlan(name="*", weights=tier, state=Tier.DISK)
    return Plan(name="mine", blocks=(rule,), host_cache_bytes=host, device_cache_bytes=device)


def test_what_does_not_stay_comes_once_per_pass() -> None:
    """Two of six layers stay on the device, and one of the others on the host."""
    found = forward_only(_plan(Tier.DISK, host=3 * WEIGHTS, device=4 * WEIGHTS), MODEL, HARDWARE)
    on_device, on_host = 4 - WINDOW, 3 - WINDOW
    assert found.uploaded_bytes == (6 - on_device) * WEIGHTS
    assert 0 < found.read_bytes <= (6 - on_device - on_host) * WEIGHTS
    slow = replace(HARDWARE, disk_read_bytes_per_s=1e6)
    assert forward_only(_plan(Tier.DISK, host=3 * WEIGHTS, device=4 * WEIGHTS), MODEL, slow).token_s == pytest.approx(
        found.read_bytes / 1e6, rel=0.02
    )


def test_a_batch_takes_its_compute_where_nothing_comes() -> None:
    found = forward_only(_plan(Tier.DEVICE), MODEL, HARDWARE)
    assert (found.read_bytes, found.uploaded_bytes) == (0, 0)
    assert found.batch_s == pytest.approx(sum(block.forward_s for block in MODEL.blocks))
    assert found.token_s == 0


def test_blocks_that_stay_are_spread_over_the_order() -> None:
    sizes = [0, *[10] * 12]
    assert staying(range(13), sizes, 120) == frozenset(range(1, 13))  # all fit
    assert staying(range(13), sizes, 80) == {1, 3, 5, 7, 9, 11}
    assert staying(range(13), sizes, 50) == {1, 5, 9}
    assert staying(range(13), sizes, 20) == staying(range(13), sizes, 5) == frozenset()


def test_gaps_that_large_blocks_leave_are_filled() -> None:
    stays = staying(range(4), [40, 40, 15, 40], 100)
    assert stays == {2}
