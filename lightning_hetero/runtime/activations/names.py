"""Names of a block's operators, by one rule for profiles and runtime.

[Note: Names of operators]
An operator has the name of the module of its first parameter (``"attn.c_proj"``). Without a
parameter, or with a parameter of the block itself, it has ATen's name (``"gelu"``), and a number if
the block has several (``"add.1"``). Numbers count operators that make storages, in the order in
which they run inside the block's own forwards of one batch. Operators of blocks inside it, and
operators between two blocks, do not count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import Tensor, nn


class OperatorNames:
    """Names the operators of one block as they run in one batch, see [Note: Names of operators]."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def name(self, operator: str, param: str, *, made: bool) -> str:
        """The name of the next operator.

        Args:
            operator: ATen's name, such as ``"addmm"``.
            param: The name of its first parameter inside the block; empty if it takes none.
            made: It has made a storage; views make none.
        """
        module = param.rpartition(".")[0]
        if module:
            return module
        if made:
            self._counts[operator] += 1
        count = self._counts[operator]
        return operator if count < 2 else f"{operator}.{count - 1}"


class ParameterAddresses:
    """Finds the parameter at an address; parameters have their names inside the block."""

    __slots__ = ("_rows", "_starts")

    def __init__(self, params: Iterable[tuple[str, Tensor]]) -> None:
        self._rows = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in params if p.numel())
        self._starts = [start for start, _, _ in self._rows]

    def first(self, tensors: Iterable[Tensor]) -> str:
        """The name of the first tensor that lies in a parameter; empty if none does."""
        return next(filter(None, (self.name_at(tensor.data_ptr()) for tensor in tensors)), "")

    def name_at(self, address: int) -> str:
        """The name of the parameter at an address; empty if there is none."""
        index = bisect_right(self._starts, address) - 1
        return self._rows[index][2] if index >= 0 and address < self._rows[index][1] else ""


def has_storage(leaf: object, device_type: str) -> TypeGuard[Tensor]:
    """Whether this is a plain dense tensor on a device: no handle, and none of a compiler."""
    if type(leaf) is not Tensor and type(leaf) is not nn.Parameter:
        return False
    return leaf.device.type == device_type and leaf.layout is torch.strided


def leaves(tree: object) -> list[object]:
    """The leaves of an operator's arguments or results, in tuples, lists and dicts, in order."""
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if not isinstance(tree, tuple | list):
        return [tree]
    found: list[object] = []
    for item in tree:
        if isinstance(item, tuple | list | dict):
            found += leaves(item)
        else:
            found.append(item)
    return found
