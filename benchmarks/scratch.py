"""Files that do not outlive a benchmark."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A directory that is removed in the end, also after an error, Ctrl-C or SIGTERM."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix="hetero-benchmark-") as directory:
            yield Path(directory)
    finally:
        signal.signal(signal.SIGTERM, before)
