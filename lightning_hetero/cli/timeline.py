"""A picture of one simulated step: lanes as rows, ops as bars, memory below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hetero.cli.output import percent, seconds
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.report.bars import DARK, KINDS, LANES, Bar, bars, spans, window
from lightning_hetero.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lightning_hetero.sim import Simulation

_TRACK_HEIGHT, _LANE_HEIGHT = 0.34, 0.9  # of one of several tracks, of a lane with one; inches at most


def draw(path: Path, simulation: Simulation, plan: Plan, model_name: str, hardware: HardwareProfile) -> None:
    """Writes the picture; the file's ending chooses the format.

    Raises:
        ConfigError: The format is unknown, the file cannot be written, or matplotlib is not
            installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--timeline needs matplotlib, which cannot be imported: {error}. Run `pip install 'lightning-hetero[plot]'` or "
            f"`pip install matplotlib`; or write --trace FILE, which needs nothing."
        ) from error
    begin, end = window(simulation)
    shown = bars(spans(simulation), begin, end)
    lanes = [lane for lane in Lane if lane in shown]
    unit, scale = ("s", 1.0) if end - begin >= 2 else ("ms", 1e3)
    heights = [max(_LANE_HEIGHT, _TRACK_HEIGHT * (1 + max(bar.track for bar in shown[lane]))) for lane in lanes]
    figure = Figure(figsize=(15, 3.2 + sum(heights)), dpi=110, layout="constrained")
    work, memory = figure.subplots(2, 1, sharex=True, height_ratios=[sum(heights), 1.3])
    _draw_lanes(work, shown, dict(zip(lanes, heights, strict=True)), simulation, scale, (end - begin) * scale)
    _draw_memory(memory, simulation, hardware, scale, (end - begin) * scale)
    memory.set_xlabel(f"time since the step began ({unit})")
    memory.set_xlim(0, (end - begin) * scale)
    prediction = simulation.prediction
    title = (
        f"{plan.name}: {model_name} on {hardware.name}   ·   {seconds(prediction.iteration_s)} a step "
        f"(forward {seconds(prediction.forward_s)}, backward {seconds(prediction.backward_s)})"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    _legend(figure, {bar.kind for row in shown.values() for bar in row})
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--timeline {str(path)!r} cannot be written: {error}. Name a .png, .svg or .pdf file.") from error


def _draw_lanes(
    axes: Axes,
    shown: Mapping[Lane, Sequence[Bar]],
    heights: Mapping[Lane, float],
    simulation: Simulation,
    scale: float,
    width: float,
) -> None:
    """One row per lane, top down, as high as its tracks."""
    middles, top = [], 0.0
    for lane, height in heights.items():
        _draw_lane(axes, shown[lane], top + 0.05 * _LANE_HEIGHT, height - 0.1 * _LANE_HEIGHT, scale, width)
        middles.append(top + height / 2)
        top += height
    names = [f"{LANES[lane]}\n{percent(simulation.busy.get(lane.value, 0.0))} busy" for lane in heights]
    axes.set_yticks(middles, names)
    axes.set_ylim(top + 0.05, -0.4)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    turn = simulation.prediction.forward_s * scale
    axes.axvline(turn, color="#444444", linewidth=1, linestyle="--")
    axes.text(turn / 2, -0.2, "forward", ha="center", va="center", fontsize=9, color="#444444")
    axes.text((turn + width) / 2, -0.2, "backward", ha="center", va="center", fontsize=9, color="#444444")


def _draw_lane(axes: Axes, found: Sequence[Bar], top: float, height: float, scale: float, width: float) -> None:
    track_height = height / (1 + max(bar.track for bar in found))
    narrow = 0.002 * width  # a white edge would hide such a bar; an edge of its own colour keeps it visible
    for kind, (_, colour) in KINDS.items():
        for track, thin in sorted({(bar.track, (bar.end_s - bar.start_s) * scale < narrow) for bar in found if bar.kind == kind}):
            pieces = [
                (bar.start_s * scale, (bar.end_s - bar.start_s) * scale)
                for bar in found
                if (bar.kind, bar.track, (bar.end_s - bar.start_s) * scale < narrow) == (kind, track, thin)
            ]
            style: dict[str, Any] = {"edgecolor": colour if thin else "white", "linewidth": 0.4}
            if kind == "wait":
                style = {"edgecolor": "#a0a0a0", "hatch": "////", "linewidth": 0.0}
            axes.broken_barh(pieces, (top + track * track_height, track_height), facecolor=colour, **style)
    for bar in found:
        if bar.label and (bar.end_s - bar.start_s) * scale > (0.0045 * len(bar.label) + 0.003) * width:
            place = (bar.start_s + bar.end_s) / 2 * scale, top + (bar.track + 0.5) * track_height
            colour = "white" if bar.kind in DARK else "#222222"
            axes.text(*place, bar.label, ha="center", va="center", fontsize=7, color=colour, clip_on=True)


def _draw_memory(axes: Axes, simulation: Simulation, hardware: HardwareProfile, scale: float, width: float) -> None:
    """Memory in use over the step, as a share of the machine's memory."""
    times = [at * scale for at, _, _ in simulation.memory.timeline] + [width]
    tiers = [("host", 2, hardware.host_memory_bytes, simulation.memory.host_peak_bytes, "#12858c", "-")]
    if not hardware.shared_memory:
        tiers.insert(0, ("device", 1, hardware.device_memory_bytes, simulation.memory.device_peak_bytes, "#333333", "--"))
    top = 1.0
    for name, column, capacity, peak, colour, line in tiers:
        values = [row[column] / capacity for row in simulation.memory.timeline]
        label = f"{name}: peak {format_bytes(peak)} of {format_bytes(capacity)}"
        axes.step(times, [*values, values[-1]], where="post", color=colour, linestyle=line, linewidth=1.6, label=label)
        top = max(top, *values)
    axes.axhline(1.0, color="#b00020", linewidth=0.8, linestyle=":")
    axes.set_ylim(0, top * 1.08)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.set_ylabel("memory")
    axes.axvline(simulation.prediction.forward_s * scale, color="#444444", linewidth=1, linestyle="--")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.6)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), fontsize=8, frameon=False, ncols=2)


def _legend(figure: Any, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(
            facecolor=colour,
            edgecolor="#a0a0a0" if kind == "wait" else "none",
            hatch="////" if kind == "wait" else None,
            label=name,
        )
        for kind, (name, colour) in KINDS.items()
        if kind in kinds
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles) if len(handles) <= 6 else (len(handles) + 1) // 2,
        fontsize=9,
        frameon=False,
    )
