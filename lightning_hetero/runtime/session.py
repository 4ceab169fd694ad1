"""One model under the runtime: cuts it into blocks, places them, opens its tiers, gives it back.

The order is the same for every plan: :class:`Session` (blocks, reserved memory) → the optimizers
are made → :meth:`Session.start` (plan, budget, files, anchors) → training → :meth:`Session.stop`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_hetero.clock import now_s
from lightning_hetero.errors import HeteroError, OutOfMemoryBudgetError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.optim import blockwise
from lightning_hetero.optim.adam import MASTERED
from lightning_hetero.runtime import other_optimizers, slice_steps
from lightning_hetero.runtime.anchors import observe, observe_forwards, observe_gradient
from lightning_hetero.runtime.announcement import Allowed, announce
from lightning_hetero.runtime.block_moves import growth, move_block, reopen
from lightning_hetero.runtime.construction import Construction
from lightning_hetero.runtime.context import Run, RunContext
from lightning_hetero.runtime.device.setup import lanes_of, side_of
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.initialize import Content
from lightning_hetero.runtime.kept_steps import KeptSteps, commit_ring, frozen_parts, part_names
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule, owners_of
from lightning_hetero.runtime.options import SessionOptions, StepRules
from lightning_hetero.runtime.parameter_data import Watched, forget, watch
from lightning_hetero.runtime.parked import ParkedAnchors
from lightning_hetero.runtime.placement import Placement, check_owners, native_state, set_slots
from lightning_hetero.runtime.process_memory import Heap
from lightning_hetero.runtime.recorder import Recorder
from lightning_hetero.runtime.same_plan import all_or_none, check_same_files, check_same_plan
from lightning_hetero.runtime.session_copies import Copies
from lightning_hetero.runtime.slices import slices_of, with_same_rooms
from lightning_hetero.runtime.updates import Updater
from lightning_hetero.store.capacity import peak_resident_bytes
from lightning_hetero.store.format.in_place import InPlace
from lightning_hetero.store.format.state_files import StateFiles
from lightning_hetero.store.live.blocks import keep_apart, parts_of
from lightning_hetero.store.live.loans import Loans
from lightning_hetero.store.live.moved_weights import bring_back_all
from lightning_hetero.store.live.spread_step import SpreadStep
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.units import format_bytes

log = logging.getLogger(__name__)


class Session(Copies):
    """The runtime of one model; see :class:`Budgets` for its arguments."""

    def __init__(
        self, root: nn.Module, options: SessionOptions, content: Content | None = None, built: Construction | None = None,
        alignment_bytes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(root, options, content, built, alignment_bytes)
        self.recorder = Recorder(enabled=options.trace)
        self._trained = {id(p) for p in root.parameters() if p.requires_grad}  # before callbacks unfreeze any
        self._obstacle, self._was_cut_late = "", False  # why steps cannot be kept
        self._handles: list[RemovableHandle] = []
        self._watched: list[Watched] = []  # parameters whose `data` is not torch's own
        self._resumes = self._fits = False
        self._source: SpreadStep | None = None
        self._has_grown = False  # weights train that were frozen when the plan in force was checked
        self._final_report: dict[str, int] = {}

    @property
    def _layout(self) -> dict[str, object]:
        """The parts, as a new store's manifest has them and a resume compares them."""
        frozen = frozen_parts(self.blocks, self._trained)
        return {"parts": part_names(self.blocks), "frozen": frozen, "alignment": self.alignment_bytes}

    # ---- start -----------------------------------------------------------------------------------

    def cut(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Cuts the blocks' parts by optimizer, before :meth:`start`.

        The optimizers have their first groups, so that a resume makes the same parts. Returns those
        for :meth:`start`: see :func:`other_optimizers.bound`.
        """
        inner, self._obstacle = other_optimizers.bound(optimizers)
        owners = {id(p): number for number, o in enumerate(inner) for group in o.param_groups for p in group["params"]}
        apart = {number for number, o in enumerate(inner) if not blockwise.is_by_element(o)} if self.options.own.ranks > 1 else ()
        self._was_cut_late |= self._cut(owners, apart) and self.store is not None
        if self._was_cut_late:
            self._obstacle = self._obstacle or "the manifest of the store has the parts of before they were cut by optimizer"
        return inner

    def start(
        self, optimizers: Sequence[Optimizer] | None, rules: StepRules, *, default_root: Path, resume: bool = False,
        with_state: Collection[int] = (), in_place: Sequence[InPlace | None] = (), source: SpreadStep | None = None,
    ) -> None:  # fmt: skip
        """Places the model and starts the engine. Weights leave memory as far as the budget asks.

        Args:
            optimizers: The optimizers of a fit; ``None`` to evaluate. A parked session then keeps
                the optimizers that it has.
            rules: How gradients are used.
            default_root: Where files go by default.
            resume: ``disk_path`` holds an earlier run's store, whose last step counts.
            with_state: The ``id``s of parameters for which that store has optimizer state.
            in_place: Where that store's last step has the weights of each part, if not in it.
            source: A step of other ranks, from which the new store at ``disk_path`` begins.

        Raises:
            OutOfMemoryBudgetError: The plan does not fit ``host_memory`` or ``device_memory``.
            OutOfDiskError: It does not fit the disk or ``disk_capacity``.
            ConfigError: The plan does not fit the model, or the directory cannot be used.
            UnsupportedError: An optimizer cannot run out of core.
        """
        self._check_process()
        begin_s = now_s()
        weights = sum(part.weight_bytes for block in self.blocks for part in block.parts)
        shares = f", a slice of them on each of {ranks} ranks" if (ranks := self.options.own.ranks) > 1 else ""
        log.info("placing %d blocks with %s of weights%s.", len(self.blocks), format_bytes(weights), shares)
        self._fits, self.rules, self._resumes, self._source = optimizers is not None, rules, resume, source
        if optimizers is not None:
            self.bindings = [
                OptimizerBinding(
                    o, self._on_step, on_read=self.drain, on_touch=self._settle_state, on_load=self._promote, on_save=self._publish,
                    with_state=with_state,
                )
                for o in optimizers
            ]  # fmt: skip
            for binding in self.bindings:
                binding.check_params(self._known())
        wanted = self._fits and self.options.wants_steps
        self.steps = KeptSteps(self.blocks, self.bindings, self.options, wanted=wanted, obstacle=self._obstacle)
        if self._fits:
            self._last_steps = self.steps
        parked, plans = self.executor, self.options.plans
        if parked is not None:
            inside = self.blocks if self._handles else []  # of a session that evaluates; else they have left
            self._forget_anchors()
            parked.finish()
            for block in inside:
                parked.residency.leave(block)
            parked.stop()
        if parked is None or self._fits:
            set_slots(self.blocks, owners_of(self.bindings))
            check_same_files(self.options.collectives, self._setup.find_in_place())
        if resume or source is not None:
            self._setup.adopt_places(in_place if source is None else source.places(parts_of(self.blocks)))
        placer = self._placer()
        if parked is not None and not self._fits:
            in_force = parked.plan
            plans = (lambda _: in_force,)  # everything is where that plan has put it
        placement = with_same_rooms(placer.first_that_fits(plans, present_bytes=self.present_bytes), self.options.collectives)
        for block, placed in zip(self.blocks, placement.plan.blocks, strict=True):
            block.plan = placed
        for binding, rule in zip(self.bindings, placement.by, strict=True):
            binding.rule = rule
        self.directories.default_root = default_root
        if self.store is None:
            self.store = self._opened_store(placement, placer.chunk_bytes)
        executor = self.executor = self._executor(self.store, placement, placer.model)
        for block in self.blocks:  # of a parked session
            bring_back_all(block)
        if parked is None or self._fits:
            self._setup.bring(self.store, executor, placement, resumed=self.steps if resume or source else None)
            homes = [(p, part, i) for b in self.blocks for part in b.parts for i, p in enumerate(part.params)]
            for binding in self.bindings:
                binding.place(self.store, homes)
        self.steps.placed()
        self.store.commit()
        self.store.files.wait_for_commit()  # a store has a record before training starts; its hooks may change what is written
        self.steps.committed()
        if executor.device is not None:
            executor.rest()
            executor.residency.move_in()
        self._handles = observe(self.blocks, executor)
        self._handles.append(other_optimizers.notice_steps(self._known(), {id(one.optimizer) for one in self.bindings}))
        self._watch(executor)
        self._started = True
        disk = f"{format_bytes(self.directories.disk_bytes)} of files in {self.disk_root()}" if self.on_disk else ""
        rooms = self.directories.allowed(self.store)
        is_given, ranks = self.options.host_memory is not None, self.options.own.ranks
        allowed = Allowed(self.device_memory, self.host_memory(), is_given, *rooms, ranks)
        announce(placement, placer, self.blocks, allowed, trains=self._trains, disk=disk, begin_s=begin_s)

    def _opened_store(self, placement: Placement, chunk_bytes: int) -> TierStore:
        ring = self.directories.ring = commit_ring(self.blocks, kept=self.keeps_steps)
        directory = self.directories.of_blocks(
            placement, trains=self._trains, kept=self.keeps_steps, layout={**ring, **self._layout}, resume=self._resumes
        )
        if directory is not None:
            ring = {key: directory.layout.get(key, size) for key, size in ring.items()}
        engine = replace(self.options.engine, staging_bytes=placement.staging_bytes)
        store = TierStore(engine, directory=directory, chunk_bytes_max=chunk_bytes, resume=self._resumes, **ring)
        store.on_patched = self.options.on_patched
        store.loans.room = self._room_for_copies
        if store.files.states is not None:
            # The files hold the function, so it has no reference to them.
            directories, files = self.directories, weakref.proxy(store.files)
            store.files.states.room_bytes = lambda: directories.beside_bytes() - files.added_bytes
        store.files.room_bytes = self.directories.beside_bytes
        return store

    def _executor(self, store: TierStore, placement: Placement, model: ModelShape) -> Executor:
        lanes = lanes_of(self.options.device, placement.arena_bytes, poison=self.options.poison)
        side = side_of(self.options.device, lanes, store)
        slices = slices_of(self.options, self.blocks, placement.plan, self.file, side)
        updater = Updater(store, side, slices)
        self.steps.begin(store, updater.blobs, self._layout if self._resumes or self._source else None, self._source)
        updater.own(self.bindings)
        self.recorder.observe(lanes, [block.name for block in self.blocks])
        run = Run(
            blocks=self.blocks, store=store, lanes=lanes, side=side, slices=slices, updater=updater, recorder=self.recorder,
            heap=Heap(placement.host_memory, present_bytes=self.present_bytes, resident_meter=self.resident_meter),
            mirror=self.steps.mirror if self.keeps_steps else None, poison=self.options.poison,
        )  # fmt: skip
        executor = Executor(self._install(run, placement, model))
        executor.batch.commits = not self.keeps_steps
        return executor

    def replan(self, plan: Plan, *, or_else: Sequence[Callable[[ModelShape], Plan]] = ()) -> Plan:
        """Changes the plan between two batches of a fit: moves weights and state to its tiers.

        Returns the plan in force, one rule per block: ``plan``, or the first that fits the budget.

        Raises:
            HeteroError: Those of :meth:`start`; nothing has changed then.
            StoreError: A transfer failed, which stops the engine.
        """
        executor, store = self.running, self.running.store
        placer = self._placer()
        self.steps.about_to_move()
        executor.rest()
        with all_or_none(self.options.collectives):
            placement = placer.first_that_fits([lambda _: plan, *or_else], present_bytes=self._held_bytes)
        check_same_plan(self.options.collectives, placement.plan)
        placement = with_same_rooms(placement, self.options.collectives)
        self.directories.make_ready(store, placement, trains=self._trains, kept=self.keeps_steps)
        if placement.staging_bytes < store.staging_bytes:
            store.resize_staging(placement.staging_bytes)
        for block in self.blocks:
            executor.residency.weights.release(block)  # cached weights come back when they are used
        if placement.arena_bytes:
            executor.residency.set_aside(placement.arena_bytes)
        moves = list(zip(self.blocks, placement.plan.blocks, strict=True))
        for block, placed in sorted(moves, key=lambda m: growth(m[0], m[1], placer.model)):  # moves that free memory go first
            move_block(executor, block, placed, placement.geometries, self.steps.arrived)
            if block.weights_on_disk:
                executor.residency.parameters.hide(block)
                executor.residency.weights.release(block)
            elif executor.slices is None:
                self._setup.restore(block)
            else:
                executor.slices.settle(block, whole=not executor.residency.is_away(block))
                executor.residency.parameters.hide(block)
        executor.rest()
        if not placement.uses_disk and not self.keeps_steps:
            assert not any(blob.on_disk for blob in store.blobs), "they are dropped first"
            self._end_snapshot()
            store.files.detach()
        if placement.staging_bytes != store.staging_bytes:
            store.resize_staging(placement.staging_bytes)
        for binding, rule in zip(self.bindings, placement.by, strict=True):
            binding.choose(rule)
        executor.install(self._install(executor.context.run, placement, placer.model))
        executor.heap.allow(placement.host_memory)
        self._has_grown = False
        return placement.plan

    def follow(self, rules: StepRules) -> None:
        """Changes how gradients are used, from the next batch on.

        Raises:
            OutOfMemoryBudgetError: The plan in force does not fit then. The rules do not change.
        """
        self._one_process_only("the clipping of gradients changes during the fit")
        before, self.rules = self.rules, rules
        try:
            self.replan(self.running.plan)
        except OutOfMemoryBudgetError:
            self.rules = before
            raise

    def promote(self) -> bool:
        """Between two batches: gives state to what trains now. Does the plan need another check?"""
        self._setup.objects.check()
        for binding in self.bindings:
            if binding.capability is not Rule.WHOLE:  # their own ``step`` takes weights wherever they are
                self._promote(binding)
        return self._has_grown

    def _install(self, run: Run, placement: Placement, model: ModelShape) -> RunContext:
        """Installs a plan, as a fit begins and when the plan changes; returns the run under it."""
        rules = placement.rules
        run.updater.rules = rules
        if run.side is not None:
            run.side.gradients.norm_type = 2.0 if rules.norms and run.slices is None else None  # slices have norms of sums
        if run.slices is not None:
            run.slices.install(placement.plan)
        run.heap.counted_bytes = placement.activation_bytes
        return RunContext(run=run, placement=placement, model=model, files=self.directories.of_swaps(run.store, placement))

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Between two batches: inside, the model is not on the device, and its memory is free.

        Raises:
            OutOfMemoryBudgetError: The host has no room for what lives on the device only.
        """
        self._check_room_to_clear()
        with self.running.cleared():
            yield

    @property
    def _trains(self) -> bool:
        return bool(self.bindings) or self._fits

    @property
    def on_disk(self) -> bool:
        """Whether anything lives on disk."""
        return self.store is not None and self.store.files.directory is not None

    # ---- while it runs ---------------------------------------------------------------------------

    def _on_step(self, binding: OptimizerBinding, scale: float) -> None:
        self._promote(binding)
        self.running.handover(binding, scale)

    def _promote(self, binding: OptimizerBinding) -> None:
        """Gives state to parameters that began to train since; see [Note: What trains]."""
        if not binding.learn():
            return
        executor = self.running
        for one in self.bindings:
            one.learn()  # parts may have parameters of several
            one.check_params(self._known())
        before = executor.updater.owners
        executor.updater.own(self.bindings)
        owners = executor.updater.owners
        check_owners(self.blocks, owners)
        self.steps.owners_changed()
        ids = owners.keys() - before.keys()
        if not ids:
            return
        self._one_process_only("parameters that were frozen as the fit began train now")
        self._has_grown = True
        placer = self._placer()
        placer.check_optimizers(executor.plan)
        executor.relearn(placer.model)
        for block in self.blocks:
            for part in block.parts:
                mine = [p for p in part.params if id(p) in ids]
                if mine:
                    num_state = native_state(part, owners)
                    if num_state and (part.native is None or part.native.geometry.num_state == 0):
                        reopen(executor, part, num_state)
                        self.steps.reopened(part)
                    elif part.slots == 1:
                        part.slots = 2
                        self.steps.reopened(part)
                    self._handles += [observe_gradient(block, p) for p in mine if p.requires_grad]

    def _publish(self, binding: OptimizerBinding) -> None:
        """Before a state dict is made, and as a fit ends: ranks tell what state they have."""
        if self.executor is not None and self.executor.slices is not None:
            slice_steps.publish(binding, self.executor.slices.reads)

    def _known(self) -> set[int]:
        return {id(p) for block in self.blocks for p in block.params()}

    @contextmanager
    def materialized(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, the blocks of ``params`` are in memory, for code outside a block's forward."""
        executor = self.running
        ids = {id(p) for p in params}
        blocks = [b for b in self.blocks if any(id(p) in ids for p in b.params())]
        with ExitStack() as opened:
            for block in blocks:
                executor.residency.provide(block)
                for part in block.parts:
                    executor.residency.parameters.free(part)
                executor.residency.open(block)
                opened.callback(executor.residency.shut, block)
                if torch.is_grad_enabled():
                    executor.hold(block)
            opened.enter_context(executor.residency.changes(blocks))
            yield

    def memory_report(self) -> dict[str, int]:
        """Bytes so far: peaks of host and device memory, files, staging, and transfers."""
        if self._final_report:
            return self._final_report
        report = {"host_peak_bytes": peak_resident_bytes(), "disk_bytes": self.directories.disk_bytes}
        if buckets := self.rules.buckets.device_bytes + self.rules.buckets.host_bytes:
            report["bucket_bytes"] = buckets
        if self.executor is not None and self.executor.device is not None:
            report["device_peak_bytes"] = self.executor.lanes.peak_bytes()
        if self.store is not None:
            stats = self.store.stats()
            report |= {
                "bytes_read": stats.bytes_read,
                "bytes_read_beyond": self.store.engine.bytes_beyond(),
                "bytes_written": stats.bytes_written,
                "staging_bytes": self.store.staging_bytes,
            }
        return report

    def binding_of(self, optimizer: Optimizer) -> OptimizerBinding | None:
        """The binding of one of the optimizers."""
        return next((b for b in self.bindings if b.optimizer is optimizer), None)

    def _settle_state(self, writes: str = "") -> None:
        if writes and self.executor is not None:
            self.executor.changed_early(writes)
        if self.executor is not None and self.executor.device is not None:
            self.executor.lanes.drain()

    def keep_step(self, state: Callable[[StateFiles], str], *, last: bool) -> None:
        """The batch of an ``optimizer.step()`` is over: commits it; see :meth:`KeptSteps.keep`."""
        self._check_process()
        self._setup.objects.check()
        if self.executor is not None:
            for binding in self.bindings:  # the record has the groups that the batch's last hook has added
                self._promote(binding)
                binding.take_in()
            self.steps.keep(self.executor, state, last=last)

    # ---- stop ------------------------------------------------------------------------------------

    def stop(self, *, failed: bool = False) -> bool:
        """Finishes updates, brings weights and state into ordinary memory, and removes the files.

        If that does not fit the budget, everything stays where it is, and can be read there.
        Returns whether it is parked so: still open, until :meth:`unpark` or :meth:`abandon`.

        Raises:
            ForkedProcessError: This is a child of fork. Nothing of the parent changes.
            UnsupportedError: Code has changed what updates read, and nothing else has ``failed``.
        """
        self._check_process()
        with nullcontext() if self.executor is None else self.executor.handlers.in_use.ending(failed=failed):
            return self._stop()

    def _stop(self) -> bool:
        if self.store is None or self.executor is None:
            self.abandon()
            return False
        self.executor.finish()
        self._forget_anchors()
        for block in self.blocks:
            self.executor.residency.leave(block)
        parks = self._started and not self._fits_memory()
        if not parks or self.executor.device is not None:
            self.executor.stop()
        if parks:
            self.store.commit()
            if self.executor.device is None:
                self._handles = observe_forwards(self.blocks, ParkedAnchors(self.executor))
                self.executor.end_batch()
            kept = "" if self.options.disk_path else "; the store is removed when the process ends"
            log.info("The model does not fit host_memory, so it stays on disk%s.", kept)
            return True
        self.executor.residency.bring(*(b for b in self.blocks if self._started or self._setup.had_memory(b)), force=True)
        for block in self.blocks:
            self._setup.restore(block)
        if self.executor.slices is not None:
            for binding in self.bindings:
                self._publish(binding)
            self.kept_state = self.executor.slices.reads
            self.kept_state.detach(self.bindings)
        for binding in self.bindings:
            binding.unbind(read=self.options.collectives is None)
        self._close()
        return False

    def has_model(self) -> bool:
        """Whether the parameters still use this session's memory: another Trainer may have them."""
        return all(part.has_its_params() for block in self.blocks for part in block.parts)

    def unpark(self) -> None:
        """Prepares another :meth:`start` with these weights. Optimizer state starts anew."""
        for binding in self.bindings:
            binding.unbind(read=False)
            binding.optimizer.state.clear()
        self.bindings = []

    def abandon(self) -> None:
        """Closes everything without reading anything back, also after an error of the engine."""
        self._check_process()
        self._forget_anchors()
        for binding in self.bindings:
            binding.unbind(read=False)
        with suppress(HeteroError):  # the engine's error has been raised before
            self._close()

    def _forget_anchors(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _watch(self, executor: Executor) -> None:
        """Sees what is done with ``data``; writes count where memory is not the only copy."""
        forget(self._watched)
        copied = self.options.device is not None
        self._watched = [
            Watched(part, index, executor.residency, counts=copied or not p.requires_grad or p.dtype in MASTERED)
            for block in self.blocks
            for part in block.parts
            for index, p in enumerate(part.params)
        ]
        watch(self._watched)

    def _close(self) -> None:
        """Closes and removes everything, also after a refused start."""
        forget(self._watched)
        self._watched = []
        self._end_snapshot()
        if self.executor is not None:
            self.executor.stop()
        self.directories.close_swaps()
        if self.store is not None:
            self._final_report = self.memory_report()
            self.recorder.close()
            store, self.store = self.store, None
            store.loans.room = Loans().room  # in place of this session's
            store.close(self.blocks, remove=None if self._started or self._resumes else True)
        keep_apart(self.blocks)
        if not self._started:
            self._setup.undo()
        # Memory is freed with its last tensor, not when the garbage collector finds these cycles.
        for block in self.blocks:
            block.parts.clear()
        if self.executor is not None:
            self.executor.let_go()
        self.blocks, self.bindings, self.executor = [], [], None
        self.steps = self._last_steps = KeptSteps([], [], self.options, wanted=False)
