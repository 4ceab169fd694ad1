"""Ranks that share one model, beside one process, Lightning's ``ddp`` and torch's FSDP2.

All train the same GPT-2 in ``32-true`` over gloo on this machine, and have the loopback device for
themselves. ``--parts`` chooses what is measured:

* ``memory``: what all ranks hold together, while they train. RAM is the sum of their proportional
  set sizes, in which a page that several processes map counts once, less what the processes have
  before there is a model (plan ``host``). Disk is what the files of their stores take (plan
  ``disk``). ``state_bytes_vs_one_process`` are the ratios to one process; ``per_rank_bytes`` is the
  RAM that each further rank adds; ``copies_vs_one_process`` (with ``--copies``) is that of
  Lightning's ``ddp``.
* ``step``: ours (plan ``host``) and FSDP2 with parameters, gradients and optimizer state offloaded
  to the CPU train in turns, on the same batches. ``step_vs_fsdp2`` is the ratio of the medians;
  ``wire_bytes_per_parameter`` what the loopback device moves in a step for each parameter, with the
  headers of packets; ``loss_difference`` the largest relative one of a step's losses.
* ``paced``: linear layers take a set time (``paced.py``), so that ranks compute at the same speed
  however many processors there are. ``speedup_over_one_rank`` is that of the same global batch
  while compute is the limit. In ``overlap`` compute and network have comparable set times: a step
  relative to the busiest of its lanes, which all overlap if it is 1.

Prints one line of JSON last. A figure that could not be measured is ``null``; a line before says
why.

    python benchmarks/sharding.py --dir DIR --parts memory --ranks 2 4 --copies
    python benchmarks/sharding.py --dir DIR --parts step --ranks 2 4
    python benchmarks/sharding.py --dir DIR --parts paced --ranks 2 4
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from contestants import Baton, interval, settle
from gpt2 import GPT2, SIZES, Layer, RandomTokens, Size, Transformer, fit, make_trainer, num_params
from paced import PacedGPT2
from rank_groups import Group, has_own_network, join_as, loopback_bytes
from scratch import free_port, process_context, scratch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.ir.trace import Span
from lightning_hetero.lanes.network import ENVIRONMENT

WARM = 2  # batches before memory counts
SAMPLE_S = 0.02
PARTS = ("memory", "step", "paced")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every rank trains.

    Attributes:
        size: The model's size.
        batch: Sequences of one rank.
        seq: Their tokens.
        steps: Those that count.
        directory: Where stores go.
        flop_per_s: The rate of linear layers; ``None``: the machine's own.
    """

    size: Size
    batch: int
    seq: int
    steps: int
    directory: Path
    flop_per_s: float | None = None


# ---- what is held ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The most that the ranks of a fit have together, in bytes."""

    ram: int
    disk: int


def pss_bytes(pid: int) -> int:
    """A process's proportional set size."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def file_bytes(directory: Path) -> int:
    """What the files below a directory take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


class Tells(pl.Callback):
    """Tells the benchmark when memory begins to count, and when it has counted enough."""

    def __init__(self, channel: Connection, steps: int) -> None:
        self._channel, self._last = channel, WARM + steps

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 in (WARM, self._last):
            self._channel.send(batch_idx)
        if batch_idx + 1 == self._last:
            self._channel.recv()  # until its files have been counted


def train_and_tell(channel: Connection, rank: int, ranks: int, port: int, work: Work, plan: str, store: Path | None) -> None:
    """One rank: tells its memory before there is a model, then when to count, and when to end."""
    if ranks > 1:
        join_as(rank, ranks, port)
    channel.send(pss_bytes(os.getpid()))
    copies = plan == "ddp"
    strategy: Any = plan if copies else HeteroOffloadStrategy(plan, block_cls=Layer, disk_path=store)
    told = Tells(channel, work.steps)
    trainer = make_trainer(strategy=strategy, devices=ranks, max_steps=WARM + work.steps, callbacks=[told])
    fit(trainer, GPT2(work.size, meta=not copies), batch=work.batch, length=work.seq, seed=rank)
    channel.close()


def held(ranks: int, work: Work, plan: str) -> Held | None:
    """What the ranks of a fit hold; ``None`` if a rank has ended with an error."""
    context, port, channels, processes = process_context(), free_port(), [], []
    store = work.directory / "store" if plan == "disk" else None
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=train_and_tell, args=(theirs, rank, ranks, port, work, plan, store)))
        processes[-1].start()
        theirs.close()
        channels.append(ours)
    try:
        before = [channel.recv() for channel in channels]
        for channel in channels:
            channel.recv()  # all of them train
        most = 0
        while not any(channel.poll() for channel in channels):
            most = max(most, sum(pss_bytes(process.pid) for process in processes))
            time.sleep(SAMPLE_S)
        for channel in channels:
            channel.recv()  # none trains any more
        found = Held(ram=most - sum(before), disk=file_bytes(work.directory))
        for channel in channels:
            channel.send(None)
        for process in processes:
            process.join()
    except EOFError:
        print(f"plan {plan!r} on {ranks} ranks cannot be measured: see the error above", flush=True)
        return None
    else:
        return found
    finally:
        for process in processes:
            process.kill()


def measure_memory(ranks: list[int], work: Work, copies: bool) -> dict[str, Any]:
    """Memory of each number of ranks beside that of one process."""
    one, rows = measure_held(1, work), dict[str, Any]()
    for number in ranks:
        several = measure_held(number, work)
        copied = held(number, work, "ddp") if copies else None
        rows[str(number)] = several | {
            "state_bytes_vs_one_process": {kind: ratio(several[f"{kind}_bytes"], one[f"{kind}_bytes"]) for kind in ("ram", "disk")},
            "per_rank_bytes": several["ram_bytes"]
            and one["ram_bytes"]
            and (several["ram_bytes"] - one["ram_bytes"]) // (number - 1),
            "copies_vs_one_process": ratio(copied and copied.ram, one["ram_bytes"]),
        }
        print(f"{number} ranks: {rows[str(number)]}", flush=True)
    return one | {"ranks": rows}


def measure_held(ranks: int, work: Work) -> dict[str, int | None]:
    """RAM under plan ``host`` and disk under plan ``disk``."""
    folder = work.directory / f"ranks-{ranks}"
    folder.mkdir()
    in_memory, on_disk = held(ranks, work, "host"), held(ranks, replace(work, directory=folder), "disk")
    return {"ram_bytes": in_memory and in_memory.ram, "disk_bytes": on_disk and on_disk.disk}


def ratio(one: float | None, other: float | None) -> float | None:
    """Rounded, for people; ``None`` if one of them is not known."""
    return round(one / other, 3) if one and other else None


# ---- how long a step takes ---------------------------------------------------------------------


class TakesTurns(pl.Callback):
    """Trains when it is the group's turn, and keeps the losses."""

    def __init__(self, baton: Baton) -> None:
        self.baton, self.losses = baton, list[float]()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.baton.step_begins():
            trainer.should_stop = True
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 1

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def offloaded(baton: Baton, rank: int, ranks: int, work: Work, network_bytes_per_s: float | None = None) -> dict[str, Any]:
    """A rank of ours; on a network of a set speed it is traced."""
    torch.manual_seed(0)
    if trace := network_bytes_per_s is not None:
        os.environ[ENVIRONMENT] = f"{network_bytes_per_s},0"
    strategy = HeteroOffloadStrategy("host", block_cls=Layer, trace=trace)
    turns = TakesTurns(baton)
    baton.drain, baton.num_bytes = partial(settled, strategy, ranks), loopback_bytes
    trainer = make_trainer(strategy=strategy, devices=ranks, callbacks=[turns], default_root_dir=work.directory)
    model = GPT2(work.size) if work.flop_per_s is None else PacedGPT2(work.size, work.flop_per_s)
    fit(trainer, model, batch=work.batch, length=work.seq, seed=rank)
    busy = lane_seconds(strategy.trace.spans) if trace else {}
    return {"losses": turns.losses, "busy_s": busy}


def settled(strategy: Any, ranks: int) -> None:
    """Nothing of any rank is under way."""
    settle(strategy)
    if ranks > 1:
        dist.barrier()


def fsdp2(baton: Baton, rank: int, ranks: int, work: Work) -> dict[str, Any]:
    """A rank of FSDP2 with the same blocks, as its documentation says."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Transformer(work.size)
    options: Any = {"mesh": init_device_mesh("cpu", (ranks,)), "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    baton.drain, baton.num_bytes = dist.barrier, loopback_bytes
    losses = []
    for tokens in RandomTokens(work.size, batch=work.batch, length=work.seq, seed=rank):
        if not baton.step_begins():
            break
        loss: Tensor = model.loss(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dist.destroy_process_group()
    return {"losses": losses}


def measure_step(number: int, work: Work, rounds: int, count_bytes: bool) -> dict[str, Any]:
    """Ours and FSDP2, in turns."""
    with Group(offloaded, number, work) as ours, Group(fsdp2, number, work) as theirs:
        groups, seconds, moved = {"ours": ours, "fsdp2": theirs}, {"ours": [], "fsdp2": []}, {"ours": 0.0, "fsdp2": 0.0}
        for turn in range(rounds):
            for name in sorted(groups, reverse=bool(turn % 2)):
                took = groups[name].turn(work.steps)
                seconds[name] += took.seconds
                moved[name] = took.num_bytes
        results = {name: group.finish() for name, group in groups.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    pairs = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["fsdp2"], strict=True)]
    wire = {name: round(count / num_params(work.size), 3) if count_bytes else None for name, count in moved.items()}
    losses = {name: [rank["losses"] for rank in of_ranks] for name, of_ranks in results.items()}
    row = {
        "step_vs_fsdp2": ratio(medians["ours"], medians["fsdp2"]),
        "step_vs_fsdp2_interval": [round(bound, 3) for bound in interval(pairs)],
        "seconds_per_step": medians["ours"], "fsdp2_seconds_per_step": medians["fsdp2"],
        "wire_bytes_per_parameter": wire["ours"], "fsdp2_wire_bytes_per_parameter": wire["fsdp2"],
        "peak_rss_bytes": sum(rank["peak_rss_bytes"] for rank in results["ours"]),
        "fsdp2_peak_rss_bytes": sum(rank["peak_rss_bytes"] for rank in results["fsdp2"]),
        "loss_difference": loss_difference(losses["ours"], losses["fsdp2"]),
    }  # fmt: skip
    print(f"{number} ranks: {row}", flush=True)
    return row


def loss_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """The largest relative one of all ranks and steps that both have."""
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one, other, strict=False)]
    return max(abs(one - other) / other for one, other in pairs)


# ---- at a set pace -----------------------------------------------------------------------------


def lane_seconds(spans: Iterable[Span]) -> dict[str, float]:
    """The median seconds for which each lane is busy in a step."""
    busy: dict[tuple[int, str], float] = {}
    for span in spans:
        if not span.is_wait:
            busy[span.step, span.lane] = busy.get((span.step, span.lane), 0.0) + span.end_s - span.start_s
    steps = sorted({step for step, _ in busy})[1:-1]  # the first is not whole, and the last may not be
    return {lane: statistics.median(busy.get((step, lane), 0.0) for step in steps) for _, lane in busy}


def compute_s(work: Work, flop_per_s: float) -> float:
    """Seconds of a rank's linear layers in a step, forward and backward."""
    return 3 * 24 * work.batch * work.seq * work.size.width**2 * work.size.layers / flop_per_s


def measure_paced(number: int, work: Work, step_s: float) -> dict[str, Any]:
    """One rank and several with the same global batch, of which one rank computes ``step_s``.

    And several whose network sends a rank's gradients in the time of its compute.
    """
    whole = replace(work, batch=work.batch * number)
    rate = compute_s(whole, 1.0) / step_s
    own = replace(work, flop_per_s=rate)
    sent = 4 * num_params(work.size) * (1 - 1 / number) / compute_s(work, rate)
    with (
        Group(offloaded, 1, replace(whole, flop_per_s=rate)) as one,
        Group(offloaded, number, own) as several,
        Group(offloaded, number, own, sent) as slowed,
    ):
        alone, together, slow = one.turn(work.steps), several.turn(work.steps), slowed.turn(work.steps)
        busy = [group.finish() for group in (one, several, slowed)][-1][0]["busy_s"]
    alone_s, together_s, slow_s = (statistics.median(turn.seconds) for turn in (alone, together, slow))
    row = {
        "speedup_over_one_rank": ratio(alone_s, together_s), "one_rank_seconds_per_step": alone_s,
        "seconds_per_step": together_s, "compute_s": compute_s(work, rate),
        "overlap": ratio(slow_s, max(busy.values())), "slow_network_seconds_per_step": slow_s, "busy_s": busy,
    }  # fmt: skip
    print(f"{number} ranks: {row}", flush=True)
    return row


# ---- the command -------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="where stores go")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1, help="sequences of each rank")
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="of a turn, or that count")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each in the part step")
    parser.add_argument("--paced-layers", type=int, default=8)
    parser.add_argument("--paced-width", type=int, default=256)
    parser.add_argument("--paced-step", type=float, default=4.0, help="seconds that one rank computes for the global batch")
    parser.add_argument("--copies", action="store_true", help="also memory of Lightning's ddp")
    args = parser.parse_args()
    if min(args.ranks) < 2:
        parser.error(f"--ranks {min(args.ranks)}; allowed: 2 or more. One process is measured beside them.")
    own_network = has_own_network()
    if not own_network:
        print("bytes on the wire cannot be measured: the system allows no network of its own to this user", flush=True)
    size = replace(SIZES["tiny"], layers=args.layers, width=args.width, heads=args.width // 64 or 1)
    result: dict[str, Any] = {"benchmark": "sharding", "parameters": num_params(size), "state_bytes": 12 * num_params(size)}
    with scratch(args.dir) as root:
        work = Work(size=size, batch=args.batch, seq=args.seq, steps=args.steps, directory=root)
        if "memory" in args.parts:
            result["memory"] = measure_memory(args.ranks, work, args.copies)
        if "step" in args.parts:
            result["step"] = {str(number): measure_step(number, work, args.rounds, own_network) for number in args.ranks}
        if "paced" in args.parts:
            small = replace(size, layers=args.paced_layers, width=args.paced_width, heads=args.paced_width // 64 or 1)
            paced = replace(work, size=small)
            result["paced"] = {str(number): measure_paced(number, paced, args.paced_step) for number in args.ranks}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
