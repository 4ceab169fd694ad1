"""``plan="auto"``, the strategy's default: what it plans, when it plans anew, and what it says;
never another bit.
"""

from __future__ import annotations

import json
import logging
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from support.machines import HARDWARE
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.strategies import least_memory
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import planners
from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError, PlanError
from lightning_hetero.handles.offloaded_parameter import OffloadedParameter
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.planners.evaluation import evaluated
from lightning_hetero.planning import autoplan, machine_profile
from lightning_hetero.planning.machine_profile import ENVIRONMENT
from lightning_hetero.runtime.process_memory import Heap
from lightning_hetero.strategies import HeteroOffloadStrategy

DEEP = Shape(layers=24)
PLANNERS = ["auto", "lohan", "autohete", "protrain", "deep_optimizer_states", "zero_offload", "zero_infinity"]


def cheap(monkeypatch: pytest.MonkeyPatch, plans: list[str]) -> list[int]:
    """Replaces the planner by one that takes turns among built-in plans; returns the budgets it was
    asked with.
    """
    asked: list[int] = []

    def plan(model: Any, hardware: HardwareProfile, **_: Any) -> Plan:
        name = plans[min(len(asked), len(plans) - 1)]
        asked.append(hardware.host_memory_bytes)
        return evaluated(planners.BUILTIN_PLANS[name](model.shape()), model, hardware)

    monkeypatch.setitem(planners.PLANNERS, "holistic", plan)
    return asked


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_trains_bit_for_bit(planner: str, tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(layers=4, dropout=0.2, tied=True), steps=7, schedule="onecycle")
    strategy = HeteroOffloadStrategy() if planner == "auto" else HeteroOffloadStrategy(planner)
    assert_same(run(recipe, strategy, tmp_path), run(recipe, "auto", tmp_path))
    assert strategy.plan.name == ("holistic" if planner == "auto" else planner)
    assert strategy.plan.predicted.iteration_s > 0
    assert [b.name for b in strategy.plan.blocks] == [b.name for b in strategy.model_profile.blocks]
    assert not list(tmp_path.glob("lightning-hetero-*"))


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(shape=DEEP, steps=7),
        Recipe(shape=DEEP, steps=6, accumulate=2),
        Recipe(shape=DEEP, steps=7, clip=0.3),
        Recipe(shape=DEEP, steps=7, optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9)),
    ],
    ids=["plain", "accumulated", "clipped", "sgd"],
)
def test_budgets_make_plans(recipe: Recipe, tmp_path: Path) -> None:
    """All fits; a part of it fits; only the least fits: three plans that put more and more on disk,
    and none changes a bit.

    Where all gradients wait in memory, or the optimizer's own code runs, little is left to choose
    from with half of the memory.
    """
    expected = run(recipe, "auto", tmp_path)
    train = partial(run, recipe, tmp_path=tmp_path)
    least, most = least_memory(train), least_memory(train, plan="host")
    on_disk = []
    for budget in (None, (least + most) // 2, least):
        strategy = HeteroOffloadStrategy(host_memory=budget)
        assert_same(run(recipe, strategy, tmp_path), expected)
        on_disk.append(strategy.plan.predicted.disk_bytes)
    nothing, some, more = on_disk
    assert nothing == 0 < some <= more
    assert some < more or recipe != Recipe(shape=DEEP, steps=7)


def test_the_plan_is_logged_once_as_a_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(Recipe(steps=7), HeteroOffloadStrategy(), tmp_path)
    (shown,) = [text for text in caplog.messages if "plan 'holistic', made in" in text]
    assert "predicted: a step in" in shown
    assert "model …" in shown or "model.blocks.0 …" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_the_first_steps_correct_the_machine_and_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps take five seconds, as far as the plan is told: updates that are slower than the profile
    says would explain it.
    """
    recipe = Recipe(shape=DEEP, steps=14)
    expected = run(recipe, "auto", tmp_path)
    params = sum(p.numel() for p in LitModel(recipe).parameters())
    monkeypatch.delenv(ENVIRONMENT)
    monkeypatch.setattr(machine_profile, "_measured", lambda *a, **k: replace(HARDWARE, cpu_update_params_per_s=params / 0.5))
    strategy = HeteroOffloadStrategy()
    taken = strategy.run.take_step_seconds
    monkeypatch.setattr(strategy.run, "take_step_seconds", lambda: None if taken() is None else 5.0)
    caplog.set_level(logging.INFO, "lightning_hetero")
    assert_same(run(recipe, strategy, tmp_path), expected)
    assert sum(text.startswith("planning once more: a step takes 5 s") for text in caplog.messages) == 1
    assert 1 / 64 < strategy.autoplan._scale < 0.5
    assert strategy.plan.predicted.iteration_s <= 5.1


def test_a_fit_of_four_batches_is_not_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "nothing"))  # it would be read
    strategy = HeteroOffloadStrategy()
    run(Recipe(steps=4), strategy, tmp_path)
    assert strategy.plan.name == "host"
    assert strategy.model_profile is None
    assert strategy.prediction_error() == {}


def test_evaluation_alone_uses_the_provisional_plan(tmp_path: Path) -> None:
    strategy = HeteroOffloadStrategy()
    trainer = quiet_trainer(strategy=strategy, default_root_dir=tmp_path)
    trainer.validate(LitModel(Recipe()), data(4, seed=1), verbose=False)
    assert strategy.plan.name == "host"


def fits(strategy: Any, folder: Path, shape: Shape = DEEP) -> Outcome:
    """Two fits and a validation of one module by one Trainer."""
    torch.manual_seed(7)
    module = LitModel(Recipe(shape=shape))
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=folder)
    trainer.fit(module, data(6))
    trainer.validate(module, data(2, seed=1), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data(6))
    return outcome(trainer, module)


@pytest.mark.parametrize("tight", [False, True], ids=["in_memory", "on_disk"])
def test_the_next_fit_continues_with_the_plan(tight: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = partial(fits, folder=tmp_path)
    budget = least_memory(train) if tight else None
    asked = cheap(monkeypatch, ["disk"])
    strategy = HeteroOffloadStrategy(host_memory=budget)
    assert_same(fits(strategy, tmp_path), fits("auto", tmp_path))
    assert len(asked) == 1
    assert strategy.autoplan.stage is autoplan.Stage.RUN


def test_another_model_is_planned_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cheap(monkeypatch, ["disk", "host"])
    strategy = HeteroOffloadStrategy()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path)
    for layers in (3, 4):
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit_loop.max_epochs = 1
        trainer.fit(LitModel(Recipe(shape=Shape(layers=layers))), data(6))
        assert len(strategy.plan.blocks) == layers + 4
    assert len(asked) == 2


def test_checkpoints_are_resumed_under_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved on disk under one plan, loaded into the provisional one, and moved on."""
    cheap(monkeypatch, ["disk", "disk"])
    recipe = Recipe(shape=DEEP)

    def resumed(strategies: list[Any]) -> Outcome:
        torch.manual_seed(7)
        trainer = quiet_trainer(strategy=strategies[0], max_steps=6, default_root_dir=tmp_path)
        trainer.fit(LitModel(recipe), data(8))
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        module = LitModel(recipe)
        trainer = quiet_trainer(strategy=strategies[1], max_steps=12, default_root_dir=tmp_path)
        trainer.fit(module, data(8), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
        return outcome(trainer, module)

    expected = resumed(["auto", "auto"])
    assert_same(resumed([HeteroOffloadStrategy(), HeteroOffloadStrategy()]), expected)
    assert_same(resumed([HeteroOffloadStrategy(), "auto"]), expected)


# ---- where it fails ------------------------------------------------------------------------------


def test_without_a_plan_training_stops_with_nothing_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Plan:
        raise PlanError("nothing fits: host, 3 GiB", tier="host", shortfall_bytes=3)

    monkeypatch.setitem(planners.PLANNERS, "holistic", refuses)
    left: list[LitModel] = []
    with pytest.raises(PlanError, match="nothing fits"):
        run(Recipe(steps=6), HeteroOffloadStrategy(), tmp_path, prepare=left.append)
    expected = run(Recipe(steps=4), "auto", tmp_path)
    for name, value in left[0].state_dict().items():
        assert torch.equal(value, expected.weights[name]), name
    assert all(type(p) is nn.Parameter for p in left[0].parameters())
    assert not list(tmp_path.glob("lightning-hetero-*"))


@pytest.mark.parametrize(("clip", "updates"), [(0.3, Updates.AFTER_VERDICT), (None, Updates.IN_BACKWARD)])
def test_every_planner_is_told_when_updates_may_run(
    clip: float | None, updates: Updates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Updates] = []
    zero_offload = planners.PLANNERS["zero_offload"]

    def plan(model: Any, hardware: HardwareProfile, **options: Any) -> Plan:
        told.append(options["updates"])
        return zero_offload(model, hardware, **options)

    monkeypatch.setitem(planners.PLANNERS, "zero_offload", plan)
    run(Recipe(steps=5, clip=clip), HeteroOffloadStrategy(plan="zero_offload"), tmp_path)
    assert set(told) == {updates}


def test_a_plan_beyond_the_budget_is_asked_for_again_with_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(shape=DEEP, steps=7)
    train = partial(run, recipe, tmp_path=tmp_path)
    budget = least_memory(train)
    asked: list[int] = []

    def greedy(model: Any, hardware: HardwareProfile, **_: Any) -> Plan:
        asked.append(hardware.host_memory_bytes)
        name = "host" if len(asked) == 1 else "disk"
        plan = planners.BUILTIN_PLANS[name](model.shape())
        return replace(plan.resolve(b.name for b in model.blocks), predicted=evaluated(plan, model, HARDWARE).predicted)

    monkeypatch.setitem(planners.PLANNERS, "holistic", greedy)
    assert_same(run(recipe, HeteroOffloadStrategy(host_memory=budget), tmp_path), run(recipe, "auto", tmp_path))
    assert len(asked) == 2
    assert asked[1] < asked[0]


def test_a_missing_solver_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: Any, **__: Any) -> Plan:
        raise ModuleNotFoundError("No module named 'cvxpy'", name="cvxpy")

    monkeypatch.setitem(planners.PLANNERS, "holistic", lacks)
    with pytest.raises(ConfigError, match=r"needs cvxpy.*pip install cvxpy.*plan=\"host\""):
        run(Recipe(steps=6), HeteroOffloadStrategy(), tmp_path)


def test_a_budget_below_the_least_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryBudgetError, match="plan 'host' needs"):
        run(Recipe(), HeteroOffloadStrategy(host_memory="1000B"), tmp_path)


def test_a_budget_below_the_least_is_told_the_least(tmp_path: Path) -> None:
    """Plan disk stages what it streams: a small model needs less host memory under plan host."""
    recipe = Recipe(steps=1, shape=Shape(layers=1))
    with pytest.raises(OutOfMemoryBudgetError, match="plan 'host' needs") as refusal:
        run(recipe, HeteroOffloadStrategy(host_memory="1000B"), tmp_path)
    run(recipe, HeteroOffloadStrategy(host_memory=refusal.value.needed_bytes), tmp_path)


@pytest.mark.parametrize("name", ["holistics", "Auto", "", None, {"zero_optimization": {"stage": 3}}])
def test_unknown_planners_are_refused_with_the_known_ones(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"'auto'.*'host'.*'lohan'"):
        HeteroOffloadStrategy(name)


@pytest.mark.parametrize("value", [0, -1, True, "much"])
def test_a_drift_is_a_positive_number(value: Any) -> None:
    with pytest.raises(ConfigError, match="replan_drift"):
        HeteroOffloadStrategy(replan_drift=value)


def test_the_machine_is_given_by_profile_file_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "machine.json"
    file.write_text(replace(HARDWARE, name="mine").to_json())
    for given in (replace(HARDWARE, name="mine"), file, str(file)):
        strategy = HeteroOffloadStrategy("zero_infinity", hardware_profile=given)
        run(Recipe(steps=5), strategy, tmp_path)
        assert strategy.autoplan.machine.name == "mine"
    monkeypatch.setenv(ENVIRONMENT, str(file))
    strategy = HeteroOffloadStrategy("zero_infinity", host_memory="2GiB", disk_capacity="5GiB")
    run(Recipe(steps=5), strategy, tmp_path)
    machine = strategy.autoplan.machine
    assert machine.name == "mine"
    assert 0 < 5 * 2**30 - machine.disk_capacity_bytes < 5 * 2**20  # what a store takes whatever the plan
    profile = strategy.model_profile
    on_top = profile.constant_host_bytes + sum(b.activation_bytes for b in profile.blocks)
    assert machine.host_memory_bytes == pytest.approx(2 * 2**30 + on_top, rel=1e-3)
    file.write_text(replace(HARDWARE, name="a GPU", shared_memory=False).to_json())
    with pytest.raises(ConfigError, match=r"'a GPU' describes a device.*CPU"):
        run(Recipe(steps=5), HeteroOffloadStrategy(hardware_profile=file), tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        HeteroOffloadStrategy(hardware_profile=tmp_path / "none.json")


# ---- planning anew -------------------------------------------------------------------------------


class Asks(pl.Callback):
    """Calls ``replan`` after some batches and notes the plan of each."""

    def __init__(self, at: dict[int, dict[str, Any]]) -> None:
        self.at = at
        self.names: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.names.append(trainer.strategy.plan.name)
        if (step := len(self.names)) in self.at:
            trainer.strategy.replan(**self.at[step])


def test_a_plan_is_made_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cheap(monkeypatch, ["disk", "host"])
    asks = Asks({6: {}})
    recipe = Recipe(steps=12)
    assert_same(run(recipe, HeteroOffloadStrategy(), tmp_path, callbacks=[asks]), run(recipe, "auto", tmp_path))
    assert len(asked) == 2
    assert asks.names == ["host"] * 4 + ["disk"] * 5 + ["host"] * 3  # three batches are timed again


def test_a_new_budget_is_kept_from_the_next_batch_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    asked = cheap(monkeypatch, ["host", "disk"])
    recipe = Recipe(shape=DEEP, steps=9)
    train = partial(run, recipe, tmp_path=tmp_path)
    least = least_memory(train)
    asks = Asks({6: {"host_memory": least}})
    allowed: list[int | None] = []
    monkeypatch.setattr(Heap, "allow", lambda heap, budget, whole=Heap.allow: (allowed.append(budget), whole(heap, budget)))
    strategy = HeteroOffloadStrategy()
    caplog.set_level(logging.INFO, "lightning_hetero")
    assert_same(train(strategy, callbacks=[asks]), train("auto"))
    assert allowed == [None, None, least]  # as fit begins, with the first plan, and with the new one
    assert any("planning anew: asked for, with another budget" in r.getMessage() for r in caplog.records)
    assert asks.names == ["host"] * 6 + ["disk"] * 3
    assert asked[1] < asked[0]
    assert strategy.options.host_memory == least


def test_only_planners_plan_anew() -> None:
    with pytest.raises(ConfigError, match='plan="auto"'):
        HeteroOffloadStrategy("host").replan()


def test_longer_batches_call_for_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Five in a row; the odd one does not."""
    asked = cheap(monkeypatch, ["disk", "host"])
    caplog.set_level(logging.INFO, "lightning_hetero")

    class Lengths(DataLoader):
        def __init__(self, lengths: list[int]) -> None:
            super().__init__(TensorDataset(torch.zeros(len(lengths))), batch_size=1)
            self.lengths = lengths

        def __iter__(self) -> Any:
            generator = torch.Generator().manual_seed(3)
            for length in self.lengths:
                yield [torch.randint(0, 37, (length, 6), generator=generator)]

    lengths = [2, 2, 2, 2, 2, 8, 2, 2] + [8] * 11

    def train(strategy: Any) -> Outcome:
        torch.manual_seed(7)
        module = LitModel(Recipe())
        trainer = quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path)
        trainer.fit(module, Lengths(lengths))
        return outcome(trainer, module)

    strategy = HeteroOffloadStrategy()
    assert_same(train(strategy), train("auto"))
    assert len(asked) == 2
    assert strategy.model_profile.tokens == 48
    assert sum("batches have 48 tokens, the plan is for 12" in r.getMessage() for r in caplog.records) == 1


# ---- the prediction ------------------------------------------------------------------------------


def test_prediction_errors_go_to_the_loggers_and_nowhere_else(tmp_path: Path) -> None:
    class Logs(LitModel):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss)
            return loss

    def train(strategy: Any, name: str) -> tuple[pl.Trainer, CSVLogger]:
        torch.manual_seed(7)
        logger = CSVLogger(tmp_path, name=name)
        trainer = quiet_trainer(
            strategy=strategy, max_steps=10, default_root_dir=tmp_path, logger=logger, log_every_n_steps=2, limit_val_batches=0
        )
        trainer.fit(Logs(Recipe()), data())
        return trainer, logger

    strategy = HeteroOffloadStrategy("zero_infinity")
    ours, logger = train(strategy, "ours")
    plain, plain_logger = train("auto", "plain")
    assert ours.callback_metrics.keys() == plain.callback_metrics.keys()
    assert ours.logged_metrics == plain.logged_metrics
    errors = strategy.prediction_error()
    assert errors.keys() == {"step_time_error", "host_peak_error"}
    assert all(value >= 0 for value in errors.values())
    assert errors["host_peak_error"] < 0.5

    def rows(log: CSVLogger) -> list[dict[str, str]]:
        header, *lines = (Path(log.log_dir) / "metrics.csv").read_text().splitlines()
        return [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]

    mine = [{k: v for k, v in row.items() if not k.startswith("hetero") and v} for row in rows(logger)]
    theirs = [{k: v for k, v in row.items() if v} for row in rows(plain_logger)]
    assert [row for row in mine if set(row) - {"step"}] == theirs
    assert sum(bool(row.get("hetero_offload/step_time_error")) for row in rows(logger)) == 3  # after 6, 8 and 10 steps


class Notes(LitModel):
    """Notes the callbacks while it trains."""

    def on_train_start(self) -> None:
        self.during = [type(c).__name__ for c in self.trainer.callbacks]


def test_the_list_of_callbacks_is_left_as_it_was(tmp_path: Path) -> None:
    strategy = HeteroOffloadStrategy("zero_infinity")
    trainer = quiet_trainer(strategy=strategy, max_steps=6, default_root_dir=tmp_path)
    before = list(trainer.callbacks)
    module = Notes(Recipe(optimizer=torch.optim.AdamW))
    trainer.fit(module, data())
    assert trainer.callbacks == before
    assert module.during[0] == "ModelProfiler"
    assert pickle.loads(pickle.dumps(trainer)).strategy.prediction_error() == strategy.prediction_error()
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert "ModelProfiler" not in json.dumps(list(torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]))


def test_random_numbers_are_the_trainings_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that draws some, and a model with dropout."""

    def draws(model: Any, hardware: HardwareProfile, **_: Any) -> Plan:
        torch.rand(7)
        return evaluated(planners.BUILTIN_PLANS["disk"](model.shape()), model, hardware)

    monkeypatch.setitem(planners.PLANNERS, "holistic", draws)
    recipe = Recipe(shape=Shape(dropout=0.4), steps=7)
    assert_same(run(recipe, HeteroOffloadStrategy(), tmp_path), run(recipe, "auto", tmp_path))


def test_a_parked_model_is_trained_on_under_its_plan(tmp_path: Path) -> None:
    """It does not fit memory after the fit, and stays on disk; the plan does too."""
    recipe = Recipe(shape=DEEP)
    train = partial(run, recipe, tmp_path=tmp_path)
    budget = least_memory(train)
    strategy = HeteroOffloadStrategy(host_memory=budget)
    torch.manual_seed(7)
    module = LitModel(recipe)
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(module, data(6))
    assert any(type(p) is OffloadedParameter for p in module.parameters())
    plan = strategy.plan
    trainer.validate(module, data(2, seed=1), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data(6))
    assert strategy.plan.blocks == plan.blocks
    torch.manual_seed(7)
    plain = LitModel(recipe)
    other = quiet_trainer(max_epochs=1, default_root_dir=tmp_path)
    other.fit(plain, data(6))
    other.validate(plain, data(2, seed=1), verbose=False)
    other.fit_loop.max_epochs = 2
    other.fit(plain, data(6))
    for name, value in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
