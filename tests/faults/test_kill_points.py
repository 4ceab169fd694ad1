"""``kill -9`` at points that matter to updates before their verdict, or to pins: a resume finds the
last kept step, bit for bit.

Kills at random moments are in test_kill.py; here the process dies exactly where it is told to, with
everything that was written so far on the disk, so that nothing but the record decides.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.children import Report, around, in_child, report_of

STEPS = 6
CLIPS, KEEPS = 1e-2, 1e6
COMMITTED = "committed"  # the point after which the step counts


@dataclass(frozen=True)
class Case:
    """Where a run dies.

    Attributes:
        point: What of the step that dies is done: ``tried``, a speculative update before its
            verdict; ``discarded``, taken back; ``redone``, updated again; ``kept``, all but the
            commit; ``committed``; ``unpinned``, all but the pin.
        resumes: Steps that the resume finds.
        plan: The plan.
        at: Steps before the one that dies.
        every: One of so many steps is kept.
        twice: The resume dies as well, while it rolls the store back, and another one follows.
        beside: On a device with memory of its own.
        disks: Directories to which the blocks are dealt.
    """

    point: str
    resumes: int
    plan: str = "disk"
    at: int = 2
    every: int = 1
    twice: bool = False
    beside: bool = False
    disks: int = 1

    @property
    def clips(self) -> bool:
        """Whether the step that dies clips."""
        return self.point in ("discarded", "redone")

    @property
    def name(self) -> str:
        """For people."""
        every = f"every{self.every}" if self.every > 1 else ""
        return "-".join(
            filter(
                None,
                (
                    self.plan,
                    self.point,
                    every,
                    "twice" * self.twice,
                    "device" * self.beside,
                    f"disks{self.disks}" * (self.disks > 1),
                ),
            )
        )


CASES = [
    Case("tried", 2),
    Case("kept", 2),
    Case("discarded", 2),
    Case("redone", 2, disks=2),
    Case(COMMITTED, 3),
    Case("kept", 2, plan="mixed", disks=3),
    Case(COMMITTED, 3, at=4, every=3),  # two later steps have written over the slots of the third
    Case(COMMITTED, 3, at=4, every=3, plan="mixed", twice=True, disks=2),
    Case("unpinned", 4, at=3, every=2, plan="mixed", disks=2),
    Case("tried", 2, plan="mixed", beside=True),
    Case("redone", 2, plan="mixed", beside=True),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(__file__, tmp_path_factory)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kill_at_this_point_loses_no_committed_step(report: Report, case: Case) -> None:
    found = report[case.name]
    assert found["killed"] == 1 + case.twice, "the point was never reached"
    assert found["tried"] > 0
    assert found["resumed_at"] == case.resumes
    assert not found["difference"]


def main(root: Path) -> None:
    """Every case; an assertion that fails ends the process."""
    import support.models  # noqa: F401  once for all children
    import torch

    import lightning_hetero.strategies  # noqa: F401

    for clips in (False, True):
        in_child(lambda clips=clips: torch.save(train(root, "auto", clips=clips), root / f"{clips}.pt"))
    report, file = {}, root / "case.json"
    for case in CASES:
        file.write_text('{"tried": 0}')
        killed = in_child(lambda case=case: die_at(root, file, case))
        tried = json.loads(file.read_text())["tried"]
        if case.twice:
            killed += in_child(lambda case=case: die_while_rolling_back(root, case))
        in_child(lambda case=case: resume(root, file, case))
        report[case.name] = {"killed": killed, "tried": tried, **json.loads(file.read_text())}
        shutil.rmtree(root / "store")
    print(json.dumps(report))


# ---- what children do ----------------------------------------------------------------------------


def strategy_of(root: Path, case: Case) -> Any:
    from support.recipes import MIXED

    from lightning_hetero import EmulatedDevice
    from lightning_hetero.runtime.speculation_choice import Worth
    from lightning_hetero.strategies import HeteroOffloadStrategy

    Worth.fixed = 1.0  # every step tries
    plan = MIXED if case.plan == "mixed" else case.plan
    device = EmulatedDevice(memory="4MiB", seed=4) if case.beside else None
    return HeteroOffloadStrategy(
        plan=plan, disk_path=[root / "store", *(root / f"disk{i}" for i in range(1, case.disks))], verify_digests=True,
        keep_every=case.every, device=device,
    )  # fmt: skip


def train(
    root: Path, strategy: Any, resume_from: Path | None = None, begins: Callable[[int], None] = id, *, clips: bool = False
) -> Any:
    """Trains to the end. The third step clips, or does not."""
    import lightning.pytorch as pl
    import torch
    from support.models import LitModel, Recipe, Shape, data, outcome, quiet_trainer

    class Clips(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            trainer.gradient_clip_val = CLIPS if clips and trainer.global_step == 2 else KEEPS
            begins(trainer.global_step)

    torch.manual_seed(7)
    module = LitModel(Recipe(shape=Shape(layers=3)))
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=STEPS, gradient_clip_val=KEEPS, limit_val_batches=0, default_root_dir=root, callbacks=[Clips()]
    )
    trainer.fit(module, data(), ckpt_path=None if resume_from is None else str(resume_from))
    return outcome(trainer, module)


def die_at(root: Path, file: Path, case: Case) -> None:
    """Trains until the point, waits for everything that has been submitted, and kills itself."""
    from lightning_hetero._native import DONE
    from lightning_hetero.runtime.executor import Executor
    from lightning_hetero.runtime.kept_steps import KeptSteps
    from lightning_hetero.runtime.speculation import Speculation, Trial

    strategy = strategy_of(root, case)
    step, tried = [0], list[Any]()

    def die(where: str) -> None:
        if (where, step[0]) != (case.point, case.at):
            return
        executor = strategy.session.executor
        executor.lanes.drain()
        tickets = [ticket for some in tried for ticket in some]
        for ticket in [*tickets, *filter(None, [executor.store.files.last_commit])]:
            ticket.wait(DONE)
        file.write_text(json.dumps({"tried": len(tickets)}))
        os.kill(os.getpid(), signal.SIGKILL)

    def dies(where: str) -> Callable[..., None]:
        return lambda *_: die(where)

    def submitted(_: Speculation, trial: Trial, *__: Any) -> None:
        if step[0] == case.at:
            tried.append(trial.tickets)  # which lanes fill

    around(Speculation, "submitted", after=submitted)
    around(Speculation, "clip", before=dies("tried"))
    around(Speculation, "discard", after=dies("discarded"))
    around(Executor, "commit", before=dies("redone" if case.clips else "kept"), after=dies(COMMITTED))
    around(KeptSteps, "_pin", before=dies("unpinned"))
    train(root, strategy, None, lambda now: step.__setitem__(0, now), clips=case.clips)


def die_while_rolling_back(root: Path, case: Case) -> None:
    """Resumes, and kills itself when the slots are those of the pin, and the record is not."""
    from lightning_hetero.store.format import pins

    pins.sync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    train(root, strategy_of(root, case), root / "store")


def resume(root: Path, file: Path, case: Case) -> None:
    """Goes on from the store, and compares with a run under plain Lightning that nobody killed."""
    import torch
    from support.models import difference

    steps: list[int] = []
    got = train(root, strategy_of(root, case), root / "store", steps.append, clips=case.clips)
    expected = torch.load(root / f"{case.clips}.pt", weights_only=False)
    expected.losses = expected.losses[steps[0] :]
    file.write_text(json.dumps({"resumed_at": steps[0], "difference": difference(got, expected)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
