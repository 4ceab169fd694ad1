"""``TraceOnDemand``: records a few steps of a run under way."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_hetero.callbacks import num_tokens
from lightning_hetero.errors import ConfigError, did_you_mean
from lightning_hetero.ir import run_record
from lightning_hetero.ir.run_record import RecordedStep, RecordedTensor, RunRecord
from lightning_hetero.ir.trace import Trace
from lightning_hetero.monitors.meter import Meter, Reading, meter_of, run_of
from lightning_hetero.profiling.wear import drives_under, together
from lightning_hetero.strategies.offload import OffloadRun
from lightning_hetero.strategies.option_checks import with_hints

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch import Callback as _Base
else:
    _Base = object  # the namespace's class is the second base

log = logging.getLogger(__name__)

_MOST_STEPS = 16  # of which the runtime keeps the spans
_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGWINCH")
# By signal: the callbacks that it asks, and what gives it back to the handler before them.
_listeners: dict[int, tuple[list[TraceOnDemand], Callable[[], object]]] = {}


class TraceOnDemand(_Base):
    """Records some steps when asked, and writes a folder that ``lightning-hetero report`` reads.

    A recording begins before the next training batch after :meth:`request`, after the process gets
    a signal, or when the Trainer has made ``at_step`` optimizer steps. Until then it costs nothing.
    The folder ``trace-step-N`` has ``trace.json`` for Perfetto, ``plan.json``, ``run.json``, and
    with ``plan="auto"`` the profiles of model and machine. Files of an earlier recording there are
    written over. Rank zero writes.

    Args:
        folder: Where the folders go. Default: the Trainer's ``default_root_dir``.
        steps: Optimizer steps of one recording.
        at_step: A number of optimizer steps after which each fit records, without being asked. If a
            batch makes several, the first batch after it begins the recording.
        on_signal: A signal that asks, such as ``"SIGUSR1"``: ``kill -USR1 PID``. Its handler is
            restored as training ends. ``None``: no signal does.

    Raises:
        ConfigError: ``steps``, ``at_step`` or ``on_signal`` is not allowed; or, as a fit begins,
            the Trainer's strategy does not offload.
    """

    @with_hints
    def __init__(
        self, folder: str | Path | None = None, *, steps: int = 4, at_step: int | None = None, on_signal: str | None = None
    ) -> None:
        if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= _MOST_STEPS:
            raise ConfigError(f"steps={steps!r}; allowed: an integer from 1 to {_MOST_STEPS}.")
        if at_step is not None and (not isinstance(at_step, int) or isinstance(at_step, bool) or at_step < 0):
            raise ConfigError(f"at_step={at_step!r}; allowed: an integer of at least 0, or None.")
        if on_signal is not None and on_signal not in _SIGNALS:
            raise ConfigError(f"on_signal={on_signal!r}; allowed: {', '.join(_SIGNALS)}.{did_you_mean(on_signal, _SIGNALS)}")
        self.folder, self.steps, self.at_step, self.on_signal = folder, steps, at_step, on_signal
        self.written: list[Path] = []  # the folders of this process's recordings, in order
        self._asked = self._due = False  # by the user; by ``at_step``
        self._meter: Meter | None = None
        self._first: int | None = None  # the recorder's number of the first step of a recording under way
        self._readings: list[Reading] = []
        self._tokens = 0
        self._is_between = True  # two optimizer steps, and not two batches of one

    def request(self) -> None:
        """Asks for a recording; it begins before the next training batch."""
        self._asked = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listens to the signal."""
        self._meter = meter_of(run_of(trainer, type(self).__name__))
        self._first, self._is_between = None, True
        self._due = trainer.global_step == self.at_step
        if self.on_signal is not None and threading.current_thread() is threading.main_thread():
            number = signal.Signals[self.on_signal]
            if number not in _listeners:
                _listeners[number] = [], partial(signal.signal, number, signal.signal(number, _heard))
            _listeners[number][0].append(self)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int) -> None:
        """Begins a recording, between two steps."""
        run = run_of(trainer, type(self).__name__)
        if run.session is None or self._first is not None or not self._is_between:
            return
        if (self._asked or self._due) and self._meter is not None:
            self._asked, self._due, recorder = False, False, run.session.recorder
            self._first, self._readings, self._tokens = recorder.step, [], 0
            self._meter.recordings += 1
            if not recorder.enabled:
                recorder.switch(run.executor.lanes, on=True)
            log.info("recording %d steps.", self.steps)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Ends a recording after its last step, and writes it."""
        reading = None if self._meter is None else self._meter.batch_ended(trainer)
        self._is_between = reading is not None
        self._due |= reading is not None and self.at_step is not None and reading.passes(self.at_step)
        if self._first is None:
            return
        self._tokens += num_tokens(batch)
        if reading is None:
            return
        self._readings.append(reading)
        if len(self._readings) >= self.steps:
            self._write(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes a recording that the end of training has cut short, and forgets the signal."""
        if self._first is not None and self._readings:
            self._write(trainer)
        self._listen_no_more()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The signal is the user's again; a recording is lost."""
        self._listen_no_more()

    def _listen_no_more(self) -> None:
        self._meter = self._first = None
        for number, (listening, give_back) in list(_listeners.items()):
            if self in listening:
                listening.remove(self)
                if not listening:
                    del _listeners[number]
                    give_back()

    def _write(self, trainer: pl.Trainer) -> None:
        run, first = run_of(trainer, type(self).__name__), self._first
        self._first = None
        if run.session is None or first is None or self._meter is None:
            return
        self._meter.recordings -= 1
        run.session.drain()  # the last step's updates and its commit belong to it
        run.executor.store.files.wait_for_commit()
        recorder = run.session.recorder
        spans = tuple(span for span in recorder.trace().spans if first <= span.step < first + len(self._readings))
        if not run.options.trace and not self._meter.recordings:
            recorder.switch(run.executor.lanes, on=False)
        # The recorder counts batches that end in steps, from the fit's begin.
        trace = Trace(spans=tuple(replace(span, step=self._readings[span.step - first].step) for span in spans))
        if not trainer.is_global_zero:
            return
        root = Path(trainer.default_root_dir if self.folder is None else self.folder)
        folder = root / f"trace-step-{self._readings[0].step}"
        _save(run, trace, _record(run, self._readings, self._tokens // len(self._readings)), folder)
        self.written.append(folder)
        log.info("%d recorded steps are in %s; `lightning-hetero report %s` shows them.", len(self._readings), folder, folder)


def _heard(number: int, frame: object) -> None:
    for one in _listeners[number][0]:
        one.request()


def _record(run: OffloadRun, readings: list[Reading], tokens: int) -> RunRecord:
    session = run.session
    drive = None if session is None else together(drives_under(session.disk_root()))
    return RunRecord(
        model=type(run.module).__name__,
        steps=tuple(
            RecordedStep(
                step=one.step,
                seconds=one.step_s or 0.0,
                host_bytes=one.host_bytes,
                device_bytes=one.device_peak_bytes,
                disk_bytes=one.disk_bytes,
                read_bytes=one.read_bytes,
                written_bytes=one.written_bytes,
            )
            for one in readings
        ),
        tensors=tuple(
            RecordedTensor(
                name=name,
                block=block.name,
                shape=tuple(param.shape),
                dtype=str(param.dtype).removeprefix("torch."),
                num_bytes=param.numel() * param.dtype.itemsize,
                trains=param.requires_grad,
            )
            for block in ([] if session is None else session.blocks)
            for part in block.parts
            for name, param in zip(part.names, part.params, strict=True)
        ),
        tokens=tokens,
        drive="" if drive is None else drive.name,
        rated_bytes=0.0 if drive is None else drive.rated_bytes,
        worn_bytes=0.0 if drive is None else drive.written_bytes,
        rated_by="" if drive is None else drive.source,
    )


def _save(run: OffloadRun, trace: Trace, record: RunRecord, folder: Path) -> None:
    """Writes the folder; its plan names the profiles beside it, so commands read it as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {run_record.FILE: record.to_json(), run_record.TRACE: trace.to_chrome()}
    plan, autoplan = run.plan, run.autoplan
    origin: dict[str, str | int] = {}
    if autoplan is not None and autoplan.model is not None and autoplan.machine is not None:
        files |= {run_record.MODEL: autoplan.model.to_json(), run_record.HARDWARE: autoplan.machine.to_json()}
        origin = {"model_profile": run_record.MODEL, "hardware_profile": run_record.HARDWARE}
    if plan is not None:
        files[run_record.PLAN] = replace(plan, origin=origin).to_json()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
