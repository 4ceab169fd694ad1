"""Who replaces or wraps Lightning's own methods sees the calls, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock, patch

import pytest
from lightning.pytorch.strategies import Strategy
from support.models import LitModel, Manual, Recipe, assert_same, data, quiet_trainer, run

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy


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
