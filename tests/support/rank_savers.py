"""What ranks that share a model save, killed as they do, and who goes on from it: a script.

See ``tests/faults/test_kill_savers.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_hetero.strategies import HeteroOffloadStrategy
from support import shared_model
from support.shared_stores import MIXED, Kill, Model, losses, run, same_end, train, was_killed


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


def main(root: Path, *names: str) -> None:
    """Runs all cases, and prints what became of them."""
    os.chdir(root)
    reference, report = fresh(root / "reference"), {}
    assert not any(run(2, lambda rank: train(reference, rank, "host", resume=False, store=False)))
    for case in (elsewhere,):
        if not names or case.__name__ in names:
            report[case.__name__] = case(root, reference)
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
