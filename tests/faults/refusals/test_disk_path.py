"""Where the disk tier may not be, and the privacy of its files."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome
from support.refusals import assert_usable, fit, holding, new_module, refused

from lightning_hetero.errors import (
    ConfigError,
    HeteroError,
    StoreBusyError,
)
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.strategies import HeteroOffloadStrategy

MIXED = Plan(name="mixed", blocks=(BlockPlan(name="model.blocks.1", weights=Tier.DISK, state=Tier.DISK), BlockPlan(name="*")))


NOBODY = 65534


# ---- where the disk tier may not be --------------------------------------------------------------


def test_an_unwritable_path_is_refused(plain: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    module = new_module()
    with tempfile.TemporaryDirectory() as above, as_nobody(above):
        readonly = Path(above) / "readonly"
        readonly.mkdir(mode=0o500)
        refused(ConfigError, [str(readonly), "cannot be written", "another disk_path"], Path(above), module, disk_path=readonly)
        refused(HeteroError, ["readonly", "Permission denied", "another disk_path"], Path(above), module, disk_path=readonly / "x")
        readonly.chmod(0o700)
        assert_usable(module, readonly, plain)


@contextmanager
def as_nobody(folder: str) -> Iterator[None]:
    """Permissions do not bind root, so root becomes another user for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(folder, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_and_a_link_are_refused(root: Path, plain: Outcome) -> None:
    module = new_module()
    (root / "file").write_text("mine")
    (root / "there").mkdir(mode=0o700)
    (root / "link").symlink_to(root / "there")
    refused(ConfigError, ["file", "is not a directory", "allowed"], root, module, disk_path=root / "file")
    refused(ConfigError, ["link", "is a symbolic link", "allowed"], root, module, disk_path=root / "link")
    assert_usable(module, root, plain)


def test_a_directory_with_other_files_is_refused(root: Path, plain: Outcome) -> None:
    module = new_module()
    (root / "thesis").mkdir(mode=0o700)
    (root / "thesis" / "chapter.tex").write_text("mine")
    refused(ConfigError, ["holds chapter.tex", "allowed", "another disk_path"], root, module, disk_path=root / "thesis")
    assert_usable(module, root, plain)


def test_a_directory_open_to_others_is_refused(root: Path) -> None:
    (root / "open").mkdir()
    (root / "open").chmod(0o777)
    refused(ConfigError, ["mode 0777", "chmod 700"], root, disk_path=root / "open")


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs /dev/shm")
def test_a_file_system_in_memory_is_refused_unless_allowed(root: Path, plain: Outcome) -> None:
    module = new_module()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = Path(folder) / "store"
        refused(ConfigError, ["tmpfs", "host memory", "allow_tmpfs=True"], root, module, disk_path=store)
        assert not store.exists()
        torch.manual_seed(11)
        strategy = HeteroOffloadStrategy(plan="disk", disk_path=store, allow_tmpfs=True)
        assert_same(outcome(fit(module, root, strategy), module), plain)


def test_a_changed_model_under_an_old_store_is_refused(root: Path, plain: Outcome) -> None:
    store, module = root / "store", new_module()
    scratch = HeteroOffloadStrategy(plan="disk", disk_path=store, durability="none")
    fit(new_module(Recipe(steps=1, shape=Shape(layers=4))), root, scratch)
    refused(ConfigError, ["changed model", "First difference", "remove this one"], root, module, disk_path=store)
    assert_usable(module, root, plain)


@pytest.mark.parametrize("plan", ["disk", MIXED], ids=["disk", "mixed"])
def test_the_same_model_uses_its_store_again_however_it_is_run(root: Path, plan: Any) -> None:
    """Where no step is kept: validated after training, with frozen parameters, another optimizer,
    or another plan.
    """
    store, module = root / "store", new_module()

    def strategy(plan: Any = plan) -> Any:
        return HeteroOffloadStrategy(plan=plan, disk_path=store, durability="none")

    trainer = fit(module, root, strategy())
    trainer.validate(module, data(2), verbose=False)
    trainer.fit_loop.epoch_loop.max_steps += 1
    trainer.fit(module, data())
    module.model.blocks[0].requires_grad_(False)
    fit(module, root, strategy())
    module.recipe = Recipe(steps=1, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    fit(module, root, strategy())
    fit(module, root, strategy("disk"))


def test_a_store_of_a_living_process_is_refused_with_its_pid(root: Path, plain: Outcome) -> None:
    module, store = new_module(), root / "store"
    with holding(store, root) as holder:
        refused(StoreBusyError, [str(store), f"in use by process {holder.pid}", "another disk_path"], root, module, disk_path=store)
        assert_usable(module, root, plain)
    assert holder.exitcode == 0
    torch.manual_seed(11)
    again = new_module()
    torch.manual_seed(11)
    assert_same(outcome(fit(again, root, HeteroOffloadStrategy(plan="disk", disk_path=store)), again), plain)


# ---- privacy -------------------------------------------------------------------------------------


class Watching(LitModel):
    """Notes the modes of everything below ``root`` while it trains."""

    root: Path
    modes: dict[str, int]

    def on_train_batch_end(self, *_: Any) -> None:
        self.modes = {str(p.relative_to(self.root)): stat.S_IMODE(p.lstat().st_mode) for p in self.root.rglob("*")}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("umask", [0o000, 0o277])
def test_files_are_private_under_any_umask(root: Path, own: bool, umask: int) -> None:
    torch.manual_seed(7)
    module = Watching(Recipe(steps=2))
    module.root = root
    old = os.umask(umask)
    try:
        fit(module, root, HeteroOffloadStrategy(plan="disk", disk_path=root / "deep" / "store" if own else None))
    finally:
        os.umask(old)
    blocks = [name for name in module.modes if "block-" in name]
    assert len(blocks) >= 2 * 3
    for name, mode in module.modes.items():
        file = name.endswith(("MANIFEST", "COMMIT")) or "block-" in name
        assert mode == (0o600 if file else 0o700), name


def test_links_in_a_store_that_is_taken_over_are_not_followed(root: Path) -> None:
    store, precious = root / "store", root / "precious"
    recipe = Recipe(steps=1)
    fit(new_module(recipe), root, HeteroOffloadStrategy(plan="disk", disk_path=store, durability="none"))
    precious.write_text("mine")
    (store / "block-00000.a").unlink()
    (store / "block-00000.a").symlink_to(precious)
    (store / "COMMIT").unlink()
    (store / "COMMIT").symlink_to(precious)
    fit(new_module(recipe), root, HeteroOffloadStrategy(plan="disk", disk_path=store, durability="none"))
    assert precious.read_text() == "mine"
    assert stat.S_ISREG((store / "block-00000.a").lstat().st_mode)
