"""All planners on every case of a suite, beside a lower bound of every plan.

    python benchmarks/planners.py [--random 80] [--small 300] [--seed 0] [--every N] [--jobs N]
                                  [--verbose]

Cases are the models of the papers' tables on their machines at several batch sizes, well-known
models on single cards, and random models on random machines. For each planner the table has the
cases for which it has a plan; those in which no planner has a faster one, and the others; its
simulated step over the lower bound; and the planning time. Everything is simulated: this compares
plans, not machines.

Then models of 1 to 3 blocks, on machines with all rates and on machines without a rate for some
work: our plan beside the fastest plan of brute force (brute_force.py). Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import cvxpy  # noqa: F401  so that no planner's time has its import
from brute_force import SmallCase, fastest, small_cases

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile, OperatorProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.evaluation import simulation
from lightning_hetero.profiling import presets

OURS = "holistic"
OPTIONS = {OURS: {"prefer_resident": 0.0}}  # the fastest plan, on every machine
TIE = 1e-9  # relative difference of simulated steps that are the same


@dataclass(frozen=True)
class Case:
    name: str
    model: ModelProfile
    hardware: HardwareProfile


# ---- the suite -----------------------------------------------------------------------------------


def paper_cases() -> Iterator[Case]:
    """Models of each paper's tables on its machines."""
    yield from _grid(("lohan-6b", "lohan-13b", "lohan-30b", "lohan-70b", "lohan-135b", "lohan-175b"), (1, 8, 16, 32, 64),
                     ("lohan-rtx4090", "lohan-rtx3090", "lohan-rtx4080"))  # fmt: skip
    yield from _grid(("autohete-2b", "autohete-4b", "autohete-6b", "autohete-8b", "autohete-12b", "autohete-16b", "autohete-24b",
                      "autohete-40b", "autohete-70b"), (4, 8, 16), ("autohete-a100",))  # fmt: skip
    yield from _grid(("protrain-gpt2-1b", "protrain-gpt2-10b", "protrain-gpt2-20b", "protrain-mistral-7b", "protrain-llama-13b",
                      "protrain-opt-30b"), (2, 8, 32), ("protrain-rtx3090", "protrain-a100"))  # fmt: skip
    yield from _grid(("dos-7b", "dos-8.3b", "dos-13b", "dos-20b"), (1, 4, 8), ("dos-h100", "dos-v100"))


def _grid(models: tuple[str, ...], batches: tuple[int, ...], machines: tuple[str, ...]) -> Iterator[Case]:
    for machine in machines:
        hardware = presets.paper_machine(machine)
        for model in models:
            for batch in batches:
                yield _case(model, batch, hardware)


def single_card_cases() -> Iterator[Case]:
    """Well-known models on one card of several kinds, with several sizes of memory and disk."""
    machines = [
        presets.machine(device="rtx4090", host_memory="64GiB", disk="p5510"),
        presets.machine(device="rtx4090", host_memory="128GiB", disk="p5510x4"),
        presets.machine(device="a100-80", host_memory="256GiB"),
        presets.machine(device="h100", host_memory="512GiB", disk="p5510x4"),
    ]
    for hardware in machines:
        for model in ("gpt2", "gpt2-xl", "smollm2-1.7b", "llama-7b", "llama-3-8b"):
            for batch in (1, 4, 16):
                yield _case(model, batch, hardware)


def _case(model: str, batch: int, hardware: HardwareProfile) -> Case:
    profile = presets.model(model, batch=batch, sequence=1024, hardware=hardware)
    return Case(f"{model}, batch {batch}, {hardware.name}", profile, hardware)


def random_cases(count: int, seed: int) -> Iterator[Case]:
    """Random models, uneven in part, on random machines.

    Most of them have too little of something.
    """
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        model = random_model(rng)
        yield Case(f"random {seed}/{number}", model, random_machine(rng, model))


def random_model(rng: random.Random) -> ModelProfile:
    """4 to 40 blocks between an embedding and a head, all alike or each different."""
    even, itemsize = rng.random() < 0.6, rng.choice((2, 2, 4))
    params, seconds, saved = 10 ** rng.uniform(6.5, 9), 10 ** rng.uniform(-3, -0.5), 10 ** rng.uniform(7, 9.5)
    num_operators = rng.randint(0, 5)

    def block(name: str, scale: float, *, pinned: bool) -> BlockProfile:
        size, step, kept = int(params * scale), seconds * scale, int(saved * scale)
        shares = [rng.random() for _ in range(num_operators)] if not pinned else []
        flop = step * 1e13
        operators = tuple(
            OperatorProfile(name=f"op{i}", flop=flop * s / sum(shares), bytes=int(0.8 * kept * s / sum(shares)))
            for i, s in enumerate(shares)
        )
        return BlockProfile(
            name=name, num_params=size, num_trainable_params=0 if rng.random() < 0.03 else size, forward_s=step,
            backward_s=2 * step, forward_flop=flop, activation_bytes=kept, boundary_bytes=kept // 8,
            transient_bytes=kept // 4, operators=operators, pinned=pinned,
        )  # fmt: skip

    plain = block("layer", 1.0, pinned=False)
    count = rng.randint(4, 40)
    layers = [
        _renamed(plain, f"layers.{i}") if even else block(f"layers.{i}", rng.uniform(0.3, 2), pinned=False) for i in range(count)
    ]
    ends = (block("embedding", rng.uniform(0.2, 1.5), pinned=True), block("head", rng.uniform(0.2, 1.5), pinned=True))
    return ModelProfile(
        name="random", tokens=1024, compute_itemsize=itemsize, constant_device_bytes=10**8, constant_host_bytes=10**8,
        blocks=(ends[0], *layers, ends[1]),
    )  # fmt: skip


def _renamed(block: BlockProfile, name: str) -> BlockProfile:
    values = {key: getattr(block, key) for key in BlockProfile.__slots__}
    return BlockProfile(**{**values, "name": name})


def random_machine(rng: random.Random, model: ModelProfile) -> HardwareProfile:
    """Capacities are shares of the model's needs; rates are from a laptop's to a server's."""
    shape = model.shape()
    states = sum(b.weight_bytes + b.gradient_bytes + b.state_bytes for b in shape.blocks)
    saved = sum(b.activation_bytes for b in model.blocks)
    largest = max(2 * b.activation_bytes + b.transient_bytes + 4 * b.num_params * model.compute_itemsize for b in model.blocks)
    shared, link, disk = rng.random() < 0.15, 10 ** rng.uniform(9.7, 11.5), 10 ** rng.uniform(9, 10.5)
    has_disk = rng.random() < 0.8
    host = int(rng.uniform(0.1, 1.5) * states + (saved if shared else 0)) + 10**9
    return HardwareProfile(
        name="random", device_memory_bytes=host if shared else int(largest + rng.uniform(0.02, 1.2) * (states + saved)),
        host_memory_bytes=host, disk_capacity_bytes=int(rng.uniform(1, 4) * states) * has_disk, device_flop_per_s=1e13,
        link_h2d_bytes_per_s=0.0 if shared else link, link_d2h_bytes_per_s=0.0 if shared else link * rng.uniform(0.8, 1),
        disk_read_bytes_per_s=disk * has_disk, disk_write_bytes_per_s=disk * rng.uniform(0.4, 1) * has_disk,
        disk_duplex=rng.random() < 0.3, host_dram_bytes_per_s=10 ** rng.uniform(10.5, 11.6),
        cpu_update_params_per_s=10 ** rng.uniform(8.5, 10), device_update_params_per_s=10 ** rng.uniform(9.5, 11),
        cpu_downcast_params_per_s=10 ** rng.uniform(9, 10), shared_memory=shared,
        contention={"compute|update": rng.uniform(1, 1.5), "update|compute": rng.uniform(1, 1.5)} if shared else {},
    )  # fmt: skip


# ---- running it ----------------------------------------------------------------------------------


@dataclass
class Record:
    """What came of one case: each planner's simulated step and planning time, and our bound."""

    case: Case
    step_s: dict[str, float] = field(default_factory=dict)
    planning_s: dict[str, float] = field(default_factory=dict)
    bound_s: float = math.nan
    resident: bool = False

    @property
    def best_other_s(self) -> float:
        return min((s for name, s in self.step_s.items() if name != OURS), default=math.inf)

    @property
    def never_worse(self) -> bool:
        return self.step_s.get(OURS, math.inf) <= self.best_other_s * (1 + TIE)


def run(case: Case) -> Record:
    """Plans one case with every planner."""
    record = Record(case)
    for name, planner in PLANNERS.items():
        begin = time.perf_counter()
        try:
            plan: Plan | None = planner(case.model, case.hardware, **OPTIONS.get(name, {}))
        except PlanError:
            plan = None
        record.planning_s[name] = time.perf_counter() - begin
        if plan is None or plan.predicted is None:
            continue
        # Deep Optimizer States predicts one rank's share of the work; here all plans do all of it.
        try:
            record.step_s[name] = simulation(plan, case.model, case.hardware).prediction.iteration_s
        except PlanError:
            continue
        if name == OURS:
            record.bound_s = plan.decisions["lower_bound_s"]
            record.resident = plan.decisions["state"].get("device", 0) == len(plan.blocks)
    return record


@dataclass(frozen=True)
class Small:
    """One small case: the fastest of all its plans, and ours; infinite where there is none."""

    case: SmallCase
    brute_force_s: float
    ours_s: float

    @property
    def over(self) -> float:
        """Ours over the fastest, less 1."""
        return 0.0 if self.ours_s == self.brute_force_s else self.ours_s / self.brute_force_s - 1


def run_small(case: SmallCase) -> Small:
    """Tries all plans of a small case, and plans it."""
    try:
        plan = PLANNERS[OURS](case.model, case.hardware, updates=case.updates, **OPTIONS[OURS])
        ours_s = plan.predicted.iteration_s if plan.predicted is not None else math.inf
    except PlanError:
        ours_s = math.inf
    return Small(case, fastest(case).seconds, ours_s)


def quantile(values: list[float], share: float) -> float:
    """The value below which a share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def table(records: list[Record]) -> None:
    """One line per planner, the one with the most wins first."""
    rows = []
    for name in PLANNERS:
        mine = [r for r in records if name in r.step_s]
        wins = sum(r.step_s[name] <= min(r.step_s.values()) * (1 + TIE) for r in mine)
        ratios = [r.step_s[name] / r.bound_s for r in mine if r.bound_s > 0]
        spent = [r.planning_s[name] for r in records]
        rows.append((wins, name, len(mine), ratios, spent))
    print(f"{'planner':22s} {'plans':>6s} {'wins':>5s} {'losses':>6s}   {'over the bound':>22s}   {'planning, ms':>18s}")
    print(f"{'':22s} {'':6s} {'':5s} {'':6s}   {'median':>10s} {'90 %':>11s}   {'median':>8s} {'most':>9s}")
    for wins, name, count, ratios, spent in sorted(rows, reverse=True):
        print(
            f"{name:22s} {count:6d} {wins:5d} {count - wins:6d}   {quantile(ratios, 0.5):10.3f} {quantile(ratios, 0.9):11.3f}   "
            f"{1e3 * quantile(spent, 0.5):8.0f} {1e3 * max(spent):9.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", type=int, default=80, help="random cases beside those of the tables")
    parser.add_argument("--small", type=int, default=300, help="cases of 1 to 3 blocks beside brute force")
    parser.add_argument("--seed", type=int, default=0, help="of the random cases")
    parser.add_argument("--every", type=int, default=1, help="take only every Nth case")
    parser.add_argument("--jobs", type=int, default=1, help="processes that plan side by side, which makes planning times longer")
    parser.add_argument("--verbose", action="store_true", help="one line per case")
    options = parser.parse_args()

    cases = [*paper_cases(), *single_card_cases(), *random_cases(options.random, options.seed)][:: options.every]
    everything = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for record in pool.map(run, cases):
            everything.append(record)
            if options.verbose:
                ours, other = record.step_s.get(OURS, math.nan), record.best_other_s
                gap = f"{ours / record.bound_s:6.3f}" if record.bound_s else ""
                print(f"{record.case.name:60s} {ours:10.4f} s  {gap} of the bound, best other {other / ours:6.3f}", flush=True)
        count = options.small // options.every
        tried = [*small_cases(count, options.seed), *small_cases(count // 5, options.seed, zero_rates=True)]
        small = list(pool.map(run_small, tried))
    records = [r for r in everything if r.step_s]
    table(records)
    for record in records:
        if not record.never_worse:
            print(f"worse: {record.case.name}: {record.step_s}")

    for s in small:
        if s.over > 0.02:
            print(f"slower than brute force: {s.case.name}: {s.ours_s:.4f} s, {s.brute_force_s:.4f} s")

    gaps = [r.step_s[OURS] / r.bound_s - 1 for r in records if OURS in r.step_s and r.bound_s > 0]
    fits = [r for r in records if "resident" in r.step_s]
    large = [r.planning_s[OURS] for r in everything if len(r.case.model.blocks) >= 80]
    result = {
        "benchmark": "planners",
        "cases": len(records),
        "never_worse": sum(r.never_worse for r in records),
        "median_gap_to_lower_bound": round(statistics.median(gaps), 4),
        "p90_gap_to_lower_bound": round(quantile(gaps, 0.9), 4),
        "planning_s_p50": round(quantile([r.planning_s[OURS] for r in everything], 0.5), 3),
        "planning_s_max": round(max(r.planning_s[OURS] for r in everything), 3),
        "planning_s_max_from_80_blocks": round(max(large, default=math.nan), 3) if large else None,
        "strictly_faster": sum(r.step_s[OURS] < r.best_other_s * (1 - 1e-3) for r in records if OURS in r.step_s),
        "below_lower_bound": sum(s < r.bound_s * (1 - 1e-6) for r in records for s in r.step_s.values()),
        "nothing_fits": len(everything) - len(records),
        "all_fits": len(fits),
        "resident_is_fastest": sum(r.step_s["resident"] <= min(r.step_s.values()) * (1 + TIE) for r in fits),
        "resident_chosen": sum(r.resident for r in fits),
        "small_cases": len(small),
        "small_with_a_plan": sum(s.brute_force_s < math.inf for s in small),
        "small_within_2_percent": sum(s.over <= 0.02 for s in small),
        "small_most_over": round(max((s.over for s in small), default=0.0), 4),
        "seed": options.seed,
        "jobs": options.jobs,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
