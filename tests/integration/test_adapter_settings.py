"""Settings of adapters that change what a model computes, and no parameter's shape."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import quiet_trainer
from torch import Tensor

from lightning_hetero.errors import ConfigError
from lightning_hetero.strategies import HeteroOffloadStrategy

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft, whose adapters are trained here, is missing")
import peft
from support import llama

OTHERS: dict[str, dict[str, Any]] = {
    r"lora_alpha of 'default' was 8, and is 16 here": {"lora_alpha": 16},
    "use_rslora of 'default' was False": {"use_rslora": True},
    "alpha_pattern of 'default' was {}": {"alpha_pattern": {"q_proj": 4}},
    "use_dora of 'default' was False": {"use_dora": True},
}


class Lit(llama.LitLlama):
    """Two models with adapters: the first one trains as it is configured."""

    def __init__(self, **options: Any) -> None:
        super().__init__(self.make)
        self.options = options

    def make(self) -> Any:
        torch.manual_seed(5)
        self.judge = self.wrapped()
        return self.wrapped(**self.options)

    def wrapped(self, **options: Any) -> Any:
        config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **options})
        return peft.get_peft_model(llama.LlamaForCausalLM(llama.config(layers=2)), config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.judge(input_ids=batch, labels=batch, use_cache=False)
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2, fused=True)


class Permissive(Lit):
    strict_loading = False


def fit(module: Lit, root: Path, steps: int, source: Path | None = None, **options: Any) -> Any:
    strategy = HeteroOffloadStrategy("disk", disk_path=root / "store", **options)
    trainer = quiet_trainer(strategy=strategy, max_steps=steps, default_root_dir=root, enable_checkpointing=True)
    trainer.fit(module, llama.batches(), ckpt_path=None if source is None else str(source))
    return trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    root: Path = tmp_path_factory.mktemp("run")
    fit(Lit(), root, 2).save_checkpoint(root / "whole.ckpt")
    fit(Lit(), root, 2, exclude_frozen_parameters=True, new_run=True).save_checkpoint(root / "adapters.ckpt")
    return root


SOURCES = ["store", "whole.ckpt", "adapters.ckpt"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("what", OTHERS)
def test_other_settings_are_refused_by_name(what: str, source: str, run: Path, tmp_path: Path) -> None:
    module = Lit(**OTHERS[what])
    with pytest.raises(ConfigError, match=f"{what}.*strict_loading = False"):
        fit(module, tmp_path, 3, run / source)
    assert not module.losses


@pytest.mark.parametrize("source", SOURCES)
def test_an_evaluation_has_them_too(source: str, run: Path, tmp_path: Path) -> None:
    trainer = quiet_trainer(strategy=HeteroOffloadStrategy("disk"), default_root_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"lora_alpha of 'default' was 8, and is 16 here"):
        trainer.validate(Lit(lora_alpha=16), llama.batches(), ckpt_path=str(run / source), verbose=False)


@pytest.mark.parametrize("source", SOURCES)
def test_settings_change_with_consent(source: str, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    losses = []
    for module in (Lit(), Permissive(lora_alpha=16)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            fit(module, tmp_path / type(module).__name__, 3, run / source)
        losses += module.losses
        assert ("lora_alpha of 'default' was 8, and is 16 here" in caplog.text) == isinstance(module, Permissive)
        assert ("other settings" in caplog.text) == isinstance(module, Permissive)
    assert len(losses) == 2
    assert losses[0] != losses[1]


@pytest.mark.parametrize("source", SOURCES)
def test_another_dropout_is_a_warning(source: str, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Lit(lora_dropout=0.5)
    with caplog.at_level(logging.WARNING):
        fit(module, tmp_path, 3, run / source)
    assert "lora_dropout of 'default' was 0.0, and is 0.5 here" in caplog.text
    assert len(module.losses) == 1


def test_where_adapters_come_from_is_not_compared(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor how their modules are named, as long as they are the same ones."""
    module = Lit(init_lora_weights="gaussian", target_modules=r".*\.(q|v)_proj", inference_mode=False, revision="other")
    with caplog.at_level(logging.WARNING):
        fit(module, tmp_path, 3, run / "whole.ckpt")
    assert "other settings" not in caplog.text


def test_an_entry_that_is_not_ours_is_refused(run: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(run / "whole.ckpt", weights_only=True)
    assert set(checkpoint["adapter_settings"]) == {"judge", "model"}
    checkpoint["adapter_settings"] = {"model": ["default"]}
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with pytest.raises(ConfigError, match=r"adapters of PEFT is not of this package.*adapter_settings"):
        fit(Lit(), tmp_path, 3, tmp_path / "other.ckpt")
