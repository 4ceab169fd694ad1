"""Adapters of PEFT on a model without memory: pretrained weights come from files, adapters start as
PEFT starts them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import Outcome, assert_same, outcome, quiet_trainer
from torch import Tensor

from lightning_hetero import EmulatedDevice
from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.strategies import HeteroOffloadStrategy

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft, whose adapters are trained here, is missing")
import peft
from support import llama

Wrap = Callable[[Any], Any]


def config(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **options})


def lora(**options: Any) -> Wrap:
    return lambda model: peft.get_peft_model(model, config(**options))


def two_adapters(model: Any) -> Any:
    wrapped = peft.get_peft_model(model, config())
    wrapped.add_adapter("other", config(r=2, target_modules=["up_proj", "q_proj"]))
    return wrapped


def two_of_the_embedding(model: Any) -> Any:
    wrapped = peft.get_peft_model(model, config(target_modules=["embed_tokens"]))
    wrapped.add_adapter("other", config(r=2, target_modules=["embed_tokens"]))
    return wrapped


def wrapped(adapter: Any) -> Wrap:
    return lambda model: peft.get_peft_model(model, adapter)


PROMPTS: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}

WRAPS: dict[str, Wrap] = {
    "lora": lora(),
    "gaussian": lora(init_lora_weights="gaussian"),
    "bias": lora(lora_bias=False, bias="all"),
    "dora": lora(use_dora=True),
    "embedding": lora(target_modules=["q_proj", "embed_tokens"]),
    "modules_to_save": lora(modules_to_save=["lm_head", "input_layernorm"]),
    "several": two_adapters,
    "several of the embedding": two_of_the_embedding,
    "dora of the embedding": lora(use_dora=True, target_modules=["q_proj", "embed_tokens"]),
    "ia3": wrapped(peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "prompt": wrapped(peft.PromptTuningConfig(**PROMPTS)),
    "p-tuning": wrapped(peft.PromptEncoderConfig(**PROMPTS, encoder_hidden_size=32)),
    "prefix": wrapped(peft.PrefixTuningConfig(**PROMPTS)),
}


class Module(llama.LitLlama):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, fused=True)


def on_meta(wrap: Wrap, *, inside: bool = True, kind: Any = Module) -> Any:
    def build() -> Any:
        with torch.device("meta"):
            model = llama.LlamaForCausalLM(llama.config())
            model = wrap(model) if inside else model
        return model if inside else wrap(model)

    return kind(build)


def hetero(plan: str, directory: Path) -> Any:
    return HeteroOffloadStrategy(plan, weights=directory)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return llama.save(tmp_path / "weights")


def started(module: Any, strategy: Any, root: Path) -> dict[str, Tensor]:
    """The weights as training begins: those after a step without a learning rate."""
    module.configure_optimizers = lambda: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0)
    trainer = quiet_trainer(strategy=strategy, max_steps=1, default_root_dir=root)
    trainer.fit(module, llama.batches())
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.parametrize("plan", ["host", "disk"])
def test_base_weights_are_read_and_adapters_start_as_peft_starts_them(
    plan: str, name: str, directory: Path, tmp_path: Path
) -> None:
    wrap = WRAPS[name]
    torch.manual_seed(1)
    plain = wrap(llama.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)).state_dict()
    got = started(on_meta(wrap, inside=plan == "host"), hetero(plan, directory), tmp_path)
    assert got.keys() == {f"model.{key}" for key in plain}
    for key, value in plain.items():
        mine = got[f"model.{key}"]
        if "lora_A" in key or "lora_embedding_B" in key or "prompt_encoder" in key:
            assert mine.std() == pytest.approx(float(value.std()), rel=0.5), key  # random, and of the same size
            assert not mine.isnan().any()
        else:
            assert torch.equal(mine, value), key


def test_a_module_of_the_name_that_weights_give(directory: Path, tmp_path: Path) -> None:
    plain = llama.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    strategy = HeteroOffloadStrategy("disk", weights={"model": directory})
    got = started(on_meta(WRAPS["lora"]), strategy, tmp_path)
    assert torch.equal(got["model.base_model.model.lm_head.weight"], plain["lm_head.weight"])


def changed(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Lenient(Module):
    strict_loading = False


@pytest.mark.parametrize("kind", [Module, Lenient])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight"])
def test_a_missing_base_weight_is_never_random(name: str, kind: Any, directory: Path, tmp_path: Path) -> None:
    changed(directory, lambda tensors: (tensors.pop(name), tensors.update(more=torch.ones(2))))
    with pytest.raises(ConfigError) as caught:
        started(on_meta(WRAPS["lora"], kind=kind), hetero("disk", directory), tmp_path)
    stem, _, last = name.rpartition(".")
    path = f"{stem}.base_layer.{last}" if "q_proj" in name else name
    assert f"{path}' missing, 'more' unexpected" in str(caught.value)


def test_a_warning_names_missing_and_unexpected_weights_without_strict_loading(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.1.input_layernorm.weight"
    changed(directory, lambda tensors: (tensors.pop(name), tensors.update(more=torch.ones(2))))
    with caplog.at_level(logging.WARNING):
        started(on_meta(lambda model: model, kind=Lenient), hetero("disk", directory), tmp_path)
    assert any(f"{name}' missing, 'more' unexpected" in text for text in caplog.messages)


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (lora(init_lora_weights="pissa"), ["lora_A", "init_lora_weights='pissa'", "in memory"]),
        (
            wrapped(peft.LoHaConfig(r=2, target_modules=["q_proj"])),
            ["q_proj", "adapter 'default' is of Linear"],
        ),
        (
            wrapped(peft.PromptTuningConfig(**PROMPTS, prompt_tuning_init="SAMPLE_VOCAB")),
            ["prompt_encoder", "prompt_tuning_init='SAMPLE_VOCAB'", "in memory"],
        ),
    ],
    ids=["pissa", "loha", "prompt"],
)
def test_adapters_whose_start_is_not_known_are_refused_by_name(
    wrap: Wrap, words: list[str], directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        started(on_meta(wrap), hetero("disk", directory), tmp_path)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("plan", ["host", "disk"])
def test_training_goes_as_from_a_model_in_memory(plan: str, directory: Path, tmp_path: Path) -> None:
    """From equal adapters, the losses are those of plain Lightning."""

    def fit(module: Any, strategy: Any) -> list[Tensor]:
        quiet_trainer(strategy=strategy, max_steps=3, default_root_dir=tmp_path).fit(module, llama.batches())
        return module.losses  # type: ignore[no-any-return]

    torch.manual_seed(5)
    model = WRAPS["dora"](llama.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32))
    adapters = {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}

    class Given(Module):
        def on_train_start(self) -> None:
            with torch.no_grad():
                for name, param in self.model.named_parameters():
                    if name in adapters:
                        param.copy_(adapters[name])

    expected = fit(Module(lambda: model.train()), "auto")
    assert all(
        torch.equal(*pair) for pair in zip(fit(on_meta(WRAPS["dora"], kind=Given), hetero(plan, directory)), expected, strict=True)
    )


@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]], ids=" and ".join)
@pytest.mark.parametrize(("plan", "inside"), [("disk", True), ("device", False)], ids=["wrapped on meta", "wrapped later"])
def test_trained_copies_of_tied_weights_begin_with_these(plan: str, saved: list[str], inside: bool, tmp_path: Path) -> None:
    """The head of such a model is in no file under its own name."""
    directory = llama.save(tmp_path / "weights", tied=True)
    wrap = lora(modules_to_save=saved, target_modules=["q_proj"])

    def fit(build: Callable[[], Any], strategy: Any) -> Outcome:
        class Given(Module):
            def on_train_start(self) -> None:
                with torch.no_grad():
                    for name, param in self.model.named_parameters():
                        if "lora_" in name:
                            param.fill_(0.1)

        module = Given(build)
        trainer = quiet_trainer(strategy=strategy, max_steps=3, gradient_clip_val=0.5, default_root_dir=tmp_path)
        trainer.fit(module, llama.batches())
        return outcome(trainer, module)

    def on_meta() -> Any:
        with torch.device("meta"):
            model = llama.LlamaForCausalLM(llama.config(tied=True))
            model = wrap(model) if inside else model
        return model if inside else wrap(model)

    chosen = {"device": EmulatedDevice(memory="8MiB")} if plan == "device" else {"plan": plan}
    expected = fit(lambda: wrap(llama.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)), "auto")
    assert_same(fit(on_meta, HeteroOffloadStrategy(weights=directory, **chosen)), expected)


@pytest.mark.parametrize("plan", ["resident", "host", "disk"])
def test_peft_saves_adapters_while_training_continues(plan: str, directory: Path, tmp_path: Path) -> None:
    class Saves(Module):
        def on_train_epoch_end(self) -> None:
            self.model.save_pretrained(tmp_path / "adapter")

    module = on_meta(WRAPS["lora"], kind=Saves)
    quiet_trainer(strategy=hetero(plan, directory), max_epochs=1, default_root_dir=tmp_path).fit(module, llama.batches())
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    trained = {name.replace(".default", ""): value for name, value in module.model.state_dict().items() if "lora_" in name}
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], value) for name, value in trained.items())


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=torch.arange(12).view(2, 6), use_cache=False).logits
    return found


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "disk") for name in WRAPS), *((name, "device") for name in ("dora", "ia3", "prompt"))]
)
def test_saved_adapters_give_the_same_logits_elsewhere(name: str, kind: str, directory: Path, tmp_path: Path) -> None:
    class Saves(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            self.model.save_pretrained(tmp_path / "inside")  # the last one counts

    module = on_meta(WRAPS[name], kind=Saves)
    if kind == "device":
        strategy = HeteroOffloadStrategy(device=EmulatedDevice(memory="8MiB"), weights=directory)
    else:
        strategy = HeteroOffloadStrategy(kind, disk_path=tmp_path / "store", weights=directory)
    quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=tmp_path).fit(module, llama.batches())
    module.model.save_pretrained(tmp_path / "after")
    expected = logits(module.model)
    for folder in (tmp_path / "inside", tmp_path / "after"):
        base = llama.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
        loaded = peft.PeftModel.from_pretrained(base, folder)
        if (folder / "other").is_dir():
            loaded.load_adapter(folder / "other", "other")
        assert torch.equal(logits(loaded), expected)


CHANGES: dict[str, Callable[[Any, Path], object]] = {
    "add": lambda model, _: model.add_adapter("new", config()),
    "add to another layer": lambda model, _: model.add_adapter("new", config(target_modules=["up_proj"])),
    "load": lambda model, folder: model.load_adapter(folder, "new"),
    "load and choose": lambda model, folder: (model.load_adapter(folder, "new"), model.set_adapter("new")),
    "choose": lambda model, _: model.set_adapter("other"),
    "delete": lambda model, _: model.delete_adapter("other"),
    "disable": lambda model, _: without_adapters(model),
}


def without_adapters(model: Any) -> None:
    with torch.no_grad(), model.disable_adapter():
        model(input_ids=torch.arange(6)[None])


@pytest.mark.parametrize("plan", ["host", "disk"])
@pytest.mark.parametrize("change", CHANGES)
def test_adapters_that_callbacks_add_are_refused_and_others_change_as_in_plain_lightning(
    change: str, plan: str, directory: Path, tmp_path: Path
) -> None:
    lora()(llama.base_in_memory(directory)).save_pretrained(tmp_path / "saved")

    class Changes(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 2:
                torch.manual_seed(9)
                CHANGES[change](self.model, tmp_path / "saved")

    def fit(strategy: Any) -> list[Tensor]:
        torch.manual_seed(5)
        module = Changes(lambda: two_adapters(llama.base_in_memory(directory)))
        trainer = quiet_trainer(strategy=strategy, max_steps=4, default_root_dir=tmp_path)
        if strategy == "auto" or change in ("choose", "delete", "disable"):
            trainer.fit(module, llama.batches())
        else:
            with pytest.raises(
                UnsupportedError, match=r"\.new.weight' (has been added to the model, and )?is on no tier.*before the fit"
            ):
                trainer.fit(module, llama.batches())
        return module.losses

    expected, found = fit("auto"), fit(HeteroOffloadStrategy(plan))
    assert len(found) == (4 if change in ("choose", "delete", "disable") else 2)
    assert found == expected[: len(found)]


IN_MEMORY: dict[str, Any] = {
    "loha": peft.LoHaConfig(r=2, target_modules=["q_proj", "v_proj"]),
    "vera": peft.VeraConfig(r=2, target_modules=["q_proj"]),
    "adalora": peft.AdaLoraConfig(init_r=3, target_r=2, total_step=9, target_modules=["q_proj"]),
    "pissa": config(init_lora_weights="pissa"),
    "tokens": config(trainable_token_indices=[1, 5]),
    "parameters": config(target_modules=[], target_parameters=["down_proj.weight"]),
    "cpt": peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[1, 2, 3, 4], cpt_mask=[1, 1, 1, 1], cpt_tokens_type_mask=[1, 2, 3, 4]
    ),
}


@pytest.mark.parametrize("plan", ["host", "disk"])
@pytest.mark.parametrize("kind", IN_MEMORY)
def test_other_kinds_train_where_the_model_is_built_in_memory(kind: str, plan: str, directory: Path, tmp_path: Path) -> None:
    def fit(strategy: Any) -> Outcome:
        torch.manual_seed(5)
        module = Module(lambda: peft.get_peft_model(llama.base_in_memory(directory), deepcopy(IN_MEMORY[kind])))
        trainer = quiet_trainer(strategy=strategy, max_steps=3, default_root_dir=tmp_path)
        trainer.fit(module, llama.batches())
        return outcome(trainer, module)

    assert_same(fit(HeteroOffloadStrategy(plan)), fit("auto"))


def test_adapters_that_are_tied_are_refused(tmp_path: Path) -> None:
    tied = config(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    module = Module(lambda: peft.get_peft_model(llama.base_in_memory(llama.save(tmp_path, tied=True)), tied))
    with pytest.raises(UnsupportedError, match=r"are views of the same memory.*With PEFT leave out ensure_weight_tying"):
        quiet_trainer(strategy=HeteroOffloadStrategy("disk"), max_steps=1, default_root_dir=tmp_path).fit(module, llama.batches())
