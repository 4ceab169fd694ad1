"""A candidate plan: its pipelines with devices, layers and micro-batches.

Its time by equation 1.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.cluster import Cluster
from lightning_hetero.ir.cluster_plan import ClusterPlan, GroupPlan, StagePlan
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.parallel.planner.balancing import Rows, balance, balance_runs, runs_s, share_out
from lightning_hetero.parallel.planner.equations import (
    StagePlace,
    Workload,
    besides_s,
    layers_s,
    most_layers,
    pipeline_s,
    stage_bytes,
)
from lightning_hetero.parallel.planner.grouping import Counts
from lightning_hetero.parallel.planner.known_clusters import DeviceKind, check_devices, kinds

Layout = tuple[tuple[int, ...], ...]  # for each group the node of each stage, by its index in the cluster

_ROUNDS = 4  # of balancing layers for given micro-batches and the other way round


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The data that all candidates of one degree of tensor parallelism share.

    Attributes:
        work: The model, as seen by one of the t devices of a stage.
        cluster: The nodes.
        kinds: Their devices, weakest first.
        micro_batches: Micro-batches of one step, of all groups together.
    """

    work: Workload
    cluster: Cluster
    kinds: Mapping[str, DeviceKind]
    micro_batches: int
    _layers: dict[str, Rows] = field(default_factory=dict)
    _tables: dict[tuple[str, StagePlace, float], Rows] = field(default_factory=dict)
    _cuts: dict[tuple[tuple[str, float], ...], dict[int, tuple[int, ...] | None]] = field(default_factory=dict)

    @property
    def tensor_parallel(self) -> int:
        """t; t devices of one node are one entity with summed power."""
        return self.work.tensor_parallel

    def entities(self) -> list[int]:
        """The number of entities of each node; the remaining devices idle."""
        return [node.count // self.tensor_parallel for node in self.cluster.nodes]

    def counts(self) -> Counts:
        """Entities of each kind, weakest first."""
        total = Counter(dict.fromkeys(self.kinds, 0))
        for node, entities in zip(self.cluster.nodes, self.entities(), strict=True):
            total[node.device] += entities
        return tuple(total[name] for name in self.kinds)

    @cached_property
    def power(self) -> float:
        """FLOP/s of one device of each entity."""
        return sum(n * kind.flop_per_s for n, kind in zip(self.counts(), self.kinds.values(), strict=True))

    def kind(self, node: int) -> DeviceKind:
        """The devices of a node."""
        return self.kinds[self.cluster.nodes[node].device]

    def table(self, kind: str, place: StagePlace, link_bytes_per_s: float) -> Rows:
        """Seconds of one micro-batch on a stage, by first layer and number of layers that fit."""
        key = kind, place, link_bytes_per_s
        if key not in self._tables:
            device, work = self.kinds[kind], self.work
            if kind not in self._layers:
                self._layers[kind] = self._by_first_layer(lambda begin: self._seconds(device, begin))

            besides = [besides_s(work, device, place, link_bytes_per_s, last) for last in range(work.num_layers)]

            def row(begin: int) -> tuple[float, ...]:
                held = most_layers(work, device.memory_bytes, place, begin)
                seconds = self._layers[kind][begin][: held + 1]
                return tuple(s + besides[max(begin + n - 1, 0)] for n, s in enumerate(seconds))

            self._tables[key] = self._by_first_layer(row)
        return self._tables[key]

    def _by_first_layer(self, row: Callable[[int], tuple[float, ...]]) -> Rows:
        count = self.work.num_layers
        return (row(0),) * count if self.work.uniform else tuple(row(begin) for begin in range(count))

    def _seconds(self, device: DeviceKind, begin: int) -> tuple[float, ...]:
        seconds = (layers_s(self.work, device, n, begin) for n in reversed(range(self.work.num_layers - begin + 1)))
        # Sums of measured runs (equation 5) may fall with one more layer; fewer layers never take
        # longer.
        return tuple(accumulate(seconds, min))[::-1]

    def tables(self, stages: Sequence[tuple[str, float]]) -> list[Rows]:
        """:meth:`table` of every stage of a pipeline, from its kind and its link to the next."""
        places = (StagePlace(stage=s, depth=len(stages)) for s in range(len(stages)))
        return [self.table(kind, place, link) for (kind, link), place in zip(stages, places, strict=True)]

    def cut(self, stages: Sequence[tuple[str, float]], micro_batches: int) -> tuple[int, ...] | None:
        """The layers of every stage that make the pipeline fastest; ``None`` if they do not fit."""
        known = self._cuts.setdefault(tuple(stages), {})
        if micro_batches not in known:
            known[micro_batches] = self.balanced(self.tables(stages), micro_batches)
        return known[micro_batches]

    def balanced(self, tables: Sequence[Rows], micro_batches: int) -> tuple[int, ...] | None:
        """The same for given tables of stages."""
        if self.work.uniform:
            return balance([rows[0] for rows in tables], self.work.num_layers, micro_batches)
        return balance_runs(tables, micro_batches)

    def stages_s(self, stages: Sequence[tuple[str, float]], layers: Sequence[int]) -> list[float]:
        """Seconds of one micro-batch on every stage of a pipeline with these numbers of layers."""
        return runs_s(self.tables(stages), layers)

    def stages(self, nodes: Sequence[int]) -> list[tuple[str, float]]:
        """Kind and link of every stage of a pipeline, given their nodes."""
        links = [*(self.link(a, b) for a, b in pairwise(nodes)), self.cluster.network_bytes_per_s]
        return [(self.cluster.nodes[n].device, link) for n, link in zip(nodes, links, strict=True)]

    def link(self, a: int, b: int) -> float:
        """Bytes/s between two nodes, or inside one."""
        return self.kind(a).peer_bytes_per_s if a == b else self.cluster.network_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A whole plan.

    Attributes:
        name: The planner.
        setting: The setting of the plan.
        nodes: The node of each stage of each group.
        layers: The number of layers of each stage.
        micro_batches: K_j.
    """

    name: str
    setting: Setting
    nodes: Layout
    layers: tuple[tuple[int, ...], ...]
    micro_batches: tuple[int, ...]

    @cached_property
    def stages_s(self) -> tuple[tuple[float, ...], ...]:
        """t[s, j]."""
        return tuple(
            tuple(self.setting.stages_s(self.setting.stages(group), layers))
            for group, layers in zip(self.nodes, self.layers, strict=True)
        )

    @cached_property
    def groups_s(self) -> tuple[float, ...]:
        """Each group's term of equation 1."""
        return tuple(pipeline_s(s, k) for s, k in zip(self.stages_s, self.micro_batches, strict=True))

    @cached_property
    def sync_s(self) -> float:
        """T_sync: the time of the device with the most gradients to all-reduce.

        Each layer counts with its owners' slowest link.

        The paper divides all bytes by the lowest bandwidth. The mapping matters because of links
        inside nodes, so this is per layer.
        """
        groups = len(self.nodes)
        if groups == 1:
            return 0.0
        owners = [[s for s, n in enumerate(layers) for _ in range(n)] for layers in self.layers]  # by group, then layer
        taken: defaultdict[tuple[int, int], float] = defaultdict(float)
        work, ring = self.setting.work, 2 * (groups - 1) / groups
        ends = ((0, work.first), (work.num_layers - 1, work.last))
        parts = [*enumerate(work.layers), *ends]
        for layer, part in parts:
            nodes = {self.nodes[j][owners[j][layer]] for j in range(groups)}
            same = len(nodes) == 1
            bandwidth = self.setting.kind(min(nodes)).peer_bytes_per_s if same else self.setting.cluster.network_bytes_per_s
            for j in range(groups):
                taken[j, owners[j][layer]] += ring * part.gradient_bytes / bandwidth
        return max(taken.values())

    @cached_property
    def iteration_s(self) -> float:
        """``T_iter = max_j ( sum_s t[s, j] + (K_j - 1) max_s t[s, j] ) + T_sync``.

        Source: equation 1, with K_j for K.
        """
        return max(self.groups_s) + self.sync_s

    def key(self) -> tuple[object, ...]:
        """A key that ignores the order of groups and the nodes of equal devices."""
        names = [n.device for n in self.setting.cluster.nodes]
        groups = ((tuple(names[n] for n in g), k) for g, k in zip(self.nodes, self.micro_batches, strict=True))
        return self.setting.tensor_parallel, tuple(sorted(groups))

    def plan(self, runner_ups: Sequence[Candidate] = ()) -> ClusterPlan:
        """The candidate as a plan."""
        setting, t = self.setting, self.setting.tensor_parallel
        used = Counter(node for group in self.nodes for node in group)
        idle = {n.name: n.count - t * used[i] for i, n in enumerate(setting.cluster.nodes) if n.count > t * used[i]}
        power = sum(n.count * setting.kinds[n.device].flop_per_s for n in setting.cluster.nodes)
        return ClusterPlan(
            name=self.name,
            tensor_parallel=t,
            tokens=setting.micro_batches * setting.work.tokens,
            iteration_s=self.iteration_s,
            sync_s=self.sync_s,
            utilisation=setting.micro_batches * setting.work.model_flop / (self.iteration_s * power),
            groups=tuple(self._group(j) for j in range(len(self.nodes))),
            idle=idle,
            runner_ups=tuple(c.plan().in_short() for c in runner_ups),
        )

    def _group(self, j: int) -> GroupPlan:
        depth, begins = len(self.nodes[j]), accumulate(self.layers[j], initial=0)
        stages = (
            StagePlan(
                node=self.setting.cluster.nodes[node].name,
                device=self.setting.cluster.nodes[node].device,
                layers=layers,
                micro_batch_s=seconds,
                memory_bytes=stage_bytes(self.setting.work, layers, StagePlace(stage=s, depth=depth), begin),
            )
            for s, (node, layers, seconds, begin) in enumerate(
                zip(self.nodes[j], self.layers[j], self.stages_s[j], begins, strict=False)
            )
        )
        return GroupPlan(micro_batches=self.micro_batches[j], seconds=self.groups_s[j], stages=tuple(stages))


def settings_of(
    model: ModelProfile, cluster: Cluster, micro_batches: int, tensor_parallel: Iterable[int] | None = None
) -> list[Setting]:
    """One setting per degree of tensor parallelism.

    The default degrees are the powers of two up to the largest node that the model allows.

    Raises:
        ConfigError: A degree, the number of devices or of micro-batches is out of range, the
            cluster names an unknown device.
    """
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ConfigError(f"micro_batches={micro_batches!r}; allowed: a whole number of at least 1.")
    check_devices(cluster.name, sum(node.count for node in cluster.nodes))
    largest = max(node.count for node in cluster.nodes)
    ways = math.gcd(*(block.sharding.ways for block in model.blocks if block.sharding is not None))  # 0: any
    powers = [2**k for k in range(largest.bit_length()) if ways % 2**k == 0]
    degrees = sorted(set(powers if tensor_parallel is None else tensor_parallel))
    if not degrees or any(not 1 <= t <= largest for t in degrees):
        raise ConfigError(f"tensor_parallel={degrees}; allowed: 1 to {largest}, the devices of the largest node.")
    if any(ways % t for t in degrees):
        raise ConfigError(
            f"tensor_parallel={degrees}; allowed: divisors of {ways}, the parts into which model {model.name!r} can be cut."
        )
    devices = kinds(cluster)
    return [Setting(work=Workload.of(model, t), cluster=cluster, kinds=devices, micro_batches=micro_batches) for t in degrees]


def expected_micro_batches(setting: Setting, power: float, stages: int) -> int:
    """The micro-batches that a group of this power will take if all devices work."""
    return min(max(round(setting.micro_batches * power / setting.power), stages, 1), setting.micro_batches)


def balanced_candidate(name: str, setting: Setting, nodes: Layout, *, equal: bool = False) -> Candidate | None:
    """Assigns layers and micro-batches for a layout in turns, each exactly for the other.

    Returns the fastest.

    Args:
        name: The planner.
        setting: The setting.
        nodes: The layout.
        equal: Whether all groups take equally many micro-batches up to a remainder, as in the
            paper.

    Returns:
        ``None`` if a group does not hold the model, or there are fewer micro-batches than stages.
    """
    groups, stages = len(nodes), [setting.stages(group) for group in nodes]
    if equal:
        counts = tuple(setting.micro_batches // groups + (j < setting.micro_batches % groups) for j in range(groups))
    else:
        powers = [sum(setting.kind(n).flop_per_s for n in group) for group in nodes]
        counts = tuple(expected_micro_batches(setting, p, len(g)) for p, g in zip(powers, nodes, strict=True))
    if any(k < len(group) for k, group in zip(counts, nodes, strict=True)):
        return None
    best: Candidate | None = None
    for _ in range(1 if equal else _ROUNDS):
        layers = [setting.cut(group, k) for group, k in zip(stages, counts, strict=True)]
        if not all(layers):
            return None
        cut = tuple(n for n in layers if n is not None)
        shared: tuple[int, ...] | None = counts
        if not equal:
            taken = [setting.stages_s(group, own) for group, own in zip(stages, cut, strict=True)]
            shared = share_out([(s, len(s)) for s in taken], setting.micro_batches)
        if shared is None:
            return None
        candidate = Candidate(name=name, setting=setting, nodes=nodes, layers=cut, micro_batches=shared)
        if best is not None and candidate.iteration_s >= best.iteration_s:
            break
        best, counts = candidate, shared
    return best
