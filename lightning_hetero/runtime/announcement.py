"""Says in the log where a plan has put everything."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from lightning_hetero.clock import now_s
from lightning_hetero.ir.plan import Tier
from lightning_hetero.runtime.placement import Placement
from lightning_hetero.store.live.blocks import Block
from lightning_hetero.units import format_bytes

log = logging.getLogger(__name__)


def announce(placement: Placement, blocks: Sequence[Block], *, on_device: bool, trains: bool, disk: str, begin_s: float) -> None:
    """Logs where everything lives, and the time since ``begin_s``; ``disk``: the files in words."""
    of_device = "on the device" if on_device else "in memory"
    what = [f"weights of {_by_tier((b.plan.weights for b in blocks), of_device)}"]
    if trains:
        trained = [b.plan.state for b in blocks if any(p.requires_grad for p in b.params())]
        what.append(f"optimizer state of {_by_tier(trained, of_device)}" if trained else "no optimizer state")
    if disk:
        what.append(disk)
    if placement.cache_bytes and any(b.weights_on_disk for b in blocks):
        what.append(f"{format_bytes(placement.cache_bytes)} of memory to cache weights from there")
    log.info("plan %r, in place after %.2g s: %s.", placement.plan.name, now_s() - begin_s, "; ".join(what))
    if trains and placement.rules.deferred:
        when = (
            "are tried during backward, and done again where they were wrong,"
            if placement.rules.speculates
            else "run after optimizer.step() in forward order,"
        )
        log.info("updates %s because %s.", when, placement.rules.deferred)


def _by_tier(tiers: Iterable[Tier], of_device: str) -> str:
    """Such as ``"2 blocks on the device, of 24 blocks on disk"``."""
    places = {Tier.DEVICE: of_device, Tier.HOST: "in memory", Tier.DISK: "on disk"}
    counts = Counter(places[tier] for tier in tiers)
    return ", of ".join(f"{counts[p]} block{'s' * (counts[p] > 1)} {p}" for p in dict.fromkeys(places.values()) if counts[p])
