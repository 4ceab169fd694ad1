"""``param.data`` of the parameters of a session.

[Note: Writes through data]
Torch's ``param.data`` is a tensor with a version counter of its own, so the parameter's counter
does not show a write such as ``param.data.mul_(0.5)``. But copies of weights follow that counter: a
device's copy, fp32 masters, files of weights that come and go, and mirrors on disk. So if a
session has copies of a parameter, its ``data`` is what ``detach()`` gives: the same memory, and the
parameter's counter. As with any write in place, autograd raises if a backward needs the old values.
The only copy of trained fp32 weights that stay in memory is their mirror. Their ``data`` is torch's
own. Once code has taken it, the mirror is written at the end of every step that is kept.

``param.data = value`` is noted in [Note: Moved weights]; ``param.set_(value)`` does the same.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lightning_hetero.handles.offloaded_parameter import OffloadedParameter
from lightning_hetero.runtime.residency import Residency
from lightning_hetero.store.live.blocks import Part
from lightning_hetero.store.live.mirrors import readers_of
from lightning_hetero.store.raw_memory import plain_data, set_data
from lightning_hetero.untyped import Value


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Watched:
    """A parameter of a session.

    Attributes:
        part: Its part.
        index: Its position in it.
        residency: Where the session has it.
        counts: Writes through its ``data`` are to count in its version counter.
    """

    part: Part
    index: int
    residency: Residency
    counts: bool

    @property
    def param(self) -> nn.Parameter:
        """The parameter."""
        return self.part.params[self.index]

    def data(self) -> Tensor:
        """Its ``data``, which the caller may write to."""
        if self.counts or self.part.block.weights_on_disk:
            return self.param.detach()
        if type(self.param) is not OffloadedParameter:
            self.part.is_lent = True
            for ticket in readers_of(self.part):
                ticket.wait()
        return plain_data(self.param)

    def assign(self, value: Tensor) -> None:
        """Sets its ``data``."""
        self.residency.assign(self.part, self.index, value)


# By the parameter's id, the latest session last. Only the session holds its rows, and with them the
# model. So a model without other references is freed with its session.
_watched: defaultdict[int, list[weakref.ref[Watched]]] = defaultdict(list)


def _row(param: nn.Parameter) -> Watched | None:
    return _watched[id(param)][-1]() if id(param) in _watched else None


def _get(param: nn.Parameter) -> Tensor:
    row = _row(param)
    return plain_data(param) if row is None else row.data()


def _set(param: nn.Parameter, value: Tensor) -> None:
    row = _row(param)
    if row is None:
        set_data(param, value)
    else:
        row.assign(value)


def _set_to(param: nn.Parameter, source: Value = None, *layout: Value, **options: Value) -> Tensor:
    """``param.set_(tensor)``, with which parametrizations assign, does what ``data`` does."""
    row = _row(param)
    if row is None or not isinstance(source, Tensor) or layout or options:
        return Tensor.set_(param, *(() if source is None else (source, *layout)), **options)
    torch.autograd.graph.increment_version([param])
    row.assign(source)
    return param


def watch(rows: Iterable[Watched]) -> None:
    """A session begins: it sees what happens to ``data`` of its parameters."""
    for row in rows:
        key = id(row.param)
        _watched[key].append(weakref.ref(row, partial(_drop, key)))
    setattr(nn.Parameter, "data", property(_get, _set))  # noqa: B010  # mypy knows of no setter
    setattr(nn.Parameter, "set_", _set_to)  # noqa: B010


def forget(rows: Iterable[Watched]) -> None:
    """The session ends. Without a session ``data`` is torch's own."""
    for row in rows:
        key = id(row.param)
        for ref in [ref for ref in _watched[key] if ref() is row]:
            _drop(key, ref)
    if not _watched and "data" in vars(nn.Parameter):
        delattr(nn.Parameter, "data")
        delattr(nn.Parameter, "set_")


def _drop(key: int, ref: weakref.ref[Watched]) -> None:
    _watched[key].remove(ref)
    if not _watched[key]:
        del _watched[key]
