from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir import schema
from lightning_hetero.ir.cluster import Cluster, DeviceType, LayerTimes, Node
from lightning_hetero.ir.cluster_plan import ClusterPlan, GroupPlan, RunnerUp, StagePlan
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Prediction, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.profiling import presets

DOCS = Path(__file__).parents[2] / "docs" / "schemas"
GOLDEN = Path(__file__).parents[1] / "golden"

HARDWARE = presets.machine(device="rtx4090", host_memory="256GiB", disk="p5510x12")
PLAN = Plan(
    name="mine",
    blocks=(
        BlockPlan(name="layers.*", weights=Tier.DISK, state=Tier.DISK, saved=Saved.RECOMPUTE, boundary=Saved.SWAP_HOST),
        BlockPlan(name="*", update=UpdateLane.DEVICE, operators={"attn": Saved.SWAP_DISK}),
    ),
    prefetch_depth=3,
    update_order=UpdateOrder.NAIVE,
    priority=False,
    micro_batches=2,
    device_cache_bytes=1,
    host_cache_bytes=0,
    objective_s=1.5,
    decisions={"case": 3, "swapped": ["attn"]},
    predicted=Prediction(
        iteration_s=2.0,
        forward_s=0.5,
        backward_s=1.5,
        device_peak_bytes=1,
        host_peak_bytes=2,
        disk_bytes=3,
        bottleneck={"forward": "compute", "backward": "disk_write"},
    ),
    origin={"preset_model": "gpt2", "batch": 4},
)
CLUSTER = Cluster(
    name="two",
    network_bytes_per_s=50e9,
    nodes=(Node(name="a", device="a100-80", count=4), Node(name="b", device="own", count=2)),
    devices=(
        DeviceType(
            name="own",
            memory_bytes=2**34,
            flop_per_s=1e13,
            peer_bytes_per_s=1e10,
            price_per_hour=0.5,
            layer_times=(LayerTimes(tensor_parallel=1, seconds=(0.25, 0.375)),),
        ),
    ),
)
CLUSTER_PLAN = ClusterPlan(
    name="asymmetric",
    tensor_parallel=2,
    tokens=4096,
    iteration_s=1.5,
    sync_s=0.25,
    utilisation=0.75,
    groups=(
        GroupPlan(
            micro_batches=3,
            seconds=1.25,
            stages=(StagePlan(node="a", device="a100-80", layers=8, micro_batch_s=0.125, memory_bytes=2**30),),
        ),
    ),
    idle={"b": 1},
    runner_ups=(RunnerUp(name="megatron", tensor_parallel=1, iteration_s=2.5, groups=("a100-80: 3 micro-batches",)),),
    origin={"cluster": "4xa100-80", "micro_batches": 3},
)

READERS: dict[str, Callable[[str], object]] = {
    "hardware-profile.schema.json": HardwareProfile.from_json,
    "model-profile.schema.json": ModelProfile.from_json,
    "plan.schema.json": Plan.from_json,
    "cluster.schema.json": Cluster.from_json,
    "cluster-plan.schema.json": ClusterPlan.from_json,
}
EXAMPLES = {
    "hardware-profile.schema.json": HARDWARE.to_json(),
    "model-profile.schema.json": presets.model("gpt2", batch=1, sequence=64, hardware=HARDWARE).to_json(),
    "plan.schema.json": PLAN.to_json(),
    "cluster.schema.json": CLUSTER.to_json(),
    "cluster-plan.schema.json": CLUSTER_PLAN.to_json(),
}


def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads(schema.text(name)))


@pytest.mark.parametrize("name", schema.PUBLISHED)
def test_published_schemas_are_current(name: str) -> None:
    Draft202012Validator.check_schema(json.loads(schema.text(name)))
    published = (DOCS / name).read_text(encoding="utf-8")
    assert published == schema.text(name), f"run python -m lightning_hetero.ir.schema {DOCS}"


def test_writing_writes_all_of_them(tmp_path: Path) -> None:
    schema.write(tmp_path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {name: schema.text(name) for name in schema.PUBLISHED}


@pytest.mark.parametrize("name", EXAMPLES)
def test_written_files_are_valid(name: str) -> None:
    _validator(name).validate(json.loads(EXAMPLES[name]))
    READERS[name](EXAMPLES[name])


@pytest.mark.parametrize("golden", ["hardware_profile", "model_profile"])
def test_golden_profiles_are_valid(golden: str) -> None:
    kind = golden.replace("_", "-") + ".schema.json"
    _validator(kind).validate(json.loads((GOLDEN / f"{golden}.json").read_text(encoding="utf-8")))


def test_every_key_is_described() -> None:
    for name in schema.PUBLISHED:
        made = json.loads(schema.text(name))
        for part in (made, *made.get("$defs", {}).values()):
            described = [k for k, v in part.get("properties", {}).items() if "description" in v or "const" in v]
            assert described == list(part.get("properties", {}))


# ---- the schema and the reader agree -------------------------------------------------------------


def _places(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths to every value, of lists the first and last one."""
    if isinstance(data, dict):
        pairs = list(data.items())
    else:
        pairs = [(i, data[i]) for i in sorted({0, len(data) - 1})] if isinstance(data, list) and data else []
    for key, value in pairs:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _changed(text: str, path: tuple[str | int, ...], change: Callable[[Any, str | int], None]) -> str:
    data = json.loads(text)
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return json.dumps(data)


def _put(value: Any) -> Callable[[Any, str | int], None]:
    def change(holder: Any, key: str | int) -> None:
        holder[key] = value

    return change


def _remove(holder: Any, key: str | int) -> None:
    del holder[key]


CHANGES: dict[str, Callable[[Any, str | int], None]] = {
    **{repr(v): _put(v) for v in (-1, 0, 1, 0.5, 2, 1024, 1025, "", "disk", "recompute", None, [], {}, True)},
    "removed": _remove,
}

# What holds between keys, or between the items of a list, only the reader checks.
BETWEEN_KEYS = ("needs both in memory", "names repeat", "allowed: at most", "has rules")


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("change", CHANGES)
def test_schema_and_reader_agree_on_every_change(name: str, change: str) -> None:
    validator, example = _validator(name), EXAMPLES[name]
    compared, disagreements = 0, []
    for path in _places(json.loads(example)):
        text = _changed(example, path, CHANGES[change])
        try:
            READERS[name](text)
            refusal = ""
        except ConfigError as error:
            refusal = str(error)
        if any(words in refusal for words in BETWEEN_KEYS):
            continue
        compared += 1
        if validator.is_valid(json.loads(text)) != (not refusal):
            disagreements.append(f"{path}: the reader says {refusal or 'yes'!r}")
    assert compared
    assert not disagreements


@pytest.mark.parametrize("name", EXAMPLES)
def test_unknown_keys_are_refused_by_both(name: str) -> None:
    data = json.loads(EXAMPLES[name]) | {"colour": 1}
    assert not _validator(name).is_valid(data)
    with pytest.raises(ConfigError, match=r"unknown keys \['colour'\]"):
        READERS[name](json.dumps(data))
