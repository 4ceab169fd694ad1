"""pytest plugin that swaps the strategy that `Trainer` and `Fabric` choose on one CPU device with
`strategy="auto"`, or DDP on several ones, and records what ran.

Loaded by `run.py` with `-p plugin`. Environment variables:

- `HETERO_SUITE_STRATEGY`: registry name of the strategy to use instead; `auto` records Lightning's
  own choice.
- `HETERO_SUITE_RECORD`: path of the record, one JSON object a line for each finished test.
- `HETERO_SUITE_ONLY`: optional path of a JSON list of test ids; every other test is deselected.
- `HETERO_SUITE_RANKS`: `1` swaps DDP on several CPU devices instead.

Of the strategies of one device only the *default* choice is replaced: a test that names its
strategy or mocks other hardware keeps it, because such a test is about that strategy. Tests that
would start further processes are skipped: they are slow, and none uses one CPU device.

Of those of several devices, DDP is replaced whether Lightning chooses it or a test names it, as in
`strategy="ddp_spawn"`. Other strategies keep: an instance of `DDPStrategy` has options of its own.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.fabric as F
import lightning.fabric.connector
import lightning.fabric.strategies.launchers as fabric_launchers
import lightning.pytorch as L
import pytest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

# User property of a test that ran a Trainer, or used a Fabric, with a strategy that is swapped.
RAN_DEFAULT = "ran_default"
# What the name or the text of a test has if it may start several processes.
SEVERAL_DEVICES = re.compile(r"ddp|_spawn|devices\W+[2-9[]|num_processes=[2-9]")


class Swap:
    """Replaces strategies and notes the tests that use them. Lives in the process that runs
    tests.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._item: pytest.Item | None = None

    def _note(self, cls: type, method: str, counts: Callable[[Any], bool]) -> None:
        """Notes the tests that call a method of an object that counts."""
        original = getattr(cls, method)

        @functools.wraps(original)
        def noted(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if self._item is not None and counts(self_):
                self._item.user_properties.append((RAN_DEFAULT, True))
            return original(self_, *args, **kwargs)

        setattr(cls, method, noted)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._item = item
        result = yield
        self._item = None
        return result


class SwapDefaultStrategy(Swap):
    """Replaces the default strategy of one device."""

    def pytest_sessionstart(self) -> None:
        self._swap(_AcceleratorConnector, SingleDeviceStrategy)
        self._swap(lightning.fabric.connector._Connector, F.strategies.SingleDeviceStrategy)
        self._note(L.Trainer, "_run", lambda trainer: hasattr(trainer._accelerator_connector, "_chose_default"))
        # A Fabric on one device need not be launched: set-ups, saves and loads ask whether it was.
        for method in ("launch", "_validate_launched"):
            self._note(F.Fabric, method, lambda fabric: hasattr(fabric._connector, "_chose_default"))

        def skip_launch(*_: Any, **__: Any) -> None:
            pytest.skip("starts further processes")

        launchers = (fabric_launchers._MultiProcessingLauncher, fabric_launchers._SubprocessScriptLauncher)
        for launcher in (_MultiProcessingLauncher, _SubprocessScriptLauncher, *launchers):
            launcher.launch = skip_launch

    def _swap(self, connector: type, default: type) -> None:
        """Makes a connector choose the other strategy where it chooses ``default`` on a CPU."""
        choose = connector._choose_strategy

        def choose_swapped(self_: Any) -> Any:
            chosen = choose(self_)
            if type(chosen) is not default or self_._accelerator_flag != "cpu":
                return chosen
            self_._chose_default = True
            return chosen if self._strategy == "auto" else self._strategy

        connector._choose_strategy = choose_swapped


class SwapRanks(Swap):
    """Replaces DDP on several CPU devices. Where Lightning would spawn ranks they are forks, in
    both runs.
    """

    def pytest_sessionstart(self) -> None:
        make = _AcceleratorConnector._init_strategy

        def make_swapped(connector: Any) -> None:
            make(connector)
            named = isinstance(connector._strategy_flag, str) and type(connector.strategy) is DDPStrategy
            if not named or connector._accelerator_flag != "cpu" or len(connector._parallel_devices) < 2:
                return
            chosen = connector.strategy
            if self._strategy != "auto":
                connector.strategy = StrategyRegistry[self._strategy]["strategy"](plan="host")
                connector.strategy.parallel_devices = connector._parallel_devices
            # Forks need neither imports nor pickles of what a test has made.
            connector.strategy._start_method = "popen" if chosen._start_method == "popen" else "fork"
            connector.strategy._swapped = True

        _AcceleratorConnector._init_strategy = make_swapped
        self._note(L.Trainer, "_run", lambda trainer: hasattr(trainer.strategy, "_swapped"))
        self._note(_MultiProcessingLauncher, "launch", lambda launcher: hasattr(launcher._strategy, "_swapped"))


class Record:
    """Appends one line per finished test. Lives in the process that collects reports (the
    controller under xdist).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reports: dict[str, list[pytest.TestReport]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.setdefault(report.nodeid, []).append(report)
        # A crashed or timed-out worker reports once, with when="???": nothing follows it.
        if report.when in ("setup", "call"):
            return
        reports = self._reports.pop(report.nodeid)
        failed = [r for r in reports if r.failed]
        if failed:
            outcome = "failed"
        elif any(hasattr(r, "wasxfail") for r in reports):
            outcome = "xfailed"
        else:
            outcome = "skipped" if any(r.skipped for r in reports) else "passed"
        line = {
            "test": report.nodeid,
            "outcome": outcome,
            "ran_default": any((RAN_DEFAULT, True) in map(tuple, r.user_properties) for r in reports),
            "duration_s": round(sum(r.duration for r in reports), 3),
            "error": "\n".join(r.longreprtext for r in failed)[-6000:],
            "skipped": next((r.longrepr[2] for r in reports if r.skipped and isinstance(r.longrepr, tuple)), ""),
        }
        with self._path.open("a") as record:
            record.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    swap = SwapRanks if os.environ.get("HETERO_SUITE_RANKS") else SwapDefaultStrategy
    config.pluginmanager.register(swap(os.environ["HETERO_SUITE_STRATEGY"]), "swap-strategies")
    if not hasattr(config, "workerinput") and "LOCAL_RANK" not in os.environ:  # nor a rank that a test has started
        config.pluginmanager.register(Record(Path(os.environ["HETERO_SUITE_RECORD"])), "record")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = items[:]
    if os.environ.get("HETERO_SUITE_RANKS"):
        kept = [item for item in kept if SEVERAL_DEVICES.search(item.nodeid + source_of(item))]
    if only := os.environ.get("HETERO_SUITE_ONLY"):
        wanted = set(json.loads(Path(only).read_text()))
        kept = [item for item in kept if item.nodeid in wanted]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def source_of(item: pytest.Item) -> str:
    """The text of a test, with its marks; empty for a doctest."""
    return inspect.getsource(item.function) if isinstance(item, pytest.Function) else ""
