"""What ranks tell each other between batches, to decide together.

[Note: Decisions]
They have a group of processes of their own. The collectives of a step may still run on their lane
while the ranks decide about the next one, and no two threads may use one group. Each exchange
begins with what it is about, so ranks that have come to different places end with an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from traceback import clear_frames

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_hetero.errors import HeteroError
from lightning_hetero.lanes.mesh import close
from lightning_hetero.lanes.network import EmulatedNetwork
from lightning_hetero.lanes.notes import Notes
from lightning_hetero.lanes.peers import DeviceLinks

_MOST = 7  # numbers of a rank in one exchange


class Topic(Enum):
    """What an exchange is about, as the error says it of a rank."""

    PLAN = "plans before a training batch"
    TRAINED = "has ended a training batch"
    EVALUATE = "begins a batch of validation, test or prediction"


ALIKE = (
    "All of them have equally many batches, of training and of each validation, and stop together. Leave the Trainer's "
    "distributed sampler in place, or set limit_train_batches and limit_val_batches."
)
_TOPICS = tuple(Topic)
_gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 warns of the older name


class Decisions:
    """Exchanges small things among all ranks; see [Note: Decisions].

    All ranks call the same methods in the same order, in the thread that trains.

    Args:
        group: The ranks, and nobody else uses it. Its timeout bounds every exchange.
        network: The speed of their collectives, if that is emulated; decisions do not take it.
        mesh: Their nodes, with groups that nobody else uses, either; ``None``: one.
        notes: Where a rank says why it ends.
        peers: Their devices, if these exchange themselves, by a group that nobody else uses.

    Raises:
        HeteroError: Of each method: another rank has died or hangs, or the network has failed.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, network: EmulatedNetwork | None = None, mesh: DeviceMesh | None = None,
        notes: Notes | None = None, peers: DeviceLinks | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.nodes = 1 if mesh is None else mesh.shape[0]
        self.group, self.network, self.mesh, self.notes, self.peers = group, network, mesh, notes or Notes(), peers
        self._is_closed = False

    @property
    def is_first(self) -> bool:
        """Whether this rank does what one rank does for all."""
        return self.rank == 0

    @property
    def shards(self) -> int:
        """The ranks of each node."""
        return self.ranks // self.nodes

    @property
    def is_first_of_node(self) -> bool:
        """Whether this rank does what one rank does for those of its node."""
        return self.rank % self.shards == 0

    def numbers(self, *own: float, about: Topic = Topic.PLAN) -> list[list[float]]:
        """The numbers of each rank; all tell as many, at most seven.

        Raises:
            HeteroError: Another rank tells something ``about`` another topic.
        """
        mine = [_TOPICS.index(about), *own, *[0.0] * (_MOST - len(own))]
        told = torch.empty(self.ranks, len(mine), dtype=torch.float64)
        with self._naming():
            _gather_all(told.view(-1), torch.tensor(mine, dtype=torch.float64), group=self.group)
        topics, rows = [_TOPICS[int(row[0])] for row in told], [row[1 : 1 + len(own)] for row in told.tolist()]
        if len(set(topics)) > 1:
            each = ", ".join(f"rank {rank} {topic.value}" for rank, topic in enumerate(topics))
            raise HeteroError(f"the ranks have come to different places: {each}. {ALIKE}")
        return rows

    def texts(self, own: str) -> list[str]:
        """The text of each rank."""
        data = own.encode()
        lengths = [int(row[0]) for row in self.numbers(len(data))]
        mine = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
        told = torch.empty(self.ranks, len(mine), dtype=torch.uint8)
        with self._naming():
            _gather_all(told.view(-1), mine, group=self.group)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(told, lengths, strict=True)]

    def close(self) -> None:
        """Ends the group on this rank, which has failed: others that wait for it fail at once."""
        if not self._is_closed:
            self._is_closed = True
            close(self.group, None if self.peers is None else self.peers.group)
            self.group = self.peers = None  # gloo closes connections with the last reference

    @contextmanager
    def _naming(self) -> Iterator[None]:
        if self._is_closed:
            raise HeteroError(f"rank {self.rank} of {self.ranks} has left the others after an error. Start all ranks again.")
        try:
            yield
        except RuntimeError as error:
            clear_frames(error.__traceback__)  # which refer to the group: it ends with its last reference (`close`)
            cause = self.notes.noted() or f"another rank has died or hangs, or the network has failed ({error})"
            raise HeteroError(
                f"rank {self.rank} of {self.ranks} could not decide with the others between two batches: {cause.rstrip('.')}. "
                f"Start all ranks again; their logs say which was the first."
            ) from error
