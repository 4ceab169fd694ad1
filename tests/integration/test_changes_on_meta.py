"""Values that code computes on the meta device, which keeps none: refused, never lost silently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import quiet_trainer

from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError
from lightning_hetero.strategies import HeteroOffloadStrategy

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft, whose adapters are trained here, is missing")
import peft
from support import llama

LOST = pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")


def config() -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])


def loaded(base: Any, adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return llama.save(tmp_path / "weights")


@pytest.fixture
def adapter(directory: Path, tmp_path: Path) -> Path:
    torch.manual_seed(1)
    model = peft.get_peft_model(llama.base_in_memory(directory), config())
    with torch.no_grad():
        first_b(model).fill_(0.5)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def fit(build: Callable[[], Any], strategy: Any, root: Path, steps: int = 1) -> Any:
    module = llama.LitAdapters(build)
    quiet_trainer(strategy=strategy, max_steps=steps, default_root_dir=root).fit(module, llama.batches())
    return module


def scaled(model: Any) -> None:
    first_b(model).data.mul_(2)


def set_in_part(model: Any) -> None:
    first_b(model).data[:1].copy_(torch.ones(1, first_b(model).shape[1]))


def computed(model: Any) -> None:
    for param in adapters_of(model):
        param.data = param.data * 2


def made_anew(model: Any) -> None:
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_B["default"].weight = torch.nn.Parameter(layer.lora_B["default"].weight.detach() + 1)


def begun(model: Any) -> None:
    for param in adapters_of(model):
        torch.nn.init.constant_(param, 0.5)


def turned(model: Any) -> None:
    """The copy has the shape of the parameter, which is a square, and another order."""
    lower = model.base_model.model.model.layers[0].self_attn.o_proj
    lower.weight.data.t().copy_(torch.arange(lower.weight.numel(), dtype=torch.float32).view(lower.weight.shape))


def zeroed(model: Any) -> None:
    torch.nn.init.zeros_(model.base_model.model.lm_head.weight)


def merged(model: Any) -> None:
    model.merge_adapter()


def adapters_of(model: Any) -> list[Any]:
    return [param for name, param in model.named_parameters() if "lora_" in name]


def first_b(model: Any) -> Any:
    return next(param for name, param in model.named_parameters() if "lora_B" in name)


@LOST
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (scaled, "lora_B"), (set_in_part, "lora_B"), (computed, "lora_A"), (made_anew, "lora_B"), (begun, "lora_A"),
        (turned, "o_proj"), (zeroed, "lm_head"), (merged, "q_proj.base_layer"),
    ],
)  # fmt: skip
def test_values_that_change_on_the_meta_device_are_refused(
    change: Callable[[Any], None], name: str, directory: Path, adapter: Path, tmp_path: Path
) -> None:
    """Also those of the base, which the files have as they were."""

    def build() -> Any:
        model = loaded(llama.base_on_meta(), adapter)
        change(model)
        return model

    with pytest.raises(ConfigError, match=rf"{name}.*changed on the meta device"):
        fit(build, HeteroOffloadStrategy("host", weights=directory), tmp_path)


@LOST
def test_new_adapters_on_a_merged_base_are_refused(directory: Path, adapter: Path, tmp_path: Path) -> None:
    """The files have the base without the first adapter, which was merged into it."""

    def build() -> Any:
        return peft.get_peft_model(loaded(llama.base_on_meta(), adapter).merge_and_unload(), config())

    with pytest.raises(ConfigError, match=r"q_proj\.base_layer\.weight' was changed on the meta device.*files that have the"):
        fit(build, HeteroOffloadStrategy("host", weights=directory), tmp_path)


@LOST
def test_a_second_adapter_that_is_merged_is_refused(directory: Path, adapter: Path, tmp_path: Path) -> None:
    """PEFT leaves a second adapter in memory, and torch adds it to a weight on the meta device."""

    def build() -> Any:
        model = loaded(llama.base_on_meta(), adapter)
        model.load_adapter(adapter, "second")
        model.base_model.merge_adapter(["second"])
        return model

    with pytest.raises(ConfigError, match=r"base_layer\.weight' was changed on the meta device"):
        fit(build, HeteroOffloadStrategy("host", weights=directory), tmp_path)


@pytest.mark.parametrize("change", [begun, zeroed, lambda model: setattr(first_b(model), "data", first_b(model).data + 1)])
def test_values_that_code_sets_on_the_meta_device_are_refused(change: Any, directory: Path, tmp_path: Path) -> None:
    """In new adapters as well: there they would begin as PEFT makes them."""

    def build() -> Any:
        model = peft.get_peft_model(llama.base_on_meta(), config())
        change(model)
        return model

    with pytest.raises(ConfigError, match=r"was changed on the meta device.*on_train_start"):
        fit(build, HeteroOffloadStrategy("host", weights=directory), tmp_path)


def test_what_is_set_on_the_meta_device_may_come_from_a_checkpoint(directory: Path, tmp_path: Path) -> None:
    """A constructor of one's own sets values, which those of the checkpoint replace."""

    def build(base: Any) -> Any:
        torch.nn.init.zeros_(base.lm_head.weight)
        return base

    module = llama.LitAdapters(lambda: build(llama.base_in_memory(directory)))
    trainer = quiet_trainer(strategy="auto", max_steps=1, default_root_dir=tmp_path)
    trainer.fit(module, llama.batches())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = llama.LitAdapters(lambda: build(llama.base_on_meta()))
    quiet_trainer(strategy=HeteroOffloadStrategy("host"), max_steps=1, default_root_dir=tmp_path).fit(
        again, llama.batches(), ckpt_path=str(tmp_path / "one.ckpt"), weights_only=False
    )
    for (name, one), (_, other) in zip(again.state_dict().items(), module.state_dict().items(), strict=True):
        assert torch.equal(one, other), name


def test_weights_that_memory_would_round_are_refused(directory: Path, tmp_path: Path) -> None:
    """``prepare_model_for_kbit_training`` makes fp32 of bf16; files may have more bits."""

    def build() -> Any:
        base = llama.base_on_meta().to(torch.bfloat16)
        return peft.get_peft_model(peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False), config())

    with pytest.raises(ConfigError, match=r"is torch\.float32 in the files.*where it was torch\.bfloat16 before"):
        fit(build, HeteroOffloadStrategy("host", weights=directory), tmp_path)
    llama.base_in_memory(directory).to(torch.bfloat16).save_pretrained(half := tmp_path / "half")
    module = fit(build, HeteroOffloadStrategy("host", weights=half), tmp_path)
    [head] = [value for name, value in module.state_dict().items() if "lm_head" in name]
    assert torch.equal(head, llama.base_in_memory(half).lm_head.weight)


def prompts(base: Any, adapter: Path, kind: Any) -> Any:
    """Saved prompts that train on: PEFT refuses ``is_trainable`` for them."""
    model = peft.get_peft_model(base, kind)
    peft.set_peft_model_state_dict(model, peft.load_peft_weights(adapter, device="cpu"))
    return model


PROMPTS: dict[str, tuple[Any, str]] = {
    "p-tuning": (
        peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
        r"was loaded on the meta device without 'model\.prompt_encoder\.default\.mlp_head\.0\.weight'.*ckpt_path",
    ),
    "cpt": (
        peft.CPTConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=3, cpt_token_ids=[1, 2, 3], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3]
        ),
        "has a CPTEmbedding, whose start is not known here",
    ),
    "cartridge": (
        peft.CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "has a CartridgeEncoder, whose start is not known here",
    ),
}


@LOST
@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_of_which_a_part_would_begin_anew_are_refused(kind: str, directory: Path, tmp_path: Path) -> None:
    settings, why = PROMPTS[kind]
    peft.get_peft_model(llama.base_in_memory(directory), settings).save_pretrained(tmp_path / "prompts")
    build = lambda: prompts(llama.base_on_meta(), tmp_path / "prompts", settings)  # noqa: E731
    with pytest.raises(ConfigError, match=why):
        fit(build, HeteroOffloadStrategy("host", weights=directory), tmp_path)


@LOST
def test_ranks_of_adalora_that_would_train_are_refused(directory: Path, tmp_path: Path) -> None:
    settings = peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=10)
    peft.get_peft_model(llama.base_in_memory(directory), settings).save_pretrained(tmp_path / "saved")
    build = lambda: peft.PeftModel.from_pretrained(llama.base_on_meta(), tmp_path / "saved", is_trainable=True)  # noqa: E731
    with pytest.raises(ConfigError, match=r"q_proj\.ranknum\.default', a rank of AdaLoRA"):
        fit(build, HeteroOffloadStrategy("host", weights=directory), tmp_path)


@LOST
@pytest.mark.parametrize("is_other", [False, True])
def test_a_base_that_is_too_large_to_keep_must_be_that_of_the_files(is_other: bool, directory: Path, tmp_path: Path) -> None:
    """Their weights come in its place, so it is compared with them."""
    state = llama.base_in_memory(directory).state_dict()
    state["lm_head.weight"][-1, -1] += float(is_other)

    def build() -> Any:
        base = llama.base_on_meta()
        base.load_state_dict(state)
        return peft.get_peft_model(base.to(torch.bfloat16), config())

    strategy = HeteroOffloadStrategy("disk", weights=directory, host_memory="20KiB")
    refused = r"lm_head.*has lost the values" if is_other else "needs"
    with pytest.raises(ConfigError if is_other else OutOfMemoryBudgetError, match=refused):
        fit(build, strategy, tmp_path)
