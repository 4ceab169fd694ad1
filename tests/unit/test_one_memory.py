"""Machines whose device is in the host's memory: one budget for both, and no gain from moving to
the host.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli import PRESET, invoke, parsed
from support.holistic import MB, MODEL, ROOMY

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.plan import Tier
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.baselines import variants
from lightning_hetero.planners.evaluation import evaluated
from lightning_hetero.profiling import presets
from lightning_hetero.units import GIB

ONE = replace(ROOMY, name="one memory", unified_memory=True, device_memory_bytes=4000 * MB, host_memory_bytes=4000 * MB)
MACHINE = ["--device", "gb10", "--host-memory", "100GiB", "--disk", "980pro"]


def machine_of(both: int) -> HardwareProfile:
    return replace(ONE, device_memory_bytes=both, host_memory_bytes=both)


def least_of(name: str) -> int:
    """The least memory that a baseline's first plan runs in, to a megabyte."""
    low, high = 0, 8000
    plan = variants(name, MODEL.shape(), ONE)[0]
    while high - low > 1:
        middle = (low + high) // 2
        try:
            evaluated(plan, MODEL, machine_of(middle * MB))
        except PlanError:
            low = middle
        else:
            high = middle
    return high * MB


def test_weights_on_the_host_need_more_than_on_the_device() -> None:
    """The device has copies of what it uses beside them."""
    assert least_of("resident") < least_of("host")
    apart = replace(ROOMY, device_memory_bytes=least_of("resident") // 2)
    assert PLANNERS["host"](MODEL, apart).predicted is not None
    with pytest.raises(PlanError):
        PLANNERS["resident"](MODEL, apart)


def test_what_is_lacking_is_lacking_of_both_together() -> None:
    least = least_of("resident")
    with pytest.raises(PlanError, match="of host memory") as caught:
        PLANNERS["resident"](MODEL, machine_of(least - 50 * MB))
    assert 49 * MB <= caught.value.shortfall_bytes <= 51 * MB
    assert "optimizer state that lives there" in str(caught.value)


@pytest.mark.parametrize("spare", [0, 10, 100, 1000])
def test_no_plan_is_slower_than_no_offload_where_that_fits(spare: int) -> None:
    machine = machine_of(least_of("resident") + spare * MB)
    resident = PLANNERS["resident"](MODEL, machine).require_predicted()
    found = PLANNERS["holistic"](MODEL, machine, prefer_resident=0.0).require_predicted()
    assert found.iteration_s <= resident.iteration_s


@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
def test_what_does_not_fit_goes_to_the_disk(share: float) -> None:
    machine = machine_of(int(share * least_of("full_recompute")))
    found = PLANNERS["holistic"](MODEL, machine)
    predicted = found.require_predicted()
    assert predicted.device_peak_bytes + predicted.host_peak_bytes <= machine.host_memory_bytes
    assert any(Tier.DISK in (block.weights, block.state) for block in found.blocks)


def test_a_profile_says_it_only_of_such_a_machine() -> None:
    assert json.loads(ONE.to_json())["unified_memory"] is True
    assert "unified_memory" not in json.loads(ROOMY.to_json())
    for machine in (ONE, ROOMY):
        assert HardwareProfile.from_json(machine.to_json()) == machine
    both = json.dumps({**json.loads(ONE.to_json()), "shared_memory": True})
    with pytest.raises(ConfigError, match="one of them"):
        HardwareProfile.from_json(both)


def test_a_device_in_host_memory_has_no_more_than_the_host() -> None:
    machine = presets.machine(device="gb10", host_memory="64GiB")
    assert (machine.unified_memory, machine.device_memory_bytes, machine.host_memory_bytes) == (True, 64 * GIB, 64 * GIB)
    assert not presets.machine(device="gh200", host_memory="480GiB").unified_memory


def test_plan_and_explain_say_that_both_have_one_memory(tmp_path: Path) -> None:
    text = " ".join(invoke("plan", *PRESET, *MACHINE, "--out", tmp_path / "plan.json").stdout.split())
    assert "100.0 GiB of memory for device and host together, at most 100.0 GiB of it for the device" in text
    shown = " ".join(invoke("explain", tmp_path / "plan.json").stdout.split())
    assert "Device and host have one memory" in shown
    found = parsed("explain", tmp_path / "plan.json")["tiers"]
    assert found["host"]["peak_bytes"] > found["device"]["peak_bytes"] > 0
    assert found["host"]["capacity_bytes"] == 100 * GIB
