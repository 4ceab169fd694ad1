"""A training state that is too large for a record has files of its own: such runs keep their steps
like any other.
"""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.cli import invoke, parsed
from support.heavy import MIB, STEPS, offload, state_files, train
from support.models import Outcome, assert_same
from support.resuming import Ends

from lightning_hetero.convert.exporting import export_weights
from lightning_hetero.errors import OutOfDiskError, StoreCorruptError
from lightning_hetero.store.format import snapshots
from lightning_hetero.store.format import state_files as module
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.store.format.encoding import loads
from lightning_hetero.store.format.pins import pins
from lightning_hetero.store.format.state_files import StateFiles, read_value
from lightning_hetero.units import KIB


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("plain"), "auto")


def ends(step: int) -> Any:
    def begins(trainer: Any) -> None:
        if trainer.global_step == step:
            raise Ends

    return begins


def stop(root: Path, store: Path, step: int, **options: Any) -> None:
    with pytest.raises(Ends):
        train(root, offload(store, **options), begins=ends(step))


def check(got: Outcome, plain: Outcome, steps: int) -> None:
    """The outcome is that of a run that went on after so many steps."""
    assert len(got.losses) == STEPS - steps
    assert_same(got, Outcome(plain.losses[steps:], plain.weights, plain.state))


def named(store: Path) -> set[str]:
    with StoreFiles(store) as files:
        assert files.record is not None
        return set(files.record.states)


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    stop(tmp_path, store, 4, verify_digests=True)
    return store


def test_training_continues_bit_for_bit_and_leaves_nothing_behind(stopped: Path, tmp_path: Path, plain: Outcome) -> None:
    (stopped / f"state-{'0' * 32}").write_bytes(b"left by a process that died")
    seen: list[set[str]] = []
    got = train(tmp_path, offload(stopped, durability="power"), stopped, begins=lambda _: seen.append(state_files(stopped)))
    check(got, plain, 4)
    assert [len(names) for names in seen] == [3, 5], "a step has three files, of which two are not those of the step before"
    assert len(state_files(stopped) - named(stopped)) == 2
    assert all(os.stat(stopped / name).st_mode & 0o777 == 0o600 for name in named(stopped))


def test_only_kept_steps_write_them_and_the_pin_has_its_own(
    tmp_path: Path, plain: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, written = tmp_path / "store", list[int]()
    fallocate = os.posix_fallocate
    monkeypatch.setattr(module.os, "posix_fallocate", lambda fd, at, size: (written.append(size), fallocate(fd, at, size)))
    stop(tmp_path, store, 5, keep_every=2)
    (pinned,) = pins(store)
    assert len(written) == 5  # the table did not change
    assert state_files(pinned) == named(pinned)
    for name in state_files(store):
        (store / name).unlink()
    check(train(tmp_path, offload(store, keep_every=2), store), plain, 4)


@pytest.mark.parametrize("links", [True, False], ids=["links", "another-file-system"])
def test_a_snapshot_carries_them(links: bool, tmp_path: Path, plain: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, "another file system")

    if not links:
        monkeypatch.setattr(snapshots, "os", SimpleNamespace(**{**vars(os), "link": refuses}))
    saves = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    strategy = offload(tmp_path / "store", link_checkpoints=True)
    train(tmp_path, strategy, callbacks=[saves], enable_checkpointing=True, max_steps=5)
    saved = tmp_path / "saved" / "step=3.ckpt"
    assert state_files(saved) == named(saved)
    assert {os.stat(saved / name).st_nlink for name in named(saved)} == ({1, 2} if links else {1})  # the table is shared
    check(train(tmp_path, offload(tmp_path / "other"), saved), plain, 3)
    assert state_files(saved) == named(saved)


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "link"])
def test_the_fault_of_a_state_file_is_named(stopped: Path, tmp_path: Path, damage: str) -> None:
    with StoreFiles(stopped) as files:
        assert files.record is not None
        name, size = max(files.record.states.items(), key=lambda item: item[1])
    path, words = stopped / name, {"flip": "digest differs", "cut": f"the record says {size}"}.get(damage, "cannot be read")
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage != "missing":
        path.write_bytes(content if damage == "flip" else content[:-64])
    with pytest.raises(StoreCorruptError, match=rf"{name}: .*{words}.*a copy of the store"):
        train(tmp_path, offload(stopped), stopped)
    with pytest.raises(StoreCorruptError, match=name):  # the buffers are in it
        export_weights(stopped, tmp_path / "weights.ckpt")
    (fault,) = parsed("verify", stopped, code=1)["faults"]
    assert name in fault
    assert words in fault


def test_they_are_shown_checked_and_exported(stopped: Path, tmp_path: Path) -> None:
    assert parsed("inspect", stopped)["facts"]["state_files"] == {n: (stopped / n).stat().st_size for n in named(stopped)}
    assert "and 3 state files" in " ".join(invoke("verify", stopped).output.split())
    export_weights(stopped, tmp_path / "weights.ckpt")
    assert torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"]["trail"].nbytes == 8 * MIB


def test_if_there_is_no_room_training_ends_with_the_step_before(
    tmp_path: Path, plain: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    with pytest.raises(OutOfDiskError, match=r"the model's buffers: 8\.0 MiB .*disk_capacity leaves .*Raise disk_capacity"):
        train(tmp_path, offload(store, disk_capacity="12MiB"))
    fallocate, calls = os.posix_fallocate, list[int]()

    def full(descriptor: int, start: int, size: int) -> None:
        calls.append(size)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(descriptor, start, size)

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with pytest.raises(OutOfDiskError, match=r"state-.*No space left.*Make room"):
        train(tmp_path, offload(store))
    monkeypatch.undo()
    check(train(tmp_path, offload(store), store), plain, 1)


def test_many_states_leave_room_in_the_record(tmp_path: Path) -> None:
    """Of each there is little, of all too much."""
    directory = StoreDirectory.create_or_adopt(
        tmp_path / "store", default_root=tmp_path, manifest={}, needed_bytes=0, allow_tmpfs=True
    )
    files, values = StateFiles(directory, durable=False), [torch.full((4096,), float(i)) for i in range(100)]
    for _ in range(2):
        files.begin()
        texts = [files.put(value, "x") for value in values]
        files.end()
        files.committed()
    assert all(torch.equal(loads(text, partial(read_value, directory.path)), v) for text, v in zip(texts, values, strict=True))
    assert sum(map(len, texts)) < 160 * KIB
    assert 90 < len(files.kept) < 100
    assert state_files(directory.path) == set(files.kept)
    assert files.put(7, "x") == "7"
    directory.close(remove=True)
    assert not directory.path.exists()
