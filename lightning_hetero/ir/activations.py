"""Sums up the activations that a block's forward saves, by their treatment under a plan."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.ir.model import BlockProfile, BlockShape
from lightning_hetero.ir.plan import BlockPlan, Saved, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """The bytes that one forward of a block saves, by their treatment.

    Attributes:
        kept: Bytes that stay on the device until backward.
        to_host: Bytes that are moved to host memory after forward and back before backward.
        to_disk: The same for the disk.
        recomputed: Bytes that are dropped after forward and recomputed in backward.
        in_use: Casts of weights that are in memory only while the block computes.
    """

    kept: int
    to_host: int
    to_disk: int
    recomputed: int
    in_use: int


def saved_bytes(block: BlockProfile | BlockShape, placed: BlockPlan, *, shared_memory: bool = False) -> SavedBytes:
    """Splits ``block.activation_bytes`` and ``block.cast_bytes`` by treatment.

    The input follows ``boundary``, each operator its own policy, the rest ``saved``. Casts are part
    of the rest if the weights stay where the block computes.

    Args:
        block: The block.
        placed: Its rule.
        shared_memory: The device is the host's own CPU.
    """
    stays = placed.weights is Tier.DEVICE or (shared_memory and placed.weights is Tier.HOST)
    in_use = 0 if stays else block.cast_bytes
    totals = [(placed.boundary, block.boundary_bytes)]
    rest = block.activation_bytes - block.boundary_bytes
    for operator in block.operators if placed.operators else ():
        policy = placed.operators.get(operator.name, placed.saved)
        taken = min(operator.bytes, rest)
        totals.append((policy, taken))
        rest -= taken
    totals.append((placed.saved, rest + block.cast_bytes - in_use))
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
    return SavedBytes(kept=kept, to_host=to_host, to_disk=to_disk, recomputed=recomputed, in_use=in_use)


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
