"""Kills training at random moments and resumes it, to find lost steps and resumes that differ.

    python benchmarks/kill.py --dir DIR [--kills 500] [--steps 600] [--seed 0]

A small model trains with clipping by norm, dropout, a schedule and shuffled data, under a plan that
keeps it on disk, with speculative updates before the norm is known. Some trainings have a plan that
keeps some or all of it in memory, which is mirrored, so that a resume moves state as well.
``VARIANTS`` has the other differences between trainings: optimizers, the dataloader, and
checkpoints that are written in the background, adapters over frozen weights. A child process
trains, and is killed with SIGKILL at a random moment, with its own children: while it starts,
resumes, moves, trains or commits. It reports every loss, every step that has ended, and every step
that had been committed before it went on. The next child resumes from the store.

* ``lost_steps``: committed steps that a later child did not find.
* ``ended_steps_lost``: the number of ended steps that a later child had to repeat, and how often. A
  step has ended when the hooks of its batch run. More than one is a failure.
* ``wrong_resumes``: children with a loss, or final weights and optimizer state, that differ from an
  uninterrupted plain run.
* ``unreadable_stores``: stores that could not be resumed from.

``tried`` counts steps with updates before their verdict, ``taken_back`` those that were discarded,
``plans`` the children.

A run that has all its steps starts again. Children are forked: importing torch takes longer than
training. Prints one JSON line last; ``state_share`` is the share of a step's time for collecting
the training state and submitting its commit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import select
import shutil
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from scratch import scratch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import LocalFirst
from lightning_hetero.convert.safetensors import TensorToWrite, write_directory
from lightning_hetero.errors import ConfigError, HeteroError
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.strategies import HeteroOffloadStrategy
from lightning_hetero.strategies.training import Training

VOCABULARY, WIDTH, LAYERS, LENGTH = 31, 32, 3, 8
BATCHES = 24  # of an epoch
ROW = struct.Struct("<cqd")  # kind, step, value
LOSS, ENDED, COMMITTED, DONE, FAILED, TIMES, TRIED = b"L", b"E", b"C", b"D", b"F", b"T", b"S"
CLIP = 2.15  # one step in four is clipped
ENDED_LOST_MOST = 1  # steps that have ended: what docs/durability.md allows a kill to lose
MIXED = Plan(
    name="mixed",
    blocks=(
        BlockPlan(name="blocks.0", weights=Tier.DISK, state=Tier.HOST),
        BlockPlan(name="blocks.*", weights=Tier.HOST, state=Tier.DISK),
        BlockPlan(name="*", weights=Tier.HOST, state=Tier.HOST),
    ),
)
PLANS: tuple[Any, ...] = ("disk", "disk", "disk", MIXED, "host")


Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One for the matrices and one for the rest, so that both have some of every block."""
    matrices, rest = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    return [torch.optim.AdamW(matrices, lr=3e-3, fused=True), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


@dataclass(frozen=True, eq=False)
class Variant:
    """A kind of training. To have another kind killed as well, add a row to ``VARIANTS``.

    Attributes:
        name: For people, and for the file of its reference.
        share: How often it is chosen, relative to the others.
        optimizers: Makes its optimizers. With more than one the model steps them by hand, each in
            every batch.
        loader: Options of its dataloader.
        checkpoints: Checkpoints are written in the background meanwhile, by ``LocalFirst``.
        adapters: Only adapters train. The frozen weights are read in place from safetensors files.
            For a third of the training one block of them is set free.
    """

    name: str
    share: int = 1
    optimizers: Optimizers = adamw
    loader: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: bool = False
    adapters: bool = False


VARIANTS = (
    Variant("adamw", share=3),
    Variant("sgd", optimizers=sgd),  # its state is one that the engine does not know
    Variant("two", optimizers=two),
    Variant("local_first", checkpoints=True),
    Variant("adapters", share=2, adapters=True),
    Variant("workers", loader={"num_workers": 1, "persistent_workers": True}),
)


class Block(nn.Module):
    """One residual block, with a low-rank adapter if it is frozen."""

    def __init__(self, *, adapted: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.requires_grad_(not adapted)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)) if adapted else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        change = self.down(F.gelu(self.up(hidden)))
        if self.adapter is not None:
            change = change + self.adapter(hidden)
        return x + F.dropout(change, 0.1, self.training)


class Model(pl.LightningModule):
    """Predicts the next token."""

    def __init__(self, steps: int, variant: Variant) -> None:
        super().__init__()
        self.steps, self.made_by = steps, variant.optimizers
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(adapted=variant.adapters) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("seen", torch.zeros(()))
        self.report: Callable[[int, float], None] = lambda step, loss: None
        self.automatic_optimization = len(variant.optimizers(self)) == 1

    @property
    def batches(self) -> int:
        """Batches that have ended in steps."""
        steps: int = self.trainer.global_step
        return steps if self.automatic_optimization else steps // len(self.optimizers())

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x = self.embed(batch[0][:, :-1])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[0][:, 1:].flatten())
        self.seen += loss.detach()
        self.report(self.batches, loss.item())
        if not self.automatic_optimization:
            self._step_by_hand(loss)
        return loss

    def _step_by_hand(self, loss: Tensor) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer, schedule in zip(optimizers, self.lr_schedulers(), strict=True):
            self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
            optimizer.step()
            schedule.step()

    def configure_optimizers(self) -> Any:
        optimizers = self.made_by(self)
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps) for optimizer in optimizers]
        return optimizers, [{"scheduler": schedule, "interval": "step"} for schedule in schedules]


class Frees(pl.Callback):
    """Sets the frozen weights of one block free for the second third of the training."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        free = module.steps // 3 <= module.batches < 2 * module.steps // 3
        for part in (module.blocks[1].norm, module.blocks[1].up, module.blocks[1].down):
            part.requires_grad_(free)


class Reports(pl.Callback):
    """Tells of steps that have ended, and of those whose record is on disk."""

    def __init__(self, write: Callable[[bytes, int, float], None]) -> None:
        self._write, self._waiting = write, (0, None)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        ticket = trainer.strategy.session.store.files.last_commit
        if ticket is not None and module.batches != self._waiting[0]:
            self._tell()
            self._waiting = (module.batches, ticket)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self._write(ENDED, module.batches, 0.0)
        speculation = trainer.strategy.session.executor.speculation
        if speculation.trying:
            self._write(TRIED, module.batches, float(speculation.discarded))
        self._tell()

    def _tell(self) -> None:
        step, ticket = self._waiting
        if ticket is not None and ticket.poll():
            self._write(COMMITTED, step, 0.0)
            self._waiting = (step, None)


def fit(
    strategy: Any, root: Path, steps: int, variant: Variant, store: Path | None, report: Any, *callbacks: Any,
    rank: int = 0, ranks: int = 1,
) -> tuple[pl.Trainer, Model]:  # fmt: skip
    """Trains to the end, from the beginning or from the store; one of several ranks, too."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with torch.device("meta" if variant.adapters and strategy != "auto" else "cpu"):
        model = Model(steps, variant)
    torch.manual_seed(3 + rank)
    model.report = report
    if variant.adapters:
        callbacks = (Frees(), *callbacks)
    tokens = torch.randint(0, VOCABULARY, (2 * BATCHES, LENGTH), generator=torch.Generator().manual_seed(2))
    saves = variant.checkpoints and strategy != "auto"
    if saves:
        callbacks = (*callbacks, ModelCheckpoint(dirpath=root / "checkpoints", every_n_train_steps=20, save_top_k=1))
    steps_by = 1 if model.automatic_optimization else len(variant.optimizers(model))
    trainer = pl.Trainer(
        strategy=strategy, devices=ranks, max_steps=steps * steps_by,
        gradient_clip_val=CLIP if model.automatic_optimization else None, default_root_dir=root, accelerator="cpu", logger=False,
        enable_checkpointing=saves, enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
        plugins=[LocalFirst(disk=root / "saves")] if saves else [],
    )  # fmt: skip
    loader = DataLoader(TensorDataset(tokens), batch_size=2, shuffle=True, **variant.loader)
    trainer.fit(model, loader, ckpt_path=None if store is None else str(store))
    return trainer, model


def content(trainer: pl.Trainer, model: Model) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    for which, optimizer in enumerate(trainer.optimizers):
        for number, state in optimizer.state_dict()["state"].items():
            values |= {f"{which}.{number}.{key}": value.clone() for key, value in state.items()}
    return values


def reference(root: Path, steps: int, variant: Variant) -> None:
    """A run under plain Lightning that is not killed: its losses and its results."""
    losses: list[float] = []
    if variant.adapters:
        torch.manual_seed(1)
        content_of = Model(steps, variant).state_dict()
        rows = [TensorToWrite(name, value.dtype, value.shape, partial(content_of.get, name)) for name, value in content_of.items()]
        write_directory(root / "weights", rows, max_shard_bytes=20_000)
    trainer, model = fit("auto", root, steps, variant, None, lambda step, loss: losses.append(loss))
    torch.save({"losses": losses, "content": content(trainer, model)}, root / f"{variant.name}.pt")


def child(root: Path, steps: int, variant: Variant, plan: Any, fresh: bool, out: int) -> None:
    """Trains until it is killed; the parent reads what it writes to ``out``."""

    def write(kind: bytes, step: int, value: float) -> None:
        os.write(out, ROW.pack(kind, step, value))

    store = root / "store"
    weights = root / "weights" if variant.adapters else None
    strategy = HeteroOffloadStrategy(plan=plan, disk_path=store, verify_digests=True, weights=weights)
    keep, spent = Training.batch_ended, [0.0]

    def timed(training: Training) -> None:
        begin = time.perf_counter()
        keep(training)
        spent[0] += time.perf_counter() - begin

    Training.batch_ended = timed
    begin = time.perf_counter()
    try:
        trainer, model = fit(
            strategy, root, steps, variant, None if fresh else store, lambda step, loss: write(LOSS, step, loss), Reports(write)
        )
    except ConfigError as error:
        if "no step has been committed yet" not in str(error) and "is not a file" not in str(error):
            raise
        write(FAILED, 0, 0.0)  # nothing to resume from
        return
    write(TIMES, 0, spent[0] / (time.perf_counter() - begin))
    expected = torch.load(root / f"{variant.name}.pt")["content"]
    got = content(trainer, model)
    write(DONE, int(got.keys() == expected.keys() and all(torch.equal(got[k], v) for k, v in expected.items())), 0.0)


def forked(call: Callable[[int], None], log: Path) -> tuple[int, int]:
    """Runs ``call`` in a child with a process group of its own.

    Its id and the end of the pipe that it writes to.
    """
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        with suppress(PermissionError, ProcessLookupError):  # the child has done it, and may be gone
            os.setpgid(process, process)
        return process, reader
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
        os.dup2(2, 1)
        call(writer)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def rows_until_end(reader: int) -> list[tuple[bytes, int, float]]:
    """What a child wrote; a row that the kill has cut off does not count."""
    data = b""
    while piece := os.read(reader, 1 << 16):
        data += piece
    os.close(reader)
    return list(ROW.iter_unpack(data[: len(data) // ROW.size * ROW.size]))


class Harness:
    """Counts what happens."""

    def __init__(self, root: Path, steps: int, seed: int) -> None:
        self.root, self.steps, self.random = root, steps, random.Random(seed)
        self.counts = dict.fromkeys(("kills", "runs", "finished", "steps", "lost_steps", "wrong_resumes", "unreadable_stores"), 0)
        self.counts |= dict.fromkeys(("tried", "taken_back"), 0)
        self.plans, self.ended_lost = Counter[str](), Counter[int]()
        self.committed, self.ended, self.fresh, self.failure, self.shares = 0, 0, True, "", list[float]()
        self.variant = self._any_variant()
        self.losses = {variant: torch.load(root / f"{variant.name}.pt")["losses"] for variant in VARIANTS}

    def _any_variant(self) -> Variant:
        return self.random.choices(VARIANTS, [variant.share for variant in VARIANTS])[0]

    def run(self) -> None:
        """One child, killed or not."""
        plan, log = self.random.choice(PLANS), self.root / "log"
        limit = self.random.choice((0.2, 0.5, 1.2))
        process, reader = forked(lambda out: child(self.root, self.steps, self.variant, plan, self.fresh, out), log)
        self.plans[f"{plan if isinstance(plan, str) else plan.name}, {self.variant.name}"] += 1
        trains = self.random.random() < 0.6 or not self.counts["runs"]  # most die while they train, however slow the machine
        begins = reader if trains else None
        status = self._kill(process, self.random.uniform(0, limit), begins)
        rows = rows_until_end(reader)
        self.counts["runs"] += 1
        self.counts["kills"] += os.WIFSIGNALED(status)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            self._failed(log)
        else:
            self._check(rows, plan)

    def _kill(self, process: int, seconds: float, begins: int | None) -> int:
        """Kills the child's group after so long, from its start or first write to ``begins``."""
        deadline = math.inf if begins is not None else time.monotonic() + seconds
        while time.monotonic() < deadline:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                return status
            if begins is not None and select.select([begins], [], [], 0)[0]:
                begins, deadline = None, time.monotonic() + seconds
            time.sleep(0.002)
        os.killpg(process, signal.SIGKILL)
        return os.waitpid(process, 0)[1]

    def _failed(self, log: Path) -> None:
        self.counts["unreadable_stores"] += 1
        self.failure = log.read_text()[-3000:]
        self._anew()

    def _anew(self) -> None:
        for name in ("store", "saves", "checkpoints"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        self.committed, self.ended, self.fresh, self.variant = 0, 0, True, self._any_variant()

    def _check(self, rows: list[tuple[bytes, int, float]], plan: Any) -> None:
        losses = [(step, value) for kind, step, value in rows if kind == LOSS]
        self.counts["steps"] += len(losses)
        discarded = [value for kind, _, value in rows if kind == TRIED]
        self.counts["tried"] += len(discarded)
        self.counts["taken_back"] += int(sum(discarded))
        expected = self.losses[self.variant]
        if any(kind == FAILED for kind, *_ in rows):  # right if it was killed before its first step was there
            self.counts["lost_steps"] += self.committed
            self._goes_back_to(0)
            self._anew()
            return
        if losses:
            self.counts["lost_steps"] += max(0, self.committed - losses[0][0])
            first = losses[0][0]
            self._goes_back_to(first)
            if losses != [(first + i, expected[first + i]) for i in range(len(losses))]:
                self.counts["wrong_resumes"] += 1
                self.failure = f"plan {plan}, {self.variant.name}: the losses from step {first} on differ"
        told = [step for kind, step, _ in rows if kind == COMMITTED]
        self.committed = max([self.committed, *told])
        self.ended = max([self.ended, *(step for kind, step, _ in rows if kind == ENDED)])
        self.fresh = self.fresh and not (self.root / "store" / "MANIFEST").exists()
        self.shares += [value for kind, _, value in rows if kind == TIMES]
        for kind, equal, _ in rows:
            if kind == DONE:
                self.counts["finished"] += 1
                self.counts["wrong_resumes"] += not equal
                self._anew()

    def _goes_back_to(self, step: int) -> None:
        """A child goes on from this step, although so many have ended."""
        if self.ended:
            self.ended_lost[max(0, self.ended - step)] += 1
        self.ended = step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="where the store goes")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--steps", type=int, default=600, help="of one training run")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.monotonic()
    with scratch(arguments.dir) as root:
        for variant in VARIANTS:
            process, reader = forked(lambda _, variant=variant: reference(root, arguments.steps, variant), root / "log")
            rows_until_end(reader)
            if os.waitpid(process, 0)[1]:
                raise SystemExit((root / "log").read_text())
        harness = Harness(root, arguments.steps, arguments.seed)
        while harness.counts["kills"] < arguments.kills and not harness.failure:
            harness.run()
        if harness.failure:
            print(harness.failure)
    share = sum(harness.shares) / len(harness.shares) if harness.shares else None
    more = {"plans": dict(harness.plans), "ended_steps_lost": dict(sorted(harness.ended_lost.items()))}
    more |= {"state_share": share, "seconds": time.monotonic() - begin}
    print(json.dumps({"benchmark": "kill", **harness.counts, **more}))
    bad = ("lost_steps", "wrong_resumes", "unreadable_stores")
    too_many = max(harness.ended_lost, default=0) > ENDED_LOST_MOST
    raise SystemExit(int(too_many or any(harness.counts[key] for key in bad)))


if __name__ == "__main__":
    try:
        main()
    except HeteroError as error:
        raise SystemExit(str(error)) from error
