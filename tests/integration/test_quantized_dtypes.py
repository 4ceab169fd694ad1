"""The dtype from which weights on the meta device are quantized, under every precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.covers import paired
from support.models import quiet_trainer
from torch import Tensor

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.strategies import HeteroOffloadStrategy

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft, whose adapters are trained here, is missing")
pytest.importorskip("bitsandbytes", reason="bitsandbytes, on whose quantized layers adapters train here, is missing")
from bitsandbytes.backends import utils
from bitsandbytes.backends.default import ops
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support import llama
from support.quantized import LATE, Module
from support.quantized import base as float_base
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel
from transformers.integrations.bitsandbytes import replace_with_bnb_linear

KINDS = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4 double": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}
PRECISIONS = ("32-true", "bf16-true", "16-true", "bf16-mixed")  # of a CPU
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["files of fp32", "files of bf16"])
def folder(request: Any, tmp_path_factory: Any) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": llama.WORDS, "max_position_embeddings": 32}
    torch.manual_seed(3)
    config = llama.LlamaConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, **sizes)
    directory: Path = tmp_path_factory.mktemp("weights")
    llama.LlamaForCausalLM(config).to(request.param).save_pretrained(directory)
    return directory


def in_memory(folder: Path, kind: str, dtype: torch.dtype | None) -> Any:
    given = {} if dtype is None else {"dtype": dtype}
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=KINDS[kind], **given)


def on_meta(folder: Path, kind: str, dtype: torch.dtype | None) -> Any:
    given = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), **given)
    base = replace_with_bnb_linear(base, modules_to_not_convert=["lm_head"], quantization_config=KINDS[kind])
    setattr(base, "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit", True)
    return base


def adapted(make: Callable[[], Any]) -> Any:
    base = make()
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))


class Lit(Module):
    """Adapters begin with the same values. The model is built in the constructor or later."""

    def __init__(self, make: Callable[[], Any], *, early: bool = False) -> None:
        super().__init__(partial(adapted, make))
        utils._code_4bit_cache.clear()  # in the default dtype of their first use in a process
        ops._get_4bit_quantize_bounds.cache_clear()
        if early:
            super().configure_model()

    def on_train_start(self) -> None:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for _, param in sorted(self.named_parameters()):
                if param.requires_grad:
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.1)


def trained(module: Module, strategy: Any, precision: Any, root: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses, and what is frozen."""
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=2, default_root_dir=root)
    trainer.fit(module, llama.batches())
    return module.losses, {name: value.clone() for name, value in module.state_dict().items() if "lora_" not in name}


def assert_same(got: tuple[list[Tensor], dict[str, Tensor]], expected: tuple[list[Tensor], dict[str, Tensor]]) -> None:
    assert got[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert got[1][name].dtype == value.dtype, name
        assert torch.equal(got[1][name], value), name
    assert got[0] == expected[0]


def rounds_twice(precision: str, dtype: torch.dtype | None) -> bool:
    """Whether weights in fp32 become 16 bits of one kind, then of the other."""
    return (precision, dtype) in {("bf16-true", torch.float16), ("16-true", torch.bfloat16)}


def is_refused_by_torch(precision: str, dtype: torch.dtype | None) -> bool:
    """Autocast to bfloat16 does not know float16."""
    return (precision, dtype) == ("bf16-mixed", torch.float16)


CASES = list(product(KINDS, PRECISIONS, (None, *DTYPES), (False, True)))
ROWS = paired(
    [row for row in CASES if not rounds_twice(*row[1:3]) and not is_refused_by_torch(*row[1:3])],
    lambda row: row,
    lambda row: [row[:3]] if row[1:3] == ("bf16-true", None) else [],  # where the orders of precision and quantization differ
)


@pytest.mark.parametrize(("kind", "precision", "dtype", "early"), ROWS)
def test_weights_are_quantized_as_from_pretrained_does(
    kind: str, precision: str, dtype: torch.dtype | None, early: bool, folder: Path, tmp_path: Path
) -> None:
    expected = trained(Lit(partial(in_memory, folder, kind, dtype), early=early), "auto", precision, tmp_path)
    module = Lit(partial(on_meta, folder, kind, dtype), early=early)
    assert_same(trained(module, HeteroOffloadStrategy("disk", weights=folder), precision, tmp_path), expected)


@pytest.mark.parametrize("early", [False, True])
def test_weights_that_are_rounded_twice_in_memory_are_refused(early: bool, folder: Path, tmp_path: Path) -> None:
    module = Lit(partial(on_meta, folder, "nf4", torch.float16), early=early)
    with pytest.raises(ConfigError, match=r"embed_tokens.weight' is .* torch.bfloat16 in the model, where it was torch.float16"):
        trained(module, HeteroOffloadStrategy("disk", weights=folder), "bf16-true", tmp_path)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_dtype_that_the_configuration_does_not_have_is_refused(precision: str, folder: Path, tmp_path: Path) -> None:
    """As it would be quantized in memory before the conversion."""

    def converted() -> Any:
        base = on_meta(folder, "nf4", torch.float32)
        for param in base.parameters():
            param.data = param.data.to(torch.bfloat16)
        return base

    with pytest.raises(UnsupportedError, match=r"is torch.bfloat16, but torch.float32 by config.dtype.*dtype=torch.bfloat16\)"):
        trained(Lit(converted), HeteroOffloadStrategy("disk", weights=folder), precision, tmp_path)


def test_matrices_that_files_have_turned_are_refused(tmp_path: Path) -> None:
    """GPT-2's. Square ones would be read without an error."""
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(vocab_size=llama.WORDS, **sizes)).save_pretrained(tmp_path)

    def made() -> Any:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        rest = ["lm_head", "c_attn", "c_fc", "mlp.c_proj"]
        return replace_with_bnb_linear(model, modules_to_not_convert=rest, quantization_config=KINDS["nf4"])

    module = Module(lambda: get_peft_model(made(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)))
    with pytest.raises(UnsupportedError, match=r"attn.c_proj.weight' is on the meta device in the place of a Conv1D"):
        trained(module, HeteroOffloadStrategy("disk", weights=tmp_path), "32-true", tmp_path)


def bare(kind: str, folder: Path | None) -> Any:
    """With layers of bitsandbytes, not quantized; without a folder on the meta device."""
    with torch.device("meta" if folder is None else "cpu"):
        model = float_base()
        if folder is not None:
            model.load_state_dict(load_file(folder / "model.safetensors"))
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and name != "lm_head":
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, LATE[kind](module))
    return model


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", LATE)
def test_other_layers_are_quantized_as_lightning_moves_them(kind: str, precision: str, tmp_path: Path) -> None:
    """Nothing says that transformers has loaded them: the precision comes first."""
    float_base().save_pretrained(tmp_path)
    expected = trained(Lit(partial(bare, kind, tmp_path)), "auto", precision, tmp_path)
    module = Lit(partial(bare, kind, None))
    assert_same(trained(module, HeteroOffloadStrategy("disk", weights=tmp_path), precision, tmp_path), expected)
