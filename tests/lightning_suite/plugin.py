"""pytest plugin that swaps the strategy `Trainer(strategy="auto")` chooses on one CPU device, and
records what ran.

Loaded by `run.py` with `-p plugin`. Environment variables:

- `HETERO_SUITE_STRATEGY`: registry name of the strategy to use instead; `auto` records Lightning's
  own choice.
- `HETERO_SUITE_RECORD`: path of the record, one JSON object a line for each finished test.
- `HETERO_SUITE_ONLY`: optional path of a JSON list of test ids; every other test is deselected.

Only the *default* choice is replaced: a test that names its strategy or mocks other hardware keeps
it, because such a test is about that strategy. Tests that would start further processes are
skipped: they are slow, and none uses one CPU device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

RAN_TRAINER = "ran_default_trainer"  # user property of a test that ran a Trainer on the default choice for one CPU device


class SwapDefaultStrategy:
    """Replaces the default strategy and notes the tests that run a Trainer with it. Lives in the
    process that runs tests.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._item: pytest.Item | None = None

    def pytest_sessionstart(self) -> None:
        choose, run = _AcceleratorConnector._choose_strategy, L.Trainer._run

        def choose_swapped(connector: _AcceleratorConnector) -> Strategy | str:
            chosen = choose(connector)
            if type(chosen) is not SingleDeviceStrategy or connector._accelerator_flag != "cpu":
                return chosen
            connector._chose_default = True
            return chosen if self._strategy == "auto" else self._strategy

        def run_noted(trainer: L.Trainer, *args: Any, **kwargs: Any) -> Any:
            if self._item is not None and hasattr(trainer._accelerator_connector, "_chose_default"):
                self._item.user_properties.append((RAN_TRAINER, True))
            return run(trainer, *args, **kwargs)

        def skip_launch(*_: Any, **__: Any) -> None:
            pytest.skip("starts further processes")

        for launcher in (_MultiProcessingLauncher, _SubprocessScriptLauncher):
            launcher.launch = skip_launch
        _AcceleratorConnector._choose_strategy = choose_swapped
        L.Trainer._run = run_noted

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._item = item
        result = yield
        self._item = None
        return result


class Record:
    """Appends one line per finished test. Lives in the process that collects reports (the
    controller under xdist).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reports: dict[str, list[pytest.TestReport]] = {}
        path.write_text("")

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
            "ran_trainer": any((RAN_TRAINER, True) in map(tuple, r.user_properties) for r in reports),
            "duration_s": round(sum(r.duration for r in reports), 3),
            "error": "\n".join(r.longreprtext for r in failed)[-6000:],
        }
        with self._path.open("a") as record:
            record.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SwapDefaultStrategy(os.environ["HETERO_SUITE_STRATEGY"]), "swap-default-strategy")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(Path(os.environ["HETERO_SUITE_RECORD"])), "record")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only = os.environ.get("HETERO_SUITE_ONLY")
    if only is None:
        return
    wanted = set(json.loads(Path(only).read_text()))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]
