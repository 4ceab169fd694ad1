"""``lightning_hetero.offload`` around plain loops: the bits of the same loop without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.machines import HARDWARE
from support.models import Model, Shape
from support.plain_loops import (
    LOOPS,
    OVERLAPS,
    STEP_BY_STEP,
    Run,
    accumulating,
    adamw,
    assert_equal,
    batches,
    outcome,
    plans,
    sgd,
    simple,
)  # fmt: skip
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode

import lightning_hetero
from lightning_hetero.errors import ConfigError, UnsupportedError


def every_pair() -> Iterator[tuple[Callable[[Run], None], str, str]]:
    """Each loop at each place and with each overlap, and each overlap at each place."""
    for overlaps, loops in ((OVERLAPS[:2], LOOPS), (OVERLAPS, STEP_BY_STEP)):
        for number, loop in enumerate(loops):
            for other, where in enumerate(("host", "disk", "device")):
                yield loop, overlaps[(number + other) % len(overlaps)], where


@pytest.mark.parametrize(("loop", "overlap", "where"), list(every_pair()))
def test_a_loop_has_the_bits_that_it_has_alone(loop: Callable[[Run], None], overlap: str, where: str, tmp_path: Path) -> None:
    shape = Shape(dropout=0.1)
    plain = outcome(loop, adamw, None, shape)
    options = plans(tmp_path)[where]
    ours = outcome(loop, adamw, lambda m, o: lightning_hetero.offload(m, o, overlap=overlap, **options), shape)
    assert_equal(plain, ours, grads=overlap != "backward")


def with_frozen_layers(model: nn.Module) -> list[Optimizer]:
    """The first half of the model is frozen, as below adapters: its outputs need no gradients."""
    params = list(model.parameters())
    for param in params[: len(params) // 2]:
        param.requires_grad_(False)
    return [torch.optim.AdamW(params[len(params) // 2 :], lr=0.01, fused=True)]


@pytest.mark.parametrize(
    ("overlap", "where"), [("none", "host"), ("forward", "disk"), *(("backward", w) for w in ("host", "disk", "device"))]
)
def test_frozen_layers_come_before_those_that_train(overlap: str, where: str, tmp_path: Path) -> None:
    plain = outcome(simple, with_frozen_layers, None, Shape())
    options = plans(tmp_path)[where]
    ours = outcome(simple, with_frozen_layers, lambda m, o: lightning_hetero.offload(m, o, overlap=overlap, **options), Shape())
    assert_equal(plain, ours, grads=overlap != "backward")


def two_optimizers(run: Run) -> None:
    """Both step after one backward, as with Muon and AdamW; the second of two backwards has one."""
    for number, batch in enumerate(batches(4)):
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        run.backward(batch)
        for optimizer in run.optimizers[: 2 - number % 2]:
            optimizer.step()


def split(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.SGD(matrices, lr=0.01, momentum=0.9), torch.optim.AdamW(rest, lr=0.01, fused=True)]


@pytest.mark.parametrize("where", ["host", "disk", "device"])
@pytest.mark.parametrize("overlap", OVERLAPS[:2])
@pytest.mark.parametrize(("loop", "make"), [(two_optimizers, split), (simple, sgd), (accumulating, sgd)])
def test_other_optimizers(
    loop: Callable[[Run], None], make: Callable[[nn.Module], list[Optimizer]], overlap: str, where: str, tmp_path: Path
) -> None:
    shape = Shape(dropout=0.1)
    plain = outcome(loop, make, None, shape)
    options = plans(tmp_path)[where]
    if where == "device":
        options["plan"] = "resident"  # SGD's own code runs where the weights are
    ours = outcome(loop, make, lambda m, o: lightning_hetero.offload(m, o, overlap=overlap, **options), shape)
    assert_equal(plain, ours)


@pytest.mark.parametrize("planner", ["auto", "lohan"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_planner_measures_the_loop_and_plans(planner: str, overlap: str, tmp_path: Path) -> None:
    def long(run: Run) -> None:
        for batch in batches(9):
            run.optimizer.zero_grad()
            run.backward(batch)
            run.optimizer.step()

    made: list[Any] = []

    def context(model: Model, optimizers: Any) -> Any:
        made.append(lightning_hetero.offload(model, optimizers, planner, overlap=overlap, hardware_profile=HARDWARE))
        return made[0]

    plain, ours = outcome(long, adamw, None, Shape()), outcome(long, adamw, context, Shape())
    assert_equal(plain, ours, grads=overlap != "backward")
    assert made[0].plan.predicted is not None
    assert _get_current_dispatch_mode() is None  # the profiler looks at nothing any more


def test_overlapping_backward_refuses_a_batch_without_a_step(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"before optimizer\.step"):
        outcome(accumulating, adamw, lambda m, o: lightning_hetero.offload(m, o, "host", overlap="backward"), Shape())


def test_overlapping_backward_refuses_two_optimizers() -> None:
    with pytest.raises(ConfigError, match="2 optimizers"):
        outcome(two_optimizers, split, lambda m, o: lightning_hetero.offload(m, o, "host", overlap="backward"), Shape())


def test_a_folder_is_read_into_a_model_on_the_meta_device(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(3)
    whole = Model(Shape(counting=False))
    save_file({name: value.contiguous() for name, value in whole.state_dict().items()}, tmp_path / "model.safetensors")
    expected = Run(whole, adamw(whole))
    simple(expected)
    with torch.device("meta"):
        empty = Model(Shape(counting=False))
    for block in empty.blocks:
        block.calls = torch.zeros((), dtype=torch.long)
    with lightning_hetero.offload(empty, lambda model: adamw(model)[0], "disk", weights=tmp_path / "model.safetensors") as loop:
        run = Run(empty, list(loop.optimizers))
        simple(run)
    assert run.losses == expected.losses
    assert all(torch.equal(value, empty.state_dict()[name]) for name, value in whole.state_dict().items())


def test_a_model_is_evaluated_without_optimizers() -> None:
    model = Model(Shape()).eval()
    batch = next(batches(1))
    expected = model(batch[0])
    with lightning_hetero.offload(model, plan="disk"):
        for _ in range(3):
            assert torch.equal(model(batch[0]), expected)
    assert torch.equal(model(batch[0]), expected)


@pytest.mark.parametrize("where", ["host", "disk", "device"])
def test_a_model_that_was_evaluated_trains(where: str, tmp_path: Path) -> None:
    def context(model: Model, optimizers: list[Optimizer]) -> Any:
        loop = lightning_hetero.offload(model, None, **plans(tmp_path)[where])
        with torch.no_grad():
            model(next(batches(1))[0])
        loop.train(optimizers)
        return loop

    shape = Shape(counting=False)
    assert_equal(outcome(simple, adamw, None, shape), outcome(simple, adamw, context, shape))
