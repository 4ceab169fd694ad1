"""Train a small Vision Transformer on scikit-learn's handwritten digits, with its state on an SSD.

    # in this repository:
    pip install ".[examples]"
    python examples/vit_digits.py
    # the same weights, without offloading:
    python examples/vit_digits.py --strategy auto

The images come with scikit-learn: 1,797 digits of 8 x 8 pixels. Model, data and loop are ordinary
PyTorch and Lightning; this is what a model of your own looks like. With `--verify 3` the first
three steps are computed again without offloading, and all bits are compared.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_hetero import HeteroOffloadStrategy

SIDE, CLASSES = 8, 10


class ViT(L.LightningModule):
    def __init__(self, width: int = 64, layers: int = 4, heads: int = 4, patch: int = 2, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.patches = nn.Conv2d(1, width, kernel_size=patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn(1, (SIDE // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, dim_feedforward=4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images of shape [batch, 1, 8, 8]."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.encoder(tokens).mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        loss = nn.functional.cross_entropy(self(images), digits)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, digits = batch
        self.log("accuracy", (self(images).argmax(1) == digits).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], fused=True)


class Digits(L.LightningDataModule):
    """Four fifths of the images to train, the rest to validate."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        data = TensorDataset(images, torch.tensor(digits.target))
        self.parts = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[list[Tensor]]:
        return DataLoader(self.parts[0], self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[list[Tensor]]:
        return DataLoader(self.parts[1], self.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images (default: 10)")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--strategy", choices=["hetero_offload", "auto"], default="hetero_offload")
    parser.add_argument("--plan", default="disk", help="auto, resident, host, disk, or the path of a plan (default: disk)")
    parser.add_argument("--host-memory", help="budget for weights, gradients and state (default: what is free)")
    parser.add_argument("--verify", type=int, default=0, help="steps to compare bit for bit (default: none)")
    options = parser.parse_args()

    L.seed_everything(0)
    strategy: HeteroOffloadStrategy | str = options.strategy
    if strategy == "hetero_offload":
        strategy = HeteroOffloadStrategy(plan=options.plan, host_memory=options.host_memory, verify=options.verify)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    model = ViT(options.width, options.layers)
    trainer.fit(model, Digits())

    metrics = trainer.callback_metrics
    print(f"parameters       {sum(p.numel() for p in model.parameters()):,}")
    print(f"last loss        {metrics['train_loss']:.6f}")
    print(f"accuracy         {metrics['accuracy']:.1%} of the images that were held out, after {trainer.global_step} steps")
    if isinstance(strategy, HeteroOffloadStrategy):
        print(f"on disk          {strategy.memory_report()['disk_bytes'] / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
