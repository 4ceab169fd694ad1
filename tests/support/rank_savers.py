"""What ranks that share a model save, killed as they do, and who goes on from it: a script.

See ``tests/faults/test_kill_savers.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_hetero.runtime import linked_steps
from lightning_hetero.strategies import HeteroOffloadStrategy
from support import shared_model
from support.shared_stores import MIXED, POINTS, Kill, Model, losses, run, same_end, train, was_killed

POINTS |= {
    "before its links are made": (linked_steps, "snapshot", "before"),
    "once its links are made": (linked_steps, "snapshot", "after"),
    "before all links get their name": (linked_steps, "_put", "before"),
    "once all links have their name": (linked_steps, "_put", "after"),
}


def ended(out: Path, world: int, kills: Sequence[Kill] = (), *, nodes: int = 1, **options: Any) -> bool:
    """Lets ranks die at one point after the other, and then end. Whether all did."""
    reached = True
    for kill in [*kills, None]:
        statuses = run(world, lambda rank: train(out, rank, MIXED, **options), kill, nodes=nodes)
        reached &= kill is None or any(map(was_killed, statuses))
    assert not any(statuses), statuses
    return reached


def fresh(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def evaluates(out: Path, world: int, store: Path) -> bool:
    """Whether all ranks validate with the weights of the end."""
    wanted = torch.load(out / "end.ckpt")["state_dict"]

    def call(rank: int) -> None:
        model, strategy = Model(), HeteroOffloadStrategy("host", block_cls="Layer", update_threads=1)
        shared_model.trainer(out, strategy).validate(model, shared_model.batches(rank), ckpt_path=store, verbose=False)
        assert all(torch.equal(param, wanted[name]) for name, param in model.named_parameters())

    return not any(run(world, call))


def elsewhere(root: Path, reference: Path) -> dict[str, Any]:
    """Stores at another path than ``disk_path`` are gone on from, and stay."""
    first, out = fresh(root / "first"), fresh(root / "elsewhere")
    ended(first, 2, resume=False, steps=3)
    before = {path: path.read_bytes() for path in sorted((first / "store").rglob("*")) if path.is_file()}
    same = evaluates(first, 2, first / "store") and evaluates(first, 1, first / "store")
    copy = fresh(root / "copy") / "store"
    shutil.copytree(first / "store", copy)
    points = [(1, "while parts come from other ranks", 2), (0, "before it writes a record", 1), (-1, "as it writes a slot", 9)]
    reached = ended(out, 2, [Kill(*point) for point in points], resume=copy)
    same &= same_end(out, reference) and min(map(int, losses(out, 2)[0])) > 3  # the last one went on where the last kill was
    for world in (3, 1):
        for kills in ([Kill(0, "while parts come from other ranks", 1)], []):
            out = fresh(root / f"elsewhere-{world}")
            reached &= ended(out, world, kills, resume=copy, steps=3)
            same &= same_end(out, first)
            shutil.rmtree(out)
    assert before == {first / "store" / path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    return {"reached": reached, "same": same}


class Saves(pl.Callback):
    """Saves after two steps, and after the third in the same place."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in (2, 3):
            trainer.save_checkpoint(self.path)


def linked(root: Path, reference: Path) -> dict[str, Any]:
    """Links are those of all ranks or of none; the checkpoint before them stays until then."""
    reached, same, kept = True, True, root / "linked" / "kept.ckpt"
    for kill, step in [
        (Kill(1, "before its links are made", 2), 2), (Kill(0, "once its links are made", 2), 2),
        (Kill(0, "before all links get their name", 2), 2), (Kill(0, "once all links have their name", 2), 3),
        (Kill(-1, "before it writes a record", 5), 3),
    ]:  # fmt: skip
        out = fresh(kept.parent)
        call = partial(train, out, plan=MIXED, resume=False, link_checkpoints=True, more=[Saves(kept)])
        statuses = run(2, call, kill)
        reached &= any(map(was_killed, statuses))
        shutil.rmtree(out / "store")
        ended(out, 2, resume=kept, place="again")
        same &= same_end(out, reference) and min(map(int, losses(out, 2)[0])) == step
    first = fresh(root / "linked-first")
    ended(first, 2, resume=False, steps=3)
    for world in (3, 1):
        ended(out, world, resume=kept, steps=3, place=f"again-{world}")
        same &= same_end(out, first) and evaluates(first, world, kept)
    ended(first, 4, nodes=2, resume=False, steps=3, place="of-nodes", link_checkpoints=True, more=[Saves(kept)])
    ended(out, 2, resume=kept, steps=3, place="of-one-node")
    same &= same_end(out, first) and (kept / "rank-3-of-4-on-2-nodes").is_dir()
    return {"reached": reached, "same": same}


def main(root: Path, *names: str) -> None:
    """Runs all cases, and prints what became of them."""
    os.chdir(root)
    reference, report = fresh(root / "reference"), {}
    assert not any(run(2, lambda rank: train(reference, rank, "host", resume=False, store=False)))
    for case in (elsewhere, linked):
        if not names or case.__name__ in names:
            report[case.__name__] = case(root, reference)
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
