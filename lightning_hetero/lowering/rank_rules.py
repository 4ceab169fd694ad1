"""Which plans can run where ranks share a model: one rule, which the runtime and planners read."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier, UpdateLane

_Kind = TypeVar("_Kind", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRules:
    """What the rule for a block may say, beside what every plan has to (``BlockPlan``).

    Attributes:
        weights: Tiers of weights, those that a planner takes instead of others first.
        state: The same of optimizer state.
        update: The same of lanes of updates.
    """

    weights: tuple[Tier, ...]
    state: tuple[Tier, ...]
    update: tuple[UpdateLane, ...]

    def allows(self, placed: BlockPlan, *, trained: bool) -> bool:
        """Whether a block can run under a rule; without training it has no state and no update."""
        return placed.weights in self.weights and (not trained or (placed.state in self.state and placed.update in self.update))

    def allows_all(self, plan: Plan, model: ModelProfile) -> bool:
        """Whether a model can run under a resolved plan."""
        rows = zip(plan.blocks, model.blocks, strict=True)
        return all(self.allows(placed, trained=block.num_trainable_params > 0) for placed, block in rows)

    def nearest(self, plan: Plan) -> Plan:
        """The plan with what is allowed in the place of what is not, for planners."""
        return replace(plan, blocks=tuple(map(self._nearest, plan.blocks)))

    def _nearest(self, placed: BlockPlan) -> BlockPlan:
        return replace(
            placed,
            weights=_or_first(placed.weights, self.weights),
            state=_or_first(placed.state, self.state),
            update=_or_first(placed.update, self.update),
        )

    @property
    def text(self) -> str:
        """What is allowed, for errors."""
        return f"weights on {_either(self.weights)}, state on {_either(self.state)}, update on {_either(self.update)}"


def _or_first(value: _Kind, allowed: Collection[_Kind]) -> _Kind:
    return value if value in allowed else next(iter(allowed))


def _either(values: Iterable[StrEnum]) -> str:
    return " or ".join(repr(str(value)) for value in values)


EVERYTHING = RankRules(weights=tuple(Tier), state=tuple(Tier), update=tuple(UpdateLane))
"""What a process alone runs."""


def rules(ranks: int, *, gathers_in_place: bool, shared_memory: bool) -> RankRules:
    """What each of several ranks can run; one rank runs everything.

    Args:
        ranks: Ranks that share a model.
        gathers_in_place: They have whole weights in the same memory, where their slices are.
        shared_memory: Their devices are the host's own CPU, which has neither a state of its own
            nor an update.
    """
    if ranks == 1:
        return EVERYTHING
    weights = (Tier.HOST, Tier.DEVICE, *([Tier.DISK] if gathers_in_place else ()))
    if shared_memory:
        return RankRules(weights=weights, state=(Tier.HOST, Tier.DISK), update=(UpdateLane.CPU,))
    return RankRules(weights=weights, state=(Tier.HOST, Tier.DISK, Tier.DEVICE), update=(UpdateLane.CPU, UpdateLane.DEVICE))


def rules_of(hardware: HardwareProfile) -> RankRules:
    """What can run on one rank's share of a machine."""
    return rules(hardware.ranks, gathers_in_place=hardware.gathers_in_place, shared_memory=hardware.shared_memory)
