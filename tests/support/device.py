"""A model's blocks over the native engine, and an emulated device beside them: what tests of
``runtime.device`` need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import nn

from lightning_hetero.ir.plan import BlockPlan, Tier, UpdateLane
from lightning_hetero.ir.schedule import Lane, Op, OpKind, Payload
from lightning_hetero.lanes import EmulatedDevice, EmulatedLanes, Event, Lanes
from lightning_hetero.optim import adam
from lightning_hetero.runtime.device import DeviceSide, DeviceUpdates, DeviceWeights, HostGradients
from lightning_hetero.runtime.optimizers import OptimizerBinding
from lightning_hetero.runtime.options import StepRules
from lightning_hetero.runtime.updates import Updater
from lightning_hetero.store.live.blocks import Block, Part, bind
from lightning_hetero.store.live.engine_options import EngineOptions
from lightning_hetero.store.live.geometry import chunk_bytes, geometry_of
from lightning_hetero.store.live.native_parts import open_native
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.partition import partition

_numbers = count()


def make_op(kind: OpKind, lane: Lane, block: int = 0, payload: Payload = Payload.WEIGHTS) -> Op:
    """An op as a schedule would have it."""
    return Op(id=next(_numbers), kind=kind, block=block, lane=lane, at=0, payload=payload, num_bytes=1)


def run(lanes: Lanes, lane: Lane, function: Callable[[], Any], after: Sequence[Event] = ()) -> Event:
    """Submits an op of this lane."""
    kinds = {Lane.H2D: OpKind.UPLOAD, Lane.D2H: OpKind.GRAD, Lane.CPU: OpKind.UPDATE, Lane.COMPUTE: OpKind.UPDATE}
    return lanes.submit(make_op(kinds[lane], lane), function, after)


@contextmanager
def emulated(memory: str | int = "1MiB", *, seed: int | None = 0) -> Iterator[EmulatedLanes]:
    """A device whose freed, early and late memory reads as NaN, and whose ops are late at
    random.
    """
    lanes = EmulatedLanes(EmulatedDevice(memory=memory, seed=seed), poison=True)
    try:
        yield lanes
        lanes.drain()
    finally:
        lanes.close()


@dataclass
class World:
    """One model with an optimizer: its weights and state in the engine's memory."""

    root: nn.Module
    blocks: list[Block]
    store: TierStore
    binding: OptimizerBinding
    updater: Updater

    @property
    def parts(self) -> list[Part]:
        return [part for block in self.blocks for part in block.parts]

    def step(self) -> None:
        """One update of everything that has a gradient, and the wait for it."""
        work = ((b, self.updater.work(b, self.binding)) for b in self.blocks)
        due = [due for b, parts in work if (due := self.updater.prepare(b, self.binding, parts)) is not None]
        for ticket in [ticket for one in due for ticket in one()]:
            ticket.wait()
        self.updater.begin_step()

    def on(self, lanes: Lanes, plan: BlockPlan, **options: Any) -> DeviceSide:
        """Moves the model to a device; every block follows the same rule."""
        weights = DeviceWeights(lanes)
        side = DeviceSide(
            lanes=lanes,
            weights=weights,
            gradients=HostGradients(lanes, **options),
            updates=DeviceUpdates(lanes, weights, self.store),
        )
        for block in self.blocks:
            block.plan = replace(plan, name=block.name)
            if plan.weights is Tier.DEVICE:
                weights.bind_resident(block, host_copy=plan.update is UpdateLane.CPU)
            else:
                weights.prepare(block)
            for part in block.parts:
                if plan.update is UpdateLane.DEVICE:
                    (side.updates.keep if plan.state is Tier.DEVICE else side.updates.borrow)(part)
        self.updater.device = side
        return side


@contextmanager
def world(root: nn.Module, optimizer: torch.optim.Optimizer, **rules: Any) -> Iterator[World]:
    """Binds a model to the engine, as a session does for plan ``host``."""
    blocks = bind(root, partition(root))
    parts = [part for block in blocks for part in block.parts]
    geometries = [
        geometry_of(p, i, num_state=len(adam.state_names(p.dtype)), weights=Tier.HOST, state=Tier.HOST) for i, p in enumerate(parts)
    ]
    largest = max(map(chunk_bytes, geometries))
    store = TierStore(EngineOptions(update_threads=1), directory=None, num_blocks=64, chunk_bytes_max=largest)
    try:
        for part, geometry in zip(parts, geometries, strict=True):
            open_native(store, part, geometry)
            store.flush(part)
        binding = OptimizerBinding(
            optimizer, on_step=_nothing, on_read=_nothing, on_touch=_nothing, on_load=_nothing, on_save=_nothing
        )
        binding.place(store, ((p, part, i) for part in parts for i, p in enumerate(part.params)))
        updater = Updater(store)
        updater.rules = StepRules(**rules)
        updater.own([binding])
        yield World(root, blocks, store, binding, updater)
        binding.unbind(read=False)
    finally:
        store.close(blocks)


def _nothing(*_: object) -> None:
    """Called by an optimizer whose steps the test takes itself."""


class Fleeting(dict[Any, Any]):
    """Whatever is asked for is gone before the next question: a lane's thread has taken it away."""

    def __contains__(self, key: object) -> bool:
        there = super().__contains__(key)
        self.pop(key, None)
        return there


def give_gradients(params: Iterable[nn.Parameter], seed: int, *, scale: float = 1.0) -> None:
    """The same random gradients for models of the same shape, in each parameter's dtype and memory
    order.
    """
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        values = torch.randn(param.shape, generator=generator) * scale
        param.grad = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device).copy_(values)
