"""The effect of each idea of the papers: their ablations on one runtime, simulated and measured.

Each variant is a plan (``ablation_plans.py``). It is simulated for the paper's machine and model,
from presets; then it trains a small GPT on an emulated machine, and is simulated for that too, with
a profile of that model.

The emulated machine (``emulation.py``) has the paper's proportions: activations to weights by the
shape of the small model; compute to links, updates and the disk by set rates. All of these wait by
the clock and need almost no processor time. So neither drift nor contention of this machine is
measured, only the runtime's order of ops.

Every round trains every variant once, forwards and backwards in turn, and speeds are compared
within a round. A step's time is the mean of a round's steps, because updates of one run into the
next. ``measured`` is the median over rounds, the spread that of all steps. All variants of an
experiment that update on the same lanes have the same losses, bit for bit; ``same_bits`` says so.
``waits_s`` has the ops that compute waited for, by the trace.

    python benchmarks/ablation.py --rounds 3 --continue FILE --minutes 5 --dir /path/on/the/disk

On a GPU the same variants train a model of some billion parameters: ``--plans DIR`` writes their
plans for a model and a machine that ``gpu_step.py --profiles`` has profiled, with their simulation,
and trains nothing; ``gpu_step.py --variants DIR`` does.

    python benchmarks/gpu_step.py --cap 24GiB --only zero_offload --profiles DIR --dir DISK
    python benchmarks/ablation.py --plans DIR/plans --model-profile DIR/model.json \\
        --hardware-profile DIR/hardware-24GiB.json
    python benchmarks/gpu_step.py --cap 24GiB --variants DIR/plans --continue LOG --minutes 9 \\
        --dir DISK

Figures are speeds relative to the experiment's reference: above 1 is faster; * marks each column's
best. With ``--continue FILE`` measurements of the same settings in the file are not repeated, and
``--minutes`` ends a turn. Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from ablation_plans import EXPERIMENTS, Experiment, Variant
from emulation import PRECISION, SEQUENCE, Emulation
from gpt2 import fit, make_trainer
from paced import PacedGPT2
from scratch import Log, first_word, scratch

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy
from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.stalls import blame, op_of_block, stalls
from lightning_hetero.planners.evaluation import simulation
from lightning_hetero.profiling.presets import model as preset_model
from lightning_hetero.profiling.presets import paper_machine

WARM = 2  # steps before those that count: the first takes so long that its updates do not run into the second, as later ones do
PROFILE = "profile"  # what is measured of an experiment beside its variants
HOST_MEMORY = "4GiB"


class Clock(pl.Callback):
    """Times steps from the start of one batch to the next, reports their end, and stops the fit."""

    def __init__(self, steps: int, done: Callable[[], object] = lambda: None) -> None:
        self.steps, self.done = steps, done
        self.began: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.began.append(time.perf_counter())
        if len(self.began) > WARM + self.steps:
            self.done()
            trainer.should_stop = True
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 1

    @property
    def seconds(self) -> list[float]:
        """Of the steps that count."""
        return [b - a for a, b in pairwise(self.began)][WARM : WARM + self.steps]


def run(args: argparse.Namespace, emulation: Emulation, strategy: Any, module: PacedGPT2, clock: Clock) -> None:
    """Trains the small model."""
    trainer = make_trainer(strategy=strategy, callbacks=[clock], precision=PRECISION, default_root_dir=args.directory)
    fit(trainer, module, batch=emulation.batch, length=emulation.sequence)


def small(emulation: Emulation) -> PacedGPT2:
    """The small model."""
    torch.set_num_threads(1)  # its kernels are small
    torch.manual_seed(0)
    return PacedGPT2(emulation.size, emulation.flop_per_s)


def train(answer: Connection, args: argparse.Namespace, emulation: Emulation, plan: Plan) -> None:
    """Sends the steps' seconds, the waits of compute in one of them, and a digest of all losses."""
    strategy = HeteroOffloadStrategy(
        plan=plan, device=emulation.device, update_threads=1, host_memory=HOST_MEMORY, replan_drift=None, trace=True
    )
    module = small(emulation)

    def send() -> None:
        steps = max(1, len({s.step for s in strategy.trace.spans}))
        waits = list(blame(stalls(strategy.trace)).items())[:4]
        found = {
            "steps_s": clock.seconds,
            "waits_s": {op_of_block(name): seconds / steps for name, seconds in waits},
            "digest": hashlib.sha256(torch.stack(module.losses).float().numpy().tobytes()).hexdigest()[:16],
        }
        answer.send(found)

    clock = Clock(args.steps, send)
    run(args, emulation, strategy, module, clock)


def profiled(args: argparse.Namespace, emulation: Emulation) -> ModelProfile:
    """The small model, as the strategy profiles it on a device whose links nothing waits for."""
    device = EmulatedDevice(memory=emulation.device.memory)
    strategy = HeteroOffloadStrategy(
        plan="zero_offload", hardware_profile=emulation.machine, device=device, update_threads=1, replan_drift=None
    )
    run(args, emulation, strategy, small(emulation), Clock(3))
    profile = strategy.model_profile
    assert profile is not None, "that many batches are enough"
    return profile


# ---- experiments ---------------------------------------------------------------------------------


def predicted(plan: Plan, model: ModelProfile, machine: HardwareProfile) -> float | None:
    """Seconds of a step by simulation; ``None`` where it does not fit."""
    try:
        return simulation(plan, model, machine).prediction.iteration_s
    except PlanError:
        return None


def on_paper(experiment: Experiment) -> dict[str, float | None]:
    """Each variant on the paper's machine."""
    machine = paper_machine(experiment.machine)
    model = preset_model(experiment.model, batch=experiment.batch, sequence=SEQUENCE, hardware=machine)
    return {v.name: predicted(v.build(model, machine, experiment.state), model, machine) for v in experiment.variants}


def write_plans(args: argparse.Namespace) -> dict[str, Any]:
    """Writes the variants' plans for a profiled model and machine.

    Says how long they take by simulation.
    """
    model = ModelProfile.from_json(args.model_profile.read_text())
    machine = HardwareProfile.from_json(args.hardware_profile.read_text())
    args.plans.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for experiment in [e for e in EXPERIMENTS if e.name in args.only]:
        seconds = found[experiment.name] = {}
        for variant in experiment.variants:
            plan, name = variant.build(model, machine, experiment.state), f"{experiment.name}, {variant.name}"
            try:
                plan = replace(plan, name=name, predicted=simulation(plan, model, machine).prediction)
            except PlanError as error:
                print(f"{name}: {error}")
                seconds[variant.name] = None
                continue
            (args.plans / f"{name}.json").write_text(plan.to_json())
            seconds[variant.name] = plan.predicted.iteration_s if plan.predicted is not None else None
            print(f"{name}: {seconds[variant.name]:.4f} s/step by simulation")
    return found


class Emulated:
    """One experiment on its emulated machine.

    Args:
        experiment: The experiment.
        args: The command line.
        log: What has been measured.
    """

    def __init__(self, experiment: Experiment, args: argparse.Namespace, log: Log) -> None:
        self.experiment, self.args, self.log = experiment, args, log
        self.emulation = Emulation.of(experiment, compute_s=experiment.share * args.compute_s, layers=args.layers)
        self.model = self.emulation.model
        if not args.simulate_only:
            if (experiment.name, PROFILE) not in log.results:
                log.add(experiment.name, PROFILE, profiled(args, self.emulation).to_json())
            self.model = ModelProfile.from_json(log.results[experiment.name, PROFILE])
        machine, state = self.emulation.machine, experiment.emulated_state
        self.plans = {v.name: v.build(self.model, machine, state) for v in experiment.variants}

    def measure(self, number: int, variant: Variant) -> None:
        """One variant's part of a round, unless it has been measured."""
        key = self.experiment.name, f"{variant.name} #{number}"
        if key not in self.log.results:
            self.log.add(*key, first_word(train, self.args, self.emulation, self.plans[variant.name]))
            print(f"{key[0]}, {key[1]}: {statistics.fmean(self.log.results[key]['steps_s']):.3f} s", flush=True)

    def rounds(self) -> list[dict[str, Any]]:
        """What each complete round has measured, by variant."""
        found = []
        for number in range(self.args.rounds):
            row = {name: self.log.results.get((self.experiment.name, f"{name} #{number}")) for name in self.plans}
            if all(row.values()):
                found.append(row)
        return found

    def result(self) -> dict[str, Any]:
        """What there is to say of it."""
        simulated = {name: predicted(plan, self.model, self.emulation.machine) for name, plan in self.plans.items()}
        found: dict[str, Any] = {
            "source": self.experiment.source,
            "paper_proportions": asdict(self.emulation.wanted),
            "device": asdict(self.emulation.device),
            "tokens": self.emulation.batch * self.emulation.sequence,
            "simulated_s": simulated,
        }
        columns: dict[str, dict[str, float | None]] = {
            "simulated, paper's machine": speeds(on_paper(self.experiment), self.experiment.reference),
            "simulated, emulated": speeds(simulated, self.experiment.reference),
        }
        if rounds := self.rounds():
            seconds = [{name: statistics.fmean(of["steps_s"]) for name, of in row.items()} for row in rounds]
            pairs, reference = list(zip(seconds, rounds, strict=True)), self.experiment.reference
            ratios = {name: [row[reference] / row[name] for row in seconds] for name in self.plans}
            columns["measured, emulated"] = {name: statistics.median(values) for name, values in ratios.items()}
            single = {name: [row[reference] / s for row, of in pairs for s in of[name]["steps_s"]] for name in self.plans}
            measured = {name: statistics.median(row[name] for row in seconds) for name in self.plans}
            lanes = {name: tuple(row.update for row in plan.blocks) for name, plan in self.plans.items()}
            digests = {name: {row[name]["digest"] for row in rounds} for name in self.plans}
            found |= {
                "rounds": len(rounds),
                "measured_s": measured,
                "spread": {name: [min(values), max(values)] for name, values in single.items()},
                "simulation_error": {name: abs(s / measured[name] - 1) for name, s in simulated.items() if s is not None},
                "waits_s": {name: rounds[-1][name]["waits_s"] for name in self.plans},
                "same_bits": all(len(set.union(*(digests[n] for n in lanes if lanes[n] == of))) == 1 for of in lanes.values()),
            }
        return found | {"rows": list(rows(self.experiment, columns))}


def speeds(seconds: dict[str, float | None], reference: str) -> dict[str, float | None]:
    """Relative to the reference; ``None`` where either is not known."""
    base = seconds.get(reference)
    return {name: None if not s or not base else base / s for name, s in seconds.items()}


def rows(experiment: Experiment, columns: dict[str, dict[str, float | None]]) -> Iterator[dict[str, Any]]:
    """One row a variant."""
    fastest = {title: max(column, key=lambda name: column[name] or 0.0) for title, column in columns.items()}
    for variant in experiment.variants:
        yield {
            "variant": variant.name,
            "paper": variant.paper,
            **{title: column.get(variant.name) for title, column in columns.items()},
            "best": [title for title, name in fastest.items() if name == variant.name],
        }


def show(experiment: Experiment, found: dict[str, Any]) -> None:
    """Prints an experiment in Markdown."""
    table, spread, errors = found["rows"], found.get("spread"), found.get("simulation_error")
    print(f"\n{experiment.name}: {experiment.source}\n")
    titles = [key for key in table[0] if key not in ("variant", "best")]
    more = ["spread", "step, simulated against measured"] if spread else []
    print(f"| variant | {' | '.join([*titles, *more])} |\n|{'---|' * (len(titles) + len(more) + 1)}")
    for row in table:
        name = row["variant"]
        cells = ["-" if row[t] is None else f"{row[t]:.2f}{' *' * (t in row['best'])}" for t in titles]
        if spread and errors is not None:
            cells += [f"{spread[name][0]:.2f} to {spread[name][1]:.2f}", f"{errors[name]:.1%}" if name in errors else "-"]
        print(f"| {name} | {' | '.join(cells)} |")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [e.name for e in EXPERIMENTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="experiments")
    parser.add_argument("--layers", type=int, default=16, help="of the small model")
    parser.add_argument("--compute-s", type=float, default=2.0, help="what its forward and backward take")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a variant and round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--continue", dest="log", type=Path, metavar="FILE", help="one line of JSON for all that is measured")
    parser.add_argument("--minutes", type=float, help="no variant is begun later than that")
    parser.add_argument("--plans", type=Path, metavar="DIR", help="write the plans for these profiles, and train nothing")
    parser.add_argument("--model-profile", type=Path, metavar="FILE")
    parser.add_argument("--hardware-profile", type=Path, metavar="FILE")
    parser.add_argument("--simulate-only", action="store_true", help="nothing is trained: models and machines from presets")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk; 1 GB free")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.plans is not None:
        if args.model_profile is None or args.hardware_profile is None:
            raise SystemExit("--plans needs --model-profile and --hardware-profile; gpu_step.py --profiles writes both.")
        print(json.dumps({"benchmark": "ablation", "simulated_s": write_plans(args)}))
        return
    end_s = time.monotonic() + 60 * (args.minutes or float("inf"))
    settings = {"layers": args.layers, "compute_s": args.compute_s, "warm": WARM, "steps": args.steps, "torch": torch.__version__}
    log = Log(args.log, settings)
    chosen = [e for e in EXPERIMENTS if e.name in args.only]
    with scratch(args.dir) as args.directory:
        emulated = [Emulated(experiment, args, log) for experiment in chosen]
        for number in range(0 if args.simulate_only else args.rounds):
            for one in emulated:
                for variant in one.experiment.variants if number % 2 == 0 else reversed(one.experiment.variants):  # drift cancels
                    if time.monotonic() < end_s:
                        one.measure(number, variant)
    found = {one.experiment.name: one.result() for one in emulated}
    for one in emulated:
        show(one.experiment, found[one.experiment.name])
    errors = [error for of in found.values() for error in of.get("simulation_error", {}).values()]
    result = {
        "benchmark": "ablation",
        "experiments": found,
        "same_bits": all(of.get("same_bits", True) for of in found.values()),
        "median_simulation_error": statistics.median(errors) if errors else None,
        "worst_simulation_error": max(errors, default=None),
        **settings,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
