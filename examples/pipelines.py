"""A small language model in pipelines of different depth.

A group of two devices and a group of one device train it together.

    torchrun --nproc-per-node=3 pipelines.py fit --config configs/pipelines.yaml

The plan, configs/pipelines_plan.json, has the form of `lightning-hetero plan-cluster`, but was
written by hand for three processes on one machine. Variants:

* `--trainer.strategy.init_args.plan auto` makes a plan for the current ranks.
* `--trainer.strategy auto --trainer.devices 1`, without torchrun, trains the same module with
  another strategy.
* `--trainer.strategy.init_args.plan null` with
  `--trainer.strategy.init_args.offload '{0: {plan: disk}}'` gives every process the whole model;
  the first one keeps it on disk.
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import ArgsType, LightningCLI
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.parallel import StagedSteps


class Embedding(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.attention_norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self, embedding: Embedding, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.out.weight = embedding.tokens.weight  # tied: on the first stage of a pipeline and on its last

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class LanguageModel(StagedSteps, pl.LightningModule):
    """Next bytes of Python's own documentation.

    Args:
        layers: Blocks.
        width: Width of the hidden states.
        length: Bytes of a sample.
        lr: Learning rate.
    """

    def __init__(self, layers: int = 6, width: int = 64, length: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.embedding = Embedding(width, length)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.head = Head(self.embedding, width)
        nn.init.normal_(self.embedding.tokens.weight, std=0.02)
        self.lr = lr

    def stage_layers(self) -> nn.ModuleDict:
        blocks = {f"block{i}": block for i, block in enumerate(self.blocks)}
        return nn.ModuleDict({"embedding": self.embedding, **blocks, "head": self.head})

    def stage_inputs(self, batch: Any) -> Tensor:
        return batch[0][:, :-1]

    def loss_sum(self, output: Tensor, batch: Any) -> Any:
        targets = batch[0][:, 1:]
        right = (output.argmax(-1) == targets).sum()
        return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel(), {"accuracy": right}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def on_validation_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.print(f"step {self.global_step}: val_loss {metrics['val_loss']:.3f}, val_accuracy {metrics['val_accuracy']:.3f}")


class Documentation(pl.LightningDataModule):
    """Bytes of ``pydoc``'s topics.

    Args:
        batch_size: Samples of a micro-batch.
        length: Bytes of a sample.
    """

    def __init__(self, batch_size: int = 4, length: int = 64) -> None:
        super().__init__()
        self.batch_size, self.length = batch_size, length

    def setup(self, stage: str) -> None:
        text = "".join(topics[name] for name in sorted(topics)).encode()
        size = self.length + 1
        samples = torch.frombuffer(bytearray(text[: len(text) // size * size]), dtype=torch.uint8).view(-1, size).long()
        self.train, self.val = TensorDataset(samples[:-64]), TensorDataset(samples[-64:])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=self.batch_size)


def main(args: ArgsType = None) -> LightningCLI:
    return LightningCLI(LanguageModel, Documentation, seed_everything_default=0, save_config_callback=None, args=args)


if __name__ == "__main__":
    main()
