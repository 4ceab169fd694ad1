"""One model under the runtime, from adoption to release: cuts it, places it, opens its tiers, and gives it back.

The order matters and is the same for every plan: :meth:`Session.adopt` (blocks, reserved memory) → the optimizers are made →
:meth:`Session.start` (plan, budget, files, anchors) → training → :meth:`Session.stop`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_hetero._native import NativePart
from lightning_hetero._native.process import Owner
from lightning_hetero.clock import now_s
from lightning_hetero.errors import HeteroError, OutOfMemoryBudgetError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan, Tier
from lightning_hetero.optim.combined import members, obstacle
from lightning_hetero.runtime.anchors import observe, observe_gradient
from lightning_hetero.runtime.block_moves import growth, move_block, reopen
from lightning_hetero.runtime.budgets import Budgets
from lightning_hetero.runtime.construction import Construction
from lightning_hetero.runtime.context import Run, RunContext
from lightning_hetero.runtime.device.setup import lanes_of, side_of
from lightning_hetero.runtime.directories import Directories
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.initialize import Content
from lightning_hetero.runtime.kept_steps import KeptSteps, commit_ring, frozen_parts, part_names
from lightning_hetero.runtime.optimizers import OptimizerBinding
from lightning_hetero.runtime.options import SessionOptions, StepRules
from lightning_hetero.runtime.placement import Placement, check_owners, native_state
from lightning_hetero.runtime.process_memory import Heap
from lightning_hetero.runtime.recorder import Recorder
from lightning_hetero.runtime.state_snapshot import StateSnapshot, take_snapshot
from lightning_hetero.runtime.updates import Updater
from lightning_hetero.store.capacity import available_memory_bytes, peak_resident_bytes
from lightning_hetero.store.format.earlier_runs import aside, refusal
from lightning_hetero.store.format.snapshots import check_room, snapshot
from lightning_hetero.store.format.state_files import StateFiles
from lightning_hetero.store.live.blocks import Part
from lightning_hetero.store.live.loans import Loans
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.units import format_bytes

log = logging.getLogger(__name__)


class Session(Budgets):
    """The runtime of one model.

    Args:
        root: The model.
        options: The user's choices.
        content: Weights in files for parameters on the meta device.
        built: The model's construction, if part of it is in a file.
    """

    def __init__(
        self, root: nn.Module, options: SessionOptions, content: Content | None = None, built: Construction | None = None
    ) -> None:
        super().__init__(root, options, content, built)
        self._owner = Owner()
        self.recorder = Recorder(enabled=options.trace)
        self.store: TierStore | None = None
        self._directories = Directories(root, self.blocks, options)
        self._trained = {id(p) for p in root.parameters() if p.requires_grad}  # before callbacks unfreeze any
        self._obstacle, self._was_cut_late = "", False  # why steps cannot be kept
        self._handles: list[RemovableHandle] = []
        self._resumes = False
        self._final_report: dict[str, int] = {}
        self._state_snapshot: StateSnapshot | None = None  # somebody reads the store
        self._last_steps: KeptSteps | None = None  # of the last fit: a parked model may have been evaluated since

    @property
    def _layout(self) -> dict[str, Any]:
        """What a new store's manifest says of the parts, and a resume compares."""
        return {"parts": part_names(self.blocks), "frozen": frozen_parts(self.blocks, self._trained)}

    # ---- start ------------------------------------------------------------------------------------------------------------

    def cut(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Cuts the blocks' parts by optimizer, before :meth:`start`.

        Args:
            optimizers: The optimizers of a fit with the groups that they were made with, so that a resume makes the same parts.

        Returns:
            The optimizers for :meth:`start`: those that a combined optimizer runs stand for it.
        """
        inner = [one for optimizer in optimizers for one in members(optimizer)]
        self._obstacle = next(filter(None, map(obstacle, optimizers)), "")
        owners = {id(p): number for number, o in enumerate(inner) for group in o.param_groups for p in group["params"]}
        self._was_cut_late |= self._arrival.cut(owners, self.executor) and self.store is not None
        if self._was_cut_late:
            self._obstacle = self._obstacle or "the manifest of the store has the parts of before they were cut by optimizer"
        return inner

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
        self._check_process()
        begin_s = now_s()
        weights = sum(part.weight_bytes for block in self.blocks for part in block.parts)
        log.info("placing %d blocks with %s of weights.", len(self.blocks), format_bytes(weights))
        if optimizers is not None:
            hooks: Any = {"on_step": self._on_step, "on_read": self.drain, "on_zero": self.drain, "on_load": self._promote}
            self.bindings = [OptimizerBinding(o, **hooks) for o in optimizers]
            for binding in self.bindings:
                binding.check_params(self._known())
        self._rules, self._resumes = rules, resume
        self.steps = None
        if optimizers is not None:
            self.steps = self._last_steps = KeptSteps(self.root, self.blocks, self.bindings, self.options, self._obstacle)
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
        self._directories.default_root = default_root
        if self.store is None:
            ring = self._directories.ring = commit_ring(self.blocks, kept=self.keeps_steps)
            layout = {**ring, **self._layout}
            directory = self._directories.of_blocks(
                placement, trains=self._trains, kept=self.keeps_steps, layout=layout, resume=resume
            )
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
            self.store.loans.room = self._room_for_copies
            if self.store.files.states is not None:
                self.store.files.states.room_bytes = self._directories.beside_bytes
        lanes = lanes_of(self.options.device, placement.arena_bytes, poison=self.options.poison)
        side = side_of(self.options.device, lanes, self.store, placement.rules)
        updater = Updater(self.store, device=side)
        if self.steps is not None:
            self.steps.begin(self.store, updater.blobs, self._layout if resume else None)
        updater.own(self.bindings)
        heap = Heap(self.options.host_memory, present_bytes=self.present_bytes)
        self.recorder.observe(lanes, [block.name for block in self.blocks])
        run = Run(
            blocks=self.blocks, store=self.store, lanes=lanes, side=side, updater=updater, recorder=self.recorder, heap=heap,
            mirror=self.steps.mirror if self.steps is not None and self.steps.kept else None, poison=self.options.poison,
        )  # fmt: skip
        self.executor = Executor(self._install(run, placement, placer.model))
        self.executor.batch.commits = self.steps is None or not self.steps.kept
        if parked is None or optimizers is not None:
            self._arrival.bring(self.store, self.executor, placement, resumed=self.steps if resume else None)
            homes = [(p, part, i) for b in self.blocks for part in b.parts for i, p in enumerate(part.params)]
            for binding in self.bindings:
                binding.place(self.store, homes)
        if self.steps is not None:
            self.steps.placed()
        self.store.commit()
        if self.steps is not None:
            self.steps.committed()
        if side is not None:
            self.executor.rest()
            self.executor.residency.move_in()
        self._handles = observe(self.blocks, self.executor)
        self._started = True
        self._announce(placement, begin_s)

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
        executor, store = self.running, self.running.store
        placer = self._placer()
        if self.steps is not None:
            self.steps.about_to_move()
        executor.rest()
        placement = placer.place(plan, present_bytes=self._held_bytes)
        self._directories.make_ready(store, placement, trains=self._trains, kept=self.keeps_steps)
        if placement.staging_bytes < store.staging_bytes:
            store.resize_staging(placement.staging_bytes)
        for block in self.blocks:
            executor.residency.release(block)  # cached weights come back when they are used
        if placement.arena_bytes:
            executor.residency.set_aside(placement.arena_bytes)
        moves = list(zip(self.blocks, placement.plan.blocks, strict=True))
        for block, placed in sorted(moves, key=lambda m: growth(m[0], m[1], placer.model)):  # what gives memory back goes first
            move_block(executor, block, placed, placement.geometries, self._settled)
            if block.weights_on_disk:
                executor.residency.doors.hide(block)
                executor.residency.release(block)
            else:
                self._arrival.restore(block)
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
        executor.heap.allow(self.options.host_memory)
        return placement.plan

    def follow(self, rules: StepRules) -> None:
        """The loop uses gradients in another way from the next batch on.

        Raises:
            OutOfMemoryBudgetError: As for :meth:`start`, under the plan in force; the rules stay what they were then.
        """
        assert self.executor is not None
        before, self._rules = self._rules, rules
        try:
            self.replan(self.executor.plan)
        except OutOfMemoryBudgetError:
            self._rules = before
            raise

    def _install(self, run: Run, placement: Placement, model: ModelShape) -> RunContext:
        """Sets what a plan says of a run, as a fit begins and as another plan comes; returns the run under that plan."""
        rules = placement.rules
        run.updater.configure(clip_value=rules.clip_value, keep_gradients=rules.keep_gradients, waits=rules.waits)
        if run.side is not None:
            run.side.gradients.norm_type = 2.0 if rules.norms else None
        run.heap.counted_bytes = placement.activation_bytes
        return RunContext(
            run=run,
            plan=placement.plan,
            model=model,
            cache_bytes=placement.cache_bytes,
            device_cache_bytes=placement.device_cache_bytes,
            deferred=bool(rules.deferred),
            speculates=rules.speculates,
            may_defer=placement.may_defer,
            files=self._directories.of_swaps(run.store, placement),
        )

    def _room_for_copies(self) -> float:
        """Host memory beside what of the model is there, and staging; where no budget was given, most of what is free."""
        lent = 0 if self.store is None else self.store.loans.num_bytes
        if self.options.host_memory is None:
            return lent + available_memory_bytes() * 3 // 4
        return self.options.host_memory - self.present_bytes - (0 if self.store is None else self.store.staging_bytes)

    def _settled(self, part: Part) -> list[NativePart]:
        return [] if self.steps is None else self.steps.settled(part)

    @property
    def _trains(self) -> bool:
        return bool(self.bindings) or self.steps is not None

    @property
    def on_disk(self) -> bool:
        """Whether anything lives on disk."""
        return self.store is not None and self.store.files.directory is not None

    @property
    def disk_overhead_bytes(self) -> int:
        """Bytes that a store takes beside the files of blocks, whatever the plan."""
        return self._directories.overhead_bytes

    def disk_root(self) -> Path:
        """An existing directory on the disk where files are or would be."""
        return self._directories.disk_root(self.store)

    def _announce(self, placement: Placement, begin_s: float) -> None:
        """Says where everything lives now, and how long it took since ``begin_s`` to get there."""
        of_device = "in memory" if self.options.device is None else "on the device"
        what = [f"weights of {_by_tier((b.plan.weights for b in self.blocks), of_device)}"]
        if self._trains:
            trained = [b.plan.state for b in self.blocks if any(p.requires_grad for p in b.params())]
            what.append(f"optimizer state of {_by_tier(trained, of_device)}" if trained else "no optimizer state")
        if self.on_disk:
            what.append(f"{format_bytes(self._directories.disk_bytes)} of files in {self.disk_root()}")
        if placement.cache_bytes and any(b.weights_on_disk for b in self.blocks):
            what.append(f"{format_bytes(placement.cache_bytes)} of memory to cache weights from there")
        log.info("plan %r, in place after %.2g s: %s.", placement.plan.name, now_s() - begin_s, "; ".join(what))
        if self._trains and placement.rules.deferred:
            when = (
                "are tried during backward, and done again where they were wrong,"
                if placement.rules.speculates
                else "run after optimizer.step() in forward order,"
            )
            log.info("updates %s because %s.", when, placement.rules.deferred)

    # ---- while it runs ------------------------------------------------------------------------------------------------------

    def _on_step(self, binding: OptimizerBinding, scale: float) -> None:
        self._promote(binding)
        self.running.handover(binding, scale)

    def _promote(self, binding: OptimizerBinding) -> None:
        """Parameters that joined the optimizer during training (unfreezing) get state."""
        executor = self.running
        owners = executor.updater.owners
        fresh = [p for p in binding.params() if id(p) not in owners]
        if not fresh:
            return
        binding.check_params(self._known())
        ids = {id(p) for p in fresh}
        executor.updater.own(self.bindings)
        check_owners(self.blocks, executor.updater.owners)
        if self.steps is not None:
            self.steps.owners_changed()
        executor.relearn(self._placer().model)
        owners = executor.updater.owners
        for block in self.blocks:
            for part in block.parts:
                mine = [p for p in part.params if id(p) in ids]
                if mine:
                    num_state = native_state(part, owners)
                    if num_state and (part.native is None or part.native.geometry.num_state == 0):
                        reopen(executor, part, num_state)
                        if self.steps is not None:
                            self.steps.reopened(part)
                    self._handles += [observe_gradient(block, p) for p in mine if p.requires_grad]

    def _known(self) -> set[int]:
        return {id(p) for block in self.blocks for p in block.params()}

    @contextmanager
    def materialized(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Brings the blocks of ``params`` into memory for the time of the context: the door for reads outside a block's forward."""
        executor = self.running
        ids = {id(p) for p in params}
        blocks = [b for b in self.blocks if any(id(p) in ids for p in b.params())]
        opened = []
        try:
            for block in blocks:
                executor.residency.provide(block)
                for part in block.parts:
                    executor.residency.doors.free(part)
                executor.residency.open(block)
                opened.append(block)
                if torch.is_grad_enabled():
                    executor.hold(block)
            yield
        finally:
            for block in opened:
                executor.residency.shut(block)

    def memory_report(self) -> dict[str, int]:
        """Bytes so far: peak of the process's host memory, of files, of staging; and moved by the engine."""
        if self._final_report:
            return self._final_report
        report = {"host_peak_bytes": peak_resident_bytes(), "disk_bytes": self._directories.disk_bytes}
        if buckets := self._rules.buckets.device_bytes + self._rules.buckets.host_bytes:
            report["bucket_bytes"] = buckets
        if self.executor is not None and self.executor.device is not None:
            report["device_peak_bytes"] = self.executor.lanes.peak_bytes()
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
        self._check_process()
        if self.executor is not None:
            self.executor.drain()

    def commit(self) -> None:
        """Makes what was written by loading a checkpoint last."""
        if self.store is not None:
            self.store.commit()

    def snapshot(self, path: Path, leaving: Sequence[Path] = ()) -> None:
        """Links the last kept step to another path, in the place of a checkpoint that is there.

        Args:
            path: The path.
            leaving: Checkpoints that are removed before training goes on.

        Raises:
            ConfigError: ``path`` is taken by something else.
            OutOfDiskError: There is no room for what it takes as training goes on.
            StoreBusyError: A process uses the checkpoint that is there.
            StoreError: A transfer or a system call failed.
        """
        source, names = self.disk_root(), self.running.store.files.committed()
        check_room(source, path, names, leaving=(path, *leaving))
        snapshot(source, path, names, replace=True)

    def make_way(self) -> None:
        """The parked model is about to be trained anew in its store: the last fit's kept step is put aside, or that is refused.

        Raises:
            ConfigError: There is one, and ``new_run`` is false.
            StoreError: A system call failed.
        """
        steps, store = self._last_steps, self.store
        if steps is None or store is None or store.files.directory is None or not steps.last_kept:
            return
        path = store.files.directory.path
        if not self.options.new_run:
            raise refusal(path, steps.last_kept)
        steps.put_aside(aside(path))

    def snapshot_state(self) -> StateSnapshot:
        """The model and its optimizers as they are now, for a thread that reads them while training goes on.

        Whoever gets it closes it; until then the store's directory stays where it is.

        Raises:
            StoreError: A transfer or a system call failed.
        """
        self._check_process()
        self._end_snapshot()  # one at a time: what is linked takes space as training goes on
        self.drain()
        parts = [part for block in self.blocks for part in block.parts]
        self._state_snapshot = take_snapshot(
            self.store, parts, self.disk_root(), room_bytes=self._directories.room_bytes(self.store)
        )
        return self._state_snapshot

    def _end_snapshot(self) -> None:
        if self._state_snapshot is not None:
            self._state_snapshot.wait()
            self._state_snapshot = None

    def keep_step(self, state: Callable[[StateFiles], str], *, last: bool) -> None:
        """The batch of an ``optimizer.step()`` is over: all of it becomes one step that survives, the loop's state included.

        Args:
            state: Takes the loop's state; see :meth:`KeptSteps.keep`.
            last: Training may end with it.
        """
        self._check_process()
        if self.steps is not None and self.executor is not None:
            self.steps.keep(self.executor, state, last=last)

    def await_record(self) -> None:
        """A step is about to end: see [Note: How much a kill loses]."""
        if self.steps is not None:
            self.steps.await_record()

    # ---- stop ---------------------------------------------------------------------------------------------------------------

    def stop(self) -> bool:
        """Finishes updates, brings weights and optimizer state back into ordinary memory, closes and removes the files.

        Where that does not fit the budget, everything stays where it is, readable through the door.

        Returns:
            Whether the session is parked: still open, until :meth:`unpark` or :meth:`abandon`.

        Raises:
            ForkedProcessError: This is a child of fork; what the parent has stays as it is. Likewise the others.
        """
        self._check_process()
        if self.store is None or self.executor is None:
            self.abandon()
            return False
        self.executor.finish()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for block in self.blocks:
            self.executor.residency.leave(block)
        self.executor.stop()
        if self._started and not self._fits_memory():
            self.store.commit()
            log.info("The model does not fit host_memory, so it stays on disk; the store is removed when the process ends.")
            return True
        self.executor.residency.bring(*(b for b in self.blocks if self._started or self._arrival.had_memory(b)), force=True)
        for block in self.blocks:
            self._arrival.restore(block)
        for binding in self.bindings:
            binding.unbind()
        self._close()
        return False

    def _check_process(self) -> None:
        if self.store is not None:
            self._owner.check("the offloaded model")

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
        self._check_process()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for binding in self.bindings:
            binding.unbind(read=False)
        with suppress(HeteroError):  # whoever met the engine's error has raised it
            self._close()

    def _close(self) -> None:
        """Of a refused start nothing is left, files included."""
        self._end_snapshot()
        if self.executor is not None:
            self.executor.stop()
        self._directories.close_swaps()
        if self.store is not None:
            self._final_report = self.memory_report()
            self.recorder.close()
            store, self.store = self.store, None
            store.loans.room = Loans().room  # which has asked this session
            store.close(self.blocks, remove=None if self._started or self._resumes else True)
        if not self._started:
            self._arrival.undo()
        # Memory goes with the last tensor that looks at it, not whenever the garbage collector finds these cycles.
        for block in self.blocks:
            block.parts.clear()
        if self.executor is not None:
            self.executor.let_go()
        self.blocks, self.bindings, self.executor, self.steps = [], [], None, None
        self._last_steps = None


def _by_tier(tiers: Iterable[Tier], of_device: str) -> str:
    """Such as ``"2 blocks on the device, of 24 blocks on disk"``."""
    places = {Tier.DEVICE: of_device, Tier.HOST: "in memory", Tier.DISK: "on disk"}
    counts = Counter(places[tier] for tier in tiers)
    return ", of ".join(f"{counts[p]} block{'s' * (counts[p] > 1)} {p}" for p in dict.fromkeys(places.values()) if counts[p])
