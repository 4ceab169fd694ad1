"""The links between the devices of ranks, over which these exchange weights and gradients.

[Note: Peers]
A group of processes moves tensors in the devices' memory: nccl or its kin where each rank has a
device of its own. Ranks that share a device, and kinds of devices without such a library, use gloo
through host memory, piece by piece. Emulated devices use gloo too, and then the caller sleeps until
the set bandwidth has carried the bytes.

All ops of a schedule that use these links, and those in which ranks only tell each other something,
are on one lane and have one thread (``ir.schedule.COLLECTIVES``). So no rank is in a collective of
one group while another is in that of the other group: the order of submission is one for both.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.lanes.network import EmulatedNetwork
from lightning_hetero.lowering.rank_needs import EXCHANGE_BYTES

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 warns of the older name


class DeviceLinks:
    """The devices of one group of ranks; see [Note: Peers].

    Args:
        group: The ranks, and nobody else uses it.
        network: The speed of the links, if that is emulated.
        through_host: The group moves what is in host memory alone.
    """

    def __init__(self, group: dist.ProcessGroup, network: EmulatedNetwork | None = None, *, through_host: bool = False) -> None:
        self.group, self.network = group, network
        self._ranks, self._through_host = dist.get_world_size(group), through_host

    def gather(self, whole: Tensor, own: Tensor) -> None:
        """Makes the whole from the slices of all ranks, as ``Collectives.gather`` does."""
        if not self._through_host:
            _all_gather(whole, own, group=self.group)
            return
        rows, most = whole.view(self._ranks, -1), EXCHANGE_BYTES // (self._ranks * whole.itemsize)
        for start in range(0, own.numel(), most):
            piece = own[start : start + most].cpu()
            every = torch.empty(self._ranks, piece.numel(), dtype=piece.dtype)
            _all_gather(every.view(-1), piece, group=self.group)
            rows[:, start : start + most].copy_(every)

    def exchange(self, received: Tensor, sent: Tensor) -> None:
        """Gives each rank its row of what this one sends: all-to-all of equal rows."""
        if not self._through_host:
            dist.all_to_all_single(received, sent, group=self.group)
            return
        to, from_ = received.view(self._ranks, -1), sent.view(self._ranks, -1)
        most = EXCHANGE_BYTES // (self._ranks * sent.itemsize)
        for start in range(0, to.shape[1], most):
            piece = from_[:, start : start + most].contiguous().cpu()
            every = torch.empty_like(piece)
            dist.all_to_all_single(every, piece, group=self.group)
            to[:, start : start + most].copy_(every)
