"""The door: every read and write of weights that are not in memory goes through here.

[Note: Two faces of an offloaded tensor]
``OffloadedParameter`` is the model's own parameter object, seen while its bytes are on another tier or being updated. The
runtime toggles its ``__class__`` with ``offload`` and ``restore``; identity, address, hooks and autograd state stay.
``OffloadedTensor`` is what a reader gets: a handle with shape, dtype and strides but no bytes. It stays lazy through
``detach`` and views, and reads its ``Source`` when an operator needs values. Writes go through to the source.

[Note: Devices]
A handle reports the device where an ordinary tensor would be: its parameter's. Operators run there, on a copy of the content, and
give their results there. The content itself comes and goes as CPU tensors: a move to the CPU, a copy into another tensor and a
checkpoint never pass through the device.

[Note: No lost gradients]
A released parameter that requires grad may be read under ``no_grad`` or in ways that build no graph. A read that would
build one raises: its gradient would reach a stand-in, not the parameter.
"""

from __future__ import annotations

import enum
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import GetSetDescriptorType
from typing import Any, NoReturn, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_hetero.errors import OffloadedAccessError, UnsupportedError


class Source(Protocol):
    """Where the bytes of an offloaded tensor are. Hashable; sources that compare equal are one storage (tied weights)."""

    @property
    def name(self) -> str:
        """The tensor's name in messages, such as ``"model.layers.3.weight"``."""

    @property
    def shape(self) -> torch.Size:
        """The tensor's shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""

    @property
    def address(self) -> int | None:
        """Where the content lies while it is in memory, the same for all that is one storage; ``None`` if that is not known."""

    def read(self) -> Tensor:
        """Returns a fresh dense CPU tensor with the current content; waits for a pending update."""

    def write(self, value: Tensor) -> None:
        """Stores ``value`` (CPU, this shape and dtype, any strides) and keeps no reference to it."""


_CPU = torch.device("cpu")


class OffloadedTensor(Tensor):
    """A tensor without bytes; see [Note: Two faces of an offloaded tensor] and [Note: Devices].

    Operators see the content of ``source``; in-place operators write it back. ``detach`` and views stay lazy. Pickling
    and ``copy.deepcopy`` give ordinary tensors, so files written by ``torch.save`` never name this class; they hold CPU tensors.

    Args:
        source: Where the content is.
        stride: Strides in elements; contiguous by default.
        device: The device that it reports and computes on; the CPU by default.
        requires_grad: Whether autograd treats it as a leaf that needs a gradient.
    """

    source: Source

    @staticmethod
    def __new__(
        cls,
        source: Source,
        *,
        stride: Sequence[int] | None = None,
        device: torch.device = _CPU,
        requires_grad: bool = False,
    ) -> Self:
        """Makes a handle; reads nothing."""
        if stride is None:
            stride = torch.empty(source.shape, device="meta").stride()
        # Always a normal tensor: one made during validation must not break training as an inference tensor.
        with torch.inference_mode(False):
            self: Self = Tensor._make_wrapper_subclass(
                cls, source.shape, strides=stride, dtype=source.dtype, device=device, requires_grad=requires_grad
            )
        self.source = source
        return self

    # Typed Any because torch's stubs declare neither as a class method.
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # operators are seen one level below
    __torch_dispatch__: Any = classmethod(lambda cls, *call: _dispatch(*call))

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a NumPy array of a fresh copy of the content."""
        return materialize(self).numpy(force=force)

    def tolist(self) -> Any:
        """Returns the content as nested lists."""
        return materialize(self).tolist()

    def __dlpack__(self, **options: Any) -> Any:
        """Exports a fresh copy of the content."""
        return materialize(self).__dlpack__(**options)

    def apply_(self, function: Callable[[Any], Any]) -> Tensor:
        """Maps ``function`` over the elements and writes the result through."""
        self.source.write(materialize(self).apply_(function))
        return self

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """Returns a copy in memory, as callers that pass it on to native code expect (``save_pretrained``)."""
        return self.clone(memory_format=memory_format)

    def data_ptr(self) -> NoReturn:
        """Refused: there is no memory to point to."""
        _refuse_memory(self)

    def untyped_storage(self) -> Any:
        """Tells tied tensors apart from others, as writers of model files ask; gives no access to bytes."""
        root, _ = _root(self)
        if root.source.address is None:
            _refuse_memory(self)
        return _AbsentStorage(root.source.address | _UNMAPPED, root.numel() * root.element_size())

    def _typed_storage(self) -> NoReturn:
        _refuse_memory(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        content: Any = materialize(self)
        return content.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = materialize(self).to(self.device).requires_grad_(self.requires_grad)
        result: Tensor = memo[id(self)]
        return result

    def _describe(self) -> str:
        return f"OffloadedTensor({tuple(self.shape)}, {self.dtype}, {self.source.name!r})"

    __repr__: Any = _describe  # mypy accepts no override of torch's signature


# No program can map memory here, so a program that takes the identity for an address stops instead of reading zeros.
_UNMAPPED = 1 << 62


class _AbsentStorage:
    """The size and identity of a storage whose bytes are away."""

    def __init__(self, identity: int, nbytes: int) -> None:
        self._identity = identity
        self._nbytes = nbytes

    def data_ptr(self) -> int:
        """Equal for tensors that share a storage, different for others; nothing can be read there."""
        return self._identity

    def nbytes(self) -> int:
        """The storage's size in bytes."""
        return self._nbytes

    size = __len__ = nbytes


def _dispatch(func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Runs one ATen operator on the contents; writes back what the operator's schema says it mutates."""
    kwargs = kwargs or {}
    first = args[0] if args else None
    if isinstance(first, OffloadedTensor):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return OffloadedTensor(first.source, stride=first.stride(), device=first.device)
        if func.is_view:
            return _view(func, first, args[1:], kwargs)
        if func is torch.ops.aten.copy_.default:
            same = isinstance(args[1], OffloadedTensor) and args[1].source == first.source
            if not same:  # load_state_dict(state_dict()) moves nothing
                first.source.write(_fitted(materialize(args[1]), first))
            return first
    return _run(func, args, kwargs)


class _ViewSource:
    """A view of another handle: reads through the view, writes by replacing the viewed part of the whole."""

    def __init__(self, root: OffloadedTensor, view: Callable[[Tensor], Tensor], outcome: Tensor) -> None:
        self.name = f"view of {root.source.name}"
        self.shape = outcome.shape
        self.dtype = outcome.dtype
        self.root = root
        self.view = view

    @property
    def address(self) -> int | None:
        return self.root.source.address

    def read(self) -> Tensor:
        # A clone, or a row of an embedding would keep the whole table alive.
        return self.view(materialize(self.root)).clone()

    def write(self, value: Tensor) -> None:
        whole = materialize(self.root)
        self.view(whole).copy_(value)
        self.root.source.write(whole)


def _root(tensor: OffloadedTensor) -> tuple[OffloadedTensor, Callable[[Tensor], Tensor]]:
    """The handle that ``tensor`` is a view of, and the view as a function of its content."""
    source = tensor.source
    if isinstance(source, _ViewSource):
        return source.root, source.view
    return tensor, lambda whole: whole


def _view(func: Any, tensor: OffloadedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies a view operator lazily: shapes from a meta tensor, values when they are read."""
    root, earlier = _root(tensor)

    def lazy(outcome: Tensor, select: Callable[[Any], Tensor]) -> OffloadedTensor:
        source = _ViewSource(root, lambda whole: select(func(earlier(whole), *args, **kwargs)), outcome)
        return OffloadedTensor(source, stride=outcome.stride(), device=tensor.device)

    outcome = func(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), *args, **kwargs)
    if isinstance(outcome, Tensor):
        return lazy(outcome, lambda result: result)
    return [lazy(part, operator.itemgetter(index)) for index, part in enumerate(outcome)]


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on materialized tensors and writes back the mutated ones. Views of one whole share its content."""
    wholes: dict[Any, tuple[OffloadedTensor, Tensor]] = {}
    contents: dict[int, Tensor] = {}
    moves = func is torch.ops.aten.copy_.default or (func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None)

    def enter(tensor: OffloadedTensor) -> Tensor:
        if id(tensor) not in contents:
            root, view = _root(tensor)
            key = root.source, root.stride()
            if key not in wholes:
                wholes[key] = root, materialize(root) if moves else materialize(root).to(root.device)
            contents[id(tensor)] = view(wholes[key][1])
        return contents[id(tensor)]

    plain_args, plain_kwargs = pytree.tree_map_only(OffloadedTensor, enter, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    written: dict[int, OffloadedTensor] = {}
    changed: dict[Any, None] = {}
    for target in _mutated(func, args, kwargs):
        content = contents[id(target)]
        if content.shape != target.shape:
            raise UnsupportedError(
                f"{func} changes the shape of {target.source.name!r} from {tuple(target.shape)} to {tuple(content.shape)}; "
                "an offloaded tensor keeps its shape. Resize a copy made with .clone()."
            )
        root, _ = _root(target)
        written[id(content)] = target
        changed[root.source, root.stride()] = None
    for key in changed:
        root, whole = wholes[key]
        root.source.write(whole.to(_CPU))
    return pytree.tree_map_only(Tensor, lambda value: written.get(id(value), value), result)


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[OffloadedTensor]:
    """The offloaded tensors among the arguments that the operator's schema marks as written."""
    targets: list[OffloadedTensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            targets += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, OffloadedTensor)]
    return targets


def _fitted(value: Tensor, like: OffloadedTensor) -> Tensor:
    """``value`` as ``like.copy_(value)`` would store it: broadcast, converted, on the CPU."""
    if value.shape == like.shape and value.dtype == like.dtype and value.device == _CPU:
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(value)


def _refuse_memory(tensor: OffloadedTensor) -> NoReturn:
    raise OffloadedAccessError(
        f"{tensor.source.name!r} is offloaded: this handle has no memory or storage of its own. "
        "Take a copy with .clone() or lightning_hetero.runtime.door.materialize(tensor)."
    )


def materialize(tensor: Tensor) -> Tensor:
    """Gives an ordinary tensor.

    Args:
        tensor: Any tensor; an ``OffloadedTensor`` or ``OffloadedParameter`` is read from where it lives.

    Returns:
        ``tensor`` itself if it is ordinary; else a fresh detached dense CPU tensor, whatever device it reports, with its shape,
        dtype and, unless it is a view, its strides.
    """
    if isinstance(tensor, OffloadedParameter):
        tensor = _handle(tensor)
    if not isinstance(tensor, OffloadedTensor):
        return tensor
    content = tensor.source.read()
    if isinstance(tensor.source, _ViewSource) or content.stride() == tensor.stride():
        return content
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(content)


class Residency(enum.Enum):
    """Where a parameter's bytes are, and who may touch them."""

    RESIDENT = "resident"  #: In its own memory and final: an ordinary parameter.
    PENDING = "pending"  #: An update is writing them; they are final after ``Record.wait``.
    RELEASED = "released"  #: On another tier; the memory behind the address reads as garbage.


class Record(Protocol):
    """What the runtime knows of one offloaded parameter; kept in ``parameter._hetero`` while it is offloaded."""

    @property
    def name(self) -> str:
        """The parameter's qualified name."""

    @property
    def state(self) -> Residency:
        """Where the bytes are now."""

    def wait(self) -> None:
        """Returns when no update is pending. May change ``state``, and may ``restore`` the parameter."""

    def source(self) -> Source:
        """The content; equal for equal records, so that tied weights stay one storage in a checkpoint."""


class OffloadedParameter(nn.Parameter):
    """A parameter while its bytes are away or being updated; see [Note: Two faces of an offloaded tensor].

    Metadata, gradients and hooks never wait and never read. ``detach`` and ``.data`` give a lazy ``OffloadedTensor``.
    Everything else waits for a pending update, and on a released parameter reads through, or writes through under
    ``no_grad``. Never constructed: ``offload`` turns an existing parameter into one.
    """

    _hetero: Record

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Decides for each torch function on the parameter: metadata, lazy handle, write-through or read."""
        kwargs = kwargs or {}
        if func in _METADATA:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        if func in _DETACH:
            return _handle(args[0]) if isinstance(args[0], OffloadedParameter) else args[0].detach()
        if func == _SET_DATA:
            return _assign(args[0], args[1])
        return _access(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(materialize(self).to(self.device), self.requires_grad)
        result: nn.Parameter = memo[id(self)]
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {key: value for key, value in self.__dict__.items() if key != "_hetero"}
        hooks: OrderedDict[int, Any] = OrderedDict()  # torch does not pickle them either
        args = (materialize(self), self.requires_grad, hooks)
        if state:
            return torch._utils._rebuild_parameter_with_state, (*args, state)
        return torch._utils._rebuild_parameter, args

    def _describe(self) -> str:
        state = self._hetero.state.value
        return f"OffloadedParameter({tuple(self.shape)}, {self.dtype}, {self._hetero.name!r}, {state})"

    __repr__: Any = _describe  # mypy accepts no override of torch's signature


def offload(parameter: nn.Parameter, record: Record) -> None:
    """Turns a parameter into an ``OffloadedParameter``, in place. Costs well under a microsecond."""
    parameter.__class__ = OffloadedParameter
    parameter.__dict__["_hetero"] = record


def restore(parameter: nn.Parameter) -> None:
    """Turns an ``OffloadedParameter`` back into an ordinary parameter that keeps no trace of the door."""
    parameter.__class__ = nn.Parameter
    parameter.__dict__.pop("_hetero", None)


def _handle(parameter: OffloadedParameter, *, requires_grad: bool = False) -> OffloadedTensor:
    return OffloadedTensor(
        parameter._hetero.source(), stride=parameter.stride(), device=parameter.device, requires_grad=requires_grad
    )


def _assign(parameter: Tensor, value: Tensor) -> None:
    """``parameter.data = value``: writes through, because the parameter's address is permanent."""
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
    source.write(materialize(value).detach().to(_CPU))


def _access(func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a function that may touch values."""
    stand_ins: dict[int, tuple[OffloadedParameter, OffloadedTensor]] = {}

    def enter(parameter: Tensor) -> Tensor:
        if not isinstance(parameter, OffloadedParameter):
            return parameter
        record = parameter._hetero
        if record.state is Residency.PENDING:
            record.wait()
        if record.state is not Residency.RELEASED:
            return parameter
        if id(parameter) not in stand_ins:
            stand_ins[id(parameter)] = (parameter, _stand_in(parameter, record))
        return stand_ins[id(parameter)][1]

    # tree_map_only would test isinstance(_, OffloadedParameter) before wait(), which may restore the class.
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


def _stand_in(parameter: OffloadedParameter, record: Record) -> Any:
    """What a function sees instead of a released parameter: as a leaf, so that autograd's own rules apply to it."""
    needs_grad = parameter.requires_grad and torch.is_grad_enabled()
    stand_in: Any = _handle(parameter, requires_grad=needs_grad)
    if needs_grad:
        name = record.name
        # Catches the graphs that the check of the results misses: tensors inside other objects.
        stand_in.register_hook(lambda grad: _refuse_gradient(name))
    return stand_in


def _refuse_gradient(name: str) -> NoReturn:
    raise OffloadedAccessError(
        f"{name!r} was read for a differentiable computation while it is offloaded; its gradient would be lost. Allowed: "
        "reading it inside its own block's forward, or under torch.no_grad(). Read it within `with "
        "strategy.materialize(module_or_params):`, or pass block_cls= so that the module that uses it is its block."
    )


def _metadata_functions() -> frozenset[Any]:
    """The torch functions that need no values: shapes, flags, gradients, hooks, and ``*_like`` factories."""
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


_METADATA = _metadata_functions()
_DATA: Any = vars(torch._C.TensorBase)["data"]
_DETACH = frozenset([Tensor.detach, torch.detach, _DATA.__get__])
_SET_DATA = _DATA.__set__
# Methods that look below the operators: the C functions would see the handle's empty memory.
_OVERRIDDEN = {
    getattr(Tensor, name): getattr(OffloadedTensor, name)
    for name in ("numpy", "tolist", "__dlpack__", "apply_", "untyped_storage", "_typed_storage", "data_ptr")
}
