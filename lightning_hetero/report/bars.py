"""The bars of a step's picture: which op is where on which lane, in which colour."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from lightning_hetero.ir.schedule import Lane
from lightning_hetero.ir.trace import Span
from lightning_hetero.sim import Simulation

# What ops do, in words, and their colours. Those that meet on one lane are distinct for
# colour-blind readers too.
KINDS: Mapping[str, tuple[str, str]] = {
    "F": ("forward", "#4c9be8"),
    "B": ("backward", "#1b4f91"),
    "wait": ("compute waits", "#d9d9d9"),
    "FETCH": ("fetch weights (disk → host)", "#3aa655"),
    "FETCH state": ("fetch state", "#a3d9a5"),
    "UPLOAD": ("upload (host → device)", "#f2a03d"),
    "GRAD": ("gradients (device → host)", "#d1495b"),
    "UPDATE": ("optimizer update", "#8e5bb5"),
    "STORE": ("store (host → disk)", "#8c6239"),
    "MIRROR": ("mirror (memory → disk)", "#5c4a2f"),
    "SWAP_OUT": ("activations out", "#e8d33f"),
    "SWAP_IN": ("activations in", "#f39ac0"),
    "SWAP_OUT state": ("state out", "#b8a400"),
    "SWAP_IN state": ("state in", "#c2618f"),
    "GATHER": ("gather (all ranks)", "#1f7a8c"),
    "REDUCE": ("reduce", "#35b5b0"),
    "AGREE": ("agree", "#555555"),
    "COMMIT": ("commit", "#222222"),
}
DARK = {"B", "GRAD", "UPDATE", "STORE", "MIRROR", "FETCH", "COMMIT", "SWAP_IN state"}
LANES = {
    Lane.COMPUTE: "compute",
    Lane.H2D: "host → device",
    Lane.D2H: "device → host",
    Lane.CPU: "CPU updates",
    Lane.DISK_READ: "disk read",
    Lane.DISK_WRITE: "disk write",
    Lane.NET: "network",
    Lane.PEER: "between devices",
}
MOST_TRACKS = 6  # rows of one lane; more of its ops at the same time share the last one, without labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One op inside the window.

    Attributes:
        kind: A key of the legend.
        label: What may stand on it: the block's number.
        start_s: Seconds since the step began.
        end_s: The same.
        track: Its row within its lane.
        span: The whole of the op.
    """

    kind: str
    label: str
    start_s: float
    end_s: float
    track: int
    span: Span


def window(simulation: Simulation) -> tuple[float, float]:
    """Begin and end of the last step, on the trace's clock.

    Prediction and memory are of this step.
    """
    return simulation.begin_s, simulation.begin_s + simulation.iterations_s[-1]


def spans(simulation: Simulation) -> list[Span]:
    """The trace's spans, and spans of ops that run beyond the end of the simulation.

    In steady state the last step leaves to the next what the one before has left to it, so their
    ends are known; of a cycle of several steps nearly so.
    """
    found = list(simulation.trace.spans)
    begin_s, end_s = window(simulation)
    last = len(simulation.iterations_s) - 1
    if simulation.steady:
        shift_s = end_s - begin_s
        left = (s for s in found if s.step == last - 1 and s.end_s > begin_s)
        found += [replace(s, step=last, start_s=s.start_s + shift_s, end_s=s.end_s + shift_s) for s in left]
    return found


def bars(found: Iterable[Span], begin_s: float, end_s: float) -> dict[Lane, list[Bar]]:
    """The bars between two moments, by lane; overlapping ops of a lane get tracks of their own."""
    lanes: dict[Lane, list[Bar]] = {}
    free: dict[Lane, list[float]] = {}
    for span in sorted(found, key=lambda s: s.start_s):
        start, end = max(span.start_s, begin_s), min(span.end_s, end_s)
        words = span.name.split(" ")
        kind = next((key for key in (" ".join(words[:2]), words[0]) if key in KINDS), "")
        if end <= start or not kind:  # RELEASE is a moment
            continue
        lane = Lane(span.lane)
        tracks = free.setdefault(lane, [])
        track = next((i for i, free_s in enumerate(tracks) if free_s <= start + 1e-12), len(tracks))
        alone = track < MOST_TRACKS
        if track == len(tracks) and alone:
            tracks.append(end)
        track = min(track, len(tracks) - 1)
        tracks[track] = max(tracks[track], end)
        numbers = re.findall(r"\d+", span.name)
        label = numbers[-1] if numbers and alone and kind != "wait" else ""
        bar = Bar(kind=kind, label=label, start_s=start - begin_s, end_s=end - begin_s, track=track, span=span)
        lanes.setdefault(lane, []).append(bar)
    return lanes
