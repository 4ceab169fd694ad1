"""Runs optimizers that treat parameters independently by their own code, one part at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.optim.adam import MASTER, MASTERED
from lightning_hetero.optim.combined import held

_REFUSED = {
    "LBFGS": "it re-evaluates the closure and couples all parameters",
    "SparseAdam": "it needs sparse gradients",
}

# Torch's own classes whose updates are by element. A class that derives from one may do anything.
_BY_ELEMENT = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
)  # fmt: skip
BY_ELEMENT = ", ".join(kind.__name__ for kind in _BY_ELEMENT)
_OF_SCALER = ("grad_scale", "found_inf")  # what a GradScaler sets for fused optimizers
COUNTS = frozenset({"step", "mu", "eta", "mu_product"})  # of their state: one number for all elements


def check_supported(optimizer: Optimizer) -> None:
    """Refuses optimizers that cannot run block by block.

    Raises:
        UnsupportedError: LBFGS, SparseAdam, or an optimizer around another one that would be left
            out.
    """
    name = type(optimizer).__name__
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _REFUSED and kind.__module__.startswith("torch.optim"):
            raise UnsupportedError(
                f"optimizer {name} cannot run out of core: {_REFUSED[kind.__name__]}. Use any other optimizer of torch.optim, such "
                f'as torch.optim.AdamW, or strategy="auto".'
            )
    inner = next(held(optimizer), None)
    sixteen_bit = any(p.dtype in MASTERED for group in optimizer.param_groups for p in group["params"])
    if sixteen_bit and steps_otherwise(optimizer):
        raise UnsupportedError(
            f"optimizer {name} has been given another step(): 16-bit weights have fp32 masters, which would not reach it. Allowed: "
            f"hooks (register_step_pre_hook, register_step_post_hook), a class that derives from {name}, or 32-bit weights."
        )
    if inner is not None and (sixteen_bit or getattr(optimizer, "hetero_blockwise", False)):
        what = "16-bit weights have fp32 masters, which" if sixteen_bit else "an update of one part"
        raise UnsupportedError(
            f"optimizer {name} runs another optimizer ({type(inner).__name__}) on the same parameters: {what} would not reach it. "
            f"Allowed: several optimizers, each with parameters of its own. Or train with 32-bit weights, and without "
            f"hetero_blockwise."
        )


def steps_otherwise(optimizer: Optimizer) -> bool:
    """Whether code has replaced ``step`` on the object, as ``optimizer.step = mine`` does.

    Schedulers replace it too, but by a function that notes the call and runs the class's own.
    """
    step: Any = vars(optimizer).get("step")
    if getattr(step, "_wrapped_by_lr_sched", False):
        step = step.__wrapped__
    return step is not None and getattr(step, "__func__", step) is not type(optimizer).step


def why_whole(optimizer: Optimizer) -> str:
    """Why an optimizer cannot run part by part, and what would change that."""
    name = type(optimizer).__name__
    if steps_otherwise(optimizer):
        return (
            f"{name} has been given another step(), so it is not known to update parameters independently. Use hooks instead "
            f"(register_step_pre_hook, register_step_post_hook)"
        )
    return (
        f"{name} is not torch's, so it is not known to update parameters independently. If it does, set "
        f"{name}.hetero_blockwise = True"
    )


def is_blockwise(optimizer: Optimizer) -> bool:
    """Whether updates part by part are known to equal one update of all parameters."""
    return type(optimizer).__module__.startswith("torch.optim") or bool(getattr(optimizer, "hetero_blockwise", False))


def is_by_element(optimizer: Optimizer) -> bool:
    """Whether each element's update is known to depend on its own gradient and state alone."""
    return type(optimizer) in _BY_ELEMENT


def step(optimizer: Optimizer, params: Sequence[nn.Parameter], pieces: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
    """Runs the optimizer's own ``step`` for some of its parameters and hides the others.

    16-bit parameters are updated through fp32 masters kept in
    ``optimizer.state[p]["master_param"]``.

    Args:
        optimizer: The user's optimizer.
        params: Parameters with weights, gradients and state in memory.
        pieces: Weights and gradients to take instead of theirs, whose state they have.
    """
    function: Any = type(optimizer).step
    if getattr(function, "hooked", False):
        function = function.__wrapped__  # torch's wrapper runs the step hooks; they belong to the whole step
    with _restricted(optimizer, params, pieces), _unscaled(optimizer), torch.no_grad():
        function(optimizer)
    torch.autograd.graph.increment_version(params)  # torch's fused optimizers do not; mirrors depend on these counters


@contextmanager
def _unscaled(optimizer: Optimizer) -> Iterator[None]:
    """Hides the loss's scale, which a ``GradScaler`` gives: gradients are divided by it already."""
    given: dict[str, Any] = {name: vars(optimizer).pop(name) for name in _OF_SCALER if name in vars(optimizer)}
    try:
        yield
    finally:
        vars(optimizer).update(given)


@contextmanager
def _restricted(
    optimizer: Optimizer, params: Sequence[nn.Parameter], pieces: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[None]:  # fmt: skip
    """Narrows ``param_groups`` to ``params``: stand-ins for pieces, and fp32 ones for 16 bits."""
    wanted = {id(p): p for p in params}
    stand_ins: dict[int, tuple[nn.Parameter, Tensor]] = {}  # and the weights that each stands for
    for param, piece in zip_longest(params, pieces):
        weights, grad = piece or (param.detach(), param.grad)
        if piece is not None or param.dtype in MASTERED:
            stand_ins[id(param)] = _stand_in(optimizer, param, weights, grad), weights
    groups = [g["params"] for g in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            mine = [p for p in group["params"] if id(p) in wanted]
            group["params"] = [stand_ins[id(p)][0] if id(p) in stand_ins else p for p in mine]
        yield
    finally:
        for group, full in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = full
        for key, (stand_in, weights) in stand_ins.items():
            state: dict[str, Any] = optimizer.state.pop(stand_in, {})
            if weights.dtype in MASTERED:
                state[MASTER] = stand_in.detach()
                weights.copy_(stand_in.detach())
            if state:
                optimizer.state[wanted[key]] = state


def _stand_in(optimizer: Optimizer, param: nn.Parameter, weights: Tensor, grad: Tensor | None) -> nn.Parameter:
    state = dict(optimizer.state.pop(param, {}))
    if param.dtype in MASTERED:
        master = state.pop(MASTER, None)
        if master is None:  # state was made, or loaded, for 16-bit weights
            state = {k: v.float() if type(v) is Tensor and v.dtype == param.dtype else v for k, v in state.items()}
        weights, grad = weights.float() if master is None else master, None if grad is None else grad.float()
    stand_in = nn.Parameter(weights)
    stand_in.grad = grad
    if state:
        optimizer.state[stand_in] = state
    return stand_in


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """The state tensors of a parameter that are offloaded: those with more than one element."""
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.numel() > 1}
