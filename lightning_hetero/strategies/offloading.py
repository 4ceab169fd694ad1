"""Lightning's side of a strategy that offloads: its methods call the strategy's run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.stalls import describe, stalls
from lightning_hetero.ir.trace import Trace
from lightning_hetero.planning.autoplan import Autoplan
from lightning_hetero.profiling.memory import OperatorMeasure
from lightning_hetero.runtime.options import SessionOptions
from lightning_hetero.runtime.session import Session
from lightning_hetero.strategies.checkpoints import PathLike
from lightning_hetero.strategies.offload import OffloadRun
from lightning_hetero.strategies.resume import State
from lightning_hetero.units import parse_bytes
from lightning_hetero.untyped import Function

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.strategies import Strategy as _Base
    from lightning.pytorch.utilities.types import STEP_OUTPUT
else:
    _Base = object  # the namespace's class comes second among the bases (strategies.namespaces)

log = logging.getLogger(__name__)

_RECORD = "pass trace=True to the strategy to record one"


class Offloading(_Base):
    """Lightning's side of a strategy that offloads, in one process or in one of several."""

    run: OffloadRun  # made by the strategy's constructor

    _lightnings_backward: ClassVar[Function]
    _in_backward = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(super(), "backward"):  # a namespace's class, not what both share
            cls._lightnings_backward = super().backward

    # ---- setup and teardown ------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Places the model."""
        self.run.setup(trainer)

    def model_to_device(self) -> None:
        """The session has placed the model."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``empty_init``, ``setup`` gives parameters memory and content block by block.

        Otherwise those beyond half of the budget wait in a file until ``setup`` places them.
        """
        with self.run.building(empty=bool(empty_init)):
            yield

    def on_exception(self, exception: BaseException) -> None:
        """Teardown must not rely on the engine."""
        self.run.failed()
        super().on_exception(exception)

    def teardown(self) -> None:
        """Gives the model back, or leaves it on disk if it does not fit memory."""
        self.run.teardown()

    # ---- steps -------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Notes a training dataloader before its iterator is made."""
        dataloader = super().process_dataloader(dataloader)
        self.run.loader_made(dataloader)
        return dataloader

    def on_train_start(self) -> None:
        """Continues where the store's last step ended."""
        super().on_train_start()
        self.run.train_starts()

    def training_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Runs a batch that trains."""
        training = self.run.training  # None if called after the Trainer's teardown
        plain = partial(super().training_step, *args, **kwargs)
        return plain() if training is None else training.training_step(plain, args, kwargs)

    if not TYPE_CHECKING:  # for mypy it stays the method that it is

        @property
        def backward(self) -> Function:
            """Runs a batch's backward and the hooks around it.

            It is the mock where one stands for Lightning's own method.
            """
            lightnings = super().backward
            return self._backward if getattr(lightnings, "__self__", None) is self else lightnings

    def _backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: object, **kwargs: object) -> Tensor:
        training, plain = self.run.training, super().backward
        if self._in_backward:  # a function in the place of Lightning's method wraps this one
            found: Tensor = self._lightnings_backward(closure_loss, optimizer, *args, **kwargs)
            return found
        if getattr(plain, "__self__", None) is not self:  # a mock there has called this one
            plain = self._lightnings_backward

        def run(loss: Tensor) -> Tensor:
            self._in_backward = True
            try:
                return plain(loss, optimizer, *args, **kwargs)
            finally:
                self._in_backward = False

        return run(closure_loss) if training is None else training.backward(run, closure_loss)

    def validation_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Runs a batch that only reads weights."""
        return self.run.evaluate(partial(super().validation_step, *args, **kwargs))

    def test_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Runs a batch that only reads weights."""
        return self.run.evaluate(partial(super().test_step, *args, **kwargs))

    def predict_step(self, *args: object, **kwargs: object) -> object:
        """Runs a batch that only reads weights."""
        return self.run.evaluate(partial(super().predict_step, *args, **kwargs))

    # ---- checkpoints -------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Lightning's checkpoint IO, which streams offloaded tensors, or the user's own."""
        self._checkpoint_io = io = self.run.checkpoints.io(super().checkpoint_io)
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self.run.checkpoints.attach(io)
        self._checkpoint_io = io

    def save_checkpoint(self, checkpoint: State, filepath: PathLike, storage_options: object | None = None) -> None:
        """Writes a checkpoint file, or with ``link_checkpoints`` links to the store's last step."""
        plain, labelled = super().save_checkpoint, self.run.checkpoints.labelled(checkpoint)
        self.run.checkpoints.save(lambda: plain(labelled, filepath, storage_options), filepath)

    def remove_checkpoint(self, filepath: PathLike) -> None:
        """Removes a checkpoint, after those of the same batch are saved: one exists at any time."""
        self.run.checkpoints.remove(super().remove_checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> State:
        """Loads a checkpoint file, or a store that a fit continues or an evaluation reads."""
        plain = super().load_checkpoint
        return self.run.checkpoints.load(lambda: plain(checkpoint_path, weights_only), checkpoint_path)

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Weights on disk appear as lazy tensors. ``exclude_frozen_parameters`` leaves some out."""
        if self.session is not None:
            self.session.drain()
        return self.run.checkpoints.of_model(super().lightning_module_state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, State], strict: bool = True) -> None:
        """Writes weights to their tiers, at the latest in ``setup``."""
        module = self.run.module
        self.run.checkpoints.load_weights(
            lambda strict: module.load_state_dict(checkpoint["state_dict"], strict=strict), checkpoint, strict=strict
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, list[State]]) -> None:
        """Writes optimizer state to the tiers that the plan chose, not to a device."""
        self.run.checkpoints.load_optimizers(checkpoint["optimizer_states"])

    # ---- for users -----------------------------------------------------------------------------

    @property
    def session(self) -> Session | None:
        """The runtime session, while there is one."""
        return self.run.session

    @property
    def options(self) -> SessionOptions:
        """Options of the session."""
        return self.run.options

    @property
    def autoplan(self) -> Autoplan | None:
        """Makes the plan during training; ``None`` if the user gave a plan."""
        return self.run.autoplan

    @property
    def offload_plan(self) -> Plan | None:
        """The plan in force, one rule per block, with its prediction if a planner made it.

        ``None`` before the first setup.
        """
        return self.run.plan

    @contextmanager
    def materialize(self, params: nn.Module | Sequence[nn.Parameter]) -> Iterator[None]:
        """Access to weights outside their block's forward: they are in memory in the context.

        Before and after training, weights that are in memory stay as they are.

        Args:
            params: A module, or parameters.

        Raises:
            ConfigError: They have no content yet, because the model is on the meta device.
        """
        wanted = list(params.parameters()) if isinstance(params, nn.Module) else list(params)
        if self.session is None and any(p.is_meta for p in wanted):
            raise ConfigError(
                "materialize() got parameters on the meta device, which have no content before the Trainer's setup. Call it from a "
                "hook such as on_fit_start, or later."
            )
        with nullcontext() if self.session is None else self.session.materialized(wanted):
            yield

    @property
    def model_profile(self) -> ModelProfile | None:
        """The model as measured in the first batches, once there is a plan."""
        return None if self.autoplan is None else self.autoplan.model

    def operator_measures(self) -> tuple[OperatorMeasure, ...]:
        """The recorded batch's operators: seconds, FLOP, memory before, during and after each."""
        return () if self.autoplan is None else self.autoplan.operators()

    def replan(self, *, host_memory: str | int | None = None) -> None:
        """Asks for a new plan. The next training batches are timed again, then it comes into force.

        Args:
            host_memory: A new budget, in force from now on. The plan then comes before the next
                batch, which raises a :class:`~lightning_hetero.errors.PlanError` if none fits.

        Raises:
            ConfigError: The strategy was given a plan instead of a planner.
        """
        if self.autoplan is None:
            raise ConfigError('replan() needs a planner, and this strategy was given a plan. Pass plan="auto".')
        budget = parse_bytes(host_memory, name="host_memory")
        if budget is not None:
            self.run.change(replace(self.options, host_memory=budget))
        self.autoplan.request(budget=budget is not None)

    def prediction_error(self) -> dict[str, float]:
        """Errors of the plan's prediction so far: ``step_time_error``, ``host_peak_error``.

        Mean absolute errors relative to the measurements; empty before the first step.
        """
        return self.run.prediction_error()

    @property
    def trace(self) -> Trace:
        """Spans of the latest steps, with ``trace=True``. Otherwise empty, with a warning."""
        if not self.options.trace:
            log.warning("There is no trace: %s.", _RECORD)
        return self.run.trace

    def stall_report(self) -> str:
        """With ``trace=True``, one line per latest step that says what compute waited for."""
        if not self.options.trace:
            return f"no trace: {_RECORD}"
        trace = self.trace
        found = stalls(trace)
        return "\n".join(describe(step, found) for step in sorted({span.step for span in trace.spans}))

    def memory_report(self) -> dict[str, int]:
        """``host_peak_bytes`` of the process, ``disk_bytes``, ``bytes_read`` and ``bytes_written``.

        With a device that has memory of its own, also ``device_peak_bytes`` since the fit began.
        """
        return self.run.memory_report()
