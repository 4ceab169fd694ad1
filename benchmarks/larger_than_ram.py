"""Trains a GPT with 1.3 billion parameters, whose training takes 21 GB in memory, in less than 6 GiB.

Weights and Adam state are on disk, in two slots of 12 bytes per parameter: 31 GB for the whole model. The model is built without
memory and initialized block by block; ``host_memory`` is what weights, gradients and staging may take together, the rest of the
peak is the interpreter, torch and activations. The directory is removed in the end, whatever happens.

Prints one line of JSON last. ``peak_rss_bytes`` is the process's own high-water mark (VmHWM), ``within_limit`` whether it
stayed below ``limit_bytes``.

    python benchmarks/larger_than_ram.py --dir /path/on/the/disk
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from gpt2 import GPT2, add_model_options, find_size, fit, make_trainer, num_params
from scratch import scratch

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.store.capacity import peak_resident_bytes
from lightning_hetero.units import format_bytes

BYTES_ON_DISK_PER_PARAM = 2 * 12 * 1.03  # two slots of fp32 weights and moments; footers and padding


class Steps(pl.Callback):
    """Loss and time of every step, and what the strategy had done by the end."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.losses: list[float] = []
        self.peaks: list[int] = []
        self.report: dict[str, int] = {}

    def on_train_batch_start(self, *_: Any) -> None:
        self.begins.append(time.perf_counter())

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.peaks.append(peak_resident_bytes())
        print(f"step {len(self.losses)}: loss {self.losses[-1]:.4f}, peak {format_bytes(self.peaks[-1])}", flush=True)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, HeteroOffloadStrategy)
        self.report = trainer.strategy.memory_report()
        self.begins.append(time.perf_counter())


def train(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The run, with its files in ``directory``."""
    size = find_size(args.model, args.layers)
    steps = Steps()
    strategy = HeteroOffloadStrategy(plan="disk", host_memory=args.host_memory, io_backend=args.io_backend)
    trainer = make_trainer(strategy=strategy, max_steps=args.steps, callbacks=[steps], default_root_dir=directory)
    before, begin = peak_resident_bytes(), time.perf_counter()
    torch.manual_seed(0)
    fit(trainer, GPT2(size, meta=True), batch=args.batch, length=args.seq)
    seconds = [end - start for start, end in pairwise(steps.begins)]
    peak = peak_resident_bytes()
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
        "host_memory": args.host_memory,
        "memory_if_resident_bytes": 16 * num_params(size),
        "batch": args.batch,
        "seq": args.seq,
        "torch": torch.__version__,
    }


def check_space(directory: Path, needed: int) -> None:
    """Ends the program where the disk is too small."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        sys.exit(f"{directory} has {format_bytes(free)} free; needed: {format_bytes(needed)}. Pass --dir or fewer --layers.")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk; 32 GB free")
    add_model_options(parser, model="gpt-1.3b")
    parser.add_argument("--host-memory", default="3GiB")
    parser.add_argument("--limit-bytes", type=int, default=6 << 30)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--io-backend", choices=("auto", "io_uring", "pool"), default="auto")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    check_space(args.dir, int(num_params(find_size(args.model, args.layers)) * BYTES_ON_DISK_PER_PARAM))
    with scratch(args.dir) as directory:
        result = train(args, directory)
    print(json.dumps({"benchmark": "larger_than_ram", "model": args.model, "layers": args.layers, **result}))


if __name__ == "__main__":
    main()
