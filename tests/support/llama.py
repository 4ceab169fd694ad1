"""A small Llama of Hugging Face as a LightningModule, from its constructor or from a directory of
safetensors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = 67


def config(*, tied: bool = False, layers: int = 3) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=WORDS, hidden_size=24, intermediate_size=40, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip


def save(directory: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A directory as ``save_pretrained`` writes it."""
    torch.manual_seed(3)
    LlamaForCausalLM(config(tied=tied)).to(dtype).save_pretrained(directory, **options)
    return directory


class LitLlama(pl.LightningModule):
    """Built in ``configure_model`` by ``build``."""

    def __init__(self, build: Callable[[], Any]) -> None:
        super().__init__()
        self.build = build
        self.model: Any = None
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build().train()

    def loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.losses.append(loss.detach())
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def from_directory(directory: Path) -> LitLlama:
    """The whole model in memory, as transformers loads it."""
    return LitLlama(lambda: LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32))


def on_meta(**options: Any) -> LitLlama:
    """The model without memory."""

    def build() -> LlamaForCausalLM:
        with torch.device("meta"):
            return LlamaForCausalLM(config(**options))

    return LitLlama(build)


def batches() -> Any:
    return DataLoader(torch.randint(0, WORDS, (12, 6), generator=torch.Generator().manual_seed(0)), batch_size=2)


class LitAdapters(LitLlama):
    """Only what has a gradient is given to the optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, fused=True)


def base_in_memory(directory: Path) -> Any:
    """The model that adapters are for, as transformers loads it."""
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)


def base_on_meta() -> Any:
    """The same without memory."""
    with torch.device("meta"):
        return LlamaForCausalLM(config())
