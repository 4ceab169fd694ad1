"""LoRA on a frozen model that is larger than memory: bytes, memory and time of a step, and peers.

A folder with the random weights of a Llama in bfloat16 is written (13.5 GB for the 32 layers of a
model with 7 billion parameters) and removed in the end. Processes of their own take turns:

* ``offload``: the model on the meta device under ``HeteroOffloadStrategy(weights=folder)``, which
  reads the frozen weights from the folder's file and keeps every step of the adapters.
* ``compute``: the same module under plain Lightning with all weights in memory.
* ``bandwidth``: reads of the same file past the page cache, with so many threads at once.
* with ``--peers``: other programs that train adapters on weights from disk (``adapter_peers.py``).
  Most of them read through the page cache, so ``--peer-memory 4GiB`` fills the rest of the memory.

Keys of the JSON line:

* ``peak_rss_bytes``: the high-water mark (VmHWM) of the process ``offload``, interpreter, torch and
  activations included.
* ``bytes_read_per_step``, ``bytes_written_per_step``: of the strategy's engine, without the first
  turn. ``read_bound_bytes``: twice the frozen bytes, less the frozen weights that were in memory
  when forward turned into backward and when the step began (``kept_bytes``), times 1.05.
  ``written_ratio``: bytes written over those of the trained state (weights and Adam's moments).
* ``vs_limit``: seconds of a step over the larger of ``compute`` and the bytes read over the
  bandwidth; all of one round, the median over rounds.
* ``extra_disk_bytes``: what the strategy's directory takes beside the folder of weights;
  ``extra_disk_bound_bytes``: twice the trained state and 16 MiB.
* ``same_losses``: all losses are those of plain Lightning, to the bit.
* with ``--device emulated`` (``adapted_card.py``): ``speed_vs_resident``, tokens a second over
  those of the same blocks in the device's memory, at the tokens where compute is the limit, and
  ``prediction_error`` of the plan.
* ``speedup_vs_<peer>``: the peer's seconds over ours in turns with it; ``null`` where it could not
  train, and ``peers`` says why.

    python benchmarks/adapters.py --dir /path/on/the/disk
    python benchmarks/adapters.py --dir DIR --device emulated
    python benchmarks/adapters.py --dir DIR --peers accelerate airllm --peer-memory 4GiB
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import statistics
import tempfile
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from adapted import Adapted, Setting, write_weights
from contestants import Baton, Contestant, Turn
from gpt2 import make_trainer
from larger_than_ram import check_space
from scratch import alone, process_context, scratch
from step import TakesTurns

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.units import format_bytes, parse_bytes

PEERS = ("accelerate", "airllm", "deepspeed")
PIECE = 4 << 20  # of one read of the bandwidth
STATE_BYTES = 12  # of a trained parameter: fp32 weights and two moments
READ_SLACK, SPARE_DISK = 1.05, 16 << 20


@dataclass(slots=True)
class Counts:
    """What the engine has moved so far."""

    read: int
    written: int
    steps: int


@dataclass
class Watch(pl.Callback):
    """Frozen weights in memory at the two turns of a step, and the directory's bytes at the end."""

    directory: Path
    kept: list[tuple[int, int]] = field(default_factory=list)
    extra_disk_bytes: int = 0
    _at_start: int = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._at_start = in_memory_bytes(trainer)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self.kept.append((self._at_start, in_memory_bytes(trainer)))

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        files = (path.stat() for path in self.directory.rglob("*") if path.is_file())
        self.extra_disk_bytes = sum(status.st_blocks * 512 for status in files)


def in_memory_bytes(trainer: pl.Trainer) -> int:
    """Bytes of frozen weights that are in memory now, or on their way there."""
    session: Any = trainer.strategy.session  # type: ignore[attr-defined]
    found = [block for block in session.executor.blocks if block.resident or not block.weights_on_disk]
    params = {id(param): param for block in found for part in block.parts for param in part.params}
    return sum(param.numel() * param.element_size() for param in params.values() if not param.requires_grad)


def offload(baton: Baton, args: argparse.Namespace) -> dict[str, Any]:
    """Trains within ``host_memory``."""
    directory = args.directory / "store"
    strategy = HeteroOffloadStrategy(
        plan=args.plan, weights=args.directory / "weights", host_memory=args.host_memory, disk_path=directory,
        disk_capacity=args.disk_capacity,
    )  # fmt: skip
    counts: list[Counts] = []
    watch = Watch(directory)
    module = Adapted(args.setting)

    def drain() -> None:
        session: Any = strategy.session
        session.drain()
        session.store.files.wait_for_commit()
        stats = session.store.stats()
        counts.append(Counts(stats.bytes_read, stats.bytes_written, len(module.losses)))

    baton.drain = drain
    trainer = make_trainer(strategy=strategy, callbacks=[TakesTurns(baton), watch], default_root_dir=args.directory)
    trainer.fit(module, module.loader())
    first, last = counts[0], counts[-1]
    steps = last.steps - first.steps
    return {
        "losses": module.losses,
        "bytes_read_per_step": (last.read - first.read) / steps,
        "bytes_written_per_step": (last.written - first.written) / steps,
        "kept_bytes": [statistics.median(kept) for kept in zip(*watch.kept[first.steps :], strict=True)],
        "extra_disk_bytes": watch.extra_disk_bytes,
        "trained_parameters": sum(param.numel() for param in module.parameters() if param.requires_grad),
        "report": strategy.memory_report(),
        "plan": strategy.plan.name if strategy.plan else None,
        "prediction_error": strategy.prediction_error(),
    }


def compute(baton: Baton, args: argparse.Namespace) -> dict[str, Any]:
    """Trains under plain Lightning, in memory."""
    module = Adapted(args.setting, args.directory / "weights")
    trainer = make_trainer(callbacks=[TakesTurns(baton)], default_root_dir=args.directory)
    trainer.fit(module, module.loader())
    return {"losses": module.losses}


def bandwidth(baton: Baton, args: argparse.Namespace) -> None:
    """A turn's step is one pass over the file, past the page cache."""
    path = args.directory / "weights" / "model.safetensors"
    size = path.stat().st_size // PIECE * PIECE
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(first: int) -> int:
        with mmap.mmap(-1, PIECE) as buffer:
            return sum(os.preadv(file, [buffer], at) for at in range(first * PIECE, size, args.io_threads * PIECE))

    done = 0
    baton.num_bytes = lambda: done
    with ThreadPoolExecutor(args.io_threads) as threads:
        while baton.step_begins():
            done += sum(threads.map(read, range(args.io_threads)))
    os.close(file)


# ---- peers ---------------------------------------------------------------------------------------


def hold(connection: Any, num_bytes: int) -> None:
    """Fills so much memory until the process is ended; the first to go if memory ends."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    with mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE)) as memory:
        for at in range(0, num_bytes, mmap.PAGESIZE):
            memory[at] = 1
        connection.send(None)
        connection.recv()


@contextlib.contextmanager
def ballast(left: int | None) -> Iterator[None]:
    """Inside, the page cache and new processes have so much memory; ``None``: what there is."""
    if left is None:
        yield
        return
    context = process_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(theirs, psutil.virtual_memory().available - left))
    process.start()
    try:
        ours.recv()
        yield
        if not process.is_alive():
            raise RuntimeError("memory ended, and the process that filled the rest of it")
    finally:
        process.kill()
        process.join()


def against(name: str, ours: Contestant, args: argparse.Namespace) -> dict[str, Any]:
    """A peer's turns beside ours."""
    from adapter_peers import PEERS as RUN

    ratios, seconds = [], []
    try:
        with ballast(args.peer_memory), Contestant(RUN[name], args) as peer:
            for number in range(args.peer_rounds):
                pair = {"peer": peer, "ours": ours}
                turns = {who: pair[who].turn(args.peer_steps) for who in (list(pair) if number % 2 else reversed(pair))}
                theirs, mine = (statistics.median(turns[who].seconds) for who in ("peer", "ours"))
                print(f"{name}: {theirs:.2f} s/step, offload beside it: {mine:.2f} s/step", flush=True)
                ratios.append(theirs / mine)
                seconds.append(theirs)
            found = peer.finish()
    except Exception as error:  # a peer that cannot train is a result
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:500]}
    return {"speedup": statistics.median(ratios), "seconds_per_step": statistics.median(seconds), **found}


# ---- the run -------------------------------------------------------------------------------------


def compete(args: argparse.Namespace) -> tuple[dict[str, list[Turn]], dict[str, Any], dict[str, Any]]:
    """Turns and results of the contestants, and those of the peers."""
    turns: dict[str, list[Turn]] = {name: [] for name in ("offload", "compute", "bandwidth")}
    with Contestant(offload, args) as ours:
        with contextlib.ExitStack() as stack:
            running = {"offload": ours, "bandwidth": stack.enter_context(Contestant(bandwidth, args))}
            running["compute"] = stack.enter_context(Contestant(compute, args))
            for number in range(args.rounds + 1):
                for name in list(running) if number % 2 else reversed(running):  # drift cancels
                    turn = running[name].turn(turn_steps(args, name, number))
                    if number:
                        turns[name].append(turn)
                    print(f"round {number}, {name}: {statistics.median(turn.seconds):.3f} s", flush=True)
            results: dict[str, Any] = {"compute": running["compute"].finish()}
        peers = {name: against(name, ours, args) for name in args.peers}
        results["offload"] = ours.finish()
    return turns, results, peers


def turn_steps(args: argparse.Namespace, name: str, number: int) -> int:
    """Timed steps of a turn; in the first one caches fill, and a planner makes its plan."""
    if number:
        return 1 if name == "bandwidth" else int(args.steps)
    return int(args.warm_up) if name == "offload" else 1


def evaluate(args: argparse.Namespace, turns: dict[str, list[Turn]], results: dict[str, Any]) -> dict[str, Any]:
    """The figures; all parts of a ratio come from one round."""
    ours, plain = results["offload"], results["compute"]
    seconds = {name: [statistics.median(turn.seconds) for turn in of_name] for name, of_name in turns.items()}
    rates = [turn.num_bytes / s for turn, s in zip(turns["bandwidth"], seconds["bandwidth"], strict=True)]
    read = ours["bytes_read_per_step"]
    limits = [max(alone_s, read / rate) for alone_s, rate in zip(seconds["compute"], rates, strict=True)]
    state = STATE_BYTES * ours["trained_parameters"]
    kept = sum(ours["kept_bytes"])
    steps = min(len(ours["losses"]), len(plain["losses"]))
    bounds = {
        "read_bound_bytes": READ_SLACK * (2 * args.frozen_bytes - kept),
        "extra_disk_bound_bytes": 2 * state + SPARE_DISK,
    }
    return {
        "peak_rss_bytes": ours["peak_rss_bytes"],
        "bytes_read_per_step": read,
        "bytes_written_per_step": ours["bytes_written_per_step"],
        "vs_limit": statistics.median(s / limit for s, limit in zip(seconds["offload"], limits, strict=True)),
        "extra_disk_bytes": ours["extra_disk_bytes"],
        "same_losses": ours["losses"][:steps] == plain["losses"][:steps],
        "within": {
            "peak_rss_bytes": ours["peak_rss_bytes"] <= args.limit_bytes,
            "bytes_read_per_step": read <= bounds["read_bound_bytes"],
            "bytes_written_per_step": ours["bytes_written_per_step"] <= 1.1 * state,
            "extra_disk_bytes": ours["extra_disk_bytes"] <= bounds["extra_disk_bound_bytes"],
        },
        **bounds,
        "written_ratio": ours["bytes_written_per_step"] / state,
        "frozen_bytes": args.frozen_bytes,
        "kept_bytes": kept,
        "kept_at_turns_bytes": ours["kept_bytes"],
        "trained_state_bytes": state,
        "limit_s": statistics.median(limits),
        "transfer_s": statistics.median(read / rate for rate in rates),
        "seconds_per_step": {name: statistics.median(values) for name, values in seconds.items() if name != "bandwidth"},
        "bandwidth_bytes_per_s": round(statistics.median(rates)),
        "seconds": seconds,
        "losses": ours["losses"],
        "prediction_error": ours["prediction_error"],
        "report": ours["report"],
        "peak_rss_bytes_in_memory": plain["peak_rss_bytes"],
    }


def parse_args() -> argparse.Namespace:
    size = partial(parse_bytes, name="memory")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk; 15 GB free")
    parser.add_argument("--device", choices=("cpu", "emulated"), default="cpu", help="emulated: a card with sizes of its own")
    parser.add_argument("--layer-s", type=float, default=0.1, help="seconds of a layer's forward on the emulated device")
    parser.add_argument("--layers", type=int, default=32, help="of the model; 32 of width 4096 are 7 billion parameters")
    parser.add_argument("--hidden", type=int, default=4096, help="width of the model")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"], help="linear layers that have one")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=16, help="tokens of a sequence")
    parser.add_argument("--plan", default="auto")
    parser.add_argument("--host-memory", default="2GiB")
    parser.add_argument("--disk-capacity", help="for the strategy's directory; default: the free space")
    parser.add_argument("--limit-bytes", type=int, default=4 << 30, help="of the process")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of one turn")
    parser.add_argument("--warm-up", type=int, default=6, help="steps of the turn before the first; a planner needs five")
    parser.add_argument("--io-threads", type=int, default=3, help="of the bandwidth")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[], help="those that are installed")
    parser.add_argument("--peer-memory", type=size, help="fill memory up to this for peers' turns; other programs may be killed")
    parser.add_argument("--peer-rounds", type=int, default=2)
    parser.add_argument("--peer-steps", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.device == "emulated":
        from adapted_card import measure

        with scratch(args.dir) as directory:
            measure(args, directory)
        return
    args.setting = Setting(
        layers=args.layers, hidden=args.hidden, vocabulary=args.vocabulary, rank=args.rank, targets=tuple(args.targets),
        batch=args.batch, seq=args.seq,
    )  # fmt: skip
    frozen = 2 * sum(param.numel() for param in args.setting.base().parameters())
    copies = 1 + len({"airllm", "deepspeed"}.intersection(args.peers))  # of the weights; some peers make one of their own
    check_space(args.dir, copies * frozen + (1 << 30))
    print(f"{format_bytes(frozen)} of frozen weights", flush=True)
    with scratch(args.dir) as args.directory:
        args.frozen_bytes = alone(write_weights, args.directory / "weights", args.setting)
        turns, results, peers = compete(args)
    found = evaluate(args, turns, results)
    speedups = {f"speedup_vs_{name}": peers.get(name, {}).get("speedup") for name in PEERS}
    shown = {key: value for key, value in vars(args).items() if key not in ("setting", "directory", "dir", "frozen_bytes", "peers")}
    print(json.dumps({"benchmark": "adapters", **found, **speedups, "peers": peers, **shown, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
