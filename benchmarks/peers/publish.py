"""The tables, the picture and the README's rows from a result, between markers of the pages."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE, README, PICTURE = ROOT / "docs" / "comparison.md", ROOT / "README.md", ROOT / "docs" / "images" / "side-by-side.svg"
SHORT = {"32-true": "fp32", "bf16-true": "bf16"}
OURS = ("host", "disk")
STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#1c2127}.h{font-size:12px}.b{font-weight:bold}.o{fill:#0b6bcb}.t{fill:#9aa4ae}"
    "@media(prefers-color-scheme:dark){text{fill:#e4e8ec}.o{fill:#6cb2ff}}"
)


def publish(file: Path, root: Path = ROOT) -> None:
    """Writes everything that shows a result below ``root``."""
    result = json.loads(file.read_text(encoding="utf-8"))
    for page, parts in parts_of(result, file.name).items():
        path = root / page.relative_to(ROOT)
        path.write_text(written(path.read_text(encoding="utf-8"), parts, "benchmarks/peers"), encoding="utf-8")
    (root / PICTURE.relative_to(ROOT)).write_text(picture(result), encoding="utf-8")


def parts_of(result: dict[str, Any], name: str) -> dict[Path, dict[str, str]]:
    """The texts of each page, by the names of their markers."""
    figures = "\n\n".join(f"### {SHORT[precision]}\n\n{steps(result, precision)}" for precision in result["measured"])
    shown = f"![Seconds of a step, by library](images/{PICTURE.name})"
    parts = {
        "setting": setting(result, name),
        "figures": f"{shown}\n\n{figures}",
        "set-up": set_up(result),
        "missing": missing(result),
    }
    return {PAGE: parts, README: {"measured": overview(result)}}


def written(text: str, made: dict[str, str], script: str) -> str:
    """A page with these parts between the markers of a script.

    Raises:
        ValueError: The page lacks a marker.
    """
    for name, part in made.items():
        begin, end = f"<!-- {name}: {script} -->\n", f"\n<!-- end of {name} -->"
        if begin not in text or end not in text:
            raise ValueError(f"the page has no place for {name!r}: {begin.strip()} … {end.strip()}")
        text = text[: text.index(begin) + len(begin)] + part + text[text.index(end) :]
    return text


def setting(result: dict[str, Any], name: str) -> str:
    """What was trained on which machine."""
    rows = [
        ("model", f"{result['model']}, {result['parameters'] / 1e6:.0f} M parameters"),
        ("a step", f"{tokens(result)}, forward, backward and AdamW"),
        ("turns", f"{result['rounds']} rounds of {result['steps']} timed steps, all contestants alive in one run"),
        ("machine", f"{result['machine']}, torch {result['torch']}, {result['threads']} threads"),
        ("taken", result["taken"]),
        ("all figures", f"[{name}](../benchmarks/results/{name})"),
    ]
    head, *others = (list(row) for row in rows)
    return table(head, others)


def tokens(result: dict[str, Any]) -> str:
    """Of a step, in words."""
    return f"{result['batch']} sequence{'s' * (result['batch'] > 1)} of {result['seq']} tokens"


def ran(result: dict[str, Any], precision: str) -> dict[str, dict[str, Any]]:
    """Those that were measured."""
    return {name: found for name, found in result["measured"][precision].items() if "skipped" not in found}


def steps(result: dict[str, Any], precision: str) -> str:
    """A precision's table."""
    found = ran(result, precision)
    common = min(len(of_name["losses"]) for of_name in found.values())
    head = ["", "state is in", "seconds of a step", "tokens/s", "peak of the process", "on disk", "moved in a step"]
    rows = [
        [
            result["contestants"][name]["title"],
            result["contestants"][name]["keeps"],
            f"**{of_name['seconds_per_step']:.2f}** ({least(of_name):.2f} to {most(of_name):.2f})",
            f"{of_name['tokens_per_s']:.0f}",
            gigabytes(of_name["peak_rss_bytes"]),
            gigabytes(of_name["disk_bytes"]),
            gigabytes(of_name["bytes_per_step"]),
            f"{of_name['losses'][common - 1]:.5f}",
            "0" if of_name["loss_difference"] == 0 else f"{of_name['loss_difference']:.0e}",
        ]
        for name, of_name in found.items()
    ]
    return table([*head, f"loss of step {common}", "largest difference of a loss from plain"], rows)


def least(found: dict[str, Any]) -> float:
    """Seconds of a step in the fastest round."""
    return float(min(found["seconds_of_rounds"]))


def most(found: dict[str, Any]) -> float:
    """Seconds of a step in the slowest round."""
    return float(max(found["seconds_of_rounds"]))


def set_up(result: dict[str, Any]) -> str:
    """What it takes to begin."""
    rows = [
        [
            of_name["title"],
            of_name.get("version", ""),
            str(of_name["lines_changed"]),
            *(
                f"{of_name['set_up'][key]:.0f} s" if of_name.get("set_up") else ""
                for key in ("with_compiling_s", "without_compiling_s")
            ),
        ]
        for name, of_name in result["contestants"].items()
        if any(name in ran(result, precision) for precision in result["measured"])
    ]
    return table(["", "version", "lines changed", "set-up, compiling", "set-up without"], rows)


def missing(result: dict[str, Any]) -> str:
    """Who did not run, with the last line of the error."""
    lines = {name: of_name["skipped"] for name, of_name in result["contestants"].items() if "skipped" in of_name}
    for precision, measured in result["measured"].items():
        for name, found in measured.items():
            if "skipped" in found:
                others = [SHORT[other] for other, of_other in result["measured"].items() if "skipped" not in of_other[name]]
                lines[name] = found["skipped"] + (f" (in {SHORT[precision]} only)" if others else "")
    rows = [[result["contestants"][name]["title"], f"`{line}`"] for name, line in lines.items()]
    return table(["did not run", "last line of its error"], rows) if rows else "All of them ran."


def overview(result: dict[str, Any]) -> str:
    """The README's part."""
    names = [name for name in result["contestants"] if any(name in ran(result, precision) for precision in result["measured"])]
    rows = []
    for name in names:
        found = {precision: ran(result, precision).get(name) for precision in result["measured"]}
        seconds = [f"{of_name['seconds_per_step']:.2f}" if of_name else "" for of_name in found.values()]
        peaks = [gigabytes(of_name["peak_rss_bytes"]) if of_name else "" for of_name in found.values()]
        of_name = result["contestants"][name]
        begins = of_name.get("set_up")
        title = f"**{of_name['title']}**" if name in OURS else of_name["title"]
        rows.append(
            [title, *seconds, *peaks, str(of_name["lines_changed"]), f"{begins['with_compiling_s']:.0f} s" if begins else ""]
        )
    shorts = [SHORT[precision] for precision in result["measured"]]
    columns = [f"{short}: {figure}" for figure in ("s/step", "peak") for short in shorts]
    begin = f"{result['model']}, {tokens(result)} a step, {result['machine']}. All took turns in one run:"
    end = "[Disk, losses, settings and the command](docs/comparison.md)."
    return "\n\n".join([textwrap.fill(begin, 100), table(["", *columns, "lines changed", "set-up"], rows), end])


def picture(result: dict[str, Any]) -> str:
    """Seconds of a step, as bars by precision."""
    groups = {
        SHORT[precision]: [
            (result["contestants"][name]["title"].replace("`", ""), found["seconds_per_step"], name in OURS)
            for name, found in ran(result, precision).items()
        ]
        for precision in result["measured"]
    }
    title = f"Seconds of a step: {result['model']}, {tokens(result)}, medians of turns of one run"
    return bars(title, groups, left=220)


def bars(title: str, groups: dict[str, list[tuple[str, float, bool]]], *, left: int = 120) -> str:
    """A picture of seconds by name, for light and dark pages; those marked true stand out."""
    longest = max(seconds for rows in groups.values() for _, seconds, _ in rows)
    drawn, top = "", 34
    for group, rows in groups.items():
        if group:
            drawn += f'<text x="0" y="{top + 14}" class="b">{group}</text>'
            top += 28
        for name, seconds, stands_out in rows:
            width, digits = (520 - left) * seconds / longest, 1 if longest >= 10 else 2
            value = f'<text x="{left + 8 + width:.0f}" y="{top + 14}">{seconds:.{digits}f} s</text>'
            drawn += f'<text x="0" y="{top + 14}">{name}</text>{value}'
            drawn += f'<rect x="{left}" y="{top}" width="{width:.0f}" height="20" rx="3" class="{"o" if stands_out else "t"}"/>'
            top += 34
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 {top}" role="img" aria-label="{title}"><style>{STYLE}</style>'
        f'<text x="0" y="16" class="h">{title}</text>{drawn}</svg>\n'
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(row)} |".replace("  ", " ") for row in [head, ["---"] * len(head), *rows])


def gigabytes(num_bytes: float) -> str:
    """With two digits after the point; 0 is nothing."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 5e6 else "0"
