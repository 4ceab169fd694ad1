"""Whatever cannot work is refused by name: nothing is left on disk, and the model trains under plain Lightning afterwards."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.scripts import output_of, result_of
from torch import nn

from lightning_hetero import EmulatedDevice
from lightning_hetero._native import library
from lightning_hetero.errors import (
    ConfigError,
    HeteroError,
    NativeMissingError,
    OutOfDiskError,
    OutOfMemoryBudgetError,
    StoreBusyError,
    UnsupportedError,
)
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier
from lightning_hetero.strategies import HeteroOffloadStrategy
from lightning_hetero.units import parse_bytes

RECIPE = Recipe(steps=2)
MIXED = Plan(name="mixed", blocks=(BlockPlan(name="model.blocks.1", weights=Tier.DISK, state=Tier.DISK), BlockPlan(name="*")))
NOBODY = 65534


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What plain Lightning makes of the recipe."""
    return run(RECIPE, "auto", tmp_path_factory.mktemp("plain"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


def fit(module: LitModel, root: Path, strategy: Any, **options: Any) -> Any:
    trainer = quiet_trainer(strategy=strategy, max_steps=module.recipe.steps, default_root_dir=root, limit_val_batches=0, **options)
    trainer.fit(module, data())
    return trainer


def new_module(recipe: Recipe = RECIPE) -> LitModel:
    torch.manual_seed(7)
    return LitModel(recipe)


def tree(root: Path) -> dict[str, int]:
    """Every path below ``root`` with its size."""
    return {str(p.relative_to(root)): p.lstat().st_size for p in root.rglob("*")}


def refused(
    error: type[Exception], words: list[str], root: Path, module: LitModel | None = None, *, plan: Any = "disk", **options: Any
) -> None:
    """Trains and expects the refusal, with every one of ``words`` in its text; nothing may have been left below ``root``."""
    before = tree(root)
    with pytest.raises(error) as caught:
        fit(module or new_module(), root, HeteroOffloadStrategy(plan=plan, **options))
    text = str(caught.value)
    assert isinstance(caught.value, HeteroError)
    assert not [w for w in words if w not in text], text
    assert tree(root) == before


def assert_usable(module: LitModel, root: Path, plain: Outcome) -> None:
    """Plain Lightning trains the module as if nothing had happened."""
    module.losses.clear()
    torch.manual_seed(11)
    assert_same(outcome(fit(module, root, "auto"), module), plain)


# ---- too little room --------------------------------------------------------------------------------------------------------


def test_a_small_host_budget_is_refused_with_a_table(root: Path, plain: Outcome) -> None:
    module = new_module()
    words = ["plan 'disk' needs", "host_memory allows 1 B", "how much", "the cache for weights", "staging", "Raise host_memory"]
    refused(OutOfMemoryBudgetError, words, root, module, host_memory=1)
    assert_usable(module, root, plain)


def test_the_refusal_names_the_smallest_budget_that_works(root: Path, plain: Outcome) -> None:
    module = new_module()
    with pytest.raises(OutOfMemoryBudgetError) as caught:
        fit(module, root, HeteroOffloadStrategy(plan="disk", host_memory=1))
    needed = caught.value.needed_bytes
    refused(OutOfMemoryBudgetError, ["needs"], root, module, host_memory=needed - 1)
    torch.manual_seed(11)
    assert_same(outcome(fit(module, root, HeteroOffloadStrategy(plan="disk", host_memory=needed)), module), plain)


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


def test_without_a_budget_what_a_control_group_leaves_is_one(root: Path, plain: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetero.runtime.options.available_memory_bytes", lambda: 1000)
    module = new_module()
    refused(OutOfMemoryBudgetError, ["plan 'disk' needs", "are free", "Free memory"], root, module)
    monkeypatch.undo()
    assert_usable(module, root, plain)


def test_a_small_device_budget_is_refused(root: Path, plain: Outcome) -> None:
    module = new_module()
    words = ["plan 'resident' puts", "device_memory allows 1000 B", "Raise device_memory"]
    refused(OutOfMemoryBudgetError, words, root, module, plan="resident", device_memory=1000)
    assert_usable(module, root, plain)


def test_a_small_disk_capacity_is_refused(root: Path, plain: Outcome) -> None:
    module = new_module()
    refused(OutOfDiskError, ["needs", "disk_capacity allows 10.0 KiB", "Raise disk_capacity"], root, module, disk_capacity="10KiB")
    assert_usable(module, root, plain)


def test_state_that_is_written_only_later_counts_too(root: Path) -> None:
    """An optimizer without native kernels makes its state at the first step."""
    recipe = Recipe(steps=2, shape=Shape(width=128), optimizer=lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9))
    with pytest.raises(OutOfDiskError) as caught:
        fit(new_module(recipe), root, HeteroOffloadStrategy(plan="disk", disk_capacity=1))
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
    """Files of this process cannot grow beyond: the allocation of a store's files fails as it does on a full disk."""
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


# ---- where the disk tier may not be -----------------------------------------------------------------------------------------


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
    """Where no step is kept: validated after training, with frozen parameters, another optimizer, or another plan."""
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


HOLDER = """
import sys
from pathlib import Path
import torch
from lightning_hetero.strategies import HeteroOffloadStrategy
from support.models import LitModel, Recipe, data, quiet_trainer

def waits(module):
    print("held", flush=True)
    sys.stdin.readline()

LitModel.on_train_start = waits
strategy = HeteroOffloadStrategy(plan="disk", disk_path=sys.argv[1], durability="none")
quiet_trainer(strategy=strategy, max_steps=1, limit_val_batches=0, default_root_dir=sys.argv[2]).fit(LitModel(Recipe()), data())
"""


def test_a_store_of_a_living_process_is_refused_with_its_pid(root: Path, plain: Outcome) -> None:
    module, store = new_module(), root / "store"
    with python(HOLDER, str(store), str(root)) as holder:
        assert holder.stdout is not None
        assert any(line == "held\n" for line in holder.stdout)
        refused(StoreBusyError, [str(store), f"in use by process {holder.pid}", "another disk_path"], root, module, disk_path=store)
        assert_usable(module, root, plain)
        holder.communicate("go\n", timeout=600)
        assert holder.returncode == 0
    torch.manual_seed(11)
    again = new_module()
    torch.manual_seed(11)
    assert_same(outcome(fit(again, root, HeteroOffloadStrategy(plan="disk", disk_path=store)), again), plain)


@contextmanager
def python(program: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process with the tests on its path, and not the current folder; killed at the end if it still lives."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# ---- the native library -----------------------------------------------------------------------------------------------------

NATIVE = """
import json, os, sys
from pathlib import Path
from lightning_hetero.strategies import HeteroOffloadStrategy
from support.models import LitModel, Recipe, data, quiet_trainer

texts = []
module = LitModel(Recipe())
for library in sys.argv[2:]:
    os.environ["LIGHTNING_HETERO_LIBRARY"] = library
    try:
        strategy = HeteroOffloadStrategy(plan="disk")
        quiet_trainer(strategy=strategy, max_steps=1, limit_val_batches=0, default_root_dir=sys.argv[1]).fit(module, data())
    except Exception as error:
        texts.append([type(error).__name__, str(error)])
quiet_trainer(strategy="auto", max_steps=1, limit_val_batches=0, default_root_dir=sys.argv[1]).fit(module, data())
print(json.dumps(texts))
"""


def test_a_missing_or_foreign_native_library_is_refused(root: Path, tmp_path: Path) -> None:
    compiler = os.environ.get("CC", "cc")
    source, foreign = tmp_path / "foreign.c", tmp_path / "foreign.so"
    source.write_text("int hetero_abi_version(void) { return 4711; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(foreign), str(source)], check=True)
    script = tmp_path / "trains.py"
    script.write_text(NATIVE)
    texts = result_of(output_of(script, root, "/nowhere/libhetero.so", foreign, source, cwd=tmp_path))
    assert [kind for kind, _ in texts] == [NativeMissingError.__name__] * 3
    for (_, text), path in zip(texts, ["/nowhere/libhetero.so", str(foreign), str(source)], strict=True):
        assert path in text
        assert "pip install" in text
    assert "version 4711" in texts[1][1]
    assert f"needs {library.ABI_VERSION}" in texts[1][1]
    assert tree(root) == {}


class _Filter(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Filter)))


def without_io_uring(call: Callable[[], None]) -> None:
    """Runs ``call`` in a thread whose system calls to set up a ring are denied, as container runtimes deny them."""
    failures: list[BaseException] = []

    def body() -> None:
        # Load the call's number (offset 0 of seccomp_data); io_uring_setup, 425 everywhere, returns EPERM; all else is allowed.
        rows = (_Filter * 4)((0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000))
        libc = ctypes.CDLL(None, use_errno=True)
        program = _Program(4, rows)
        if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):
            failures.append(pytest.skip.Exception("seccomp is not available"))
            return
        try:
            call()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def test_a_denied_io_uring_is_refused_and_the_option_is_named(root: Path, plain: Outcome) -> None:
    module = new_module()

    def call() -> None:
        for path in (None, root / "store"):
            words = ["io_uring", "errno 1", "io_backend='pool'"]
            refused(UnsupportedError, words, root, module, io_backend="io_uring", disk_path=path)
        torch.manual_seed(11)
        assert_same(outcome(fit(module, root, HeteroOffloadStrategy(plan="disk", io_backend="auto")), module), plain)

    without_io_uring(call)


# ---- plans and blocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dsik", "", "zero3"])
def test_an_unknown_plan_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="plan="):
        HeteroOffloadStrategy(plan=name)


def row(name: str, **values: str) -> dict[str, str]:
    return {"name": name, **values}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{not json", ["plan.json is not JSON", "line 1"]),
        ("[]", ["is not a plan", "expected an object"]),
        ({"version": 2}, ["version", "expected"]),
        ({"blocks": []}, ["'blocks' must be a non-empty list"]),
        ({"blocks": [row("*", weights="tape")]}, ["blocks[0]", "weights='tape'", "allowed", "'disk'"]),
        ({"blocks": [row("*", wieghts="disk")]}, ["blocks[0]", "unknown keys ['wieghts']", "known"]),
        ({"blocks": [row("*", weights="disk", update="device")]}, ["update 'device'", "'cpu'"]),
        ({"depth": 3}, ["unknown keys ['depth']", "prefetch_depth"]),
        ({"prefetch_depth": 0}, ["prefetch_depth=0", "1 to 1024"]),
    ],
)  # fmt: skip
def test_a_plan_file_that_is_none_is_refused(tmp_path: Path, content: Any, words: list[str]) -> None:
    path = tmp_path / "plan.json"
    head = {"format": "lightning-hetero-plan", "version": 1, "name": "mine", "blocks": [row("*")]}
    path.write_text(content if isinstance(content, str) else json.dumps(head | content))
    with pytest.raises(ConfigError) as caught:
        HeteroOffloadStrategy(plan=path)
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)


def test_a_missing_plan_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plan file '.*gone.json' does not exist"):
        HeteroOffloadStrategy(plan=tmp_path / "gone.json")


def test_a_plan_that_does_not_fit_the_model_is_refused(root: Path, plain: Outcome) -> None:
    module = new_module()
    unknown = Plan(name="mine", blocks=(BlockPlan(name="model.layers.0", weights=Tier.DISK), BlockPlan(name="*")))
    refused(ConfigError, ["'mine'", "model lacks: model.layers.0", "model.blocks.0", "block_cls"], root, module, plan=unknown)
    missing = Plan(name="mine", blocks=(BlockPlan(name="model.blocks.*", weights=Tier.DISK, state=Tier.DISK),))
    refused(ConfigError, ["no rule for block 'model", "blocks are", '"*"'], root, module, plan=missing)
    assert_usable(module, root, plain)


def test_a_block_cls_that_matches_nothing_is_refused(root: Path, plain: Outcome) -> None:
    module = new_module()
    refused(ConfigError, ["block_cls='LlamaDecoderLayer'", "matches no", "MlpBlock"], root, module, block_cls="LlamaDecoderLayer")
    refused(ConfigError, ["GELU", "matches no", "MlpBlock"], root, module, block_cls=nn.GELU)
    refused(ConfigError, ["block_cls has 3", "allowed"], root, module, block_cls=[nn.GELU, 3])
    assert_usable(module, root, plain)


def test_a_lazy_module_without_shapes_is_refused(root: Path) -> None:
    module = new_module()
    module.model.spare = nn.LazyLinear(3)
    refused(ConfigError, ["'model.spare.weight' has no shape yet", "setup()"], root, module)


# ---- options ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("host_memory", "4GiBB"), ("host_memory", "-1GiB"), ("host_memory", 0), ("host_memory", True), ("device_memory", "much"),
        ("host_memory", 1.5), ("disk_capacity", 0.5),
        ("disk_capacity", "1 2 GiB"), ("io_backend", "uring"), ("durability", "always"), ("io_threads", 0), ("io_threads", "many"),
        ("update_threads", 0), ("update_threads", -1), ("update_threads", 2.5), ("io_threads", 4096), ("disk_path", "s3://bucket/run"),
        ("disk_path", ""), ("disk_path", 3), ("weights", 3), ("device", "cuda"), ("allow_tmpfs", "no"), ("trace", "yes"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_when_the_strategy_is_made(option: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        HeteroOffloadStrategy(**{option: value})
    text = str(caught.value)
    assert option in text
    assert repr(value) in text
    assert "llowed" in text


def test_more_memory_than_the_emulated_device_has_is_refused() -> None:
    device = EmulatedDevice(memory="4MiB")
    HeteroOffloadStrategy(device=device, device_memory="4MiB")
    assert EmulatedDevice("4MiB") == device
    with pytest.raises(ConfigError, match=r"device_memory=5\.0 MiB of an emulated device that has 4\.0 MiB; allowed: at most that"):
        HeteroOffloadStrategy(device=device, device_memory="5MiB")


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="host_budget"):
        HeteroOffloadStrategy(host_budget="4GiB")


# ---- what this version does not do ------------------------------------------------------------------------------------------


def test_two_devices_are_refused(root: Path) -> None:
    refused_in(root, UnsupportedError, ["devices=2", "one process", "devices=1"], devices=2)


def test_two_nodes_are_refused(root: Path) -> None:
    refused_in(root, UnsupportedError, ["num_nodes=2", "one process", "num_nodes=1"], num_nodes=2)


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_one_of_several_processes_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    variables = {
        "torchrun": {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "WORLD_SIZE": "2"},
        "srun": {
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_JOB_NAME": "train",
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "0",
        },
    }[launcher]
    for name, value in (variables | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    words = ["has started 2", "a model of its own", "--nproc-per-node=1", 'strategy="hetero_parallel"']
    with pytest.raises(UnsupportedError) as caught:
        fit(new_module(), root, HeteroOffloadStrategy("disk"))
    assert all(word in str(caught.value) for word in words)


def test_more_host_memory_than_the_machine_has_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"host_memory=1000\.0 TiB; this machine.* has .*GiB. Give at most that"):
        fit(new_module(), root, HeteroOffloadStrategy("disk", host_memory="1000TiB"))


def test_a_plan_is_not_recommended_to_itself(root: Path) -> None:
    with pytest.raises(OutOfMemoryBudgetError, match="fewer weights outside repeated blocks") as caught:
        fit(new_module(), root, HeteroOffloadStrategy("disk", host_memory="100KiB"))
    assert "plan=" not in str(caught.value)
    with pytest.raises(OutOfMemoryBudgetError, match=r'weights on "disk" \(plan="disk"\)'):
        fit(new_module(), root, HeteroOffloadStrategy("host", host_memory="100KiB"))


@pytest.mark.parametrize(("option", "typo", "meant"), [("plan", "dsik", "disk"), ("durability", "proces", "process")])
def test_a_mistyped_value_is_refused_with_the_one_that_was_meant(option: str, typo: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
        HeteroOffloadStrategy(**{option: typo})


def refused_in(root: Path, error: type[Exception], words: list[str], **options: Any) -> None:
    module = new_module()
    with pytest.raises(error) as caught:
        fit(module, root, HeteroOffloadStrategy(plan="disk"), **options)
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)
    assert tree(root) == {}


def test_an_accelerator_without_lanes_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.accelerators import MPSAccelerator as accelerator

    monkeypatch.setattr(accelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(accelerator, "auto_device_count", staticmethod(lambda: 1))
    monkeypatch.setattr(accelerator, "parse_devices", staticmethod(lambda devices: [0]))
    monkeypatch.setattr(accelerator, "get_parallel_devices", staticmethod(lambda devices: [torch.device("mps", 0)]))
    words = ["MPSAccelerator", "CUDA or ROCm GPU", 'accelerator="cpu"', 'accelerator="cuda"']
    refused_in(root, UnsupportedError, words, accelerator="mps", devices=1)


def test_lbfgs_is_refused(root: Path) -> None:
    module = new_module(Recipe(steps=1, optimizer=torch.optim.LBFGS))
    refused(UnsupportedError, ["LBFGS", "closure", "torch.optim.AdamW"], root, module)


def test_an_unknown_optimizer_on_disk_is_refused(root: Path, plain: Outcome) -> None:
    class Coupled(torch.optim.SGD):
        """An optimizer from elsewhere."""

    Coupled.__module__ = "elsewhere"
    module = new_module(Recipe(steps=1, optimizer=lambda groups: Coupled(groups, lr=0.1)))
    refused(UnsupportedError, ["Coupled", "hetero_blockwise = True", 'plan="host"'], root, module)
    module.recipe = RECIPE
    assert_usable(module, root, plain)


@pytest.mark.parametrize("plan", ["host", "disk"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_sparse_gradients_are_refused(root: Path, plan: str, clip: float | None) -> None:
    module = new_module()
    module.model.embed.sparse = True
    with pytest.raises(UnsupportedError) as caught:
        fit(module, root, HeteroOffloadStrategy(plan=plan), gradient_clip_val=clip)
    text = str(caught.value)
    assert not [w for w in ("model.embed.weight", "sparse", "sparse=False") if w not in text], text
    assert tree(root) == {}


# ---- privacy ----------------------------------------------------------------------------------------------------------------


class Watching(LitModel):
    """Notes the modes of everything below ``root`` while it trains."""

    root: Path
    modes: dict[str, int]

    def on_train_batch_end(self, *_: Any) -> None:
        self.modes = {str(p.relative_to(self.root)): stat.S_IMODE(p.lstat().st_mode) for p in self.root.rglob("*")}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("umask", [0o000, 0o277])
def test_files_are_private_whatever_the_umask(root: Path, own: bool, umask: int) -> None:
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
