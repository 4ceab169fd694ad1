"""What a run measures anyway, read as one of its optimizer steps ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from lightning_hetero.callbacks import LoggedSteps
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.plan import Prediction
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.ir.stalls import blame, stalls
from lightning_hetero.lanes.stream_device import StreamDevice
from lightning_hetero.runtime.session import Session
from lightning_hetero.store.capacity import resident_bytes
from lightning_hetero.strategies.offload import OffloadRun
from lightning_hetero.strategies.offloading import Offloading
from lightning_hetero.strategies.training import Training

if TYPE_CHECKING:
    import lightning.pytorch as pl

_COMPUTE_BOUND = 0.05  # if compute waits for a smaller share of a step, nothing else bounds it
_WORDS = {
    Lane.COMPUTE.value: "compute",
    Lane.H2D.value: "copies to the device",
    Lane.D2H.value: "copies from the device",
    Lane.CPU.value: "updates on the CPU",
    Lane.DISK_READ.value: "disk reads",
    Lane.DISK_WRITE.value: "disk writes",
    Lane.NET.value: "the exchange between devices",
    Lane.PEER.value: "the exchange between devices",
    "disk": "the disk",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One optimizer step of a run.

    Attributes:
        before: The Trainer's ``global_step`` before it; several optimizers make several steps.
        step: The same after it.
        logged_at: Where loggers get it, beside the module's own metrics; ``None``: they do not.
        step_s: Seconds of its batches, without what comes between them. On a GPU those of the last
            step whose time is known. ``None``: none is yet.
        predicted_s: What the plan in force predicts; ``None``: it has no prediction.
        wait_share: The share of it in which compute waited, as far as the host knows; ``None`` on a
            GPU, where the host runs ahead.
        bound_by: What bounds it, in words; empty if nothing says so.
        host_bytes: Memory of the process now.
        host_peak_bytes: The most memory that the process has had.
        device_peak_bytes: The same of a device with memory of its own; 0 without one.
        disk_bytes: Files of the run.
        read_bytes: What it has read from disk so far.
        written_bytes: What it has written.
    """

    before: int
    step: int
    logged_at: int | None
    step_s: float | None
    predicted_s: float | None
    wait_share: float | None
    bound_by: str
    host_bytes: int
    host_peak_bytes: int
    device_peak_bytes: int
    disk_bytes: int
    read_bytes: int
    written_bytes: int

    def passes(self, step: int) -> bool:
        """Whether ``global_step`` has come to a number, or past it."""
        return self.before < step <= self.step

    def metrics(self) -> dict[str, float]:
        """The numbers by the names that loggers get; what is not known is left out."""
        rows = {
            "step_s": self.step_s,
            "predicted_step_s": self.predicted_s,
            "wait_share": self.wait_share,
            "host_bytes": self.host_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "device_peak_bytes": self.device_peak_bytes or None,
            "disk_bytes": self.disk_bytes,
            "bytes_read": self.read_bytes,
            "bytes_written": self.written_bytes,
        }
        return {f"hetero_offload/{name}": float(value) for name, value in rows.items() if value is not None}


def run_of(trainer: pl.Trainer, who: str) -> OffloadRun:
    """The run of the Trainer's strategy.

    Raises:
        ConfigError: The strategy does not offload.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, Offloading):
        raise ConfigError(
            f'{who} shows what offloading does, and this Trainer has {type(strategy).__name__}. Pass strategy="hetero_offload", or '
            f"leave {who} out; Lightning's own ThroughputMonitor works with every strategy."
        )
    return strategy.run


class Meter:
    """Reads the run of one fit, once per batch however many callbacks ask; see :func:`meter_of`."""

    def __init__(self, run: OffloadRun, training: Training) -> None:
        self._run, self._clock = run, training.time_steps()
        self.recordings = 0  # that are under way; they share the recorder
        self._batch, self._step = -1, 0
        self._logged = LoggedSteps()
        self._steps = self._clock.steps
        self._waited_s = 0.0 if run.session is None else run.session.recorder.waited_s
        self._last: Reading | None = None

    def batch_ended(self, trainer: pl.Trainer) -> Reading | None:
        """A batch is over: the optimizer step that has ended with it, if one has."""
        if trainer.fit_loop.total_batch_idx != self._batch:
            self._batch = trainer.fit_loop.total_batch_idx
            if self._run.autoplan is None:  # otherwise the planner's callback has done it
                self._run.take_step_seconds()
            self._last = self._read(trainer) if self._clock.steps != self._steps else None
            self._steps = self._clock.steps
        return self._last

    def _read(self, trainer: pl.Trainer) -> Reading | None:
        session, step_s, step = self._run.session, self._clock.last_s, trainer.global_step
        if session is None:
            return None
        before, self._step = self._step or step - 1, step
        waited_s, self._waited_s = session.recorder.waited_s - self._waited_s, session.recorder.waited_s
        waits = None
        if step_s and not isinstance(session.options.device, StreamDevice):
            waits = min(1.0, waited_s / step_s)
        report, predicted = session.memory_report(), session.running.plan.predicted
        return Reading(
            before=before,
            step=step,
            logged_at=self._logged.step(trainer),
            step_s=step_s,
            predicted_s=None if predicted is None else predicted.iteration_s,
            wait_share=waits,
            bound_by=_bound_by(session, waits, predicted),
            host_bytes=resident_bytes(),
            host_peak_bytes=report["host_peak_bytes"],
            device_peak_bytes=report.get("device_peak_bytes", 0),
            disk_bytes=report["disk_bytes"],
            read_bytes=report.get("bytes_read", 0) + report.get("bytes_read_beyond", 0),
            written_bytes=report.get("bytes_written", 0),
        )


_meters: WeakKeyDictionary[Training, Meter] = WeakKeyDictionary()


def meter_of(run: OffloadRun) -> Meter | None:
    """The one meter of the fit that is under way; made before its first batch."""
    training = run.training
    if training is None:
        return None
    if training not in _meters:
        _meters[training] = Meter(run, training)
    return _meters[training]


def _bound_by(session: Session, waits: float | None, predicted: Prediction | None) -> str:
    """What bounds a step, in words: compute if it hardly waits, else what it waits for."""
    if waits is not None and waits < _COMPUTE_BOUND:
        return _WORDS[Lane.COMPUTE.value]
    share = "" if waits is None else f", {100 * waits:.0f} % waiting"
    if session.recorder.enabled:
        causes = blame(stalls(session.recorder.trace()))
        if cause := next((name for name in causes if name), ""):
            return f"{cause.rpartition(' ')[0] or cause}{share}"
    if predicted is not None:
        return f"{in_words(predicted)}{share}"
    return f"what compute waits for{share}" if waits is not None else ""


def in_words(predicted: Prediction) -> str:
    """What bounds the two phases of a predicted step."""
    forward, backward = (_WORDS.get(predicted.bottleneck.get(phase, ""), "") for phase in ("forward", "backward"))
    return forward if forward == backward or not backward else f"{forward}, then {backward}"
