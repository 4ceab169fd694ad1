"""Facts that the operating system reports about this machine. Nothing is measured or changed."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import resource
import tempfile
from pathlib import Path


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's name."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def huge_pages(root: Path = Path("/")) -> dict[str, int | str]:
    """Huge pages: the mode of transparent ones (such as ``madvise``) and the reserved ones."""
    mode = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    rows = {key: value.split() for key, _, value in (line.partition(":") for line in _read(root / "proc/meminfo").splitlines())}
    page_kib = int(rows.get("Hugepagesize", ["0"])[0])
    return {
        "transparent": mode.partition("[")[2].partition("]")[0] or "unavailable",
        "page_bytes": page_kib * 1024,
        "reserved": int(rows.get("HugePages_Total", ["0"])[0]),
        "free": int(rows.get("HugePages_Free", ["0"])[0]),
    }


def memlock_bytes() -> int | None:
    """Bytes that this process may lock; ``None`` for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def direct_io_error(path: Path) -> str:
    """Writes one page with O_DIRECT to a temporary file.

    Returns the system's error, or an empty text.
    """
    try:
        fd, name = tempfile.mkstemp(dir=path, prefix="lightning-hetero-")
    except OSError as error:
        return str(error)
    os.close(fd)
    page = mmap.mmap(-1, mmap.PAGESIZE)  # aligned, as O_DIRECT demands
    try:
        fd = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            os.pwrite(fd, page, 0)
        finally:
            os.close(fd)
    except OSError as error:
        return os.strerror(error.errno or 0)
    finally:
        page.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
