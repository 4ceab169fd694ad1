"""``lightning-hetero inspect``: shows the contents of a store, weights, a checkpoint or a plan."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_hetero.cli.contents import PLAN, Contents, contents_of, grouped
from lightning_hetero.cli.output import console, count, pairs, plain, print_json, table
from lightning_hetero.units import format_bytes


def run(path: Path, *, as_json: bool) -> None:
    """Prints the contents of a path.

    Raises:
        ConfigError: It is of no known kind, or incomplete.
        StoreBusyError: A process uses the store.
    """
    contents = contents_of(path)
    if as_json:
        print_json(contents)
        return
    _print(contents)


def _print(contents: Contents) -> None:
    screen = console()
    facts = dict(contents.facts)
    plan = facts.pop("plan", None)
    screen.print(pairs("", {"path": str(contents.path), "kind": contents.kind, **_texts(facts), **_totals(contents)}))
    if contents.kind == PLAN:
        rules = plan["blocks"]
        names = [key for key in ("name", "weights", "state", "update") if any(key in rule for rule in rules)]
        screen.print(table("Rules", names, [[str(rule.get(key, "")) for key in names] for rule in rules]))
    if contents.blocks:
        screen.print(_blocks(contents))
    if contents.tensors:
        rows = [
            (
                name,
                str(number),
                first.dtype,
                " x ".join(map(str, first.shape)) or "one",
                format_bytes(number * first.num_bytes),
                first.place if number == 1 else re.sub(r"\d+", "*", first.place),
            )
            for name, number, first in grouped(contents.tensors)
        ]
        screen.print(table("Tensors", ("name", "number", "dtype", "shape", "in all", "in"), rows, right=("number", "in all")))


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    out = {}
    for key, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else plain(value)
        if isinstance(value, Mapping):
            shown = ", ".join(f"{k}={v}" for k, v in value.items())
        out[key.replace("_", " ")] = "none" if shown in (None, "") else str(shown)
    return out


def _totals(contents: Contents) -> dict[str, str]:
    if not contents.tensors:
        return {}
    elements = sum(math.prod(row.shape) for row in contents.tensors)
    size = sum(row.num_bytes for row in contents.tensors)
    return {"tensors": f"{len(contents.tensors)} with {count(elements)} elements, {format_bytes(size)}"}


def _blocks(contents: Contents) -> Any:
    rows = [
        (
            str(row["id"]),
            row["name"],
            row["file"],
            str(row["step"]),
            row.get("weights") or "",
            str(row.get("state_arrays") or ""),
            count(row.get("elements", 0)),
            row.get("fault") or ("digests" if row.get("has_digests") else ""),
        )
        for row in contents.blocks
    ]
    columns = ("id", "block", "file", "step", "weights", "state arrays", "elements", "")
    return table("Blocks that the last record names", columns, rows, right=("id", "step", "state arrays", "elements"))
