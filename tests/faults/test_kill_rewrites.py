"""``kill -9`` where a batch writes the same blocks several times: between two writes, after them,
while the record is written.

Two optimizers share every block, and hooks change weights after both and at the end of an epoch.
The process dies with everything that was submitted so far on the disk, so that nothing but the
slots that were chosen decides; only a record that is being written is left to itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.children import Report, all_on_disk, around, assert_nothing_lost, in_child, kill_all, report_of

STEPS = 6


@dataclass(frozen=True)
class Case:
    """Where a run dies.

    Attributes:
        point: What of the batch that dies is on the disk: ``once``, the first optimizer's updates;
            ``twice``, the second one's too; ``changed``, what a hook has changed as well, all but
            the record; ``recording``, the record, maybe; ``unfrozen``, parameters have joined an
            optimizer in the middle of it, and one of their blocks got new files, or ``both``;
            ``epoch``, a hook has changed everything after the record; ``moved``, and then blocks
            have moved to where another plan wants them.
        joins: Number of the optimizer that parameters join. Before the first one steps nothing of
            the batch was written.
        plan: The plan.
        at: Batches before the one that dies.
        every: One of so many steps is kept.
        durability: How much a kept step survives.
    """

    point: str
    plan: str = "disk"
    at: int = 1
    every: int = 1
    durability: str = "process"
    joins: int | None = None

    @property
    def resumes(self) -> tuple[int, ...]:
        """Batches that the resume may find to be over."""
        if self.every > 1:
            from support.twofold import kept_before

            return (kept_before(self.at, self.every),)
        over = self.at + 1
        return {"recording": (self.at, over), "epoch": (over,)}.get(self.point, (self.at,))

    @property
    def name(self) -> str:
        """For people."""
        more = [f"every{self.every}"] * (self.every > 1) + [f"optimizer{self.joins}"] * (self.joins is not None)
        return "-".join((self.plan, self.point, *more, self.durability))


CASES = [
    Case("once"),
    Case("twice"),
    Case("changed"),
    Case("recording"),
    Case("epoch", at=2),
    Case("twice", plan="mixed", durability="power"),
    Case("epoch", plan="mixed", at=2),
    Case("moved", plan="host", at=3),
    Case("unfrozen", plan="mixed", at=3, joins=0),
    Case("unfrozen", plan="mixed", at=3, joins=1),
    Case("both", plan="mixed", at=3, joins=0),  # the second one's files have the number that those of the first one had
    Case("recording", plan="mixed", at=3, joins=1),
    Case("twice", plan="mixed", at=4, joins=0),  # parameters had joined in the step that was kept
    Case("twice", plan="mixed", at=5, every=2),  # the step before it is not kept
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(__file__, tmp_path_factory)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kill_at_this_point_loses_no_committed_step(report: Report, case: Case) -> None:
    assert_nothing_lost(report[case.name], case.resumes)


def main(root: Path) -> None:
    """Every case; an assertion that fails ends the process."""
    import support.twofold  # noqa: F401  once for all children
    import torch

    import lightning_hetero.strategies  # noqa: F401

    for joins in (None, 0, 1):
        in_child(lambda joins=joins: torch.save(train(root, "auto", joins=joins), root / f"{joins}.pt"))
    kill_all(root, CASES, die_at, resume)


# ---- what children do ----------------------------------------------------------------------------


def strategy_of(root: Path, case: Case) -> Any:
    from support.recipes import MIXED

    from lightning_hetero.strategies import HeteroOffloadStrategy

    plan = MIXED if case.plan == "mixed" else case.plan
    return HeteroOffloadStrategy(
        plan=plan, disk_path=root / "store", verify_digests=True, keep_every=case.every, durability=case.durability
    )


def train(root: Path, strategy: Any, *, joins: int | None, **options: Any) -> Any:
    """Trains to the end. A frozen block may join an optimizer."""
    from support.models import Recipe, Shape
    from support.twofold import train_twofold

    recipe = Recipe(shape=Shape(layers=3, frozen=() if joins is None else (1, 2)), steps=STEPS)
    if joins is not None:
        options |= {"unfreezes": BATCHES_BEFORE_UNFREEZING, "joins": joins}
    return train_twofold(root, strategy, recipe, **options)


BATCHES_BEFORE_UNFREEZING = 3


def die_at(root: Path, case: Case) -> None:
    """Trains until the point, and kills itself."""
    from support.twofold import Twofold

    from lightning_hetero._native import DONE
    from lightning_hetero.planners import BUILTIN_PLANS
    from lightning_hetero.runtime import session
    from lightning_hetero.runtime.executor import Executor
    from lightning_hetero.store.live.block_files import BlockFiles

    strategy = strategy_of(root, case)
    batch, handovers, reopened = [0], [0], [0]

    def die(where: str) -> None:
        if (where, batch[0]) != (case.point, case.at):
            return
        executor = strategy.session.executor
        if where != "recording":
            all_on_disk(executor)
            executor.lanes.drain()
            for ticket in filter(None, [executor.store.files.last_commit]):
                ticket.wait(DONE)
        os.kill(os.getpid(), signal.SIGKILL)

    def dies(where: str) -> Callable[..., None]:
        return lambda *_: die(where)

    def handed_over(*_: Any) -> None:
        handovers[0] += 1
        die("once" if handovers[0] % 2 else "twice")

    def has_reopened(*_: Any) -> None:
        reopened[0] += 1
        die("unfrozen" if reopened[0] == 1 else "both")

    around(Executor, "handover", after=handed_over)
    around(BlockFiles, "commit", before=dies("changed"), after=dies("recording"))
    around(session, "reopen", after=has_reopened)
    around(Twofold, "on_train_epoch_end", after=dies("epoch"))

    def begins(now: int) -> None:
        batch[0] = now
        if (case.point, case.at) == ("moved", now):
            strategy.session.replan(BUILTIN_PLANS["disk"](strategy.session.executor.model))
            die("moved")

    train(root, strategy, joins=case.joins, begins=begins)


def resume(root: Path, file: Path, case: Case) -> None:
    """Goes on from the store, and compares with a run under plain Lightning that nobody killed."""
    import torch
    from support.models import difference

    begun: list[int] = []
    got = train(root, strategy_of(root, case), joins=case.joins, store=root / "store", begins=begun.append)
    expected = torch.load(root / f"{case.joins}.pt", weights_only=False)
    expected.losses = expected.losses[2 * begun[0] :]
    file.write_text(json.dumps({"resumed_at": begun[0], "difference": difference(got, expected)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
