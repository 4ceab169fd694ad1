"""Python values as JSON text: what a commit record holds of a training run. Nothing in it can execute.

[Note: Encoding]
Numbers, strings, booleans, ``None`` and lists are JSON's own; infinities and NaN are spelled as Python's ``json`` does. A
dictionary whose keys are strings stays one. Everything else is an object with the one key ``"$"``: ``[kind, ...]``, see
``_DECODERS``. Tensors and bytes are base64 of their little-endian bytes. A type that is not listed is refused with the place
where it was found.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.errors import ConfigError

DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_DEPTH_MAX = 64


def dumps(value: Any, where: str) -> str:
    """The value as JSON text.

    Args:
        value: The value.
        where: What it is, for the message.

    Raises:
        ConfigError: Something in it has no safe form; names the place and the type.
    """
    return json.dumps(_encode(value, where, 0), separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    """The value of a text that :func:`dumps` made.

    Raises:
        ConfigError: It is no such text.
    """
    try:
        return _decode(json.loads(text))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError, RuntimeError) as error:
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
    if isinstance(value, Tensor) and not value.is_sparse and not value.is_quantized:
        flat = value.detach().to("cpu", copy=False).contiguous().view(-1)
        raw = flat.view(torch.uint8) if flat.numel() else flat
        return {"$": ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), _base64(bytes(raw.numpy()))]}
    if isinstance(value, bytes | bytearray):
        return {"$": ["bytes", _base64(bytes(value))]}
    if isinstance(value, PurePath):
        return {"$": ["path", str(value)]}
    if isinstance(value, timedelta):
        return {"$": ["seconds", value.total_seconds()]}
    if isinstance(value, Enum):  # what it stands for: nobody but its class can make the member again
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
        return {"$": ["array", little.dtype.str, list(value.shape), _base64(little.tobytes())]}
    if isinstance(value, bool | int | float | str):  # a subclass, such as numpy's float64
        return next(base(value) for base in (int, float, str) if isinstance(value, base))
    raise ConfigError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a commit record cannot hold; allowed: numbers, "
        f"strings, tensors, bytes and containers of them. Keep it out of the state, or in one of these forms."
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {"$"}:
        return {k: _decode(v) for k, v in value.items()}
    kind, *rest = value["$"]
    return _DECODERS[kind](*rest)


def _tensor(dtype: str, shape: list[int], data: str) -> Tensor:
    raw = bytearray(base64.b64decode(data, validate=True))
    flat = torch.frombuffer(raw, dtype=DTYPES[dtype]) if raw else torch.empty(0, dtype=DTYPES[dtype])
    if flat.numel() != math.prod(shape):
        raise ValueError(f"a tensor of shape {shape} has {flat.numel()} elements")
    return flat.view(shape)


def _array(dtype: str, shape: list[int], data: str) -> Any:
    import numpy

    if numpy.dtype(dtype).kind not in "biuf":
        raise ValueError(f"an array of {dtype}")
    return numpy.frombuffer(base64.b64decode(data, validate=True), dtype=dtype).reshape(shape).copy()


def _pairs(items: list[list[Any]]) -> list[tuple[Any, Any]]:
    return [(_decode(k), _decode(v)) for k, v in items]


_DECODERS: dict[str, Callable[..., Any]] = {
    "tensor": _tensor,
    "array": _array,
    "bytes": lambda data: base64.b64decode(data, validate=True),
    "path": str,
    "seconds": lambda seconds: timedelta(seconds=seconds),
    "dtype": lambda name: DTYPES[name],
    "complex": lambda real, imag: complex(real, imag),
    "tuple": lambda items: tuple(_decode(items)),
    "set": lambda items: set(_decode(items)),
    "frozenset": lambda items: frozenset(_decode(items)),
    "deque": lambda items: deque(_decode(items)),
    "dict": lambda items: dict(_pairs(items)),
    "ordered": lambda items: OrderedDict(_pairs(items)),
    "counter": lambda items: Counter(dict(_pairs(items))),
}
