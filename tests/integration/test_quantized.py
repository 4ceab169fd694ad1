"""Frozen weights of bitsandbytes under adapters: bit for bit as in plain Lightning, on every tier,
after a kill, in checkpoints.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import Outcome, assert_same, outcome, quiet_trainer
from support.resuming import Ends, EndsAt, after
from support.strategies import least_memory
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier, export_weights
from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.runtime import quantized
from lightning_hetero.strategies import HeteroOffloadStrategy

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft, whose adapters are trained here, is missing")
pytest.importorskip("bitsandbytes", reason="bitsandbytes, on whose quantized layers adapters train here, is missing")
import peft
from support import llama
from support.quantized import KINDS, LATE, Module, build, on_meta

STEPS = 4
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
        loaders = (llama.batches(), llama.batches()) if "limit_val_batches" in options else (llama.batches(),)
        trainer.fit(module, *loaders, ckpt_path=None if ckpt_path is None else str(ckpt_path))
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
    with pytest.raises(UnsupportedError, match=r"on the meta device, and quantizing needs its values"):
        fit(Module(partial(on_meta, kind)), strategy("disk"), tmp_path)


def packs_anew(kind: str, *, wants: bool) -> Any:
    """Layers as bitsandbytes makes them on a CPU with AVX512-BF16, or on another one."""
    model = build(kind)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = wants
    return model


@pytest.mark.parametrize("plan", ["host", "disk", "tight", "device"])
@pytest.mark.parametrize("kind", ["nf4 double", "int8"])
def test_an_evaluation_between_steps_changes_nothing(kind: str, plan: str, tmp_path: Path) -> None:
    """On some CPUs bitsandbytes packs weights anew then, and loses the gradients of adapters."""
    options: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 1}
    expected = fit(Module(lambda: packs_anew(kind, wants=False)), "auto", tmp_path, **options)
    module = Module(lambda: packs_anew(kind, wants=True))
    assert_same(fit(module, strategy(plan), tmp_path, **options), expected)
    assert {vars(layer).get("support_avx512bf16_for_cpu") for layer in module.model.modules()} <= {True, None}


@pytest.mark.parametrize("plan", ["tight", "device disk"])
def test_prepared_for_training_with_checkpointing(plan: str, tmp_path: Path) -> None:
    made = partial(build, "nf4 double", checkpointed=True)
    assert_same(fit(Module(made), strategy(plan), tmp_path), fit(Module(made), "auto", tmp_path))


def scales_of(kind: str) -> int:
    """Bytes of scales and code books, by bitsandbytes' own attributes."""
    found = 0
    for weight in (module._parameters.get("weight") for module in build(kind).modules()):
        state = getattr(weight, "quant_state", None)
        if state is not None:
            nested = state.state2
            inner = 0 if nested is None else nested.absmax.nbytes + nested.code.nbytes + state.offset.nbytes
            found += state.absmax.nbytes + state.code.nbytes + inner
        if isinstance(scales := getattr(weight, "SCB", None), torch.Tensor):
            found += scales.nbytes
    return found


@pytest.mark.parametrize("plan", ["host", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_count_in_the_budget(plan: str, kind: str, tmp_path: Path) -> None:
    def least(kind: str, scale_bytes: int | None = None) -> int:
        with pytest.MonkeyPatch.context() as patch:
            if scale_bytes is not None:
                patch.setattr(quantized, "scale_bytes", lambda _: scale_bytes)
            return least_memory(lambda one: fit(Module(lambda: build(kind)), one, tmp_path), plan)

    needed, scales = least(kind), scales_of(kind)
    assert scales
    assert needed - least(kind, 0) == scales
    present: list[int] = []

    class Looks(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            session = self.trainer.strategy.session  # type: ignore[attr-defined]
            present.append(session.present_bytes)

    fit(Looks(lambda: build(kind)), HeteroOffloadStrategy(plan, host_memory=needed), tmp_path, max_steps=2)
    assert scales < max(present) <= needed


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


def two_tensors(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach()), requires_grad=False)


def by_torchao(config: Callable[[Any], object], layer: nn.Linear) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao, whose tensors are refused, is missing")
    before = type(layer.weight)
    torchao.quantize_(layer, config(torchao))
    assert type(layer.weight) is not before, "torchao leaves layers alone whose sizes it does not like"


def in_int4(torchao: Any) -> Any:
    """The only one of its 4-bit layouts that torchao 0.18 makes on a CPU without other packages."""
    flow = pytest.importorskip("torchao.prototype.quantization.int4.inference_workflow", reason="of another version of torchao")
    return flow.PrototypeInt4WeightOnlyConfig(group_size=32)


SEVERAL: dict[str, Callable[[Any], None]] = {
    "two tensors": two_tensors,
    "int8": partial(by_torchao, lambda torchao: torchao.Int8WeightOnlyConfig()),
    "int8 dynamic": partial(by_torchao, lambda torchao: torchao.Int8DynamicActivationInt8WeightConfig()),
    "float8": partial(by_torchao, lambda torchao: torchao.Float8WeightOnlyConfig()),
    "int4": partial(by_torchao, in_int4),
    "intx": partial(by_torchao, lambda torchao: torchao.IntxWeightOnlyConfig()),
}


@pytest.mark.parametrize("only", ["q_proj", "layers.2.mlp.up_proj", "lm_head"])
@pytest.mark.parametrize("kind", SEVERAL)
def test_weights_of_several_tensors_are_refused_by_name(kind: str, only: str, tmp_path: Path) -> None:
    """Whether a model has one such layer or more, wherever it is, and whatever it is for."""

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 32}
    config = llama.LlamaConfig(num_attention_heads=1, num_key_value_heads=1, **sizes)

    def made(device: str = "cpu") -> Any:
        with torch.device(device):
            model = llama.LlamaForCausalLM(config)
            for name, layer in model.named_modules():
                if name.endswith(only):
                    SEVERAL[kind](layer)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))

    refused = pytest.raises(UnsupportedError, match=rf"{only}.*weight' is a .*Tensor: its content is several tensors.*bitsandbytes")
    for plan in ("auto", "disk", "resident", "device"):
        with refused:
            fit(Module(made), strategy(plan), tmp_path)
    with refused:
        quiet_trainer(strategy=strategy("disk")).validate(Module(made), llama.batches())
    for merge in (False, True):
        with refused:
            export_weights(made(), tmp_path / "out", merge=merge)
    if kind != "int4":  # which torchao does not make there
        llama.LlamaForCausalLM(config).save_pretrained(tmp_path / "weights")
        with refused:
            fit(Module(partial(made, "meta")), HeteroOffloadStrategy("disk", weights={"model": tmp_path / "weights"}), tmp_path)
