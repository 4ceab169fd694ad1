"""A batch in equal parts."""

from __future__ import annotations

from dataclasses import replace

from lightning_hetero.ir.model import ModelProfile


def split(model: ModelProfile, parts: int) -> ModelProfile:
    """The profile of one of ``parts`` equal micro-batches.

    Times, FLOP and activations shrink by ``parts`` [assumed: small micro-batches compute less
    efficiently, which only another profile could tell]; constants and parameters stay.
    """
    if parts == 1:
        return model

    def less(size: int) -> int:
        return -(-size // parts)

    blocks = (
        replace(
            b,
            forward_s=b.forward_s / parts,
            backward_s=b.backward_s / parts,
            forward_flop=b.forward_flop / parts,
            activation_bytes=less(b.activation_bytes),
            boundary_bytes=less(b.boundary_bytes),
            transient_bytes=less(b.transient_bytes),
            operators=tuple(replace(o, flop=o.flop / parts, bytes=less(o.bytes)) for o in b.operators),
            backward=tuple(o.scaled(1 / parts) for o in b.backward),
        )
        for b in model.blocks
    )
    batch = model.batch // parts if model.batch % parts == 0 else 0
    return replace(model, tokens=less(model.tokens), blocks=tuple(blocks), batch=batch)
