"""A frozen Llama of random weights with LoRA adapters: what ``adapters.py`` and its peers train.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from gpt2 import INIT_STD, RandomTokens, Size
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero.convert.safetensors import TensorToWrite, write_directory

HEAD = 128  # width of an attention head
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The model, its adapters and its batches.

    Attributes:
        layers: Decoder layers; 32 of width 4096 have 6.7 billion parameters.
        hidden: Their width.
        vocabulary: Words.
        rank: ``r`` of the adapters.
        targets: Ends of the names of linear layers that get one.
        batch: Sequences of a step.
        seq: Their tokens.
    """

    layers: int
    hidden: int
    vocabulary: int
    rank: int
    targets: tuple[str, ...]
    batch: int
    seq: int

    def config(self) -> Any:
        """transformers' configuration; every word may be a target, so no word ends a text."""
        from transformers import LlamaConfig

        heads = max(2, self.hidden // HEAD)
        return LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=-(-8 * self.hidden // (3 * 256)) * 256,
            num_hidden_layers=self.layers, num_attention_heads=heads, num_key_value_heads=heads,
            max_position_embeddings=max(2048, self.seq), bos_token_id=None, eos_token_id=None, dtype="bfloat16",
        )  # fmt: skip

    def base(self) -> Any:
        """The model without memory and without adapters."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config(), dtype=torch.bfloat16)

    def adapted(self, base: Any) -> Any:
        """The model with its adapters, which PEFT makes in fp32."""
        from peft import LoraConfig, get_peft_model

        return get_peft_model(base, LoraConfig(r=self.rank, target_modules=list(self.targets))).train()

    def tokens(self) -> RandomTokens:
        """Without end, batches of [B, T] words."""
        size = Size(layers=self.layers, width=self.hidden, heads=1, vocabulary=self.vocabulary, context=self.seq)
        return RandomTokens(size, batch=self.batch, length=self.seq - 1)


def write_weights(directory: Path, setting: Setting) -> int:
    """Writes the model's folder, with one file of random weights; returns their bytes."""
    shapes = {name: param.shape for name, param in setting.base().named_parameters()}
    generator = torch.Generator().manual_seed(0)

    def draw(name: str, shape: torch.Size) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return torch.empty(shape, dtype=torch.bfloat16).normal_(std=INIT_STD, generator=generator)

    tensors = [TensorToWrite(n, torch.bfloat16, s, lambda n=n, s=s: draw(n, s)) for n, s in shapes.items()]
    write_directory(directory, tensors, max_shard_bytes=1 << 62)
    setting.config().save_pretrained(directory)
    return sum(2 * shape.numel() for shape in shapes.values())


def start_adapters(model: Any) -> None:
    """Sets the adapters' first weights, so that every contestant begins with the same."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in sorted(model.named_parameters()):
            if "lora_A" in name:
                param.copy_(torch.empty(param.shape).normal_(std=INIT_STD, generator=generator))


class Adapted(pl.LightningModule):
    """The model as a user would write it.

    Args:
        setting: What it is.
        weights: A folder whose weights it takes into memory; ``None``: it stays on the meta device,
            and the strategy has the folder.
    """

    def __init__(self, setting: Setting, weights: Path | None = None) -> None:
        super().__init__()
        self.setting, self.weights = setting, weights
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            base = self.setting.base() if self.weights is None else in_memory(self.weights)
            self.model = self.setting.adapted(base)

    def on_train_start(self) -> None:
        start_adapters(self.model)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)

    def loader(self) -> DataLoader[Tensor]:
        """Its batches."""
        return DataLoader(self.setting.tokens(), batch_size=None)


def in_memory(weights: Path) -> Any:
    """The model with all of its weights in memory, none of them mapped from the file."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    for param in model.parameters():
        param.data = param.data.clone()
    return model
