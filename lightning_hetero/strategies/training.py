"""The steps of one fit, from a batch to the commit, as Lightning's hooks reach them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.ir.plan import UpdateLane
from lightning_hetero.lanes.memory import is_out_of_memory
from lightning_hetero.planning.autoplan import Autoplan
from lightning_hetero.planning.step_clock import StepClock
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.method_patches import Patches
from lightning_hetero.runtime.options import StepRules
from lightning_hetero.runtime.session import Session
from lightning_hetero.strategies.namespaces import lightning_of
from lightning_hetero.strategies.precision import Method, PrecisionHooks
from lightning_hetero.strategies.step_retry import OUT_OF_MEMORY, Retry
from lightning_hetero.strategies.training_state import TrainingState
from lightning_hetero.strategies.update_rules import step_rules
from lightning_hetero.strategies.verification import Verifier

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.utilities.types import STEP_OUTPUT


log = logging.getLogger(__name__)

_CLIPPING_CHANGED = (
    "The Trainer's way of clipping gradients has changed after the batch began. Change it before the batch, as in "
    "on_train_batch_start."
)
_CLIPPING_CHANGED_IN_BACKWARD = (
    "The Trainer's way of clipping gradients has changed during backward, when updates of this step had begun: what is in memory "
    "is of two steps. Change it before backward, as in on_before_backward or on_train_batch_start."
)
_CLOSURE_WRAPPED = (
    "optimizer_step of the LightningModule calls optimizer.step with a closure of its own, which may look at gradients or change "
    "weights after backward. Pass the closure that it gets, and use on_before_optimizer_step for the rest."
)


def _clipping_of(trainer: pl.Trainer) -> tuple[str, object]:
    """How gradients are clipped. Clipping by norm reads its threshold when it clips."""
    threshold = trainer.gradient_clip_val
    if not threshold:
        return "", None
    return ("value", threshold) if trainer.gradient_clip_algorithm == "value" else ("norm", None)


class Peers(Protocol):
    """The other processes of a group that trains the same model."""

    def rules(self, rules: StepRules) -> StepRules:
        """The rules of a fit if all ranks average gradients."""

    def batch_begins(self, *, training: bool) -> None:
        """A batch is about to begin."""

    def gradients_computed(self) -> None:
        """A backward has ended, and no hook has seen its gradients yet."""


class Training:
    """The steps of one fit.

    Contract: made after the session has started; :meth:`close` when the fit ends, normally or not.
    One thread calls.
    """

    def __init__(
        self,
        *,
        session: Session,
        executor: Executor,
        module: pl.LightningModule,
        precision: Precision,
        speculates: bool,
        autoplan: Autoplan | None,
        state: TrainingState | None,
        verifier: Verifier | None,
        retry: Retry | None,
        peers: Peers | None,
        is_trial: Callable[[], bool],
        make_links: Callable[[], None],
    ) -> None:
        self._session, self._executor, self._module, self._precision = session, executor, module, precision
        self._autoplan, self.state, self._verifier = autoplan, state, verifier
        self._retry, self._peers, self._is_trial, self._make_links = retry, peers, is_trial, make_links
        # With manual optimization `optimizer.step()` is called within a batch, which may still use
        # the weights.
        self._is_manual = not module.automatic_optimization
        self._closure = lightning_of(module.trainer).module("loops.optimization.automatic").Closure
        self.clock: StepClock | None = None
        if autoplan is not None:
            self.time_steps()
        self._stepped = False
        self.step_ended = False  # the current batch ends in an optimizer step
        self._clipping = _clipping_of(module.trainer)  # as the rules in force have it
        self._hooks = self._make_hooks(speculates=speculates)
        self._patches = Patches()
        if retry is not None and not self._is_manual:
            loop = module.trainer.fit_loop.epoch_loop.automatic_optimization
            self._patches.replace(loop, "_on_before_zero_grad", partial(self._before_zero_grad, loop._on_before_zero_grad, retry))
        if state is not None:
            state.attach(self.batch_ended)

    def _make_hooks(self, *, speculates: bool) -> PrecisionHooks:
        return PrecisionHooks(
            self._precision,
            backward=self._backward,
            optimizer_step=self.optimizer_step,
            speculates=self._executor if speculates else None,
        )

    def _follow_clipping(self, trainer: pl.Trainer) -> None:
        """A callback has changed how the Trainer clips gradients, from this batch on."""
        self._clipping = _clipping_of(trainer)
        log.info(
            "from this batch on gradients are clipped by gradient_clip_val=%s, gradient_clip_algorithm=%s.",
            trainer.gradient_clip_val,
            trainer.gradient_clip_algorithm,
        )
        if self._autoplan is not None:
            self._autoplan.abandon_batch()  # its profile would mix two kinds of clipping
        self._hooks.close()
        rules = step_rules(trainer, self._module, self._precision)
        if self._peers is not None:
            rules = self._peers.rules(rules)
        self._session.follow(rules)
        self._hooks = self._make_hooks(speculates=rules.speculates)

    def training_step(self, plain: Callable[[], STEP_OUTPUT], args: tuple[object, ...], kwargs: dict[str, object]) -> STEP_OUTPUT:
        """Runs a batch's ``training_step``: ``plain``, to which these arguments are bound."""
        trainer = self._module.trainer
        if _clipping_of(trainer) != self._clipping:
            self._follow_clipping(trainer)
        if self._session.promote():
            self._fit_budget()
        verifier = self._verifier
        if verifier is not None:
            self._session.drain()
            with self._hooks.aside(), self._reading():
                verifier.batch_begins(self._module, self._module.trainer.optimizers[0], self._precision, args, kwargs)
        if self.clock is not None:
            self.clock.batch_begins()
        forward = partial(self._forward, plain)
        output = forward() if self._retry is None else self._retry.training_step(forward, (args, kwargs))
        if verifier is not None:
            verifier.batch_ended(output)
        return output

    def _fit_budget(self) -> None:
        """Weights have been set free: checks the budget again, and divides it anew.

        Raises:
            OutOfMemoryBudgetError: No plan fits. Weights and state are those of the last step.
        """
        session = self._session
        if self._autoplan is not None:
            self._autoplan.abandon_batch()  # its profile would mix two states of the model
        try:
            session.replan(self._executor.plan, or_else=session.options.plans)
        except OutOfMemoryBudgetError as error:
            why = "weights that were frozen train now, so more memory is needed"
            raise OutOfMemoryBudgetError(f"{why}: {error}", error.needed_bytes, error.tier) from error

    def _forward(self, plain: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        if self._peers is not None:
            self._peers.batch_begins(training=True)
        self._executor.begin_step(training=True)
        profiler = None if self._autoplan is None else self._autoplan.profiler
        try:
            with nullcontext() if profiler is None else profiler.forward():
                output = plain()
        finally:
            if self._is_manual:
                self._executor.end_batch()
        if self._is_manual:
            self._session.steps.await_record()
        return output

    def backward(self, run: Callable[[Tensor], Tensor], loss: Tensor) -> Tensor:
        """Runs Lightning's ``Strategy.backward`` of a loss: a backward and the hooks around it."""
        output = run(loss) if self._retry is None else self._retry.backward(run, loss)
        if not self._executor.armed and not self._is_manual:  # gradients accumulate: no step ends the batch
            self._executor.end_batch()
        return output

    def _backward(self, plain: Method, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Runs the precision plugin's ``backward`` from a scaled loss."""
        executor = self._executor
        clipping = _clipping_of(self._module.trainer)
        if clipping != self._clipping:  # since the batch began; the next one brings new rules
            executor.await_verdict(_CLIPPING_CHANGED)
            if self._autoplan is not None:
                self._autoplan.abandon_batch()
        profiler = None if self._autoplan is None else self._autoplan.profiler
        with (
            nullcontext() if self._retry is None else self._retry.between_hooks(),
            nullcontext() if profiler is None else profiler.backward(),
        ):
            executor.backward_starts(loss)
            plain(loss, *args, **kwargs)
            executor.backward_ends()
            executor.check_gradients()
            if _clipping_of(self._module.trainer) != clipping:
                executor.take_back(_CLIPPING_CHANGED_IN_BACKWARD)
            if self._peers is not None:
                with self._waiting():
                    self._peers.gradients_computed()

    def _before_zero_grad(self, plain: Callable[[Optimizer], None], retry: Retry, optimizer: Optimizer) -> None:
        """Runs the hooks ``on_before_zero_grad``, also in a batch without the optimizer's step."""
        try:
            plain(optimizer)
        except OUT_OF_MEMORY as error:
            if not is_out_of_memory(error):
                raise
            raise retry.step_failed(error) from error

    def _waiting(self) -> AbstractContextManager[None]:
        """The time in the context is not part of the step's time."""
        return nullcontext() if self.clock is None else self.clock.stopped()

    def optimizer_step(self, plain: Method, optimizer: Optimizer, *args: object, **kwargs: object) -> object:
        """Runs the plugin's ``optimizer_step``: the batch ends in a step, so updates may run."""
        session, executor = self._session, self._executor
        self._stepped = self.step_ended = True
        executor.arm(session.binding_of(optimizer))
        try:
            if not isinstance(kwargs.get("closure"), self._closure) and not self._is_manual:
                executor.await_verdict(_CLOSURE_WRAPPED)
            output = plain(optimizer, *args, **kwargs)
        except OUT_OF_MEMORY as error:
            if self._retry is None or not is_out_of_memory(error):
                raise
            raise self._retry.step_failed(error) from error
        finally:
            executor.arm(None)
            if not self._is_manual:
                executor.end_batch()
            if self._retry is not None:
                self._retry.step_ended()
        if not self._is_manual:
            session.steps.await_record()
        if self._verifier is not None:
            self._verify(self._verifier, optimizer)
        return output

    def _reading(self) -> AbstractContextManager[None]:
        """In the context ranks that share a model read its weights and state together."""
        slices = self._executor.slices
        return nullcontext() if slices is None else slices.reads.by_all()

    def _verify(self, verifier: Verifier, optimizer: Optimizer) -> None:
        blocks = self._session.blocks
        on_cpu = {id(p) for block in blocks if block.plan.update is UpdateLane.CPU for p in block.params()}
        self._session.drain()
        with self._waiting(), self._hooks.aside(), self._reading():
            verifier.check(self._module, optimizer, self._precision, on_cpu)
        if not verifier.steps_left:
            self._verifier = None

    def batch_ended(self) -> None:
        """All hooks of a training batch have run: keeps its optimizer step."""
        if not self.step_ended or self.state is None:
            return
        self.step_ended = False
        if not self._is_trial():
            bindings = self._session.bindings
            self._session.keep_step(partial(self.state.take, lambda: [b.books() for b in bindings]), last=self.state.may_be_last)
        self._make_links()

    def time_steps(self) -> StepClock:
        """Between two batches: times the steps from now on, also without a planner."""
        if self.clock is None:
            self.clock = StepClock(self._executor.lanes.now)
        return self.clock

    def take_step_seconds(self) -> float | None:
        """As a batch ends: see :meth:`StepClock.take`."""
        if self.clock is None:
            return None
        self.clock.batch_ended(stepped=self._stepped)
        self._stepped = False
        return self.clock.take()

    def close(self) -> None:
        """The fit is over: restores module and precision plugin.

        Then this object is empty: the traceback of an error may keep it alive, but must not keep
        the session's memory.
        """
        if self.state is not None:
            self.state.detach()
        self._hooks.close()
        self._patches.restore()
        vars(self).clear()
