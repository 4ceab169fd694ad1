"""Gives weights to a block that was made on the meta device: its modules' own ``reset_parameters``, one block at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lightning_hetero.errors import ConfigError
from lightning_hetero.store.blocks import Block


def initialize(block: Block) -> None:
    """Initializes the block's parameters in the memory reserved for them.

    Raises:
        ConfigError: A module owns parameters but has no ``reset_parameters``.
    """
    mine = {id(p) for p in block.params()}
    for module in _modules(block):
        if not any(id(p) in mine for p in module.parameters(recurse=False)):
            continue
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise ConfigError(
                f"block {block.name!r} was made on the meta device, but its module {type(module).__name__} has no "
                f"reset_parameters() to initialize them with. Define it, or build the model outside configure_model()."
            )
        with torch.no_grad():
            reset()


def _modules(block: Block) -> Iterator[nn.Module]:
    return iter([block.spec.module]) if block.spec.pinned and not _owns_all(block) else block.spec.module.modules()


def _owns_all(block: Block) -> bool:
    """Whether the block is its whole module (tied ones are pinned too), not a leftover with its direct parameters only."""
    direct = {id(p) for p in block.spec.module.parameters(recurse=False)}
    return not all(id(p) in direct for p in block.params())
