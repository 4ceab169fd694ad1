"""The kinds of lanes that a device with memory of its own may have, behind one emulated device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_hetero import EmulatedDevice
from lightning_hetero.runtime.activations import uses
from lightning_hetero.runtime.device import setup
from lightning_hetero.runtime.lanes import EmulatedLanes, InlineLanes, Lanes
from lightning_hetero.runtime.lanes.cuda import CudaLanes
from support.streams import FakeCuda

KINDS = ("inline", "emulated", "streams")


@contextmanager
def lanes_of(kind: str) -> Iterator[None]:
    """Devices with memory of their own have lanes of this kind: streams are stood in for by threads."""
    made: list[FakeCuda] = []

    def inline(device: EmulatedDevice, *, poison: bool) -> Lanes:
        return InlineLanes(memory_bytes=device.memory_bytes, poison=poison)

    def streams(device: EmulatedDevice, *, poison: bool) -> Lanes:
        made.append(FakeCuda(seed=device.seed))
        return CudaLanes("cpu", cuda=made[-1], memory_bytes=device.memory_bytes, staging_bytes=2**16, poison=poison)

    with pytest.MonkeyPatch.context() as patch:
        make = {"inline": inline, "emulated": EmulatedLanes, "streams": streams}[kind]
        patch.setattr(setup, "EmulatedLanes", make)
        patch.setattr(uses, "SMALL_BYTES", 64)  # the models are small, and what they save shall leave
        yield
    for fake in made:
        fake.close()
