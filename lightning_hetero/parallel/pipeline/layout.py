"""The work of each rank: stages to ranks, layers to stages, segments to owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.cluster_plan import ClusterPlan

NODE = "LIGHTNING_HETERO_NODE"  # in a process' environment: the plan's name of its node


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """The position of a rank.

    Attributes:
        group: Its pipeline.
        stage: Its stage in it.
        shard: Its index among the ranks that compute this stage's layers together.
    """

    group: int
    stage: int
    shard: int


@dataclass(frozen=True)
class RankLayout:
    """A plan applied to the ranks of a run and the layers of a module.

    Attributes:
        plan: The plan.
        slots: Each rank's position; ``None``: it idles.
        bounds: For each group, the layer at which each stage begins, and the number of layers at
            the end.
    """

    plan: ClusterPlan
    slots: tuple[Slot | None, ...]
    bounds: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, plan: ClusterPlan, *, num_layers: int, repeated: range, nodes: Sequence[str | None]) -> RankLayout:
        """Applies a plan.

        Args:
            plan: The plan.
            num_layers: Layers of the module, repeated or not.
            repeated: The layers that the plan counts. The first stage also has all layers before,
                the last stage all after.
            nodes: For each rank the plan's name of its node. All ``None``: ranks are numbered node
                by node, in the order in which the plan names them; either no idle device has a
                rank, or all have.

        Raises:
            ConfigError: Ranks, nodes, layers or micro-batches do not match the plan.
        """
        bounds = []
        for j, group in enumerate(plan.groups):
            layers = [stage.layers for stage in group.stages]
            if sum(layers) != len(repeated):
                raise ConfigError(
                    f"group {j + 1} of the plan has {sum(layers)} repeated layers; stage_layers() has {len(repeated)}. "
                    "Plan for this model."
                )
            if group.micro_batches < len(layers):
                raise ConfigError(
                    f"group {j + 1} of the plan has {group.micro_batches} micro-batches for {len(layers)} stages; "
                    "1F1B needs as many as there are stages. Plan with more micro-batches."
                )
            own = (0, *(repeated.start + n for n in accumulate(layers[:-1])), num_layers)
            if any(a >= b for a, b in pairwise(own)):
                raise ConfigError(f"group {j + 1} of the plan has a stage without layers: {layers}. Leave its device idle.")
            bounds.append(own)
        return cls(plan=plan, slots=_slots(plan, nodes), bounds=tuple(bounds))

    @property
    def is_data_parallel(self) -> bool:
        """Every rank holds the whole model."""
        return is_data_parallel(self.plan)

    @property
    def num_layers(self) -> int:
        """Layers of the module."""
        return self.bounds[0][-1]

    @property
    def num_groups(self) -> int:
        """Pipelines."""
        return len(self.bounds)

    @property
    def num_shards(self) -> int:
        """Ranks of one stage."""
        return self.plan.tensor_parallel

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Micro-batches of each group in a step."""
        return tuple(group.micro_batches for group in self.plan.groups)

    @cached_property
    def segments(self) -> tuple[range, ...]:
        """Layers between neighbouring boundaries of any groups, in order; see [Note: Segments]."""
        return tuple(range(a, b) for a, b in pairwise(sorted({cut for own in self.bounds for cut in own})))

    def depth(self, group: int) -> int:
        """Stages of a group."""
        return len(self.bounds[group]) - 1

    def layers(self, group: int, stage: int) -> range:
        """The layers of a stage."""
        return range(self.bounds[group][stage], self.bounds[group][stage + 1])

    def stage_of(self, group: int, layer: int) -> int:
        """The stage of a group that holds a layer."""
        return next(s for s in range(self.depth(group)) if layer in self.layers(group, s))

    def rank(self, group: int, stage: int, shard: int) -> int:
        """The ranks with a position."""
        return self._ranks[Slot(group, stage, shard)]

    def pipeline(self, group: int, shard: int) -> tuple[int, ...]:
        """The ranks of one pipeline, by stage."""
        return tuple(self.rank(group, stage, shard) for stage in range(self.depth(group)))

    def stage(self, group: int, stage: int) -> tuple[int, ...]:
        """The ranks that compute a stage's layers together, by shard."""
        return tuple(self.rank(group, stage, shard) for shard in range(self.num_shards))

    def owners(self, layer: int, shard: int) -> tuple[int, ...]:
        """The rank of each group that holds a layer's shard."""
        return tuple(self.rank(j, self.stage_of(j, layer), shard) for j in range(self.num_groups))

    @cached_property
    def _ranks(self) -> dict[Slot, int]:
        return {slot: rank for rank, slot in enumerate(self.slots) if slot is not None}


def is_data_parallel(plan: ClusterPlan) -> bool:
    """Every device of the plan holds the whole model."""
    return plan.tensor_parallel == 1 and all(len(group.stages) == 1 for group in plan.groups)


def _slots(plan: ClusterPlan, nodes: Sequence[str | None]) -> tuple[Slot | None, ...]:
    """Positions of ranks: a node's first ranks in order, shards of a stage together.

    The others idle.
    """
    places: dict[str, list[Slot | None]] = {}
    for j, group in enumerate(plan.groups):
        for s, stage in enumerate(group.stages):
            places.setdefault(stage.node, []).extend(Slot(j, s, shard) for shard in range(plan.tensor_parallel))
    expected = {node: len(own) for node, own in places.items()}
    if all(node is None for node in nodes):
        idle = plan.idle if len(nodes) > plan.world_size else {}
        for node, count in idle.items():
            places.setdefault(node, []).extend([None] * count)
        found = tuple(slot for own in places.values() for slot in own)
        if len(found) == len(nodes):
            return found
        raise ConfigError(
            f"the plan has {plan.world_size} working devices, and {len(nodes)} processes were started. "
            "Start one for each (`lightning-hetero launch` prints the lines), or plan for this cluster."
        )
    started = Counter(nodes)
    if any(started[node] < count for node, count in expected.items()):
        raise ConfigError(
            f"processes by node: {dict(started)}; the plan has {expected}. Set {NODE} on every node to its name in the plan, as "
            "`lightning-hetero launch` does, and start as many processes as it has working devices."
        )
    left = {node: iter(own) for node, own in places.items()}
    return tuple(next(left.get(node or "", iter(())), None) for node in nodes)
