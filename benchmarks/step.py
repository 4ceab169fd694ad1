"""Step time of a GPT-2 under plain Lightning and under the plans, in one run, in turns.

* ``plain``: Lightning's default strategy with ``AdamW(fused=True)``; ``compute``: the same without
  an optimizer.
* ``resident``, ``host``, ``disk``: the same module, optimizer and Trainer under
  ``HeteroOffloadStrategy``.
* ``device``: the plan ``resident`` on the lanes of an emulated device that is as fast as the host,
  with links without limit; ``device_offload``: the plan ``zero_offload`` there, with an op on a
  lane for every transfer.
* ``kept``: the plan ``disk`` with a ``disk_path``, so that every step is kept.
* ``traced``, ``device_traced``: the plans ``host`` and, on that device, ``zero_offload`` with
  ``trace=True``.
* ``io``: the update's transfers through the engine in the same directory, without compute: the
  available bandwidth.
* with ``--against WHEEL``: every plan under that build of the package as well, as
  ``<plan>_before``.

Other libraries are compared by ``python benchmarks/peers``.

Prints one line of JSON last. Ratios are medians over rounds, each of figures from the same round;
``intervals`` has for each the bounds between which the median of many more rounds lies, 19 times of
20:

* ``resident_vs_plain``, ``host_vs_plain``: step time / that of plain Lightning; below 1 is faster.
* ``device_vs_plain``, ``device_vs_resident``: the cost of the lanes of a device.
* ``traced_vs_host``, ``device_traced_vs_offload``: the cost of recording, which is smaller than the
  drift of machines. So the recorder's functions are timed as well: ``recording_share`` is their
  share of a step, with a trace and without.
* ``disk_vs_limit``: step time / max(compute, bytes per step / bandwidth).
* ``<plan>_vs_before``: step time / that of the build given by ``--against``; below 1, this build is
  faster.

    python benchmarks/step.py --model gpt2-124m --dir /path/on/the/disk
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from contestants import Baton, Contestant, Turn, interval, settle, unpacked
from gpt2 import GPT2, add_model_options, find_size, fit, make_trainer, num_params
from scratch import scratch

import lightning_hetero
from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy
from lightning_hetero.ir.stalls import blame, op_of_block, stalls
from lightning_hetero.ir.trace import Trace

PLANS = ("resident", "host", "disk", "device", "traced", "device_offload", "device_traced", "kept")
OF = {  # what they run
    "kept": "disk",
    "device": "resident",
    "traced": "host",
    "device_offload": "zero_offload",
    "device_traced": "zero_offload",
}
TRACED = ("traced", "device_traced")
RATIOS = {
    "resident_vs_plain": ("resident", "plain"),
    "host_vs_plain": ("host", "plain"),
    "device_vs_plain": ("device", "plain"),
    "device_vs_resident": ("device", "resident"),
    "traced_vs_host": ("traced", "host"),
    "device_traced_vs_offload": ("device_traced", "device_offload"),
    "disk_vs_plain": ("disk", "plain"),
}
RATIOS |= {f"{plan}_vs_before": (plan, f"{plan}_before") for plan in PLANS}


class NoUpdate(torch.optim.Optimizer):
    """Computes gradients and leaves it at that."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()


class ComputeOnly(GPT2):
    """The model without its optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return NoUpdate(self.parameters())


class TakesTurns(pl.Callback):
    """Trains when it is this process's turn."""

    def __init__(self, baton: Baton) -> None:
        self.baton = baton

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.baton.step_begins():
            trainer.should_stop = True
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 1


def plain(baton: Baton, args: argparse.Namespace, module_cls: type[GPT2]) -> None:
    """Lightning without us."""
    torch.manual_seed(0)
    trainer = make_trainer(precision=args.precision, callbacks=[TakesTurns(baton)], default_root_dir=args.directory)
    fit(trainer, module_cls(args.size), batch=args.batch, length=args.seq)


def time_recording() -> Callable[[], float]:
    """Times all that the recorder does in this process; says how many seconds that have been."""
    from lightning_hetero.lanes import EmulatedLanes
    from lightning_hetero.runtime import recorder

    total_s, inside = 0.0, False

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal total_s, inside
            if inside:
                return function(*args, **kwargs)
            inside, begin_s = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                total_s, inside = total_s + time.perf_counter() - begin_s, False

        return call

    for owner, names in (
        (recorder.Recorder, ("watch", "leave", "names", "end_step", "_follow")),
        (EmulatedLanes, ("now",)),
        (recorder, ("host_moment",)),
    ):
        for name in names:
            setattr(owner, name, timed(getattr(owner, name)))
    return lambda: total_s


def offloaded(baton: Baton, args: argparse.Namespace, plan: str) -> dict[str, Any]:
    """Lightning under a plan."""
    torch.manual_seed(0)
    # Names inside the package may differ between two builds, so a comparison does without this.
    recording_s = time_recording() if args.against is None else None
    strategy = HeteroOffloadStrategy(
        plan=OF.get(plan, plan),
        device=EmulatedDevice(memory=args.device_memory) if plan.startswith("device") else None,
        disk_path=args.directory / f"store-{os.getpid()}" if plan == "kept" else None,
        host_memory=args.host_memory if OF.get(plan, plan) == "disk" else None,
        io_backend=args.io_backend,
        io_threads=args.io_threads,
        update_threads=args.update_threads,
        trace=args.trace is not None or plan in TRACED,
    )

    def num_bytes() -> int:
        report = strategy.memory_report()
        return int(report["bytes_read"] + report["bytes_written"])

    baton.drain, baton.num_bytes = functools.partial(settle, strategy), num_bytes
    trainer = make_trainer(
        strategy=strategy, precision=args.precision, callbacks=[TakesTurns(baton)], default_root_dir=args.directory
    )
    fit(trainer, GPT2(args.size), batch=args.batch, length=args.seq)
    if args.trace is not None:
        show_trace(strategy.trace, args.trace.with_stem(f"{args.trace.stem}-{plan}"), plan)
    result: dict[str, Any] = {"package": lightning_hetero.__file__, "report": strategy.memory_report()}
    if recording_s is not None:
        result["recording_s"] = recording_s() / trainer.global_step
    return result


def show_trace(trace: Trace, path: Path, plan: str) -> None:
    """Saves the trace, and says where the time of its steps went."""
    trace.save(path)
    steps = len({s.step for s in trace.spans}) or 1
    lanes = ", ".join(f"{lane} {busy / steps:.3f} s" for lane, busy in sorted(trace.busy_s().items()))
    longest = list(blame(stalls(trace)).items())[:5]
    print(f"{plan}: {path}; busy per step: {lanes} (compute: with its waits)")
    print(f"{plan}: longest waits per step: {', '.join(f'{op_of_block(n)} {s / steps:.3f} s' for n, s in longest)}", flush=True)


def transfers(baton: Baton, args: argparse.Namespace) -> None:
    """Updates with nothing to compute, on files of their own.

    A turn's step is one pass over them.
    """
    from out_of_core import Workload, make_engine  # a process of another build has another native interface

    with make_engine(args.io_backend, args) as engine:
        common = {"direct_io": True, "verify_digests": False}
        work = Workload(args.directory / "io", num_blocks=args.io_blocks, chunks_per_block=args.io_chunks, **common)
        work.fill(engine)

        def num_bytes() -> int:
            stats = engine.stats()
            return stats.bytes_read + stats.bytes_written

        baton.num_bytes = num_bytes
        while baton.step_begins():
            work.run(engine, compute=False)
        work.close()


def contestants(args: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    """What each process runs, by name."""
    named: dict[str, tuple[Any, ...]] = {"plain": (plain, args, GPT2)}
    named |= {name: (offloaded, args, name) for name in args.plans}
    if args.against is not None:
        named |= {f"{name}_before": (offloaded, args, name) for name in args.plans}
    if "disk" in args.plans:
        named |= {"compute": (plain, args, ComputeOnly), "io": (transfers, args)}
    return named


def compete(args: argparse.Namespace) -> tuple[dict[str, list[Turn]], dict[str, dict[str, Any]]]:
    """Every contestant's turns, one per round, and what each says in the end.

    The first round fills caches and does not count.
    """
    turns: dict[str, list[Turn]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(Contestant(*what, build=args.against if name.endswith("_before") else None))
            for name, what in contestants(args).items()
        }
        for number in range(args.rounds + 1):
            for name in list(processes) if number % 2 else reversed(processes):  # drift cancels
                turn = processes[name].turn(args.steps if number else 2)
                if number:
                    turns[name].append(turn)
                    print(f"round {number}, {name}: {statistics.median(turn.seconds):.4f} s/step", flush=True)
        results = {name: process.finish() for name, process in processes.items()}
    for name in args.plans if args.against else ():
        assert results[name]["package"] != results[f"{name}_before"]["package"], "both ran the same build"
    return turns, results


def evaluate(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """The figures; all of a ratio's parts come from one round."""
    seconds = {name: [statistics.median(turn.seconds) for turn in of_name] for name, of_name in turns.items()}
    ratios = {
        key: [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]
        for key, (above, below) in RATIOS.items()
        if above in seconds and below in seconds
    }
    result: dict[str, Any] = {
        **{key: statistics.median(ratios[key]) if key in ratios else None for key in RATIOS},
        "intervals": {key: interval(values) for key, values in ratios.items()},
        "disk_vs_limit": None,
        "seconds_per_step": {name: statistics.median(values) for name, values in seconds.items()},
    }
    if "disk" in turns:
        bandwidth = [turn.num_bytes / s for turn, s in zip(turns["io"], seconds["io"], strict=True)]
        transfer = [turn.num_bytes / rate for turn, rate in zip(turns["disk"], bandwidth, strict=True)]
        limits = [max(pair) for pair in zip(seconds["compute"], transfer, strict=True)]
        result["disk_vs_limit"] = statistics.median(s / limit for s, limit in zip(seconds["disk"], limits, strict=True))
        result["limit_s"] = statistics.median(limits)
        result["transfer_s"] = statistics.median(transfer)
        result["bytes_per_step"] = round(statistics.median(turn.num_bytes for turn in turns["disk"]))
        result["bandwidth_bytes_per_s"] = round(statistics.median(bandwidth))
    return result


def parse_args() -> argparse.Namespace:
    def plans(text: str) -> tuple[str, ...]:
        names = tuple(filter(None, text.split(",")))
        if unknown := set(names) - set(PLANS):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}; allowed: {', '.join(PLANS)}")
        return names

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, model="gpt2-124m")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of one turn")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each contestant")
    parser.add_argument("--precision", default="32-true", help="as the Trainer takes it, such as bf16-mixed")
    parser.add_argument("--plans", type=plans, default=PLANS[:5], help=f"comma-separated, of {', '.join(PLANS)}")
    parser.add_argument("--against", type=Path, metavar="WHEEL", help="another build of the package: a wheel, or where it lies")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk; 5 GB free")
    parser.add_argument("--host-memory", help="budget of the plan disk; default: what is free")
    parser.add_argument("--device-memory", default="8GiB", help="of the emulated device")
    parser.add_argument("--trace", type=Path, help="write Chrome traces to FILE-<plan> and print busy seconds; costs a little")
    parser.add_argument("--io-backend", choices=("auto", "io_uring", "pool"), default="auto")
    parser.add_argument("--io-threads", type=int, default=3)
    parser.add_argument("--queue-depth", type=int, default=8)
    parser.add_argument("--update-threads", type=int, default=max(1, (torch.get_num_threads()) // 2))
    parser.add_argument("--io-blocks", type=int, help="4 Mi parameters each, for bandwidth; default: as many as the model")
    parser.add_argument("--io-chunks", type=int, default=16, help="256 Ki parameters each; chunks of a block")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.size = find_size(args.model, args.layers)
    # Files as large as training's: smaller ones may be cached below the file system.
    from out_of_core import CHUNK_ELEMENTS

    args.io_blocks = args.io_blocks or -(-num_params(args.size) // (args.io_chunks * CHUNK_ELEMENTS))
    with scratch(args.dir) as args.directory:
        if args.against is not None:
            args.against = unpacked(args.against, args.directory / "before")
        turns, results = compete(args)
    result = {
        "benchmark": "step",
        "model": args.model,
        **(found := evaluate(turns)),
        "recording_share": {
            name: of_name["recording_s"] / found["seconds_per_step"][name]
            for name, of_name in results.items()
            if "recording_s" in of_name
        },
        "parameters": num_params(args.size),
        "bytes_per_step_of": {
            name: round(statistics.median(turn.num_bytes for turn in of_name)) for name, of_name in turns.items()
        },
        "peak_rss_bytes": {name: of_name["peak_rss_bytes"] for name, of_name in results.items()},
        "batch": args.batch,
        "seq": args.seq,
        "precision": args.precision,
        "host_memory": args.host_memory,
        "rounds": args.rounds,
        "steps": args.steps,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
