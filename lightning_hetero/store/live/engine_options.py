"""How the engine transfers and updates."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.store.capacity import available_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How transfers and updates run; the defaults suit most machines.

    Attributes:
        io_backend: ``"auto"`` (io_uring where the kernel allows it, else threads), ``"io_uring"``
            or ``"pool"``.
        io_threads: Threads of the pool for each disk.
        queue_depth: Transfers in flight on each disk.
        update_threads: Threads that run update kernels; 0 means half of the processors that the
            process may use.
        staging_bytes: Memory through which state streams; 0 means eight chunks for each disk.
        durability: ``"process"`` survives ``kill -9``, ``"power"`` also a crash of the system,
            ``"none"`` nothing.
        direct_io: Bypass the page cache.
        verify_digests: Check the contents of every chunk that is read, also of those that this run
            wrote.
        emulated_bytes_per_s: The disk reads so much in a second, and writes as much beside that, if
            it can; 0: as fast as it is. With several disks each of them.
        num_disks: Disks that have files of a store.
        cpus: Processors of the engine's threads; ``None``: those of the process.
    """

    io_backend: str = "auto"
    io_threads: int = 3
    queue_depth: int = 8
    update_threads: int = 0
    staging_bytes: int = 0
    durability: str = "process"
    direct_io: bool = True
    verify_digests: bool = False
    emulated_bytes_per_s: float = 0.0
    num_disks: int = 1
    cpus: frozenset[int] | None = None

    def threads(self) -> int:
        """Update threads, resolved."""
        return self.update_threads or max(1, available_cores() // 2)


def staging_bytes(options: EngineOptions, chunk_bytes_max: int) -> int:
    """Bytes of staging that the options ask for; at least what one update on each disk needs."""
    return max(options.staging_bytes or 8 * options.num_disks * chunk_bytes_max, least_staging_bytes(options, chunk_bytes_max))


def least_staging_bytes(options: EngineOptions, chunk_bytes_max: int) -> int:
    """A chunk of each disk is read, one is computed, and one is written."""
    return 3 * options.num_disks * chunk_bytes_max
