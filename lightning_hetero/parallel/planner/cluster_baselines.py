"""Plans of systems without asymmetric pipelines.

They use all devices, equally deep pipelines, and stages in the order of the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from lightning_hetero.parallel.planner.balancing import share_out
from lightning_hetero.parallel.planner.candidates import Candidate, Layout, Setting


def megatron(setting: Setting) -> Iterator[Candidate]:
    """Megatron-like plans: equal pipelines on all devices.

    They have equal depth, and equal layers and micro-batches up to a remainder.

    Source: AutoHet, section V-A ("we report their best-performing results in the parallel
    structures supported").
    """
    for nodes in _symmetric(setting):
        counts = _even(setting.micro_batches, len(nodes))
        layers = _cut(setting, nodes, _even(setting.work.num_layers, len(nodes[0])))
        if layers is not None and min(counts) >= len(nodes[0]):
            yield Candidate(name="megatron", setting=setting, nodes=nodes, layers=layers, micro_batches=counts)


def whale(setting: Setting) -> Iterator[Candidate]:
    """Whale-like plans: Megatron-like, with micro-batches by the speed of each pipeline.

    Source: AutoHet, section V-A1 ("Intra-TaskGraph load balance").
    """
    for nodes in _symmetric(setting):
        layers = _cut(setting, nodes, _even(setting.work.num_layers, len(nodes[0])))
        if layers is not None:
            yield from _with_batches("whale", setting, nodes, layers)


def balanced(setting: Setting) -> Iterator[Candidate]:
    """The strongest baseline: symmetric plans that balance layers and micro-batches.

    Weakest devices come first.

    All pipelines have the same cut. The plans show the gain that remains if pipelines must not
    differ.
    """
    for nodes in _symmetric(setting, weakest_first=True):
        tables = [setting.tables(setting.stages(group)) for group in nodes]
        # A stage is as slow as its slowest device, and holds the layers that all of its devices
        # hold.
        slowest = [
            tuple(
                tuple(map(max, zip(*rows, strict=False))) if len(rows) > 1 else rows[0]
                for rows in zip(*(group[s] for group in tables), strict=True)
            )
            for s in range(len(nodes[0]))
        ]
        even = setting.balanced(slowest, max(setting.micro_batches // len(nodes), 1))
        if even is not None:
            yield from _with_batches("balanced", setting, nodes, (even,) * len(nodes))


def _symmetric(setting: Setting, *, weakest_first: bool = False) -> Iterator[Layout]:
    """Layouts of equally deep pipelines: ranks run over tensor, data, then pipeline parallelism."""
    if any(node.count % setting.tensor_parallel for node in setting.cluster.nodes):
        return
    order = list(range(len(setting.cluster.nodes)))
    if weakest_first:
        order.sort(key=lambda node: setting.kind(node).flop_per_s)
    entities = [node for node in order for _ in range(setting.entities()[node])]
    for depth in range(1, min(len(entities), setting.work.num_layers) + 1):
        if len(entities) % depth == 0:
            groups = len(entities) // depth
            yield tuple(tuple(entities[s * groups + j] for s in range(depth)) for j in range(groups))


def _with_batches(name: str, setting: Setting, nodes: Layout, layers: tuple[tuple[int, ...], ...]) -> Iterator[Candidate]:
    stages = [setting.stages_s(setting.stages(group), cut) for group, cut in zip(nodes, layers, strict=True)]
    counts = share_out([(s, len(s)) for s in stages], setting.micro_batches)
    if counts is not None:
        yield Candidate(name=name, setting=setting, nodes=nodes, layers=layers, micro_batches=counts)


def _even(total: int, parts: int) -> tuple[int, ...]:
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def _cut(setting: Setting, nodes: Layout, cut: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """The same layers for all pipelines, if they fit."""
    tables = (setting.tables(setting.stages(group)) for group in nodes)
    begins = tuple(accumulate(cut, initial=0))
    fits = all(n < len(rows[begin]) for group in tables for rows, begin, n in zip(group, begins, cut, strict=False))
    return (tuple(cut),) * len(nodes) if fits and min(cut) else None
