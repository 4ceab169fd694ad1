"""JSON text to frozen dataclasses and back, with errors that name the file and the key."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lightning_hetero.errors import ConfigError, did_you_mean


def parse_object(text: str, *, what: str, source: str) -> dict[str, Any]:
    """Reads JSON text that must be an object.

    Raises:
        ConfigError: The text is not JSON, or not an object.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers with too many digits, and objects nested too deep
        raise ConfigError(f"{source} is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source} is not a {what}: got {type(data).__name__}, expected an object.")
    return data


def check_format(data: dict[str, Any], name: str, *versions: int, what: str, source: str) -> None:
    """Removes ``format`` and ``version``, which may be missing, from ``data``.

    ``versions``: those that are read, the newest one last.

    Raises:
        ConfigError: They belong to another format or version.
    """
    got = data.pop("format", name), data.pop("version", versions[-1])
    if got[0] == name and (got[1] not in versions or isinstance(got[1], bool)):
        read = " and ".join(map(str, versions))
        raise ConfigError(f"{source} is a {what} of version {got[1]!r}; this package reads version {read}. Make it anew.")
    if got[0] != name:
        raise ConfigError(
            f"{source} is not a {what}: got format {got[0]!r}, version {got[1]!r}, expected {name!r}, {versions[-1]}."
        )


def check_keys(data: Mapping[str, Any], *, required: Collection[str], optional: Collection[str], where: str) -> None:
    """Refuses missing and unknown keys.

    Raises:
        ConfigError: There is one; the message names all of them.
    """
    if missing := [key for key in required if key not in data]:
        raise ConfigError(f"{where}: missing keys {missing}; required: {list(required)}.")
    if unknown := sorted(set(data) - set(required) - set(optional), key=str):  # YAML keys may be other types than text
        hints = "".join(did_you_mean(key, [*required, *optional]) for key in unknown)
        raise ConfigError(f"{where}: unknown keys {unknown}; known: {[*required, *optional]}.{hints}")


def number(value: Any, *, key: str, where: str, positive: bool = False, whole: bool = False) -> float:
    """A finite number of at least zero.

    Raises:
        ConfigError: Another type, NaN, infinite, negative; zero if ``positive``; a fraction if
            ``whole``.
    """
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    if not usable or (positive and value == 0) or (whole and value != int(value)):
        kind = f"{'a whole' if whole else 'a'} number {'above' if positive else 'of at least'} 0"
        raise ConfigError(f"{where}: {key}={value!r}; allowed: {kind}.")
    return int(value) if whole else float(value)


class Rows(tuple[Any, ...]):
    """A list that :func:`to_text` writes with one row per line."""

    __slots__ = ()


def to_text(values: Mapping[str, Any]) -> str:
    """An object as JSON text, one key or row per line, so that files diff well."""
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {_text(v, '  ')}" for k, v in values.items()) + "\n}\n"


def _text(value: Any, indent: str) -> str:
    if isinstance(value, Rows):
        rows = ",\n".join(f"{indent}  {_text(row, indent + '  ')}" for row in value)
        return f"[\n{rows}\n{indent}]"
    if isinstance(value, dict) and any(isinstance(v, Rows) for v in value.values()):
        return "{" + ", ".join(f"{json.dumps(k)}: {_text(v, indent)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def read_text(path: str | Path, *, what: str) -> str:
    """The text of a file.

    Raises:
        ConfigError: It does not exist, or cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{what} {str(path)!r} does not exist. Check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error}.") from error
