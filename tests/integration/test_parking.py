"""After training, a model that does not fit its budget stays where it is, and everything goes on
working.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from torch.utils._pytree import tree_map

from lightning_hetero.errors import ConfigError, OffloadedAccessError, OutOfMemoryBudgetError
from lightning_hetero.handles.offloaded_parameter import OffloadedParameter
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.runtime.session import Session
from lightning_hetero.strategies import HeteroOffloadStrategy

RECIPE = Recipe(steps=2, shape=Shape(layers=4, width=32))
DEEP = Recipe(steps=2, shape=Shape(layers=24, width=32))  # larger than its budget, however small the staging
MIXED = Plan(
    name="mixed",
    blocks=(
        BlockPlan(name="model.blocks.[02]", weights=Tier.DISK, state=Tier.HOST),
        BlockPlan(name="model.blocks.1", weights=Tier.HOST, state=Tier.DISK),
        BlockPlan(name="model.blocks.*", weights=Tier.DISK, state=Tier.DISK),
        BlockPlan(name="*"),
    ),
)


@pytest.fixture(params=["disk", MIXED], ids=["disk", "mixed"])
def plan(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def budgets_of_small_models_are_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging would be larger than a model that is quick to test: with a budget it never fits."""
    fits = Session._fits_memory

    def fits_no_budget(session: Session) -> bool:
        return session.options.host_memory is None or (len(session.blocks) > DEEP.shape.layers and fits(session))

    monkeypatch.setattr(Session, "_fits_memory", fits_no_budget)


def module_of(recipe: Recipe) -> LitModel:
    torch.manual_seed(7)
    return LitModel(recipe)


def trainer_of(strategy: Any, root: Path, **options: Any) -> pl.Trainer:
    return quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=root, limit_val_batches=2, **options)


def smallest(plan: Any, recipe: Recipe, root: Path) -> int:
    """The least budget that the refusal names: far less than weights and state."""
    with pytest.raises(OutOfMemoryBudgetError) as refusal:
        trainer_of(HeteroOffloadStrategy(plan=plan, host_memory="1B"), root, precision=recipe.precision).fit(
            module_of(recipe), data()
        )
    return refusal.value.needed_bytes


def fitted(strategy: Any, root: Path, recipe: Recipe = RECIPE, **options: Any) -> tuple[pl.Trainer, LitModel]:
    module = module_of(recipe)
    trainer = trainer_of(strategy, root, precision=recipe.precision, **options)
    torch.manual_seed(11)
    trainer.fit(module, data())
    return trainer, module


def again(trainer: pl.Trainer, module: LitModel) -> None:
    """Another two steps, with a fresh optimizer as ever."""
    trainer.fit_loop.epoch_loop.max_steps += 2
    torch.manual_seed(13)
    trainer.fit(module, data(seed=3))


def parked(plan: Any, root: Path, recipe: Recipe = RECIPE, **options: Any) -> tuple[pl.Trainer, LitModel]:
    strategy = HeteroOffloadStrategy(plan=plan, host_memory=smallest(plan, recipe, root), **options)
    trainer, module = fitted(strategy, root, recipe)
    assert any(type(p) is OffloadedParameter for p in module.parameters())
    return trainer, module


def same_tensors(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name].clone(), value), name


def test_weights_and_state_are_read_where_they_are(plan: Any, tmp_path: Path) -> None:
    plain = outcome(*fitted("auto", tmp_path, DEEP))
    trainer, module = parked(plan, tmp_path, DEEP)
    assert_same(outcome(trainer, module), plain)
    for name, param in module.named_parameters():
        with torch.no_grad():
            assert torch.equal(param * 1, plain.weights[name])


def test_a_checkpoint_is_saved_and_plain_lightning_resumes_it(plan: Any, tmp_path: Path) -> None:
    fitted("auto", tmp_path)[0].save_checkpoint(tmp_path / "plain.ckpt")
    parked(plan, tmp_path)[0].save_checkpoint(tmp_path / "parked.ckpt")
    ours, plain = (torch.load(tmp_path / name, weights_only=False) for name in ("parked.ckpt", "plain.ckpt"))
    same_tensors(ours["state_dict"], plain["state_dict"])
    outcomes = []
    for name in ("plain.ckpt", "parked.ckpt"):
        module = module_of(RECIPE)
        trainer = trainer_of("auto", tmp_path)
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(module, data(), ckpt_path=tmp_path / name)
        outcomes.append(outcome(trainer, module))
    assert_same(outcomes[1], outcomes[0])


def test_it_is_validated_tested_and_saved_again(plan: Any, tmp_path: Path) -> None:
    losses = []
    for trainer, module in (fitted("auto", tmp_path), parked(plan, tmp_path)):
        module.losses.clear()
        trainer.validate(module, data(2, seed=1), verbose=False)
        trainer.validate(module, data(2, seed=1), verbose=False)
        trainer.save_checkpoint(tmp_path / "after.ckpt")
        losses.append(module.losses)
    assert len(losses[0]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


@pytest.mark.parametrize("between", [lambda t, m: None, lambda t, m: t.validate(m, data(2, seed=1), verbose=False)])
def test_it_is_trained_further(plan: Any, tmp_path: Path, between: Callable[[pl.Trainer, LitModel], Any]) -> None:
    outcomes = []
    for trainer, module in (fitted("auto", tmp_path), parked(plan, tmp_path)):
        for _ in range(2):
            between(trainer, module)
            again(trainer, module)
        outcomes.append(outcome(trainer, module))
    assert_same(outcomes[1], outcomes[0])


def test_it_is_trained_further_with_masters(plan: Any, tmp_path: Path) -> None:
    """The masters start anew from the 16-bit weights, as those of a new process would."""
    recipe = Recipe(steps=2, shape=RECIPE.shape, precision="bf16-true")
    expected = []
    for budget in (None, smallest(plan, recipe, tmp_path)):
        trainer, module = fitted(HeteroOffloadStrategy(plan=plan, host_memory=budget), tmp_path, recipe)
        again(trainer, module)
        expected.append(outcome(trainer, module))
    assert_same(expected[1], expected[0])


def test_training_again_many_times_does_not_use_the_store_up(tmp_path: Path) -> None:
    trainer, module = parked("disk", tmp_path)
    for _ in range(12):
        again(trainer, module)
    assert trainer.global_step == 26
    (store,) = tmp_path.glob("lightning-hetero-*")
    blocks = [p for p in store.iterdir() if p.name.startswith("block-")]
    assert len(blocks) == 2 * len({p.name.split(".")[0] for p in blocks})


def test_a_checkpoint_is_loaded_into_it(plan: Any, tmp_path: Path) -> None:
    fitted("auto", tmp_path)[0].save_checkpoint(tmp_path / "plain.ckpt")
    expected = None
    for trainer, module in (fitted("auto", tmp_path), parked(plan, tmp_path)):
        again(trainer, module)
        trainer.fit_loop.epoch_loop.max_steps += 2
        trainer.fit(module, data(seed=5), ckpt_path=tmp_path / "plain.ckpt")
        expected = expected or outcome(trainer, module)
        got = outcome(trainer, module)
    assert expected is not None
    assert_same(got, expected)


def test_a_model_that_is_only_validated_within_its_budget_is_trained_afterwards(tmp_path: Path) -> None:
    budget = smallest("disk", RECIPE, tmp_path)
    expected = None
    for strategy in ("auto", HeteroOffloadStrategy(plan="disk", host_memory=budget)):
        module, trainer = module_of(RECIPE), trainer_of(strategy, tmp_path)
        trainer.validate(module, data(2, seed=1), verbose=False)
        torch.manual_seed(11)
        trainer.fit(module, data())
        expected = expected or outcome(trainer, module)
    assert_same(outcome(trainer, module), expected)


def test_an_exception_in_training_does_not_bring_the_model_into_memory(plan: Any, tmp_path: Path) -> None:
    class Stops(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise KeyError("the user's own error")

    strategy = HeteroOffloadStrategy(plan=plan, host_memory=smallest(plan, RECIPE, tmp_path))
    module, trainer = module_of(RECIPE), trainer_of(strategy, tmp_path, callbacks=[Stops()])
    torch.manual_seed(11)
    with pytest.raises(KeyError, match="own error"):
        trainer.fit(module, data())
    assert any(type(p) is OffloadedParameter for p in module.parameters())
    plain = module_of(RECIPE)
    plain_trainer = trainer_of("auto", tmp_path, callbacks=[Stops()])
    torch.manual_seed(11)
    with pytest.raises(KeyError):
        plain_trainer.fit(plain, data())
    same_tensors(dict(module.state_dict()), dict(plain.state_dict()))


def test_the_files_go_with_the_strategy_and_reading_afterwards_is_refused_by_name(tmp_path: Path) -> None:
    trainer, module = parked("disk", tmp_path)
    (store,) = tmp_path.glob("lightning-hetero-*")
    trainer.fit(module_of(Recipe(steps=2)), data())  # another model: the first one's store is closed
    assert not store.exists()
    refusals = []
    for value in module.state_dict().values():
        try:
            value.clone()
        except OffloadedAccessError as error:
            refusals.append(str(error))
    assert refusals
    assert all("model.blocks." in text and "store has been closed" in text and "checkpoint" in text for text in refusals)


def test_files_of_a_parked_model_are_removed_with_its_last_reference(tmp_path: Path) -> None:
    trainer, module = parked("disk", tmp_path)
    assert list(tmp_path.glob("lightning-hetero-*"))
    del trainer, module
    gc.collect()
    assert not list(tmp_path.glob("lightning-hetero-*"))


class LitLlama(pl.LightningModule):
    """A small model of transformers with tied embeddings."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers", reason="saving in its format needs transformers")
        torch.manual_seed(7)
        config = transformers.LlamaConfig(
            vocab_size=384, hidden_size=64, intermediate_size=192, num_hidden_layers=30, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        self.model: Any = transformers.LlamaForCausalLM(config)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


@pytest.mark.parametrize("shard_size", ["5GB", "1MB"])
def test_transformers_saves_and_runs_a_model_that_stays_on_disk(shard_size: str, tmp_path: Path) -> None:
    plain, module = LitLlama(), LitLlama()
    strategy = HeteroOffloadStrategy(plan="disk", host_memory="8MiB")
    for each, how in (plain, "auto"), (module, strategy):
        torch.manual_seed(11)
        tokens = torch.randint(2, 384, (4, 16))
        trainer = quiet_trainer(strategy=how, max_steps=2, default_root_dir=tmp_path, limit_val_batches=0)
        trainer.fit(each, torch.utils.data.DataLoader(tokens, batch_size=2))
    assert any(type(p) is OffloadedParameter for p in module.parameters())

    module.model.save_pretrained(tmp_path / "saved", max_shard_size=shard_size)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > (shard_size == "1MB")
    loaded = type(module.model).from_pretrained(tmp_path / "saved")
    expected = plain.model.state_dict()
    assert {name for name, tensor in loaded.state_dict().items() if not torch.equal(tensor, expected[name])} == set()
    prompt = tokens[:1]
    with torch.inference_mode():
        assert torch.equal(module.model.eval()(prompt).logits, plain.model.eval()(prompt).logits)


@pytest.mark.parametrize("new_run", [False, True])
def test_kept_steps_of_a_parked_model_are_not_overwritten(new_run: bool, plan: Any, tmp_path: Path) -> None:
    """The store is open, and has the model's weights: the kept step is refused to be lost, gone on
    from, or linked elsewhere.
    """
    store, module = tmp_path / "store", module_of(RECIPE)
    budget = smallest(plan, RECIPE, tmp_path)
    trainer = trainer_of(HeteroOffloadStrategy(plan, host_memory=budget, disk_path=store, new_run=new_run), tmp_path)
    trainer.fit(module, data())
    first = outcome(trainer, module)
    state = tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, first.state)
    trainer.validate(module, data(2), verbose=False)
    trainer.fit_loop.epoch_loop.max_steps = 4
    losses = len(module.losses)
    if new_run:
        trainer.fit(module, data())
    else:
        with pytest.raises(ConfigError, match=r"holds the last kept step of an earlier run.*new_run=True"):
            trainer.fit(module, data())
        assert len(module.losses) == losses
        trainer.fit(module, data(), ckpt_path=str(store))
    assert trainer.global_step == 4
    if new_run:
        again = module_of(RECIPE)
        resumed = trainer_of(HeteroOffloadStrategy("disk", disk_path=tmp_path / "other"), tmp_path)
        resumed.fit(again, data(), ckpt_path=str(tmp_path / "store.earlier-1"))
        assert_same(outcome(resumed, again), Outcome([], first.weights, state))
    else:
        assert not (tmp_path / "store.earlier-1").exists()
