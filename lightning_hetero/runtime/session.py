"""One model under the runtime, from adoption to release: cuts it, places it, opens its tiers, and gives it back.

The order matters and is the same for every plan: :meth:`Session.adopt` (blocks, reserved memory) → the optimizers are made →
:meth:`Session.start` (plan, budget, files, anchors) → training → :meth:`Session.stop`.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_hetero._native import BlockGeometry, file_bytes
from lightning_hetero.errors import HeteroError, UnsupportedError
from lightning_hetero.ir.model import BlockShape, ModelShape
from lightning_hetero.ir.plan import Plan, Tier
from lightning_hetero.lowering.budget import HostShares, check_device, host_needs, share_out
from lightning_hetero.optim import adam
from lightning_hetero.runtime.anchors import observe, observe_gradient
from lightning_hetero.runtime.door import OffloadedParameter, materialize, restore
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.heap import Heap
from lightning_hetero.runtime.initialize import check_initializable, in_order_of_construction, initialize, initialize_buffers
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule
from lightning_hetero.runtime.recorder import Recorder
from lightning_hetero.runtime.updates import Updater
from lightning_hetero.store.blocks import Block, Part, back_to_meta, bind
from lightning_hetero.store.directory import StoreDirectory
from lightning_hetero.store.partition import BlockCls, partition
from lightning_hetero.store.tiers import EngineOptions, TierStore, chunk_bytes, geometry_of, staging_bytes
from lightning_hetero.units import format_bytes

log = logging.getLogger(__name__)

_UNKNOWN_STATE_BYTES = 8  # per element, for optimizers whose state is known only after their first step


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What the user may choose; see ``HeteroOffloadStrategy``."""

    plan: Callable[[ModelShape], Plan]
    block_cls: BlockCls | None = None
    host_memory: int | None = None
    device_memory: int | None = None
    disk_path: Path | None = None
    disk_capacity: int | None = None
    allow_tmpfs: bool = False
    allow_rotational: bool = False
    trace: bool = False
    poison: bool = False
    on_patched: Callable[[Tensor], object] = id  # told of values that were copied from a checkpoint
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """How the training loop uses gradients, which decides when updates may run.

    Attributes:
        deferred: Why updates wait until ``optimizer.step()`` knows all gradients; empty: they run during backward.
        accumulates: Gradients live through several batches.
        keep_gradients: ``param.grad`` stays after the step.
        waits: ``optimizer.step()`` waits for the updates.
        clip_value: Clip by value at this, during backward.
    """

    deferred: str = ""
    accumulates: bool = False
    keep_gradients: bool = False
    waits: bool = False
    clip_value: float | None = None


class Session:
    """The runtime of one model.

    Args:
        root: The model.
        options: The user's choices.
    """

    def __init__(self, root: nn.Module, options: SessionOptions) -> None:
        self.root = root
        self.options = options
        self.bindings: list[OptimizerBinding] = []
        self.recorder = Recorder(enabled=options.trace)
        self._handles: list[RemovableHandle] = []
        check_initializable(root)
        specs = partition(root, options.block_cls)
        self._made_on_meta = frozenset(n for s in specs for n, p in s.params.items() if p.is_meta)
        self._unset = {s.name for s in specs if not self._made_on_meta.isdisjoint(s.params)}
        self._elsewhere = {id(p) for s in specs for p in s.params.values() if isinstance(p, OffloadedParameter)}
        self.blocks: list[Block] = bind(root, specs, away=lambda p: id(p) in self._elsewhere)
        self.executor: Executor | None = None
        self.store: TierStore | None = None
        self._started = False
        self._disk_bytes = 0
        self._final_report: dict[str, int] = {}

    # ---- start ------------------------------------------------------------------------------------------------------------

    def start(self, optimizers: Sequence[Optimizer] | None, rules: StepRules, *, default_root: Path) -> None:
        """Places the model and starts the engine; the weights of blocks on disk leave memory as far as the budget asks.

        Args:
            optimizers: The optimizers of a fit; ``None`` to evaluate. A parked session then keeps the optimizers that it has.
            rules: How gradients are used.
            default_root: Where files go by default.

        Raises:
            OutOfMemoryBudgetError: The plan does not fit ``host_memory`` or ``device_memory``.
            OutOfDiskError: It does not fit the disk or ``disk_capacity``.
            ConfigError: The plan does not fit the model, or the directory cannot be used.
            UnsupportedError: An optimizer cannot run out of core.
        """
        if optimizers is not None:
            self.bindings = [OptimizerBinding(o, on_step=self._on_step, on_read=self.drain, on_zero=self.drain) for o in optimizers]
        owners = {id(p): b for b in self.bindings for p in b.params()}
        model = self.shape(owners)
        plan = self._fitting(self.options.plan(model).resolve(b.name for b in model.blocks), model)
        self._check_rules(plan, owners)
        for block, placed in zip(self.blocks, plan.blocks, strict=True):
            block.plan = placed
        self._choose_rules(owners)
        if any(b.rule is Rule.WHOLE for b in self.bindings):
            rules = replace(rules, deferred=rules.deferred or "the optimizer updates all its parameters at once")
        geometries = self._geometries(owners)
        parked = self.store is not None
        chunk = self.store.chunk_bytes_max if self.store else self._chunk_bytes()
        shares = self._shares(plan, model, rules, chunk)
        capacity = shares.cache
        if self.store is None:
            directory = self._directory(plan, geometries, owners, default_root)
            num_blocks = 8 * len(geometries) + 64  # unfreezing, and state that only its optimizer knows, take more files
            staging = staging_bytes(self.options.engine, chunk) + shares.read_ahead
            engine = replace(self.options.engine, staging_bytes=staging)
            self.store = TierStore(engine, directory=directory, num_blocks=num_blocks, chunk_bytes_max=chunk)
            self.store.on_patched = self.options.on_patched
        present = sum(p.weight_bytes for b in self.blocks if b.resident and b.name not in self._unset for p in b.parts)
        heap = Heap(self.options.host_memory, present_bytes=present)
        updater = Updater(
            self.store,
            clip_value=rules.clip_value,
            keep_gradients=rules.keep_gradients or bool(rules.deferred),
            waits=rules.waits,
        )
        updater.own(self.bindings)
        self.executor = Executor(
            self.blocks, plan=plan, model=model, store=self.store, updater=updater, capacity_bytes=capacity,
            deferred=bool(rules.deferred), recorder=self.recorder, heap=heap, poison=self.options.poison,
        )  # fmt: skip
        if not parked or optimizers is not None:
            self._open(geometries, capacity)
            homes = [(p, part, i) for b in self.blocks for part in b.parts for i, p in enumerate(part.params)]
            for binding in self.bindings:
                binding.place(self.store, homes)
        self.store.commit()
        self._handles = observe(self.blocks, self.executor)
        self._started = True
        self._announce(plan, rules, capacity)

    def shape(self, owners: dict[int, OptimizerBinding]) -> ModelShape:
        """The blocks' sizes, given which parameters are optimized by whom."""
        rows = []
        for block in self.blocks:
            trainable = [p for p in block.params() if id(p) in owners]
            state = sum(p.num_elements * _state_bytes(p, owners) for p in block.parts)
            rows.append(
                BlockShape(
                    name=block.name,
                    num_params=sum(p.num_elements for p in block.parts),
                    num_trainable_params=sum(p.numel() for p in trainable),
                    weight_bytes=sum(p.weight_bytes for p in block.parts),
                    gradient_bytes=sum(p.nbytes for p in block.params() if p.requires_grad),
                    state_bytes=state,
                    pinned=block.spec.pinned,
                )
            )
        return ModelShape(name=type(self.root).__name__, blocks=tuple(rows))

    def _fitting(self, plan: Plan, model: ModelShape) -> Plan:
        """Weights that have no anchor of their own stay in memory whatever a pattern of the plan says."""
        pinned = [b.name for b, p in zip(model.blocks, plan.blocks, strict=True) if b.pinned and p.weights is Tier.DISK]
        if pinned:
            log.info("The weights of %s are used outside repeated blocks, so they stay in host memory.", ", ".join(pinned))
        return replace(plan, blocks=tuple(replace(p, weights=Tier.HOST) if p.name in pinned else p for p in plan.blocks))

    def _choose_rules(self, owners: dict[int, OptimizerBinding]) -> None:
        """An optimizer that the engine does not know runs as it always does, unless something of it lives on disk."""
        for binding in self.bindings:
            mine = [b for b in self.blocks if any(owners.get(id(p)) is binding for p in b.params())]
            if binding.rule is Rule.BLOCKWISE and not any(Tier.DISK in (b.plan.weights, b.plan.state) for b in mine):
                binding.rule = Rule.WHOLE

    @property
    def on_disk(self) -> bool:
        """Whether anything lives on disk."""
        return self.store is not None and self.store.directory is not None

    def _check_rules(self, plan: Plan, owners: dict[int, OptimizerBinding]) -> None:
        for block, placed in zip(self.blocks, plan.blocks, strict=True):
            whole = [owners[id(p)] for p in block.params() if id(p) in owners and owners[id(p)].rule is Rule.WHOLE]
            if whole and Tier.DISK in (placed.state, placed.weights):
                name = type(whole[0].optimizer).__name__
                raise UnsupportedError(
                    f"plan {plan.name!r} places block {block.name!r} on disk, but optimizer {name} is not torch's, so it is not "
                    f"known to update parameters independently. If it does, set {name}.hetero_blockwise = True; else use "
                    f'plan="host" or an optimizer of torch.optim.'
                )

    def _geometries(self, owners: dict[int, OptimizerBinding]) -> dict[Part, BlockGeometry]:
        """Geometries of the parts that the engine sees: native updates, and weights on disk."""
        geometries: dict[Part, BlockGeometry] = {}
        for block in self.blocks:
            for part in block.parts:
                num_state = _num_state(part, owners)
                if num_state or block.weights_on_disk:
                    geometries[part] = geometry_of(
                        part, len(geometries), num_state=num_state, weights=block.plan.weights, state=block.plan.state
                    )
        return geometries

    def _shares(self, plan: Plan, model: ModelShape, rules: StepRules, chunk: int) -> HostShares:
        check_device(plan, model, self.options.device_memory)
        on_disk = any(Tier.DISK in (p.weights, p.state) for p in plan.blocks)
        all_gradients = bool(rules.deferred) or rules.accumulates
        staging = staging_bytes(self.options.engine, chunk) if on_disk else 0
        needs = host_needs(plan, model, staging=staging, all_gradients=all_gradients)
        if self.options.host_memory is not None:
            return share_out(plan, needs, host_memory=self.options.host_memory, source="host_memory")
        # Weights are in memory already, so only what a block needs on top counts against what is free.
        free = psutil.virtual_memory().available + needs.weights + (0 if self._unset else needs.all_cached)
        return share_out(plan, needs, host_memory=free, source="the machine's free memory")

    def _chunk_bytes(self) -> int:
        """Large enough for every part once it is trained: a model may be validated first, or unfrozen later."""
        chunks = [64 * 1024]
        for part in [part for block in self.blocks for part in block.parts]:
            trained = len(adam.state_names(part.dtype)) if part.dtype in adam.DTYPES else 0
            for num_state in {0, trained}:
                chunks.append(chunk_bytes(geometry_of(part, 0, num_state=num_state, weights=Tier.DISK, state=Tier.DISK)))
        return max(chunks)

    def _directory(
        self, plan: Plan, geometries: dict[Part, BlockGeometry], owners: dict[int, OptimizerBinding], default_root: Path
    ) -> StoreDirectory | None:
        placements = {t for p in plan.blocks for t in (p.weights, p.state)}
        if Tier.DISK not in placements:
            return None
        self._disk_bytes = sum(file_bytes(g) * g.num_slots for g in geometries.values())
        # State that only its optimizer's own code knows gets files at the first step; it has to find room then.
        later = sum(
            _state_bytes(part, owners) * part.num_elements
            for block in self.blocks
            for part in block.parts
            if block.plan.state is Tier.DISK and not _num_state(part, owners)
        )
        default_root.mkdir(parents=True, exist_ok=True)
        # The model alone: the same one may come with another plan, without an optimizer, or with frozen parameters.
        rows = [
            {"block": b.name, "params": {n: [str(p.dtype), list(p.shape)] for n, p in b.spec.params.items()}} for b in self.blocks
        ]
        return StoreDirectory.create_or_adopt(
            self.options.disk_path,
            default_root=default_root,
            manifest={"model": type(self.root).__name__, "blocks": rows},
            allow_tmpfs=self.options.allow_tmpfs,
            allow_rotational=self.options.allow_rotational,
            needed_bytes=self._disk_bytes + 2 * later,
            capacity_bytes=self.options.disk_capacity,
        )

    def _open(self, geometries: dict[Part, BlockGeometry], capacity: int) -> None:
        """Opens files block by block, writes the weights there, and keeps in memory what fits the budget."""
        assert self.store is not None
        assert self.executor is not None
        used = 0
        for block in in_order_of_construction(self.root, self.blocks):
            if block.name in self._unset:
                initialize(block, self._made_on_meta)
            self._take_over(block)
            self.executor.bring(block)  # a parked model's weights are on disk
            for part in block.parts:
                self._open_part(part, geometries.get(part))
            if block.weights_on_disk:
                size = sum(p.weight_bytes for p in block.parts)
                self.executor.hide(block)
                if used + size <= capacity:
                    used += size
                else:
                    self.executor.release(block)
                    for part in block.parts:
                        self.store.barrier(part)
        initialize_buffers(self.root)
        self._unset = set()

    def _take_over(self, block: Block) -> None:
        """Brings weights into the block's memory that another Trainer left on its disk, where they stay as they are."""
        for part in block.parts:
            for i, param in enumerate(part.params):
                if id(param) in self._elsewhere:
                    memory = part.memory(i)
                    memory.copy_(materialize(param))
                    restore(param)
                    param.data = memory
                    self._elsewhere.discard(id(param))

    def _open_part(self, part: Part, geometry: BlockGeometry | None) -> None:
        """Opens the part with its weights as they are in memory and no state."""
        assert self.store is not None
        if part.native is not None and geometry is not None and replace(part.native.geometry, id=geometry.id) == geometry:
            self.store.reset(part)
        else:
            if part.native is not None:
                self.store.discard(part)
            if geometry is not None:
                self.store.open(part, replace(geometry, id=self.store.free_id(geometry.id)))
        if part.native is not None:
            self.store.flush(part)

    def _announce(self, plan: Plan, rules: StepRules, capacity: int) -> None:
        on_disk = sum(b.weights_on_disk for b in self.blocks)
        log.info(
            "plan %r: %d blocks, weights of %d on disk (%s cached in memory), %s of files; updates %s.",
            plan.name, len(self.blocks), on_disk, format_bytes(capacity), format_bytes(self._disk_bytes),
            f"after optimizer.step() in forward order, because {rules.deferred}" if rules.deferred else "run during backward",
        )  # fmt: skip

    # ---- while it runs ------------------------------------------------------------------------------------------------------

    def _on_step(self, binding: OptimizerBinding, scale: float) -> None:
        assert self.executor is not None
        self._promote(binding)
        self.executor.handover(binding, scale)

    def _promote(self, binding: OptimizerBinding) -> None:
        """Parameters that joined the optimizer during training (unfreezing) get state."""
        assert self.store is not None
        assert self.executor is not None
        owners = self.executor.updater.owners
        fresh = [p for p in binding.params() if id(p) not in owners]
        if not fresh:
            return
        ids = {id(p) for p in fresh}
        self.executor.updater.own(self.bindings)
        owners = self.executor.updater.owners
        for block in self.blocks:
            for part in block.parts:
                mine = [p for p in part.params if id(p) in ids]
                if mine:
                    num_state = _num_state(part, owners)
                    if num_state and (part.native is None or part.native.geometry.num_state == 0):
                        self._reopen(part, num_state)
                    self._handles += [observe_gradient(block, p) for p in mine if p.requires_grad]

    def _reopen(self, part: Part, num_state: int) -> None:
        assert self.store is not None
        assert self.executor is not None
        block = part.block
        self.executor.bring(block)
        if part.native is not None:
            self.store.discard(part)
        geometry = geometry_of(part, self.store.next_id(), num_state=num_state, weights=block.plan.weights, state=block.plan.state)
        self.store.open(part, geometry)
        self.store.flush(part)

    @contextmanager
    def materialized(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Brings the blocks of ``params`` into memory for the time of the context: the door for reads outside a block's forward."""
        assert self.executor is not None
        ids = {id(p) for p in params}
        blocks = [b for b in self.blocks if any(id(p) in ids for p in b.params())]
        opened = []
        try:
            for block in blocks:
                self.executor.bring(block)
                self.executor.open(block)
                opened.append(block)
                if torch.is_grad_enabled():
                    self.executor.hold(block)
            yield
        finally:
            for block in opened:
                self.executor.shut(block)

    def memory_report(self) -> dict[str, int]:
        """Bytes so far: peak of the process's host memory, of files, of staging; and moved by the engine."""
        if self._final_report:
            return self._final_report
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        report = {"host_peak_bytes": peak, "disk_bytes": self._disk_bytes}
        if self.store is not None:
            stats = self.store.stats()
            report |= {
                "bytes_read": stats.bytes_read,
                "bytes_written": stats.bytes_written,
                "staging_bytes": self.store.staging_bytes,
            }
        return report

    def binding_of(self, optimizer: Optimizer) -> OptimizerBinding | None:
        """The binding of one of the optimizers."""
        return next((b for b in self.bindings if b.optimizer is optimizer), None)

    def drain(self) -> None:
        """Waits for all updates under way."""
        if self.executor is not None:
            self.executor.drain()

    def commit(self) -> None:
        """Makes what was written by loading a checkpoint a step of its own."""
        if self.store is not None:
            self.store.commit()

    # ---- stop ---------------------------------------------------------------------------------------------------------------

    def stop(self) -> bool:
        """Finishes updates, brings weights and optimizer state back into ordinary memory, closes and removes the files.

        Where that does not fit the budget, everything stays where it is, readable through the door.

        Returns:
            Whether the session is parked: still open, until :meth:`unpark` or :meth:`abandon`.
        """
        if self.store is None or self.executor is None:
            self.abandon()
            return False
        self.executor.finish()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._started and not self._fits_memory():
            self.store.commit()
            log.info("The model does not fit host_memory, so it stays on disk; the store is removed when the process ends.")
            return True
        for block in self.blocks:
            if self._started or not self._made_on_meta.issuperset(block.spec.params):
                self.executor.bring(block, force=True)
            self._restore(block)
        for binding in self.bindings:
            binding.unbind()
        self._close()
        return False

    def has_model(self) -> bool:
        """Whether the parameters are still in this session's hands: another Trainer may have taken the model over."""
        parts = [part for block in self.blocks for part in block.parts]
        return all(p.data_ptr() == part.memory(i).data_ptr() for part in parts for i, p in enumerate(part.params))

    def unpark(self) -> None:
        """Gets ready for another :meth:`start` with the weights as they are; optimizer state starts anew."""
        for binding in self.bindings:
            binding.unbind(read=False)
            binding.optimizer.state.clear()
        self.bindings = []

    def abandon(self) -> None:
        """Closes everything without reading anything back: after an error of the engine, or when nobody needs it any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for binding in self.bindings:
            binding.unbind(read=False)
        with suppress(HeteroError):  # whoever met the engine's error has raised it
            self._close()

    def _fits_memory(self) -> bool:
        """Whether all weights and all state may be in memory at once."""
        assert self.executor is not None
        pairs = list(zip(self.executor.model.blocks, self.executor.plan.blocks, strict=True))
        if self.options.host_memory is not None:
            return sum(b.weight_bytes + b.state_bytes for b, _ in pairs) <= self.options.host_memory
        more = sum(b.weight_bytes for b, p in pairs if p.weights is Tier.DISK)
        more += sum(b.state_bytes for b, p in pairs if p.state is Tier.DISK)
        return more <= psutil.virtual_memory().available * 3 // 4

    def _restore(self, block: Block) -> None:
        for param in block.params():
            if type(param) is OffloadedParameter and id(param) not in self._elsewhere:
                restore(param)

    def _close(self) -> None:
        """Of a refused start nothing is left: no files, and no memory that was never initialized."""
        if self.store is not None:
            self._final_report = self.memory_report()
            self.recorder.close()
            store, self.store = self.store, None
            store.close(self.blocks, remove=None if self._started else True)
        if not self._started:
            for block in self.blocks:
                self._restore(block)
                back_to_meta(self.root, block, self._made_on_meta)
        # Memory goes with the last tensor that looks at it, not whenever the garbage collector finds these cycles.
        for block in self.blocks:
            block.parts.clear()
        if self.executor is not None:
            self.executor.let_go()
        self.blocks, self.bindings, self.executor = [], [], None


def _num_state(part: Part, owners: dict[int, OptimizerBinding]) -> int:
    rules = {owners[id(p)].rule for p in part.params if id(p) in owners}
    return len(adam.state_names(part.dtype)) if rules == {Rule.NATIVE} else 0


def _state_bytes(part: Part, owners: dict[int, OptimizerBinding]) -> int:
    rules = {owners[id(p)].rule for p in part.params if id(p) in owners}
    if rules == {Rule.NATIVE}:
        return 4 * len(adam.state_names(part.dtype))
    return _UNKNOWN_STATE_BYTES if rules else 0
