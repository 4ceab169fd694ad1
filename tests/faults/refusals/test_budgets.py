"""Too little room: host memory, device memory, disk."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, outcome
from support.refusals import assert_usable, fit, new_module, refused, tree

from lightning_hetero import EmulatedDevice
from lightning_hetero.errors import (
    ConfigError,
    OutOfDiskError,
    OutOfMemoryBudgetError,
)
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved
from lightning_hetero.strategies import HeteroOffloadStrategy
from lightning_hetero.units import parse_bytes


def test_a_small_host_budget_is_refused_with_a_table(root: Path, plain: Outcome) -> None:
    module = new_module()
    words = ["plan 'disk' needs", "host_memory allows 1 B", "how much", "the cache for weights", "staging", "Raise host_memory"]
    refused(OutOfMemoryBudgetError, words, root, module, host_memory="1B")
    assert_usable(module, root, plain)


@pytest.mark.parametrize(("shape", "recommends"), [(Shape(width=8), False), (Shape(layers=12, width=256), True)])
def test_plan_disk_is_recommended_only_where_it_needs_less(shape: Shape, recommends: bool, root: Path) -> None:
    """Staging takes more than small blocks save."""
    needed = {}
    for plan in ("host", "disk"):
        with pytest.raises(OutOfMemoryBudgetError) as caught:
            fit(new_module(Recipe(shape=shape)), root, HeteroOffloadStrategy(plan=plan, host_memory="1B"))
        needed[plan] = caught.value.needed_bytes
        if plan == "host":
            assert ('plan="disk"' in str(caught.value)) == recommends
    assert (needed["disk"] < needed["host"]) == recommends


@pytest.mark.parametrize("given", [True, False])
def test_the_log_says_how_long_a_model_stays_on_disk(given: bool, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = Recipe(shape=Shape(layers=12, width=256), steps=1)
    options: dict[str, Any] = {"disk_path": root / "run"} if given else {}
    with caplog.at_level("INFO"):
        fit(new_module(recipe), root, HeteroOffloadStrategy(plan="disk", host_memory="30MiB", **options))
    removed = "; the store is removed when the process ends" if not given else ""
    assert f"The model does not fit host_memory, so it stays on disk{removed}." in caplog.text


def test_an_optimizer_that_runs_on_the_device_is_not_sent_to_the_host(root: Path) -> None:
    for optimizer, words in ((torch.optim.SGD, "torch.optim.Adam or AdamW"), (torch.optim.AdamW, "place weights on 'host'")):
        recipe = Recipe(optimizer=lambda groups, make=optimizer: make(groups, lr=1e-3))
        with pytest.raises(OutOfMemoryBudgetError, match="of device memory") as caught:
            fit(new_module(recipe), root, HeteroOffloadStrategy(plan="resident", device=EmulatedDevice("8KiB")))
        assert words in str(caught.value)
        assert ("'host'" in str(caught.value)) == (optimizer is torch.optim.AdamW)


def test_the_refusal_names_the_smallest_budget_that_works(root: Path, plain: Outcome) -> None:
    module = new_module()
    with pytest.raises(OutOfMemoryBudgetError) as caught:
        fit(module, root, HeteroOffloadStrategy(plan="disk", host_memory="1B"))
    needed = caught.value.needed_bytes
    named = re.search(r'Raise host_memory to "(.*?)"', str(caught.value))
    assert named
    assert needed <= parse_bytes(named[1], name="host_memory") <= 1.1 * needed
    refused(OutOfMemoryBudgetError, ["needs"], root, module, host_memory=needed - 1)
    torch.manual_seed(11)
    assert_same(outcome(fit(module, root, HeteroOffloadStrategy(plan="disk", host_memory=needed)), module), plain)


def test_a_refusal_says_what_the_other_plans_need(root: Path) -> None:
    """Of a small model staging takes more than the disk saves."""
    other = r"^plan 'host' needs (.|\n)*\nThe other plans do not fit either: plan 'disk' needs "
    with pytest.raises(OutOfMemoryBudgetError, match=other) as caught:
        fit(new_module(Recipe(shape=Shape(width=8))), root, HeteroOffloadStrategy(host_memory="1B"))
    with pytest.raises(OutOfMemoryBudgetError) as least:
        fit(new_module(Recipe(shape=Shape(width=8))), root, HeteroOffloadStrategy(plan="host", host_memory="1B"))
    assert caught.value.needed_bytes == least.value.needed_bytes


RECOMPUTES = BlockPlan(name="*", saved=Saved.RECOMPUTE)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(name="p", blocks=(RECOMPUTES,)), ["saved='recompute'", "Allowed: 'keep'"]),
        (Plan(name="p", blocks=(BlockPlan(name="*"),), micro_batches=2), ["micro_batches=2", "accumulate_grad_batches"]),
    ],
    ids=["recompute", "micro_batches"],
)
def test_a_plan_for_another_machine_is_refused_as_fit_begins(
    plan: Plan, words: list[str], root: Path, plain: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is opened, and before there is a batch."""
    opened: list[object] = []
    monkeypatch.setattr("lightning_hetero.runtime.session.TierStore", lambda *a, **k: opened.append(a))
    monkeypatch.setattr(LitModel, "training_step", lambda self, batch, batch_idx: opened.append(batch))
    module = new_module()
    refused(ConfigError, words, root, module, plan=plan)
    assert not opened
    monkeypatch.undo()
    assert_usable(module, root, plain)


def test_the_default_budget_is_the_rest_of_the_control_group(root: Path, plain: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetero.runtime.options.available_memory_bytes", lambda: 1000)
    module = new_module()
    refused(OutOfMemoryBudgetError, ["plan 'disk' needs", "are free", "Free memory"], root, module)
    monkeypatch.undo()
    assert_usable(module, root, plain)


def test_a_small_device_budget_is_refused(root: Path, plain: Outcome) -> None:
    module = new_module()
    words = ["plan 'resident' puts", "device_memory allows 1000 B", "Raise device_memory"]
    refused(OutOfMemoryBudgetError, words, root, module, plan="resident", device_memory="1000B")
    assert_usable(module, root, plain)


def test_a_small_disk_capacity_is_refused(root: Path, plain: Outcome) -> None:
    module = new_module()
    refused(OutOfDiskError, ["needs", "disk_capacity allows 10.0 KiB", "Raise disk_capacity"], root, module, disk_capacity="10KiB")
    assert_usable(module, root, plain)


def test_a_disk_that_only_kept_steps_fill_is_remedied_by_keeping_none(root: Path, tmp_path: Path) -> None:
    store = tmp_path / "kept"
    with pytest.raises(OutOfDiskError, match=r"^disk_path '.*kept': .*Raise disk_capacity, or keep no steps") as found:
        fit(new_module(), root, HeteroOffloadStrategy(plan="host", disk_path=store, disk_capacity="10KiB"))
    assert "fewer blocks" not in str(found.value)
    fit(new_module(), root, HeteroOffloadStrategy(plan="host", disk_path=store, disk_capacity="10KiB", durability="none"))
    with pytest.raises(OutOfDiskError, match=r"^without disk_path files go to the Trainer's root directory.*fewer blocks"):
        fit(new_module(), root, HeteroOffloadStrategy(plan="disk", disk_capacity="10KiB"))


def test_state_that_is_written_only_later_counts_too(root: Path) -> None:
    """An optimizer without native kernels makes its state at the first step."""
    recipe = Recipe(steps=2, shape=Shape(width=128), optimizer=lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9))
    with pytest.raises(OutOfDiskError) as caught:
        fit(new_module(recipe), root, HeteroOffloadStrategy(plan="disk", disk_capacity="1B"))
    match = re.search(r"the plan needs ([0-9.]+ [KM]iB)", str(caught.value))
    assert match is not None
    needed = parse_bytes(match[1], name="needed")
    written: list[int] = []

    class Sums(pl.Callback):
        def on_train_end(self, *_: Any) -> None:
            written.append(sum(p.stat().st_size for p in root.rglob("block-*")))

    fit(new_module(recipe), root, HeteroOffloadStrategy(plan="disk"), callbacks=[Sums()])
    assert needed is not None
    assert 0.5 * needed < written[0] <= 1.1 * needed  # padded to pages


def test_a_full_disk_is_refused(root: Path, plain: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    module, real = new_module(), os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*real(path)[:3], 2, 2, *real(path)[5:]]))
    refused(OutOfDiskError, [str(root), "needs", "8.0 KiB are free", "larger disk"], root, module)
    monkeypatch.undo()
    assert_usable(module, root, plain)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond: the allocation of a store's files fails as it does
    on a full disk.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("limit", "file"), [(8 * 1024, "COMMIT"), (70 * 1024, "block-0")])
@pytest.mark.parametrize("own", [False, True])
def test_a_disk_that_fills_up_while_files_are_laid_out_is_refused(
    root: Path, plain: Outcome, limit: int, file: str, own: bool
) -> None:
    module = new_module(Recipe(steps=2, shape=Shape(width=64)))
    options = {"disk_path": root / "store", "durability": "none"} if own else {}  # the ring of kept steps is larger than a block
    with file_size_limit(limit):
        refused(OutOfDiskError, [file, "needs", "are free", "errno"], root, module, **options)
    fit(module, root, HeteroOffloadStrategy(plan="disk", disk_path=root / "store" if own else None))
    assert bool(tree(root)) is own
