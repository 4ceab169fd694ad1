"""Local-first recovery: checkpoints by layer, on several tiers, read from the nearest one."""

from __future__ import annotations

from lightning_hetero.parallel.recovery.layer_map import LayerMap, StoredFile
from lightning_hetero.parallel.recovery.tiered_checkpoints import Loaded, TieredCheckpoints
from lightning_hetero.parallel.recovery.tiers import CheckpointTier

__all__ = ["CheckpointTier", "LayerMap", "Loaded", "StoredFile", "TieredCheckpoints"]
