"""Weights that were saved while ``merge_adapter()`` was active: no adapter is applied twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from support.models import quiet_trainer
from support.resuming import Ends, EndsAt
from torch import Tensor

from lightning_hetero import EmulatedDevice, export_weights
from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.strategies import HeteroOffloadStrategy

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft, whose adapters are merged here, is missing")
import peft
from support import llama

CONFIGS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


class Lit(llama.LitLlama):
    def __init__(self, kind: str = "lora") -> None:
        super().__init__(self.make)
        self.kind = kind

    def make(self) -> Any:
        torch.manual_seed(5)
        return peft.get_peft_model(llama.LlamaForCausalLM(llama.config()), CONFIGS[self.kind]())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=5e-2, fused=True)


class Merges(pl.Callback):
    """Merges after the second step and at the end of each epoch, until training goes on."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            pl_module.model.unmerge_adapter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.model.merge_adapter()


def fit(
    root: Path, strategy: Any, module: Lit, *callbacks: Any, epochs: int = 2, steps: int = -1, ckpt_path: Any = None
) -> pl.Trainer:
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=epochs, max_steps=steps, limit_train_batches=3, default_root_dir=root,
        enable_checkpointing=True, callbacks=[Merges(), ModelCheckpoint(root, filename="{epoch}", save_top_k=-1), *callbacks],
    )  # fmt: skip
    trainer.fit(module, llama.batches(), ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return trainer


def same(module: Lit, expected: Lit) -> bool:
    pairs = zip(module.state_dict().items(), expected.state_dict().items(), strict=True)
    late = expected.losses[len(expected.losses) - len(module.losses) :]
    return all(a == b and torch.equal(one.clone(), other) for (a, one), (b, other) in pairs) and module.losses == late


def ours(plan: str, **options: Any) -> Any:
    if plan == "device":
        return HeteroOffloadStrategy("disk", device=EmulatedDevice(memory="8MiB"), **options)
    return HeteroOffloadStrategy(plan, **options)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("plan", ["host", "disk", "device"])
def test_a_run_goes_on_from_a_checkpoint_and_from_a_step_with_merged_layers(plan: str, kind: str, tmp_path: Path) -> None:
    expected = Lit(kind)
    fit(tmp_path / "plain", "auto", expected)
    fit(tmp_path / "ours", ours(plan, exclude_frozen_parameters=plan == "host"), Lit(kind), epochs=1)
    module = Lit(kind)
    fit(tmp_path / "checkpoint", ours(plan), module, ckpt_path=tmp_path / "ours" / "epoch=0.ckpt")
    assert same(module, expected)
    store = tmp_path / "store"
    with pytest.raises(Ends):
        fit(tmp_path, ours(plan, disk_path=store), Lit(kind), EndsAt(2))
    module = Lit(kind)
    fit(tmp_path, ours(plan, disk_path=store), module, ckpt_path=store)
    assert same(module, expected)


def validated(source: Any, module: Lit, root: Path) -> list[Tensor]:
    trainer = quiet_trainer(strategy=HeteroOffloadStrategy("disk"), default_root_dir=root)
    before = len(module.losses)
    trainer.validate(module, llama.batches(), ckpt_path=source, verbose=False)
    return module.losses[before:]


def test_what_is_loaded_decides_whether_layers_are_merged(tmp_path: Path) -> None:
    """Whatever the layers of the model were before."""
    store = tmp_path / "store"
    module = Lit()
    trainer = fit(tmp_path, HeteroOffloadStrategy("disk", disk_path=store), module, epochs=1)
    merged = str(tmp_path / "epoch=0.ckpt")
    assert torch.load(merged, weights_only=True)["merged_adapters"]["model.base_model.model.model.layers.0.mlp.down_proj"] == {
        "adapters": ["default"], "norms": {},
    }  # fmt: skip
    expected = validated(None, module, tmp_path)
    other = Lit()
    assert validated(merged, other, tmp_path) == expected
    with torch.no_grad():
        module.model.unmerge_adapter()
    trainer.save_checkpoint(tmp_path / "not merged.ckpt")
    assert torch.load(tmp_path / "not merged.ckpt", weights_only=True)["merged_adapters"] == {}
    without, layer = validated(None, module, tmp_path), "model.base_model.model.model.layers.0.mlp.down_proj"
    assert other.get_submodule(layer).merged
    assert validated(str(tmp_path / "not merged.ckpt"), other, tmp_path) == without
    assert not other.get_submodule(layer).merged
    assert validated(str(store), other, tmp_path) == without  # the last step was kept before the epoch ended
    plain = quiet_trainer(default_root_dir=tmp_path)
    plain.validate(other, llama.batches(), ckpt_path=merged, verbose=False)  # reads the entry over


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_export_does_not_merge_them_again(kind: str, tmp_path: Path) -> None:
    module, store = Lit(kind), tmp_path / "store"
    trainer = fit(tmp_path, HeteroOffloadStrategy("disk", disk_path=store), module, steps=2)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    module.model.save_pretrained(tmp_path / "adapter")
    sources: list[tuple[Any, Any]] = [
        (module, True), (module, tmp_path / "adapter"), (store, True), (store, tmp_path / "adapter"),
        (tmp_path / "x.ckpt", tmp_path / "adapter"),
    ]  # fmt: skip
    for number, (source, merge) in enumerate(sources):
        export_weights(source, tmp_path / str(number), module="model", merge=merge)
    expected = {name: value.clone() for name, value in module.model.merge_and_unload().state_dict().items()}
    for number in range(len(sources)):
        found = load_file(tmp_path / str(number) / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_checkpoint_that_an_export_writes_says_what_is_merged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Safetensors cannot, so the log does."""
    module, store = Lit("dora"), tmp_path / "store"
    trainer = fit(tmp_path, HeteroOffloadStrategy("disk", disk_path=store), module, steps=2)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    expected = validated(None, module, tmp_path)
    other = Lit("dora")
    for number, source in enumerate((module, store, tmp_path / "x.ckpt")):
        export_weights(source, tmp_path / f"{number}.ckpt")
        assert validated(str(tmp_path / f"{number}.ckpt"), other, tmp_path) == expected
        export_weights(tmp_path / f"{number}.ckpt", tmp_path / f"below {number}.ckpt", module="model")
        other.model.load_state_dict(torch.load(tmp_path / f"below {number}.ckpt", weights_only=True)["state_dict"])
        assert validated(None, other, tmp_path) == expected
        assert "twice" not in caplog.text
        export_weights(tmp_path / f"{number}.ckpt", tmp_path / str(number))
        assert "adapters are merged into the weights" in caplog.text
        caplog.clear()
    with torch.no_grad():
        module.model.unmerge_adapter()
    export_weights(module, tmp_path / "none")
    assert "twice" not in caplog.text


def test_an_export_of_weights_that_have_another_adapter_is_refused(tmp_path: Path) -> None:
    module, store = Lit(), tmp_path / "store"
    module.configure_model()
    module.model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    trainer = fit(tmp_path, HeteroOffloadStrategy("disk", disk_path=store), module, steps=2)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    module.model.save_pretrained(tmp_path / "adapters")
    for source in (module, store, tmp_path / "x.ckpt"):
        with pytest.raises(UnsupportedError, match=r"'default' merged, and not all that have 'other' exactly.*unmerge_adapter\(\)"):
            export_weights(source, tmp_path / "out", module="model", merge=tmp_path / "adapters" / "other")


def test_merges_of_another_model_or_program_are_refused(tmp_path: Path) -> None:
    fit(tmp_path, HeteroOffloadStrategy("disk"), Lit(), epochs=1)
    checkpoint = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    layer = checkpoint["merged_adapters"]["model.base_model.model.model.layers.0.mlp.down_proj"]
    for entry, message in (
        ({"model.nowhere": layer}, "adapters are merged into 'model.nowhere' where the weights come from"),
        ({"model.nowhere": ["default"]}, r"not of this package: merged_adapters.model.nowhere is list"),
    ):
        torch.save({**checkpoint, "merged_adapters": entry}, tmp_path / "x.ckpt")
        with pytest.raises(ConfigError, match=message):
            validated(str(tmp_path / "x.ckpt"), Lit(), tmp_path)
