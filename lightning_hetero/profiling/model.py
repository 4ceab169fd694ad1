"""The profile of a model, measured in a real training step.

Several batches are observed (ProTrain section 3.2). The first has a recorder of operators, for FLOP
and memory. The later ones have only a clock at the blocks' anchors, for seconds, because recording
slows a step, and a process's first step is slow anyway. Each figure is the median over these,
because caches and memory take a batch or two to settle, and a machine stalls now and then. While
blocks are timed nothing overlaps: updates and transfers run one after the other and their time does
not count. Weights and state stay on the tiers of the current plan. Observation does not change a
bit of the result.

The seconds of all blocks, forward and backward, add up to those of a timed batch. Code outside
every block belongs to the block that follows, and the loss to the last block. Code after backward
(the optimizer's step without updates, the loop, callbacks) belongs to the block with which backward
ends. The runtime's work at an anchor before it waits counts too, because every step has it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from lightning_hetero.clock import now_s
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.model import BlockProfile, BlockShape, ModelProfile, ModelShape
from lightning_hetero.ir.schedule import NO_BLOCK, Phase
from lightning_hetero.profiling.memory import Observed, RecordedMemory
from lightning_hetero.profiling.operators import Addresses, BoundAddresses, OperatorRecorder, live_bytes, storages_in
from lightning_hetero.profiling.timeline import Mark, Stretch, Timeline, attributed
from lightning_hetero.runtime.optimizers import Rule
from lightning_hetero.runtime.session import Session
from lightning_hetero.store.capacity import heap_meter
from lightning_hetero.store.live.blocks import Block
from lightning_hetero.units import format_bytes


class BatchProfiler:
    """Observes one training batch of a session, from :meth:`start` to :meth:`stop`.

    Args:
        session: The session, between two batches.
        tokens: Tokens of the batch, or samples if there are no tokens.
        operators: Whether to record operators; otherwise only blocks are timed.
    """

    def __init__(self, session: Session, *, tokens: int, operators: bool) -> None:
        assert session.executor is not None
        self._session, self._executor, self._tokens = session, session.executor, tokens
        device, lanes = session.executor.device, session.executor.lanes
        addresses = Addresses(session.blocks) if device is None else BoundAddresses(device.weights)
        device_type = lanes.device_type
        # In host memory trained parts of frozen blocks, and their casts, stay when the rest leaves.
        kept = set() if device is not None else {p.data_ptr() for b in session.blocks if b.rest is not None for p in b.params()}
        self._recorder = OperatorRecorder(addresses, self._now, device_type=device_type, kept=kept) if operators else None
        # If compute is a stream, the host waits for an event of it before it reads the clock.
        self._catch_up: Callable[[], object] = float if device is None else lanes.catch_up
        self._apart = device is not None and device_type != "cpu"
        self._heap_bytes: Callable[[], int] = lanes.allocated_bytes if self._apart else heap_meter()
        self._peak_bytes: Callable[[], int] = lanes.take_peak_bytes if self._apart else int
        self._timeline = Timeline(self._mark, self._note_inputs)
        self._inputs: dict[int, tuple[int, ...]] = {}
        self._handles: list[RemovableHandle] = []
        self._saved: frozenset[int] | None = None
        self._left: set[int] = set()  # saved storages that were moved elsewhere
        self._again: set[int] = set()  # storages that a repeated forward saved
        self._recording = False
        self._looking_s = 0.0  # time for marks, while compute waits
        self._in_python = device is not None or any(binding.capability is not Rule.NATIVE for binding in session.bindings)
        self._in_python |= session.options.collectives is not None  # collectives at anchors are no compute
        self._last: Mark | None = None  # when the last forward or backward ended

    def start(self) -> None:
        """Begins. If blocks are timed, nothing overlaps from now on."""
        self._executor.rest()
        self._executor.batch.serial = self._recorder is None
        self._executor.watcher = self._timeline
        casts = self._executor.residency.casts
        casts.on_made, casts.on_saved = self.set_aside, self.leaves
        if self._executor.handlers.activations is not None:
            self._executor.handlers.activations.watcher = self
        self._session.recorder.catch_up = self._catch_up
        if self._recorder is not None:
            for block in self._session.blocks:
                for param in block.params():
                    if param.requires_grad:
                        register: Callable[..., RemovableHandle] = param.register_post_accumulate_grad_hook
                        self._handles.append(register(self._recorder.is_gradient))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context of the batch's ``training_step``."""
        with self._looking(Phase.FORWARD):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of a backward of the batch."""
        if self._saved is None:
            self._saved = frozenset() if self._recorder is None else self._recorder.alive() | self._left
        with self._looking(Phase.BACKWARD):
            yield

    def stop(self) -> Observed | None:
        """Lets the session overlap again; ``None`` if the batch had no backward."""
        stretches = [*self._timeline.stretches]
        if self._last is not None and not self._in_python:
            stretches.append(Stretch(phase=Phase.BACKWARD, block=NO_BLOCK, begin=self._last, end=self._mark()))
        self._executor.batch.serial = False
        self._executor.watcher = None
        self._executor.residency.casts.on_made = self._executor.residency.casts.on_saved = None
        if self._executor.handlers.activations is not None:
            self._executor.handlers.activations.watcher = None
        self._session.recorder.catch_up = float
        for handle in self._handles:
            handle.remove()
        recorder, saved = self._recorder, self._saved
        if saved is None:
            return None
        if recorder is None:
            return Observed(stretches=tuple(attributed(stretches)), tokens=self._tokens, inputs={})
        recorder.forget()
        shown = live_bytes(recorder, everything=True)
        held = saved | self._again
        casts = held & self._casts(recorder, stretches)
        return Observed(
            stretches=tuple(attributed(stretches)),
            hidden_bytes=tuple(_hidden(stretch, shown) for stretch in stretches),
            tokens=self._tokens,
            ran=tuple(recorder.ran),
            made=tuple(recorder.made),
            live_bytes=tuple(live_bytes(recorder, without=casts)),
            saved_live_bytes=tuple(live_bytes(recorder, only=held, without=casts)),
            peak_bytes=max(shown),
            saved=saved,
            again=frozenset(self._again),
            casts=casts,
            inputs=self._inputs,
        )

    # ---- watcher of activations ------------------------------------------------------------------

    @contextmanager
    def recomputing(self, block: int) -> Iterator[None]:
        """Context of a repeated forward of a block."""
        recorder = self._recorder
        before = 0 if recorder is None else len(recorder.made)
        with self._timeline.again(block):
            yield
        if recorder is not None:
            self._again |= {number for number in recorder.alive() if number >= before}

    def leaves(self, storage: torch.UntypedStorage) -> None:
        """A saved tensor is moved elsewhere until backward."""
        number = None if self._recorder is None else self._recorder.set_aside(storage)
        if number is not None:
            self._left.add(number)

    def set_aside(self, storage: torch.UntypedStorage) -> None:
        """Memory of the runtime itself, for restored tensors or inputs of a recomputation."""
        if self._recorder is not None:
            self._recorder.set_aside(storage)

    # ---- details ---------------------------------------------------------------------------------

    @contextmanager
    def _looking(self, phase: Phase) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._timeline.during(phase))
            if self._recorder is not None and not self._recording:  # a backward may run inside training_step
                self._recording = True
                stack.callback(setattr, self, "_recording", False)
                mode: AbstractContextManager[Any] = self._recorder
                stack.enter_context(mode)
            yield
        self._last = self._mark()

    def _now(self) -> float:
        self._catch_up()
        return now_s() - self._waited_s() - self._looking_s

    def _waited_s(self) -> float:
        """Seconds that compute has waited, Python updates at anchors included."""
        store = self._session.store
        return self._session.recorder.waited_s if self._in_python or store is None else store.engine.waited_s

    def _mark(self) -> Mark:
        recorder, now = self._recorder, self._now()
        # Malloc walks its free memory to answer, and the host's backward is never compared.
        heap = self._heap_bytes() if self._apart or self._timeline.phase is Phase.FORWARD else 0
        if recorder is not None:
            done = {"operators": len(recorder.ran), "events": len(recorder.events)}
            return Mark(seconds=now, heap_bytes=heap, peak_bytes=self._peak_bytes(), **done)
        mark = Mark(seconds=now, heap_bytes=heap)
        self._looking_s += self._now() - now
        return mark

    def _casts(self, recorder: OperatorRecorder, stretches: Sequence[Stretch]) -> frozenset[int]:
        """Storages that are casts of weights, made in forwards of blocks that are not pinned."""
        whose = {block.index for block in self._session.blocks if not block.spec.pinned}
        forwards = [s for s in stretches if s.block in whose and (s.phase is Phase.FORWARD or s.again)]
        made = [n for s in forwards for op in recorder.ran[s.begin.operators : s.end.operators] for n in op.made]
        return frozenset(number for number in made if recorder.made[number].cast)

    def _note_inputs(self, block: Block, inputs: Any) -> None:
        if self._recorder is not None and block.index not in self._inputs:
            self._inputs[block.index] = tuple(dict.fromkeys(storages_in(self._recorder, inputs)))


def _hidden(stretch: Stretch, shown: Sequence[int]) -> int:
    """Memory of a device's allocator in a stretch beyond the storages: workspaces of kernels.

    Args:
        stretch: The stretch.
        shown: Bytes of all storages before the first event and after each.
    """
    begin, end = stretch.begin, stretch.end
    grown = max(shown[begin.events : end.events + 1]) - shown[begin.events]
    return max(0, end.peak_bytes - begin.heap_bytes - grown)


def model_profile(
    model: ModelShape,
    recorded: Observed,
    timed: Sequence[Observed] = (),
    *,
    compute_itemsize: int,
    constant_host_bytes: int,
    constant_device_bytes: int = 0,
) -> ModelProfile:
    """Combines the observations of some batches.

    Args:
        model: The blocks' sizes.
        recorded: A batch with its operators; the profile is of its number of tokens.
        timed: Later batches without recording, whose seconds count, scaled to that number. If
            empty, the recorded batch's count.
        compute_itemsize: Bytes of one weight.
        constant_host_bytes: Host memory that no plan changes.
        constant_device_bytes: The same for a device with memory of its own.
    """
    clocks = tuple(timed) or (recorded,)

    def seconds(phase: Phase, block: int) -> float:
        return statistics.median(recorded.tokens / clock.tokens * clock.seconds(phase, block) for clock in clocks)

    memory = RecordedMemory(recorded, len(model.blocks))
    memory.correct([int(statistics.median(clock.grown_bytes(i) for clock in clocks)) for i in range(len(model.blocks))])
    backward = memory.backward()
    state_itemsize = 8 if compute_itemsize == 4 else 12
    rows = []
    for index, block in enumerate(model.blocks):
        own = block.weight_bytes != block.num_params * compute_itemsize  # of another dtype, such as quantized ones
        rows.append(
            BlockProfile(
                name=block.name,
                num_params=block.num_params,
                num_trainable_params=_trainable(block, state_itemsize),
                forward_s=seconds(Phase.FORWARD, index),
                backward_s=seconds(Phase.BACKWARD, index),
                forward_flop=memory.forward_flop[index],
                activation_bytes=memory.activation_bytes[index],
                boundary_bytes=memory.boundary_bytes[index],
                transient_bytes=memory.transient_bytes[index],
                cast_bytes=memory.cast_bytes[index],
                operators=memory.operators(index),
                backward=backward[index],
                pinned=block.pinned,
                weight_bytes=block.weight_bytes * own,
                gradient_bytes=block.gradient_bytes * own,
                state_bytes=block.state_bytes * own,
                in_place_bytes=min(block.in_place_bytes, block.weight_bytes if own else block.num_params * compute_itemsize),
                copied=block.copied,
            )
        )
    return ModelProfile(
        name=model.name,
        tokens=recorded.tokens,
        compute_itemsize=compute_itemsize,
        constant_device_bytes=constant_device_bytes,
        constant_host_bytes=constant_host_bytes,
        blocks=tuple(rows),
    )


def check_activations(profile: ModelProfile) -> None:
    """Refuses a profile without saved tensors, because swaps and recomputation would look free.

    A repeated block after the first one uses the output of another block, so it has a boundary. If
    such blocks save more than their boundaries, operators inside them have made it. Every backward
    needs some temporary memory.

    Args:
        profile: A profile that was measured on a device with memory of its own.

    Raises:
        ConfigError: No block has a boundary, memory of its own during compute, or operators.
    """
    repeated = [block for block in profile.blocks if not block.pinned]
    beyond = [block for block in repeated[:-1] if block.activation_bytes > block.boundary_bytes]  # the last one's may be the loss
    missing = {
        "the blocks' inputs (boundary_bytes)": len(repeated) > 1 and not any(b.boundary_bytes for b in profile.blocks),
        "what they need beside what they save (transient_bytes)": not any(b.transient_bytes for b in profile.blocks),
        "the operators that save something": bool(beyond) and not any(b.operators for b in profile.blocks),
    }
    unseen = [what for what, absent in missing.items() if absent]
    if unseen:
        saved = format_bytes(sum(b.activation_bytes for b in profile.blocks))
        raise ConfigError(
            f"the profile of {profile.name!r} ({len(profile.blocks)} blocks, {saved} saved for backward) does not show "
            f"{' and '.join(unseen)}, so swaps and recomputation cannot be planned from it. Code that torch.compile has made "
            f'one kernel of shows none of this: leave the model uncompiled, or pass a plan by name, such as plan="host".'
        )


def _trainable(block: BlockShape, state_itemsize: int) -> int:
    """Elements with state, alignment padding included where the engine keeps the state."""
    return min(block.num_params, max(block.num_trainable_params, block.state_bytes // state_itemsize))
