"""Which plans ranks that share a model can run: one value, which the runtime and planners read."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from lightning_hetero.ir.plan import BlockPlan, Plan, Tier, UpdateLane

_Kind = TypeVar("_Kind", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRules:
    """What a rule for a block may say.

    Attributes:
        weights: Tiers of weights, those that a planner takes instead of others first.
        state: The same of optimizer state.
        update: The same of lanes of updates.
    """

    weights: tuple[Tier, ...]
    state: tuple[Tier, ...]
    update: tuple[UpdateLane, ...]

    def allows(self, placed: BlockPlan) -> bool:
        """Whether ranks can run a block under a rule."""
        return placed.weights in self.weights and placed.state in self.state and placed.update in self.update

    def nearest(self, plan: Plan) -> Plan:
        """The plan with what is allowed in the place of what is not, for planners."""
        rows = tuple(
            replace(
                b,
                weights=_or_first(b.weights, self.weights),
                state=_or_first(b.state, self.state),
                update=_or_first(b.update, self.update),
            )
            for b in plan.blocks
        )
        return replace(plan, blocks=rows)

    @property
    def text(self) -> str:
        """What is allowed, for errors."""
        return f"weights on {_either(self.weights)}, state on {_either(self.state)}, update on {_either(self.update)}"


def _or_first(value: _Kind, allowed: Collection[_Kind]) -> _Kind:
    return value if value in allowed else next(iter(allowed))


def _either(values: Iterable[StrEnum]) -> str:
    return " or ".join(repr(str(value)) for value in values)


def nearest(plan: Plan, ranks: int) -> Plan:
    """The plan with what several ranks can run in the place of what they cannot, for planners."""
    return plan if ranks == 1 else RANKS.nearest(plan)


RANKS = RankRules(weights=(Tier.HOST, Tier.DEVICE, Tier.DISK), state=(Tier.HOST, Tier.DISK), update=(UpdateLane.CPU,))
"""What several ranks run."""
