"""Where a run's weights are: on the host, on a device too, or in slices on several ranks."""

from lightning_hetero.runtime.context import RunContext
from lightning_hetero.runtime.residency import Residency
from lightning_hetero.runtime.residency.device import DeviceResidency
from lightning_hetero.runtime.residency.host import HostResidency
from lightning_hetero.runtime.residency.ranks import RanksResidency


def residency_of(context: RunContext) -> Residency:
    """The places of the weights of one run."""
    run = context.run
    if run.side is not None:
        return DeviceResidency(context, run.side)
    return HostResidency(context) if run.slices is None else RanksResidency(context, run.slices)
