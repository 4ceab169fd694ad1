"""Plans, blocks and options that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.models import Outcome
from support.refusals import assert_usable, new_module, refused
from torch import nn

from lightning_hetero import EmulatedDevice
from lightning_hetero.errors import (
    ConfigError,
    PlanError,
)
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.strategies import HeteroOffloadStrategy

# ---- plans and blocks ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dsik", "", "zero3"])
def test_an_unknown_plan_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="plan="):
        HeteroOffloadStrategy(plan=name)


def row(name: str, **values: str) -> dict[str, str]:
    return {"name": name, **values}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{not json", ["plan.json is not JSON", "line 1"]),
        ("[]", ["is not a plan", "expected an object"]),
        ({"version": 3}, ["version 3", "reads version 1 and 2"]),
        ({"blocks": []}, ["'blocks' must be a non-empty list"]),
        ({"blocks": [row("*", weights="tape")]}, ["blocks[0]", "weights='tape'", "allowed", "'disk'"]),
        ({"blocks": [row("*", wieghts="disk")]}, ["blocks[0]", "unknown keys ['wieghts']", "known"]),
        ({"blocks": [row("*", weights="disk", update="device")]}, ["update 'device'", "'cpu'"]),
        ({"depth": 3}, ["unknown keys ['depth']", "prefetch_depth"]),
        ({"prefetch_depth": 0}, ["prefetch_depth=0", "1 to 1024"]),
    ],
)  # fmt: skip
def test_a_plan_file_that_is_none_is_refused(tmp_path: Path, content: Any, words: list[str]) -> None:
    path = tmp_path / "plan.json"
    head = {"format": "lightning-hetero-plan", "version": 1, "name": "mine", "blocks": [row("*")]}
    path.write_text(content if isinstance(content, str) else json.dumps(head | content))
    with pytest.raises(ConfigError) as caught:
        HeteroOffloadStrategy(plan=path)
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)


def test_a_missing_plan_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plan file '.*gone.json' does not exist"):
        HeteroOffloadStrategy(plan=tmp_path / "gone.json")


def test_a_plan_that_does_not_fit_the_model_is_refused(root: Path, plain: Outcome) -> None:
    module = new_module()
    unknown = Plan(name="mine", blocks=(BlockPlan(name="model.layers.0", weights=Tier.DISK), BlockPlan(name="*")))
    refused(ConfigError, ["'mine'", "model lacks: model.layers.0", "model.blocks.0", "block_cls"], root, module, plan=unknown)
    missing = Plan(name="mine", blocks=(BlockPlan(name="model.blocks.*", weights=Tier.DISK, state=Tier.DISK),))
    refused(ConfigError, ["no rule for block 'model", "blocks are", '"*"'], root, module, plan=missing)
    assert_usable(module, root, plain)


def test_a_block_cls_that_matches_nothing_is_refused(root: Path, plain: Outcome) -> None:
    module = new_module()
    refused(ConfigError, ["block_cls='LlamaDecoderLayer'", "matches no", "MlpBlock"], root, module, block_cls="LlamaDecoderLayer")
    refused(ConfigError, ["GELU", "matches no", "MlpBlock"], root, module, block_cls=nn.GELU)
    refused(ConfigError, ["block_cls has 3", "allowed"], root, module, block_cls=[nn.GELU, 3])
    for whole in (type(module), [nn.Module]):
        refused(ConfigError, ["matches the whole model", type(module).__name__, "of a layer"], root, module, block_cls=whole)
    assert_usable(module, root, plain)


def test_a_lazy_module_without_shapes_is_refused(root: Path) -> None:
    module = new_module()
    module.model.spare = nn.LazyLinear(3)
    refused(ConfigError, ["'model.spare.weight' has no shape yet", "setup()"], root, module)


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("host_memory", "4GiBB"), ("host_memory", "-1GiB"), ("host_memory", 0), ("host_memory", True), ("device_memory", "much"),
        ("host_memory", 1.5), ("disk_capacity", 0.5),
        ("disk_capacity", "1 2 GiB"), ("io_backend", "uring"), ("durability", "always"), ("io_threads", 0), ("io_threads", "many"),
        ("update_threads", 0), ("update_threads", -1), ("update_threads", 2.5), ("io_threads", 4096), ("disk_path", "s3://bucket/run"),
        ("disk_path", ""), ("disk_path", 3), ("weights", 3), ("device", "cuda"), ("allow_tmpfs", "no"), ("trace", "yes"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_when_the_strategy_is_made(option: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        HeteroOffloadStrategy(**{option: value})
    text = str(caught.value)
    assert option in text
    assert repr(value) in text
    assert "llowed" in text


def test_more_memory_than_the_emulated_device_has_is_refused() -> None:
    device = EmulatedDevice(memory="4MiB")
    HeteroOffloadStrategy(device=device, device_memory="4MiB")
    assert EmulatedDevice("4MiB") == device
    with pytest.raises(ConfigError, match=r"device_memory=5\.0 MiB of an emulated device that has 4\.0 MiB; allowed: at most that"):
        HeteroOffloadStrategy(device=device, device_memory="5MiB")


def test_a_planner_of_clusters_is_said_to_be_one() -> None:
    with pytest.raises(ConfigError, match="'autohet' plans clusters: lightning-hetero plan-cluster --planner autohet"):
        HeteroOffloadStrategy(plan="autohet")


def test_a_planner_that_has_no_plan_for_a_cpu_is_refused_before_training(root: Path, plain: Outcome) -> None:
    module = new_module()
    refused(PlanError, ["'full_recompute' recomputes activations", "'CPU'", "'host'"], root, module, plan="full_recompute")
    assert not module.losses
    assert_usable(module, root, plain)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"new_run": True}, "new_run=True .* no disk_path"),
        ({"plan": "disk", "hardware_profile": "machine.json"}, "hardware_profile='machine.json' .*plan='disk' is a plan"),
        ({"plan": "host", "replan_drift": 0.1}, "replan_drift=0.1 .*plan='host' is a plan"),
        ({"plan": "host", "replan_drift": -1}, "replan_drift=-1; allowed"),
    ],
)
def test_an_option_that_nothing_would_read_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HeteroOffloadStrategy(**options)


def test_a_given_plan_may_say_that_no_difference_makes_a_new_one() -> None:
    HeteroOffloadStrategy(plan="host", replan_drift=None)


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="host_budget"):
        HeteroOffloadStrategy(host_budget="4GiB")


# ---- reports -------------------------------------------------------------------------------------


def test_a_trace_that_was_not_recorded_is_said_to_be_none(caplog: pytest.LogCaptureFixture) -> None:
    strategy: Any = HeteroOffloadStrategy(plan="host")
    assert strategy.stall_report() == "no trace: pass trace=True to the strategy to record one"
    assert not strategy.trace.spans
    assert "There is no trace: pass trace=True" in caplog.text
    caplog.clear()
    traced: Any = HeteroOffloadStrategy(plan="host", trace=True)
    assert traced.stall_report() == ""
    assert not caplog.text
