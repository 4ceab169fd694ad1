"""Step time of an offloaded GPT on a GPU with capped memory, by this library and by others.

The GPT has 1 to 3 billion parameters.

* ``zero_offload``, ``zero_infinity``, ``auto``: Lightning under ``HeteroOffloadStrategy`` with that
  plan. ``auto`` is the planner ``holistic``, which needs highspy. A machine without it saves the
  planner's input with ``--profiles DIR``; the plan is made elsewhere (``lightning-hetero plan``),
  and ``--plan FILE`` trains with it.
* ``fsdp2``: ``fully_shard`` of every layer with ``CPUOffloadPolicy``, its own loop, fused AdamW on
  the CPU; ``fsdp2_recompute``: with activation checkpointing of every layer, which needs less
  memory. The faster of the two counts.
* ``deepspeed_cpu``, ``deepspeed_nvme``: ZeRO-Offload and ZeRO-Infinity, if deepspeed can be
  imported.
* ``peak``: the same layers with nothing offloaded, updated by torch's fused AdamW on the device.
  Two numbers of layers that fit give the time of a layer and of the rest, and so that of the whole
  model.
* ``overhead``: plan ``resident`` against plain Lightning, on a model that fits.
* With ``--variants DIR`` only the plans in it are trained, each by its file's name: those of
  ``ablation.py --plans DIR``.

A contestant that cannot run here is ``null``, and a line before says why. Contestants run one after
the other, each in a process with the device to itself. ``--continue LOG`` keeps the measurements,
contestant by contestant, and after ``--minutes`` no contestant begins; the same command again
continues. For short sessions without highspy:

    python benchmarks/gpu_step.py --cap 24GiB --only peak zero_offload --profiles DIR \\
        --continue LOG --dir DISK
    # on any machine with highspy:
    lightning-hetero plan --model-profile DIR/model.json \\
        --hardware-profile DIR/hardware-24GiB.json --out plan-24.json
    python benchmarks/gpu_step.py --cap 24GiB --plan plan-24.json --minutes 7 --continue LOG \\
        --dir DISK
    # a trial without a GPU:
    python benchmarks/gpu_step.py --device emulated --model tiny --seq 16 --cap 1GiB --batch 1

Weights and state are 14 bytes per parameter in bf16: 19 GB of host memory for 1.3 billion, and
twice as much of disk for ``zero_infinity``, whose step reads and writes 19 GB each.

Prints one line of JSON last. Per cap and contestant: ``seconds_per_step``, ``tokens_per_s``,
``share_of_peak`` (relative to the same blocks without offload), ``flops_per_s``,
``device_peak_bytes``, ``allocator_retries`` (of torch's allocator; it frees what it has cached and
tries again), ``prediction_error``; and ``auto_vs_fsdp2``, ``auto_vs_deepspeed_nvme`` (times
faster). ``flops_per_step`` counts the matrix products of forward and backward, two operations per
multiplication and addition: those of layers, head and attention (its causal half), neither
recomputation nor updates. After its timed steps each of our plans trains two steps with a trace:
``stalls`` says what compute waited for, ``waits_s`` the seconds by op, ``lanes_bytes_per_s`` the
rate of each lane while it was busy, and ``trace`` has the ops: step, name, lane, start, end, bytes.
``bars``: the targets, the worst figure of all caps, and whether it meets the target.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from contestants import Baton, Contestant
from gpt2 import GPT2, add_model_options, find_size, fit, make_trainer, num_params
from gpu_peers import DTYPES, accelerator, capped, deepspeed, fsdp2, memory
from scratch import Log, scratch
from step import TakesTurns

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy
from lightning_hetero.ir.stalls import blame, describe, stalls
from lightning_hetero.ir.trace import Trace
from lightning_hetero.units import parse_bytes

WARM = 5  # the steps in which plans are made and pipelines fill
AUTO, PEAK, OVERHEAD = "auto", "peak", "overhead"
TRACE = "trace"  # the order of a turn whose steps are recorded
BARS = {  # the least of some, the most of others
    "share_of_peak": (min, 0.95),
    "auto_vs_deepspeed_nvme": (min, 2.5),
    "auto_vs_fsdp2": (min, 1.5),
    "prediction_error": (max, 0.05),
    "overhead": (max, 1.02),
}


class InTime(TakesTurns):
    """Trains when it is this process's turn, a step after the other."""

    def __init__(self, baton: Baton, args: argparse.Namespace) -> None:
        super().__init__(baton)
        self.args = args

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        if self.args.device == "cuda":
            torch.cuda.synchronize()
        super().on_train_batch_start(trainer, *rest)


# ---- contestants ---------------------------------------------------------------------------------


def plain(baton: Baton, args: argparse.Namespace, layers: int, module_cls: type[GPT2]) -> dict[str, Any]:
    """Lightning without us."""
    capped(args)
    torch.manual_seed(0)
    trainer = make_trainer(
        accelerator=accelerator(args), devices=1, precision=args.precision, callbacks=[InTime(baton, args)],
        default_root_dir=args.directory,
    )  # fmt: skip
    fit(trainer, module_cls(replace(args.size, layers=layers)), batch=args.batch, length=args.seq)
    return memory(args)


def offloaded(baton: Baton, args: argparse.Namespace, plan: str | Path, layers: int) -> dict[str, Any]:
    """Lightning under a plan, its planner or its file."""
    capped(args)
    torch.manual_seed(0)
    options: dict[str, Any] = {"device_memory": args.cap}
    if args.device == "emulated":
        options = {"device": EmulatedDevice(memory=args.cap)}
    strategy = HeteroOffloadStrategy(plan=plan, host_memory=args.host_memory, replan_drift=None, **options)

    def drain() -> None:
        session: Any = strategy.session
        session.executor.drain()

    baton.drain = drain
    trainer = make_trainer(
        accelerator=accelerator(args), devices=1, strategy=strategy, precision=args.precision, callbacks=[InTime(baton, args)],
        default_root_dir=args.directory,
    )  # fmt: skip
    found: dict[str, Any] = {}

    class Notes(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if baton.order == TRACE and baton.position == 0:
                session: Any = strategy.session
                session.recorder.enabled = True
                session.recorder.observe(session.executor.lanes, [block.name for block in session.blocks])

        def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
            session: Any = strategy.session
            found["lanes_peak_bytes"] = session.executor.lanes.memory().peak_bytes
            found.update(traced(strategy.run.trace))

    trainer.callbacks.append(Notes())
    fit(trainer, GPT2(replace(args.size, layers=layers), meta=True), batch=args.batch, length=args.seq)
    predicted = strategy.plan.predicted if strategy.plan is not None else None
    if args.profiles is not None and strategy.autoplan is not None and strategy.model_profile is not None:
        assert strategy.autoplan.machine is not None, "a plan has been made"
        (args.profiles / "model.json").write_text(strategy.model_profile.to_json())
        (args.profiles / f"hardware-{args.cap_text}.json").write_text(strategy.autoplan.machine.to_json())
    return {
        **memory(args, found.pop("lanes_peak_bytes", None)),
        **found,
        "predicted_s": None if predicted is None else predicted.iteration_s,
        "predicted_device_peak_bytes": None if predicted is None else predicted.device_peak_bytes,
        "bottleneck": None if predicted is None else predicted.bottleneck,
    }


def traced(trace: Trace) -> dict[str, Any]:
    """What a trace says, and the trace."""
    found, busy_s, moved = stalls(trace), trace.busy_s(), dict[str, int]()
    for span in trace.spans:
        moved[span.lane] = moved.get(span.lane, 0) + span.num_bytes
    begin_s = min((span.start_s for span in trace.spans), default=0.0)
    return {
        "stalls": [describe(step, found) for step in sorted({span.step for span in trace.spans})],
        "waits_s": blame(found),
        "lanes_bytes_per_s": {lane: moved[lane] / seconds for lane, seconds in busy_s.items() if moved[lane] and seconds},
        "trace": [
            [span.step, span.name, span.lane, round(span.start_s - begin_s, 6), round(span.end_s - begin_s, 6), span.num_bytes]
            for span in trace.spans
        ],
    }


# ---- the run -------------------------------------------------------------------------------------


def run(args: argparse.Namespace, name: str, target: Callable[..., object], *arguments: object) -> dict[str, Any] | None:
    """One contestant from begin to end; ``None`` if it cannot."""
    try:
        with Contestant(target, *arguments) as process:
            process.turn(WARM)
            seconds = [s for _ in range(args.rounds) for s in process.turn(args.steps).seconds]
            if target is offloaded:
                process.turn(1, TRACE)  # two steps, of which none counts
            found = process.finish()
    except RuntimeError as error:
        print(f"{name}: {error}")
        return None
    median = statistics.median(seconds)
    print(f"cap {args.cap_text}, {name}: {median:.4f} s/step", flush=True)
    predicted = found.pop("predicted_s", None)
    return {
        "seconds_per_step": median,
        "tokens_per_s": args.batch * args.seq / median,
        "flops_per_s": flops_per_step(args) / median,
        "prediction_error": None if predicted is None else abs(predicted / median - 1),
        **found,
    }


def flops_per_step(args: argparse.Namespace) -> float:
    """Operations of a step's matrix products, forward and backward, without recomputation."""
    size, tokens = args.size, args.batch * args.seq
    products = size.layers * 12 * size.width**2 + size.vocabulary * size.width  # qkv, project, up, down; the head
    attention = size.layers * size.width * args.seq  # two products with, on average, half of the tokens
    return float(6 * tokens * (products + attention))


def once(args: argparse.Namespace, name: str, measure: Callable[[], Any]) -> Any:
    """What the log has of a figure, else what measuring gives.

    ``None`` if it is too late for that.
    """
    file = args.variants / f"{name}.json" if args.variants is not None else args.plan if name == AUTO else None
    plan = f" {zlib.crc32(file.read_bytes())}" if file is not None else ""
    key = args.cap_text, name + plan
    if args.log.results.get(key) is None:
        if time.monotonic() >= args.end_s:
            print(f"cap {args.cap_text}, {name}: too late")
            return None
        args.log.add(*key, measure())
    return args.log.results[key]


def peak_s(args: argparse.Namespace) -> float | None:
    """Seconds of a step of all layers with nothing offloaded, from two layer counts that fit."""
    few, more = (max(1, n * args.size.layers // 24) for n in (2, 4))
    more = max(more, few + 1)
    found = [run(args, f"peak, {n} layers", plain, args, n, GPT2) for n in (few, more)]
    if found[0] is None or found[1] is None:
        return None
    least, most = (row["seconds_per_step"] for row in found if row is not None)
    layer_s = max(0.0, most - least) / (more - few)
    return float(least + (args.size.layers - few) * layer_s)


def contestants(args: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    """What runs at one cap, by name."""
    named: dict[str, tuple[Any, ...]] = {}
    layers = args.size.layers
    if args.variants is not None:
        return {file.stem: (offloaded, args, file, layers) for file in sorted(args.variants.glob("*.json"))}
    for plan in ("zero_offload", "zero_infinity"):
        named[plan] = (offloaded, args, plan, layers)
    if args.plan is not None:
        named[AUTO] = (offloaded, args, args.plan, layers)
    elif importlib.util.find_spec("highspy") is not None:
        named[AUTO] = (offloaded, args, AUTO, layers)
    else:
        print("auto: highspy is not installed, and no --plan says what the planner chose elsewhere")
    named |= {"fsdp2": (fsdp2, args), "fsdp2_recompute": (partial(fsdp2, recompute=True), args)}
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed: pip install deepspeed (it compiles for minutes on first use, and needs libaio-dev)")
    else:
        named |= {name: (deepspeed, args, name) for name in ("deepspeed_cpu", "deepspeed_nvme")}
    return {name: what for name, what in named.items() if wanted(args, name)}


def wanted(args: argparse.Namespace, name: str) -> bool:
    """Whether a contestant was asked for."""
    return args.variants is None and (args.only is None or name in args.only)


def at_cap(args: argparse.Namespace) -> dict[str, Any]:
    """All contestants at one cap."""
    best_s = once(args, PEAK, partial(peak_s, args)) if wanted(args, PEAK) else None
    rows = {name: once(args, name, partial(run, args, name, *what)) for name, what in contestants(args).items()}
    for row in rows.values():
        if row is not None:
            row["share_of_peak"] = None if best_s is None else best_s / row["seconds_per_step"]

    def faster(*names: str) -> float | None:
        ours, theirs = rows.get(AUTO), [row["seconds_per_step"] for row in map(rows.get, names) if row is not None]
        return None if ours is None or not theirs else min(theirs) / ours["seconds_per_step"]

    return {
        "cap_bytes": args.cap,
        "peak_seconds_per_step": best_s,
        "contestants": rows,
        "auto_vs_fsdp2": faster("fsdp2", "fsdp2_recompute"),
        "auto_vs_deepspeed_nvme": faster("deepspeed_nvme"),
    }


def bars(result: dict[str, Any]) -> dict[str, Any]:
    """What is to be reached, the worst figure of all caps, and whether it is.

    ``None`` where nothing was measured.

    The share of the peak counts where the simulator says that compute is the limit.
    """
    auto = [row for row in (at["contestants"].get(AUTO) for at in result["caps"]) if row is not None]
    compute = [row for row in auto if row["bottleneck"] is not None and set(row["bottleneck"].values()) == {"compute"}]
    figures = {
        "share_of_peak": [row["share_of_peak"] for row in compute],
        "prediction_error": [row["prediction_error"] for row in auto],
        OVERHEAD: [result[OVERHEAD]],
        **{key: [at[key] for at in result["caps"]] for key in ("auto_vs_deepspeed_nvme", "auto_vs_fsdp2")},
    }
    found = {}
    for key, (worst, bar) in BARS.items():
        value = worst((v for v in figures[key] if v is not None), default=None)
        found[key] = {"bar": bar, "value": value, "reached": None if value is None else worst(value, bar) == bar}
    return found


def overhead(args: argparse.Namespace) -> float | None:
    """Step time of the plan ``resident`` on the device's lanes / that of plain Lightning.

    The median over rounds, in turns.
    """
    layers = max(1, args.size.layers // 6)
    try:
        with Contestant(plain, args, layers, GPT2) as other, Contestant(offloaded, args, "resident", layers) as ours:
            ratios = []
            for number in range(args.rounds + 1):
                pair = [statistics.median(process.turn(args.steps).seconds) for process in (other, ours)]
                ratios += [pair[1] / pair[0]] if number else []
            other.finish()
            ours.finish()
    except RuntimeError as error:
        print(f"overhead: {error}")
        return None
    return statistics.median(ratios)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    add_model_options(parser, model="gpt-1.3b", batch=8, seq=1024)
    parser.add_argument("--cap", nargs="+", default=["24GiB", "12GiB"], help="device memory that a process may use")
    parser.add_argument("--precision", choices=DTYPES, default="bf16-true")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of one turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="contestants by name, and peak, overhead; all by default")
    parser.add_argument("--plan", nargs="+", type=Path, dest="plans", metavar="FILE", help="auto's plans, one for each cap")
    parser.add_argument("--variants", type=Path, metavar="DIR", help="plans to train, and nothing else")
    parser.add_argument("--profiles", type=Path, metavar="DIR", help="write what planning needs there")
    parser.add_argument("--continue", dest="log", type=Path, metavar="FILE", help="one line of JSON for all that is measured")
    parser.add_argument("--minutes", type=float, help="no contestant is begun later than that")
    parser.add_argument("--host-memory", help="budget of our plans; default: what is free")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk; 28 bytes a parameter")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --device emulated runs the same on an emulated one")
    caps, plans = args.cap, args.plans or [None] * len(args.cap)
    if len(plans) != len(caps):
        raise SystemExit(f"--plan has {len(plans)} files for {len(caps)} caps; allowed: one for each.")
    args.size, args.end_s = find_size(args.model, args.layers), time.monotonic() + 60 * (args.minutes or math.inf)
    if args.profiles is not None:
        args.profiles.mkdir(parents=True, exist_ok=True)
    settings = {
        "device": torch.cuda.get_device_name(0) if args.device == "cuda" else "emulated",
        "model": args.model,
        "layers": args.size.layers,
        "batch": args.batch,
        "seq": args.seq,
        "precision": args.precision,
        "rounds": args.rounds,
        "steps": args.steps,
        "torch": torch.__version__,
    }
    args.log = Log(args.log, settings)
    result: dict[str, Any] = {
        "benchmark": "gpu_step",
        "parameters": num_params(args.size),
        "flops_per_step": flops_per_step(args),
        "caps": [],
    }
    with scratch(args.dir) as args.directory:
        for args.cap_text, args.plan in zip(caps, plans, strict=True):
            args.cap = parse_bytes(args.cap_text, name="--cap")
            result["caps"].append(at_cap(args))
        result[OVERHEAD] = once(args, OVERHEAD, partial(overhead, args)) if wanted(args, OVERHEAD) else None
    print(json.dumps(result | {"bars": bars(result)} | settings))


if __name__ == "__main__":
    main()
