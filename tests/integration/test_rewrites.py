"""Kept steps whose batches write blocks several times, or whose weights change while the last one
is on its way to the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from support.recipes import MIXED
from support.resuming import Ends
from support.twofold import train_twofold
from torch import Tensor

from lightning_hetero._native import F32, U8, Arena, Engine, NativePart, PartGeometry
from lightning_hetero.handles.offloaded_parameter import OffloadedParameter
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.pins import pins
from lightning_hetero.strategies import HeteroOffloadStrategy


@pytest.mark.parametrize("plan", ["disk", "host", MIXED], ids=["disk", "host", "mixed"])
def test_a_step_of_two_optimizers_is_one_record(plan: Any, tmp_path: Path) -> None:
    """A record in the middle of a step would stand for none."""
    records = []
    for steps in (2, 5):
        store = tmp_path / str(steps)
        train_twofold(tmp_path, HeteroOffloadStrategy(plan, disk_path=store), Recipe(steps=steps))
        with StoreFiles(store) as files:
            assert files.record is not None
            records.append(files.record.sequence)
        assert not pins(store)
    assert records[1] - records[0] == 3


class Gate:
    """Lets no mirror begin to be written while it is shut."""

    def __init__(self) -> None:
        self._arena = Arena(4096)
        geometry = PartGeometry(
            id=0, weight_dtype=F32, num_elements=16, num_state=2, weights_on_disk_file=False, state_on_disk_file=False,
            chunk_elements=4096,
        )  # fmt: skip
        self._block = NativePart(None, geometry, self._arena.address)
        self._engine: Engine | None = None
        self._tickets: list[Any] = []
        self.is_open = threading.Event()
        self.shuts = False

    def before(self, engine: Engine) -> list[Any]:
        """What a mirror that is submitted now waits for: an update that nobody arms."""
        if not self.shuts:
            return []
        if not self._tickets:
            self._engine = engine
            self._tickets.append(engine.open_update(self._block, weights_resident=True, speculative=False, priority=0, after=[]))
        return list(self._tickets)

    def opens_soon(self) -> None:
        """Somebody else opens it, while whoever called waits."""
        assert self._tickets, "no mirror waits"
        threading.Timer(0.2, self.open).start()

    def open(self) -> None:
        assert self._engine is not None
        self.shuts = False
        self.is_open.set()
        self._engine.cancel_update(self._tickets[0])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made, store = Gate(), Engine.store

    def late(engine: Engine, block: NativePart, patches: Any, *, after: Any = (), **options: Any) -> Any:
        held = made.before(engine) if block.geometry.weight_dtype == U8 else []
        return store(engine, block, patches, after=[*after, *held], **options)

    monkeypatch.setattr(Engine, "store", late)
    yield made
    assert not made.shuts, "it was never opened"


class At(pl.Callback):
    def __init__(self, step: int, call: Callable[[Any], None]) -> None:
        self.step, self.call = step, call

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.call(module)


class Reads(pl.Callback):
    """Makes all parameters that live in memory ordinary ones, before the step is kept."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def fit(
    root: Path,
    strategy: Any,
    *callbacks: pl.Callback,
    module_class: type[LitModel] = LitModel,
    store: Path | None = None,
    frozen: tuple[int, ...] = (),
) -> Outcome:
    torch.manual_seed(7)
    module = module_class(Recipe(shape=Shape(layers=2, frozen=frozen)))
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=5, limit_val_batches=0, default_root_dir=root, callbacks=[Reads(), *callbacks]
    )
    trainer.fit(module, data(), ckpt_path=None if store is None else str(store))
    return outcome(trainer, module)


def halve(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)


WRITES: dict[str, Callable[[Any], None]] = {
    "in place": halve,
    "data": lambda module: module.model.head.weight.data.mul_(0.5),
    "a view": lambda module: module.model.head.weight.detach()[1:3].fill_(0.25),
    "a state_dict": lambda module: module.load_state_dict({k: v.clone() * 2 for k, v in module.state_dict().items()}),
}


@pytest.mark.parametrize("write", WRITES)
def test_weights_that_change_between_batches_wait_for_the_step_before(write: str, gate: Gate, tmp_path: Path) -> None:
    expected = fit(tmp_path, "auto", At(2, WRITES[write]))
    store = tmp_path / "store"

    def change(module: Any) -> None:
        gate.opens_soon()
        WRITES[write](module)
        assert gate.is_open.is_set()  # else what was written would be a part of the step before
        raise Ends

    def shut(_: Any) -> None:
        gate.shuts = True

    with pytest.raises(Ends):
        fit(tmp_path, HeteroOffloadStrategy("host", disk_path=store, verify_digests=True), At(1, shut), At(2, change))
    got = fit(tmp_path, HeteroOffloadStrategy("host", disk_path=store, verify_digests=True), At(2, WRITES[write]), store=store)
    expected.losses = expected.losses[2:]
    assert_same(got, expected)


def test_frozen_weights_that_are_written_through_the_door_are_in_the_next_step(gate: Gate, tmp_path: Path) -> None:
    store = tmp_path / "store"

    def halve_frozen(module: Any) -> None:
        with torch.no_grad():
            module.model.blocks[0].up.weight.mul_(0.5)

    def quarter(module: Any) -> None:
        module.model.blocks[0].up.weight.data.mul_(0.25)

    def ends(_: Any) -> None:
        raise Ends

    def shut(module: Any) -> None:
        halve_frozen(module)
        gate.shuts = True

    def behind_the_door(module: Any) -> None:
        assert type(module.model.blocks[0].up.weight) is OffloadedParameter
        gate.opens_soon()
        quarter(module)

    expected = fit(tmp_path, "auto", At(1, halve_frozen), At(2, quarter), frozen=(0,))
    callbacks = At(1, shut), At(2, behind_the_door), At(3, ends)
    with pytest.raises(Ends):
        fit(tmp_path, HeteroOffloadStrategy("host", disk_path=store, verify_digests=True), *callbacks, frozen=(0,))
    got = fit(tmp_path, HeteroOffloadStrategy("host", disk_path=store, verify_digests=True), store=store, frozen=(0,))
    expected.losses = expected.losses[3:]
    assert_same(got, expected)


class Renorms(LitModel):
    """Its embedding is scaled in forward."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.embed.max_norm = 0.5


class Clamps(LitModel):
    """A block changes its own weights as it begins."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.blocks[1].register_forward_pre_hook(_clamp)


def _clamp(block: Any, _: Any) -> None:
    with torch.no_grad():
        block.up.weight.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("module_class", [Renorms, Clamps])
def test_a_block_that_changes_its_weights_in_forward_waits_before_it_begins(
    module_class: type[LitModel], gate: Gate, tmp_path: Path
) -> None:
    expected = fit(tmp_path, "auto", module_class=module_class)

    def shut(_: Any) -> None:
        gate.shuts = True

    class Looks(module_class):  # type: ignore[valid-type, misc]
        def loss(self, batch: list[Tensor]) -> Tensor:
            loss = super().loss(batch)
            assert gate.is_open.is_set() or self.trainer.global_step < 2
            return loss  # type: ignore[no-any-return]

    strategy = HeteroOffloadStrategy("host", disk_path=tmp_path / "store", verify_digests=True)
    got = fit(tmp_path, strategy, At(1, shut), At(2, lambda _: gate.opens_soon()), module_class=Looks)
    assert_same(got, expected)
