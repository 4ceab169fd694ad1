"""Values that are not finite go through as under plain Lightning, and whoever watches for them sees
them at the same moment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Recipe, Shape, data, quiet_trainer
from torch import Tensor, nn

from lightning_hetero.strategies import HeteroOffloadStrategy

BAD_STEP = 2


class Spoiled(LitModel):
    """Its loss is not finite from one step on, or its gradients alone."""

    spoil = "loss"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.blocks[1].up.register_forward_hook(self.spoil_gradient)

    def spoil_gradient(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if self.spoil != "gradient" or self.global_step != BAD_STEP:
            return None
        return output + (output * 0).sqrt()  # adds nothing; an infinite derivative times 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == BAD_STEP and self.spoil == "loss":
            loss = loss * float("nan")
        if self.global_step == BAD_STEP and self.spoil == "infinity":
            loss = loss * float("inf")
        self.log("loss", loss)
        return loss


class Raises(pl.Callback):
    """What users write to stop at the first gradient that is not finite."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        bad = [n for n, p in module.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        if bad:
            raise FloatingPointError(f"step {trainer.global_step}: {len(bad)} gradients, first {bad[0]}")


def trained(strategy: Any, root: Path, spoil: str, *callbacks: pl.Callback, **options: Any) -> tuple[Spoiled, Any]:
    torch.manual_seed(7)
    module = Spoiled(Recipe(shape=Shape(width=24)))
    module.spoil = spoil
    torch.manual_seed(11)
    options = {"max_steps": 4, "limit_val_batches": 0, "default_root_dir": root, "callbacks": list(callbacks), **options}
    trainer = quiet_trainer(strategy=strategy, **options)
    trainer.fit(module, data())
    return module, trainer


def tensors(module: Spoiled, trainer: Any) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in module.state_dict().items()}
    for number, entry in trainer.optimizers[0].state_dict()["state"].items():
        found |= {f"{number}.{key}": value.clone() for key, value in entry.items()}
    return found


def assert_same_with_nan(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name].isnan(), value.isnan()), name
        assert torch.equal(got[name].nan_to_num(), value.nan_to_num()), name


PLANS = pytest.mark.parametrize("plan", ["resident", "host", "disk"])


@PLANS
@pytest.mark.parametrize("spoil", ["loss", "gradient", "infinity"])
@pytest.mark.parametrize(("clip", "by"), [(None, None), (0.5, "norm"), (0.5, "value")])
def test_nan_and_infinity_spread_as_in_torch(plan: str, spoil: str, clip: float | None, by: str | None, tmp_path: Path) -> None:
    options = {"gradient_clip_val": clip, "gradient_clip_algorithm": by}
    expected = tensors(*trained("auto", tmp_path, spoil, **options))
    assert any(value.isnan().any() for value in expected.values())
    assert_same_with_nan(tensors(*trained(HeteroOffloadStrategy(plan=plan), tmp_path, spoil, **options)), expected)


@PLANS
@pytest.mark.parametrize("spoil", ["loss", "gradient"])
def test_anomaly_detection_raises_the_same_error(plan: str, spoil: str, tmp_path: Path) -> None:
    texts = []
    for strategy in ("auto", HeteroOffloadStrategy(plan=plan)):
        with pytest.raises(RuntimeError, match="returned nan values") as caught:
            trained(strategy, tmp_path, spoil, detect_anomaly=True)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@PLANS
def test_a_callback_that_looks_at_gradients_stops_at_the_same_step(plan: str, tmp_path: Path) -> None:
    texts = []
    for strategy in ("auto", HeteroOffloadStrategy(plan=plan)):
        with pytest.raises(FloatingPointError) as caught:
            trained(strategy, tmp_path, "gradient", Raises())
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"step {BAD_STEP}:")


@PLANS
def test_early_stopping_on_a_value_that_is_not_finite(plan: str, tmp_path: Path) -> None:
    outcomes = []
    for strategy in ("auto", HeteroOffloadStrategy(plan=plan)):
        stop = pl.callbacks.EarlyStopping("loss", check_finite=True, check_on_train_epoch_end=True, patience=100)
        module, trainer = trained(strategy, tmp_path, "loss", stop, max_steps=20, limit_train_batches=1)
        outcomes.append((trainer.global_step, stop.stopped_epoch, tensors(module, trainer)))
    assert outcomes[0][:2] == outcomes[1][:2]
    assert outcomes[0][0] == BAD_STEP + 1
    assert_same_with_nan(outcomes[1][2], outcomes[0][2])


@PLANS
def test_the_poison_of_released_memory_never_reaches_a_result(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tests' NaN in memory that is not the block's own, a run without NaN stays without."""
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")
    assert not any(v.isnan().any() for v in tensors(*trained(HeteroOffloadStrategy(plan=plan), tmp_path, "nothing")).values())
