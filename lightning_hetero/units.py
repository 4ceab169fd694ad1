"""Sizes as text, for options and messages.

Inside the library bytes are ``int``, seconds ``float``.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import overload

from lightning_hetero.errors import ConfigError

_FACTORS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FACTORS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")

KIB, MIB, GIB = 2**10, 2**20, 2**30


@overload
def parse_bytes(size: str | int | float, *, name: str) -> int: ...
@overload
def parse_bytes(size: str | int | float | None, *, name: str) -> int | None: ...
def parse_bytes(size: str | int | float | None, *, name: str) -> int | None:
    """Turns ``"4GiB"``, ``"1.5 TB"`` or a number of bytes into an ``int`` of bytes.

    Args:
        size: The size; ``None`` stays ``None``. Decimal suffixes are powers of ten, ``KiB``/``K``
            and so on powers of two.
        name: The option, for the error.

    Raises:
        ConfigError: The text is not a size; the size is not positive; a number without a unit is
            not whole; or a number below 1 KiB, or text below 1 MiB, has no unit.
    """
    if size is None:
        return None
    match = _SIZE.fullmatch(str(int(size) if isinstance(size, float) and size.is_integer() else size))
    factor = _FACTORS.get(match.group(2).upper(), 0) if match else 0
    number = Fraction(match.group(1)) if match else Fraction(0)
    # "256" probably means gigabytes and would be 256 bytes. Numbers may be computed: refuse less.
    least = MIB if isinstance(size, str) else KIB
    is_bare = match and not match.group(2) and (isinstance(size, str) or number.denominator == 1)
    if match and is_bare and not isinstance(size, bool) and 0 < number < least:
        raise ConfigError(
            f'{name}={size!r} has no unit, and would be {match.group(1)} bytes. Allowed: "{match.group(1)}GiB", '
            f'"{match.group(1)}MiB", or "{match.group(1)}B" for bytes.'
        )
    # 1.5 probably means gigabytes and would be one byte.
    if isinstance(size, bool) or number * factor < 1 or (factor == 1 and number.denominator > 1):
        raise ConfigError(
            f"{name}={size!r} is not a size. Allowed: a whole number of bytes, at least 1, or text: a number with KB, MB, GB, TB, "
            f'KiB, MiB, GiB or TiB, such as "4GiB" or "1.5GiB".'
        )
    return int(number * factor)


def format_bytes(num_bytes: int | float) -> str:
    """Bytes as text: ``format_bytes(3 * 2**30) == "3.0 GiB"``."""
    value = float(num_bytes)
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if suffix == "B" else f"{value:.1f} {suffix}"
        value /= 1024
    return f"{value:.1f} TiB"


def size_option(num_bytes: int) -> str:
    """The bytes as an option, rounded up: ``size_option(3 * 2**20 + 1) == "3.1MiB"``."""
    for suffix, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes >= factor:
            tenths = -(-10 * num_bytes // factor)
            return f"{tenths // 10}.{tenths % 10}{suffix}" if tenths % 10 else f"{tenths // 10}{suffix}"
    return f"{num_bytes}B"


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple
