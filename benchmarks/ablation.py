"""What each idea of the papers brings: their ablations on one runtime, simulated and measured side by side.

Each variant is a plan (``ablation_plans.py``). It is simulated for the paper's machine and model, from presets; then it trains a
small GPT on an emulated device, and is simulated for that too, with profiles of that model and of this machine, measured first.

The emulated device has the paper's proportions. The updates' time on this machine is given; compute is slowed down until it is as
long, relative to the updates, as the paper's, and the links are as slow, relative to compute, as the paper's. Where this machine's
updates in memory are too fast for that, the state lives on its disk. What cannot be matched: compute is never faster than this
machine, the disk is its own, and updates on the emulated device run on the host's processor.

All variants of an experiment with the same lanes for updates end with the same weights, bit for bit; ``same_bits`` says so.

    python benchmarks/ablation.py --dir /path/on/the/disk

Figures are speeds relative to the experiment's reference: above 1 is faster; * marks each column's best. Prints one line of
JSON last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from ablation_plans import EXPERIMENTS, Experiment
from gpt2 import GPT2, Size, fit, make_trainer
from scratch import scratch

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy
from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan, Tier
from lightning_hetero.planners.judge import simulation
from lightning_hetero.profiling import hardware
from lightning_hetero.profiling.presets import model as preset_model
from lightning_hetero.profiling.presets import paper_machine
from lightning_hetero.strategies.machine import emulated

SEQUENCE = 1024  # of the papers' models
WARM = 3  # steps before those that count
SLOWEST = 40.0  # slower than this, a step would take minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Proportions:
    """A step of a machine, relative to its compute: seconds per second of forward and backward.

    Attributes:
        upload: The weights' one way to the device.
        download: The gradients' one way from it.
        update: All updates where the state lives.
    """

    upload: float
    download: float
    update: float


def compute_s(model: ModelProfile) -> float:
    """Seconds of forward and backward, without anything else."""
    return sum(b.forward_s + b.backward_s for b in model.blocks)


def update_s(model: ModelProfile, machine: HardwareProfile, state: Tier) -> float:
    """Seconds of all CPU updates: on disk the slower of computing and of reading and writing state and weights."""
    params = sum(b.num_trainable_params for b in model.blocks if not b.pinned)
    on_cpu = params / machine.cpu_update_params_per_s
    if state is not Tier.DISK:
        return on_cpu
    num_bytes = params * (model.state_itemsize + model.compute_itemsize)
    read, write = num_bytes / machine.disk_read_bytes_per_s, num_bytes / machine.disk_write_bytes_per_s
    return max(on_cpu, max(read, write) if machine.disk_duplex else read + write)


def proportions(model: ModelProfile, machine: HardwareProfile, state: Tier) -> Proportions:
    """Those of a model on a machine."""
    blocks, compute = [b for b in model.shape().blocks if not b.pinned], compute_s(model)
    return Proportions(
        upload=sum(b.weight_bytes for b in blocks) / machine.link_h2d_bytes_per_s / compute,
        download=sum(b.gradient_bytes for b in blocks) / machine.link_d2h_bytes_per_s / compute,
        update=update_s(model, machine, state) / compute,
    )


def slowed(model: ModelProfile, factor: float) -> ModelProfile:
    """The model on a device that computes so many times slower."""
    blocks = (replace(b, forward_s=factor * b.forward_s, backward_s=factor * b.backward_s) for b in model.blocks)
    return replace(model, blocks=tuple(blocks))


def device_for(wanted: Proportions, model: ModelProfile, machine: HardwareProfile, state: Tier) -> EmulatedDevice:
    """The emulated device with these proportions, as far as this machine allows."""
    factor = min(SLOWEST, max(1.0, update_s(model, machine, state) / wanted.update / compute_s(model)))
    blocks, compute = [b for b in model.shape().blocks if not b.pinned], factor * compute_s(model)
    saved = sum(b.activation_bytes for b in model.blocks)
    held = sum(b.weight_bytes + b.state_bytes + b.gradient_bytes for b in model.shape().blocks)
    return EmulatedDevice(
        memory=2 * (saved + held) + model.constant_device_bytes,
        h2d_bytes_per_s=sum(b.weight_bytes for b in blocks) / (wanted.upload * compute),
        d2h_bytes_per_s=sum(b.gradient_bytes for b in blocks) / (wanted.download * compute),
        compute_slowdown=factor,
    )


def machine_of(host: HardwareProfile, device: EmulatedDevice) -> HardwareProfile:
    """The emulated machine.

    Compute runs in bursts and rests between them. What runs beside it is hindered by the bursts alone; a burst that is hindered is
    slowed down as a whole, so that compute suffers as it does on the host.
    """
    factor = device.compute_slowdown
    contention = {
        pair: 1 + (value - 1) / factor if "compute" in pair.split("|")[1].split("+") else value
        for pair, value in host.contention.items()
    }
    return replace(emulated(host, device), contention=contention)


# ---- training ---------------------------------------------------------------------------------------------------------------


class Clock(pl.Callback):
    """Times steps, from the begin of one batch to the next one's, and ends the fit."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.began: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.began.append(time.perf_counter())
        if len(self.began) > WARM + self.steps:
            trainer.should_stop = True
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 1

    @property
    def seconds(self) -> list[float]:
        """Of the steps that count."""
        return [b - a for a, b in pairwise(self.began)][WARM : WARM + self.steps]


def train(args: argparse.Namespace, plan: Plan, device: EmulatedDevice) -> tuple[list[float], str]:
    """Seconds of the steps, and a digest of the weights after them."""
    torch.manual_seed(0)
    strategy = HeteroOffloadStrategy(plan=plan, device=device, update_threads=1, host_memory=args.host_memory, replan_drift=None)
    clock = Clock(args.steps)
    module = GPT2(args.size)
    fit(
        make_trainer(strategy=strategy, callbacks=[clock], default_root_dir=args.directory),
        module,
        batch=args.batch,
        length=args.seq,
    )
    digest = hashlib.sha256()
    for tensor in module.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return clock.seconds, digest.hexdigest()[:16]


def profiled(args: argparse.Namespace, host: HardwareProfile) -> ModelProfile:
    """The small model, as the strategy profiles it."""
    strategy = HeteroOffloadStrategy(
        plan="zero_offload", hardware_profile=host, device=EmulatedDevice(memory="8GiB"), update_threads=1, replan_drift=None
    )
    clock = Clock(2)
    torch.manual_seed(0)
    trainer = make_trainer(strategy=strategy, callbacks=[clock], default_root_dir=args.directory)
    fit(trainer, GPT2(args.size), batch=args.batch, length=args.seq)
    profile = strategy.model_profile
    assert profile is not None, "two batches are enough"
    return profile


# ---- experiments ------------------------------------------------------------------------------------------------------------


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


def here(
    args: argparse.Namespace, experiment: Experiment, model: ModelProfile, host: HardwareProfile
) -> tuple[dict[str, Any], dict[str, float | None], dict[str, float | None], dict[str, str]]:
    """The device, each variant's step on it by simulation and by the clock, and the weights' digests."""
    paper = paper_machine(experiment.machine)
    theirs = preset_model(experiment.model, batch=experiment.batch, sequence=SEQUENCE, hardware=paper)
    state = Tier.DISK if experiment.updates_on_disk else Tier.HOST
    device = device_for(proportions(theirs, paper, experiment.state), model, host, state)
    slow, machine = slowed(model, device.compute_slowdown), machine_of(host, device)
    plans = {v.name: v.build(slow, machine, state) for v in experiment.variants}
    simulated = {name: predicted(plan, slow, machine) for name, plan in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    digests: dict[str, str] = {}
    for number in range(args.rounds):
        for name in list(plans) if number % 2 else reversed(plans):  # drift cancels
            steps, digests[name] = train(args, plans[name], device)
            seconds[name] += steps
            print(f"{experiment.name}, {name}: {statistics.median(steps):.3f} s", flush=True)
    lanes = {name: tuple(row.update for row in plan.blocks) for name, plan in plans.items()}
    settings = {
        "compute_slowdown": device.compute_slowdown,
        "contention": machine.contention,
        "h2d_bytes_per_s": device.h2d_bytes_per_s,
        "d2h_bytes_per_s": device.d2h_bytes_per_s,
        "paper": proportions(theirs, paper, experiment.state),
        "emulated": proportions(slow, machine, state),
        "same_bits": all(len({digests[n] for n in plans if lanes[n] == kind}) == 1 for kind in lanes.values()),
    }
    return settings, simulated, {name: statistics.median(rows) for name, rows in seconds.items()}, digests


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


def show(experiment: Experiment, table: list[dict[str, Any]]) -> None:
    """Prints an experiment in Markdown."""
    print(f"\n{experiment.name}: {experiment.source}\n")
    titles = [key for key in table[0] if key not in ("variant", "best")]
    print(f"| variant | {' | '.join(titles)} |\n|{'---|' * (len(titles) + 1)}")
    for row in table:
        cells = ["-" if row[t] is None else f"{row[t]:.2f}{' *' * (t in row['best'])}" for t in titles]
        print(f"| {row['variant']} | {' | '.join(cells)} |")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [e.name for e in EXPERIMENTS]
    parser.add_argument("--experiments", nargs="+", choices=names, default=names)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a variant and round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--simulate-only", action="store_true", help="the papers' machines alone; nothing is trained")
    parser.add_argument("--host-memory", default="8GiB")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk; 5 GB free")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # one processor for compute, the others for what runs beside it
    heads = max(1, args.width // 64)
    args.size = Size(layers=args.layers, width=args.width, heads=heads, vocabulary=2048, context=max(args.seq, 64))
    chosen = [e for e in EXPERIMENTS if e.name in args.experiments]
    result: dict[str, Any] = {"benchmark": "ablation", "experiments": {}}
    with scratch(args.dir) as args.directory:
        if not args.simulate_only:
            host = hardware.measure(args.directory, device="cpu", update_threads=1)
            model = profiled(args, host)
        for experiment in chosen:
            columns = {"simulated, paper's machine": speeds(on_paper(experiment), experiment.reference)}
            found: dict[str, Any] = {"source": experiment.source}
            if not args.simulate_only:
                settings, simulated, measured, digests = here(args, experiment, model, host)
                columns["simulated, emulated"] = speeds(simulated, experiment.reference)
                columns["measured, emulated"] = speeds(measured, experiment.reference)
                found |= {**settings, "simulated_s": simulated, "measured_s": measured, "digests": digests}
            found["rows"] = list(rows(experiment, columns))
            show(experiment, found["rows"])
            result["experiments"][experiment.name] = found
    result |= {"layers": args.layers, "width": args.width, "batch": args.batch, "seq": args.seq, "steps": args.steps}
    result |= {"rounds": args.rounds, "torch": torch.__version__}
    print(json.dumps(result, default=lambda value: {f: getattr(value, f) for f in value.__slots__}))


if __name__ == "__main__":
    main()
