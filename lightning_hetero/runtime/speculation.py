"""Updates that run before the verdict on all gradients, and what the verdict is made of.

[Note: Norms]
``torch.nn.utils.clip_grad_norm_`` takes the norm of every gradient, in the order of the optimizer's parameters; then the norm of
these norms; then it multiplies all gradients by ``max_norm / (norm + 1e-6)``, or by 1 where that is more. Here the same functions
run in the same order. Only that the norms of single gradients are taken early, block by block as backward leaves them: each depends
on its own gradient and the number of threads alone. So norm, verdict and clipped gradients have torch's bits. A factor of 1 changes
no bit, so it is not applied; then the update that was tried with the gradients as they were is the right one.

[Note: Loss scaling]
A ``GradScaler`` divides all gradients by the scale and looks for one that is not finite. Both are done by its own function too,
early and block by block; it skips the step, and lowers the scale, as ever. Optimizers that divide themselves (``fused=True``) are
tried with the scale that the loss was multiplied by.

[Note: Beside a device]
On a device with memory of its own both are done there, as backward leaves the gradients and before they leave for the host
(``runtime.device.gradients``); on the host are those that were added up there over several batches. Updates run on a lane, so the
verdict waits until those that were tried have been handed to the engine; their gradients stay on the host. What the device holds of
weights is not renewed before the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero._native import READY, Ticket
from lightning_hetero.ir.plan import Tier, UpdateLane
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule
from lightning_hetero.runtime.speculation_choice import Worth
from lightning_hetero.runtime.updates import DueUpdate
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.tier_store import TierStore

Unscale = Callable[[Any, Tensor, Tensor, bool], dict[torch.device, Tensor]]  # GradScaler._unscale_grads_


@dataclass(slots=True)
class _Tried:
    due: DueUpdate
    tickets: list[Ticket]  # none where the store could not try it
    handed: Callable[[], None]  # waits until it has got them


def _at_once() -> None:
    """It has them."""


class Speculation:
    """What of a step is tried before its verdict, and whether it is worth trying.

    Contract: one thread calls. :meth:`begin`, then during backward :meth:`measured` and :meth:`remember` for each block that
    :meth:`may_try` allows, then the verdict: :meth:`keep`, or :meth:`discard` and :meth:`again`, or :meth:`skip`. Beside a device
    with memory of its own :meth:`hopes`, :meth:`divide` and :meth:`scaled` take the place of the first two.

    Args:
        store: The tiers.
        turn: Held while the store is used, where lanes use it too.

    Attributes:
        enabled: Nothing but the verdict stands between a block's gradients and its update.
        trying: The step under way may try.
        discarded: Its verdict was to discard.
        worth: Whether to try at all.
        scaler: The ``GradScaler`` of the loss, if there is one.
        unscale: Its function for all gradients.
    """

    def __init__(self, store: TierStore, turn: AbstractContextManager[Any]) -> None:
        self.enabled = False
        self.trying = False
        self.discarded = False
        self.worth = Worth()
        self.scaler: torch.amp.GradScaler | None = None
        self.unscale: Unscale | None = None
        self._store, self._turn = store, turn
        self._tried: dict[int, _Tried] = {}
        self._norms: dict[int, Tensor] = {}  # by the parameter's id
        self._unscaled: set[int] = set()
        self._found: list[Tensor] = []  # above 0 where a gradient was not finite
        self._loss_scale = 1.0

    def begin(self, *, training: bool) -> None:
        """A batch begins; one that ended without a verdict is forgotten."""
        self.skip()
        self._norms.clear()
        self._unscaled.clear()
        self._found.clear()
        self.trying = training and self.enabled and self.worth.tries
        if self.trying and self.scaler is not None:
            self._loss_scale = self.scaler.get_scale()

    # ---- trying -------------------------------------------------------------------------------------------------------------

    def may_try(self, block: Block, binding: OptimizerBinding) -> bool:
        """Whether the block's update may run now, to be taken back if need be."""
        return self.hopes(block, binding) and self.may_be_tried(block.parts)

    def hopes(self, block: Block, binding: OptimizerBinding) -> bool:
        """The same, but for what the store says (:meth:`may_be_tried`), which may change until the update runs."""
        if not self.trying or self.discarded or binding.rule is not Rule.NATIVE:
            return False
        revocable = block.plan.state is Tier.DISK and block.plan.update is UpdateLane.CPU
        return revocable and not any(
            binding.is_new(part, p) for part in _with_state(block.parts) for p in part.params if p.grad is not None
        )

    def may_be_tried(self, parts: Iterable[Part]) -> bool:
        """Whether updates of these parts can be taken back."""
        return all(self._store.may_speculate(part) for part in _with_state(parts))

    def measured(self, due: DueUpdate) -> DueUpdate:
        """The update as it is tried: its gradients are divided by the loss's scale, and their norms are taken."""
        params = [one.part.params[i] for one in due.parts for i in one.indices]
        self.divide(params, due.binding)
        with torch.no_grad():
            self._norms.update(zip(map(id, params), torch._foreach_norm([_grad(p) for p in params], 2.0), strict=True))
        return self.scaled(due)

    def divide(self, params: Sequence[nn.Parameter], binding: OptimizerBinding) -> None:
        """Divides gradients by the loss's scale, unless the optimizer does, and looks for one that is not finite."""
        if self.scaler is not None and params:
            self._divide(params, binding)
            self._unscaled.update(map(id, params))

    def _divide(self, params: Sequence[nn.Parameter], binding: OptimizerBinding) -> None:
        assert self.unscale is not None, "it is the scaler's"
        divides, device = _divides(binding), _grad(params[0]).device
        inverse = torch.full((), 1.0 if divides else self._loss_scale, device=device).double().reciprocal().float()
        self._found += self.unscale(_group(params), inverse, torch.zeros((), device=device), divides).values()

    def divide_on_host(self, due: DueUpdate) -> None:
        """The same for gradients that have left a device and were added up on the host; called on a lane."""
        for one in due.parts if self.scaler is not None else ():
            assert one.claim is not None, "they have left a device"
            params = [one.part.params[i] for i in one.indices]
            self._divide([_holding(one.claim.gradient(p)) for p in params], due.binding)
            self._unscaled.update(map(id, params))

    def scaled(self, due: DueUpdate) -> DueUpdate:
        """The update with the scale that it is tried with."""
        return replace(due, scale=1.0 / self._loss_scale) if self.scaler is not None and _divides(due.binding) else due

    def remember(self, due: DueUpdate, tickets: list[Ticket], handed: Callable[[], None] = _at_once) -> None:
        """The update is tried; ``handed`` waits until ``tickets`` has all of its tickets, or none if the store could not try it."""
        self._tried[due.block.index] = _Tried(due, tickets, handed)

    # ---- the verdict --------------------------------------------------------------------------------------------------------

    def clip(self, params: Iterable[nn.Parameter], max_norm: float) -> None:
        """As ``torch.nn.utils.clip_grad_norm_``, see [Note: Norms]; what was tried with gradients that it changes is discarded."""
        params = [p for p in params if p.grad is not None]
        if not params:
            return
        with torch.no_grad():
            total = self._total_norm(params)
            factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            if float(factor) != 1.0:
                self.discard()
                torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)

    def _total_norm(self, params: Sequence[nn.Parameter]) -> Tensor:
        grads = [_grad(p) for p in params]
        if not self._norms or len({grad.dtype for grad in grads}) > 1:  # torch groups gradients by dtype, in an order of its own
            return torch.nn.utils.get_total_norm(grads)
        missing = [p for p in params if id(p) not in self._norms]
        if missing:
            self._norms.update(zip(map(id, missing), torch._foreach_norm([_grad(p) for p in missing], 2.0), strict=True))
        total: Tensor = torch.linalg.vector_norm(torch.stack([self._norms[id(p)] for p in params]), 2.0)
        return total

    def unscale_rest(self, optimizer: Any, inverse: Tensor, found_inf: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        """``GradScaler._unscale_grads_`` for gradients that :meth:`measured` has not seen."""
        assert self.unscale is not None
        self._wait_handed()
        params = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self._unscaled]
        found = self.unscale(_group(params), inverse, found_inf, allow_fp16)
        if self._unscaled:
            found.setdefault(found_inf.device, found_inf.clone())
            for flag in self._found:
                found[found_inf.device] += flag.to(found_inf.device)
        return found

    def keep(self, scale: float) -> None:
        """The verdict: gradients are what they were, and are multiplied by ``scale``; what was tried with that is right."""
        if any(tried.due.scale != scale for tried in self._tried.values()):
            self.discard()
        if self.discarded:
            return
        self._wait_handed()
        with self._turn:
            for index, tried in list(self._tried.items()):
                lost = [one for one in tried.due.parts if not (tried.tickets and self._store.keep(one.part))]
                tried.due = replace(tried.due, parts=lost)
                if not lost:
                    del self._tried[index]

    def _wait_handed(self) -> None:
        for tried in self._tried.values():
            tried.handed()

    @property
    def redoes(self) -> bool:
        """What was tried has been taken back, and the step goes on."""
        return self.trying and self.discarded

    def discard(self) -> None:
        """The verdict: what was tried is taken back. Its gradients may be changed once this returns."""
        self.discarded = True
        self._wait_handed()
        with self._turn:
            for tried in self._tried.values():
                for one in tried.due.parts:
                    self._store.revoke(one.part)
        for tried in self._tried.values():
            for ticket in tried.tickets:
                ticket.wait(READY)

    def again(self, block: Block, scale: float) -> DueUpdate | None:
        """The update of the block that was tried and taken back, with the scale that is right; ``None`` if there is none."""
        tried = self._tried.pop(block.index, None)
        return None if tried is None else tried.due.updater.again(tried.due, scale)

    def is_due(self, block: Block) -> bool:
        """Whether :meth:`again` has one."""
        return block.index in self._tried

    def skip(self) -> None:
        """There was no verdict, or it was that there is no step: nothing has happened."""
        if self._tried:
            self.discard()
        for tried in self._tried.values():
            for one in tried.due.parts:
                if one.part.last_write is not None:
                    one.part.last_write.wait(READY)  # the weights are back
                if one.claim is not None:
                    one.claim.give_up()
                tried.due.binding.retreat(one.part, one.indices)
        self._tried.clear()
        self.trying = self.discarded = False

    def observe(self, discarded: bool) -> None:
        """One more verdict, whether anything was tried or not."""
        if self.enabled:
            self.worth.verdict(tried=self.trying, discarded=discarded)


def _with_state(parts: Iterable[Part]) -> list[Part]:
    """Those that the engine updates."""
    return [part for part in parts if part.native is not None and part.native.geometry.num_state]


def _divides(binding: OptimizerBinding) -> bool:
    """Whether the optimizer divides gradients by the loss's scale itself."""
    return bool(getattr(binding.optimizer, "_step_supports_amp_scaling", False))


def _group(params: Sequence[nn.Parameter]) -> Any:
    """What of an optimizer a scaler looks at."""
    return SimpleNamespace(param_groups=[{"params": list(params)}])


def _holding(grad: Tensor) -> nn.Parameter:
    """A parameter with this gradient."""
    param = nn.Parameter(grad, requires_grad=False)
    param.grad = grad
    return param


def _grad(param: nn.Parameter) -> Tensor:
    assert param.grad is not None, "only parameters with gradients are tried"
    return param.grad.detach()
