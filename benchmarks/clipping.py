"""Step time with clipping by global norm, in one run, in turns.

The norm is known only when all gradients are there.

A GPT-2 trains under the plan ``disk`` in one process for each of these:

* ``unclipped``: no clipping; updates overlap with backward.
* ``speculative``: updates overlap with backward, and are repeated if the gradients are clipped, at
  every rate.
* ``adaptive``: like ``speculative`` while few steps clip, otherwise like ``forward_ordered``; the
  default.
* ``forward_ordered``: all updates follow the verdict, in the order of the next forward, and overlap
  with it.
* ``after_everything``: all updates follow the verdict, and the next forward follows them.
* ``plain``: Lightning without us, with everything in memory.

In every turn a set share of the steps clips: their threshold is far below any norm, the others' far
above. A ratio is the mean of a turn's steps over that of ``unclipped`` in the same round; figures
are medians over rounds, and ``intervals`` bound them 19 times of 20. All processes that clip must
end with the same weights and optimizer state, bit for bit: ``same_bits``. ``taken_back`` counts the
steps whose updates were discarded.

Prints one line of JSON last. ``speculative_vs_unclipped`` is the largest of its ratios at rates up
to 10 %.

    python benchmarks/clipping.py --dir /path/on/the/disk
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import statistics
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from contestants import Baton, Contestant, Turn, interval
from gpt2 import GPT2, add_model_options, find_size, fit, make_trainer, num_params
from scratch import scratch
from step import TakesTurns, show_trace
from torch import Tensor, nn

from lightning_hetero import BlockPlan, HeteroOffloadStrategy, Plan, Tier

WAYS = ("unclipped", "speculative", "adaptive", "forward_ordered", "after_everything")
TRIES_UP_TO = {"speculative": 1.0, "forward_ordered": -1.0, "after_everything": -1.0}  # the rate of discards
CLIPS, KEEPS = 1e-2, 1e6  # thresholds; norms of a GPT-2's gradients are between 0.3 and 30
BAR_RATE = 0.1
LAYERS = BlockPlan(name="model.layers.*", weights=Tier.DISK, state=Tier.DISK)
DISK = Plan(name="disk", blocks=(LAYERS, BlockPlan(name="*", state=Tier.DISK)))


def threshold(position: int, rate: float) -> float:
    """The threshold of one step of a turn: of any steps in a row, the share ``rate`` clips."""
    clips = int(position * rate + 0.5) > int((position - 1) * rate + 0.5)
    return CLIPS if clips else KEEPS


class Clips(TakesTurns):
    """Clips as often as the referee says."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_batch_start(trainer)
        if self.baton.order is not None:
            trainer.gradient_clip_val = threshold(self.baton.position, self.baton.order)


class SeesNorms(GPT2):
    """Notes how many steps have clipped, under plain Lightning."""

    def __init__(self, baton: Baton, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.baton = baton
        self.clipped: dict[float, list[bool]] = defaultdict(list)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        if self.baton.order is not None and self.baton.position:
            self.clipped[self.baton.order].append(bool(norm > gradient_clip_val))
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)


def digest(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all weights and optimizer state."""
    found = hashlib.sha256()
    states = [value for _, state in sorted(optimizer.state_dict()["state"].items()) for _, value in sorted(state.items())]
    for value in (*module.state_dict().values(), *states):
        if isinstance(value, Tensor):
            found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def plain(baton: Baton, args: argparse.Namespace) -> dict[str, Any]:
    """Lightning without us."""
    torch.manual_seed(0)
    module = SeesNorms(baton, args.size)
    trainer = make_trainer(gradient_clip_val=KEEPS, callbacks=[Clips(baton)], default_root_dir=args.directory)
    fit(trainer, module, batch=args.batch, length=args.seq)
    rates = {rate: statistics.mean(clipped) for rate, clipped in module.clipped.items()}
    return {"digest": digest(module, trainer.optimizers[0]), "clipped": rates}


def offloaded(baton: Baton, args: argparse.Namespace, way: str) -> dict[str, Any]:
    """Lightning under the plan ``disk``."""
    torch.manual_seed(0)
    plan = replace(DISK, priority=way != "after_everything")
    strategy = HeteroOffloadStrategy(plan=plan, host_memory=args.host_memory, trace=args.trace is not None)

    def drain() -> None:
        session: Any = strategy.session
        for part in (part for block in session.blocks for part in block.parts):
            session.store.barrier(part)

    class Chooses(pl.Callback):
        taken_back = 0

        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            if way in TRIES_UP_TO:
                strategy.session.executor.speculation.worth.fixed = TRIES_UP_TO[way]

        def on_train_batch_end(self, *_: Any) -> None:
            speculation = strategy.session.executor.speculation
            self.taken_back += speculation.trying and speculation.discarded

    def num_bytes() -> int:
        report = strategy.memory_report()
        return int(report["bytes_read"] + report["bytes_written"])

    baton.drain, baton.num_bytes = drain, num_bytes
    module, chooses = GPT2(args.size), Chooses()
    trainer = make_trainer(
        strategy=strategy, gradient_clip_val=None if way == "unclipped" else KEEPS,
        callbacks=[TakesTurns(baton) if way == "unclipped" else Clips(baton), chooses], default_root_dir=args.directory,
    )  # fmt: skip
    fit(trainer, module, batch=args.batch, length=args.seq)
    if args.trace is not None:
        show_trace(strategy.trace, args.trace.with_stem(f"{args.trace.stem}-{way}"), way)
    return {"digest": digest(module, trainer.optimizers[0]), "taken_back": chooses.taken_back}


def compete(args: argparse.Namespace) -> tuple[dict[float, dict[str, list[Turn]]], dict[str, dict[str, Any]]]:
    """Turns by rate and by way, and what each process says in the end.

    Of each rate the first round does not count.

    ``plain`` takes its turns of a rate after all others. It leaves the disk alone, and a disk that
    has rested is faster for the next contestant, which was the same one every other round.
    """
    turns: dict[float, dict[str, list[Turn]]] = {rate: defaultdict(list) for rate in args.rates}
    with contextlib.ExitStack() as stack:
        named: dict[str, tuple[Any, ...]] = {"plain": (plain, args), **{way: (offloaded, args, way) for way in args.ways}}
        processes = {name: stack.enter_context(Contestant(*what)) for name, what in named.items()}
        for rate in args.rates:
            rounds = range(args.rounds + 1)
            order = [(n, name) for n in rounds for name in (args.ways if n % 2 else reversed(args.ways))]  # drift cancels
            for number, name in [*order, *((n, "plain") for n in rounds)]:
                turn = processes[name].turn(args.steps, rate)
                if number:
                    turns[rate][name].append(turn)
                    print(f"{rate:.0%}, round {number}, {name}: {statistics.mean(turn.seconds):.4f} s/step", flush=True)
        results = {name: process.finish() for name, process in processes.items()}
    return turns, results


def evaluate(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """The figures of one rate; both parts of a ratio come from one round."""
    seconds = {name: [statistics.mean(turn.seconds) for turn in of_name] for name, of_name in turns.items()}
    ratios = {
        name: [a / b for a, b in zip(values, seconds["unclipped"], strict=True)]
        for name, values in seconds.items()
        if name != "unclipped"
    }
    return {
        "vs_unclipped": {name: statistics.median(values) for name, values in ratios.items()},
        "intervals": {name: interval(values) for name, values in ratios.items()},
        "seconds_per_step": {name: statistics.median(values) for name, values in seconds.items()},
        "bytes_per_step": {name: round(statistics.median(t.num_bytes for t in turns[name])) for name in turns if name != "plain"},
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, model="gpt2-124m")
    parser.add_argument("--rates", type=float, nargs="+", default=(0.0, 0.1, 0.5, 1.0), help="shares of steps that clip")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of one turn")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contestant at each rate")
    parser.add_argument("--host-memory", help="budget; default: what is free")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk; 12 GB free")
    parser.add_argument("--trace", type=Path, help="write Chrome traces to FILE-<way>; costs a little")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.size = find_size(args.model, args.layers)
    args.ways = tuple(dict.fromkeys(("unclipped", *args.ways)))
    with scratch(args.dir) as args.directory:
        turns, results = compete(args)
    rates = {f"{rate:g}": {**evaluate(turns[rate]), "clipped": results["plain"]["clipped"][rate]} for rate in args.rates}
    few = [rates[f"{rate:g}"]["vs_unclipped"] for rate in args.rates if rate <= BAR_RATE]
    of_way = {way: max((row[way] for row in few), default=None) for way in args.ways if way != "unclipped"}
    result = {
        "benchmark": "clipping",
        "model": args.model,
        "speculative_vs_unclipped": of_way.get("speculative"),
        "adaptive_vs_unclipped": of_way.get("adaptive"),
        "same_bits": len({results[name]["digest"] for name in results if name != "unclipped"}) == 1,
        "rates": rates,
        "taken_back": {name: results[name]["taken_back"] for name in args.ways},
        "parameters": num_params(args.size),
        "layers": args.size.layers,
        "batch": args.batch,
        "seq": args.seq,
        "rounds": args.rounds,
        "steps": args.steps,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
