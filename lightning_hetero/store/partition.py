"""Divides a model into blocks: repeated modules, as FSDP's auto-wrap finds them, and the rest.

[Note: Trained parts of frozen blocks]
A repeated block in which few parameters train, such as one with adapters, becomes two: the frozen
parameters under the module's name, and the trained ones under that name with ``:trained`` behind
it. The second block is pinned: its weights stay in memory, and its state is where the plan says.
The first one has no gradients, no state and no updates, so its weights only come and go. Both have
the module's anchor, the trained part first: a backward of the frozen part then ends the one of the
trained part of the block above, whose update begins.

*Few* means that the trained parameters with their gradients and Adam's state (16 bytes per element
in any precision) take at most half of the bytes of the frozen ones. To keep a trained weight in
memory saves the same reads per byte as to keep a frozen one there, and the writes besides. What it
costs is that the least memory grows by all trained weights, by this limit at most an eighth of the
frozen ones. Where more trains, that would be more than the blocks that stream anyway: such a block
stays one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.ir.plan import TRAINED, is_divided
from lightning_hetero.store.raw_memory import PAGE, check_has_memory
from lightning_hetero.units import round_up

log = logging.getLogger(__name__)

BlockCls = str | type[nn.Module] | Sequence[str | type[nn.Module]]

ALIGNMENT_BYTES = 64  # of each parameter in host memory: whole cache lines

_UNCALLED = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)

# Weights, gradients and state arrays of a part have the same offsets in elements, so the update
# kernels' split points must be on such a multiple, too. The engine checks it.
_ELEMENTS = 16


def aligned_elements(num_elements: int, itemsize: int, alignment_bytes: int) -> int:
    """A parameter's length in a part, with the padding behind it.

    Args:
        num_elements: Its elements.
        itemsize: Bytes of each.
        alignment_bytes: A multiple at which the next parameter starts; 0 in stores of version 1,
            where only the engine's multiple of elements counts.
    """
    return round_up(num_elements, max(_ELEMENTS, alignment_bytes // itemsize))


def laid_out(lengths: Sequence[int], itemsize: int, alignment_bytes: int, ranks: int = 1) -> tuple[list[int], int]:
    """Where the parameters of a part start in its memory, and its length, in elements.

    Several ranks have equal slices of whole pages, so that those of the others can be given back.
    """
    ends = list(accumulate((aligned_elements(n, itemsize, alignment_bytes) for n in lengths), initial=0))
    total = max(ends[-1], aligned_elements(1, itemsize, alignment_bytes))
    if ranks > 1:
        total = ranks * round_up(-(-total // ranks), PAGE // itemsize)
    return ends[:-1], total


@dataclass(eq=False, slots=True)
class BlockSpec:
    """One block of the model before anything is placed.

    Attributes:
        name: The module's name; ``"(root)"`` for parameters of the root module itself.
        module: The module whose forward is the block's anchor. That of a list or dictionary of
            parameters, which has no forward, is the module that has it.
        params: Its parameters by name; tied parameters appear only in the block of their first use.
        pinned: The weights must stay in memory: leftovers, blocks that share a parameter with
            another module, and trained parts of frozen blocks.
        rest: Of a trained part the block of the module's frozen parameters.
        order: Names of all parameters of the module, in the order of registration; empty if the
            block has all of them.
    """

    name: str
    module: nn.Module
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    pinned: bool = False
    rest: BlockSpec | None = None
    order: tuple[str, ...] = ()


def partition(root: nn.Module, block_cls: BlockCls | None = None) -> list[BlockSpec]:
    """Assigns every parameter of ``root`` to exactly one block, in the order of registration.

    See [Note: Trained parts of frozen blocks] for blocks in which few parameters train.

    Args:
        root: The model.
        block_cls: Classes (or their names) whose outermost instances are the blocks. Default:
            Hugging Face's ``_no_split_modules``, else classes that repeat with equal parameter
            shapes inside a ``ModuleList`` or ``Sequential``.

    Raises:
        ConfigError: ``block_cls`` matches no module that has parameters, or the whole model; or a
            lazy module has not set its own yet.
        UnsupportedError: A parameter consists of several tensors, such as those of torchao; or one
            that trains is a view of another's memory.
    """
    if lazy := [name for name, param in root.named_parameters() if isinstance(param, UninitializedParameter)]:
        raise ConfigError(
            f"parameter {lazy[0]!r} has no shape yet: a lazy module sets it in its first forward, and memory is reserved before. "
            f"Call the model once on an example, in setup() or earlier."
        )
    for name, param in root.named_parameters():
        check_has_memory(name, param)
    _refuse_views(root)
    repeated = {id(m) for m in _block_modules(root, block_cls)}
    specs: list[BlockSpec] = []
    owner: dict[int, BlockSpec] = {}

    def visit(module: nn.Module, name: str, block: BlockSpec | None, caller: nn.Module) -> None:
        if not isinstance(module, _UNCALLED):
            caller = module
        if block is None and id(module) in repeated:
            block = BlockSpec(name or "(root)", module)
            specs.append(block)
        own = block
        for key, param in module._parameters.items():
            if param is None:
                continue
            if own is None:
                own = BlockSpec(name or "(root)", caller, pinned=True)
                specs.append(own)
            first = owner.setdefault(id(param), own)
            if first is own:
                own.params.setdefault(f"{name}.{key}" if name else key, param)
            else:
                first.pinned = True  # tied: another block computes with it too
        for key, child in module._modules.items():
            if child is not None:
                visit(child, f"{name}.{key}" if name else key, block, caller)

    visit(root, "", None, root)
    return [half for spec in specs if spec.params for half in _apart(_without_aliases(spec))]


def _refuse_views(root: nn.Module) -> None:
    """Refuses parameters that train and share memory with another parameter or a buffer.

    Each gets memory of its own in its block. The others would then keep the values that they have.
    """
    rows: list[tuple[int, int, int, str, bool]] = []  # storage, begin and end in it, name, whether it trains
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided or not tensor.numel():
            continue
        last = sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = int(tensor.storage_offset()) * tensor.itemsize
        rows.append((tensor.untyped_storage()._cdata, begin, begin + (last + 1) * tensor.itemsize, name, tensor.requires_grad))
    rows.sort()
    for i, (storage, _, end, name, trains) in enumerate(rows):
        for other, begin, _, its_name, its_trains in rows[i + 1 :]:
            if other != storage or begin >= end:
                break
            if trains or its_trains:
                raise UnsupportedError(
                    f"{name!r} and {its_name!r} are views of the same memory, and each would train with memory of its own here. "
                    f"Make them one parameter, as in `head.weight = embedding.weight`, or give each its own values (`clone()`). "
                    f"With PEFT leave out ensure_weight_tying, or the head and the embedding out of target_modules."
                )


def _apart(spec: BlockSpec) -> Iterator[BlockSpec]:
    """The block, or its trained part and the rest."""
    trained = {name: param for name, param in spec.params.items() if param.requires_grad}
    frozen = {name: param for name, param in spec.params.items() if not param.requires_grad}
    num_trained, frozen_bytes = sum(p.numel() for p in trained.values()), sum(p.nbytes for p in frozen.values())
    if not spec.pinned and is_divided(num_trained, frozen_bytes):
        order = tuple(spec.params)
        spec.params, spec.order = frozen, order
        yield BlockSpec(f"{spec.name}{TRAINED}", spec.module, trained, pinned=True, rest=spec, order=order)
    yield spec


def _without_aliases(spec: BlockSpec) -> BlockSpec:
    """Keeps the first name of a parameter that is registered twice inside one block."""
    first: dict[int, str] = {}
    for name, param in spec.params.items():
        first.setdefault(id(param), name)
    spec.params = {name: spec.params[name] for name in first.values()}
    return spec


def _block_modules(root: nn.Module, block_cls: BlockCls | None) -> list[nn.Module]:
    if block_cls is not None:
        wanted: list[Any] = list(block_cls) if isinstance(block_cls, list | tuple | set) else [block_cls]
        if wrong := [w for w in wanted if not isinstance(w, str | type)]:
            raise ConfigError(f"block_cls has {wrong[0]!r}; allowed: a class or its name, or several of them.")
        found = _outermost(root, lambda m: any(_matches(m, w) for w in wanted))
        if not found:
            classes = sorted({type(m).__name__ for m in root.modules() if _has_params(m)})
            raise ConfigError(
                f"block_cls={block_cls!r} matches no module with parameters. The model's classes are: {', '.join(classes)}."
            )
        if found == [root]:
            raise ConfigError(
                f"block_cls={block_cls!r} matches the whole model, {type(root).__name__}; allowed: modules inside it. As one block "
                f"it would have to be in memory whole. Give the class of a layer, or leave block_cls out."
            )
        return found
    names = {n for m in root.modules() for n in _no_split_modules(m)}
    if names and (found := _outermost(root, lambda m: type(m).__name__ in names)):
        return found
    return list(_repeated(root))


def _no_split_modules(module: nn.Module) -> Iterable[str]:
    names = getattr(module, "_no_split_modules", None)
    return [n for n in names if isinstance(n, str)] if isinstance(names, (list, tuple, set)) else []


def _matches(module: nn.Module, wanted: str | type[nn.Module]) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    return any(wanted in (c.__name__, f"{c.__module__}.{c.__qualname__}") for c in type(module).__mro__)


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _outermost(module: nn.Module, predicate: object) -> list[nn.Module]:
    assert callable(predicate)
    if predicate(module) and _has_params(module):
        return [module]
    return [found for child in module.children() for found in _outermost(child, predicate)]


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Outermost children of containers that share class and parameter shapes with a sibling."""
    repeats: set[int] = set()
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        kinds = {id(c): _kind(c) for c in module.children() if _has_params(c)}
        counts = Counter(kinds.values())
        repeats = {i for i, kind in kinds.items() if counts[kind] > 1}
    for child in module.children():
        if id(child) in repeats:
            yield child
        else:
            yield from _repeated(child)


def _kind(module: nn.Module) -> tuple[object, ...]:
    return (type(module), *((n, tuple(p.shape), p.dtype) for n, p in module.named_parameters()))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill one run of memory in some order of its dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
