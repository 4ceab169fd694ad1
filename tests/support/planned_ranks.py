"""One rank of a test of planners on several devices: a script, as ``shared_model.py`` is.

See ``tests/integration/test_planned_ranks.py``.
"""

from __future__ import annotations

import random
import re
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Gather, Plan, Tier, UpdateLane
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planning import machine_profile
from lightning_hetero.profiling import hardware
from lightning_hetero.strategies import HeteroOffloadStrategy
from support import shared_model
from support.shared_model import RANK, SHARDS, WORLD, batches, model, reference, run_scenarios, same, trainer

MACHINE = Path(__file__).with_name("hardware.json")


def strategy(**options: Any) -> HeteroOffloadStrategy:
    """The default plan, on a machine whose rates are given, except those of collectives."""
    given = {"hardware_profile": MACHINE, "device": shared_model.DEVICE, **options}
    return HeteroOffloadStrategy(block_cls="Layer", update_threads=1, **given)


def on_all_ranks(value: object) -> list[Any]:
    """The value of each rank."""
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, value)
    return found


class Plans(pl.Callback):
    """Notes the plans that come into force; one rank alone may ask for another one.

    Attributes:
        found: The batch, the plan, and the profiles that it was made from.
        checked: Planners whose plans for less and less host memory can run here.
    """

    def __init__(self, asks: int = -1) -> None:
        self.found: list[tuple[int, str, str, str]] = []
        self.checked: set[str] = set()
        self._asks, self._batch = asks, 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        auto = trainer.strategy.autoplan
        if auto.plan is not None and (not self.found or self.found[-1][1] != auto.plan.to_json()):
            self.found.append((self._batch, auto.plan.to_json(), auto.model.to_json(), auto.machine.to_json()))
            self._check(trainer.strategy.session, auto.model, auto.machine)

    def _check(self, session: Any, model: ModelProfile, machine: HardwareProfile) -> None:
        for planner, memory in product(PLANNERS, (machine.host_memory_bytes, 100_000, 70_000, 50_000)):
            with suppress(PlanError, ConfigError):
                plan = PLANNERS[planner](model, replace(machine, host_memory_bytes=memory))
                session.check(session.fitting(plan))
                self.checked.add(planner)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._batch += 1
        if self._batch == self._asks and RANK == WORLD - 1:
            trainer.strategy.replan()


def plans_alike(out: Path) -> None:
    """All ranks measure for the default plan, and have the same; the bits are the reference's."""
    shared, plans = model(), Plans()
    trainer(out, strategy(), max_epochs=2, callbacks=[plans]).fit(shared, batches())
    same(shared, reference("", epochs=2))
    every = on_all_ranks(plans.found)
    assert every == [every[0]] * WORLD, "ranks have the same plan, from the same profiles"
    assert plans.checked >= {"holistic", "host", "disk", "lohan", "protrain", "autohete"}, plans.checked
    assert [batch for batch, *_ in every[0]] == [4], "planned once, after the batches that are measured"
    machine = HardwareProfile.from_json(every[0][0][3])
    assert (machine.ranks, machine.world_size) == (SHARDS, 1)
    assert machine.collective_bytes_per_s > 0
    assert machine.meeting_s > 0
    on_host = shared_model.DEVICE is None and shared_model.ACCELERATOR == "cpu"
    others, lanes = ("update", "compute" if on_host else "copy"), ("net",) if on_host else ("net", "peer")
    pairs = {pair for kind, lane in product(others, lanes) for pair in (f"{lane}|{kind}", f"{kind}|{lane}")}
    found = {pair for pair in machine.contention if "net" in pair or "peer" in pair}
    assert found == pairs, "collectives are measured beside what else ranks do"
    assert (machine.peer_bytes_per_s > 0) is not on_host, "and so are those between devices"
    given = HardwareProfile.load(MACHINE)
    assert machine.cpu_update_params_per_s == given.cpu_update_params_per_s / SHARDS


def clips_by_value(out: Path) -> None:
    """Gradients are clipped in slices, as in the reference."""
    shared, flags = model(), {"gradient_clip_val": 1e-2, "gradient_clip_algorithm": "value"}
    trainer(out, strategy(), max_epochs=2, **flags).fit(shared, batches())
    same(shared, reference("", 1, 1e-2, by_value=True, epochs=2))


def asks_alone(out: Path) -> None:
    """One rank asks for another plan: all measure again, and get it."""
    shared, plans = model(), Plans(asks=6)
    trainer(out, strategy(replan_drift=None), max_epochs=4, callbacks=[plans]).fit(shared, batches())
    same(shared, reference("", epochs=4))
    every = on_all_ranks(plans.found)
    assert every == [every[0]] * WORLD
    assert [batch for batch, *_ in every[0]] == [4, 9], "its blocks are timed again in three batches"


def measures_the_machine(out: Path) -> None:
    """One rank of each node measures, before all have to agree on anything. Plans are for its share
    of disk.
    """
    measured = list[int | None]()

    def measure(machine: object, seconds: float, room: int | None) -> HardwareProfile:
        measured.append(room)
        return HardwareProfile.load(MACHINE)

    shared, plans, capacity = model(), Plans(), 64 << 20
    options = {"disk_path": out / "store", "host_memory": "64MiB", "disk_capacity": capacity, "hardware_profile": None}
    with (
        mock.patch.object(hardware, "_measured", measure),
        mock.patch.object(hardware, "_known", return_value=None),
        mock.patch.object(machine_profile, "ENVIRONMENT", "NO_PROFILE"),
    ):
        trainer(out, strategy(**options), max_epochs=2, callbacks=[plans]).fit(shared, batches())
    same(shared, reference("", epochs=2))
    assert 0 < HardwareProfile.from_json(plans.found[0][3]).disk_capacity_bytes < capacity // SHARDS
    assert on_all_ranks(len(measured)) == [int(rank % SHARDS == 0) for rank in range(WORLD)]


class Moves(pl.Callback):
    """Brings another plan into force before each batch, the same on all ranks."""

    def __init__(self) -> None:
        self._draw = random.Random(7)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        session, draw = trainer.strategy.session, self._draw
        runs, rows = session.runs, list[BlockPlan]()
        for block in session.blocks:
            weights, update = draw.choice(runs.weights), draw.choice(runs.update)
            there = update is UpdateLane.DEVICE and weights is not Tier.DISK
            state = draw.choice([Tier.HOST, Tier.DEVICE if there else Tier.DISK])
            rows.append(BlockPlan(name=block.name, weights=weights, state=state, update=update if there else UpdateLane.CPU))
        wanted = Plan(name="another", blocks=tuple(rows), prefetch_depth=draw.choice([1, 2]), priority=draw.random() < 0.5)
        wanted = replace(wanted, gather=draw.choice([*Gather]) if shared_model.DEVICE is not None else Gather.HOST)
        assert session.replan(wanted).prefetch_depth == wanted.prefetch_depth
        for block, row in zip(session.blocks, session.running.plan.blocks, strict=True):
            whole = all(part.is_whole for part in block.parts)
            assert whole or row.weights is not Tier.DEVICE, "weights that live whole are whole"


def moves_blocks(out: Path) -> None:
    """Plans change between any two batches, and not a bit of the result does."""
    shared = model("frozen tied")
    fixed = HeteroOffloadStrategy("host", device=shared_model.DEVICE, block_cls="Layer", update_threads=1)
    trainer(out, fixed, max_epochs=2, callbacks=[Moves()]).fit(shared, batches())
    same(shared, reference("frozen tied", epochs=2))


def refuses_a_budget_by_what_all_need(out: Path) -> None:
    """The remedy is a budget that is enough for all ranks; that of the last node counts for all."""
    spare = {} if RANK >= WORLD - SHARDS else {"host_memory": "64MiB"}
    with pytest.raises(OutOfMemoryBudgetError) as caught:
        trainer(out, strategy(**{"host_memory": "420KiB"} | spare)).fit(model(), batches())
    found = re.search(r'Raise host_memory to "(\d+)KiB", for (\d) devices together', str(caught.value))
    assert found is not None, str(caught.value)
    assert int(found[2]) == SHARDS
    trainer(out, strategy(**{"host_memory": f"{found[1]}KiB"} | spare), max_steps=1).fit(model(), batches())


def refuses_a_machine_that_some_ranks_have(out: Path) -> None:
    """Ranks that were given no profile would measure, and wait for the others."""
    with (
        mock.patch.object(machine_profile, "ENVIRONMENT", "NO_PROFILE"),
        pytest.raises(ConfigError, match="no hardware profile was given on ranks 1, but one on the others"),
    ):
        trainer(out, strategy(hardware_profile=None if RANK else MACHINE), max_epochs=2).fit(model(), batches())


def refuses_other_plans(out: Path) -> None:
    """Ranks that were given different plans say where these differ, before anything trains."""
    rows = (BlockPlan(name="layers.2", weights=Tier.DEVICE if RANK else Tier.HOST), BlockPlan(name="*"))
    words = r"have other plans. Of block 'layers.2' this rank has BlockPlan.* rank \d something else"
    with pytest.raises(ConfigError, match=words):
        trainer(out, HeteroOffloadStrategy(Plan(name="mine", blocks=rows), block_cls="Layer")).fit(model(), batches())


def refuses_a_machine_of_another_number(out: Path) -> None:
    """A profile of other devices is refused by name."""
    other = replace(HardwareProfile.load(MACHINE), world_size=WORLD + 1)
    with pytest.raises(ConfigError, match=f"has world_size={WORLD + 1}, and {WORLD} devices train together"):
        trainer(out, strategy(hardware_profile=other), max_epochs=2).fit(model(), batches())


if __name__ == "__main__":
    run_scenarios(globals())
