"""Maps groups of counts to nodes and stages: AutoHet's heuristic (section III-C)."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.parallel.planner.candidates import Layout, Setting
from lightning_hetero.parallel.planner.grouping import Counts


def stages_of(group: Counts) -> list[int]:
    """The kind of each stage, weakest first: early stages need more memory and less compute."""
    return [kind for kind, n in enumerate(group) for _ in range(n)]


def place(setting: Setting, groups: Sequence[Counts]) -> Layout:
    """Gives every stage a node.

    Kinds are taken in ascending power; for each kind the groups' first stages, then their second
    ones, and so on. Such a round goes to one node if the node has a free entity for every group, so
    that gradients are synchronised over the fast link. Otherwise it is filled from the nodes with
    the most free entities. Tensor parallelism stays inside a node by construction.

    Source: section III-C, "GPU node mapping" and "Pipeline stage mapping".
    """
    free, names = setting.entities(), list(setting.kinds)
    stages: list[list[int]] = [[] for _ in groups]
    for kind, name in enumerate(names):
        nodes = [i for i, node in enumerate(setting.cluster.nodes) if node.device == name]
        for turn in range(max((group[kind] for group in groups), default=0)):
            wanting = [j for j, group in enumerate(groups) if group[kind] > turn]
            whole = [i for i in nodes if free[i] >= len(wanting)]
            for j in wanting:
                node = min(whole, key=lambda i: free[i]) if whole else max(nodes, key=lambda i: free[i])
                whole = [node] if whole else []  # the whole round on this node
                free[node] -= 1
                stages[j].append(node)
    return tuple(map(tuple, stages))
