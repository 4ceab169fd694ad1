"""Rule *collectives*: ranks that share a model agree, and enter collectives in one order."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.errors import ScheduleError
from lightning_hetero.ir.schedule import COLLECTIVES, NO_BLOCK, Anchor, Op, OpKind, Schedule, Updates
from lightning_hetero.lowering.check.history import History


def agree(h: History, op: Op, _: Anchor) -> None:
    """The ranks agree that all of them have the record of the step before, then on the verdict."""
    if op.num_bytes or op.block != NO_BLOCK:
        h.fail("collectives", op, op.block, f"moves {op.num_bytes} bytes of a block; it has neither")
    if h.agreed is None and (OpKind.COMMIT, NO_BLOCK) not in op.carried:
        h.fail("collectives", op, op.block, "is the first of the step, and does not wait for the COMMIT of the step before")


def verdict(h: History, op: Op, _: Anchor) -> None:
    """What waits for the verdict waits until it is the same on all ranks."""
    updates = h.schedule.signature.updates
    if not h.after_verdict(op) or updates in (Updates.NONE, Updates.IN_BACKWARD):
        return
    if h.agreed_verdict is None or not h.is_behind(op, h.agreed_verdict):
        h.fail("collectives", op, op.block, "does not wait until the ranks agree on the verdict")


def same_order(schedules: Sequence[Schedule]) -> None:
    """All ranks enter the same collectives in the same order, so none waits for another for ever.

    That is one order for all lanes of collectives. One thread runs them: two groups of processes
    that ranks entered in different orders would wait for each other.

    Args:
        schedules: The schedule of each rank for one step.

    Raises:
        ScheduleError: Names the first collective that differs.
    """
    rows = [[(op.what, op.block, op.num_bytes, op.lane) for op in schedule.ops if _meets(op)] for schedule in schedules]
    for rank, row in enumerate(rows[1:], start=1):
        for place in range(max(len(row), len(rows[0]))):
            ours, theirs = (_named(r, place) for r in (rows[0], row))
            if ours != theirs:
                raise ScheduleError(
                    f"rule 'collectives': collective {place} of the step is {ours} on rank 0 and {theirs} on rank {rank}. Ranks "
                    f"enter collectives in one order, or wait for each other for ever."
                )


def _meets(op: Op) -> bool:
    return op.lane in COLLECTIVES and op.kind is not OpKind.RELEASE


def _named(row: Sequence[tuple[str, int, int, str]], place: int) -> str:
    if place >= len(row):
        return "none"
    what, block, num_bytes, lane = row[place]
    return f"{what} on lane {lane}" if block == NO_BLOCK else f"{what} of block {block} ({num_bytes} bytes) on lane {lane}"
