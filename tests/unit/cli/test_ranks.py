"""The commands about several devices that hold one model together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli import invoke, parsed
from support.simulations import CPU, ON_HOST, model_of, plan_of

from lightning_hetero.cli.ranks import together
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.plan import Plan, UpdateLane
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.evaluation import evaluated, simulation
from lightning_hetero.planners.one_rank import as_run, one_rank
from lightning_hetero.profiling import presets

PRESET = ["--preset-model", "gpt:layers=4,hidden=2048,heads=16", "--batch", "8", "--sequence", "512"]
BOX = ["--device", "rtx4090", "--host-memory", "64GiB", "--devices", "4", "--peers", "10GB"]


def test_a_plan_of_several_devices_says_what_all_have_and_what_each(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = " ".join(invoke("plan", *PRESET, *BOX, "--out", path).stdout.split())
    got = parsed("plan", *PRESET, *BOX)
    found, p = got["all_devices"], got["predicted"]
    assert (found["devices"], found["ranks"]) == (4, 4)
    assert found["tokens_per_s"] == pytest.approx(4 * 8 * 512 / p["iteration_s"])
    assert found["host_peak_bytes"] == 4 * p["host_peak_bytes"]
    assert "24.0 GiB of memory on each of 4 devices, 64.0 GiB host memory for all" in words
    assert "of optimizer state are its own" in words
    for command in ("explain", "simulate"):
        assert "each device" in invoke(command, path).stdout
    invoke("report", path, "--out", tmp_path / "page.html")
    assert "of optimizer state are its own" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("planner", ["deep_optimizer_states", "protrain"])
def test_a_planner_of_updates_on_the_device_plans_them_for_slices(planner: str, tmp_path: Path) -> None:
    """The papers' own plans update on the device: each of several devices updates its slices."""
    words = " ".join(invoke("plan", *PRESET, *BOX, "--planner", planner, "--out", tmp_path / "p.json").stdout.split())
    plan = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))
    assert "device" in {block["update"] for block in plan["blocks"]}
    assert "of optimizer state are its own" in words


def test_a_plan_that_devices_do_not_share_says_so() -> None:
    """Devices that are the host's own CPU have no update of their own."""
    plan, model, machine = (
        plan_of(replace(ON_HOST, update=UpdateLane.DEVICE), ON_HOST),
        model_of(20, 20),
        replace(CPU, world_size=2),
    )
    found = evaluated(plan, *as_run(plan, model, machine))
    assert "without the time of collectives and with a whole copy each" in together(found, model, machine)["all devices"]


def test_exchanges_between_devices_are_named() -> None:
    words = " ".join(invoke("plan", *PRESET, *BOX[:-1], "10MB").stdout.split())
    assert "bound by the exchange between devices" in words


def test_what_is_missing_is_of_each_device() -> None:
    refusal = invoke("plan", *PRESET[:1], "llama-13b", *PRESET[2:], *BOX[:2], "--host-memory", "32GiB", *BOX[4:], code=2)
    assert "more host memory for each of 4 devices" in refusal.stderr


def test_a_link_between_devices_has_a_name_or_a_rate() -> None:
    def rate(peers: str | int | None, count: int = 2) -> float:
        return presets.machine(device="rtx4090", host_memory="64GiB", count=count, peers=peers).between_devices_bytes_per_s

    assert rate("10GB") == 10e9
    assert rate("nvlink4") == 0.75 * 450e9
    assert rate("pcie4") < rate("nvlink3")
    assert rate(None) == 12.5e9, "through the host"
    with pytest.raises(ConfigError, match="no peers preset 'nvlink9'"):
        rate("nvlink9")
    with pytest.raises(ConfigError, match="connects several devices, and there is one"):
        rate("10GB", count=1)


def test_a_machine_is_simulated_as_one_of_its_ranks() -> None:
    machine = presets.machine(device="rtx4090", host_memory="64GiB", count=4)
    model = presets.model("gpt:layers=4,hidden=2048,heads=16", batch=8, sequence=512, hardware=machine)
    plan: Plan = PLANNERS["host"](model, machine)
    share = one_rank(model, machine)
    assert simulation(plan, model, machine).prediction == simulation(plan, *share).prediction
    assert evaluated(plan, model, machine) == evaluated(plan, *share)
    alone = simulation(plan, model, replace(machine, world_size=1)).prediction
    assert alone.host_peak_bytes > 1.5 * plan.require_predicted().host_peak_bytes, "one of four has a fourth of the state"


def test_explain_says_where_devices_exchange_and_what_the_other_way_takes(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast.json", tmp_path / "slow.json"
    invoke("plan", *PRESET, *BOX[:-1], "nvlink4", "--planner", "host", "--out", fast)
    invoke("plan", *PRESET, *BOX[:-1], "10MB", "--planner", "host", "--out", slow)
    assert [json.loads(path.read_text(encoding="utf-8")).get("gather") for path in (fast, slow)] == ["device", None]
    words = " ".join(invoke("explain", fast).stdout.split())
    assert "over the links between devices, each of which copies its slice" in words
    found = parsed("explain", slow)["exchange"]
    assert (found["gather"], found["other_s"] > found["iteration_s"]) == ("host", True)
