"""Options of the test suite."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support.effort import limit_search, remember_entry_points
from support.properties import DEEP_EXAMPLES, QUICK_EXAMPLES

# Micro-benchmarks take their time and differ from run to run: tests plan for this machine, child
# processes too.
os.environ.setdefault("LIGHTNING_HETERO_HARDWARE", str(Path(__file__).parent / "support" / "hardware.json"))

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
# One thread of torch's own per process, set before anybody imports torch: models here are tiny,
# pytest-xdist takes all cores, and OpenMP's threads wait for each other by spinning, ten times
# longer than they compute. Where a test wants more, they sleep.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Who runs the tests in the background may have had Ctrl-C ignored, and with them their children:
# tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

remember_entry_points()

# By default the same examples every time, however slow the machine. HYPOTHESIS_PROFILE=deep looks
# for new ones, and for longer.
settings.register_profile(
    "quick",
    max_examples=QUICK_EXAMPLES,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("deep", settings.get_profile("quick"), max_examples=DEEP_EXAMPLES, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_configure() -> None:
    """Planners search as briefly here as in the scripts that tests run."""
    limit_search()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What tests import stays: no collection has to look at it, neither meanwhile nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files in tests/golden instead of comparing with them"
    )


@pytest.fixture(autouse=True)
def _no_lane_is_left() -> Iterator[None]:
    """A fit ends its threads however it ends: one that is left would fail a later test, in another
    file.
    """
    before = set(threading.enumerate())
    yield
    if "torch" in sys.modules:
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        assert _get_current_dispatch_mode() is None  # a profiler that looks on would record all later tests
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning-hetero") and thread not in before]
    assert not left


@pytest.fixture(autouse=True)
def _levels_of_loggers_come_back() -> Iterator[None]:
    """Programs that a test runs in this process, such as benchmarks, may silence Lightning."""
    names = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric", "lightning_hetero")
    before = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(autouse=True)
def _no_group_of_processes_is_left() -> Iterator[None]:
    """Lightning leaves its group and its variables to the end of the process. Transformers and
    accelerate would find them, and average gradients; ranks would begin with another test's seed.
    """
    group = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    names = (*group, "PL_GLOBAL_SEED", "PL_SEED_WORKERS")
    before = {name: os.environ.get(name) for name in names}
    yield
    if "lightning_utilities" in sys.modules:  # other ranks say less
        from lightning_utilities.core.rank_zero import rank_zero_only

        if "rank" in vars(rank_zero_only):
            vars(rank_zero_only)["rank"] = 0
    if "torch.distributed" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
