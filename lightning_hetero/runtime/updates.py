"""Runs the update of one part: hands gradients to the engine, or runs the optimizer's own code where there is no kernel for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero._native import Ticket
from lightning_hetero.ir.plan import Tier, UpdateLane
from lightning_hetero.optim import adam, blockwise
from lightning_hetero.runtime.blobs import StateBlobs
from lightning_hetero.runtime.device import DeviceSide
from lightning_hetero.runtime.device.gradients import check_dense
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule
from lightning_hetero.store.blocks import Block, Part
from lightning_hetero.store.tiers import TierStore

_Row = tuple[int, nn.Parameter, dict[str, Any], Tensor]  # position in the part, parameter, its group, its gradient


class Updater:
    """Updates parts for the bound optimizers.

    Args:
        store: The tiers.
        clip_value: Gradients are clamped to ``[-clip_value, clip_value]`` before updates that run during backward.
        keep_gradients: ``param.grad`` stays after the update, as plain Lightning leaves it; else it is given up to save memory.
        waits: ``optimizer.step()`` waits for the updates (manual optimization may change gradients right after it).

    Attributes:
        owners: Each optimized parameter's optimizer, by the parameter's ``id``.
        verdict: The optimizer whose ``step`` is under way; ``None`` during forward and backward.
        device: Weights, gradients and updates on a device with memory of its own; ``None`` where the device is the host.
    """

    def __init__(self, store: TierStore, *, clip_value: float | None, keep_gradients: bool, waits: bool) -> None:
        self.store = store
        self.waits = waits
        self.verdict: OptimizerBinding | None = None
        self._scale = 1.0
        self._clip_value = clip_value
        self._keep_gradients = keep_gradients
        self._blobs = StateBlobs(store)
        self.owners: dict[int, OptimizerBinding] = {}
        self._groups: dict[int, dict[str, Any]] = {}
        self._updated: set[int] = set()  # parameters that this step has already updated
        self.device: DeviceSide | None = None

    def configure(self, *, clip_value: float | None, keep_gradients: bool, waits: bool) -> None:
        """Sets what the constructor's arguments of these names say, between steps."""
        self._clip_value, self._keep_gradients, self.waits = clip_value, keep_gradients, waits

    def move_state(self, part: Part) -> None:
        """State that only the optimizer's own code knows follows the part's plan: into memory, or into a blob on disk."""
        owner = next((self.owners[id(p)] for p in part.params if id(p) in self.owners), None)
        if owner is None or owner.capability is not Rule.BLOCKWISE:
            return
        if part.block.plan.state is Tier.DISK:
            self._blobs.save(part, owner.optimizer)
        else:
            self._blobs.drop(part, owner.optimizer)

    def own(self, bindings: Iterable[OptimizerBinding]) -> None:
        """Learns which parameter belongs to which optimizer."""
        self.owners = {id(p): b for b in bindings for p in b.params()}

    def begin_step(self) -> None:
        """Hyper-parameters may have changed since the last step."""
        self.verdict, self._scale = None, 1.0
        self._groups = {}
        self._updated = set()

    def begin_verdict(self, binding: OptimizerBinding, scale: float) -> None:
        """``binding.step`` is under way; gradients are multiplied by ``scale`` first."""
        self.verdict, self._scale = binding, scale

    def has_work(self, block: Block, binding: OptimizerBinding) -> bool:
        """Whether an update of the block for this optimizer is due."""
        return any(self._indices(part, binding) for part in block.parts)

    def open(self, block: Block, *, priority: int, after: Sequence[Ticket]) -> list[Ticket]:
        """Lets the state of a block that will be updated stream towards the host, once ``after`` are done."""
        tickets = []
        for part in block.parts:
            owner = next((self.owners[id(p)] for p in part.params if id(p) in self.owners and p.requires_grad), None)
            if owner is None or owner.rule is not Rule.NATIVE or part.opened is not None or not part.on_disk:
                continue
            if part.native is not None and part.native.geometry.state_on_disk_file and block.resident:
                tickets.append(self.store.open_update(part, resident=True, priority=priority, after=after))
        return tickets

    def cancel_opened(self, blocks: Iterable[Block]) -> None:
        """Takes opened updates back."""
        for block in blocks:
            for part in block.parts:
                self.store.cancel_update(part)

    def check_gradients(self, block: Block) -> None:
        """Refuses gradients that are not dense, unless the optimizer runs whole.

        Raises:
            UnsupportedError: Names the parameter.
        """
        for part in block.parts:
            for name, param in zip(part.names, part.params, strict=True):
                owner = self.owners.get(id(param))
                if param.grad is not None and owner is not None and owner.rule is not Rule.WHOLE:
                    check_dense(name, param.grad)

    def update(self, block: Block, binding: OptimizerBinding, *, priority: int, after: Sequence[Ticket] = ()) -> list[Ticket]:
        """Updates the block's parameters that have gradients and belong to ``binding``.

        Args:
            block: The block.
            binding: The optimizer.
            priority: Of native updates among all that may run, the lowest first.
            after: What native updates wait for, unless they have been opened.
        """
        tickets: list[Ticket] = []
        for part in block.parts:
            indices = self._indices(part, binding)
            if not indices:
                continue
            self._prepare_gradients(part, indices)
            if self.device is None:
                part.reclaim()
            if self.device is not None and binding.rule is Rule.NATIVE and block.plan.update is UpdateLane.DEVICE:
                rows = self._rows(part, indices, binding)
                self.device.updates.update(binding.optimizer, part, rows, scale=self._scale)
            elif binding.rule is Rule.NATIVE:
                tickets.append(self._update_native(part, indices, binding, priority, after))
            else:
                tickets += self._update_in_python(block, part, indices, binding)
            self._updated.update(id(part.params[i]) for i in indices)
            if self.device is not None:
                self.device.gradients.used([part.params[i] for i in indices], tickets[-1] if tickets else None)
            if not self._keep_gradients:
                for i in indices:
                    part.params[i].grad = None
        return tickets

    def update_whole(self, binding: OptimizerBinding) -> None:
        """One step of an optimizer that may couple its parameters; all of them are in memory."""
        params = [p for p in binding.params() if p.grad is not None]
        if self._scale != 1.0:
            torch._foreach_mul_([p.grad for p in params if p.grad is not None], self._scale)
        blockwise.step(binding.optimizer, params)

    # ---- details ----------------------------------------------------------------------------------------------------------

    def _indices(self, part: Part, binding: OptimizerBinding) -> list[int]:
        def due(param: nn.Parameter) -> bool:
            there = param.grad is not None or (self.device is not None and param in self.device.gradients)
            return there and self.owners.get(id(param)) is binding and id(param) not in self._updated

        return [i for i, p in enumerate(part.params) if p.numel() and due(p)]

    def _gradient(self, param: nn.Parameter) -> Tensor:
        """The gradient where the update finds it: on the host once it has left a device, else where autograd has put it."""
        held = None if self.device is None else self.device.gradients.gradient(param)
        grad = param.grad if held is None else held
        assert grad is not None, "only parameters with gradients are updated"
        return grad.detach()

    def _prepare_gradients(self, part: Part, indices: Sequence[int]) -> None:
        for i in indices:
            param, grad = part.params[i], self._gradient(part.params[i])
            check_dense(part.names[i], grad)
            if grad.stride() != param.stride():  # autograd gives the parameter's own memory order almost always
                param.grad = torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)
        if self._clip_value is not None and self.verdict is None:
            grads = [self._gradient(part.params[i]) for i in indices]  # as torch.nn.utils.clip_grad_value_ does it
            torch._foreach_clamp_min_(grads, -self._clip_value)
            torch._foreach_clamp_max_(grads, self._clip_value)

    def _update_native(
        self, part: Part, indices: Sequence[int], binding: OptimizerBinding, priority: int, after: Sequence[Ticket]
    ) -> Ticket:
        self.store.refresh_master(part)
        rows = self._rows(part, indices, binding)
        segments, hypers = adam.request(binding.optimizer, part, rows)
        if part.opened is None:
            self.store.open_update(part, resident=part.block.resident, priority=priority, after=after)
        keep = [grad for *_, grad in rows]
        ticket = self.store.arm_update(part, segments, hypers, keep, scale=self._scale, priority=priority)
        # A graph that still holds these weights would read new values: autograd shall say so instead.
        torch.autograd.graph.increment_version([part.params[i] for i in indices])
        self.store.master_is_current(part)
        if self.device is not None:
            self.device.weights.outdate(part)
        return ticket

    def _rows(self, part: Part, indices: Sequence[int], binding: OptimizerBinding) -> list[_Row]:
        """What is updated; the optimizer's books say that it was."""
        groups = self._groups_of(binding)
        binding.renew(part, indices)
        binding.advance(part, indices)
        return [(i, part.params[i], groups[id(part.params[i])], self._gradient(part.params[i])) for i in indices]

    def _update_in_python(self, block: Block, part: Part, indices: Sequence[int], binding: OptimizerBinding) -> list[Ticket]:
        params = [part.params[i] for i in indices]
        if self._scale != 1.0:
            torch._foreach_mul_([p.grad for p in params if p.grad is not None], self._scale)
        self._blobs.load(part, binding.optimizer)
        blockwise.step(binding.optimizer, params)
        if block.plan.state is Tier.DISK:
            self._blobs.save(part, binding.optimizer)
        return [self.store.store_weights(part)] if part.on_disk else []

    def _groups_of(self, binding: OptimizerBinding) -> dict[int, dict[str, Any]]:
        if not self._groups:
            self._groups = binding.groups()
        return self._groups
