from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.model import BlockShape, ModelShape
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier, UpdateLane
from lightning_hetero.planners import BUILTIN_PLANS

DISK = BlockPlan(name="layers.*", weights=Tier.DISK, state=Tier.DISK)
REST = BlockPlan(name="*")


def _edited(**changes: Any) -> str:
    return json.dumps(json.loads(Plan(name="mine", blocks=(DISK, REST)).to_json()) | changes)


def test_first_matching_rule_holds_and_every_block_gets_one() -> None:
    plan = Plan(name="mine", blocks=(BlockPlan(name="layers.1", state=Tier.DISK), DISK, REST)).resolve(
        ["embed", "layers.0", "layers.1"]
    )
    assert [b.name for b in plan.blocks] == ["embed", "layers.0", "layers.1"]
    assert [b.weights for b in plan.blocks] == [Tier.HOST, Tier.DISK, Tier.HOST]
    assert [b.state for b in plan.blocks] == [Tier.HOST, Tier.DISK, Tier.DISK]


def test_a_plan_that_was_not_simulated_has_no_prediction_to_give() -> None:
    with pytest.raises(ConfigError, match="plan 'mine' has no prediction: it has not been simulated"):
        Plan(name="mine", blocks=(REST,)).require_predicted()


def test_a_block_without_a_rule_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no rule for block 'embed'.*embed, layers\.0"):
        Plan(name="mine", blocks=(DISK,)).resolve(["embed", "layers.0"])


def test_a_rule_without_a_block_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"lacks: layers\.\*"):
        Plan(name="mine", blocks=(DISK, REST)).resolve(["embed"])


def test_a_rule_that_is_shadowed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rules that are never reached: layers\.0\. The first rule .* Move"):
        Plan(name="mine", blocks=(DISK, BlockPlan(name="layers.0"))).resolve(["layers.0"])


@pytest.mark.parametrize("tiers", [{"weights": Tier.DISK}, {"state": Tier.DISK}])
def test_a_device_update_needs_weights_and_state_in_memory(tiers: dict[str, Tier]) -> None:
    with pytest.raises(ConfigError, match="block 'x': update 'device'"):
        BlockPlan(name="x", update=UpdateLane.DEVICE, **tiers)


@pytest.mark.parametrize("depth", [0, -1, 1025, True, 2.0])
@pytest.mark.parametrize("field", ["prefetch_depth", "gradient_depth"])
def test_depths_outside_their_range_are_refused(field: str, depth: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field}={depth}"):
        Plan(name="mine", blocks=(REST,), **{field: depth})


def test_json_round_trip_is_exact_and_one_block_a_line() -> None:
    plan = Plan(name="mine", blocks=(DISK, REST), prefetch_depth=3, gradient_depth=7)
    assert Plan.from_json(plan.to_json()) == plan
    assert sum('"weights"' in line for line in plan.to_json().splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a plan: got list"),
        (_edited(format="other"), "is not a plan"),
        (_edited(version=3), "version 3; this package reads version 1 and 2"),
        (_edited(blocks=[]), "non-empty list"),
        (_edited(blocks={"name": "*"}), "non-empty list"),
        (_edited(blocks=[{"weights": "disk"}]), r"blocks\[0\] must be an object with a 'name'"),
        (_edited(blocks=[{"name": "*", "weights": "dsk"}]), "Did you mean 'disk'"),
        (_edited(blocks=[{"name": "*", "weights": "floppy"}]), r"weights='floppy'; allowed: \['device', 'host', 'disk'\]"),
        (_edited(blocks=[{"name": "*", "weight": "disk"}]), r"unknown keys \['weight'\]"),
        (_edited(prefetch=3), r"unknown keys \['prefetch'\]"),
        (_edited(prefetch_depth="3"), "prefetch_depth='3'"),
    ],
)
def test_a_bad_plan_file_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(text, source="my.json")


def test_load_names_the_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json"):
        Plan.load(tmp_path / "missing.json")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.json"):
        Plan.load(binary)


def test_builtin_plans_place_every_block_and_keep_pinned_weights_in_memory() -> None:
    def block(name: str, state_bytes: int, pinned: bool) -> BlockShape:
        trainable = 16 if state_bytes else 0
        return BlockShape(
            name=name,
            num_params=16,
            num_trainable_params=trainable,
            weight_bytes=64,
            gradient_bytes=64,
            state_bytes=state_bytes,
            pinned=pinned,
        )

    model = ModelShape(name="m", blocks=(block("rest", 128, True), block("layers.0", 128, False), block("layers.1", 0, False)))
    names = [b.name for b in model.blocks]
    for name, planner in BUILTIN_PLANS.items():
        plan = planner(model)
        assert plan.name == name
        assert plan.resolve(names) == plan
    disk = BUILTIN_PLANS["disk"](model).blocks
    assert [b.weights for b in disk] == [Tier.HOST, Tier.DISK, Tier.DISK]
    assert [b.state for b in disk] == [Tier.DISK, Tier.DISK, Tier.HOST]
    assert {b.update for b in BUILTIN_PLANS["resident"](model).blocks} == {UpdateLane.DEVICE}
