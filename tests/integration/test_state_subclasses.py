"""Optimizer state in tensor subclasses, and of any dtype, goes to disk and comes back; 8-bit
optimizers have such state.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.coded import Coded, CodedDescent, NestedDescent, OpaqueDescent
from support.models import LitModel, Outcome, Recipe, Shape, data, quiet_trainer
from support.resuming import BATCHES, Ends, EndsAt
from support.strategies import make_strategy, on_device
from torch import Tensor

from lightning_hetero.checkpoint import load, save
from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.optim.subclasses import leaves
from lightning_hetero.strategies import HeteroOffloadStrategy

SHAPE = Shape(half_frozen=True, tied=True)


@pytest.fixture(autouse=True)
def _known_to_load() -> Iterator[None]:
    """``Coded`` is safe to load in these tests. What other packages have registered on import stays
    registered.
    """
    with torch.serialization.safe_globals([Coded]):
        yield


def plain(states: dict[Any, Any]) -> dict[Any, dict[str, Any]]:
    return {k: {**{n: v for n, v in s.items() if not isinstance(v, Tensor)}, **leaves(s)} for k, s in states.items()}


def assert_same(got: Outcome, expected: Outcome) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got.losses, expected.losses[-len(got.losses) :], strict=True))
    assert all(torch.equal(got.weights[name], value) for name, value in expected.weights.items())
    for ours, theirs in zip(got.state, expected.state, strict=True):
        assert {k: {n: type(v) for n, v in s.items()} for k, s in ours["state"].items()} == {
            k: {n: type(v) for n, v in s.items()} for k, s in theirs["state"].items()
        }
        mine = plain(ours["state"])
        for number, entry in plain(theirs["state"]).items():
            assert mine[number].keys() == entry.keys()
            for key, value in entry.items():
                there = mine[number][key]
                assert type(there) is type(value), key
                same = torch.equal(there, value) and there.dtype == value.dtype if isinstance(value, Tensor) else there == value
                assert same, f"{number}.{key}"


def train(
    strategy: Any, kind: Any, folder: Path, *, stop: int | None = None, path: Path | None = None, precision: Any = "32-true",
    shape: Shape = SHAPE, epochs: int = 1, end: Any = None,
) -> Outcome:  # fmt: skip
    torch.manual_seed(7)
    module = LitModel(Recipe(shape=shape, optimizer=kind))
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=epochs, default_root_dir=folder, precision=precision, gradient_clip_val=0.5,
        callbacks=[] if stop is None else [EndsAt(stop)],
    )  # fmt: skip
    weights_only = None if path is None or path.is_dir() else True
    if stop is None:
        trainer.fit(module, data(BATCHES), ckpt_path=path, weights_only=weights_only)
    else:
        with pytest.raises(Ends):
            trainer.fit(module, data(BATCHES), ckpt_path=path)
    if end is not None:
        end(trainer)
    state = [o.state_dict() for o in trainer.optimizers] if stop is None else []
    return Outcome(module.losses, {n: v.clone() for n, v in module.state_dict().items()} if stop is None else {}, state)


@pytest.mark.parametrize("kind", [CodedDescent, NestedDescent])
@pytest.mark.parametrize("plan", ["host", "disk", "tight"])
def test_state_in_subclasses(plan: str, kind: Any, tmp_path: Path) -> None:
    run = partial(train, kind=kind, folder=tmp_path)
    assert_same(run(make_strategy(plan, run)), run("auto"))


@pytest.mark.parametrize("plan", ["host", "disk"])
def test_checkpoints_go_both_ways(plan: str, tmp_path: Path) -> None:
    for name in ("auto", plan):
        strategy = "auto" if name == "auto" else HeteroOffloadStrategy(name)
        train(strategy, CodedDescent, tmp_path, end=lambda t, name=name: t.save_checkpoint(tmp_path / f"{name}.ckpt"))
    states = [load(tmp_path / f"{name}.ckpt", weights_only=True)["optimizer_states"] for name in ("auto", plan)]
    assert_same(Outcome([], {}, states[1]), Outcome([], {}, states[0]))
    # Plain Lightning cannot load it: torch has no function as map_location for such tensors.
    names = (
        train(HeteroOffloadStrategy(plan), CodedDescent, tmp_path, path=tmp_path / f"{n}.ckpt", epochs=2) for n in ("auto", plan)
    )
    assert_same(*names)


@pytest.mark.parametrize("plans", [("host", "disk"), ("disk", "host")], ids=str)
@pytest.mark.parametrize("kind", [CodedDescent, NestedDescent])
def test_a_resume_from_a_store(kind: Any, plans: tuple[str, str], tmp_path: Path) -> None:
    expected = train("auto", kind, tmp_path, epochs=2)
    store = tmp_path / "store"
    train(HeteroOffloadStrategy(plans[0], disk_path=store), kind, tmp_path, stop=5, epochs=2)
    got = train(HeteroOffloadStrategy(plans[1], disk_path=store), kind, tmp_path, path=store, epochs=2)
    assert len(got.losses) == 3
    assert_same(got, expected)


def test_a_record_names_no_class_that_is_not_known_as_safe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.serialization, "get_safe_globals", list)
    with caplog.at_level(logging.WARNING):
        train(HeteroOffloadStrategy("disk", disk_path=tmp_path / "store"), CodedDescent, tmp_path)
    assert any("add_safe_globals([Coded])" in text and "cannot be resumed from" in text for text in caplog.messages)


def test_a_store_makes_no_class_that_is_not_known_as_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    train(HeteroOffloadStrategy("disk", disk_path=store), CodedDescent, tmp_path, stop=3)
    monkeypatch.setattr(torch.serialization, "get_safe_globals", list)
    with pytest.raises(ConfigError, match=r"optimizer state of class support\.coded\.Coded"):
        train(HeteroOffloadStrategy("disk", disk_path=store), CodedDescent, tmp_path, path=store)


def test_state_of_an_opaque_class_is_refused_on_disk(tmp_path: Path) -> None:
    train(HeteroOffloadStrategy("host"), OpaqueDescent, tmp_path)
    with pytest.raises(UnsupportedError, match=r"momentum is a tensor of support\.coded\.Opaque"):
        train(HeteroOffloadStrategy("disk"), OpaqueDescent, tmp_path)


def test_state_is_read_where_it_is_copied_and_saved(tmp_path: Path) -> None:
    """While state is on disk: a copy of it, and a streamed file, have what is there."""
    seen = []

    class Looks(LitModel):
        def on_train_batch_end(self, *_: Any) -> None:
            state = self.trainer.optimizers[0].state_dict()
            save(state, tmp_path / "state.pt")
            loaded = load(tmp_path / "state.pt", weights_only=True)
            for number, entry in copy.deepcopy(state)["state"].items():
                seen.append(torch.equal(entry["momentum"].value(), loaded["state"][number]["momentum"].value()))
                seen.append(torch.equal(entry["count"], loaded["state"][number]["count"]))

    torch.manual_seed(7)
    trainer = quiet_trainer(strategy=HeteroOffloadStrategy("disk"), max_steps=2, default_root_dir=tmp_path)
    trainer.fit(Looks(Recipe(optimizer=CodedDescent)), data())
    assert seen
    assert all(seen)


WIDE = Shape(layers=2, width=128)  # its embedding and its head are large enough for 8-bit state


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao, whose 8-bit AdamW is trained here, is missing")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_low_bit_optimizers_of_torchao(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchao = importlib.import_module("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # it takes longer than the training

    class LowBit(getattr(torchao, name)):  # type: ignore[misc]
        hetero_blockwise = True

    class Model(LitModel):
        def __init__(self, recipe: Recipe) -> None:
            super().__init__(recipe)
            self.more = torch.nn.Linear(128, 128)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + self.more(torch.ones(128)).square().mean()

    def run(strategy: Any, *, stop: int | None = None, path: Path | None = None) -> Outcome:
        torch.manual_seed(7)
        module = Model(Recipe(shape=WIDE, optimizer=lambda groups: LowBit(groups, lr=1e-3)))
        trainer = quiet_trainer(
            strategy=strategy, max_epochs=1, default_root_dir=tmp_path, callbacks=[] if stop is None else [EndsAt(stop)]
        )
        if stop is not None:
            with pytest.raises(Ends):
                trainer.fit(module, data(BATCHES))
            return Outcome([], {}, [])
        trainer.fit(module, data(BATCHES), ckpt_path=path)
        return Outcome(module.losses, {n: v.clone() for n, v in module.state_dict().items()}, [trainer.optimizers[0].state_dict()])

    expected = run("auto")
    kinds = {type(v) for s in expected.state[0]["state"].values() for v in s.values()}
    assert any(kind not in (Tensor, int) for kind in kinds), "some state has few bits"
    assert_same(run(HeteroOffloadStrategy("disk")), expected)
    assert_same(run(on_device("resident")), expected)
    store = tmp_path / "store"
    run(HeteroOffloadStrategy("disk", disk_path=store), stop=2)
    assert_same(run(HeteroOffloadStrategy("disk", disk_path=store), path=store), expected)
