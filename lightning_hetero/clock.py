"""The clock of the package: seconds of ``CLOCK_MONOTONIC``, as in the native engine's events.

Training loops and their tests replace ``time.monotonic`` and ``time.perf_counter`` by mocks, and
count the calls. The package reads the same clock by a call that has no Python frame.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

now_s: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
