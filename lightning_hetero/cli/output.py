"""Output of the commands: JSON for programs, tables for people.

Only this module gives numbers units.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lightning_hetero.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPED_WIDTH = 140  # columns if standard output is not a terminal


def seconds(value: float) -> str:
    """Seconds with three significant digits: ``seconds(0.0123) == "12.3 ms"``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= factor:
            return f"{_digits(value / factor)} {unit}"
    return f"{_digits(value / 1e-6)} µs" if value else "0 s"


def count(value: float, unit: str = "") -> str:
    """A number with a decimal prefix: ``count(1.65e14, "FLOP/s") == "165 TFLOP/s"``."""
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{_digits(value / factor)} {prefix}{unit}"
    return f"{value if value == int(value) else _digits(value)} {unit}".rstrip()


def percent(share: float) -> str:
    """A share of one: ``percent(0.123) == "12 %"``; small shares with tenths."""
    value = 100 * share
    if 0 < abs(value) < 0.05:
        return "<0.1 %"
    return f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"


def change(value: float, reference: float) -> str:
    """A time relative to another one: ``change(0.9, 1.0) == "-10.0 %"``."""
    relative = 100 * (value / reference - 1) if reference else 0.0
    return "the same" if abs(relative) < 0.05 else f"{relative:+.1f} %"


def _digits(value: float) -> str:
    places = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(max(places, 0), 2)}f}"


def plain(value: Any) -> Any:
    """The value in JSON types: dataclasses become objects, infinity and NaN ``null``."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def print_json(value: Any) -> None:
    """Prints one JSON value to standard output."""
    typer.echo(json.dumps(plain(value), indent=2, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Writes a file that the user named.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}. Choose another file.") from error


def console() -> Console:
    """Standard output; if it is a pipe or a file, wide enough for the tables."""
    from rich.console import Console

    out = Console(highlight=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = _PIPED_WIDTH
    return out


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Shows a status on standard error during a long action, if that is a terminal."""
    from rich.console import Console

    screen = Console(stderr=True)
    if not screen.is_terminal:
        yield
        return
    with screen.status(what):
        yield


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), best: int = -1) -> Table:
    """A table for people.

    Args:
        title: The title.
        columns: Heads of the columns.
        rows: One text per column.
        right: Columns with numbers.
        best: The row to highlight.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns)
    )
    for name in columns:
        out.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for index, row in enumerate(rows):
        out.add_row(*map(Text, row), style="bold green" if index == best else None)
    return out


def pairs(title: str, rows: Mapping[str, str]) -> Table:
    """A table of names and values."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False, pad_edge=False)
    out.add_column(style="cyan", no_wrap=True)
    out.add_column(overflow="fold")
    for name, value in rows.items():
        out.add_row(name, Text(value))
    return out
