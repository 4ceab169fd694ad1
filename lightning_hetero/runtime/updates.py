"""Runs updates: hands gradients to the engine, or runs the optimizer's own code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_hetero._native import Hyper, Ticket
from lightning_hetero.errors import HeteroError, UnsupportedError
from lightning_hetero.ir.plan import Tier, UpdateLane
from lightning_hetero.optim import adam, blockwise
from lightning_hetero.runtime import slice_steps
from lightning_hetero.runtime.device import DeviceSide
from lightning_hetero.runtime.device.gradients import Claim, check_dense, grads_of
from lightning_hetero.runtime.early_changes import ReadEarly
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule, owners_of
from lightning_hetero.runtime.options import StepRules
from lightning_hetero.runtime.slice_gradients import SliceClaim
from lightning_hetero.runtime.slices import Slices
from lightning_hetero.runtime.state_blobs import StateBlobs
from lightning_hetero.runtime.taken_gradients import TakenGradients
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import versions
from lightning_hetero.store.live.mirrors import writes_of
from lightning_hetero.store.live.moved_weights import bring_back, find_moved
from lightning_hetero.store.live.tier_store import TierStore


class PartWork(NamedTuple):
    """The update of one part that is due, before anything of it is read."""

    part: Part
    indices: list[int]  # positions of the parameters
    steps: NDArray[np.float32] | None  # their step counts, if the optimizer's state is as it was
    new: list[int]  # those for which the optimizer has other state than the store


@dataclass(frozen=True, slots=True)
class DuePart:
    """The update of one part, as it was issued."""

    part: Part
    indices: list[int]  # positions of the updated parameters
    numbers: list[Hyper]  # their hyper-parameters, for a native update
    # Their gradients that have left a device, or of which the rank has a slice; else ``None``.
    claim: Claim | SliceClaim | None
    early: ReadEarly | None  # if it was issued before the verdict


@dataclass(frozen=True, slots=True)
class DueUpdate:
    """The update of one block, as it was issued. A call runs it."""

    updater: Updater
    block: Block
    binding: OptimizerBinding
    parts: list[DuePart]  # the updates of its parts
    scale: float  # gradients are multiplied by it first
    clip: bool  # gradients are clipped here, if the rules ask for clipping by value

    def __call__(self, *, priority: int = 0, after: Sequence[Ticket] = (), speculative: bool = False) -> list[Ticket]:
        """Runs the update; ``speculative``: it may be taken back."""
        return self.updater.run(self, priority=priority, after=after, speculative=speculative)

    def lift(self) -> list[Ticket]:
        """Brings what a rank updates on its device there, before the call."""
        return self.updater.lift(self)


class Updater:
    """Updates parts for the bound optimizers."""

    def __init__(self, store: TierStore, device: DeviceSide | None = None, slices: Slices | None = None) -> None:
        self.store, self.device, self.slices = store, device, slices
        self.blobs = StateBlobs(store)  # state that only an optimizer's own code knows
        self.rules = StepRules()  # how gradients are used, from one step to another
        self.owners: dict[int, OptimizerBinding] = {}  # of each parameter that trains, by the parameter's ``id``
        self._updated: set[int] = set()  # parameters that this step has already updated
        self._taken = TakenGradients()
        self.begin_step()

    def move_state(self, part: Part) -> None:
        """Moves state that the engine does not know to the plan's tier: memory or a blob."""
        owners = {self.owners[id(p)] for p in part.params if id(p) in self.owners}
        with self.store.unrecorded.moving():
            for owner in owners:
                if owner.capability is not Rule.BLOCKWISE:
                    continue
                if part.block.plan.state is Tier.DISK:
                    self.blobs.save(part, owner.optimizer)
                else:
                    self.blobs.drop(part, owner.optimizer)

    def own(self, bindings: Iterable[OptimizerBinding]) -> None:
        """Learns which optimizer trains which parameter."""
        self.owners = owners_of(bindings)

    def begin_step(self) -> None:
        """Begins a step. Hyper-parameters may have changed since the last one."""
        self.verdict: OptimizerBinding | None = None  # the optimizer whose ``step`` is under way
        self.scale = 1.0  # gradients are multiplied by it first
        self.read_anew()
        self._updated = set()
        self._taken.clear()  # of a backward that failed
        self.early = ReadEarly()

    def read_anew(self) -> None:
        """Hyper-parameters have changed since they were read last, or may have."""
        self._groups: dict[int, dict[str, object]] = {}
        self._known: dict[tuple[int, float], Hyper] = {}  # by the group's ``id`` and the count of steps

    def has_work(self, block: Block, binding: OptimizerBinding) -> bool:
        """Whether an update of the block for this optimizer is due."""
        return any(self._indices(part, binding) for part in block.parts)

    def open(self, block: Block, *, priority: int, after: Sequence[Ticket], speculative: bool = False) -> list[Ticket]:
        """Begins to read the state of a block that will be updated, once ``after`` are done."""
        tickets = []
        for part in block.parts:
            owner = next((self.owners[id(p)] for p in part.params if id(p) in self.owners and p.requires_grad), None)
            if owner is None or owner.rule is not Rule.NATIVE or part.opened is not None or not part.on_disk:
                continue
            if part.native is not None and part.native.geometry.state_on_disk_file and block.resident:
                tickets.append(self.store.open_update(part, resident=True, priority=priority, after=after, speculative=speculative))
        return tickets

    def cancel_opened(self, blocks: Iterable[Block]) -> None:
        """Cancels updates that :meth:`open` has begun."""
        for block in blocks:
            for part in block.parts:
                self.store.cancel_update(part)

    def check_gradients(self, block: Block) -> None:
        """Refuses gradients that are not dense, unless the optimizer runs whole.

        Raises:
            UnsupportedError: Names the parameter.
        """
        for part in block.parts:
            for name, param, grad in zip(part.names, part.params, grads_of(part), strict=True):
                if grad is None or grad.layout is torch.strided:
                    continue
                owner = self.owners.get(id(param))
                if owner is not None and owner.rule is not Rule.WHOLE:
                    check_dense(name, grad)

    def work(self, block: Block, binding: OptimizerBinding) -> list[PartWork]:
        """What is due of the block for this optimizer.

        If some of it is ``new``, :meth:`prepare` writes to the store: no op on the block may run.
        """
        found = []
        for part in block.parts:
            if indices := self._indices(part, binding):
                steps = new = None
                if binding.rule is Rule.NATIVE:
                    steps = binding.steps(part, indices)
                    new = binding.new_ones(part, indices) if steps is None else None
                found.append(PartWork(part, indices, steps, new or []))
        return found

    def show_taken(self, block: Block, taken: Set[int]) -> None:
        """Tells hooks of this backward if they use gradients that updates have, or are to have."""
        for part in block.parts:
            self._taken.place(zip(part.names, part.params, strict=True), taken)

    def backward_ends(self) -> None:
        """Parameters whose update has begun have no gradient again.

        Raises:
            UnsupportedError: A hook has given one another gradient.
        """
        if changed := self._taken.clear():
            raise UnsupportedError(
                f"the gradient of {changed[0]!r} was set during backward, after its update had begun. Set it in on_after_backward "
                f'or on_before_optimizer_step of Lightning, so that updates wait; in a loop pass overlap="forward".'
            )

    @property
    def has_begun(self) -> bool:
        """Whether an update of the step under way has been prepared."""
        return bool(self._updated)

    @property
    def updated(self) -> Set[int]:
        """The parameters, by ``id``, whose updates of the step under way have been prepared."""
        return self._updated

    def prepare(self, block: Block, binding: OptimizerBinding, work: Iterable[PartWork]) -> DueUpdate | None:
        """Reads all that may change before the update runs; ``None`` if none is due."""
        parts = [self._due_part(one, binding) for one in work]
        return DueUpdate(self, block, binding, parts, self.scale, clip=self.verdict is None) if parts else None

    def _due_part(self, work: PartWork, binding: OptimizerBinding) -> DuePart:
        part, indices = work.part, work.indices
        params = [part.params[i] for i in indices]
        keys = list(map(id, params))
        self._updated.update(keys)
        claim, apart = None, self.slices or self.device
        if apart is not None and not apart.gradients.ids().isdisjoint(keys):
            claim = apart.gradients.claim(params, keep=self.rules.keep_gradients)
        numbers: list[Hyper] = []
        part.is_whole &= self.slices is None  # the other ranks' slices will be old
        if binding.rule is Rule.NATIVE:
            self._groups = groups = self._groups or binding.groups()
            if work.new:
                binding.renew(part, work.new)
            known = self._known
            for param_key, step in zip(keys, binding.advance(part, indices, work.steps), strict=True):
                group = groups[param_key]
                key = id(group), step
                if key not in known:
                    known[key] = adam.hyper(binding.optimizer, group, step)
                numbers.append(known[key])
        early = self.early if self.verdict is None else None
        if early is not None:
            early.prepared(binding, part, indices, numbers)
        return DuePart(part, indices, numbers, claim, early)

    def run(self, due: DueUpdate, *, priority: int, after: Sequence[Ticket], speculative: bool = False) -> list[Ticket]:
        """Runs a prepared update. If it is not open, the engine waits for the tickets first.

        ``priority``: of native updates that may run, the lowest number runs first.
        """
        tickets: list[Ticket] = []
        on_device = due.block.plan.update is UpdateLane.DEVICE
        if self.device is not None and self.slices is not None and on_device:
            for one in due.parts:
                self.device.updates.update_slices(one.part, list(zip(one.indices, one.numbers, strict=True)), scale=due.scale)
            return tickets
        for one in due.parts:
            if self.device is None:
                find_moved(one.part)
                if one.part.moved:
                    bring_back(one.part)
                    if self.slices is not None:
                        one.part.versions = versions(one.part)
            grads = self._gradients(one, clip=due.clip)
            if due.binding.rule is not Rule.NATIVE:
                tickets += self._update_in_python(due, one, grads)
            elif self.device is not None and on_device:
                self.device.updates.update(one.part, list(zip(one.indices, one.numbers, grads, strict=True)), scale=due.scale)
            else:
                tickets += self._update_native(one, grads, due.scale, priority, after, speculative=speculative)
            if one.claim is not None:
                one.claim.used(tickets[-1] if tickets else None)
            if one.early is not None and not speculative:
                one.early.updated(one.part, one.indices)
            if not self.rules.keep_gradients and self.slices is None and (self.device is None or on_device):
                for i in one.indices:
                    one.part.params[i].grad = None
        return tickets

    def lift(self, due: DueUpdate) -> list[Ticket]:
        """SWAP_IN of the slices of gradients and weights that :meth:`run` updates on the device."""
        if self.device is not None:
            for one in due.parts:
                self.device.updates.lift(one.part, one.indices, self._gradients(one, clip=due.clip))
        return []

    def again(self, due: DueUpdate, scale: float) -> DueUpdate:
        """The same update once more, with another scale."""
        if self.early.has_changed:
            due = replace(due, parts=[self._renumbered(one, due.binding) for one in due.parts])
        parts = [one for one in (self._with_gradients(one, due.binding) for one in due.parts) if one.indices]
        if self.device is not None:
            gradients, keep = self.device.gradients, self.rules.keep_gradients
            parts = [replace(p, claim=gradients.claim([p.part.params[i] for i in p.indices], keep=keep)) for p in parts]
        return replace(due, scale=scale, parts=parts)

    def _with_gradients(self, due: DuePart, binding: OptimizerBinding) -> DuePart:
        """The update without parameters whose gradients code in backward has dropped since."""
        away = () if self.device is None else self.device.gradients.ids()
        with torch._C.DisableTorchFunctionSubclass():  # for offloaded parameters these would be calls of Python
            gone = {i for i in due.indices if (p := due.part.params[i]).grad is None and id(p) not in away}
        if not gone:
            return due
        binding.retreat(due.part, gone)
        left = [(i, number) for i, number in zip(due.indices, due.numbers, strict=True) if i not in gone]
        return replace(due, indices=[i for i, _ in left], numbers=[number for _, number in left])

    @staticmethod
    def _renumbered(due: DuePart, binding: OptimizerBinding) -> DuePart:
        """The update with the hyper-parameters that its optimizer has now."""
        groups, params = binding.groups(), [due.part.params[i] for i in due.indices]
        rows = zip(params, due.numbers, strict=False)  # without numbers, if it is not native
        return replace(due, numbers=[adam.hyper(binding.optimizer, groups[id(p)], number.step) for p, number in rows])

    def update_whole(self, binding: OptimizerBinding) -> None:
        """One step of an optimizer that may couple its parameters. All of them are in memory."""
        params = [p for p in binding.params() if p.grad is not None]
        if self.scale != 1.0:
            torch._foreach_mul_([p.grad for p in params if p.grad is not None], self.scale)
        blockwise.step(binding.optimizer, params)

    def _indices(self, part: Part, binding: OptimizerBinding) -> list[int]:
        """The part's parameters whose update for this optimizer is due, by position."""
        if self._updated and self._updated.issuperset(map(id, part.params)):  # as nearly all are at the verdict
            return []
        apart = self.slices or self.device
        away = () if apart is None else apart.gradients.ids()
        # The engine skips parameters without elements. An optimizer's own code counts their steps.
        counts_empty = binding.rule is not Rule.NATIVE
        found = []
        with torch._C.DisableTorchFunctionSubclass():  # for offloaded parameters these would be calls of Python
            for index, param in enumerate(part.params):
                key = id(param)
                if key in self._updated or self.owners.get(key) is not binding:
                    continue
                if (key in away or (self.slices is None and param.grad is not None)) and (counts_empty or param.numel()):
                    found.append(index)
        return found

    def _gradients(self, due: DuePart, *, clip: bool) -> list[Tensor]:
        """The gradients, in the parameters' memory order, from the host once they are there."""
        part, grads = due.part, []
        params = [part.params[i] for i in due.indices]
        here = [None] * len(params) if due.claim is None else due.claim.gradients(params)
        for i, param, held in zip(due.indices, params, here, strict=True):
            if held is not None:
                grads.append(held)
                continue
            if (grad := param.grad) is None:
                raise HeteroError(f"{part.names[i]!r} lost its gradient between optimizer.step() and its update.")
            if grad.layout is not torch.strided:
                check_dense(part.names[i], grad)
            if grad.stride() != part.layouts[i].stride:  # autograd nearly always gives the parameter's memory order
                copy = torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype, device=grad.device)
                param.grad = grad = copy.copy_(grad)
            grads.append(grad.detach() if grad.requires_grad else grad)
        if clip and (limit := self.rules.clip_value) is not None:  # Source: torch.nn.utils.clip_grad_value_
            torch._foreach_clamp_min_(grads, -limit)
            torch._foreach_clamp_max_(grads, limit)
        return grads

    def _update_native(
        self, due: DuePart, grads: list[Tensor], scale: float, priority: int, after: Sequence[Ticket], *, speculative: bool
    ) -> list[Ticket]:
        part = due.part
        self.store.refresh_master(part)
        segments, hypers = adam.request(part, zip(due.indices, due.numbers, grads, strict=True))
        tickets: list[Ticket] = []
        if segments:  # else other ranks have all of these parameters
            if part.opened is None:
                resident = part.block.resident
                self.store.open_update(part, resident=resident, priority=priority, after=after, speculative=speculative)
            ticket = self.store.arm_update(part, segments, hypers, grads, scale=scale, priority=priority, speculative=speculative)
            tickets = [ticket]
        # So autograd refuses a graph that still holds these weights: it would read new values.
        torch.autograd.graph.increment_version([part.params[i] for i in due.indices])
        if self.slices is not None:
            part.versions = versions(part)
        self.store.master_is_current(part)
        if self.device is not None:
            self.device.weights.outdate(part)
        return tickets

    def _update_in_python(self, due: DueUpdate, one: DuePart, grads: list[Tensor]) -> list[Ticket]:
        part, params, optimizer = one.part, [one.part.params[i] for i in one.indices], due.binding.optimizer
        for ticket in writes_of(part):  # mirrors read the memory that the optimizer writes now
            ticket.wait()
        if due.scale != 1.0:
            torch._foreach_mul_(grads, due.scale)
        if self.slices is not None:
            part.is_whole = False
            slice_steps.step(optimizer, part, one.indices, grads, self.slices.reads)
            part.versions = versions(part)
            if self.device is not None:
                self.device.weights.outdate(part)
            return []
        self.blobs.load(part, optimizer)
        blockwise.step(optimizer, params)
        if due.block.plan.state is Tier.DISK:
            self.blobs.save(part, optimizer)
        return [self.store.store_weights(part)] if part.on_disk else []
