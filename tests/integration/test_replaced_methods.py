"""Who replaces or wraps Lightning's own methods sees the calls, and training goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock, patch

import lightning.pytorch as pl
import pytest
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from support.models import LitModel, Manual, Recipe, Shape, assert_same, data, quiet_trainer, run

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy, strategies

METHODS: tuple[tuple[type, str], ...] = (
    (Strategy, "backward"),
    (Strategy, "optimizer_step"),
    (Precision, "clip_gradients"),
    (pl.LightningModule, "clip_gradients"),
    (pl.LightningModule, "configure_gradient_clipping"),
    (pl.LightningModule, "backward"),
    (pl.LightningModule, "optimizer_step"),
)
CLASSES = ("strategy_class", "parallel_class", "parallel_offload_class", "parallel_fsdp_class")


def calls_of(strategy: Any, folder: Path) -> Counter[str]:
    calls = Counter[str]()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return method(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in METHODS:
            patch.setattr(owner, name, counted(f"{owner.__name__}.{name}", getattr(owner, name)))
        run(Recipe(shape=Shape(layers=2), steps=3, clip=0.3), strategy, folder, callbacks=[])  # an option: no result is shared
    return calls


@pytest.mark.parametrize("kind", ["host", "disk", "device"])
def test_wrapped_methods_are_called_as_often_as_under_plain_lightning(kind: str, tmp_path: Path) -> None:
    expected = calls_of("auto", tmp_path)
    device = EmulatedDevice(memory="4MiB") if kind == "device" else None
    plan = "host" if kind == "device" else kind
    assert len(expected) == len(METHODS), "the plain run calls them all"
    assert calls_of(HeteroOffloadStrategy(plan, device=device), tmp_path) == expected


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("name", CLASSES)
def test_at_most_two_classes_of_ours_stand_above_lightnings(name: str, namespace: str) -> None:
    kinds = getattr(strategies, name)(namespace).__mro__
    assert len([kind for kind in kinds if kind.__module__.startswith("lightning_hetero.")]) <= 2


@pytest.mark.parametrize("device", [None, EmulatedDevice("4MiB")], ids=["host", "device"])
@pytest.mark.parametrize("kind", [LitModel, Manual])
def test_a_mock_of_backward_that_wraps_the_strategys_counts_it(
    kind: type[LitModel], device: EmulatedDevice | None, tmp_path: Path
) -> None:
    recipe = Recipe(steps=2)
    options: dict[str, Any] = {} if device is None else {"device": device}
    strategy = HeteroOffloadStrategy("host", **options)
    with patch.object(Strategy, "backward", wraps=strategy.backward) as backward:
        got = run(recipe, strategy, tmp_path, module_class=kind)
        assert strategy.backward.call_count == 2  # as Lightning's own tests ask
    assert backward.call_count == 2
    assert_same(got, run(recipe, "auto", tmp_path, module_class=kind))


@pytest.mark.parametrize("strict", [True, False])
def test_weights_are_loaded_as_lightning_loads_them(strict: bool, tmp_path: Path) -> None:
    trainer = quiet_trainer(max_steps=1, default_root_dir=tmp_path, strategy=HeteroOffloadStrategy("host"))
    trainer.fit(LitModel(Recipe()), data())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    module = LitModel(Recipe())
    module.strict_loading = strict
    with patch.object(module, "load_state_dict", Mock()) as load:
        again = quiet_trainer(max_steps=2, default_root_dir=tmp_path, strategy=HeteroOffloadStrategy("host"))
        again.fit(module, data(), ckpt_path=tmp_path / "one.ckpt")
    load.assert_called_once_with(ANY, strict=strict)
