"""The memory that plans for one model may use, and the memory in use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import nn

from lightning_hetero.errors import HeteroError, OutOfMemoryBudgetError, UnsupportedError
from lightning_hetero.ir.model import BlockShape, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.ir.schedule import NO_BLOCK
from lightning_hetero.lanes import memory
from lightning_hetero.lowering.rank_rules import RankRules
from lightning_hetero.runtime import quantized, quantizing
from lightning_hetero.runtime.construction import Construction
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.initialize import Content
from lightning_hetero.runtime.kept_steps import KeptSteps
from lightning_hetero.runtime.model_setup import ModelSetup
from lightning_hetero.runtime.optimizers import OptimizerBinding
from lightning_hetero.runtime.options import SessionOptions, StepRules, host_budget
from lightning_hetero.runtime.placement import Placer
from lightning_hetero.runtime.slice_reads import SliceReads
from lightning_hetero.runtime.slices import shared_file
from lightning_hetero.store.capacity import available_memory_bytes, resident_bytes
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.partition import ALIGNMENT_BYTES
from lightning_hetero.units import format_bytes


class Budgets:
    """One model, and the memory that it uses; ``content`` and ``built`` are for ModelSetup.

    ``alignment_bytes`` is that of parameters in a store that is resumed. ``None``: that of the
    memory in which the model computes.
    """

    def __init__(
        self,
        root: nn.Module,
        options: SessionOptions,
        content: Content | None,
        built: Construction | None = None,
        alignment_bytes: int | None = None,
    ) -> None:
        self.root, self.options = root, options
        if alignment_bytes is None:
            alignment_bytes = ALIGNMENT_BYTES if options.device is None else memory.ALIGNMENT_BYTES
        self.alignment_bytes = alignment_bytes
        ranks = options.collectives
        self.file = None if ranks is None else shared_file(ranks)
        if ranks is not None and self.file is not None:
            ranks.notes.add(self.file)
        self._setup = ModelSetup(
            root, options.block_cls, content, built, alignment_bytes=alignment_bytes, own=options.own, file=self.file,
            share=None if ranks is None else ranks.broadcast,
        )  # fmt: skip
        self.blocks = self._setup.blocks
        self._meet()
        self._scale_bytes = quantized.scale_bytes(root) + quantizing.coming_scale_bytes(root)
        self._reading_bytes = quantizing.reading_bytes(root)
        self.bindings: list[OptimizerBinding] = []
        self.executor: Executor | None = None  # runs its steps, once the session has started
        self.store: TierStore | None = None
        # Of a profiled batch. From then on the machine's free memory has to hold activations too.
        self.profile: ModelProfile | None = None
        self.steps = KeptSteps([], [], options, wanted=False)  # keeps the steps of a fit
        self.rules = StepRules()  # how the training loop uses gradients
        self._started = False
        self.kept_state: SliceReads | None = None  # of one of several ranks, after the fit

    def _one_process_only(self, what: str) -> None:
        """Refuses ``what`` in the fit of a model that several ranks share."""
        if self.options.collectives is not None:
            raise UnsupportedError(f"{what}, and {self.options.own.ranks} devices share the model. Pass devices=1.")

    def _meet(self) -> None:
        """If ranks share memory, waits until all of them are here: one has filled it for all."""
        if self.file is not None and self.options.collectives is not None:
            self.options.collectives.meet("SHARE", NO_BLOCK)

    def _cut(self, owners: Mapping[int, int], whole: Collection[int]) -> bool:
        """See :meth:`ModelSetup.cut`; no rank reads weights meanwhile that another one fills."""
        self._meet()
        was_cut = self._setup.cut(owners, self.executor, whole)
        self._meet()
        return was_cut

    @property
    def running(self) -> Executor:
        """The executor.

        Raises:
            HeteroError: The session has not been started, or has ended.
        """
        if self.executor is None:
            raise HeteroError("the session has not been started, or has ended.")
        return self.executor

    def needed_bytes(self, plan: Plan) -> int:
        """The least of the budget that a resolved plan needs."""
        placer = self._placer()
        return placer.least_bytes(plan, placer.needs(plan))

    def fitting(self, plan: Plan) -> Plan:
        """The plan as it would run here; see :meth:`Placer.fitting`."""
        return self._placer().fitting(plan)

    @property
    def device_memory(self) -> int | None:
        """Bytes of a device with memory of its own that plans may use; ``None`` without one."""
        return self._placer().device_memory

    @property
    def runs(self) -> RankRules:
        """What the rules for blocks may say, of one of several ranks."""
        return self._placer().runs

    def check(self, plan: Plan) -> None:
        """Refuses a plan that could not run now, without changing anything.

        Raises what :meth:`~lightning_hetero.runtime.session.Session.start` raises of plans.
        """
        self._placer().place(plan, present_bytes=self._held_bytes)

    def _placer(self) -> Placer:
        # A user's host_memory is for what a plan can place. Free memory has to hold activations,
        # as does any budget if a device has memory of its own: its plans place activations.
        profile = self.profile if self.options.host_memory is None or self.options.device is not None else None
        name, every = type(self.root).__name__, self.options.keep_every if self.keeps_steps else 0
        return Placer(
            name, self.blocks, self.options, self.bindings, self.rules, profile, kept_every=every,
            scale_bytes=self._scale_bytes, reading_bytes=0 if self._started else self._reading_bytes,
            in_place=self.file is not None,
        )  # fmt: skip

    @property
    def keeps_steps(self) -> bool:
        """Whether a later run can resume from steps of this fit."""
        return self.steps.kept

    def host_memory(self) -> int:
        """Bytes of the budget: host_memory if given, else free memory plus what this run uses."""
        return host_budget(self.options, self._held_bytes, profiled=self.profile is not None)

    @property
    def _held_bytes(self) -> int:
        """Bytes of the budget in use: all but the constant part, once that is known."""
        device = self.options.device
        present, on_device = self.present_bytes, 0 if device is None or not device.is_unified else device.held_bytes()
        if self.profile is None or not self._started:
            return on_device + present
        return on_device + max(present, self.resident_meter() - self.profile.constant_host_bytes)

    @property
    def present_bytes(self) -> int:
        """A rank's weights, their scales and optimizer state that are in memory now."""
        there = [b for b in self.blocks if b.resident and self._setup.is_set(b)]
        scales = self._scale_bytes if self.options.device is None else 0
        if self.executor is None:
            return scales + sum(p.slice_bytes for b in there for p in b.parts)
        weights = scales + sum(p.slice_bytes for b in there if self.executor.residency.is_on_host(b) for p in b.parts)
        away = (Tier.DISK,) if self.options.device is None else (Tier.DISK, Tier.DEVICE)
        rows = zip(self.executor.model.blocks, self.blocks, strict=True)
        return weights + sum(s.state_bytes for s, b in rows if b.plan.state not in away and any(p.stepped for p in b.parts))

    @property
    def resident_meter(self) -> Callable[[], int]:
        """Says how much host memory this process holds now; of what ranks share, its slices."""
        if self.file is None:
            return resident_bytes
        rows = [(block, sum(part.slice_bytes for part in block.parts)) for block in self.blocks]

        def read() -> int:
            # Memory for blocks made on the meta device is filled after the budget begins to count.
            there = (size for block, size in rows if block.resident and (self._started or self._setup.is_set(block)))
            return resident_bytes(shared=False) + sum(there)

        return read

    def _room_for_copies(self) -> float:
        """Host memory for copies: the rest of the budget, or most of the free memory."""
        lent, staging = (0, 0) if self.store is None else (self.store.loans.num_bytes, self.store.staging_bytes)
        budget = self.options.host_memory if self.executor is None else self.executor.context.placement.host_memory
        if budget is None:
            return lent + available_memory_bytes() * 3 // 4
        return budget - self.present_bytes - staging

    def _check_room_to_clear(self) -> None:
        """Refuses to empty the device if the host has no room for what lives there only."""
        parts = [part for block in self.blocks for part in block.parts]
        moving = sum(part.weight_bytes for part in parts if not self.running.residency.is_on_host(part.block))
        kept = [part for part in parts if part.state_home is not None and part.block.plan.state is Tier.DEVICE]
        moving += sum(4 * part.slice_elements * part.require_native().geometry.num_state for part in kept)
        if moving > self._room_for_copies():
            raise OutOfMemoryBudgetError(
                f"measuring this machine's device needs its memory, and {format_bytes(moving)} of weights and optimizer state that "
                f"live there do not fit host memory meanwhile. Measure the machine before, with `lightning-hetero profile`, or "
                f"raise host_memory.",
                moving,
                "host",
            )

    def _fits_memory(self) -> bool:
        """Whether all weights and all state may be in memory at once."""
        pairs, collectives = list(zip(self.running.model.blocks, self.running.plan.blocks, strict=True)), self.options.collectives
        if collectives is not None:
            return all(fits for (fits,) in collectives.agree([self._shared_fits(pairs)]))
        if self.options.host_memory is not None:
            return self._scale_bytes + sum(b.weight_bytes + b.state_bytes for b, _ in pairs) <= self.options.host_memory
        more = sum(b.weight_bytes for b, p in pairs if p.weights is Tier.DISK)
        more += sum(b.state_bytes for b, p in pairs if p.state is Tier.DISK)
        return more <= available_memory_bytes() * 3 // 4

    def _shared_fits(self, pairs: Sequence[tuple[BlockShape, BlockPlan]]) -> bool:
        """The same on one of several ranks, which gets all weights and keeps slices of state."""
        ranks, given = self.options.own.ranks, self.options.host_memory
        copies = 1 if self.file is not None else ranks  # of the slices, on each rank
        away = [(b, p) for b, p in pairs if Tier.DISK in (p.weights, p.state)]
        if given is not None and away:
            return sum(b.weight_bytes * copies + b.state_bytes for b, _ in pairs) <= given // ranks
        more = sum(b.weight_bytes * copies * (p.weights is Tier.DISK) + b.state_bytes * (p.state is Tier.DISK) for b, p in away)
        return more <= available_memory_bytes() * 3 // 4 // ranks
