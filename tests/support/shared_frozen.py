"""Ranks that read slices of frozen weights in place from safetensors files: a script.

See ``tests/integration/test_shared_frozen.py``. The ranks are forked from one process that has
imported everything. What counts as right is what as many ranks do with everything in memory.
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
from torch.utils.data import DataLoader

from lightning_hetero.cli import verify
from lightning_hetero.convert.exporting import export_weights
from lightning_hetero.convert.safetensors import INDEX, TensorToWrite, write_directory
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.lanes import EmulatedDevice
from lightning_hetero.store.format import sets
from lightning_hetero.store.format.record import parse
from lightning_hetero.strategies import HeteroOffloadStrategy
from support import shared_model, shared_stores
from support.shared_stores import FAILED, Kill, run, same_end, was_killed

STEPS, TRAINED = 4, ("norm", "offset")
DISK = Plan(  # with memory for two blocks
    name="disk", host_cache_bytes=2**15,
    blocks=(*(BlockPlan(name=f"layers.{i}", weights=Tier.DISK, state=Tier.DISK) for i in range(4)), BlockPlan(name="*")),
)  # fmt: skip
MIXED = Plan(
    name="mixed",
    blocks=(BlockPlan(name="layers.0", weights=Tier.DISK), BlockPlan(name="layers.1", weights=Tier.DEVICE), BlockPlan(name="*")),
)


class Model(shared_stores.Model):
    """Its norms train. All else is frozen; the head has the embedding's weights."""

    def __init__(self, *, meta: bool) -> None:
        with torch.device("meta" if meta else "cpu"):
            super().__init__("tied")
        for name, param in self.named_parameters():
            param.requires_grad_(any(word in name for word in TRAINED))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, fused=True)


def made(*, meta: bool = False) -> Model:
    torch.manual_seed(5)
    return Model(meta=meta)


def write(path: Path) -> Path:
    """The model as a sharded folder, in which no tensor begins at a page."""
    rows = [
        TensorToWrite(name, value.dtype, value.shape, lambda value=value: value)
        for name, value in made().state_dict().items()
        if name not in ("offset", "head.weight")
    ]
    rows.append(TensorToWrite("offset", torch.float32, torch.Size([1]), lambda: torch.zeros(1)))
    write_directory(path, rows, max_shard_bytes=20_000)
    assert (path / INDEX).is_file()
    return path


class Counts(pl.Callback):
    """Writes down how many steps have ended."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.file.write_text(str(trainer.global_step))


class Changes(pl.Callback):
    """After the second step frozen weights are written: some by one rank's slice alone."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            params = [*module.layers[0].up.parameters(), module.layers[1].up.weight]
            with trainer.strategy.materialize(params), torch.no_grad():
                for param in params[:2]:
                    param.mul_(1.01)
                params[2].view(-1)[0] += 0.5


def train(
    out: Path, plan: Any, folder: Path | None, rank: int, *, resume: bool = False, store: bool = True, steps: int = STEPS,
    more: Sequence[pl.Callback] = (), place: str = "store", meta: bool = False, begin: Path | None = None, **options: Any,
) -> None:  # fmt: skip
    """What a rank does; ``place``: the disk of its node; ``begin``: a checkpoint to go on from."""
    model = made(meta=meta or folder is not None)
    torch.manual_seed(11 + rank)
    disk: dict[str, Any] = {"disk_path": out / place} if store else {}
    weights = {} if folder is None else {"weights": folder}
    strategy = HeteroOffloadStrategy(plan, block_cls="Layer", update_threads=1, **disk, **weights, **options)
    trainer = shared_model.trainer(
        out, strategy, max_steps=steps, max_epochs=-1, callbacks=[*more, Counts(out / f"ended-{rank}")]
    )  # fmt: skip
    data = torch.randint(0, 13, (12, 7), generator=torch.Generator().manual_seed(21 + rank))
    loader = DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(3 + rank))
    trainer.fit(model, loader, ckpt_path=out / place if resume else begin)
    trainer.save_checkpoint(out / "end.ckpt", weights_only=False)


def places(store: Path) -> list[list[bool]]:
    """Of each rank, and each part with frozen weights: whether the record has them in place."""
    found = []
    with sets.Stores(store) as stores:
        for _, one in stores.all:
            assert one.record is not None
            frozen = one.manifest["layout"]["frozen"]
            entries = parse(one.record.user).parts
            found.append([entries[number].in_place is not None for number in frozen])
            assert frozen
    return found


def extra_bytes(store: Path) -> int:
    """What the stores take on the disk."""
    return sum(file.stat().st_blocks * 512 for file in store.rglob("*") if file.is_file())


def trained_bytes() -> int:
    """Weights and Adam's state of what trains."""
    return sum(12 * p.numel() for p in made().parameters() if p.requires_grad)


def folder_of(root: Path, name: str, world: int, **options: Any) -> Path:
    """What as many ranks end with, in memory; made once."""
    out = root / name
    if not out.exists():
        out.mkdir()
        assert not any(run(world, partial(train, out, "host", None, store=False, **options)))
    return out


def _train_on(device: type[EmulatedDevice] | None, out: Path, plan: Any, weights: Path, rank: int) -> None:
    train(out, plan, weights, rank, **({} if device is None else {"device": device("4MiB")}))


def is_read_in_place(root: Path, weights: Path) -> dict[str, Any]:
    """Under any plan nothing of them is written, and the bits are those of ranks in memory."""
    report = {}
    content = {path: path.read_bytes() for path in weights.iterdir()}
    for world, plan, on_devices in [(2, DISK, False), (3, "host", False), (3, MIXED, False), (1, DISK, False), (2, DISK, True)]:
        name = f"{plan if isinstance(plan, str) else plan.name}{' on devices' if on_devices else ''}"
        reference, out = folder_of(root, f"reference-{world}", world), root / f"in-place-{world}-{name}"
        out.mkdir()
        call = partial(_train_on, EmulatedDevice if on_devices else None, out, plan, weights)
        assert not any(run(world, call))
        export_weights(out / "store", out / "exported.ckpt")
        wanted, got = (torch.load(path)["state_dict"] for path in (reference / "end.ckpt", out / "exported.ckpt"))
        report[f"{world}, {name}"] = {
            "same": same_end(out, reference) and all(torch.equal(wanted[key], value) for key, value in got.items()),
            "in_place": all(all(rank) for rank in places(out / "store")),
            "extra": extra_bytes(out / "store") <= 2 * trained_bytes() + world * 16 * 2**20,
            "sound": not verify._stores(out / "store").faults,
        }
    assert {path: path.read_bytes() for path in weights.iterdir()} == content, "they are never written"
    return report


def goes_on_with_other_numbers(root: Path, weights: Path) -> dict[str, Any]:
    """What one process has kept goes to three, two, one and two, with kills on the way, and stays
    in place; files of it need not be given again.
    """
    out, report = root / "moved", {}
    out.mkdir()
    assert not any(run(1, partial(train, out, "disk", weights, steps=2)))
    shutil.copytree(out, root / "first")
    bring, close, gone = "while parts come from other ranks", "before the earlier stores go", "while the earlier stores go"
    for world, plan, folder, kills in [
        (3, "disk", None, [Kill(2, bring, 3)]), (2, MIXED, weights, [Kill(1, bring, 2), Kill(0, close, 1)]),
        (1, "host", None, [Kill(0, gone, 2)]), (2, "host", weights, [Kill(-1, close, 1)]),
    ]:  # fmt: skip
        reached = 0
        for kill in [*kills, None]:
            statuses = run(world, partial(train, out, plan, folder, meta=True, resume=True, steps=2), kill)
            reached += any(map(was_killed, statuses))
            assert kill is not None or not any(statuses), f"a resume has failed: {statuses}"
        report[f"{world}, {plan if isinstance(plan, str) else plan.name}"] = {
            "killed": reached == len(kills),
            "same": same_end(out, root / "first"),
            "in_place": [all(rank) for rank in places(out / "store")] == [True] * world,
            "extra": extra_bytes(out / "store") <= 2 * trained_bytes() + world * 16 * 2**20,
        }
    return report


def is_moved_when_it_changes(root: Path, weights: Path) -> dict[str, Any]:
    """Weights that code writes move to the store of every rank."""
    report = {}
    reference = folder_of(root, "reference-2-changed", 2, more=[Changes()])
    for name, plan, store in [("disk", DISK, True), ("disk alone", DISK, False), ("host", "host", True)]:
        out = root / f"changed-{name}"
        out.mkdir()
        assert not any(run(2, partial(train, out, plan, weights, more=[Changes()], store=store)))
        moved = not store or [rank.count(False) for rank in places(out / "store")] == [2, 2]
        report[name] = {"same": same_end(out, reference), "moved": moved}
    return report


def goes_on_from_checkpoints(root: Path, weights: Path) -> dict[str, Any]:
    """One without frozen weights, which are those of the folder, and one that has other ones."""
    report = {}
    alone, changed = root / "alone", folder_of(root, "reference-2-changed", 2, more=[Changes()])
    alone.mkdir()
    assert not any(run(2, partial(train, alone, DISK, weights, store=False, exclude_frozen_parameters=True)))
    kept = torch.load(alone / "end.ckpt", weights_only=False)["state_dict"]
    report["left out"] = {"same": all(any(word in name for word in TRAINED) for name in kept)}
    for name, begin, other in [("alone", alone, folder_of(root, "reference-2", 2)), ("changed", changed, changed)]:
        reference, out = root / f"on-from-{name}", root / f"in-place-from-{name}"
        for place, plan, folder, first in [(reference, "host", None, other), (out, DISK, weights, begin)]:
            place.mkdir()
            options = {"store": folder is not None, "exclude_frozen_parameters": name == "alone"}
            assert not any(run(3, partial(train, place, plan, folder, begin=first / "end.ckpt", steps=6, **options)))
        report[name] = {
            "same": same_end(reference, out) if name == "alone" else same_end(out, reference),
            "in_place": all(map(all, places(out / "store"))) == (name == "alone"),
        }
    return report


def is_killed(root: Path, weights: Path) -> dict[str, Any]:
    """Ranks die in steps, also in those in which frozen weights have moved to the store."""
    report = {}
    for seed, (world, plan, more) in enumerate([(2, DISK, False), (3, MIXED, True), (2, DISK, True), (2, "host", True)]):
        kind = "changed" if more else "kept"
        reference = folder_of(root, f"reference-{world}-{kind}", world, more=[Changes()] if more else [])
        out, resume, reached = root / f"killed-{seed}", False, 0
        out.mkdir()
        for kill in [*shared_stores.random_kills(seed, world, 2), None]:
            statuses = run(world, partial(train, out, plan, weights, resume=resume, more=[Changes()] if more else []), kill)
            reached += any(map(was_killed, statuses))
            assert kill is not None or not any(statuses), f"a resume has failed: {statuses}"
            resume = resume or shared_stores.ended(out, world) > 1
            if not resume:
                shutil.rmtree(out / "store", ignore_errors=True)
        found = places(out / "store")
        report[f"{world}, {seed}"] = {
            "killed": reached > 0,
            "same": same_end(out, reference),
            "in_place": all(map(any, found)) if more else all(map(all, found)),
            "moved": not more or not all(map(all, found)),
        }
    return report


def is_refused_by_name(root: Path, weights: Path) -> dict[str, Any]:
    """A file that is another one ends all ranks, before anything trains and after it has begun."""
    report, out, other = {}, root / "refused", root / "other"
    out.mkdir()
    shutil.copytree(weights, other)
    assert not any(run(2, partial(train, out, "disk", other, steps=2)))
    file = sorted(other.glob("*.safetensors"))[2]
    content, status = file.read_bytes(), file.stat()

    def put(data: bytes, times: tuple[int, int] = (status.st_atime_ns, status.st_mtime_ns)) -> None:
        file.write_bytes(data)
        os.utime(file, ns=times)

    start = 8 + int.from_bytes(content[:8], "little")
    for world, what, harm in [
        (2, "its size", lambda: put(content + b"\0")),
        (3, "time of its last change", lambda: put(content, (1, 1))),
        (2, "a tensor's sample", lambda: put(content[:start] + bytes(byte ^ 1 for byte in content[start:]))),
        (3, "cannot be read", file.unlink),
    ]:
        harm()
        statuses = run(world, partial(train, out, "host", None, meta=True, resume=True))
        said = [FAILED.with_name(f"{FAILED.name}-{rank}").read_text() for rank in range(world)]
        named = all(file.name in text for text in said) and any(what in text for text in said)
        report[what] = {"refused": all(statuses) and named}
        put(content)
    assert not any(run(3, partial(train, out, "host", None, meta=True, resume=True, steps=2)))
    return report


def is_read_on_nodes(root: Path, weights: Path) -> dict[str, Any]:
    """Two nodes see one folder, or have one each; those with other weights are refused."""
    reference = folder_of(root, "reference-4", 4)
    out, copy, apart = root / "nodes", root / "copy", root / "apart"
    out.mkdir()
    shutil.copytree(weights, copy)
    assert not any(run(4, lambda rank: train(out, "disk", (weights, copy)[rank // 2], rank, place=f"s-{rank // 2}"), nodes=2))
    in_place = [all(rank) for node in (0, 1) for rank in places(out / f"s-{node}")] == [True] * 4
    report = {"each has the folder": {"same": same_end(out, reference), "in_place": in_place}}
    shutil.copytree(weights, apart)
    file = sorted(apart.glob("*.safetensors"))[0]
    data = file.read_bytes()
    file.write_bytes(data[:-4096] + bytes(byte ^ 1 for byte in data[-4096:]))
    statuses = run(4, lambda rank: train(out, "disk", (weights, apart)[rank // 2], rank, store=False), nodes=2)
    said = [FAILED.with_name(f"{FAILED.name}-{rank}").read_text() for rank in range(4)]
    refused = all(statuses) and all("finds other files with other weights" in text for text in said)
    return report | {"other weights": {"refused": refused}}


def main(root: Path) -> None:
    """Runs all cases, and prints what became of them."""
    os.chdir(root)
    weights = write(root / "weights")
    cases = (
        is_read_in_place,
        is_moved_when_it_changes,
        goes_on_from_checkpoints,
        goes_on_with_other_numbers,
        is_killed,
        is_refused_by_name,
        is_read_on_nodes,
    )
    print(json.dumps({case.__name__: case(root, weights) for case in cases if not sys.argv[2:] or case.__name__ in sys.argv[2:]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
