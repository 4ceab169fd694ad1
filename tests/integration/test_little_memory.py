"""Without ``host_memory`` a run in a small control group trains or is refused by name; it does not
fill the group.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.scripts import result_of, run_script
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.store.capacity import available_memory_bytes, peak_resident_bytes, resident_bytes
from lightning_hetero.strategies import HeteroOffloadStrategy
from lightning_hetero.units import MIB

WIDTH = 256
BATCH, LARGE_BATCH = 4, 32  # activations of the large one need more than what is free beside the budget
STEPS = 6  # the plan is due before the fifth
ROOMY, TIGHT = 144, 48  # MiB: weights, state and gradients of all blocks are 100


class Layers(pl.LightningModule):
    """Blocks of 3 MiB of weights each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        block = partial(nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.layers = nn.ModuleList(block() for _ in range(count))
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return self.head(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(module: Layers, strategy: Any, folder: str, batch: int = BATCH) -> int:
    """Trains; returns the steps."""
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.randn(batch * STEPS, 32, WIDTH), batch_size=batch))
    return trainer.global_step


def pretend(limit_bytes: int, folder: Path) -> int:
    """Files of a control group that has this much for what the process takes from now on; returns
    what it holds now.
    """
    before = resident_bytes()
    proc, groups = folder / "proc", folder / "groups"
    for place in (proc / "self", groups):
        place.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/\n")
    (proc / "meminfo").symlink_to("/proc/meminfo")
    (groups / "memory.max").write_text(str(limit_bytes))

    def available() -> int:
        (groups / "memory.current").write_text(str(max(0, resident_bytes() - before)))
        return available_memory_bytes(proc=proc, cgroups=groups)

    from lightning_hetero.profiling import hardware  # noqa: F401 - it asks too, and is imported late

    for module in list(sys.modules.values()):
        if getattr(module, "available_memory_bytes", None) is available_memory_bytes and module.__name__ != __name__:
            module.available_memory_bytes = available  # type: ignore[attr-defined]
    return before


def main(plan: str, limit_mib: str, group: str, batch: str, folder: str) -> None:
    """Prints what came of a fit, and the most that the process held beyond what it held before, as
    one line of JSON.

    Args:
        plan: The strategy's.
        limit_mib: Of the control group.
        group: Its directory; empty: only files say that there is one.
        batch: Samples of a batch.
        folder: Where files go.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    torch.manual_seed(0)
    if group:
        module = Layers(8)
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
        before = resident_bytes()
    else:
        fit(Layers(1), "auto", folder)  # pages of libraries count as resident, and a group is not charged for them
        module = Layers(8)
        before = pretend(int(limit_mib) * MIB, Path(folder))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: Linux, Documentation/filesystems/proc.rst
    steps, refused = 0, ""
    try:
        steps = fit(module, HeteroOffloadStrategy(plan, disk_path=Path(folder, "store")), folder, int(batch))
    except OutOfMemoryBudgetError as error:
        refused = str(error)
    print(json.dumps({"steps": steps, "refused": refused, "peak_mib": (peak_resident_bytes() - before) / MIB}))


def outcome(plan: str, limit_mib: int, folder: Path, group: str = "", batch: int = BATCH) -> dict[str, Any]:
    """What :func:`main` prints, in a process with a machine's profile of its own to measure."""
    env = {**os.environ, "LIGHTNING_HETERO_POISON": "", "XDG_CACHE_HOME": str(folder / "cache")}
    env.pop("LIGHTNING_HETERO_HARDWARE", None)
    done = run_script(Path(__file__), plan, str(limit_mib), group, str(batch), folder, cwd=folder, env=env)
    assert done.returncode == 0, f"{done.returncode} (-9: killed, for memory):\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    found: dict[str, Any] = result_of(done.stdout)
    return found


@pytest.mark.parametrize("plan", ["auto", "disk", "host"])
def test_a_run_keeps_to_a_small_control_group(plan: str, tmp_path: Path) -> None:
    found = outcome(plan, ROOMY, tmp_path)
    assert found["peak_mib"] < ROOMY, found
    assert found["steps"] == STEPS or (plan == "host" and "reserve" in found["refused"]), found


def test_a_batch_that_needs_more_than_the_reserve_is_refused_before_memory_ends(tmp_path: Path) -> None:
    found = outcome("disk", ROOMY, tmp_path, batch=LARGE_BATCH)
    assert found["steps"] == 0
    assert "too little is free for the next block" in found["refused"]
    assert "Set a smaller host_memory" in found["refused"]
    assert found["peak_mib"] < ROOMY


def test_a_group_that_holds_no_batch_is_refused_before_training(tmp_path: Path) -> None:
    found = outcome("auto", TIGHT, tmp_path)
    assert found["steps"] == 0
    assert "are free beside a reserve for the process and a batch" in found["refused"]
    assert "set host_memory" in found["refused"]
    assert found["peak_mib"] < TIGHT


def _v1(root: Path, line: str) -> Path | None:
    _, controllers, path = line.split(":", 2)
    return root / "memory" / path.lstrip("/") if "memory" in controllers.split(",") else None


@pytest.fixture
def make_group() -> Iterator[Callable[[int], str]]:
    """Makes a control group with a limit of memory, in MiB, and returns its directory; skips where
    that may not be done.
    """
    made: list[Path] = []

    def make(limit_mib: int) -> str:
        root, lines = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text().splitlines()
        v1 = next((p for line in lines if (p := _v1(root, line)) is not None), None)
        place = v1 or root / next((line for line in lines if line.startswith("0::")), "0::/").removeprefix("0::/")
        place = next(p for p in (place, *place.parents) if p.is_dir()) / f"lightning-hetero-test-{os.getpid()}"
        try:
            place.mkdir()
            made.append(place)
            (place / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(limit_mib * MIB))
        except OSError as error:
            pytest.skip(f"no control group of memory can be made here: {error}")
        return str(place)

    yield make
    for place in made:
        place.rmdir()


@pytest.mark.parametrize(
    ("plan", "limit_mib", "batch"), [("auto", ROOMY, BATCH), ("auto", TIGHT, BATCH), ("disk", ROOMY, LARGE_BATCH)]
)
def test_a_real_group_kills_nothing(
    plan: str, limit_mib: int, batch: int, make_group: Callable[[int], str], tmp_path: Path
) -> None:
    found = outcome(plan, limit_mib, tmp_path, make_group(limit_mib), batch)
    assert found["steps"] == STEPS or "reserve" in found["refused"], found


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # a fork's ordinary exit copies pages of what it was forked from, and its group pays for them
