"""Profiles as JSON. The golden files are rewritten with ``pytest tests/unit/test_profiles.py
--update-golden``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile, OperatorProfile, Sharding

GOLDEN = Path(__file__).parents[1] / "golden"

HARDWARE = HardwareProfile(
    name="a machine",
    device_memory_bytes=24 * 2**30,
    host_memory_bytes=256 * 2**30,
    disk_capacity_bytes=4 * 10**12,
    device_flop_per_s=1.5e14,
    link_h2d_bytes_per_s=2.5e10,
    link_d2h_bytes_per_s=2.4e10,
    disk_read_bytes_per_s=6.5e9,
    disk_write_bytes_per_s=3.4e9,
    disk_duplex=False,
    host_dram_bytes_per_s=1.6e11,
    cpu_update_params_per_s=5.5e9,
    device_update_params_per_s=2.9e10,
    cpu_downcast_params_per_s=2.0e10,
    collective_bytes_per_s=1.0e10,
    world_size=2,
    contention={"compute|update": 1.25, "update|compute": 1.5},
    source={"device_memory_bytes": "datasheet", "device_flop_per_s": "measured 2026-11-21, median of 5, spread 2 %"},
)

MODEL = ModelProfile(
    name="a model",
    tokens=2048,
    compute_itemsize=2,
    constant_device_bytes=2**30,
    constant_host_bytes=2**31,
    blocks=(
        BlockProfile(
            name="embedding",
            num_params=1000,
            num_trainable_params=0,
            forward_s=0.0,
            backward_s=0.0,
            forward_flop=0.0,
            activation_bytes=16,
            boundary_bytes=16,
            transient_bytes=0,
            pinned=True,
        ),
        BlockProfile(
            name="layers.0",
            num_params=4000,
            num_trainable_params=3000,
            forward_s=0.001,
            backward_s=0.0025,
            forward_flop=1.5e6,
            activation_bytes=96,
            boundary_bytes=32,
            transient_bytes=48,
            operators=(OperatorProfile(name="attn", flop=5e5, bytes=32), OperatorProfile(name="mlp", flop=1e6, bytes=16)),
        ),
    ),
)


@pytest.mark.parametrize(("name", "profile"), [("hardware_profile", HARDWARE), ("model_profile", MODEL)])
def test_profile_is_written_as_reviewed(name: str, profile: HardwareProfile | ModelProfile, pytestconfig: pytest.Config) -> None:
    golden = GOLDEN / f"{name}.json"
    if pytestconfig.getoption("--update-golden"):
        golden.write_text(profile.to_json(), encoding="utf-8")
    assert profile.to_json() == golden.read_text(encoding="utf-8"), f"{golden.name} differs; --update-golden rewrites it"
    assert type(profile).load(golden) == profile


def test_a_file_of_an_earlier_version_with_only_the_required_keys_still_loads() -> None:
    optional = ("format", "version", "collective_bytes_per_s", "world_size", "shared_memory", "contention", "source")
    data = {k: v for k, v in json.loads(HARDWARE.to_json()).items() if k not in optional}
    assert HardwareProfile.from_json(json.dumps(data)) == replace(
        HARDWARE, collective_bytes_per_s=0.0, world_size=1, shared_memory=False, contention={}, source={}
    )


def test_the_rate_of_pageable_memory_in_a_file_of_an_earlier_version_does_not_count() -> None:
    data = {**json.loads(HARDWARE.to_json()), "link_h2d_pageable_bytes_per_s": 2.5e9}
    assert HardwareProfile.from_json(json.dumps(data)) == HARDWARE
    data["link_h2d_pageable_bytes_per_s"] = -1
    with pytest.raises(ConfigError, match="link_h2d_pageable_bytes_per_s=-1"):
        HardwareProfile.from_json(json.dumps(data))


_COUNT = st.integers(0, 2**50)
_SECONDS = st.floats(0, 1e6, allow_nan=False)


@st.composite
def _blocks(draw: st.DrawFn) -> tuple[BlockProfile, ...]:
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True))
    made = []
    for name in names:
        operators = draw(st.lists(st.text(min_size=1, max_size=4), max_size=3, unique=True))
        boundary, trained = draw(_COUNT), draw(_COUNT)
        made.append(
            BlockProfile(
                name=name,
                num_params=trained + draw(_COUNT),
                num_trainable_params=trained,
                forward_s=draw(_SECONDS),
                backward_s=draw(_SECONDS),
                forward_flop=draw(_SECONDS),
                activation_bytes=boundary + draw(_COUNT),
                boundary_bytes=boundary,
                transient_bytes=draw(_COUNT),
                operators=tuple(OperatorProfile(name=o, flop=draw(_SECONDS), bytes=draw(_COUNT)) for o in operators),
                pinned=draw(st.booleans()),
                sharding=draw(st.none() | st.builds(_sharding, st.just(trained), st.just(boundary), _COUNT)),
            )
        )
    return tuple(made)


def _sharding(params: int, activations: int, traffic: int) -> Sharding:
    return Sharding(
        num_params=params, num_trainable_params=params, forward_flop=0.0, activation_bytes=activations, traffic_bytes=traffic
    )


@given(blocks=_blocks(), itemsize=st.sampled_from([2, 4]), name=st.text(min_size=1))
def test_any_model_profile_survives_json(blocks: tuple[BlockProfile, ...], itemsize: int, name: str) -> None:
    profile = replace(MODEL, name=name, blocks=blocks, compute_itemsize=itemsize)
    assert ModelProfile.from_json(profile.to_json()) == profile


@given(
    rates=st.lists(st.floats(0, 1e18, allow_nan=False), min_size=6, max_size=6),
    contention=st.dictionaries(st.text(), st.floats(1, 100)),
    source=st.dictionaries(st.text(), st.text()),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_any_hardware_profile_survives_json(
    rates: list[float], contention: dict[str, float], source: dict[str, str], flags: tuple[bool, bool]
) -> None:
    profile = replace(
        HARDWARE,
        link_h2d_bytes_per_s=rates[0],
        link_d2h_bytes_per_s=rates[1],
        disk_read_bytes_per_s=rates[2],
        disk_write_bytes_per_s=rates[3],
        cpu_update_params_per_s=rates[4],
        device_update_params_per_s=rates[5],
        disk_duplex=flags[0],
        shared_memory=flags[1],
        contention=contention,
        source=source,
    )
    assert HardwareProfile.from_json(profile.to_json()) == profile


def _edited(profile: HardwareProfile | ModelProfile, **changes: Any) -> str:
    return json.dumps(json.loads(profile.to_json()) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_memory_bytes": 0}, r"device_memory_bytes=0; allowed: a whole number above 0"),
        ({"disk_read_bytes_per_s": -1}, r"disk_read_bytes_per_s=-1; allowed: a number of at least 0"),
        ({"world_size": 1.5}, r"world_size=1\.5"),
        ({"disk_duplex": 1}, r"disk_duplex=1; allowed: true, false"),
        ({"contention": {"compute|update": "much"}}, r"contention=.*expected an object of numbers"),
        ({"source": {"name": 3}}, r"source=.*expected an object of text"),
        ({"name": 3}, r"name=3; expected text"),
        ({"format": "lightning-hetero-model"}, r"is not a hardware profile: got format 'lightning-hetero-model'"),
        ({"version": 2}, r"is a hardware profile of version 2; this package reads version 1"),
    ],
)
def test_a_hardware_profile_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HardwareProfile.from_json(_edited(HARDWARE, **changes))


def _with_block(**changes: Any) -> str:
    data = json.loads(MODEL.to_json())
    data["blocks"][1] |= changes
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_edited(MODEL, tokens=0), r"tokens=0"),
        (_edited(MODEL, compute_itemsize=3), r"compute_itemsize=3; allowed: 2 \(16 bit\), 4 \(fp32\)"),
        (_edited(MODEL, blocks=[]), r"'blocks' must be a non-empty list"),
        (_with_block(name="embedding"), r"block names repeat"),
        (_with_block(num_trainable_params=4001), r"blocks\[1\]: num_trainable_params=4001; allowed: at most num_params"),
        (_with_block(boundary_bytes=97), r"boundary_bytes=97; allowed: at most activation_bytes"),
        (_with_block(operators=[{"name": "a", "flop": 1, "bytes": 1}] * 2), r"operator names repeat"),
        (_with_block(operators=[{"name": "a", "flop": 1}]), r"operators\[0\]: missing keys \['bytes'\]"),
        (_with_block(forward_s=-1), r"forward_s=-1"),
        (_with_block(sharding=[]), r"sharding must be an object"),
        (_with_block(sharding=asdict(_sharding(4001, 0, 0))), r"sharding: num_params=4001; allowed: at most the block's, 4000"),
        ("[]", r"is not a model profile: got list, expected an object"),
        ("{", r"is not JSON"),
    ],
)
def test_a_model_profile_out_of_range_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelProfile.from_json(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hardware profile '.*missing\.json' does not exist"):
        HardwareProfile.load(tmp_path / "missing.json")


@pytest.mark.parametrize(("itemsize", "gradient", "state"), [(2, 2, 12), (4, 4, 8)])
def test_a_profiles_shape_has_the_bytes_of_its_precision(itemsize: int, gradient: int, state: int) -> None:
    shape = replace(MODEL, compute_itemsize=itemsize).shape().blocks[1]
    assert (shape.weight_bytes, shape.gradient_bytes, shape.state_bytes) == (itemsize * 4000, gradient * 3000, state * 3000)
