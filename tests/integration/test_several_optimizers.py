"""Several optimizers on the parameters of one block: parts are cut by optimizer, and the bits stay
those of plain Lightning.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.resuming import BATCHES, EndsAt, after, fitted
from support.several import MAKE, Automatic, ByTurns, Several, Together, by_hand
from support.strategies import assert_same_as_plain, least_memory, least_memory_throughout, make_strategy
from torch import nn

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.store.format import record
from lightning_hetero.strategies import HeteroOffloadStrategy

KINDS = ["resident", "host", "disk", "tight", "device_resident"]
PAIRS = [("Muon", "AdamW"), ("SGD", "AdamW"), ("AdamW", "Adam")]
SHAPE = Shape(tied=True, half_frozen=True)


def of(base: type[Several], *names: str) -> type[Several]:
    """The module with these optimizers."""
    return type(base.__name__, (base,), {"names": names})


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_two_optimizers_on_one_block(kind: str, pair: tuple[str, ...], tmp_path: Path) -> None:
    recipe = Recipe(shape=SHAPE, steps=4, clip=None)
    assert_same_as_plain(kind, partial(run, recipe, tmp_path=tmp_path, module_class=of(Several, *pair)))


@pytest.mark.parametrize("base", [Several, ByTurns])
@pytest.mark.parametrize("kind", KINDS)
def test_clipping_and_accumulation_by_hand(kind: str, base: type[Several], tmp_path: Path) -> None:
    recipe = Recipe(shape=SHAPE, steps=4, clip=0.3, accumulate=2)
    assert_same_as_plain(kind, partial(by_hand, recipe, folder=tmp_path, module_class=base))


@pytest.mark.parametrize("pair", [("AdamW", "Adam")], ids=str)
def test_two_native_optimizers_on_every_tier_of_a_device(pair: tuple[str, ...], tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(layers=5), steps=4, clip=0.3, accumulate=2)
    assert_same_as_plain("device", partial(by_hand, recipe, folder=tmp_path, module_class=of(Several, *pair)))


@pytest.mark.parametrize("pair", PAIRS[::2], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_runs_two_others(kind: str, pair: tuple[str, ...], tmp_path: Path) -> None:
    recipe = Recipe(shape=SHAPE, steps=4, clip=0.3, accumulate=2)
    assert_same_as_plain(kind, partial(run, recipe, tmp_path=tmp_path, module_class=of(Automatic, *pair)))


@pytest.mark.parametrize("pair", PAIRS[:2], ids=str)
@pytest.mark.parametrize("kind", ["host", "disk", "tight"])
def test_16_bit_weights_have_masters_with_each_optimizer(kind: str, pair: tuple[str, ...], tmp_path: Path) -> None:
    recipe = Recipe(shape=SHAPE, steps=4, precision="bf16-true")
    reference = type("Reference", (of(Several, *pair),), {"reference": True})
    expected = run(recipe, "auto", tmp_path, module_class=reference)
    train = partial(run, recipe, tmp_path=tmp_path, module_class=of(Several, *pair))
    assert_same(train(make_strategy(kind, train)), expected)


@pytest.mark.parametrize("base", [Several, Automatic])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_checkpoint_is_plain_lightnings(kind: str, base: type[Several], tmp_path: Path) -> None:
    def train(strategy: Any, path: Path | None) -> tuple[pl.Trainer, Outcome]:
        torch.manual_seed(7)
        module = base(Recipe())
        trainer = quiet_trainer(strategy=strategy, max_epochs=1 if path is None else 2, default_root_dir=tmp_path)
        trainer.fit(module, data(), ckpt_path=path, weights_only=None if path is None else True)
        return trainer, outcome(trainer, module)

    files = {}
    for name in ("auto", kind):
        trainer, _ = train("auto" if name == "auto" else HeteroOffloadStrategy(name), None)
        files[name] = tmp_path / f"{name}.ckpt"
        trainer.save_checkpoint(files[name])
    _, expected = train("auto", files["auto"])
    for path in files.values():
        assert_same(train(HeteroOffloadStrategy(kind), path)[1], expected)


# ---- resume from the store -----------------------------------------------------------------------


class Turns(ByTurns):
    """A record has no gradients."""

    drops = True


def go(
    folder: Path, strategy: Any, base: Callable[[Recipe], LitModel], *, stop: int | None = None, store: Path | None = None
) -> Outcome:
    torch.manual_seed(7)
    module = base(Recipe(shape=SHAPE, clip=0.3))
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=2, default_root_dir=folder, callbacks=[] if stop is None else [EndsAt(stop)],
        gradient_clip_val=0.3 if module.automatic_optimization else None,
    )  # fmt: skip
    return fitted(trainer, module, data(BATCHES), store=store)


@pytest.mark.parametrize(("first", "second"), [("host", "disk"), ("disk", "host")])
@pytest.mark.parametrize(
    "base", [Several, Turns, of(Several, "AdamW", "Adam"), Automatic], ids=["Several", "Turns", "native", "Automatic"]
)
def test_a_resume_continues_with_each_optimizers_state(first: str, second: str, base: Any, tmp_path: Path) -> None:
    expected = go(tmp_path / "plain", "auto", base)
    store = tmp_path / "store"
    steps = 5 if base in (Automatic, Turns) else 10  # Lightning counts each optimizer's
    go(tmp_path, HeteroOffloadStrategy(first, disk_path=store), base, stop=steps)
    got = go(tmp_path, HeteroOffloadStrategy(second, disk_path=store), base, store=store)
    assert_same(got, after(expected, 3))


def test_a_store_is_refused_where_parts_belong_to_other_optimizers(tmp_path: Path) -> None:
    class Halves(of(Several, "AdamW", "AdamW")):  # type: ignore[misc]
        def split(self) -> Any:
            keys = ("bias", "weight") if turned else ("weight", "bias")
            yield from ([p for n, p in self.named_parameters() if n.endswith(f".norm.{key}")] for key in keys)

    turned = False
    store = tmp_path / "store"
    go(tmp_path, HeteroOffloadStrategy("disk", disk_path=store), Halves, stop=4)
    turned = True
    with pytest.raises(ConfigError, match=r"norm.* belongs to optimizer 1 \(AdamW\), in the store to optimizer 0 \(AdamW\)"):
        go(tmp_path, HeteroOffloadStrategy("disk", disk_path=store), Halves, store=store)


def test_a_store_from_before_parts_were_cut_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = of(Several, "AdamW", "Adam")
    store = tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr("lightning_hetero.runtime.model_setup.ModelSetup.cut", lambda *_: False)
        go(tmp_path, HeteroOffloadStrategy("disk", disk_path=store), base, stop=4)
    with pytest.raises(ConfigError, match=r"grouped in another way, because others are .* with another optimizer"):
        go(tmp_path, HeteroOffloadStrategy("disk", disk_path=store), base, store=store)


def test_a_record_that_names_no_optimizers_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(parts: Any, state: str, why: str, owners: Any) -> bytes:
        return compose(parts, state, why)

    compose = record.compose
    expected = go(tmp_path / "plain", "auto", LitModel)
    store = tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr(record, "compose", older)
        go(tmp_path, HeteroOffloadStrategy("disk", disk_path=store), LitModel, stop=5)
    assert_same(go(tmp_path, HeteroOffloadStrategy("disk", disk_path=store), LitModel, store=store), after(expected, 3))


# ---- what is refused, and what is cut late -------------------------------------------------------


class OtherGroups(Together):
    """Its groups are copies, of which its steps read the learning rate."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        super().__init__(*inner)
        self.param_groups = [dict(group) for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        inner = [(o, group) for o in self.inner for group in o.param_groups]
        for (_, group), mine in zip(inner, self.param_groups, strict=True):
            group["lr"] = mine["lr"]
        return super().step() if loss is None else (super().step(), loss)[1]


class Counting(Together):
    """Keeps a count of its own."""

    count = 0

    def state_dict(self) -> Any:
        return {**super().state_dict(), "count": self.count}


@pytest.mark.parametrize(("kind", "why"), [(OtherGroups, "parameter groups other than"), (Counting, "state besides the state")])
def test_steps_are_not_kept_where_a_combined_optimizer_has_state_of_its_own(
    kind: Any, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = type("Module", (Automatic,), {"kind": kind})
    with caplog.at_level(logging.WARNING):
        train = partial(run, Recipe(steps=4, clip=0.3), tmp_path=tmp_path, module_class=base)
        assert_same(train(HeteroOffloadStrategy("disk", disk_path=tmp_path / "store")), train("auto"))
    assert any("Steps are not kept" in text and why in text for text in caplog.messages)


class Around(torch.optim.Optimizer):
    """Another optimizer's steps, and then weights move half way back."""

    hetero_blockwise = False

    def __init__(self, params: Any) -> None:
        params = list(params)
        self.inner = torch.optim.SGD(params, lr=1e-2, momentum=0.9)
        super().__init__(params, {})
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        before = [p.clone() for group in self.param_groups for p in group["params"]]
        self.inner.step()
        for p, old in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
            p.lerp_(old, 0.5)
        return loss


class Blockwise(Around):
    hetero_blockwise = True


@pytest.mark.parametrize("kind", ["resident", "host"])
def test_an_optimizer_around_another_runs_whole(kind: str, tmp_path: Path) -> None:
    assert_same_as_plain(kind, partial(run, Recipe(optimizer=Around), tmp_path=tmp_path))


@pytest.mark.parametrize(("kind", "precision", "plan"), [(Around, "bf16-true", "host"), (Blockwise, "32-true", "disk")])
def test_an_optimizer_around_another_is_refused_if_that_would_be_left_out(
    kind: Any, precision: str, plan: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=rf"{kind.__name__} runs another optimizer \(SGD\)"):
        run(Recipe(optimizer=kind, precision=precision), HeteroOffloadStrategy(plan), tmp_path)


def test_verification_of_a_combined_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"Together runs another one \(Muon\)"):
        run(Recipe(), HeteroOffloadStrategy("host", verify=1), tmp_path, module_class=Automatic)


class Unfreezes(pl.Callback):
    """After two batches, gives the frozen matrices of a block to one optimizer, and its other
    parameters to the other.
    """

    def __init__(self, to: Callable[[nn.Parameter], int]) -> None:
        self.to = to

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            for param in module.model.blocks[1].parameters():
                param.requires_grad_()
                group = {**trainer.optimizers[self.to(param)].param_groups[0], "params": [param]}
                trainer.optimizers[self.to(param)].add_param_group(group)


def unfreezing(strategy: Any, base: type[Several], to: Any, folder: Path) -> Outcome:
    torch.manual_seed(7)
    module = base(Recipe(shape=Shape(frozen=(1,))))
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=folder, callbacks=[Unfreezes(to)])
    trainer.fit(module, data())
    return outcome(trainer, module)


@pytest.mark.parametrize("kind", ["host", "disk", "tight"])
def test_parameters_that_join_one_of_the_optimizers(kind: str, tmp_path: Path) -> None:
    train = partial(unfreezing, base=Several, to=lambda p: 1, folder=tmp_path)
    if kind == "tight":
        assert_same(train(HeteroOffloadStrategy("disk", host_memory=least_memory_throughout(train))), train("auto"))
    else:
        assert_same_as_plain(kind, train)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_parameters_that_join_several_native_optimizers(kind: str, tmp_path: Path) -> None:
    assert_same_as_plain(kind, partial(unfreezing, base=of(Several, "AdamW", "Adam"), to=lambda p: p.ndim % 2, folder=tmp_path))


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_parameters_that_join_optimizers_of_different_kinds_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"have joined AdamW and Muon|have joined Muon and AdamW"):
        unfreezing(HeteroOffloadStrategy(kind), Several, lambda p: 2 - p.ndim, tmp_path)


@pytest.mark.parametrize("pair", PAIRS[:2], ids=str)
def test_a_model_that_stays_on_disk_after_evaluation_is_cut_then(pair: tuple[str, ...], tmp_path: Path) -> None:
    def train(strategy: Any) -> Outcome:
        torch.manual_seed(7)
        module = of(Several, *pair)(Recipe(shape=Shape(layers=4)))
        trainer = quiet_trainer(strategy=strategy, max_epochs=1, limit_train_batches=3, default_root_dir=tmp_path)
        trainer.validate(module, data(1, seed=1), verbose=False)
        trainer.fit(module, data())
        trainer.validate(module, data(1, seed=1), verbose=False)
        return outcome(trainer, module)

    expected = train("auto")
    budget = least_memory(partial(by_hand, Recipe(shape=Shape(layers=4)), folder=tmp_path, module_class=of(Several, *pair)))
    strategy = HeteroOffloadStrategy("disk", host_memory=budget)
    assert_same(train(strategy), expected)


def test_the_optimizers_of_a_combined_one_are_found_wherever_they_are() -> None:
    from lightning_hetero.optim.combined import members

    def params() -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(2, 2))]

    one, two, three = (MAKE["SGD"](params()) for _ in range(3))
    pair = Together(one, two)
    assert members(one) == [one]
    assert members(pair) == [one, two]
    assert members(Together(pair, three)) == [one, two, three]
    pair.inner = {"a": (one,), "b": [two]}
    assert members(pair) == [one, two]
    pair.inner = [one]
    assert members(pair) == [pair]
    assert members(copy.copy(pair)) != [pair]
