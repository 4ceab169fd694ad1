"""Pretrain a small GPT on the text behind Python's `help()`, larger than the memory it may take.

    # in this repository:
    pip install .
    python examples/pretrain_gpt.py
    # 341 million parameters in 1 GiB; in memory they would take 5.5 GB:
    python examples/pretrain_gpt.py --layers 27 --width 1024 --host-memory 1GiB --steps 3

The model is built on the meta device, so it never is in memory as a whole: each layer gets its
initial values where the plan has it. Model, data and loop are ordinary PyTorch and Lightning.
"""

from __future__ import annotations

import argparse
import resource
from pydoc_data.topics import topics

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroOffloadStrategy

BYTES = 256  # the vocabulary


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Of shape [batch, sequence, width]."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(L.LightningModule):
    def __init__(self, width: int = 256, layers: int = 8, heads: int = 8, sequence: int = 128) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            width, sequence = self.hparams["width"], self.hparams["sequence"]
            with torch.device("meta"):
                self.net = nn.ModuleDict(
                    {
                        "tokens": nn.Embedding(BYTES, width),
                        "places": nn.Embedding(sequence, width),
                        "blocks": nn.Sequential(*[Block(width, self.hparams["heads"]) for _ in range(self.hparams["layers"])]),
                        "head": nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES)),
                    }
                )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (text,) = batch
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.net["tokens"](inputs) + self.net["places"](torch.arange(inputs.shape[1]))
        loss = F.cross_entropy(self.net["head"](self.net["blocks"](x)).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Text(L.LightningDataModule):
    """The text as windows of `sequence + 1` bytes."""

    def __init__(self, sequence: int = 128, batch_size: int = 8) -> None:
        super().__init__()
        self.length, self.batch_size = sequence + 1, batch_size

    def train_dataloader(self) -> DataLoader[list[Tensor]]:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        count = len(text) // self.length
        rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: count * self.length].view(-1, self.length).long()
        return DataLoader(TensorDataset(rows), batch_size=self.batch_size, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128, help="bytes of a sequence (default: 128)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step (default: 8)")
    parser.add_argument("--host-memory", default="96MiB", help="budget for weights, gradients and state (default: 96MiB)")
    parser.add_argument("--plan", default="auto", help="auto, host, disk, or the path of a plan (default: auto)")
    options = parser.parse_args()

    L.seed_everything(0)
    model = GPT(options.width, options.layers, options.heads, options.sequence)
    strategy = HeteroOffloadStrategy(plan=options.plan, host_memory=options.host_memory)
    losses: list[float] = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
            losses.append(float(trainer.callback_metrics["train_loss"]))

    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=options.steps,
        gradient_clip_val=1.0,
        callbacks=[Losses()],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, Text(options.sequence, options.batch))

    count = sum(p.numel() for p in model.parameters())
    report = strategy.memory_report()
    print(f"parameters       {count / 1e6:.1f} M; in memory {16 * count / 2**20:.0f} MiB with gradients and Adam's state")
    print(f"loss             {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte after {trainer.global_step} steps")
    print(f"on disk          {report['disk_bytes'] / 2**20:.0f} MiB, within {options.host_memory} of memory")
    print(f"host peak        {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB for the whole process")


if __name__ == "__main__":
    main()
