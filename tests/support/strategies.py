"""Strategies to compare with plain Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier, UpdateLane
from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.ir.plan import Saved
from lightning_hetero.strategies import HeteroOffloadStrategy
from support.models import Outcome, assert_same

Train = Callable[[Any], Any]  # trains from one seed under the given strategy


class Spread(Plan):
    """A plan that puts the blocks of any model to all tiers, by turns."""

    __slots__ = ()

    def resolve(self, names: Iterable[str]) -> Plan:
        """Each block gets the next rule, over and over."""
        rows = [replace(self.blocks[i % len(self.blocks)], name=name) for i, name in enumerate(names)]
        return Plan(name=self.name, blocks=tuple(rows), prefetch_depth=self.prefetch_depth)


SPREAD = Spread(
    name="spread",
    prefetch_depth=2,
    blocks=(
        BlockPlan(name="0", boundary=Saved.SWAP_HOST),
        BlockPlan(name="1", weights=Tier.DISK, state=Tier.DISK, saved=Saved.SWAP_HOST),
        BlockPlan(name="2", update=UpdateLane.DEVICE),
        BlockPlan(name="3", weights=Tier.DEVICE, state=Tier.DISK),
        BlockPlan(name="4", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE, saved=Saved.SWAP_DISK),
    ),
)


def on_device(plan: Any = SPREAD, memory: str | int = "16MiB", **options: Any) -> Any:
    """The strategy with an emulated device whose ops are late at random."""
    return HeteroOffloadStrategy(plan, device=EmulatedDevice(memory=memory, seed=1), **options)


def rules(**options: Any) -> Plan:
    return Plan(name="one", blocks=(BlockPlan(name="*", **options),))


ON_DEVICE = {
    "spread": SPREAD,
    "updated on the host": rules(weights=Tier.DEVICE, state=Tier.DISK),
    "updated on the device": rules(update=UpdateLane.DEVICE),
    "resident": "resident",
}
WHERE = pytest.mark.parametrize("where", ["host", "disk", "tight", *ON_DEVICE])


def make_strategy(kind: str, train: Train) -> Any:
    """The strategy of a kind.

    ``"auto"``; a built-in plan; ``"tight"``: plan ``disk`` with so little memory that weights come
    and go at every block; ``"device"``: a device with memory of its own, and blocks on all tiers;
    ``"device_resident"``: the same, all on the device.
    """
    if kind == "auto":
        return "auto"
    if kind == "tight":
        return HeteroOffloadStrategy(plan="disk", host_memory=least_memory(train))
    if kind == "device":
        return on_device()
    if kind == "device_resident":
        return on_device("resident")
    return HeteroOffloadStrategy(plan=kind)


def least_memory(train: Train, plan: Any = "disk") -> int:
    """The least budget that the plan accepts, as its refusal says."""
    with pytest.raises(OutOfMemoryBudgetError) as refusal:
        train(HeteroOffloadStrategy(plan=plan, host_memory="1B"))
    return int(refusal.value.needed_bytes)


def least_memory_throughout(train: Train, plan: Any = "disk") -> int:
    """The least budget of a run that sets weights free on its way, as its last refusal says."""
    budget = least_memory(train, plan)
    while True:
        try:
            train(HeteroOffloadStrategy(plan=plan, host_memory=budget))
        except OutOfMemoryBudgetError as error:
            if error.needed_bytes <= budget:
                raise
            budget = error.needed_bytes
        else:
            return budget


def assert_same_as_plain(kind: str, train: Callable[[Any], Outcome]) -> None:
    """Trains under plain Lightning and under the strategy; nothing may differ by a bit."""
    expected = train("auto")
    assert_same(train(make_strategy(kind, train)), expected)
