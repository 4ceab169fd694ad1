"""The ProTrain and Deep Optimizer States papers' numbers beside ours: tables of docs/planners.

    python benchmarks/papers_protrain_dos.py

Nothing is trained. Prints the tables and, last, one JSON line with the same figures. The inferred
settings, and reasons for differences, are in docs/planners/protrain.md and
docs/planners/deep_optimizer_states.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import Saved
from lightning_hetero.planners import protrain
from lightning_hetero.planners.deep_optimizer_states import formulas as dos
from lightning_hetero.planners.deep_optimizer_states.search import emit
from lightning_hetero.planners.evaluation import evaluated
from lightning_hetero.planners.protrain.planner import space_of
from lightning_hetero.planners.protrain.search import search
from lightning_hetero.planners.protrain.search_space import Configuration, Space
from lightning_hetero.profiling.presets import gpt, machine, model, paper_machine
from lightning_hetero.units import GIB

# ProTrain, table 1: the largest GPT-2 of 8192 hidden elements that trains, 1e9 parameters.
LARGEST = {
    ("protrain-rtx3090", 1): 34,
    ("protrain-rtx3090", 4): 37,
    ("protrain-a100", 1): 75,
    ("protrain-a100", 4): 87,
}
# ProTrain, table 4: model, batch of all four devices [inferred], machine; recomputed, swapped,
# persistent, all chunks, buffers.
SEARCHED = {
    "A": ("protrain-gpt2-1b", 8, "protrain-rtx3090", (0, 0, 12, 12, 0)),
    "B": ("protrain-gpt2-1b", 64, "protrain-rtx3090", (24, 2, 2, 12, 3)),
    "C": ("protrain-gpt2-1b", 64, "protrain-a100", (0, 0, 12, 12, 0)),
    "D": ("protrain-gpt2-10b", 8, "protrain-rtx3090", (48, 0, 3, 49, 46)),
    "E": ("protrain-gpt2-10b", 8, "protrain-a100", (0, 0, 15, 49, 3)),
}
# ProTrain, figure 3: the models of table 2; figure 4a: 10B GPT-2. Batches of one device.
FIGURE_3 = (
    *("mistral-7b", "gpt2-10b", "opt-13b", "llama-13b", "gpt2-15b"),
    *("gpt2-20b", "gpt2-30b", "opt-30b", "llama-34b", "gpt2-40b"),
)
PROTRAIN_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
# Deep Optimizer States, section 5.4: updates/s on the V100 machine by stride. That of stride 2 is
# the best and not given.
V100_MEASURED = {3: 1.67e9, 4: 1.62e9, 5: 1.28e9}
RANKS = 4
# As the paper puts them into eq. 1: updates and downcasts of the whole machine, copies of one
# device (docs/adr/0007).
V100 = dos.UpdateRates(cpu=2e9, device=35e9, downcast=8.7e9, link=3e9)  # section 5.4
H100 = dos.UpdateRates(cpu=8e9, device=100e9, downcast=62e9 / 4, link=12e9)  # section 1, table 1
SUBGROUP = 10**8
DOS_MODELS = {"7B": 7e9, "8.3B": 8.3e9, "10B": 10e9, "13B": 13e9, "20B": 20e9}
STRIDE = 2  # the paper's, on all machines
CORES_A_RANK = 24  # section 5.1


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints one table in Markdown."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join('-' if cell is None else f'{cell:.3g}' if isinstance(cell, float) else str(cell) for cell in row)} |")


# ------------------------------------------------------------------ ProTrain


def largest_model(hardware: HardwareProfile) -> tuple[float, float]:
    """Parameters of the largest GPT-2 that fits, and host bytes for each parameter."""

    def space(layers: int) -> Space:
        return space_of(gpt(layers, 8192, 64, batch=1, sequence=1024, hardware=hardware), hardware)

    low, high = 0, 512  # `low` layers fit, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if search(space(middle)) is None else (middle, high)
    params = space(low).model.num_params
    return float(params), hardware.host_memory_bytes / params


def protrain_table_1() -> list[dict[str, object]]:
    rows = []
    for (name, count), paper in LARGEST.items():
        hardware = paper_machine(name, count=count)
        params, host_bytes = largest_model(hardware)
        known = {"machine": name, "devices": count, "paper_params": paper * 1e9}
        rows.append({**known, "params": params, "host_bytes_per_param": host_bytes})
    table(
        "ProTrain, table 1: the largest trainable model, 1e9 parameters",
        ("machine", "devices", "paper", "ours", "host bytes a parameter, paper", "ours"),
        [
            (
                r["machine"],
                r["devices"],
                r["paper_params"] / 1e9,
                r["params"] / 1e9,
                r["host_bytes_per_param"] * r["params"] / r["paper_params"],
                r["host_bytes_per_param"],
            )
            for r in rows
        ],
    )
    return rows


def protrain_table_4() -> list[dict[str, object]]:
    names = ("checkpoint", "swap", "persistent", "chunks", "buffers")
    rows = []
    for row, (name, batch, computer, paper) in SEARCHED.items():
        hardware = paper_machine(computer)
        space = space_of(model(name, batch=batch // hardware.world_size, sequence=1024, hardware=hardware), hardware)
        config = search(space)
        ours: Mapping[str, int | None] = dict.fromkeys(names)
        seconds = None
        if config is not None:
            counts = (
                config.checkpoint_blocks,
                config.swap_blocks,
                config.persistent_chunks,
                len(space.chunks),
                config.chunk_buffers,
            )
            ours, seconds = dict(zip(names, counts, strict=True)), space.iteration_s(config)
        chosen, fits = _paper_s(space, paper)
        rows.append(
            {
                "row": row,
                "paper": dict(zip(names, paper, strict=True)),
                "ours": dict(ours),
                "swap_interval": space.swap_interval,
                "objective_s": seconds,
                "objective_of_papers_choice_s": chosen,
                "papers_choice_fits": fits,
            }
        )
    table(
        "ProTrain, table 4: recomputed / swapped blocks, persistent / all chunks, buffers; seconds by eq. 2",
        ("row", "paper", "ours", "ours, s", "the paper's choice by our estimator, s", "and fits"),
        [
            (
                r["row"],
                _counts(r["paper"]),
                _counts(r["ours"]),
                r["objective_s"],
                r["objective_of_papers_choice_s"],
                {True: "yes", False: "no", None: None}[r["papers_choice_fits"]],
            )
            for r in rows
        ],
    )
    return rows


def _counts(c: Mapping[str, object]) -> str:
    return f"{c['checkpoint']} / {c['swap']}, {c['persistent']} / {c['chunks']}, {c['buffers']}"


def _paper_s(space: Space, paper: Sequence[int]) -> tuple[float | None, bool | None]:
    """Eq. 2 at the paper's configuration, and whether it fits by our estimate, if we have it."""
    checkpoint, swap, persistent, chunks, buffers = paper
    config = Configuration(persistent_chunks=persistent, chunk_buffers=buffers, swap_blocks=swap, checkpoint_blocks=checkpoint)
    if len(space.chunks) != chunks or swap > space.most_swaps:
        return None, None
    return space.iteration_s(config), space.fits(config)


def most_tokens_per_s(name: str, hardware: HardwareProfile) -> tuple[float | None, int | None]:
    """The best tokens/s of all devices by eq. 2 over batches, and that batch of one device.

    ``None`` where none fits.
    """
    best: tuple[float | None, int | None] = (None, None)
    for batch in PROTRAIN_BATCHES:
        space = space_of(model(f"protrain-{name}", batch=batch, sequence=1024, hardware=hardware), hardware)
        config = search(space)
        if config is None:
            break
        tokens = hardware.world_size * batch * 1024 / space.iteration_s(config)
        best = max(best, (tokens, batch), key=lambda found: found[0] or 0.0)
    return best


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def protrain_figure_3() -> list[dict[str, Any]]:
    """The most tokens/s by model.

    The paper's text has the average on RTX 3090, not which models are in it.
    """
    rows: list[dict[str, Any]] = []
    for name in FIGURE_3:
        row: dict[str, Any] = {"model": name}
        for computer in ("protrain-rtx3090", "protrain-a100"):
            tokens, batch = most_tokens_per_s(name, paper_machine(computer))
            row |= {f"{computer}_tokens_per_s": tokens, f"{computer}_batch": batch}
        rows.append(row)
    columns = [f"protrain-{device}_{key}" for device in ("rtx3090", "a100") for key in ("tokens_per_s", "batch")]
    mean: dict[str, Any] = {"model": "average"}
    for column in columns[::2]:
        mean[column] = statistics.mean(r[column] for r in rows if r[column] is not None)
    table(
        "ProTrain, figure 3: the most tokens/s of four devices by eq. 2",
        ("model", "4x RTX 3090", "batch of one", "4x A100", "batch of one"),
        [
            (r["model"], *(_whole(r.get(c)) for c in columns))
            for r in [*rows, mean, {"model": "average, paper", columns[0]: 2089.5}]
        ],
    )
    return [*rows, mean]


def protrain_figure_4a() -> list[dict[str, Any]]:
    """The best tokens/s of 10B GPT-2 by devices; the paper has four devices', 3.5 times one's."""
    paper = {1: 2493 / 3.5, 2: None, 4: 2493.0}
    rows: list[dict[str, Any]] = []
    for count, theirs in paper.items():
        tokens, batch = most_tokens_per_s("gpt2-10b", paper_machine("protrain-rtx3090", count=count))
        rows.append({"devices": count, "paper_tokens_per_s": theirs, "tokens_per_s": tokens, "batch": batch})
    one = rows[0]["tokens_per_s"]
    table(
        "ProTrain, figure 4a: the most tokens/s of 10B GPT-2 by number of RTX 3090, by eq. 2",
        ("devices", "paper", "ours", "batch of one", "times one device, ours"),
        [(*map(_whole, r.values()), r["tokens_per_s"] / one) for r in rows],
    )
    return rows


def protrain_agreement() -> dict[str, float]:
    """Eq. 2 at the optimum beside the simulator's iteration, on one device."""
    ratios = []
    for device in ("rtx3090", "rtx4090", "a100-80", "h100"):
        hardware = machine(device=device, host_memory="512GiB")
        for name in ("gpt2-xl", "protrain-gpt2-10b", "llama-13b", "opt-30b"):
            for batch in (1, 4, 16, 64):
                try:
                    plan = protrain.plan(model(name, batch=batch, sequence=1024, hardware=hardware), hardware)
                except PlanError:
                    continue
                assert plan.predicted is not None
                assert plan.objective_s is not None
                ratios.append(plan.predicted.iteration_s / plan.objective_s)
    off = [abs(r - 1) for r in ratios]
    result = {"plans": len(off), "median_difference": statistics.median(off), "worst_difference": max(off)}
    print(
        f"\nProTrain, simulated iteration against eq. 2 on {len(off)} plans: median {result['median_difference']:.1%} apart, "
        f"at most {result['worst_difference']:.1%}"
    )
    return result


# ------------------------------------------------------------------ Deep Optimizer States


def ratios() -> list[dict[str, object]]:
    """Eq. 1 on both machines of the paper, with its figures as printed and for one rank."""
    cases = {}
    for what, rates in (("v100", V100), ("h100", H100)):
        hardware = paper_machine(f"dos-{what}")
        cases[f"4x {what.upper()}, as in the paper"] = rates
        cases[f"one rank, dos-{what}"] = dos.update_rates(model("dos-7b", batch=1, sequence=2048, hardware=hardware), hardware)
    rows = []
    for what, rates in cases.items():
        k, sizes = dos.update_ratio(rates), [SUBGROUP] * 120  # divides by every stride
        best = min((s for s in dos.strides(k) if s), key=lambda s: dos.update_s(rates, sizes, stride=s, static_residents=0))
        rows.append({"machine": what, "k": k, "paper_stride": 2, "strides": dos.strides(k), "best_by_formula": best})
    table(
        "Deep Optimizer States, eq. 1",
        ("machine", "k", "stride, paper", "strides to choose from", "best by eq. 1"),
        [(r["machine"], r["k"], r["paper_stride"], ", ".join(map(str, r["strides"])), r["best_by_formula"]) for r in rows],
    )
    return rows


def one_rank(name: str) -> HardwareProfile:
    """One rank of a machine, with its share of the host."""
    h = paper_machine(name)
    return replace(
        h,
        world_size=1,
        host_memory_bytes=h.host_memory_bytes // RANKS,
        host_dram_bytes_per_s=h.host_dram_bytes_per_s / RANKS,
        cpu_update_params_per_s=h.cpu_update_params_per_s / RANKS,
        cpu_downcast_params_per_s=h.cpu_downcast_params_per_s / RANKS,
    )


def shard(num_params: float, hardware: HardwareProfile, ranks: int = RANKS) -> ModelProfile:
    """One rank's part of a model in the paper's subgroups, with one sequence of 2048 tokens."""
    flop = 2.0 * SUBGROUP * 2048
    seconds = flop / hardware.device_flop_per_s
    blocks = (
        BlockProfile(
            name=f"subgroup.{i}",
            num_params=SUBGROUP,
            num_trainable_params=SUBGROUP,
            forward_s=seconds,
            backward_s=3 * seconds,  # activations are recomputed (5.3)
            forward_flop=flop,
            activation_bytes=0,
            boundary_bytes=0,
            transient_bytes=0,
        )
        for i in range(round(num_params / ranks / SUBGROUP))
    )
    return ModelProfile(
        name="shard", tokens=2048, compute_itemsize=2, constant_device_bytes=GIB, constant_host_bytes=GIB, blocks=tuple(blocks)
    )


def throughput(what: str, num_params: float, hardware: HardwareProfile, measured: Mapping[int, float]) -> list[dict[str, object]]:
    """Updates/s of all ranks in the update phase by stride: by eq. 1's two sides, and simulated."""
    profile = shard(num_params, hardware)
    rates, sizes = dos.update_rates(profile, hardware), [b.num_params for b in profile.blocks]
    compute_s = sum(b.forward_s + b.backward_s for b in profile.blocks)
    rows = []
    for stride in (1, 2, 3, 4, 5, None):
        plan = evaluated(emit(profile, hardware, stride=stride, static_residents=0, saved=Saved.KEEP), profile, hardware)
        assert plan.predicted is not None
        phase_s = dos.update_s(rates, sizes, stride=stride, static_residents=0)
        rows.append(
            {
                "stride": stride,
                "measured_params_per_s": measured.get(stride or 0),
                "formula_params_per_s": RANKS * profile.num_params / phase_s,
                "simulated_params_per_s": RANKS * profile.num_params / (plan.predicted.iteration_s - compute_s),
            }
        )
    columns = [f"{key}_params_per_s" for key in ("measured", "formula", "simulated")]
    table(
        f"Deep Optimizer States, 1e9 updates/s by stride: {what}",
        ("stride", "on the device", "paper, measured", "eq. 1", "simulated"),
        [
            (
                r["stride"] or "none",
                f"{100 / r['stride']:.0f} %" if r["stride"] else "0 %",
                *(r[c] / 1e9 if r[c] is not None else None for c in columns),
            )
            for r in rows
        ],
    )
    return rows


def step(profile: ModelProfile, hardware: HardwareProfile, *, stride: int | None, static_share: float = 0.0) -> tuple[float, float]:
    """Seconds of a rank's simulated step, and of its update phase: the time beyond compute."""
    residents = round(static_share * len(profile.blocks))
    placed = emit(profile, hardware, stride=stride, static_residents=residents, saved=Saved.KEEP)
    plan = evaluated(placed, profile, hardware)
    assert plan.predicted is not None
    return plan.predicted.iteration_s, plan.predicted.iteration_s - sum(b.forward_s + b.backward_s for b in profile.blocks)


def compared(profile: ModelProfile, hardware: HardwareProfile, *, static_share: float = 0.0) -> dict[str, float]:
    """The same rank with the paper's stride, and as ZeRO-3 and TwinFlow do: updates on the CPU."""
    (step_s, update_s), (cpu_step_s, cpu_update_s) = (
        step(profile, hardware, stride=stride, static_share=static_share) for stride in (STRIDE, None)
    )
    seconds = {"step_s": step_s, "update_s": update_s, "cpu_step_s": cpu_step_s, "cpu_update_s": cpu_update_s}
    return {**seconds, "faster": cpu_step_s / step_s, "updates_faster": cpu_update_s / update_s}


def with_batch(profile: ModelProfile, batch: int) -> ModelProfile:
    """The shard with so many sequences in a micro-batch."""
    rows = (
        replace(b, forward_s=batch * b.forward_s, backward_s=batch * b.backward_s, forward_flop=batch * b.forward_flop)
        for b in profile.blocks
    )
    return replace(profile, tokens=batch * profile.tokens, blocks=tuple(rows))


def with_cores(hardware: HardwareProfile, share: float) -> HardwareProfile:
    """The machine with that share of its cores, whose update rate falls with them.

    Its memory stays as it is.
    """
    return replace(
        hardware,
        cpu_update_params_per_s=share * hardware.cpu_update_params_per_s,
        cpu_downcast_params_per_s=share * hardware.cpu_downcast_params_per_s,
    )


def dos_figures() -> dict[str, list[dict[str, Any]]]:
    """Figures 7 to 14 and 17 on one rank of the H100 machine, simulated."""
    hardware = one_rank("dos-h100")
    large = shard(DOS_MODELS["20B"], hardware)
    sizes = [{"model": name, **compared(shard(params, hardware), hardware)} for name, params in DOS_MODELS.items()]
    ratios = [{"static": share, **compared(large, hardware, static_share=share)} for share in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)]
    twin = [{"model": n, **compared(shard(p, hardware), hardware, static_share=0.2)} for n, p in DOS_MODELS.items()]
    batches = [{"batch": batch, **compared(with_batch(large, batch), hardware)} for batch in (1, 2, 4, 8)]
    cores = [{"cores": n, **compared(large, with_cores(hardware, n / CORES_A_RANK))} for n in (4, 8, 12, 16, 20, 24)]
    weak: list[dict[str, Any]] = []
    for name, params in DOS_MODELS.items():
        for ranks in (1, 2, 4):
            memory = replace(hardware, host_memory_bytes=RANKS * hardware.host_memory_bytes // ranks)
            try:
                weak.append({"model": name, "devices": ranks, **compared(shard(params, memory, ranks), memory)})
            except PlanError:  # fewer devices cannot hold it
                weak.append({"model": name, "devices": ranks})
    found = {"7_8_9": sizes, "10_11": ratios, "12": twin, "13": batches, "14": cores, "17": weak}
    print_dos(found)
    return found


def print_dos(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """The sentences of the paper's text on each figure beside ours; its plots have no numbers."""

    def span(figure: str, key: str) -> str:
        values = [row[key] for row in found[figure] if key in row]
        return f"{min(values):.3g} to {max(values):.3g}"

    zero, static = found["7_8_9"], found["10_11"]
    of_rank = {n: max(r["faster"] for r in found["17"] if r["devices"] == n and "faster" in r) for n in (1, 2, 4)}
    twin_flow = statistics.mean(a["cpu_update_s"] / b["cpu_update_s"] for a, b in zip(zero, found["12"], strict=True))
    table(
        "Deep Optimizer States, figures 7 to 14 and 17: stride 2 beside CPU updates alone, H100 machine, simulated",
        ("figure", "what", "paper", "ours"),
        [
            ("7", "steps, times faster than ZeRO-3, 7B to 20B", "2 to 2.5", span("7_8_9", "faster")),
            ("7", "the same, 20B", "2.5", zero[-1]["faster"]),
            ("8", "updates/s over ZeRO-3, mean", "1.7", statistics.mean(r["updates_faster"] for r in zero)),
            ("9", "step of 20B over ZeRO-3's of 7B", "1", zero[-1]["step_s"] / zero[0]["cpu_step_s"]),
            (
                "10",
                "update phase, times faster than TwinFlow, 20B, 0 to 50 % static",
                "at least 1.7",
                span("10_11", "updates_faster"),
            ),
            ("11", "steps, the same", "about 2", span("10_11", "faster")),
            ("11", "step at 0 % static, s", "3", static[0]["step_s"]),
            ("11", "TwinFlow's step at 50 % static, s", "4.3", static[-1]["cpu_step_s"]),
            ("12", "steps, times faster than TwinFlow at 20 % static, 7B to 20B", "1.7 to 2.3", span("12", "faster")),
            ("12", "TwinFlow's update phase there, times faster than ZeRO-3's", "1.2", twin_flow),
            ("13", "steps, times faster than ZeRO-3, 20B, micro-batches 1 to 8", "1.6 to 2.5", span("13", "faster")),
            ("14", "steps, times faster than ZeRO-3, 20B, 4 to 24 cores a device", "up to 3", span("14", "faster")),
            *(
                ("17", f"steps, times faster than ZeRO-3 at best, devices: {n}", {1: "up to 4.4", 4: "up to 2.5"}.get(n), best)
                for n, best in of_rank.items()
            ),
        ],
    )


def main() -> None:
    """Prints all tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    result = {
        "benchmark": "papers_protrain_dos",
        "protrain_table_1": protrain_table_1(),
        "protrain_table_4": protrain_table_4(),
        "protrain_figure_3": protrain_figure_3(),
        "protrain_figure_4a": protrain_figure_4a(),
        "protrain_agreement": protrain_agreement(),
        "dos_ratios": ratios(),
        "dos_v100_7b": throughput("7B on 4x V100", 7e9, one_rank("dos-v100"), V100_MEASURED),
        "dos_h100_20b": throughput("20B on 4x H100", 20e9, one_rank("dos-h100"), {}),
        "dos_figures": dos_figures(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
