"""One training step as the strategy sees it, from its batch to the commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_hetero.clock import now_s
from lightning_hetero.ir.plan import Plan, UpdateLane
from lightning_hetero.strategies.checkpoints import Checkpoints
from lightning_hetero.strategies.recovery import OUT_OF_MEMORY
from lightning_hetero.strategies.resume import go_on


class Steps(Checkpoints):
    """Training steps, and the batches that only read."""

    def process_dataloader(self, dataloader: object) -> object:
        """Takes note of a training dataloader before its iterator is made."""
        dataloader = super().process_dataloader(dataloader)
        if self._state is not None and self._state.is_training:
            self._state.data.loader_made(dataloader)
        return dataloader

    def on_train_start(self) -> None:
        """Goes on where the store's last step ended."""
        super().on_train_start()
        if self._state is None:
            return
        if self._resumed is not None and self.lightning_module is not None:
            state, self._resumed = self._resumed, None
            go_on(self.lightning_module.trainer, state, self._state.data, self.namespace)
        else:
            self._state.data.follow()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begins a batch that trains."""
        if self._verifier is not None and self.session is not None:
            self.session.drain()
            with self._plain_precision():
                self._verifier.batch_begins(self.lightning_module, self.optimizers[0], self.precision_plugin, args, kwargs)
        self._began_s = now_s()
        if self._recovery is not None and self._executor is not None:
            output = self._recovery.training_step(self._executor, args, kwargs)
        else:
            output = self._forward(*args, **kwargs)
        if self._verifier is not None:
            self._verifier.batch_ended(output)
        return output

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_step(training=True)
        try:
            with nullcontext() if self._profiler is None else self._profiler.forward():
                output = super().training_step(*args, **kwargs)
        finally:
            if self._is_manual and self._executor is not None:
                self._executor.end_batch()
        if self._is_manual and self.session is not None:
            self.session.await_record()
        return output

    @property
    def _is_manual(self) -> bool:
        """Whether an ``optimizer.step()`` is in the middle of its batch, which may go on to use the weights."""
        return self.lightning_module is not None and not self.lightning_module.automatic_optimization

    def _begin_step(self, *, training: bool) -> None:
        if self._executor is not None:  # steps may be called by hand after the Trainer has torn down
            self._executor.begin_step(training=training)

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs a backward."""
        if self._recovery is not None and self._executor is not None:
            return self._recovery.backward(self._executor, closure_loss, optimizer, *args, **kwargs)
        return self._backward(closure_loss, optimizer, *args, **kwargs)

    def _backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Lightning's own, but that the runtime has gradients to itself only between the hooks before backward and those after."""
        plugin, executor, module = self.precision_plugin, self._executor, self.lightning_module
        assert module is not None
        with nullcontext() if self._profiler is None else self._profiler.backward():
            self.pre_backward(closure_loss)
            closure_loss = plugin.pre_backward(closure_loss, module)
            if executor is not None:
                executor.backward_starts(closure_loss)
            plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            if executor is not None:
                executor.backward_ends()
                executor.check_gradients()
            self._gradients_computed()
            closure_loss = plugin.post_backward(closure_loss, module)
            self.post_backward(closure_loss)
        return closure_loss

    def _gradients_computed(self) -> None:
        """A backward has left its gradients, and nobody has seen them yet."""

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """What is done inside is no part of the step's time."""
        began_s = now_s()
        try:
            yield
        finally:
            self._began_s += now_s() - began_s

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Arms the updates: only the batch that ends in ``step`` comes through here, batches that only accumulate do not."""
        self._stepped = self._step_ended = True
        if self.session is None or self._executor is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._executor.arm(self.session.binding_of(optimizer))
        try:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        except OUT_OF_MEMORY as error:
            if self._recovery is None:
                raise
            raise self._recovery.step_failed(error) from error
        finally:
            self._executor.arm(None)
            if not self._is_manual:
                self._executor.end_batch()
            if self._recovery is not None:
                self._recovery.step_ended()
        if not self._is_manual:
            self.session.await_record()
        if self._verifier is not None:
            with self._waiting(), self._plain_precision():
                self.session.drain()
                self._verifier.check(self.lightning_module, optimizer, self.precision_plugin, self._updated_on_cpu())
            if not self._verifier.steps_left:
                self._verifier = None
        return output

    def _updated_on_cpu(self) -> set[int]:
        """The ids of parameters that the plan in force lets the CPU update."""
        blocks = [] if self.session is None else self.session.blocks
        return {id(p) for block in blocks if block.plan.update is UpdateLane.CPU for p in block.params()}

    @property
    def _is_trial(self) -> bool:
        """Whether steps are only tried, and nobody would go on from them."""
        trainer: Any = None if self.lightning_module is None else self.lightning_module.trainer
        return self._tunes or (trainer is not None and bool(trainer.fast_dev_run))

    def _batch_ends(self) -> None:
        """All hooks of a training batch have run: an optimizer step that it ended in is kept."""
        if self._step_ended and self._state is not None and self.session is not None:
            self._step_ended = False
            if not self._is_trial:
                bindings = self.session.bindings
                self.session.keep_step(
                    partial(self._state.take, lambda: [b.books() for b in bindings]), last=self._state.may_be_last
                )
            self.make_links()

    def _plain_precision(self) -> AbstractContextManager[None]:
        return nullcontext() if self._verdicts is None else self._verdicts.aside()

    def _abandon_profile(self, error: BaseException) -> Callable[[Plan], Plan]:
        if self.autoplan is None or self.session is None:
            return lambda plan: plan
        self.autoplan.demoted(error, self.session.device_memory or 0)
        return partial(self.autoplan.lesser, self.session)

    def take_step_seconds(self) -> float | None:
        """As a training batch ends: seconds of the optimizer step's batches, loading them left out; ``None`` if none has ended."""
        self._step_s += now_s() - self._began_s
        if not self._stepped:
            return None
        seconds, self._step_s, self._stepped = self._step_s, 0.0, False
        return seconds

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begins a batch that only reads."""
        with self._evaluating():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begins a batch that only reads."""
        with self._evaluating():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begins a batch that only reads."""
        with self._evaluating():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._begin_step(training=False)
        try:
            yield
        finally:
            if self._executor is not None:
                self._executor.end_batch()
