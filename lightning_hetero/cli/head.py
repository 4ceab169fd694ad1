"""The logits of a language model's head as a remedy: what ``chunked_head=True`` would save."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.cli.options import Request
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """A head that needs more memory than any other block of its model.

    Attributes:
        num_bytes: What it saves for backward and needs for a time.
        saved_bytes: How much less that is in chunks.
        model: The model with the head in chunks.
    """

    num_bytes: int
    saved_bytes: int
    model: ModelProfile

    def __str__(self) -> str:
        return f"its logits take {format_bytes(self.num_bytes)}; chunked_head=True saves {format_bytes(self.saved_bytes)}"


def logits(request: Request, model: ModelProfile, hardware: HardwareProfile) -> Logits | None:
    """The head of a model, if its logits dominate memory and may be computed in chunks."""
    chunked = request.with_chunked_head(hardware)
    if chunked is None:
        return None
    sizes = {block.name: _held(block) for block in model.blocks}
    saved = {block.name: sizes[block.name] - _held(block) for block in chunked.blocks}
    head = max(saved, key=lambda name: saved[name])
    others = max((sizes[b.name] + model.weight_bytes(b) for b in model.blocks if b.name != head), default=0)
    if saved[head] <= others:
        return None
    return Logits(num_bytes=sizes[head], saved_bytes=saved[head], model=chunked)


def _held(block: BlockProfile) -> int:
    return block.activation_bytes + block.transient_bytes
