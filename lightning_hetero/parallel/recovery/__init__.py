"""Local-first recovery: checkpoints by layer, on several tiers, read from the nearest one."""

from __future__ import annotations

from lightning_hetero.parallel.recovery.checkpoints import Loaded, TieredCheckpoints
from lightning_hetero.parallel.recovery.layer_map import LayerMap, StoredFile
from lightning_hetero.parallel.recovery.tiers import Tier

__all__ = ["LayerMap", "Loaded", "StoredFile", "Tier", "TieredCheckpoints"]
