"""One rank of a test of ``hetero_offload`` on several devices: a script.

See ``tests/integration/test_shared_model.py``. The reference is plain torch in one process: each
rank's gradients of each batch, their mean in float64 in the order of the ranks, rounded once, and
torch's own AdamW on whole tensors.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero.errors import HeteroError, OffloadedAccessError, UnsupportedError
from lightning_hetero.strategies import HeteroOffloadStrategy

WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
BATCH, STEPS = 2, 4
DATA = torch.randint(0, 13, (BATCH * STEPS * WORLD, 7), generator=torch.Generator().manual_seed(3))


class Layer(nn.Module):
    """A block whose parameters are cut by slices; ``rare`` is used by some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.rare = nn.Linear(30, 67), nn.Linear(67, 30), nn.LayerNorm(30), nn.Linear(30, 30)

    def forward(self, x: Tensor, rarely: bool) -> Tensor:
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        return x + self.rare(x) if rarely else x


class Model(pl.LightningModule):
    """A language model; ``kind`` chooses what is special about it."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.losses, self.seen = kind, [], []
        self.embed, self.head = nn.Embedding(13, 30), nn.Linear(30, 13)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.register_buffer("offset", torch.full((1,), float(RANK)))
        if kind == "frozen":
            self.layers[1].requires_grad_(False)
            self.layers[2].up.requires_grad_(False)
            self.embed.requires_grad_(False)
        if kind == "tied":
            self.head.weight = self.embed.weight

    def loss(self, batch: Tensor, index: int) -> Tensor:
        """The batch's loss; batches of ranks and steps differ in what they use."""
        x, rarely = self.embed(batch[:, :-1]) + self.offset, self.kind == "rare" and int(batch.sum()) % 3 == 0
        for number, layer in enumerate(self.layers):
            skips = (self.kind == "skips" and index == 1 and number == 2) or (self.kind == "apart" and RANK == 1 and number == 1)
            x = x if skips else layer(x, rarely)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.loss(batch, index)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("validated", self.loss(batch, index), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() < 2]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-2, fused=True)


class Looks(pl.Callback):
    """Looks at what a rank has between two batches."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        blocks, follows = trainer.strategy.session.blocks, trainer.strategy.session.running.schedule is not None
        for part in [part for block in blocks for part in block.parts]:
            own = part.run.view(WORLD, -1)
            if follows and not part.block.spec.pinned and not part.is_whole:
                others = own[[rank for rank in range(WORLD) if rank != RANK]]
                assert not others.count_nonzero() or others.isnan().all(), "pages of others are gone, or poisoned"
                module.seen.append(part.names[0])
            assert part.native is None or part.native.geometry.num_elements == own.shape[1]
        if not blocks[1].parts[0].is_whole:
            with pytest.raises(OffloadedAccessError, match=f"spread over {WORLD} ranks"):
                module.layers[0].up.weight.sum()


def trainer(out: Path, strategy: Any = None, **flags: Any) -> pl.Trainer:
    """A Trainer on as many devices as there are ranks."""
    strategy = strategy or HeteroOffloadStrategy("host", block_cls="Layer", update_threads=1)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    return pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        default_root_dir=out,
        max_epochs=1,
        use_distributed_sampler=False,
        **quiet | flags,
    )


def model(kind: str = "", seed: int = 5) -> Model:
    """A model; other seeds give other weights."""
    torch.manual_seed(seed)
    return Model(kind)


def reference(kind: str, accumulate: int = 1, clip: float | None = None) -> Model:
    """The model after the same steps in one process."""
    plain = model(kind)
    plain.offset.zero_()  # the first rank's
    optimizer = plain.configure_optimizers()
    for step in range(STEPS):
        means: dict[nn.Parameter, Tensor] = {}
        every = []
        for rank in range(WORLD):
            batch = DATA[rank::WORLD][step * BATCH : (step + 1) * BATCH]
            for param in plain.parameters():
                param.grad = None
            loss = plain.loss(batch, step)
            (loss / accumulate).backward()
            every.append({p: p.grad for p in plain.parameters() if p.grad is not None})
            if rank == RANK:
                plain.losses.append(loss.item())
        for param in dict.fromkeys(p for one in every for p in one):
            total = sum(one[param].double() if param in one else torch.zeros_like(param, dtype=torch.float64) for one in every)
            means[param] = (total / WORLD).to(param.dtype)
        for param in plain.parameters():
            param.grad = None
        kept = plain.__dict__.setdefault("_kept", {})
        for param, mean in means.items():
            kept[param] = mean if param not in kept else kept[param] + mean
        if (step + 1) % accumulate:
            continue
        for param, mean in kept.items():
            param.grad = mean
        if clip is not None:
            given = [p for group in optimizer.param_groups for p in group["params"]]
            grads = [p.grad for p in given if p.grad is not None]
            norms = [torch.tensor(math.sqrt(float(g.double().square().sum()))) for g in grads]
            torch.nn.utils.clip_grads_with_norm_(given, clip, torch.stack(norms).norm())
        optimizer.step()
        kept.clear()
    return plain


def same(got: Model, wanted: Model) -> None:
    """Both have the same losses and weights, bit for bit."""
    assert got.losses == wanted.losses, (got.kind, got.losses, wanted.losses)
    for (name, param), other in zip(got.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(param, other), (name, (param - other).abs().max())


def is_as_in_one_process(out: Path) -> None:
    """Every kind of batch and model trains as the reference does."""
    for kind, accumulate, clip in [
        ("", 1, None), ("", 2, 0.3), ("frozen", 1, None), ("tied", 1, 0.3), ("rare", 2, None), ("skips", 1, None), ("skips", 1, 0.3)
    ]:  # fmt: skip
        shared = model(kind, seed=5 + RANK)  # the first rank's weights count
        flags = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
        trainer(out, callbacks=[Looks()], **flags).fit(shared, DataLoader(DATA[RANK::WORLD], BATCH))
        same(shared, reference(kind, accumulate, clip))
        assert shared.seen, "a rank has slices"


def is_as_under_ddp(out: Path) -> None:
    """Two ranks: the bits of Lightning's own DDP, with clipping by value, bf16 and validation."""
    for flags in ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"precision": "bf16-mixed"}):
        runs = []
        for strategy in (None, "ddp_find_unused_parameters_true"):
            one = model()
            run = trainer(out, strategy, val_check_interval=2, **flags)
            run.fit(one, DataLoader(DATA[RANK::WORLD], BATCH), DataLoader(DATA[RANK::WORLD], BATCH))
            runs.append((one, run.callback_metrics["validated"]))
        same(runs[0][0], runs[1][0])
        assert torch.equal(runs[0][1], runs[1][1])


def saves_weights(out: Path) -> None:
    """After the fit all ranks have all weights; optimizer state is refused. The log has shares."""
    shared = model()
    run, said = trainer(out, max_steps=1), io.StringIO()
    logging.getLogger("lightning_hetero").addHandler(logging.StreamHandler(said))
    run.fit(shared, DataLoader(DATA[RANK::WORLD], BATCH))
    assert ("2 ranks hold the model together" in said.getvalue()) is (RANK == 0), said.getvalue()
    assert "nothing to gain" not in said.getvalue()
    run.save_checkpoint(out / "weights.ckpt", weights_only=True)
    saved = torch.load(out / "weights.ckpt")["state_dict"]
    assert all(torch.equal(saved[name], param) for name, param in shared.named_parameters())
    with pytest.raises(UnsupportedError, match="weights_only=True"):
        run.save_checkpoint(out / "all.ckpt")


def goes_apart(out: Path) -> None:
    """Ranks whose batches use other blocks say so, and do not wait for each other for ever."""
    try:
        trainer(out).fit(model("apart"), DataLoader(DATA[RANK::WORLD], BATCH))
    except HeteroError as error:
        print(str(error))
        os._exit(0)
    raise AssertionError("nothing failed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["LIGHTNING_HETERO_POISON"] = str(int(WORLD == 3))
    for name in sys.argv[2:]:
        globals()[name](Path(sys.argv[1]))
    dist.destroy_process_group()
    print("ok")
