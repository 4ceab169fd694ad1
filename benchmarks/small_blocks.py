"""Host time per block: the time of a step per block of a model that computes next to nothing.

Each block has nine parameters of a few elements, so a step is what Python, torch and the runtime do
for a block, not arithmetic. That is what a GPU waits for if its kernels are short.

* ``plain``: Lightning's default strategy with ``AdamW(fused=True)``.
* ``resident``: weights, state and updates on an emulated device without limits.
* ``host``: weights and state in host memory, updates on the CPU, activations stay on the device.
* ``recompute``: the same, and activations are recomputed.

The emulated device counts the memory of every tensor that forward saves, in Python. On a GPU
torch's allocator counts, and plan ``resident`` has no hooks on saved tensors at all. ``…,
uncounted`` is the same plan on a device that counts nothing: what the runtime itself does.

Prints one line of JSON last: seconds per block, the median over rounds of the difference between a
model of ``--blocks`` and one of a quarter of them; ``overhead_per_block_vs_plain``, its ratio to
that of ``plain``; ``calls_per_block``, functions of the package that a step calls per block. On a
machine that does other work, times tell little: ``cpu_per_block_vs_plain`` is the same ratio of the
CPU time of the process, and ``thread_per_block_vs_plain`` of that of the thread that trains, which
is what a device waits for.

Lanes run ops in threads of their own, whose Python holds the interpreter too.
``calls_per_block`` has only calls of the thread that trains. Rounds end after ``--minutes``; there
are three at least.

    python benchmarks/small_blocks.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from gpt2 import make_trainer
from torch import Tensor, nn

import lightning_hetero
from lightning_hetero import BlockPlan, EmulatedDevice, HeteroOffloadStrategy, Plan, Tier, UpdateLane
from lightning_hetero.ir.plan import Saved
from lightning_hetero.lanes import EmulatedLanes
from lightning_hetero.runtime.device import setup

WIDTH = 8
LEAST_ROUNDS = 3
PACKAGE = str(Path(lightning_hetero.__file__).parent)
ON_DEVICE = BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE)
ON_HOST = BlockPlan(name="blocks.*", weights=Tier.HOST, state=Tier.HOST, update=UpdateLane.CPU)
RECOMPUTED = BlockPlan(name="blocks.*", weights=Tier.HOST, state=Tier.HOST, update=UpdateLane.CPU, saved=Saved.RECOMPUTE)
PLANS = {
    "resident": Plan(name="resident", blocks=(ON_DEVICE,)),
    "host": Plan(name="host", blocks=(ON_HOST, ON_DEVICE)),
    "recompute": Plan(name="recompute", blocks=(RECOMPUTED, ON_DEVICE)),
}


UNCOUNTED = ", uncounted"
CONTESTANTS = (*PLANS, *(name + UNCOUNTED for name in PLANS))


class UncountedLanes(EmulatedLanes):
    """An emulated device that leaves what torch allocates to torch, as a GPU does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts = False

    def allocated(self, storage: torch.UntypedStorage) -> None:
        """Counts nothing."""


class Block(nn.Module):
    """Nine parameters, each used once."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(9)])

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x


class SmallBlocks(pl.LightningModule):
    """Many blocks that compute next to nothing."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(1 << 12, WIDTH), batch_size=4)


CLOCKS = {"overhead": time.perf_counter, "cpu": time.process_time, "thread": time.thread_time}


class Steps(pl.Callback):
    """The times of steps after the first ones by each clock, or the calls of one of them."""

    def __init__(self, *, warm: int, counts: bool) -> None:
        self.seconds: dict[str, list[float]] = {clock: [] for clock in CLOCKS}
        self.calls: Counter[str] = Counter()
        self._warm, self._counts = warm, counts
        self._last_s = dict.fromkeys(CLOCKS, 0.0)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self._counts:
            sys.setprofile(self._note if batch_idx == self._warm else None)
        for clock, read in CLOCKS.items():
            now = read()
            if batch_idx > self._warm:
                self.seconds[clock].append(now - self._last_s[clock])
            self._last_s[clock] = now

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.calls[f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_qualname}"] += 1


def train(name: str, num_blocks: int, steps: int, *, counts: bool = False) -> Steps:
    """One fit of a contestant; ``counts``: counts calls instead of taking times."""
    torch.manual_seed(1)
    module, seen, warm = SmallBlocks(num_blocks), Steps(warm=4, counts=counts), 4
    strategy: Any = "auto"
    if name != "plain":
        device = EmulatedDevice(memory="256MiB")
        strategy = HeteroOffloadStrategy(PLANS[name.removesuffix(UNCOUNTED)], device=device, block_cls=Block)
    trainer = make_trainer(strategy=strategy, max_steps=warm + 2 if counts else warm + steps + 1, callbacks=[seen])
    with patch.object(setup, "EmulatedLanes", UncountedLanes if name.endswith(UNCOUNTED) else EmulatedLanes):
        trainer.fit(module)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=64, help="of the larger model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no round begins")
    parser.add_argument("--steps", type=int, default=20, help="per contestant and round")
    parser.add_argument("--calls", choices=CONTESTANTS, help="only print the functions that a step of this plan calls")
    args = parser.parse_args()
    many, few = args.blocks, args.blocks // 4
    if args.calls:
        of_many, of_few = (train(args.calls, n, 0, counts=True).calls for n in (many, few))
        counts = {name: (of_many[name] - of_few[name]) / (many - few) for name in of_many}
        for name, count in sorted(counts.items(), key=lambda row: -row[1])[:70]:
            print(f"{count:7.2f} {name}")
        print(f"{sum(counts.values()):7.2f} per block")
        return
    calls = {}
    for name in CONTESTANTS:
        total, less = (train(name, n, 0, counts=True).calls.total() for n in (many, few))
        calls[name] = round((total - less) / (many - few), 1)
    found: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in ("plain", *CONTESTANTS)} for clock in CLOCKS}
    begun_s = time.perf_counter()
    for number in range(args.rounds):
        if number >= LEAST_ROUNDS and time.perf_counter() - begun_s > 60 * args.minutes:
            break
        for name in ("plain", *CONTESTANTS):
            large, small = (train(name, n, args.steps).seconds for n in (many, few))
            for clock, rows in found.items():
                rows[name].append((statistics.median(large[clock]) - statistics.median(small[clock])) / (many - few))
    result: dict[str, Any] = {"seconds_per_block": {name: statistics.median(rows) for name, rows in found["overhead"].items()}}
    for clock, rows in found.items():
        ratios = {name: [a / b for a, b in zip(rows[name], rows["plain"], strict=True)] for name in CONTESTANTS}
        result[f"{clock}_per_block_vs_plain"] = {name: round(statistics.median(each), 3) for name, each in ratios.items()}
    result |= {"calls_per_block": calls, "rounds": len(found["overhead"]["plain"])}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
