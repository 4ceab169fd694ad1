"""Runs optimizers that treat parameters independently by their own code, one part at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


def step(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
    """Runs the optimizer's own ``step`` for some of its parameters and hides the others.

    16-bit parameters are updated through fp32 masters kept in
    ``optimizer.state[p]["master_param"]``.

    Args:
        optimizer: The user's optimizer.
        params: Parameters with weights, gradients and state in memory.
    """
    function: Any = type(optimizer).step
    if getattr(function, "hooked", False):
        function = function.__wrapped__  # torch's wrapper runs the step hooks; they belong to the whole step
    with _restricted(optimizer, params), _unscaled(optimizer), torch.no_grad():
        function(optimizer)
    torch.autograd.graph.increment_version(params)  # torch's fused optimizers do not; mirrors depend on these counters


@contextmanager
def _unscaled(optimizer: Optimizer) -> Iterator[None]:
    """Hides the loss's scale, which a ``GradScaler`` gives: gradients are divided by it already."""
    given = {name: vars(optimizer).pop(name) for name in ("grad_scale", "found_inf") if name in vars(optimizer)}
    try:
        yield
    finally:
        vars(optimizer).update(given)


@contextmanager
def _restricted(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Narrows ``param_groups`` to ``params``, with fp32 stand-ins for the 16-bit ones."""
    wanted = {id(p): p for p in params}
    stand_ins: dict[int, nn.Parameter] = {}
    for param in params:
        if param.dtype in MASTERED:
            stand_ins[id(param)] = _stand_in(optimizer, param)
    groups = [g["params"] for g in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [stand_ins.get(id(p), p) for p in group["params"] if id(p) in wanted]
        yield
    finally:
        for group, full in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = full
        for key, master in stand_ins.items():
            state: dict[str, Any] = optimizer.state.pop(master, {})
            state[MASTER] = master.detach()
            optimizer.state[wanted[key]] = state
            with torch.no_grad():
                wanted[key].copy_(master)


def _stand_in(optimizer: Optimizer, param: nn.Parameter) -> nn.Parameter:
    state = dict(optimizer.state.pop(param, {}))
    master = state.pop(MASTER, None)
    weights = param.detach().float() if master is None else master
    if master is None:  # state was made, or loaded, for 16-bit weights
        state = {k: v.float() if type(v) is Tensor and v.dtype == param.dtype else v for k, v in state.items()}
    stand_in = nn.Parameter(weights, requires_grad=True)
    stand_in.grad = None if param.grad is None else param.grad.float()
    if state:
        optimizer.state[stand_in] = state
    return stand_in


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """The state tensors of a parameter that are offloaded: those with more than one element."""
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.numel() > 1}
