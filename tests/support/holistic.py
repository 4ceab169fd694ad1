"""A model and machines on which the planners' choices differ."""

from __future__ import annotations

from dataclasses import replace

from lightning_hetero.ir.model import BlockProfile, ModelProfile, OperatorProfile
from lightning_hetero.ir.plan import Tier, UpdateLane
from support.machines import ROOMY

MB, GB = 10**6, 10**9


DEVICE = (Tier.DEVICE, Tier.DEVICE, UpdateLane.DEVICE)


def block_of(
    name: str, *, params: int = 10 * MB, pinned: bool = False, forward_s: float = 0.01, saved: int = 100 * MB
) -> BlockProfile:
    """Half of what it saves is the output of one operator that is cheap to repeat, four tenths that
    of a dear one.
    """
    return BlockProfile(
        name=name,
        num_params=params,
        num_trainable_params=params,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        forward_flop=100.0,
        activation_bytes=saved,
        boundary_bytes=saved // 10,
        transient_bytes=5 * MB,
        operators=(
            OperatorProfile(name="cheap", flop=20.0, bytes=saved // 2),
            OperatorProfile(name="dear", flop=80.0, bytes=saved * 4 // 10),
        ),
        pinned=pinned,
    )


def model_of(layers: int = 6, **changes: object) -> ModelProfile:
    blocks = (block_of("embedding", pinned=True), *(block_of(f"layers.{i}") for i in range(layers)))
    fields = {
        "name": "m",
        "tokens": 8,
        "compute_itemsize": 2,
        "constant_device_bytes": 0,
        "constant_host_bytes": 0,
        "blocks": blocks,
    }
    return ModelProfile(**(fields | changes))  # type: ignore[arg-type]


MODEL = model_of()  # 7 blocks of 20 MB of weights, 20 MB of gradients, 120 MB of state; 700 MB of activations


TIGHT = replace(ROOMY, name="tight", device_memory_bytes=500 * MB)


OWN_CPU = replace(
    ROOMY, name="own cpu", shared_memory=True, link_h2d_bytes_per_s=0.0, link_d2h_bytes_per_s=0.0, device_update_params_per_s=0.0
)
