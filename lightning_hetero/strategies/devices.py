"""The device that a fit computes on: the CPU, or a device with memory of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.lanes import Device, EmulatedDevice
from lightning_hetero.lanes.backends import BACKENDS, CHOICES, COMPUTES_ON
from lightning_hetero.lanes.peers import DeviceLinks
from lightning_hetero.runtime import quantized
from lightning_hetero.strategies.namespaces import lightning_of

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators import Accelerator


def chosen(trainer: pl.Trainer, accelerator: Accelerator | None, name: str) -> torch.device:
    """The device that the Trainer's flags choose.

    Raises:
        UnsupportedError: The package does not support it; or a launcher has started more processes
            than the Trainer has devices, or there are several nodes with one each.
    """
    environment = trainer._accelerator_connector.cluster_environment
    try:
        processes = environment.world_size() if environment.creates_processes_externally else 1
    except KeyError:  # SLURM's environment without SLURM_NTASKS: no srun has started this process
        processes = 1
    nodes = trainer._accelerator_connector._num_nodes_flag  # trainer.num_nodes asks the strategy, which has one
    if nodes > 1:
        raise UnsupportedError(
            f"strategy {name!r} got devices=1, num_nodes={nodes}; the devices of a node share a model, so there have to be two or "
            f"more on each. Pass devices=2 or more, or num_nodes=1."
        )
    if processes > 1:
        raise UnsupportedError(
            f"strategy {name!r} got devices=1, but a launcher ({type(environment).__name__}) has started {processes} processes. "
            f"Each of them would train a model of its own on all data. Pass devices={processes} to train one model together, or "
            f"as many as each node has, and num_nodes. Or start one process: run `python`, `torchrun --nproc-per-node=1` or "
            f"`srun --ntasks=1`."
        )
    devices = trainer._accelerator_connector._parallel_devices
    first = devices[0] if devices else "cpu"
    device = first if isinstance(first, torch.device) else torch.device("cpu")  # the CPU's are numbers of processes
    check_kind(device, accelerator, name)
    return device


def check_kind(device: torch.device, accelerator: Accelerator | None, name: str) -> None:
    """Refuses devices of kinds that the package does not support.

    Raises:
        UnsupportedError: Names device and strategy.
    """
    if device.type != "cpu" and device.type not in BACKENDS:
        raise UnsupportedError(
            f"strategy {name!r} got accelerator {type(accelerator).__name__}, device {str(device)!r}; it computes on "
            f"{COMPUTES_ON}. Pass {CHOICES}."
        )


def process_group_of(devices: Sequence[torch.device]) -> str:
    """The back ends of torch.distributed for ranks on these devices.

    What is on hosts goes through gloo, and what is on devices through their own library. That takes
    each device once, so ranks that share one use gloo for all.
    """
    kind = devices[0].type
    if kind == "cpu" or len(set(devices)) < len(devices):
        return "gloo"
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def peers_of(device: Device | None, backends: str, nodes: int, timeout: timedelta | None) -> DeviceLinks | None:
    """How ranks' devices exchange weights and gradients; ``None`` if they do not. All call it.

    Args:
        device: That of this rank, if it has memory of its own.
        backends: As :func:`process_group_of` names them.
        nodes: How many there are. Devices of several nodes do not exchange.
        timeout: Bounds each exchange.
    """
    if device is None or nodes > 1:
        return None
    library = backends.rpartition(":")[2]
    group = dist.new_group(timeout=timeout, backend=library)
    if isinstance(device, EmulatedDevice):
        return DeviceLinks(group, device.peer_links)
    return DeviceLinks(group, through_host=library == "gloo" and device.device.type != "cpu")


def move_rest(module: nn.Module, device: torch.device) -> None:
    """Moves all but parameters to a device: buffers, metrics, the modules' ``device``."""
    from torchmetrics import Metric

    placed = lightning_of(module).fabric("utilities.device_dtype_mixin")._DeviceDtypeModuleMixin
    for part in module.modules():
        if isinstance(part, Metric) and not any(True for _ in part.parameters()):
            part.to(device)  # its states are not buffers
        if isinstance(part, placed):
            part._device = device
    move_buffers(module, device)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Moves buffers to a device. Those on the meta device stay: they have no content yet."""
    moved: dict[Tensor, Tensor] = {}
    for part in module.modules():
        for key, buffer in part._buffers.items():
            if buffer is None or (buffer.is_meta and device.type != "meta"):
                continue
            if buffer not in moved:  # modules may share one
                moved[buffer] = buffer.to(device)
            part._buffers[key] = moved[buffer]
    quantized.to_device(module, device)


def optimizers_to_host(optimizers: Iterable[Optimizer]) -> None:
    """Moves optimizer state to host memory that the optimizers' own code has made on a device."""
    for optimizer in optimizers:
        for param, state in list(optimizer.state.items()):
            optimizer.state[param] = tree_map_only(Tensor, lambda t: t.cpu() if type(t) is Tensor else t, state)
