"""Locks on a store's files, and the processes that hold them.

[Note: Locks of the dead]
The kernel releases the locks of a killed process once the last of its threads has ended and its
last read or write is done. On a busy disk that takes seconds, and a run that is restarted at once
meets these locks. So a lock that no living process holds is waited for. A living process keeps its
lock for as long as it trains, so that is refused at once.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from lightning_hetero.clock import now_s

WAIT_S = 60.0

_PAUSE_S = 0.05
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_ENDING = 0x4 | 0x400  # PF_EXITING, PF_SIGNALED: linux/sched.h
_KILLED = 1 << (signal.SIGKILL - 1)

log = logging.getLogger(__name__)


def lock(descriptor: int, path: Path, *, user: int | None = None, waits: bool = True) -> bool:
    """Takes the exclusive lock on an open file.

    Args:
        descriptor: The file.
        path: Its path, for the log.
        user: The process that is likely to hold the lock if the kernel does not say who does: some
            file systems and containers hide it.
        waits: Wait while no living process holds the lock.

    Returns:
        Whether it was taken. It was not if a living process holds it, or if it was not released
        within ``WAIT_S`` seconds.
    """
    end = None
    while not _taken(descriptor):
        holders = holders_of(descriptor)
        if not holders and user is not None:
            if _taken(descriptor):  # it was released before the kernel was asked
                return True
            holders = [user]
        if not waits or any(map(is_living, holders)):
            return False
        if end is None:
            end = now_s() + WAIT_S
            whose = f"by process {holders[0]}, which has ended" if holders else "although no process is seen to hold it"
            log.warning("%r is still locked %s. Waiting up to %.0f s until reads and writes are over.", str(path), whose, WAIT_S)
        elif now_s() > end:
            return False
        time.sleep(_PAUSE_S)
    return True


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_files(directory: Path, names: Iterable[str]) -> None:
    """Waits until no dead process holds one of these files. Who opens them refuses the others."""
    for name in names:
        try:
            descriptor = os.open(directory / name, _OPEN)
        except OSError:
            continue  # whoever opens it says what is wrong
        try:
            if not lock(descriptor, directory / name):
                return
        finally:
            os.close(descriptor)


def holders_of(descriptor: int) -> list[int]:
    """The processes that took the locks on an open file, as far as the kernel shows them."""
    inode = os.fstat(descriptor).st_ino  # the device's number differs from stat's on some file systems
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return []
    found = [row[4:6] for row in rows if len(row) >= 6 and row[1] == "FLOCK"]  # 1: FLOCK ADVISORY WRITE 99 fe:00:12 0 EOF
    return [int(pid) for pid, file in found if file.rpartition(":")[2] == str(inode)]


def is_living(pid: int) -> bool:
    """Whether a process runs and has not been killed."""
    try:
        status = dict(line.partition(":")[::2] for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        flags = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
    except OSError:
        return False
    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    return status["State"].strip()[0] not in "ZX" and not pending & _KILLED and not flags & _ENDING
