"""Frozen weights of bitsandbytes under adapters: bit for bit as in plain Lightning, on every tier,
after a kill, in checkpoints.
"""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import Outcome, assert_same, outcome, quiet_trainer
from support.resuming import Ends, EndsAt, after
from torch import nn

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier, export_weights
from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.runtime import quantized
from lightning_hetero.strategies import HeteroOffloadStrategy

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft, whose adapters are trained here, is missing")
pytest.importorskip("bitsandbytes", reason="bitsandbytes, on whose quantized layers adapters train here, is missing")
import bitsandbytes as bnb
import peft
from support import llama

STEPS = 4


def linear4(module: nn.Linear, *, double: bool, late: bool = False) -> nn.Module:
    options = {"quant_type": "nf4", "compress_statistics": double}
    layer: nn.Module = bnb.nn.Linear4bit(
        module.in_features, module.out_features, bias=False, compute_dtype=torch.float32, **options
    )
    layer.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, **options)
    return layer if late else layer.to("cpu")


def linear8(module: nn.Linear, *, late: bool = False) -> nn.Module:
    layer: nn.Module = bnb.nn.Linear8bitLt(module.in_features, module.out_features, bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(module.weight.data, requires_grad=False)
    return layer if late else layer.to("cpu")


KINDS = {"nf4": partial(linear4, double=False), "nf4 double": partial(linear4, double=True), "int8": linear8}
LATE = {"nf4 late": partial(linear4, double=True, late=True), "int8 late": partial(linear8, late=True)}  # quantized in setup


def build(kind: str, *, seed: int = 3, scale: float = 1.0, checkpointed: bool = False) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": llama.WORDS, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = llama.LlamaForCausalLM(llama.LlamaConfig(num_hidden_layers=4, **sizes, **heads))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            parent, _, last = name.rpartition(".")
            with torch.no_grad():
                module.weight.mul_(scale)
            setattr(model.get_submodule(parent), last, (KINDS | LATE)[kind](module))
    if checkpointed:
        model.is_loaded_in_4bit = True
        options = {"use_gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        model = peft.prepare_model_for_kbit_training(model, **options)
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


class Module(llama.LitLlama):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, fused=True)


TIGHT = Plan(name="tight", blocks=(BlockPlan(name="*", weights=Tier.DISK, state=Tier.DISK),), host_cache_bytes=1)


def strategy(plan: str, **options: Any) -> Any:
    if plan.startswith("device"):
        return HeteroOffloadStrategy(plan[7:] or "auto", device=EmulatedDevice(memory="8MiB"), **options)
    return HeteroOffloadStrategy(TIGHT if plan == "tight" else plan, **options)


def fit(
    module: Any, strategy: Any, folder: Path, *, stop: int | None = None, ckpt_path: Path | None = None, **options: Any
) -> Outcome:
    torch.manual_seed(11)
    callbacks = [] if stop is None else [EndsAt(stop)]
    trainer = quiet_trainer(**{"max_steps": STEPS, **options}, strategy=strategy, default_root_dir=folder, callbacks=callbacks)
    try:
        trainer.fit(module, llama.batches(), ckpt_path=None if ckpt_path is None else str(ckpt_path))
    except Ends:
        return Outcome(module.losses, {}, [])
    return outcome(trainer, module)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")


@pytest.mark.parametrize("kind", KINDS)
def test_backward_reads_the_weights_where_they_are_by_then(kind: str) -> None:
    """On a device a block's weights come back to other memory, and theirs has other weights."""
    found = []
    for moves in (False, True):
        torch.manual_seed(0)
        layer, x = KINDS[kind](nn.Linear(64, 64, bias=False)), torch.randn(3, 64, requires_grad=True)
        handles = quantized.follow(layer) if moves else []
        out = layer(x)
        if moves:
            before = layer.weight.data
            layer.weight.data = before.clone()
            before.fill_(77)
        out.square().sum().backward()
        found.append(x.grad)
        for handle in handles:
            handle.remove()
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", ["host", "disk", "tight", "device", "device disk"])
def test_plans_do_not_change_a_bit(plan: str, kind: str, tmp_path: Path) -> None:
    expected = fit(Module(lambda: build(kind)), "auto", tmp_path)
    module = Module(lambda: build(kind))
    assert_same(fit(module, strategy(plan), tmp_path), expected)
    plain = build(kind)
    for name, param in module.model.named_parameters():
        assert type(param) is type(plain.get_parameter(name)), name
    with torch.no_grad():
        tokens = torch.arange(12).view(2, 6)
        assert torch.equal(module.model(tokens).logits, copy.deepcopy(module.model)(tokens).logits)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", ["nf4 double", "int8"])
def test_precisions(kind: str, precision: str, tmp_path: Path) -> None:
    plain = "auto" if precision == "bf16-mixed" else strategy("resident")  # fp32 masters of 16-bit weights
    expected = fit(Module(lambda: build(kind)), plain, tmp_path, precision=precision)
    for plan in ("tight", "device", "auto"):
        got = fit(Module(lambda: build(kind)), strategy(plan), tmp_path, precision=precision)
        assert_same(got, expected)


@pytest.mark.parametrize("kind", LATE)
def test_layers_that_are_quantized_when_a_model_is_moved(kind: str, tmp_path: Path) -> None:
    assert_same(fit(Module(lambda: build(kind)), strategy("disk"), tmp_path), fit(Module(lambda: build(kind)), "auto", tmp_path))

    def on_meta() -> Any:
        with torch.device("meta"):
            return build(kind)

    with pytest.raises(UnsupportedError, match=r"on the meta device, and quantizing needs its values"):
        fit(Module(on_meta), strategy("disk"), tmp_path)


@pytest.mark.parametrize("plan", ["tight", "device disk"])
def test_prepared_for_training_with_checkpointing(plan: str, tmp_path: Path) -> None:
    made = partial(build, "nf4 double", checkpointed=True)
    assert_same(fit(Module(made), strategy(plan), tmp_path), fit(Module(made), "auto", tmp_path))


@pytest.mark.parametrize("kind", ["nf4 double", "int8"])
def test_a_run_that_ended_goes_on(kind: str, tmp_path: Path) -> None:
    expected, store = fit(Module(lambda: build(kind)), "auto", tmp_path), tmp_path / "store"
    fit(Module(lambda: build(kind)), strategy("tight", disk_path=store), tmp_path, stop=2)
    other = Module(lambda: build(kind, scale=2.0))  # the codes are the same, the scales are not
    with pytest.raises(ConfigError, match=r"scales of the quantized weight 'model.base_model.*q_proj.base_layer.weight'"):
        fit(other, strategy("tight", disk_path=store), tmp_path, ckpt_path=store)
    got = fit(Module(lambda: build(kind)), strategy("tight", disk_path=store), tmp_path, ckpt_path=store)
    assert_same(got, after(expected, len(got.losses)))


@pytest.mark.parametrize("kind", ["nf4 double", "int8"])
def test_checkpoints_of_the_adapters_alone(kind: str, tmp_path: Path) -> None:
    path, make = tmp_path / "x.ckpt", partial(strategy, "disk", exclude_frozen_parameters=True)
    module = Module(lambda: build(kind))
    fit(module, make(), tmp_path, max_steps=2)
    module.trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True)["state_dict"]
    assert all("lora_" in name for name in state)
    got = fit(Module(lambda: build(kind)), make(), tmp_path, ckpt_path=path)
    plain = Module(lambda: build(kind))
    plain.strict_loading = False
    assert_same(got, fit(plain, "auto", tmp_path, ckpt_path=path))
    with pytest.raises(ConfigError, match="other values than when it was saved"):
        fit(Module(lambda: build(kind, scale=2.0)), make(), tmp_path, ckpt_path=path)


def copied(model: Any) -> Any:
    return copy.deepcopy(model)


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("take", [copied, saved])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_copied_and_saved_whole_while_it_trains(kind: str, take: Any, tmp_path: Path) -> None:
    tokens, found = torch.arange(12).view(2, 6), []

    class Takes(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                found.append(take(self.model)(tokens).logits)

    for one in ("auto", strategy("tight")):
        fit(Takes(lambda: build(kind)), one, tmp_path, max_steps=2)
    assert len(found) == 4
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_merging_a_quantized_layer_while_it_is_exported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"torch.uint8 .*not quantized"):
        export_weights(build("nf4"), tmp_path / "out", merge=True)


def test_weights_of_several_tensors_are_refused_by_name(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao, whose tensors are refused, is missing")

    def build() -> Any:
        model = llama.LlamaForCausalLM(llama.config())
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))

    with pytest.raises(UnsupportedError, match=r"q_proj.base_layer.weight' is a Int8Tensor.*bitsandbytes"):
        fit(Module(build), strategy("disk"), tmp_path)
