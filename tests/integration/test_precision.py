"""16-bit training equals the resident reference that does the same casts: fp32 masters, or autocast
over fp32 weights.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.strategies import assert_same_as_plain, make_strategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero.optim.reference import MasterWeightOptimizer

KINDS = ["resident", "host", "disk", "tight"]
TRUE = ["bf16-true", "16-true"]
ADAMW = partial(torch.optim.AdamW, lr=3e-3, fused=True)
SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
FUSED_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True)
ADAGRAD = partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1)


def recipe(precision: str, factory: Any = ADAMW, **options: Any) -> Recipe:
    return Recipe(shape=Shape(tied=True, frozen=(1,), odd=True), optimizer=factory, precision=precision, steps=4, **options)


def with_masters(factory: Any) -> Any:
    return lambda groups: MasterWeightOptimizer(groups, factory)


def assert_same_as_reference(kind: str, precision: str, factory: Any, folder: Path, **options: Any) -> None:
    expected = run(recipe(precision, with_masters(factory), **options), "auto", folder)
    train = partial(run, recipe(precision, factory, **options), tmp_path=folder)
    got = train(make_strategy(kind, train))
    assert all("master_param" in state for state in got.state[0]["state"].values())
    assert_same(got, expected)


@pytest.mark.parametrize("kind", [*KINDS, "device"])
@pytest.mark.parametrize("precision", TRUE)
def test_true_16_bit_has_fp32_masters(precision: str, kind: str, tmp_path: Path) -> None:
    assert_same_as_reference(kind, precision, ADAMW, tmp_path, groups=True, schedule="step")


@pytest.mark.parametrize("options", [{"clip": 0.3}, {"clip": 0.01, "clip_by": "value"}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("kind", ["host", "tight", "device"])
def test_true_16_bit_with_clipping_and_accumulation(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert_same_as_reference(kind, "bf16-true", ADAMW, tmp_path, **options)


class Fills(torch.optim.SGD):
    """Has state before its first step."""

    hetero_blockwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05, momentum=0.9)
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param]["momentum_buffer"] = torch.full_like(param, 0.1)


@pytest.mark.parametrize("kind", ["host", "tight", "device_resident"])
@pytest.mark.parametrize("factory", [SGD, ADAGRAD, Fills], ids=["sgd", "adagrad", "fills"])
@pytest.mark.parametrize("precision", TRUE)
def test_other_optimizers_have_masters_too(precision: str, factory: Any, kind: str, tmp_path: Path) -> None:
    assert_same_as_reference(kind, precision, factory, tmp_path)


@pytest.mark.parametrize("kind", ["host", "tight"])
def test_state_that_was_made_for_16_bit_weights_becomes_that_of_masters(kind: str, tmp_path: Path) -> None:
    """The optimizer is made where the strategy does not see it."""

    def unseen(params: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return torch.optim.Adagrad(params, lr=1e-2)

    expected = run(recipe("bf16-true", with_masters(partial(torch.optim.Adagrad, lr=1e-2))), "auto", tmp_path)
    train = partial(run, recipe("bf16-true", unseen), tmp_path=tmp_path)
    assert_same(train(make_strategy(kind, train)), expected)


@pytest.mark.parametrize("kind", [*KINDS, "device"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])  # on the CPU Lightning replaces "16-mixed" by "bf16-mixed"
@pytest.mark.filterwarnings("ignore:You passed `Trainer\\(accelerator='cpu', precision='16-mixed'\\)`")
def test_mixed_precision(precision: str, kind: str, tmp_path: Path) -> None:
    assert_same_as_plain(kind, partial(run, recipe(precision), tmp_path=tmp_path))


class Overflowing(LitModel):
    """Its loss overflows in the third step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (torch.inf if batch_idx == 2 else 1.0)


def run_scaled(strategy: Any, folder: Path, factory: Any, clip: float | None = None, scales: list[float] | None = None) -> Outcome:
    """fp16 autocast with a scaled loss, which Lightning offers for the CPU only as a plugin."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    torch.manual_seed(7)
    module = Overflowing(Recipe(optimizer=factory, schedule="step"))
    trainer = quiet_trainer(strategy=strategy, plugins=[plugin], max_steps=5, gradient_clip_val=clip, default_root_dir=folder)
    trainer.fit(module, data())
    if scales is not None:
        scales.append(scaler.get_scale())
    return outcome(trainer, module)


# A fused optimizer unscales gradients itself, so Lightning refuses to clip them; any other finds
# them unscaled.
@pytest.mark.parametrize(
    ("kind", "factory", "clip"),
    [
        *((kind, *row) for row in ((ADAMW, None), (SGD, None), (SGD, 0.3), (FUSED_SGD, None)) for kind in KINDS),
        ("device", ADAMW, None),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # plain Lightning's too, after a skipped step
def test_a_scaled_loss_skips_steps_that_overflow(kind: str, factory: Any, clip: float | None, tmp_path: Path) -> None:
    scales: list[float] = []
    train = partial(run_scaled, folder=tmp_path, factory=factory, clip=clip, scales=scales)
    expected = train("auto")
    assert_same(train(make_strategy(kind, train)), expected)
    assert scales == [2.0**13] * 2  # doubled twice, halved once
    if factory is ADAMW:
        assert {float(s["step"]) for s in expected.state[0]["state"].values()} == {4.0}


def resume(strategy: Any, folder: Path, epochs: int, path: Path | None, factory: Any) -> Outcome:
    torch.manual_seed(7)
    module = LitModel(Recipe(optimizer=factory, precision="bf16-true"))
    saver = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
    trainer = quiet_trainer(
        strategy=strategy, precision="bf16-true", max_epochs=epochs, default_root_dir=folder,
        enable_checkpointing=True, callbacks=[saver],
    )  # fmt: skip
    batches: DataLoader[Any] = DataLoader(data(3).dataset, batch_size=2)
    trainer.fit(module, batches, ckpt_path=path, weights_only=None if path is None else True)
    return outcome(trainer, module)


@pytest.mark.parametrize("kind", [*KINDS, "device"])
def test_masters_are_saved_and_resumed(kind: str, tmp_path: Path) -> None:
    """With masters made anew from the rounded weights the second epoch would end elsewhere."""
    expected = resume("auto", tmp_path / "plain", 2, None, with_masters(ADAMW))
    train = partial(resume, folder=tmp_path / kind, epochs=1, path=None, factory=ADAMW)
    train(make_strategy(kind, train))
    got = resume(make_strategy(kind, train), tmp_path / kind, 2, tmp_path / kind / "epoch=0.ckpt", ADAMW)
    got.losses[:0] = expected.losses[: len(expected.losses) // 2]
    assert_same(got, expected)


@pytest.mark.parametrize("kind", ["host", "tight"])
def test_a_16_bit_checkpoint_of_plain_lightning_gets_masters(kind: str, tmp_path: Path) -> None:
    """Plain Lightning has no masters: the weights are all there is."""
    resume("auto", tmp_path / "plain", 1, None, ADAMW)
    path = tmp_path / "plain" / "epoch=0.ckpt"
    expected = resume("auto", tmp_path / "reference", 2, path, with_masters(ADAMW))
    train = partial(resume, folder=tmp_path / kind, epochs=2, path=path, factory=ADAMW)
    assert_same(train(make_strategy(kind, train)), expected)


class Clamped(LitModel):
    """Writes to weights after the step."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.model.position.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("kind", [*KINDS, "device", "device_resident"])
def test_weights_written_after_a_step_are_the_master(kind: str, tmp_path: Path) -> None:
    """Whoever reads the state sees what the next update would start from, so a checkpoint goes on
    as training would have.
    """

    def train(strategy: Any) -> Outcome:
        module = Clamped(recipe("bf16-true"))
        options: Any = {"precision": "bf16-true", "max_steps": 2, "limit_val_batches": 0}
        trainer = quiet_trainer(strategy=strategy, default_root_dir=tmp_path, **options)
        trainer.fit(module, data())
        return outcome(trainer, module)

    got = train(make_strategy(kind, train))
    position = got.weights["model.position"]
    assert position.abs().max() == torch.tensor(0.01, dtype=torch.bfloat16)
    masters = [state["master_param"] for state in got.state[0]["state"].values()]
    same = [m for m in masters if m.shape == position.shape and torch.equal(m, position.float())]
    assert len(same) == 1
