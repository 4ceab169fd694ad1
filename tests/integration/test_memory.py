"""Memory of whole fits: with ``LocalFirst`` within the budget, and nothing that stays behind."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Recipe, data, quiet_trainer
from support.scripts import output_of, result_of
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.store.capacity import peak_resident_bytes
from lightning_hetero.strategies import HeteroOffloadStrategy, LocalFirst

MIB = 2**20
BUDGET = 96 * MIB
WIDTH, LAYERS, WORDS, TOKENS = 512, 16, 4096, 16

# What comes on top of the budget, by reason (all float32):
ACTIVATIONS = 4 * TOKENS * (LAYERS * (5 * WIDTH + 2 * 4 * WIDTH) + 4 * WORDS)  # saved for backward, and their gradients
LARGEST_GRADIENT = 4 * WIDTH * max(WORDS, 4 * WIDTH)  # one is accumulated while the next is computed: it exists twice
ONE_TENSOR = 4 * WIDTH * max(WORDS, 4 * WIDTH)  # saving and loading hold one tensor of weights or state at a time
PATCHES = 64 * MIB  # writes through the door that wait to be brought into the file together (TierStore)
ALLOCATOR = 48 * MIB  # what malloc, the threads' stacks and the lazily loaded code of torch take once training begins
MARGIN = ACTIVATIONS + ALLOCATOR + max(2 * LARGEST_GRADIENT, ONE_TENSOR + PATCHES)


# LocalFirst writes and reads a block's weights and state as one file.
ONE_BLOCK = 16 * MIB + 12 * WIDTH * max(WORDS, 2 * 4 * WIDTH + 7)
ONE_READ = 64 * MIB


def main(phase: str, folder: str) -> None:
    """Runs one phase and prints the peaks as one line of JSON."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # there are as many threads on every machine

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x))))

    class Large(pl.LightningModule):
        def configure_model(self) -> None:
            if hasattr(self, "head"):
                return
            with torch.device("meta"):
                self.embed = nn.Embedding(WORDS, WIDTH)
                self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
                self.head = nn.Linear(WIDTH, WORDS, bias=False)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = self.embed(batch[:, :-1])
            for layer in self.layers:
                x = layer(x)
            return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.randint(0, WORDS, (8, TOKENS + 1)), batch_size=1)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)  # loads what Lightning loads lazily
    a = torch.ones(256, 256, requires_grad=True)
    (a @ a).sum().backward()
    peaks = {"before": peak_resident_bytes()}
    saved = str(Path(folder) / "last.ckpt")
    strategy = HeteroOffloadStrategy(plan="disk", host_memory=BUDGET)
    callback = pl.callbacks.ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=2)
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, logger=False, default_root_dir=folder, enable_progress_bar=False,
        max_steps=2 if phase == "save" else 4, callbacks=[callback] if phase == "save" else [], enable_model_summary=False,
        enable_checkpointing=phase == "save", plugins=[LocalFirst(disk=Path(folder) / "disk")],
    )  # fmt: skip
    module = Large()
    if phase == "save":
        trainer.fit(module)
    else:
        trainer.fit(module, ckpt_path=saved, weights_only=True)
    peaks["fit"] = peak_resident_bytes()
    peaks["step"] = trainer.global_step
    peaks["parameters"] = sum(p.numel() for p in module.parameters())
    if phase == "load":  # the model does not fit, so it is parked: written and read through the door
        trainer.strategy.remove_checkpoint(saved)
        trainer.save_checkpoint(saved)
        trainer.strategy.checkpoint_io.wait()
        peaks["parked"] = peak_resident_bytes()
    print(json.dumps(peaks))


def child(phase: str, folder: Path) -> dict[str, int]:
    env = {**os.environ, "LIGHTNING_HETERO_POISON": ""}
    peaks: dict[str, int] = result_of(output_of(Path(__file__), phase, folder, cwd=folder, env=env))
    return peaks


@pytest.mark.slow
def test_a_model_larger_than_its_budget_is_saved_and_loaded_by_local_first_within_it(tmp_path: Path) -> None:
    """Ordinary checkpoints are in test_memory_phases.py."""
    allowed = BUDGET + MARGIN + ONE_BLOCK + ONE_READ
    saving = child("save", tmp_path)
    assert saving["parameters"] * 12 > 1.3 * allowed, "its weights and state would fit as a whole"
    assert saving["step"] == 2
    assert saving["fit"] - saving["before"] < allowed, saving
    assert not list(tmp_path.glob("lightning-hetero-*"))
    loading = child("load", tmp_path)
    assert loading["step"] == 4
    assert max(loading["fit"], loading["parked"]) - loading["before"] < allowed, loading
    assert not list(tmp_path.glob("lightning-hetero-*"))
    shutil.rmtree(tmp_path / "last.ckpt")


@pytest.mark.parametrize("plan", ["resident", "host", "disk"])
def test_nothing_of_a_finished_run_waits_for_the_garbage_collector(plan: str, tmp_path: Path) -> None:
    """Weights and state would be in memory twice when the same model is trained again."""
    module, strategy = LitModel(Recipe()), HeteroOffloadStrategy(plan=plan)
    trainer = quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=tmp_path, limit_val_batches=0)
    made: list[weakref.ref[Any]] = []

    class Notes(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            made.append(weakref.ref(strategy.session))

    trainer.callbacks.append(Notes())
    gc.collect()
    gc.disable()
    try:
        trainer.fit(module, data())
        assert made[0]() is None
    finally:
        gc.enable()


def test_state_in_memory_is_handed_over_without_a_copy(tmp_path: Path) -> None:
    strategy = HeteroOffloadStrategy(plan="host")
    trainer = quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=tmp_path, limit_val_batches=0)
    native: list[tuple[int, int]] = []

    class Notes(pl.Callback):
        def on_train_end(self, *_: Any) -> None:
            blocks = [part.native for block in strategy.session.blocks for part in block.parts]
            native.extend((b.state_address(k), 4 * b.geometry.num_elements) for b in blocks for k in (0, 1))

    trainer.callbacks.append(Notes())
    trainer.fit(LitModel(Recipe()), data())
    for state in trainer.optimizers[0].state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            assert any(start <= state[key].data_ptr() < start + length for start, length in native)
            assert state[key].isfinite().all()


if __name__ == "__main__":
    main(*sys.argv[1:])
