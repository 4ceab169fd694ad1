"""The LoHan and AutoHete papers' numbers beside ours, from presets: tables of docs/planners.

    python benchmarks/papers_lohan_autohete.py

Nothing is trained. Prints the tables and, last, one JSON line with the same figures. The inferred
settings, and reasons for differences, are in docs/planners/lohan.md and docs/planners/autohete.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.activations import recomputed_share
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.planners import autohete, baselines, lohan
from lightning_hetero.planners.evaluation import evaluated
from lightning_hetero.planners.lohan import formulas as lohan_formulas
from lightning_hetero.planners.lohan.search import walk
from lightning_hetero.profiling.presets import machine, model, paper_machine
from lightning_hetero.units import GIB

SEQUENCE = 1024  # both papers
# The authors' figures behind the plots of LoHan, TFLOP/s: evaluation_data.md of
# github.com/RC4ML/LoHan, which the paper links.
FIGURE_5A = {8: 42.8, 16: 84.3, 32: 143.1, 64: 155.8, 128: 153.8}  # 13B on an RTX 4090, by batch
FIGURE_7B = {8: 52.6, 16: 86.9}  # 175B, by batch; 32 does not fit
FIGURE_10B = {  # 13B, by batch and number of SSDs
    32: {1: 37.5, 2: 64.3, 3: 81.1, 6: 121.7, 12: 142.0},
    48: {1: 53.1, 2: 89.7, 3: 121.7, 6: 146.3, 12: 153.9},
    64: {1: 70.3, 2: 111.7, 3: 136.3, 6: 151.5, 12: 148.2},
}
FIGURE_9B = {24: 1, 36: 3, 48: 3, 60: 3}  # section V-E: the case by batch
LOHAN_SIZES = ("6b", "13b", "30b", "70b", "135b", "175b", "276b", "412b")  # table IV
# What the text says of figures 2a and 6: the largest model at batch 1, by system, device and GiB of
# host memory.
LARGEST = {
    ("LoHan", "rtx4090", 768): "276B",
    ("LoHan", "rtx4080", 256): "at least 175B",
    ("ZeRO-Infinity", "rtx4090", 768): "135B",
    ("FlashNeuron", "rtx4090", 768): "less than 6B",
}
FIGURE_8_BATCHES = (12, 24, 36, 48, 60)  # 60 is the paper's; the others are those of figure 9b, and half of the least
SERVER_PRICE, GPU_PRICE, SSD_PRICE = 14_098, 1_600, 308  # table VII, US$
BATCHES = (8, 16, 32, 64)
AUTOHETE_ONE_GPU = ("2b", "4b", "6b", "8b", "10b", "12b", "14b", "16b", "24b", "32b", "40b")

Cell = str | int | float | None


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Prints one table in Markdown."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join('-' if cell is None else f'{cell:.3g}' if isinstance(cell, float) else str(cell) for cell in row)} |")


# ------------------------------------------------------------------ LoHan


def flop_per_s(plan: Plan, profile: ModelProfile, seconds: float | None) -> float | None:
    """TFLOP/s as the authors count them: forward, backward and what is recomputed."""
    if seconds is None:
        return None
    again = sum(recomputed_share(b, p) * b.forward_flop for b, p in zip(profile.blocks, plan.blocks, strict=True))
    return (3 * sum(b.forward_flop for b in profile.blocks) + again) / seconds / 1e12


def lohan_plan(name: str, batch: int, hardware: HardwareProfile, **options: Any) -> tuple[Plan | None, ModelProfile]:
    """LoHan's plan, or ``None`` where it does not fit; and the model."""
    profile = model(name, batch=batch, sequence=SEQUENCE, hardware=hardware)
    try:
        return lohan.plan(profile, hardware, **options), profile
    except PlanError:
        return None, profile


def throughputs(name: str, batch: int, hardware: HardwareProfile, **options: Any) -> tuple[float | None, float | None, int | None]:
    """TFLOP/s by the paper's formula and by simulation, and the case."""
    plan, profile = lohan_plan(name, batch, hardware, **options)
    if plan is None or plan.predicted is None:
        return None, None, None
    return (
        flop_per_s(plan, profile, plan.objective_s),
        flop_per_s(plan, profile, plan.predicted.iteration_s),
        plan.decisions["case"],
    )


def swap_of_13b() -> list[list[Cell]]:
    """Figure 1c: 13B at batch 32 swaps 34 GB; recomputation is 32 % of backward's other work."""
    sheet = machine(device="rtx4090", host_memory=768 * GIB, disk="p5510x12", host="xeon-5320x2")
    measured = paper_machine("lohan-rtx4090")
    profile = model("lohan-13b", batch=32, sequence=SEQUENCE, hardware=measured)
    rows: list[list[Cell]] = [["paper", "", 34.0, 32.0, None, None]]
    for reading in ("first", "amount"):
        q = lohan_formulas.quantities(profile, measured, host_bytes=600 * GIB, inter_block=reading)  # type: ignore[arg-type]
        share = 50 * lohan_formulas.recomputed_flop(q, lohan_formulas.swap_order(profile), 34e9) / q.forward_flop
        rows.append([f"ours, 34 GB given, {reading}", "", 34.0, share, None, None])
        for title, hardware in (("12 x datasheet", sheet), ("the paper's 13 s for 2 x 182 GB", measured)):
            q = lohan_formulas.quantities(profile, hardware, host_bytes=600 * GIB, inter_block=reading)  # type: ignore[arg-type]
            swap = walk(q, lohan_formulas.swap_order(profile))
            again = lohan_formulas.recomputed_flop(q, swap.layers, swap.swapped_bytes)
            rows.append(
                [
                    f"ours, {title}, {reading}",
                    q.disk_s(q.read_bytes, q.written_bytes),
                    swap.swapped_bytes / 1e9,
                    50 * again / q.forward_flop,
                    swap.iteration_s,
                    swap.case,
                ]
            )
        # The disk time at which the walk would end at 34 GB: what backward then computes.
        floor = (2 * q.forward_flop + lohan_formulas.recomputed_flop(q, lohan_formulas.swap_order(profile), 34e9)) / q.flop_per_s
        slower = replace(measured, disk_read_bytes_per_s=(q.read_bytes + q.written_bytes) / floor)
        slower = replace(slower, disk_write_bytes_per_s=slower.disk_read_bytes_per_s)
        q = lohan_formulas.quantities(profile, slower, host_bytes=600 * GIB, inter_block=reading)  # type: ignore[arg-type]
        swap = walk(q, lohan_formulas.swap_order(profile))
        again = lohan_formulas.recomputed_flop(q, swap.layers, swap.swapped_bytes)
        rows.append(
            [
                f"ours, disks at which 34 GB are best, {reading}",
                floor,
                swap.swapped_bytes / 1e9,
                50 * again / q.forward_flop,
                swap.iteration_s,
                swap.case,
            ]
        )
    return rows


def figure_5() -> tuple[list[list[Cell]], list[list[Cell]]]:
    """Throughput by batch, and by model at the largest batch that fits."""
    hardware = paper_machine("lohan-rtx4090")
    batches: list[list[Cell]] = []
    for batch, theirs in FIGURE_5A.items():
        formula, simulated, case = throughputs("lohan-13b", batch, hardware)
        batches.append(["13B", batch, theirs, formula, simulated, case])
    for batch, theirs in FIGURE_7B.items():
        formula, simulated, case = throughputs("lohan-175b", batch, hardware)
        batches.append(["175B", batch, theirs, formula, simulated, case])
    models: list[list[Cell]] = []
    for size in ("6b", "13b", "30b", "70b", "135b", "175b", "276b", "412b"):
        best = max(
            (
                (simulated, batch)
                for batch in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
                if (simulated := throughputs(f"lohan-{size}", batch, hardware)[1])
            ),
            default=(None, None),
        )
        models.append([size.upper(), best[1], best[0], 100 * best[0] / (hardware.device_flop_per_s / 1e12) if best[0] else None])
    return batches, models


def against_baselines() -> list[list[Cell]]:
    """Figures 5a and 5b: LoHan over the baselines, 13B.

    What the paper runs as ZeRO-Offload keeps all states in host memory.
    """
    rows: list[list[Cell]] = []
    systems = {"ZeRO-Offload": Tier.HOST, "ZeRO-Infinity": Tier.DISK}
    for device, theirs in (("rtx4090", (2.32, 3.46)), ("rtx3090", (1.57, 2.48))):
        hardware = paper_machine(f"lohan-{device}")
        for (system, tier), ratio in zip(systems.items(), theirs, strict=True):
            gains: list[Cell] = []
            for batch in BATCHES:
                plan, profile = lohan_plan("lohan-13b", batch, hardware)
                try:
                    other = evaluated(baselines.zero_infinity(profile.shape(), tier), profile, hardware).predicted
                except PlanError:
                    other = None
                gains.append(other.iteration_s / plan.predicted.iteration_s if plan and plan.predicted and other else None)
            rows.append([device, system, ratio, *gains])
    return rows


def figure_7() -> list[list[Cell]]:
    """Active gradient offloading, 13B at batch 64: optimized over the others."""
    hardware = paper_machine("lohan-rtx4090")
    seconds = {}
    for order in UpdateOrder:
        plan, _ = lohan_plan("lohan-13b", 64, hardware, update_order=order)
        assert plan is not None
        assert plan.predicted is not None
        seconds[order] = plan.predicted.iteration_s
    best = seconds[UpdateOrder.OVERLAPPED]
    theirs = {UpdateOrder.NAIVE: 1.22, UpdateOrder.AFTER_BACKWARD: 1.33}
    return [[order.value, ratio, seconds[order] / best] for order, ratio in theirs.items()]


def figure_9() -> tuple[list[list[Cell]], list[list[Cell]]]:
    """Section V-E: 70B by host memory; 13B's case by batch."""
    memories: list[list[Cell]] = []
    for gib in (128, 256, 512):
        formula, simulated, case = throughputs("lohan-70b", 32, paper_machine("lohan-rtx4090", host_memory=gib * GIB))
        memories.append([gib, formula, simulated, case])
    hardware = paper_machine("lohan-rtx4090")
    cases: list[list[Cell]] = []
    for batch, theirs in FIGURE_9B.items():
        profile = model("lohan-13b", batch=batch, sequence=SEQUENCE, hardware=hardware)
        row: list[Cell] = [batch, theirs]
        for reading in ("first", "amount"):
            q = lohan_formulas.quantities(profile, hardware, host_bytes=600 * GIB, inter_block=reading)  # type: ignore[arg-type]
            swap = walk(q, lohan_formulas.swap_order(profile))
            row += [swap.case, swap.swapped_bytes / 1e9]
        cases.append(row)
    return memories, cases


def figure_10() -> tuple[list[list[Cell]], list[list[Cell]]]:
    """Throughput by the number of SSDs: 135B relative to one, 13B in TFLOP/s."""
    large: list[list[Cell]] = []
    one: float | None = None
    for count in (1, 2, 3, 6, 12):
        hardware = paper_machine("lohan-rtx4090", disk=f"p5510x{count}")
        reached = [throughputs("lohan-135b", batch, hardware)[1] for batch in (8, 16, 24, 32)]
        best = max((r for r in reached if r), default=None)
        one = one or best
        large.append([count, best, best / one if best and one else None])
    rows: list[list[Cell]] = []
    for batch, figures in FIGURE_10B.items():
        for count, theirs in figures.items():
            formula, simulated, case = throughputs("lohan-13b", batch, paper_machine("lohan-rtx4090", disk=f"p5510x{count}"))
            rows.append([batch, count, theirs, formula, simulated, case])
    return large, rows


def readings() -> list[list[Cell]]:
    """Errors of figures 5a, 7b, 10b by the reading of inter-block activations (docs/adr/0012)."""
    points = [("lohan-13b", batch, 12, theirs) for batch, theirs in FIGURE_5A.items()]
    points += [("lohan-175b", batch, 12, theirs) for batch, theirs in FIGURE_7B.items()]
    points += [("lohan-13b", batch, disks, theirs) for batch, row in FIGURE_10B.items() for disks, theirs in row.items()]
    rows: list[list[Cell]] = []
    for reading in ("first", "amount"):
        off: list[tuple[float, float]] = []
        for name, batch, disks, theirs in points:
            hardware = paper_machine("lohan-rtx4090", disk=f"p5510x{disks}")
            formula, simulated, _ = throughputs(name, batch, hardware, inter_block=reading)
            if formula and simulated:
                off.append((abs(formula / theirs - 1), abs(simulated / theirs - 1)))
        rows.append([reading, len(off), *(100 * statistics.median(errors) for errors in zip(*off, strict=True))])
    return rows


def largest(hardware: HardwareProfile, batch: int, make: Callable[[ModelProfile, HardwareProfile], Plan]) -> str | None:
    """The largest model of table IV with a plan that fits, or ``None``."""
    for size in reversed(LOHAN_SIZES):
        profile = model(f"lohan-{size}", batch=batch, sequence=SEQUENCE, hardware=hardware)
        try:
            evaluated(make(profile, hardware), profile, hardware)
        except PlanError:
            continue
        return size.upper()
    return None


def zero_infinity(profile: ModelProfile, _: HardwareProfile) -> Plan:
    """Weights and state on disk, blocks' inputs in host memory."""
    return baselines.zero_infinity(profile.shape(), Tier.DISK)


def in_host_memory(profile: ModelProfile, _: HardwareProfile) -> Plan:
    """LoHan+CpuAct with least memory: only blocks' inputs on the host, one block fetched ahead."""
    placed = baselines.disk(profile.shape())
    rows = (replace(b, saved=Saved.RECOMPUTE, boundary=Saved.SWAP_HOST) for b in placed.blocks)
    return replace(placed, blocks=tuple(rows), prefetch_depth=1)


def flash_neuron(profile: ModelProfile, _: HardwareProfile) -> Plan:
    """Model states on the device, all activations to the disk."""
    placed = baselines.resident(profile.shape())
    return replace(
        placed, blocks=tuple(replace(b, saved=Saved.SWAP_DISK, boundary=Saved.SWAP_DISK) for b in placed.blocks), name="flashneuron"
    )


def figures_2a_and_6() -> list[list[Cell]]:
    """The largest model that trains at batch 1, by system, device and host memory."""
    systems = {"LoHan": lohan.plan, "ZeRO-Infinity": zero_infinity, "FlashNeuron": flash_neuron}
    rows: list[list[Cell]] = []
    for system, make in systems.items():
        for device in ("rtx4090", "rtx4080"):
            for gib in (128, 256, 512, 768) if system != "FlashNeuron" else (768,):
                hardware = paper_machine(f"lohan-{device}", host_memory=gib * GIB)
                rows.append([system, device, gib, LARGEST.get((system, device, gib)), largest(hardware, 1, make) or "none"])
    return rows


def figure_8() -> list[list[Cell]]:
    """The largest model by batch and host memory, with and without activations on the disk."""
    rows: list[list[Cell]] = []
    for gib in (128, 256):
        for batch in FIGURE_8_BATCHES:
            hardware = paper_machine("lohan-rtx4090", host_memory=gib * GIB)
            rows.append([gib, batch, largest(hardware, batch, lohan.plan), largest(hardware, batch, in_host_memory)])
    return rows


def figure_13() -> list[list[Cell]]:
    """30B: TFLOP/s for the server's price by SSDs, one device."""
    rows: list[list[Cell]] = []
    for count in (1, 2, 3, 6, 12):
        hardware = paper_machine("lohan-rtx4090", disk=f"p5510x{count}")
        reached = [throughputs("lohan-30b", batch, hardware)[1] for batch in (8, 16, 24, 32, 48)]
        best = max(r for r in reached if r)
        price = SERVER_PRICE + GPU_PRICE + count * SSD_PRICE
        rows.append([count, best, price, 1000 * best / price])
    return rows


# ------------------------------------------------------------------ AutoHete


def transformer_blocks_on_cpu(plan: Plan) -> int:
    """The transformer blocks that the CPU updates; like the paper, without embedding and head."""
    return sum(row.update is UpdateLane.CPU for row in plan.blocks if row.name.startswith("layers."))


def four_billion() -> list[list[Cell]]:
    """Section 4.2: the 4B model offloads the optimizer of the last 13 of 21 blocks.

    The batch is not given.
    """
    hardware = paper_machine("autohete-a100")
    rows: list[list[Cell]] = [["paper", None, None, 13, None]]
    for batch in (1, 2, 4, 6, 8, 12, 16):
        plan = autohete.plan(model("autohete-4b", batch=batch, sequence=SEQUENCE, hardware=hardware), hardware)
        k = plan.decisions
        rows.append([batch, k["checkpoint"], k["offload_params"], transformer_blocks_on_cpu(plan), plan.objective_s])
    return rows


def figure_3(batch: int) -> tuple[list[list[Cell]], dict[str, float]]:
    """Throughput on one GPU by model: over ZeRO-Offload, and the gain of priority scheduling."""
    hardware = paper_machine("autohete-a100")
    rows: list[list[Cell]] = []
    gains: dict[str, list[float]] = {"over_zero_offload": [], "priority": []}
    for size in AUTOHETE_ONE_GPU:
        profile = model(f"autohete-{size}", batch=batch, sequence=SEQUENCE, hardware=hardware)
        plan = autohete.plan(profile, hardware)
        plain = autohete.plan(profile, hardware, priority=False).predicted
        assert plan.predicted is not None
        assert plain is not None
        seconds = plan.predicted.iteration_s
        gains["priority"].append(plain.iteration_s / seconds)
        try:
            zero = baselines.plan(profile, hardware, baseline="zero_offload").predicted
        except PlanError:
            zero = None
        if zero:
            gains["over_zero_offload"].append(zero.iteration_s / seconds)
        flop = 3 * sum(b.forward_flop for b in profile.blocks)
        rows.append(
            [
                *(size.upper(), counts(plan), plan.objective_s, seconds, flop / seconds / 1e12),
                *(plain.iteration_s / seconds, zero.iteration_s / seconds if zero else None),
            ]
        )
    summary = {f"{name}_mean": statistics.mean(values) for name, values in gains.items()}
    return rows, summary | {f"{name}_max": max(values) for name, values in gains.items()}


def figure_4() -> list[list[Cell]]:
    """Throughput of 6B and 10B on one GPU by batch."""
    hardware = paper_machine("autohete-a100")
    rows: list[list[Cell]] = []
    for size in ("6b", "10b"):
        for batch in (1, 2, 4, 8, 16, 32):
            profile = model(f"autohete-{size}", batch=batch, sequence=SEQUENCE, hardware=hardware)
            plan = autohete.plan(profile, hardware)
            assert plan.predicted is not None
            seconds = plan.predicted.iteration_s
            flop = 3 * sum(b.forward_flop for b in profile.blocks)
            rows.append([size.upper(), batch, counts(plan), plan.objective_s, seconds, flop / seconds / 1e12])
    return rows


def counts(plan: Plan) -> str:
    """c, p and o of all blocks."""
    k = plan.decisions
    return f"{k['checkpoint']}, {k['offload_params']}, {k['offload_optimizer']} of {len(plan.blocks)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="AutoHete's batch in figure 3, which the paper does not give")
    options = parser.parse_args()
    by_batch, by_model = figure_5()
    by_memory, by_case = figure_9()
    by_disks, by_disks_13b = figure_10()
    by_size, summary = figure_3(options.batch)
    tables: dict[str, tuple[str, Sequence[str], list[list[Cell]]]] = {
        "lohan_34_gb": (
            "LoHan, 13B at batch 32: activations swapped, and recomputation in % of backward's other FLOP",
            ("", "backward's disk time, s", "swapped, GB", "recomputed, %", "T_iter, s", "case"),
            swap_of_13b(),
        ),
        "lohan_2a_6": (
            "LoHan, figures 2a and 6: the largest model at batch 1, of those of table IV",
            ("system", "device", "GiB of host memory", "paper", "ours"),
            figures_2a_and_6(),
        ),
        "lohan_5": (
            "LoHan, figures 5a and 7b: TFLOP/s by batch, recomputed FLOP counted",
            ("model", "batch", "paper", "ours, formula", "ours, simulated", "case"),
            by_batch,
        ),
        "lohan_5c": (
            "LoHan, figure 5c: the best batch by model, simulated",
            ("model", "batch", "TFLOP/s", "% of the device's peak on blocks"),
            by_model,
        ),
        "lohan_5_baselines": (
            "LoHan, figures 5a and 5b: times faster than the baselines, 13B, simulated",
            ("device", "baseline", "paper, at best", *(f"batch {batch}" for batch in BATCHES)),
            against_baselines(),
        ),
        "lohan_7": (
            "LoHan, figure 7a: overlapped updates, 13B at batch 64",
            ("instead of", "paper, times faster", "ours"),
            figure_7(),
        ),
        "lohan_8": (
            "LoHan, figure 8: the largest model on an RTX 4090, of those of table IV",
            ("GiB of host memory", "batch", "activations to host memory and disk", "to host memory alone"),
            figure_8(),
        ),
        "lohan_9a": (
            "LoHan, figure 9a: 70B at batch 32, TFLOP/s by host memory",
            ("GiB", "ours, formula", "ours, simulated", "case"),
            by_memory,
        ),
        "lohan_9b": (
            "LoHan, figure 9b: the case by batch, 13B",
            ("batch", "paper", "ours, first", "GB", "ours, amount", "GB"),
            by_case,
        ),
        "lohan_10a": ("LoHan, figure 10a: 135B by SSDs, simulated", ("SSDs", "TFLOP/s", "times one SSD"), by_disks),
        "lohan_10b": (
            "LoHan, figure 10b: 13B, TFLOP/s by batch and SSDs",
            ("batch", "SSDs", "paper", "ours, formula", "ours, simulated", "case"),
            by_disks_13b,
        ),
        "lohan_13": (
            "LoHan, figure 13: 30B on one RTX 4090, TFLOP/s and the server's price by SSDs, simulated",
            ("SSDs", "TFLOP/s", "US$", "TFLOP/s for 1000 US$"),
            figure_13(),
        ),
        "lohan_readings": (
            "LoHan, figures 5a, 7b and 10b: median difference from the paper by reading",
            ("inter-block activations", "points", "formula, %", "simulated, %"),
            readings(),
        ),
        "autohete_4b": (
            "AutoHete, 4B on an A100 of 40 GB: blocks by batch",
            ("batch", "checkpointed", "weights offloaded", "transformer blocks on the CPU, of 21", "T_iter, s"),
            four_billion(),
        ),
        "autohete_3": (
            f"AutoHete, figure 3a: one A100, batch {options.batch}",
            ("model", "c, p, o", "eq. 6, s", "simulated, s", "TFLOP/s", "with priority over without", "over ZeRO-Offload"),
            by_size,
        ),
        "autohete_4": (
            "AutoHete, figure 4: one A100, by batch",
            ("model", "batch", "c, p, o", "eq. 6, s", "simulated, s", "TFLOP/s"),
            figure_4(),
        ),
    }
    for title, head, rows in tables.values():
        table(title, head, rows)
    print()
    print(json.dumps({name: rows for name, (_, _, rows) in tables.items()} | {"autohete_summary": summary}))


if __name__ == "__main__":
    main()
