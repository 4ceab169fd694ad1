"""Trains with random options for a while, and watches memory, files and threads: nothing may be
left, and nothing may grow.

    python tests/soak.py --minutes 10 [--seed 0] [--dir DIR]

Every round draws a model, an optimizer, plans, precision, accumulation, clipping, a back end and a
durability, or an emulated device, and trains a few steps. Some rounds stop in the middle, and go on
from the store under another plan. Bits are compared with plain Lightning where both do the same
arithmetic (``32-true``), else with a run in memory. After every round the process must have the
threads and the descriptors that it had before, and the directory must be as empty as before.
Resident memory must not grow from the second third of the rounds to the last by more than
``--slack`` bytes. Prints one JSON line last; the options of a round are printed before it.
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

import torch
from support.models import Recipe, Shape, assert_same
from support.resuming import after, train

from lightning_hetero import EmulatedDevice
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.store.capacity import resident_bytes
from lightning_hetero.strategies import HeteroOffloadStrategy

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=3e-3, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=3e-3, fused=True),
    "unfused": lambda groups: torch.optim.AdamW(groups, lr=3e-3),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=3e-3),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5),
}


DEVICE_PLANS = {True: ("resident", "host", "disk"), False: ("resident",)}  # by whether the engine knows the optimizer


def random_plan(draw: random.Random, layers: int) -> Any:
    """A plan by name, or one that mixes tiers."""
    if draw.random() < 0.6:
        return draw.choice(["disk", "host", "resident"])
    tiers = (Tier.HOST, Tier.DISK)
    rows = [BlockPlan(name=f"model.blocks.{i}", weights=draw.choice(tiers), state=draw.choice(tiers)) for i in range(layers)]
    return Plan(name="mixed", blocks=(*rows, BlockPlan(name="*", weights=Tier.HOST, state=draw.choice(tiers))))


def one_round(root: Path, draw: random.Random) -> None:
    """Draws the options, trains, and compares."""
    layers = draw.randint(2, 4)
    optimizer = draw.choice(["adamw", "adamw", "adam", "sgd", "nadam", "rmsprop"])
    precision = draw.choice(["32-true", "32-true", "bf16-true", "bf16-mixed", "16-mixed"])
    known = optimizer in ("adamw", "adam")  # to the engine
    if known and precision.endswith("mixed"):
        optimizer = "unfused"  # Lightning clips no gradients that a fused optimizer unscales
    recipe = Recipe(
        steps=draw.randint(1, 6), accumulate=draw.choice([1, 1, 2]), clip=draw.choice([None, 0.5, 5.0]),
        precision=precision, schedule=draw.choice(["", "onecycle"]) if known else "", optimizer=OPTIMIZERS[optimizer],
        validate=draw.random() < 0.3, groups=draw.random() < 0.3,
        shape=Shape(
            layers=layers, width=draw.choice([16, 24, 40]), dropout=draw.choice([0.0, 0.1]), frozen=draw.choice([(), (0,)]),
            tied=draw.random() < 0.2,
        ),
    )  # fmt: skip
    device = draw.random() < 0.2
    own = not device and draw.random() < 0.7
    options: dict[str, Any] = {
        "disk_path": root / "store" if own else None,
        "durability": draw.choice(["none", "process", "process", *(["power"] if own else [])]),
        "io_backend": draw.choice(["auto", "pool"]),
        "verify_digests": draw.random() < 0.5,
        "update_threads": draw.choice([1, 2]),
    }
    plans = [draw.choice(DEVICE_PLANS[known]) if device else random_plan(draw, layers) for _ in range(2)]
    stop = draw.randint(1, recipe.steps) if own and options["durability"] != "none" and draw.random() < 0.6 else None
    said = {"optimizer": optimizer, "recipe": str(recipe), "plans": [str(p) for p in plans], "stop": stop, "device": device}
    print(json.dumps({**said, **{k: str(v) for k, v in options.items()}}), flush=True)

    def strategy(plan: Any) -> Any:
        more = {"device": EmulatedDevice(memory="8MiB")} if device else {}
        return HeteroOffloadStrategy(plan=plan, **options, **more)

    store = None
    if stop is not None and stop < recipe.steps:
        train(root, strategy(plans[0]), recipe, stop=stop)
        store = root / "store"
    got = train(root, strategy(plans[1]), recipe, store=store)
    plain: Any = "auto" if recipe.precision == "32-true" else HeteroOffloadStrategy(plan="resident")
    assert_same(got, after(train(root, plain, recipe), len(got.losses)))
    shutil.rmtree(root / "store", ignore_errors=True)


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
