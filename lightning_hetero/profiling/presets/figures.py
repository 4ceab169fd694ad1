"""Figures with their sources, and tables of them that are looked up by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from lightning_hetero.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Figure(NamedTuple):
    """A number and where it comes from.

    Attributes:
        value: The number, in the unit that the name of its key says.
        source: A datasheet, a section of a paper, or a derivation with its assumption.
    """

    value: float
    source: str

    def times(self, factor: float, how: str) -> Figure:
        """The product, with the derivation in its source."""
        return Figure(self.value * factor, f"{how} of {self.source}")


def find(kind: str, table: Mapping[str, T], name: str) -> T:
    """Looks a preset up; case, blanks, underscores and a trailing ``GB`` do not matter.

    Args:
        kind: What the table holds, for the error.
        table: The presets by name.
        name: The name as somebody wrote it.

    Raises:
        ConfigError: There is none of that name; lists near matches first, then all names.
    """
    key = name.strip().lower().replace(" ", "").replace("_", "-").removesuffix("gb")
    if key in table:
        return table[key]
    longer = [known for known in table if key and known.startswith(key)]
    hint = f" Did you mean {' or '.join(map(repr, longer))}?" if longer else did_you_mean(key, table)
    raise ConfigError(f"there is no {kind} preset {name!r}.{hint} Known: {', '.join(sorted(table))}.")
