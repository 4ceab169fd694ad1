"""What a commit record holds beside the slots: values as JSON text, the map of parts, and reading
both without trust.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections import Counter, OrderedDict, deque
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero import _native
from lightning_hetero._native import PartGeometry
from lightning_hetero.errors import ConfigError
from lightning_hetero.store.format import record
from lightning_hetero.store.format.encoding import Encoded, dumps, loads, unpack
from lightning_hetero.store.format.manifest import identity_of, layout_of
from lightning_hetero.store.format.state_files import Digest

HERE = pathlib.Path("store")


def same(a: Any, b: Any) -> bool:
    """Equal, of equal types, all the way down; NaN equals itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8) if x.numel() else torch.empty(0)


VALUES = [
    {"lr": 1e-3, "inf": math.inf, "nan": math.nan, "none": None, "flag": True, "text": "é\ud800"},
    {1: (2, [3.5]), "$": {"x": {4}}, None: frozenset((5,))},
    Counter({3: 1, 1: 2}),
    OrderedDict([("b", 1), ("a", 2)]),
    deque([1, b"\x00\xff"]),
    timedelta(seconds=1.5),
    torch.bfloat16,
    2 - 3j,
    10**40,
    torch.randn(3, 0, 2),
    torch.tensor(7),
    torch.tensor([math.nan, -0.0]),
    torch.randn(4, 6, dtype=torch.bfloat16)[:, ::2].contiguous(),
    torch.tensor([True, False]),
    np.arange(6, dtype=np.uint32).reshape(2, 3),
    torch.get_rng_state(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert same(loads(dumps(value, "value")), value)


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_a_value_comes_back_from_a_file_of_its_own(value: Any) -> None:
    pieces = Encoded({"here": [value, b"", value]}, "value").pieces()
    assert same(unpack(memoryview(bytearray(b"".join(pieces)))), {"here": [value, b"", value]})


def test_a_text_is_given_up_where_it_is_longer_than_it_may_be() -> None:
    for value in ({"x": torch.zeros(1000)}, list(range(2000))):
        text = dumps(value, "value")
        assert Encoded(value, "value").short_text(len(text)) == text
        assert Encoded(value, "value").short_text(len(text) - 1) is None


def test_a_state_files_name_knows_contents_apart_that_have_the_same_crc() -> None:
    content = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    other = content.clone()
    polynomial = (0x82F63B78 << 1 | 1).to_bytes(8, "little")  # CRC32C's: what differs by it has the same checksum
    other[64:72] ^= torch.tensor(list(polynomial), dtype=torch.uint8)
    assert _native.digest(content.data_ptr(), 4096) == _native.digest(other.data_ptr(), 4096)
    names = []
    for data in (content, other):
        found = Digest()
        found.add(memoryview(bytearray(data.numpy())))
        names.append(found.name)
    assert names[0] != names[1]


def test_a_transposed_tensor_comes_back_with_its_values() -> None:
    value = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(loads(dumps(value, "value")), value)


def test_objects_without_a_safe_form_are_refused_by_place_and_type() -> None:
    with pytest.raises(ConfigError, match=r"callbacks\['a'\]\[1\] is a torch.nn.modules.linear.Identity"):
        dumps({"a": [1, torch.nn.Identity()]}, "callbacks")
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="nested too deeply"):
        dumps(endless, "x")


GEOMETRY = PartGeometry(
    id=3, weight_dtype=_native.F32, num_elements=64, num_state=2, weights_on_disk_file=True, state_on_disk_file=False,
    chunk_elements=4096,
)  # fmt: skip
ENTRIES = [record.PartEntry(GEOMETRY, stepped=True, weights=None, state=None), record.PartEntry(None, False, None, None)]
BLOB = record.compose([e.to_json() for e in ENTRIES], dumps({"x": torch.ones(3)}, "state"), "")


def test_a_record_comes_back_as_it_was() -> None:
    found = record.parse(BLOB)
    assert list(found.parts) == ENTRIES
    assert torch.equal(record.state_of(found, "here")["x"], torch.ones(3))


def test_a_record_without_a_state_says_why() -> None:
    found = record.parse(record.compose([], "", "nothing was trained"))
    with pytest.raises(ConfigError, match="'here' cannot be resumed from: nothing was trained"):
        record.state_of(found, "here")


def test_two_parts_cannot_have_the_same_files() -> None:
    row = ENTRIES[0].to_json()
    with pytest.raises(ConfigError, match="the same files to two parts"):
        record.parse(record.compose([row, row], "", "x"))


@given(st.data())
def test_damaged_records_are_refused_and_do_nothing_else(data: st.DataObject) -> None:
    blob = bytearray(BLOB)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(blob) - 1))
        blob[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    with suppress(ConfigError):
        record.state_of(record.parse(bytes(blob)), "here")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["$", "a", "version", "parts"]), inner, max_size=4),
    max_leaves=12,
)
KINDS = st.sampled_from(["tensor", "array", "bytes", "dict", "dtype", "tuple", "set", "counter", "complex", "seconds", "none"])


@given(JSON | st.builds(lambda kind, rest: {"$": [kind, *rest]}, KINDS, st.lists(JSON, max_size=3)))
def test_any_json_is_read_or_refused(value: Any) -> None:
    text = json.dumps(value)
    for read in (loads, lambda t: record.parse(t.encode()), lambda _: layout_of(HERE, {"layout": value})):
        with suppress(ConfigError):
            read(text)
    with suppress(ConfigError):
        identity_of(HERE, {"uuid": value})


@given(st.binary(max_size=64))
def test_any_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(ConfigError):
        record.parse(blob)
