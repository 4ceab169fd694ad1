"""Blocks that are frozen but for few parameters: what moves in a step, what is refused, and stores
of undivided blocks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import BaseFinetuning
from support.models import LitModel, Recipe, Shape, assert_same, run
from support.resuming import after, offload, train
from torch import Tensor

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier
from lightning_hetero.errors import OffloadedAccessError
from lightning_hetero.ir.plan import TRAINED
from lightning_hetero.ir.schedule import OpKind
from lightning_hetero.store import partition
from lightning_hetero.strategies import HeteroOffloadStrategy

LAYERS = 4
RECIPE = Recipe(shape=Shape(layers=LAYERS, few=True), steps=4)
FROZEN_BYTES = 3 * 4096  # weights of the frozen part of a block, in whole pages


def streams(**options: Any) -> Plan:
    """Frozen weights on disk, all else in memory."""
    rows = (BlockPlan(name=f"*{TRAINED}"), BlockPlan(name="model.blocks.*", weights=Tier.DISK), BlockPlan(name="*"))
    return Plan(name="streams", blocks=rows, **options)


class Watched(pl.Callback):
    """The bytes that the engine has read and written when each step began, and the ops of the last
    one.
    """

    def __init__(self) -> None:
        self.read: list[int] = []
        self.written: list[int] = []
        self.ops: list[Any] = []
        self.names: list[str] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        session: Any = trainer.strategy.session  # type: ignore[attr-defined]
        session.drain()
        stats = session.store.stats()
        self.read.append(stats.bytes_read)
        self.written.append(stats.bytes_written)
        frozen = [b for b in session.executor.model.blocks if b.name.startswith("model.blocks") and not b.pinned]
        assert [b.weight_bytes for b in frozen] == [FROZEN_BYTES] * LAYERS
        assert not any(b.gradient_bytes or b.state_bytes or b.num_trainable_params for b in frozen)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        executor: Any = trainer.strategy.session.executor  # type: ignore[attr-defined]
        self.ops = list(executor.schedule.ops)
        self.names = [block.name for block in executor.blocks]


@pytest.mark.parametrize("kept", [1, 3])
def test_a_step_reads_frozen_weights_twice_and_writes_none(kept: int, tmp_path: Path) -> None:
    """The cache keeps ``kept`` blocks where forward turns into backward, and backward into the next
    forward.
    """
    watched = Watched()
    strategy = HeteroOffloadStrategy(streams(host_cache_bytes=kept * FROZEN_BYTES), disk_path=tmp_path / "store", durability="none")
    run(RECIPE, strategy, tmp_path, callbacks=[watched])
    assert watched.read[-1] - watched.read[-2] == 2 * (LAYERS - kept) * FROZEN_BYTES
    assert watched.written[-1] == watched.written[-2]
    kinds = [(op.kind, watched.names[op.block]) for op in watched.ops]
    frozen = {kind for kind, name in kinds if name.startswith("model.blocks") and not name.endswith(TRAINED)}
    assert frozen == {OpKind.FETCH, OpKind.RELEASE}
    assert [name for kind, name in kinds if kind is OpKind.UPDATE and name.endswith(TRAINED)] == [
        f"model.blocks.{i}:trained" for i in reversed(range(LAYERS))
    ]


class Leaks(LitModel):
    """The loss has a tensor of a block that the block does not return."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        found: list[Tensor] = []
        block: Any = self.model.blocks[1]
        handle = block.norm.register_forward_hook(lambda module, args, output: found.append(output))
        super().training_step(batch, batch_idx)
        handle.remove()
        return found[0].square().sum()


def test_a_graph_that_leaves_a_frozen_block_otherwise_than_by_its_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OffloadedAccessError, match=r"block 'model.blocks.1' has its weights on disk"):
        run(RECIPE, HeteroOffloadStrategy(streams(host_cache_bytes=1)), tmp_path, module_class=Leaks)


class SetsFree(BaseFinetuning):
    """Trains norms alone at first, a whole block from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.blocks[1], optimizer, lr=1e-3)


@pytest.mark.parametrize("kind", ["host", "disk", "device"])
def test_a_frozen_rest_that_is_set_free_trains(kind: str, tmp_path: Path) -> None:
    def fit(strategy: Any) -> Any:
        return run(replace(RECIPE, steps=12), strategy, tmp_path, callbacks=[SetsFree()], limit_train_batches=4)

    device = EmulatedDevice(memory="16MiB", seed=2) if kind == "device" else None
    assert_same(fit(HeteroOffloadStrategy("host" if kind == "device" else kind, device=device)), fit("auto"))


@pytest.mark.parametrize("plan", ["host", "disk"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_store_of_undivided_blocks_is_resumed(
    plan: str, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier builds wrote such stores."""
    recipe = Recipe(shape=Shape(layers=3, few=True, odd=True), steps=6, accumulate=accumulate, groups=True)
    expected = train(tmp_path, "auto", recipe)
    with monkeypatch.context() as earlier:
        earlier.setattr(partition, "is_divided", lambda num_trained, frozen_bytes: False)
        train(tmp_path, offload(plan, tmp_path / "store"), recipe, stop=3)
    got = train(tmp_path, offload(plan, tmp_path / "store"), recipe, store=tmp_path / "store")
    assert_same(got, after(expected, len(got.losses)))
