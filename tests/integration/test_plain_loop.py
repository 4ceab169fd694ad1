"""``lightning_hetero.offload`` around plain loops: the bits of the same loop without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.machines import HARDWARE
from support.models import Model, Shape
from support.plain_loops import Run, adamw, assert_equal, batches, loss_of, outcome, plans, simple
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode

import lightning_hetero
from lightning_hetero.errors import ConfigError, UnsupportedError

OVERLAPS = ("none", "forward", "backward")


def zero_at_end(run: Run) -> None:
    for batch in batches(5):
        run.backward(batch)
        run.optimizer.step()
        run.model.zero_grad()


def closure(run: Run) -> None:
    for batch in batches(4):

        def compute(batch: tuple[Tensor, Tensor] = batch) -> Tensor:
            run.optimizer.zero_grad()
            return run.backward(batch)

        run.optimizer.step(compute)


def scheduled(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    for batch in batches(4):
        run.optimizer.zero_grad()
        run.backward(batch)
        run.optimizer.step()
        scheduler.step()


def evaluating(run: Run) -> None:
    for number, batch in enumerate(batches(5)):
        run.optimizer.zero_grad()
        run.backward(batch)
        run.optimizer.step()
        if number % 2:
            run.model.eval()
            with torch.no_grad():
                for other in batches(2):
                    run.losses.append(loss_of(run.model, other).item())
            run.losses.append(loss_of(run.model, batch).item())  # with a graph that nobody uses
            run.model.train()
            run.losses.append(sum(value.double().sum().item() for value in run.model.state_dict().values()))


def accumulating(run: Run) -> None:
    for number, batch in enumerate(batches(6)):
        run.backward(batch)
        if number % 2:
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=False)


def never_zeroed(run: Run) -> None:
    for batch in batches(4):
        run.backward(batch)
        run.optimizer.step()


def clipped(run: Run) -> None:
    for batch in batches(4):
        run.optimizer.zero_grad()
        run.backward(batch)
        run.losses.append(float(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)))
        run.optimizer.step()


def scaled(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for batch in batches(4):
        run.optimizer.zero_grad()
        loss = loss_of(run.model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(run.optimizer)
        run.losses.append(float(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)))
        scaler.step(run.optimizer)
        scaler.update()
        run.losses.append(loss.item())


def autocast(run: Run) -> None:
    for batch in batches(4):
        run.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(run.model, batch)
        loss.backward()
        run.losses.append(loss.item())
        run.optimizer.step()


def two_forwards(run: Run) -> None:
    given = list(batches(6))
    for one, other in zip(given[::2], given[1::2], strict=True):
        run.optimizer.zero_grad()
        with torch.no_grad():
            target = run.model(one[0])
        loss = loss_of(run.model, one) + loss_of(run.model, other) + F.mse_loss(run.model(one[0]), target + 1)
        loss.backward()
        run.losses.append(loss.item())
        run.optimizer.step()


def two_backwards(run: Run) -> None:
    for batch in batches(3):
        run.optimizer.zero_grad()
        loss = loss_of(run.model, batch)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        run.losses.append(loss.item())
        run.optimizer.step()


def by_hand(run: Run) -> None:
    """Gradients come as results, and the loop sets them."""
    params = list(run.model.parameters())
    for batch in batches(3):
        loss = loss_of(run.model, batch)
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad * 0.5
        run.losses.append(loss.item())
        run.optimizer.step()


def in_parts(run: Run) -> None:
    """The loop calls the parts of the model, not the model."""
    model = run.model
    for batch in batches(3):
        run.optimizer.zero_grad()
        x = model.embed(batch[0])
        for block in model.blocks:
            x = block(x)
        loss = F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), batch[1].flatten())
        loss.backward()
        run.losses.append(loss.item())
        run.optimizer.step()


def interrupted(run: Run) -> None:
    for number, batch in enumerate(batches(5)):
        run.optimizer.zero_grad()
        if number == 2:
            with suppress(IndexError):
                run.model(batch[0] + 1000)
            continue
        run.backward(batch)
        run.optimizer.step()


def failed_backward(run: Run) -> None:
    """Gradients until the failure stay; the loop drops them before the next forward."""

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    for number, batch in enumerate(batches(5)):
        run.optimizer.zero_grad()
        loss = loss_of(run.model, batch)
        if number % 2:
            hook = run.model.blocks[number // 2].up.weight.register_hook(fail)
            with suppress(ZeroDivisionError):
                loss.backward()
            hook.remove()
            continue
        loss.backward()
        run.losses.append(loss.item())
        run.optimizer.step()


def failed_closure(run: Run) -> None:
    def fail() -> Tensor:
        raise ZeroDivisionError

    for number, batch in enumerate(batches(4)):
        run.optimizer.zero_grad()
        run.backward(batch)
        with suppress(ZeroDivisionError):
            run.optimizer.step(fail if number == 1 else None)


def two_step(run: Run) -> None:
    """A step of the sharpness-aware kind: its closure computes the batch again."""
    for batch in batches(3):

        def compute(batch: tuple[Tensor, Tensor] = batch) -> Tensor:
            run.optimizer.zero_grad()
            return run.backward(batch)

        compute()
        with torch.no_grad():
            for param in run.model.parameters():
                param.add_(0.01 * torch.zeros_like(param) if param.grad is None else 0.01 * param.grad)
        run.optimizer.step(compute)


LOOPS = [
    accumulating, never_zeroed, clipped, scaled, two_forwards, two_backwards, by_hand, interrupted, evaluating, failed_backward,
    failed_closure, two_step,
]  # fmt: skip


STEP_BY_STEP = [simple, zero_at_end, closure, scheduled, autocast, in_parts]  # step() follows each backward


def sgd(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)]


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
