"""``kill -9`` while a run begins where an earlier one has kept steps: the same command can be given
again, and nothing is lost.

A run begins anew and puts the earlier store aside, or goes on from a snapshot in an empty
``disk_path``. It dies exactly where it is told to. Then the same command runs to the end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.children import Report, around, in_child, report_of

STEPS, KEPT, MORE = 6, 2, 4


@dataclass(frozen=True)
class Case:
    """Where a run dies.

    Attributes:
        begins: ``anew``, with ``new_run``; or ``snapshot``, from another store.
        point: ``renaming``, before the earlier store is renamed; ``renamed``, after that;
            ``linking``, with half of a snapshot's files linked; ``linked``, when the store is
            there; ``opened``, with the new manifest; ``laid out``, when its first record is there;
            ``training``, after more steps.
        plan: The plan.
        every: One of so many steps is kept.
    """

    begins: str
    point: str
    plan: str = "disk"
    every: int = 1

    @property
    def name(self) -> str:
        """For people."""
        return "-".join((self.begins, self.point, self.plan, *[f"every{self.every}"] * (self.every > 1)))


CASES = [
    *(Case("anew", point) for point in ("renaming", "renamed", "opened", "laid out")),
    *(Case("snapshot", point) for point in ("linking", "linked", "opened", "laid out", "training")),
    Case("snapshot", "training", plan="host"),
    Case("snapshot", "training", every=2),
    Case("snapshot", "laid out", every=2),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(__file__, tmp_path_factory)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_command_continues_after_a_kill(report: Report, case: Case) -> None:
    found = report[case.name]
    assert found["killed"], "the point was never reached"
    at = {"anew": 0, "snapshot": MORE if case.point == "training" else KEPT}[case.begins]
    assert found["began_at"] == at
    assert not found["difference"]
    assert found["earlier"] == 1, "what the earlier run kept is there, as it was"
    assert not found["left"]


def main(root: Path) -> None:
    """Every case; an assertion that fails ends the process."""
    import support.resuming  # noqa: F401  once for all children
    import torch

    import lightning_hetero.strategies  # noqa: F401

    in_child(lambda: torch.save(train(root, "auto"), root / "plain.pt"))
    in_child(lambda: train(root, strategy_of(root / "earlier", Case("", "")), stop=KEPT))
    kept, report, file = contents(root / "earlier"), {}, root / "case.json"
    for case in CASES:
        folder = root / "case"
        shutil.copytree(root / "earlier", folder / ("store" if case.begins == "anew" else "snapshot"))
        killed = in_child(partial(die_at, folder, case))
        in_child(partial(finish, root, folder, file, case))
        names = sorted(path.name for path in folder.iterdir())
        earlier = sum(contents(folder / name) == kept for name in names)
        left = [name for name in names if name.startswith(".")]
        report[case.name] = {"killed": killed, "earlier": earlier, "left": left, **json.loads(file.read_text())}
        shutil.rmtree(folder)
    print(json.dumps(report))


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_bytes().hex() for path in folder.iterdir() if path.is_file()}


# ---- what children do ----------------------------------------------------------------------------


def strategy_of(store: Path, case: Case) -> Any:
    from lightning_hetero.strategies import HeteroOffloadStrategy

    return HeteroOffloadStrategy(
        case.plan or "disk", disk_path=store, new_run=case.begins == "anew", keep_every=case.every, verify_digests=True
    )


def train(root: Path, strategy: Any, **options: Any) -> Any:
    from support import resuming
    from support.models import Recipe, Shape

    return resuming.train(root, strategy, Recipe(steps=STEPS, shape=Shape(layers=2, dropout=0.1)), **options)


def command(folder: Path, case: Case, **options: Any) -> Any:
    """The command that is given again and again."""
    if case.begins == "snapshot":
        options["store"] = folder / "snapshot"
    return train(folder, strategy_of(folder / "store", case), **options)


def die_at(folder: Path, case: Case) -> None:
    """Begins, and kills itself at the point."""
    from lightning_hetero.runtime.session import Session
    from lightning_hetero.store.format import directory, earlier_runs, snapshots

    linked = [0]

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_in_the_middle(*_: Any) -> None:
        linked[0] += 1
        if linked[0] == 3:
            die()

    def die_when_recorded(session: Any, *_: Any) -> None:
        session.store.files.wait_for_commit()
        die()

    if case.point == "renaming":
        around(earlier_runs.os, "rename", before=die)
    elif case.point == "renamed":
        around(earlier_runs, "_put_aside", after=die)
    elif case.point == "linking":
        around(snapshots, "link", after=die_in_the_middle)
    elif case.point == "linked":
        around(earlier_runs, "snapshot", after=die)
    elif case.point == "opened":
        around(directory, "write_manifest", after=die)
    elif case.point == "laid out":
        around(Session, "start", after=die_when_recorded)
    command(folder, case, stop=MORE)
    die()


def finish(root: Path, folder: Path, file: Path, case: Case) -> None:
    """The same command to the end, compared with a run under plain Lightning that nobody killed."""
    import torch
    from support.models import difference
    from support.resuming import after

    expected = torch.load(root / "plain.pt", weights_only=False)
    got = command(folder, case)
    began_at = STEPS - len(got.losses)
    file.write_text(json.dumps({"began_at": began_at, "difference": difference(got, after(expected, len(got.losses)))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
