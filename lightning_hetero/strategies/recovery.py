"""A device whose memory turns out to be too small: the plan gives something up, and the step begins again from its first batch.

[Note: Clean state]
A step is begun again only if nothing of it lasts: its gradients are dropped, buffers and random generators are set back, and no
update has begun. To make sure of the latter, updates wait for all gradients in batches that are larger than any that has fitted
under the plan in force, if the host has room for all gradients; that changes no bit.

``training_step`` is called again, and so are the hooks around backward. What it logs is logged once; what it counts by itself
counts twice.
"""

from __future__ import annotations

import gc
import importlib
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_hetero.errors import DeviceMemoryError, HeteroError, OutOfMemoryBudgetError
from lightning_hetero.ir.plan import Plan
from lightning_hetero.runtime.demotion import demotions
from lightning_hetero.runtime.device.executor import DeviceExecutor
from lightning_hetero.runtime.optimizers import Rule
from lightning_hetero.runtime.replay import ChangingBuffers, Generators
from lightning_hetero.runtime.session import Session

_MOST = 16  # demotions of one step

OUT_OF_MEMORY = (DeviceMemoryError, torch.OutOfMemoryError)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Batch:
    """One call of ``training_step``, and the generators before it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generators: Generators


class Recovery:
    """Begins steps again on a device that is too small for them; see [Note: Clean state].

    Args:
        session: The session.
        namespace: Lightning's.
        module: The LightningModule.
        forward: Runs ``training_step`` of a batch.
        backward: Runs backward of its loss.
        on_demotion: Told of each lack of memory, before the plan changes.
    """

    def __init__(
        self,
        session: Session,
        *,
        namespace: str,
        module: Any,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        on_demotion: Callable[[BaseException], object],
    ) -> None:
        self._session, self._module, self._forward, self._backward = session, module, forward, backward
        self._on_demotion = on_demotion
        self._result = importlib.import_module(f"{namespace}.loops.optimization.automatic").ClosureResult
        self._buffers = ChangingBuffers(session.root)
        self._batches: list[_Batch] = []  # of the step under way
        self._fitted: tuple[Plan, int, int] | None = None  # the plan, and the largest batch that fitted under it
        self._demotions = 0

    def step_ended(self) -> None:
        """The optimizer's step is over: the next batch begins another one."""
        self._batches.clear()
        self._demotions = 0

    def training_step(self, executor: DeviceExecutor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a batch's forward, under lesser plans if need be."""
        if not self._batches:
            self._buffers.remember()
        self._batches.append(_Batch(args, kwargs, Generators(executor.lanes.device)))
        executor.probing = executor.may_defer and self._is_larger(executor)
        error: BaseException
        try:
            return self._forward(*args, **kwargs)
        except OUT_OF_MEMORY as out:
            error = _bare(out)
        while True:
            self._give_up(executor, error)
            try:
                self._again(executor, self._batches[:-1])
                return self._run(executor, self._batches[-1])
            except OUT_OF_MEMORY as out:
                error = _bare(out)

    def backward(self, executor: DeviceExecutor, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Runs a batch's backward; under lesser plans the batch's forward too, whose loss is the same."""
        error: BaseException
        try:
            found: Tensor = self._backward(loss, *args, **kwargs)
            self._has_fitted(executor)
            return found
        except OUT_OF_MEMORY as out:
            error = _bare(out)
        loss.detach_()  # Lightning holds it, and with it the graph
        while True:
            self._give_up(executor, error)
            try:
                found = self._again(executor, self._batches, *args, **kwargs)
                self._has_fitted(executor)
                return found
            except OUT_OF_MEMORY as out:
                error = _bare(out)

    # ---- details ------------------------------------------------------------------------------------------------------------

    def _again(self, executor: DeviceExecutor, batches: Sequence[_Batch], *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of batches; returns what the last backward does."""
        found = None
        for batch in batches:
            trainer = self._module.trainer
            output = self._result.from_training_step_output(self._run(executor, batch), trainer.accumulate_grad_batches)
            if output.closure_loss is not None:
                found = self._backward(output.closure_loss, *args, **kwargs)
        return found

    def _run(self, executor: DeviceExecutor, batch: _Batch) -> Any:
        batch.generators.restore()
        executor.probing = executor.may_defer
        with _logging_nothing(self._module):
            return self._forward(*batch.args, **batch.kwargs)

    def _give_up(self, executor: DeviceExecutor, error: BaseException) -> None:
        """Throws away what the step has done, and goes on with a plan that needs less of the device.

        Raises:
            HeteroError: The step cannot begin again, or nothing is left to give up.
        """
        self._refuse(executor, error)
        self._on_demotion(error)
        executor.give_up()
        gc.collect()
        if executor.lanes.device.type != "cpu":
            torch.accelerator.empty_cache()
        if not self._buffers.restore():
            raise _final(error, "and a buffer that never changed before has changed in the failed attempt")
        self._demotions += 1
        native = all(binding.capability is Rule.NATIVE for binding in self._session.bindings)
        blocks = self._session.blocks

        def recomputable(index: int) -> bool:
            return not self._buffers.may_change(blocks[index].spec.module)

        before = executor.plan
        options = demotions(before, executor.model, recomputable=recomputable, native=native)
        for plan, what in options if self._demotions <= _MOST else ():
            try:
                self._session.replan(plan)
            except (OutOfMemoryBudgetError, HeteroError) as refusal:
                log.info("device memory: a plan that %s is refused: %s", what, refusal)
                continue
            log.warning("The device's memory is too small: %s The plan now %s; the step begins again.", error, what)
            return
        raise _final(error, f"and plan {before.name!r} has nothing left to give up")

    def _refuse(self, executor: DeviceExecutor, error: BaseException) -> None:
        if not self._module.automatic_optimization:
            raise _final(error, "and optimization is manual, so that the step cannot begin again")
        if executor.updater.has_begun:
            raise _final(error, "and updates of this step have begun, so that it cannot begin again")

    def _size(self) -> tuple[int, int]:
        """Of the latest batch: elements, and the longest side."""
        batch = self._batches[-1]
        shapes = [leaf.shape for leaf in tree_leaves((batch.args, batch.kwargs)) if isinstance(leaf, Tensor)]
        return sum(shape.numel() for shape in shapes), max((side for shape in shapes for side in shape), default=0)

    def _is_larger(self, executor: DeviceExecutor) -> bool:
        """Whether no batch as large as this one has fitted under the plan in force."""
        if self._fitted is None or self._fitted[0] is not executor.plan:
            return True
        elements, side = self._size()
        return elements > self._fitted[1] or side > self._fitted[2]

    def _has_fitted(self, executor: DeviceExecutor) -> None:
        if not self._batches:  # another backward after a step, by hand
            return
        elements, side = self._size()
        if self._fitted is not None and self._fitted[0] is executor.plan:
            elements, side = max(elements, self._fitted[1]), max(side, self._fitted[2])
        self._fitted = executor.plan, elements, side


def _bare(error: BaseException) -> BaseException:
    """The error without what its frames hold: tensors that are in the way."""
    seen: BaseException | None = error
    while seen is not None:
        if seen.__traceback__ is not None:
            traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__
    return error.with_traceback(None)


def _final(error: BaseException, why: str) -> HeteroError:
    return OutOfMemoryBudgetError(
        f"the device's memory is too small for this batch, {why}: {error} Use a smaller batch, a plan that keeps less on the "
        f'device (plan="zero_infinity"), or raise device_memory.',
        getattr(error, "needed_bytes", 0),
        "device",
    )


@contextmanager
def _logging_nothing(module: Any) -> Iterator[None]:
    """What ``training_step`` logs, it has logged."""

    def log_nothing(*args: Any, **kwargs: Any) -> None:
        pass

    module.__dict__["log"] = log_nothing
    try:
        yield
    finally:
        del module.__dict__["log"]
