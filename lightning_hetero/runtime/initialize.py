"""Gives content to what was made on the meta device: the modules' own ``reset_parameters``, one block at a time.

[Note: Meta initialization]
As under FSDP, every module that owns parameters or buffers on the meta device must be able to set them itself, children before
their parents, as constructors do. What is to be set holds NaN (integers their smallest value) before, so a ``reset_parameters``
that forgets something is found and not trained on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.errors import ConfigError
from lightning_hetero.store.blocks import Block


def check_initializable(root: nn.Module) -> None:
    """Refuses a model whose modules cannot set what they own on the meta device.

    Raises:
        ConfigError: Names the module and what it owns.
    """
    for name, module in root.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        missing = [key for key, value in own if value.is_meta]
        if missing and _reset(module) is None:
            raise ConfigError(
                f"module {name or '(root)'!r} was made on the meta device, but its class {type(module).__name__} has no "
                f"reset_parameters() that could set {', '.join(missing)}. Define it, make these tensors on the CPU, or build the "
                f"model without empty_init and outside torch.device('meta')."
            )


def in_order_of_construction(root: nn.Module, blocks: Iterable[Block]) -> list[Block]:
    """The blocks, those inside a module before that module's own: what it sets in them stays."""
    order = {id(module): i for i, (_, module) in enumerate(_children_first(root, "(root)"))}
    return sorted(blocks, key=lambda block: order[id(block.spec.module)])


def initialize(block: Block, names: Collection[str]) -> None:
    """Sets those parameters of a block that were made on the meta device, and the buffers of their modules.

    Args:
        block: The block, bound to memory.
        names: Names of the model's parameters that have no content yet.

    Raises:
        ConfigError: A ``reset_parameters`` leaves something unset.
    """
    mine = {id(p) for n, p in block.spec.params.items() if n in names}
    for name, module in _children_first(block.spec.module, block.name):
        own = {k: p for k, p in module.named_parameters(recurse=False) if id(p) in mine}
        if own:
            _set(name, module, own)


def initialize_buffers(root: nn.Module) -> None:
    """Sets buffers on the meta device whose modules have no parameters to set.

    Raises:
        ConfigError: A ``reset_parameters`` leaves something unset.
    """
    for name, module in _children_first(root, "(root)"):
        if any(b.is_meta for b in module.buffers(recurse=False)):
            _set(name, module, {})


def _set(name: str, module: nn.Module, params: Mapping[str, Tensor]) -> None:
    buffers = {k: torch.empty_like(b, device="cpu") for k, b in module.named_buffers(recurse=False) if b.is_meta}
    module._buffers.update(buffers)
    reset = _reset(module)
    assert reset is not None  # check_initializable
    with torch.no_grad():
        for value in chain(params.values(), buffers.values()):
            value.fill_(_unset(value.dtype))
        reset()
        for key, value in chain(params.items(), module.named_buffers(recurse=False)):
            if (key in params or key in buffers) and _is_unset(value):
                raise ConfigError(
                    f"{type(module).__name__}.reset_parameters() of module {name!r}, which was made on the meta device, "
                    f"leaves {key!r} unset. Set it there, make it on the CPU, or build the model without empty_init and outside "
                    f"torch.device('meta')."
                )


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


def _reset(module: nn.Module) -> Any:
    """``reset_parameters``; torch's attention modules call theirs ``_reset_parameters``."""
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def _unset(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unset(value: Tensor) -> bool:
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return bool(value.isnan().any())
    return value.dtype != torch.bool and value.numel() > 0 and bool((value == _unset(value.dtype)).all())
