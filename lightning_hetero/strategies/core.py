"""What all parts of the offloading strategy share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_hetero.convert.importing import Weights
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.trace import Trace
from lightning_hetero.profiling.model import BatchProfiler
from lightning_hetero.runtime.construction import Construction
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.lanes import EmulatedDevice
from lightning_hetero.runtime.options import SessionOptions
from lightning_hetero.runtime.session import Session
from lightning_hetero.strategies.autoplan import Autoplan
from lightning_hetero.strategies.recovery import Recovery
from lightning_hetero.strategies.training_state import TrainingState
from lightning_hetero.strategies.verdicts import Verdicts
from lightning_hetero.strategies.verification import Verifier

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as Base
else:
    Base = object  # the namespace's class comes behind the engine's among the bases (strategies.factory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the options of :class:`~lightning_hetero.strategies.hetero_offload.HeteroOffload` ask for.

    Attributes:
        options: What the session is made with.
        autoplan: What makes the plan as training goes on; ``None`` where it was given.
        device: An emulated device.
        weights: Files that the model gets its weights from.
        verify: Steps that are computed a second time.
        link_checkpoints: Checkpoints are links to the store.
    """

    options: SessionOptions
    autoplan: Autoplan | None = None
    device: EmulatedDevice | None = None
    weights: Weights | None = None
    verify: int = 0
    link_checkpoints: bool = False


class Core(Base):
    """The strategy's state; see :class:`~lightning_hetero.strategies.hetero_offload.HeteroOffload`.

    Args:
        parts: What Lightning's strategy takes.
        plugins: The same, by name.
    """

    namespace = "lightning.pytorch"

    def __init__(self, *parts: Any, **plugins: Any) -> None:
        super().__init__(*parts, **plugins)
        self.session: Session | None = None
        self._verifier: Verifier | None = None
        self._recovery: Recovery | None = None
        self._verdicts: Verdicts | None = None
        self._callback: Any = None
        self._imported: weakref.ref[nn.Module] | None = None  # the model that has got its weights from files
        self._last_plan: Plan | None = None
        self._last_trace = Trace(spans=())
        self._last_report: dict[str, int] = {}
        self._began_s = self._step_s = 0.0
        self._stepped = self._step_ended = False
        self._state: TrainingState | None = None  # takes it for every step that is kept
        self._resumed: dict[str, Any] | None = None  # the training state of the store that ckpt_path is
        self._evaluated = ExitStack()  # the files of a store whose weights are evaluated, until these are loaded
        self._waiting_checkpoint: tuple[Mapping[str, Any], bool] | None = None
        # Checkpoints by links that are made, or removed, when the batch has ended: path, action, whether it saves.
        self._links: list[tuple[Path, Callable[[], object], bool]] = []
        self._failed = False
        self._built: Construction | None = None  # the model that was made in tensor_init_context, until it is placed
        self._tunes = False  # one of Lightning's tuners tries steps, and takes them back

    def _choose(self, choices: Choices) -> None:
        """Says how this process trains, before :meth:`setup`."""
        self._choices, self.options, self.autoplan = choices, choices.options, choices.autoplan

    def _drop_session(self) -> None:
        if self.session is not None:
            self.session.abandon()
            self._forget_session()

    def _forget_session(self) -> None:
        assert self.session is not None
        self._last_trace, self._last_report = self.session.recorder.trace(), self.session.memory_report()
        self.session = self._recovery = None

    @property
    def _executor(self) -> Executor | None:
        return None if self.session is None else self.session.executor

    @property
    def _profiler(self) -> BatchProfiler | None:
        return None if self.autoplan is None else self.autoplan.profiler

    def _running(self) -> Executor:
        assert self._executor is not None, "while a fit lasts there is an executor"
        return self._executor
