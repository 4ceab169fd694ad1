"""Damaged files are read or refused, whatever is parsed: nothing else is raised, and no memory is
touched that is not theirs.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import TARGETS, Target
from support.properties import examples

from lightning_hetero.errors import HeteroError

each = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
ODD = (0, 1, 0x7F, 0x80, 0xFF)
ABSENT = object()
VALUES: tuple[Any, ...] = (ABSENT, None, True, -1, 0, 2**64, 10**400, 1e308, "", "x", [], [[]], {}, {"$": ["none"]})


@each
def test_whole_ones_are_read(target: Target) -> None:
    for example in target.examples():
        if any(example[:56]) or len(example) < 56:  # an empty place of the ring is refused as such
            target.read(example)


@each
@examples(24)
@given(st.randoms(use_true_random=False))
def test_damaged_bytes_are_read_or_refused(target: Target, draw: random.Random) -> None:
    data = bytearray(draw.choice(target.examples()))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(len(data), draw.choice((64, 256, 1 << 20))) or 1)
        match draw.randrange(5):
            case 0:
                data[at:at] = draw.randbytes(draw.randint(1, 8))
            case 1:
                del data[at : at + draw.randint(1, 8)]
            case 2:
                data[at : at + 1] = bytes([draw.choice(ODD)])
            case 3:
                data[at : at + 4] = draw.randbytes(4)
            case 4:
                del data[at:]
    target(bytes(data))


def _paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, inner in items for path in _paths(inner, (*here, key)))]


@pytest.mark.parametrize("name", ["plan", "cluster", "cluster-plan", "hardware-profile", "model-profile", "manifest", "record"])
def test_json_with_any_value_or_none_in_any_place_is_read_or_refused(name: str) -> None:
    target = TARGETS[name]
    whole = target.examples()[0]
    for path in _paths(json.loads(whole))[:60]:
        for value in VALUES:
            changed = {"root": json.loads(whole)}
            place: Any = changed
            for key in ("root", *path)[:-1]:
                place = place[key]
            if value is ABSENT:
                del place[("root", *path)[-1]]
            else:
                place[("root", *path)[-1]] = value
            target(json.dumps(changed.get("root")).encode())


@pytest.mark.parametrize("name", [n for n in TARGETS if n not in ("commit-ring", "slot-file")])
@pytest.mark.parametrize(
    "data", [b"[" * 3_000, b'{"a":' * 3_000, b"9" * 5000, b'{"version":' + b"9" * 5000 + b"}", b"\xff\xfe", b""]
)
def test_input_that_is_too_deep_or_too_long_is_refused(name: str, data: bytes) -> None:
    if name == "safetensors":
        data = len(data).to_bytes(8, "little") + data
    with pytest.raises(HeteroError):
        TARGETS[name].read(data)
