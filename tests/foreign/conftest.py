"""These tests change what torch's accelerator is, so they run in a process of their own:
``FOREIGN=1 pytest -n0 tests/foreign``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from foreign import native

if os.environ.get("FOREIGN") == "1":
    native()  # from now on torch knows the device's name
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    """Streams are late by random times."""
    native().set_delay(0, 200)
    yield
    native().set_delay(0, 0)
