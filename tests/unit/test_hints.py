"""Hints for mistyped names and options: a near one is named, a far one is not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from lightning_hetero import (
    DiskWear,
    HeteroOffloadStrategy,
    HeteroParallelFsdpStrategy,
    HeteroParallelStrategy,
    OffloadMonitor,
    TraceOnDemand,
)
from lightning_hetero.errors import ConfigError, did_you_mean
from lightning_hetero.planners import PLANNERS
from lightning_hetero.profiling.presets.devices import DEVICES
from lightning_hetero.strategies import strategy_class


@pytest.mark.parametrize(
    ("typed", "known", "hint"),
    [
        ("disc", ("device", "host", "disk"), " Did you mean 'disk'?"),
        ("HOST", ("device", "host", "disk"), " Did you mean 'host'?"),
        ("lohn", PLANNERS, " Did you mean 'lohan'?"),
        ("zero_ofload", PLANNERS, " Did you mean 'zero_offload'?"),
        ("rtx9090", DEVICES, " Did you mean 'rtx3090' or 'rtx4090' or 'rtx5090'?"),
        ("oracle", PLANNERS, ""),
        ("fast", PLANNERS, ""),
        ("memory", ("device", "host", "disk"), ""),
        ("tpu", DEVICES, ""),
        ("host_mem", ("host_memory", "device_memory", "disk_path"), " Did you mean 'host_memory'?"),
    ],
)
def test_only_near_names_are_proposed(typed: str, known: Any, hint: str) -> None:
    assert did_you_mean(typed, known) == hint


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_a_mistyped_option_of_the_strategy_is_refused_with_the_nearest_one(namespace: str) -> None:
    kind: Any = strategy_class(namespace)
    with pytest.raises(
        TypeError, match=r"HeteroOffloadStrategy has no option 'host_mem'\. Did you mean 'host_memory'\? Options: plan, "
    ):
        kind(host_mem="4GiB")


@pytest.mark.parametrize(
    ("kind", "typed", "meant"),
    [(OffloadMonitor, "window", "window_size"), (DiskWear, "rated_write", "rated_writes"), (TraceOnDemand, "step", "steps")],
)
def test_so_are_those_of_the_callbacks(kind: Any, typed: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} has no option '{typed}'. Did you mean .*'{meant}'"):
        kind(**{typed: 1})


@pytest.mark.parametrize(
    ("kind", "options", "meant"),
    [
        (HeteroParallelStrategy, {"rebalence_every": 3}, "rebalance_every"),
        (HeteroParallelStrategy, {"find_unused_parameter": True}, "find_unused_parameters"),  # of DDP
        (HeteroParallelStrategy, {"offload": True, "rebalence_every": 3}, "rebalance_every"),
        (HeteroParallelFsdpStrategy, {"rebalence_every": 3}, "rebalance_every"),
    ],
)
def test_so_are_those_of_parallel_strategies_before_processes_start(kind: Any, options: dict[str, Any], meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"has no option '{list(options)[-1]}'\. Did you mean '{meant}'"):
        kind(**options)


def test_the_options_stay_visible_to_programs() -> None:
    """LightningCLI and editors read the signature."""
    parameters = inspect.signature(HeteroOffloadStrategy).parameters
    assert list(parameters)[:2] == ["plan", "block_cls"]
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values())
