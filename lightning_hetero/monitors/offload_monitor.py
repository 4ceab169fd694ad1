"""``OffloadMonitor``: speed, prediction, bottleneck and memory in progress bar and loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_hetero.callbacks import num_tokens
from lightning_hetero.clock import now_s
from lightning_hetero.errors import ConfigError
from lightning_hetero.monitors.meter import Meter, Reading, meter_of, run_of
from lightning_hetero.runtime.method_patches import Patches
from lightning_hetero.strategies.namespaces import lightning_of
from lightning_hetero.strategies.option_checks import with_hints
from lightning_hetero.units import format_bytes

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.utilities.throughput import Throughput
    from lightning.pytorch import Callback as _Base
    from lightning.pytorch.loggers import Logger
else:
    _Base = object  # the namespace's class is the second base

_STAGE = "train"  # before the names of Lightning's ThroughputMonitor
_BOUND_BY = "hetero_offload/bound_by"
_TEXT_TOO = {"CSVLogger", "WandbLogger"}  # loggers whose log_metrics takes text


class OffloadMonitor(_Base):
    """Shows how fast a fit is, what bounds it, and what memory it has.

    The progress bar gets the time of a step with its prediction, tokens per second, what bounds the
    step, and the memory of each tier. Every ``log_every_n_steps`` steps the loggers get, beside the
    module's own metrics,

    - ``train/device/batches_per_sec``, ``train/device/samples_per_sec``,
      ``train/device/items_per_sec``, ``train/time`` and so on, with the meaning that Lightning's
      ``ThroughputMonitor`` gives them. It is not needed beside this callback;
    - ``hetero_offload/step_s``, ``predicted_step_s``, ``wait_share`` (the share of a step in which
      compute waits), ``host_bytes``, ``host_peak_bytes``, ``device_peak_bytes``, ``disk_bytes``,
      ``bytes_read`` and ``bytes_written``: seconds and bytes of this process;
    - ``hetero_offload/bound_by`` in words: CSV files, Weights & Biases, TensorBoard's texts.

    The module's own metrics stay as they are. Speeds are of training: the time of validations does
    not count.

    Args:
        batch_size_fn: The number of samples of a batch. Default: the length of its first tensor.
        length_fn: The number of items of a batch, such as tokens. Default: the elements of
            ``"input_ids"``, or of the first integer tensor with two dimensions; without one there
            are no items.
        window_size: Over how many batches speeds are averaged, at least 2; there is none before so
            many.
        separator: Between the parts of Lightning's names.

    Raises:
        ConfigError: ``window_size`` is not allowed; or, as a fit begins, the Trainer's strategy
            does not offload.
    """

    @with_hints
    def __init__(
        self,
        batch_size_fn: Callable[[object], int] | None = None,
        length_fn: Callable[[object], int] | None = None,
        *,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        if not isinstance(window_size, int) or window_size < 2:
            raise ConfigError(
                f"window_size={window_size!r}; allowed: an integer of at least 2: speeds are of the time between batches."
            )
        self.batch_size_fn, self.length_fn = batch_size_fn, length_fn
        self.window_size, self.separator = window_size, separator
        self.last: Reading | None = None  # of the latest optimizer step
        self._meter: Meter | None = None
        self._throughput: Throughput | None = None
        self._begin_s = self._away_s = 0.0
        self._batches = self._samples = self._items = 0
        self._tokens = self._per_step = 0  # of the step under way, of the latest one
        self._said = ""
        self._patches = Patches()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to measure."""
        self._meter = meter_of(run_of(trainer, type(self).__name__))
        kind = lightning_of(trainer).fabric("utilities.throughput").Throughput
        self._throughput = kind(world_size=trainer.world_size, window_size=self.window_size, separator=self.separator)
        self.last, self._said, self._begin_s = None, "", now_s()
        self._batches = self._samples = self._items = self._tokens = self._per_step = 0
        bar = trainer.progress_bar_callback
        if bar is not None:
            plain = bar.get_metrics

            def with_ours(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, object]:
                return {**self.shown(), **plain(trainer, pl_module)}  # a metric of the module's may have one of our names

            self._patches.replace(bar, "get_metrics", with_ours)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Counts the batch, and shows the optimizer step that has ended with it."""
        throughput, meter = self._throughput, self._meter
        if throughput is None or meter is None:
            return
        self._count(throughput, batch)
        if (reading := meter.batch_ended(trainer)) is None:  # gradients accumulate
            return
        self.last, self._per_step, self._tokens = reading, self._tokens, 0
        if reading.logged_at is not None:
            speeds = {f"{_STAGE}{self.separator}{name}": value for name, value in throughput.compute().items()}
            for logger in trainer.loggers:
                self._log(logger, {**speeds, **reading.metrics()}, reading.bound_by, reading.logged_at)
            self._said = reading.bound_by

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The time of a validation does not count."""
        self._away_s = now_s()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training goes on."""
        self._begin_s += now_s() - self._away_s

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The progress bar is the user's again."""
        self._end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The same, after an error."""
        self._end()

    def shown(self) -> dict[str, str]:
        """What the progress bar shows of the latest step; empty before the first one."""
        reading = self.last
        if reading is None:
            return {}
        out = {}
        if reading.step_s:
            expected = "" if reading.predicted_s is None else f" of {reading.predicted_s:.3g} s"
            out["step"] = f"{reading.step_s:.3g} s{expected}"
            if self._per_step:
                out["tokens/s"] = f"{self._per_step / reading.step_s:.0f}"
        if reading.bound_by:
            out["bound by"] = reading.bound_by
        tiers = {"device": reading.device_peak_bytes, "host": reading.host_bytes, "disk": reading.disk_bytes}
        return out | {tier: format_bytes(size) for tier, size in tiers.items() if size}

    def _count(self, throughput: Throughput, batch: object) -> None:
        with torch.inference_mode():  # the user's functions may compute
            samples = _samples(batch) if self.batch_size_fn is None else self.batch_size_fn(batch)
            items = num_tokens(batch) if self.length_fn is None else self.length_fn(batch)
        has_items = self.length_fn is not None or items > samples  # without tokens `num_tokens` counts samples
        self._batches += 1
        self._samples += samples
        self._items += items
        self._tokens += items if has_items else 0
        throughput.update(
            time=now_s() - self._begin_s,
            batches=self._batches,
            samples=self._samples,
            lengths=self._items if has_items else None,
        )

    def _log(self, logger: Logger, metrics: dict[str, float], bound_by: str, at: int) -> None:
        """Logs numbers, and words where the logger has a place for them."""
        words = {_BOUND_BY: bound_by} if bound_by else {}
        if _takes_text(logger):
            logger.log_metrics(metrics={**metrics, **words}, step=at)
            return
        logger.log_metrics(metrics=metrics, step=at)
        if words and bound_by != self._said:
            add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
            if callable(add_text):
                add_text(_BOUND_BY, bound_by, at)

    def _end(self) -> None:
        self._patches.restore()
        self._meter = self._throughput = None


class _TextLogger(Protocol):
    def log_metrics(self, metrics: Mapping[str, float | str], step: int) -> None: ...


def _takes_text(logger: Logger) -> TypeGuard[_TextLogger]:
    return any(kind.__name__ in _TEXT_TOO for kind in type(logger).__mro__)


def _samples(batch: object) -> int:
    """The length of a batch's first tensor."""
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
    return 1 if first is None else max(1, len(first))
