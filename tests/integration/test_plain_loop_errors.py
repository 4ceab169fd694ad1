"""Plain loops under ``lightning_hetero.offload``: what is refused, and what errors leave behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import Model, Shape
from support.plain_loops import Run, adamw, assert_equal, batches, loss_of, outcome, plans, simple
from torch import nn

import lightning_hetero
from lightning_hetero.errors import ConfigError, HeteroError, UnsupportedError


def norm(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)


def norm_one_by_one(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.05, foreach=False)


def value(run: Run) -> None:
    nn.utils.clip_grad_value_(run.model.parameters(), 0.05)


def unscaled(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.step(run.optimizer)


def multiplied(run: Run) -> None:
    for param in run.model.blocks.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)


@pytest.mark.parametrize("use", [norm, norm_one_by_one, value, unscaled, multiplied])
@pytest.mark.parametrize("where", ["host", "disk", "device"])
def test_overlapping_backward_notices_that_the_loop_uses_gradients(use: Callable[[Run], None], where: str, tmp_path: Path) -> None:
    def loop(run: Run) -> None:
        run.optimizer.zero_grad()
        run.backward(next(batches(1)))
        with pytest.raises(UnsupportedError, match=r"gradient of '.*' is used before optimizer\.step"):
            use(run)
        run.optimizer.step()
        assert all(param.grad is None for param in run.model.blocks.parameters())

    options = plans(tmp_path)[where]
    outcome(loop, adamw, lambda m, o: lightning_hetero.offload(m, o, overlap="backward", **options), Shape())


@pytest.mark.parametrize("value", [None, 1.0])
def test_overlapping_backward_notices_that_the_loop_sets_gradients(value: float | None) -> None:
    def loop(run: Run) -> None:
        run.backward(next(batches(1)))
        for param in run.model.parameters():
            param.grad = None if value is None else torch.full_like(param, value)
        run.optimizer.step()

    with pytest.raises(UnsupportedError, match=r"has set the gradient of '.*'"):
        outcome(loop, adamw, lambda m, o: lightning_hetero.offload(m, o, "host", overlap="backward"), Shape())


def keeps(run: Run) -> None:
    run.model.zero_grad(set_to_none=False)


def drops(run: Run) -> None:
    run.model.zero_grad(set_to_none=False)
    run.optimizer.zero_grad()


def waits(run: Run) -> None:
    run.model.zero_grad(set_to_none=False)
    run.optimizer.state_dict()


@pytest.mark.parametrize("after", [keeps, drops, waits])
@pytest.mark.parametrize("plan", ["host", "disk"])
@pytest.mark.parametrize("steps", [1, 2])
def test_overlapping_forward_notices_gradients_written_in_place(after: Callable[[Run], None], plan: str, steps: int) -> None:
    def loop(run: Run) -> None:
        for batch in batches(steps):
            run.backward(batch)
            run.optimizer.step()
            after(run)

    with pytest.raises(UnsupportedError, match=r"written in place after optimizer\.step"):
        outcome(loop, adamw, lambda m, o: lightning_hetero.offload(m, o, plan, overlap="forward"), Shape())


def test_overlapping_forward_lets_gradients_be_written_once_something_has_waited() -> None:
    def loop(run: Run) -> None:
        for batch in batches(3):
            run.backward(batch)
            run.optimizer.step()
            run.optimizer.state_dict()
            run.model.zero_grad(set_to_none=False)

    context = partial(lightning_hetero.offload, plan="host", overlap="forward")
    assert_equal(outcome(loop, adamw, None, Shape()), outcome(loop, adamw, context, Shape()))


def test_a_refused_start_leaves_the_model_as_it_was() -> None:
    model = Model(Shape())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizers = adamw(model)
    with pytest.raises(HeteroError, match="host_memory"):
        lightning_hetero.offload(model, optimizers, "disk", host_memory="1KiB")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert_equal(
        outcome(simple, adamw, None, Shape()), outcome(simple, adamw, lambda m, o: lightning_hetero.offload(m, o, "host"), Shape())
    )


def test_an_error_in_the_loop_gives_the_model_back() -> None:
    model = Model(Shape())
    optimizers = adamw(model)

    def interrupted() -> None:
        with lightning_hetero.offload(model, optimizers, "disk"):
            loss_of(model, next(batches(1))).backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert type(next(model.parameters())) is nn.Parameter
    for batch in batches(2):
        loss_of(model, batch).backward()
        optimizers[0].step()


@pytest.mark.parametrize(("options", "said"), [
    ({"keep_every": 2}, "needs Lightning's Trainer"),
    ({"hostmemory": 3}, "Did you mean 'host_memory'"),
    ({"overlap": "all"}, "allowed"),
])  # fmt: skip
def test_options_of_other_loops_are_refused(options: dict[str, Any], said: str) -> None:
    model = Model(Shape())
    with pytest.raises(ConfigError, match=said):
        lightning_hetero.offload(model, adamw(model), "host", **options)
