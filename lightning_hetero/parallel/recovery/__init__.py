"""Local-first recovery: checkpoints by layer, in host memory, on the local disk and at their URL, read from where it is nearest."""

from __future__ import annotations

from lightning_hetero.parallel.recovery.checkpoints import Loaded, TieredCheckpoints
from lightning_hetero.parallel.recovery.layer_map import LayerMap, StoredFile
from lightning_hetero.parallel.recovery.tiers import Tier

__all__ = ["LayerMap", "Loaded", "StoredFile", "Tier", "TieredCheckpoints"]
