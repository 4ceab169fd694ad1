"""Optimizers that run other optimizers, each with parameters of its own.

Each inner one is bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer


def members(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers to bind instead of a user's optimizer.

    A class may hold several optimizers, such as ``Muon`` for matrices and ``AdamW`` for the rest,
    and call their steps in its own. Its code runs unchanged, and the inner steps hand their updates
    to the runtime. Together the inner optimizers must have all of its parameters, each once.

    Args:
        optimizer: The user's optimizer.

    Returns:
        The optimizers inside it, from the inside out; only itself if there are none, or if they do
        not divide its parameters.
    """
    inner = list(held(optimizer))
    ids = [id(p) for one in inner for p in _params(one)]
    if len(inner) < 2 or len(set(ids)) != len(ids) or set(ids) != set(map(id, _params(optimizer))):
        return [optimizer]
    return [member for one in inner for member in members(one)]


def held(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizers in another one's attributes, also inside lists, tuples and dictionaries."""
    seen = {id(optimizer)}

    def search(value: Any) -> Iterator[Optimizer]:
        if isinstance(value, Optimizer):
            if id(value) not in seen:
                seen.add(id(value))
                yield value
        elif isinstance(value, Mapping):
            for item in value.values():
                yield from search(item)
        elif isinstance(value, list | tuple):
            for item in value:
                yield from search(item)

    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups", "defaults"):
            yield from search(value)


def obstacle(optimizer: Optimizer) -> str:
    """The reason why an optimizer has state outside its members; empty if it has none."""
    inner = members(optimizer)
    if inner == [optimizer]:
        return ""
    theirs = {id(group) for one in inner for group in one.param_groups}
    if {id(group) for group in optimizer.param_groups} != theirs:
        return f"optimizer {type(optimizer).__name__} has parameter groups other than those of the optimizers that it runs"
    kind: Any = type(optimizer)
    if kind.state_dict is not Optimizer.state_dict and not _is_theirs(optimizer.state_dict()):
        return f"optimizer {kind.__name__} has state besides the state of the optimizers that it runs"
    return ""


def _is_theirs(state: Any) -> bool:
    """Whether a state dict is a mapping or list of optimizers' state dicts."""
    if isinstance(state, Mapping):
        return state.keys() == {"state", "param_groups"} or all(_is_theirs(value) for value in state.values())
    return isinstance(state, list | tuple) and all(map(_is_theirs, state))


def _params(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]
