"""Devices of several ranks exchange weights and gradients in the faster way, by simulation."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from brute_force import SmallCase, fastest, small_cases
from support.covers import is_deep
from support.simulations import model_of

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.plan import Gather
from lightning_hetero.lanes import EmulatedDevice
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.evaluation import evaluated
from lightning_hetero.planners.one_rank import share_of
from lightning_hetero.planning.machine_profile import emulated

WITHIN = 0.02
HOST = Path(__file__).parents[1] / "support" / "hardware.json"


def _between(case: SmallCase, number: int) -> SmallCase:
    """The case with links between its devices: fast ones and slow ones in turn."""
    rate = 10 ** random.Random(number).uniform(*((7.5, 9.0) if number % 2 else (11.0, 12.5)))
    return replace(case, hardware=replace(case.hardware, gathers_in_place=True, peer_bytes_per_s=rate))


def _other_way(case: SmallCase) -> SmallCase:
    return replace(case, hardware=replace(case.hardware, gathers_on_devices=True))


def test_the_joint_planner_finds_the_fastest_plan_of_both_ways() -> None:
    ways = set[Gather]()
    every = small_cases(36, 11, most_plans=250, ranks=True, devices=True)
    cases = [case for case in every if not case.hardware.shared_memory][:: 1 if is_deep() else 6]
    for number, case in enumerate(_between(case, number) for number, case in enumerate(cases)):
        best = min(fastest(case), fastest(_other_way(case)), key=lambda one: one.seconds)
        if best.plan is None:
            continue
        found = PLANNERS["holistic"](case.model, case.hardware, updates=case.updates, prefer_resident=0.0, evaluations=300)
        assert found.objective_s is not None
        assert found.objective_s <= best.seconds * (1 + WITHIN), (number, case.name, found.gather)
        again = evaluated(found, case.model, case.hardware, updates=case.updates)
        assert again.require_predicted().iteration_s == pytest.approx(found.objective_s), "its plan says which way it takes"
        ways.add(found.gather)
    assert ways == set(Gather), "some of these devices have fast links and some have none"


@pytest.mark.parametrize("planner", PLANNERS)
def test_emulated_devices_with_fast_and_slow_links_choose_differently(planner: str) -> None:
    model = replace(model_of(*[100_000] * 4), tokens=8).slice_of(4)
    chosen = []
    for rate in (1e11, 1e6):
        device = EmulatedDevice("8MiB", h2d_bytes_per_s=1e7, d2h_bytes_per_s=1e7, net_bytes_per_s=1e8, peer_bytes_per_s=rate)
        machine = replace(emulated(HardwareProfile.load(HOST), device), world_size=4, gathers_in_place=True, meeting_s=1e-6)
        chosen.append(PLANNERS[planner](model, share_of(machine)).gather)
    assert chosen == [Gather.DEVICE, Gather.HOST]
