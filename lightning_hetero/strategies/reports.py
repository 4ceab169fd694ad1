"""What the strategy offers its user: weights outside their block, the plan, and what happened."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from torch import nn

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.stalls import describe, stalls
from lightning_hetero.ir.trace import Trace
from lightning_hetero.profiling.memory import OperatorMeasure
from lightning_hetero.strategies.core import Core
from lightning_hetero.units import parse_bytes

log = logging.getLogger(__name__)

_RECORD = "pass trace=True to the strategy to record one"


class Reports(Core):
    """Reads off a running or finished fit, and asks for another plan."""

    @contextmanager
    def materialize(self, params: nn.Module | Sequence[nn.Parameter]) -> Iterator[None]:
        """The door to weights outside their block's forward: inside the context they are ordinary parameters in memory.

        Before and after training, weights that are in memory stay as they are.

        Args:
            params: A module, or parameters.

        Raises:
            ConfigError: They have no content yet: the model is on the meta device.
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
    def offload_plan(self) -> Plan | None:
        """The plan in force, one rule per block, with its prediction if it was planned; ``None`` before the first setup."""
        return self._executor.plan if self._executor is not None else self._last_plan

    @property
    def model_profile(self) -> ModelProfile | None:
        """What the first batches have shown of the model, once there is a plan."""
        return None if self.autoplan is None else self.autoplan.model

    def operator_measures(self) -> tuple[OperatorMeasure, ...]:
        """Every operator of the recorded batch, forward and backward: seconds, FLOP, and memory before, during and after it."""
        return () if self.autoplan is None else self.autoplan.operators()

    def replan(self, *, host_memory: str | int | None = None) -> None:
        """Asks for a new plan: the next training batches are timed again, and the plan comes into force after them.

        Args:
            host_memory: A new budget, in force from then on; the plan then comes before the next batch, which raises a
                :class:`~lightning_hetero.errors.PlanError` if none fits.

        Raises:
            ConfigError: The strategy was given a plan instead of a planner.
        """
        if self.autoplan is None:
            raise ConfigError('replan() needs a planner, and this strategy was given a plan. Pass plan="auto".')
        budget = parse_bytes(host_memory, name="host_memory")
        if budget is not None:
            self.options = replace(self.options, host_memory=budget)
            if self.session is not None:
                self.session.options = self.options
        self.autoplan.request(budget=budget is not None)

    def prediction_error(self) -> dict[str, float]:
        """How far the plan's prediction is from its steps so far: ``step_time_error``, ``host_peak_error``.

        Mean absolute errors relative to what is measured; empty before there are any.
        """
        return {} if self._callback is None else self._callback.error.compute()

    @property
    def trace(self) -> Trace:
        """Spans of the latest steps, with ``trace=True``; without it there are none, and a warning says so."""
        if not self.options.trace:
            log.warning("There is no trace: %s.", _RECORD)
        return self.session.recorder.trace() if self.session is not None else self._last_trace

    def stall_report(self) -> str:
        """For each of the latest steps a line that says what compute waited for, with ``trace=True``."""
        if not self.options.trace:
            return f"no trace: {_RECORD}"
        trace = self.trace
        found = stalls(trace)
        return "\n".join(describe(step, found) for step in sorted({span.step for span in trace.spans}))

    def memory_report(self) -> dict[str, int]:
        """``host_peak_bytes`` of the process, ``disk_bytes`` of files, ``bytes_read`` and ``bytes_written`` so far.

        On a device with memory of its own also ``device_peak_bytes``, the most that was in use there since the fit began.
        """
        return self.session.memory_report() if self.session is not None else dict(self._last_report)
