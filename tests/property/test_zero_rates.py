"""A rate of 0 says that the machine cannot do that work: plans that need it are no candidates, the
others are.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machines import ROOMY
from support.profiles import machines, models
from support.properties import examples

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.planners import PLANNERS

RATES = (
    "cpu_update_params_per_s",
    "device_update_params_per_s",
    "link_h2d_bytes_per_s",
    "link_d2h_bytes_per_s",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
    "cpu_downcast_params_per_s",
)
TIE = 1 + 1e-9


def _seconds(model: ModelProfile, hardware: HardwareProfile) -> dict[str, float]:
    """The step of each planner that has a plan. Any error but ``PlanError`` goes on."""
    found = {}
    for name, planner in PLANNERS.items():
        options = {"prefer_resident": 0.0} if name == "holistic" else {}
        try:
            predicted = planner(model, hardware, **options).predicted
        except PlanError:
            continue
        assert predicted is not None
        found[name] = predicted.iteration_s
    return found


def _check(model: ModelProfile, hardware: HardwareProfile) -> None:
    found = _seconds(model, hardware)
    assert ("holistic" in found) == bool(found), found
    assert not found or found["holistic"] <= min(found.values()) * TIE, found


@examples(60)
@given(models(), machines(), st.sets(st.sampled_from(RATES), min_size=1, max_size=3))
def test_a_planner_needs_no_work_that_is_impossible(model: ModelProfile, hardware: HardwareProfile, zeros: set[str]) -> None:
    _check(model, replace(hardware, **dict.fromkeys(zeros, 0.0)))  # type: ignore[arg-type]


MODEL = ModelProfile(
    name="m",
    tokens=8,
    compute_itemsize=2,
    constant_device_bytes=0,
    constant_host_bytes=0,
    blocks=tuple(
        BlockProfile(
            name=f"layers.{i}",
            num_params=10**7,
            num_trainable_params=10**7,
            forward_s=0.01,
            backward_s=0.02,
            forward_flop=1e10,
            activation_bytes=10**8,
            boundary_bytes=10**7,
            transient_bytes=10**6,
        )
        for i in range(3)
    ),
)


@pytest.mark.parametrize("device_bytes", [10**10, 4 * 10**8])  # all fits, or about half of it
@pytest.mark.parametrize("zeros", [z for z in product((False, True), repeat=4) if any(z)], ids=str)
def test_every_combination_of_missing_updates_and_links(zeros: tuple[bool, ...], device_bytes: int) -> None:
    missing = {name: 0.0 for name, zero in zip(RATES, zeros, strict=False) if zero}
    hardware = replace(ROOMY, device_memory_bytes=device_bytes, **missing)  # type: ignore[arg-type]
    _check(MODEL, hardware)
    able = not zeros[1] or not (zeros[0] or zeros[2] or zeros[3])
    assert bool(_seconds(MODEL, hardware)) == (able and (device_bytes == 10**10 or not (zeros[2] or zeros[3])))


def test_a_machine_that_cannot_update_is_told_which_rates_to_give() -> None:
    hardware = replace(ROOMY, cpu_update_params_per_s=0.0, device_update_params_per_s=0.0)
    for planner in PLANNERS.values():
        with pytest.raises(PlanError, match=r"update_params_per_s=0.*[Mm]easure or give"):
            planner(MODEL, hardware)
