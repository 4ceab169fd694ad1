"""What contestants of a benchmark may do, for processes that must import it."""

from __future__ import annotations

import os
import signal

from contestants import Baton


def fails(baton: Baton) -> None:
    """Ends with an error of two lines before its first turn."""
    raise ValueError("first line\nlast line")


def dies(baton: Baton) -> None:
    """Is killed before its first turn."""
    signal.raise_signal(signal.SIGKILL)


def tells(baton: Baton, name: str) -> dict[str, str]:
    """What a variable of the process says."""
    baton.step_begins()
    return {"found": os.environ[name]}
