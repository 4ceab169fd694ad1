"""The papers' figures on several devices beside ours, from presets: tables of docs/planners.

    python benchmarks/papers_ranks.py

Nothing is trained. Prints the tables and, last, one JSON line with the same figures. Devices hold
the model together: each has a slice, and what belongs to the machine is divided. Reasons for
differences are in the planners' pages.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence

from papers_lohan_autohete import SEQUENCE, Cell, table, zero_infinity

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.planners import autohete, baselines, holistic, lohan
from lightning_hetero.planners.evaluation import evaluated
from lightning_hetero.profiling.presets import model, paper_machine

FIGURE_11 = {("13b", 4): 2.21, ("70b", 4): 1.69}  # LoHan, section V-G: over ZeRO-Infinity, by model and devices
FIGURE_11_BATCHES = {"13b": (8, 16, 32, 64), "70b": (4, 8, 16, 32)}  # of one device
FIGURE_3B = {"over_zero_offload": 2.31, "priority": 1.17}  # AutoHete, section 4.1: means on eight devices
SIZES_3B = ("2b", "4b", "6b", "8b", "10b")

Planner = Callable[[ModelProfile, HardwareProfile], Plan]


def zero_infinity_plan(profile: ModelProfile, hardware: HardwareProfile) -> Plan:
    """ZeRO-Infinity's plan, evaluated."""
    return evaluated(zero_infinity(profile, hardware), profile, hardware)


def tokens_per_s(planner: Planner, profile: ModelProfile, hardware: HardwareProfile) -> float | None:
    """What all devices train in a second; ``None``: no plan fits."""
    try:
        step_s = planner(profile, hardware).require_predicted().iteration_s
    except PlanError:
        return None
    return hardware.world_size * profile.tokens / step_s


def best(planner: Planner, name: str, batches: Sequence[int], hardware: HardwareProfile) -> tuple[float | None, int | None]:
    """The highest throughput, and the batch of one device that has it."""
    found = []
    for batch in batches:
        reached = tokens_per_s(planner, model(name, batch=batch, sequence=SEQUENCE, hardware=hardware), hardware)
        found += [(reached, batch)] if reached is not None else []
    return max(found, default=(None, None))


def figure_11() -> list[list[Cell]]:
    """LoHan and ZeRO-Infinity on 1, 2 and 4 RTX 4090 with 12 SSDs, each at its best batch."""
    rows: list[list[Cell]] = []
    for size, batches in FIGURE_11_BATCHES.items():
        one: float | None = None
        for devices in (1, 2, 4):
            hardware = paper_machine("lohan-rtx4090", count=devices)
            ours, batch = best(lohan.plan, f"lohan-{size}", batches, hardware)
            theirs, other = best(zero_infinity_plan, f"lohan-{size}", batches, hardware)
            one = one or ours
            ratio = ours / theirs if ours and theirs else None
            over_one = ours / one if ours and one else None
            rows.append([size.upper(), devices, FIGURE_11.get((size, devices)), ratio, ours, batch, theirs, other, over_one])
    return rows


def figure_3b() -> tuple[list[list[Cell]], dict[str, float]]:
    """AutoHete, ZeRO-Offload and holistic on eight A100, at batch 4 of one device."""
    hardware = paper_machine("autohete-a100", count=8)
    rows: list[list[Cell]] = []
    gains: dict[str, list[float]] = {"over_zero_offload": [], "priority": []}
    for size in SIZES_3B:
        profile = model(f"autohete-{size}", batch=4, sequence=SEQUENCE, hardware=hardware)
        reached = [
            tokens_per_s(planner, profile, hardware)
            for planner in (
                autohete.plan,
                lambda m, h: autohete.plan(m, h, priority=False),
                lambda m, h: baselines.plan(m, h, baseline="zero_offload"),
                holistic.plan,
            )
        ]
        ours, plain, zero, joint = reached
        for key, other in (("over_zero_offload", zero), ("priority", plain)):
            if ours and other:
                gains[key].append(ours / other)
        rows.append([size.upper(), ours, ours / zero if ours and zero else None, ours / plain if ours and plain else None, joint])
    return rows, {key: statistics.mean(values) for key, values in gains.items() if values}


def main() -> None:
    by_devices = figure_11()
    eight, means = figure_3b()
    head = ("model", "devices", "paper, over ZeRO-Infinity", "ours", "tokens/s", "batch", "ZeRO-Infinity's", "batch", "over one")
    table("LoHan, figure 11: global throughput on RTX 4090", head, by_devices)
    head = ("model", "AutoHete, tokens/s", "over ZeRO-Offload", "priority over none", "holistic, tokens/s")
    table("AutoHete, figure 3b: eight A100", head, eight)
    print(f"\nmeans: {', '.join(f'{key} {value:.2f}, paper {FIGURE_3B[key]}' for key, value in means.items())}")
    print(json.dumps({"lohan_figure_11": by_devices, "autohete_figure_3b": eight, "autohete_means": means}))


if __name__ == "__main__":
    main()
