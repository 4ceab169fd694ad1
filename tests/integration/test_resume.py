"""``ckpt_path`` is a store: training goes on from its last step as if nothing had happened, bit for
bit.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.resuming import BATCHES, RECIPE, Ends, EndsAt, Model, after, offload, train
from support.strategies import on_device
from torch import Tensor, nn

from lightning_hetero import EmulatedDevice
from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier, UpdateLane
from lightning_hetero.ir.schedule import Op, OpKind
from lightning_hetero.lanes import EmulatedLanes
from lightning_hetero.lanes.op import QueuedOp
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.stored_model import block_names
from lightning_hetero.strategies import HeteroOffloadStrategy

MIXED = Plan(
    name="mixed",
    blocks=(
        BlockPlan(name="model.blocks.0", weights=Tier.HOST, state=Tier.DISK),
        BlockPlan(name="model.blocks.*", weights=Tier.DISK, state=Tier.HOST),
        BlockPlan(name="*", weights=Tier.HOST, state=Tier.HOST),
    ),
)


DEVICE = on_device
DEVICE_RESIDENT = partial(on_device, "resident")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("plain"), "auto", RECIPE)


@pytest.mark.parametrize(
    ("first", "second", "stop"),
    [
        ("disk", "disk", 1), ("disk", "host", 6), ("host", "disk", 4), (MIXED, MIXED, 7), ("resident", MIXED, 9),
        (DEVICE, DEVICE, 6), (DEVICE, "host", 5), ("disk", DEVICE_RESIDENT, 7), (DEVICE_RESIDENT, DEVICE, 3),
    ],
    ids=[
        "disk", "disk-host", "host-disk-at-the-end-of-an-epoch", "mixed", "resident-mixed",
        "device", "device-host", "disk-device", "devices",
    ],
)  # fmt: skip
def test_it_continues_bit_for_bit_also_under_another_plan(
    tmp_path: Path, plain: Outcome, first: Any, second: Any, stop: int
) -> None:
    store = tmp_path / "store"
    before = train(tmp_path, offload(first, store, verify_digests=True), RECIPE, stop=stop)
    got = train(tmp_path, offload(second, store, verify_digests=True), RECIPE, store=store)
    assert_same(got, after(plain, len(got.losses)))
    validated = stop // BATCHES - (stop % BATCHES == 0)  # what followed the step itself had not begun
    assert len(got.losses) == len(plain.losses) - stop - 2 * validated
    assert len(before.losses) == stop + 2 * (stop // BATCHES)


RENEWED = (
    BlockPlan(name="model.blocks.0", weights=Tier.DISK, state=Tier.DISK),
    BlockPlan(name="model.blocks.*", weights=Tier.DEVICE),
    BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE),
)


BORROWED = replace(RENEWED[2], name="model.blocks.1", weights=Tier.HOST, state=Tier.HOST)


@pytest.mark.parametrize(("every", "rows"), [(1, RENEWED), (3, (BORROWED, *RENEWED))], ids=["each", "some"])
def test_a_device_continues_while_a_step_is_kept(
    every: int, rows: tuple[BlockPlan, ...], tmp_path: Path, plain: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights on their way up and transfers to the disk are waited for by others: a record needs
    what it names to be under way.
    """
    left: list[Op] = []
    handed, handover, work = Executor.handed, Executor.handover, EmulatedLanes._work
    may_go = threading.Event()  # uploads after an optimizer's step, once it is kept: however late that is

    def held(executor: Executor, *args: Any) -> None:
        may_go.clear()
        handover(executor, *args)

    def late(lanes: EmulatedLanes, queued: QueuedOp) -> Any:
        assert queued.op.kind is not OpKind.UPLOAD or may_go.wait(60)
        return work(lanes, queued)

    @contextmanager
    def watched(executor: Executor, *, whole: bool) -> Iterator[None]:
        with handed(executor, whole=whole):
            lanes = executor.lanes
            now = [end.op for end in list(lanes._submitted) if not end.ended()] if isinstance(lanes, EmulatedLanes) else []
            assert not [op for op in now if op.kind is OpKind.GRAD or (whole and op.kind is OpKind.SWAP_OUT)]
            left.extend(now)
            yield
        may_go.set()

    may_go.set()
    monkeypatch.setattr(Executor, "handed", watched)
    monkeypatch.setattr(Executor, "handover", held)
    monkeypatch.setattr(EmulatedLanes, "_work", late)
    options = {"disk_path": tmp_path / "store", "keep_every": every, "verify_digests": True}
    for stop in (6, 9):
        device = EmulatedDevice(memory="16MiB", seed=stop, h2d_bytes_per_s=1e6, d2h_bytes_per_s=2e6, disk_bytes_per_s=2e6)
        strategy = HeteroOffloadStrategy(Plan(name="mixed", blocks=rows, priority=False), device=device, **options)
        train(tmp_path, strategy, RECIPE, stop=stop, **({} if stop == 6 else {"store": options["disk_path"]}))
    got = train(tmp_path, HeteroOffloadStrategy("host", **options), RECIPE, store=options["disk_path"])
    assert_same(got, after(plain, len(got.losses)))
    assert OpKind.UPLOAD in {op.kind for op in left}


def test_it_continues_again_and_again(tmp_path: Path, plain: Outcome) -> None:
    store = tmp_path / "store"
    train(tmp_path, offload("disk", store), RECIPE, stop=2)
    for stop in (3, 4, 5, 8, 10):
        train(tmp_path, offload("disk", store), RECIPE, stop=stop, store=store)
    got = train(tmp_path, offload("disk", store), RECIPE, store=store)
    assert_same(got, after(plain, len(got.losses)))
    assert len(train(tmp_path, offload("disk", store), RECIPE, store=store).losses) == 0  # all steps are done


def test_numbers_of_files_are_used_again(tmp_path: Path, plain: Outcome) -> None:
    """A record has so many places: a store that moves with every resume must not run out of
    them.
    """
    store, largest = tmp_path / "store", list[int]()
    before: dict[str, Path] = {}
    for stop, plan in enumerate(("host", "disk", MIXED) * 3, 2):
        train(tmp_path, offload(plan, store), RECIPE, stop=stop, **before)
        before = {"store": store}
        with StoreFiles(store) as files:
            assert files.record is not None
            largest.append(max(int(block.file.partition("-")[2][:5]) for block in files.record.blocks))
    assert max(largest[6:]) <= max(largest[3:6])
    got = train(tmp_path, offload("disk", store), RECIPE, **before)
    assert_same(got, after(plain, len(got.losses)))


@pytest.mark.parametrize("limits", [{"max_steps": 9, "max_epochs": -1}, {"max_steps": -1, "max_epochs": 2}], ids=str)
def test_it_continues_at_every_step_around_the_end_of_an_epoch_without_validation(tmp_path: Path, limits: dict[str, int]) -> None:
    recipe, store = Recipe(shape=Shape(layers=1, dropout=0.1)), tmp_path / "store"
    plain = train(tmp_path, "auto", recipe, **limits)
    before: dict[str, Path] = {}
    for stop in (BATCHES - 1, BATCHES, BATCHES + 1):
        begun = train(tmp_path, offload("disk", store), recipe, stop=stop, **before, **limits)
        before = {"store": store}
        assert begun.losses == plain.losses[stop - len(begun.losses) : stop]
    got = train(tmp_path, offload("disk", store), recipe, **before, **limits)
    assert_same(got, after(plain, len(plain.losses) - BATCHES - 1))


def test_accumulated_batches_without_a_step_are_done_again(tmp_path: Path) -> None:
    recipe = Recipe(steps=4, accumulate=2, shape=Shape(dropout=0.1))
    plain = train(tmp_path, "auto", recipe)
    store = tmp_path / "store"
    train(tmp_path, offload("disk", store), recipe, stop=2)
    got = train(tmp_path, offload("disk", store), recipe, store=store)
    assert_same(got, after(plain, 4))


@pytest.mark.parametrize(("first", "second"), [("host", "disk"), (DEVICE, DEVICE_RESIDENT)], ids=["host", "device"])
def test_16_bit_weights_keep_their_masters(tmp_path: Path, first: Any, second: Any) -> None:
    recipe = Recipe(steps=4, precision="bf16-true")
    whole = train(tmp_path, offload("host", tmp_path / "whole"), recipe)
    store = tmp_path / "store"
    train(tmp_path, offload(first, store), recipe, stop=2)
    assert_same(train(tmp_path, offload(second, store), recipe, store=store), after(whole, 2))


OTHERS = {
    "sgd": (lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), "32-true"),
    "nadam": (lambda groups: torch.optim.NAdam(groups, lr=3e-3), "32-true"),
    "adagrad": (lambda groups: torch.optim.Adagrad(groups, lr=1e-2), "32-true"),  # has state before its first step
    "amsgrad-fused": (lambda groups: torch.optim.AdamW(groups, lr=3e-3, amsgrad=True, fused=True), "32-true"),
    "sgd-fused": (lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True), "32-true"),
    "adagrad-bf16": (lambda groups: torch.optim.Adagrad(groups, lr=1e-2), "bf16-true"),
    "rmsprop-bf16": (lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9), "bf16-true"),
}


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("sgd", "host", "disk"),
        ("nadam", "disk", "host"),
        ("adagrad", MIXED, MIXED),
        ("adagrad-bf16", MIXED, "host"),
        ("amsgrad-fused", "host", MIXED),
        ("sgd-fused", "resident", "disk"),
        ("rmsprop-bf16", "resident", MIXED),
    ],
)
def test_state_that_only_its_optimizer_knows_is_kept(tmp_path: Path, name: str, first: Any, second: Any) -> None:
    optimizer, precision = OTHERS[name]
    recipe = Recipe(steps=7, optimizer=optimizer, precision=precision, clip=1.0, shape=Shape(dropout=0.1, frozen=(1,)))
    reference = "auto" if precision == "32-true" else HeteroOffloadStrategy(plan=first)
    plain = train(tmp_path, reference, recipe)
    store = tmp_path / "store"
    train(tmp_path, offload(first, store, verify_digests=True), recipe, stop=2)
    train(tmp_path, offload(second, store, verify_digests=True), recipe, stop=4, store=store)
    with StoreFiles(store) as files:
        assert list(files.check()) == []
        assert sum(name.endswith(" (state)") for name in block_names(files).values()) >= 3
    got = train(tmp_path, offload(first, store, verify_digests=True), recipe, store=store)
    assert_same(got, after(plain, 3))


@pytest.mark.parametrize(("first", "second"), [("disk", "disk"), ("disk", "host"), ("host", MIXED)])
def test_state_keeps_the_memory_order_of_its_parameter(tmp_path: Path, first: Any, second: Any) -> None:
    """Fused kernels go through a transposed parameter and its state as they lie in memory, whatever
    their strides.
    """
    fused = partial(torch.optim.AdamW, lr=3e-3, fused=True)
    recipe = Recipe(steps=6, optimizer=fused, precision="64-true", shape=Shape(odd=True))
    plain = train(tmp_path, "auto", recipe)
    assert_same(train(tmp_path, offload(first, tmp_path / "whole"), recipe), plain)
    store = tmp_path / "store"
    train(tmp_path, offload(first, store), recipe, stop=3)
    assert_same(train(tmp_path, offload(second, store), recipe, store=store), after(plain, 3))


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_step_is_one_record(tmp_path: Path, optimizer: str) -> None:
    """A record in the middle of a step would stand for none: a run that is killed after it could
    not go on.
    """
    records = []
    for steps in (2, 5):
        store = tmp_path / str(steps)
        recipe = Recipe(steps=steps, clip=1.0, optimizer=lambda groups: getattr(torch.optim, optimizer)(groups, lr=0.01))
        run(recipe, HeteroOffloadStrategy("disk", disk_path=store), tmp_path)
        with StoreFiles(store) as files:
            assert files.record is not None
            records.append(files.record.sequence)
    assert records[1] - records[0] == 3


def test_a_checkpoint_of_links_has_state_that_only_its_optimizer_knows(tmp_path: Path) -> None:
    recipe = Recipe(steps=4, optimizer=OTHERS["sgd"][0])
    plain = train(tmp_path, "auto", recipe)
    kept = tmp_path / "kept.ckpt"

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(kept)

    torch.manual_seed(7)
    module = Model(recipe)
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=offload("disk", tmp_path / "store", link_checkpoints=True), max_steps=4, default_root_dir=tmp_path,
        limit_val_batches=0, callbacks=[Saves()],
    )  # fmt: skip
    trainer.fit(module, data(BATCHES))
    assert_same(outcome(trainer, module), plain)
    assert_same(train(tmp_path, offload("host", tmp_path / "other"), recipe, store=kept), after(plain, 2))


def test_nothing_is_unpickled(tmp_path: Path, plain: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    train(tmp_path, offload(MIXED, store), RECIPE, stop=3)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a store has no pickle")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    got = train(tmp_path, offload("disk", store), RECIPE, store=store)
    assert_same(got, after(plain, len(got.losses)))


def test_it_continues_with_a_smaller_budget(tmp_path: Path) -> None:
    recipe = Recipe(steps=4, shape=Shape(layers=6, width=64))
    plain = train(tmp_path, "auto", recipe)
    store = tmp_path / "store"
    with pytest.raises(OutOfMemoryBudgetError) as refusal:
        train(tmp_path, HeteroOffloadStrategy(plan="disk", host_memory="1B"), recipe)
    train(tmp_path, offload("disk", store), recipe, stop=2)
    got = train(tmp_path, offload("disk", store, host_memory=refusal.value.needed_bytes), recipe, store=store)
    assert_same(got, after(plain, 2))


def test_evaluation_leaves_the_store_alone(tmp_path: Path, plain: Outcome) -> None:
    store = tmp_path / "store"
    train(tmp_path, offload("disk", store), RECIPE, stop=5)
    torch.manual_seed(7)
    trainer = quiet_trainer(strategy=offload("disk", store), default_root_dir=tmp_path)
    trainer.validate(Model(RECIPE), data(2, seed=1), verbose=False)
    got = train(tmp_path, offload("disk", store), RECIPE, store=store)
    assert_same(got, after(plain, len(got.losses)))


def contents(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.iterdir()}


@pytest.mark.parametrize("plan", ["disk", MIXED], ids=["disk", "mixed"])
def test_a_checkpoint_of_links_stays_what_it_was_and_is_resumed(tmp_path: Path, plain: Outcome, plan: Any) -> None:
    store, kept, elsewhere = tmp_path / "store", tmp_path / "kept" / "step=5.ckpt", tmp_path / "elsewhere"

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(kept)

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                slots = [path for path in kept.iterdir() if path.name.startswith("block")]
                assert slots
                assert all(path.samefile(store / path.name) for path in slots)
                self.before = contents(kept)

    saves = Saves()
    torch.manual_seed(7)
    module = Model(RECIPE)
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=offload(plan, store, link_checkpoints=True, verify_digests=True),
        max_steps=RECIPE.steps, gradient_clip_val=RECIPE.clip,
        default_root_dir=tmp_path, limit_val_batches=2, callbacks=[saves],
    )  # fmt: skip
    trainer.fit(module, data(BATCHES), data(2, seed=1))
    assert_same(outcome(trainer, module), plain)
    assert contents(kept) == saves.before
    for _ in range(2):  # it may be used again and again
        got = train(tmp_path, offload("disk", elsewhere, verify_digests=True), RECIPE, store=kept)
        assert_same(got, after(plain, len(got.losses)))
        assert len(got.losses) == len(plain.losses) - 5 - 2
        assert contents(kept) == saves.before
        for path in elsewhere.iterdir():
            path.unlink()


class Odd(pl.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"odd": nn.Identity()}


class Counts(pl.Callback):
    def __init__(self) -> None:
        self.seen: Any = (0, torch.zeros(2, dtype=torch.float64))

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen = (self.seen[0] + 1, self.seen[1] + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_callbacks_and_hyper_parameters_travel(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = tmp_path / "store"
    loaded: list[dict[str, Any]] = []

    class Module(LitModel):
        def __init__(self, recipe: Recipe, rate: float = 0.5) -> None:
            super().__init__(recipe)
            self.save_hyperparameters("rate")

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            loaded.append(copy.deepcopy(checkpoint["hyper_parameters"]))

    def run(steps: int, ckpt_path: str | None = None) -> Counts:
        counts = Counts()
        trainer = quiet_trainer(
            strategy=offload("disk", store),
            max_steps=steps,
            limit_val_batches=0,
            default_root_dir=tmp_path,
            callbacks=[Odd(), counts],
        )
        trainer.fit(Module(RECIPE), data(BATCHES), ckpt_path=ckpt_path)
        return counts

    run(2)
    assert "the state of callback Odd" in caplog.text
    assert "not kept" in caplog.text
    count, vector = run(5, str(store)).seen
    assert count == 5
    assert torch.equal(vector, torch.full((2,), 5.0, dtype=torch.float64))
    assert loaded == [{"rate": 0.5}]


def test_weights_that_a_callback_changes_after_the_step_are_in_its_record(tmp_path: Path) -> None:
    class Clamps(LitModel):
        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                for p in self.parameters():
                    p.clamp_(-0.05, 0.05)

    def run(strategy: Any, steps: int, ckpt_path: str | None = None) -> dict[str, Tensor]:
        torch.manual_seed(7)
        module = Clamps(Recipe(shape=Shape(layers=2)))
        trainer = quiet_trainer(strategy=strategy, max_steps=steps, limit_val_batches=0, default_root_dir=tmp_path)
        trainer.fit(module, data(BATCHES), ckpt_path=ckpt_path)
        return {name: value.clone() for name, value in module.state_dict().items()}

    expected = run("auto", 4)
    store = tmp_path / "store"
    run(offload("disk", store), 2)
    got = run(offload("disk", store), 4, str(store))
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_averaging_of_weights_continues_within_an_epoch(tmp_path: Path) -> None:
    """Its callback makes a scheduler as an epoch begins, which a resume within the epoch does not
    see begin.
    """

    def fit(strategy: Any, *, stop: int | None = None, store: Path | None = None) -> Outcome | None:
        torch.manual_seed(7)
        module = LitModel(Recipe(shape=Shape(layers=2)))
        swa = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)
        callbacks = [swa, *([] if stop is None else [EndsAt(stop)])]
        trainer = quiet_trainer(
            strategy=strategy, max_epochs=3, limit_val_batches=0, default_root_dir=tmp_path, callbacks=callbacks
        )  # fmt: skip
        with nullcontext() if stop is None else pytest.raises(Ends):
            trainer.fit(module, data(BATCHES), ckpt_path=None if store is None else str(store))
        return outcome(trainer, module) if stop is None else None

    store = tmp_path / "store"
    fit(offload("disk", store), stop=BATCHES + 2)
    got, expected = fit(offload("host", store), store=store), fit("auto")
    assert got is not None
    assert expected is not None
    assert_same(got, after(expected, len(got.losses)))
