"""Python values as JSON text for commit records. Nothing in it can execute.

[Note: Encoding]
Numbers, strings, booleans, ``None`` and lists are JSON's own; infinities and NaN are spelled as
Python's ``json`` does. A dictionary whose keys are strings stays one. Everything else is an object
with the one key ``"$"``: ``[kind, ...]``, see ``_Decoder``. A type that is not listed is refused
with the place where it was found.

The little-endian bytes of tensors, arrays and ``bytes`` are base64 in a text. A value as a file of
its own has them behind the text, which says ``[first byte, bytes]`` there: 8 bytes with the length
of the text, the text, and the bytes, each run of them at a multiple of 64.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.errors import ConfigError, HeteroError

DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_DEPTH_MAX = 64
_ALIGN = 64


class Encoded:
    """A value on its way to the disk. It refers to the value's memory: write it before a change.

    Args:
        value: The value.
        where: What it is, for the message.

    Raises:
        ConfigError: Something in it has no safe form; names the place and the type.
    """

    def __init__(self, value: Any, where: str) -> None:
        self._tree = _encode(value, where, 0)

    def text(self) -> str:
        """All of it as text."""
        return self._dumps(_as_base64)

    def short_text(self, most: int) -> str | None:
        """All of it as text; ``None`` if that is longer than ``most``."""
        left = most

        def inline(raw: bytes | memoryview) -> str:
            nonlocal left
            left -= len(raw)
            if left < 0:
                raise _TooLongError
            return _as_base64(raw)

        try:
            text = self._dumps(inline)
        except _TooLongError:
            return None
        return text if len(text) <= most else None

    def pieces(self) -> list[bytes | memoryview]:
        """What a file of its own has, one piece after the other."""
        runs: list[bytes | memoryview] = []
        end = 0

        def place(raw: bytes | memoryview) -> list[int]:
            nonlocal end
            runs.extend((raw, bytes(-len(raw) % _ALIGN)))
            begin, end = end, end + len(raw) + -len(raw) % _ALIGN
            return [begin, len(raw)]

        text = self._dumps(place).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        return [len(text).to_bytes(8, "little"), text, *runs]

    def _dumps(self, on_bytes: Callable[[Any], Any]) -> str:
        return json.dumps(self._tree, separators=(",", ":"), default=on_bytes)


def _as_base64(raw: bytes | memoryview) -> str:
    return base64.b64encode(raw).decode("ascii")


class _TooLongError(Exception):
    pass


def dumps(value: Any, where: str) -> str:
    """The value as JSON text.

    Args:
        value: The value.
        where: What it is, for the message.

    Raises:
        ConfigError: Something in it has no safe form; names the place and the type.
    """
    return Encoded(value, where).text()


def loads(text: str | bytes, file: Callable[[str, int], Any] | None = None) -> Any:
    """The value of a text that :func:`dumps` made.

    Args:
        text: The text.
        file: Reads what has a file of its own, by its name and size.

    Raises:
        ConfigError: It is no such text.
    """
    with _reading():
        return _Decoder(_from_base64, file).decode(json.loads(text))


def unpack(content: memoryview) -> Any:
    """The value of a file of its own; its tensors lie in ``content``.

    Raises:
        ConfigError: It is no such file.
    """
    with _reading():
        start = 8 + int.from_bytes(content[:8], "little")

        def run(place: list[int]) -> memoryview:
            first, length = place
            if min(first, length) < 0 or start + first + length > len(content):
                raise ValueError("it refers to bytes behind its end")
            return content[start + first : start + first + length]

        return _Decoder(run, None).decode(json.loads(bytes(content[8:start])))


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError, RuntimeError) as error:
        if isinstance(error, HeteroError):
            raise
        raise ConfigError(f"the training state of a commit record cannot be read: {error}.") from error


def _encode(value: Any, where: str, depth: int) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth > _DEPTH_MAX:
        raise ConfigError(f"{where} is nested too deeply for a commit record, or holds itself; allowed: {_DEPTH_MAX} levels.")

    def inner(item: Any, key: Any) -> Any:
        return _encode(item, f"{where}[{key!r}]", depth + 1)

    kind = type(value)
    if kind is dict:
        if all(type(k) is str and k != "$" for k in value):
            return {k: inner(v, k) for k, v in value.items()}
        return {"$": ["dict", [[inner(k, k), inner(v, k)] for k, v in value.items()]]}
    if kind is list:
        return [inner(v, i) for i, v in enumerate(value)]
    if kind in _SEQUENCES:
        return {"$": [_SEQUENCES[kind], [inner(v, i) for i, v in enumerate(value)]]}
    if kind in _MAPPINGS:
        return {"$": [_MAPPINGS[kind], [[inner(k, k), inner(v, k)] for k, v in value.items()]]}
    return _encode_leaf(value, where, inner)


_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_MAPPINGS: dict[type, str] = {OrderedDict: "ordered", Counter: "counter", defaultdict: "dict"}


def _encode_leaf(value: Any, where: str, inner: Callable[[Any, Any], Any]) -> Any:
    plain = isinstance(value, Tensor) and not hasattr(value, "__tensor_flatten__")  # else: inner tensors
    if plain and value.layout is torch.strided and not value.is_quantized:
        flat = value.detach().to("cpu", copy=False).contiguous().view(-1)
        raw = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        return {"$": ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), raw]}
    if isinstance(value, bytes | bytearray):
        return {"$": ["bytes", bytes(value)]}
    if isinstance(value, PurePath):
        return {"$": ["path", str(value)]}
    if isinstance(value, timedelta):
        return {"$": ["seconds", value.total_seconds()]}
    if isinstance(value, Enum):  # its value: only its class can make the member
        return inner(value.value, "value")
    if isinstance(value, torch.dtype):
        return {"$": ["dtype", str(value).removeprefix("torch.")]}
    if isinstance(value, complex):
        return {"$": ["complex", value.real, value.imag]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and not isinstance(value, numpy.void | numpy.object_):
        return inner(value.item(), "item")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        little = numpy.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
        raw = little.reshape(-1).view(numpy.uint8).data if little.size else b""
        return {"$": ["array", little.dtype.str, list(value.shape), raw]}
    if isinstance(value, bool | int | float | str):  # a subclass, such as numpy's float64
        return next(base(value) for base in (int, float, str) if isinstance(value, base))
    raise ConfigError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a commit record cannot hold; allowed: numbers, "
        f"strings, tensors, bytes and containers of them. Keep it out of the state, or in one of these forms."
    )


def _from_base64(data: str) -> bytearray:
    return bytearray(base64.b64decode(data, validate=True))


class _Decoder:
    """Makes values of trees.

    Args:
        raw: The bytes that a tree refers to.
        file: Reads what has a file of its own; ``None``: nothing has.
    """

    def __init__(self, raw: Callable[[Any], Any], file: Callable[[str, int], Any] | None) -> None:
        self._raw = raw
        kinds: dict[str, Callable[..., Any]] = {
            "tensor": self._tensor,
            "array": self._array,
            "bytes": lambda data: bytes(raw(data)),
            "path": str,
            "seconds": lambda seconds: timedelta(seconds=seconds),
            "dtype": lambda name: DTYPES[name],
            "complex": lambda real, imag: complex(real, imag),
            "tuple": lambda items: tuple(self.decode(items)),
            "set": lambda items: set(self.decode(items)),
            "frozenset": lambda items: frozenset(self.decode(items)),
            "deque": lambda items: deque(self.decode(items)),
            "dict": lambda items: dict(self._pairs(items)),
            "ordered": lambda items: OrderedDict(self._pairs(items)),
            "counter": lambda items: Counter(dict(self._pairs(items))),
        }
        self._kinds = kinds if file is None else {**kinds, "file": file}

    def decode(self, tree: Any) -> Any:
        """The value."""
        if isinstance(tree, list):
            return [self.decode(v) for v in tree]
        if not isinstance(tree, dict):
            return tree
        if tree.keys() != {"$"}:
            return {k: self.decode(v) for k, v in tree.items()}
        kind, *rest = tree["$"]
        return self._kinds[kind](*rest)

    def _tensor(self, dtype: str, shape: list[int], data: Any) -> Tensor:
        raw = self._raw(data)
        flat = torch.frombuffer(raw, dtype=DTYPES[dtype]) if raw else torch.empty(0, dtype=DTYPES[dtype])
        if flat.numel() != math.prod(shape):
            raise ValueError(f"a tensor of shape {shape} has {flat.numel()} elements")
        return flat.view(shape)

    def _array(self, dtype: str, shape: list[int], data: Any) -> Any:
        import numpy

        if numpy.dtype(dtype).kind not in "biuf":
            raise ValueError(f"an array of {dtype}")
        return numpy.frombuffer(self._raw(data), dtype=dtype).reshape(shape).copy()

    def _pairs(self, items: list[list[Any]]) -> list[tuple[Any, Any]]:
        return [(self.decode(k), self.decode(v)) for k, v in items]
