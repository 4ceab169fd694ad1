"""Where parameters start in memory and in files; and stores of version 1, in which they started
elsewhere.
"""

from __future__ import annotations

import shutil
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import resuming
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, outcome
from support.resuming import offload
from support.strategies import on_device
from torch import nn

from lightning_hetero import export_weights
from lightning_hetero.convert.safetensors import WeightFiles
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.manifest import alignment_in
from lightning_hetero.store.format.record import parse
from lightning_hetero.store.live.blocks import bind
from lightning_hetero.store.partition import partition

OLD = Path(__file__).parents[1] / "data" / "stores-version-1.tar.xz"
STEPS, KEPT = 5, 2
SHAPE = Shape(layers=2, width=2, frozen=(0,))


class All(LitModel):
    def configure_optimizers(self) -> Any:
        return self.recipe.optimizer(list(self.parameters()))


# The file has two stores after two steps on plan "disk", and ordinary checkpoints of the same
# steps: another machine may compute other bits. In ``members`` the optimizer has the frozen block,
# which has two slots and state.
STORES: dict[str, tuple[type[LitModel], str]] = {"members": (All, "32-true"), "halves": (LitModel, "bf16-true")}


def fit(root: Path, strategy: Any, name: str, *callbacks: pl.Callback, **options: Any) -> Outcome:
    module_class, precision = STORES[name]
    recipe = Recipe(steps=STEPS, shape=SHAPE, precision=precision)
    return resuming.fit(root, strategy, recipe, module_class, *callbacks, batches=3, **options)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """What the last commit with version 1 has written."""
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old"


def slots(store: Path) -> dict[str, int]:
    """Of the parts of the frozen block: the number of their files, by their first names."""
    with StoreFiles(store) as files:
        assert files.record is not None
        rows = zip(files.manifest["layout"]["parts"], parse(files.record.user).parts, strict=True)
        homes = {names[0]: entry.weights or entry.home for names, entry in rows if "blocks.0." in names[0]}
    assert all(homes.values())
    return {name: sum((store / f"block-{home.id:05d}.{slot}").exists() for slot in "ab") for name, home in homes.items() if home}


class BeginsWith(pl.Callback):
    """Compares model and optimizer with an ordinary checkpoint of the same step."""

    def __init__(self, path: Path) -> None:
        self.kept = torch.load(path, weights_only=False)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        assert trainer.global_step == KEPT
        assert_same(outcome(trainer, pl_module), Outcome([], self.kept["state_dict"], self.kept["optimizer_states"]))


@pytest.mark.parametrize("name", [*STORES])
def test_a_store_of_version_1_is_resumed(name: str, old: Path, tmp_path: Path) -> None:
    assert set(slots(old / name).values()) == {2 if name == "members" else 1}
    found = []
    for number, plan in enumerate(("disk", "host", on_device)):
        store = tmp_path / str(number)
        shutil.copytree(old / name, store)
        begins = BeginsWith(old / f"{name}.ckpt")
        fit(tmp_path, offload(plan, store, verify_digests=True), name, begins, store=store, stop=KEPT + 1)
        assert set(slots(store).values()) == {1}
        assert alignment_in(store) == 0
        found.append(fit(tmp_path, offload("disk", store, verify_digests=True), name, store=store))
    assert len(found[0].losses) == STEPS - KEPT - 1
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.parametrize("name", [*STORES])
def test_weights_of_a_store_of_version_1_are_exported(name: str, old: Path, tmp_path: Path) -> None:
    export_weights(old / name, tmp_path / "weights")
    found = WeightFiles.open(tmp_path / "weights").tensors
    kept = torch.load(old / f"{name}.ckpt", weights_only=False)["state_dict"]
    assert found.keys() == kept.keys()
    for key, value in kept.items():
        assert torch.equal(found[key].read(), value), key


class Kinds(nn.Module):
    """Parameters of sizes that no alignment divides."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.params = nn.ParameterList(
            nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=False) for size in (1, 3, 17, 0, 100, 64)
        )


@pytest.mark.parametrize("alignment", [0, 64, 512])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_each_parameter_starts_at_a_multiple_of_the_alignment(dtype: torch.dtype, alignment: int) -> None:
    root = Kinds(dtype)
    (block,) = bind(root, partition(root), alignment_bytes=alignment)
    (part,) = block.parts
    assert all(offset % 16 == 0 for offset in part.offsets)  # the kernels' split points
    starts = [p.data_ptr() for p in part.params if p.numel()]
    assert starts == [part.arena.address + o * dtype.itemsize for o, p in zip(part.offsets, part.params, strict=True) if p.numel()]
    assert all(start % max(alignment, 16) == 0 for start in starts)
    gaps = [b - a - p.numel() for a, b, p in zip(part.offsets, [*part.offsets[1:], part.num_elements], part.params, strict=True)]
    assert all(0 <= gap < max(16, alignment // dtype.itemsize) for gap in gaps), "the padding is not wasted"


class Starts(pl.Callback):
    """Where the parameters are while the model computes."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.starts: set[int] = set()
        for block in pl_module.model.blocks:
            block.register_forward_hook(lambda module, *_: self.starts.update(p.data_ptr() for p in module.parameters()))


@pytest.mark.parametrize(
    ("plan", "alignment"),
    [("host", 64), ("disk", 64), (on_device, 512), (partial(on_device, "resident"), 512)],
    ids=["host", "disk", "device", "resident"],
)
def test_they_start_there_while_the_model_computes(plan: Any, alignment: int, tmp_path: Path) -> None:
    starts = Starts()
    fit(tmp_path, offload(plan, tmp_path / "store"), "halves", starts, stop=2)
    assert starts.starts
    assert all(start % alignment == 0 for start in starts.starts)
    assert alignment_in(tmp_path / "store") == alignment
