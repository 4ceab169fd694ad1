"""Runs ``tests/foreign`` in a process of its own: there a device is torch's accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from foreign import lacking
from support.covers import is_deep

TESTS = Path(__file__).parents[1]


@pytest.mark.skipif(bool(lacking()), reason=lacking())
@pytest.mark.timeout(3600 if is_deep() else 600)
def test_lanes_and_training_hold_on_a_device_that_the_host_cannot_touch() -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--timeout=200", str(TESTS / "foreign")]
    # The installed package is tested, not the source folder.
    env = {**os.environ, "FOREIGN": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
