"""``Fabric(strategy="hetero_offload")``: a plain loop whose model and optimizers Fabric sets up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.loops.plain import OffloadedLoop, Overlap, choices_of, computing_on
from lightning_hetero.strategies.console import speak
from lightning_hetero.strategies.namespaces import Lightning, lightning_of, public_names
from lightning_hetero.untyped import Value

if TYPE_CHECKING:
    from lightning.fabric.accelerators.accelerator import Accelerator
    from lightning.fabric.plugins import CheckpointIO, Precision
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy as _Base
else:
    _Base = object  # the namespace's class is the second base

_NAME = "HeteroOffloadFabricStrategy"
HOME = __name__


class HeteroOffloadFabric(_Base):
    """Trains models that do not fit memory, in a loop of Lightning Fabric.

    ``fabric.setup(model, optimizer)`` places the model, or ``setup_module`` and
    ``setup_optimizers``. The loop stays as it is.

    Args:
        plan: As for :func:`lightning_hetero.offload`.
        overlap: The same.
        options: Its other options.
    """

    # Fabric's connector sets these.
    cluster_environment: ClusterEnvironment | None = None
    num_nodes = _num_nodes = 1

    def __init__(
        self,
        plan: Value = "auto",
        *,
        overlap: Overlap = "none",
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        **options: Value,
    ) -> None:
        super().__init__("cpu", accelerator, checkpoint_io, precision)
        self._overlap, self._choices = overlap, choices_of(plan, **options)
        self._devices: list[torch.device] = []
        self._early: list[Optimizer] = []  # set up before their module
        self.loop: OffloadedLoop | None = None

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices that Fabric's flags choose, once the connector has set them."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._devices = devices or []

    @property
    def root_device(self) -> torch.device:
        """The device that the loop computes on."""
        return self._devices[0] if self._devices else torch.device("cpu")

    def setup_environment(self) -> None:
        """Refuses several devices, and to train one model in each of several processes."""
        environment = self.cluster_environment
        processes = len(self._devices) * self._num_nodes
        if environment is not None and environment.creates_processes_externally:
            processes = max(processes, environment.world_size())
        if processes > 1:
            raise UnsupportedError(
                f"strategy 'hetero_offload' got {processes} processes or devices; with Fabric it runs in one process, on one "
                f"device. Pass devices=1, num_nodes=1, and start one process."
            )
        super().setup_environment()
        speak(lightning_of(self))

    def module_to_device(self, module: nn.Module) -> None:
        """The loop places the module."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Places a module, to evaluate it until there are optimizers."""
        self._place(module, ())
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Value = None
    ) -> tuple[nn.Module, list[Optimizer], Value]:
        """Places a module with its optimizers."""
        self._place(module, optimizers)
        return module, optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The module trains by this optimizer, too; it may come before its module."""
        if self.loop is None or not self.loop.is_open:
            self._early.append(optimizer)
        elif _trains(optimizer, self.loop.model):
            self._place(self.loop.model, [optimizer])
        return optimizer

    def _place(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """A module may be set up again. Then it also trains by the optimizers that come with it."""
        loop = self.loop
        if next(module.parameters(), None) is None:
            return  # there is nothing to place
        if loop is None or not loop.is_open:
            early = [one for one in self._early if _trains(one, module)]
            self._early = [one for one in self._early if one not in early]
            self.loop = self._loop(module, [*early, *(one for one in optimizers if one not in early)])
            return
        if loop.model is not module:
            raise UnsupportedError(
                "strategy 'hetero_offload' has a module already; it offloads one. Set up the larger module, and leave the other "
                "one in memory: move it by fabric.to_device."
            )
        if new := [one for one in optimizers if one not in loop.optimizers]:
            if not loop.optimizers:
                loop.train(new)
                return
            loop.close()  # with the state of its optimizers
            self.loop = self._loop(module, [*loop.optimizers, *new])

    def _loop(self, module: nn.Module, optimizers: list[Optimizer]) -> OffloadedLoop:
        return OffloadedLoop(module, optimizers or None, computing_on(self._choices, self.root_device), overlap=self._overlap)


def _trains(optimizer: Optimizer, module: nn.Module) -> bool:
    """Whether an optimizer has parameters of a module."""
    mine = {id(param) for param in module.parameters()}
    return any(id(param) in mine for group in optimizer.param_groups for param in group["params"])


def class_for(lightning: Lightning) -> type[HeteroOffloadFabric]:
    """The class for Fabrics of a namespace."""
    return lightning.subclass(HeteroOffloadFabric, "fabric.strategies.SingleDeviceStrategy", name=_NAME, home=HOME)


def make(namespace: str, **options: Value) -> HeteroOffloadFabric:
    """Makes the strategy for ``Fabric(strategy="hetero_offload")``; see ``strategies.make``."""
    return class_for(Lightning(namespace))(**options)


def __getattr__(name: str) -> type[HeteroOffloadFabric]:
    if (lightning := public_names(_NAME).get(name)) is not None:
        return class_for(lightning)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
