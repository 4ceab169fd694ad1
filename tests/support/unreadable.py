"""Files that cannot be read."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


class Unreadable:
    """Files of which the n-th read fails with EIO.

    Reads without the engine are made by ``os.pread`` and ``os.preadv``.
    """

    def __init__(self, patch: pytest.MonkeyPatch, pattern: str, fails_at: int) -> None:
        self.reads: list[str] = []
        self.failed = ""
        for name in ("pread", "preadv"):
            patch.setattr(os, name, partial(self._read, getattr(os, name), pattern, fails_at))

    def _read(self, read: Callable[..., Any], pattern: str, fails_at: int, descriptor: int, *arguments: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if re.search(pattern, path):
            self.reads.append(path)
            if len(self.reads) - 1 == fails_at:
                self.failed = path
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, *arguments)
