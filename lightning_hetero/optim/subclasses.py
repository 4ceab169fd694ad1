"""Optimizer state in tensor subclasses: split into plain tensors, and assembled again.

[Note: Tensor subclasses]
An optimizer may keep its state in a subclass of ``Tensor`` that holds several tensors, such as
codes and scales of 8-bit moments. torch's protocol for such classes (``__tensor_flatten__`` and
``__tensor_unflatten__``) names these tensors. They go to disk one by one, and the object is made
again around the tensors that are read. So the class is not on disk. A record names only classes
that ``torch.serialization.add_safe_globals`` knows, because a record must not choose the code that
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.errors import ConfigError, UnsupportedError

_PLAIN = (Tensor, nn.Parameter)


def mapped(value: Any, key: str, function: Callable[[str, Any], Any]) -> Any:
    """A state tensor with every plain tensor in it replaced.

    Args:
        value: A tensor, possibly of a subclass.
        key: The optimizer's name of it.
        function: Gets the name and the content of each plain tensor; an inner one has the name
            ``"<key>/<attribute>"``.
    """
    if not hasattr(value, "__tensor_flatten__"):
        return function(key, value)
    names, context = value.__tensor_flatten__()
    inner = {name: mapped(getattr(value, name), f"{key}/{name}", function) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())


def plain_tensors(value: Tensor, key: str) -> dict[str, Tensor]:
    """The plain tensors in a state tensor, by name: itself, or those inside it."""
    if not hasattr(value, "__tensor_flatten__"):
        return {key: value}
    names, _ = value.__tensor_flatten__()
    return {path: t for name in names for path, t in plain_tensors(getattr(value, name), f"{key}/{name}").items()}


def leaves(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The plain tensors of a parameter's state that are offloaded: with more than one element."""
    large = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.numel() > 1}
    return {path: tensor for key, value in large.items() for path, tensor in plain_tensors(value, key).items()}


def check_plain(name: str, value: Tensor) -> None:
    """Refuses a tensor that bytes, shape and dtype do not describe completely.

    Args:
        name: Its name, for the message.
        value: A tensor of :func:`leaves` in memory.

    Raises:
        UnsupportedError: It is sparse, quantized, or of a subclass without the protocol.
    """
    if type(value) not in _PLAIN or value.layout is not torch.strided or value.is_quantized:
        what = value.layout if type(value) in _PLAIN else f"{type(value).__module__}.{type(value).__qualname__}"
        raise UnsupportedError(
            f"optimizer state {name} is a tensor of {what}, which cannot be kept on disk. Allowed: dense tensors of any dtype, and "
            f"subclasses with __tensor_flatten__ and __tensor_unflatten__. Keep the state in memory: "
            f'plan="host", durability="none".'
        )


def outlines(state: Mapping[str, Any]) -> dict[str, Any]:
    """Describes the subclass tensors of a state for a record, without their plain tensors.

    Raises:
        ConfigError: ``torch.load`` does not make a class by default.
    """
    return {key: _outline(value) for key, value in state.items() if hasattr(value, "__tensor_flatten__") and value.numel() > 1}


def _outline(value: Any) -> Any:
    if not hasattr(value, "__tensor_flatten__"):
        return None
    names, context = value.__tensor_flatten__()
    inner = {name: _outline(getattr(value, name)) for name in names}
    path = f"{type(value).__module__}.{type(value).__qualname__}"
    if path not in _safe_classes():
        raise ConfigError(
            f"optimizer state is a {path}, which a commit record does not name: it is none of the classes that torch.load makes by "
            f"default. Call torch.serialization.add_safe_globals([{type(value).__qualname__}])."
        )
    return {"class": path, "context": context, "shape": list(value.shape), "stride": list(value.stride()), "inner": inner}


def put_together(key: str, outline: Any, plain: dict[str, Tensor]) -> Tensor:
    """Makes the tensor that :func:`outlines` has described, from plain tensors of a dictionary.

    Raises:
        ConfigError: The class is not known as safe in this process.
    """
    if outline is None:
        return plain.pop(key)
    inner = {name: put_together(f"{key}/{name}", of_one, plain) for name, of_one in outline["inner"].items()}
    kind: Any = _safe_classes().get(outline["class"])
    if kind is None:
        raise ConfigError(
            f"the store has optimizer state of class {outline['class']}, which is none that torch.load makes by default. Import "
            f"the package that it is from, or call torch.serialization.add_safe_globals, before trainer.fit."
        )
    found: Tensor = kind.__tensor_unflatten__(inner, outline["context"], torch.Size(outline["shape"]), tuple(outline["stride"]))
    return found


def _safe_classes() -> dict[str, type]:
    known = (entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals())
    return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in known if isinstance(kind, type)}
