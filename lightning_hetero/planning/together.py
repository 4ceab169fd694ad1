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
    def ranks(self) -> int:
        """How many there are."""
        return 1 if self.decisions is None else self.decisions.ranks

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
        if self.decisions is None:
            return make()
        made, error = "", None
        if self.decisions.is_first:
            try:
                made = make()
            except Exception as raised:
                error = raised
        told, refusal = self.decisions.texts(made)[0], self.decisions.texts("" if error is None else _named(error))[0]
        if error is not None:
            raise error
        if refusal:
            raise _raised(refusal)
        return told


def _named(error: Exception) -> str:
    short = error.shortfall_bytes if isinstance(error, PlanError) else getattr(error, "needed_bytes", 0)
    kind = next((name for name, known in _TOLD.items() if isinstance(error, known)), "")
    return "\n".join([kind, getattr(error, "tier", ""), str(short), str(error) or repr(error)])


def _raised(text: str) -> HeteroError:
    kind, tier, number, why = text.split("\n", 3)
    if kind == "plan":
        return PlanError(why, tier=tier, shortfall_bytes=int(number))
    if kind == "memory":
        return OutOfMemoryBudgetError(why, int(number), tier)
    return HeteroError(f"the first rank has failed, and with it all that wait for what it plans: {why}")


ALONE = Together()
"""A process that has all of its model."""

_TOLD = {"plan": PlanError, "memory": OutOfMemoryBudgetError}
