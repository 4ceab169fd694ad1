"""Trains with random options for a while, and watches memory, files and threads: nothing may be left, and nothing may grow.

    python tests/soak.py --minutes 10 [--seed 0] [--dir DIR]

Every round draws a model, a plan, precision, accumulation, clipping, a back end and a durability, and trains a few steps. Some
rounds stop in the middle, and go on from the store. Bits are compared with plain Lightning where both do the same arithmetic
(``32-true``). After every round the process must have the threads and the descriptors that it had before, and the directory must
be as empty as before. Resident memory must not grow from the second third of the rounds to the last by more than ``--slack``
bytes. Prints one JSON line last; the seed and the options of a round that fails are printed before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lightning.pytorch as pl
import torch
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer

from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.strategies import HeteroOffloadStrategy


class Stops(Exception):
    """In the middle of training."""


class StopsAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Stops


def random_plan(draw: random.Random, layers: int) -> Any:
    """A plan by name, or one that mixes tiers."""
    if draw.random() < 0.6:
        return draw.choice(["disk", "host", "resident"])
    tiers = (Tier.HOST, Tier.DISK)
    rows = [BlockPlan(name=f"model.blocks.{i}", weights=draw.choice(tiers), state=draw.choice(tiers)) for i in range(layers)]
    return Plan(name="mixed", blocks=(*rows, BlockPlan(name="*", weights=Tier.HOST, state=draw.choice(tiers))))


def train(root: Path, strategy: Any, recipe: Recipe, stop: int | None, store: Path | None) -> Outcome | None:
    """One fit; ``None`` if it was stopped."""
    torch.manual_seed(7)
    module = LitModel(recipe)
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=recipe.steps, accumulate_grad_batches=recipe.accumulate, gradient_clip_val=recipe.clip,
        precision=recipe.precision, default_root_dir=root, limit_val_batches=2 if recipe.validate else 0,
        callbacks=[] if stop is None else [StopsAt(stop)],
    )  # fmt: skip
    try:
        trainer.fit(
            module, data(), data(2, seed=1) if recipe.validate else None, ckpt_path=None if store is None else str(store)
        )  # fmt: skip
    except Stops:
        return None
    return outcome(trainer, module)


def one_round(root: Path, draw: random.Random) -> dict[str, Any]:
    """Draws the options, trains, and compares; returns what was drawn."""
    layers = draw.randint(2, 4)
    recipe = Recipe(
        steps=draw.randint(1, 6), accumulate=draw.choice([1, 1, 2]), clip=draw.choice([None, 0.5]),
        precision=draw.choice(["32-true", "32-true", "bf16-true"]), schedule=draw.choice(["", "onecycle"]),
        validate=draw.random() < 0.3, groups=draw.random() < 0.3,
        shape=Shape(
            layers=layers, width=draw.choice([16, 24, 40]), dropout=draw.choice([0.0, 0.1]), frozen=draw.choice([(), (0,)]),
            tied=draw.random() < 0.2,
        ),
    )  # fmt: skip
    own = draw.random() < 0.7
    options: dict[str, Any] = {
        "disk_path": root / "store" if own else None,
        "durability": draw.choice(["none", "process", "process", "power"]),
        "io_backend": draw.choice(["auto", "pool"]),
        "verify_digests": draw.random() < 0.5,
        "update_threads": draw.choice([1, 2]),
    }
    plans = [random_plan(draw, layers) for _ in range(2)]
    stop = draw.randint(1, recipe.steps) if own and options["durability"] != "none" and draw.random() < 0.6 else None
    said = {"recipe": str(recipe), "plans": [str(p) for p in plans], "stop": stop, **{k: str(v) for k, v in options.items()}}
    print(json.dumps(said), flush=True)
    store = None
    if stop is not None and train(root, HeteroOffloadStrategy(plan=plans[0], **options), recipe, stop, None) is None:
        store = root / "store"
    got = train(root, HeteroOffloadStrategy(plan=plans[1], **options), recipe, None, store)
    if recipe.precision == "32-true" and got is not None:
        expected = train(root, "auto", recipe, None, None)
        assert expected is not None
        losses = expected.losses[len(expected.losses) - len(got.losses) :]
        assert_same(got, Outcome(losses, expected.weights, expected.state))
    shutil.rmtree(root / "store", ignore_errors=True)
    return said


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def held() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    gc.collect()
    native = len(os.listdir("/proc/self/task"))
    assert native >= threading.active_count()
    return native, len(os.listdir("/proc/self/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=0, help="stop after so many; 0: when the time is over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--slack", type=int, default=64 << 20, help="bytes that resident memory may grow by")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    deadline, rounds = time.monotonic() + 60 * arguments.minutes, 0
    sizes: list[int] = []
    before: tuple[int, int] | None = None
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="hetero-soak-") as folder:
        root = Path(folder)
        while time.monotonic() < deadline and (not arguments.rounds or rounds < arguments.rounds):
            one_round(root, draw)
            rounds += 1
            left = [p.name for p in root.iterdir() if p.name != "lightning_logs"]
            assert not left, f"left behind: {left}"
            if rounds > 3:  # torch starts its own threads, and opens its own files, in the first ones
                now = held()
                assert before is None or (now[0] <= before[0] and now[1] <= before[1]), f"threads, descriptors: {before} -> {now}"
                before = now
            sizes.append(resident_bytes())
    third = len(sizes) // 3
    grown = statistics.median(sizes[-third:]) - statistics.median(sizes[third : 2 * third]) if third else 0
    print(json.dumps({"rounds": rounds, "seed": arguments.seed, "grown_bytes": grown, "held": before}))
    raise SystemExit(int(grown > arguments.slack))


if __name__ == "__main__":
    main()
