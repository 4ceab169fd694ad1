"""Names of a block's operators, by one rule for profiles and runtime.

[Note: Names of operators]
An operator is called after the module of the first parameter that it takes (``"attn.c_proj"``); one
without a parameter, or whose parameter is the block's own, has ATen's name (``"gelu"``), and a
number where the block has several (``"add.1"``). Numbers count operators that make storages, in the
order in which they run inside the block's own forwards of one batch: what runs in a block inside
it, or between two blocks, has no number among them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn


class OperatorNames:
    """Names the operators of one block as they run in one batch, see [Note: Names of operators].

    Args:
        counts: How many there have been so far.
    """

    __slots__ = ("_counts",)

    def __init__(self, counts: Counter[str] | None = None) -> None:
        self._counts: Counter[str] = Counter() if counts is None else counts

    def name(self, operator: str, param: str, *, made: bool) -> str:
        """The name of the next operator.

        Args:
            operator: ATen's name, such as ``"addmm"``.
            param: Name of the first parameter that it takes, in the block's terms; empty if none.
            made: It has made a storage; views make none.
        """
        module = param.rpartition(".")[0]
        if module:
            return module
        if made:
            self._counts[operator] += 1
        count = self._counts[operator]
        return operator if count < 2 else f"{operator}.{count - 1}"

    def copy(self) -> OperatorNames:
        """Names that go on from here by themselves."""
        return OperatorNames(Counter(self._counts))


class ParameterAddresses:
    """Finds the parameter at an address.

    Args:
        params: Parameters that lie where they lie now, with the names of their blocks' terms.
    """

    __slots__ = ("_rows", "_starts")

    def __init__(self, params: Iterable[tuple[str, Tensor]]) -> None:
        rows = ((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in params if p.numel())
        self._rows = sorted(rows)
        self._starts = [start for start, _, _ in self._rows]

    def first(self, tensors: Iterable[Tensor]) -> str:
        """The name of the first tensor that lies in a parameter; empty if none does."""
        return next(filter(None, (self.name_at(tensor.data_ptr()) for tensor in tensors)), "")

    def name_at(self, address: int) -> str:
        """The parameter's name inside its block; empty where there is none."""
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._rows[index][1]:
            return ""
        return self._rows[index][2]


def has_storage(leaf: object, device_type: str) -> TypeGuard[Tensor]:
    """Whether this is a plain dense tensor on a device: no handle, and none of a compiler."""
    return type(leaf) in (Tensor, nn.Parameter) and leaf.device.type == device_type and leaf.layout is torch.strided  # type: ignore[attr-defined]


def leaves(tree: Any) -> list[Any]:
    """The leaves of an operator's arguments or results, in tuples, lists and dicts, in order."""
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if not isinstance(tree, tuple | list):
        return [tree]
    found: list[Any] = []
    for item in tree:
        if isinstance(item, tuple | list | dict):
            found += leaves(item)
        else:
            found.append(item)
    return found
