"""Training whose gradients are clipped or overflow, and what became of updates that were tried
before the verdict.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_hetero.runtime.speculation import Speculation
from lightning_hetero.runtime.speculation_choice import Worth
from support.models import LitModel, Outcome, Recipe, data, outcome, quiet_trainer, run


def counted_verdicts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how many blocks are tried, kept, updated again, and skipped; from now on every step
    tries.
    """
    seen: Counter[str] = Counter()
    monkeypatch.setattr(Worth, "fixed", 1.0)

    def counted(name: str, what: str) -> None:
        original = getattr(Speculation, name)

        def call(self: Speculation, *args: Any) -> Any:
            before = len(self._tried)
            result = original(self, *args)
            seen[what] += before - len(self._tried) if what != "tried" else len(self._tried) - before
            return result

        monkeypatch.setattr(Speculation, name, call)

    for name, what in {"submitted": "tried", "keep": "kept", "again": "again", "skip": "skipped"}.items():
        counted(name, what)
    return seen


def norms(recipe: Recipe, folder: Path) -> list[float]:
    """The norm of every step's gradients where nothing is clipped."""
    seen: list[float] = []

    class Looks(LitModel):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])))

    run(recipe, "auto", folder, module_class=Looks)
    return seen


class Overflowing(LitModel):
    """Its loss overflows in some batches."""

    overflows: frozenset[int] = frozenset()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (torch.inf if batch_idx in self.overflows else 1.0)


def fused(groups: Any) -> torch.optim.Optimizer:
    """It divides by the scale itself."""
    return torch.optim.AdamW(groups, lr=3e-3, fused=True)


def divided(groups: Any) -> torch.optim.Optimizer:
    """The same kernel, but the scaler divides, so that Lightning allows clipping."""
    optimizer = fused(groups)
    vars(optimizer)["_step_supports_amp_scaling"] = False
    return optimizer


def run_scaled(
    recipe: Recipe, strategy: Any, folder: Path, overflows: frozenset[int], module_class: type[Overflowing] = Overflowing
) -> tuple[Outcome, float]:
    """Trains in 16-bit mixed precision under a ``GradScaler``, whose scale in the end comes with
    the outcome.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    torch.manual_seed(7)
    module = module_class(recipe)
    module.overflows = overflows
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy, plugins=[plugin], max_steps=recipe.steps, accumulate_grad_batches=recipe.accumulate,
        gradient_clip_val=recipe.clip, gradient_clip_algorithm=recipe.clip_by if recipe.clip else None, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, data())
    assert "_unscale_grads_" not in vars(scaler)
    assert "clip_grad_by_norm" not in vars(plugin)
    return outcome(trainer, module), scaler.get_scale()
