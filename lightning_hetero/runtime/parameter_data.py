"""``param.data`` of parameters of which a session has copies.

[Note: Writes through data]
Torch's ``param.data`` is a tensor with a version counter of its own, so the parameter's counter
does not show a write such as ``param.data.mul_(0.5)``. But copies of weights follow that counter: a
device's copy, fp32 masters, and mirrors on disk. So for parameters of which a session has copies,
``data`` is what ``detach()`` gives: the same memory, and the parameter's counter. Setting ``data``
does not change. As with any write in place, autograd raises if a backward needs the old values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_hetero.untyped import Value

_DATA: Value = vars(torch._C.TensorBase)["data"]
_get_plain, set_data = _DATA.__get__, _DATA.__set__
_counted: Counter[int] = Counter()  # sessions that have the parameter, by its id


def _get(param: nn.Parameter) -> Tensor:
    return param.detach() if id(param) in _counted else _get_plain(param)


def count_writes(params: Iterable[nn.Parameter]) -> None:
    """A session begins: writes through ``data`` of its parameters count."""
    _counted.update(map(id, params))
    setattr(nn.Parameter, "data", property(_get, set_data))  # noqa: B010  # mypy knows of no setter


def forget_writes(params: Iterable[nn.Parameter]) -> None:
    """The session ends. Without a session ``data`` is torch's own."""
    for param in params:
        _counted[id(param)] -= 1
        if not _counted[id(param)]:
            del _counted[id(param)]
    if not _counted and "data" in vars(nn.Parameter):
        delattr(nn.Parameter, "data")
