"""One rank of a test of Lightning's manners on several devices: a script.

See ``tests/integration/test_shared_options.py``. What Lightning's own DDP does is the reference.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader

from lightning_hetero.errors import HeteroError, OffloadedAccessError, UnsupportedError, VerificationError
from lightning_hetero.strategies import HeteroOffloadStrategy
from support.shared_model import DATA, RANK, STEPS, WORLD, Model, batches, model, on_device, reference, run_scenarios, same, trainer

UNEVEN = DATA[:11]  # with two ranks and batches of four: the last batch has two, one of which is repeated


class Manners(Model):
    """Notes what each rank is given, and what all of them have found together."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.found, self.alone = list[Tensor](), list[Tensor](), list[int]()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.given.append(batch.clone())
        loss = super().training_step(batch, index)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.note(index)
        return loss

    @rank_zero_only
    def note(self, index: int) -> None:
        self.alone.append(index)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.given.append(batch.clone())
        loss = self.loss(batch, index)
        self.log("validated", loss, sync_dist=True)
        self.found.append(self.all_gather(loss.detach()))

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("tested", self.loss(batch, index), sync_dist=True, reduce_fx="max")

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(batch, index)


def _run(out: Path, strategy: Any, **flags: Any) -> tuple[Manners, pl.Trainer, list[dict[str, Tensor]], list[Tensor]]:
    torch.manual_seed(5)
    module = Manners()
    loader = DataLoader(UNEVEN, 4, shuffle=flags.pop("shuffle", False))
    shown = {"enable_progress_bar": True, "callbacks": [TQDMProgressBar()]}
    run = trainer(out, strategy, **shown | {"use_distributed_sampler": True} | flags)
    metrics = []
    run.fit(module, loader, DataLoader(UNEVEN, 4))
    metrics.append(dict(run.callback_metrics))
    for step in (run.validate, run.test):
        step(module, DataLoader(UNEVEN, 4), verbose=False)
        metrics.append(dict(run.callback_metrics))
    predicted = run.predict(module, DataLoader(UNEVEN, 4))
    assert isinstance(run.progress_bar_callback, TQDMProgressBar)
    assert run.progress_bar_callback.is_disabled is (RANK > 0)
    return module, run, metrics, predicted


def has_lightnings_manners(out: Path) -> None:
    """Samplers, the last batch, logs, gathering, rank 0, evaluation and prediction are DDP's."""
    for flags in ({}, {"shuffle": True, "max_epochs": 2}, {"use_distributed_sampler": False, "accumulate_grad_batches": 3}):
        strategies = (HeteroOffloadStrategy("host", block_cls="Layer"), "ddp_find_unused_parameters_true")
        ours, theirs = (_run(out, strategy, **dict(flags)) for strategy in strategies)
        for mine, other in ((ours[0].given, theirs[0].given), (ours[0].found, theirs[0].found), (ours[3], theirs[3])):
            assert len(mine) == len(other)
            assert all(map(torch.equal, mine, other))
        if "accumulate_grad_batches" not in flags:  # DDP adds before it averages
            same(ours[0], theirs[0])
        assert ours[0].alone == theirs[0].alone
        assert bool(ours[0].alone) is (RANK == 0)
        for mine, other in zip(ours[2], theirs[2], strict=True):
            assert mine.keys() == other.keys()
            assert all(torch.equal(value, other[name]) for name, value in mine.items()), (mine, other)


class Gradients(pl.Callback):
    """Looks at gradients in hooks of parameters, and after the backward of each of two batches.

    Attributes:
        hooked: What hooks have seen: the names of parameters, and gradients.
    """

    names = ("layers.1.up.weight", "head.weight")

    def __init__(self) -> None:
        self.hooked, self._batch = list[tuple[str, Tensor]](), 0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        for name in self.names:
            module.get_parameter(name).register_hook(lambda grad, name=name: self.hooked.append((name, grad.clone())))

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        inside, outside = (module.get_parameter(name).grad for name in self.names)
        if self._batch == 0:  # which accumulates
            assert torch.equal(outside, dict(self.hooked)["head.weight"]), "of this rank"
        for grad in (inside, outside)[: self._batch + 1]:
            with pytest.raises(OffloadedAccessError, match=f"spread over {WORLD} ranks, so its values cannot be read. Its norm"):
                grad.sum()
        means = [_means(module, index) for index in range(self._batch + 1)]
        for place, grad in enumerate((inside, outside)[: self._batch + 1]):
            torch.testing.assert_close(grad.norm(), sum(mean[place] for mean in means).norm(), rtol=1e-5, atol=0)
        self._batch += 1
        if self._batch == 2:
            module.layers[1].up.weight.grad = torch.zeros_like(module.layers[1].up.weight)


def _gradients(index: int, rank: int) -> list[Tensor]:
    plain = model()
    plain.offset.zero_()
    plain.loss(list(batches(rank))[index], index).backward()
    return [plain.get_parameter(name).grad for name in Gradients.names]


def _means(module: Any, index: int) -> list[Tensor]:
    every = [_gradients(index, rank) for rank in range(WORLD)]
    return [
        torch.stack(rows).double().mean(0).float() / module.trainer.accumulate_grad_batches for rows in zip(*every, strict=True)
    ]


def looks_at_gradients(out: Path) -> None:
    """Hooks see the rank's own gradients. After backward only norms are there to read."""
    looks = Gradients()
    with pytest.raises(UnsupportedError, match=r"'layers\.1\.up\.weight' got another gradient after backward"):
        trainer(out, HeteroOffloadStrategy("host", block_cls="Layer"), accumulate_grad_batches=2, callbacks=[looks]).fit(
            model(), batches()
        )
    for index in range(2):
        seen, own = dict(looks.hooked[2 * index : 2 * index + 2]), _gradients(index, RANK)
        assert seen.keys() == set(Gradients.names)
        for name, grad in zip(Gradients.names, own, strict=True):
            assert torch.equal(seen[name], grad / 2), name


def has_batches_of_other_sizes(out: Path) -> None:
    """The mean over ranks is one of their losses, however many samples each has, as in DDP."""
    runs = []
    for strategy in (HeteroOffloadStrategy("host", block_cls="Layer"), "ddp_find_unused_parameters_true"):
        torch.manual_seed(5)
        module = Model()
        trainer(out, strategy).fit(module, DataLoader(DATA[: 6 + 3 * RANK], 2 + RANK))
        runs.append(module)
    same(*runs)


class Assigns(Model):
    """Gives parameters other memory in each training step, the same values on all ranks."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.head.weight.data = torch.full_like(self.head.weight.data, 0.1 * (index + 1))
        self.layers[1].up.weight.data = torch.ones_like(self.layers[1].up.weight).cumsum(0) / 70
        return super().training_step(batch, index)


class Writes(Model):
    """Writes to memory that all ranks have."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        with torch.no_grad():
            self.head.weight.mul_(0.5)
        return super().training_step(batch, index)


def assigns_weights(out: Path) -> None:
    """Weights that code assigns within a batch count, as in DDP; writes in place are refused."""
    for options in ({}, {"optimizer": torch.optim.SGD, "lr": 0.1}):
        runs = []
        for strategy in (HeteroOffloadStrategy("host", block_cls="Layer"), "ddp_find_unused_parameters_true"):
            module = model(cls=Assigns, **options)
            run = trainer(out, strategy)
            run.fit(module, batches())
            runs.append(module)
        same(*runs)
    with pytest.raises(UnsupportedError, match=r"changed weights of block 'head'.* which 2 ranks have in the same memory"):
        trainer(out).fit(model(cls=Writes), batches())


class EverySecond(WeightAveraging):
    """The mean of the weights after every second step: a kind of the user's."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == 1


def averages_weights(out: Path) -> None:
    """Averages that callbacks make are DDP's, in validations and after the fit."""
    swa = {"swa_lrs": 1e-3, "swa_epoch_start": 2, "annealing_epochs": 1}
    for make, options in ((EMAWeightAveraging, {"decay": 0.9}), (StochasticWeightAveraging, swa), (EverySecond, {})):
        runs = []
        for strategy in (on_device(), "ddp_find_unused_parameters_true"):
            module = model()
            run = trainer(out, strategy, callbacks=[make(**options)], max_epochs=3)
            run.fit(module, batches(), batches())
            runs.append((module, run.callback_metrics["validated"]))
        same(runs[0][0], runs[1][0])
        assert torch.equal(runs[0][1], runs[1][1])


def averages_as_in_one_process(out: Path) -> None:
    """The average of any number of ranks is that of the reference's weights after each step."""
    shared = model(seed=5 + RANK)
    trainer(out, callbacks=[EMAWeightAveraging(decay=0.9)]).fit(shared, batches())
    steps = [reference("", number=number + 1) for number in range(STEPS)]
    average = AveragedModel(steps[0], avg_fn=get_ema_avg_fn(0.9))
    for step in steps:
        average.update_parameters(step)
    average.module.losses = steps[-1].losses
    same(shared, average.module)


def goes_on_from_checkpoints_of_ddp(out: Path) -> None:
    """What DDP has saved is gone on from, and DDP goes on from what ranks have saved."""
    ddp, kind = "ddp_find_unused_parameters_true", "tied frozen"
    whole = model(kind)
    trainer(out, ddp, max_epochs=2).fit(whole, batches())
    for begin, end in ((ddp, None), (None, ddp)):
        first, second = model(kind), model(kind, seed=9 + RANK)
        path = out / f"{begin or 'ours'}.ckpt"
        run = trainer(out, begin)
        run.fit(first, batches())
        run.save_checkpoint(path)
        trainer(out, end, max_epochs=2).fit(second, batches(), ckpt_path=path)
        second.losses = [*first.losses, *second.losses]
        same(second, whole)


class Fails(Model):
    """Fails in its third batch, on the ranks that it is told."""

    ranks: tuple[int, ...] = ()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == 2 and RANK in self.ranks:
            raise ValueError("a batch that cannot be used")
        return super().training_step(batch, index)


def saves_after_errors(out: Path) -> None:
    """Callbacks save after an error of all ranks; not after that of one, which all hear of."""
    for place, ranks, kind in ((out / "all", (0, 1), ValueError), (out / "one", (1,), ValueError if RANK else HeteroError)):
        module = model(cls=Fails)
        module.ranks = ranks
        callbacks = [OnExceptionCheckpoint(place), ModelCheckpoint(place, "late", save_on_exception=True)]
        with pytest.raises(kind, match="that cannot be used" if kind is ValueError else "different places of a step"):
            trainer(out, callbacks=callbacks, enable_checkpointing=True).fit(module, batches())
        if len(ranks) == 2:
            wanted = reference("", number=2).state_dict()
            for name in ("on_exception", "late"):
                saved = torch.load(place / f"{name}.ckpt")
                assert saved["global_step"] == 2
                assert all(torch.equal(saved["state_dict"][key], value) for key, value in wanted.items() if key != "offset"), name
    assert not (out / "one").exists() or not list((out / "one").iterdir())


class Changes(pl.Callback):
    """Changes what all ranks share, in the third batch and on the ranks that it is told."""

    def __init__(self, what: str, ranks: tuple[int, ...]) -> None:
        self.what, self.ranks = what, ranks

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == 2 and RANK in self.ranks:
            if self.what == "clips":
                trainer.gradient_clip_val = 0.1
            else:
                module.layers[1].requires_grad_(True)


def refuses_changes(out: Path) -> None:
    """Parameters that code unfreezes, and other clipping, end the fit, also if one rank does so."""
    for what in ("clips", "unfreezes"):
        for ranks in ((0, 1), (1,)):
            kind = UnsupportedError if RANK in ranks else HeteroError
            words = "2 devices share the model. Pass devices=1" if RANK in ranks else "rank 1 has ended with UnsupportedError"
            with pytest.raises(kind, match=words):
                trainer(out, callbacks=[Changes(what, ranks)]).fit(model("frozen"), batches())


def is_verified(out: Path) -> None:
    """The reference of each rank knows the gradients of all, and the rules by which they add up."""
    said = list[str]()
    handler = logging.Handler()
    handler.emit = lambda row: said.append(row.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_hetero.strategies.verification").addHandler(handler)
    sgd, half = {"optimizer": torch.optim.SGD, "momentum": 0.9}, {"precision": "bf16-true"}
    for kind, accumulate, clip, plan, options, flags in [
        ("rare tied", 2, 0.3, None, {}, {}), ("skips", 1, None, "disk", {}, {}), ("counts", 1, 0.3, None, {}, half),
        ("frozen", 2, None, "host", sgd, {}), ("overflows", 1, None, None, {}, {"precision": "16-mixed"}),
    ]:  # fmt: skip
        shared = model(kind, seed=5 + RANK, **options)
        strategy = on_device(plan, verify=2)
        if "precision" in flags and flags["precision"] == "16-mixed":
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
            flags = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
        run = trainer(out, strategy, accumulate_grad_batches=accumulate, gradient_clip_val=clip, **flags)
        said.clear()
        run.fit(shared, batches())
        assert RANK or any("of 2 steps are bitwise those of the reference" in line for line in said)  # the first one tells
        if not flags:
            same(shared, reference(kind, accumulate, clip, **options))


class _Spoils(pl.Callback):
    """Changes one rank's slice of the weights of a layer."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        with trainer.strategy.materialize(module), torch.no_grad():
            for param in module.layers[1].parameters():
                param.mul_(1 + 1e-3 * RANK)


def finds_what_differs(out: Path) -> None:
    """What a callback changes on one rank differs from the reference of all."""
    strategy = HeteroOffloadStrategy("host", block_cls="Layer", update_threads=1, verify=2)
    with pytest.raises(VerificationError, match="in step 2, the loss"):
        trainer(out, strategy, callbacks=[_Spoils()]).fit(model(), batches())
    print("ok", flush=True)
    os._exit(0)


if __name__ == "__main__":
    run_scenarios(globals())
