"""One rank beside one process that has the batches of all ranks as one: a script.

See ``tests/integration/test_global_batch.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero.strategies import HeteroOffloadStrategy

WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
BATCH, STEPS, WIDTH = 2, 8, 24
DATA = torch.randint(0, 13, (BATCH * STEPS * WORLD, 7), generator=torch.Generator().manual_seed(3))

# Bounds of docs/several-devices.md: for each precision, relative to the largest of its kind.
BOUNDS = {  # gradients and loss of one step; losses of 8 AdamW steps; weights after them
    "64-true": (1e-12, 1e-10, 1e-10),
    "32-true": (2e-6, 1e-6, 5e-6),
    "bf16-mixed": (3e-2, 2e-3, 5e-2),
}


class Layer(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(pl.LightningModule):
    """A language model. SGD with a rate this large makes gradients of weights."""

    def __init__(self, adam: bool) -> None:
        super().__init__()
        self.adam, self.losses = adam, list[float]()
        self.embed, self.head = nn.Embedding(13, WIDTH), nn.Linear(WIDTH, 13)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        x = self.embed(batch[:, :-1])
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), lr=2.0**20)


def trained(strategy: Any, devices: int, data: Tensor, batch: int, precision: str, out: Path, *, adam: bool) -> Model:
    """The model after one step of SGD, or some of AdamW."""
    torch.manual_seed(5)
    model = Model(adam)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, precision=precision, max_steps=STEPS if adam else 1, max_epochs=1,
        use_distributed_sampler=False, default_root_dir=out, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch))
    return model


def alone(*arguments: Any, **options: Any) -> Model:
    """The same in one process, which knows nothing of others."""
    kept = {name: os.environ.pop(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK") if name in os.environ}
    try:
        return trained("auto", 1, *arguments, **options)
    finally:
        os.environ.update(kept)


def difference(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The largest one, relative to the largest number of each tensor."""
    pairs = [(one.double(), other.double()) for one, other in zip(ours, theirs, strict=True)]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def mean_losses(model: Model) -> Tensor:
    """Of all ranks, step by step: the loss of the global batch."""
    losses = torch.tensor(model.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    return losses / WORLD


def is_near_one_process(out: Path, precision: str) -> None:
    """Gradients, losses and weights are within the bounds."""
    found = []
    for adam in (False, True):
        strategy = HeteroOffloadStrategy("host", block_cls="Layer")
        ours = trained(strategy, WORLD, DATA[RANK::WORLD], BATCH, precision, out, adam=adam)
        one = alone(DATA, BATCH * WORLD, precision, out, adam=adam)
        torch.manual_seed(5)
        begin = Model(adam).to(next(one.parameters()).dtype)
        weights = [list(model.parameters()) for model in (ours, one, begin)]
        found.append(difference([mean_losses(ours)], [torch.tensor(one.losses, dtype=torch.float64)]))
        if adam:
            found.append(difference(weights[0], weights[1]))
        else:
            gradients = [[start - end for start, end in zip(weights[2], ends, strict=True)] for ends in weights[:2]]
            found[-1] = max(found[-1], difference(*gradients))
    print(f"{precision} on {WORLD} ranks: {found}")
    for got, allowed in zip(found, BOUNDS[precision], strict=True):
        assert 0 <= got <= allowed, (precision, found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        is_near_one_process(Path(sys.argv[1]), name)
    print("ok", flush=True)
    dist.barrier()
    dist.destroy_process_group()
