"""Lightning's own callbacks and tuner, and what a user's callback may read, bit for bit as under
plain Lightning.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from support.cuda import StandIn
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.strategies import assert_same_as_plain, least_memory, least_memory_throughout
from support.streams import FakeCuda
from support.unfreezing import Unfreezing
from torch import Tensor, nn

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.errors import ConfigError, OffloadedAccessError, OutOfMemoryBudgetError

KINDS = ["host", "disk", "tight"]
SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)


class Inspecting(pl.Callback):
    """Reads weights after every batch, in the ways that people read them."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        seen: list[Tensor] = pl_module.losses
        seen += [v.clone() for v in pl_module.state_dict().values()]
        seen += [p.data.sum() for p in pl_module.parameters()]
        seen += [p.norm() for p in pl_module.parameters()]
        seen += [p.detach()[..., :1].clone() for p in pl_module.parameters()]
        seen += [nn.utils.parameters_to_vector(pl_module.parameters())]
        weight = pl_module.model.blocks[1].up.weight
        seen += [weight @ weight.T, torch.stack([weight, 2 * weight]), torch.from_numpy(weight.detach().numpy().copy())]
        seen += [torch.tensor(weight[0].tolist()), torch.tensor(float(weight.max())), torch.nn.functional.linear(weight, weight)]


class Writing(pl.Callback):
    """Changes weights after every batch, in place: the next step starts from them."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        block = pl_module.model.blocks[1]
        block.up.weight.mul_(0.5)
        block.down.weight.data.clamp_(-0.1, 0.1)
        block.norm.bias.copy_(torch.linspace(0, 1, block.norm.bias.numel()))
        nn.init.constant_(pl_module.model.blocks[0].down.bias, 0.25)
        pl_module.model.blocks[2].load_state_dict(pl_module.model.blocks[0].state_dict())
        pl_module.model.embed.weight[3] = 0
        for p in pl_module.model.norm.parameters():
            p.data = p.data + 1


class Copying(pl.Callback):
    """Copies the model in the middle of training, and uses the copy."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        twin = copy.deepcopy(pl_module.model)
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        loss = twin(torch.arange(10).view(2, 5)).square().mean()
        loss.backward()
        pl_module.losses += [loss.detach(), *(p.grad for p in twin.parameters())]


class Exchanging(pl.Callback):
    """Puts averages in place of the weights for a while, as many EMA callbacks do it: by ``.data``,
    without copies.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.shadow = {n: p.data.clone() for n, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            backup = {}
            for n, p in pl_module.named_parameters():
                backup[n] = p.data
                p.data = self.shadow[n]
            pl_module.losses += [p.detach().clone() for p in pl_module.parameters()]
            for n, p in pl_module.named_parameters():
                p.data = backup[n]
        for n, p in pl_module.named_parameters():
            self.shadow[n] = 0.5 * self.shadow[n] + 0.5 * p.data


class Swapping(Exchanging):
    """The same in one assignment."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            for n, p in pl_module.named_parameters():
                p.data, self.shadow[n] = self.shadow[n], p.data
            pl_module.losses += [p.detach().clone() for p in pl_module.parameters()]


class Validating(pl.Callback):
    """Validates with averages in place of the weights."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        new = {n: p.data.clone() for n, p in pl_module.named_parameters()}
        old = getattr(self, "shadow", new)
        self.shadow = {n: 0.5 * old[n] + 0.5 * new[n] for n in new}

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.backup = {n: p.data for n, p in pl_module.named_parameters()}
        for n, p in pl_module.named_parameters():
            p.data = self.shadow[n].clone()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for n, p in pl_module.named_parameters():
            p.data = self.backup[n]


@pytest.mark.parametrize("kind", [*KINDS, "resident", "device", "device_resident"])
def test_averages_may_take_the_place_of_weights_in_validation(kind: str, tmp_path: Path) -> None:
    def trained(strategy: Any) -> Outcome:
        torch.manual_seed(7)
        module = LitModel(Recipe())
        trainer = quiet_trainer(
            strategy=strategy, default_root_dir=tmp_path, max_epochs=2, val_check_interval=3, num_sanity_val_steps=0,
            callbacks=[Validating()],
        )  # fmt: skip
        trainer.fit(module, data(), data(2, seed=1))
        return outcome(trainer, module)

    assert_same_as_plain(kind, trained)


class Rewinding(pl.Callback):
    """Keeps ``.data`` over steps, whose updates it sees, and views of it, and assigns what is made
    of them.
    """

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.kept = {n: p.data for n, p in pl_module.named_parameters()}
        if batch_idx == 3:
            for n, p in pl_module.named_parameters():
                flat, first = p.data.view(-1), p.detach()[:1]
                p.data = self.kept[n] * 0.5
                p.view(-1)[:1].copy_(flat[:1] * 2 + first.reshape(-1)[:1])


@pytest.mark.parametrize("callback", [Exchanging, Swapping, Rewinding])
@pytest.mark.parametrize("kind", [*KINDS, "resident", "device", "device_resident"])
def test_an_alias_of_weights_outlives_their_exchange(kind: str, callback: Any, tmp_path: Path) -> None:
    assert_same_as_plain(kind, lambda strategy: run(Recipe(), strategy, tmp_path, callbacks=[callback()]))


class Regularized(LitModel):
    """Reads all weights in ``training_step``, outside of their blocks, as part of the loss."""

    inside = nullcontext

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with self.inside():
            return loss + 1e-3 * sum((p.pow(2).sum() for p in self.parameters()), start=torch.zeros(()))


@pytest.mark.parametrize("kind", [*KINDS, "resident"])
def test_a_regularizer_of_offloaded_weights_is_refused_with_the_context_that_allows_it(kind: str, tmp_path: Path) -> None:
    def trained(strategy: Any, *, inside: bool) -> Outcome:
        torch.manual_seed(7)
        module = Regularized(Recipe())
        if inside and strategy is not None and not isinstance(strategy, str):
            module.inside = lambda: strategy.materialize(module)  # type: ignore[method-assign, assignment]
        trainer = quiet_trainer(strategy=strategy, default_root_dir=tmp_path, max_epochs=1)
        trainer.fit(module, data())
        return outcome(trainer, module)

    if kind in ("disk", "tight"):
        with pytest.raises(OffloadedAccessError, match=r"its gradient would be lost.*strategy\.materialize"):
            trained(HeteroOffloadStrategy("disk"), inside=False)
    kind = "disk" if kind == "tight" else kind  # all weights at once are more than the least memory
    assert_same_as_plain(kind, lambda strategy: trained(strategy, inside=True))


def test_a_tensor_that_plain_pytorch_would_train_along_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_hetero.store.live.moved_weights._shared", set())
    module = LitModel(Recipe())
    parts = [(block.up, "weight") for block in module.model.blocks]
    pruning = ModelPruning("l1_unstructured", parts, amount=0.3, use_lottery_ticket_hypothesis=True)
    with caplog.at_level("WARNING", logger="lightning_hetero"):
        quiet_trainer(strategy=HeteroOffloadStrategy("host"), default_root_dir=tmp_path, callbacks=[pruning], max_epochs=2).fit(
            module, data()
        )
    named = [record.getMessage() for record in caplog.records if "something else still holds" in record.getMessage()]
    assert len(named) == 1
    assert "up.weight" in named[0]
    assert "use_lottery_ticket_hypothesis" in named[0]


@pytest.mark.parametrize("factory", [None, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("callback", [Inspecting, Writing, Copying])
@pytest.mark.parametrize("kind", KINDS)
def test_callbacks_that_touch_weights(kind: str, callback: Any, factory: Any, tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(tied=True)) if factory is None else Recipe(shape=Shape(tied=True), optimizer=factory)
    assert_same_as_plain(kind, lambda strategy: run(recipe, strategy, tmp_path, callbacks=[callback()]))


def fit_epochs(strategy: Any, folder: Path, make_callback: Any, *, recipe: Recipe | None = None, epochs: int = 4) -> Outcome:
    torch.manual_seed(7)
    module = LitModel(recipe or Recipe())
    trainer = quiet_trainer(strategy=strategy, max_epochs=epochs, callbacks=[make_callback()], default_root_dir=folder)
    trainer.fit(module, data(3), data(1))
    return outcome(trainer, module)


@pytest.mark.parametrize("factory", [None, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("kind", KINDS)
def test_stochastic_weight_averaging(kind: str, factory: Any, tmp_path: Path) -> None:
    recipe = Recipe() if factory is None else Recipe(optimizer=factory)
    make = partial(StochasticWeightAveraging, swa_lrs=1e-3, swa_epoch_start=2, annealing_epochs=1)
    assert_same_as_plain(kind, lambda strategy: fit_epochs(strategy, tmp_path, make, recipe=recipe))


@pytest.mark.parametrize("kind", KINDS)
def test_exponential_moving_average(kind: str, tmp_path: Path) -> None:
    make = partial(EMAWeightAveraging, decay=0.9)
    assert_same_as_plain(kind, lambda strategy: fit_epochs(strategy, tmp_path, make))


@pytest.mark.parametrize("options", [{}, {"weights": {"model": "weights"}}], ids=["on meta", "from files"])
def test_averaging_a_model_that_has_no_weights_yet_is_refused_by_name(options: Any, tmp_path: Path) -> None:
    """Lightning copies the model before the strategy allocates it."""
    with torch.device("cpu" if options else "meta"):
        module = LitModel(Recipe())
    trainer = quiet_trainer(
        strategy=HeteroOffloadStrategy("disk", **options), callbacks=[EMAWeightAveraging(decay=0.9)], default_root_dir=tmp_path
    )
    with pytest.raises(ConfigError, match=r"EMAWeightAveraging copies the model .* no weights before the strategy reads them"):
        trainer.fit(module, data(3))


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_pruning(kind: str, tmp_path: Path) -> None:
    """Pruning replaces parameters by ``weight_orig`` and a mask before training."""
    make = partial(ModelPruning, "l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False, make_pruning_permanent=True)
    # It multiplies weights with masks outside their block's forward, and with grad: weights on disk
    # refuse that.
    refused = nullcontext() if kind == "host" else pytest.raises(OffloadedAccessError, match="materialize")
    with refused:
        assert_same_as_plain(kind, lambda strategy: fit_epochs(strategy, tmp_path, make, epochs=2))


@pytest.mark.parametrize(
    ("kind", "factory"),
    [*product(KINDS, [None, SGD]), ("device", None)],
    ids=lambda v: v if isinstance(v, str) else "adamw" if v is None else "sgd",
)
def test_unfreezing_during_training(kind: str, factory: Any, tmp_path: Path) -> None:
    recipe = Recipe() if factory is None else Recipe(optimizer=factory)
    assert_same_as_plain("disk" if kind == "tight" else kind, train := partial(fit_unfreezing, recipe, tmp_path))
    if kind == "tight":
        with pytest.raises(OutOfMemoryBudgetError, match="frozen train now"):
            train(HeteroOffloadStrategy("disk", host_memory=least_memory(train)))
        assert_same(train(HeteroOffloadStrategy("disk", host_memory=least_memory_throughout(train))), train("auto"))


def fit_unfreezing(recipe: Recipe, folder: Path, strategy: Any) -> Outcome:
    return fit_epochs(strategy, folder, Unfreezing, recipe=recipe)


@pytest.mark.parametrize(("kind", "factory"), [("host", None), ("disk", None), ("disk", SGD)], ids=["host", "disk", "disk-sgd"])
def test_unfreezing_continues_from_a_checkpoint(kind: str, factory: Any, tmp_path: Path) -> None:
    """The callback gives the optimizer its groups back, and then state is loaded for blocks that
    had none.
    """
    recipe = Recipe() if factory is None else Recipe(optimizer=factory)

    def train(kind: str) -> Outcome:
        for epochs, path in ((2, None), (4, tmp_path / f"{kind}.ckpt")):
            torch.manual_seed(7)
            module = LitModel(recipe)
            strategy = "auto" if kind == "auto" else HeteroOffloadStrategy(kind)
            trainer = quiet_trainer(strategy=strategy, max_epochs=epochs, callbacks=[Unfreezing()], default_root_dir=tmp_path)
            trainer.fit(module, data(3), ckpt_path=path)
            trainer.save_checkpoint(tmp_path / f"{kind}.ckpt")
        return outcome(trainer, module)

    assert_same(train(kind), train("auto"))


class Backbone(LitModel):
    @property
    def backbone(self) -> nn.Module:
        return self.model.blocks


@pytest.mark.parametrize("kind", ["host", "tight"])
def test_backbone_finetuning(kind: str, tmp_path: Path) -> None:
    def train(strategy: Any) -> Outcome:
        torch.manual_seed(7)
        module = Backbone(Recipe())
        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        trainer = quiet_trainer(strategy=strategy, max_epochs=3, callbacks=[callback], default_root_dir=tmp_path)
        trainer.fit(module, data(3))
        return outcome(trainer, module)

    if kind == "host":
        assert_same_as_plain(kind, train)
    else:
        assert_same(train(HeteroOffloadStrategy("disk", host_memory=least_memory_throughout(train))), train("auto"))


class Tunable(LitModel):
    """Has what the tuner turns."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.lr, self.batch_size = 1e-3, 1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(data(8).dataset, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return data(1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_learning_rate_finder(kind: str, tmp_path: Path) -> None:
    """It saves a checkpoint, trains, and goes back to the checkpoint; fit then starts where it
    would have.
    """

    def train(strategy: Any) -> Outcome:
        torch.manual_seed(7)
        module = Tunable(Recipe())
        finder = LearningRateFinder(num_training_steps=12, min_lr=1e-5, max_lr=1e-1)
        trainer = quiet_trainer(strategy=strategy, max_steps=3, callbacks=[finder], default_root_dir=tmp_path)
        trainer.fit(module)
        found = finder.optimal_lr
        assert found is not None
        module.losses += [torch.tensor(found.results["loss"]), torch.tensor(module.lr)]
        return outcome(trainer, module)

    assert_same_as_plain(kind, train)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tuner(kind: str, tmp_path: Path) -> None:
    def train(strategy: Any) -> Outcome:
        torch.manual_seed(7)
        module = Tunable(Recipe())
        trainer = quiet_trainer(strategy=strategy, max_steps=3, default_root_dir=tmp_path)
        tuner = Tuner(trainer)
        found = tuner.lr_find(module, num_training=12, min_lr=1e-5, max_lr=1e-1)
        tuner.scale_batch_size(module, mode="power", steps_per_trial=2, init_val=2, max_trials=2)
        assert found is not None
        assert module.batch_size > 2
        trainer.fit(module)
        module.losses += [torch.tensor(found.results["loss"]), torch.tensor([module.lr, module.batch_size])]
        return outcome(trainer, module)

    assert_same_as_plain(kind, train)
    assert not [p for p in tmp_path.iterdir() if p.suffix != ".ckpt" and p.name != "lightning_logs"], "leftover files"


class GrowingOutOfMemory(Tunable):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if len(batch[0]) > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_size_scaler_survives_a_batch_that_does_not_fit(kind: str, tmp_path: Path) -> None:
    def train(strategy: Any) -> Outcome:
        torch.manual_seed(7)
        module = GrowingOutOfMemory(Recipe())
        trainer = quiet_trainer(strategy=strategy, max_steps=3, default_root_dir=tmp_path)
        Tuner(trainer).scale_batch_size(module, mode="binsearch", steps_per_trial=2, init_val=2)
        assert 2 <= module.batch_size <= 4
        trainer.fit(module)
        module.losses.append(torch.tensor(module.batch_size))
        return outcome(trainer, module)

    assert_same_as_plain(kind, train)


class GrowingOutOfDeviceMemory(Tunable):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return super().training_step(batch, batch_idx)


def test_the_batch_size_scaler_survives_a_device_that_has_no_smaller_plan_left(fake: FakeCuda, tmp_path: Path) -> None:
    outcomes = []
    for strategy, options in (("auto", {}), (HeteroOffloadStrategy("resident"), {"accelerator": StandIn(), "devices": 1})):
        torch.manual_seed(7)
        module = GrowingOutOfDeviceMemory(Recipe())
        trainer = quiet_trainer(strategy=strategy, max_steps=3, default_root_dir=tmp_path, **options)
        Tuner(trainer).scale_batch_size(module, mode="power", steps_per_trial=2, init_val=2)
        assert module.batch_size == 4
        trainer.fit(module)
        outcomes.append(outcome(trainer, module))
    assert_same(outcomes[1], outcomes[0])
