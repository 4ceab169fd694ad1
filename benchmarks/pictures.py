"""Draws the pictures of the pages about concepts, as SVG that follows light and dark.

    # writes them into docs/images
    python benchmarks/pictures.py

The step is one that the simulator has played through; the other pictures show no figures.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.evaluation import simulation
from lightning_hetero.profiling import presets

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 560  # small, so that a phone shows letters that can be read
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f } .small { font-size: 11px } .strong { font-weight: 600 }
.muted { fill: #57606a } .card { fill: #ffffff } .box { fill: #f3f4f6; stroke: #8c959f } .line { stroke: #57606a; fill: none }
.a { fill: #9fc5f8 } .b { fill: #b9a7e8 } .c { fill: #f6b26b } .d { fill: #93c47d } .e { fill: #e6a0a0 } .f { fill: #d0d7de }
.on { fill: #1b1f24 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .muted { fill: #9da7b3 } .card { fill: #1e2129 } .box { fill: #2a2f3a; stroke: #6e7681 }
  .line { stroke: #9da7b3 } .f { fill: #a5b0bd } .on { fill: #1b1f24 }
}
"""


class Picture:
    """Shapes and texts on a card."""

    def __init__(self, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">',
            '<path d="M0 0 L8 4 L0 8" class="line"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" rx="8" class="card"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box", radius: int = 4) -> None:
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" class="{kind}"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self._parts.append(f'<path d="M{x:.1f} {y:.1f} L{to_x:.1f} {to_y:.1f}" class="line" marker-end="url(#tip)"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, dashes: str = "") -> None:
        self._parts.append(f'<path d="M{x:.1f} {y:.1f} L{to_x:.1f} {to_y:.1f}" class="line" stroke-dasharray="{dashes}"/>')

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def tiers() -> str:
    """What lives in each tier, and the ops that move it."""
    picture = Picture(314, "Three tiers and what moves between them")
    rows = [
        ("device", "the GPU's memory, or the CPU's own", ["weights in use", "activations", "gradients"]),
        ("host", "the machine's memory", ["weights, next", "gradients", "optimizer state"]),
        ("disk", "an SSD", ["all other weights", "optimizer state", "kept steps"]),
    ]
    for index, (name, what, lives) in enumerate(rows):
        y = 14 + 108 * index
        picture.box(12, y, WIDTH - 24, 66)
        picture.text(24, y + 20, name, "strong")
        picture.text(24 + 9 * len(name), y + 20, what, "small muted")
        for place, kind in enumerate(
            ("a", "c" if index == 0 else "e" if index == 1 else "d", "e" if index == 0 else "d" if index == 1 else "f")
        ):
            picture.box(24 + 174 * place, y + 30, 164, 26, kind)
            picture.text(24 + 174 * place + 82, y + 47, lives[place], "small on", "middle")
    for x, top, down, name in (
        (70, 80, False, "UPLOAD"),
        (210, 80, True, "GRAD"),
        (370, 80, True, "SWAP_OUT"),
        (478, 80, False, "SWAP_IN"),
    ):
        picture.arrow(*((x, top, x, top + 42) if down else (x, top + 42, x, top)))
        picture.text(x + 8, top + 26, name, "small")
    for x, top, down, name in ((70, 188, False, "FETCH"), (210, 188, True, "STORE"), (370, 188, True, "COMMIT")):
        picture.arrow(*((x, top, x, top + 42) if down else (x, top + 42, x, top)))
        picture.text(x + 8, top + 26, name, "small")
    picture.text(WIDTH - 24, 142, "UPDATE: native threads", "small muted", "end")
    return picture.svg()


LANES = {
    "compute": ("compute", "a"), "h2d": ("to the device", "b"), "d2h": ("to the host", "e"), "cpu": ("CPU updates", "d"),
    "disk_read": ("disk reads", "c"), "disk_write": ("disk writes", "f"),
}  # fmt: skip


def step() -> str:
    """One step of the plan `disk`, as the simulator plays it."""
    machine = presets.machine(device="rtx4090", host_memory="6GiB", disk="p5510x4")
    model = presets.model("gpt:layers=5,hidden=2048,heads=16,vocabulary=2048", batch=72, sequence=1024, hardware=machine)
    spans = simulation(PLANNERS["disk"](model, machine), model, machine, keep_trace=True).trace.spans
    end_s = max(s.end_s for s in spans if s.step == 0)  # the next forward has begun by then
    shown = [s for s in spans if s.start_s < end_s and not s.name.startswith("wait") and s.lane in LANES]
    begin_s = min(s.start_s for s in shown)
    scale = (WIDTH - 120) / (end_s - begin_s)
    row = 38
    picture = Picture(60 + row * len(LANES), "One step of the plan disk, simulated: lanes as rows, ops as bars")
    for index, (lane, (name, kind)) in enumerate(LANES.items()):
        y = 16 + row * index
        picture.text(100, y + 17, name, "small", "end")
        picture.line(108, y + 32, WIDTH - 8, y + 32, "1 4")
        for span in (s for s in shown if s.lane == lane):
            x, width = 108 + (span.start_s - begin_s) * scale, (min(span.end_s, end_s) - span.start_s) * scale
            if width < 1:
                continue
            picture.box(x, y, width - 0.5, 26, kind, 2)
            op, _, block = span.name.rpartition(" ")
            label = f"{op}{block.removeprefix('layers.')}" if lane == "compute" else block.removeprefix("layers.")
            if width > 6.5 * len(label):
                picture.text(x + width / 2, y + 17, label, "small on", "middle")
    y = 16 + row * len(LANES)
    update_s = min(s.start_s for s in shown if s.lane == "cpu" and s.end_s - s.start_s > 1 / scale)
    x = 108 + (update_s - begin_s) * scale
    picture.line(x, 10, x, y, "4 3")
    picture.text(x, y + 14, "the first update begins while backward computes", "small muted", "middle")
    picture.arrow(108, y + 26, WIDTH - 8, y + 26)
    picture.text(WIDTH - 12, y + 40, "time", "small muted", "end")
    return picture.svg()


def batches() -> str:
    """From the first batch to a plan."""
    picture = Picture(150, "The first batches are measured, then a plan is made")
    names = ["1", "2", "3", "4", "plan", "5", "6", "7", "…"]
    kinds = ["c", "b", "b", "b", "d", "a", "a", "a", "f"]
    wide = (WIDTH - 24) / len(names)
    for index, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        picture.box(12 + wide * index, 20, wide - 5, 40, kind)
        picture.text(12 + wide * index + (wide - 5) / 2, 45, name, "on strong", "middle")
    notes = [
        (0, 1, "operators", "are recorded"),
        (1, 3, "blocks are timed;", "the median counts"),
        (4, 1, "search, then", "weights move"),
        (5, 4, "each step is compared", "with its prediction"),
    ]
    for first, count, *lines in notes:
        middle = 12 + wide * (first + count / 2) - 3
        picture.line(12 + wide * first, 70, 12 + wide * (first + count) - 5, 70)
        for index, line in enumerate(lines):
            picture.text(middle, 88 + 15 * index, line, "small", "middle")
    picture.text(12, 136, "All of them train: measuring changes no bit of the result.", "small muted")
    return picture.svg()


def slots() -> str:
    """Two files of a block, and the record that names one of them."""
    picture = Picture(236, "An update writes the slot that the last record does not name")
    columns = ["step 7 is kept", "step 8 is written", "step 8 is kept"]
    contents = [("7", "6"), ("7", "8 …"), ("7", "8")]
    wide = (WIDTH - 24) / 3
    for index, (title, (a, b)) in enumerate(zip(columns, contents, strict=True)):
        x = 12 + wide * index
        picture.text(x + wide / 2 - 6, 24, title, "strong", "middle")
        for place, (slot, step_of) in enumerate((("slot A", a), ("slot B", b))):
            y = 40 + 48 * place
            picture.box(
                x + 4, y, wide - 22, 36, "a" if step_of == "7" else "f" if step_of == "6" else "c" if "…" in step_of else "d"
            )
            picture.text(x + 14, y + 22, slot, "small on")
            picture.text(x + wide - 30, y + 22, f"step {step_of}", "small on", "end")
        picture.box(x + 4, 150, wide - 22, 30)
        named = "A" if index < 2 else "B"
        picture.text(x + wide / 2 - 6, 169, f"the record names {named}", "small", "middle")
        resumed = 7 if index < 2 else 8
        picture.text(x + wide / 2 - 6, 202, f"after kill -9: step {resumed}", "small muted", "middle")
    picture.text(12, 226, "The record is one write, and the last one of a step.", "small muted")
    return picture.svg()


def memory() -> str:
    """The pieces of a device's memory."""
    picture = Picture(160, "A device's memory in three pieces")
    pieces = [(0.1, "f", "reserve"), (0.52, "a", "weights, optimizer state, cache"), (0.38, "c", "activations, gradients")]
    notes = [
        ("staging,", "libraries"),
        ("one block of memory, taken as fit", "begins: no step allocates from it"),
        ("torch's allocator", ""),
    ]
    x = 12.0
    for (share, kind, name), lines in zip(pieces, notes, strict=True):
        width = share * (WIDTH - 24)
        picture.box(x, 36, width - 3, 46, kind)
        picture.text(x + width / 2, 63, name, "small on", "middle")
        for index, line in enumerate(lines):
            picture.text(x, 100 + 15 * index, line, "small muted")
        x += width
    picture.text(12, 24, "device_memory", "strong")
    picture.text(12, 146, "A plan whose pieces do not fit is refused before any weights are loaded.", "small muted")
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {"tiers": tiers, "step": step, "batches": batches, "slots": slots, "memory": memory}


def main() -> None:
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
