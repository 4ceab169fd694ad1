"""Trainings of ranks of which every use of memory has to be ordered; see ``checked_ranks``.

As a script this is one rank; see ``tests/integration/test_rank_lanes.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def is_ordered(out: Path) -> None:
    """Weights in memory that ranks share: prefetch, clipping, accumulation, validation."""
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    for kind, flags in (
        ("", {}),
        ("rare", {}),
        ("rare", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "val_check_interval": 2}),
        ("rare", by_value),
        ("skips", {}),
    ):
        _check(out, kind, flags, plan="host")


def is_ordered_on_disk(out: Path) -> None:
    """Slices come from the disk, and go. In little memory, a use that no schedule foresees drives
    out a block while the lane works.
    """
    from support.shared_model import Layer, least_memory

    few = 4 * sum(param.nbytes for param in Layer().parameters())
    for kind, options in (("", {}), ("skips", {"host_memory": least_memory(out) + few})):
        _check(out, kind, {"val_check_interval": 2}, plan="disk", **options)


def _check(out: Path, kind: str, flags: dict[str, Any], **options: Any) -> None:
    from lightning_hetero import HeteroOffloadStrategy
    from support.checked_ranks import checked_rank
    from support.shared_model import RANK, batches, model, reference, same, trainer

    shared = model(kind, seed=5 + RANK)
    strategy = HeteroOffloadStrategy(**options, block_cls="Layer", update_threads=1)
    with checked_rank() as checker:
        trainer(out, strategy, **flags).fit(shared, batches(), *[batches()] * ("val_check_interval" in flags))
    assert checker.uses > 1000
    by_value = flags.get("gradient_clip_algorithm") == "value"
    same(shared, reference(kind, flags.get("accumulate_grad_batches", 1), flags.get("gradient_clip_val"), by_value=by_value))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for word in sys.argv[2:]:
        globals()[word](Path(sys.argv[1]))
    print("ok", flush=True)
    dist.barrier()
    dist.destroy_process_group()
