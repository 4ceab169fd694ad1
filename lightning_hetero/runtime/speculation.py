"""Updates that run before the verdict on all gradients, and the parts of the verdict.

[Note: Norms]
``torch.nn.utils.clip_grad_norm_`` takes the norm of every gradient, in the order of the optimizer's
parameters. Then it takes the norm of these norms. Then it multiplies all gradients by
``max_norm / (norm + 1e-6)``, or by 1 if that is more. Here the same functions run in the same
order. Only the norms of single gradients are taken early, block by block as backward produces the
gradients: such a norm depends on its own gradient and on the number of threads alone. So norm,
verdict and clipped gradients have torch's bits. A factor of 1 changes no bit, so it is not applied,
and an update with the gradients as they were is right.

[Note: Loss scaling]
A ``GradScaler`` divides all gradients by the scale and looks for one that is not finite. Its own
function does both here too, early and block by block. The scaler itself skips the step and lowers
the scale. Optimizers that divide gradients themselves (``fused=True``) speculate with the scale
that the loss was multiplied by. As a batch begins, its scale is sent to the host, where it is known
by the time that the first gradient is: nothing waits for the device.

docs/architecture.md says what is different on a device with memory of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from lightning_hetero._native import READY, Ticket
from lightning_hetero.errors import HeteroError, UnsupportedError
from lightning_hetero.ir.plan import Tier, UpdateLane
from lightning_hetero.lanes import All, Event, Lanes, OpEvent
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule
from lightning_hetero.runtime.speculation_choice import Worth
from lightning_hetero.runtime.updates import DueUpdate
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.untyped import Function


@dataclass(eq=False, slots=True)
class Trial:
    """An update before the verdict."""

    due: DueUpdate
    divided: bool  # its gradients have been divided by the scale of the loss
    tickets: list[Ticket] = field(default_factory=list)  # once it has run; none if the store could not take it back
    end: OpEvent | None = None  # of its op, once it is submitted
    read: list[tuple[nn.Parameter, weakref.ref[Tensor], int]] = field(default_factory=list)  # gradients, and their versions then


class Speculation:
    """The updates of a step that run before its verdict, and the choice whether any do.

    Contract: one thread calls; only :meth:`run` is called on a lane. First :meth:`begin`; during
    backward :meth:`trial` and :meth:`submitted` for blocks that :meth:`may_try` allows; then the
    verdict: :meth:`keep`, or :meth:`discard` and :meth:`again`, or :meth:`skip`.
    """

    def __init__(self, store: TierStore, turn: AbstractContextManager[bool | None], lanes: Lanes) -> None:
        self.enabled = False  # only the verdict delays updates
        self.trying = False  # the step under way speculates
        self.discarded = False  # the verdict on it was to discard
        self.worth = Worth()  # chooses whether a step speculates
        self._store, self._turn, self._lanes = store, turn, lanes
        self._scaler: torch.amp.GradScaler | None = None
        self._unscale: Function | None = None  # the scaler's function for all gradients
        self._tried: dict[int, Trial] = {}
        self._left: dict[int, bool] = {}  # block whose gradients left a device -> divided before
        self._norms: dict[int, Tensor] = {}  # by the parameter's id
        self._unscaled: set[int] = set()
        self._found: list[Tensor] = []  # above 0 if a gradient was not finite
        self._sent_scale: Tensor | None = None  # host memory for the scale of the batch's loss
        self._scale_sent: Event = All(())

    def follow(self, scaler: torch.amp.GradScaler) -> None:
        """Divides gradients by the scale of this scaler, with its own function."""
        self._scaler, self._unscale = scaler, scaler._unscale_grads_

    def begin(self, *, training: bool) -> None:
        """Begins a batch. A batch that ended without a verdict is forgotten."""
        self.skip()
        self._left.clear()
        self._norms.clear()
        self._unscaled.clear()
        self._found.clear()
        self.trying = training and self.enabled and self.worth.tries
        if self.trying and self._scaler is not None:
            self._send_scale(self._scaler)

    def _send_scale(self, scaler: torch.amp.GradScaler) -> None:
        if self._sent_scale is None:
            self._sent_scale = self._lanes.host_buffer(4).view(torch.float32)
        if scaler._scale is None:  # before the first loss
            self._sent_scale.fill_(scaler.get_scale())
        else:
            self._sent_scale.copy_(scaler._scale, non_blocking=True)
        self._scale_sent = self._lanes.mark()

    def _loss_scale(self) -> float:
        """What the loss of this batch was multiplied by."""
        if self._sent_scale is None:
            raise HeteroError("no scaler is followed, and one unscales.")
        self._scale_sent.wait()
        return float(self._sent_scale)

    # ---- before the verdict ----------------------------------------------------------------------

    def may_try(self, block: Block, binding: OptimizerBinding, *, on_device: bool) -> bool:
        """Whether the block's update may run now."""
        if on_device:
            return block.index in self._left
        return self.is_wanted(block, binding) and self.can_take_back(block.parts)

    def is_wanted(self, block: Block, binding: OptimizerBinding) -> bool:
        """Whether the block's update may run now, if the store :meth:`can_take_back` it."""
        if not self.trying or self.discarded or binding.rule is not Rule.NATIVE:
            return False
        revocable = block.plan.state is Tier.DISK and block.plan.update is UpdateLane.CPU
        return revocable and not any(
            binding.new_ones(part, [i for i, p in enumerate(part.params) if p.grad is not None])
            for part in _with_state(block.parts)
        )

    def can_take_back(self, parts: Iterable[Part]) -> bool:
        """Whether updates of these parts can be taken back."""
        return all(self._store.may_speculate(part) for part in _with_state(parts))

    def leave(self, block: Block, params: Sequence[nn.Parameter], binding: OptimizerBinding, *, whole: bool) -> None:
        """Gradients are about to leave a device; ``whole``: the host has none to add them to."""
        self._left[block.index] = whole
        if whole:
            self._divide(params, binding)

    def trial(self, due: DueUpdate, *, on_device: bool) -> Trial:
        """The update as it runs now. On the host, divides gradients and takes their norms."""
        if not on_device:
            params = [one.part.params[i] for one in due.parts for i in one.indices]
            self._divide(params, due.binding)
            self._take_norms(params)
        if self._scaler is not None and _divides(due.binding):
            due = replace(due, scale=1.0 / self._loss_scale())
        return Trial(due, divided=not on_device or self._left[due.block.index])

    def submitted(self, trial: Trial, end: OpEvent) -> None:
        """The update has been given to its lane."""
        trial.end = end
        self._tried[trial.due.block.index] = trial
        with torch._C.DisableTorchFunctionSubclass():  # handles would answer in Python
            params = [one.part.params[i] for one in trial.due.parts for i in one.indices]
            trial.read = [(p, weakref.ref(g), g._version) for p in params if (g := p.grad) is not None]

    def run(self, trial: Trial, *, priority: int, after: Sequence[Ticket]) -> Sequence[Ticket]:
        """Runs the update if the store can take it back; otherwise it runs after the verdict."""
        with self._turn:
            if self.can_take_back(one.part for one in trial.due.parts):
                for one in () if trial.divided else trial.due.parts:
                    if one.claim is not None:
                        params = [one.part.params[i] for i in one.indices]
                        self._divide(params, trial.due.binding, [g for g in one.claim.gradients(params) if g is not None])
                trial.tickets.extend(trial.due(priority=priority, after=after, speculative=True))
        return trial.tickets

    def _divide(self, params: Sequence[nn.Parameter], binding: OptimizerBinding, on_host: Sequence[Tensor] = ()) -> None:
        """Divides by the loss's scale, unless the optimizer does; looks for what is not finite.

        ``on_host``: the gradients, if they have left a device.
        """
        if self._unscale is None or not params:
            return
        held = list(map(_holding, on_host)) or params
        divides, device = _divides(binding), _grads(held)[0].device
        inverse = torch.full((), 1.0 if divides else self._loss_scale(), device=device).double().reciprocal().float()
        self._found += self._unscale(_group(held), inverse, torch.zeros((), device=device), divides).values()
        self._unscaled.update(map(id, params))

    def _take_norms(self, params: Sequence[nn.Parameter]) -> None:
        with torch.no_grad():
            self._norms.update(zip(map(id, params), torch._foreach_norm(_grads(params), 2.0), strict=True))

    # ---- the verdict -----------------------------------------------------------------------------

    def clip(self, params: Iterable[nn.Parameter], max_norm: float) -> None:
        """Does what ``torch.nn.utils.clip_grad_norm_`` does. Discards updates if gradients change.

        See [Note: Norms].
        """
        params = [p for p in params if p.grad is not None]
        if not params:
            return
        self.notice_changes()
        with torch.no_grad():
            total = self._total_norm(params)
            # Only updates that may be taken back need the verdict on the host.
            if self.enabled or total.is_cpu:  # else the host would wait for the device
                if float(torch.clamp(max_norm / (total + 1e-6), max=1.0)) == 1.0:
                    return
                self.discard()
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)

    def notice_changes(self) -> None:
        """Takes updates back if code in backward, such as a hook, has changed their gradients.

        Raises:
            UnsupportedError: It has changed what was divided by the loss's scale already.
        """
        if self.discarded:
            return
        self._wait_handed()
        with torch._C.DisableTorchFunctionSubclass():  # handles would answer in Python
            tried = [trial for trial in self._tried.values() if trial.divided or trial.tickets]  # others read nothing yet
            for param, given, version in (row for trial in tried for row in trial.read):
                grad = param.grad
                if grad is None or grad is not given() or grad._version != version:
                    break
            else:
                return
        if self._unscaled:
            raise UnsupportedError(
                "a gradient has changed during backward, by a hook for example, after it was divided by the loss's scale. Change "
                "gradients in on_after_backward or on_before_optimizer_step, so that updates wait."
            )
        self._norms.clear()
        self.discard()

    def _total_norm(self, params: Sequence[nn.Parameter]) -> Tensor:
        grads = _grads(params)
        if not self._norms or len({grad.dtype for grad in grads}) > 1:  # torch groups gradients by dtype in its own order
            return torch.nn.utils.get_total_norm(grads)
        missing = [p for p in params if id(p) not in self._norms]
        if missing:
            self._take_norms(missing)
        total: Tensor = torch.linalg.vector_norm(torch.stack([self._norms[id(p)] for p in params]), 2.0)
        return total

    def unscale_rest(
        self, optimizer: torch.optim.Optimizer, inverse: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """``GradScaler._unscale_grads_`` for the gradients that are not divided yet."""
        if self._unscale is None:
            raise HeteroError("no scaler is followed, and one unscales.")
        self._wait_handed()
        params = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self._unscaled]
        found: dict[torch.device, Tensor] = self._unscale(_group(params), inverse, found_inf, allow_fp16)
        if self._unscaled:
            found.setdefault(found_inf.device, found_inf.clone())
            for flag in self._found:
                found[found_inf.device] += flag.to(found_inf.device)
        return found

    def keep(self, scale: float) -> None:
        """The verdict: gradients are unchanged, and multiplied by ``scale``."""
        if any(trial.due.scale != scale for trial in self._tried.values()):
            self.discard()
        if self.discarded:
            return
        self._wait_handed()
        with self._turn:
            for index, trial in list(self._tried.items()):
                lost = [one for one in trial.due.parts if not (trial.tickets and self._store.keep(one.part))]
                trial.due = replace(trial.due, parts=lost)
                if not lost:
                    del self._tried[index]

    def _wait_handed(self) -> None:
        """Waits until the engine has the updates that it will ever get."""
        for trial in self._tried.values():
            if trial.end is not None:
                with suppress(Exception):  # the lanes raise it when they are drained
                    trial.end.handed()

    @property
    def redoes(self) -> bool:
        """Whether updates were discarded and the step goes on."""
        return self.trying and self.discarded

    def discard(self) -> None:
        """The verdict: takes the updates back. Their gradients may change once this returns."""
        self.discarded = True
        self._wait_handed()
        with self._turn:
            for trial in self._tried.values():
                for one in trial.due.parts:
                    self._store.revoke(one.part)
        for trial in self._tried.values():
            for ticket in trial.tickets:
                ticket.wait(READY)

    def again(self, block: Block, scale: float) -> DueUpdate | None:
        """The block's discarded update, with the right scale; ``None`` if there is none."""
        trial = self._tried.pop(block.index, None)
        return None if trial is None else trial.due.updater.again(trial.due, scale)

    def is_due(self, block: Block) -> bool:
        """Whether :meth:`again` has an update."""
        return block.index in self._tried

    def skip(self) -> None:
        """There is no verdict, or there is no step: nothing has happened."""
        if self._tried:
            self.discard()
        for trial in self._tried.values():
            for one in trial.due.parts:
                if one.part.last_write is not None:
                    one.part.last_write.wait(READY)  # the weights are back
                if one.claim is not None:
                    one.claim.give_up()
                trial.due.binding.retreat(one.part, one.indices)
        self._tried.clear()
        self.trying = self.discarded = False

    def observe(self, discarded: bool) -> None:
        """Counts one more verdict, of a step that speculated or not."""
        if self.enabled:
            self.worth.verdict(tried=self.trying, discarded=discarded)


def _with_state(parts: Iterable[Part]) -> list[Part]:
    """The parts that the engine updates."""
    return [part for part in parts if part.native is not None and part.native.geometry.num_state]


def _divides(binding: OptimizerBinding) -> bool:
    """Whether the optimizer divides gradients by the loss's scale itself."""
    return bool(getattr(binding.optimizer, "_step_supports_amp_scaling", False))


def _group(params: Sequence[nn.Parameter]) -> SimpleNamespace:
    """The attribute of an optimizer that a scaler reads."""
    return SimpleNamespace(param_groups=[{"params": list(params)}])


def _holding(grad: Tensor) -> nn.Parameter:
    """A parameter with this gradient."""
    param = nn.Parameter(grad, requires_grad=False)
    param.grad = grad
    return param


def _grads(params: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad.detach() for p in params if p.grad is not None]
