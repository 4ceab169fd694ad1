"""``kill -9`` while frozen weights, which have one slot on disk or none, move to two because
something has changed them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.children import Report, all_on_disk, around, assert_nothing_lost, in_child, kill_all, report_of


@dataclass(frozen=True)
class Case:
    """Where a run dies.

    Attributes:
        point: ``opened``, the new files are there, and empty; ``written``, all but the record that
            names them; ``closed``, the old files are gone.
        resumes: Steps that the resume finds.
        plan: The plan.
        change: What changes them; the name of a function in ``support.frozen``.
        every: One of so many steps is kept. Each epoch has three.
        files: The weights are read in place from a file, so there is no slot.
    """

    point: str
    resumes: tuple[int, ...]
    plan: str = "disk"
    change: str = "by_hand"
    every: int = 1
    files: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return "-".join((self.plan, self.change, self.point, f"every{self.every}", "file" * self.files))


CASES = [
    Case("opened", (3,)),
    Case("written", (3,)),
    Case("closed", (4,)),
    Case("written", (3,), plan="host"),
    Case("written", (3,), change="unfreezes"),
    Case("written", (3,), every=4),
    Case("written", (3,), files=True),
    Case("closed", (4,), plan="host", files=True),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(__file__, tmp_path_factory)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kill_at_this_point_loses_no_committed_step(report: Report, case: Case) -> None:
    assert_nothing_lost(report[case.name], case.resumes)


def main(root: Path) -> None:
    """Every case; an assertion that fails ends the process."""
    import support.frozen  # noqa: F401  once for all children

    import lightning_hetero.convert.safetensors
    import lightning_hetero.strategies  # noqa: F401

    in_child(partial(write_weights, root))
    for change, files in sorted({(case.change, case.files) for case in CASES}):
        in_child(partial(train_plain, root, change, files))
    kill_all(root, CASES, die_at, resume)


# ---- what children do ----------------------------------------------------------------------------


def train(root: Path, strategy: Any, change: str, begins: Callable[[int], object] = id, **options: Any) -> Any:
    """Trains six steps. After the fourth one frozen weights change."""
    import lightning.pytorch as pl
    from support import frozen

    class Begins(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            begins(trainer.global_step)

    return frozen.fit(root, strategy, frozen.RECIPE, Begins(), change=getattr(frozen, change), at=(4,), **options)


def write_weights(root: Path) -> None:
    import torch
    from support.frozen import RECIPE, Changed

    from lightning_hetero.convert.safetensors import TensorToWrite, write_directory

    content = Changed(RECIPE).model.state_dict()
    torch.save(content, root / "content.pt")
    rows = [TensorToWrite(name, value.dtype, value.shape, lambda value=value: value) for name, value in content.items()]
    write_directory(root / "weights", rows, max_shard_bytes=20_000)


def train_plain(root: Path, change: str, files: bool) -> None:
    import torch

    content = torch.load(root / "content.pt") if files else None
    torch.save(train(root, "auto", change, content=content), root / f"{change}-{files}.pt")


def strategy_of(root: Path, case: Case) -> Any:
    from lightning_hetero.strategies import HeteroOffloadStrategy

    weights = {"model": root / "weights"} if case.files else None
    return HeteroOffloadStrategy(
        case.plan, disk_path=root / "store", verify_digests=True, keep_every=case.every, weights=weights
    )  # fmt: skip


def die_at(root: Path, case: Case) -> None:
    """Trains until the point, and kills itself."""
    from lightning_hetero.runtime import session
    from lightning_hetero.store.live.block_files import BlockFiles

    strategy = strategy_of(root, case)
    moved: list[object] = []

    def die(point: str) -> None:
        if point != case.point or (not moved and point != "opened"):
            return
        executor = strategy.session.executor
        if point == "written":
            all_on_disk(executor)
        os.kill(os.getpid(), signal.SIGKILL)

    def has_moved(*_: Any) -> None:
        die("opened")
        moved.append(None)

    around(BlockFiles, "replace", after=has_moved)
    around(session, "reopen", after=has_moved)
    around(BlockFiles, "commit", before=lambda *_: die("written"))
    around(BlockFiles, "close_part", after=lambda *_: die("closed"))
    train(root, strategy, case.change, device="meta" if case.files else "cpu")


def resume(root: Path, file: Path, case: Case) -> None:
    """Goes on from the store, and compares with a run under plain Lightning that nobody killed."""
    import torch
    from support.models import difference

    begun: list[int] = []
    got = train(
        root, strategy_of(root, case), case.change, begun.append, store=root / "store", device="meta" if case.files else "cpu"
    )
    expected = torch.load(root / f"{case.change}-{case.files}.pt", weights_only=False)
    expected.losses = expected.losses[begun[0] :]
    file.write_text(json.dumps({"resumed_at": begun[0], "difference": difference(got, expected)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
