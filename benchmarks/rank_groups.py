"""Groups of ranks that take turns, in a network where nothing else talks."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from contestants import Baton, Contestant, Turn
from scratch import free_port, process_context

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_SENT = 8  # the column of /proc/net/dev, behind the name


def has_own_network() -> bool:
    """Gives this process a network with a loopback device alone; its children have it too.

    Returns:
        False: the system allows it neither to this user nor in a namespace of users.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))
    return True


def loopback_bytes() -> int:
    """Bytes that the loopback device has moved: those of all ranks, with the headers of packets."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counts = next(line.partition(":")[2] for line in lines if line.strip().startswith("lo:"))
    return int(counts.split()[_SENT])


def join_as(rank: int, ranks: int, port: int) -> None:
    """Makes this process one of several that train together, and gives it its share of threads."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "NODE_RANK": "0"}
    os.environ.update(address, WORLD_SIZE=str(ranks), RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))


class Group:
    """As many processes as ranks, which train together when it is their turn.

    Args:
        target: What each rank runs: ``target(baton, rank, ranks, *arguments)``.
        ranks: Their number.
        arguments: Of ``target``; pickled.
    """

    def __init__(self, target: Callable[..., object], ranks: int, *arguments: object) -> None:
        process_context()  # the server of processes starts in this thread, not in those below
        port = free_port()
        self._ranks = [Contestant(_as_rank, target, rank, ranks, port, arguments, waits=False) for rank in range(ranks)]
        try:
            for rank in self._ranks:
                rank.wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def turn(self, steps: int) -> Turn:
        """Trains ``steps`` timed steps. A step lasts until the last rank has ended it."""
        with ThreadPoolExecutor(len(self._ranks)) as pool:
            turns = list(pool.map(lambda rank: rank.turn(steps), self._ranks))
        seconds = [max(times) for times in zip(*(turn.seconds for turn in turns), strict=True)]
        return Turn(seconds=seconds, num_bytes=turns[0].num_bytes)

    def finish(self) -> list[dict[str, Any]]:
        """Ends the processes in order: what the target returned on each rank."""
        with ThreadPoolExecutor(len(self._ranks)) as pool:
            return list(pool.map(Contestant.finish, self._ranks))

    def kill(self) -> None:
        """Ends the processes at once."""
        for rank in self._ranks:
            rank.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _as_rank(baton: Baton, target: Callable[..., Any], rank: int, ranks: int, port: int, arguments: tuple[object, ...]) -> Any:
    join_as(rank, ranks, port)
    return target(baton, rank, ranks, *arguments)
