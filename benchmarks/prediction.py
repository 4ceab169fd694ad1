"""The error of predictions: the simulator against the clock and the process's memory.

Every pair of a model and a plan gets a process. There the strategy profiles the model in its first
batches, as ``plan="auto"`` does, and the plan is simulated with that profile and this machine's,
which was measured just before. Then rounds follow: batches are timed again and the plan evaluated
again (``strategy.replan()``), and steps are measured. Prediction and measurement of a round are
seconds apart, because machines drift by more than the measured errors. A round in which other
processes have computed is repeated, up to as many times as there are rounds.

One more pair is a device with memory of its own (``EmulatedDevice``) whose first batch does not
fit: its memory holds weights and gradients under its first plan, and about half of the saved
activations. The batch is repeated under smaller plans, the next ones are profiled, and ``lohan``
plans for them. The memory of this pair is the device's.

The cost of profiling is measured once per model, in three more processes that keep everything in
memory: plain Lightning, a plan that is given, and one that profiles its first batches and later,
once steps are steady, records another one. A process's first step is slow by itself: memory is
touched for the first time.

A run takes half an hour. With ``--continue FILE`` measurements are added to the file, and those of
the same settings on the same machine are not repeated, so a run can be interrupted, or done one
model at a time.

Keys of the JSON line: ``median_error`` and ``worst_error`` of the pairs' step times, each pair's
the median over its rounds, relative to the measurement, of the pairs on the CPU;
``memory_median_error`` and ``memory_worst_error`` of the process's peak memory; ``small_device``:
the same of the small device, and ``begun_again``, how often a step began again. Memory was
predicted before the plan had ever run, against the peak of all rounds; ``pairs`` has all of them.
``profiled_batch_ratio``: a fit's first batch, recorded, over an ordinary step of plain Lightning;
``vs_plain_first_ratio`` and ``vs_given_first_ratio``: the same over the first step of plain
Lightning and of a given plan; ``recorded_batch_ratio`` and ``timed_batch_ratio``: a batch that is
recorded or timed once steps are steady, over such a step. All are the worst model's; ``profiles``
has the seconds.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from gpt2 import GPT2, Size, fit, make_trainer
from scratch import Log, alone, scratch

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy
from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile, ModelShape
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.planners import BUILTIN_PLANS, PLANNERS
from lightning_hetero.planners.evaluation import evaluated
from lightning_hetero.planning.autoplan import Stage
from lightning_hetero.profiling import hardware
from lightning_hetero.profiling.machine import MeasuredMachine

MODELS = {
    "wide": (Size(layers=6, width=1024, heads=16, vocabulary=16384), 1, 128),
    "deep": (Size(layers=16, width=512, heads=8, vocabulary=16384), 2, 128),
    "gpt2-124m": (Size(layers=12, width=768, heads=12), 1, 128),
    "compute-bound": (Size(layers=8, width=512, heads=8, vocabulary=8192), 8, 128),
}

SMALL_DEVICE = "small-device"  # the pair of a model with a device whose first batch does not fit
PROFILE = "profile"  # what is measured of a model beside its pairs
_SAVED = 16  # of a layer's inputs, in bytes, at least so much is saved for backward
DISTURBED = 0.05  # CPU seconds of other processes a second
ATTEMPTS = 3


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
    """Whether the machine is otherwise idle. Kernel time is ignored: disks work there."""

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
        on_host: Memory is the process's; else the device's.
    """

    PROFILED = 5  # batches until the first plan is in force
    SETTLE = 5  # the batches that are timed, the one after them, with the new plan, and those until times are steady

    def __init__(self, *, rounds: int, steps: int, on_host: bool = True) -> None:
        self.num_rounds, self.steps = rounds, steps
        self.began: list[float] = []
        self.left = self.PROFILED
        self.rounds: list[dict[str, float]] = []
        self.repeated = 0
        self.clock = Idle()
        self.on_host = on_host

    def peak_bytes(self, strategy: Any) -> int:
        """Of the process, or of the device."""
        executor = strategy.session.executor
        peak: int = executor.heap.peak_bytes if self.on_host else executor.lanes.peak_bytes()
        return peak

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.began.append(time.perf_counter())
        if self.left:
            self.left -= 1
            return
        strategy: Any = trainer.strategy
        if strategy.autoplan.stage is not Stage.RUN:  # a step has begun again, so the batches are profiled again
            self.left = self.steps
            return
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
                    "measured_bytes": self.peak_bytes(strategy),
                    "predicted_bytes": predicted.host_peak_bytes if self.on_host else predicted.device_peak_bytes,
                    "others": share,
                }
            )
        if len(self.rounds) == self.num_rounds:
            trainer.should_stop = True
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 1
            return
        strategy.replan()
        self.left = self.SETTLE + self.steps - 1


class Batches(pl.Callback):
    """Times every batch; has one recorded once steps are steady."""

    AGAIN = 12  # the batch that is recorded then
    END = AGAIN + 2

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.began.append(time.perf_counter())

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        autoplan = getattr(trainer.strategy, "autoplan", None)
        if autoplan is not None and len(self.began) == self.AGAIN:
            autoplan.stage = Stage.RECORD

    @property
    def seconds(self) -> list[float]:
        """Of each batch, until the next one began."""
        return [b - a for a, b in pairwise(self.began)]


def strategy_for(plan: str, machine: HardwareProfile) -> HeteroOffloadStrategy:
    """Profiles the model, and then goes on with one of ``PLANS``."""

    def planner(model: ModelProfile, hardware: HardwareProfile, **options: Any) -> Plan:
        return evaluated(replace(PLANS[plan](model.shape()), name=plan), model, hardware, **options)

    PLANNERS["benchmark"] = planner
    return HeteroOffloadStrategy(plan="benchmark", hardware_profile=machine, replan_drift=None)


def train(args: argparse.Namespace, name: str, strategy: Any, callback: pl.Callback, **options: Any) -> None:
    torch.manual_seed(0)
    size, batch, length = MODELS[name]
    trainer = make_trainer(strategy=strategy, callbacks=[callback], default_root_dir=args.directory, **options)
    fit(trainer, GPT2(size), batch=batch, length=length)


def measure(args: argparse.Namespace, name: str, plan: str, machine: HardwareProfile) -> dict[str, float]:
    """One pair."""
    rounds = Rounds(rounds=args.rounds, steps=args.steps)
    train(args, name, strategy_for(plan, machine), rounds)
    return summary(rounds.rounds)


class BegunAgain(logging.Handler):
    """Counts steps that begin again because the device's memory is too small."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "the step begins again" in record.getMessage()


def small_device(args: argparse.Namespace, name: str, machine: HardwareProfile) -> dict[str, float]:
    """A model on a device whose first batch does not fit.

    Raises:
        RuntimeError: It did fit.
    """
    size, batch, length = MODELS[name]
    layer_bytes = 4 * batch * length * size.width * _SAVED  # of fp32
    needed = 0
    try:
        train(args, name, HeteroOffloadStrategy("host", device=EmulatedDevice(memory="1B")), Batches(), max_steps=1)
    except OutOfMemoryBudgetError as refusal:
        needed = refusal.needed_bytes
    logits_bytes = 3 * 4 * batch * length * size.vocabulary  # they, their logarithms and their gradient
    memory = needed + logits_bytes + size.layers * layer_bytes // 2
    device = EmulatedDevice(memory=memory, h2d_bytes_per_s=2e9, d2h_bytes_per_s=2e9)
    strategy = HeteroOffloadStrategy("lohan", device=device, hardware_profile=machine, replan_drift=None)
    rounds, again = Rounds(rounds=args.rounds, steps=args.steps, on_host=False), BegunAgain()
    logger = logging.getLogger("lightning_hetero")
    logger.addHandler(again)
    try:
        train(args, name, strategy, rounds)
    finally:
        logger.removeHandler(again)
    if not again.count:
        raise RuntimeError(f"the first batch of {name!r} fitted the device of {memory} bytes")
    return summary(rounds.rounds) | {"begun_again": again.count, "device_bytes": memory}


def batches(args: argparse.Namespace, name: str, how: str, machine: HardwareProfile) -> list[float]:
    """CPU seconds of other processes per second, and the seconds of each of the first batches."""
    make: dict[str, Callable[[], Any]] = {
        "plain": lambda: "auto",
        "given": lambda: HeteroOffloadStrategy(plan="host"),
        "profiled": lambda: strategy_for("host", machine),
    }
    callback, clock = Batches(), Idle()
    train(args, name, make[how](), callback, max_steps=Batches.END)
    return [clock.lap(), *callback.seconds]


def profile_costs(args: argparse.Namespace, name: str, machine: HardwareProfile) -> dict[str, float]:
    """What profiling a model costs; what others have disturbed is measured again, a few times."""
    found: dict[str, list[float]] = {}
    for how in ("plain", "given", "profiled"):
        for _ in range(ATTEMPTS):
            others, *found[how] = alone(batches, args, name, how, machine)
            if others <= DISTURBED:
                break
    plain, given, ours = found.values()
    profiled, steady = Rounds.PROFILED - 1, Batches.AGAIN - Rounds.SETTLE
    return {
        "plain_first_s": plain[0],
        "given_first_s": given[0],
        "plain_s": statistics.median(plain[steady:]),
        "first_s": ours[0],
        "timed_s": statistics.median(ours[1:profiled]),
        "step_s": statistics.median(ours[steady : Batches.AGAIN]),
        "recorded_s": ours[Batches.AGAIN],
    }


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


def print_pair(name: str, what: str, pair: dict[str, float]) -> None:
    print(
        f"{name:14} {what:14} step {pair['measured_s']:.3f} s, predicted {pair['predicted_s']:.3f} s "
        f"({pair['error']:.1%}); memory {pair['measured_bytes'] / 2**20:.0f} MiB, predicted "
        f"{pair['predicted_bytes'] / 2**20:.0f} MiB ({pair['memory_error']:.1%})",
        flush=True,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument(
        "--small-device", choices=MODELS, default="compute-bound", metavar="MODEL", help="the model on a small device"
    )
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--continue", dest="log", type=Path, metavar="FILE", help="one line of JSON for all that is measured")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk; 10 GB free")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    settings = {
        "rounds": args.rounds,
        "steps": args.steps,
        "machine": MeasuredMachine.of(args.dir, device="cpu", update_threads=None).fingerprint(),
    }
    log = Log(args.log, settings | {"models": {name: [asdict(size), *shape] for name, (size, *shape) in MODELS.items()}})
    with scratch(args.dir) as args.directory:
        for name in args.models:
            profile = functools.cache(functools.partial(hardware.measure, args.directory, device="cpu", refresh=True))
            if (name, PROFILE) not in log.results:
                costs = profile_costs(args, name, profile())
                log.add(name, PROFILE, costs)
                print(f"{name:14} " + ", ".join(f"{key} {value:.3f}" for key, value in costs.items()), flush=True)
            for plan in args.plans:
                if (name, plan) in log.results:
                    continue
                pair = alone(measure, args, name, plan, profile())
                log.add(name, plan, pair)
                print_pair(name, plan, pair)
        if (args.small_device, SMALL_DEVICE) not in log.results:
            found = alone(small_device, args, args.small_device, hardware.measure(args.directory, device="cpu", refresh=True))
            log.add(args.small_device, SMALL_DEVICE, found)
            print_pair(args.small_device, SMALL_DEVICE, found)
    profiles = {name: costs for (name, what), costs in log.results.items() if what == PROFILE}
    pairs = [
        {"model": name, "plan": what} | pair for (name, what), pair in log.results.items() if what not in (PROFILE, SMALL_DEVICE)
    ]
    result = {
        "benchmark": "prediction",
        "median_error": statistics.median(p["error"] for p in pairs),
        "worst_error": max(p["error"] for p in pairs),
        "memory_median_error": statistics.median(p["memory_error"] for p in pairs),
        "memory_worst_error": max(p["memory_error"] for p in pairs),
        "profiled_batch_ratio": max(p["first_s"] / p["plain_s"] for p in profiles.values()),
        "vs_plain_first_ratio": max(p["first_s"] / p["plain_first_s"] for p in profiles.values()),
        "vs_given_first_ratio": max(p["first_s"] / p["given_first_s"] for p in profiles.values()),
        "recorded_batch_ratio": max(p["recorded_s"] / p["step_s"] for p in profiles.values()),
        "timed_batch_ratio": max(p["timed_s"] / p["step_s"] for p in profiles.values()),
        "num_pairs": len(pairs),
        "pairs": pairs,
        "small_device": {"model": args.small_device} | log.results[args.small_device, SMALL_DEVICE],
        "profiles": profiles,
        "rounds": args.rounds,
        "steps": args.steps,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
