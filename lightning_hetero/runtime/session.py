"""One model under the runtime, from adoption to release: cuts it, places it, opens its tiers, and gives it back.

The order matters and is the same for every plan: :meth:`Session.adopt` (blocks, reserved memory) → the optimizers are made →
:meth:`Session.start` (plan, budget, files, anchors) → training → :meth:`Session.stop`.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_hetero._native import Block as NativeBlock
from lightning_hetero._native import BlockGeometry
from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.model import ModelProfile, ModelShape
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.runtime.activations.files import NativeSwapFiles
from lightning_hetero.runtime.anchors import observe, observe_gradient
from lightning_hetero.runtime.device import DeviceSide, DeviceUpdates, DeviceWeights, HostGradients
from lightning_hetero.runtime.device.executor import DeviceExecutor
from lightning_hetero.runtime.door import OffloadedParameter, materialize, restore
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.heap import Heap
from lightning_hetero.runtime.initialize import Content, Initializer, in_order_of_construction
from lightning_hetero.runtime.lanes import EmulatedDevice, EmulatedLanes
from lightning_hetero.runtime.optimizers import OptimizerBinding
from lightning_hetero.runtime.placement import Placement, Placer, SessionOptions, StepRules, host_budget, least_bytes, native_state
from lightning_hetero.runtime.recorder import Recorder
from lightning_hetero.runtime.steps import KeptSteps, commit_ring, part_names
from lightning_hetero.runtime.updates import Updater
from lightning_hetero.store.blocks import Block, Part, back_to_meta, bind
from lightning_hetero.store.capacity import available_memory_bytes, resident_bytes
from lightning_hetero.store.directory import DiskLimits, StoreDirectory
from lightning_hetero.store.geometry import geometry_of
from lightning_hetero.store.homes import close_home, open_home, reset_home
from lightning_hetero.store.keeping import committed_slots
from lightning_hetero.store.manifest import MANIFEST
from lightning_hetero.store.mirrors import mirror_bytes
from lightning_hetero.store.moves import move
from lightning_hetero.store.partition import partition
from lightning_hetero.store.snapshots import snapshot
from lightning_hetero.store.tiers import TierStore
from lightning_hetero.units import format_bytes

__all__ = ["Session", "SessionOptions", "StepRules"]

log = logging.getLogger(__name__)


class Session:
    """The runtime of one model.

    Args:
        root: The model.
        options: The user's choices.
        content: Weights in files for parameters on the meta device.

    Attributes:
        steps: What keeps the steps of a fit, if anything does.
        profile: What a profiled batch has shown of the model; from then on what the machine has free has to hold activations too.
    """

    def __init__(self, root: nn.Module, options: SessionOptions, content: Content | None = None) -> None:
        self.root = root
        self.options = options
        self.bindings: list[OptimizerBinding] = []
        self.recorder = Recorder(enabled=options.trace)
        self._handles: list[RemovableHandle] = []
        self._initializer = Initializer(root, content)
        self._initializer.check()
        specs = partition(root, options.block_cls)
        self._made_on_meta = frozenset(n for s in specs for n, p in s.params.items() if p.is_meta)
        self._unset = {s.name for s in specs if not self._made_on_meta.isdisjoint(s.params)}
        self._elsewhere = {id(p) for s in specs for p in s.params.values() if isinstance(p, OffloadedParameter)}
        self.blocks: list[Block] = bind(root, specs, away=lambda p: id(p) in self._elsewhere)
        self.executor: Executor | None = None
        self.store: TierStore | None = None
        self.profile: ModelProfile | None = None
        self.steps: KeptSteps | None = None
        self._rules = StepRules()
        self._files: NativeSwapFiles | None = None
        self._default_root = Path()
        self._started = self._resumes = False
        self._disk_bytes = 0
        self._final_report: dict[str, int] = {}

    # ---- start ------------------------------------------------------------------------------------------------------------

    def start(self, optimizers: Sequence[Optimizer] | None, rules: StepRules, *, default_root: Path, resume: bool = False) -> None:
        """Places the model and starts the engine; the weights of blocks on disk leave memory as far as the budget asks.

        Args:
            optimizers: The optimizers of a fit; ``None`` to evaluate. A parked session then keeps the optimizers that it has.
            rules: How gradients are used.
            default_root: Where files go by default.
            resume: ``disk_path`` holds an earlier run's store: weights and state are those of its last step.

        Raises:
            OutOfMemoryBudgetError: The plan does not fit ``host_memory`` or ``device_memory``.
            OutOfDiskError: It does not fit the disk or ``disk_capacity``.
            ConfigError: The plan does not fit the model, or the directory cannot be used.
            UnsupportedError: An optimizer cannot run out of core.
        """
        if optimizers is not None:
            self.bindings = [OptimizerBinding(o, on_step=self._on_step, on_read=self.drain, on_zero=self.drain) for o in optimizers]
        self._rules, self._resumes = rules, resume
        placer = self._placer()
        parked = self.executor
        plans = self.options.plans
        if parked is not None and optimizers is None:
            plans = (lambda _: parked.plan,)  # everything is where that plan has put it
        placement = placer.first_that_fits(plans, present_bytes=self.present_bytes)
        for block, placed in zip(self.blocks, placement.plan.blocks, strict=True):
            block.plan = placed
        for binding, rule in zip(self.bindings, placement.by, strict=True):
            binding.rule = rule
        self._default_root = default_root
        self.steps = KeptSteps(self.root, self.blocks, self.bindings, self.options) if optimizers is not None else None
        if self.store is None:
            ring = commit_ring(self.root, self.blocks, kept=self.keeps_steps)
            directory = self._directory(placement, layout={**ring, "parts": part_names(self.blocks)}, resume=resume)
            if directory is not None:
                ring = {key: directory.layout.get(key, size) for key, size in ring.items()}
            self.store = TierStore(
                replace(self.options.engine, staging_bytes=placement.staging_bytes),
                directory=directory,
                chunk_bytes_max=placer.chunk_bytes,
                resume=resume,
                **ring,
            )
            self.store.on_patched = self.options.on_patched
        if self.steps is not None:
            self.steps.begin(self.store, resume=resume)
        rules = placement.rules
        updater = Updater(self.store, clip_value=rules.clip_value, keep_gradients=rules.keep_gradients, waits=rules.waits)
        updater.own(self.bindings)
        heap = Heap(self.options.host_memory, present_bytes=self.present_bytes)
        heap.counted_bytes = placement.activation_bytes
        common: dict[str, Any] = {
            "plan": placement.plan, "model": placer.model, "store": self.store, "updater": updater,
            "capacity_bytes": placement.cache_bytes, "deferred": bool(rules.deferred), "recorder": self.recorder, "heap": heap,
            "poison": self.options.poison,
        }  # fmt: skip
        if self.options.device is None:
            self.executor = Executor(self.blocks, **common)
        else:
            self.executor = self._on_device(self.options.device, placement, updater, common)
        self.executor.commits = self.steps is None or not self.steps.kept
        self.executor.speculation.enabled = rules.speculates
        if parked is None or optimizers is not None:
            self._open(placement, resume=resume)
            homes = [(p, part, i) for b in self.blocks for part in b.parts for i, p in enumerate(part.params)]
            for binding in self.bindings:
                binding.place(self.store, homes)
        if self.steps is not None:
            self.steps.placed()
        self.store.commit()
        if isinstance(self.executor, DeviceExecutor):
            self.executor.may_defer = placement.may_defer
            self.executor.rest()
            self.executor.move_in()
            for buffer in self.root.buffers():
                buffer.data = buffer.data.to(self.executor.lanes.device)
        self._handles = observe(self.blocks, self.executor)
        self._started = True
        self._announce(placement)

    def _on_device(self, device: EmulatedDevice, placement: Placement, updater: Updater, common: dict[str, Any]) -> DeviceExecutor:
        """The executor for a device with memory of its own."""
        assert self.store is not None
        lanes = EmulatedLanes(device, poison=self.options.poison)
        self.recorder.observe(lanes, [block.name for block in self.blocks])
        weights = DeviceWeights(lanes)
        updater.device = DeviceSide(
            weights=weights,
            gradients=HostGradients(lanes, norm_type=2.0 if placement.rules.norms else None),
            updates=DeviceUpdates(lanes, weights, self.store),
        )
        cache = placement.device_cache_bytes
        files = self._swap_files(placement)
        return DeviceExecutor(self.blocks, lanes=lanes, side=updater.device, device_cache_bytes=cache, files=files, **common)

    def _swap_files(self, placement: Placement) -> NativeSwapFiles | None:
        """Files for activations that go to the disk, in a directory of their own: no commit names them."""
        assert self.store is not None
        if placement.swaps_to_disk and self._files is None:
            given = self.options.disk_path is not None and self.store.files.directory is not None
            path = self.store.files.directory.path / "activations" if given and self.store.files.directory is not None else None
            manifest = {"model": type(self.root).__name__, "holds": "activations"}
            directory = self._make_directory(path, manifest, placement.swapped_bytes)
            self._files = NativeSwapFiles(self.store.engine, directory)
        return self._files

    def replan(self, plan: Plan) -> Plan:
        """Goes on with another plan: moves weights and optimizer state to the tiers that it says, between two batches of a fit.

        Args:
            plan: The plan; its rules may be patterns.

        Returns:
            The plan as it is in force, one rule per block.

        Raises:
            OutOfMemoryBudgetError: As for :meth:`start`; nothing has changed then, nor with the next three.
            OutOfDiskError: The same.
            ConfigError: The same.
            UnsupportedError: The same.
            StoreError: A transfer failed, which stops the engine.
        """
        assert self.executor is not None
        assert self.store is not None
        placer = self._placer()
        self.executor.rest()
        placement = placer.place(plan, present_bytes=self._held_bytes)
        self._make_disk_ready(placement)
        if placement.staging_bytes < self.store.staging_bytes:
            self.store.resize_staging(placement.staging_bytes)
        for block in self.blocks:
            self.executor.release(block)  # cached weights come back when they are used
        moves = list(zip(self.blocks, placement.plan.blocks, strict=True))
        for block, placed in sorted(moves, key=lambda m: _growth(m[0], m[1], placer.model)):  # what gives memory back goes first
            self._move(block, placed, placement)
        self.executor.rest()
        if not placement.uses_disk and not self.keeps_steps:
            assert not any(blob.on_disk for blob in self.store.blobs), "they are dropped first"
            self.store.files.detach()
        if placement.staging_bytes != self.store.staging_bytes:
            self.store.resize_staging(placement.staging_bytes)
        rules = placement.rules
        for binding, rule in zip(self.bindings, placement.by, strict=True):
            binding.choose(rule)
        self.executor.speculation.enabled = rules.speculates
        self.executor.updater.configure(clip_value=rules.clip_value, keep_gradients=rules.keep_gradients, waits=rules.waits)
        if isinstance(self.executor, DeviceExecutor):
            self.executor.files, self.executor.may_defer = self._swap_files(placement), placement.may_defer
        self.executor.adopt(
            placement.plan, model=placer.model, capacity_bytes=placement.cache_bytes, deferred=bool(rules.deferred),
            device_cache_bytes=placement.device_cache_bytes,
        )  # fmt: skip
        self.executor.heap.allow(self.options.host_memory)
        self.executor.heap.counted_bytes = placement.activation_bytes
        self._announce(placement)
        return placement.plan

    def needed_bytes(self, plan: Plan) -> int:
        """The least host memory that a resolved plan needs, whether there is as much or not."""
        return least_bytes(self._placer().needs(plan))

    def fitting(self, plan: Plan) -> Plan:
        """The plan as it would run here, resolved: weights that are used outside repeated blocks stay where those can be.

        Raises:
            ConfigError: The plan does not fit the model.
        """
        return self._placer().fitting(plan)

    @property
    def device_memory(self) -> int | None:
        """What plans may use of a device with memory of its own, bytes; ``None`` where the device is the host."""
        return self._placer().device_memory

    def check(self, plan: Plan) -> None:
        """Refuses a plan that could not run in the session as it is, without changing anything.

        Raises:
            OutOfMemoryBudgetError: As for :meth:`start`.
            ConfigError: The same.
            UnsupportedError: The same.
        """
        self._placer().place(plan, present_bytes=self._held_bytes)

    @property
    def rules(self) -> StepRules:
        """How the training loop uses gradients."""
        return self._rules

    def _placer(self) -> Placer:
        # What a user gives is for what a plan can place; what the machine has free has to hold activations as well. A plan for a
        # device with memory of its own places activations too.
        profile = self.profile if self.options.host_memory is None or self.options.device is not None else None
        return Placer(type(self.root).__name__, self.blocks, self.options, self.bindings, self._rules, profile)

    def host_memory(self) -> int:
        """The budget in bytes: the user's, else what is free and what of it is in use already."""
        return host_budget(self.options, self._held_bytes)

    @property
    def _held_bytes(self) -> int:
        """What the process holds of its budget: all but the constant part, once that is known; what malloc keeps is free too."""
        present = self.present_bytes
        if self.profile is None or not self._started:
            return present
        return max(present, resident_bytes() - self.profile.constant_host_bytes)

    @property
    def present_bytes(self) -> int:
        """Weights and optimizer state that are in memory now."""
        there = [b for b in self.blocks if b.resident and b.name not in self._unset]
        if self.executor is None:
            return sum(p.weight_bytes for b in there for p in b.parts)
        weights = sum(p.weight_bytes for b in there if self.executor.is_on_host(b) for p in b.parts)
        away = (Tier.DISK,) if self.options.device is None else (Tier.DISK, Tier.DEVICE)
        rows = zip(self.executor.model.blocks, self.blocks, strict=True)
        return weights + sum(s.state_bytes for s, b in rows if b.plan.state not in away and any(p.stepped for p in b.parts))

    def _move(self, block: Block, placed: BlockPlan, placement: Placement) -> None:
        """Brings one block to where its new plan wants it."""
        assert self.executor is not None
        assert self.store is not None
        before = block.plan
        same_weights = (before.weights is Tier.DISK) == (placed.weights is Tier.DISK)
        same_state = (before.state is Tier.DISK) == (placed.state is Tier.DISK)
        where = (before.weights, before.state, before.update)
        if where != (placed.weights, placed.state, placed.update) or self.executor.is_away(block):
            self.executor.leave(block)
        if not (same_weights and same_state):
            self.executor.bring(block, force=True)
            for part in block.parts:
                move(self.store, part, placement.geometries.get(part), self._settled)
        block.plan = placed
        if not same_state:
            for part in block.parts:
                self.executor.updater.move_state(part)
        if block.weights_on_disk:
            self.executor.hide(block)
            self.executor.release(block)
        else:
            self._restore(block)

    def _settled(self, part: Part) -> list[NativeBlock]:
        return [] if self.steps is None else self.steps.settled(part)

    @property
    def keeps_steps(self) -> bool:
        """Whether every step of this fit can be resumed from."""
        return self.steps is not None and self.steps.kept

    def _make_disk_ready(self, placement: Placement) -> None:
        """Room for the plan's files, before anything moves."""
        assert self.store is not None
        if self.store.files.directory is None:
            directory = self._directory(placement)
            if directory is not None:
                self.store.files.attach(directory)
            return
        self._disk_bytes = placement.disk_bytes + self._mirror_bytes(placement)
        limits = DiskLimits(
            needed_bytes=self._disk_bytes + placement.later_bytes, capacity_bytes=self.options.disk_capacity,
            allow_tmpfs=True, allow_rotational=True,
        )  # fmt: skip  # the directory is in use already
        self.store.files.directory.check_room(limits)

    @property
    def on_disk(self) -> bool:
        """Whether anything lives on disk."""
        return self.store is not None and self.store.files.directory is not None

    def disk_root(self) -> Path:
        """An existing directory on the disk where files are or would be."""
        if self.store is not None and self.store.files.directory is not None:
            return self.store.files.directory.path
        wanted = (self.options.disk_path or self._default_root).expanduser().absolute()
        return next(p for p in (wanted, *wanted.parents) if p.is_dir())

    def _mirror_bytes(self, placement: Placement) -> int:
        """Bytes of files for what the plan keeps in memory."""
        if not self.keeps_steps:
            return 0
        parts = [part for block in self.blocks for part in block.parts]
        return 2 * sum(mirror_bytes(part, placement.geometries.get(part)) for part in parts)

    def _directory(
        self, placement: Placement, *, layout: dict[str, Any] | None = None, resume: bool = False
    ) -> StoreDirectory | None:
        self._disk_bytes = placement.disk_bytes + self._mirror_bytes(placement)
        if not placement.uses_disk and not self.keeps_steps:
            return None
        # The model alone: the same one may come with another plan, without an optimizer, or with frozen parameters.
        rows = [{"block": b.name, "params": {n: _row(p) for n, p in b.spec.params.items()}} for b in self.blocks]
        manifest = {"model": type(self.root).__name__, "blocks": rows}
        path = self.options.disk_path if self.bindings or self.steps is not None else self._scratch_path()
        return self._make_directory(path, manifest, self._disk_bytes + placement.later_bytes, layout=layout, resume=resume)

    def _make_directory(self, path: Path | None, manifest: dict[str, Any], needed_bytes: int, **more: Any) -> StoreDirectory:
        self._default_root.mkdir(parents=True, exist_ok=True)
        return StoreDirectory.create_or_adopt(
            path, default_root=self._default_root, manifest=manifest, needed_bytes=needed_bytes,
            capacity_bytes=self.options.disk_capacity, allow_tmpfs=self.options.allow_tmpfs,
            allow_rotational=self.options.allow_rotational, **more,
        )  # fmt: skip

    def _scratch_path(self) -> Path | None:
        """Evaluation leaves a store alone that training has left at ``disk_path``."""
        path = self.options.disk_path
        return None if path is not None and (path / MANIFEST).exists() else path

    def _open(self, placement: Placement, *, resume: bool) -> None:
        """Opens files block by block, writes the weights there, and keeps in memory what fits the budget."""
        assert self.store is not None
        assert self.executor is not None
        used, later = 0, list[tuple[str, nn.Parameter]]()
        self._initializer.read_buffers()
        for block in in_order_of_construction(self.root, self.blocks):
            if block.name in self._unset and not self._initializer.read(block, self._made_on_meta):
                later += [(n, block.spec.params[n]) for n in self._initializer.set(block, self._made_on_meta)]
            self._take_over(block)
            self.executor.bring(block, force=not block.weights_on_disk)  # a parked model's weights are on disk
            for part in block.parts:
                if resume and self.steps is not None:
                    self.steps.adopt(part)
                    move(self.store, part, placement.geometries.get(part), self._settled)
                else:
                    self._open_part(part, placement.geometries.get(part))
            if block.weights_on_disk:
                size = sum(p.weight_bytes for p in block.parts)
                self.executor.hide(block)
                if used + size <= placement.cache_bytes:
                    used += size
                else:
                    self.executor.release(block)
                    for part in block.parts:
                        self.store.barrier(part)
        self._initializer.set_buffers()
        if later and not resume:  # [Note: Meta initialization]
            for name, param in later:
                self._initializer.fill(name, param)
            self._initializer.read_buffers()
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
            reset_home(self.store, part)
        else:
            if part.native is not None:
                close_home(self.store, part)
            if geometry is not None:
                open_home(self.store, part, replace(geometry, id=self.store.files.free_id(geometry.id)))
        if part.native is not None:
            self.store.flush(part)

    def _announce(self, placement: Placement) -> None:
        plan, rules, capacity = placement.plan, placement.rules, placement.cache_bytes
        on_disk = sum(b.weights_on_disk for b in self.blocks)
        log.info(
            "plan %r: %d blocks, weights of %d on disk (%s cached in memory), %s of files; updates %s.",
            plan.name, len(self.blocks), on_disk, format_bytes(capacity), format_bytes(self._disk_bytes),
            "run during backward" if not rules.deferred
            else f"are tried during backward, and done again where they were wrong, because {rules.deferred}" if rules.speculates
            else f"after optimizer.step() in forward order, because {rules.deferred}",
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
                    num_state = native_state(part, owners)
                    if num_state and (part.native is None or part.native.geometry.num_state == 0):
                        self._reopen(part, num_state)
                    self._handles += [observe_gradient(block, p) for p in mine if p.requires_grad]

    def _reopen(self, part: Part, num_state: int) -> None:
        assert self.store is not None
        assert self.executor is not None
        block = part.block
        self.executor.bring(block)
        if part.native is not None:
            close_home(self.store, part)
        geometry = geometry_of(
            part, self.store.files.next_id(), num_state=num_state, weights=block.plan.weights, state=block.plan.state
        )
        open_home(self.store, part, geometry)
        self.store.flush(part)
        if self.steps is not None:
            self.steps.reopened(part)

    @contextmanager
    def materialized(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Brings the blocks of ``params`` into memory for the time of the context: the door for reads outside a block's forward."""
        assert self.executor is not None
        ids = {id(p) for p in params}
        blocks = [b for b in self.blocks if any(id(p) in ids for p in b.params())]
        opened = []
        try:
            for block in blocks:
                self.executor.provide(block)
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
        """Makes what was written by loading a checkpoint last."""
        if self.store is not None:
            self.store.commit()

    def snapshot(self, path: Path) -> None:
        """Links the last kept step to another path.

        Raises:
            ConfigError: ``path`` is taken.
            StoreError: A transfer or a system call failed.
        """
        assert self.store is not None
        assert self.store.files.directory is not None
        snapshot(self.store.files.directory.path, path, committed_slots(self.store, self.blocks))

    def keep_step(self, state: str) -> None:
        """The batch of an ``optimizer.step()`` is over: all of it becomes one step that survives, the loop's state included."""
        if self.steps is not None and self.executor is not None:
            self.steps.keep(self.executor, state)

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
        for block in self.blocks:
            self.executor.leave(block)
        self.executor.stop()
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
        return more <= available_memory_bytes() * 3 // 4

    def _restore(self, block: Block) -> None:
        for param in block.params():
            if type(param) is OffloadedParameter and id(param) not in self._elsewhere:
                restore(param)

    def _close(self) -> None:
        """Of a refused start nothing is left: no files, and no memory that was never initialized."""
        if self.executor is not None:
            self.executor.stop()
        if self._files is not None:
            self._files.close()
            self._files = None
        if self.store is not None:
            self._final_report = self.memory_report()
            self.recorder.close()
            store, self.store = self.store, None
            store.close(self.blocks, remove=None if self._started or self._resumes else True)
        if not self._started:
            for block in self.blocks:
                self._restore(block)
                back_to_meta(self.root, block, self._made_on_meta)
        # Memory goes with the last tensor that looks at it, not whenever the garbage collector finds these cycles.
        for block in self.blocks:
            block.parts.clear()
        if self.executor is not None:
            self.executor.let_go()
        self.blocks, self.bindings, self.executor, self.steps = [], [], None, None


def _row(param: nn.Parameter) -> list[Any]:
    """What a manifest says of a parameter; strides where they are not the usual ones."""
    row = [str(param.dtype), list(param.shape)]
    return row if param.is_contiguous() else [*row, list(param.stride())]


def _growth(block: Block, placed: BlockPlan, model: ModelShape) -> int:
    """Bytes of memory that moving the block takes."""
    shape = model.blocks[block.index]
    tiers = ((shape.weight_bytes, block.plan.weights, placed.weights), (shape.state_bytes, block.plan.state, placed.state))
    return sum(size * ((after is not Tier.DISK) - (before is not Tier.DISK)) for size, before, after in tiers)
