"""Faults of the system, and records that somebody has made up: every error is one of ours, and says
what and where.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import Recipe, Shape, assert_same
from support.resuming import after, train
from support.unreadable import Unreadable

from lightning_hetero.errors import CheckpointWriteError, ConfigError, StoreError
from lightning_hetero.store.format import record, value_shapes
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.encoding import dumps
from lightning_hetero.strategies import HeteroOffloadStrategy, checkpoint_io

RECIPE = Recipe(steps=4, shape=Shape(layers=2))
OPTIMIZER = {"name": "AdamW", "sizes": [2], "groups": [{"lr": 0.1}]}
MOMENT = {"at": -1, "random": {}, "generators": {"dataloader 0: generator": torch.ones(1)}, "drawn_by": [0]}
DATA = {
    "started": None, "samplers_know_epoch": False, "moments": [MOMENT], "memory": {"states": {}, "attributes": {"s": {"epoch": 1}}},
    "generators": {}, "drawn": 2, "calls": 2, "fetched": 2, "held": 0, "done": False, "is_lost": False, "reloaded": [0, None],
    "loaders": [{"batch_size": 2, "drop_last": False, "dataset length": None, "sampler": "RandomSampler"}],
}  # fmt: skip
STATE: dict[str, Any] = {
    "version": "2.6", "epoch": 1, "global_step": 4, "fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 1}}},
    "optimizers": [OPTIMIZER], "changes": {}, "lr_schedulers": [{}], "precision": {}, "buffers": {"b": torch.ones(2)},
    "random": {"0": {}}, "data": DATA, "validation": {"generators": {}, "started": [False]}, "callbacks": {"c": 1},
    "datamodule": ["Data", {"at": 3}], "hyper_parameters": {},
}  # fmt: skip


def state_of(state: Any, *only: str) -> dict[str, Any]:
    return record.state_of(record.parse(record.compose([], dumps(state, "state"), "")), "here", *only)


def test_a_state_as_training_takes_it_is_read() -> None:
    read = state_of(STATE)
    record.check_state(read, "here", value_shapes.Fields(record.STATE))
    assert set(record.STATE) == set(STATE)
    assert state_of({**STATE, "datamodule": None}, "datamodule")["datamodule"] is None


WRONG = st.sampled_from([None, True, 7, -1.5, "text", [], [3], {"a": 1}, [[1]], torch.ones(2), b"bytes"])


@given(field=st.sampled_from(sorted(STATE)), value=WRONG)
def test_a_field_of_another_type_is_refused_by_name(field: str, value: Any) -> None:
    shape = record.STATE[field]
    expected = value_shapes.fault(value, shape, f"state.{field}")
    if not expected:
        state_of({**STATE, field: value})
        return
    for only in ((), (field,)):
        with pytest.raises(ConfigError, match=rf"last record of 'here' cannot be used: state\.{field}.* is "):
            state_of({**STATE, field: value}, *only)


@pytest.mark.parametrize("field", sorted(STATE))
def test_a_field_that_is_missing_is_named(field: str) -> None:
    state = {key: value for key, value in STATE.items() if key != field}
    with pytest.raises(ConfigError, match=field):
        record.check_state(state_of(state), "here", value_shapes.Fields(record.STATE))


@pytest.mark.parametrize(
    ("field", "value", "place"), [
        ("fit_loop", {"epoch_progress": 3}, r"fit_loop\.epoch_progress is int"),
        ("fit_loop", {"epoch_progress": {"current": {"ready": "many"}}}, r"current\.ready is str"),
        ("fit_loop", {"epoch_loop.batch_progress": {"is_last_batch": 3}}, r"is_last_batch is int"),
        ("datamodule", ["Data", 3], r"datamodule\[1\] is int"), ("datamodule", 3, "datamodule is int"),
        ("optimizers", 3, "optimizers is int"), ("lr_schedulers", {"a": 1}, "lr_schedulers is dict"),
        ("random", [1], "random is list"), ("data", {**DATA, "drawn": "x"}, r"data\.drawn is str"),
        ("data", {**DATA, "loaders": [{"batch_size": [2]}]}, r"data\.loaders\[0\]\.batch_size is list"),
        ("data", {**DATA, "loaders": [2]}, r"loaders\[0\] is int"),
        ("data", {**DATA, "moments": 3}, r"data\.moments is int"), ("validation", [1], "validation is list"),
        ("validation", {"generators": {}, "started": [3]}, r"started\[0\] is int"),
        ("buffers", {"b": 1}, r"buffers\.b is int"),
    ],
)  # fmt: skip
def test_a_resume_from_a_record_with_wrong_types_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any, place: str
) -> None:
    def keeping() -> Any:
        return HeteroOffloadStrategy("host", disk_path=tmp_path / "store")

    train(tmp_path, keeping(), RECIPE, stop=2)
    original = record.loads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "loads", lambda *args: {k: value if k == field else v for k, v in original(*args).items()})
        with pytest.raises(ConfigError, match=place):
            train(tmp_path, keeping(), RECIPE, store=tmp_path / "store")
    train(tmp_path, keeping(), RECIPE, store=tmp_path / "store")


@pytest.mark.parametrize("plan", ["resident", "disk"])
def test_a_full_disk_under_an_ordinary_checkpoint_is_named(tmp_path: Path, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    io = checkpoint_io.make("lightning.pytorch")
    io.streams = plan == "disk"

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointWriteError, match=r"x\.ckpt' cannot be written: .*No space left.*Make room"):
        io.save_checkpoint({"a": torch.ones(3)}, tmp_path / "x.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_removed_is_named_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(tmp_path, "auto", RECIPE)
    store = tmp_path / "store"
    train(tmp_path, HeteroOffloadStrategy("host", disk_path=store), RECIPE, stop=2)
    (store / f"state-{'0' * 32}").write_bytes(b"of a process that died")
    original = os.unlink

    def fails(path: Any, **options: Any) -> None:
        if str(path).startswith("state-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", fails)
        with pytest.raises(StoreError, match=r"store/state-0+' cannot be removed: Input/output error.*go on from"):
            train(tmp_path, HeteroOffloadStrategy("host", disk_path=store), RECIPE, store=store)
    assert_same(train(tmp_path, HeteroOffloadStrategy("host", disk_path=store), RECIPE, store=store), after(plain, 2))


def test_whatever_read_of_a_store_fails_the_file_is_named(tmp_path: Path) -> None:
    train(tmp_path, HeteroOffloadStrategy("disk", disk_path=tmp_path / "store", verify_digests=True), RECIPE, stop=2)

    def read_all() -> None:
        with StoreFiles(tmp_path / "store") as store:
            assert store.record is not None
            for block in store.record.blocks:
                with store.slot(block) as slot:
                    slot.read_weights(0, torch.empty(16))
                    slot.read_state(0, 0, torch.empty(16))
                    assert slot.has_digests
                    assert not list(slot.check())

    with pytest.MonkeyPatch.context() as patch:
        whole = Unreadable(patch, "/store/", -1)
        read_all()
    assert {Path(path).name[:6] for path in whole.reads} == {"MANIFE", "COMMIT", "block-"}
    for number in range(len(whole.reads)):
        with pytest.MonkeyPatch.context() as patch:
            broken = Unreadable(patch, "/store/", number)
            with pytest.raises(StoreError, match=r"cannot be read.*Input/output error") as raised:
                read_all()
        assert repr(broken.failed) in str(raised.value)
        assert ("block " in str(raised.value)) is ("block-" in broken.failed)
