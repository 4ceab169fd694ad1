from __future__ import annotations

import math

import pytest

from lightning_hetero.errors import ConfigError
from lightning_hetero.units import GIB, MIB, format_bytes, parse_bytes, round_up, size_option


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (None, None),
        (1024, 1024),
        (4096.0, 4096),
        ("17B", 17),
        ("4294967296", 4 * GIB),
        ("1KB", 1000),
        ("1 kb", 1000),
        ("1KiB", 1024),
        ("1K", 1024),
        ("3M", 3 * 2**20),
        ("4GiB", 4 * GIB),
        (" 1.5 TB ", 1_500_000_000_000),
        ("0.5GiB", GIB // 2),
        (1e16, 10**16),
        ("1.1GB", 1_100_000_000),
    ],
)
def test_sizes_are_read_as_people_write_them(size: str | float | None, expected: int | None) -> None:
    assert parse_bytes(size, name="host_memory") == expected


@pytest.mark.parametrize(
    "size",
    [
        "17",
        "256",
        4,
        256,
        1023,
        512.0,
        "1048575",
        "",
        "GiB",
        "four",
        "4 GiBs",
        "-1",
        -1,
        0,
        "0GiB",
        "1e9",
        "4,5GiB",
        True,
        math.nan,
        math.inf,
        "0.1B",
        1.5,
        "1.5",
        "2.5B",
    ],
)
def test_anything_else_is_refused_and_names_the_option(size: str | float) -> None:
    with pytest.raises(ConfigError, match=r"host_memory=.*Allowed: "):
        parse_bytes(size, name="host_memory")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * GIB, "3.0 GiB"), (5 * 2**40, "5.0 TiB"), (2**51, "2048.0 TiB")],
)
def test_bytes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (1, 16), (16, 16), (17, 32)])
def test_round_up_reaches_the_next_multiple(value: int, expected: int) -> None:
    assert round_up(value, 16) == expected


@pytest.mark.parametrize("num_bytes", [1, 1023, 1025, MIB - 1, MIB, 3 * MIB + 1, 3 * GIB - 1])
def test_an_option_for_bytes_is_no_smaller_than_they_are(num_bytes: int) -> None:
    assert num_bytes <= parse_bytes(size_option(num_bytes), name="host_memory") <= 1.1 * num_bytes + 1
