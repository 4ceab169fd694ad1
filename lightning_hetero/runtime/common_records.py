"""What one of several ranks knows of the others' commit records, while it trains."""

from __future__ import annotations

from collections.abc import Callable

from lightning_hetero._native import Ticket
from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.schedule import NO_BLOCK
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.store.common_steps import Membership


class CommonRecords:
    """The records that count only together with those of the other ranks.

    See [Note: Common steps] in ``store/common_steps.py``. The op AGREE of a step asks while the
    record still has time. What comes to a write later finds the answer. Where there was no AGREE,
    it asks. Both follow from what was submitted before, so all ranks do the same.

    Args:
        collectives: Those of the ranks.
        recorded: The number of this rank's last record.
    """

    def __init__(self, collectives: Collectives, recorded: int) -> None:
        self._collectives, self._membership = collectives, Membership(recorded=recorded)

    def settle(self, number: int) -> None:
        """Returns once all ranks have the record with this number, which is on this one's disk.

        Raises:
            HeteroError: A rank has recorded something else, has died, or hangs.
        """
        if self._holds(number):
            return
        self._collectives.settle()
        if not self._holds(number):
            self._exchange(number)

    def any(self, found: bool) -> bool:
        """Whether any rank has found something. All of them call it."""
        (some,) = self._collectives.meet("CHANGE", NO_BLOCK, found)
        return some

    def agree(self, meeting: Callable[[], object], number: int, record: Ticket | None) -> None:
        """AGREE, in the thread of its lane.

        Args:
            meeting: Makes sure that all ranks have come to this op.
            number: The number of this rank's last record.
            record: That record, if it may not be on the disk.
        """
        meeting()
        if record is not None:
            record.wait()
        if not self._holds(number):
            self._exchange(number)

    def _holds(self, number: int) -> bool:
        return self._membership.held_by_all >= number

    def _exchange(self, number: int) -> None:
        told = [int(row[0]) for row in self._collectives.agree([number])]
        found = Membership(recorded=number).after_exchange(told)
        if not found.may_write:
            raise HeteroError(f"the ranks have recorded other commits: {told}. Start all of them again from the store.")
        self._membership = found
