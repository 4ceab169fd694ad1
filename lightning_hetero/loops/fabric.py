"""``Fabric(strategy="hetero_offload")``: a plain loop whose model and optimizers Fabric sets up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hetero.errors import ConfigError, UnsupportedError
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

    ``fabric.setup(model, optimizer)`` places the model, or ``setup_module`` and then
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
        if self.loop is not None and self.loop.is_open:
            raise UnsupportedError(
                "strategy 'hetero_offload' has a module already; it offloads one. Set up the larger module, and leave the other "
                "one in memory: move it by fabric.to_device."
            )
        self.loop = OffloadedLoop(module, None, computing_on(self._choices, self.root_device), overlap=self._overlap)
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Value = None
    ) -> tuple[nn.Module, list[Optimizer], Value]:
        """Places a module with its optimizers."""
        self.setup_module(module)
        self._train(optimizers)
        return module, optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The module trains by this optimizer, too."""
        self._train([optimizer])
        return optimizer

    def _train(self, optimizers: list[Optimizer]) -> None:
        if self.loop is None or self.loop.optimizers:
            raise ConfigError(
                "strategy 'hetero_offload' got optimizers before their module, or one after the other. Pass them together: "
                "fabric.setup(module, *optimizers), or setup_module(module) and then setup_optimizers(*optimizers)."
            )
        self.loop.train(optimizers)


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
