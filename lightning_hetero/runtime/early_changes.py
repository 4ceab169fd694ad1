"""What updates before the verdict have read, so that a later change of it is noticed.

An update that runs during backward has read its optimizer's options, its state and its weights.
Code that changes one of them before ``optimizer.step()`` changes the update in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor

from lightning_hetero._native import Hyper
from lightning_hetero.runtime.optimizers import OptimizerBinding
from lightning_hetero.store.live.blocks import Part
from lightning_hetero.store.live.geometry import VERSION
from lightning_hetero.untyped import Options, Value

TOO_LATE = (
    "{what} changed between the begin of backward and optimizer.step(), when updates had read it. Change it before backward or "
    'after step(). Or let updates wait: in a loop pass overlap="forward"; in Lightning\'s Trainer make the change in '
    "on_before_optimizer_step."
)


class ReadEarly:
    """The updates of one step that began before its verdict."""

    def __init__(self) -> None:
        self.has_changed = False  # what :meth:`changed` found last
        self._options: dict[OptimizerBinding, list[tuple[Options, Options]]] = {}
        self._read: list[tuple[OptimizerBinding, Part, Sequence[int], Sequence[Hyper]]] = []
        self._written: list[tuple[Part, Sequence[int], int]] = []

    def prepared(self, binding: OptimizerBinding, part: Part, indices: Sequence[int], numbers: Sequence[Hyper]) -> None:
        """An update of this optimizer has read its options and its state."""
        self._read.append((binding, part, indices, numbers))
        if binding not in self._options:
            self._options[binding] = [(group, _copied(group)) for group in binding.optimizer.param_groups]

    def updated(self, part: Part, indices: Sequence[int]) -> None:
        """An update has written these weights, and counted that."""
        self._written.append((part, indices, _versions(part, indices)))

    def changed(self, binding: OptimizerBinding) -> str | None:
        """What code has changed since, in words; ``None`` if nothing."""
        self.has_changed = True
        for group, before in self._options.get(binding, ()):
            for key, value in before.items():
                if not _is_same(group.get(key), value):
                    return f"{key!r} of {type(binding.optimizer).__name__}"
        mine = ((part, indices, numbers) for owner, part, indices, numbers in self._read if owner is binding and numbers)
        changed = binding.changed_part(mine)
        if changed is not None:
            return f"optimizer state of block {changed.block.name!r}"
        for part, indices, version in self._written:
            if _versions(part, indices) != version:
                return f"weights of block {part.block.name!r}"
        self.has_changed = False
        return None


def _versions(part: Part, indices: Sequence[int]) -> int:
    with torch._C.DisableTorchFunctionSubclass():  # handles would answer in Python
        return sum(map(VERSION, map(part.params.__getitem__, indices)))


def _copied(group: Options) -> Options:
    """Options as they are now: tensors, such as a learning rate, and lists may change in place."""
    return {key: deepcopy(value) if isinstance(value, Tensor | list) else value for key, value in group.items() if key != "params"}


def _is_same(one: Value, other: Value) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if one is other:
        return True
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other)
