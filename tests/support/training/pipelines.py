"""One rank of pipelines that train together, or the one process that they are compared with.

Runs every scenario through ``Trainer.fit`` and saves the results. With the file of a checkpoint as
an argument, it goes on from there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import LocalFirst
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.ir.cluster import LayerTimes
from lightning_hetero.ir.cluster_plan import ClusterPlan, GroupPlan, StagePlan
from lightning_hetero.parallel import StagedSteps
from lightning_hetero.parallel.pipeline import automatic
from lightning_hetero.parallel.pipeline.synchronise import local
from lightning_hetero.strategies import HeteroParallelStrategy
from support.training import RANK, WORLD, loader, lr_of, moments_of, trainer, whole

WORDS, WIDTH, LENGTH, BATCH = 13, 8, 5, 2
PADDING = 0
Layers = tuple[int, ...]


def cluster_plan(*groups: tuple[int, Layers], tensor_parallel: int = 1, nodes: Sequence[str] = ()) -> ClusterPlan:
    """A plan of groups ``(micro-batches, layers of each stage)``, all on one node, or each on one
    of ``nodes``.
    """

    def stage(node: str, layers: int) -> StagePlan:
        return StagePlan(node=node, device="cpu", layers=layers, micro_batch_s=1.0, memory_bytes=0)

    return ClusterPlan(
        name="test",
        tensor_parallel=tensor_parallel,
        tokens=1,
        iteration_s=1.0,
        sync_s=0.0,
        utilisation=1.0,
        groups=tuple(
            GroupPlan(micro_batches=k, seconds=1.0, stages=tuple(stage(node, n) for n in layers))
            for (k, layers), node in zip(groups, nodes or ["node0"] * len(groups), strict=True)
        ),
    )


class Embedding(nn.Module):
    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.tokens = tokens
        self.register_buffer("scale", torch.tensor([3.0]))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) * self.scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mix = nn.Linear(LENGTH, LENGTH, bias=False)  # a bias would be lost in every norm, its gradient nothing but rounding

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Net(StagedSteps, pl.LightningModule):
    """A small transformer without attention, tied embeddings, whose loss counts tokens that are not
    padding.
    """

    padding = PADDING

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        tokens = nn.Embedding(WORDS, WIDTH)
        self.embedding, self.head = Embedding(tokens), Head(tokens)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.lr = lr

    def stage_layers(self) -> nn.ModuleDict:
        blocks = {f"block{i}": block for i, block in enumerate(self.blocks)}
        return nn.ModuleDict({"embedding": self.embedding, **blocks, "head": self.head})

    def loss_sum(self, output: Tensor, batch: Any) -> Any:
        targets = batch[1]
        loss = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=self.padding)
        known = targets != self.padding
        name = "seen" if self.training else "unseen"  # training and evaluation may have other sums
        return loss, known.sum(), {name: ((output.argmax(-1) == targets) & known).sum()}

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class Counting(Net):
    """Counts every token, so that samples weigh the same, as data parallelism has it."""

    padding = -100


class Thawing(Net):
    """Its first layers, all of some stages, are frozen but for the second step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for layer in (self.embedding, *self.blocks[:4]):
            layer.requires_grad_(self.trainer.global_step == 1)


class Dropping(nn.Module):
    """A block with dropout before and inside of what ranks of a stage share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.dropout(self.up(self.drop(x)), 0.5, self.training))


class DroppingNet(Net):
    """Its layers draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropping() for _ in range(6))


class Whole(Block):
    """A block that does not run on shards."""

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self.up.weight, "to_local"):
            raise ValueError("no shards")
        return super().forward(x)


class WholeNet(Net):
    """Its layers look as if they could be shared."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Whole() for _ in range(6))


class MeanNet(Net):
    """Its loss cannot be added up."""

    def loss_sum(self, output: Tensor, batch: Any) -> Any:
        loss, count, _ = super().loss_sum(output, batch)
        return loss / count, count


class Notes(Callback):
    """What happened, batch by batch: losses, and gradients of the parameters that are here, as the
    optimizer sees them.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.val: list[float] = []
        self.began: dict[str, Tensor] = {}
        self.random = torch.empty(0)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.random = torch.get_rng_state()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.began = {f"state_dict.{name}": value for name, value in held(module).items()}
        state = trainer.optimizers[0].state
        for name, parameter in module.named_parameters():
            self.began |= {f"optimizer_0.state.{name}.{key}": whole(value) for key, value in state.get(parameter, {}).items()}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients.append({name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None})

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.val.append(float(trainer.callback_metrics["val_loss"]))


def held(module: Any) -> dict[str, Tensor]:
    """The weights and buffers that this rank has; others are expanded from one element."""
    return {name: whole(value) for name, value in module.state_dict().items() if any(value.stride())}


def data(samples: int, *, step: int, alone: bool, seed: int = 7) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (samples, LENGTH + 1), generator=generator)
    dataset = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    unseen = TensorDataset(tokens[:11, 1:], tokens[:11, :-1])
    return loader(dataset, step if alone else BATCH, alone=alone, drop_last=True), DataLoader(unseen, batch_size=3)


def fit(
    out: Path,
    name: str,
    plan: ClusterPlan | str | None,
    *,
    micro_batches: int | None = None,
    step: int = 24,
    resume: str | None = None,
    dtype: Any = torch.float64,
    net: type[Net] = Net,
    node: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains; by no plan as one process, as data parallelism by ``"equal"``; with ``node`` its
    folder keeps copies.
    """
    torch.manual_seed(RANK if plan else 0)  # all ranks have other weights; those of rank 0 count
    module = net().to(dtype)
    notes = Notes()
    train, val = data(80, step=step, alone=plan is None, seed=RANK if name == "datasets" else 7)
    checkpoint = ModelCheckpoint(
        dirpath=out / f"{name}-{WORLD}",
        filename="{step}",
        save_top_k=-1,
        monitor="val_loss" if name == "plain" else None,
        save_on_train_epoch_end=name != "plain",
    )
    elastic = "TORCHELASTIC_RUN_ID" in os.environ
    strategy: Any = "auto"
    if plan == "equal":
        strategy = HeteroParallelStrategy(global_batch_size=step, rebalance_every=0)
    elif plan:
        strategy = HeteroParallelStrategy(plan=plan, micro_batches=micro_batches)
    local_first = [] if node is None else [LocalFirst(memory=out / "nodes" / node, keep=9, piece_bytes=256)]
    if elastic:
        options |= {"devices": 2, "num_nodes": 2} if plan else {}
    limit = 1.0 if name in ("plain", "resumed") else 0
    callbacks = [notes, checkpoint]
    made = trainer(out, strategy, *local_first, callbacks=callbacks, num_sanity_val_steps=1, limit_val_batches=limit, **options)
    made.fit(module, train, val, ckpt_path=resume)
    found = {
        "weights": held(module),
        "state": moments_of(made, "exp_avg_sq"),
        "local": {n: tuple(local(p).shape) for n, p in module.named_parameters()},
        "losses": notes.losses,
        "gradients": notes.gradients,
        "val": notes.val,
        "metrics": dict(made.callback_metrics),
        "plan": getattr(strategy, "plan", None),
        "began": notes.began,
        "random": notes.random,
        "bytes": local_first[0].bytes_read if local_first else {},
        "best": checkpoint.best_model_path,
        "lr": lr_of(made),
    }
    if name == "plain":
        validated = made.validate(module, val, ckpt_path=checkpoint.best_model_path, verbose=False)
        found["after"] = [*validated, *made.test(module, [val, val], verbose=False)]
    return found


# Depths 3, 2 and 1, boundaries nowhere the same, micro-batches 3, 5 and 4.
PLANS = {
    6: cluster_plan((3, (1, 2, 3)), (5, (4, 2)), (4, (6,))),
    3: cluster_plan((7, (5, 1)), (5, (6,)), nodes=("a", "b")),
    1: None,
}
SHARDED = cluster_plan((5, (2, 4)), (7, (6,)), tensor_parallel=2)
IDLE = replace(cluster_plan((12, (2, 4)), nodes=("a",)), idle={"b": 1})
SHARED = replace(cluster_plan((12, (6,)), tensor_parallel=2, nodes=("a",)), idle={"b": 1})
NODES = ("node1", "node4", "new")  # of the three that go on from what six nodes kept


def measured(faster: float) -> Any:
    """Measures, and says that each rank more makes layers so many times faster."""
    measure = automatic.layer_times

    def times(layers: Any, *args: Any, tensor_parallel: int, **options: Any) -> LayerTimes:
        found = measure(layers, *args, tensor_parallel=tensor_parallel, **options)
        return replace(found, seconds=tuple(2**n * faster ** (1 - tensor_parallel) for n in range(len(found.seconds))))

    return times


def main(folder: Path, checkpoint: str | None = None) -> None:
    plan = PLANS[WORLD]
    if checkpoint is not None:
        node = NODES[RANK] if plan else None  # LocalFirst reads an ordinary checkpoint, too
        out = {"resumed": fit(folder, "resumed", plan, max_epochs=2, resume=checkpoint, node=node)}
        kept: dict[str, tuple[str, Any]] = {"layers": ("layers", plan), "equal": ("layers", "equal"), "shared": ("layers", SHARED)}
        for name, (saved, other) in (kept if plan else {"shards": ("shards", None)}).items():
            path = str(folder / f"{saved}-6" / "step=3.ckpt")
            out[name] = fit(folder, name, other, net=Counting, max_epochs=2, resume=path, node=NODES[RANK])
        if plan:  # as many ranks by another plan
            path = str(folder / "layers-3" / "step=6.ckpt")
            out["again"] = fit(folder, "again", SHARED, net=Counting, max_steps=7, resume=path, node=NODES[RANK])
        if plan:
            out["refused"] = {}
            for name, net, options in (
                ("mean", MeanNet, {}), ("samplers", Net, {"use_distributed_sampler": False}), ("datasets", Net, {}),
            ):  # fmt: skip
                try:
                    fit(folder, name, plan, net=net, max_steps=1, **options)
                except UnsupportedError as error:
                    out["refused"][name] = str(error)
            out["idle"] = fit(folder, "idle", IDLE, max_steps=3, gradient_clip_val=0.05)
            out["values"] = fit(folder, "values", SHARED, max_steps=3, gradient_clip_val=0.001, gradient_clip_algorithm="value")
            slower, faster = measured(faster=0.1), measured(faster=10)
            automatic.layer_times, automatic.memory_bytes = slower, lambda device: 140_000
            out["auto"] = fit(folder, "auto", "auto", max_steps=3, micro_batches=12)
            automatic.memory_bytes, automatic.bandwidth = lambda device: 1_000_000, lambda device, group=None: 1e12
            out["fits"] = fit(folder, "fits", "auto", max_steps=1)
            automatic.layer_times = faster
            out["whole"] = fit(folder, "whole", "auto", net=WholeNet, max_steps=1)
            out["together"] = fit(folder, "together", "auto", max_steps=3, micro_batches=12, gradient_clip_val=0.05)
        torch.save(out, folder / f"resumed{WORLD}-rank{RANK}.pt")
        return
    out = {
        "plain": fit(folder, "plain", plan, max_epochs=2),
        "clipped": fit(folder, "clipped", plan, max_steps=3, gradient_clip_val=0.05),
        "accumulated": fit(folder, "accumulated", plan, max_epochs=1, accumulate_grad_batches=2),
        "thawed": fit(folder, "thawed", plan, net=Thawing, max_steps=3),
        "sharded": fit(folder, "sharded", SHARDED if plan else None, max_steps=3, gradient_clip_val=0.05),
        "dropout": fit(folder, "dropout", SHARDED if plan else None, net=DroppingNet, max_steps=2),
        "bf16": fit(folder, "bf16", plan, dtype=torch.float32, max_steps=2, precision="bf16-mixed"),
        "layers": fit(folder, "layers", plan, net=Counting, max_epochs=1 if plan else 2, node=f"node{RANK}" if plan else None),
    }
    if plan is None:
        out["values"] = fit(folder, "values", None, max_steps=3, gradient_clip_val=0.001, gradient_clip_algorithm="value")
    else:
        out["shards"] = fit(folder, "shards", SHARDED, net=Counting, max_epochs=1, node=f"node{RANK}")
    torch.save(out, folder / f"world{WORLD}-rank{RANK}.pt")
