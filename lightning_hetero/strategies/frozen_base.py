"""``exclude_frozen_parameters``: checkpoints without the frozen weights that a run began with.

[Note: The base]
The base is what the model had before a checkpoint was loaded: its own values, or those of the files
of ``weights``. A checkpoint leaves a parameter out only if it is frozen and still has the base's
values. So it has frozen parameters that were trained or written before, those that were initialized
at random on the meta device, and adapters that are frozen for now.

[Note: Which base it is]
A checkpoint names what it leaves out, with shapes, a digest of all values, and a sample of them: at
most 64 elements of each parameter, in runs over its whole length. A model that loads the checkpoint
must have the same there. So another base is found wherever its weights come from, and files may be
moved or divided anew. The sample is compared first, because that is quick. The digest takes one
read of the whole base, which is half of what a step over weights on disk reads; a fit computes it
once. Values are compared in the narrower dtype of the two. If the model's is the narrower one, only
the sample can be compared.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NotRequired, TypedDict, TypeGuard

import torch
from torch import Tensor, nn

from lightning_hetero.convert.importing import adapter_names
from lightning_hetero.errors import ConfigError
from lightning_hetero.handles.offloaded_parameter import materialize
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
from lightning_hetero.runtime import quantized
from lightning_hetero.runtime.session import Session
from lightning_hetero.runtime.tensor_sources import WeightSource
from lightning_hetero.store.live.blocks import Part, parts_of
from lightning_hetero.store.partition import is_dense
from lightning_hetero.store.raw_memory import memory_of

KEY = "excluded_parameters"  # of a checkpoint

_RUNS, _LENGTH = 8, 8  # of a sample
_PIECE = 1 << 22  # elements that are read at once for a digest

_Reader = Callable[[Sequence[int], int], Tensor]  # runs of a parameter, by first elements and one length


class Excluded(TypedDict):
    """A parameter that a checkpoint leaves out.

    Attributes:
        shape: Its shape.
        sample: Some of its elements, see [Note: Which base it is].
        digest: SHA-256 of all of them, in memory order and in the sample's dtype, in hexadecimal
            digits. The first files lack it.
        quantization: A digest of a quantized weight's scales; empty for others.
    """

    shape: list[int]
    sample: Tensor
    digest: NotRequired[str]
    quantization: str


class FrozenBase:
    """The frozen parameters of a model, as they were before a checkpoint was loaded."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._unset: frozenset[str] = frozenset()  # on the meta device, and in no file
        self._samples: dict[str, Tensor] | None = None
        self._digests: dict[str, str] = {}  # of this fit
        self._versions: dict[str, int] = {}

    def is_of(self, module: nn.Module) -> bool:
        """Whether it is of this model."""
        return self._module() is module

    def placed(self, content: Container[str] | None) -> None:
        """The model is about to get memory, with what files have."""
        known: Container[str] = () if content is None else content
        self._unset |= {name for name, param in self._named() if param.is_meta and name not in known}

    def remember(self) -> None:
        """Takes samples of all frozen parameters, unless they have been taken."""
        if self._samples is None:
            adapters = adapter_names(self._root)
            frozen = ((name, param) for name, param in self._named() if not param.requires_grad and name not in adapters)
            self._samples = {name: _sample(param) for name, param in frozen if name not in self._unset}

    @contextmanager
    def loading(self, state: Mapping[str, object], session: Session | None) -> Iterator[None]:
        """A checkpoint is loaded in the context: what it changes is no longer the base's."""
        self.look(session)
        samples = self._samples or {}
        for name, param in self._named():
            value = state.get(name)
            if name in samples and isinstance(value, Tensor) and not _equal(materialize(value), materialize(param.detach())):
                self._changed(name)
        yield
        self._versions = {name: param._version for name, param in self._named()}
        for part in _parts(session):
            part.rewritten = False

    def ends(self, session: Session | None) -> None:
        """The fit or the evaluation is over: until the next one, nothing tells what code writes."""
        self.look(session)
        self._digests.clear()

    def begins(self, session: Session, *, resumed: bool) -> None:
        """The session has placed the model. ``resumed``: with the weights of a store."""
        for name, param in self._named():
            self._versions.setdefault(name, param._version)
        if resumed:
            self._forget(part for part in _parts(session) if _was_written(part))

    def look(self, session: Session | None) -> None:
        """Notes what was written since the last look, before a session forgets it."""
        self._forget(part for part in _parts(session) if part.rewritten or part.moved)
        if self._samples:
            changed = [name for name, param in self._named() if self._versions.get(name, param._version) != param._version]
            for name in changed:
                self._changed(name)

    def excluded(self, session: Session | None) -> dict[str, Excluded]:
        """The parameters that a checkpoint leaves out now, by name."""
        self.look(session)
        samples = self._samples or {}
        frozen = {name: param for name, param in self._named() if name in samples and not param.requires_grad}
        same = {name: param for name, param in frozen.items() if _equal(samples[name], _sample(param))}
        scales = quantized.digests(self._root)
        return {
            name: {
                "shape": list(param.shape),
                "sample": samples[name],
                "digest": self._digest(name, param),
                "quantization": scales.get(name, ""),
            }
            for name, param in same.items()
        }

    def check(self, excluded: Mapping[str, Excluded]) -> None:
        """Refuses a model that does not have what a checkpoint leaves out.

        Raises:
            ConfigError: Names the first parameter that is missing, unset or different.
        """
        params = dict(self._named())
        left_out = f"the checkpoint leaves out {len(excluded)} frozen parameters, which this model must have already"
        remedy = (
            "Give the weights that its training began with: weights= for a model on the meta device, or build the model with them."
        )
        if missing := [name for name in excluded if name not in params]:
            raise ConfigError(f"{left_out}; it has no parameter {_some(missing)}. Load the checkpoint into the same model.")
        if unset := [name for name in excluded if name in self._unset]:
            raise ConfigError(
                f"{left_out}; {_some(unset)} would be random: made on the meta device, and in no file of weights=. {remedy}"
            )
        for name, row in excluded.items():
            if (shape := list(params[name].shape)) != row["shape"]:
                raise ConfigError(
                    f"{left_out}; {name!r} is {row['shape']} there, {shape} here. Load the checkpoint into the same model."
                )
        scales = quantized.digests(self._root)
        different = [
            name
            for name, row in excluded.items()
            if not _equal(row["sample"], _sample(params[name])) or row["quantization"] != scales.get(name, "")
        ]
        different = different or [name for name, row in excluded.items() if not self._has_all(row, name, params[name])]
        if different:
            raise ConfigError(f"{left_out}; other values than when it was saved: {_some(different)}. {remedy}")

    def _has_all(self, row: Excluded, name: str, param: nn.Parameter) -> bool:
        """Whether all values of a parameter are those that a checkpoint says it leaves out."""
        saved, dtype = row.get("digest", ""), row["sample"].dtype
        if not saved or dtype.itemsize > param.dtype.itemsize:
            return True
        return saved == (self._digest(name, param) if dtype == param.dtype else _digest(param, dtype))

    @property
    def _root(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise RuntimeError("the model is gone")
        return module

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._root.named_parameters(remove_duplicate=False)

    def _forget(self, parts: Iterable[Part]) -> None:
        written = {id(param) for part in parts for param in part.params}
        if not written:
            return
        for name in [name for name, param in self._named() if id(param) in written]:
            self._changed(name)

    def _changed(self, name: str) -> None:
        """A parameter no longer has the base's values."""
        (self._samples or {}).pop(name, None)
        self._digests.pop(name, None)

    def _digest(self, name: str, param: nn.Parameter) -> str:
        if name not in self._digests:
            self._digests[name] = _digest(param, param.dtype)
        return self._digests[name]


def without(state: Mapping[str, Tensor], excluded: Collection[str]) -> dict[str, Tensor]:
    """A state without parameters and what quantized ones add to it, such as ``weight.absmax``."""
    gone = {*excluded, *quantized.keys_of(excluded)}
    return {name: value for name, value in state.items() if gone.isdisjoint(_names(name))}


def excluded_of(checkpoint: Mapping[str, object]) -> dict[str, Excluded] | None:
    """What a checkpoint leaves out; ``None`` for one with all parameters.

    Raises:
        ConfigError: The entry is not one that this package writes.
    """
    found = checkpoint.get(KEY)
    if found is None:
        return None
    if not _is_table(found):
        raise ConfigError(f"the checkpoint's entry {KEY!r} is not of this package. Load a checkpoint that it has saved.")
    return found


def check_keys(missing: Collection[str], unexpected: Collection[str], excluded: Collection[str]) -> None:
    """Refuses keys as ``load_state_dict`` does, except those that the checkpoint leaves out.

    Raises:
        RuntimeError: Names them.
    """
    gone = {*excluded, *quantized.keys_of(excluded)}
    missing = [name for name in missing if gone.isdisjoint(_names(name))]
    if missing or unexpected:
        what = [f"Missing key(s) in state_dict: {_some(missing)}."] if missing else []
        what += [f"Unexpected key(s) in state_dict: {_some(unexpected)}."] if unexpected else []
        raise RuntimeError(f"Error(s) in loading a checkpoint without frozen parameters: {' '.join(what)}")


def _is_table(found: object) -> TypeGuard[dict[str, Excluded]]:
    kinds = {"shape": list, "sample": Tensor, "quantization": str}
    return isinstance(found, dict) and all(
        isinstance(name, str) and isinstance(row, dict) and all(isinstance(row.get(key), kind) for key, kind in kinds.items())
        for name, row in found.items()
    )


def _names(key: str) -> set[str]:
    """The key of a state, and all names that it extends."""
    parts = key.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts) + 1)}


def _sample(param: nn.Parameter) -> Tensor:
    """Some elements in memory order, on the CPU."""
    numel = param.numel()
    length, runs = (_LENGTH, _RUNS) if numel > _LENGTH * _RUNS else (numel, 1)
    return _reader(param)([(numel - length) * run // max(runs - 1, 1) for run in range(runs)], length)


def _digest(param: nn.Parameter, dtype: torch.dtype) -> str:
    """Of all elements in memory order, converted to a dtype. Takes the memory of a piece."""
    digest, read, numel = hashlib.sha256(), _reader(param), param.numel()
    for first in range(0, numel, _PIECE):
        piece = read([first], min(_PIECE, numel - first)).to(dtype)
        digest.update(memory_of(piece))
    return digest.hexdigest()


def _reader(param: nn.Parameter) -> _Reader:
    """Reads runs of elements in memory order, joined, on the CPU."""
    numel, value = param.numel(), param.detach()
    if not is_dense(value):
        value = value.contiguous()
    if isinstance(value, OffloadedTensor) and numel and isinstance(value.source, WeightSource):
        return value.source.sample
    flat = value.as_strided((numel,), (1,))
    return lambda firsts, length: torch.cat([flat[first : first + length] for first in firsts]).cpu()


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether values are equal bit for bit in the narrower dtype."""
    if one.shape != other.shape:
        return False
    if one.dtype != other.dtype:
        if not (one.is_floating_point() and other.is_floating_point()):
            return False
        dtype = min(one.dtype, other.dtype, key=lambda d: d.itemsize)
        one, other = one.to(dtype), other.to(dtype)
    return torch.equal(one.cpu().contiguous().view(-1).view(torch.uint8), other.cpu().contiguous().view(-1).view(torch.uint8))


def _parts(session: Session | None) -> list[Part]:
    return [] if session is None else parts_of(session.blocks)


def _was_written(part: Part) -> bool:
    """Whether a resumed store has more than the slot that frozen weights have."""
    natives = [part.native, *(mirror.native for mirror in part.mirrors.values())]
    return any(native is not None and native.geometry.num_slots > 1 for native in natives)


def _some(names: Collection[str]) -> str:
    shown = ", ".join(map(repr, list(names)[:3]))
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
