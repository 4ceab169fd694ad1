"""Adapters that go on from a folder, and heads that the base's files lack, on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import assert_same, outcome, quiet_trainer
from torch import Tensor

import lightning_hetero
from lightning_hetero.errors import ConfigError
from lightning_hetero.strategies import HeteroOffloadStrategy

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft, whose adapters are trained here, is missing")
import peft
from support import llama
from transformers import GemmaConfig, GemmaForCausalLM, LlamaForSequenceClassification

LOST = pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")


def config(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], **options})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return llama.save(tmp_path / "weights")


@pytest.fixture
def adapter(directory: Path, tmp_path: Path) -> Path:
    torch.manual_seed(1)
    peft.get_peft_model(llama.base_in_memory(directory), config(init_lora_weights=False)).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def fit(build: Callable[[], Any], strategy: Any, root: Path) -> Any:
    module = llama.LitAdapters(build)
    trainer = quiet_trainer(strategy=strategy, max_steps=3, default_root_dir=root)
    trainer.fit(module, llama.batches())
    return outcome(trainer, module)


def loaded(base: Any, adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)


def without_copies(base: Any, adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True, low_cpu_mem_usage=True)


def set_in_place(base: Any, adapter: Path) -> Any:
    model = peft.get_peft_model(base, config(init_lora_weights=False))
    peft.set_peft_model_state_dict(model, peft.load_peft_weights(adapter))
    return model


def added(base: Any, adapter: Path) -> Any:
    model = peft.get_peft_model(base, config(r=1))
    model.load_adapter(adapter, "other", is_trainable=True)
    model.delete_adapter("default")
    model.set_adapter("other")
    return model


@LOST
@pytest.mark.parametrize("load", [loaded, without_copies, set_in_place, added])
def test_training_goes_on_from_saved_adapters(load: Any, directory: Path, adapter: Path, tmp_path: Path) -> None:
    expected = fit(lambda: load(llama.base_in_memory(directory), adapter), "auto", tmp_path)
    got = fit(lambda: load(llama.base_on_meta(), adapter), HeteroOffloadStrategy("disk", weights=directory), tmp_path)
    assert_same(got, expected)


KINDS: dict[str, Callable[[], Any]] = {
    "lora": config,
    "embedding": lambda: config(target_modules=["q_proj", "embed_tokens"]),
    "dora": lambda: config(use_dora=True),
    "saved": lambda: config(modules_to_save=["lm_head"]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def in_meta(base: Any, adapter: Path) -> Any:
    with torch.device("meta"):
        return loaded(base, adapter)


@LOST
@pytest.mark.parametrize("load", [loaded, in_meta])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_that_nobody_saw_loaded_are_refused(kind: str, load: Any, directory: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    peft.get_peft_model(llama.base_in_memory(directory), KINDS[kind]()).save_pretrained(tmp_path / "adapter")
    model = load(llama.base_on_meta(), tmp_path / "adapter")
    refused = pytest.raises(ConfigError, match=r"loaded into adapters before the fit are lost.*default.*configure_model")
    with refused, lightning_hetero.offload(model, plan="host", weights=directory):
        pass
    module = llama.LitAdapters(llama.base_on_meta)
    module.model = model
    with refused:
        quiet_trainer(strategy=HeteroOffloadStrategy("host", weights=directory), default_root_dir=tmp_path).fit(
            module, llama.batches()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_new_adapters_begin_with_a_warning(
    kind: str, dtype: torch.dtype, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They look like adapters that were loaded with low_cpu_mem_usage=True."""
    model = peft.get_peft_model(llama.base_on_meta().to(dtype), KINDS[kind]())
    with lightning_hetero.offload(model, plan="host", weights=directory):
        assert "Adapters on the meta device begin anew: 'base_model.model" in caplog.text
        assert "low_cpu_mem_usage=True" in caplog.text


def test_adapters_that_were_loaded_in_memory_and_moved_are_named(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peft.get_peft_model(llama.base_in_memory(directory), config()).save_pretrained(tmp_path)
    model = without_copies(llama.base_on_meta(), tmp_path)
    with lightning_hetero.offload(model, plan="host", weights=directory):
        assert "Adapters on the meta device begin anew" in caplog.text


class Beginning(llama.LitAdapters):
    """Notes the values that training begins with."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.began = {name: value.clone() for name, value in peft.get_peft_model_state_dict(self.model).items()}
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss


def save_changed(kind: str, directory: Path, adapter: Path) -> dict[str, Tensor]:
    """An adapter with other values than a new one, copies of the base's modules included."""
    model = peft.get_peft_model(llama.base_in_memory(directory), KINDS[kind]())
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param))
    model.save_pretrained(adapter)
    saved: dict[str, Tensor] = peft.load_peft_weights(adapter, device="cpu")
    return saved


@LOST
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize(
    ("load", "kind"), [*((loaded, kind) for kind in KINDS), (without_copies, "lora"), (without_copies, "saved")]
)
def test_training_begins_with_the_saved_values(load: Any, kind: str, precision: Any, directory: Path, tmp_path: Path) -> None:
    """Those of copied modules too, which the base's files have, in the dtype of the precision."""
    saved = save_changed(kind, directory, tmp_path / "adapter")
    module = Beginning(lambda: load(llama.base_on_meta(), tmp_path / "adapter"))
    strategy = HeteroOffloadStrategy("disk", weights=directory)
    quiet_trainer(strategy=strategy, precision=precision, max_steps=1, default_root_dir=tmp_path).fit(module, llama.batches())
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert module.began.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(module.began[name], value.to(dtype)), name


@LOST
@pytest.mark.parametrize("convert", [lambda model: model.to(torch.bfloat16), lambda model: model.half(), copy.deepcopy])
def test_values_follow_a_conversion(convert: Any, directory: Path, tmp_path: Path) -> None:
    saved = save_changed("saved", directory, tmp_path / "adapter")
    module = Beginning(lambda: convert(loaded(llama.base_on_meta(), tmp_path / "adapter")))
    strategy = HeteroOffloadStrategy("host", weights=directory)
    quiet_trainer(strategy=strategy, max_steps=1, default_root_dir=tmp_path).fit(module, llama.batches())
    for name, value in saved.items():
        assert torch.equal(module.began[name], value.to(module.began[name].dtype)), name


@LOST
def test_an_embedding_of_the_adapter_comes_before_the_base(directory: Path, tmp_path: Path) -> None:
    """PEFT saves the embedding with an adapter of it; a base of another folder has another one."""
    torch.manual_seed(7)
    llama.LlamaForCausalLM(llama.config()).save_pretrained(tmp_path / "other")
    saved = save_changed("embedding", tmp_path / "other", tmp_path / "adapter")
    assert any("embed_tokens.base_layer" in name for name in saved)
    expected = fit(lambda: loaded(llama.base_in_memory(directory), tmp_path / "adapter"), "auto", tmp_path)
    build = lambda: loaded(llama.base_on_meta(), tmp_path / "adapter")  # noqa: E731
    assert_same(fit(build, HeteroOffloadStrategy("disk", weights=directory), tmp_path), expected)


@LOST
@pytest.mark.parametrize("plan", ["host", "disk"])
def test_a_buffer_beside_weights_is_set_and_the_weights_stay(plan: str, tmp_path: Path) -> None:
    """Gemma's embedding has a buffer that files lack. Its weights draw no random numbers."""
    settings = GemmaConfig(
        vocab_size=llama.WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    GemmaForCausalLM(settings).save_pretrained(directory := tmp_path / "weights")
    adapter = tmp_path / "adapter"
    base = GemmaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = peft.get_peft_model(base, config(modules_to_save=["embed_tokens"], lora_dropout=0.5))
    with torch.no_grad():
        for param in filter(lambda p: p.requires_grad, model.parameters()):
            param.add_(torch.randn_like(param))
    model.save_pretrained(adapter)

    def build(device: str) -> Any:
        with torch.device(device):
            base = GemmaForCausalLM(settings)
        if device == "cpu":
            base.load_state_dict(GemmaForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict())
        model = loaded(base, adapter).train()
        torch.manual_seed(3)  # dropout follows
        return model

    expected = fit(lambda: build("cpu"), "auto", tmp_path)
    assert_same(fit(lambda: build("meta"), HeteroOffloadStrategy(plan, weights=directory), tmp_path), expected)


@LOST
@pytest.mark.parametrize(
    ("load", "kind"), [*((loaded, kind) for kind in [*KINDS, "prompt"]), (without_copies, "lora"), (without_copies, "saved")]
)
def test_what_configure_model_makes_needs_no_warning(
    load: Any, kind: str, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "prompt":

        def build() -> Any:
            return peft.get_peft_model(llama.base_on_meta(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    else:
        peft.get_peft_model(llama.base_in_memory(directory), KINDS[kind]()).save_pretrained(tmp_path / "adapter")

        def build() -> Any:
            return load(llama.base_on_meta(), tmp_path / "adapter")

    fit(build, HeteroOffloadStrategy("host", weights=directory), tmp_path)
    assert "begin anew" not in caplog.text


@LOST
def test_lost_values_are_not_missed_by_a_resume(directory: Path, tmp_path: Path) -> None:
    """The checkpoint has the adapters."""
    peft.get_peft_model(llama.base_in_memory(directory), config()).save_pretrained(adapter := tmp_path / "adapter")
    strategy = HeteroOffloadStrategy("host", weights=directory)
    module = llama.LitAdapters(lambda: loaded(llama.base_on_meta(), adapter))
    trainer = quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=tmp_path)
    trainer.fit(module, llama.batches())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = llama.LitAdapters(llama.base_on_meta)
    again.model = loaded(llama.base_on_meta(), adapter)
    quiet_trainer(strategy=HeteroOffloadStrategy("host", weights=directory), max_steps=2, default_root_dir=tmp_path).fit(
        again, llama.batches(), ckpt_path=str(tmp_path / "last.ckpt"), weights_only=False
    )
    for (name, one), (_, other) in zip(again.state_dict().items(), module.state_dict().items(), strict=True):
        assert torch.equal(one, other), name


@LOST
def test_a_state_that_is_loaded_on_the_meta_device_counts(directory: Path, tmp_path: Path) -> None:
    def build() -> Any:
        model = llama.base_on_meta()
        model.load_state_dict(llama.base_in_memory(directory).state_dict())
        return model

    expected = fit(lambda: llama.base_in_memory(directory), "auto", tmp_path)
    assert_same(fit(build, HeteroOffloadStrategy("disk"), tmp_path), expected)


@LOST
def test_a_state_that_is_loaded_there_may_not_take_the_budget(directory: Path, tmp_path: Path) -> None:
    def build() -> Any:
        model = llama.base_on_meta()
        model.load_state_dict(llama.base_in_memory(directory).state_dict())
        return model

    with pytest.raises(ConfigError, match=r"has lost the values.*meta device.*Up to 10\.0 KiB.*weights="):
        fit(build, HeteroOffloadStrategy("disk", host_memory="20KiB"), tmp_path)


@LOST
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_saved_prompts_predict(kind: Any, inside: bool, directory: Path, tmp_path: Path) -> None:
    """Wherever the model was on the meta device when PEFT read them."""
    torch.manual_seed(1)
    settings = kind(task_type="CAUSAL_LM", num_virtual_tokens=3)
    peft.get_peft_model(llama.base_in_memory(directory), settings).save_pretrained(adapter := tmp_path / "adapter")

    def build() -> Any:
        with torch.device("meta") if inside else nullcontext():
            return peft.PeftModel.from_pretrained(llama.base_on_meta(), adapter)

    module = llama.LitAdapters(build)
    trainer = quiet_trainer(strategy=HeteroOffloadStrategy("disk", weights=directory), default_root_dir=tmp_path)
    trainer.validate(module, llama.batches(), verbose=False)
    plain = llama.LitAdapters(lambda: peft.PeftModel.from_pretrained(llama.base_in_memory(directory), adapter))
    quiet_trainer(default_root_dir=tmp_path).validate(plain, llama.batches(), verbose=False)
    assert all(map(torch.equal, module.losses, plain.losses))
    assert len(module.losses) == len(plain.losses) > 0


class Classifier(llama.LitAdapters):
    strict_loading = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.began = self.weights()
        loss: Tensor = self.model(input_ids=batch, labels=batch[:, 0] % 2).loss
        return loss

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if "score" in name}


@pytest.mark.parametrize("plan", ["host", "disk"])
def test_a_new_head_starts_at_random_and_trains(plan: str, directory: Path, tmp_path: Path) -> None:
    def build() -> Any:
        with torch.device("meta"):
            base = LlamaForSequenceClassification(llama.config())
        base.config.pad_token_id = 0
        return peft.get_peft_model(base, config(task_type="SEQ_CLS"))

    module = Classifier(build)
    strategy = HeteroOffloadStrategy(plan, weights=directory)
    quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=tmp_path).fit(module, llama.batches())
    (before, copied), (after, trained) = module.began.values(), module.weights().values()
    assert torch.equal(before, copied)
    assert before.std() > 0
    assert torch.equal(after, before)
    assert not torch.equal(trained, copied)


def test_a_new_head_needs_consent(directory: Path, tmp_path: Path) -> None:
    def build() -> Any:
        with torch.device("meta"):
            base = LlamaForSequenceClassification(llama.config())
        return peft.get_peft_model(base, config(task_type="SEQ_CLS"))

    with pytest.raises(ConfigError, match=r"score.*missing.*strict_loading = False"):
        fit(build, HeteroOffloadStrategy("host", weights=directory), tmp_path)


def test_a_base_that_nobody_names_is_refused(directory: Path, tmp_path: Path) -> None:
    def build() -> Any:
        return peft.get_peft_model(llama.base_on_meta(), config())

    with pytest.raises(ConfigError, match=r"frozen weights.*in no file: .*embed_tokens.weight.*would be random.*weights='folder'"):
        fit(build, HeteroOffloadStrategy("host"), tmp_path)
    with pytest.raises(ConfigError, match="would be random"), lightning_hetero.offload(build(), plan="host"):
        pass
    module = llama.LitAdapters(build)
    quiet_trainer(strategy=HeteroOffloadStrategy("host", weights=directory), max_steps=1, default_root_dir=tmp_path).fit(
        module, llama.batches()
    )
    torch.save(module.trainer._checkpoint_connector.dump_checkpoint(), tmp_path / "all.ckpt")
    again = llama.LitAdapters(build)
    quiet_trainer(strategy=HeteroOffloadStrategy("host"), max_steps=2, default_root_dir=tmp_path).fit(
        again, llama.batches(), ckpt_path=tmp_path / "all.ckpt", weights_only=False
    )
    assert torch.equal(again.model.state_dict()["base_model.model.lm_head.weight"], llama.base_in_memory(directory).lm_head.weight)
