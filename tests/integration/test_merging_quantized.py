"""PEFT merges adapters into layers of bitsandbytes by making new weights: refused by name while the
model trains, and done where the weights are in memory after it. The command merges them into the
base's own files.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from support.cli import invoke
from support.models import quiet_trainer
from support.resuming import Ends, EndsAt
from torch import Tensor

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.runtime.session import Session
from lightning_hetero.strategies import HeteroOffloadStrategy

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft, whose adapters are merged here, is missing")
pytest.importorskip("bitsandbytes", reason="bitsandbytes, into whose layers adapters are merged here, is missing")
import peft
from support import llama
from support.quantized import Module, base, build

TIGHT = Plan(name="tight", blocks=(BlockPlan(name="*", weights=Tier.DISK, state=Tier.DISK),), host_cache_bytes=1)
KEY = "model.layers.0.self_attn.q_proj.weight"
REFUSAL = r"layers\.0\.self_attn\.q_proj.*Merge after the fit, .*`lightning-hetero export --merge`"


def strategy(plan: str) -> Any:
    if plan.startswith("device"):
        return HeteroOffloadStrategy(plan[7:] or "disk", device=EmulatedDevice(memory="8MiB"))
    return HeteroOffloadStrategy(TIGHT if plan == "tight" else plan)


class Merges(pl.Callback):
    """For the time of each validation."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.model.merge_adapter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.model.unmerge_adapter()


def fit(module: Module, strategy: Any, folder: Path, *callbacks: pl.Callback, steps: int = 3) -> list[Tensor]:
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=steps, default_root_dir=folder, callbacks=list(callbacks), limit_val_batches=1,
        val_check_interval=2,
    )  # fmt: skip
    trainer.fit(module, llama.batches(), llama.batches())
    return module.losses


def steady(kind: str, **lora: Any) -> Any:
    """Plain PyTorch too keeps the layout of 4-bit weights in evaluation mode."""
    model = build(kind, checkpointed=True, **lora)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")


@pytest.mark.filterwarnings("ignore:.*erge lora module to .*rounding errors")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("plan", ["host", "disk", "device"])
def test_merging_while_it_trains_is_refused_by_name(plan: str, kind: str, tmp_path: Path) -> None:
    expected = fit(Module(partial(steady, kind)), "auto", tmp_path, Merges())
    module = Module(partial(steady, kind))
    with pytest.raises(UnsupportedError, match=REFUSAL):
        fit(module, strategy(plan), tmp_path, Merges())
    assert len(module.losses) in (2, 3)
    assert module.losses == expected[: len(module.losses)]


@pytest.mark.filterwarnings("ignore:.*erge lora module to .*rounding errors")
@pytest.mark.parametrize("parked", [False, True])
def test_merging_after_the_fit_as_the_refusal_says(parked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, module = (Module(partial(steady, "nf4")) for _ in range(2))
    if parked:  # the model stays on disk after the fit
        monkeypatch.setattr(Session, "_fits_memory", lambda session: False)
    ours = strategy("disk")
    for one, kind in ((plain, "auto"), (module, ours)):
        fit(one, kind, tmp_path)
    if parked:
        with torch.no_grad(), pytest.raises(UnsupportedError, match=REFUSAL):
            module.model.merge_adapter()
    with torch.no_grad(), ours.materialize(module):
        values = [one.model.merge_and_unload().state_dict() for one in (plain, module)]
        assert all(torch.equal(value, values[0][name]) for name, value in values[1].items())


@pytest.mark.filterwarnings("ignore:.*erge lora module to .*rounding errors")
def test_a_copy_of_a_model_that_trains_can_be_merged(tmp_path: Path) -> None:
    class Copies(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            found.append(copy.deepcopy(pl_module.model))

    found: list[Any] = []
    module, plain = (Module(partial(steady, "nf4")) for _ in range(2))
    fit(module, strategy("tight"), tmp_path, Copies(), steps=1)
    fit(plain, "auto", tmp_path, steps=1)
    with torch.no_grad():
        merged, expected = (model.merge_and_unload().state_dict() for model in (found[0], plain.model))
    assert all(torch.equal(value, expected[name]) for name, value in merged.items())


@pytest.mark.parametrize("plan", ["host", "tight", "device disk"])
def test_dora_leaves_layers_their_weights(plan: str, tmp_path: Path) -> None:
    """On a CPU it puts others in their place, with the memory that the weights have just now."""

    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            found.append({name: value.clone() for name, value in pl_module.state_dict().items()})

    found: list[dict[str, Tensor]] = []
    losses = [fit(Module(partial(steady, "nf4", use_dora=True)), s, tmp_path, Reads()) for s in ("auto", strategy(plan))]
    assert losses[0] == losses[1]
    for expected, got in zip(found[:3], found[3:], strict=True):
        assert all(torch.equal(value, expected[name]) for name, value in got.items())


@pytest.mark.filterwarnings("ignore:.*erge lora module to .*rounding errors")
@pytest.mark.parametrize(("kind", "dora"), [("nf4 double", False), ("nf4 double", True), ("int8", False)])  # PEFT: no int8 and DoRA
def test_the_command_merges_into_the_files_of_the_base(kind: str, dora: bool, tmp_path: Path) -> None:
    """The adapter is that of a store of a run that ended early, or a folder of one that did not."""
    made = partial(steady, kind, use_dora=dora, init_lora_weights=True)
    weights, store = tmp_path / "weights", tmp_path / "store"
    base().save_pretrained(weights)
    ended, finished, plain = (Module(made) for _ in range(3))
    with pytest.raises(Ends):
        fit(ended, HeteroOffloadStrategy("disk", disk_path=store), tmp_path, EndsAt(2))
    fit(finished, HeteroOffloadStrategy("disk"), tmp_path)
    finished.trainer.save_checkpoint(tmp_path / "x.ckpt")
    fit(plain, "auto", tmp_path, steps=2)
    for module, name, adapter in ((plain, "of ended", store), (finished, "of finished", tmp_path / "of finished")):
        module.model.save_pretrained(tmp_path / name)
        invoke("export", weights, tmp_path / f"merged {name}", "--merge", adapter)
        loaded = llama.LlamaForCausalLM.from_pretrained(weights)
        expected = peft.PeftModel.from_pretrained(loaded, tmp_path / name).merge_and_unload().state_dict()
        found = load_file(tmp_path / f"merged {name}" / "model.safetensors")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
        assert not torch.equal(expected[KEY], load_file(weights / "model.safetensors")[KEY])
    for source, adapter in ((store, store), (tmp_path / "x.ckpt", tmp_path / "of finished")):
        refused = invoke("export", source, tmp_path / "out", "--module", "model", "--merge", adapter, code=2)
        said = " ".join(refused.stderr.split())
        assert "proj' has a weight of torch." in said
        assert "Merge into the folder of the base, which has them as they were" in said
