"""Memory is as predicted: random plans on an emulated device, whose arena counts what is taken from
it.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from hypothesis import given
from support.device_plans import device_plans
from support.models import LitModel, Recipe, Shape, data, quiet_trainer
from support.properties import examples

from lightning_hetero import EmulatedDevice, Plan
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.lanes.memory import ALIGNMENT_BYTES
from lightning_hetero.lowering import needs_of
from lightning_hetero.lowering.needs import total_bytes
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.evaluation import evaluated
from lightning_hetero.runtime.activations import block as activations
from lightning_hetero.store.raw_memory import PAGE
from lightning_hetero.strategies import HeteroOffloadStrategy

NEAR = 0.75
STEPS, IN_FORCE = 9, 6  # the plan comes after the batches that are profiled


class Peaks(pl.Callback):
    """What was in memory while the plan was in force."""

    device_bytes = host_bytes = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == IN_FORCE:
            memory: Any = trainer.strategy.session.executor.lanes.memory()
            memory.peak_bytes = memory.used_bytes

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self.device_bytes = strategy.session.executor.lanes.memory().peak_bytes
        self.host_bytes = strategy.session.needed_bytes(strategy.plan)


@examples(4)
@given(plan=device_plans())
def test_memory_is_as_predicted(plan: Plan) -> None:
    def planner(model: ModelProfile, hardware: HardwareProfile, **options: Any) -> Plan:
        return evaluated(replace(plan, name="random"), model, hardware, **options)

    peaks = Peaks()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(PLANNERS, "random", planner)
        patch.setattr(activations, "SMALL_BYTES", 64)  # the model is small, and what it saves shall leave
        strategy = HeteroOffloadStrategy(plan="random", device=EmulatedDevice(memory="16MiB"), replan_drift=None)
        trainer = quiet_trainer(strategy=strategy, max_steps=STEPS, default_root_dir=Path(folder), callbacks=[peaks])
        trainer.fit(LitModel(Recipe(shape=Shape(layers=5, width=64, counting=False))), data(STEPS))
    model, found = strategy.model_profile, strategy.plan
    assert model is not None
    assert found is not None
    assert found.predicted is not None
    needs, predicted = needs_of(found, model, shared_memory=False), found.predicted.device_peak_bytes
    # The arena sees neither gradients, nor what is gone before a block's forward or backward ends,
    # nor what pinned blocks save.
    unseen = sum(b.gradient_bytes for b in model.shape().blocks) + max(b.transient_bytes for b in model.blocks)
    unseen += sum(b.activation_bytes for b in model.blocks if b.pinned)
    rounded = 2 * ALIGNMENT_BYTES * len(model.blocks)
    # What is on its way at the peak depends on whose turn it was.
    assert NEAR * (predicted - unseen) <= peaks.device_bytes <= predicted + rounded
    assert predicted <= total_bytes(needs.device) + sum(needs.device_caches)
    # The session's account and the planners' differ by the process itself, and by how parts are
    # padded: weights, gradients and both moments to pages, which shows where little is on the host.
    planned = total_bytes(needs.host) + max(needs.host_caches, default=0) - model.constant_host_bytes
    assert peaks.host_bytes == pytest.approx(planned, rel=0.03, abs=4 * PAGE)
