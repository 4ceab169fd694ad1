"""``with lightning_hetero.offload(model, optimizer):`` around a loop of the user's own.

The loop stays as it is in PyTorch. Hooks follow it:

- a forward of the model with gradients begins a batch, unless the last batch has not had its
  backward, and its results are still alive;
- the first gradient that reaches a result of that forward, or a block, begins a backward, and
  autograd says when it ends;
- ``optimizer.step()`` is the verdict on the updates.

[Note: Overlap]
What a loop does between backward and the next batch is not known. So by default ``step()`` returns
when weights are updated, and gradients stay, as in PyTorch. With ``overlap="forward"`` it returns
at once: updates run while the loop goes on, and the next forward waits for the blocks that it uses.
With ``overlap="backward"`` they also run during backward, as soon as the gradients of a block are
complete, and ``step()`` finds no gradients left.
"""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_hetero.callbacks import num_tokens, table
from lightning_hetero.convert.importing import ModelWeights, check_begun, refuse_random_base
from lightning_hetero.errors import ConfigError, UnsupportedError, did_you_mean
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.trace import Trace
from lightning_hetero.lanes.backends import BACKENDS, COMPUTES_ON
from lightning_hetero.lanes.stream_device import StreamDevice
from lightning_hetero.loops.gradients import taken_gradients
from lightning_hetero.optim.combined import members
from lightning_hetero.planning.autoplan import Autoplan, BatchSize, Stage
from lightning_hetero.planning.step_clock import StepClock
from lightning_hetero.runtime import quantized, quantizing
from lightning_hetero.runtime.anchors import eager, tensors_in
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.options import StepRules
from lightning_hetero.runtime.session import Session
from lightning_hetero.runtime.taken_gradients import TakenGradients
from lightning_hetero.strategies import option_checks as checked
from lightning_hetero.strategies.data import random_state, set_random_state
from lightning_hetero.strategies.devices import move_buffers, optimizers_to_host
from lightning_hetero.strategies.option_checks import Choices
from lightning_hetero.untyped import Value

log = logging.getLogger(__name__)

Overlap = Literal["none", "forward", "backward"]
Optimizers = Optimizer | Sequence[Optimizer] | Callable[[nn.Module], Optimizer | Sequence[Optimizer]]

_RULES = {
    "none": StepRules(deferred="the loop is the user's", accumulates=True, keep_gradients=True, waits=True, norms=True),
    "forward": StepRules(deferred="the loop is the user's", accumulates=True, keep_gradients=True, norms=True),
    "backward": StepRules(),
}


_OF_TRAINERS = {  # options of ``HeteroOffloadStrategy`` that need Lightning's Trainer
    "new_run", "durability", "keep_every", "verify", "verify_digests", "link_checkpoints", "exclude_frozen_parameters",
    "chunked_head", "timeout",
}  # fmt: skip


def choices_of(plan: str | os.PathLike[str] | Plan, *, device: Value = None, **options: Value) -> Choices:
    """Checks the options of a loop.

    Raises:
        ConfigError: A value is not allowed, or there is no such option.
        UnsupportedError: Training does not compute on that device.
    """
    known = sorted(inspect.signature(checked.choices).parameters.keys() - _OF_TRAINERS)
    for name in options:
        if name in _OF_TRAINERS:
            raise ConfigError(f"{name} is an option of HeteroOffloadStrategy, and needs Lightning's Trainer. Leave it out.")
        if name not in known:
            raise ConfigError(f"{name} is no option of a loop; allowed: {', '.join(known)}.{did_you_mean(name, known)}")
    if not isinstance(device, str | torch.device):
        return checked.choices(plan, durability="none", device=device, **options)
    return computing_on(checked.choices(plan, durability="none", **options), torch.device(device))


def computing_on(choices: Choices, device: torch.device) -> Choices:
    """The same on the CPU or on a GPU, whose memory is measured."""
    if device.type == "cpu":
        return choices
    if device.type not in BACKENDS:
        raise UnsupportedError(f'device={str(device)!r}; a loop computes on {COMPUTES_ON}. Pass such a device, or "cpu".')
    if choices.options.device is not None:
        raise ConfigError(f"device={choices.options.device!r} is emulated on the CPU, but the loop computes on {device}.")
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    lanes = StreamDevice.of(device, choices.options.device_memory)
    return replace(choices, options=checked.on_lanes(choices.options, choices.autoplan, lanes))


def offload(
    model: nn.Module,
    optimizers: Optimizers | None = None,
    plan: str | os.PathLike[str] | Plan = "auto",
    *,
    overlap: Overlap = "none",
    **options: Value,
) -> OffloadedLoop:
    """Places a model on its tiers for a training loop in plain PyTorch, until the context ends.

    >>> with offload(model, optimizer, plan="disk", host_memory="8GiB"):
    ...     for batch in data:
    ...         loss = model(batch)
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()

    Losses, weights and optimizer state are those of the same loop without the context, with
    ``fused=True`` for Adam and AdamW. Clipping, accumulation, gradient scaling, schedulers,
    closures and several optimizers stay as they are in the loop. Weights and state in
    ``state_dict()`` are read where they live. After the context the model is in memory again, if it
    fits ``host_memory``. Steps are not kept: after a crash begin from a checkpoint of your own.

    Args:
        model: The model. With ``weights=`` it may be on the meta device.
        optimizers: The optimizers whose ``step`` the loop calls, or a function that makes them from
            the model once it has memory. ``None``: the model is only evaluated.
        plan: As for ``HeteroOffloadStrategy``.
        overlap: What updates run beside; see [Note: Overlap]. ``"none"``: ``step()`` returns when
            weights are updated. ``"forward"``: it returns at once, and gradients may not be written
            in place until the next backward, except by ``optimizer.zero_grad``. ``"backward"``:
            updates also run during backward; each backward is followed by ``step()``, and nothing
            reads or changes gradients between the two.
        options: Those of ``HeteroOffloadStrategy`` for tiers, planners and traces: ``weights``,
            ``block_cls``, ``host_memory``, ``device_memory``, ``disk_path``, ``disk_capacity``,
            ``hardware_profile``, ``trace`` and so on. ``device`` may be a GPU's name too: the model
            comes from the CPU, and the loop moves its batches to the GPU.

    Returns:
        A context, whose ``plan``, ``trace`` and ``memory_report()`` say what happens.

    Raises:
        HeteroError: An option is wrong, or no plan fits.
    """
    return OffloadedLoop(model, optimizers, choices_of(plan, **options), overlap=overlap)


class OffloadedLoop:
    """A model and its optimizers under the runtime, from :func:`offload` to the end of its context.

    Attributes:
        model: The model.
        optimizers: Its optimizers.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers | None, choices: Choices, *, overlap: Overlap) -> None:
        if overlap not in _RULES:
            raise ConfigError(f"overlap={overlap!r}; allowed: {', '.join(map(repr, _RULES))}.")
        self.model, self._overlap, self._autoplan = model, overlap, choices.autoplan
        self._device = torch.device("cpu") if choices.options.device is None else choices.options.device.device
        self._batches = 0  # since the last optimizer step
        self._step_batches = 1  # of that step
        self._has_ended = False  # the context; a model that does not fit memory is on disk still
        self._is_open = False  # a training batch is under way
        self._evaluates = False  # batches without gradients are under way
        self._in_backward = self._had_backward = False
        self._taken = TakenGradients()
        self._hooks: list[weakref.ref[partial[None]]] = []  # of the graph of the batch under way
        self._looking: AbstractContextManager[None] | None = None  # the profiler, at a batch
        self._looking_back: AbstractContextManager[None] | None = None  # the same, at a backward of it
        self._handles: list[RemovableHandle] = []
        self._last_plan: Plan | None = None
        self.optimizers: tuple[Optimizer, ...] = ()
        self._bound: list[Optimizer] = []  # of these, those that the runtime updates for
        self._quantized: list[quantized.Removable] = []
        _refuse_second(model)
        quantized.quantize(model)
        quantizing.unpack(model)
        files = None if choices.weights is None else ModelWeights(model, choices.weights)
        content = quantizing.content_of(model, files, {})
        if files is None:
            refuse_random_base(model, lambda *_: None)
        check_begun(model, () if files is None else files, lambda *_: False)
        self.session = Session(model, choices.options, content)
        try:
            if optimizers is None:
                self.session.start(None, StepRules(), default_root=Path.cwd())
                self._started()
            else:
                self.train(optimizers(model) if callable(optimizers) else optimizers)
        except BaseException:
            self.session.abandon()
            raise

    def train(self, optimizers: Optimizer | Sequence[Optimizer]) -> None:
        """The model, which was only evaluated until now, trains by these optimizers."""
        given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        if self._overlap == "backward" and len(given) != 1:
            raise ConfigError(
                f'overlap="backward" with {len(given)} optimizers; allowed: one, whose step() follows each backward. Pass '
                f'overlap="forward".'
            )
        self._end_batch()
        self.optimizers, session = tuple(given), self.session
        cut = session.cut(given)
        self._bound = [one for one in given if any(member in cut for member in members(one))]
        if self._autoplan is not None:
            self._autoplan.fit_begins(session)
        session.start(cut, _RULES[self._overlap], default_root=Path.cwd())
        self._started()

    def _started(self) -> None:
        for handle in (*self._handles, *self._quantized):
            handle.remove()
        self._quantized = quantized.follow(self.model)
        if self._device.type != "cpu":
            move_buffers(self.model, self._device)
        self._clock = StepClock(self._executor.lanes.now)
        _LOOPS.add(self)
        self._handles = self._observe()

    @property
    def _executor(self) -> Executor:
        return self.session.running

    # ---- hooks -------------------------------------------------------------------------------

    def _observe(self) -> list[RemovableHandle]:
        """Hooks of blocks come before the runtime's own, those of optimizers around ``step``."""
        handles: list[RemovableHandle] = []
        for block in self.session.blocks:
            if block.rest is None:  # a trained part has the anchors of the rest
                module = block.spec.module
                handles += [
                    module.register_forward_pre_hook(eager(self._forward_begins), prepend=True, with_kwargs=True),
                    module.register_forward_hook(eager(self._forward_ends), prepend=True),
                ]
        for optimizer in self.optimizers:
            if optimizer not in self._bound:  # it steps by its own code
                handles.append(optimizer.register_step_pre_hook(lambda *_: self.session.drain()))
                continue
            handles += [
                optimizer.register_step_pre_hook(self._step_begins),
                optimizer.register_step_post_hook(lambda optimizer, *_: self._step_ends(optimizer)),
            ]
        return handles

    def _forward_begins(self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._in_backward:  # recomputation
            return
        if not torch.is_grad_enabled() or not self.optimizers:
            if not self._is_open and not self._evaluates:
                self._evaluates = True
                self._executor.begin_step(training=False)
        elif not self._is_open or self._had_backward or not self._has_graph():
            self._begin_batch(args, kwargs)

    def _has_graph(self) -> bool:
        """Whether the graph of the batch under way is still alive, so that a backward may come."""
        return not self._hooks or any(hook() is not None for hook in reversed(self._hooks))

    def _forward_ends(self, _: nn.Module, args: tuple[object, ...], output: object) -> None:
        if not self._is_open or self._in_backward or not torch.is_grad_enabled():
            return
        given = frozenset(map(id, args))
        leaves = [leaf for leaf in tensors_in(output) if leaf.requires_grad and id(leaf) not in given]
        if not leaves:  # a frozen block before the first one that trains: no backward comes here
            return
        hook = partial(OffloadedLoop._backward_begins, self)  # lives as long as the node that has it
        for leaf in leaves:
            register: Callable[[Callable[[Tensor], None]], RemovableHandle] = leaf.register_hook
            register(hook)
        self._hooks.append(weakref.ref(hook))

    def _begin_batch(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._end_batch()
        self._refuse_averaging()
        session, autoplan = self.session, self._autoplan
        if autoplan is not None:
            self._plan(autoplan, BatchSize(tokens=_tokens(args, kwargs), micro_batches=self._step_batches))
        if session.promote():
            session.replan(self._executor.plan, or_else=session.options.plans)
        self._clock.batch_begins()
        if self._overlap == "backward":
            self._executor.arm(session.binding_of(self.optimizers[0]))
        self._is_open, self._had_backward, self._in_backward, self._hooks = True, False, False, []
        self._batches += 1
        self._executor.begin_step(training=True)
        if autoplan is not None and autoplan.profiler is not None:
            self._look(autoplan.profiler.forward())

    def _refuse_averaging(self) -> None:
        """DistributedDataParallel averages ``param.grad`` as backward ends: it has to be there.

        Otherwise it averages what backward has not sent away yet, and drops what lies elsewhere.
        """
        if torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is None:
            return
        if self._executor.device is not None:
            which, change = "device=, which gradients leave during backward", "leave device= out"
        elif self._overlap == "backward":
            which, change = 'overlap="backward", where updates begin during backward', 'pass overlap="forward"'
        else:
            return
        raise UnsupportedError(
            f"the model computes in DistributedDataParallel, which averages gradients as backward ends, with {which}. To train in "
            f"one process start one, by python and not by torchrun or accelerate launch, and leave DistributedDataParallel out; in "
            f"several, {change}, or use HeteroParallelStrategy(offload=...) of Lightning."
        )

    def _plan(self, autoplan: Autoplan, batch: BatchSize) -> None:
        """Profiles the batch that begins, or brings a new plan into force."""
        random = random_state() if autoplan.stage is Stage.PLAN else None
        made = autoplan.before_batch(self.session, batch)
        if random is not None:  # planners and micro-benchmarks may draw random numbers
            set_random_state(random)
        if made is not None:
            self._clock.forget()
            self._executor.heap.peak_bytes = 0
            log.info("%s", table(made, autoplan, autoplan.next_best(self.session)))

    def _look(self, looking: AbstractContextManager[None]) -> None:
        self._looking = looking
        looking.__enter__()

    def _look_away(self) -> None:
        """Ends what the profiler looks at.

        Not called within a backward: as it ends, autograd puts the dispatch modes back that were
        there when it began, the profiler's too.
        """
        self._back_ends()
        if self._looking is not None:
            looking, self._looking = self._looking, None
            looking.__exit__(None, None, None)

    def _back_ends(self) -> None:
        if self._looking_back is not None:
            looking, self._looking_back = self._looking_back, None
            looking.__exit__(None, None, None)

    def _backward_begins(self, _: Tensor) -> None:
        if self._in_backward:
            return
        self._executor.handlers.in_use.check()
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(self))
        if self._looking is not None and self._autoplan is not None and self._autoplan.profiler is not None:
            self._looking_back = self._autoplan.profiler.backward()
            self._looking_back.__enter__()
        self._executor.backward_starts()

    def _backward_ends(self) -> None:
        self._executor.backward_ends()
        self._back_ends()
        self._in_backward, self._had_backward = False, True
        self._executor.check_gradients()
        if self._overlap == "backward":
            self._executor.wait_handed()  # what the loop changes from now on comes too late, not sometimes
            self._taken.place(self._named(), self._executor.updater.updated)

    def _backward_failed(self) -> None:
        """An exception has left backward. Gradients until then stay, as in PyTorch."""
        if self.is_open:
            self._executor.backward_ends()
            self._back_ends()
            self._in_backward, self._had_backward = False, True
            self._executor.show_gradients()

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for block in self.session.blocks:
            for part in block.parts:
                yield from zip(part.names, part.params, strict=True)

    def _step_begins(
        self, optimizer: Optimizer, args: tuple[Value, ...], kwargs: dict[str, Value]
    ) -> tuple[tuple[Value, ...], dict[str, Value]]:
        self._look_away()
        self._executor.arm(self.session.binding_of(optimizer))
        given = [self._seen(one) if callable(one) else one for one in args]
        return tuple(given), {key: self._seen(one) if callable(one) else one for key, one in kwargs.items()}

    def _seen(self, closure: Callable[[], Value]) -> Callable[[], Value]:
        """A closure whose batch the profiler sees, and not the optimizer's own code after it."""

        def run() -> Value:
            try:
                return closure()
            finally:
                self._look_away()

        return run

    def _step_ends(self, optimizer: Optimizer) -> None:
        self._executor.arm(None)
        if changed := self._taken.clear():
            raise UnsupportedError(
                f'overlap="backward", and the loop has set the gradient of {changed[0]!r} between backward and optimizer.step(): '
                f'its update had begun during backward. Pass overlap="forward", which allows any loop until step().'
            )
        self._step_batches, self._batches = max(1, self._batches), 0
        if optimizer is self._bound[-1]:
            self._end_batch(stepped=True)

    def _end_batch(self, *, stepped: bool = False) -> None:
        """The batch under way is over, if there is one; ``stepped``: by an optimizer step."""
        if self._evaluates:
            self._evaluates = False
            self._executor.end_batch()
        if not self._is_open:
            return
        self._is_open, self._hooks = False, []
        self._look_away()
        self._taken.clear()
        if self._overlap == "backward" and self._executor.armed:
            self._executor.arm(None)
            raise UnsupportedError(
                'overlap="backward", and another batch begins before optimizer.step(): updates of the batch before have begun. '
                'Call step() after each backward, or pass overlap="forward", which allows any loop.'
            )
        self._executor.end_batch()
        self._clock.batch_ended(stepped=stepped)
        if self._autoplan is not None:
            self._autoplan.after_batch()
            if (seconds := self._clock.take()) is not None:
                self._autoplan.after_step(self.session, seconds)

    # ---- for users ---------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the model is under the runtime: until :meth:`close`."""
        return self.session.executor is not None and not self._has_ended

    @property
    def plan(self) -> Plan | None:
        """The plan in force, one rule per block; after the context the last one."""
        return self._executor.plan if self.is_open else self._last_plan

    @property
    def trace(self) -> Trace:
        """Spans of the latest steps, with ``trace=True``."""
        return self.session.recorder.trace()

    def memory_report(self) -> dict[str, int]:
        """Peaks of memory and bytes on disk; see ``HeteroOffloadStrategy.memory_report``."""
        return self.session.memory_report()

    def close(self, *, failed: bool = False) -> None:
        """Brings the model back, or leaves it on disk if it does not fit; may be called twice.

        Args:
            failed: An exception has interrupted the loop, maybe one of the runtime.
        """
        if not self.is_open:
            return
        self._last_plan, self._has_ended = self._executor.plan, True
        for handle in (*self._handles, *self._quantized):
            handle.remove()
        self._handles, self._quantized = [], []
        self._look_away()
        self._taken.clear()
        if self._autoplan is not None:
            self._autoplan.abandon_batch()
        self._executor.arm(None)
        try:
            gradients = taken_gradients(param for _, param in self._named())
            self.session.stop(failed=failed)
            for param, gradient in gradients:
                param.grad = gradient
            if self._device.type != "cpu":
                move_buffers(self.model, torch.device("cpu"))
                optimizers_to_host(self.optimizers)
        except Exception:
            if not failed:
                raise
            log.warning("The engine had failed; weights and optimizer state on disk are not brought back.")
            self.session.abandon()

    def __enter__(self) -> OffloadedLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(failed=kind is not None)


_LOOPS = weakref.WeakSet["OffloadedLoop"]()


def _refuse_second(model: nn.Module) -> None:
    ids = {id(p) for p in model.parameters()}
    for loop in list(_LOOPS):
        shared = next((name for name, p in loop._named() if id(p) in ids), None)
        if shared is None:
            continue
        if loop.is_open:
            raise ConfigError(f"{shared!r} is offloaded already, by a context that has not ended. End it first, by close().")
        raise ConfigError(
            f"{shared!r} is still on disk, where an earlier context has left it, because the model does not fit host_memory. Train "
            f"in one context, or raise host_memory."
        )


class _EndOfBackward:
    """Autograd calls it as a backward ends, and drops it if the backward fails."""

    def __init__(self, loop: OffloadedLoop) -> None:
        self._loop: OffloadedLoop | None = loop

    def __call__(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop._backward_ends()

    def __del__(self) -> None:
        if self._loop is not None:
            self._loop._backward_failed()


def _tokens(args: tuple[object, ...], kwargs: dict[str, object]) -> int:
    return num_tokens(kwargs if "input_ids" in kwargs else [*args, *kwargs.values()])
