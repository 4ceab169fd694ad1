"""Code holds the memory of weights and reads it later: it has the values that plain PyTorch has."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import LitModel, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from torch import Tensor

from lightning_hetero import BlockPlan, EmulatedDevice, HeteroOffloadStrategy, Plan, Tier
from lightning_hetero._native import F32, Arena, Engine, NativePart, PartGeometry


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Updates begin a little late: each waits for one that is never armed, and soon cancelled."""
    arena, timers = Arena(4096), list[threading.Timer]()
    geometry = PartGeometry(
        id=0, weight_dtype=F32, num_elements=16, num_state=2, weights_on_disk_file=False, state_on_disk_file=False,
        chunk_elements=4096,
    )  # fmt: skip
    other, begin = NativePart(None, geometry, arena.address), Engine.open_update

    def begin_late(engine: Engine, part: NativePart, *, after: Any = (), **options: Any) -> Any:
        if not timers or not timers[-1].is_alive():
            gate = begin(engine, other, weights_resident=True, speculative=False, priority=0, after=[])
            timers.append(threading.Timer(0.05, engine.cancel_update, [gate]))
            vars(timers[-1])["gate"] = gate
            timers[-1].start()
        return begin(engine, part, after=[*after, vars(timers[-1])["gate"]], **options)

    monkeypatch.setattr(Engine, "open_update", begin_late)
    yield
    for timer in timers:
        timer.join()


class Holding(LitModel):
    """It takes memory of weights once, in a forward, and reads it after each step."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.held: list[Tensor] = []
        self.model.blocks[1].register_forward_hook(self.hold)

    def hold(self, *_: Any) -> None:
        self.held = self.held or self.take()

    def take(self) -> list[Tensor]:
        return [param.detach() for param in self.model.blocks[1].parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(torch.stack([tensor.double().sum() for tensor in self.held]))


class HoldingData(Holding):
    def take(self) -> list[Tensor]:
        return [param.data for param in self.model.blocks[1].parameters()]


def fit(kind: type[Holding], strategy: Any, folder: Path, **options: Any) -> Any:
    torch.manual_seed(7)
    module = kind(Recipe(shape=Shape(layers=3)))
    trainer = quiet_trainer(strategy=strategy, max_steps=4, limit_val_batches=0, default_root_dir=folder, **options)
    trainer.fit(module, data())
    return outcome(trainer, module)


STATE_ON_DISK = Plan(name="state", blocks=(BlockPlan(name="*", state=Tier.DISK),))


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("kind", [Holding, HoldingData])
@pytest.mark.parametrize("plan", ["host", STATE_ON_DISK], ids=["host", "state"])
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.3}], ids=["", "clipped"])
def test_memory_of_weights_has_the_new_values_after_the_step(
    options: dict[str, Any], plan: Any, kind: type[Holding], tmp_path: Path
) -> None:
    assert_same(fit(kind, HeteroOffloadStrategy(plan), tmp_path, **options), fit(kind, "auto", tmp_path, **options))


@pytest.mark.parametrize("options", [{"plan": "disk"}, {"plan": "host", "device": EmulatedDevice("4MiB")}], ids=["disk", "host"])
def test_memory_of_weights_that_live_elsewhere_is_named(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        fit(Holding, HeteroOffloadStrategy(**options), tmp_path)
    named = [row.args for row in caplog.records if "holds the memory" in str(row.msg)]
    assert named == [("model.blocks.1.norm.weight", request.node.callspec.id)]
