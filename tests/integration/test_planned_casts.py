"""Under mixed precision memory is as predicted: casts of weights leave memory with the weights."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gpt2 import GPT2, Size, fit, make_trainer
from lightning.pytorch.plugins import MixedPrecision
from support.machines import HARDWARE
from support.models import LitModel, Recipe, Shape, data, quiet_trainer
from support.scripts import output_of, result_of
from torch import nn

from lightning_hetero import EmulatedDevice, Plan
from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Tier, UpdateLane
from lightning_hetero.lanes.memory import ALIGNMENT_BYTES
from lightning_hetero.planners import BUILTIN_PLANS, PLANNERS
from lightning_hetero.planners.evaluation import evaluated
from lightning_hetero.store.capacity import heap_meter
from lightning_hetero.strategies import HeteroOffloadStrategy

STEPS, IN_FORCE = 9, 6  # the plan comes after the batches that are profiled
PRECISIONS = ["bf16-mixed", "16-mixed"]
SHAPE = Shape(layers=6, width=128, counting=False)
CAST_BYTES = 2 * 2 * 128 * 259  # of the two matrices of a block


def plugins(precision: str) -> list[MixedPrecision]:
    """16 bits under autocast, with a scaled loss for fp16, which Lightning itself refuses on a
    CPU.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if precision == "16-mixed" else None
    return [MixedPrecision(precision, "cpu", scaler=scaler)]  # type: ignore[arg-type]


def train(strategy: HeteroOffloadStrategy, precision: str, folder: Path, *callbacks: pl.Callback) -> None:
    torch.manual_seed(7)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=STEPS, default_root_dir=folder, callbacks=[*callbacks], plugins=plugins(precision)
    )
    trainer.fit(LitModel(Recipe(shape=SHAPE)), data(STEPS))


# ---- a device with memory of its own -------------------------------------------------------------


class Peak(pl.Callback):
    """What the device's memory held at most while the plan was in force."""

    num_bytes = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == IN_FORCE:
            memory: Any = trainer.strategy.session.executor.lanes.memory()
            memory.peak_bytes = memory.used_bytes

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.num_bytes = trainer.strategy.session.executor.lanes.memory().peak_bytes


RULES = {
    "all leave": BlockPlan(name="*"),
    "all stay": BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rule", RULES)
def test_a_device_holds_what_was_predicted(rule: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planner(model: ModelProfile, hardware: HardwareProfile, **options: Any) -> Plan:
        blocks = tuple(replace(RULES[rule], name=b.name) for b in model.blocks)
        return evaluated(Plan(name="given", blocks=blocks, device_cache_bytes=2**20), model, hardware, **options)

    monkeypatch.setitem(PLANNERS, "given", planner)
    strategy, peak = HeteroOffloadStrategy("given", device=EmulatedDevice(memory="16MiB"), replan_drift=None), Peak()
    train(strategy, precision, tmp_path, peak)
    model, plan = strategy.model_profile, strategy.plan
    assert model is not None
    assert plan is not None
    assert [b.cast_bytes for b in model.blocks if not b.pinned] == [CAST_BYTES] * SHAPE.layers
    predicted = plan.require_predicted().device_peak_bytes
    # The emulated device's memory counts neither gradients, nor what is gone before a block's
    # forward or backward ends.
    unseen = max(b.gradient_bytes for b in model.shape().blocks) * (2 if rule == "all leave" else SHAPE.layers)
    unseen += max(b.transient_bytes + b.cast_bytes for b in model.blocks)
    unseen += sum(b.activation_bytes for b in model.blocks if b.pinned)
    assert predicted - unseen <= peak.num_bytes <= predicted + 2 * ALIGNMENT_BYTES * 12 * SHAPE.layers, (predicted, unseen)


class Adapted(LitModel):
    """Its blocks are frozen but for two small matrices, whose casts are large enough to count."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        width = recipe.shape.width
        for block in self.model.blocks:
            block.requires_grad_(False)
            block.dropout = nn.Sequential(nn.Linear(width, 20, bias=False), nn.Linear(20, width, bias=False))


@pytest.mark.parametrize("kind", ["host", "device"])
def test_casts_of_adapters_are_counted_where_they_live(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In host memory they stay until backward. On a device they go with the frozen weights of their
    block.
    """

    def planner(model: ModelProfile, hardware: HardwareProfile, **options: Any) -> Plan:
        cpu = replace(RULES["all leave"], weights=Tier.DISK)
        return evaluated(
            Plan(name="given", blocks=tuple(replace(cpu, name=b.name) for b in model.blocks)), model, hardware, **options
        )

    monkeypatch.setitem(PLANNERS, "given", planner)
    device = EmulatedDevice(memory="16MiB") if kind == "device" else None
    strategy = HeteroOffloadStrategy("given", device=device, replan_drift=None)
    torch.manual_seed(7)
    trainer = quiet_trainer(strategy=strategy, max_steps=IN_FORCE, default_root_dir=tmp_path, plugins=plugins("bf16-mixed"))
    trainer.fit(Adapted(Recipe(shape=SHAPE)), data(STEPS))
    assert strategy.model_profile is not None
    frozen = [b for b in strategy.model_profile.blocks if not b.pinned]
    assert len(frozen) == SHAPE.layers
    of_adapters = 2 * 2 * 128 * 20
    assert [b.cast_bytes for b in frozen] == [CAST_BYTES + of_adapters * (kind == "device")] * SHAPE.layers


# ---- the host ------------------------------------------------------------------------------------

SIZE = Size(layers=8, width=512, heads=4, vocabulary=1024, context=8)
MIB = 2**20
CASTS_OF_LAYER = 2 * 12 * SIZE.width**2


class Forward(pl.Callback):
    """What malloc gives out in a forward under the plan, and what is given back only in
    backward.
    """

    def __init__(self) -> None:
        self.meter = heap_meter()
        self.begin = self.num_bytes = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.begin = self.meter()

    def on_before_backward(self, *_: Any) -> None:
        self.num_bytes = self.meter() - self.begin


def main(precision: str, folder: str) -> None:
    """Prints what forward saves under plan "disk", predicted and measured, as one line of JSON."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])

    def planner(model: ModelProfile, hardware: HardwareProfile, **options: Any) -> Plan:
        return evaluated(BUILTIN_PLANS["disk"](model.shape()), model, hardware, **options)

    PLANNERS["given"] = planner
    strategy = HeteroOffloadStrategy("given", hardware_profile=HARDWARE, host_memory=400 * MIB, replan_drift=None)
    forward = Forward()
    options: dict[str, Any] = {"plugins": plugins(precision), "callbacks": [forward], "default_root_dir": folder}
    fit(make_trainer(strategy=strategy, max_steps=STEPS, **options), GPT2(SIZE), batch=1, length=4)
    plan, model = strategy.plan, strategy.model_profile
    assert plan is not None
    assert model is not None
    found = {
        "predicted": sum(saved_bytes(b, p, shared_memory=True).kept for b, p in zip(model.blocks, plan.blocks, strict=True)),
        "measured": forward.num_bytes,
        "casts": [b.cast_bytes for b in model.blocks if not b.pinned],
    }
    print(json.dumps(found))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_forward_on_the_host_saves_no_casts_as_predicted(precision: str, tmp_path: Path) -> None:
    env = {**os.environ, "LIGHTNING_HETERO_POISON": ""}
    found = result_of(output_of(Path(__file__), precision, tmp_path, cwd=tmp_path, env=env))
    assert found["casts"] == [CASTS_OF_LAYER] * SIZE.layers
    assert found["predicted"] < CASTS_OF_LAYER, found
    # Updates of the step before free their gradients meanwhile.
    assert found["measured"] < found["predicted"] + 2 * CASTS_OF_LAYER, found


if __name__ == "__main__":
    main(*sys.argv[1:])
