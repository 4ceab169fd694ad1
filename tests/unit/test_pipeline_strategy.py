"""What the strategy refuses before pipelines are made, and what it says aloud."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from support.training.pipelines import Net, cluster_plan

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.parallel.strategies.pipelines import check_module, check_optimizers, say_what_runs
from lightning_hetero.strategies import HeteroParallelStrategy

PLAN = cluster_plan((3, (1, 2, 3)))


def strategy_for(module: pl.LightningModule) -> Any:
    strategy = HeteroParallelStrategy(plan=PLAN)
    strategy._lightning_module = module
    return strategy


class OwnSteps(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError


def test_a_plan_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(PLAN.to_json(), encoding="utf-8")
    assert HeteroParallelStrategy(plan=file).plan == HeteroParallelStrategy(plan=str(file)).plan == PLAN
    assert HeteroParallelStrategy(plan="auto", micro_batches=4).plan is None
    with pytest.raises(ConfigError, match=r"no\.json"):
        HeteroParallelStrategy(plan=tmp_path / "no.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": PLAN, "speeds": [1, 2]}, "speeds and plan"),
        ({"plan": PLAN, "micro_batches": 4}, "micro_batches=4"),
        ({"plan": "auto", "micro_batches": 0}, "micro_batches=0"),
    ],
)
def test_options_that_contradict_a_plan_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HeteroParallelStrategy(**options)


def test_modules_that_step_by_themselves_are_refused() -> None:
    net = Net()
    net.automatic_optimization = False
    with pytest.raises(UnsupportedError, match="automatic optimization"):
        check_module(net, Precision())
    with pytest.raises(UnsupportedError, match="bf16-mixed"):
        check_module(Net(), MixedPrecision("16-mixed", "cuda"))


def test_several_optimizers_and_line_searches_are_refused() -> None:
    net = Net()
    sgd: list[torch.optim.Optimizer] = [torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(UnsupportedError, match="2 optimizers"):
        check_optimizers(sgd)
    with pytest.raises(UnsupportedError, match="LBFGS"):
        check_optimizers([torch.optim.LBFGS(net.parameters())])
    check_optimizers(sgd[:1])


def test_predicting_is_refused_where_no_rank_has_the_model() -> None:
    strategy = strategy_for(Net())
    strategy._staged = object()
    with pytest.raises(UnsupportedError, match="predict from a checkpoint"):
        strategy.predict_step(None, 0)


def test_steps_that_are_not_executed_are_named_aloud() -> None:
    with pytest.warns(UserWarning, match=r"OwnSteps\.training_step will NOT be executed"):
        say_what_runs(OwnSteps())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        say_what_runs(Net())
