"""Figures with their sources, and look-up of presets by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from lightning_hetero.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Figure(NamedTuple):
    """A number with its source.

    Attributes:
        value: The number, in the unit of its key's name.
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
        kind: The kind of presets, for the error.
        table: The presets by name.
        name: The name as given.

    Raises:
        ConfigError: There is no such preset; lists near matches, then all names.
    """
    key = name.strip().lower().replace(" ", "").replace("_", "-").removesuffix("gb")
    if key in table:
        return table[key]
    longer = [known for known in table if key and known.startswith(key)]
    hint = f" Did you mean {' or '.join(map(repr, longer))}?" if longer else did_you_mean(key, table)
    raise ConfigError(f"there is no {kind} preset {name!r}.{hint} Known: {', '.join(sorted(table))}.")
