"""Frozen parts have one slot on disk, which is written once. What changes them gives them two, and
a resume finds every step.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.frozen import FROZEN, RECIPE, SGD, Change, by_hand, fit, loads, loads_the_same, slots_of, unfreezes
from support.models import LitModel, Recipe, assert_same
from support.recipes import MIXED
from support.resuming import after, offload
from support.strategies import on_device

from lightning_hetero.strategies import HeteroOffloadStrategy

PLANS = ["disk", "host", MIXED, on_device]


@pytest.mark.parametrize("plan", PLANS, ids=["disk", "host", "mixed", "device"])
def test_frozen_weights_are_written_once_to_one_slot(plan: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    got = fit(tmp_path, offload(plan, store, verify_digests=True), change=loads_the_same)
    assert_same(got, fit(tmp_path, "auto"))
    found = slots_of(store)
    assert len(found) == len(FROZEN)
    assert {number for number, _ in found.values()} == {1}
    assert max(step for _, step in found.values()) <= 1, "a step of training has written them"


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("change", [by_hand, loads, unfreezes])
@pytest.mark.parametrize("plan", PLANS, ids=["disk", "host", "mixed", "device"])
def test_frozen_weights_that_change_have_two_slots_from_then_on(plan: Any, change: Change, every: int, tmp_path: Path) -> None:
    store = tmp_path / "store"
    at = (2,) if change is unfreezes else (2, 4)
    plain = fit(tmp_path, "auto", change=change, at=at)
    fit(tmp_path, offload(plan, store, verify_digests=True, keep_every=every), change=change, at=at, stop=4)
    assert max(number for number, _ in slots_of(store).values()) == 2
    got = fit(tmp_path, offload("disk", store, verify_digests=True, keep_every=every), change=change, at=at, store=store)
    assert_same(got, after(plain, RECIPE.steps - 4))


def test_frozen_weights_that_join_an_optimizer_with_code_of_its_own_have_two_slots(tmp_path: Path) -> None:
    store = tmp_path / "store"
    plain = fit(tmp_path, "auto", SGD, change=unfreezes, at=(2,))
    fit(tmp_path, offload("disk", store, verify_digests=True), SGD, change=unfreezes, at=(2,), stop=4)
    assert sorted(number for number, _ in slots_of(store).values()) == [1, 2]
    got = fit(tmp_path, offload("host", store, verify_digests=True), SGD, change=unfreezes, at=(2,), store=store)
    assert_same(got, after(plain, RECIPE.steps - 4))


@pytest.mark.parametrize("plan", ["disk", "host"])
def test_a_step_after_which_they_join_an_optimizer_is_resumed(plan: str, tmp_path: Path) -> None:
    """The optimizer has them when the step's record is written, and has not stepped since."""
    store = tmp_path / "store"
    plain = fit(tmp_path, "auto", change=unfreezes, at=(2,))
    fit(tmp_path, offload(plan, store), change=unfreezes, at=(2,), stop=2)
    got = fit(tmp_path, offload("disk", store, verify_digests=True), change=unfreezes, at=(2,), store=store)
    assert_same(got, after(plain, RECIPE.steps - 2))


@pytest.mark.parametrize("plan", ["disk", "host"])
def test_the_disk_account_has_one_slot_of_them(plan: str, tmp_path: Path) -> None:
    def needed(recipe: Recipe) -> int:
        strategy = offload(plan, tmp_path / str(len(recipe.shape.frozen)))
        fit(tmp_path, strategy, recipe)
        return int(strategy.memory_report()["disk_bytes"])

    wide = replace(RECIPE, steps=1, shape=replace(RECIPE.shape, width=256))
    trained = replace(wide, shape=replace(wide.shape, frozen=()))
    weights = sum(p.nbytes for i in FROZEN for p in LitModel(wide).model.blocks[i].parameters())
    # Two slots of weights and state, against one of weights.
    assert 0.98 * 5 * weights < needed(trained) - needed(wide) < 1.02 * 5 * weights


def test_a_store_of_frozen_weights_with_two_slots_is_resumed_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions gave all parts two."""
    store = tmp_path / "store"
    plain = fit(tmp_path, "auto")
    with monkeypatch.context() as patched:
        patched.setattr("lightning_hetero.runtime.session.set_slots", lambda *_: None)
        fit(tmp_path, offload("disk", store, verify_digests=True), stop=3)
    assert {number for number, _ in slots_of(store).values()} == {2}
    for plan, stop in (("disk", 4), ("host", None)):
        got = fit(tmp_path, offload(plan, store, verify_digests=True), store=store, stop=stop)
        assert {number for number, _ in slots_of(store).values()} == {1}
    assert_same(got, after(plain, RECIPE.steps - 4))


def test_a_scratch_store_works_likewise(tmp_path: Path) -> None:
    plain = fit(tmp_path, "auto", change=by_hand)
    assert_same(fit(tmp_path, HeteroOffloadStrategy("disk"), change=by_hand), plain)
