"""A plan for the current ranks: each measures its device with some layers, and one rank plans.

[Note: Tensor parallelism is measured]
Ranks of a node that could form a stage shard copies of these layers and measure them together, for
every power of two that divides everything that the module shards. The sharded shares of ends and of
a layer's memory come from one whole forward (``costs``). The process groups stay, because DTensor
reuses a mesh's group for the next mesh of the same ranks.
"""

from __future__ import annotations

import copy
import logging
import os
import socket
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils import _pytree as pytree

from lightning_hetero.clock import now_s
from lightning_hetero.errors import ConfigError, HeteroError, PlanError
from lightning_hetero.ir.cluster import Cluster, DeviceType, LayerTimes, Node
from lightning_hetero.ir.cluster_plan import ClusterPlan
from lightning_hetero.ir.model import BlockProfile, ModelProfile, Sharding
from lightning_hetero.parallel.measure import layer_times
from lightning_hetero.parallel.pipeline.costs import Context, Cost, measure
from lightning_hetero.parallel.pipeline.layers import Layers
from lightning_hetero.parallel.pipeline.layout import NODE
from lightning_hetero.parallel.pipeline.sums import num_samples
from lightning_hetero.parallel.pipeline.tensor import most_ways, sharded_modules, sharded_parameters, styles_of
from lightning_hetero.parallel.planner import plan

_MOST_LAYERS = 8  # measured together; longer runs are sums of these (equation 5)
_PROBE_BYTES = 1 << 23
_USABLE = 0.9  # of a device's free memory; the rest is for fragmentation

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """One rank's facts about its device.

    Attributes:
        node: Its node.
        device: Its kind.
        memory_bytes: Memory that training may use there.
        seconds: Seconds of 1, 2, 4, … layers by the degree of tensor parallelism, for degrees that
            its node has ranks for.
        flop_per_s: FLOP/s that it reached alone on the longest of these runs.
        peer_bytes_per_s: Bandwidth to other ranks of its node; ``None``: there are none.
        refused: The reason why layers do not run, by degree.
    """

    node: str
    device: str
    memory_bytes: int
    seconds: Mapping[int, tuple[float, ...]]
    flop_per_s: float
    peer_bytes_per_s: float | None = None
    refused: Mapping[int, str] = field(default_factory=dict)


def plan_here(
    layers: Layers,
    batch: Any,
    *,
    micro_batches: int,
    device: torch.device,
    context: Context,
    tensor_parallel: Collection[int] | None = None,
    timeout: timedelta | None = None,
) -> ClusterPlan:
    """Measures, and plans for all ranks of the default group.

    All ranks call it and get the same plan.

    Args:
        layers: The module's layers, in host memory.
        batch: One micro-batch, on the device.
        micro_batches: Micro-batches of one step.
        device: This rank's device.
        context: Entered around the forward of layers.
        tensor_parallel: Allowed degrees. Default: powers of two for which nodes have ranks, and
            which divide everything that the module shards.
        timeout: Timeout of the process groups made here.

    Raises:
        ConfigError: A degree is not possible.
        PlanError: The model does not fit these devices.
    """
    repeated = layers.repeated()
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, node_name())
    degrees = _degrees(nodes, most_ways(layers), tensor_parallel)
    profile, entering, seconds = _measure(layers, repeated, batch, device, context)
    room = memory_bytes(device)
    times, refused, peer = {1: seconds}, {}, None
    teams = {t: _team(nodes, t, timeout) for t in degrees if t > 1}
    for t, team in teams.items():
        if team is not None:
            try:
                times[t] = _measure_together(layers, repeated[: 2 ** (len(seconds) - 1)], entering, team, device, context)
            except Exception as error:  # any error of a module's own code on shards
                refused[t] = f"{type(error).__name__}: {error}"
    neighbours = _team(nodes, None, timeout)
    if neighbours is not None:
        peer = bandwidth(device, neighbours)
        dist.destroy_process_group(neighbours)
    flop = 3 * profile.blocks[repeated.start].forward_flop
    own = Report(
        node=node_name(),
        device=_kind(device),
        memory_bytes=room,
        seconds=times,
        flop_per_s=max(flop, 1.0) * 2 ** (len(seconds) - 1) / seconds[-1],
        peer_bytes_per_s=peer,
        refused=refused,
    )
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, own)
    for t, reason in {t: reason for report in reports for t, reason in report.refused.items()}.items():
        degrees.remove(t)
        if dist.get_rank() == 0:
            log.warning('plan="auto": tensor parallelism of %d is left out, layers do not run with it: %s', t, reason)
    network = bandwidth(device)
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [plan(profile, cluster_of(reports, network), micro_batches=micro_batches, tensor_parallel=degrees)]
        except HeteroError as error:
            found = [str(error)]
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], str):
        raise PlanError(f'plan="auto": {found[0]}')
    planned: ClusterPlan = found[0]
    return planned


def profile_layers(module: nn.Module, batch: Any, device: torch.device) -> tuple[ModelProfile, LayerTimes]:
    """Measures a module's layers on one device: their profile, and times of 1, 2, 4, … layers.

    Args:
        module: With ``stage_layers()`` and ``loss_sum()``, in host memory; it does not change.
        batch: One micro-batch.
        device: The device on which layers run one after another.

    Raises:
        ConfigError: The module has no layers for a pipeline.
        UnsupportedError: A layer depends on other samples of its batch.
    """
    layers = Layers(module)
    moved = pytree.tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, batch)
    profile, _, seconds = _measure(layers, layers.repeated(), moved, device, nullcontext)
    return profile, LayerTimes(tensor_parallel=1, seconds=seconds)


def _degrees(nodes: Sequence[str], ways: int, wanted: Collection[int] | None) -> list[int]:
    """Degrees of tensor parallelism to try, ascending."""
    largest = max(Counter(nodes).values())
    if wanted is None:
        return [2**k for k in range(largest.bit_length()) if 2**k <= largest and ways % 2**k == 0]
    if not wanted or any(not 1 <= t <= largest or (ways % t and t > 1) for t in wanted):
        raise ConfigError(
            f"tensor_parallel={sorted(wanted)}; allowed: 1 to {largest}, the ranks of the largest node, where it divides {ways}, "
            "the greatest common divisor of all sizes that the module shards."
        )
    return sorted(set(wanted))


def _team(nodes: Sequence[str], size: int | None, timeout: timedelta | None) -> Any:
    """This rank's group of some or all ranks of its node; ``None`` if there are too few.

    All ranks make all groups.
    """
    own = None
    for name in dict.fromkeys(nodes):
        ranks = [rank for rank, node in enumerate(nodes) if node == name]
        step = size or len(ranks)
        for begin in range(0, len(ranks) - step + 1 if step > 1 else 0, step):
            some = ranks[begin : begin + step]
            group = dist.new_group(some, timeout=timeout)
            own = group if dist.get_rank() in some else own
    return own


def _measure_together(
    layers: Layers, repeated: range, entering: tuple[Tensor, ...], team: Any, device: torch.device, context: Context
) -> tuple[float, ...]:
    """Seconds of 1, 2, 4, … layers that the ranks of a group compute together."""
    mesh = DeviceMesh.from_group(team, device.type)
    copies = []
    for index in repeated:
        layer = copy.deepcopy(layers.modules[index]).to(device)
        copies.append(parallelize_module(layer, mesh, styles_of(layers, index)))
    return _seconds(copies, entering, context, mesh.size())


def cluster_of(reports: Sequence[Report], network_bytes_per_s: float) -> Cluster:
    """The cluster of the ranks' reports: nodes by name, kinds of devices with their slowest times.

    Raises:
        ConfigError: A node has devices of several kinds.
    """
    nodes = []
    for name in dict.fromkeys(report.node for report in reports):
        kinds = Counter(report.device for report in reports if report.node == name)
        if len(kinds) > 1:
            raise ConfigError(f"node {name!r} has {dict(kinds)}; the planner wants one kind of device per node. Give a plan file.")
        nodes += [Node(name=name, device=kind, count=count) for kind, count in kinds.items()]
    devices = []
    for kind in dict.fromkeys(report.device for report in reports):
        own = [report for report in reports if report.device == kind]
        times = []
        for degree in sorted({t for report in own for t in report.seconds}):
            measured = [report.seconds[degree] for report in own if degree in report.seconds]
            slowest = tuple(max(runs) for runs in zip(*measured, strict=False))  # the common length
            times.append(LayerTimes(tensor_parallel=degree, seconds=slowest))
        peers = [report.peer_bytes_per_s for report in own if report.peer_bytes_per_s is not None]
        devices.append(
            DeviceType(
                name=kind,
                memory_bytes=min(report.memory_bytes for report in own),
                flop_per_s=min(report.flop_per_s for report in own),
                peer_bytes_per_s=min(peers, default=network_bytes_per_s),
                layer_times=tuple(times),
            )
        )
    return Cluster(name="these ranks", network_bytes_per_s=network_bytes_per_s, nodes=tuple(nodes), devices=tuple(devices))


def node_name() -> str:
    """This rank's node: from its environment, otherwise the host's name and torchrun's number."""
    return os.environ.get(NODE) or f"{socket.gethostname()}-{os.environ.get('GROUP_RANK', '0')}"


def memory_bytes(device: torch.device) -> int:
    """Memory of a device for one process; processes on one host share its memory."""
    if device.type == "cpu":
        return int(_USABLE * psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    module: Any = torch.get_device_module(device)
    return int(_USABLE * module.mem_get_info(device)[0])


def _kind(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device))


def _measure(
    layers: Layers, repeated: range, batch: Any, device: torch.device, context: Context
) -> tuple[ModelProfile, tuple[Tensor, ...], tuple[float, ...]]:
    """The model's profile, the costs of repeated layers, and seconds of 1, 2, 4, … of them."""
    styles: dict[nn.Module, ParallelStyle] = {}
    for index, layer in enumerate(layers.modules):
        styles |= sharded_modules(layer, styles_of(layers, index))
    parts = [range(repeated.start), range(repeated.start, repeated.start + 1), range(repeated.stop, len(layers))]
    value: Any = layers.stage_inputs(batch)
    costs: list[Cost] = []
    entering: tuple[Tensor, ...] = ()
    for part in parts:
        modules = [layers.modules[i].to(device) for i in part]
        if part is parts[1]:
            entering = value if isinstance(value, tuple) else (value,)
        cost, value = measure(modules, styles, value, context)
        costs.append(cost)
    seconds = _alone(layers, repeated, entering, device, context)
    if device.type != "cpu":
        for module in layers.modules:
            module.to("cpu")
    boundary = sum(t.nbytes for t in entering)
    blocks, ways = [], most_ways(layers)
    for part, cost in zip(parts, costs, strict=True):
        for index in repeated if part is parts[1] else part:
            block = _block(layers, index, cost, len(part), boundary, seconds, styles, ways=ways, pinned=part is not parts[1])
            blocks.append(block)
    profile = ModelProfile(
        name=type(layers.module).__name__,
        tokens=num_samples(batch),
        compute_itemsize=_itemsize(layers),
        constant_device_bytes=0,
        constant_host_bytes=0,
        blocks=tuple(blocks),
    )
    return profile, entering, seconds


def _alone(
    layers: Layers, repeated: range, entering: tuple[Tensor, ...], device: torch.device, context: Context
) -> tuple[float, ...]:
    """Seconds of 1, 2, 4, … layers on this device, as many as fit."""
    some = repeated[:_MOST_LAYERS]
    while True:
        try:
            return _seconds([layers.modules[i].to(device) for i in some], entering, context, 1)
        except torch.OutOfMemoryError:
            if len(some) == 1:
                raise
        for index in some:
            layers.modules[index].zero_grad(set_to_none=True)
            layers.modules[index].to("cpu")
        some = some[: len(some) // 2]


def _seconds(
    modules: Sequence[nn.Module], entering: tuple[Tensor, ...], context: Context, tensor_parallel: int
) -> tuple[float, ...]:
    hidden, *rest = entering

    def call(layer: nn.Module, hidden: Tensor) -> Tensor:
        with context():
            found = layer(hidden, *rest)
        first: Tensor = found[0] if isinstance(found, tuple) else found
        return first

    return layer_times(modules, hidden, call=call, tensor_parallel=tensor_parallel).seconds


def _itemsize(layers: Layers) -> int:
    """Item size for profiles: 2 for 16-bit weights, otherwise 4.

    Wider elements count as several.
    """
    return 2 if all(p.itemsize == 2 for p in layers.module.parameters()) else 4


def _block(
    layers: Layers,
    index: int,
    cost: Cost,
    shared: int,
    boundary: int,
    seconds: Sequence[float],
    styles: Mapping[nn.Module, ParallelStyle],
    *,
    ways: int,
    pinned: bool,
) -> BlockProfile:
    """One layer; the modules of an end share their costs."""
    parameters = layers.parameters(index).values()
    size = _itemsize(layers)
    sharded = [p for m in layers.modules[index].modules() if m in styles for p in sharded_parameters(m, styles[m])]
    return BlockProfile(
        name=layers.names[index],
        num_params=sum(p.nbytes for p in parameters) // size,
        num_trainable_params=sum(p.nbytes for p in parameters if p.requires_grad) // size,
        forward_s=seconds[0] / 3,
        backward_s=seconds[0] * 2 / 3,
        forward_flop=cost.flop / shared,
        activation_bytes=max(cost.saved_bytes // shared, boundary),
        boundary_bytes=boundary,
        transient_bytes=boundary,
        pinned=pinned,
        sharding=Sharding(
            num_params=sum(p.nbytes for p in sharded) // size,
            num_trainable_params=sum(p.nbytes for p in sharded if p.requires_grad) // size,
            forward_flop=cost.sharded_flop / shared,
            activation_bytes=cost.sharded_bytes // shared,
            traffic_bytes=cost.traffic_bytes // shared,
            ways=ways,
        ),
    )


def bandwidth(device: torch.device, group: Any = None) -> float:
    """Bytes/s that each rank of a group sends during a reduction; default: all ranks."""
    world = dist.get_world_size(group)
    if world == 1:
        return 1e12  # no other rank
    probe = torch.zeros(_PROBE_BYTES // 4, device=device)
    took = []
    for _ in range(3):
        dist.barrier(group)
        begin = now_s()
        dist.all_reduce(probe, group=group)
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        took.append(now_s() - begin)
    slowest = torch.tensor(min(took), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return 2 * (world - 1) / world * _PROBE_BYTES / float(slowest)
