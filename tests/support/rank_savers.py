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
import pytest
import torch

from lightning_hetero.errors import ConfigError
from lightning_hetero.parallel.recovery import TieredCheckpoints
from lightning_hetero.parallel.recovery.writer import LayerWriter
from lightning_hetero.runtime import linked_steps
from lightning_hetero.store.format import sets
from lightning_hetero.strategies import HeteroOffloadStrategy, LocalFirst
from support import shared_model
from support.shared_stores import MIXED, POINTS, Kill, Model, losses, run, same_end, train, was_killed

POINTS |= {
    "before its links are made": (linked_steps, "snapshot", "before"),
    "once its links are made": (linked_steps, "snapshot", "after"),
    "before all links get their name": (linked_steps, "_put", "before"),
    "once all links have their name": (linked_steps, "_put", "after"),
    "before it writes to its disk": (LayerWriter, "write_data", "before"),
    "before its remote copy": (LayerWriter, "upload", "before"),
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
    swapped = root / "swapped"
    shutil.copytree(first / "store", swapped)
    for old, new in [("0", "x"), ("1", "0"), ("x", "1")]:
        (swapped / f"rank-{old}-of-2").rename(swapped / f"rank-{new}-of-2")
    with pytest.raises(ConfigError, match=r"rank-0-of-2' is the store of rank 1 of 2, which belongs into .*rank-1-of-2'"):
        sets.Stores(swapped)
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


class SavesEpochs(pl.Callback):
    """Saves as an epoch ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


def fit_locally(out: Path, rank: int, *, resume: Any = None, epochs: int = 3, end: str = "end.ckpt", **options: Any) -> None:
    """Saves on the local disk first, after each epoch and after the fit. Alone: plain Lightning."""
    torch.manual_seed(5)
    model, shares = Model(), shared_model.WORLD > 1
    strategy = HeteroOffloadStrategy(MIXED, block_cls="Layer", update_threads=1, **options) if shares else "auto"
    torch.manual_seed(11 + rank)
    plugins, callbacks = [LocalFirst(disk=out / "local")], [SavesEpochs(out / "run")]
    trainer = shared_model.trainer(out, strategy, max_epochs=epochs, plugins=plugins, callbacks=callbacks)
    trainer.fit(model, shared_model.batches(rank), ckpt_path=resume)
    trainer.save_checkpoint(out / end)
    plugins[0].wait()


def local_first(root: Path, _: Path) -> dict[str, Any]:
    """What is whole on the local disk counts without a remote copy, for any number of ranks."""
    whole, reached, same = fresh(root / "whole"), True, True
    assert not any(run(2, partial(fit_locally, whole, disk_path=whole / "store")))
    assert not any(run(2, partial(fit_locally, whole, disk_path=whole / "store", resume=whole / "store", end="again.ckpt")))
    same &= same_state(whole / "again.ckpt", whole / "end.ckpt")
    for kill, epoch, worlds in [
        (Kill(1, "before it writes to its disk", 2), 0, ()), (Kill(0, "before its remote copy", 2), 1, (3, 1)),
    ]:  # fmt: skip
        out = fresh(root / "local")
        statuses = run(2, partial(fit_locally, out), kill)
        reached &= any(map(was_killed, statuses))
        shutil.copytree(out / "local", out / "left")
        saved = [(world, epoch + 1, f"run/{epoch}.ckpt") for world in worlds]
        for world, epochs, end in [*saved, (2, 3, "end.ckpt")]:
            shutil.rmtree(out / "local")
            shutil.copytree(out / "left", out / "local")
            assert not any(run(world, partial(fit_locally, out, resume="newest", epochs=epochs)))
            same &= same_state(out / "end.ckpt", whole / end)
    shutil.rmtree(out / "local")
    assert not any(run(2, partial(fit_locally, out, resume=out / "run" / "0.ckpt", end="remote.ckpt")))
    return {"reached": reached, "same": same and same_state(out / "remote.ckpt", whole / "end.ckpt")}


def same_state(path: Path, other: Path) -> bool:
    """Whether two checkpoints have the same weights and optimizer state."""
    mine, theirs = (TieredCheckpoints().load(one) for one in (path, other))
    return mine is not None and theirs is not None and _same(mine.state, theirs.state)


def _same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(_same(got[key], value) for key, value in wanted.items())
    return torch.equal(got, wanted) if isinstance(wanted, torch.Tensor) else got == wanted


def main(root: Path, *names: str) -> None:
    """Runs all cases, and prints what became of them."""
    os.chdir(root)
    reference, report = fresh(root / "reference"), {}
    assert not any(run(2, lambda rank: train(reference, rank, "host", resume=False, store=False)))
    for case in (elsewhere, linked, local_first):
        if not names or case.__name__ in names:
            report[case.__name__] = case(root, reference)
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
