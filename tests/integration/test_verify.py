"""``verify=N``: steps that are right pass, in every mode and bitwise as without it; one wrong bit
is found and named.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from support.cuda import StandIn
from support.models import LitModel, Manual, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.streams import FakeCuda

from lightning_hetero import EmulatedDevice
from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError, UnsupportedError, VerificationError
from lightning_hetero.optim import adam
from lightning_hetero.strategies import HeteroOffloadStrategy, verification


def hetero(**options: Any) -> Any:
    return HeteroOffloadStrategy(**{"plan": "disk", "verify": 2, **options})


RECIPES = {
    "plain": Recipe(),
    "norm": Recipe(clip=0.05, accumulate=2),
    "value": Recipe(clip=0.01, clip_by="value", schedule="step"),
    "groups": Recipe(groups=True, schedule="onecycle", shape=Shape(dropout=0.3)),
    "shapes": Recipe(shape=Shape(tied=True, frozen=(1,), unused=True)),
    "bf16": Recipe(precision="bf16-true", clip=0.05),
    "mixed": Recipe(precision="bf16-mixed"),
    "sgd": Recipe(optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)),
    "sgd16": Recipe(optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), precision="bf16-true"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_right_steps_pass_and_training_is_the_same(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = RECIPES[name]
    plan = "disk" if name in ("plain", "norm", "groups", "bf16", "sgd16") else "host"
    expected = run(recipe, hetero(plan=plan, verify=0), tmp_path)
    with caplog.at_level("INFO", logger="lightning_hetero"):
        assert_same(run(recipe, hetero(plan=plan), tmp_path), expected)
    assert "of 2 steps are bitwise" in caplog.text


@pytest.mark.parametrize("plan", ["disk", "zero_offload"])
def test_steps_on_a_device_are_verified_from_outside(plan: str, tmp_path: Path) -> None:
    """Between two steps the weights are read through the door, wherever they are."""
    strategy = hetero(plan=plan, verify=3, device=EmulatedDevice(memory="64MiB"))
    assert_same(run(Recipe(clip=0.05), strategy, tmp_path), run(Recipe(clip=0.05), "auto", tmp_path))


class Overflows(LitModel):
    """Its second batch has gradients that fp16 cannot hold."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1e30 if batch_idx == 1 else 1.0)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("clip", [None, 0.05])
def test_scaled_losses_and_skipped_steps_are_replayed(clip: float | None, tmp_path: Path) -> None:
    def optimizer(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=3e-3, fused=clip is None)  # a fused one unscales gradients itself

    outcomes = []
    for verify in (0, 4):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        module = Overflows(Recipe(optimizer=optimizer))
        module.load_state_dict(LitModel(Recipe()).state_dict() if not outcomes else outcomes[0][2])
        start = {n: v.clone() for n, v in module.state_dict().items()}
        trainer = quiet_trainer(
            strategy=hetero(verify=verify), plugins=[plugin], max_steps=5, gradient_clip_val=clip, default_root_dir=tmp_path,
            limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(module, data())
        outcomes.append((outcome(trainer, module), scaler.get_scale(), start))
    assert outcomes[0][1] == outcomes[1][1] < 2.0**13
    assert_same(outcomes[1][0], outcomes[0][0])


def test_planned_training_is_verified_too(tmp_path: Path) -> None:
    expected = run(Recipe(steps=5), "auto", tmp_path)
    assert_same(run(Recipe(steps=5), hetero(plan="auto", verify=5), tmp_path), expected)


class Meddles(pl.Callback):
    """Changes one bit of one weight as batch ``when`` begins."""

    def __init__(self, when: int) -> None:
        self.when = when

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.when:
            with torch.no_grad(), trainer.strategy.materialize(module.model.blocks[1]):
                module.model.blocks[1].up.weight.view(torch.int32)[3, 5] ^= 1


def message(recipe: Recipe, tmp_path: Path, *, module_class: type[LitModel] = LitModel, **options: Any) -> str:
    with pytest.raises(VerificationError) as caught:
        run(recipe, hetero(verify=3), tmp_path, module_class=module_class, **options)
    assert not list(tmp_path.glob("lightning-hetero-*"))
    return str(caught.value)


@pytest.mark.parametrize("options", [{}, {"accelerator": StandIn(), "devices": 1}], ids=["cpu", "gpu"])
def test_one_bit_of_a_weight_is_found_in_its_step(options: dict[str, Any], fake: FakeCuda, tmp_path: Path) -> None:
    assert "in step 2" in message(Recipe(), tmp_path, callbacks=[Meddles(1)], **options)


def test_a_wrong_number_of_the_update_is_found_where_it_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = adam.request

    def wrong(part: Any, grads: Any) -> Any:
        rows = list(grads)
        off = [part.layouts[index].shape == (24,) for index, _, _ in rows]
        return right(part, [(i, h._replace(lr=h.lr * (1 + 1e-6)) if o else h, g) for o, (i, h, g) in zip(off, rows, strict=True)])

    monkeypatch.setattr(adam, "request", wrong)
    text = message(Recipe(), tmp_path)
    assert "in step 1, model.blocks.0.norm.weight is " in text
    assert " at [" in text
    assert "units in the last place apart" in text
    assert "of 24 elements differ" in text


def test_a_module_that_computes_something_else_twice_is_found_by_its_loss(tmp_path: Path) -> None:
    numbers = itertools.count()

    class Drifts(LitModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + next(numbers)

    assert "in step 1, the loss is " in message(Recipe(), tmp_path, module_class=Drifts)


def test_lost_state_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgets(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                state = trainer.optimizers[0].state[module.model.head.weight]
                state["exp_avg"].zero_()

    assert "in step 2, model.head.weight is " in message(Recipe(), tmp_path, callbacks=[Forgets()])


@pytest.mark.parametrize(
    ("a", "b", "dtype", "distance"),
    [
        (1.0, 1.0 + 2**-23, torch.float32, 1),
        (-0.0, 2**-149, torch.float32, 1),
        (-(2.0**-149), 2**-149, torch.float32, 2),
        (1.0, 1.0 - 2**-8, torch.bfloat16, 1),
        (2.0, -2.0, torch.float16, 2 * 0x4000),
    ],
)
def test_distances_are_counted_in_numbers_of_the_dtype(a: float, b: float, dtype: torch.dtype, distance: int) -> None:
    assert verification._ulp_distance(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)) == distance


# ---- refusals ------------------------------------------------------------------------------------


def test_a_reference_that_memory_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "available_memory_bytes", lambda: 1000)
    with pytest.raises(OutOfMemoryBudgetError, match=r"verify=N needs .* 1000 B are free"):
        run(Recipe(), hetero(), tmp_path)
    assert not list(tmp_path.glob("lightning-hetero-*"))


class Locked(LitModel):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.lock = threading.Lock()


@pytest.mark.parametrize(("module_class", "words"), [(Manual, "optimization is manual"), (Locked, "Locked cannot be copied")])
def test_features_that_cannot_be_replayed_are_refused(module_class: type[LitModel], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=words):
        run(Recipe(), hetero(), tmp_path, module_class=module_class)


@pytest.mark.parametrize("value", [True, -1, 1.0])
def test_only_a_number_of_steps_is_taken(value: Any) -> None:
    with pytest.raises(ConfigError, match="verify_digests=True"):
        hetero(verify=value)
