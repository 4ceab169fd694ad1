"""Frozen weights that safetensors files have as they are: read in place, never copied, and moved to
the store when they change.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.frozen import FROZEN, RECIPE, Change, Changed, by_hand, fit, loads, loads_the_same, slots_of, unfreezes
from support.models import Outcome, assert_same
from support.recipes import MIXED
from support.resuming import after
from support.strategies import on_device
from support.unreadable import Unreadable
from torch import Tensor
from torch.serialization import safe_globals
from torch.testing._internal.two_tensor import TwoTensor

from lightning_hetero import export_weights
from lightning_hetero.convert.safetensors import INDEX, TensorToWrite, WeightFiles, write_directory
from lightning_hetero.errors import ConfigError, StoreCorruptError, StoreError, UnsupportedError
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.record import parse
from lightning_hetero.store.format.stored_model import source_faults
from lightning_hetero.strategies import HeteroOffloadStrategy

PLANS = ["disk", "host", MIXED, on_device]
IDS = ["disk", "host", "mixed", "device"]


@pytest.fixture(scope="module")
def content() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: value.clone() for name, value in Changed(RECIPE).model.state_dict().items()}


@pytest.fixture
def folder(content: dict[str, Tensor], tmp_path: Path) -> Path:
    return write(content, tmp_path / "weights")


def write(content: dict[str, Tensor], path: Path, dtype: torch.dtype | None = None) -> Path:
    """A sharded folder with an index."""
    rows = []
    for name, value in content.items():
        kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
        rows.append(TensorToWrite(name, kind, value.shape, lambda value=value: value))
    write_directory(path, rows, max_shard_bytes=20_000)
    assert (path / INDEX).is_file()
    return path


def offload(plan: Any, store: Path | None, folder: Path, **options: Any) -> Any:
    make: Callable[..., Any] = plan if callable(plan) else lambda **o: HeteroOffloadStrategy(plan, **o)
    return make(disk_path=store, weights={"model": folder}, verify_digests=True, **options)


def train(root: Path, strategy: Any, *arguments: Any, **options: Any) -> Outcome:
    return fit(root, strategy, *arguments, device="meta", **options)


def in_place(store: Path) -> list[bool]:
    """Of each frozen block in the last record: whether its weights are read in place."""
    with StoreFiles(store) as files:
        assert files.record is not None
        rows = zip(files.manifest["layout"]["parts"], parse(files.record.user).parts, strict=True)
        return [entry.in_place is not None for names, entry in rows if any(f"blocks.{i}." in names[0] for i in FROZEN)]


@pytest.mark.parametrize("plan", PLANS, ids=IDS)
def test_frozen_weights_are_not_copied(plan: Any, folder: Path, content: dict[str, Tensor], tmp_path: Path) -> None:
    store = tmp_path / "store"
    before = {path: path.stat() for path in folder.iterdir()}
    plain = fit(tmp_path, "auto", content=content)
    got = train(tmp_path, offload(plan, store, folder), change=loads_the_same)
    assert_same(got, plain)
    assert in_place(store) == [True, True]
    assert not slots_of(store)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == {p: s.st_mtime_ns for p, s in before.items()}
    export_weights(store, tmp_path / "exported")
    exported = WeightFiles.open(tmp_path / "exported").tensors
    for name, value in plain.weights.items():
        assert torch.equal(exported[name].read(), value), name


class Sizes(pl.Callback):
    """What the plan in force needs on the disk, and what the measured profile would say of the
    blocks.
    """

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        session: Any = trainer.strategy.session  # type: ignore[attr-defined]
        frozen = [b for b in session.executor.model.blocks if any(b.name == f"model.blocks.{i}" for i in FROZEN)]
        self.rows = [(b.weight_bytes, b.in_place_bytes, b.copied) for b in frozen]
        self.disk = session._placer().needs(session.executor.plan).disk


@pytest.mark.parametrize("plan", PLANS, ids=IDS)
def test_the_account_of_a_plan_has_no_slot_of_them(plan: Any, folder: Path, content: dict[str, Tensor], tmp_path: Path) -> None:
    found = []
    halved = write(content, tmp_path / "half", torch.bfloat16)
    for weights in (folder, halved, None):
        sizes = Sizes()
        strategy = offload(plan, tmp_path / f"store-{weights.name}", weights) if weights else HeteroOffloadStrategy("host")
        if weights is None:
            fit(tmp_path, strategy, RECIPE, sizes)
        else:
            train(tmp_path, strategy, RECIPE, sizes)
        found.append(sizes)
    ours, copied, in_memory = found
    assert [(size, why) for _, size, why in ours.rows] == [(size, "") for size, *_ in ours.rows]
    assert {row[1:] for row in copied.rows} == {(0, "they are torch.float32, in the files torch.bfloat16")}
    assert {row[1:] for row in in_memory.rows} == {(0, "they were in memory when training began")}
    assert sum(copied.disk.values()) - sum(ours.disk.values()) == sum(size for size, *_ in ours.rows)


@pytest.mark.parametrize("change", [by_hand, loads, unfreezes])
@pytest.mark.parametrize("plan", PLANS, ids=IDS)
def test_weights_that_change_move_to_the_store(
    plan: Any, change: Change, folder: Path, content: dict[str, Tensor], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    at = (2,) if change is unfreezes else (2, 4)
    plain = fit(tmp_path, "auto", change=change, at=at, content=content)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    train(tmp_path, offload(plan, store, folder), change=change, at=at, stop=1)
    assert in_place(store) == [True, True]
    train(tmp_path, offload(plan, store, folder), change=change, at=at, stop=3, store=store)
    assert not all(in_place(store))
    got = train(tmp_path, offload("disk", store, folder), change=change, at=at, store=store)
    assert_same(got, after(plain, RECIPE.steps - 3))
    assert {path: path.read_bytes() for path in folder.iterdir()} == files, "they are never written"


def test_without_steps_that_are_kept_they_move_likewise(folder: Path, content: dict[str, Tensor], tmp_path: Path) -> None:
    plain = fit(tmp_path, "auto", change=by_hand, content=content)
    for plan in PLANS:
        assert_same(train(tmp_path, offload(plan, None, folder), change=by_hand), plain)


@pytest.mark.parametrize("plan", ["disk", "host"])
def test_another_dtype_is_copied_to_one_slot(
    plan: str, content: dict[str, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(content, tmp_path / "half", torch.bfloat16)
    rounded = {name: value.bfloat16().to(value.dtype) if value.is_floating_point() else value for name, value in content.items()}
    caplog.set_level(logging.INFO, "lightning_hetero")
    got = train(tmp_path, offload(plan, tmp_path / "store", folder))
    assert_same(got, fit(tmp_path, "auto", content=rounded))
    assert {number for number, _ in slots_of(tmp_path / "store").values()} == {1}
    assert "copied to one slot, or kept in memory: they are torch.float32, in the files torch.bfloat16" in caplog.text


@pytest.mark.parametrize("plan", ["disk", "host"])
def test_a_resume_needs_no_room_for_them(plan: str, tmp_path: Path) -> None:
    """Also without ``weights=``, and with the model in memory: the record has the files."""
    recipe = replace(RECIPE, shape=replace(RECIPE.shape, width=256, frozen=(0, 1, 2)))
    torch.manual_seed(3)
    folder = write(Changed(recipe).model.state_dict(), tmp_path / "weights")
    store, strategy = tmp_path / "store", offload(plan, tmp_path / "store", folder)
    fit(tmp_path, strategy, recipe, device="meta", stop=2)
    needed = int(strategy.memory_report()["disk_bytes"])
    resumed = HeteroOffloadStrategy(plan, disk_path=store, disk_capacity=needed + 2**18)  # and the training state
    fit(tmp_path, resumed, recipe, store=store, stop=3)
    assert resumed.memory_report()["disk_bytes"] == needed


class Reads(pl.Callback):
    """The bytes that the engine has read before the first batch."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.num_bytes = trainer.strategy.session.store.stats().bytes_read  # type: ignore[attr-defined]


def test_a_resume_reads_them_into_memory_once(folder: Path, content: dict[str, Tensor], tmp_path: Path) -> None:
    found = []
    for copied in (False, True):
        store, reads = tmp_path / str(copied), Reads()
        first = HeteroOffloadStrategy("host", disk_path=store) if copied else offload("host", store, folder)
        if copied:
            fit(tmp_path, first, content=content, stop=2)
            fit(tmp_path, HeteroOffloadStrategy("host", disk_path=store), RECIPE, reads, store=store, stop=3)
        else:
            train(tmp_path, first, stop=2)
            train(tmp_path, offload("host", store, folder), RECIPE, reads, store=store, stop=3)
        found.append(reads.num_bytes)
    pages = 4096 * (len(content) + 2)  # direct reads begin and end at pages
    assert found[0] <= found[1] + pages


def verified(store: Path) -> list[str]:
    """The faults that ``lightning-hetero verify`` finds."""
    with StoreFiles(store) as files:
        return list(source_faults(files))


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def other_header(path: Path) -> None:
    status, text = path.stat(), path.read_bytes()
    path.write_bytes(text.replace(b'"format":"pt"', b'"format":"tp"'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def other_values(path: Path) -> None:
    """A file of the same model with other weights, as another training of it leaves."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start:] = bytes(byte ^ 1 for byte in data[start:])
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("plan", ["disk", "host"])
@pytest.mark.parametrize("harm", [longer, shorter, touched, other_header, other_values, unreadable, Path.unlink])
def test_a_resume_refuses_a_file_that_is_another_one(
    plan: str, harm: Callable[[Path], object], folder: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    train(tmp_path, offload(plan, store, folder), stop=2)
    spare = tmp_path / "spare"
    shutil.copytree(folder, spare)
    with StoreFiles(store) as files:
        assert files.record is not None
        path = next(Path(e.in_place.files[0].path) for e in parse(files.record.user).parts if e.in_place is not None)
    assert not list(verified(store))
    harm(path)
    assert path.name in " ".join(verified(store))
    with pytest.raises(StoreError, match=path.name):
        train(tmp_path, HeteroOffloadStrategy(plan, disk_path=store, weights={"model": spare}), store=store)


def test_whatever_read_of_them_fails_the_file_is_named(folder: Path, tmp_path: Path) -> None:
    train(tmp_path, offload("disk", tmp_path / "store", folder), stop=2)
    with pytest.MonkeyPatch.context() as patch:
        whole = Unreadable(patch, f"{folder}/.*safetensors", -1)
        export_weights(tmp_path / "store", tmp_path / "out")
    for number in {0, len(whole.reads) // 2, len(whole.reads) - 1}:
        with pytest.MonkeyPatch.context() as patch:
            broken = Unreadable(patch, f"{folder}/.*safetensors", number)
            with pytest.raises(StoreError, match=r"cannot be read.*Input/output error") as raised:
                export_weights(tmp_path / "store", tmp_path / f"out{number}")
        assert broken.failed in str(raised.value)


def test_a_file_that_changes_while_it_is_read_ends_the_fit(folder: Path, tmp_path: Path) -> None:
    def touches(_: Changed) -> None:
        for path in folder.glob("*.safetensors"):
            touched(path)

    strategy = offload("disk", tmp_path / "store", folder, host_memory="572KiB")
    with pytest.raises(StoreCorruptError, match="has changed"):
        train(tmp_path, strategy, change=touches)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "bf16-true"), (torch.float16, "16-true")])
def test_one_file_and_narrow_types_are_read_in_place(dtype: torch.dtype, precision: Any, tmp_path: Path) -> None:
    """The model is of 16 bits, as the file is."""
    recipe = replace(RECIPE, shape=replace(RECIPE.shape, width=13))
    torch.manual_seed(3)
    content = {n: v.to(dtype) if v.is_floating_point() else v.clone() for n, v in Changed(recipe).model.state_dict().items()}
    write_directory(
        tmp_path / "one", [TensorToWrite(n, v.dtype, v.shape, lambda v=v: v) for n, v in content.items()], max_shard_bytes=1 << 30
    )
    recipe = replace(recipe, precision=precision)
    in_memory = fit(tmp_path, HeteroOffloadStrategy("host"), recipe, content=content)
    for n, plan in enumerate(("host", "disk", on_device)):
        got = fit(tmp_path, offload(plan, tmp_path / f"store-{n}", tmp_path / "one"), recipe, device="meta")
        assert_same(got, in_memory)
        assert in_place(tmp_path / f"store-{n}") == [True, True]
        assert any(
            torch.equal(got.weights[f"model.{name}"], value) for name, value in content.items() if f"blocks.{FROZEN[0]}." in name
        )


def saved(content: dict[str, Tensor], path: Path, kind: str) -> Path:
    """What ``torch.save`` writes: one file, a checkpoint, a directory, or a directory of two
    files.
    """
    path.mkdir()
    if kind in (".pt", ".bin"):
        torch.save(content if kind == ".bin" else {"state_dict": content}, path / f"model{kind}")
        return path / f"model{kind}"
    if kind == "folder":
        torch.save(content, path / "pytorch_model.bin")
        return path
    names = list(content)
    files = {"pytorch_model-1.bin": names[: len(names) // 2], "pytorch_model-2.bin": names[len(names) // 2 :]}
    for file, mine in files.items():
        torch.save({name: content[name] for name in mine}, path / file)
    index = {"weight_map": {name: file for file, mine in files.items() for name in mine}}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize(
    ("kind", "plan", "dtype"),
    [
        (".bin", "disk", torch.float32),
        (".pt", "host", torch.float16),
        ("folder", on_device, torch.float32),
        ("index", MIXED, torch.bfloat16),
    ],
)
def test_files_of_torch_save_are_copied_to_one_slot(
    kind: str, plan: Any, dtype: torch.dtype, content: dict[str, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_hetero")
    stored = {name: value.to(dtype) if value.is_floating_point() else value for name, value in content.items()}
    files, store = saved(stored, tmp_path / "weights", kind), tmp_path / "store"
    plain = fit(tmp_path, "auto", change=by_hand, content={n: stored[n].to(v.dtype) for n, v in content.items()})
    train(tmp_path, offload(plan, store, files), stop=1)
    assert {number for number, _ in slots_of(store).values()} == {1}
    assert in_place(store) == [False, False]
    assert "copied to one slot, or kept in memory: their files are not local safetensors files" in caplog.text
    shutil.rmtree(tmp_path / "weights") if files.is_dir() else files.unlink()
    got = fit(tmp_path, HeteroOffloadStrategy("disk", disk_path=store, verify_digests=True), change=by_hand, store=store)
    assert_same(got, after(plain, RECIPE.steps - 1))


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_nothing_in_a_file_of_torch_save_is_executed(
    content: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({**content, "more": Harmful()}, tmp_path / "model.bin")
    with pytest.raises(ConfigError, match="without executing code"):
        train(tmp_path, offload("host", None, tmp_path / "model.bin"))
    assert not (tmp_path / "executed").exists()
    odd = TwoTensor(torch.ones(2), torch.ones(2))
    torch.save({**content, "more": odd}, tmp_path / "model.bin")
    with safe_globals([TwoTensor, getattr]), pytest.raises(UnsupportedError, match="'more' is a TwoTensor: its content is several"):
        train(tmp_path, offload("host", None, tmp_path / "model.bin"))
    torch.save({**content, "more": 3}, tmp_path / "model.bin")
    with pytest.raises(ConfigError, match="is not a state_dict"):
        train(tmp_path, offload("host", None, tmp_path / "model.bin"))
