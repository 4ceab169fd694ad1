"""Process groups of a layout, and gradients summed over the owners of each segment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.parallel.pipeline.layers import Layers
from lightning_hetero.parallel.pipeline.layout import RankLayout


class Groups:
    """Process groups by their ranks.

    All ranks make all groups in one order, as ``new_group`` requires.
    """

    def __init__(self, layout: RankLayout, layers: Layers, timeout: timedelta | None) -> None:
        self._made: dict[tuple[int, ...], Any] = {}
        wanted = [layout.pipeline(j, k) for k in range(layout.num_shards) for j in range(layout.num_groups)]
        wanted += [layout.owners(segment.start, k) for k in range(layout.num_shards) for segment in layout.segments]
        if layout.num_shards > 1:
            wanted += [layout.stage(j, s) for j in range(layout.num_groups) for s in range(layout.depth(j))]
        wanted += [tied_ranks(layout, users, k) for k in range(layout.num_shards) for users in layers.tied.values()]
        for ranks in wanted:
            key = tuple(sorted(ranks))
            if key not in self._made:
                self._made[key] = dist.new_group(list(key), timeout=timeout)

    def of(self, ranks: Iterable[int]) -> Any:
        """The group of these ranks; this rank is a member."""
        return self._made[tuple(sorted(ranks))]


@torch.no_grad()
def broadcast(layers: Layers, device: torch.device) -> None:
    """Gives all ranks the first rank's weights and buffers, while all have the whole module."""
    tensors = {id(t): t for module in layers.modules for t in (*module.parameters(), *module.buffers())}
    for tensor in tensors.values():
        staged = tensor.detach().to(device).contiguous()
        dist.broadcast(staged, src=0)
        tensor.copy_(staged)


def tied_ranks(layout: RankLayout, users: Sequence[int], shard: int) -> tuple[int, ...]:
    """The owners of a parameter that several layers use."""
    return tuple(sorted({rank for layer in users for rank in layout.owners(layer, shard)}))


@dataclass(frozen=True)
class _OwnedParameters:
    """Parameters with the same owners."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]


class Synchronisation:
    """Sums gradients over their owners in one order: the segments, then tied parameters."""

    def __init__(self, layout: RankLayout, layers: Layers, groups: Groups, rank: int) -> None:
        self.layers, self._groups = layers, groups
        self._buckets: list[_OwnedParameters] = []
        slot = layout.slots[rank]
        if slot is None:
            return
        own = layout.layers(slot.group, slot.stage)
        for segment in layout.segments:
            if segment.start in own:
                names = dict.fromkeys(n for i in segment for n in layers.parameters(i) if n not in layers.tied)
                self._buckets.append(_OwnedParameters(tuple(names), layout.owners(segment.start, slot.shard)))
        for name, users in layers.tied.items():
            if any(layer in own for layer in users):
                self._buckets.append(_OwnedParameters((name,), tied_ranks(layout, users, slot.shard)))

    def names(self) -> list[str]:
        """This rank's parameters."""
        return [name for bucket in self._buckets for name in bucket.names]

    @torch.no_grad()
    def reduce(self) -> dict[nn.Parameter, Tensor]:
        """Removes the gradients from the parameters and sums them over the owners.

        Unused ones get none.
        """
        named = dict(self.layers.module.named_parameters())
        pending = []
        for bucket in self._buckets:
            trained = [named[name] for name in bucket.names if named[name].requires_grad]
            for dtype in dict.fromkeys(p.dtype for p in trained):
                some = [p for p in trained if p.dtype == dtype]
                flat = _flatten(some)
                for parameter in some:
                    parameter.grad = None
                several = len(bucket.ranks) > 1
                work = dist.all_reduce(flat, group=self._groups.of(bucket.ranks), async_op=True) if several else None
                pending.append((some, flat, work))
        gradients: dict[nn.Parameter, Tensor] = {}
        for some, flat, work in pending:
            if work is not None:
                work.wait()
            gradients |= _unflatten(some, flat)
        return gradients


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that several compute together."""
    whole: Any = tensor
    return whole.to_local() if hasattr(whole, "to_local") else tensor


def _placed(parameter: nn.Parameter) -> Tensor:
    """The gradient, sharded as its parameter is."""
    whole: Any = parameter
    gradient: Any = parameter.grad
    if hasattr(whole, "placements") and gradient.placements != whole.placements:
        gradient = gradient.redistribute(placements=whole.placements)
    found: Tensor = gradient
    return found


def _flatten(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Their gradients in one tensor, followed by one flag per parameter: whether it has one."""
    grads = [None if p.grad is None else local(_placed(p)) for p in parameters]
    pieces = [torch.zeros_like(local(p)) if g is None else g for p, g in zip(parameters, grads, strict=True)]
    present = pieces[0].new_tensor([g is not None for g in grads])
    return torch.cat([*(piece.reshape(-1) for piece in pieces), present])


def _unflatten(parameters: Sequence[nn.Parameter], flat: Tensor) -> dict[nn.Parameter, Tensor]:
    sizes = [local(p).numel() for p in parameters]
    *pieces, present = torch.split(flat, [*sizes, len(sizes)])
    found: dict[nn.Parameter, Tensor] = {}
    for parameter, piece, has in zip(parameters, pieces, present.tolist(), strict=True):
        if has:
            found[parameter] = like(parameter, piece.view(local(parameter).shape))
    return found


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's part of a tensor, as a tensor sharded like a parameter."""
    whole: Any = parameter
    if not hasattr(whole, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made
