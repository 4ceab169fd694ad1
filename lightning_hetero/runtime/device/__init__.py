"""Weights, gradients and optimizer state of blocks on a device that has memory of its own.

Each class does the work of some op kinds, when the executor calls it. A *run* is the function of an
op, for ``Lanes.submit`` (``lanes``). All other methods run in the thread that computes.
"""

from lightning_hetero.runtime.device.device_updates import DeviceUpdates
from lightning_hetero.runtime.device.gradients import HostGradients
from lightning_hetero.runtime.device.host_gradient import HostGradient
from lightning_hetero.runtime.device.references import WeightRef
from lightning_hetero.runtime.device.setup import DeviceSide
from lightning_hetero.runtime.device.weights import DeviceWeights

__all__ = ["DeviceSide", "DeviceUpdates", "DeviceWeights", "HostGradient", "HostGradients", "WeightRef"]
