"""The out-of-core update compared with the limit of the disk.

A block's Adam update streams its state from one file through staging memory into another. Measured,
with each I/O back end:

* ``update``: the update as training runs it: 16-bit weights in memory and on disk, fp32 master and
  moments on disk.
* ``limit``: the same transfers through the same engine, with no gradient to apply, so without
  compute.
* ``naive``: read a chunk, update it, write it, then the next.

This machine's disk may be half-duplex; then only compute can be hidden. So overlap of reads and
writes is shown on a synthetic duplex device (transfers that sleep, with a rate for each direction),
whose limit is the slower direction alone.

Prints one line of JSON last. ``share_of_*`` is limit time / update time (1: compute and the other
direction are hidden), ``vs_naive`` naive time / update time on the synthetic device; times are
medians of alternating repetitions.

    python benchmarks/out_of_core.py --dir /path/on/the/disk
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_hetero._native import BF16, Arena, Engine, Hyper, NativePart, PartGeometry, Patch, Segment, Store, Ticket
from lightning_hetero.errors import UnsupportedError

CHUNK_ELEMENTS = 256 * 1024
CHUNKS_PER_BLOCK = 16
CHUNK_BYTES_MAX = CHUNK_ELEMENTS * (2 + 3 * 4) + 8 * 4096  # weights, master and two moments, footers
STAGING_CHUNKS = 8
HYPER = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1.0)
BF16_PATTERN = 0x3C  # both bytes: the gradient 0.0115


class Workload:
    """Blocks of equal size in one store, their weights and gradients in memory.

    Args:
        directory: An empty private directory.
        num_blocks: Blocks.
        chunks_per_block: Chunks of each; 1 makes a block the unit of a naive loop.
        direct_io: Bypass the page cache.
        verify_digests: Check every chunk's content when it is read.
    """

    def __init__(self, directory: Path, *, num_blocks: int, chunks_per_block: int, direct_io: bool, verify_digests: bool) -> None:
        directory.mkdir(mode=0o700)
        self.numel = chunks_per_block * CHUNK_ELEMENTS
        self.weights = Arena(num_blocks * self.numel * 2)
        self.grads = Arena(num_blocks * self.numel * 2)
        ctypes.memset(self.grads.address, BF16_PATTERN, self.grads.num_bytes)
        self.store = Store(
            directory,
            uuid=bytes(range(16)),
            create=True,
            direct_io=direct_io,
            durability=1,
            verify_digests=verify_digests,
            num_blocks=num_blocks,
            user_bytes=0,
        )
        self.blocks = [self._open(index) for index in range(num_blocks)]
        self.step = 0

    def _open(self, index: int) -> NativePart:
        geometry = PartGeometry(
            id=index,
            weight_dtype=BF16,
            num_elements=self.numel,
            num_state=3,
            weights_on_disk_file=True,
            state_on_disk_file=True,
            chunk_elements=CHUNK_ELEMENTS,
        )
        return NativePart(self.store, geometry, self.weights.address + index * self.numel * 2)

    def fill(self, engine: Engine) -> None:
        """Writes both slots, so that no measured write allocates: zero masters, an update."""
        self.step += 1
        with Arena(self.numel * 4) as zeros:
            master = [Patch(0, self.numel, zeros.address, 0)]
            for block in self.blocks:
                engine.store(block, master, weights_from_memory=True, step=self.step)
            engine.commit(self.store, self.step).wait()
        self.run(engine)

    def _arm(self, engine: Engine, index: int, ticket: Ticket, *, compute: bool) -> None:
        segment = Segment(0, self.numel, self.grads.address + index * self.numel * 2, BF16, 0)
        engine.arm_update(ticket, [segment] if compute else [], [HYPER] if compute else [], step=self.step, priority=index)

    def run(self, engine: Engine, *, compute: bool = True, one_by_one: bool = False) -> float:
        """Seconds for one update of every block and its commit."""
        self.step += 1
        begin = time.perf_counter()
        if one_by_one:
            for index, block in enumerate(self.blocks):
                ticket = engine.open_update(block, weights_resident=True)
                self._arm(engine, index, ticket, compute=compute)
                ticket.wait()
        else:
            tickets = [engine.open_update(block, weights_resident=True) for block in self.blocks]
            for index, ticket in enumerate(tickets):
                self._arm(engine, index, ticket, compute=compute)
        engine.commit(self.store, self.step).wait()
        return time.perf_counter() - begin

    def bytes_of_update(self, engine: Engine) -> tuple[int, int]:
        """Bytes that one update reads and writes."""
        before = engine.stats()
        self.run(engine)
        after = engine.stats()
        return after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written

    def close(self) -> None:
        """Closes the store; the files stay."""
        for block in self.blocks:
            block.close()
        self.store.close()


def make_engine(io_backend: str, args: argparse.Namespace, *, bytes_per_s: float = 0.0) -> Engine:
    """An engine with the package's own settings."""
    return Engine(
        io_backend=io_backend,
        io_threads=args.io_threads,
        queue_depth=args.queue_depth,
        update_threads=args.update_threads,
        staging_bytes=STAGING_CHUNKS * CHUNK_BYTES_MAX,
        chunk_bytes_max=CHUNK_BYTES_MAX,
        synthetic_read_bytes_per_s=bytes_per_s,
        synthetic_write_bytes_per_s=bytes_per_s,
    )


def alternate(runs: dict[str, Callable[[], float]], repetitions: int) -> dict[str, float]:
    """Median seconds of each run.

    The order turns round from repetition to repetition, so that drift cancels.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions):
        for name in list(runs) if repetition % 2 == 0 else reversed(runs):
            seconds[name].append(runs[name]())
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_disk(directory: Path, args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """Update, limit and naive loop on the disk with the engine's back end."""
    common = {"direct_io": not args.buffered, "verify_digests": args.verify_digests}
    num_chunks = args.blocks * CHUNKS_PER_BLOCK // 4  # a quarter is enough for the naive loop
    scale = args.blocks * CHUNKS_PER_BLOCK / num_chunks
    blocks = Workload(directory / "blocks", num_blocks=args.blocks, chunks_per_block=CHUNKS_PER_BLOCK, **common)
    chunks = Workload(directory / "chunks", num_blocks=num_chunks, chunks_per_block=1, **common)
    with engine:
        blocks.fill(engine)
        chunks.fill(engine)
        num_read, num_written = blocks.bytes_of_update(engine)
        seconds = alternate(
            {
                "limit": lambda: blocks.run(engine, compute=False),
                "update": lambda: blocks.run(engine),
                "naive": lambda: chunks.run(engine, one_by_one=True) * scale,
            },
            args.repetitions,
        )
    blocks.close()
    chunks.close()
    return {"bytes_read": num_read, "bytes_written": num_written, **{f"{k}_s": v for k, v in seconds.items()}}


def measure_duplex(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Update and naive loop on the synthetic duplex device, whose limit is the slower direction."""
    rate = args.duplex_rate
    num_chunks = 12 * args.blocks
    chunks = Workload(directory / "duplex", num_blocks=num_chunks, chunks_per_block=1, direct_io=False, verify_digests=False)
    with make_engine("synthetic", args, bytes_per_s=rate) as engine:
        chunks.fill(engine)
        num_read, num_written = chunks.bytes_of_update(engine)
        runs = {"update": lambda: chunks.run(engine), "naive": lambda: chunks.run(engine, one_by_one=True)}
        seconds = alternate(runs, args.repetitions)
    chunks.close()
    limit = max(num_read, num_written) / rate
    sizes = {"bytes_read": num_read, "bytes_written": num_written, "bytes_per_s_each_way": rate}
    return {**sizes, "limit_s": limit, **{f"{k}_s": v for k, v in seconds.items()}}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk; 3 GB free")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of 4 Mi parameters")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--update-threads", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--io-threads", type=int, default=3)
    parser.add_argument("--queue-depth", type=int, default=8)
    parser.add_argument("--duplex-rate", type=float, default=1e9, help="bytes/s of the synthetic device, each way")
    parser.add_argument("--verify-digests", action="store_true", help="check every chunk, in the limit too")
    parser.add_argument("--buffered", action="store_true", help="through the page cache, where O_DIRECT is refused")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    result: dict[str, Any] = {"share_of_io_limit": None}
    for name, io_backend in (("pool", "pool"), ("uring", "io_uring")):
        try:
            engine = make_engine(io_backend, args)
        except UnsupportedError as error:
            print(f"{io_backend}: {error}")
            result[f"share_of_io_limit_{name}"] = None
            continue
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="hetero-benchmark-") as directory:
            figures = measure_disk(Path(directory), args, engine)
        result[f"share_of_io_limit_{name}"] = figures["limit_s"] / figures["update_s"]
        result[name] = figures
        print(f"{io_backend}: {figures}", flush=True)
    shares = [result[key] for key in ("share_of_io_limit_pool", "share_of_io_limit_uring") if result[key] is not None]
    result["share_of_io_limit"] = min(shares, default=None)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="hetero-benchmark-") as directory:
        duplex = measure_duplex(Path(directory), args)
    result["share_of_duplex_limit"] = duplex["limit_s"] / duplex["update_s"]
    result["vs_naive"] = duplex["naive_s"] / duplex["update_s"]
    result["duplex"] = duplex
    print(json.dumps(result))


if __name__ == "__main__":
    main()
