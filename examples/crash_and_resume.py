"""Kill a training run with SIGKILL, start it again, and get the bits of a run that was not killed.

    # in this repository:
    pip install .
    python examples/crash_and_resume.py

Each run is a process of its own. Each of its steps is kept in a directory; after the kill the same
code continues from there (`ckpt_path`). A third run is left alone, to compare with.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroOffloadStrategy


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
        self.net = nn.Sequential(*layers, nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


class Report(L.Callback):
    """Says how far the run has come, so that the parent knows when to kill it."""

    def __init__(self, parent: Connection) -> None:
        self.parent = parent

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        self.parent.send(trainer.global_step)


def train(store: Path, result: Path, steps: int, parent: Connection) -> None:
    """What a training script does: resume if there is something to resume from."""
    L.seed_everything(0)
    x = torch.randn(96, 64)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    trainer = L.Trainer(
        strategy=HeteroOffloadStrategy(plan="disk", disk_path=store),
        accelerator="cpu",
        max_steps=steps,
        callbacks=[Report(parent)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, data, ckpt_path=store if store.exists() else None)
    torch.save(model.state_dict(), result)


def run(store: Path, result: Path, steps: int, *, kill_at: int | None = None) -> int:
    """Trains in a process of its own; returns the first step that ended in it."""
    context = multiprocessing.get_context("fork")  # nothing has been computed here: no threads are lost
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(store, result, steps, theirs))
    process.start()
    theirs.close()
    ended: list[int] = []
    try:
        while not ended or ended[-1] != kill_at:
            ended.append(ours.recv())
        process.kill()
    except EOFError:  # it has come to its end
        pass
    process.join()
    expected = -signal.SIGKILL if kill_at else 0
    if process.exitcode != expected:
        raise RuntimeError(f"the run ended with exit code {process.exitcode}, not {expected}")
    return ended[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kill_at = options.steps // 2
        run(folder / "run", folder / "killed.pt", options.steps, kill_at=kill_at)
        first = run(folder / "run", folder / "killed.pt", options.steps)
        run(folder / "other", folder / "alone.pt", options.steps)
        killed, alone = (torch.load(folder / f"{which}.pt", weights_only=True) for which in ("killed", "alone"))
    same = all(torch.equal(value, alone[key]) for key, value in killed.items())
    print(f"killed           after step {kill_at} of {options.steps}")
    print(f"resumed          the first step that ended was {first}")
    print(f"same bits        {same}")
    if not same:
        raise SystemExit("the resumed run differs from the one that was left alone")


if __name__ == "__main__":
    main()
