"""``DiskWear``: what a run writes, and how long its drives last under that."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_hetero.ir.plan import Plan
from lightning_hetero.monitors.meter import Meter, Reading, meter_of, run_of
from lightning_hetero.profiling.wear import Drive, Wear, drives_under, together
from lightning_hetero.strategies.option_checks import with_hints
from lightning_hetero.units import parse_bytes

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch import Callback as _Base
else:
    _Base = object  # the namespace's class is the second base

log = logging.getLogger(__name__)

_SOON = 10  # steps after which the log has a first forecast


class DiskWear(_Base):
    """Logs the bytes that a run writes to its disk, and when its drives' rating will be used up.

    After the first ten steps under a plan and as the fit ends, the log has a line with both. Every
    ``log_every_n_steps`` steps the loggers get ``hetero_offload/bytes_written`` of the run,
    ``hetero_offload/bytes_written_per_step``, and ``hetero_offload/drive_days_left`` of training if
    the drive's rating is known.

    Args:
        rated_writes: Bytes that may be written to the drives within their warranty (TBW), such as
            ``"1200TB"``. Default: the datasheet's, of a drive that is known by its model; else what
            follows from SMART, if ``smartctl`` is installed and may read it.

    Raises:
        ConfigError: ``rated_writes`` is not a size; or, as a fit begins, the Trainer's strategy
            does not offload.
    """

    @with_hints
    def __init__(self, rated_writes: str | int | None = None) -> None:
        self.rated_bytes = parse_bytes(rated_writes, name="rated_writes")
        self.wear: Wear | None = None  # as of the latest step
        self._meter: Meter | None = None
        self._drive: Drive | None = None
        self._plan: Plan | None = None
        self._steps, self._seconds, self._began_bytes = 0, 0.0, 0  # under this plan

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds the drives."""
        run = run_of(trainer, type(self).__name__)
        self._meter, self._plan, self.wear, self._steps = meter_of(run), None, None, 0
        self._drive = None if run.session is None else together(drives_under(run.session.disk_root()))
        if self.rated_bytes is not None:
            known = Drive(name="the drive") if self._drive is None else self._drive
            self._drive = replace(known, rated_bytes=float(self.rated_bytes), source="given")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Follows the writes of the step that has ended."""
        reading = None if self._meter is None else self._meter.batch_ended(trainer)
        if reading is None:
            return
        self._follow(reading, run_of(trainer, type(self).__name__).plan)
        if self._steps == _SOON:
            self._say()
        if self.wear is not None and reading.logged_at is not None:
            values = {"bytes_written": float(reading.written_bytes), "bytes_written_per_step": self.wear.step_bytes}
            if self.wear.left_s is not None:
                values["drive_days_left"] = self.wear.left_s / 86400
            for logger in trainer.loggers:
                logger.log_metrics(metrics={f"hetero_offload/{k}": v for k, v in values.items()}, step=reading.logged_at)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Says what the fit has written."""
        if self._steps != _SOON:
            self._say()
        self._meter = None

    def _follow(self, reading: Reading, plan: Plan | None) -> None:
        """Means over the steps under one plan, but its first, with which weights move."""
        if plan is not self._plan:
            self._plan, self._steps, self._seconds, self._began_bytes = plan, 0, 0.0, reading.written_bytes
            return
        self._steps += 1
        self._seconds += reading.step_s or 0.0
        written = reading.written_bytes - self._began_bytes
        self.wear = Wear(step_bytes=written / self._steps, step_s=self._seconds / self._steps, drive=self._drive)

    def _say(self) -> None:
        if self.wear is None:
            return
        if not self.wear.step_bytes:
            log.info("disk wear: steps write nothing to the disk.")
            return
        log.info("disk wear: %s.%s", self.wear, "" if self.wear.left_s is not None else ' DiskWear("600TB") says what it is.')
