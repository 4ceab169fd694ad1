"""What a machine with a GPU can do, measured in about half a minute with torch alone.

Prints one line of JSON: the driver and how the GPU is connected, limits of page-locking, huge
pages, NUMA nodes, the disk, the seconds that page-locking takes, and rates of copies. What cannot
be found out is a string that says why. This package is not used, so a fault of it hides nothing.

    python3 tests/gpu/preflight.py --dir /path/on/the/disk
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GPU = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
PIECE_BYTES = 4 << 20
READERS = 4
_MADV_HUGEPAGE = 14


def command(*words: str) -> str:
    """What a program prints."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    return (done.stdout + done.stderr).strip()


def text(path: str) -> str:
    """A file of the kernel's."""
    return Path(path).read_text(encoding="utf-8").strip()


def system() -> dict[str, Any]:
    """Versions, limits and memory."""
    memory = [line for line in text("/proc/meminfo").splitlines() if line.startswith(("Mem", "Huge", "AnonHuge", "Swap"))]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "kernel": text("/proc/sys/kernel/osrelease"),
        "cores": len(os.sched_getaffinity(0)),
        "memlock_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE),
        "memory": memory,
    }


def huge_pages() -> dict[str, str]:
    """When the kernel gives huge pages."""
    folder = "/sys/kernel/mm/transparent_hugepage"
    return {name: text(f"{folder}/{name}") for name in ("enabled", "defrag", "shmem_enabled")}


def numa() -> dict[str, str]:
    """The cores of each node."""
    return {node.name: text(f"{node}/cpulist") for node in sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))}


def disk(directory: Path, num_bytes: int) -> dict[str, Any]:
    """Bytes per second of writes and reads past the page cache, and the space."""
    file, path = tempfile.mkstemp(dir=directory)
    os.close(file)
    file = os.open(path, os.O_RDWR | os.O_DIRECT)

    def pieces(write: bool, first: int) -> None:
        with mmap.mmap(-1, PIECE_BYTES) as buffer:
            for at in range(first * PIECE_BYTES, num_bytes, READERS * PIECE_BYTES):
                os.pwritev(file, [buffer], at) if write else os.preadv(file, [buffer], at)

    rates = {}
    try:
        with ThreadPoolExecutor(READERS) as threads:
            for name, write in (("write", True), ("read", False)):
                begin = time.perf_counter()
                list(threads.map(lambda first, write=write: pieces(write, first), range(READERS)))
                os.fsync(file)
                rates[f"{name}_bytes_per_s"] = num_bytes / (time.perf_counter() - begin)
    finally:
        os.close(file)
        Path(path).unlink()
    mounted = command("findmnt", "-no", "SOURCE,FSTYPE,OPTIONS", "-T", str(directory)) if shutil.which("findmnt") else ""
    return {**rates, "free_bytes": shutil.disk_usage(directory).free, "mount": mounted}


def page_lock(num_bytes: int) -> dict[str, float]:
    """Seconds that page-locking of memory takes which has been written, by the size of its
    pages.
    """
    cudart, seconds = torch.cuda.cudart(), {}
    for name, huge in (("small_pages_s", False), ("huge_pages_s", True)):
        with mmap.mmap(-1, num_bytes) as memory:
            if huge:
                memory.madvise(_MADV_HUGEPAGE)
            held = (ctypes.c_char * num_bytes).from_buffer(memory)
            ctypes.memset(held, 1, num_bytes)
            begin = time.perf_counter()
            torch.cuda.check_error(cudart.cudaHostRegister(ctypes.addressof(held), num_bytes, 0))
            seconds[name] = time.perf_counter() - begin
            torch.cuda.check_error(cudart.cudaHostUnregister(ctypes.addressof(held)))
            del held
    return seconds


def copies(device: torch.device, num_bytes: int, repeats: int = 4) -> dict[str, float]:
    """Bytes per second of copies, each alone and some together, best of some.

    Of copies together it is the sum.
    """
    on_gpu = device.type == "cuda"

    def memory(pinned: bool) -> Tensor:
        return torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned and on_gpu)

    def here() -> Tensor:
        return torch.ones(num_bytes, dtype=torch.uint8, device=device)

    pinned, other, pageable = memory(True), memory(True), memory(False)
    there, back = here(), here()
    streams = [torch.cuda.Stream(device) for _ in range(2)] if on_gpu else []

    def rate(*work: tuple[Tensor, Tensor]) -> float:
        best = float("inf")
        for _ in range(repeats):
            begin = time.perf_counter()
            for index, (target, source) in enumerate(work):
                if on_gpu:
                    with torch.cuda.stream(streams[index]):
                        target.copy_(source, non_blocking=True)
                else:
                    target.copy_(source)
            if on_gpu:
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - begin)
        return len(work) * num_bytes / best

    return {
        "pinned_h2d": rate((there, pinned)),
        "pinned_d2h": rate((other, back)),
        "pinned_h2d_and_d2h": rate((there, pinned), (other, back)),
        "pageable_h2d": rate((there, pageable)),
        "pageable_d2h": rate((pageable, back)),
        "pinned_d2h_and_pageable_h2d": rate((other, back), (there, pageable)),
        "host_to_host": rate((pageable, other)),
        "device_to_device": rate((there, back)),
    }


def found(look: Callable[[], Any]) -> Any:
    """What is found out, or the reason why not."""
    try:
        return look()
    except (OSError, RuntimeError, ValueError, AttributeError, AssertionError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk that training will use")
    parser.add_argument("--device", default="cuda", help="cpu: a trial")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="of a copy and of the file; page-locking takes four times that")
    args = parser.parse_args()
    begin, device, num_bytes = time.perf_counter(), torch.device(args.device), args.bytes // PIECE_BYTES * PIECE_BYTES
    result: dict[str, Any] = {
        "system": found(system),
        "gpu": found(lambda: command("nvidia-smi", f"--query-gpu={GPU}", "--format=csv")),
        "topology": found(lambda: command("nvidia-smi", "topo", "-m")),
        "huge_pages": found(huge_pages),
        "numa": found(numa),
        "disk": found(lambda: disk(args.dir, num_bytes)),
        "copies_bytes_per_s": found(lambda: copies(device, num_bytes)),
        "page_lock": found(lambda: page_lock(4 * num_bytes)),
    }  # fmt: skip
    print(json.dumps({**result, "seconds": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
