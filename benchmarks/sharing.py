"""Memory of ranks that share one model, beside that of one process with the same model.

One process and as many as each of ``--ranks`` train the same GPT-2 with plan ``host``. With
``--copies`` Lightning's ``ddp`` does too, in which every rank has a copy. The proportional set
sizes of all ranks, in which a page that several processes map counts once, are added while they
train, at the same time. What the processes have before there is a model is subtracted.

Prints one line of JSON last. ``state_bytes`` are weights and optimizer state, which are held at
least; ``held_bytes`` the largest sum; ``vs_one_process`` its ratio to that of one process;
``per_rank_bytes`` what each further rank adds.

    python benchmarks/sharing.py --ranks 2 4 --copies
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from gpt2 import GPT2, SIZES, Layer, Size, fit, make_trainer, num_params
from scratch import free_port, process_context

from lightning_hetero import HeteroOffloadStrategy

WARM = 2  # batches before memory counts
SAMPLE_S = 0.02


def pss_bytes(pid: int) -> int:
    """A process's proportional set size."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


class Tells(pl.Callback):
    """Tells the benchmark when memory begins to count, and when it has counted enough."""

    def __init__(self, channel: Connection, steps: int) -> None:
        self._channel, self._last = channel, WARM + steps

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 in (WARM, self._last):
            self._channel.send(batch_idx)


def train(channel: Connection, rank: int, ranks: int, port: int, size: Size, args: argparse.Namespace, *, copies: bool) -> None:
    """One rank: tells its memory before there is a model, then when to count, and when to end."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "NODE_RANK": "0"}
    if ranks > 1:
        os.environ.update(address, WORLD_SIZE=str(ranks), RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    channel.send(pss_bytes(os.getpid()))
    strategy: Any = "ddp" if copies else HeteroOffloadStrategy("host", block_cls=Layer)
    told = Tells(channel, args.steps)
    trainer = make_trainer(strategy=strategy, devices=ranks, max_steps=WARM + args.steps + 1, callbacks=[told])
    fit(trainer, GPT2(size, meta=not copies), batch=args.batch, length=args.seq)
    channel.close()


def held_bytes(ranks: int, size: Size, args: argparse.Namespace, *, copies: bool = False) -> int:
    """The most that all ranks of a fit have together beside what they have without a model."""
    context, port, channels, processes = process_context(), free_port(), [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        given = (theirs, rank, ranks, port, size, args)
        processes.append(context.Process(target=train, args=given, kwargs={"copies": copies}))
        processes[-1].start()
        theirs.close()
        channels.append(ours)
    before = [channel.recv() for channel in channels]
    for channel in channels:
        channel.recv()  # all of them train
    most = 0
    while not any(channel.poll() for channel in channels):
        most = max(most, sum(pss_bytes(process.pid) for process in processes))
        time.sleep(SAMPLE_S)
    for process in processes:
        process.join()
    return most - sum(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1, help="sequences of each rank")
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4, help="that count")
    parser.add_argument("--copies", action="store_true", help="also Lightning's ddp")
    args = parser.parse_args()
    size = replace(SIZES["tiny"], layers=args.layers, width=args.width, heads=args.width // 64 or 1)
    one = held_bytes(1, size, args)
    rows: dict[str, Any] = {}
    for ranks in args.ranks:
        held = held_bytes(ranks, size, args)
        rows[str(ranks)] = row = {
            "held_bytes": held, "vs_one_process": round(held / one, 3), "per_rank_bytes": (held - one) // max(1, ranks - 1),
        }  # fmt: skip
        if args.copies:
            row["copies_vs_one_process"] = round(held_bytes(ranks, size, args, copies=True) / one, 3)
        print(f"{ranks} ranks: {row}", flush=True)
    print(json.dumps({"state_bytes": 12 * num_params(size), "held_bytes": one, "ranks": rows}))


if __name__ == "__main__":
    main()
