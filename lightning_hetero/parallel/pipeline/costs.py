"""The cost of a forward, and the part that tensor parallelism divides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetero.parallel.pipeline.module import run_layers

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Cost:
    """The costs of one forward.

    Attributes:
        flop: FLOP.
        saved_bytes: Bytes saved for backward.
        sharded_flop: FLOP that the ranks of a stage divide: between the sharding of a value and the
            point where it is whole again.
        sharded_bytes: Bytes saved there, without whole inputs.
        traffic_bytes: Bytes that this forward and its backward all-reduce: outputs summed over
            shards, gradients of inputs.
    """

    flop: float
    saved_bytes: int
    sharded_flop: float
    sharded_bytes: int
    traffic_bytes: int


def measure(
    modules: Sequence[nn.Module], styles: Mapping[nn.Module, ParallelStyle], value: Any, context: Context
) -> tuple[Cost, Any]:
    """Runs whole layers once. Returns the costs and the detached outputs.

    Args:
        modules: The layers.
        styles: The sharding of modules in them.
        value: The input of the first layer.
        context: Entered around them.
    """
    own = {p.untyped_storage().data_ptr() for module in modules for p in module.parameters()}
    counter = FlopCounterMode(display=False)
    watch = _FlopWatch(own, counter)
    inner = {m for module in modules for m in module.modules()}
    handles = [h for m, style in styles.items() if m in inner for h in watch.hooks(m, style)]
    try:
        with counter, torch.autograd.graph.saved_tensors_hooks(watch.note, lambda t: t), context():
            found = run_layers(modules, _leaves(value))
    finally:
        for handle in handles:
            handle.remove()
    given = tuple(t.detach() for t in found) if isinstance(found, tuple) else found.detach()
    return watch.cost(), given


class _FlopWatch:
    """Follows sharded and whole values through one forward."""

    def __init__(self, parameters: set[int], counter: FlopCounterMode) -> None:
        self._parameters, self._counter = parameters, counter
        self._is_sharded = False
        self._since, self._flop, self._traffic = 0, 0, 0
        self._saved: dict[int, int] = {}
        self._on_shards: set[int] = set()
        self._whole: dict[int, Tensor] = {}  # kept alive, so that their memory is not reused

    def hooks(self, module: nn.Module, style: ParallelStyle) -> list[Any]:
        columns = isinstance(style, ColwiseParallel)

        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            if columns:
                self._whole[inputs[0].untyped_storage().data_ptr()] = inputs[0]
                self._traffic += inputs[0].nbytes * inputs[0].requires_grad
            self._turn(sharded=True)

        def leave(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if columns and not any(isinstance(p, Replicate) for p in vars(style)["output_layouts"]):
                return  # stays sharded up to the module that narrows
            self._traffic += output.nbytes // (2 if columns else 1)  # gathering is half of a ring all-reduce
            self._turn(sharded=False)

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    def _turn(self, *, sharded: bool) -> None:
        total = self._counter.get_total_flops()
        if self._is_sharded:
            self._flop += total - self._since
        self._since, self._is_sharded = total, sharded

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._parameters:
            self._saved[key] = storage.nbytes()
            (self._on_shards.add if self._is_sharded else self._on_shards.discard)(key)
        return tensor

    def cost(self) -> Cost:
        self._turn(sharded=False)
        return Cost(
            flop=float(self._counter.get_total_flops()),
            saved_bytes=sum(self._saved.values()),
            sharded_flop=float(self._flop),
            sharded_bytes=sum(self._saved[key] for key in self._on_shards - self._whole.keys()),
            traffic_bytes=self._traffic,
        )


def _leaves(value: Any) -> Any:
    if isinstance(value, tuple):
        found = tuple(_leaves(v) for v in value)
        return found if len(found) > 1 else found[0]
    return value.detach().requires_grad_(value.is_floating_point())
