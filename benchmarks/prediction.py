"""How well a step is predicted: the simulator against the clock, and against the process's memory.

Every pair of a model and a plan gets a process. There the strategy profiles the model in two of its first batches, as
``plan="auto"`` does, and the plan is simulated with that profile and this machine's, which was measured just before. Then rounds
follow: one batch is timed again and the plan judged anew (``strategy.replan()``), and steps are measured. Prediction and
measurement of a round are seconds apart, because machines drift by more than what is measured. A round in which other processes
have computed is repeated, up to as many times as there are rounds.

Keys of the JSON line: ``median_error`` and ``worst_error`` of the pairs' step times, each pair's the median over its rounds,
relative to what was measured; ``memory_median_error`` and ``memory_worst_error`` of the process's peak memory: what was predicted
before the plan had ever run, against the peak of all rounds; ``pairs`` has all of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from gpt2 import GPT2, Size, fit, make_trainer
from scratch import scratch

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile, ModelShape
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.planners import BUILTIN_PLANS, PLANNERS
from lightning_hetero.planners.judge import judged
from lightning_hetero.profiling import hardware

MODELS = {
    "wide": (Size(layers=6, width=1024, heads=16, vocabulary=16384), 1, 128),
    "deep": (Size(layers=16, width=512, heads=8, vocabulary=16384), 2, 128),
    "gpt2-124m": (Size(layers=12, width=768, heads=12), 1, 128),
    "compute-bound": (Size(layers=8, width=512, heads=8, vocabulary=8192), 8, 128),
}


DISTURBED = 0.05  # CPU seconds of other processes a second


def every_other_on_disk(model: ModelShape) -> Plan:
    """The plan ``disk`` for every second block, ``host`` for the others."""
    pairs = zip(BUILTIN_PLANS["host"](model).blocks, BUILTIN_PLANS["disk"](model).blocks, strict=True)
    return Plan(name="mixed", blocks=tuple(pair[index % 2] for index, pair in enumerate(pairs)))


def state_on_disk(model: ModelShape) -> Plan:
    """Weights in memory, all state on disk."""
    rows = tuple(BlockPlan(name=b.name, state=Tier.DISK if b.state_bytes else Tier.HOST) for b in model.blocks)
    return Plan(name="state_on_disk", blocks=rows)


PLANS: dict[str, Callable[[ModelShape], Plan]] = {**BUILTIN_PLANS, "mixed": every_other_on_disk, "state_on_disk": state_on_disk}


class Idle:
    """Says whether the machine is otherwise idle: work in the kernel counts for nobody, as a disk's is done there."""

    def __init__(self) -> None:
        self._last = self._now()

    def lap(self) -> float:
        """CPU seconds of other processes a second, since the last lap."""
        before, self._last = self._last, self._now()
        return (self._last[1] - before[1]) / (self._last[0] - before[0])

    def _now(self) -> tuple[float, float]:
        machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
        return time.perf_counter(), machine.user + machine.nice - own.user


class Rounds(pl.Callback):
    """Plans, lets the pipeline fill, measures; as often as there are rounds.

    Args:
        rounds: How often.
        steps: Measured steps of a round.
    """

    PROFILED = 3  # batches until the first plan is in force
    SETTLE = 3  # the batch that is timed, the one after it, with the new plan, and those until times are steady

    def __init__(self, *, rounds: int, steps: int) -> None:
        self.num_rounds, self.steps = rounds, steps
        self.began: list[float] = []
        self.left = self.PROFILED
        self.rounds: list[dict[str, float]] = []
        self.repeated = 0
        self.clock = Idle()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.began.append(time.perf_counter())
        if self.left:
            self.left -= 1
            return
        strategy: Any = trainer.strategy
        share = self.clock.lap()
        if share > DISTURBED and self.repeated < self.num_rounds:
            self.repeated += len(self.began) > self.PROFILED + 1
        elif len(self.began) > self.PROFILED + 1:
            measured = [b - a for a, b in pairwise(self.began)][-self.steps :]
            predicted = strategy.plan.predicted
            self.rounds.append(
                {
                    "measured_s": statistics.median(measured),
                    "predicted_s": predicted.iteration_s,
                    "measured_bytes": strategy.session.executor.heap.peak_bytes,
                    "predicted_bytes": predicted.host_peak_bytes,
                    "others": share,
                }
            )
        if len(self.rounds) == self.num_rounds:
            trainer.should_stop = True
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 1
            return
        strategy.replan()
        self.left = self.SETTLE + self.steps - 1


def measure(args: argparse.Namespace, name: str, plan: str, machine: HardwareProfile) -> list[dict[str, float]]:
    """The rounds of one pair."""
    torch.manual_seed(0)
    size, batch, length = MODELS[name]

    def planner(model: ModelProfile, hardware: HardwareProfile, **options: Any) -> Plan:
        return judged(replace(PLANS[plan](model.shape()), name=plan), model, hardware, **options)

    PLANNERS["benchmark"] = planner
    strategy = HeteroOffloadStrategy(plan="benchmark", hardware_profile=machine, replan_drift=None)
    rounds = Rounds(rounds=args.rounds, steps=args.steps)
    trainer = make_trainer(strategy=strategy, callbacks=[rounds], default_root_dir=args.directory)
    fit(trainer, GPT2(size), batch=batch, length=length)
    return rounds.rounds


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    """What the rounds of a pair say together."""
    peak, predicted = max(r["measured_bytes"] for r in rounds), rounds[0]["predicted_bytes"]
    ratios = [r["predicted_s"] / r["measured_s"] for r in rounds]
    return {
        "error": abs(statistics.median(ratios) - 1),
        "spread": max(ratios) - min(ratios),
        "others": max(r["others"] for r in rounds),
        "measured_s": statistics.median(r["measured_s"] for r in rounds),
        "predicted_s": statistics.median(r["predicted_s"] for r in rounds),
        "memory_error": abs(predicted / peak - 1),
        "measured_bytes": peak,
        "predicted_bytes": predicted,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk; 10 GB free")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    pairs: list[dict[str, Any]] = []
    with scratch(args.dir) as args.directory:
        for name in args.models:
            machine = hardware.measure(args.directory, device="cpu", refresh=True)
            for plan in args.plans:
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as process:
                    rounds = process.submit(measure, args, name, plan, machine).result()
                pair = {"model": name, "plan": plan, **summary(rounds)}
                pairs.append(pair)
                print(
                    f"{name:14} {plan:14} step {pair['measured_s']:.3f} s, predicted {pair['predicted_s']:.3f} s "
                    f"({pair['error']:.1%}); memory {pair['measured_bytes'] / 2**20:.0f} MiB, predicted "
                    f"{pair['predicted_bytes'] / 2**20:.0f} MiB ({pair['memory_error']:.1%})",
                    flush=True,
                )
    result = {
        "benchmark": "prediction",
        "median_error": statistics.median(p["error"] for p in pairs),
        "worst_error": max(p["error"] for p in pairs),
        "memory_median_error": statistics.median(p["memory_error"] for p in pairs),
        "memory_worst_error": max(p["memory_error"] for p in pairs),
        "num_pairs": len(pairs),
        "pairs": pairs,
        "rounds": args.rounds,
        "steps": args.steps,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
