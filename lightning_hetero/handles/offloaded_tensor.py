"""Handles: tensors without bytes, which read and write their content where it is.

[Note: Devices]
A handle reports the device of its parameter, as an ordinary tensor would. Operators run there, on a
copy of the content, and give their results there. The content itself comes and goes as CPU tensors:
a move to the CPU, a copy into another tensor and a checkpoint never use the device.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_hetero.errors import OffloadedAccessError, UnsupportedError
from lightning_hetero.untyped import Function, Operator, Options, Value, Values


class Source(Protocol):
    """An offloaded tensor's content. Hashable; equal sources are one storage (tied weights)."""

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
        """The content's address while it is in memory, one per storage; ``None`` if unknown."""

    def read(self) -> Tensor:
        """Returns a fresh dense CPU tensor with the current content; waits for a pending update."""

    def write(self, value: Tensor) -> None:
        """Stores ``value`` (CPU, this shape and dtype, any strides); keeps no reference."""


@runtime_checkable
class Begins(Protocol):
    """A source that can be read ahead."""

    def begin(self) -> Callable[[], Tensor]:
        """Begins to read the present content. The result, called once, waits and returns it."""


_CPU = torch.device("cpu")


class OffloadedTensor(Tensor):
    """A tensor without bytes; see [Note: Two faces of an offloaded tensor] and [Note: Devices].

    Operators see the content of ``source``; in-place operators write it back. ``detach`` and views
    stay lazy. Pickling and ``copy.deepcopy`` give ordinary tensors, so files from ``torch.save``
    hold CPU tensors and never name this class.

    Args:
        source: The content.
        stride: Strides in elements; contiguous by default.
        device: The device that it reports and computes on; the CPU by default.
        requires_grad: Autograd treats it as a leaf that needs a gradient.
    """

    source: Source
    _copy: _Copy | None

    @staticmethod
    def __new__(
        cls, source: Source, *, stride: Sequence[int] | None = None, device: torch.device = _CPU, requires_grad: bool = False
    ) -> Self:
        """Makes a handle; reads nothing."""
        if stride is None:
            stride = torch.empty(source.shape, device="meta").stride()
        # Never an inference tensor: a handle made during validation must not break training.
        with torch.inference_mode(False):
            self: Self = Tensor._make_wrapper_subclass(
                cls, source.shape, strides=stride, dtype=source.dtype, device=device, requires_grad=requires_grad
            )
        self.source, self._copy = source, None
        if not isinstance(source, _ViewSource) and source.address is not None:
            _HANDLES.setdefault(source.address, weakref.WeakValueDictionary())[id(self)] = self
        return self

    # `Value` because torch's stubs declare neither as a class method.
    __torch_function__: Value = torch._C._disabled_torch_function_impl  # operators are seen one level below
    __torch_dispatch__: Value = classmethod(lambda cls, *call: _dispatch(*call))

    def numpy(self, *, force: bool = False) -> Value:
        """Returns a NumPy array of a fresh copy of the content."""
        return contents_of(self).numpy(force=force)

    def tolist(self) -> Value:
        """Returns the content as nested lists."""
        return contents_of(self).tolist()

    def __dlpack__(self, **options: Value) -> Value:
        """Exports a fresh copy of the content."""
        return contents_of(self).__dlpack__(**options)

    def apply_(self, function: Function) -> Tensor:
        """Maps ``function`` over the elements and writes the result through."""
        self.source.write(contents_of(self).apply_(function))
        return self

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """Returns a copy in memory, for native code (``save_pretrained``)."""
        return self.clone(memory_format=memory_format)

    def data_ptr(self) -> int:
        """The address of a copy of the content, in memory for as long as this handle lives.

        Writers of model files read there (``safetensors.torch.save_file``). Tied tensors and views
        share the copy, as they share a storage. A later call updates the copy.

        Raises:
            OutOfMemoryBudgetError: The copy does not fit the budget.
        """
        root, view = _root(self)
        if root._copy is None:
            key = root.source, root.stride()
            root._copy = _COPIES.get(key) or _Copy(root)
            _COPIES[key] = root._copy
        root._copy.content.copy_(contents_of(root))
        return view(root._copy.content).data_ptr()

    def untyped_storage(self) -> Value:
        """The identity of the storage, by which writers of model files find tied tensors.

        It gives no access to bytes. Its address is ``data_ptr`` of the whole tensor after a call of
        that. Before, nothing is read.
        """
        root, _ = _root(self)
        copy = root._copy or _COPIES.get((root.source, root.stride()))
        if copy is not None:
            return _AbsentStorage(copy.content.data_ptr(), copy.content.nbytes)
        if root.source.address is None:
            _refuse_memory(self)
        return _AbsentStorage(root.source.address | _UNMAPPED, root.numel() * root.element_size())

    def _typed_storage(self) -> NoReturn:
        _refuse_memory(self)

    def __reduce_ex__(self, protocol: object) -> Value:
        reduce: Callable[[object], object] = contents_of(self).__reduce_ex__
        return reduce(protocol)

    def __deepcopy__(self, memo: dict[int, Tensor]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = contents_of(self).to(self.device).requires_grad_(self.requires_grad)
        return memo[id(self)]

    def _describe(self) -> str:
        return f"OffloadedTensor({tuple(self.shape)}, {self.dtype}, {self.source.name!r})"

    __repr__: Value = _describe  # mypy accepts no override of torch's signature


# No program can map memory here. Code that reads at this address stops instead of reading zeros.
_UNMAPPED = 1 << 62


class _AbsentStorage:
    """The size and identity of a storage whose bytes are away."""

    def __init__(self, identity: int, nbytes: int) -> None:
        self._identity = identity
        self._nbytes = nbytes

    def data_ptr(self) -> int:
        """The identity of the storage; nothing can be read there."""
        return self._identity

    def nbytes(self) -> int:
        """The storage's size in bytes."""
        return self._nbytes

    size = __len__ = nbytes


# They read shapes and dtypes of their first argument, but no values.
_FACTORIES = {
    getattr(torch.ops.aten, name)
    for name in (
        "empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randn_like", "randint_like", "new_empty",
        "new_empty_strided", "new_full", "new_ones", "new_zeros",
    )
}  # fmt: skip


def _dispatch(func: Operator, types: Sequence[type], args: Values = (), kwargs: Options | None = None) -> Value:
    """Runs one ATen operator on the contents; writes back the arguments that it mutates."""
    kwargs = kwargs or {}
    first = args[0] if args else None
    if isinstance(first, OffloadedTensor):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return OffloadedTensor(first.source, stride=first.stride(), device=first.device)
        if func.is_view:
            return _view(func, first, args[1:], kwargs)
        if func.overloadpacket in _FACTORIES:
            like = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device="meta")
            return func(like, *args[1:], **{**kwargs, "device": kwargs.get("device") or first.device})
        if func is torch.ops.aten.copy_.default:
            same = isinstance(args[1], OffloadedTensor) and args[1].source == first.source
            if not same:  # load_state_dict(state_dict()) moves nothing
                first.source.write(_fitted(contents_of(args[1]), first))
            return first
    return _run(func, args, kwargs)


class _ViewSource:
    """A view of another handle. It reads and writes through the whole content."""

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
        return self.view(contents_of(self.root)).clone()

    def write(self, value: Tensor) -> None:
        whole = contents_of(self.root)
        self.view(whole).copy_(value)
        self.root.source.write(whole)


class _Copy:
    """Memory for the content of tied handles; it counts as a loan while one of them lives."""

    content: Tensor

    def __init__(self, root: OffloadedTensor) -> None:
        if (loans := getattr(getattr(root.source, "store", None), "loans", None)) is not None:
            loans.take(self, root.numel() * root.element_size(), root.source.name)
        self.content = torch.empty_strided(root.shape, root.stride(), dtype=root.dtype)


_Storage = tuple[Source, tuple[int, ...]]  # with the strides

# Copies whose addresses are in use, by storage.
_COPIES: weakref.WeakValueDictionary[_Storage, _Copy] = weakref.WeakValueDictionary()

# Living handles by the parameter's fixed address and the handle's id.
_HANDLES: dict[int, weakref.WeakValueDictionary[int, OffloadedTensor]] = {}


class _Kept:
    """Content in memory that only handles hold."""

    def __init__(self, name: str, content: Tensor) -> None:
        self.name = name
        self.content = content
        self.shape = content.shape
        self.dtype = content.dtype

    @property
    def address(self) -> int:
        return self.content.data_ptr()

    def read(self) -> Tensor:
        return self.content.clone()

    def write(self, value: Tensor) -> None:
        self.content.copy_(value)


def keep_content(source: Source) -> None:
    """Lets the living handles of ``source`` keep its present content when ``source`` gets another.

    In PyTorch ``old = p.data; p.data = new`` leaves ``old`` with the old values, because the
    parameter changes its memory. An offloaded parameter keeps its memory, so the handles leave it.
    """
    address = source.address
    living = [] if address is None else [h for h in _HANDLES.pop(address, {}).values() if h.source == source]
    if living:
        kept = _Kept(source.name, source.read())
        for handle in living:
            handle.source = kept
            if handle._copy is not None:
                _COPIES.pop((source, handle.stride()), None)
                _COPIES[kept, handle.stride()] = handle._copy


def _root(tensor: OffloadedTensor) -> tuple[OffloadedTensor, Callable[[Tensor], Tensor]]:
    """The handle that ``tensor`` is a view of, and the view as a function of its content."""
    source = tensor.source
    if isinstance(source, _ViewSource):
        return source.root, source.view
    return tensor, lambda whole: whole


def _view(func: Operator, tensor: OffloadedTensor, args: Values, kwargs: Options) -> Value:
    """Applies a view operator lazily: shapes from a meta tensor, values when they are read."""
    root, earlier = _root(tensor)

    def lazy(outcome: Tensor, select: Function) -> OffloadedTensor:
        source = _ViewSource(root, lambda whole: select(func(earlier(whole), *args, **kwargs)), outcome)
        return OffloadedTensor(source, stride=outcome.stride(), device=tensor.device)

    outcome = func(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), *args, **kwargs)
    if isinstance(outcome, Tensor):
        return lazy(outcome, lambda result: result)
    return [lazy(part, operator.itemgetter(index)) for index, part in enumerate(outcome)]


def _run(func: Operator, args: Values, kwargs: Options) -> Value:
    """Runs an operator on contents and writes mutated ones back. Views share one whole."""
    wholes: dict[_Storage, tuple[OffloadedTensor, Tensor]] = {}
    contents: dict[int, Tensor] = {}
    moves = func is torch.ops.aten.copy_.default or (func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None)

    def enter(tensor: OffloadedTensor) -> Tensor:
        if id(tensor) not in contents:
            root, view = _root(tensor)
            key = root.source, root.stride()
            if key not in wholes:
                wholes[key] = root, contents_of(root) if moves else contents_of(root).to(root.device)
            contents[id(tensor)] = view(wholes[key][1])
        return contents[id(tensor)]

    plain_args, plain_kwargs = pytree.tree_map_only(OffloadedTensor, enter, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    written: dict[int, OffloadedTensor] = {}
    changed: dict[_Storage, None] = {}
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


def _mutated(func: Operator, args: Values, kwargs: Options) -> list[OffloadedTensor]:
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
        f"{tensor.source.name!r} is offloaded: this handle has no memory or storage of its own. Take a copy with .clone()."
    )


def contents_of(tensor: Tensor) -> Tensor:
    """The content of a handle, as a fresh detached dense CPU tensor. Other tensors are returned."""
    return begin_contents(tensor)() if isinstance(tensor, OffloadedTensor) else tensor


def begin_contents(tensor: OffloadedTensor) -> Callable[[], Tensor]:
    """Begins to read a handle's content; the result, called once, gives :func:`contents_of`."""
    source = tensor.source
    read = source.begin() if isinstance(source, Begins) else source.read

    def contents() -> Tensor:
        found = read()
        return found if isinstance(source, _ViewSource) else with_strides(found, tensor.stride())

    return contents


def with_strides(content: Tensor, stride: Sequence[int]) -> Tensor:
    """The same values in this memory order; the tensor itself if it has it already."""
    if content.stride() == tuple(stride):
        return content
    return torch.empty_strided(content.shape, stride, dtype=content.dtype).copy_(content)
