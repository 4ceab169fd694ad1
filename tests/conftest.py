"""Options of the test suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Micro-benchmarks take their time and differ from run to run: tests plan for this machine, child processes too.
os.environ.setdefault("LIGHTNING_HETERO_HARDWARE", str(Path(__file__).parent / "support" / "hardware.json"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files in tests/golden instead of comparing with them"
    )
