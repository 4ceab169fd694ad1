"""Sums of losses over micro-batches and groups, and their logged means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_hetero.errors import ConfigError


class Sums:
    """The loss sums of one micro-batch.

    Attributes:
        loss: The sum, a scalar tensor.
        count: The number of items: tokens, samples.
        further: Other sums over the same items, by name.
    """

    def __init__(self, loss: Tensor, count: Any, further: Mapping[str, Any]) -> None:
        self.loss, self.count, self.further = loss, count, dict(further)

    @classmethod
    def of(cls, found: Any, batch: Any) -> Sums:
        """Reads the result of ``loss_sum`` for a batch.

        Raises:
            ConfigError: It has another form.
        """
        parts = found if isinstance(found, tuple) else (found,)
        loss = parts[0] if 1 <= len(parts) <= 3 else None
        further = parts[2] if len(parts) > 2 else {}
        if not isinstance(loss, Tensor) or loss.dim() or not isinstance(further, Mapping):
            shown = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise ConfigError(
                f"loss_sum(output, batch) gave {shown}; allowed: a scalar tensor, (it, the number of items summed over), or "
                "(it, the number, {name: other sum})."
            )
        return cls(loss, parts[1] if len(parts) > 1 else num_samples(batch), further)

    def as_row(self, names: Sequence[str]) -> Tensor:
        """Loss, count and the further sums of these names, float64."""
        values = (self.loss, self.count, *(self.further.get(name, 0.0) for name in names))
        return torch.stack([torch.as_tensor(v).detach().to("cpu", torch.float64).reshape(()) for v in values])


def num_samples(batch: Any) -> int:
    """The first dimension of a batch's tensors.

    Raises:
        ConfigError: There is none, or they differ.
    """
    sizes = {t.shape[0] if t.dim() else 0 for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)}
    if len(sizes) != 1:
        raise ConfigError(f"the tensors of a batch have {sorted(sizes)} samples; allowed: one number, in the first dimension.")
    return int(sizes.pop())


def split(batch: Any, parts: int) -> list[Any]:
    """Equal micro-batches of a batch: tensors are divided in their first dimension.

    Raises:
        ConfigError: It cannot be divided equally.
    """
    samples = num_samples(batch)
    if samples % parts:
        raise ConfigError(f"{samples} samples cannot be cut into {parts} equal micro-batches.")
    size = samples // parts

    def part(index: int) -> Any:
        return pytree.tree_map(lambda v: v[index * size : (index + 1) * size] if isinstance(v, Tensor) else v, batch)

    return [part(index) for index in range(parts)]


def joined(one: Any, other: Any) -> Any:
    """Two micro-batches, or the outputs for them, as one."""
    return pytree.tree_map(lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) and a.dim() else a, one, other)
