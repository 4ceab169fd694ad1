"""A plan for the ranks that are there: each measures its own device with some of the module's layers, and one of them plans."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetero.errors import ConfigError, HeteroError, PlanError
from lightning_hetero.ir.cluster import Cluster, DeviceType, LayerTimes, Node
from lightning_hetero.ir.cluster_plan import ClusterPlan
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.parallel.measure import layer_times
from lightning_hetero.parallel.pipeline.layers import Layers
from lightning_hetero.parallel.pipeline.layout import NODE
from lightning_hetero.parallel.pipeline.module import run_layers
from lightning_hetero.parallel.pipeline.sums import num_samples
from lightning_hetero.parallel.planner import plan

_MOST_LAYERS = 8  # measured at once; longer runs are sums of these (equation 5)
_PROBE_BYTES = 1 << 23
_USABLE = 0.9  # of a device's free memory; the rest is for what allocators leave unused

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Report:
    """What one rank knows of its device.

    Attributes:
        node: Where it is.
        device: Its kind.
        memory_bytes: What training may use there.
        seconds: Of 1, 2, 4, … layers.
        flop_per_s: What it reached on the longest of these runs.
    """

    node: str
    device: str
    memory_bytes: int
    seconds: tuple[float, ...]
    flop_per_s: float


def plan_here(layers: Layers, batch: Any, *, micro_batches: int, device: torch.device, context: Context) -> ClusterPlan:
    """Measures, and plans for all ranks of the default group. All have to ask; all get the same plan.

    Args:
        layers: Of the module, in host memory.
        batch: One micro-batch, on the device.
        micro_batches: Of one step.
        device: Of this rank.
        context: Entered around the forward of layers.

    Raises:
        PlanError: The model does not fit these devices.
    """
    repeated = layers.repeated()
    profile, seconds = _measure(layers, repeated, batch, device, context)
    flop = 3 * profile.blocks[repeated.start].forward_flop
    own = Report(
        node=node_name(),
        device=_kind(device),
        memory_bytes=memory_bytes(device),
        seconds=seconds,
        flop_per_s=max(flop, 1.0) * 2 ** (len(seconds) - 1) / seconds[-1],
    )
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, own)
    network = bandwidth(device)
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [plan(profile, cluster_of(reports, network), micro_batches=micro_batches, tensor_parallel=(1,))]
        except HeteroError as error:
            found = [str(error)]
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], str):
        raise PlanError(f'plan="auto": {found[0]}')
    planned: ClusterPlan = found[0]
    return planned


def cluster_of(reports: Sequence[Report], network_bytes_per_s: float) -> Cluster:
    """The cluster that ranks describe: a node for each name, kinds of devices with the slowest measured times of each.

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
        seconds = tuple(max(times) for times in zip(*(report.seconds for report in own), strict=True))
        devices.append(
            DeviceType(
                name=kind,
                memory_bytes=min(report.memory_bytes for report in own),
                flop_per_s=min(report.flop_per_s for report in own),
                peer_bytes_per_s=network_bytes_per_s,
                layer_times=(LayerTimes(tensor_parallel=1, seconds=seconds),),
            )
        )
    return Cluster(name="these ranks", network_bytes_per_s=network_bytes_per_s, nodes=tuple(nodes), devices=tuple(devices))


def node_name() -> str:
    """This rank's node: as its environment says, else the host's name and torchrun's number."""
    return os.environ.get(NODE) or f"{socket.gethostname()}-{os.environ.get('GROUP_RANK', '0')}"


def memory_bytes(device: torch.device) -> int:
    """What one process may use of a device's memory; the host's is shared by the processes on it."""
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
) -> tuple[ModelProfile, tuple[float, ...]]:
    """The model's profile, its ends included, and the seconds of 1, 2, 4, … layers."""
    parts = [range(repeated.start), range(repeated.start, repeated.start + 1), range(repeated.stop, len(layers))]
    value: Any = layers.stage_inputs(batch)
    costs: list[_Cost] = []
    entering: tuple[Tensor, ...] = ()
    for part in parts:
        modules = [layers.modules[i].to(device) for i in part]
        if part is parts[1]:
            entering = value if isinstance(value, tuple) else (value,)
        cost, value = _cost(modules, value, context)
        costs.append(cost)
    hidden, *rest = entering

    def call(layer: nn.Module, hidden: Tensor) -> Tensor:
        with context():
            found = layer(hidden, *rest)
        first: Tensor = found[0] if isinstance(found, tuple) else found
        return first

    some = [layers.modules[i].to(device) for i in repeated[:_MOST_LAYERS]]
    seconds = layer_times(some, hidden, call=call).seconds
    if device.type != "cpu":
        for module in layers.modules:
            module.to("cpu")
    boundary = sum(t.nbytes for t in entering)
    blocks = []
    for part, cost in zip(parts, costs, strict=True):
        for index in repeated if part is parts[1] else part:
            blocks.append(_block(layers, index, cost, len(part), boundary, seconds, pinned=part is not parts[1]))
    profile = ModelProfile(
        name=type(layers.module).__name__,
        tokens=num_samples(batch),
        compute_itemsize=_itemsize(layers),
        constant_device_bytes=0,
        constant_host_bytes=0,
        blocks=tuple(blocks),
    )
    return profile, seconds


@dataclass(frozen=True)
class _Cost:
    """Of the forward of some layers: FLOP, and bytes saved for backward."""

    flop: float
    saved_bytes: int


def _cost(modules: Sequence[nn.Module], value: Any, context: Context) -> tuple[_Cost, Any]:
    """Runs layers once: what it costs, and what they give, detached."""
    saved: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for module in modules for p in module.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), context():
        found = run_layers(modules, _leaves(value))
    flop = float(counter.get_total_flops())
    return _Cost(flop, sum(saved.values())), tuple(t.detach() for t in found) if isinstance(found, tuple) else found.detach()


def _leaves(value: Any) -> Any:
    if isinstance(value, tuple):
        found = tuple(_leaves(v) for v in value)
        return found if len(found) > 1 else found[0]
    return value.detach().requires_grad_(value.is_floating_point())


def _itemsize(layers: Layers) -> int:
    """As profiles know it: 2 for 16-bit weights, else 4; of wider ones every element counts as several."""
    return 2 if all(p.itemsize == 2 for p in layers.module.parameters()) else 4


def _block(
    layers: Layers, index: int, cost: _Cost, shared: int, boundary: int, seconds: Sequence[float], *, pinned: bool
) -> BlockProfile:
    """One layer; ends share what they cost together."""
    parameters = layers.parameters(index).values()
    size = _itemsize(layers)
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
    )


def bandwidth(device: torch.device) -> float:
    """Bytes/s that each rank sends while all reduce a tensor together."""
    world = dist.get_world_size()
    if world == 1:
        return 1e12  # nobody to send to
    probe = torch.zeros(_PROBE_BYTES // 4, device=device)
    took = []
    for _ in range(3):
        dist.barrier()
        begin = time.monotonic()
        dist.all_reduce(probe)
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        took.append(time.monotonic() - begin)
    slowest = torch.tensor(min(took), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return 2 * (world - 1) / world * _PROBE_BYTES / float(slowest)
