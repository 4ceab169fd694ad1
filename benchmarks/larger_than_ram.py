"""Trains a GPT with 1.3 billion parameters, which takes 21 GB in memory, in less than 6 GiB.

Weights and Adam state are on disk, in two slots of 12 bytes per parameter: 31 GB for the whole
model. The model is built without memory and initialized block by block. ``host_memory`` bounds
weights, gradients and staging together; the rest of the peak is the interpreter, torch and
activations. The directory is always removed in the end.

Prints one line of JSON last. ``peak_rss_bytes`` is the process's own high-water mark (VmHWM),
``within_limit`` whether it stayed below ``limit_bytes``. The mark is read and reset in each phase:
while the model is placed, in every step, while the plan changes with ``--change-plan``, with
``--save`` while a checkpoint is written and loaded, and at the end. ``over_bytes`` is the excess of
the worst phase over ``host_memory``, one block (the largest, with gradients and state) and
``torch_bytes``: the resident peak of the same script with one block of width 64 under plain
Lightning, in the same precision and run, with the same batch.

    python benchmarks/larger_than_ram.py --dir /path/on/the/disk
    python benchmarks/larger_than_ram.py --dir /path/on/the/disk --precision all --build cpu \\
        --change-plan --save
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from gpt2 import GPT2, Size, add_model_options, find_size, fit, make_trainer, num_params
from scratch import alone, scratch

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.store.capacity import peak_resident_bytes, resident_bytes
from lightning_hetero.units import format_bytes, parse_bytes

BYTES_ON_DISK_PER_PARAM = 2 * 12 * 1.03  # two slots of fp32 weights and moments; footers and padding


PRECISIONS = ("32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed", "64-true")
ITEMSIZES = {"bf16-true": 2, "16-true": 2, "64-true": 8}  # of parameters and gradients; the others have 4

OTHER = Plan(  # what --change-plan goes on with: one layer comes into memory
    name="other",
    blocks=(
        BlockPlan(name="model.layers.0", weights=Tier.HOST, state=Tier.DISK),
        BlockPlan(name="*", weights=Tier.DISK, state=Tier.DISK),
    ),
)


class Steps(pl.Callback):
    """Loss and time of every step, peak memory of every phase, and the strategy's final figures."""

    def __init__(self, args: argparse.Namespace, checkpoint: Path) -> None:
        self.args, self.checkpoint = args, checkpoint
        self.begins: list[float] = []
        self.losses: list[float] = []
        self.peaks: list[int] = []
        self.phases: dict[str, int] = {}
        self.report: dict[str, int] = {}
        self.before = resident_bytes()
        set_mark_back()

    def end(self, phase: str) -> None:
        """A phase is over: what it took beyond what was there before anything was built."""
        self.phases[phase] = peak_resident_bytes() - self.before
        print(f"{phase}: {format_bytes(self.phases[phase])}", flush=True)
        set_mark_back()

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.end("load" if trainer.ckpt_path else "place")

    def on_train_batch_start(self, *_: Any) -> None:
        self.begins.append(time.perf_counter())

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.peaks.append(peak_resident_bytes())
        print(f"step {trainer.global_step}: loss {self.losses[-1]:.4f}", flush=True)
        self.end(f"step {trainer.global_step}")
        session = getattr(trainer.strategy, "session", None)
        if self.args.change_plan and session is not None and trainer.global_step == self.args.steps - 1:
            session.replan(OTHER)
            self.end("change of plan")
        if self.args.save and trainer.global_step == self.args.steps:
            trainer.save_checkpoint(self.checkpoint)
            self.end("save")

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if isinstance(trainer.strategy, HeteroOffloadStrategy):
            self.report = trainer.strategy.memory_report()
        self.begins.append(time.perf_counter())


def size_of(args: argparse.Namespace) -> Size:
    """The model's size."""
    size = find_size(args.model, args.layers)
    return size if args.vocabulary is None else replace(size, vocabulary=args.vocabulary)


def set_mark_back() -> None:
    """The high-water mark begins anew.

    Source: Linux, Documentation/filesystems/proc.rst, on ``clear_refs``.
    """
    Path("/proc/self/clear_refs").write_text("5")


def run(args: argparse.Namespace, size: Size, strategy: Any, precision: str, directory: Path, *, goes_on: bool) -> Steps:
    """One fit; the checkpoint of the one before is what it goes on from, if it does."""
    trainer_steps = args.steps + goes_on
    make_trainer()  # loads what Lightning loads lazily
    steps = Steps(args, directory / "saved.ckpt")
    options: dict[str, Any] = {"max_steps": trainer_steps, "precision": precision, "default_root_dir": directory}
    trainer = make_trainer(strategy=strategy, callbacks=[steps], **options)
    torch.manual_seed(0)
    meta = args.build == "meta" and strategy != "auto"
    path = steps.checkpoint if goes_on else None
    fit(trainer, GPT2(size, meta=meta), batch=args.batch, length=args.seq, ckpt_path=path)
    steps.end("end of the resumed fit" if goes_on else "end")
    return steps


def torch_itself(args: argparse.Namespace, precision: str, directory: Path) -> int:
    """What plain Lightning has resident at most with one small block."""
    size = replace(size_of(args), layers=1, width=64, heads=1)
    fits = [run(args, size, "auto", precision, directory, goes_on=goes_on) for goes_on in (False, True)[: 1 + args.save]]
    return max(peak for steps in fits for peak in steps.phases.values())


def resumed(args: argparse.Namespace, precision: str, directory: Path) -> dict[str, int]:
    """The phases of the fit that goes on from the checkpoint."""
    return run(args, size_of(args), offloading(args), precision, directory, goes_on=True).phases


def offloading(args: argparse.Namespace) -> HeteroOffloadStrategy:
    """The strategy."""
    return HeteroOffloadStrategy(plan="disk", host_memory=args.host_memory, io_backend=args.io_backend)


def train(args: argparse.Namespace, precision: str, directory: Path) -> dict[str, Any]:
    """The run, with its files in ``directory``."""
    size = size_of(args)
    before, begin = resident_bytes(), time.perf_counter()
    steps = run(args, size, offloading(args), precision, directory, goes_on=False)
    seconds = [end - start for start, end in pairwise(steps.begins)]
    peak = before + max(steps.phases.values())
    return {
        "peak_rss_bytes": peak,
        "limit_bytes": args.limit_bytes,
        "within_limit": peak <= args.limit_bytes,
        "parameters": num_params(size),
        "seconds_per_step": statistics.median(seconds),
        "seconds": seconds,
        "setup_s": steps.begins[0] - begin,
        "losses": steps.losses,
        "disk_bytes": steps.report["disk_bytes"],
        "bytes_read": steps.report["bytes_read"],
        "bytes_written": steps.report["bytes_written"],
        "rss_before_bytes": before,
        "peak_rss_bytes_by_step": steps.peaks,
        "phases": steps.phases,
        "host_memory": args.host_memory,
        "memory_if_resident_bytes": 16 * num_params(size),
        "batch": args.batch,
        "seq": args.seq,
        "torch": torch.__version__,
    }


def measure(args: argparse.Namespace, precision: str, directory: Path) -> dict[str, Any]:
    """One precision: torch's memory, the run, and a run from its checkpoint, each in a process."""
    ordinary = alone(partial(torch_itself, args, precision, directory))
    result = alone(partial(train, args, precision, directory))
    if args.save:
        result["phases"] |= alone(partial(resumed, args, precision, directory))
        (directory / "saved.ckpt").unlink()
    block = largest_block_bytes(size_of(args), precision)
    budget = parse_bytes(args.host_memory, name="--host-memory")
    assert budget is not None
    allowed = budget + block + ordinary
    over = max(result["phases"].values()) - allowed
    own = {
        "precision": precision,
        "build": args.build,
        "torch_bytes": ordinary,
        "one_block_bytes": block,
        "over_bytes": max(0, over),
    }
    return {**result, **own}


def largest_block_bytes(size: Size, precision: str) -> int:
    """Weights, gradients and state of the largest block, a layer or the embedding.

    16-bit ones have an fp32 master.
    """
    itemsize = ITEMSIZES.get(precision, 4)
    largest = max(num_params(replace(size, layers=1)) - num_params(replace(size, layers=0)), size.vocabulary * size.width)
    return largest * (2 * itemsize + (12 if itemsize == 2 else 2 * itemsize))


def check_space(directory: Path, needed: int) -> None:
    """Ends the program where the disk is too small."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        sys.exit(f"{directory} has {format_bytes(free)} free; needed: {format_bytes(needed)}. Pass --dir or fewer --layers.")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk; 32 GB free")
    add_model_options(parser, model="gpt-1.3b")
    parser.add_argument("--vocabulary", type=int, help="another one than the model has")
    parser.add_argument("--host-memory", default="3GiB")
    parser.add_argument("--precision", default="32-true", choices=(*PRECISIONS, "all"), help="the Trainer's, or all in turn")
    parser.add_argument("--build", choices=("meta", "cpu"), default="meta", help="where configure_model makes the model")
    parser.add_argument("--change-plan", action="store_true", help="before the last step")
    parser.add_argument("--save", action="store_true", help="a checkpoint, and go on from it; as much again on the disk")
    parser.add_argument("--limit-bytes", type=int, default=6 << 30)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--io-backend", choices=("auto", "io_uring", "pool"), default="auto")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    check_space(args.dir, int(num_params(size_of(args)) * BYTES_ON_DISK_PER_PARAM * (1 + args.save)))
    precisions = PRECISIONS if args.precision == "all" else (args.precision,)
    with scratch(args.dir) as directory:
        results = [measure(args, precision, directory) for precision in precisions]
    common = {"benchmark": "larger_than_ram", "model": args.model, "layers": args.layers, "vocabulary": args.vocabulary}
    for result in results[:-1]:
        print(json.dumps({**common, **result}))
    print(json.dumps({**common, **results[-1], "over_bytes_by_precision": {r["precision"]: r["over_bytes"] for r in results}}))


if __name__ == "__main__":
    main()
