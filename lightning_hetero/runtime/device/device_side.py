"""What the runtime keeps on, and for, a device that has memory of its own."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.runtime.device.gradients import HostGradients
from lightning_hetero.runtime.device.updates import DeviceUpdates
from lightning_hetero.runtime.device.weights import DeviceWeights


@dataclass(frozen=True, slots=True)
class DeviceSide:
    """The device's side of one model.

    Attributes:
        weights: Weights there.
        gradients: Gradients that have left it.
        updates: Updates and state there.
    """

    weights: DeviceWeights
    gradients: HostGradients
    updates: DeviceUpdates
