"""The shapes of decoded values. A checksum proves that bytes are intact, not who wrote them.

A *shape* is a type (``bool`` is no ``int``), ``None``, or one of the classes here, which are made
of shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list or tuple; each item has the shape."""

    item: Any


@dataclass(frozen=True, slots=True)
class DictOf:
    """A dictionary with text as keys; each value has the shape."""

    value: Any


@dataclass(frozen=True, slots=True)
class Row:
    """A list or tuple with one item for each shape."""

    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Fields:
    """A dictionary with these keys, and maybe others."""

    required: Mapping[str, Any] = field(default_factory=dict)
    optional: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Either:
    """One of several shapes."""

    shapes: tuple[Any, ...]


def fault(value: Any, shape: Any, where: str) -> str:
    """The first place where a value has another shape, and its type; empty if there is none."""
    match shape:
        case ListOf(item):
            rows = [(row, item, f"{where}[{i}]") for i, row in enumerate(value)] if isinstance(value, list | tuple) else None
        case Row(items):
            whole = isinstance(value, list | tuple) and len(value) == len(items)
            rows = [(v, s, f"{where}[{i}]") for i, (v, s) in enumerate(zip(value, items, strict=True))] if whole else None
        case DictOf(inner):
            whole = isinstance(value, dict) and all(isinstance(key, str) for key in value)
            rows = [(v, inner, f"{where}.{key}") for key, v in value.items()] if whole else None
        case Fields(required, optional):
            whole = isinstance(value, dict) and required.keys() <= value.keys()
            known = {**required, **optional}
            rows = [(v, known[key], f"{where}.{key}") for key, v in value.items() if key in known] if whole else None
        case Either(shapes):
            found = [fault(value, inner, where) for inner in shapes]
            return "" if "" in found else found[-1]
        case None:
            rows = [] if value is None else None
        case _:
            rows = [] if isinstance(value, shape) and not (isinstance(value, bool) and shape is int) else None
    if rows is None:
        return f"{where} is {type(value).__name__}, not {_name(shape)}"
    return next((what for row in rows if (what := fault(*row))), "")


def like(template: Any) -> Any:
    """The shape of an existing value, for others that have to look like it; keys may be missing."""
    if isinstance(template, dict):
        return Fields(optional={key: like(value) for key, value in template.items()})
    if isinstance(template, bool | int | float | str):
        return type(template)
    return object


def _name(shape: Any) -> str:
    match shape:
        case None:
            return "None"
        case ListOf():
            return "a list"
        case Row(items):
            return f"a list of {len(items)}"
        case DictOf():
            return "a dictionary with text as keys"
        case Fields(required):
            return f"a dictionary with {', '.join(required)}" if required else "a dictionary"
    return str(shape.__name__)
