"""Callbacks that show a run: speed in progress bar and loggers, wear of the disk, traces on demand.
None of them changes a bit.
"""

from __future__ import annotations

import csv
import importlib
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar, ThroughputMonitor, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from support.machines import HARDWARE
from support.models import LitModel, Recipe, Shape, assert_same, data, quiet_trainer, run

from lightning_hetero import DiskWear, EmulatedDevice, HeteroOffloadStrategy, OffloadMonitor, TraceOnDemand, monitors
from lightning_hetero.cli.options import Request, load_plan
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.run_record import RunRecord
from lightning_hetero.ir.stalls import stalls
from lightning_hetero.ir.trace import Trace
from lightning_hetero.profiling.wear import Drive

DISK: dict[str, Any] = {"plan": "disk", "allow_tmpfs": True}
TOKENS, SAMPLES = 12, 2  # of a batch


def fit(folder: Path, *callbacks: Callback, strategy: HeteroOffloadStrategy | None = None, **options: Any) -> pl.Trainer:
    trainer = quiet_trainer(
        strategy=HeteroOffloadStrategy(**DISK) if strategy is None else strategy,
        callbacks=list(callbacks), default_root_dir=folder, **{"max_steps": 6, **options},
    )  # fmt: skip
    trainer.fit(LitModel(Recipe()), data())
    return trainer


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    logger.save()
    with (Path(logger.log_dir) / "metrics.csv").open(encoding="utf-8") as file:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize("plan", ["host", "disk", "auto"])
def test_no_callback_changes_a_bit(plan: str, tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(layers=4, dropout=0.2), steps=7)
    strategy = HeteroOffloadStrategy(plan, allow_tmpfs=True, hardware_profile=HARDWARE if plan == "auto" else None)
    shown = [OffloadMonitor(), DiskWear(), TraceOnDemand(tmp_path / "traces", steps=2, at_step=3)]
    assert_same(run(recipe, strategy, tmp_path, callbacks=shown), run(recipe, "auto", tmp_path))
    assert len(shown[2].written) == 1


# ---- the monitor ---------------------------------------------------------------------------------


def test_loggers_get_the_names_and_values_of_lightnings_throughput_monitor(tmp_path: Path) -> None:
    """Both count the same batches over the same window; seconds are each one's own."""
    ours, plain = CSVLogger(tmp_path, name="ours"), CSVLogger(tmp_path, name="plain")
    fit(tmp_path, OffloadMonitor(window_size=3), logger=ours)
    reference = ThroughputMonitor(lambda batch: len(batch[0]), lambda batch: batch[0].numel(), window_size=3)
    LitModel.flops_per_batch = None  # type: ignore[attr-defined]  # else it warns
    try:
        fit(tmp_path, reference, logger=plain)
    finally:
        del LitModel.flops_per_batch  # type: ignore[attr-defined]
    names, counts = [], []
    for logger in (ours, plain):
        last = rows(logger)[-1]
        names.append({key for key in last if key.startswith("train/")})
        counts.append({key: float(last[f"train/{key}"]) for key in ("batches", "samples", "lengths")})
    assert names[0] == names[1] >= {"train/device/items_per_sec", "train/device/samples_per_sec", "train/device/batches_per_sec"}
    assert counts[0] == counts[1] == {"batches": 6, "samples": 6 * SAMPLES, "lengths": 6 * TOKENS}


def test_loggers_get_step_time_memory_and_the_bottleneck_in_words(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    monitor = OffloadMonitor()
    trainer = fit(tmp_path, monitor, logger=logger)
    logged = [row for row in rows(logger) if "hetero_offload/step_s" in row]
    assert [int(row["step"]) for row in logged] == list(range(6))
    last = {key.removeprefix("hetero_offload/"): value for key, value in logged[-1].items()}
    assert float(last["step_s"]) > 0
    assert 0 <= float(last["wait_share"]) <= 1
    report = trainer.strategy.memory_report()
    assert 0 < float(last["host_bytes"]) <= float(last["host_peak_bytes"]) <= report["host_peak_bytes"]
    assert float(last["disk_bytes"]) > 0
    written = [float(row["hetero_offload/bytes_written"]) for row in logged]
    assert written == sorted(written)
    assert 0 < written[-1] <= report["bytes_written"]
    assert last["bound_by"] == monitor.last.bound_by != ""
    assert not any(key.startswith(("hetero_offload/", "train/")) for key in trainer.callback_metrics)


def test_a_planned_run_logs_what_was_predicted(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    monitor = OffloadMonitor()
    trainer = fit(tmp_path, monitor, strategy=HeteroOffloadStrategy(hardware_profile=HARDWARE), logger=logger, max_steps=7)
    found = [row["hetero_offload/predicted_step_s"] for row in rows(logger) if "hetero_offload/predicted_step_s" in row]
    assert set(map(float, found)) == {trainer.strategy.plan.predicted.iteration_s}
    assert " of " in monitor.shown()["step"]


def test_every_step_is_measured_once_whatever_the_accumulation_and_however_many_ask(tmp_path: Path) -> None:
    """Three callbacks read one clock, and a step has the time of all of its batches."""
    seen: list[tuple[int, float]] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if monitor.last is not None and (not seen or seen[-1][0] != monitor.last.step):
                seen.append((monitor.last.step, monitor.last.step_s))

    monitor = OffloadMonitor()
    tracer = TraceOnDemand(tmp_path, steps=3, at_step=0)
    fit(tmp_path, monitor, DiskWear(), tracer, Watch(), max_steps=3, accumulate_grad_batches=2)
    record = RunRecord.load(tracer.written[0] / "run.json")
    assert [(row.step, row.seconds) for row in record.steps] == seen
    assert [step for step, _ in seen] == [1, 2, 3]
    assert record.tokens == 2 * TOKENS


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_the_progress_bar_shows_it_and_is_the_users_again_afterwards(bar: type[Any], tmp_path: Path) -> None:
    shown: list[dict[str, Any]] = []

    class Bar(bar):  # type: ignore[misc]
        def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Any:
            return super().get_metrics(trainer, pl_module) | {"mine": "1"}

    class Look(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, pl_module))

    used = Bar()
    fit(tmp_path, OffloadMonitor(), Look(), used, enable_progress_bar=True)
    last = shown[-1]
    assert last["mine"] == "1"
    assert {"step", "tokens/s", "bound by", "host", "disk"} <= last.keys()
    assert last["step"].endswith(" s")
    assert "iB" in last["host"]
    assert "get_metrics" not in vars(used)


def test_an_error_gives_the_progress_bar_and_the_signal_back(tmp_path: Path) -> None:
    class Fails(LitModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    before = signal.getsignal(signal.SIGUSR1)
    bar = TQDMProgressBar()
    callbacks = [OffloadMonitor(), TraceOnDemand(tmp_path, on_signal="SIGUSR1"), bar]
    trainer = quiet_trainer(
        strategy=HeteroOffloadStrategy(**DISK), callbacks=callbacks, enable_progress_bar=True, default_root_dir=tmp_path
    )
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fails(Recipe()), data())
    assert "get_metrics" not in vars(bar)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_tensorboard_gets_numbers_and_words(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="TensorBoard's files are written by tensorboardX, which is not installed")
    from lightning.pytorch.loggers import TensorBoardLogger

    texts: list[tuple[str, str]] = []
    logger = TensorBoardLogger(tmp_path)
    plain = logger.experiment.add_text
    logger.experiment.add_text = lambda tag, text, step: (texts.append((tag, text)), plain(tag, text, step))
    fit(tmp_path, OffloadMonitor(), logger=logger)
    assert texts
    assert {tag for tag, _ in texts} == {"hetero_offload/bound_by"}
    written = b"".join(path.read_bytes() for path in Path(logger.log_dir).glob("events*"))
    for name in (b"hetero_offload/step_s", b"hetero_offload/host_bytes", b"train/samples"):
        assert name in written


def test_weights_and_biases_offline_gets_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="test")
    fit(tmp_path, OffloadMonitor(), logger=logger)
    summary = dict(logger.experiment.summary)
    logger.experiment.finish()
    assert summary["hetero_offload/step_s"] > 0
    assert summary["hetero_offload/bound_by"]


@pytest.mark.parametrize("kind", [OffloadMonitor, DiskWear, TraceOnDemand])
def test_a_strategy_that_does_not_offload_is_refused_with_a_remedy(kind: type[Any], tmp_path: Path) -> None:
    trainer = quiet_trainer(callbacks=[kind()], max_steps=1, default_root_dir=tmp_path)
    with pytest.raises(ConfigError, match=f'{kind.__name__} shows .* SingleDeviceStrategy. Pass strategy="hetero_offload"'):
        trainer.fit(LitModel(Recipe()), data())


@pytest.mark.parametrize("name", ["OffloadMonitor", "DiskWear", "TraceOnDemand"])
def test_both_namespaces_have_the_callbacks(name: str) -> None:
    kinds = {"": "lightning.pytorch", "PytorchLightning": "pytorch_lightning"}
    for prefix, namespace in kinds.items():
        assert issubclass(getattr(monitors, prefix + name), importlib.import_module(namespace).Callback)


def test_a_device_with_memory_of_its_own_has_a_tier_of_its_own(tmp_path: Path) -> None:
    monitor = OffloadMonitor()
    fit(tmp_path, monitor, strategy=HeteroOffloadStrategy("host", device=EmulatedDevice("64MiB")))
    assert {"device", "host"} <= monitor.shown().keys()
    assert monitor.last.metrics()["hetero_offload/device_peak_bytes"] > 0


# ---- wear ----------------------------------------------------------------------------------------


def test_the_log_says_what_steps_write_and_how_long_the_drive_lasts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger, worn = CSVLogger(tmp_path), DiskWear("1TB")
    with caplog.at_level(logging.INFO, logger="lightning_hetero"):
        trainer = fit(tmp_path, worn, logger=logger)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("disk wear: ")]
    assert "rated for 1 TB (given)" in line
    assert line.endswith("of training.")
    last = [row for row in rows(logger) if "hetero_offload/bytes_written_per_step" in row][-1]
    on_disk = tuple(f"{block.name}." for block in trainer.strategy.plan.blocks if block.state.value == "disk")
    moments = sum(8 * p.numel() for name, p in trainer.model.named_parameters() if name.startswith(on_disk))
    assert float(last["hetero_offload/bytes_written_per_step"]) > moments > 0
    assert float(last["hetero_offload/drive_days_left"]) > 0


def test_a_drive_that_says_nothing_is_not_guessed_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_hetero.monitors.disk_wear.drives_under", lambda path: (Drive(name="vda"),))
    with caplog.at_level(logging.INFO, logger="lightning_hetero"):
        fit(tmp_path, DiskWear())
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("disk wear: ")]
    assert 'what vda is rated for is not known. DiskWear("600TB") says what it is.' in line


def test_a_plan_in_memory_wears_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning_hetero"):
        fit(tmp_path, DiskWear(), strategy=HeteroOffloadStrategy("host"))
    assert "disk wear: steps write nothing to the disk." in caplog.text


# ---- traces --------------------------------------------------------------------------------------


def test_a_signal_records_some_steps_and_then_nothing(tmp_path: Path) -> None:
    class Ask(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    tracer = TraceOnDemand(steps=2, on_signal="SIGUSR1")
    trainer = fit(tmp_path, Ask(), tracer)
    assert tracer.written == [tmp_path / "trace-step-3"]
    events = [e for e in json.loads((tracer.written[0] / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {event["args"]["step"] for event in events} == {3, 4}
    names = {event["name"].rpartition(" ")[0] for event in events}
    assert {"F", "B", "FETCH state", "UPDATE", "STORE", "COMMIT"} <= names
    assert signal.getsignal(signal.SIGUSR1) is before
    assert trainer.strategy.run.trace.spans[-1].step < 5, "later steps are not recorded"


def test_a_recording_equals_a_trace_of_the_whole_run(tmp_path: Path) -> None:
    """The same ops in the same order on every lane."""
    tracer = TraceOnDemand(steps=2, at_step=2)
    fit(tmp_path, tracer)
    whole = fit(tmp_path, strategy=HeteroOffloadStrategy(**DISK, trace=True)).strategy.trace
    found = Trace.from_chrome((tracer.written[0] / "trace.json").read_text())
    for step in (3, 4):  # the whole one counts from 0
        ours, theirs = ([s for s in t.spans if s.step == n] for t, n in ((found, step), (whole, step - 1)))
        for lane in {span.lane for span in theirs}:
            if lane != "disk_read":  # what is in the page cache or not yet released changes nothing of the rest
                expected = [s.name for s in sorted(theirs, key=lambda s: s.start_s) if s.lane == lane and not s.is_wait]
                assert sorted(s.name for s in ours if s.lane == lane and not s.is_wait) == sorted(expected)
    assert stalls(found)


def test_a_planned_run_leaves_what_commands_need(tmp_path: Path) -> None:
    tracer = TraceOnDemand(tmp_path, steps=1, at_step=5)
    fit(tmp_path, tracer, strategy=HeteroOffloadStrategy(hardware_profile=HARDWARE), max_steps=7)
    plan, request = load_plan(tracer.written[0] / "plan.json", Request())
    model, _ = request.profiles()
    assert [b.name for b in model.blocks] == [b.name for b in plan.blocks]
    record = RunRecord.load(tracer.written[0] / "run.json")
    assert record.model == "LitModel"
    assert {t.name for t in record.tensors} == {name for name, _ in LitModel(Recipe()).named_parameters()}
    assert {t.block for t in record.tensors} <= {b.name for b in plan.blocks}


def test_a_recording_that_training_cuts_short_is_written(tmp_path: Path) -> None:
    tracer = TraceOnDemand(tmp_path, steps=4, at_step=4)
    fit(tmp_path, tracer)
    assert len(RunRecord.load(tracer.written[0] / "run.json").steps) == 2


def test_a_strategy_that_records_anyway_goes_on_recording(tmp_path: Path) -> None:
    tracer = TraceOnDemand(tmp_path, steps=1, at_step=1)
    trainer = fit(tmp_path, tracer, strategy=HeteroOffloadStrategy(**DISK, trace=True))
    assert max(span.step for span in trainer.strategy.trace.spans) == 5
    assert {span.step for span in Trace.from_chrome((tracer.written[0] / "trace.json").read_text()).spans} == {2}


def recorded(tracer: TraceOnDemand) -> list[tuple[set[int], list[int]]]:
    """The steps of each recording, by its trace and by its record."""
    return [
        (
            {s.step for s in Trace.from_chrome((f / "trace.json").read_text()).spans},
            [s.step for s in RunRecord.load(f / "run.json").steps],
        )
        for f in tracer.written
    ]


def test_recordings_at_the_same_time_are_both_whole(tmp_path: Path) -> None:
    short, long = TraceOnDemand(tmp_path / "1", steps=2, at_step=1), TraceOnDemand(tmp_path / "2", steps=3, at_step=2)
    trainer = fit(tmp_path, short, long)
    assert recorded(short) == [({2, 3}, [2, 3])]
    assert recorded(long) == [({3, 4, 5}, [3, 4, 5])]
    assert max(span.step for span in trainer.strategy.run.trace.spans) == 4, "later steps are not recorded"


def test_one_signal_asks_all_and_is_given_back_as_the_last_one_ends(tmp_path: Path) -> None:
    class Ask(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    tracers = [TraceOnDemand(tmp_path / name, steps=1, on_signal="SIGUSR1") for name in "ab"]
    fit(tmp_path, Ask(), *tracers)
    assert [recorded(tracer) for tracer in tracers] == [[({3}, [3])]] * 2
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_recording_that_was_asked_for_does_not_replace_that_of_at_step(tmp_path: Path) -> None:
    tracer = TraceOnDemand(tmp_path, steps=2, at_step=1)
    tracer.request()
    fit(tmp_path, tracer)
    assert recorded(tracer) == [({1, 2}, [1, 2]), ({3, 4}, [3, 4])]
    fit(tmp_path, tracer, max_steps=2)
    assert recorded(tracer)[2:] == [({2}, [2])], "each fit records"


class TwoOptimizers(LitModel):
    """Steps both in each batch, so ``global_step`` is even after it."""

    def __init__(self) -> None:
        super().__init__(Recipe())
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
        self.log("mine", 1.0)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.AdamW(part, lr=1e-3, fused=True) for part in (parameters[:4], parameters[4:])]


def test_a_batch_with_several_steps_skips_no_log_and_no_recording(tmp_path: Path) -> None:
    logger, tracer = CSVLogger(tmp_path), TraceOnDemand(tmp_path, steps=2, at_step=3)
    trainer = quiet_trainer(
        strategy=HeteroOffloadStrategy(**DISK), callbacks=[OffloadMonitor(), DiskWear(), tracer], default_root_dir=tmp_path,
        max_steps=12, logger=logger, log_every_n_steps=5,
    )  # fmt: skip
    trainer.fit(TwoOptimizers(), data())
    assert recorded(tracer) == [({6, 8}, [6, 8])]
    assert [int(row["step"]) for row in rows(logger) if "hetero_offload/step_s" in row] == [4]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_axis_of_loggers_is_that_of_the_module_s_metrics(every: int, tmp_path: Path) -> None:
    """It counts batches that stepped, however many optimizers did."""
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(
        strategy=HeteroOffloadStrategy(hardware_profile=HARDWARE), callbacks=[OffloadMonitor(), DiskWear()],
        default_root_dir=tmp_path, max_steps=24, logger=logger, log_every_n_steps=every,
    )  # fmt: skip
    trainer.fit(TwoOptimizers(), data())
    own, ours, wear, errors = (
        [int(row["step"]) for row in rows(logger) if row.get(name)]
        for name in ("mine", "hetero_offload/step_s", "hetero_offload/bytes_written", "hetero_offload/step_time_error")
    )
    assert own
    assert ours == own
    assert sorted(set(wear)) == own
    assert errors == [step for step in own if step >= errors[0]]


@pytest.mark.parametrize("strategy", [{}, {"hardware_profile": HARDWARE}], ids=["disk", "auto"])
def test_a_trainer_that_never_logs_is_not_logged_to(strategy: dict[str, Any], tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    given = HeteroOffloadStrategy(**(strategy or DISK))
    fit(tmp_path, OffloadMonitor(), DiskWear(), logger=logger, log_every_n_steps=0, max_steps=8, strategy=given)
    assert not (Path(logger.log_dir) / "metrics.csv").exists()


def test_a_fit_shows_nothing_of_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor, worn, shown = OffloadMonitor(), DiskWear(), []

    class Look(Callback):
        def on_train_start(self, *_: Any) -> None:
            shown.append((monitor.shown(), worn.wear))

    fit(tmp_path, monitor, worn)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="lightning_hetero"):
        fit(tmp_path, monitor, worn, Look(), strategy=HeteroOffloadStrategy("host"), max_steps=1)
    assert shown == [({}, None)]
    assert "disk wear: " not in caplog.text, "a single step says nothing of the others"


def test_the_progress_bar_keeps_metrics_that_have_our_names(tmp_path: Path) -> None:
    class Mine(LitModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("step", 7.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

    seen = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            seen.append(trainer.progress_bar_callback.get_metrics(trainer, pl_module)["step"])

    trainer = quiet_trainer(
        strategy=HeteroOffloadStrategy("host"), callbacks=[OffloadMonitor(), Look()], default_root_dir=tmp_path, max_steps=3,
        enable_progress_bar=True,
    )  # fmt: skip
    trainer.fit(Mine(Recipe()), data())
    assert seen[1:] == [7.0, 7.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 17}, "steps=17; allowed: an integer from 1 to 16"),
        ({"on_signal": "SIGUSR"}, "Did you mean 'SIGUSR1'"),
        ({"at_step": "100"}, "at_step='100'; allowed: an integer of at least 0"),
        ({"at_step": -1}, "at_step=-1"),
    ],
    ids=["steps", "signal", "text", "negative"],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TraceOnDemand(**options)
    with pytest.raises(ConfigError, match="rated_writes"):
        DiskWear("much")


@pytest.mark.parametrize("size", [-1, 0, 1, 2.5, "3"])
def test_a_window_without_time_between_batches_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"window_size=.* allowed: an integer of at least 2"):
        OffloadMonitor(window_size=size)
