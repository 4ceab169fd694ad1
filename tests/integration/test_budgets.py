"""What counts against a budget, and the table of a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from support.models import LitModel, Recipe, Shape, data, quiet_trainer, run

from lightning_hetero import EmulatedDevice
from lightning_hetero.callbacks import _names, table
from lightning_hetero.ir.plan import BlockPlan, Plan, Prediction, Tier
from lightning_hetero.planners import BUILTIN_PLANS
from lightning_hetero.runtime.device.gradients import HostGradients
from lightning_hetero.runtime.gradient_room import GradientRoom
from lightning_hetero.runtime.process_memory import Heap
from lightning_hetero.strategies import HeteroOffloadStrategy


@pytest.mark.parametrize("host_memory", [None, "1GiB"], ids=["free", "given"])
def test_the_default_budget_includes_activations_once_they_are_known(host_memory: str | None, tmp_path: Path) -> None:
    """They come on top of a budget that is given."""
    strategy = HeteroOffloadStrategy("zero_infinity", host_memory=host_memory)
    needed: list[int] = []

    class Asks(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            session = strategy.session
            assert session is not None
            needed.append(
                session.needed_bytes(BUILTIN_PLANS["host"](session.executor.model).resolve(b.name for b in session.blocks))
            )

    run(Recipe(shape=Shape(layers=24), steps=6), strategy, tmp_path, callbacks=[Asks()])
    assert strategy.model_profile is not None
    activations = sum(b.activation_bytes for b in strategy.model_profile.blocks)
    assert len(set(needed[:4])) == len(set(needed[4:])) == 1
    more = needed[4] - needed[3]
    assert 0.5 * activations < more < 2 * activations if host_memory is None else more == 0


def test_evaluation_needs_no_memory_for_gradients(tmp_path: Path) -> None:
    """Weights in memory, nothing else: 24 blocks with their gradients would need twice as much."""
    module = LitModel(Recipe(shape=Shape(layers=24)))
    weights = sum(p.nbytes for p in module.parameters())
    trainer = quiet_trainer(strategy=HeteroOffloadStrategy("resident", host_memory=weights * 5 // 4), default_root_dir=tmp_path)
    trainer.validate(module, data(2), verbose=False)
    assert len(module.losses) == 2


def test_gradients_that_have_left_a_device_take_what_the_budget_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device each parameter begins at a multiple of 512 bytes, and so do the gradients that
    left it.
    """
    held, take = list[int](), HostGradients._buffer

    def buffer(gradients: HostGradients, *args: Any) -> Any:
        found = take(gradients, *args)
        held.append(sum(one.memory.nbytes for one in gradients._buffers.values()))
        return found

    monkeypatch.setattr(HostGradients, "_buffer", buffer)
    strategy, counted = HeteroOffloadStrategy("host", device=EmulatedDevice("4MiB")), list[int]()

    class Asks(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            assert strategy.session is not None
            counted.append(sum(block.gradient_bytes for block in strategy.session.running.model.blocks))

    run(Recipe(clip=0.3), strategy, tmp_path, callbacks=[Asks()])  # all gradients wait for the norm
    assert max(held) == counted[0]


def test_before_each_block_s_backward_there_is_room_for_its_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What malloc keeps counts as taken: gradients that find no hole come on top."""
    strategy, coming, expected = HeteroOffloadStrategy("host", host_memory="1GiB"), list[int](), set[int]()
    monkeypatch.setattr(Heap, "check", lambda heap, coming_bytes=0: coming.append(coming_bytes))

    class Looks(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            assert strategy.session is not None
            blocks = strategy.session.executor.model.blocks
            pinned = sum(b.gradient_bytes for b in blocks if b.pinned)
            expected.update(pinned + b.gradient_bytes for b in blocks if not b.pinned)

    run(Recipe(steps=2), strategy, tmp_path, callbacks=[Looks()])
    assert expected
    assert {c for c in coming if c} == expected


def test_before_each_forward_there_is_room_for_the_weights_that_it_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is filled again: what malloc has kept of gradients would come on top of it."""
    strategy, coming, expected = HeteroOffloadStrategy("disk", host_memory="1GiB"), list[int](), list[int]()
    monkeypatch.setattr(Heap, "check", lambda heap, coming_bytes=0: coming.append(coming_bytes))
    monkeypatch.setattr(GradientRoom, "make_room", lambda room, block: None)

    class Looks(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            assert strategy.session is not None
            executor = strategy.session.executor
            away = [b for b in executor.blocks if b.weights_on_disk and b.resident][: len(expected)]
            for block in away:
                executor.residency.weights.release(block)
            expected.append(sum(executor.model.blocks[b.index].weight_bytes for b in away))

    run(Recipe(steps=3), strategy, tmp_path, callbacks=[Looks()])
    assert coming == expected
    assert expected[0] == 0 < expected[1] < expected[2]


PREDICTED = Prediction(
    iteration_s=1.5, forward_s=0.5, backward_s=1.0, device_peak_bytes=0, host_peak_bytes=3 * 2**30, disk_bytes=2**30,
    bottleneck={"forward": "compute", "backward": "disk"},
)  # fmt: skip


def test_the_table_of_a_plan_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    disk, memory = (BlockPlan(name="", weights=tier, state=tier) for tier in (Tier.DISK, Tier.HOST))
    names = ["model.model.embed_tokens", *(f"model.model.layers.{i}" for i in range(24)), "model.a_very_long_name." * 4, "lm_head"]

    def shown(rows: list[BlockPlan]) -> list[str]:
        named = tuple(replace(row, name=name) for row, name in zip(rows, names, strict=True))
        made = SimpleNamespace(planned_s=0.31, moved_s=1.2, machine=None)
        return table(Plan(name="p", blocks=named, predicted=PREDICTED), made, None).splitlines()  # type: ignore[arg-type]

    lines = shown([memory, *[disk] * 24, memory, memory])
    assert all(len(line) <= 80 for line in lines)
    assert any("model.model.layers.0 … 23" in line and " 24 " in line and "disk" in line for line in lines)
    assert any("3.0 GiB of memory" in line and "1.0 GiB on disk" in line for line in lines)
    turns = shown([memory, *[disk, memory] * 12, memory, memory])
    assert len(turns) < len(lines), "blocks that take turns are one row for each kind"
    assert any(" 12 " in line for line in turns)
    assert any(" 15 " in line for line in turns)


def test_in_a_notebook_the_table_of_a_plan_is_in_the_log_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich shows what a console prints below the cell, whatever file the console has."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does
    made = SimpleNamespace(planned_s=0.31, moved_s=1.2, machine=None)
    shown = table(Plan(name="p", blocks=(BlockPlan(name="layers.0"),), predicted=PREDICTED), made, None)  # type: ignore[arg-type]
    assert "plan 'p', made in 0.31 s" in shown
    assert "layers.0" in shown
    assert "predicted: a step in 1.5 s" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("rival_s", "said"),
    [
        (1.8, "the next best, plan 'host', would take 1.8 s a step, 20 % more"),
        (1.502, "the next best, plan 'host', would take 1.5 s a step, the same"),
        (1.455, "plan 'host' would take 3 % less, within the error of predictions"),  # everything in memory is preferred
    ],
)
def test_the_table_of_a_plan_says_what_the_next_best_costs(rival_s: float, said: str) -> None:
    made = SimpleNamespace(planned_s=0.31, moved_s=1.2, machine=None)
    plan = Plan(name="p", blocks=(BlockPlan(name="layers.0"),), predicted=PREDICTED)
    rival = replace(plan, name="host", predicted=replace(PREDICTED, iteration_s=rival_s))
    *_, last = table(plan, made, rival).splitlines()  # type: ignore[arg-type]
    assert last.strip() == said


def test_a_range_of_blocks_has_the_common_part_of_its_names_once() -> None:
    assert _names(["model.layers.0", "model.layers.1", "model.layers.11"]) == "model.layers.0 … 11"
    assert _names(["model.layers.2", "model.layers.3", "model.norm"]) == "model.layers.2 … norm"
    assert _names(["embedding", "layers.0"]) == "embedding … layers.0"
