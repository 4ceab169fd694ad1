"""Ranks that share one model, beside one process, Lightning's ``ddp`` and torch's FSDP2.

All train the same GPT-2 in ``32-true`` over gloo on this machine, and have the loopback device for
themselves. ``--parts`` chooses what is measured:

* ``memory``: what all ranks hold together while they train, and what one process holds that has
  the same budget (``--headroom`` times 12 bytes a parameter) and trains the same global batch. RAM
  is the sum of their proportional set sizes, in which a page that several processes map counts
  once, less what the processes have before there is a model (plan ``host``). Disk is what the files
  of their stores take (plan ``disk``). ``state_bytes_vs_one_process`` are the ratios to that
  process of what is held between two steps: weights and optimizer state.
  ``peak_ram_vs_one_process`` is that of the most in a step, with gradients and activations too, and
  with what malloc keeps of freed ones; ``peak_bytes_per_rank`` is what each further rank adds to
  it. ``peak_ram_vs_one_process_with_a_ranks_batch`` compares with a process that has the batch of
  one rank alone, so activations of N batches with those of one. ``copies_vs_one_process``
  (``--copies``) is that of Lightning's ``ddp`` between two steps.
* ``large``: a budget for all ranks together (``--host-memory``), kept in every phase of a fit that
  plans by itself, or has ``--large-plan disk``, and ends with a checkpoint; see
  ``rank_memory.within_budget``. The model is GPT-2 with ``--large-layers`` layers of width
  ``--large-width``; by default it has 1.3 billion parameters. It is measured only if it is asked
  for.
* ``step``: ours (plan ``host``) and FSDP2 with parameters, gradients and optimizer state offloaded
  to the CPU train in turns, on the same batches. ``step_vs_fsdp2`` is the ratio of the medians;
  ``wire_bytes_per_parameter`` what the loopback device moves in a step for each parameter, with the
  headers of packets; ``loss_difference`` the largest relative one of a step's losses.
* ``paced``: linear layers take a set time (``paced.py``), so that ranks compute at the same speed
  however many processors there are. ``speedup_over_one_rank`` is that of the same global batch
  while compute is the limit. In ``overlap`` the network has a set time too, which is ``--network``
  times that of compute: ``step_vs_busiest`` is a step relative to the busiest of its lanes, which
  all overlap if it is 1; ``step_vs_in_order`` and ``step_vs_any_order`` are relative to the
  shortest step that an order of gradients allows (``shortest_steps``).

Prints one line of JSON last. A figure that could not be measured is ``null``; a line before says
why.

    python benchmarks/sharding.py --dir DIR --parts memory --ranks 2 4 --copies
    python benchmarks/sharding.py --dir DIR --parts step --ranks 2 4
    python benchmarks/sharding.py --dir DIR --parts paced --ranks 2 4
    python benchmarks/sharding.py --dir DIR --parts large --ranks 4 --host-memory 8GiB
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from contestants import Baton, interval, settle
from gpt2 import GPT2, SIZES, Layer, RandomTokens, Size, Transformer, fit, make_trainer, num_params
from paced import PacedGPT2
from rank_groups import Group, has_own_network, loopback_bytes
from rank_memory import Fit, compare, ratio, within_budget
from scratch import scratch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.ir.trace import Span
from lightning_hetero.lanes.network import ENVIRONMENT
from lightning_hetero.units import parse_bytes

WARM = 2  # batches before memory counts
MEASURED = 4  # batches before there is a plan
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


def shortest_steps(blocks: int, compute_s: float, network_s: float) -> dict[str, float]:
    """The shortest step of equal blocks, whose backward takes twice the time of forward.

    ``in_order``: the network takes gradients as backward makes them. It is idle in forward, and the
    next forward begins when the first block, whose gradients come last, has been reduced.
    ``any_order``: gradients may wait whole, so those of the last blocks are reduced while the next
    forward runs. Then two waits are left: compute has nothing to do while the first block is
    reduced, and the network none while the last block computes.
    """
    forward_s, block_s = compute_s / (3 * blocks), network_s / blocks
    end_s = blocks * forward_s
    for number in range(blocks):
        end_s = max(end_s, blocks * forward_s + (number + 1) * 2 * forward_s) + block_s
    return {"in_order": end_s, "any_order": max(compute_s + block_s, network_s + 3 * forward_s)}


def measure_paced(number: int, work: Work, step_s: float, shares: list[float]) -> dict[str, Any]:
    """One rank and several with the same global batch, of which one rank computes ``step_s``."""
    whole = replace(work, batch=work.batch * number)
    rate = compute_s(whole, 1.0) / step_s
    own = replace(work, flop_per_s=rate)
    with Group(offloaded, 1, replace(whole, flop_per_s=rate)) as one, Group(offloaded, number, own) as several:
        alone_s, together_s = (statistics.median(group.turn(work.steps).seconds) for group in (one, several))
        for group in (one, several):
            group.finish()
    row = {
        "speedup_over_one_rank": ratio(alone_s, together_s), "one_rank_seconds_per_step": alone_s,
        "seconds_per_step": together_s, "compute_s": compute_s(work, rate),
        "overlap": {str(share): measure_overlap(number, own, share) for share in shares},
    }  # fmt: skip
    print(f"{number} ranks: {row}", flush=True)
    return row


def measure_overlap(number: int, work: Work, share: float) -> dict[str, Any]:
    """Ranks whose network sends a rank's gradients in this share of the time of its compute."""
    assert work.flop_per_s is not None
    computes_s = compute_s(work, work.flop_per_s)
    rate = 4 * num_params(work.size) * (1 - 1 / number) / (share * computes_s)
    with Group(offloaded, number, work, rate) as ranks:
        took_s = statistics.median(ranks.turn(work.steps).seconds)
        busy = ranks.finish()[0]["busy_s"]
    shortest = shortest_steps(work.size.layers, busy["compute"], busy["net"])
    return {
        "seconds_per_step": took_s, "busy_s": busy, "step_vs_busiest": ratio(took_s, max(busy.values())),
        **{f"step_vs_{order}": ratio(took_s, seconds) for order, seconds in shortest.items()},
    }  # fmt: skip


# ---- the command -------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="where stores go")
    parser.add_argument("--parts", choices=(*PARTS, "large"), nargs="+", default=PARTS)
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
    parser.add_argument("--network", type=float, nargs="+", default=[0.5, 0.8, 1.0, 1.4], help="its time relative to compute's")
    parser.add_argument("--headroom", type=float, default=1.1, help="the budget in the part memory, relative to the state")
    parser.add_argument(
        "--host-memory", type=partial(parse_bytes, name="--host-memory"), default="8GiB", help="the budget in the part large"
    )
    parser.add_argument("--large-plan", choices=("auto", "disk"), default="auto")
    parser.add_argument("--large-layers", type=int, default=24)
    parser.add_argument("--large-width", type=int, default=2048)
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
            memory = Fit(
                size=size, batch=args.batch, seq=args.seq, plan="host", warm=WARM, steps=args.steps, directory=root,
                host_memory=int(args.headroom * result["state_bytes"]),
            )  # fmt: skip
            result["memory"] = {"host_memory_bytes": memory.host_memory, "ranks": {}}
            for number in args.ranks:
                with scratch(root) as folder:
                    row = compare(number, replace(memory, directory=folder), copies=args.copies)
                result["memory"]["ranks"][str(number)] = row
                print(f"{number} ranks: {row}", flush=True)
        if "step" in args.parts:
            result["step"] = {str(number): measure_step(number, work, args.rounds, own_network) for number in args.ranks}
        if "paced" in args.parts:
            small = replace(size, layers=args.paced_layers, width=args.paced_width, heads=args.paced_width // 64 or 1)
            paced = replace(work, size=small)
            result["paced"] = {str(number): measure_paced(number, paced, args.paced_step, args.network) for number in args.ranks}
        if "large" in args.parts:
            result["large"] = {str(number): measure_large(number, args, root) for number in args.ranks}
    print(json.dumps(result))


def measure_large(number: int, args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """A budget that is kept in all phases of a fit."""
    large = replace(SIZES["gpt-1.3b"], layers=args.large_layers, width=args.large_width, heads=args.large_width // 64)
    with scratch(root) as folder:
        work = Fit(
            size=large, batch=args.batch, seq=args.seq, plan=args.large_plan, steps=args.steps, directory=folder,
            warm=MEASURED if args.large_plan == "auto" else 1, host_memory=args.host_memory, checkpoint=True,
        )  # fmt: skip
        row = {"parameters": num_params(large)} | within_budget(number, work)
    print(f"{number} ranks: {row}", flush=True)
    return row


if __name__ == "__main__":
    main()
