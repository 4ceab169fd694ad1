"""A device in the host's memory: one budget for both, and the bits of plain Lightning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from support.cuda import MIXED, StandIn
from support.models import Recipe, Shape, assert_same, run
from support.streams import FakeCuda

from lightning_hetero import EmulatedDevice
from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.ir.plan import Tier
from lightning_hetero.lowering import Purpose
from lightning_hetero.lowering.needs import total_bytes
from lightning_hetero.runtime.session import Session
from lightning_hetero.strategies import HeteroOffloadStrategy
from lightning_hetero.units import MIB

RECIPE = Recipe(shape=Shape(layers=16, width=96, dropout=0.2, counting=False), steps=6)


def strategy_of(plan: Any, memory: int, *, unified: bool = True, **options: Any) -> HeteroOffloadStrategy:
    return HeteroOffloadStrategy(plan, device=EmulatedDevice("16MiB", unified=unified), host_memory=memory, **options)


def least_of(plan: str, folder: Path, *, unified: bool = True) -> int:
    """The ``host_memory`` that it needs, bytes."""
    needed: list[int] = []

    class Asks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            session: Session = trainer.strategy.session
            needed.append(session.needed_bytes(session.running.plan))

    recipe = replace(RECIPE, steps=1)
    run(recipe, strategy_of(plan, 32 * MIB, unified=unified), folder, callbacks=[Asks()])
    run(recipe, strategy_of(plan, needed[0], unified=unified), folder)
    with pytest.raises(OutOfMemoryBudgetError) as caught:
        run(recipe, strategy_of(plan, needed[0] - 1, unified=unified), folder)
    assert caught.value.tier == "host"
    return needed[0]


@pytest.mark.parametrize("plan", ["resident", "host", "disk", MIXED], ids=["resident", "host", "disk", "mixed"])
def test_training_has_the_bits_of_plain_lightning(plan: Any, tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(layers=4, dropout=0.2, counting=False), steps=4, clip=0.3)
    assert_same(run(recipe, strategy_of(plan, 16 * MIB), tmp_path), run(recipe, "auto", tmp_path))


def test_a_device_with_streams_has_them_too(fake: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake.unified = True
    recipe = Recipe(shape=Shape(layers=4, dropout=0.2, counting=False), steps=4)
    strategy = HeteroOffloadStrategy(MIXED, host_memory="8MiB")
    got = run(recipe, strategy, tmp_path, accelerator=StandIn(), devices=1)
    assert_same(got, run(recipe, "auto", tmp_path))
    assert [r.message for r in caplog.records if "host_memory is for both together" in r.message]


def test_what_is_on_the_host_is_counted_beside_its_copies_on_the_device(tmp_path: Path) -> None:
    """With memory of its own for the device, what it has takes nothing of ``host_memory``."""
    apart, together = (least_of("host", tmp_path, unified=unified) for unified in (False, True))
    assert least_of("resident", tmp_path) < together
    assert apart < together


def test_a_budget_that_is_too_small_for_both_is_refused_with_a_table_of_both(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryBudgetError) as caught:
        run(RECIPE, strategy_of("resident", MIB), tmp_path)
    text = str(caught.value)
    assert "host_memory allows 1.0 MiB" in text
    assert Purpose.STATE.value in text


class Looks(pl.Callback):
    """Takes what device and host may have as a batch ends, and where everything is."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.tiers: list[set[Tier]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        session: Session = trainer.strategy.session
        placement = session.running.context.placement
        needs = session._placer().needs(placement.plan, placement.rules)
        assert placement.host_memory is not None
        self.taken.append(total_bytes(needs.device) + placement.device_cache_bytes + placement.host_memory)
        self.tiers.append({tier for block in placement.plan.blocks for tier in (block.weights, block.state)})


@pytest.mark.parametrize("share", [1.5, 0.85], ids=["all fits", "disk"])
def test_the_library_s_plans_stay_within_one_memory(share: float, tmp_path: Path) -> None:
    """From the first batch to its own plan, nothing is where it would be there twice."""
    memory, looks = int(share * least_of("resident", tmp_path)), Looks()
    strategy = strategy_of("auto", memory)
    got = run(RECIPE, strategy, tmp_path, callbacks=[looks])
    assert_same(got, run(RECIPE, "auto", tmp_path))
    assert max(looks.taken) <= memory
    assert strategy.plan is not None
    if share > 1:
        assert looks.tiers[0] == {Tier.DEVICE}
        assert Tier.DISK not in looks.tiers[-1]
    else:
        assert Tier.DISK in looks.tiers[0] & looks.tiers[-1]
