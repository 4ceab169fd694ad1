"""Repeats what did not fit the device's memory, under a plan that needs less of it.

A training step begins again from its first batch; an evaluation repeats one batch.

[Note: Clean state]
A step can be repeated only from a clean state: its gradients are dropped, buffers, metrics and
random generators are set back, and no update has begun, or only updates that can be revoked. So
updates wait for all gradients in every batch that may not fit; docs/devices.md says which may not.
``training_step`` runs again, and so do the hooks before and after backward. ``self.log`` takes
effect once, in the first attempt that reaches the call.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hetero.errors import BatchMemoryError, DeviceMemoryError, HeteroError, OutOfDiskError, StoreError
from lightning_hetero.ir.plan import Plan
from lightning_hetero.lanes.memory import is_out_of_memory
from lightning_hetero.planners.demotion import demotions
from lightning_hetero.runtime.activations.buffers import Buffers, FoundBuffers
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.optimizers import Rule
from lightning_hetero.runtime.session import Session
from lightning_hetero.strategies.batch_state import MetricStates
from lightning_hetero.strategies.data import RandomStates, random_state, set_random_state
from lightning_hetero.strategies.namespaces import lightning_of
from lightning_hetero.units import MIB
from lightning_hetero.untyped import Function

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.types import STEP_OUTPUT

_T = TypeVar("_T")

_MOST = 16  # plans that one step may give up
_SLACK_BYTES = 32 * MIB  # smaller differences do not count: gradients on their way to the host come and go

OUT_OF_MEMORY = (DeviceMemoryError, RuntimeError)
"""Errors that :func:`is_out_of_memory` tells from others."""

_eager: Callable[[Function], Function] = torch.compiler.disable

log = logging.getLogger(__name__)

_BETWEEN = "between forward and backward"
_AFTER = "after backward"


@dataclass(slots=True)
class _Logged:
    """Calls of ``log`` that have taken effect, over all attempts of a batch."""

    calls: int = 0


@dataclass(slots=True)
class _Batch:
    run: Callable[[], STEP_OUTPUT]
    content: object  # its arguments
    random: RandomStates  # random generators before it
    backward: Callable[[Tensor], Tensor] | None = None  # from its loss, with the hooks around it
    logged: _Logged = field(default_factory=_Logged)


class _State:
    """Buffers and metrics as they are before something that may be repeated."""

    def __init__(self, root: nn.Module) -> None:
        self._buffers, self._metrics = Buffers("the model", root), MetricStates(root)
        self._found: FoundBuffers | None = None

    def remember(self) -> None:
        """It begins."""
        if self._found is not None:
            self._found.learn()
        self._found = self._buffers.now()
        self._metrics.remember()

    def restore(self) -> bool:
        """It will begin again; false if a buffer cannot be restored."""
        if self._found is not None and not self._found.restore():
            return False
        self._metrics.restore()
        return True


@dataclass(frozen=True, slots=True)
class _Demand:
    """What decides whether a batch fits."""

    plan: Plan  # the plan in force
    elements: int  # of all tensors of the batch
    side: int  # the longest side of any of them
    spare_bytes: int  # bytes that torch could get as the batch began; 0 if unknown

    def has_less_than(self, fitted: _Demand) -> bool:
        """Whether there is less memory than for the other."""
        return self.spare_bytes < fitted.spare_bytes - _SLACK_BYTES

    def fits_like(self, fitted: _Demand | None) -> bool:
        """Whether it fits because the other did."""
        if fitted is None or fitted.plan is not self.plan:
            return False
        return self.elements <= fitted.elements and self.side <= fitted.side and not self.has_less_than(fitted)


class StepRetry:
    """Repeats steps on a device that is too small for them; see [Note: Clean state].

    ``on_demotion`` gets each error before the plan changes, and returns what predicts a lesser one.
    """

    def __init__(
        self,
        session: Session,
        executor: Executor,
        *,
        module: pl.LightningModule,
        on_demotion: Callable[[BaseException], Callable[[Plan], Plan]],
    ) -> None:
        self._session, self._executor, self._module = session, executor, module
        self._on_demotion = on_demotion
        self._result = lightning_of(module.trainer).module("loops.optimization.automatic").ClosureResult
        self._before_step, self._before_evaluation = _State(session.root), _State(session.root)
        self._log = _Log(module)
        self._batches: list[_Batch] = []  # of the current step
        self._outside = ""  # where the step is, outside forward and backward
        self._fitted: _Demand | None = None  # the largest that ended in a step
        self._spare_bytes = 0  # what torch could get as the current batch began
        self._demotions = 0
        self._retries = executor.lanes.allocator_retries()
        self._has_warned = False

    def step_ended(self) -> None:
        """The optimizer's step is over. The next batch begins another one."""
        self._count_retries()
        self._batches.clear()
        self._demotions = 0

    def _count_retries(self) -> None:
        """Says how often the allocator had to empty its cache in the step; the first time loudly.

        A step that began again has done so on purpose.
        """
        before, self._retries = self._retries, self._executor.lanes.allocator_retries()
        if self._retries > before and not self._demotions:
            level, self._has_warned = logging.DEBUG if self._has_warned else logging.WARNING, True
            log.log(
                level,
                "%d times in this step the device had no memory in one piece until torch emptied its cache, which waits for the "
                "device and is slow. Lower device_memory, so that a plan leaves more.",
                self._retries - before,
            )

    def evaluate(self, run: Callable[[], _T]) -> _T:
        """Runs a batch that only reads weights, under lesser plans if necessary."""
        self._before_evaluation.remember()
        self._demotions = 0
        random, logged = random_state(), _Logged()

        def first() -> _T:
            with self._log.of(logged, begins=True):
                return run()

        def again() -> _T:
            set_random_state(random)
            return first()

        return self._until_it_fits(first, again, self._give_up_evaluation)

    def training_step(self, run: Callable[[], STEP_OUTPUT], content: object) -> STEP_OUTPUT:
        """Runs a batch's forward, under lesser plans if necessary."""
        executor = self._executor
        if not self._batches:
            self._before_step.remember()
        batch = _Batch(run, content, random_state())
        self._batches.append(batch)
        self._spare_bytes = (executor.lanes.spare_bytes() or 0) if executor.may_defer else 0
        executor.batch.probing = executor.may_defer and not self._demand().fits_like(self._fitted)

        def again() -> STEP_OUTPUT:
            self._repeat_earlier()
            return self._run(batch)

        return self._until_it_fits(partial(self._forward_of, batch), again, self._give_up_step)

    def backward(self, run: Callable[[Tensor], Tensor], loss: Tensor) -> Tensor:
        """Runs a batch's backward; under a lesser plan its forward too, to the same loss.

        ``run`` runs it from a loss, with the hooks before and after it. A ``loss`` that did not fit
        loses its graph.
        """
        if not self._batches:
            return run(loss)
        batch = self._batches[-1]
        batch.backward = run

        def first() -> Tensor:
            try:
                return self._backward_of(batch, loss)
            except OUT_OF_MEMORY as error:
                if is_out_of_memory(error):
                    loss.detach_()  # Lightning holds it, and with it the graph
                raise

        def again() -> Tensor:
            self._repeat_earlier()
            found = self._loss_of(self._run(batch))
            return loss if found is None else self._backward_of(batch, found)

        closed = self._until_it_fits(first, again, self._give_up_step)
        self._has_fitted()
        return closed

    @contextmanager
    def between_hooks(self) -> Iterator[None]:
        """Backward itself runs in the context; around it the hooks before and after it run."""
        self._outside = ""
        yield
        self._outside = _AFTER

    def step_failed(self, error: BaseException) -> HeteroError:
        """The error if memory was too small after backward, when nothing is repeated."""
        if self._outside == _BETWEEN:
            return _final(error, f"{_BETWEEN}, in on_before_zero_grad, which does not begin again")
        why = "in the optimizer's step, after backward, which does not begin again: what is in memory may be of two steps"
        return _final(error, why)

    # ---- attempts ----------------------------------------------------------------------------

    def _until_it_fits(self, attempt: Callable[[], _T], again: Callable[[], _T], give_up: Callable[[BaseException], None]) -> _T:
        while True:
            try:
                return attempt()
            except OUT_OF_MEMORY as out:
                if not is_out_of_memory(out):
                    raise
                error = _bare(out)
            give_up(error)
            attempt = again

    def _repeat_earlier(self) -> None:
        """Repeats the step's earlier batches."""
        for batch in self._batches[:-1]:
            loss = self._loss_of(self._run(batch))
            if loss is not None:
                self._backward_of(batch, loss)

    def _loss_of(self, output: STEP_OUTPUT) -> Tensor | None:
        loss: Tensor | None = self._result.from_training_step_output(
            output, self._module.trainer.accumulate_grad_batches
        ).closure_loss
        return loss

    def _run(self, batch: _Batch) -> STEP_OUTPUT:
        set_random_state(batch.random)
        self._executor.batch.probing = self._executor.may_defer
        return self._forward_of(batch)

    def _forward_of(self, batch: _Batch) -> STEP_OUTPUT:
        self._outside = ""
        with self._log.of(batch.logged, begins=True):
            output = batch.run()
        self._outside = _BETWEEN
        return output

    def _backward_of(self, batch: _Batch, loss: Tensor) -> Tensor:
        self._outside = _BETWEEN
        with self._log.of(batch.logged):
            return loss if batch.backward is None else batch.backward(loss)

    def _give_up_step(self, error: BaseException) -> None:
        """Discards the step's results, and changes to a plan that needs less of the device."""
        where = self._outside or self._executor.where
        self._refuse(error, where)
        self._change_plan(error, where, self._before_step, trains=True)

    def _give_up_evaluation(self, error: BaseException) -> None:
        """The same for a batch that only reads weights; gradients of a step under way stay."""
        self._change_plan(error, f"in an evaluation, {self._executor.where}", self._before_evaluation, trains=False)

    def _change_plan(self, error: BaseException, where: str, before: _State, *, trains: bool) -> None:
        executor = self._executor
        predicted = self._on_demotion(error)
        executor.give_up(gradients=trains)
        gc.collect()
        if executor.lanes.device.type != "cpu":
            torch.accelerator.empty_cache()
        if not before.restore():
            raise _final(error, f"{where}, and a buffer that never changed before has changed in the failed attempt")
        self._demotions += 1
        native = all(binding.capability is Rule.NATIVE for binding in self._session.bindings)
        failed = executor.plan
        options = demotions(failed, executor.model, native=native, trains=trains)
        for plan, what in options if self._demotions <= _MOST else ():
            try:
                self._session.replan(predicted(plan))
            except (HeteroError, torch.OutOfMemoryError) as refusal:
                if isinstance(refusal, StoreError) and not isinstance(refusal, OutOfDiskError):
                    raise  # the engine has stopped
                log.info("device memory: a plan that %s is refused: %s", what, refusal)
                continue
            begins = "step" if trains else "batch"
            log.warning("The device's memory is too small %s: %s The plan now %s; the %s begins again.", where, error, what, begins)
            return
        raise _final(error, f"{where}, and plan {failed.name!r} has nothing left to give up")

    def _refuse(self, error: BaseException, where: str) -> None:
        if not self._module.automatic_optimization:
            raise _final(error, f"{where}, and optimization is manual, so that the step cannot begin again")
        if self._executor.has_begun:
            raise _final(
                error,
                f"{where}, and updates of this step have begun, so that it cannot begin again: what is in memory is of two steps. "
                f"Go on from the last checkpoint, or with ckpt_path from the last step that disk_path has kept",
            )

    def _demand(self) -> _Demand:
        batch = self._batches[-1]
        shapes = [leaf.shape for leaf in tree_leaves(batch.content) if isinstance(leaf, Tensor)]
        sides = (side for shape in shapes for side in shape)
        return _Demand(self._executor.plan, sum(shape.numel() for shape in shapes), max(sides, default=0), self._spare_bytes)

    def _has_fitted(self) -> None:
        """Notes what a backward needed, if its batch ended in a step and so held all gradients."""
        if not self._executor.armed:
            return
        now, fitted = self._demand(), self._fitted
        if now.fits_like(fitted):
            return  # changes nothing: memory that varies a little would otherwise lower the mark again and again
        if fitted is not None and fitted.plan is now.plan and not now.has_less_than(fitted):
            now = _Demand(
                now.plan, *(max(getattr(row, key) for row in (now, fitted)) for key in ("elements", "side", "spare_bytes"))
            )
        self._fitted = now


class OneAttempt:
    """In place of :class:`StepRetry` in a group, whose other ranks would have to repeat it, too."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def step_ended(self) -> None:
        """The optimizer's step is over."""

    def evaluate(self, run: Callable[[], _T]) -> _T:
        """Runs a batch that only reads weights."""
        return self._named(run)

    def training_step(self, run: Callable[[], STEP_OUTPUT], content: object) -> STEP_OUTPUT:
        """Runs a batch's forward."""
        return self._named(run)

    def backward(self, run: Callable[[Tensor], Tensor], loss: Tensor) -> Tensor:
        """Runs a batch's backward."""
        return self._named(partial(run, loss))

    @contextmanager
    def between_hooks(self) -> Iterator[None]:
        """Backward itself runs in the context."""
        yield

    def step_failed(self, error: BaseException) -> HeteroError:
        """The error if memory was too small after backward."""
        return self._final(error, "after backward")

    def _named(self, run: Callable[[], _T]) -> _T:
        try:
            return run()
        except OUT_OF_MEMORY as error:
            if not is_out_of_memory(error):
                raise
            raise self._final(error, self._executor.where) from error

    def _final(self, error: BaseException, where: str) -> HeteroError:
        why = "and it does not begin again where several processes train together (go on from the last checkpoint, on all of them)"
        return _final(error, f"{where}, {why}")


Retry = StepRetry | OneAttempt


def _bare(error: BaseException) -> BaseException:
    """The error without its frames, which hold tensors."""
    seen: BaseException | None = error
    while seen is not None:
        if seen.__traceback__ is not None:
            traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__
    return error.with_traceback(None)


def _final(error: BaseException, why: str) -> HeteroError:
    return BatchMemoryError(
        f"the device's memory is too small for this batch {why}: {error} Use a smaller batch, smaller blocks (block_cls), or more "
        f"device memory: raise device_memory, or give the EmulatedDevice more memory.",
        getattr(error, "needed_bytes", 0),
        "device",
    )


class _Log:
    """Replaces ``log`` while a batch runs, and leaves out the calls of earlier attempts.

    It is one object for the whole fit, and compiled code breaks its graph for it, so the code stays
    compiled.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._logged = _Logged()  # of the batch under way
        self._log: Function = module.log
        self._calls = 0  # of the current attempt

    @contextmanager
    def of(self, logged: _Logged, *, begins: bool = False) -> Iterator[None]:
        """Counts calls of ``log`` in the context; ``begins``: an attempt does."""
        attributes = vars(self._module)
        outer = attributes.get("log")
        if outer is not self:
            self._log = self._module.log
        if begins:
            self._calls = 0
        before, self._logged = self._logged, logged
        attributes["log"] = self
        try:
            yield
        finally:
            self._logged = before
            del attributes["log"]
            if outer is not None:
                attributes["log"] = outer

    @_eager
    def __call__(self, *args: object, **kwargs: object) -> None:
        self._calls += 1
        if self._calls > self._logged.calls:
            self._log(*args, **kwargs)
            self._logged.calls = self._calls
