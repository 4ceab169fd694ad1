"""Initializes parameters on the meta device, from files or by ``reset_parameters``.

[Note: Meta initialization]
As under FSDP, every module that owns parameters or buffers on the meta device must be able to set
them itself, children before parents, as constructors do. A Hugging Face model sets those of its
modules with ``_init_weights``. Before that, tensors hold NaN (integers their smallest value), so a
``reset_parameters`` that forgets something is found.

A block that is whole in files is only read. If files lack something, a module's
``reset_parameters`` may set other tensors as well, even in other blocks. So blocks that are in
files in part are read last, through ``handles.offloaded_parameter``.

[Note: Adapters on the meta device]
A PEFT layer has a child ``base_layer`` and adapters beside it, which it initializes itself: LoRA's
second matrix is zero, which ``reset_parameters`` does not know, IA3's vectors are ones, and DoRA's
magnitudes are norms of the base weights. So base weights are read first. Prompt encoders are set by
torch's layers alone, not by the base model's ``_init_weights``. Other adapters are refused by name,
unless files have them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_hetero.errors import ConfigError
from lightning_hetero.runtime.adapters import adapter_setters, copy_setters, number_tokens
from lightning_hetero.store.format.in_place import TensorPlace
from lightning_hetero.store.live.blocks import Block
from lightning_hetero.store.raw_memory import own_memory


class Content(Protocol):
    """Weights in files, by the names of the model's parameters and buffers."""

    def __contains__(self, name: object) -> bool:
        """Whether the files have this tensor."""

    def fill(self, name: str, memory: Tensor) -> None:
        """Reads it into a CPU tensor of its shape, converting to the tensor's dtype."""

    def place(self, name: str) -> TensorPlace | None:
        """Where it is, if that is a local safetensors file."""


class _Nothing(dict[str, Tensor]):
    """No files."""

    def fill(self, name: str, memory: Tensor) -> None:
        memory.copy_(self[name])

    def place(self, name: str) -> None: ...


class Initializer:
    """Sets parameters and buffers of a model that are on the meta device; files come first.

    Args:
        root: The model.
        content: Weights in files.
        share: Gives what was read to the other ranks that share the model. Those that share a block
            do so when all of it is set.
    """

    def __init__(
        self, root: nn.Module, content: Content | None = None, share: Callable[[Tensor], object] | None = None
    ) -> None:  # fmt: skip
        self._root, self._share = root, share
        self._content: Content = _Nothing() if content is None else content
        self._setters = _setters(root)
        self._refused, adapters = adapter_setters(root)
        self._setters |= adapters
        self._in_adapters = set(adapters)
        for number, copies in copy_setters(root).items():
            self._setters[number] = [*self._setters[number], *copies]

    def check(self) -> None:
        """Refuses a model with tensors on the meta device that no module can set and no file has.

        Raises:
            ConfigError: Names the module and its tensors.
        """
        for name, module in self._root.named_modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            missing = [key for key, value in own if value.is_meta and _join(name, key) not in self._content]
            if missing and id(module) in self._refused:
                raise ConfigError(
                    f"{_join(name, missing[0])!r} is on the meta device, and {self._refused[id(module)]}. Allowed there: LoRA and "
                    f"DoRA with init_lora_weights True or 'gaussian', IA3, and prompts that begin at random. Build the model in "
                    f"memory, or give files that have it."
                )
            if missing and not self._setters[id(module)]:
                raise ConfigError(
                    f"module {name or '(root)'!r} was made on the meta device, but its class {type(module).__name__} has no "
                    f"reset_parameters() that could set {', '.join(missing)}. Define it, make these tensors on the CPU, or build "
                    f"the model without empty_init and outside torch.device('meta')."
                )

    def read_buffers(self) -> None:
        """Reads the buffers that are in files."""
        for prefix, module in self._root.named_modules():
            for key, buffer in list(module.named_buffers(recurse=False)):
                if (name := _join(prefix, key)) in self._content:
                    if buffer.is_meta:
                        buffer = module._buffers[key] = torch.empty_like(buffer, device="cpu")
                    self.fill(name, buffer)

    def place(self, name: str) -> TensorPlace | None:
        """Where a parameter is in a local safetensors file; ``None`` if it is in none."""
        return self._content.place(name) if name in self._content else None

    def has(self, name: str) -> bool:
        """Whether files of any kind have a parameter."""
        return name in self._content

    def reads_first(self, block: Block, names: Collection[str]) -> bool:
        """Whether what files have of the block is read before, or without, any module's setter."""
        unset = {id(p) for n, p in params_of(block).items() if n in names and n not in self._content}
        return self._is_whole(block, names) or self._lacks_only_adapters(block, unset)

    def _is_whole(self, block: Block, names: Collection[str]) -> bool:
        """Whether files have all parameters of the block, and no module has to set its buffers.

        Here and in :meth:`set` a block includes its trained part: a module sets both at once.
        """
        params = params_of(block)
        if not all(n in self._content for n in params if n in names):
            return False
        owners = {id(p) for p in params.values()}
        for module in block.spec.module.modules():
            if any(id(p) in owners for p in module.parameters(recurse=False)) and any(b.is_meta for b in _own_buffers(module)):
                return False
        return True

    def read(self, block: Block, names: Collection[str]) -> bool:
        """Reads a block's parameters if files have all of them. Returns whether they have."""
        if not self._is_whole(block, names):
            return False
        self._read_into(block, names)
        return True

    def _read_into(self, block: Block, names: Collection[str]) -> None:
        for part in [part for half in _halves(block) for part in half.parts]:
            for index, name in enumerate(part.names):
                if name in names:
                    self._content.fill(name, part.memory(index))

    def _lacks_only_adapters(self, block: Block, unset: Collection[int]) -> bool:
        """Whether only adapters are set by modules, which set nothing else."""
        for module in block.spec.module.modules():
            own = any(id(p) in unset for p in module.parameters(recurse=False)) or any(b.is_meta for b in _own_buffers(module))
            if own and id(module) not in self._in_adapters:
                return False
        return True

    def set(self, block: Block, names: Collection[str]) -> list[str]:
        """Sets a block's parameters on the meta device, and the buffers of their modules.

        Returns names of parameters that are in files and have not been read yet.
        """
        params = params_of(block)
        mine = {id(p) for n, p in params.items() if n in names}
        later = [n for n in params if n in names and n in self._content]
        read = {id(params[n]) for n in later}
        if self._lacks_only_adapters(block, mine - read):
            self._read_into(block, later)
            later = []
        for name, module in _children_first(block.spec.module, block.name):
            own = {k: p for k, p in module.named_parameters(recurse=False) if id(p) in mine}
            unset = {k: p for k, p in own.items() if id(p) not in read}
            if unset or (own and any(b.is_meta for b in _own_buffers(module))):
                self._set(name, module, unset)
        return later

    def set_buffers(self) -> None:
        """Sets buffers on the meta device whose modules have no parameters to set."""
        for name, module in _children_first(self._root, "(root)"):
            if any(b.is_meta for b in _own_buffers(module)):
                self._set(name, module, {})
        number_tokens(self._root)

    def fill(self, name: str, tensor: Tensor) -> None:
        """Reads a parameter or a buffer from its file."""
        content = own_memory(tensor.numel(), tensor.dtype).view(tensor.shape)
        self._content.fill(name, content)
        if self._share is not None:
            self._share(content)
        with torch.no_grad():
            tensor.copy_(content)

    def _set(self, name: str, module: nn.Module, params: Mapping[str, Tensor]) -> None:
        buffers = {k: torch.empty_like(b, device="cpu") for k, b in module.named_buffers(recurse=False) if b.is_meta}
        module._buffers.update(buffers)
        with torch.no_grad(), _only(module, params):
            for value in chain(params.values(), buffers.values()):
                value.fill_(_unset(value.dtype))
            for setter in self._setters[id(module)]:
                setter()
            for key, value in chain(params.items(), module.named_buffers(recurse=False)):
                if (key in params or key in buffers) and _is_unset(value):
                    raise ConfigError(
                        f"{type(module).__name__}.reset_parameters() of module {name!r}, which was made on the meta device, "
                        f"leaves {key!r} unset. Set it there, make it on the CPU, or build the model without empty_init and "
                        f"outside torch.device('meta')."
                    )


@contextmanager
def _only(module: nn.Module, params: Collection[str]) -> Iterator[None]:
    """Setters find the module's other parameters on the meta device.

    Those have values, or get them from files. There a setter changes nothing, and draws no random
    numbers.
    """
    others = {k: p for k, p in module.named_parameters(recurse=False) if k not in params}
    stand_ins = {
        k: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=False) for k, p in others.items()
    }
    module._parameters.update(stand_ins)
    try:
        yield
    finally:
        module._parameters.update(others)


def in_order_of_construction(root: nn.Module, blocks: Iterable[Block]) -> list[Block]:
    """The blocks, inner ones before their parents: what parents set in them stays.

    A trained part follows the rest, with which it is initialized.
    """
    order = {id(module): i for i, (_, module) in enumerate(_children_first(root, "(root)"))}
    return sorted(blocks, key=lambda block: (order[id(block.spec.module)], block.rest is not None))


def params_of(block: Block) -> dict[str, nn.Parameter]:
    """A block's parameters by name, with those of its trained part."""
    return {name: param for half in _halves(block) for name, param in half.spec.params.items()}


def _halves(block: Block) -> list[Block]:
    return [block] if block.trained is None else [block, block.trained]


def _own_buffers(module: nn.Module) -> Iterator[Tensor]:
    return module.buffers(recurse=False)


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _setters(root: nn.Module) -> dict[int, list[Callable[[], object]]]:
    """The functions that set each module's own tensors, in the order of constructors."""
    out: dict[int, list[Callable[[], object]]] = {}

    def visit(module: nn.Module, init: Callable[[nn.Module], object] | None) -> None:
        if id(module) in out:
            return
        if hasattr(module, "_no_split_modules") and callable(own := getattr(module, "_init_weights", None)):
            init = own  # Hugging Face's PreTrainedModel
        setters = [] if (reset := _reset(module)) is None else [reset]
        if init is not None:
            setters.append(partial(init, module))
        out[id(module)] = setters
        for child in module.children():
            visit(child, init)

    visit(root, None)
    return out


def _children_first(top: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules once each, in the order in which their constructors end."""
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) not in seen:
            seen.add(id(module))
            for key, child in module.named_children():
                yield from visit(key if name == "(root)" else f"{name}.{key}", child)
            yield name, module

    return visit(name, top)


def _reset(module: nn.Module) -> Callable[[], object] | None:
    """``reset_parameters``; torch's attention modules call theirs ``_reset_parameters``."""
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def _unset(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unset(value: Tensor) -> bool:
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return bool(value.isnan().any())
    return value.dtype != torch.bool and value.numel() > 0 and bool((value == _unset(value.dtype)).all())
