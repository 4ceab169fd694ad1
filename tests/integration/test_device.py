"""Training on an emulated device: plans by name, planners, optimizers of their own code,
activations on disk; never another bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from support.device_plans import RESIDENT
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.strategies import SPREAD
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier
from lightning_hetero.errors import OutOfMemoryBudgetError, UnsupportedError
from lightning_hetero.ir.plan import Saved
from lightning_hetero.runtime.activations.swaps import Swap
from lightning_hetero.runtime.device.gradients import HostGradients
from lightning_hetero.strategies import HeteroOffloadStrategy

SHAPE = Shape(layers=4, dropout=0.2)


def device(memory: str | int = "4MiB", **options: Any) -> EmulatedDevice:
    return EmulatedDevice(memory=memory, **options)


def strategy_of(plan: Any = "auto", *, memory: str | int = "4MiB", **options: Any) -> Any:
    return HeteroOffloadStrategy(plan, device=device(memory), **options)


def same(recipe: Recipe, strategy: Any, folder: Path) -> Outcome:
    got = run(recipe, strategy, folder)
    assert_same(got, run(recipe, "auto", folder))
    return got


@pytest.mark.parametrize("name", ["resident", "host", "disk"])
def test_plans_by_name(name: str, tmp_path: Path) -> None:
    strategy = strategy_of(name)
    same(Recipe(shape=SHAPE, steps=3), strategy, tmp_path)
    assert strategy.plan.name == name
    assert not list(tmp_path.glob("lightning-hetero-*"))


@pytest.mark.parametrize("name", ["auto", "full_recompute", "zero_offload", "zero_infinity", "lohan", "autohete", "protrain"])
def test_planners(name: str, tmp_path: Path) -> None:
    """Profiled, planned with the device's figures, and run."""
    slow = device(h2d_bytes_per_s=50e6, d2h_bytes_per_s=40e6, compute_slowdown=1.5)
    strategy = HeteroOffloadStrategy(name, device=slow)
    same(Recipe(shape=SHAPE, steps=6, clip=0.5 if name == "lohan" else None), strategy, tmp_path)
    machine = strategy.autoplan.machine
    assert not machine.shared_memory
    assert (machine.device_memory_bytes, machine.link_h2d_bytes_per_s, machine.link_d2h_bytes_per_s) == (4 * 2**20, 50e6, 40e6)
    assert strategy.plan.predicted.device_peak_bytes <= 4 * 2**20
    operators = {operator.name for row in strategy.model_profile.blocks for operator in row.operators}
    assert {"norm", "up"} <= operators  # found where the weights lay at that moment


def test_a_planner_uses_a_small_device(tmp_path: Path) -> None:
    """What does not fit goes below: the same model with less and less device memory."""
    recipe = Recipe(shape=Shape(layers=8, counting=False), steps=6)
    on_device = []
    for memory in ("4MiB", "300KiB"):
        strategy = strategy_of(memory=memory)
        same(recipe, strategy, tmp_path)
        on_device.append(sum(row.weights is Tier.DEVICE and row.state is Tier.DEVICE for row in strategy.plan.blocks))
        assert strategy.session is None
    assert on_device[0] > on_device[1]


def test_a_plan_that_does_not_fit_the_device_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryBudgetError, match=r"needs .* of device memory; 64.0 KiB may be used") as refusal:
        run(Recipe(shape=SHAPE), strategy_of("resident", memory="64KiB"), tmp_path)
    assert refusal.value.tier == "device"
    least = refusal.value.needed_bytes
    run(Recipe(shape=SHAPE), strategy_of("resident", memory=least), tmp_path)
    with pytest.raises(OutOfMemoryBudgetError):
        run(Recipe(shape=SHAPE), strategy_of("resident", memory=least - 1), tmp_path)


class Uneven(LitModel):
    """Its last batch is shorter than the others."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(data(2).dataset.tensors[0][:3]), batch_size=2)


@pytest.mark.parametrize("plan", ["disk", SPREAD], ids=["disk", "spread"])
def test_batches_of_another_shape(plan: Any, tmp_path: Path) -> None:
    def train(strategy: Any) -> Outcome:
        torch.manual_seed(7)
        module = Uneven(Recipe(shape=SHAPE, groups=True, schedule="step"))
        trainer = quiet_trainer(strategy=strategy, max_epochs=3, accumulate_grad_batches=2, default_root_dir=tmp_path)
        torch.manual_seed(11)
        trainer.fit(module)
        return outcome(trainer, module)

    assert_same(train(strategy_of(plan)), train("auto"))


@pytest.mark.parametrize("clip", [{}, {"clip": 0.3}, {"clip": 3e-3, "clip_by": "value"}], ids=["sums", "norm", "value"])
def test_gradients_add_up_in_batches_that_use_other_blocks_than_foreseen(clip: dict[str, Any], tmp_path: Path) -> None:
    """Some have left for the host by then: those of such a batch are added to them, and are clipped
    with them.
    """
    recipe = Recipe(shape=Shape(counting=False, skips=True), steps=4, accumulate=3, **clip)
    assert_same(run(recipe, strategy_of("host"), tmp_path), run(recipe, "auto", tmp_path))


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adafactor"])
@pytest.mark.parametrize("plan", ["resident", "auto"])
def test_optimizers_of_their_own_code_run_on_the_device(plan: str, optimizer: Any, tmp_path: Path) -> None:
    strategy = strategy_of(plan)
    same(Recipe(shape=SHAPE, steps=6, optimizer=optimizer, schedule="step", clip=0.3), strategy, tmp_path)
    assert all(row.weights is Tier.DEVICE for row in strategy.plan.blocks)


def test_optimizers_of_their_own_code_are_refused_by_name_where_weights_are_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"block 'model'.*optimizer SGD.*plan=\"resident\""):
        run(Recipe(shape=SHAPE, optimizer=OPTIMIZERS[0]), strategy_of("host"), tmp_path)


def swapping(saved: Saved, boundary: Saved) -> Plan:
    row = BlockPlan(name="model.blocks.*", saved=saved, boundary=boundary)
    return Plan(name="swapping", blocks=(row, RESIDENT))


@pytest.mark.parametrize("given", [False, True], ids=["temporary", "disk_path"])
def test_activations_on_the_disk(given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a directory of their own, which goes with the run."""
    moved = []
    write = Swap.write
    monkeypatch.setattr(Swap, "write", lambda swap, *args: moved.append(swap.num_bytes) or write(swap, *args))
    plan = swapping(Saved.SWAP_DISK, Saved.SWAP_DISK)
    disk = tmp_path / "disk"
    same(Recipe(shape=SHAPE), strategy_of(plan, disk_path=disk if given else None), tmp_path)
    assert moved
    assert all(moved)
    left = [path for path in tmp_path.rglob("*") if path.name.startswith(("block-", "activations", "lightning"))]
    assert not [path for path in left if not given or path.parent != disk]  # what lies there itself is the store, which stays


def test_norms_are_computed_on_the_device_only_for_clipping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[float | None] = set()
    take = HostGradients.take

    def noted(self: HostGradients, block: Any, **options: Any) -> Any:
        used.add(self.norm_type)
        return take(self, block, **options)

    monkeypatch.setattr(HostGradients, "take", noted)
    for clip, by, norm_type in ((None, "norm", None), (0.3, "value", None), (0.3, "norm", 2.0)):
        used.clear()
        same(Recipe(shape=SHAPE, clip=clip, clip_by=by), strategy_of("host"), tmp_path)
        assert used == {norm_type}


class Writing(pl.Callback):
    """Writes weights between batches, in place, as data, and by loading."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        model = pl_module.model
        model.blocks[1].up.weight.mul_(0.5)
        model.embed.weight[3] = 0
        model.embed.weight.data.clamp_(-0.5, 0.5)
        model.blocks[2].load_state_dict(model.blocks[0].state_dict())
        pl_module.losses += [model.blocks[1].up.weight.norm(), *(p.data.sum() for p in pl_module.parameters())]
        for param in model.norm.parameters():
            param.data = param.data + 1


@pytest.mark.parametrize("plan", ["host", "disk", "resident"])
@pytest.mark.parametrize("make", [Writing, lambda: EMAWeightAveraging(decay=0.9)], ids=["writing", "averaging"])
def test_callbacks_that_touch_weights(make: Any, plan: str, tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(layers=4, tied=True), validate=True)
    expected = run(recipe, "auto", tmp_path, callbacks=[make()])
    assert_same(run(recipe, strategy_of(plan), tmp_path, callbacks=[make()]), expected)


@pytest.mark.parametrize("name", ["resident", "host"])
def test_mirrors_of_a_kept_step_are_in_the_schedule_and_in_the_trace(name: str, tmp_path: Path) -> None:
    """Those of what the device has alone come by way of the host."""
    strategy = strategy_of(name, trace=True, disk_path=tmp_path / "store", durability="process")
    issued: list[set[str]] = []

    class Notes(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            executor = trainer.strategy.session.executor
            blocks = [block.name for block in executor.blocks]
            mirrors = [op for op in executor.schedule.ops if op.kind.value == "MIRROR"] if executor.schedule else []
            issued.append({f"{op.lane.value} {blocks[op.block]}" for op in mirrors})

    run(Recipe(shape=SHAPE, steps=4), strategy, tmp_path, callbacks=[Notes()])
    spans = [s for s in strategy.trace.spans if s.name.startswith("MIRROR ")]
    assert spans
    assert issued[-1]
    assert any(row.startswith("d2h") for row in issued[-1]) == (name == "resident")
    steps = sorted({s.step for s in spans})
    found = {f"{s.lane} {s.name.removeprefix('MIRROR ')}" for s in spans if s.step == steps[-2]}
    assert found == issued[-1]
