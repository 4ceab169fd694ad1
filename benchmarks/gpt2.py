"""The benchmarks' model: GPT-2 as in its paper, in plain torch and Lightning, on random tokens.

Shapes: B batch, T tokens, C width, H heads, V vocabulary.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

INIT_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The numbers that make a GPT-2."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    context: int = 1024


SIZES = {
    "tiny": Size(layers=3, width=64, heads=2, vocabulary=257, context=128),
    "gpt2-124m": Size(layers=12, width=768, heads=12),
    "gpt-1.3b": Size(layers=24, width=2048, heads=32, context=2048),
}


class Linear(nn.Linear):
    """A linear layer that starts as GPT-2's do."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding that starts as GPT-2's do."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class Layer(nn.Module):
    """Attention and MLP, normalized before each: [B, T, C] -> [B, T, C]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1 = nn.LayerNorm(size.width)
        self.qkv = Linear(size.width, 3 * size.width)
        self.project = Linear(size.width, size.width)
        self.norm_2 = nn.LayerNorm(size.width)
        self.up = Linear(size.width, 4 * size.width)
        self.down = Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        x = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return x

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))  # [B, H, T, C / H]
        mixed: Tensor = self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return mixed


class Transformer(nn.Module):
    """[B, T] tokens -> [B, T, V] logits; the head is the embedding's transpose."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = Embedding(size.vocabulary, size.width)
        self.position = Embedding(size.context, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of [B, T + 1] tokens."""
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class GPT2(pl.LightningModule):
    """The model with its loss and torch's fused AdamW, as a user would write it.

    Args:
        size: The model's size.
        meta: Build the model without memory: the strategy initializes it, block by block.
    """

    def __init__(self, size: Size, *, meta: bool = False) -> None:
        super().__init__()
        self.size, self.meta = size, meta
        self.model: Transformer | None = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta") if self.meta else nullcontext():
                self.model = Transformer(self.size)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        return self.model.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class RandomTokens(IterableDataset[Tensor]):
    """Without end, one batch of [B, T + 1] random tokens after the other."""

    def __init__(self, size: Size, *, batch: int, length: int, seed: int = 0) -> None:
        if length > size.context:
            raise ValueError(f"{length} tokens; allowed: {size.context}, the model's context. Pass a smaller --seq.")
        self.size, self.batch, self.length, self.seed = size, batch, length, seed

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield torch.randint(self.size.vocabulary, (self.batch, self.length + 1), generator=generator)


def add_model_options(parser: argparse.ArgumentParser, *, model: str, batch: int = 1, seq: int = 128) -> None:
    """What is trained on how much at once, with these defaults."""
    parser.add_argument("--model", choices=SIZES, default=model)
    parser.add_argument("--layers", type=int, help="another number of layers than the model has; 56 of gpt-1.3b make 3 billion")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--seq", type=int, default=seq)


def find_size(model: str, layers: int | None = None) -> Size:
    """A size by its name, with another number of layers if asked for."""
    return SIZES[model] if layers is None else replace(SIZES[model], layers=layers)


def num_params(size: Size) -> int:
    """Parameters of the model, counted without making it."""
    with torch.device("meta"):
        rest, layer = Transformer(replace(size, layers=0)), Layer(size)
    return sum(p.numel() for p in rest.parameters()) + size.layers * sum(p.numel() for p in layer.parameters())


def fit(trainer: pl.Trainer, module: GPT2, *, batch: int, length: int, seed: int = 0, **options: Any) -> None:
    """Trains on random tokens, until the Trainer stops; options are those of ``Trainer.fit``."""
    tokens = RandomTokens(module.size, batch=batch, length=length, seed=seed)
    trainer.fit(module, DataLoader(tokens, batch_size=None), **options)


def make_trainer(**options: Any) -> pl.Trainer:
    """A Trainer that does nothing but train, and says nothing."""
    return pl.Trainer(**quiet_options(**options))


def quiet_options(**options: Any) -> dict[str, Any]:
    """The options of such a Trainer; silences Lightning's log too."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "max_epochs": 1,
    }  # fmt: skip
    return {**quiet, **options}
