"""What a planner knows of a model: its blocks in forward order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The size of one block.

    Attributes:
        name: The block's module name inside the LightningModule, such as ``"model.layers.3"``.
        num_params: Elements of all its parameters, alignment padding included.
        num_trainable_params: Elements that have optimizer state, padding included.
        weight_bytes: Bytes of its weights in the dtype that computes.
        gradient_bytes: Bytes of one full set of its gradients.
        state_bytes: Bytes of its optimizer state (16-bit weights: fp32 master included).
        pinned: Its weights must stay in memory: parameters outside repeated blocks, and tied weights.
    """

    name: str
    num_params: int
    num_trainable_params: int
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The blocks of one model in forward order."""

    name: str
    blocks: tuple[BlockShape, ...]
