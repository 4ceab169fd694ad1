"""Planning of several ranks: what each has measured counts, one of them plans, and all agree.

A process that has all of a model is its only rank, and asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_hetero.errors import HeteroError, OutOfMemoryBudgetError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.lanes.decisions import Decisions
from lightning_hetero.planning.merged import merged_machines, merged_models


@dataclass(frozen=True, slots=True)
class Together:
    """The ranks that plan together; ``decisions`` is ``None`` for a process alone."""

    decisions: Decisions | None = None

    @property
    def shards(self) -> int:
        """How many there are on each node."""
        return 1 if self.decisions is None else self.decisions.shards

    def numbers(self, *own: float) -> list[list[float]]:
        """The numbers of each rank."""
        return [list(own)] if self.decisions is None else self.decisions.numbers(*own)

    def all(self, flag: bool) -> bool:
        """Whether it holds on all ranks."""
        return all(bool(row[0]) for row in self.numbers(flag))

    def model(self, own: ModelProfile) -> ModelProfile:
        """The model's profile, from those of all ranks."""
        if self.decisions is None:
            return own
        return merged_models([ModelProfile.from_json(text) for text in self.decisions.texts(own.to_json())])

    def machine(self, own: HardwareProfile) -> HardwareProfile:
        """One rank's share of the machine, from those of all ranks."""
        if self.decisions is None:
            return own
        return merged_machines([HardwareProfile.from_json(text) for text in self.decisions.texts(own.to_json())])

    def measured(self, measure: Callable[[], HardwareProfile]) -> HardwareProfile:
        """The machine, as the first rank of each node measures it; errors as for :meth:`first`."""
        if self.decisions is None:
            return measure()
        texts = _made(self.decisions, lambda: measure().to_json(), makes=self.decisions.is_first_of_node)
        return merged_machines([HardwareProfile.from_json(text) for text in texts[:: self.decisions.shards]])

    def plan(self, make: Callable[[], Plan]) -> Plan:
        """The plan that the first rank makes; errors as for :meth:`first`."""
        return make() if self.decisions is None else Plan.from_json(self.first(lambda: make().to_json()))

    def first(self, make: Callable[[], str]) -> str:
        """The text that the first rank makes.

        Raises:
            PlanError: ``make`` raises it there.
            OutOfMemoryBudgetError: The same.
            HeteroError: It raises another error, which the first rank raises itself.
        """
        return make() if self.decisions is None else _made(self.decisions, make, makes=self.decisions.is_first)[0]


def _made(decisions: Decisions, make: Callable[[], str], *, makes: bool) -> list[str]:
    """The text of each rank that ``makes`` one; of the others an empty one."""
    made, error = "", None
    try:
        made = make() if makes else ""
    except Exception as raised:
        error = raised
    told, refusals = decisions.texts(made), decisions.texts("" if error is None else _named(error))
    if error is not None:
        raise error
    for rank, refusal in enumerate(refusals):
        if refusal:
            raise _raised(refusal, rank)
    return told


def _named(error: Exception) -> str:
    short = error.shortfall_bytes if isinstance(error, PlanError) else getattr(error, "needed_bytes", 0)
    kind = next((name for name, known in _TOLD.items() if isinstance(error, known)), "")
    return "\n".join([kind, getattr(error, "tier", ""), str(short), str(error) or repr(error)])


def _raised(text: str, rank: int) -> HeteroError:
    kind, tier, number, why = text.split("\n", 3)
    if kind == "plan":
        return PlanError(why, tier=tier, shortfall_bytes=int(number))
    if kind == "memory":
        return OutOfMemoryBudgetError(why, int(number), tier)
    return HeteroError(f"rank {rank} has failed, and with it all that wait for what it plans or measures: {why}")


ALONE = Together()
"""A process that has all of its model."""

_TOLD = {"plan": PlanError, "memory": OutOfMemoryBudgetError}
