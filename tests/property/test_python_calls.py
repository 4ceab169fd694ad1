"""What one step costs in Python: calls of functions in files of the package, in the thread that
trains.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import pytest
from support.models import Recipe, Shape, run

import lightning_hetero
from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier, UpdateLane
from lightning_hetero.strategies import HeteroOffloadStrategy

PACKAGE = str(Path(lightning_hetero.__file__).parent)
ON_DISK = Plan(
    name="on_disk",
    blocks=(
        BlockPlan(name="model.blocks.*", weights=Tier.DISK, state=Tier.DISK, update=UpdateLane.CPU),
        BlockPlan(name="*", state=Tier.DISK, update=UpdateLane.CPU),
    ),
    host_cache_bytes=64 * 1024,
)
ON_DEVICE = Plan(
    name="on_device",
    blocks=(
        BlockPlan(name="model.blocks.*", weights=Tier.HOST, state=Tier.HOST, update=UpdateLane.CPU),
        BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.HOST, update=UpdateLane.CPU),
    ),
)


RESIDENT = Plan(name="resident", blocks=(BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE),))


class Calls(pl.Callback):
    """Counts from the begin of the third batch to the begin of the fourth."""

    def __init__(self) -> None:
        self.by_function: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        sys.setprofile(self._note if batch_idx == 2 else None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.by_function[f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_qualname}"] += 1


def calls_of(plan: Plan, device: EmulatedDevice | None, folder: Path, layers: int = 5, **recipe: Any) -> Counter[str]:
    calls = Calls()
    strategy = HeteroOffloadStrategy(plan, device=device, disk_path=None)
    run(Recipe(shape=Shape(layers=layers), steps=4, **recipe), strategy, folder, callbacks=[calls])
    return calls.by_function


@pytest.mark.parametrize(
    ("plan", "device", "recipe", "most"),
    [
        # 2126, and 17 for each op that a busy CPU delays
        (Plan(name="host", blocks=(BlockPlan(name="*", state=Tier.HOST),)), None, {}, 2270),
        (ON_DISK, None, {}, 2800),
        (ON_DISK, None, {"clip": 0.3}, 3600),
        (ON_DEVICE, EmulatedDevice(memory="2MiB"), {}, 4300),
        (ON_DEVICE, EmulatedDevice(memory="2MiB"), {"clip": 0.3}, 5250),
    ],
    ids=["host", "disk", "disk-clip", "device", "device-clip"],
)
def test_a_step_makes_no_more_python_calls_than_it_did(
    plan: Plan, device: EmulatedDevice | None, recipe: dict[str, Any], most: int, tmp_path: Path
) -> None:
    for attempt in range(3):  # lanes have threads: how often compute polls an op depends on time
        found = calls_of(plan, device, tmp_path / str(attempt), **recipe)
        if found.total() <= most:
            break
    functions = "\n".join(f"{count:5} {name}" for name, count in found.most_common(60))
    assert 0 < found.total() <= most, f"{found.total()} calls:\n{functions}"


@pytest.mark.parametrize(("plan", "most"), [(RESIDENT, 330), (ON_DEVICE, 585)], ids=["resident", "device"])
def test_a_block_more_makes_no_more_python_calls_than_it_did(plan: Plan, most: int, tmp_path: Path) -> None:
    """As ``benchmarks/small_blocks.py`` counts them, without the calls of a step."""
    counts = []
    for attempt in range(3):  # as above
        few, many = (
            calls_of(plan, EmulatedDevice(memory="4MiB"), tmp_path / f"{attempt} {layers}", layers).total() for layers in (3, 7)
        )
        counts.append((many - few) / 4)
        if counts[-1] <= most:
            break
    assert 0 < min(counts) <= most, counts
