"""From one Trainer call to the next: fit, validate, test, predict, fit again, interruptions,
errors, and the door to weights.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.strategies import assert_same_as_plain, least_memory, make_strategy
from torch import Tensor, nn

from lightning_hetero.errors import ConfigError, OffloadedAccessError
from lightning_hetero.handles.offloaded_parameter import OffloadedParameter
from lightning_hetero.strategies import HeteroOffloadStrategy

KINDS = ["host", "disk", "tight"]
DEEP = Shape(layers=24)  # more weights and state than the least budget, so that they stay on disk after fit


class Complete(LitModel):
    """Has every kind of step."""

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(self.loss(batch))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0][:, :-1])


def fit_and_evaluate(strategy: Any, folder: Path, shape: Shape) -> Outcome:
    torch.manual_seed(7)
    module = Complete(Recipe(shape=shape, validate=True))
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, num_sanity_val_steps=2, default_root_dir=folder)
    evaluate = partial(DataOrder, trainer, module)
    evaluate().validate().predict()
    trainer.fit(module, data(2), data(1, seed=1))
    evaluate().validate().test().predict()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data(2), data(1, seed=1))
    evaluate().predict().test()
    return outcome(trainer, module)


class DataOrder:
    """Trainer calls on one loader each, chained."""

    def __init__(self, trainer: pl.Trainer, module: Complete) -> None:
        self.trainer, self.module = trainer, module

    def validate(self) -> DataOrder:
        self.trainer.validate(self.module, data(1, seed=1), verbose=False)
        return self

    def test(self) -> DataOrder:
        self.trainer.test(self.module, data(1, seed=2), verbose=False)
        return self

    def predict(self) -> DataOrder:
        self.module.losses += self.trainer.predict(self.module, data(1, seed=3))
        return self


@pytest.mark.parametrize(
    ("kind", "shape"),
    [*product(KINDS, [Shape(tied=True), DEEP]), ("device", Shape(tied=True))],
    ids=lambda value: value if isinstance(value, str) else "deep" if value is DEEP else "small",
)
def test_fit_evaluate_and_fit_again(kind: str, shape: Shape, tmp_path: Path) -> None:
    strategy = make_strategy(kind, partial(run, Recipe(shape=shape), tmp_path=tmp_path))  # to evaluate needs less than to fit
    assert_same(fit_and_evaluate(strategy, tmp_path, shape), fit_and_evaluate("auto", tmp_path, shape))


@pytest.mark.parametrize(
    ("first", "second"), [("host", "auto"), ("auto", "disk"), ("tight", "tight"), ("tight", "host"), ("device", "disk")]
)
def test_a_new_trainer_takes_the_trained_module_over(first: str, second: str, tmp_path: Path) -> None:
    """And the first one takes it back, although the module had been left on the first one's
    disk.
    """
    recipe = Recipe(shape=DEEP)

    def train(*strategies: Any) -> Outcome:
        torch.manual_seed(7)
        module = LitModel(recipe)
        trainers = [quiet_trainer(strategy=s, max_epochs=1, default_root_dir=tmp_path) for s in strategies]
        for trainer in trainers:
            trainer.fit(module, data(2))
        trainers[0].fit_loop.max_epochs = 2
        trainers[0].fit(module, data(2))
        return outcome(trainers[0], module)

    ours = [make_strategy(kind, lambda strategy: run(recipe, strategy, tmp_path)) for kind in (first, second)]
    assert_same(train(*ours), train("auto", "auto"))


def test_a_model_that_does_not_fit_stays_on_disk_and_usable(tmp_path: Path) -> None:
    """After fit its weights are read through the door: state_dict, checkpoints, another fit."""
    recipe = Recipe(shape=DEEP, steps=2)
    budget = least_memory(lambda strategy: run(recipe, strategy, tmp_path))
    module = LitModel(recipe)
    trainer = quiet_trainer(strategy=HeteroOffloadStrategy("disk", host_memory=budget), max_steps=2, default_root_dir=tmp_path)
    trainer.fit(module, data())
    assert any(type(p) is OffloadedParameter for p in module.parameters())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    for name, value in module.state_dict().items():
        assert torch.equal(saved["state_dict"][name], value)
    with pytest.raises(OffloadedAccessError, match="materialize"):
        module.loss(next(iter(data())))
    twin = LitModel(recipe)
    twin.load_state_dict(module.state_dict())
    twin.loss(next(iter(data()))).backward()


def test_a_released_weight_is_read_through_the_door(tmp_path: Path) -> None:
    """With grad it is refused, because the gradient would be lost, and the refusal names the
    way.
    """

    class Regularized(LitModel):
        how = "plain"

        def loss(self, batch: list[Tensor]) -> Tensor:
            loss = super().loss(batch)
            weights = [self.model.blocks[0].up.weight, self.model.blocks[2].down.bias]
            if self.how == "materialized":
                with self.trainer.strategy.materialize(weights):
                    return loss + sum(w.square().sum() for w in weights)
            return loss + sum(w.square().sum() for w in weights)

    class Materialized(Regularized):
        how = "materialized"

    recipe = Recipe(shape=Shape(layers=8))
    expected = run(recipe, "auto", tmp_path, module_class=Regularized)
    with pytest.raises(OffloadedAccessError, match=r"model.blocks.0.up.weight.*strategy.materialize"):
        run(recipe, HeteroOffloadStrategy("disk"), tmp_path, module_class=Regularized)
    assert_same(run(recipe, HeteroOffloadStrategy("disk"), tmp_path, module_class=Materialized), expected)
    some_blocks = least_memory(lambda strategy: run(recipe, strategy, tmp_path)) + 4 * block_bytes(recipe)
    tight = HeteroOffloadStrategy("disk", host_memory=some_blocks)
    assert_same(run(recipe, tight, tmp_path, module_class=Materialized), expected)


def test_materializing_a_model_that_is_in_memory_anyway_changes_nothing(tmp_path: Path) -> None:
    """As a function that is called both in training and after it does. Without content there is
    nothing to read.
    """
    strategy = HeteroOffloadStrategy("disk")
    module = LitModel(Recipe(steps=1))
    trainer = quiet_trainer(strategy=strategy, max_steps=1, default_root_dir=tmp_path)
    for train in (lambda: None, lambda: trainer.fit(module, data())):
        train()
        with strategy.materialize(module):
            assert all(type(p) is nn.Parameter for p in module.parameters())
    with torch.device("meta"):
        empty = LitModel(Recipe())
    with pytest.raises(ConfigError, match=r"meta device.*on_fit_start"), strategy.materialize(empty):
        pass


def block_bytes(recipe: Recipe) -> int:
    """Host memory of one more block, in pages, with what aligning its parameters may add."""
    return sum(p.numel() * p.itemsize for p in LitModel(recipe).model.blocks[0].parameters()) + 4096


class Failing(LitModel):
    """Raises in its third step, after or before backward."""

    error: BaseException = ValueError("the user's own")
    in_backward = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            if not self.in_backward:
                raise self.error
            loss.register_hook(self.fail)
        return loss

    def fail(self, grad: Tensor) -> None:
        raise self.error


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "device"])
def test_the_users_exception_is_raised_as_it_is_and_files_are_removed(kind: str, in_backward: bool, tmp_path: Path) -> None:
    recipe = Recipe(steps=6)
    strategy = make_strategy(kind, lambda s: run(recipe, s, tmp_path))
    left: list[LitModel] = []

    def prepare(module: LitModel) -> None:
        module.in_backward = in_backward
        left.append(module)

    with pytest.raises(ValueError, match=r"^the user's own$") as raised:
        run(recipe, strategy, tmp_path, module_class=Failing, prepare=prepare)
    assert raised.value is Failing.error
    assert list(tmp_path.iterdir()) == []
    # The model is an ordinary one again, with the weights of the two steps that were complete.
    expected = run(Recipe(steps=2), "auto", tmp_path)
    for name, value in left[0].state_dict().items():
        if not name.endswith("calls"):
            assert torch.equal(value, expected.weights[name]), name
    left[0].loss(next(iter(data()))).backward()


class Interrupted(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", KINDS)
def test_a_keyboard_interrupt_leaves_the_model_usable(kind: str, tmp_path: Path) -> None:
    recipe = Recipe(steps=6)
    strategy = make_strategy(kind, lambda s: run(recipe, s, tmp_path))
    left: list[LitModel] = []
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(recipe, strategy, tmp_path, callbacks=[Interrupted()], prepare=left.append)
    assert list(tmp_path.iterdir()) == []
    expected = run(Recipe(steps=2), "auto", tmp_path)
    assert_same(Outcome([], dict(left[0].state_dict()), []), Outcome([], expected.weights, []))
    assert all(type(p) is nn.Parameter for p in left[0].parameters())
    left[0].loss(next(iter(data()))).backward()


class InterruptedAndSaved(Interrupted):
    """Saves when it is told of the interruption."""

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "interrupted.ckpt")


@pytest.mark.parametrize("kind", [*KINDS, "device"])
def test_an_interrupted_run_can_be_saved(kind: str, tmp_path: Path) -> None:
    recipe = Recipe(steps=6)
    strategy = make_strategy(kind, lambda s: run(recipe, s, tmp_path))
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(recipe, strategy, tmp_path, callbacks=[InterruptedAndSaved()])
    expected = run(Recipe(steps=2), "auto", tmp_path)
    saved = torch.load(tmp_path / "interrupted.ckpt", weights_only=True)
    assert_same(Outcome([], saved["state_dict"], saved["optimizer_states"]), Outcome([], expected.weights, expected.state))


@pytest.mark.parametrize("kind", KINDS)
def test_no_optimizer(kind: str, tmp_path: Path) -> None:
    class Untrained(LitModel):
        def configure_optimizers(self) -> None:
            return None

    assert_same_as_plain(kind, partial(run, Recipe(steps=-1), tmp_path=tmp_path, module_class=Untrained, max_epochs=1))


class Empty(pl.LightningModule):
    """Has no parameters, as a baseline that only counts."""

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return batch[0].sum()


def test_a_model_without_parameters(tmp_path: Path) -> None:
    trainers = [quiet_trainer(strategy=s, default_root_dir=tmp_path) for s in (HeteroOffloadStrategy(), "auto")]
    ours, theirs = (trainer.predict(Empty(), data()) for trainer in trainers)
    assert torch.equal(torch.stack(ours), torch.stack(theirs))


@pytest.mark.parametrize("kind", [*KINDS, "device"])
def test_evaluation_alone(kind: str, tmp_path: Path) -> None:
    """Without fit there is no optimizer, and nothing is written but weights."""

    def train(strategy: Any) -> Outcome:
        torch.manual_seed(7)
        module = Complete(Recipe(shape=DEEP))
        trainer = quiet_trainer(strategy=strategy, default_root_dir=tmp_path, inference_mode=False)
        DataOrder(trainer, module).validate().test().predict()
        return outcome(trainer, module)

    assert_same_as_plain(kind, train)


@pytest.mark.parametrize("kind", KINDS)
def test_fast_dev_run_and_overfit_batches(kind: str, tmp_path: Path) -> None:
    for options in ({"fast_dev_run": 2}, {"overfit_batches": 2, "max_epochs": 2}):

        def train(strategy: Any, options: dict[str, Any] = options) -> Outcome:
            torch.manual_seed(7)
            module = LitModel(Recipe())
            trainer = quiet_trainer(strategy=strategy, default_root_dir=tmp_path, **options)
            trainer.fit(module, data(3), data(1))
            return outcome(trainer, module)

        assert_same_as_plain(kind, train)
