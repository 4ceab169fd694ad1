"""The ranks of several nodes as a mesh: nodes replicate a model, and ranks of a node share it.

[Note: Nodes]
Rank ``r`` of nodes with ``n`` ranks each is place ``r % n`` of node ``r // n``. It owns slice ``r %
n`` of the model, and so do the ranks at that place on the other nodes. Memory is shared and slices
are gathered within a node (dimension ``shard``). Between nodes ranks with the same slice exchange
what they have of it (dimension ``replicate``). One node is a mesh of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

REPLICATE, SHARD = "replicate", "shard"


def mesh_of(nodes: int, timeout: timedelta | None) -> DeviceMesh:
    """The mesh of all ranks on the CPU; all of them call this.

    Args:
        nodes: How many there are, with equally many ranks each.
        timeout: Bounds each collective along a dimension.
    """
    grid = torch.arange(dist.get_world_size()).view(nodes, -1)
    groups = [_own_group(rows, timeout) for rows in (grid.T.tolist(), grid.tolist())]
    return DeviceMesh.from_group(groups, "cpu", grid, mesh_dim_names=(REPLICATE, SHARD))


def close(*groups: dist.ProcessGroup | None) -> None:
    """Ends groups on this rank; the group of all ranks (``None``) is not ended."""
    for group in {one for one in groups if one is not None}:
        dist.destroy_process_group(group)


def _own_group(rows: Sequence[Sequence[int]], timeout: timedelta | None) -> dist.ProcessGroup:
    own: dist.ProcessGroup = dist.new_subgroups_by_enumeration(rows, timeout=timeout, backend="gloo")[0]
    return own
