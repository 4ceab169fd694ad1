"""A small Llama with layers of bitsandbytes under LoRA, as a LightningModule."""

from __future__ import annotations

from functools import partial
from typing import Any

import bitsandbytes as bnb
import peft
import torch
from torch import nn

from support import llama


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


def base(*, seed: int = 3) -> Any:
    """The model without adapters, not quantized."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": llama.WORDS, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return llama.LlamaForCausalLM(llama.LlamaConfig(num_hidden_layers=4, **sizes, **heads))


def build(
    kind: str, *, seed: int = 3, scale: float = 1.0, checkpointed: bool = False, dtype: torch.dtype = torch.float32, **lora: Any
) -> Any:
    model = base(seed=seed).to(dtype)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            parent, _, last = name.rpartition(".")
            with torch.no_grad():
                module.weight.mul_(scale)
            setattr(model.get_submodule(parent), last, (KINDS | LATE)[kind](module))
    if checkpointed:
        setattr(model, "is_loaded_in_8bit" if kind.startswith("int8") else "is_loaded_in_4bit", True)
        checkpointing = {"use_gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        model = peft.prepare_model_for_kbit_training(model, **checkpointing)
    torch.manual_seed(seed)
    options = {"init_lora_weights": False, **lora}
    return peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules=["q_proj", "down_proj"], **options))


def on_meta(kind: str, **options: Any) -> Any:
    """The same on the meta device; its adapters must begin as PEFT's default says."""
    with torch.device("meta"):
        return build(kind, **options)


class Module(llama.LitLlama):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, fused=True)
