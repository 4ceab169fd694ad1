"""What all parts of the offloading strategy share."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.trace import Trace
from lightning_hetero.profiling.model import BatchProfiler
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.placement import SessionOptions
from lightning_hetero.runtime.session import Session
from lightning_hetero.strategies.autoplan import Autoplan
from lightning_hetero.strategies.recovery import Recovery
from lightning_hetero.strategies.training_state import TrainingState
from lightning_hetero.strategies.verdicts import Verdicts
from lightning_hetero.strategies.verification import Verifier

if TYPE_CHECKING:
    from lightning.pytorch.strategies import SingleDeviceStrategy as Base
else:
    Base = object  # the namespace's class comes second among the bases (strategies.factory)


class Core(Base):
    """The strategy's state; see :class:`~lightning_hetero.strategies.hetero_offload.HeteroOffload`.

    Args:
        options: What the session is made with.
        autoplan: What makes the plan as training goes on; ``None`` where it was given.
        root_device: Where the model computes.
        plugins: Lightning's accelerator, checkpoint IO and precision.
    """

    namespace = "lightning.pytorch"
    strategy_name = "hetero_offload"

    def __init__(self, options: SessionOptions, autoplan: Autoplan | None, root_device: Any, *plugins: Any) -> None:
        super().__init__(root_device, *plugins)
        self.options, self.autoplan = options, autoplan
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
        self._waiting_checkpoint: tuple[Mapping[str, Any], bool] | None = None
        self._snapshots: list[Path] = []  # to be made when the batch has ended

    @property
    def _executor(self) -> Executor | None:
        return None if self.session is None else self.session.executor

    @property
    def _profiler(self) -> BatchProfiler | None:
        return None if self.autoplan is None else self.autoplan.profiler

    def _running(self) -> Executor:
        assert self._executor is not None, "while a fit lasts there is an executor"
        return self._executor
