"""The kinds of lanes that a device with memory of its own may have, behind one emulated device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_hetero import EmulatedDevice
from lightning_hetero.lanes import EmulatedLanes, Lanes
from lightning_hetero.lanes.streams import StreamLanes
from lightning_hetero.runtime.activations import block as activations
from lightning_hetero.runtime.activations import names
from lightning_hetero.runtime.device import setup
from support.lanes import InlineLanes
from support.streams import FakeCuda

KINDS = ("inline", "emulated", "streams")


@contextmanager
def lanes_of(kind: str) -> Iterator[None]:
    """Devices with memory of their own have lanes of this kind: streams are stood in for by
    threads.
    """
    made: list[FakeCuda] = []

    def inline(device: EmulatedDevice, *, poison: bool) -> Lanes:
        return InlineLanes(memory_bytes=device.memory_bytes, poison=poison)

    def streams(device: EmulatedDevice, *, poison: bool) -> Lanes:
        made.append(FakeCuda(seed=device.seed))
        return StreamLanes("cpu", backend=made[-1], memory_bytes=device.memory_bytes, staging_bytes=2**16, poison=poison)

    with pytest.MonkeyPatch.context() as patch:
        make = {"inline": inline, "emulated": EmulatedLanes, "streams": streams}[kind]
        patch.setattr(setup, "EmulatedLanes", make)
        patch.setattr(activations, "SMALL_BYTES", 64)  # the models are small, and what they save shall leave
        yield
    for fake in made:
        fake.close()


@contextmanager
def answering_as_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of the emulated device say that they are on ``cuda``: whoever asks for those of the
    CPU finds none.
    """
    real = names.has_storage

    def has_storage(leaf: object, device_type: str) -> bool:
        return device_type == "cuda" and real(leaf, "cpu")

    with monkeypatch.context() as patch:
        for module in [module for module in list(sys.modules.values()) if getattr(module, "has_storage", None) is real]:
            patch.setattr(module, "has_storage", has_storage)
        patch.setattr(EmulatedLanes, "device_type", property(lambda lanes: "cuda", lambda lanes, value: None), raising=False)
        yield
