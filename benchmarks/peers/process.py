"""What a contestant's process runs: its program, in turns, on the same model and tokens."""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from contestants import Baton, settle
from gpt2 import GPT2, RandomTokens, Size, Transformer, quiet_options
from scratch import free_port
from torch import Tensor, nn
from torch.utils.data import DataLoader

from peers.entrants import Entrant

HALF = {"bf16-true": torch.bfloat16}
PRECISIONS = ("32-true", *HALF)


class Loss(nn.Module):
    """The model with its loss inside: wrappers want a forward that returns the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = Transformer(size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.loss(tokens)


class Recorded(GPT2):
    """The module with weights from the start, which keeps its losses."""

    def __init__(self, size: Size, model: Transformer, losses: list[float]) -> None:
        super().__init__(size)
        self.model, self.losses = model, losses

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss


class Turns(pl.Callback):
    """Lightning trains when it is this process's turn."""

    def __init__(self, turn: Watched) -> None:
        self.turn = turn

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if hasattr(trainer.strategy, "session"):
            self.turn.baton.drain = partial(settle, trainer.strategy)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.turn.begins():
            trainer.should_stop = True
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 1


class Watched:
    """The turns of a process, with the bytes that it moves and those that it has on disk."""

    def __init__(self, baton: Baton, directory: Path) -> None:
        self.baton, self.directory, self.disk_bytes = baton, directory, 0
        baton.num_bytes = transferred_bytes

    def begins(self) -> bool:
        """Whether another step begins; waits for the next turn."""
        more = self.baton.step_begins()
        if not more:
            self.disk_bytes = occupied_bytes(self.directory)
        return more

    def each(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """The batches, each in its turn."""
        return itertools.takewhile(lambda _: self.begins(), batches)


def transferred_bytes() -> int:
    """Bytes that all threads of this process have read from disks and written to them."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]) + int(lines["write_bytes"])


def occupied_bytes(directory: Path) -> int:
    """Bytes on disk below a directory, also in open files that have no name any more."""
    found = {}
    for path in [*directory.rglob("*"), *Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # descriptors and files come and go
            if path.is_file() and (path.parent.name != "fd" or str(path.readlink()).startswith(str(directory))):
                stat = path.stat()
                found[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())


def compete(baton: Baton, entrant: Entrant, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Trains as the referee says; losses, bytes on disk and the package's version."""
    tempfile.tempdir = str(directory)
    if entrant.alone:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
        }
    turn, losses = Watched(baton, directory), list[float]()
    train = importlib.import_module(f"peers.programs.{entrant.program}").train
    tokens = RandomTokens(args.size, batch=args.batch, length=args.seq)
    model = start(args)
    half = HALF.get(args.precision)
    options: dict[str, Any] = {"dtype": half} if entrant.takes_dtype else {}
    if entrant.plan:
        options["plan"] = entrant.plan
    if entrant.config:
        options["config"] = filled(entrant, args, directory)
    if entrant.base == "with_lightning":
        trainer = quiet_options(precision=args.precision, callbacks=[Turns(turn)], default_root_dir=directory)
        train(Recorded(args.size, model.model, losses), DataLoader(tokens, batch_size=None), **trainer, **options)
    else:
        if half is not None and not (entrant.takes_dtype or entrant.half):
            model = model.to(half)
        train(model, turn.each(tokens), lambda loss: losses.append(float(loss.detach())), **options)
    return {"losses": losses, "disk_bytes": turn.disk_bytes}


def start(args: argparse.Namespace) -> Loss:
    """The model with the weights that all begin with: those that the precision can hold."""
    torch.manual_seed(0)
    model = Loss(args.size)
    for param in model.parameters():
        param.data.copy_(param.data.to(HALF.get(args.precision, param.dtype)))
    return model


def filled(entrant: Entrant, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The entrant's settings for this run."""
    places = {"{directory}": str(directory), "{batch}": args.batch}

    def fill(value: Any) -> Any:
        return {key: fill(of_key) for key, of_key in value.items()} if isinstance(value, dict) else places.get(str(value), value)

    return {**fill(entrant.config), **(entrant.half if args.precision in HALF else {})}
