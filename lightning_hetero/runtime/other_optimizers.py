"""Optimizers that step by their own code, on weights and gradients as they find them.

The runtime keeps one state of a parameter. If several optimizers have it, one of them is bound. The
others step as in PyTorch, and so do optimizers that the runtime was never given. Their state stays
in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.optim.adam import MASTERED
from lightning_hetero.optim.combined import members, obstacle

log = logging.getLogger(__name__)


def bound(optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], str]:
    """The optimizers that the runtime updates for, and why steps cannot be kept; empty: they can.

    The members of a combined optimizer stand for it. Of optimizers that share parameters it is the
    one that has most of them, or comes first.

    Raises:
        UnsupportedError: They share 16-bit parameters.
    """
    inner = [one for optimizer in optimizers for one in members(optimizer)]
    taken, others = set[int](), list[Optimizer]()
    for optimizer in sorted(inner, key=lambda one: -sum(p.numel() for p in _params(one))):
        ids = set(map(id, _params(optimizer)))
        if ids & taken:
            others.append(optimizer)
        else:
            taken |= ids
    why = next(filter(None, map(obstacle, optimizers)), "")
    if not others:
        return inner, why
    names = ", ".join(type(one).__name__ for one in others)
    if any(p.dtype in MASTERED for one in others for p in _params(one)):
        raise UnsupportedError(
            f"optimizer {names} shares 16-bit parameters with another one, whose fp32 masters it would not change. Give each "
            f"parameter one optimizer, or train in 32 bits."
        )
    log.warning(
        "Optimizer %s shares parameters with another one: it steps by its own code, and its state stays in memory, beyond what the "
        "plan and host_memory count.", names,
    )  # fmt: skip
    return [one for one in inner if one not in others], why or f"optimizer {names} shares parameters with another one"


def notice_steps(known: Collection[int], ours: Collection[int]) -> RemovableHandle:
    """Lets the runtime see what the steps of other optimizers write.

    It sees writes of user code by autograd's counts, and torch's fused optimizers do not count
    theirs.

    Args:
        known: The ids of the model's parameters.
        ours: The ids of the optimizers that the runtime updates for.
    """

    def stepped(optimizer: Optimizer, *_: object) -> None:
        if type(optimizer).__module__.startswith("torch.optim.") and id(optimizer) not in ours:
            fused = [group["params"] for group in optimizer.param_groups if group.get("fused")]
            with torch._C.DisableTorchFunctionSubclass():  # for offloaded parameters these would be calls of Python
                torch.autograd.graph.increment_version([p for params in fused for p in params if id(p) in known])

    return register_optimizer_step_post_hook(stepped)


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]
