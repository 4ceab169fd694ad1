"""Trains with the installed package, where no compiler can be found."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

os.environ["PATH"] = tempfile.mkdtemp()  # before torch: it looks for compilers as it is imported
os.chdir(os.environ["PATH"])

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_hetero


def weights(strategy: Any) -> torch.Tensor:
    torch.manual_seed(0)
    module: Any = BoringModel()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), fused=True)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=4, limit_val_batches=0, enable_model_summary=False, **quiet
    )
    trainer.fit(module)
    return torch.cat([p.detach().clone().flatten() for p in module.parameters()])


assert not any(map(shutil.which, ("cc", "c++", "g++", "gcc", "clang", "cmake"))), "there is a compiler"
print(lightning_hetero.__file__)
assert torch.equal(weights("auto"), weights(lightning_hetero.HeteroOffloadStrategy(plan="disk")))
