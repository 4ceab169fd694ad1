"""Models and machines for ProTrain's formulas."""

from __future__ import annotations

from dataclasses import replace

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import Saved
from lightning_hetero.planners.protrain.search_space import Space

KEEP, RECOMPUTE, SWAP = Saved.KEEP, Saved.RECOMPUTE, Saved.SWAP_HOST


def block_of(name: str = "layers.0", **changes: object) -> BlockProfile:
    fields = {
        "num_params": 8,
        "num_trainable_params": 8,
        "forward_s": 2.0,
        "backward_s": 4.0,
        "forward_flop": 1.0,
        "activation_bytes": 10,
        "boundary_bytes": 2,
        "transient_bytes": 0,
    }
    return BlockProfile(name=name, **(fields | changes))  # type: ignore[arg-type]


def model_of(*blocks: BlockProfile, **changes: object) -> ModelProfile:
    named = tuple(replace(b, name=f"layers.{i}") for i, b in enumerate(blocks))
    fields = {"name": "m", "tokens": 1, "compute_itemsize": 2, "constant_device_bytes": 0, "constant_host_bytes": 0}
    return ModelProfile(**(fields | changes), blocks=named)  # type: ignore[arg-type]


def hardware_of(**changes: object) -> HardwareProfile:
    fields: dict[str, object] = {
        "name": "h",
        "device_memory_bytes": 10**9,
        "host_memory_bytes": 10**9,
        "disk_capacity_bytes": 0,
        "device_flop_per_s": 1.0,
        "link_h2d_bytes_per_s": 8.0,
        "link_d2h_bytes_per_s": 8.0,
        "disk_read_bytes_per_s": 0.0,
        "disk_write_bytes_per_s": 0.0,
        "disk_duplex": False,
        "host_dram_bytes_per_s": 64.0,
        "cpu_update_params_per_s": 4.0,
        "device_update_params_per_s": 64.0,
        "cpu_downcast_params_per_s": 64.0,
    }
    return HardwareProfile(**(fields | changes))  # type: ignore[arg-type]


def space_with(model: ModelProfile, hardware: HardwareProfile, chunk_params: int) -> Space:
    return Space(
        model=model,
        hardware=hardware,
        chunk_params=chunk_params,
        device_bytes_allowed=hardware.device_memory_bytes,
        host_bytes_allowed=hardware.host_memory_bytes,
    )
