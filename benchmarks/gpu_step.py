"""Step time of a GPT of 1 to 3 billion parameters on a GPU whose memory is capped, offloaded by us and by others.

* ``zero_offload``, ``zero_infinity``, ``auto``: Lightning under ``HeteroOffloadStrategy`` with that plan. ``auto`` is the planner
  ``holistic``, which needs cvxpy; without it ``--plan-file`` gives the plan that was made elsewhere (``lightning-hetero plan``).
* ``fsdp2``: ``fully_shard`` of every layer with ``CPUOffloadPolicy``, its own loop, fused AdamW on the CPU.
* ``deepspeed_cpu``, ``deepspeed_nvme``: ZeRO-Offload and ZeRO-Infinity, if deepspeed can be imported.
* ``peak``: the same layers with nothing offloaded and no optimizer. Two numbers of layers that fit give the time of a layer and
  of the rest, and so that of the whole model.
* ``overhead``: plan ``resident`` against plain Lightning, on a model that fits.

A contestant that cannot run here is ``null``, and a line before says why. Contestants run one after the other, each in a process
with the device to itself; what is compared is from one run.

    python benchmarks/gpu_step.py --model gpt-1.3b --cap 24GiB 12GiB --dir /path/on/the/disk
    python benchmarks/gpu_step.py --device emulated --model tiny --seq 16 --cap 1GiB --batch 1     # how it runs without a GPU

Prints one line of JSON last. Per cap and contestant: ``seconds_per_step``, ``tokens_per_s``, ``share_of_peak`` (of what the same
blocks reach without offload), ``device_peak_bytes``, ``prediction_error``; and ``auto_vs_fsdp2``, ``auto_vs_deepspeed_nvme``
(times faster).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from contestants import Baton, Contestant
from gpt2 import GPT2, SIZES, RandomTokens, Transformer, find_size, fit, make_trainer, num_params
from scratch import scratch
from step import ComputeOnly, TakesTurns

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy
from lightning_hetero.units import GIB, parse_bytes

WARM = 4  # the steps in which plans are made and pipelines fill
DTYPES = {"bf16-true": torch.bfloat16, "bf16-mixed": torch.bfloat16, "32-true": torch.float32}


def capped(args: argparse.Namespace) -> None:
    """Leaves this process so much device memory."""
    if args.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap / total))
        torch.backends.cuda.matmul.allow_tf32 = True


def device_peak_bytes(args: argparse.Namespace) -> int | None:
    """The most device memory that this process has reserved; ``None`` where there is no such device."""
    return torch.cuda.max_memory_reserved() if args.device == "cuda" else None


def accelerator(args: argparse.Namespace) -> str:
    """As the Trainer names it; an emulated device is the CPU's."""
    return "cuda" if args.device == "cuda" else "cpu"


def step_begins(baton: Baton, args: argparse.Namespace) -> bool:
    """The next step begins once the device has done the last one: the host runs ahead of it."""
    if args.device == "cuda":
        torch.cuda.synchronize()
    return baton.step_begins()


class InTime(TakesTurns):
    """Trains when it is this process's turn, a step after the other."""

    def __init__(self, baton: Baton, args: argparse.Namespace) -> None:
        super().__init__(baton)
        self.args = args

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        if self.args.device == "cuda":
            torch.cuda.synchronize()
        super().on_train_batch_start(trainer, *rest)


# ---- contestants ------------------------------------------------------------------------------------------------------------


def plain(baton: Baton, args: argparse.Namespace, layers: int, module_cls: type[GPT2]) -> dict[str, Any]:
    """Lightning without us."""
    capped(args)
    torch.manual_seed(0)
    trainer = make_trainer(
        accelerator=accelerator(args), devices=1, precision=args.precision, callbacks=[InTime(baton, args)],
        default_root_dir=args.directory,
    )  # fmt: skip
    fit(trainer, module_cls(replace(args.size, layers=layers)), batch=args.batch, length=args.seq)
    return {"device_peak_bytes": device_peak_bytes(args)}


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
        def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
            executor: Any = strategy.session.executor if strategy.session is not None else None
            lanes = getattr(executor, "lanes", None)
            found["lanes_peak_bytes"] = None if lanes is None else lanes.memory().peak_bytes

    trainer.callbacks.append(Notes())
    fit(trainer, GPT2(replace(args.size, layers=layers), meta=True), batch=args.batch, length=args.seq)
    predicted = strategy.plan.predicted if strategy.plan is not None else None
    return {
        "device_peak_bytes": device_peak_bytes(args) or found.get("lanes_peak_bytes"),
        "predicted_s": None if predicted is None else predicted.iteration_s,
        "predicted_device_peak_bytes": None if predicted is None else predicted.device_peak_bytes,
    }


def fsdp2(baton: Baton, args: argparse.Namespace) -> dict[str, Any]:
    """FSDP2 with parameters, gradients and optimizer state on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    capped(args)
    alone()
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = Transformer(args.size)
        mesh = torch.distributed.init_device_mesh(device.type, (1,))
        dtype = DTYPES[args.precision]
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        if on_gpu:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for tokens in RandomTokens(args.size, batch=args.batch, length=args.seq):
            if not step_begins(baton, args):
                break
            moved = tokens.to(device)
            logits = model(moved[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), moved[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.distributed.destroy_process_group()
    return {"device_peak_bytes": device_peak_bytes(args)}


def alone() -> None:
    """A process group of this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def deepspeed(baton: Baton, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """ZeRO-3 with parameters and optimizer offloaded to memory, or to the disk."""
    from deepspeed_peer import Loss, config

    capped(args)
    alone()
    os.environ["DS_ACCELERATOR"] = accelerator(args)
    engines: Any = importlib.import_module("deepspeed")
    torch.manual_seed(0)
    settings = config(args, name)
    zero = settings["zero_optimization"]
    zero["offload_param"] = {**zero["offload_optimizer"], "pin_memory": True}
    zero |= {"overlap_comm": True, "contiguous_gradients": True}
    for key in ("pipeline_read", "pipeline_write"):
        zero["offload_param"].pop(key, None)
    engine, *_ = engines.initialize(model=(module := Loss(args.size)), model_parameters=module.parameters(), config=settings)
    for tokens in RandomTokens(args.size, batch=args.batch, length=args.seq):
        if not step_begins(baton, args):
            break
        engine.backward(engine(tokens.to(engine.device)))
        engine.step()
    return {"device_peak_bytes": device_peak_bytes(args)}


# ---- the run ----------------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, name: str, target: Callable[..., object], *arguments: object) -> dict[str, Any] | None:
    """One contestant from begin to end; ``None`` if it cannot."""
    try:
        with Contestant(target, *arguments) as process:
            process.turn(WARM)
            seconds = [s for _ in range(args.rounds) for s in process.turn(args.steps).seconds]
            found = process.finish()
    except RuntimeError as error:
        print(f"{name}: {error}")
        return None
    median = statistics.median(seconds)
    print(f"cap {args.cap / GIB:.3g} GiB, {name}: {median:.4f} s/step", flush=True)
    predicted = found.pop("predicted_s", None)
    return {
        "seconds_per_step": median,
        "tokens_per_s": args.batch * args.seq / median,
        "prediction_error": None if predicted is None else abs(predicted / median - 1),
        **found,
    }


def peak_s(args: argparse.Namespace) -> float | None:
    """Seconds of a step of all layers with nothing offloaded, from two numbers of layers that fit."""
    few, more = (max(1, n * args.size.layers // 24) for n in (2, 4))
    more = max(more, few + 1)
    found = [run(args, f"peak, {n} layers", plain, args, n, ComputeOnly) for n in (few, more)]
    if found[0] is None or found[1] is None:
        return None
    least, most = (row["seconds_per_step"] for row in found if row is not None)
    layer_s = max(0.0, most - least) / (more - few)
    return float(least + (args.size.layers - few) * layer_s)


def contestants(args: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    """What runs at one cap, by name."""
    named: dict[str, tuple[Any, ...]] = {}
    layers = args.size.layers
    for plan in ("zero_offload", "zero_infinity"):
        named[plan] = (offloaded, args, plan, layers)
    if args.plan_file is not None:
        named["auto"] = (offloaded, args, args.plan_file, layers)
    elif importlib.util.find_spec("cvxpy") is not None:
        named["auto"] = (offloaded, args, "auto", layers)
    else:
        print("auto: cvxpy is not installed, and no --plan-file says what the planner chose elsewhere")
    named["fsdp2"] = (fsdp2, args)
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed: pip install deepspeed (it compiles for minutes on first use, and needs libaio-dev)")
    else:
        named |= {name: (deepspeed, args, name) for name in ("deepspeed_cpu", "deepspeed_nvme")}
    return {name: what for name, what in named.items() if wanted(args, name)}


def wanted(args: argparse.Namespace, name: str) -> bool:
    """Whether a contestant was asked for."""
    return args.only is None or name in args.only


def at_cap(args: argparse.Namespace) -> dict[str, Any]:
    """All contestants at one cap."""
    best_s = peak_s(args) if wanted(args, "peak") else None
    rows = {name: run(args, name, *what) for name, what in contestants(args).items()}
    for row in rows.values():
        if row is not None:
            row["share_of_peak"] = None if best_s is None else best_s / row["seconds_per_step"]

    def faster(name: str) -> float | None:
        ours, theirs = rows.get("auto"), rows.get(name)
        return None if ours is None or theirs is None else theirs["seconds_per_step"] / ours["seconds_per_step"]

    return {
        "cap_bytes": args.cap,
        "peak_seconds_per_step": best_s,
        "contestants": rows,
        "auto_vs_fsdp2": faster("fsdp2"),
        "auto_vs_deepspeed_nvme": faster("deepspeed_nvme"),
    }


def overhead(args: argparse.Namespace) -> float | None:
    """Step time of the plan ``resident`` on the device's lanes / that of plain Lightning; the median over rounds, in turns."""
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
    parser.add_argument("--model", choices=SIZES, default="gpt-1.3b")
    parser.add_argument("--layers", type=int, help="another number of layers than the model has; 56 of gpt-1.3b make 3 billion")
    parser.add_argument("--cap", nargs="+", default=["24GiB", "12GiB"], help="device memory that a process may use")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--precision", choices=DTYPES, default="bf16-true")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of one turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="contestants by name, and peak, overhead; all by default")
    parser.add_argument("--plan-file", type=Path, help="the plan of ours instead of planning")
    parser.add_argument("--host-memory", help="budget of our plans; default: what is free")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk; 28 bytes a parameter")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --device emulated runs the same on an emulated one")
    args.size = find_size(args.model, args.layers)
    result: dict[str, Any] = {"benchmark": "gpu_step", "model": args.model, "parameters": num_params(args.size), "caps": []}
    with scratch(args.dir) as args.directory:
        for cap in args.cap:
            args.cap = parse_bytes(cap, name="--cap")
            result["caps"].append(at_cap(args))
        result["overhead"] = overhead(args) if wanted(args, "overhead") else None
    result |= {
        "device": torch.cuda.get_device_name(0) if args.device == "cuda" else "emulated",
        "batch": args.batch,
        "seq": args.seq,
        "precision": args.precision,
        "rounds": args.rounds,
        "steps": args.steps,
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
