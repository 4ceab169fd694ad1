"""Names for what torch, Lightning or the user leaves without a type.

In ``runtime`` and ``strategies`` mypy allows no explicit ``Any`` (``disallow_any_explicit`` in
pyproject.toml), so each place that has to take one says by one of these names what it takes.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch._ops import OpOverload

Function: TypeAlias = Callable[..., Any]
"""A function of torch or of the user. Its parameters are not known here."""

Operator: TypeAlias = "OpOverload[..., Any]"
"""An operator of ATen. Torch makes the class generic over parameters that no operator declares."""

Trainer: TypeAlias = Any
"""Lightning's Trainer, where private attributes of its loops are used."""

Loader: TypeAlias = Any
"""A dataloader of the user, Lightning's combination of several, or what fetches from them."""

Value: TypeAlias = Any
"""An argument or a result of such a function, or an object that is used by its attributes."""

Values: TypeAlias = tuple[Any, ...]
"""Positional arguments of such a function."""

Options: TypeAlias = dict[str, Any]
"""Keyword arguments of such a function, or entries whose values only the owner knows."""
