"""The planner: what it finds, how it splits a batch, what it says where nothing fits."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
from support.holistic import DEVICE, GB, MB, MODEL, OWN_CPU, TIGHT, model_of
from support.machines import ROOMY

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.plan import Saved, Tier
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.evaluation import evaluated
from lightning_hetero.planners.holistic import plan
from lightning_hetero.planners.holistic.relaxation import Practice, Relaxation
from lightning_hetero.planners.micro_batches import split

# Updates on the CPU are slower than compute, so nothing is gained by them where everything fits.
SLOW_CPU = replace(ROOMY, name="slow cpu", cpu_update_params_per_s=1e7)


# ---- the planner ---------------------------------------------------------------------------------


def test_everything_stays_on_the_device_if_it_fits() -> None:
    found = plan(MODEL, SLOW_CPU)
    assert found.name == "holistic"
    assert {(b.weights, b.state, b.update, b.saved) for b in found.blocks} == {(*DEVICE, Saved.KEEP)}
    assert found.decisions["start"] == "resident"
    assert found.objective_s == pytest.approx(7 * 0.031)


def test_resident_may_be_preferred_though_something_is_a_little_faster() -> None:
    fastest = plan(MODEL, ROOMY, prefer_resident=0.0)
    assert fastest.decisions["start"] != "resident"  # the CPU updates some blocks meanwhile
    preferred = plan(MODEL, ROOMY, prefer_resident=0.1)
    assert preferred.decisions["start"] == "resident"
    assert fastest.objective_s is not None
    assert preferred.objective_s is not None
    assert fastest.objective_s < preferred.objective_s < 1.1 * fastest.objective_s


def test_if_the_device_is_the_host_resident_is_preferred_unless_told_otherwise() -> None:
    close = replace(OWN_CPU, cpu_update_params_per_s=1e10, host_dram_bytes_per_s=1e12)  # updates take 7 ms, compute 210 ms
    assert plan(MODEL, close).decisions["start"] == "resident"
    assert plan(MODEL, close, prefer_resident=0.0).decisions["start"] != "resident"


def test_resident_is_preferred_within_the_margin_and_not_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest_s, resident_s = plan(MODEL, ROOMY, prefer_resident=0.0).objective_s, PLANNERS["resident"](MODEL, ROOMY).objective_s
    assert fastest_s is not None
    assert resident_s is not None
    gain = resident_s / fastest_s - 1
    assert gain > 0
    for margin, chosen in ((1.01 * gain, True), (0.99 * gain, False)):
        assert (plan(MODEL, ROOMY, prefer_resident=margin).decisions["start"] == "resident") is chosen
        monkeypatch.setattr("lightning_hetero.planners.holistic.planner._MARGIN", margin)
        assert (plan(MODEL, ROOMY).decisions["start"] == "resident") is chosen
    assert plan(MODEL, ROOMY, prefer_resident=math.inf).decisions["start"] == "resident"


@pytest.mark.parametrize(
    "hardware",
    [
        ROOMY,
        TIGHT,
        replace(TIGHT, host_memory_bytes=600 * MB),
        replace(TIGHT, disk_capacity_bytes=0),
        replace(TIGHT, link_h2d_bytes_per_s=1e9, cpu_update_params_per_s=1e8),
        replace(OWN_CPU, host_memory_bytes=1300 * MB),
    ],
)
def test_no_other_planner_is_faster_and_none_beats_the_bound(hardware: HardwareProfile) -> None:
    ours = plan(MODEL, hardware, prefer_resident=0.0)
    assert ours.predicted is not None
    bound = ours.decisions["lower_bound_s"]
    assert ours.decisions["gap"] == pytest.approx(ours.predicted.iteration_s / bound - 1)
    for name, planner in PLANNERS.items():
        if name == "holistic":
            continue
        try:
            other = planner(MODEL, hardware)
        except PlanError:
            continue
        assert other.predicted is not None
        assert ours.predicted.iteration_s <= other.predicted.iteration_s * (1 + 1e-9), name
        assert bound <= other.predicted.iteration_s * (1 + 1e-9), name


@pytest.mark.parametrize("hardware", [ROOMY, TIGHT, replace(OWN_CPU, host_memory_bytes=2 * GB)])
def test_if_updates_wait_for_all_gradients_every_planner_predicts_that(hardware: HardwareProfile) -> None:
    ours = plan(MODEL, hardware, prefer_resident=0.0, updates=Updates.AFTER_VERDICT)
    assert ours.predicted is not None
    waiting = 0
    for name, planner in PLANNERS.items():
        try:
            found = planner(MODEL, hardware, updates=Updates.AFTER_VERDICT)
        except PlanError:
            continue
        assert found.predicted == evaluated(found, MODEL, hardware, updates=Updates.AFTER_VERDICT).predicted, name
        assert ours.predicted.iteration_s <= found.predicted.iteration_s * (1 + 1e-9), name
        with suppress(PlanError):
            waiting += found.predicted.iteration_s > evaluated(found, MODEL, hardware).predicted.iteration_s
    assert waiting >= 2  # of plans whose updates overlap backward otherwise


def test_the_joint_space_beats_all_of_its_parts_if_memory_is_short() -> None:
    ours = plan(model_of(20), TIGHT)
    others = []
    for name, planner in PLANNERS.items():
        try:
            others += [planner(model_of(20), TIGHT).predicted] if name != "holistic" else []
        except PlanError:
            continue
    assert ours.predicted is not None
    assert ours.predicted.iteration_s < 0.99 * min(p.iteration_s for p in others if p is not None)


def test_decisions_add_up() -> None:
    found = plan(MODEL, TIGHT)
    d = found.decisions
    for key in ("weights", "state", "update"):
        assert sum(d[key].values()) == len(MODEL.blocks)
        assert d[key] == {value: sum(getattr(b, key).value == value for b in found.blocks) for value in d[key]}
    bytes_of_all = sum(d[key] for key in ("kept_bytes", "recomputed_bytes", "swapped_host_bytes", "swapped_disk_bytes"))
    assert bytes_of_all == sum(b.activation_bytes for b in MODEL.blocks)
    assert found.objective_s == found.predicted.iteration_s  # type: ignore[union-attr]
    assert found.decisions["evaluations"] >= 1


def test_planning_is_deterministic() -> None:
    assert plan(MODEL, TIGHT) == plan(MODEL, TIGHT)


def test_planning_is_the_same_in_every_process() -> None:
    script = (
        "from lightning_hetero.profiling import presets; from lightning_hetero.planners import PLANNERS; "
        "machine = presets.machine(device='rtx4090', host_memory='24GiB', disk='p5510'); "
        "model = presets.model('smollm2-1.7b', batch=4, sequence=512, hardware=machine); "
        "print(PLANNERS['holistic'](model, machine).to_json())"
    )
    plans = [
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert plans[0] == plans[1]
    assert "lower_bound_s" in plans[0]


def test_the_search_simulates_no_more_than_it_may() -> None:
    assert plan(model_of(12), TIGHT, evaluations=3).decisions["evaluations"] <= 3


def test_a_plan_without_time_is_still_the_best_of_the_others() -> None:
    found = plan(MODEL, TIGHT, seconds=0.0)
    assert found.predicted is not None
    assert found.predicted.iteration_s <= PLANNERS["host"](MODEL, TIGHT).predicted.iteration_s


def test_if_the_device_is_the_host_activations_stay() -> None:
    found = plan(MODEL, replace(OWN_CPU, host_memory_bytes=1300 * MB))
    assert {(b.saved, b.boundary, tuple(b.operators)) for b in found.blocks} == {(Saved.KEEP, Saved.KEEP, ())}
    assert found.micro_batches == 1
    assert Tier.DISK in {b.state for b in found.blocks}


def test_updates_that_wait_for_all_gradients_are_planned_as_such() -> None:
    now = plan(MODEL, OWN_CPU, prefer_resident=0.0)
    later = plan(MODEL, OWN_CPU, prefer_resident=0.0, updates=Updates.AFTER_VERDICT)
    assert now.objective_s is not None
    assert later.objective_s is not None
    assert later.objective_s > now.objective_s


# ---- splitting the batch -------------------------------------------------------------------------


def test_a_split_batch_has_the_same_work_in_all() -> None:
    part = split(MODEL, 4)
    assert part.tokens == 2
    assert 4 * sum(b.forward_s for b in part.blocks) == pytest.approx(sum(b.forward_s for b in MODEL.blocks))
    assert part.blocks[0].activation_bytes == 25 * MB
    assert [o.bytes for o in part.blocks[0].operators] == [12_500_000, 10 * MB]
    assert part.num_params == MODEL.num_params
    assert split(MODEL, 1) is MODEL


def test_a_batch_is_split_if_only_that_fits() -> None:
    tight = replace(ROOMY, device_memory_bytes=130 * MB, disk_capacity_bytes=0)  # one block saves 100 MB, its weights pass beside
    with pytest.raises(PlanError, match="micro_batches"):
        plan(MODEL, tight)
    found = plan(MODEL, tight, micro_batches=(1, 2, 4, 8))
    assert found.micro_batches > 1
    assert found.decisions["micro_batches"] == found.micro_batches


def test_a_batch_stays_whole_if_splitting_does_not_help() -> None:
    assert plan(MODEL, SLOW_CPU, micro_batches=(1, 2)).micro_batches == 1


@pytest.mark.parametrize("micro_batches", [(), (0,), (2.0,), (True,), (3,)])
def test_a_split_that_cannot_be_is_refused(micro_batches: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="micro_batches"):
        plan(MODEL, ROOMY, micro_batches=micro_batches)


def test_the_hosts_own_cpu_splits_no_batch() -> None:
    with pytest.raises(ConfigError, match="own CPU splits no batch"):
        plan(MODEL, OWN_CPU, micro_batches=(2,))
    assert plan(MODEL, OWN_CPU, micro_batches=(1, 2)).micro_batches == 1


# ---- nothing fits --------------------------------------------------------------------------------


def test_an_error_names_the_tightest_tier_and_its_shortage() -> None:
    machine = replace(TIGHT, device_memory_bytes=300 * MB, host_memory_bytes=300 * MB, disk_capacity_bytes=800 * MB)
    with pytest.raises(PlanError, match=r"lacks .* Cheapest remedy: .* more disk; else .* more host memory; else ") as refused:
        plan(MODEL, machine)
    keys = {"disk": "disk_capacity_bytes", "host": "host_memory_bytes", "device": "device_memory_bytes"}
    key, short = keys[refused.value.tier], refused.value.shortfall_bytes
    assert short > 0
    assert plan(MODEL, replace(machine, **{key: getattr(machine, key) + short})).predicted is not None  # type: ignore[arg-type]


def test_an_error_proposes_a_disk_without_one() -> None:
    machine = replace(
        TIGHT, host_memory_bytes=300 * MB, disk_capacity_bytes=0, disk_read_bytes_per_s=0.0, disk_write_bytes_per_s=0.0
    )
    with pytest.raises(PlanError, match="more disk"):
        plan(MODEL, machine)


def test_an_error_proposes_a_smaller_batch_where_activations_are_too_many() -> None:
    machine = replace(ROOMY, device_memory_bytes=160 * MB)  # the pinned block keeps 100 MB, another one recomputes as much
    with pytest.raises(PlanError, match=r"Cheapest remedy: micro_batches=\[4\]") as refused:
        plan(MODEL, machine)
    assert refused.value.tier == "device"
    enough = machine.device_memory_bytes + refused.value.shortfall_bytes
    assert plan(MODEL, replace(machine, device_memory_bytes=enough)).predicted is not None
    assert plan(MODEL, machine, micro_batches=(4,)).micro_batches == 4


def test_practice_never_promises_more_than_the_bound() -> None:
    for hardware in (TIGHT, replace(TIGHT, host_memory_bytes=600 * MB)):
        relaxation = Relaxation(MODEL, hardware)
        bound, start = relaxation.bound_s(), relaxation.start(Practice(slots=3, depth=1))
        assert bound is not None
        assert start is not None
        assert start.seconds >= bound * (1 - 1e-6)
