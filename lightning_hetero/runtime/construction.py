"""Builds a model that need not fit memory: new parameters move to a file and stay ordinary tensors.

[Note: Construction]
Inside the context every new ``nn.Parameter`` is noted. When those in memory exceed their share, the
oldest move with their values to memory that is mapped from a file. They remain ordinary CPU
tensors. Code that initializes a parameter later (``post_init``, ``apply``, an outer constructor)
reads and writes the file's pages, which the system brings back. A mode that sees torch functions
gives these pages back again. No random number is drawn and no function is replaced, so weights and
generators are those of a construction without the context.

A parameter moves only while nothing else refers to its storage, because other views would not move
with it. It is checked again when the next one is made. When the plan's blocks are placed, one block
at a time is copied out of the file (``runtime.model_setup``).

[Note: Values on the meta device]
The meta device keeps no values. Those that code copies there, as ``load_state_dict`` does, are kept
here until the model is placed, as far as they fit. So are those of parameters that were loaded and
are moved there, as PEFT moves adapters to their layer's device. A loaded parameter is one that
nothing has written in place since it was made: constructors do. Values follow their tensor to a
copy and to another dtype, as of a precision.

Whatever else is computed from them there is lost, and so is a weight that takes it in, as a merge
writes adapters into the base. Lost as well is what code outside of modules computes from any tensor
there, as ``nn.init.zeros_(head.weight)`` does. A parameter that has it is refused when the model is
placed. What modules do themselves, in constructors above all, is how they begin: files and
initialization take its place.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_hetero._native import kernels
from lightning_hetero.errors import ConfigError
from lightning_hetero.handles.offloaded_parameter import METADATA
from lightning_hetero.runtime.initialize import Content
from lightning_hetero.runtime.process_memory import give_free_pages_back
from lightning_hetero.store.partition import is_dense
from lightning_hetero.units import format_bytes
from lightning_hetero.untyped import Function, Options, Value, Values

_SMALL_BYTES = 64 * 1024  # norms and biases: moving them would not pay
_SET_DATA: Function = vars(torch._C.TensorBase)["data"].__set__
_CONVERSIONS = {getattr(torch.Tensor, name) for name in ("to", "clone", "type", "float", "double", "half", "bfloat16")}


class Scratch(Protocol):
    """Makes tensors whose memory is that of a file."""

    def place(self, like: Tensor) -> Tensor:
        """A contiguous CPU tensor with shape and dtype of ``like``, without content."""

    def filled(self, tensor: Tensor) -> None:
        """Gives the pages of a tensor of :meth:`place` back; the file keeps the content."""


class _Given(NamedTuple):
    """What code has given a storage on the meta device."""

    storage: torch.UntypedStorage  # alive, so that no other has its address
    values: Tensor | None  # ``None``: they are lost
    layout: tuple[torch.Size, tuple[int, ...]]  # shape and strides of the tensor that has them
    is_changed: bool = False  # lost, because others were computed from them
    digest: tuple[torch.dtype, bytes] | None = None  # of values that are too many to keep, in their dtype

    @property
    def num_bytes(self) -> int:
        """Memory that they take here."""
        return 0 if self.values is None else self.values.nbytes


class _Rounded(NamedTuple):
    """A storage whose values, which are not known here, have passed through a narrower dtype."""

    storage: torch.UntypedStorage
    dtype: torch.dtype


class _Made(NamedTuple):
    """A parameter, and torch's default dtype in the context in which it was made."""

    param: weakref.ref[nn.Parameter]
    default: torch.dtype


class Construction:
    """The parameters of one model's construction, some of them in a file.

    Args:
        share_bytes: Memory that they may use; above that they move to the file.
        scratch: Makes the file; called when the first parameter moves.
    """

    def __init__(self, share_bytes: int, scratch: Callable[[], Scratch]) -> None:
        self._share_bytes, self._make_scratch = share_bytes, scratch
        self._scratch: Scratch | None = None
        self._waiting: list[weakref.ref[nn.Parameter]] = []  # in memory, the oldest first
        self._waiting_bytes = 0
        self._places: dict[int, weakref.ref[nn.Parameter]] = {}  # tensors in the file by address
        self._touched: dict[int, weakref.ref[nn.Parameter]] = {}  # those whose pages may be in memory, by address
        self._touched_bytes = 0
        self._given: dict[int, _Given] = {}  # values of storages on the meta device, by address
        self._given_bytes = 0
        self._rounded: dict[int, _Rounded] = {}  # storages on the meta device, by address
        self._all: dict[int, _Made] = {}  # every parameter that was made, by ``id``
        self._default_dtype = torch.get_default_dtype()

    def __contains__(self, param: object) -> bool:
        """Whether the parameter's memory is in the file."""
        return isinstance(param, Tensor) and self._place_of(param) is not None

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Notes the parameters that this thread makes. At the end all or none are in the file."""
        self._default_dtype = torch.get_default_dtype()
        with _hooked(self._made), _Touches(self):
            yield
            if self._scratch is not None:
                self._move_out(0)
                self._give_back()

    def release(self, tensor: Tensor) -> None:
        """Gives the pages of a tensor in the file back: its content is elsewhere now."""
        if self._scratch is not None:
            self._scratch.filled(tensor)

    def given(self, name: str, tensor: Tensor) -> Tensor | None:
        """The values that code has given a tensor on the meta device.

        Raises:
            ConfigError: They were too many to keep, or were given to a part of it.
        """
        values, found = self.kept(tensor), self._found(tensor)
        if values is None and found is not None and not found.is_changed:
            raise ConfigError(
                f"{name!r} has lost the values that were loaded into it on the meta device, which keeps none. Up to "
                f"{format_bytes(self._share_bytes)} of them, half of host_memory, are kept, if they are of whole tensors. "
                f"Name their files by weights=, or build the model without torch.device('meta')."
            )
        return values

    def kept(self, tensor: Tensor) -> Tensor | None:
        """The values that code has given a tensor on the meta device; ``None`` if they are lost."""
        found = self._found(tensor)
        return None if found is None or found.layout != _layout(tensor) else found.values

    def lost_as(self, tensor: Tensor, read: Callable[[Tensor], object]) -> bool:
        """Whether the values of a tensor were too many to keep, and are those in files.

        Args:
            tensor: The tensor.
            read: Reads those of the files into a tensor of any dtype.
        """
        found = self._found(tensor)
        if found is None or found.digest is None:
            return False
        dtype, digest = found.digest
        read(theirs := torch.empty(tensor.shape, dtype=dtype, device="cpu"))
        return _digest(theirs) == (dtype, digest)

    def refuse_changes(self, root: nn.Module, files: Content | None) -> None:
        """Refuses parameters that code has changed on the meta device.

        Args:
            root: The model, of which no checkpoint is loaded.
            files: What its weights are read from.

        Raises:
            ConfigError: Names the first of them.
        """
        for name, param in root.named_parameters():
            found = self._found(param)
            if found is not None and (found.is_changed or found.layout != _layout(param)):
                raise ConfigError(
                    f"{name!r} was changed on the meta device, which keeps no values, so that the change is lost. Change it in "
                    f"on_train_start or later, give files that have the result (weights=), or build the model without "
                    f"torch.device('meta')."
                )
            passed = self._rounded.get(param.untyped_storage()._cdata) if param.is_meta else None
            if passed is not None:
                _refuse_rounding(name, param, passed.dtype, files)

    def knows(self, name: str, tensor: Tensor) -> bool:
        """Whether a parameter was made here, or its values were given here."""
        return self._made_here(tensor) is not None or self.given(name, tensor) is not None

    def default_dtype(self, module: nn.Module) -> torch.dtype:
        """Torch's default dtype when the module was built: that of now if not here."""
        first = next(module.parameters(), None)  # others may have been added here
        made = None if first is None else self._made_here(first)
        return torch.get_default_dtype() if made is None else made.default

    def _made_here(self, param: Tensor) -> _Made | None:
        made = self._all.get(id(param))
        return made if made is not None and made.param() is param else None

    def forget_given(self) -> None:
        """Values that code has given to tensors on the meta device are needed no longer."""
        self._all.clear()
        self._given.clear()
        self._rounded.clear()
        self._given_bytes = 0

    def _found(self, tensor: Tensor) -> _Given | None:
        return self._given.get(tensor.untyped_storage()._cdata) if tensor.is_meta and self._given else None

    def _give(
        self, tensor: Tensor, values: Tensor | None, *, is_changed: bool = False, digest: tuple[torch.dtype, bytes] | None = None
    ) -> None:  # fmt: skip
        storage, layout = tensor.untyped_storage(), _layout(tensor)
        if (before := self._given.pop(storage._cdata, None)) is not None:
            self._given_bytes -= before.num_bytes
        own = None
        if values is not None and self._given_bytes + tensor.nbytes <= self._share_bytes:
            own = values.detach().to(tensor.dtype, copy=True).expand(tensor.shape)
        elif values is not None:
            digest = _digest(values.detach().to(tensor.dtype).expand(tensor.shape))
        self._given[storage._cdata] = given = _Given(storage, own, layout, is_changed, digest)
        self._given_bytes += given.num_bytes

    def _made(self, param: nn.Parameter) -> None:
        """A parameter was made, or was given other memory."""
        if self._made_here(param) is None:
            self._all[id(param)] = _Made(weakref.ref(param), self._default_dtype)
        if param.device.type != "cpu" or param.layout is not torch.strided or param.nbytes < _SMALL_BYTES:
            return
        self._waiting_bytes += param.nbytes
        self._move_out(self._share_bytes, but=param)
        self._waiting.append(weakref.ref(param))

    def _move_out(self, allowed_bytes: int, but: nn.Parameter | None = None) -> None:
        """Moves the oldest parameters to the file until the others fit."""
        if self._waiting_bytes + self._touched_bytes > allowed_bytes and self._touched_bytes:
            self._give_back()
        if self._waiting_bytes <= allowed_bytes:
            return
        alive = {id(p): p for ref in self._waiting if (p := ref()) is not None and p is not but}
        left = [p for p in alive.values() if not p.is_meta and p not in self]
        total = sum(p.nbytes for p in left) + (but.nbytes if but is not None else 0)
        kept: list[nn.Parameter] = []
        for param in left:
            if total > allowed_bytes and _is_alone(param):
                self._move(param)
                total -= param.nbytes
            else:
                kept.append(param)
        self._waiting = [weakref.ref(p) for p in kept]
        self._waiting_bytes = total
        give_free_pages_back()  # the next parameters may not fit the holes

    def _move(self, param: nn.Parameter) -> None:
        if self._scratch is None:
            self._scratch = self._make_scratch()
        with torch.no_grad(), torch._C.DisableTorchFunction():
            flat = self._scratch.place(torch.empty((param.numel(),), dtype=param.dtype, device="meta"))
            memory = flat.as_strided(param.shape, param.stride())
            memory.copy_(param)
            param.data = memory
            self._places[flat.untyped_storage().data_ptr()] = weakref.ref(param)
            self._scratch.filled(flat)

    def _place_of(self, tensor: Tensor) -> int | None:
        """The address of the tensor's storage if it is in the file."""
        if not self._places or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return None
        with torch._C.DisableTorchFunction():
            address = tensor.untyped_storage().data_ptr()
        return address if address in self._places else None

    def _written(self, func: Function, values: Values) -> None:
        """A torch function has written the first of these values, which is on the meta device."""
        target, source = values[0], values[1] if func == torch.Tensor.copy_ else None
        if isinstance(source, Tensor) and not source.is_meta:
            self._give(target, source)
        elif isinstance(source, Tensor) and (kept := self.kept(source)) is not None:
            self._give(target, kept)
        elif self._is_change(values):
            self._give(target, None, is_changed=True)

    def _is_change(self, values: Values) -> bool:
        """Whether what is computed from these values is lost.

        See [Note: Values on the meta device]. What modules compute from numbers alone is not.
        """
        tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
        if any(self._found(value) is not None if value.is_meta else value.ndim > 0 for value in tensors):
            return True
        return any(value.is_meta for value in tensors) and not _in_module()

    def _computed(self, func: Function, values: Values, result: Tensor) -> None:
        """A torch function has made a tensor with memory of its own on the meta device."""
        source = values[0]
        if func not in _CONVERSIONS:
            if self._is_change(values):
                self._give(result, None, is_changed=True)
        elif (found := self._found(source)) is not None:
            kept = self.kept(source)
            self._give(result, kept, is_changed=found.is_changed or kept is not found.values, digest=found.digest)
        elif _is_loaded(source):
            self._give(result, source)
        elif source.is_floating_point() and result.is_floating_point():
            before = self._rounded.get(source.untyped_storage()._cdata)
            dtypes = [source.dtype, result.dtype, *([] if before is None else [before.dtype])]
            storage = result.untyped_storage()
            self._rounded[storage._cdata] = _Rounded(storage, min(dtypes, key=lambda dtype: dtype.itemsize))

    def _seen(self, func: Function, values: Values, result: Value) -> None:
        """A torch function has run on these values."""
        if func == _SET_DATA and type(values[0]) is nn.Parameter and values[0] not in self:
            self._made(values[0])  # as module.to(dtype) does it
        if made := [value for value in tree_leaves(result) if isinstance(value, Tensor) and value.is_meta]:
            before = {v.untyped_storage()._cdata for v in tree_leaves(values) if isinstance(v, Tensor)}
            for value in made:
                if before and value.untyped_storage()._cdata not in before:
                    self._computed(func, values, value)
        if self._places and func not in METADATA:
            for value in tree_leaves(values):
                place = self._place_of(value) if isinstance(value, Tensor) else None
                if place is not None and place not in self._touched:
                    self._touched[place] = self._places[place]
                    self._touched_bytes += value.untyped_storage().nbytes()
            if self._waiting_bytes + self._touched_bytes > self._share_bytes:
                self._give_back()

    def _give_back(self) -> None:
        with torch._C.DisableTorchFunction():
            for ref in self._touched.values():
                if (param := ref()) is not None and self._scratch is not None:
                    self._scratch.filled(param.detach())
        self._touched.clear()
        self._touched_bytes = 0


def refuse_roundings(root: nn.Module, before: Mapping[str, torch.dtype], files: Content | None) -> None:
    """Refuses parameters on the meta device that a precision would round a second time in memory.

    Args:
        root: The model, of which no checkpoint is loaded.
        before: The dtypes that its parameters on the meta device had before.
        files: What its weights are read from.

    Raises:
        ConfigError: Names the first of them.
    """
    for name, param in root.named_parameters():
        if param.is_meta and param.is_floating_point() and name in before:
            _refuse_rounding(name, param, before[name], files)


def _refuse_rounding(name: str, param: nn.Parameter, passed: torch.dtype, files: Content | None) -> None:
    place = None if files is None or name not in files else files.place(name)
    if place is not None and passed not in (param.dtype, place.dtype) and passed.itemsize <= place.dtype.itemsize:
        raise ConfigError(
            f"{name!r} is {place.dtype} in the files and {param.dtype} in the model, where it was {passed} before: in memory its "
            f"values would be rounded to {passed}, and here they would not. Build the model in {param.dtype}, or convert the files "
            f"to {passed}."
        )


class _Touches(TorchFunctionMode):
    """Tells a construction which tensors torch functions have used."""

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(self, func: Function, types: object, args: Values = (), kwargs: Options | None = None) -> Value:
        values = (*args, *(kwargs or {}).values())
        target = values[0] if values and isinstance(values[0], Tensor) and values[0].is_meta else None
        before = 0 if target is None else target._version
        result = func(*args, **(kwargs or {}))
        if target is not None and target._version != before:
            self._construction._written(func, values)
        self._construction._seen(func, values, result)
        return result


@contextmanager
def _hooked(made: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Calls ``made`` with every ``nn.Parameter`` that this thread makes, in any way."""
    thread = threading.get_ident()
    before = vars(nn.Parameter)["__new__"]
    original = nn.Parameter.__new__

    def new(cls: type[nn.Parameter], *args: Value, **kwargs: Value) -> nn.Parameter:
        param = original(cls, *args, **kwargs)
        if type(param) is nn.Parameter and threading.get_ident() == thread:
            made(param)
        return param

    setattr(nn.Parameter, "__new__", staticmethod(new))  # noqa: B010  # mypy allows no other __new__
    try:
        yield
    finally:
        setattr(nn.Parameter, "__new__", before)  # noqa: B010


def _is_loaded(tensor: Tensor) -> bool:
    """Whether it is a parameter in memory that no function has written since it was made."""
    return type(tensor) is nn.Parameter and not tensor.is_meta and tensor._version == 0


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return tensor.shape, tensor.stride()


def _digest(values: Tensor) -> tuple[torch.dtype, bytes]:
    content = values.contiguous()
    return content.dtype, kernels.digest(content.data_ptr(), content.nbytes)


def _in_module() -> bool:
    """Whether a module's own code runs, such as its constructor.

    The code of a LightningModule is the user's, and so are functions that ``apply`` is given.
    """
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        frame, code = caller, caller.f_code
        if code.co_varnames[:1] == ("self",) and code.co_name != "apply":
            module = frame.f_locals["self"]
            if isinstance(module, nn.Module) and (code.co_name == "reset_parameters" or not hasattr(module, "configure_model")):
                return True
    return False


def _is_alone(param: nn.Parameter) -> bool:
    """Whether the parameter has its storage to itself, whole."""
    with torch._C.DisableTorchFunction():
        storage = param.untyped_storage()
        uses = torch._C._storage_Use_Count(storage._cdata)
        return is_dense(param) and storage.resizable() and storage.nbytes() == param.nbytes and uses == _own_uses()


def _own_uses() -> int:
    """The count of a storage that nothing shares, with the handle that asks for it."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))
