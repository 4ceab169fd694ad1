"""Sums up the activations that a block's forward saves, by their treatment under a plan."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.ir.model import BlockProfile, BlockShape
from lightning_hetero.ir.plan import BlockPlan, Saved


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """The bytes that one forward of a block saves, by their treatment.

    Attributes:
        kept: Bytes that stay on the device until backward.
        to_host: Bytes that are moved to host memory after forward and back before backward.
        to_disk: The same for the disk.
        recomputed: Bytes that are dropped after forward and recomputed in backward.
    """

    kept: int
    to_host: int
    to_disk: int
    recomputed: int


def saved_bytes(block: BlockProfile | BlockShape, placed: BlockPlan) -> SavedBytes:
    """Splits ``block.activation_bytes`` by treatment.

    The input follows ``boundary``, each operator its own policy, the rest ``saved``.
    """
    totals = [(placed.boundary, block.boundary_bytes)]
    rest = block.activation_bytes - block.boundary_bytes
    for operator in block.operators if placed.operators else ():
        policy = placed.operators.get(operator.name, placed.saved)
        taken = min(operator.bytes, rest)
        totals.append((policy, taken))
        rest -= taken
    totals.append((placed.saved, rest))
    kept = to_host = to_disk = recomputed = 0
    for policy, size in totals:
        if policy is Saved.KEEP:
            kept += size
        elif policy is Saved.RECOMPUTE:
            recomputed += size
        elif policy is Saved.SWAP_HOST:
            to_host += size
        else:
            to_disk += size
    return SavedBytes(kept=kept, to_host=to_host, to_disk=to_disk, recomputed=recomputed)


def recomputed_share(block: BlockProfile, placed: BlockPlan) -> float:
    """The share of the block's forward that backward repeats, from 0 to 1.

    A recomputed block repeats all operators except those whose outputs are kept or swapped (LoHan
    eq. 7). Other blocks repeat only the operators that are recomputed.
    """
    if block.forward_flop <= 0:
        return 1.0 if placed.saved is Saved.RECOMPUTE else 0.0
    policies = [(o.flop, placed.operators.get(o.name, placed.saved)) for o in block.operators]
    if placed.saved is Saved.RECOMPUTE:
        spared = sum(flop for flop, policy in policies if policy is not Saved.RECOMPUTE)
        return max(0.0, 1.0 - spared / block.forward_flop)
    return min(1.0, sum(flop for flop, policy in policies if policy is Saved.RECOMPUTE) / block.forward_flop)
