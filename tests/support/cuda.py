"""A GPU that is not there: Lightning's accelerator and the strategy's device, with streams that are
threads over CPU tensors.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator

from lightning_hetero import BlockPlan, Plan, Tier, UpdateLane
from lightning_hetero.ir.plan import Saved
from lightning_hetero.lanes.stream_device import StreamDevice
from support.device_plans import RESIDENT
from support.streams import FakeCuda

MIXED = Plan(
    name="mixed",
    blocks=(
        BlockPlan(name="model.blocks.0", weights=Tier.DISK, state=Tier.DISK, saved=Saved.RECOMPUTE, boundary=Saved.SWAP_HOST),
        BlockPlan(name="model.blocks.1", weights=Tier.HOST, state=Tier.HOST, update=UpdateLane.DEVICE, saved=Saved.SWAP_HOST),
        BlockPlan(name="model.blocks.2", weights=Tier.DEVICE, state=Tier.HOST, saved=Saved.SWAP_DISK),
        RESIDENT,
    ),
)


class StandIn(Accelerator):
    """What the Trainer takes for one accelerator with GPUs."""

    kind = "cuda"

    def setup_device(self, device: torch.device) -> None:
        """Every device is fine."""

    def teardown(self) -> None:
        """Nothing was set up."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return 1 if devices == "auto" else int(devices)

    @classmethod
    def get_parallel_devices(cls, devices: int) -> list[torch.device]:
        return [torch.device(cls.kind, index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "standin"


class OneGpu(StandIn):
    """A real GPU, which all ranks of the Trainer share."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    @classmethod
    def get_parallel_devices(cls, devices: int) -> list[torch.device]:
        return [torch.device(cls.kind, 0)] * devices


def stand_in(kind: str) -> StandIn:
    """The same for devices of another kind: Lightning asks the class for them."""
    made: StandIn = type("StandIn", (StandIn,), {"kind": kind})()
    return made


def standing_in(fake: FakeCuda, usable_bytes: int) -> Any:
    """What takes the place of ``StreamDevice.of``: CPU memory of this size, with the fake's
    streams.
    """

    def of(device: torch.device, budget_bytes: int | None) -> StreamDevice:
        assert device == torch.device(fake.kind, int(os.environ.get("LOCAL_RANK", "0")))
        size = usable_bytes if budget_bytes is None else min(usable_bytes, budget_bytes)
        return StreamDevice(device=torch.device("cpu"), usable_bytes=size, backend=fake)

    return of
