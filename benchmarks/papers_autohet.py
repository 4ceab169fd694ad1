"""The AutoHet paper's claims beside our simulation: the tables of docs/planners/autohet.md.

    python benchmarks/papers_autohet.py [--planning-time]

Nothing is trained: times are those of equation 1. Prints the tables and, last, one JSON line with
the same figures. The inferred settings, and reasons for differences, are in
docs/planners/autohet.md. ``--planning-time`` also measures the time of planning.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_hetero.ir.cluster import Cluster, DeviceType
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.parallel.planner import cluster, plan
from lightning_hetero.parallel.planner.candidates import Candidate, Setting, settings_of
from lightning_hetero.parallel.planner.mapping import place
from lightning_hetero.profiling import presets

MICRO_BATCHES = 64  # of a step; the paper gives none
HARDWARE = presets.machine(device="a100-80", host_memory="1GiB")
MODELS: dict[str, tuple[str, int, int]] = {  # preset, sequences of a micro-batch, tokens of each: inferred
    "BERT-Large": ("gpt:layers=24,hidden=1024,heads=16,vocabulary=30522,positions=512", 4, 512),
    "GPT-3 6.7B": ("gpt3-6.7b", 1, 2048),
    "LLaMA 6.7B": ("llama-7b", 1, 2048),
}
UNIFORM = [f"{n}xa100-80+{n}x{other}" for other in ("h800", "h20") for n in (2, 4, 8)]
H800_UNEVEN = ["4xa100-80+2xh800", "5xa100-80+3xh800", "3xa100-80+5xh800"]
H20_UNEVEN = ["1xa100-80+4xh20"]
# Model, clusters, the paper's averages over Megatron-LM and over Whale.
CLAIMS: list[tuple[str, str, list[str], float, float | None]] = [
    ("BERT-Large", "2, 4, 8 of each, uniform", UNIFORM, 1.38, None),
    ("GPT-3 6.7B", "2, 4, 8 of each, uniform", UNIFORM, 1.53, 1.27),
    ("LLaMA 6.7B", "A100 + H800, uneven", H800_UNEVEN, 1.79, 1.51),
    ("LLaMA 6.7B", "A100 + H20, uneven", H20_UNEVEN, 1.44, 1.16),
]
SCALES = ("4xa100-80+4xh800", "8xa100-80+8xh800", "8xa100-80+8xh800+8xh20", "12xa100-80+12xh800+8xh20", "24xa100-80+24xh800+16xh20")
H800_PEAK = 0.55 * presets.device("h800").peak_flop_per_s.value  # as much of its peak as an A100 reaches

Cell = str | int | float | None


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Prints one table in Markdown."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join('-' if cell is None else f'{cell:.3g}' if isinstance(cell, float) else str(cell) for cell in row)} |")


def model(name: str) -> ModelProfile:
    preset, batch, sequence = MODELS[name]
    return presets.model(preset, batch=batch, sequence=sequence, hardware=HARDWARE)


def at_peak(machines: Cluster) -> Cluster:
    """The same with H800s at an A100's share of peak: 3.2 times an A100, not the paper's 2."""
    own = DeviceType(name="h800", flop_per_s=H800_PEAK)
    return replace(machines, devices=(own,)) if any(n.device == "h800" for n in machines.nodes) else machines


def speedups(name: str, machines: Cluster) -> dict[str, float]:
    """How many times as long the other planners' steps take as ours."""
    profile = model(name)
    ours = plan(profile, machines, micro_batches=MICRO_BATCHES).iteration_s
    others = ("megatron", "whale", "balanced", "autohet")
    return {p: plan(profile, machines, micro_batches=MICRO_BATCHES, planner=p).iteration_s / ours for p in others}


def claims() -> tuple[list[list[Cell]], list[list[Cell]]]:
    """The paper's averages beside ours; and every cluster."""
    averages: list[list[Cell]] = []
    details: list[list[Cell]] = []
    for name, what, lines, megatron, whale in CLAIMS:
        means: list[Cell] = []
        for power in ("twice an A100", "at its peak"):
            found = []
            for line in lines:
                machines = cluster(line)
                found.append(speedups(name, machines if power == "twice an A100" else at_peak(machines)))
                if power == "twice an A100":
                    details.append([name, line, *found[-1].values()])
            means += [statistics.fmean(f[p] for f in found) for p in ("megatron", "whale", "balanced")]
        averages.append([name, what, megatron, whale, *means])
    return averages, details


def examples() -> list[list[Cell]]:
    """The plans that the paper names, beside ours for the same cluster."""
    rows: list[list[Cell]] = []
    named = {  # tensor parallelism, groups as counts of kinds, weakest first
        "4xa100-80+2xh800": ("TP 2: the A100s a pipeline of two stages, the H800s a group", 2, [(2, 0), (0, 1)]),
        "1xa100-80+4xh20": ("A100 + H20, and three H20", 1, [(1, 1), (3, 0)]),
    }
    for line, (words, degree, groups) in named.items():
        (setting,) = settings_of(model("LLaMA 6.7B"), cluster(line), MICRO_BATCHES, [degree])
        theirs = _candidate(setting, groups)
        ours = plan(model("LLaMA 6.7B"), cluster(line), micro_batches=MICRO_BATCHES)
        shown = f"TP {ours.tensor_parallel}: {'; '.join(ours.in_short().groups)}"
        rows.append([line, words, theirs.iteration_s if theirs else None, shown, ours.iteration_s])
    return rows


def _candidate(setting: Setting, groups: Sequence[tuple[int, ...]]) -> Candidate | None:
    from lightning_hetero.parallel.planner.candidates import balanced_candidate

    return balanced_candidate("paper", setting, place(setting, groups), equal=True)


def breakdown() -> list[list[Cell]]:
    """Section V-B: grouping, mapping and balancing in turn, over one pipeline in node order."""
    (setting,) = settings_of(model("GPT-3 6.7B"), cluster("4xh800+4xa100-80"), MICRO_BATCHES, [1])
    mapped = place(setting, [(2, 2), (2, 2)])
    steps = [
        ("one pipeline, equal layers", 1.0, ((0, 0, 0, 0, 1, 1, 1, 1),), False),
        ("+ grouping", 1.11, tuple(tuple(reversed(group)) for group in mapped), False),
        ("+ mapping", 1.16, mapped, False),
        ("+ balancing", 1.79, mapped, True),
    ]
    rows: list[list[Cell]] = []
    baseline = 0.0
    for name, paper, nodes, balances in steps:
        layers = tuple(
            setting.cut(setting.stages(group), MICRO_BATCHES // len(nodes)) if balances else (32 // len(group),) * len(group)
            for group in nodes
        )
        shares = (MICRO_BATCHES // len(nodes),) * len(nodes)
        found = Candidate(name=name, setting=setting, nodes=nodes, layers=layers, micro_batches=shares)  # type: ignore[arg-type]
        baseline = baseline or found.iteration_s
        rows.append([name, paper, baseline / found.iteration_s])
    return rows


def planning_times() -> list[list[Cell]]:
    """Seconds of a processor that planning takes, by devices, the median of three."""
    rows: list[list[Cell]] = []
    for line in SCALES:
        machines, profile = cluster(line), model("GPT-3 6.7B")
        times = []
        for _ in range(3):
            begin = time.process_time()  # one thread computes; others on the machine do not count
            plan(profile, machines, micro_batches=MICRO_BATCHES)
            times.append(time.process_time() - begin)
        kinds = len({n.device for n in machines.nodes})
        rows.append([sum(n.count for n in machines.nodes), kinds, statistics.median(times)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planning-time", action="store_true", help="also measure how long planning takes")
    arguments = parser.parse_args()
    averages, details = claims()
    out: dict[str, Any] = {"benchmark": "papers_autohet", "claims": averages, "clusters": details}
    three = ("over Megatron-like", "over Whale-like", "over balanced")
    table(
        "Speed-ups: the paper's, ours with H800s twice as fast as A100s, ours with H800s at their peak",
        ("model", "clusters", "paper, Megatron", "paper, Whale", *(f"{t}, 2 x" for t in three), *(f"{t}, peak" for t in three)),
        averages,
    )
    table("Each cluster, H800s twice as fast as A100s", ("model", "cluster", *three, "over AutoHet's procedure"), details)
    out["examples"] = examples()
    table("The paper's example plans", ("cluster", "the paper's plan", "step, s", "ours", "step, s"), out["examples"])
    out["breakdown"] = breakdown()
    table("Breakdown, GPT-3 6.7B on 4 A100 + 4 H800", ("", "paper", "ours"), out["breakdown"])
    if arguments.planning_time:
        out["planning_s"] = planning_times()
        table("Planning", ("devices", "kinds", "seconds of a processor"), out["planning_s"])
    print(json.dumps(out))


if __name__ == "__main__":
    main()
