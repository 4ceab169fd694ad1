"""Resolves a plan for one model: budgets, geometries, rules, disk space. Refuses bad plans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_hetero._native import PartGeometry
from lightning_hetero.errors import OutOfMemoryBudgetError, UnsupportedError
from lightning_hetero.ir.model import BlockShape, ModelProfile, ModelShape
from lightning_hetero.ir.plan import BlockPlan, Gather, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import StepSignature, Updates
from lightning_hetero.lanes.memory import ALIGNMENT_BYTES
from lightning_hetero.lowering import (
    CacheSizes,
    DeviceRoom,
    Needs,
    Purpose,
    cache_sizes_in_budget,
    check,
    fitted,
    lower,
    needs_of_shape,
    rank_rules,
)
from lightning_hetero.lowering.cache_sizes import device_rows, divided
from lightning_hetero.lowering.memory_errors import device_too_small, too_small
from lightning_hetero.lowering.needs import DEVICE_STATES, Constant, total_bytes
from lightning_hetero.lowering.placed_blocks import placements
from lightning_hetero.lowering.rank_needs import whole_bytes
from lightning_hetero.optim import adam, blockwise
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule, owners_of
from lightning_hetero.runtime.options import SessionOptions, StepRules, host_budget
from lightning_hetero.runtime.sum_rooms import alignment_bytes
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.engine_options import staging_bytes
from lightning_hetero.store.live.geometry import chunk_bytes, geometry_of
from lightning_hetero.units import format_bytes

log = logging.getLogger(__name__)

_UNKNOWN_STATE_BYTES = 8  # per element, before the first step of an optimizer shows its state

Owners = Mapping[int, OptimizerBinding]  # the optimizer of each parameter that trains, by the parameter's ``id``


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A plan that fits."""

    plan: Plan  # one rule per block
    rules: StepRules  # how gradients are used under it, and when updates run
    by: tuple[Rule, ...]  # the rule of each optimizer, in their order
    cache_bytes: int  # host memory for weights that live on disk
    least_cache_bytes: int  # what all gradients of a step leave of it, if a device has them and ``may_defer``
    device_cache_bytes: int  # device memory for weights that live below the device
    arena_bytes: int  # device memory that is reserved for weights and state; 0 for none
    staging_bytes: int  # host memory for state that streams; 0 if nothing is on disk
    host_memory: int | None  # the budget of the host alone; ``None``: what is free
    activation_bytes: int  # activations in the budget; 0 if they are not known
    geometries: Mapping[Part, PartGeometry]  # the parts that the engine sees: native updates, and weights on disk
    may_defer: bool  # the host has room for all gradients at once
    swaps_to_disk: bool  # activations go to files
    swapped_bytes: int  # bytes of these files, as far as they are known
    num_blobs: int  # parts with state that the engine does not know, in files
    later_bytes: int  # bytes of their files, from the first step on

    @property
    def uses_disk(self) -> bool:
        """Whether anything is on disk."""
        return self.swaps_to_disk or any(Tier.DISK in (p.weights, p.state) for p in self.plan.blocks)


class Placer:
    """Resolves plans for one model, with one set of optimizers and rules. Changes nothing.

    Args:
        profile: A profiled batch's results; ``None``: activations are unknown and not counted.
        kept_every: One of so many steps is kept on disk; 0: none is.
        scale_bytes: What belongs to quantized weights, and is where the model computes.
        reading_bytes: What the start needs beside a block, to quantize weights that it reads.
        in_place: The ranks that share the model have the same memory for weights.
    """

    def __init__(
        self,
        name: str,
        blocks: Sequence[Block],
        options: SessionOptions,
        bindings: Sequence[OptimizerBinding],
        rules: StepRules,
        profile: ModelProfile | None = None,
        *,
        kept_every: int = 0,
        scale_bytes: int = 0,
        reading_bytes: int = 0,
        in_place: bool = False,
    ) -> None:
        self._reading_bytes = reading_bytes
        self._profile, self._kept_every, self._scale_bytes = profile, kept_every, scale_bytes
        self._blocks, self._options, self._bindings, self._rules = blocks, options, bindings, rules
        self._ranks, self._in_place = options.own.ranks, in_place
        self.runs = rank_rules.rules(self._ranks, gathers_in_place=in_place, shared_memory=options.device is None)
        self.owners: Owners = owners_of(bindings)
        self.chunk_bytes = self._chunk_bytes()
        self.model = self._shape(name)

    def _shape(self, name: str) -> ModelShape:
        rows = []
        known = {} if self._profile is None else {b.name: b for b in self._profile.blocks}
        for block in self._blocks:
            trainable = [p for p in block.params() if id(p) in self.owners]
            sizes = BlockShape(
                name=block.name,
                num_params=sum(p.slice_elements for p in block.parts),
                num_trainable_params=sum(p.numel() for p in trainable),
                weight_bytes=sum(p.weight_bytes // p.own.ranks for p in block.parts),
                gradient_bytes=self._gradient_bytes(block),
                state_bytes=sum(p.slice_elements * _state_bytes(p, self.owners) for p in block.parts),
                pinned=block.spec.pinned,
                in_memory=any(self.owners[id(p)].capability is Rule.WHOLE for p in trainable),
                in_place_bytes=sum(p.weight_bytes // p.own.ranks for p in block.parts if p.in_place is not None),
                copied="; ".join(dict.fromkeys(p.copied for p in block.parts if p.copied and p.slots == 1 and p.in_place is None)),
            )
            if (seen := known.get(block.name)) is not None:
                sizes = replace(
                    sizes, activation_bytes=seen.activation_bytes, boundary_bytes=seen.boundary_bytes,
                    transient_bytes=seen.transient_bytes, cast_bytes=seen.cast_bytes, operators=seen.operators,
                )  # fmt: skip
            rows.append(sizes)
        return ModelShape(name=name, blocks=tuple(rows), kept_every=self._kept_every)

    def _gradient_bytes(self, block: Block) -> int:
        """Gradients that leave a device have memory with the layout of their part and its gaps."""
        if not self._bindings:
            return 0
        if self._options.device is None and self._ranks == 1:
            return sum(p.nbytes for p in block.params() if p.requires_grad)
        trained = [part for part in block.parts if any(p.requires_grad for p in part.params)]
        return sum(part.slice_elements * part.dtype.itemsize for part in trained)

    def _chunk_bytes(self) -> int:
        """Enough for every part with state: a model may be validated first, or unfrozen later."""
        chunks = [64 * 1024]
        for part in [part for block in self._blocks for part in block.parts]:
            trained = len(adam.state_names(part.dtype)) if part.dtype in adam.DTYPES else 0
            for num_state in {0, trained}:
                chunks.append(chunk_bytes(geometry_of(part, 0, num_state=num_state, weights=Tier.DISK, state=Tier.DISK)))
        return max(chunks)

    def first_that_fits(self, plans: Sequence[Callable[[ModelShape], Plan]], *, present_bytes: int) -> Placement:
        """The first of the plans that the budget allows, with what is in memory already.

        Raises:
            OutOfMemoryBudgetError: None fits. The error is that of the plan that needs least, and
                says what the others need.
            UnsupportedError: None runs with these optimizers. The error is that of the first.
        """
        too_large: list[OutOfMemoryBudgetError] = []
        names: list[str] = []
        unsupported: list[UnsupportedError] = []
        for plan in (make(self.model) for make in plans):
            try:
                return self.place(plan, present_bytes=present_bytes)
            except OutOfMemoryBudgetError as error:
                too_large.append(error)
                names.append(plan.name)
            except UnsupportedError as error:
                unsupported.append(error)
        if not too_large:
            raise unsupported[0]
        last = too_large[-1]  # bytes of different tiers cannot be compared
        same = [error for error in reversed(too_large) if error.tier == last.tier and error.needed_bytes]
        least = min(same, key=lambda error: error.needed_bytes, default=last)
        others = [
            f"plan {name!r} needs {format_bytes(error.needed_bytes)} of {error.tier} memory"
            for name, error in zip(names, too_large, strict=True)
            if error is not least and error.needed_bytes
        ]
        if not others:
            raise least
        message = f"{least}\nThe other plans do not fit either: {'; '.join(others)}."
        raise OutOfMemoryBudgetError(message, least.needed_bytes, least.tier)

    def place(self, plan: Plan, *, present_bytes: int) -> Placement:
        """Resolves a plan, and refuses one that cannot run.

        Raises:
            OutOfMemoryBudgetError: The plan does not fit ``host_memory`` or ``device_memory``.
            ConfigError: The plan does not fit the model.
            UnsupportedError: An optimizer cannot run out of core.
        """
        plan = self.fitting(plan)
        self.check_optimizers(plan)
        by = tuple(self._rule_of(binding, plan) for binding in self._bindings)
        rules = self._rules
        if Rule.WHOLE in by:
            rules = replace(rules, deferred=rules.deferred or "the optimizer updates all its parameters at once")
        rules = replace(rules, keep_gradients=rules.keep_gradients or bool(rules.deferred))
        rules = replace(rules, speculates=rules.speculates and self._may_speculate(plan, by))
        budget = host_budget(self._options, present_bytes, profiled=self._profile is not None)
        if self._options.collectives is not None:  # free memory differs from one moment to the next
            budget = int(min(share for (share,) in self._options.collectives.agree([budget])))
        self._check_gather(plan)
        self._check_device(plan)  # ranks that are refused, and ranks that are not, have agreed before
        needs = self.needs(plan, rules)
        if rules.speculates and self.least_bytes(plan, needs) > budget:  # speculation needs copies of weights until the verdict
            rules = replace(rules, speculates=False)
            needs = self.needs(plan, rules)
        waiting = self.needs(plan, replace(rules, deferred="a batch may not fit"))
        device, device_memory, beside = self._options.device, self.device_memory, None
        if self.is_unified and device is not None and device_memory is not None:
            most = waiting if self.least_bytes(plan, waiting) <= budget else needs
            most = replace(most, device=self._apart(plan, most)) if device.partitioned else most
            known = self._profile is not None
            device_memory, budget = divided(plan, most, device_memory=device_memory, memory=budget, profiled=known)
            beside = device_rows(plan, most)
        self._check_reading(plan, needs, budget)
        room = cache_sizes_in_budget(
            plan, needs, host_memory=budget, given=self._options.host_memory is not None,
            profiled=self._profile is not None, device_memory=device_memory, beside=beside,
            less_on_disk=lambda: self._needs_less_on_disk(self.least_bytes(plan, needs)), tied_to_device=self._is_tied_to_device,
            ranks=self._ranks,
        )  # fmt: skip
        may_defer, least_cache_bytes = least_bytes(waiting) <= budget, room.host_cache_bytes
        if may_defer and device_memory is not None:  # else gradients come beside activations (GradientRoom)
            room, least_cache_bytes = _beside_all_gradients(room, needs, waiting, budget)
        arena_bytes = 0
        cache_bytes = room.device_cache_bytes
        if device is not None and device.partitioned and device_memory is not None and cache_bytes is not None:
            cache_bytes, arena_bytes = self._partitioned(plan, needs, cache_bytes, device_memory)
            room = replace(room, device_cache_bytes=cache_bytes)
        if self._ranks > 1 and device is None:
            room = replace(room, device_cache_bytes=whole_bytes(plan, self.model, self._ranks, in_place=self._in_place))
        if plan.update_order is UpdateOrder.AFTER_BACKWARD:
            rules = replace(rules, deferred=rules.deferred or "the plan says so")
        self._check_schedule(plan, room, rules)
        geometries = self._geometries(plan)
        return Placement(
            plan=plan,
            rules=rules,
            by=by,
            cache_bytes=room.host_cache_bytes,
            least_cache_bytes=least_cache_bytes,
            device_cache_bytes=room.device_cache_bytes or 0,
            arena_bytes=arena_bytes,
            staging_bytes=room.staging_bytes,
            host_memory=None if self._options.host_memory is None else budget,
            activation_bytes=needs.host[Purpose.ACTIVATIONS],
            geometries=geometries,
            may_defer=may_defer,
            swaps_to_disk=any(Saved.SWAP_DISK in policies_of(p) for p in plan.blocks),
            swapped_bytes=needs.disk[Purpose.ACTIVATIONS],
            later_bytes=self._later_bytes(plan),
            num_blobs=sum(1 for _ in self._blobs(plan)),
        )

    def _check_reading(self, plan: Plan, needs: Needs, budget: int) -> None:
        """Refuses a budget in which the weights of a block cannot be quantized as they are read."""
        held = {purpose: needs.host[purpose] for purpose in (Purpose.CONSTANT, Purpose.WEIGHTS, Purpose.STAGING)}
        rows = {**held, Purpose.CACHE: max(needs.host_caches, default=0), Purpose.READING: self._reading_bytes}
        if self._reading_bytes and total_bytes(rows) > max(budget, least_bytes(needs)):
            raise too_small(
                plan.name, rows, host_memory=budget, given=self._options.host_memory is not None,
                profiled=True, less_on_disk=self._needs_less_on_disk(self.least_bytes(plan, needs)),
            )  # fmt: skip

    def fitting(self, plan: Plan) -> Plan:
        """The plan, resolved. Weights without an anchor of their own stay in memory in any plan.

        Raises:
            ConfigError: The plan does not fit the model.
        """
        plan = plan.resolve(b.name for b in self.model.blocks)
        found = fitted(plan, self.model, device=self.device_memory is not None or self._ranks > 1)
        rows = zip(self._blocks, plan.blocks, found.blocks, strict=True)
        moved = [(block, new) for block, old, new in rows if old.weights is not new.weights]
        outside = [new for block, new in moved if block.rest is None]
        where = f"in {moved[0][1].weights.value} memory" if moved and self._ranks == 1 else "whole on each rank"
        if outside:
            names = ", ".join(p.name for p in outside)
            log.info("The weights of %s are used outside repeated blocks, so they stay %s.", names, where)
        if trained := [new for block, new in moved if block.rest is not None]:
            log.info("The trained weights of %d blocks stay %s.", len(trained), where)
        return found

    def check_optimizers(self, plan: Plan) -> None:
        """Refuses a resolved plan with blocks that their optimizers cannot update where they are.

        Raises:
            UnsupportedError: Names plan, block and optimizer.
        """
        for block, placed in zip(self._blocks, plan.blocks, strict=True):
            owners = [self.owners[id(p)] for p in block.params() if id(p) in self.owners]
            foreign = [b for b in owners if b.capability is not Rule.NATIVE]
            if self._ranks > 1 and (other := next((b for b in foreign if b.capability is Rule.WHOLE), None)):
                raise UnsupportedError(
                    f"optimizer {blockwise.why_whole(other.optimizer)}. {self._ranks} ranks share the parameters of block "
                    f"{block.name!r}, and each updates some. Or use an optimizer of torch.optim."
                )
            if self._ranks > 1 and foreign and Tier.DISK in (placed.weights, placed.state):
                raise UnsupportedError(
                    f"plan {plan.name!r} places block {block.name!r} on disk, but optimizer {type(foreign[0].optimizer).__name__} "
                    f'updates slices by its own code, in memory. Use plan="host", or {adam.SUPPORTED}.'
                )
            if not self.runs.allows(placed, trained=bool(owners)):
                raise UnsupportedError(
                    f"plan {plan.name!r} has weights={placed.weights.value!r}, state={placed.state.value!r}, "
                    f"update={placed.update.value!r} for block {block.name!r}, which {self._ranks} ranks share"
                    f"{'' if self._in_place else ' without having the same memory (the log says why)'}. "
                    f'Allowed: {self.runs.text}, as in plan "host".'
                )
            if self._ranks > 1 and foreign and placed.update is UpdateLane.DEVICE:
                raise UnsupportedError(
                    f"plan {plan.name!r} has update='device' for block {block.name!r}, but optimizer "
                    f'{type(foreign[0].optimizer).__name__} updates slices by its own code, on the CPU. Use plan="host", or '
                    f"{adam.SUPPORTED}."
                )
            there = (placed.weights, placed.state, placed.update) == (Tier.DEVICE, Tier.DEVICE, UpdateLane.DEVICE)
            if self._ranks == 1 and foreign and self.device_memory is not None and not there:
                name = type(foreign[0].optimizer).__name__
                raise UnsupportedError(
                    f"plan {plan.name!r} has weights={placed.weights.value!r}, state={placed.state.value!r}, "
                    f"update={placed.update.value!r} for block {block.name!r}, but optimizer {name} updates it by its own code, on "
                    f"the device. Allowed with it: weights, state and update on 'device'. Use plan=\"resident\", or "
                    f"{adam.SUPPORTED}."
                )
            whole = [b for b in owners if b.capability is Rule.WHOLE]
            if whole and Tier.DISK in (placed.state, placed.weights):
                why = blockwise.why_whole(whole[0].optimizer)
                raise UnsupportedError(
                    f"plan {plan.name!r} places block {block.name!r} on disk, but optimizer {why}; "
                    f'else use plan="host" or an optimizer of torch.optim.'
                )

    def _needs_less_on_disk(self, host_bytes: int) -> bool:
        """Whether plan "disk" runs with these optimizers and needs less of the budget."""
        tiers = [Tier.HOST if b.in_memory else Tier.DISK for b in self.model.blocks]
        rows = (BlockPlan(name=b.name, weights=t, state=t) for b, t in zip(self.model.blocks, tiers, strict=True))
        plan = fitted(Plan(name="disk", blocks=tuple(rows)), self.model, device=self.device_memory is not None)
        try:
            self.check_optimizers(plan)
        except UnsupportedError:
            return False
        return self.least_bytes(plan, self.needs(plan)) < host_bytes

    def least_bytes(self, plan: Plan, needs: Needs) -> int:
        """The least of the budget that a plan needs, in bytes; it may be for the device too."""
        return least_bytes(needs) + (total_bytes(device_rows(plan, needs)) if self.is_unified else 0)

    @property
    def _is_tied_to_device(self) -> bool:
        """Whether an optimizer runs by its own code on a device: all it uses must be there."""
        foreign = any(binding.capability is not Rule.NATIVE for binding in self._bindings)
        return self._ranks == 1 and self.device_memory is not None and foreign

    def _rule_of(self, binding: OptimizerBinding, plan: Plan) -> Rule:
        """Without a disk, an optimizer that the engine does not know runs whole."""
        pairs, members = zip(self._blocks, plan.blocks, strict=True), {id(p) for p in binding.params()}  # they may train later
        mine = [p for b, p in pairs if any(id(q) in members for q in b.params())]
        on_disk = any(Tier.DISK in (p.weights, p.state) for p in mine)  # never on a device with memory of its own: checked
        as_ever = not on_disk and not (self._options.wants_steps and self._options.device is None) and self._ranks == 1
        return Rule.WHOLE if binding.capability is Rule.BLOCKWISE and as_ever else binding.capability

    def _may_speculate(self, plan: Plan, by: Sequence[Rule]) -> bool:
        """Whether any update can be taken back."""
        placed = placements(plan, self.model, device=self.device_memory is not None, ranks=self._ranks)
        revocable = any(p.revocable for p in placed)
        return revocable and plan.update_order is UpdateOrder.OVERLAPPED and Rule.NATIVE in by

    @property
    def is_unified(self) -> bool:
        """Whether the budget is for the host and for a device in its memory."""
        return self._options.is_unified

    def needs(self, plan: Plan, rules: StepRules | None = None) -> Needs:
        """The memory that a resolved plan needs; with activations once a batch has been profiled.

        Without ``rules`` gradients are used as in the loop, without speculation.
        """
        rules = rules or replace(self._rules, speculates=False)
        waits = Updates.REDONE if rules.speculates else Updates.AFTER_VERDICT
        shared = self.device_memory is None
        measured = 0 if self._profile is None else self._profile.constant_device_bytes
        on_device = max(measured, self._scale_bytes)
        constant = Constant(host_bytes=self._scale_bytes) if shared else Constant(device_bytes=on_device)
        return needs_of_shape(
            plan, self.model, shared_memory=shared, constant=constant,
            staging_bytes=staging_bytes(self._options.engine, self.chunk_bytes),
            updates=waits if rules.deferred or rules.accumulates else Updates.IN_BACKWARD, buckets=rules.buckets, ranks=self._ranks,
            gathers_in_place=self._in_place,
        )  # fmt: skip

    def _apart(self, plan: Plan, needs: Needs) -> dict[Purpose, int]:
        """What a device needs if weights and state have memory of their own there."""
        moves = [p.visiting_bytes for p in placements(plan, self.model, device=True, ranks=self._ranks)]
        rows = dict(needs.device)
        rows[Purpose.WEIGHTS] += 2 * ALIGNMENT_BYTES * sum(len(block.parts) for block in self._blocks)
        if Purpose.RANKS in rows:
            rows[Purpose.RANKS] += alignment_bytes([block.parts for block in self._blocks])
        if not rows[Purpose.ACTIVATIONS]:  # then state uses their memory at the peak, but cannot be there
            rows[Purpose.ACTIVATIONS] = rows[Purpose.MOVING] if self._profile is not None else 0
        rows[Purpose.MOVING] = sum(sorted(moves, reverse=True)[:DEVICE_STATES])
        return rows

    def _partitioned(self, plan: Plan, needs: Needs, cache_bytes: int, device_memory: int) -> tuple[int, int]:
        """Divides a device between memory reserved for weights and state, and torch's allocator.

        Returns the bytes of the cache, at most ``cache_bytes``, and the reserved bytes.

        Raises:
            OutOfMemoryBudgetError: The device is too small for both.
        """
        placed = placements(plan, self.model, device=True, ranks=self._ranks)
        native = {block.index for block in self._blocks if any(native_state(part, self.owners) for part in block.parts)}
        ours = sum(p.shape.state_bytes for i, p in enumerate(placed) if p.plan.state is Tier.DEVICE and i in native)
        rows = self._apart(plan, needs)
        least = max((*needs.device_caches, 0)) if plan.device_cache_bytes is None else cache_bytes
        cache = min(cache_bytes, device_memory - total_bytes(rows))
        if cache < least:
            rows[Purpose.CACHE] = least
            raise device_too_small(
                plan.name, rows, device_memory=device_memory, profiled=self._profile is not None,
                tied_to_device=self._is_tied_to_device,
            )  # fmt: skip
        ranks = rows.get(Purpose.RANKS, 0)
        set_aside = rows[Purpose.WEIGHTS] + ours + rows[Purpose.MOVING] + ranks + cache  # other state is in torch's memory
        # First fit leaves gaps between blocks of different sizes.
        spare = min(max((*needs.device_caches, 0)), device_memory - total_bytes(rows) - cache)
        return cache, set_aside + spare

    @property
    def device_memory(self) -> int | None:
        """Bytes of a device with memory of its own that plans may use; ``None`` without one."""
        if self._options.device is None:
            return None
        return min(self._options.device.memory_bytes, self._options.device_memory or self._options.device.memory_bytes)

    def _check_device(self, plan: Plan) -> None:
        """Refuses a plan whose device tier exceeds ``device_memory``, if the device is the host."""
        allowed = self._options.device_memory if self.device_memory is None else None
        need = 0
        for block, placed in zip(self.model.blocks, plan.blocks, strict=True):
            need += block.weight_bytes + block.gradient_bytes if placed.weights is Tier.DEVICE else 0
            need += block.state_bytes if placed.state is Tier.DEVICE else 0
        if allowed is not None and need > allowed:
            raise OutOfMemoryBudgetError(
                f"plan {plan.name!r} puts {format_bytes(need)} of weights, gradients and optimizer state on the device; "
                f'device_memory allows {format_bytes(allowed)}. Raise device_memory, or choose plan="host" or plan="disk".'
            )

    def _check_gather(self, plan: Plan) -> None:
        """Refuses devices of several nodes that are to exchange; ``lower`` refuses other cases."""
        collectives = self._options.collectives
        if plan.gather is Gather.DEVICE and collectives is not None and collectives.nodes > 1:
            raise UnsupportedError(
                f"plan {plan.name!r} has gather='device'; devices exchange weights and gradients within one node, and there are "
                f"{collectives.nodes}. Allowed: 'host'."
            )

    def _check_schedule(self, plan: Plan, room: CacheSizes, rules: StepRules) -> None:
        """Lowers the plan, so that its refusals come before anything is loaded."""
        on_device, capacity = room.device_cache_bytes, room.host_cache_bytes
        on_host = self._ranks > 1 and self.device_memory is None
        device = None
        if on_device is not None:
            device = DeviceRoom(capacity_bytes=on_device, ranks=self._ranks, shared_memory=on_host, gathers_in_place=self._in_place)
        waits = (Updates.AFTER_VERDICT, *((Updates.SPECULATIVE, Updates.REDONE) if rules.speculates else ()))
        for updates in waits if rules.deferred else (Updates.IN_BACKWARD,):
            signature = StepSignature(
                order=tuple(range(len(self._blocks))),
                training=bool(self._bindings),
                updates=updates if self._bindings else Updates.NONE,
            )
            schedule = lower(plan, self.model, signature, resident=frozenset(), capacity_bytes=capacity, device=device)
            check(schedule, plan, self.model, capacity_bytes=capacity, device_capacity_bytes=on_device)

    def _geometries(self, plan: Plan) -> dict[Part, PartGeometry]:
        geometries: dict[Part, PartGeometry] = {}
        for block, placed in zip(self._blocks, plan.blocks, strict=True):
            for part in block.parts:
                num_state = native_state(part, self.owners)
                if num_state or placed.weights is Tier.DISK:
                    geometries[part] = geometry_of(
                        part, len(geometries), num_state=num_state, weights=placed.weights, state=placed.state
                    )
        return geometries

    def _later_bytes(self, plan: Plan) -> int:
        return 2 * sum(_state_bytes(part, self.owners) * part.num_elements for part in self._blobs(plan))

    def _blobs(self, plan: Plan) -> Iterator[Part]:
        """Parts with state that the engine does not know, in files from the first step on."""
        for block, placed in zip(self._blocks, plan.blocks, strict=True):
            for part in block.parts:
                if (placed.state is Tier.DISK or self._options.wants_steps) and not native_state(part, self.owners):
                    yield part


def policies_of(placed: BlockPlan) -> tuple[Saved, ...]:
    """The policies for what the block's forward saves."""
    return placed.saved, placed.boundary, *placed.operators.values()


def least_bytes(needs: Needs) -> int:
    """The least host memory, in bytes."""
    return total_bytes(needs.host) + max(needs.host_caches, default=0)


def _beside_all_gradients(room: CacheSizes, needs: Needs, waiting: Needs, budget: int) -> tuple[CacheSizes, int]:
    """Staging and cache in a batch whose updates wait, so that all gradients are in memory.

    Staging has one size throughout: it reads ahead with what the largest block leaves then, too.

    Returns the room of other batches, and the bytes of the cache in such a batch.
    """
    left, least = budget - total_bytes(waiting.host), needs.host[Purpose.STAGING]
    ahead = min(room.staging_bytes - least, left - max(needs.host_caches, default=0))
    return replace(room, staging_bytes=least + ahead), min(room.host_cache_bytes, left - ahead)


def native_state(part: Part, owners: Owners) -> int:
    """State arrays that the engine keeps for a part; 0 if it does not update the part."""
    rules = {owners[id(p)].capability for p in part.params if id(p) in owners}
    return len(adam.state_names(part.dtype)) if rules == {Rule.NATIVE} else 0


def set_slots(blocks: Sequence[Block], owners: Owners) -> None:
    """As a fit begins: parts without a parameter that trains get one slot on disk."""
    for part in [part for block in blocks for part in block.parts]:
        part.slots = 2 if any(id(p) in owners for p in part.params) else 1
        part.in_place = part.in_place if part.slots == 1 else None


def _state_bytes(part: Part, owners: Owners) -> int:
    rules = {owners[id(p)].capability for p in part.params if id(p) in owners}
    if rules == {Rule.NATIVE}:
        return 4 * len(adam.state_names(part.dtype))
    return _UNKNOWN_STATE_BYTES if rules else 0


def check_owners(blocks: Sequence[Block], owners: Owners) -> None:
    """Refuses parts that the engine and another optimizer update: the engine's state is per part.

    Parts are cut by optimizer as a fit begins, so such a part was frozen then.

    Raises:
        UnsupportedError: Names a parameter of each.
    """
    for part in [part for block in blocks for part in block.parts]:
        found = {owners[id(p)]: name for name, p in zip(part.names, part.params, strict=True) if id(p) in owners}
        if len({binding.capability for binding in found}) > 1:
            (one, a), (other, b), *_ = ((type(binding.optimizer).__name__, name) for binding, name in found.items())
            raise UnsupportedError(
                f"{a!r} and {b!r} were frozen as the fit began, so they were placed together; now they have joined {one} and "
                f"{other}, which update them in different ways. Give both to their optimizers in configure_optimizers(): a frozen "
                f"parameter in an optimizer stays as it is."
            )
