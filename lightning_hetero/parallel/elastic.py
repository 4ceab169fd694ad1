"""Elastic runs: the committed steps of a run, and the notice before a rank must leave.

Under torchrun's elastic agent a change of membership ends all workers and starts as many as there
are devices. The state is in the last committed step, so a worker may be killed at any instant.

[Note: Committed]
A step is committed when its record exists: an empty file beside its checkpoint, written after the
checkpoint is complete. So a checkpoint may be a file or a directory, on any file system of fsspec,
and an incomplete one never counts as a step.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from lightning_hetero.errors import ConfigError
from lightning_hetero.parallel.pipeline.layout import NODE

STEPS = "LIGHTNING_HETERO_STEPS"  # environment: the path of Elastic, if the strategy has none

LEFT = 128 + signal.SIGTERM  # exit status of a rank that was told to leave: as if the signal had killed it
RESTARTS = 75  # exit status (EX_TEMPFAIL) of the others: the agent starts them again

_RECORD = re.compile(r"step-(\d{12})\.committed")


@dataclass(frozen=True, slots=True)
class Elastic:
    """An elastic run: its steps are committed, and a restart resumes from the newest one.

    Attributes:
        path: Directory or URL of the committed steps, the same from every node. Each run needs its
            own: a run resumes from the steps that are there.
        every_n_steps: Optimizer steps between two commits.
        keep: Number of committed steps to keep.
        grace_s: After SIGTERM: seconds to finish the step and to commit it; then the process ends.
            torchrun kills it after 30.

    Raises:
        ConfigError: A value is out of range.
    """

    path: str | os.PathLike[str]
    every_n_steps: int = 1
    keep: int = 2
    grace_s: float = 25.0

    def __post_init__(self) -> None:
        for name in ("every_n_steps", "keep"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}; allowed: a whole number of at least 1.")
        if not isinstance(self.grace_s, int | float) or not 0 < self.grace_s < float("inf"):
            raise ConfigError(f"grace_s={self.grace_s!r}; allowed: a positive number of seconds.")


def elastic_from(given: str | os.PathLike[str] | Elastic | None, environment: Mapping[str, str] = os.environ) -> Elastic | None:
    """The strategy's ``elastic``; without it, the path in the environment, if any."""
    given = environment.get(STEPS) or None if given is None else given
    return given if given is None or isinstance(given, Elastic) else Elastic(given)


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """This node's name: from ``lightning-hetero launch``, otherwise the host's."""
    return environment.get(NODE) or socket.gethostname()


class CommittedSteps:
    """The directory of a run's committed steps.

    Args:
        path: Directory or URL.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import fsspec

        self._fs, self._root = fsspec.core.url_to_fs(os.fspath(path))
        self._path = os.fspath(path).rstrip("/")

    def checkpoint(self, step: int) -> str:
        """The path of a step's checkpoint."""
        return f"{self._path}/step-{step:012}.ckpt"

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        self._fs.invalidate_cache()
        try:
            names = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(int(match.group(1)) for name in names if (match := _RECORD.fullmatch(name.rpartition("/")[2])))

    def commit(self, step: int) -> None:
        """Writes the record of a step whose checkpoint is complete."""
        self._fs.touch(self._record(step))

    def forget(self, step: int) -> None:
        """Removes a step's record, before its checkpoint is removed."""
        self._fs.rm_file(self._record(step))

    def _record(self, step: int) -> str:
        return f"{self._root}/step-{step:012}.committed"


class Notice:
    """SIGTERM as a notice: the rank continues until all ranks know, at the end of the same step.

    It replaces the current handler, which may be Lightning's: that one broadcasts inside the
    handler, while other ranks do other collectives. Only the main thread may begin and end it.

    Args:
        grace_s: Seconds from the signal to the forced end of the process.
    """

    def __init__(self, grace_s: float) -> None:
        self.received = False
        self._grace_s = grace_s
        self._before: Any = None
        self._timer: threading.Timer | None = None
        self._group: Any = None

    def begin(self) -> None:
        """Handles the signal from now on; every rank must call it."""
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1 and self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")  # host flags: no device waits for them
        handler = signal.signal(signal.SIGTERM, self._on_signal)
        if handler != self._on_signal:
            self._before = handler

    def end(self) -> None:
        """Restores the previous handler."""
        if self._timer is not None:
            self._timer.cancel()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def anyone(self) -> bool:
        """Whether some rank was told to leave.

        All ranks call it together and get the same answer.
        """
        if self._group is None:
            return self.received
        flag = torch.tensor(int(self.received))
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.received:
            return
        self.received = True
        # At the end of the grace the current step is discarded; the previous one is committed.
        self._timer = threading.Timer(self._grace_s, os._exit, (LEFT,))
        self._timer.daemon = True
        self._timer.start()
