"""The planners: AutoHet's Algorithm 1, our own, and the baselines.

Ours searches equation 1 itself, with unequal micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_hetero.errors import ConfigError, did_you_mean
from lightning_hetero.ir.cluster import Cluster
from lightning_hetero.ir.cluster_plan import ClusterPlan
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.parallel.planner import cluster_baselines
from lightning_hetero.parallel.planner.candidates import (
    Candidate,
    Setting,
    balanced_candidate,
    expected_micro_batches,
    settings_of,
)
from lightning_hetero.parallel.planner.grouping import Counts, Packing, Problem, grouping, vectors
from lightning_hetero.parallel.planner.mapping import place, stages_of
from lightning_hetero.parallel.planner.refusals import refuse

MOST_STAGES = 16  # of a pipeline, unless only deeper ones hold the model
_RUNNER_UPS = 5
_PRECISION = 1e-3  # relative precision of the bisection over a step's time


def plan(
    model: ModelProfile,
    cluster: Cluster,
    *,
    micro_batches: int,
    planner: str = "asymmetric",
    tensor_parallel: Iterable[int] | None = None,
) -> ClusterPlan:
    """The fastest plan by equation 1 among a planner's candidates.

    Args:
        model: The model at one micro-batch.
        cluster: The nodes.
        micro_batches: Micro-batches of one step, of all groups together.
        planner: A name of :data:`PLANNERS`.
        tensor_parallel: Degrees to try. Default: all powers of two up to the largest node.

    Raises:
        ConfigError: A degree or a number is out of range; the planner or a device is unknown.
        PlanError: The model does not fit.
    """
    if planner not in PLANNERS:
        raise ConfigError(f"planner={planner!r}; allowed: {', '.join(PLANNERS)}.{did_you_mean(planner, PLANNERS)}")
    settings = settings_of(model, cluster, micro_batches, tensor_parallel)
    found: dict[object, Candidate] = {}
    for setting in settings:
        for candidate in PLANNERS[planner](setting):
            rival = found.setdefault(candidate.key(), candidate)
            if candidate.iteration_s < rival.iteration_s:
                found[candidate.key()] = candidate
    ranked = sorted(found.values(), key=lambda c: c.iteration_s)
    if not ranked:
        refuse(settings, planner)
    return ranked[0].plan(ranked[1 : 1 + _RUNNER_UPS])


def asymmetric(setting: Setting) -> Iterator[Candidate]:
    """Our planner: AutoHet's groupings, a direct search, and the symmetric plans.

    For a given time of a step, the direct search computes how many micro-batches each possible
    group completes. It packs the disjoint groups that complete the most (a knapsack over count
    vectors). Bisection finds the least sufficient time.
    """
    for groups in (*_groupings(setting), *_direct(setting)):
        yield from _candidates("asymmetric", setting, groups)
    for symmetric in (cluster_baselines.megatron, cluster_baselines.whale, cluster_baselines.balanced):
        yield from symmetric(setting)


def autohet(setting: Setting) -> Iterator[Candidate]:
    """AutoHet's procedure: equation 3, mapping, balancing, with equal micro-batches.

    Source: Algorithm 1.
    """
    for groups in _groupings(setting):
        candidate = balanced_candidate("autohet", setting, place(setting, groups), equal=True)
        if candidate is not None:
            yield candidate


PLANNERS: dict[str, Callable[[Setting], Iterator[Candidate]]] = {
    "asymmetric": asymmetric,
    "autohet": autohet,
    "balanced": cluster_baselines.balanced,
    "whale": cluster_baselines.whale,
    "megatron": cluster_baselines.megatron,
}


def _candidates(name: str, setting: Setting, groups: Sequence[Counts]) -> Iterator[Candidate]:
    """The grouping, and versions without its weakest groups as long as the step gets faster."""
    remaining, before = list(groups), float("inf")
    while remaining:
        candidate = balanced_candidate(name, setting, place(setting, remaining))
        if candidate is None or candidate.iteration_s >= before:
            return
        yield candidate
        before = candidate.iteration_s
        remaining.remove(min(remaining, key=lambda g: _power(setting, g)))


def _power(setting: Setting, group: Counts) -> float:
    return sum(n * kind.flop_per_s for n, kind in zip(group, setting.kinds.values(), strict=True))


def _groupings(setting: Setting) -> Iterator[list[Counts]]:
    """Equation 3 for every number of groups, with the fewest bytes that one group has to hold."""
    work, t = setting.work, setting.tensor_parallel
    whole = work.run(0, work.num_layers).fixed_bytes + work.first.fixed_bytes + work.last.fixed_bytes
    devices = list(setting.kinds.values())
    room = [kind.memory_bytes - work.constant_bytes for kind in devices]
    if min(room) <= 0:
        room = [max(r, 0) for r in room]
    problem = Problem(
        counts=setting.counts(),
        powers=tuple(t * kind.flop_per_s for kind in devices),
        memories=tuple(map(float, room)),
        least_bytes=float(whole),
        micro_batches=setting.micro_batches,
        most_stages=min(MOST_STAGES, work.num_layers),
    )
    held = sum(n * r for n, r in zip(problem.counts, room, strict=True))
    for groups in range(1, min(sum(problem.counts), setting.micro_batches, int(held // whole)) + 1):
        if (solved := grouping(problem, groups)) is None:
            return
        yield solved[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A possible group.

    Its part of a step is ``latency_s + K slowest_s`` for K of at least ``least``.
    """

    counts: Counts
    latency_s: float
    slowest_s: float
    least: int

    def completes(self, seconds: float, most: int) -> int:
        """The number of micro-batches that it computes in a given time."""
        count = int((seconds - self.latency_s) / self.slowest_s + 1e-9)
        return min(count, most) if count >= self.least else 0


def _direct(setting: Setting) -> Iterator[list[Counts]]:
    """The groupings that a bisection over the time of a step finds."""
    groups = _possible(setting, min(MOST_STAGES, setting.work.num_layers, setting.micro_batches))
    if not groups:
        groups = _possible(setting, min(setting.work.num_layers, setting.micro_batches))
    if not groups:
        return
    most, counts = setting.micro_batches, setting.counts()
    high = min(g.latency_s + most * g.slowest_s for g in groups)  # one group does it all
    low = 0.0
    while high - low > _PRECISION * high:
        seconds = (low + high) / 2
        packing = Packing(counts)
        for group in groups:
            value = group.completes(seconds, most)
            if value > packing.worth(group.counts):
                packing.add(group.counts, value)
        if packing.worth(counts) >= most:
            high = seconds
            yield packing.best()
        else:
            low = seconds
    yield [min(groups, key=lambda g: g.latency_s + most * g.slowest_s).counts]


def _possible(setting: Setting, most_stages: int) -> list[_Group]:
    """All groups that hold the model, fewest devices first.

    Gradients count as synchronised over the network.
    """
    names, network = list(setting.kinds), setting.cluster.network_bytes_per_s
    work, found = setting.work, []
    for counts in vectors(setting.counts(), most_stages):
        pipeline = [(names[kind], network) for kind in stages_of(counts)]
        depth = len(pipeline)
        layers = setting.cut(pipeline, expected_micro_batches(setting, _power(setting, counts), depth))
        if layers is None:
            continue
        stages = setting.stages_s(pipeline, layers)
        begins = accumulate(layers, initial=0)
        heaviest = max(work.run(b, n).gradient_bytes for b, n in zip(begins, layers, strict=False)) + max(
            work.first.gradient_bytes, work.last.gradient_bytes
        )
        sync = 2 * heaviest / network
        slowest = max(stages)
        found.append(_Group(counts=counts, latency_s=sum(stages) - slowest + sync, slowest_s=slowest, least=depth))
    return found
