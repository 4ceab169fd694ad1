"""Parameters whose weights are not in memory: every read and write of them goes through here.

[Note: Two faces of an offloaded tensor]
``OffloadedParameter`` is the model's own parameter object while its weights are on another tier or
being updated. The runtime switches its ``__class__`` with ``offload`` and ``restore``; identity,
address, hooks and autograd state stay. A reader gets an ``OffloadedTensor``
(``offloaded_tensor.py``): a handle with shape, dtype and strides but no bytes. It stays lazy
through ``detach`` and views, and reads its ``Source`` when an operator needs values. Writes go to
the source.

[Note: No lost gradients]
A released parameter that requires grad may be read under ``no_grad`` or in ways that build no
graph. A read that would build one raises, because its gradient would not reach the parameter.
"""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import GetSetDescriptorType
from typing import NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_hetero.errors import OffloadedAccessError, UnsupportedError
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor, Source, contents_of, keep_content
from lightning_hetero.untyped import Function, Options, Value, Values


class ParameterState(enum.Enum):
    """Where a parameter's weights are."""

    RESIDENT = "resident"  #: In its own memory and final: an ordinary parameter.
    PENDING = "pending"  #: An update is writing them. They are final after ``Record.wait``.
    RELEASED = "released"  #: On another tier. The memory at the address reads as garbage.


class Record(Protocol):
    """One offloaded parameter for the runtime, in ``parameter._hetero`` while it is offloaded."""

    @property
    def name(self) -> str:
        """The parameter's qualified name."""

    @property
    def state(self) -> ParameterState:
        """Where the bytes are now."""

    def wait(self) -> None:
        """Waits until no update is pending. May change ``state`` and ``restore`` the parameter."""

    def source(self) -> Source:
        """The content; equal for equal records: tied weights stay one storage in a checkpoint."""


class OffloadedParameter(nn.Parameter):
    """A parameter while its weights are away or being updated.

    See [Note: Two faces of an offloaded tensor]. Metadata, gradients and hooks never wait and never
    read. ``detach`` and ``.data`` of a released parameter give a lazy ``OffloadedTensor``. Of a
    pending one they wait and give its own memory. Everything else waits for a pending update; on a
    released parameter it reads the source or, under ``no_grad``, writes it. It is never
    constructed: ``offload`` turns an existing parameter into one.
    """

    _hetero: Record

    @classmethod
    def __torch_function__(cls, func: Function, types: Sequence[type], args: Values = (), kwargs: Options | None = None) -> Value:
        """Decides for a torch function: metadata, lazy handle, write or read."""
        kwargs = kwargs or {}
        if func in METADATA:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        if func in _DETACH:
            return _detached(args[0])
        if func == _SET_DATA:
            return _assign(args[0], args[1])
        return _access(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, nn.Parameter]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = copied = nn.Parameter(materialize(self).to(self.device), self.requires_grad)
            if (kind := self.__dict__.get("_hetero_class")) is not None:  # its attributes belong to the values
                own = {key: value for key, value in self.__dict__.items() if not key.startswith("_hetero")}
                copied.__class__ = kind
                copied.__dict__.update(copy.deepcopy(own, memo))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        state = {key: value for key, value in self.__dict__.items() if key not in ("_hetero", "_hetero_class")}
        hooks: OrderedDict[int, object] = OrderedDict()  # torch does not pickle them either
        args = (materialize(self), self.requires_grad, hooks)
        if state:
            return torch._utils._rebuild_parameter_with_state, (*args, state)
        return torch._utils._rebuild_parameter, args

    def _describe(self) -> str:
        state = self._hetero.state.value
        return f"OffloadedParameter({tuple(self.shape)}, {self.dtype}, {self._hetero.name!r}, {state})"

    __repr__: Value = _describe  # mypy accepts no override of torch's signature


def offload(parameters: Iterable[nn.Parameter], records: Mapping[int, Record]) -> None:
    """Turns parameters into ``OffloadedParameter``, in place; ``records``: theirs, by ``id``."""
    for parameter in parameters:
        kind = type(parameter)
        if kind is not OffloadedParameter:
            attributes = parameter.__dict__
            if kind is not nn.Parameter:
                attributes["_hetero_class"] = kind  # such as one of bitsandbytes
            attributes["_hetero"] = records[id(parameter)]
            parameter.__class__ = OffloadedParameter


def restore(parameters: Iterable[nn.Parameter]) -> None:
    """Turns those that are ``OffloadedParameter`` back into what they were."""
    for parameter in parameters:
        if type(parameter) is OffloadedParameter:
            attributes = parameter.__dict__
            parameter.__class__ = attributes.pop("_hetero_class", nn.Parameter)
            attributes.pop("_hetero", None)


def _detached(tensor: Tensor) -> Tensor:
    """``detach``, ``.data``, ``state_dict``: an alias of final weights in memory, or a handle."""
    if isinstance(tensor, OffloadedParameter) and tensor._hetero.state is ParameterState.PENDING:
        tensor._hetero.wait()
    return _handle(tensor) if isinstance(tensor, OffloadedParameter) else tensor.detach()


def _handle(parameter: OffloadedParameter, *, requires_grad: bool = False) -> OffloadedTensor:
    return OffloadedTensor(
        parameter._hetero.source(), stride=parameter.stride(), device=parameter.device, requires_grad=requires_grad
    )


def materialize(tensor: Tensor) -> Tensor:
    """Gives an ordinary tensor.

    Args:
        tensor: Any tensor. An ``OffloadedTensor`` or ``OffloadedParameter`` is read from its tier.

    Returns:
        ``tensor`` itself if it is ordinary. Otherwise a fresh detached dense CPU tensor with its
        shape, dtype and, unless it is a view, its strides.
    """
    return contents_of(_handle(tensor) if isinstance(tensor, OffloadedParameter) else tensor)


def _assign(parameter: Tensor, value: Tensor) -> None:
    """``parameter.data = value``: writes the source, because the address is permanent."""
    if not isinstance(parameter, OffloadedParameter):  # an ordinary tensor takes the data of an offloaded one
        parameter.data = materialize(value).to(value.device)
        return
    source = parameter._hetero.source()
    if value is parameter or (isinstance(value, OffloadedTensor) and value.source == source):
        return  # module.to(), .cpu(), .float() assign what they read
    if value.shape != parameter.shape or value.dtype != parameter.dtype:
        raise UnsupportedError(
            f"{parameter._hetero.name!r} is {tuple(parameter.shape)} {parameter.dtype}; assigning .data of "
            f"{tuple(value.shape)} {value.dtype} would move it, but an offloaded parameter keeps shape, dtype and address. "
            "Convert the model before the trainer sets it up."
        )
    content = materialize(value).detach().to("cpu")
    keep_content(source)
    torch.autograd.graph.increment_version([parameter])  # backward cannot get the old values again
    source.write(content)


def _access(func: Function, types: Sequence[type], args: Values, kwargs: Options) -> Value:
    """Runs a function that may touch values."""
    stand_ins: dict[int, tuple[OffloadedParameter, OffloadedTensor]] = {}

    def enter(parameter: Tensor) -> Tensor:
        if not isinstance(parameter, OffloadedParameter):
            return parameter
        record = parameter._hetero
        if record.state is ParameterState.PENDING:
            record.wait()
        if record.state is not ParameterState.RELEASED:
            return parameter
        if id(parameter) not in stand_ins:
            stand_ins[id(parameter)] = (parameter, _stand_in(parameter, record))
        return stand_ins[id(parameter)][1]

    # tree_map_only tests the class before wait(), which may restore it.
    plain_args, plain_kwargs = pytree.tree_map_only(OffloadedParameter, enter, (args, kwargs))
    result = torch._C._disabled_torch_function_impl(
        _OVERRIDDEN.get(func, func) if stand_ins else func, types, plain_args, plain_kwargs
    )
    if not stand_ins:
        return result
    originals = {id(stand_in): parameter for parameter, stand_in in stand_ins.values()}

    def leave(value: Tensor) -> Tensor:
        if id(value) in originals:  # in-place functions, and conversions that change nothing, return their argument
            return originals[id(value)]
        if value.requires_grad:
            for parameter in originals.values():
                if parameter.requires_grad:
                    _refuse_gradient(parameter._hetero.name)
        return value

    return pytree.tree_map_only(Tensor, leave, result)


def _stand_in(parameter: OffloadedParameter, record: Record) -> OffloadedTensor:
    """The handle in place of a released parameter; a leaf, so that autograd's rules apply to it."""
    needs_grad = parameter.requires_grad and torch.is_grad_enabled()
    stand_in = _handle(parameter, requires_grad=needs_grad)
    if needs_grad:
        name = record.name
        # Catches the graphs that the check of the results misses: tensors inside other objects.
        register: Callable[[Callable[[Tensor], None]], object] = stand_in.register_hook
        register(lambda _: _refuse_gradient(name))
    return stand_in


def _refuse_gradient(name: str) -> NoReturn:
    raise OffloadedAccessError(
        f"{name!r} was read for a differentiable computation while it is offloaded; its gradient would be lost. Allowed: "
        "reading it inside its own block's forward, or under torch.no_grad(). Read it within `with "
        "strategy.materialize(module_or_params):`, or pass block_cls= so that the module that uses it is its block."
    )


def _metadata_functions() -> frozenset[object]:
    """Torch functions that need no values: shapes, flags, gradients, hooks, ``*_like``."""
    of_values = {"data", "T", "mT", "H", "mH", "real", "imag"}
    properties = [
        descriptor
        for name in dir(Tensor)
        if name not in of_values and isinstance(descriptor := getattr(Tensor, name), GetSetDescriptorType)
    ]
    names = [
        "__hash__", "__len__", "backward", "data_ptr", "dim", "dim_order", "element_size", "get_device", "has_names",
        "is_coalesced", "is_complex", "is_conj", "is_contiguous", "is_distributed", "is_floating_point", "is_inference",
        "is_neg", "is_pinned", "is_same_size", "is_set_to", "is_shared", "is_signed", "ndimension", "nelement", "new_empty",
        "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "numel", "register_hook",
        "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size", "storage_offset", "stride",
        "_has_compatible_shallow_copy_type", "empty_like", "full_like", "ones_like", "rand_like", "randint_like",
        "randn_like", "result_type", "zeros_like",
    ]  # fmt: skip
    functions = [getattr(home, name) for home in (Tensor, torch) for name in names if hasattr(home, name)]
    accessors = [accessor for prop in properties for accessor in (prop.__get__, prop.__set__)]
    return frozenset([*functions, *accessors, torch.autograd.grad])


METADATA = _metadata_functions()
_DATA: Value = vars(torch._C.TensorBase)["data"]
_GET_DATA, _SET_DATA = _DATA.__get__, _DATA.__set__
_DETACH = frozenset([Tensor.detach, torch.detach, _GET_DATA])
# Methods below the operators, whose C functions would see the handle's empty memory.
_OVERRIDDEN = {
    getattr(Tensor, name): getattr(OffloadedTensor, name)
    for name in ("numpy", "tolist", "__dlpack__", "apply_", "untyped_storage", "_typed_storage", "data_ptr")
}
