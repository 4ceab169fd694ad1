"""``kill -9`` of adapters on quantized weights, whose scales are not in the store."""

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
from support.children import Report, around, assert_nothing_lost, in_child, kill_all, report_of

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft, whose adapters are trained here, is missing")
pytest.importorskip("bitsandbytes", reason="bitsandbytes, on whose quantized layers adapters train here, is missing")

STEPS = 5


@dataclass(frozen=True)
class Case:
    """Where a run dies.

    Attributes:
        kind: How the base is quantized.
        point: ``backward``, as a backward ends; ``record``, before the record of a step is written.
            Both of step 3.
        resumes: Steps that the resume finds.
        plan: The plan; ``device``: on a device of its own, with the base on disk.
        second: The plan of the resume.
    """

    kind: str
    point: str
    resumes: tuple[int, ...]
    plan: str = "disk"
    second: str = "disk"

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind}-{self.plan}-{self.second}-{self.point}"


CASES = [
    Case("nf4 double", "record", (2,)),
    Case("nf4 double", "backward", (1, 2), plan="host"),
    Case("nf4 late", "record", (2,), second="host"),
    Case("int8", "record", (2,)),
    Case("int8 late", "backward", (1, 2), plan="host"),
    Case("nf4", "record", (2,), plan="device", second="device"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(__file__, tmp_path_factory)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kill_loses_no_committed_step(report: Report, case: Case) -> None:
    assert_nothing_lost(report[case.name], case.resumes)


def main(root: Path) -> None:
    """Every case; an assertion that fails ends the process."""
    import support.quantized  # noqa: F401  once for all children

    import lightning_hetero.strategies  # noqa: F401

    for kind in sorted({case.kind for case in CASES}):
        in_child(partial(train_plain, root, kind))
    kill_all(root, CASES, die_at, resume)


# ---- what children do ----------------------------------------------------------------------------


def train(root: Path, strategy: Any, kind: str, begins: Callable[[int], object] = id, *, store: Path | None = None) -> Any:
    import lightning.pytorch as pl
    import torch
    from support import llama
    from support.models import outcome, quiet_trainer
    from support.quantized import Module, build

    class Begins(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            begins(trainer.global_step)

    torch.manual_seed(11)
    module = Module(lambda: build(kind))
    trainer = quiet_trainer(strategy=strategy, max_steps=STEPS, default_root_dir=root, callbacks=[Begins()])
    trainer.fit(module, llama.batches(), ckpt_path=None if store is None else str(store))
    return outcome(trainer, module)


def train_plain(root: Path, kind: str) -> None:
    import torch

    torch.save(train(root, "auto", kind), root / f"{kind}.pt")


def strategy_of(root: Path, plan: str) -> Any:
    from lightning_hetero import EmulatedDevice
    from lightning_hetero.strategies import HeteroOffloadStrategy

    device = EmulatedDevice(memory="8MiB", seed=3) if plan == "device" else None
    return HeteroOffloadStrategy("disk" if device else plan, disk_path=root / "store", verify_digests=True, device=device)


def die_at(root: Path, case: Case) -> None:
    """Trains until the point, and kills itself."""
    from lightning_hetero.runtime.executor import Executor
    from lightning_hetero.runtime.kept_steps import KeptSteps

    at = [0]

    def die(point: str) -> None:
        if point == case.point and at[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    around(Executor, "backward_ends", after=lambda *_: die("backward"))
    around(KeptSteps, "keep", before=lambda *_: die("record"))
    train(root, strategy_of(root, case.plan), case.kind, partial(at.__setitem__, 0))


def resume(root: Path, file: Path, case: Case) -> None:
    """Goes on from the store, and compares with a run under plain Lightning that nobody killed."""
    import torch
    from support.models import difference

    begun: list[int] = []
    got = train(root, strategy_of(root, case.second), case.kind, begun.append, store=root / "store")
    expected = torch.load(root / f"{case.kind}.pt", weights_only=False)
    expected.losses = expected.losses[begun[0] :]
    file.write_text(json.dumps({"resumed_at": begun[0], "difference": difference(got, expected)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
