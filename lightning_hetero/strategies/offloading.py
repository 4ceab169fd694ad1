"""What Lightning's methods do in a strategy that offloads: each calls the strategy's run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.trace import Trace
from lightning_hetero.profiling.memory import OperatorMeasure
from lightning_hetero.runtime.options import SessionOptions
from lightning_hetero.runtime.session import Session
from lightning_hetero.strategies.autoplan import Autoplan
from lightning_hetero.strategies.checkpoints import PathLike
from lightning_hetero.strategies.offload import OffloadRun
from lightning_hetero.strategies.resume import State

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.strategies import Strategy as _Base
    from lightning.pytorch.utilities.types import STEP_OUTPUT
else:
    _Base = object  # the namespace's class comes second among the bases (strategies.namespaces)


class Offloading(_Base):
    """Lightning's side of a strategy that offloads, in one process or in one of several.

    Attributes:
        run: Places the model, trains it, saves it; made by the strategy's constructor.
    """

    run: OffloadRun

    # ---- setup and teardown -----------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Places the model."""
        self.run.setup(trainer)

    def model_to_device(self) -> None:
        """The session has placed the model."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``empty_init`` parameters have no memory until ``setup`` initializes them block by block.

        Else those that take more than half of the budget wait in a file until ``setup`` places them.
        """
        with self.run.building(empty=bool(empty_init)):
            yield

    def on_exception(self, exception: BaseException) -> None:
        """Remembers that teardown must not count on the engine."""
        self.run.failed()
        super().on_exception(exception)

    def teardown(self) -> None:
        """Gives the model back, or leaves it on disk where it does not fit."""
        self.run.teardown()

    # ---- steps ------------------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Takes note of a training dataloader before its iterator is made."""
        dataloader = super().process_dataloader(dataloader)
        self.run.loader_made(dataloader)
        return dataloader

    def on_train_start(self) -> None:
        """Goes on where the store's last step ended."""
        super().on_train_start()
        self.run.train_starts()

    def training_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Begins a batch that trains."""
        training = self.run.training  # steps may be called by hand after the Trainer has torn down
        plain = super().training_step
        return plain(*args, **kwargs) if training is None else training.training_step(plain, args, kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """A backward begins."""
        super().pre_backward(closure_loss)
        if self.run.training is not None:
            self.run.training.loss = weakref.ref(closure_loss)

    def validation_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Begins a batch that only reads."""
        with self.run.evaluating():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Begins a batch that only reads."""
        with self.run.evaluating():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: object, **kwargs: object) -> object:
        """Begins a batch that only reads."""
        with self.run.evaluating():
            return super().predict_step(*args, **kwargs)

    # ---- checkpoints ------------------------------------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Lightning's checkpoint IO, streaming while something lives on disk; one that the user gave stays."""
        self._checkpoint_io = io = self.run.checkpoints.io(super().checkpoint_io)
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self.run.checkpoints.attach(io)
        self._checkpoint_io = io

    def save_checkpoint(self, checkpoint: State, filepath: PathLike, storage_options: object | None = None) -> None:
        """Writes a checkpoint file; with ``link_checkpoints``, where steps are kept, links the store's last step instead."""
        plain = super().save_checkpoint
        self.run.checkpoints.save(lambda: plain(checkpoint, filepath, storage_options), filepath)

    def remove_checkpoint(self, filepath: PathLike) -> None:
        """Removes a checkpoint: after those that were saved in the same batch, so that one is there whenever the process dies."""
        self.run.checkpoints.remove(super().remove_checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> State:
        """A checkpoint file, or a store: a fit goes on in it, ``setup`` takes over what is there; else its weights are read."""
        plain = super().load_checkpoint
        return self.run.checkpoints.load(lambda: plain(checkpoint_path, weights_only), checkpoint_path)

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Weights on disk appear as lazy tensors."""
        if self.session is not None:
            self.session.drain()
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, State], strict: bool = True) -> None:
        """Writes weights to where they live; ``setup`` does it for a model on the meta device or in a file."""
        self.run.checkpoints.load_weights(super().load_model_state_dict, checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, list[State]]) -> None:
        """State goes to the tier that the plan chose; nothing is moved to a device."""
        self.run.checkpoints.load_optimizers(checkpoint["optimizer_states"])

    # ---- what users ask ---------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session | None:
        """The runtime session, while there is one."""
        return self.run.session

    @property
    def options(self) -> SessionOptions:
        """What the session is made with."""
        return self.run.options

    @property
    def autoplan(self) -> Autoplan | None:
        """What makes the plan as training goes on; ``None`` where it was given."""
        return self.run.autoplan

    @property
    def offload_plan(self) -> Plan | None:
        """The plan in force, one rule per block, with its prediction if it was planned.

        ``None`` before the first setup.
        """
        return self.run.plan

    def materialize(self, params: nn.Module | Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """As :meth:`~lightning_hetero.strategies.offload.OffloadRun.materialize`; likewise the others."""
        return self.run.materialize(params)

    @property
    def model_profile(self) -> ModelProfile | None:
        """What the first batches have shown of the model, once there is a plan."""
        return self.run.model_profile

    def operator_measures(self) -> tuple[OperatorMeasure, ...]:
        """Every operator of the recorded batch, forward and backward: seconds, FLOP, and memory before, during and after it."""
        return self.run.operator_measures()

    def replan(self, *, host_memory: str | int | None = None) -> None:
        """Asks for a new plan, with a new budget if one is given."""
        self.run.replan(host_memory=host_memory)

    def prediction_error(self) -> dict[str, float]:
        """How far the plan's prediction is from its steps so far: ``step_time_error``, ``host_peak_error``."""
        return self.run.prediction_error()

    @property
    def trace(self) -> Trace:
        """Spans of the latest steps, with ``trace=True``."""
        return self.run.trace

    def stall_report(self) -> str:
        """For each of the latest steps a line that says what compute waited for, with ``trace=True``."""
        return self.run.stall_report()

    def memory_report(self) -> dict[str, int]:
        """Bytes so far: peak of host memory, files on disk, read and written; with a device also its peak."""
        return self.run.memory_report()
