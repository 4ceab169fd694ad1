"""``exclude_frozen_parameters=True``: checkpoints without frozen weights resume bit for bit, given
the same base.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from torch import Tensor

from lightning_hetero import EmulatedDevice
from lightning_hetero.errors import ConfigError
from lightning_hetero.strategies import HeteroOffloadStrategy, LocalFirst

RECIPE = Recipe(shape=Shape(layers=3, few=True))
STEPS = 6


class Frozen(LitModel):
    """Of its blocks only the norms train; the embedding is frozen too."""

    def __init__(self, seed: int = 7) -> None:
        torch.manual_seed(seed)
        super().__init__(RECIPE)
        self.model.embed.requires_grad_(False)


def excluding(plan: Any = "disk", **options: Any) -> Any:
    return HeteroOffloadStrategy(plan, exclude_frozen_parameters=True, **options)


def fit(module: Any, strategy: Any, folder: Path, *, steps: int = STEPS, ckpt_path: Any = None, **options: Any) -> pl.Trainer:
    torch.manual_seed(11)
    trainer = quiet_trainer(strategy=strategy, max_steps=steps, default_root_dir=folder, **options)
    trainer.fit(module, data(), ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return trainer


def result(module: Any, strategy: Any, folder: Path, **options: Any) -> Outcome:
    return outcome(fit(module, strategy, folder, **options), module)


@pytest.fixture
def expected(tmp_path: Path) -> Outcome:
    """Plain Lightning's, which goes on from a checkpoint with everything."""
    path = saved(tmp_path, "auto")
    return result(Frozen(), "auto", tmp_path, ckpt_path=path)


def saved(folder: Path, strategy: Any, module: Any = None, **options: Any) -> Path:
    path = folder / "three.ckpt"
    fit(module or Frozen(), strategy, folder, steps=3, **options).save_checkpoint(path)
    return path


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def frozen_names(module: Any) -> set[str]:
    return {name for name, param in module.named_parameters() if not param.requires_grad}


@pytest.mark.parametrize("kind", ["resident", "host", "disk", "device"])
def test_a_run_goes_on_from_a_checkpoint_without_its_frozen_weights(kind: str, expected: Outcome, tmp_path: Path) -> None:
    def make() -> Any:
        if kind == "device":
            return excluding(device=EmulatedDevice(memory="4MiB"))
        return excluding(kind)

    path = saved(tmp_path, make())
    checkpoint, module = read(path), Frozen()
    assert set(checkpoint["excluded_parameters"]) == frozen_names(module)
    assert set(checkpoint["state_dict"]) == set(module.state_dict()) - frozen_names(module)
    assert "model.blocks.0.calls" in checkpoint["state_dict"]  # a buffer
    assert_same(result(module, make(), tmp_path, ckpt_path=path), expected)


def test_model_checkpoint_writes_them_and_the_best_is_tested(tmp_path: Path) -> None:
    module = Frozen()
    module.test_step = module.validation_step  # type: ignore[method-assign]
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_last=True, filename="{step}")
    trainer = fit(module, excluding(), tmp_path, steps=4, callbacks=[callback], enable_checkpointing=True)
    module.losses.clear()
    trainer.test(module, data(2), ckpt_path=callback.best_model_path, verbose=False)
    plain = Frozen()
    plain.strict_loading = False
    plain.test_step = plain.validation_step  # type: ignore[method-assign]
    trainer = quiet_trainer(default_root_dir=tmp_path)
    trainer.test(plain, data(2), ckpt_path=callback.best_model_path, verbose=False)
    assert len(plain.losses) == 2
    assert all(torch.equal(*pair) for pair in zip(module.losses, plain.losses, strict=True))


@pytest.mark.parametrize("plan", ["host", "disk"])
def test_another_base_is_refused_by_name(plan: str, tmp_path: Path) -> None:
    path = saved(tmp_path, excluding(plan))
    with pytest.raises(ConfigError, match=r"leaves out 13 frozen .*other values .*'model.embed.weight'.* and 10 more"):
        fit(Frozen(seed=8), excluding(plan), tmp_path, ckpt_path=path)
    with pytest.raises(ConfigError, match=r"other values than when it was saved: 'model.embed.weight'"):
        quiet_trainer(strategy=HeteroOffloadStrategy(plan), default_root_dir=tmp_path).validate(
            Frozen(seed=8), data(1), ckpt_path=str(path), verbose=False
        )


def edited() -> Frozen:
    """Another base: one element differs that no sample has."""
    module = Frozen()
    with torch.no_grad():
        write_in_place(module.model.blocks[1].up.weight)
    return module


@pytest.mark.parametrize("kind", ["resident", "host", "disk", "device"])
def test_a_base_with_one_other_value_is_refused_by_name(kind: str, expected: Outcome, tmp_path: Path) -> None:
    def make() -> Any:
        return excluding(device=EmulatedDevice(memory="4MiB")) if kind == "device" else excluding(kind)

    path = saved(tmp_path, make())
    with pytest.raises(ConfigError, match=r"other values than when it was saved: 'model.blocks.1.up.weight'\. Give"):
        fit(edited(), make(), tmp_path, ckpt_path=path)
    with pytest.raises(ConfigError, match=r"other values than when it was saved: 'model.blocks.1.up.weight'\. Give"):
        quiet_trainer(strategy=make(), default_root_dir=tmp_path).validate(edited(), data(1), ckpt_path=str(path), verbose=False)
    # A checkpoint of the run that goes on says the same about its base, which was read once for
    # both.
    trainer = fit(Frozen(), make(), tmp_path, ckpt_path=path)
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    first, later = (read(found)["excluded_parameters"] for found in (path, tmp_path / "later.ckpt"))
    assert {name: row["digest"] for name, row in first.items()} == {name: row["digest"] for name, row in later.items()}


def test_a_weight_that_is_written_between_two_fits_is_not_taken_for_the_first_one(tmp_path: Path) -> None:
    """Plain memory may be written through ``data`` then, of which no version counter tells."""
    module, weight = Frozen(), "model.blocks.1.up.weight"
    saved(tmp_path, excluding(), module)
    module.get_parameter(weight).data[0, 9] += 1
    fit(module, excluding(), tmp_path, steps=1).save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ConfigError, match=weight):
        fit(Frozen(), excluding(), tmp_path, ckpt_path=tmp_path / "x.ckpt")
    fit(edited(), excluding(), tmp_path, ckpt_path=tmp_path / "x.ckpt")


def test_a_file_without_digests_is_compared_by_samples(expected: Outcome, tmp_path: Path) -> None:
    """As the first files of this kind were written."""
    path = saved(tmp_path, excluding())
    checkpoint = read(path)
    for row in checkpoint["excluded_parameters"].values():
        del row["digest"]
    torch.save(checkpoint, path)
    assert_same(result(Frozen(), excluding(), tmp_path, ckpt_path=path), expected)


@pytest.mark.parametrize("saved_as", [torch.float32, torch.float64])
def test_all_values_are_compared_in_the_narrower_dtype(saved_as: torch.dtype, tmp_path: Path) -> None:
    """A wider model with the same values is the same base; so is a narrower one, by its sample."""
    here = torch.float64 if saved_as == torch.float32 else torch.float32
    path = tmp_path / "x.ckpt"
    fit(Frozen().to(saved_as), excluding(), tmp_path, steps=1, precision=precision(saved_as)).save_checkpoint(path)
    evaluate = partial(pl.Trainer.validate, dataloaders=data(1), ckpt_path=str(path), verbose=False)
    quiet = partial(quiet_trainer, default_root_dir=tmp_path, precision=precision(here))
    evaluate(quiet(strategy=excluding()), Frozen().to(here))
    if here == torch.float64:
        with pytest.raises(ConfigError, match=r"model\.blocks\.1\.up\.weight"):
            evaluate(quiet(strategy=excluding()), edited().to(here))


def precision(dtype: torch.dtype) -> Any:
    return {torch.float32: "32-true", torch.float64: "64-true"}[dtype]


def test_a_strategy_without_the_option_loads_them_too_and_saves_everything(expected: Outcome, tmp_path: Path) -> None:
    path, module = saved(tmp_path, excluding()), Frozen()
    trainer = fit(module, HeteroOffloadStrategy("disk"), tmp_path, ckpt_path=path)
    assert_same(outcome(trainer, module), expected)
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    assert set(read(tmp_path / "all.ckpt")["state_dict"]) == set(module.state_dict())


def test_keys_are_checked_as_ever(tmp_path: Path) -> None:
    path = saved(tmp_path, excluding())
    checkpoint = read(path)
    checkpoint["state_dict"]["more"] = checkpoint["state_dict"].pop("model.head.weight")
    torch.save(checkpoint, path)
    with pytest.raises(RuntimeError, match=r"Missing key.*'model.head.weight'.*Unexpected key.*'more'"):
        fit(Frozen(), excluding(), tmp_path, ckpt_path=path)


def test_an_entry_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, excluding())
    torch.save({**read(path), "excluded_parameters": ["model.embed.weight"]}, path)
    with pytest.raises(ConfigError, match="'excluded_parameters' is not of this package"):
        fit(Frozen(), excluding(), tmp_path, ckpt_path=path)


class Freezes(pl.Callback):
    """Freezes what has trained so far."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            module.model.norm.requires_grad_(False)
            for param in module.model.norm.parameters():
                param.grad = None


class Writes(pl.Callback):
    """Writes one element of a frozen weight that no sample has."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        self.write = write

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            with torch.no_grad():
                self.write(module.model.blocks[1].up.weight)


def write_in_place(weight: Any) -> None:
    weight[0, 9] += 1


def write_data(weight: Any) -> None:
    weight.data[0, 9] += 1


def assign_data(weight: Any) -> None:
    value = weight.detach().clone()
    value[0, 9] += 1
    weight.data = value


@pytest.mark.parametrize("kind", ["host", "disk", "device"])
@pytest.mark.parametrize(
    ("more", "name"),
    [
        (Freezes(), "model.norm.weight"),
        *((Writes(write), "model.blocks.1.up.weight") for write in (write_in_place, write_data, assign_data)),
    ],
    ids=["frozen later", "in place", "through data", "assigned"],
)
def test_frozen_weights_that_were_trained_or_written_are_kept(kind: str, more: Any, name: str, tmp_path: Path) -> None:
    train = partial(fit, steps=3, callbacks=[more])
    strategy = excluding(device=EmulatedDevice(memory="4MiB")) if kind == "device" else excluding(kind)
    module = Frozen()
    trainer = train(module, strategy, tmp_path)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = read(tmp_path / "x.ckpt")
    assert torch.equal(checkpoint["state_dict"][name], module.state_dict()[name])
    # It stays kept in a run that goes on from there, and has it frozen from the start.
    later = Frozen()
    later.get_parameter(name).requires_grad_(False)
    quiet_trainer(strategy=(strategy := excluding()), default_root_dir=tmp_path).validate(
        later, data(1), ckpt_path=str(tmp_path / "x.ckpt"), verbose=False
    )
    strategy.run.module.trainer.save_checkpoint(tmp_path / "y.ckpt")
    assert torch.equal(read(tmp_path / "y.ckpt")["state_dict"][name], checkpoint["state_dict"][name])


def test_layers_that_are_unfrozen_later_resume(tmp_path: Path) -> None:
    """The checkpoint leaves out weights that train in the run that goes on from it."""
    path = saved(tmp_path, excluding())

    def unfrozen() -> Any:
        module = Frozen()
        module.model.embed.requires_grad_(True)
        return module

    class Loads(pl.Callback):
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            module.load_state_dict(read(path)["state_dict"], strict=False)

    expected = result(unfrozen(), "auto", tmp_path, callbacks=[Loads()])
    got = result(unfrozen(), excluding(), tmp_path, callbacks=[Loads()])
    assert_same(got, expected)


def test_a_store_and_checkpoints_of_the_same_run(expected: Outcome, tmp_path: Path) -> None:
    """A store resumes as ever; checkpoints of the resumed run have what was trained before it."""
    module, more = Frozen(), [Freezes()]
    fit(module, excluding(disk_path=tmp_path / "store"), tmp_path, steps=3, callbacks=more)
    later = Frozen()
    trainer = fit(later, excluding(disk_path=tmp_path / "store"), tmp_path, steps=4, ckpt_path=tmp_path / "store")
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = read(tmp_path / "x.ckpt")
    assert not later.model.norm.weight.requires_grad
    assert torch.equal(checkpoint["state_dict"]["model.norm.weight"], later.model.norm.weight)
    assert set(checkpoint["excluded_parameters"]) == frozen_names(Frozen())


def test_local_first_keeps_them_out(expected: Outcome, tmp_path: Path) -> None:
    path = tmp_path / "three"
    plugins = [LocalFirst(disk=tmp_path / "local")]
    fit(Frozen(), excluding(), tmp_path, steps=3, plugins=plugins).save_checkpoint(path)
    plugins[0].wait()
    module = Frozen()
    got = result(module, excluding(), tmp_path, ckpt_path=path, plugins=[LocalFirst(disk=tmp_path / "other")])
    assert_same(got, expected)
    with pytest.raises(ConfigError, match="other values"):
        fit(Frozen(seed=8), excluding(), tmp_path, ckpt_path=path, plugins=[LocalFirst(disk=tmp_path / "third")])


@pytest.fixture
def llama() -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("peft", reason="peft, whose adapters are trained here, is missing")
    from support import llama

    return llama


def adapted(llama: Any, directory: Path | None, *, meta: bool = True) -> Any:
    """A Llama with LoRA, on the meta device or with the weights of a directory."""
    import peft

    class Lit(llama.LitLlama):  # type: ignore[misc]
        strict_loading = meta

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, fused=True)

    def build() -> Any:
        with torch.device("meta" if meta else "cpu"):
            model = llama.LlamaForCausalLM(llama.config(tied=True))
            wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
            wrapped.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"]))
        if not meta:
            model.load_state_dict(llama.LlamaForCausalLM.from_pretrained(directory).state_dict(), strict=False)
            for name, value in llama.LlamaForCausalLM.from_pretrained(directory).named_parameters():
                stem, _, last = name.rpartition(".")
                known = dict(model.named_parameters())
                with torch.no_grad():
                    known.get(name, known.get(f"{stem}.base_layer.{last}")).copy_(value)
        return wrapped

    return Lit(build)


def fit_llama(llama: Any, module: Any, strategy: Any, folder: Path, *, steps: int, ckpt_path: Path | None = None) -> Any:
    trainer = quiet_trainer(strategy=strategy, max_steps=steps, default_root_dir=folder)
    trainer.fit(module, llama.batches(), ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return trainer


@pytest.mark.parametrize("plan", ["host", "disk"])
def test_weights_of_files_are_the_base(llama: Any, plan: str, tmp_path: Path) -> None:
    directory, path = llama.save(tmp_path / "weights", tied=True), tmp_path / "x.ckpt"
    fit_llama(llama, adapted(llama, None), excluding(plan, weights=directory), tmp_path, steps=2).save_checkpoint(path)
    found = read(path)
    trained = {name for name in found["state_dict"] if "lora_" in name}
    assert set(found["state_dict"]) == trained
    assert {name.split(".")[-2] for name in trained} == {"default", "other"}  # the second one is frozen
    plain, module = adapted(llama, directory, meta=False), adapted(llama, None)
    fit_llama(llama, plain, "auto", tmp_path, steps=4, ckpt_path=path)
    fit_llama(llama, module, excluding(plan, weights=directory), tmp_path, steps=4, ckpt_path=path)
    assert len(plain.losses) == 2
    assert all(torch.equal(*pair) for pair in zip(module.losses, plain.losses, strict=True))
    with pytest.raises(ConfigError, match=r"'model.base_model.model.model.embed_tokens.weight'.* would be random"):
        fit_llama(llama, adapted(llama, None), excluding(plan), tmp_path, steps=4, ckpt_path=path)
    other = llama.save(tmp_path / "other", tied=True, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="other values than when it was saved"):
        fit_llama(llama, adapted(llama, None), excluding(plan, weights=other), tmp_path, steps=4, ckpt_path=path)


def test_frozen_weights_that_began_at_random_are_in_the_file(llama: Any, tmp_path: Path) -> None:
    def build() -> Any:
        model = llama.on_meta().build()
        model.model.layers.requires_grad_(False)
        return model

    module = llama.LitLlama(build)
    trainer = fit_llama(llama, module, excluding(), tmp_path, steps=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    found = read(tmp_path / "x.ckpt")
    assert set(found["state_dict"]) == set(module.state_dict())
    assert not found["excluded_parameters"]


def test_links_have_everything() -> None:
    with pytest.raises(ConfigError, match=r"exclude_frozen_parameters=True with link_checkpoints=True"):
        excluding(disk_path="x", link_checkpoints=True)


def test_it_is_a_switch() -> None:
    with pytest.raises(ConfigError, match="exclude_frozen_parameters='no'"):
        HeteroOffloadStrategy(exclude_frozen_parameters="no")  # type: ignore[arg-type]
