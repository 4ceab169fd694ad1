"""Trainings of ranks of which every use of memory has to be ordered; see ``checked_ranks``.

As a script this is one rank; see ``tests/integration/test_rank_lanes.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist


def is_ordered(out: Path) -> None:
    """Weights in memory that ranks share: prefetch, clipping, accumulation, validation."""
    _check(out, [("", {}), ("rare", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "val_check_interval": 2})])


def is_ordered_on_disk(out: Path) -> None:
    """Slices come from the disk, and go."""
    _check(out, [("", {"val_check_interval": 2})], plan="disk")


def _check(out: Path, runs: list[tuple[str, dict[str, object]]], plan: str = "host") -> None:
    from lightning_hetero import HeteroOffloadStrategy
    from support.checked_ranks import checked_rank
    from support.shared_model import RANK, batches, model, reference, same, trainer

    for kind, flags in runs:
        shared = model(kind, seed=5 + RANK)
        strategy = HeteroOffloadStrategy(plan, block_cls="Layer", update_threads=1)
        with checked_rank() as checker:
            trainer(out, strategy, **flags).fit(shared, batches(), *[batches()] * ("val_check_interval" in flags))
        assert checker.uses > 1000
        same(shared, reference(kind, flags.get("accumulate_grad_batches", 1), flags.get("gradient_clip_val")))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for word in sys.argv[2:]:
        globals()[word](Path(sys.argv[1]))
    print("ok", flush=True)
    dist.barrier()
    dist.destroy_process_group()
