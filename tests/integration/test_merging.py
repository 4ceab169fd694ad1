"""``export_weights(merge=...)``: the bits of PEFT's ``merge_and_unload()``, one layer at a time,
from every kind of source.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import quiet_trainer
from torch import Tensor
from typer.testing import CliRunner

from lightning_hetero import EmulatedDevice, export_weights
from lightning_hetero.cli.app import app
from lightning_hetero.errors import ConfigError, OffloadedAccessError, UnsupportedError
from lightning_hetero.runtime.session import Session
from lightning_hetero.strategies import HeteroOffloadStrategy

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft, whose adapters are merged here, is missing")
import peft
from support import llama

State = dict[str, Tensor]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], **options})


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "rslora": lambda: lora(use_rslora=True, rank_pattern={"v_proj": 2}, alpha_pattern={"layers.1.self_attn.q_proj": 5}),
    "dora": lambda: lora(use_dora=True),
    "embedding": lambda: lora(target_modules=["q_proj", "embed_tokens"], layers_to_transform=None),
    "dora embedding": lambda: lora(use_dora=True, target_modules=["embed_tokens"]),
    "modules_to_save": lambda: lora(modules_to_save=["lm_head", "input_layernorm"]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


class Lit(llama.LitLlama):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=5e-2, fused=True)


def trained(directory: Path, config: Any, root: Path, *, dtype: torch.dtype, **options: Any) -> Any:
    """A module with an adapter, after a few steps from a store, and the adapter's folder."""
    torch.manual_seed(5)
    model = peft.get_peft_model(llama.LlamaForCausalLM.from_pretrained(directory, dtype=dtype), config)
    module = Lit(lambda: model)
    strategy = HeteroOffloadStrategy("disk", disk_path=root / "store", **options)
    precision: Any = "bf16-true" if dtype == torch.bfloat16 else "32-true"
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=2, default_root_dir=root)
    trainer.fit(module, llama.batches())
    trainer.save_checkpoint(root / "x.ckpt")
    module.model.save_pretrained(root / "adapter")
    return module


def by_peft(model: Any) -> State:
    return {name: value.detach().clone() for name, value in model.merge_and_unload().state_dict().items()}


def same(folder: Path, expected: State) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_all_sources_have_the_bits_of_peft(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = llama.save(tmp_path / "weights", dtype=dtype)
    module = trained(directory, CONFIGS[name](), tmp_path, dtype=dtype)
    export_weights(module, tmp_path / "model", module="model", merge=True)
    export_weights(tmp_path / "store", tmp_path / "of store", module="model", merge=tmp_path / "adapter")
    export_weights(tmp_path / "store", tmp_path / "of store alone", module="model", merge=True)
    export_weights(tmp_path / "x.ckpt", tmp_path / "of file", module="model", merge=tmp_path / "adapter")
    export_weights(directory, tmp_path / "of base", merge=tmp_path / "adapter")
    base = llama.LlamaForCausalLM.from_pretrained(directory, dtype=dtype)
    same(tmp_path / "of base", by_peft(peft.PeftModel.from_pretrained(base, tmp_path / "adapter")))
    expected = by_peft(module.model)
    for kind in ("model", "of store", "of store alone", "of file"):
        same(tmp_path / kind, expected)


def test_the_command_and_transformers_read_the_result(tmp_path: Path) -> None:
    directory = llama.save(tmp_path / "weights", tied=True)
    module = trained(directory, lora(), tmp_path, dtype=torch.float32)
    arguments = ["export", str(directory), str(tmp_path / "out"), "--merge", str(tmp_path / "adapter")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    store = str(tmp_path / "store")
    done = CliRunner().invoke(app, ["export", store, str(tmp_path / "alone"), "--module", "model", "--merge", store])
    assert done.exit_code == 0, done.output
    same(tmp_path / "alone", load_file(tmp_path / "out" / "model.safetensors"))
    module.model.config.save_pretrained(tmp_path / "out")
    loaded = llama.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, module.model.merge_and_unload().eval()(tokens).logits)


def with_biases(directory: Path) -> Path:
    config = llama.config()
    config.attention_bias = config.mlp_bias = True
    torch.manual_seed(3)
    llama.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("bias", "dtype"), [("lora_only", torch.float32), ("all", torch.float32), ("all", torch.bfloat16)])
def test_biases_that_trained_come_from_the_store(bias: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """They are tensors of the base, and PEFT saves them with the adapter."""
    directory = with_biases(tmp_path / "weights")
    trained(directory, lora(bias=bias), tmp_path, dtype=dtype)
    export_weights(directory, tmp_path / "out", merge=tmp_path / "store")
    export_weights(directory, tmp_path / "of folder", merge=tmp_path / "adapter")
    base = llama.LlamaForCausalLM.from_pretrained(directory)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    expected = by_peft(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    same(tmp_path / "out", expected)
    same(tmp_path / "of folder", expected)
    changed = {name for name, value in expected.items() if not torch.equal(value, before[name])}
    assert "model.layers.1.mlp.down_proj.bias" in changed
    assert ("model.layers.1.mlp.up_proj.bias" in changed) == (bias == "all")


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_weights_of_the_base_that_trained_come_from_the_store(optimizer: Any, tmp_path: Path) -> None:
    """PEFT does not save them. SGD without momentum has no state that would tell of them.

    PEFT is in the model, without a model of its own, and the module has weights beside it.
    """

    class Beside(llama.LitLlama):
        def __init__(self, build: Any) -> None:
            super().__init__(build)
            self.head = torch.nn.Linear(1, 1)

        def loss(self, tokens: Tensor) -> Tensor:
            found: Tensor = self.head(super().loss(tokens)[None]).sum()
            return found

        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=1e-2)

    directory = with_biases(tmp_path / "weights")
    model: Any = peft.inject_adapter_in_model(lora(), llama.LlamaForCausalLM.from_pretrained(directory))
    model.model.norm.weight.requires_grad_(True)
    module, store = Beside(lambda: model), tmp_path / "store"
    strategy = HeteroOffloadStrategy("disk", disk_path=store)
    quiet_trainer(strategy=strategy, precision="bf16-mixed", max_steps=2, default_root_dir=tmp_path).fit(module, llama.batches())
    export_weights(directory, tmp_path / "out", merge=store)
    export_weights(store, tmp_path / "of store", module="model", merge=True)
    found, before = load_file(tmp_path / "out" / "model.safetensors"), load_file(directory / "model.safetensors")
    same(tmp_path / "of store", found)
    assert {name for name in found if not torch.equal(found[name], before[name])} == {"model.norm.weight"} | {
        f"model.layers.{layer}.{name}.weight"
        for layer in range(3)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    }


@pytest.mark.parametrize(
    ("models", "words"), [(["a", "b"], "has adapters of the models 'a', 'b'"), ([], "does not say which model")]
)
def test_a_store_that_does_not_tell_which_adapter_is_meant_is_refused(models: list[str], words: str) -> None:
    """Two may have one configuration, and stores of earlier versions do not name them."""
    from lightning_hetero.convert import merging

    adapter = merging.of_store({"default": lora().to_dict()}, "run")
    with pytest.raises(UnsupportedError, match=f"store 'run' {words}.*Give the folder"):
        merging.with_tensors(adapter, [], models, ())


def test_one_layer_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_hetero.convert import merging
    from lightning_hetero.convert.exporting import weights_of

    directory = llama.save(tmp_path / "weights")
    trained(directory, lora(), tmp_path, dtype=torch.float32)
    from contextlib import ExitStack

    tensors = merging.merged(weights_of(directory, ExitStack()), merging.of_folder(tmp_path / "adapter"), {})
    layers = {t.read.func.__self__ for t in tensors if hasattr(t.read, "func")}  # type: ignore[attr-defined]
    assert len(layers) == 9
    for tensor in tensors:
        tensor.read()
        assert all(p.is_meta for layer in layers for p in layer.module.parameters())


def test_an_unknown_kind_is_refused_by_name(tmp_path: Path) -> None:
    directory = llama.save(tmp_path / "weights")
    model = llama.LlamaForCausalLM.from_pretrained(directory)
    peft.get_peft_model(model, peft.LoHaConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "loha")
    with pytest.raises(UnsupportedError, match="is of type LOHA; merged are LORA, IA3"):
        export_weights(directory, tmp_path / "out", merge=tmp_path / "loha")
    with pytest.raises(ConfigError, match=r"no folder of an adapter: it has no adapter_config.json"):
        export_weights(directory, tmp_path / "out", merge=directory)
    with pytest.raises(ConfigError, match="merge=True is for a model in memory"):
        export_weights(directory, tmp_path / "out", merge=True)
    with pytest.raises(ConfigError, match="no adapters of PEFT"):
        export_weights(model.model.embed_tokens, tmp_path / "out", merge=True)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    directory = llama.save(tmp_path / "weights")
    deeper = peft.get_peft_model(llama.LlamaForCausalLM(llama.config(layers=4)), lora())
    deeper.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"the adapter is for 'model.layers.3.*', which the model does not have"):
        export_weights(directory, tmp_path / "out", merge=tmp_path / "adapter")


def test_layers_of_the_base_that_the_adapter_lacks_are_named_and_keep_their_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = llama.save(tmp_path / "weights")
    torch.manual_seed(1)
    for layers in (1, 3):
        made = peft.get_peft_model(llama.LlamaForCausalLM(llama.config(layers=layers)), lora(init_lora_weights=False))
        made.save_pretrained(tmp_path / str(layers))
    export_weights(directory, tmp_path / "all", merge=tmp_path / "3")
    assert not caplog.messages
    export_weights(directory, tmp_path / "one", merge=tmp_path / "1")
    (message,) = caplog.messages
    assert "has no tensors for 'model.layers.1.mlp.down_proj', 'model.layers.1.self_attn.q_proj'" in message
    assert "and 3 more, which its configuration names: they keep the base's weights" in message
    merged, before = load_file(tmp_path / "one" / "model.safetensors"), load_file(directory / "model.safetensors")
    changed = {name for name, value in before.items() if not torch.equal(merged[name], value)}
    assert changed == {f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")}


def test_several_active_adapters_are_refused(tmp_path: Path) -> None:
    model = peft.get_peft_model(llama.LlamaForCausalLM(llama.config()), lora())
    model.add_adapter("other", lora(r=2))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(UnsupportedError, match="'default', 'other' are active"):
        export_weights(model, tmp_path / "out", merge=True)
    model.set_adapter("other")
    export_weights(model, tmp_path / "out", merge=True)
    same(tmp_path / "out", by_peft(model))


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_an_adapter_that_changed_its_base_is_not_merged_into_another(kind: str, tmp_path: Path) -> None:
    """PEFT takes the first values of such an adapter out of the base weights, in memory."""
    directory = llama.save(tmp_path / "weights")
    model = peft.get_peft_model(llama.LlamaForCausalLM.from_pretrained(directory), lora(init_lora_weights=kind))
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedError, match=f"began with init_lora_weights='{kind}', which changes the base weights"):
        export_weights(directory, tmp_path / "out", merge=tmp_path / "adapter")
    export_weights(model, tmp_path / "out", merge=True)
    same(tmp_path / "out", by_peft(model))


@pytest.mark.parametrize("name", ["lora", "dora", "modules_to_save"])
def test_a_source_and_a_folder_with_other_weights_of_an_adapter_are_refused(name: str, tmp_path: Path) -> None:
    """Nothing says which of the two is meant."""
    directory = llama.save(tmp_path / "weights")
    module = trained(directory, CONFIGS[name](), tmp_path, dtype=torch.float32)
    with torch.no_grad():
        next(p for name, p in module.named_parameters() if p.requires_grad).mul_(1.5)
    module.model.save_pretrained(tmp_path / "later")
    for source in (tmp_path / "store", tmp_path / "x.ckpt"):
        with pytest.raises(ConfigError, match=r"have an adapter of their own, and '.*later' has other values"):
            export_weights(source, tmp_path / "out", module="model", merge=tmp_path / "later")
    (tmp_path / "later" / "adapter_model.safetensors").unlink()
    export_weights(tmp_path / "store", tmp_path / "out", module="model", merge=tmp_path / "later")
    export_weights(tmp_path / "store", tmp_path / "same", module="model", merge=tmp_path / "adapter")
    same(tmp_path / "out", load_file(tmp_path / "same" / "model.safetensors"))


def test_each_of_two_models_is_merged_by_its_own_configuration(tmp_path: Path) -> None:
    """Such as a student and a teacher, whose adapters have one name and other scales."""

    class Two(Lit):
        def configure_model(self) -> None:
            torch.manual_seed(5)
            made = [peft.get_peft_model(llama.LlamaForCausalLM(llama.config()), lora(lora_alpha=alpha)) for alpha in (8, 32)]
            self.model, self.other = made[0].train(), made[1].train()

        def loss(self, tokens: Tensor) -> Tensor:
            found: Tensor = super().loss(tokens) + self.other(input_ids=tokens, labels=tokens, use_cache=False).loss
            return found

    module, store = Two(lambda: None), tmp_path / "store"
    strategy = HeteroOffloadStrategy("disk", disk_path=store)
    quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=tmp_path).fit(module, llama.batches())
    for name in ("model", "other"):
        expected = by_peft(deepcopy(module.get_submodule(name)))
        export_weights(module, tmp_path / name, module=name, merge=True)
        same(tmp_path / name, expected)
        with pytest.raises(ConfigError, match="does not say how its adapters were configured"):
            export_weights(store, tmp_path / "no", module=name, merge=True)
        module.get_submodule(name).save_pretrained(tmp_path / f"adapter of {name}")  # type: ignore[operator]
        export_weights(store, tmp_path / f"{name} of store", module=name, merge=tmp_path / f"adapter of {name}")
        same(tmp_path / f"{name} of store", expected)
    module.other.merge_adapter()
    export_weights(module, tmp_path / "again", module="model", merge=True)
    same(tmp_path / "again", by_peft(deepcopy(module.model)))
    with pytest.raises(UnsupportedError, match=r"'model', 'other' have adapters of their own.*module='model'"):
        export_weights(module, tmp_path / "no", merge=True)


def test_layers_that_are_merged_already_are_not_merged_again(tmp_path: Path) -> None:
    """``merge_adapter()`` changes the base weights, and keeps the adapters."""
    directory = llama.save(tmp_path / "weights")
    module = trained(directory, lora(modules_to_save=["lm_head"]), tmp_path, dtype=torch.float32)
    module.model.add_adapter("other", lora(r=2))
    expected = by_peft(deepcopy(module.model))
    module.model.merge_adapter()
    export_weights(module, tmp_path / "out", module="model", merge=True)
    same(tmp_path / "out", expected)
    module.model.unmerge_adapter()
    module.model.merge_adapter(["other"])
    with pytest.raises(UnsupportedError, match=r"'other' merged, and not all that have 'default' exactly.*unmerge_adapter\(\)"):
        export_weights(module, tmp_path / "other", module="model", merge=True)


def test_adapters_of_other_layers_do_not_count(tmp_path: Path) -> None:
    """All layers that have the adapter have it merged; those of the other one need not."""
    directory = llama.save(tmp_path / "weights")
    module = trained(directory, lora(target_modules=["q_proj"]), tmp_path, dtype=torch.float32)
    module.model.add_adapter("other", lora(r=2, target_modules=["v_proj"]))
    expected = by_peft(deepcopy(module.model))
    module.model.merge_adapter(["default"])
    export_weights(module, tmp_path / "out", module="model", merge=True)
    same(tmp_path / "out", expected)
    module.model.base_model.model.model.layers[0].self_attn.q_proj.unmerge()
    with pytest.raises(UnsupportedError, match=r"'default' merged, and not all that have 'default' exactly"):
        export_weights(module, tmp_path / "no", module="model", merge=True)
    module.model.merge_adapter(["other"])
    with pytest.raises(UnsupportedError, match=r"'default', 'other' merged"):
        export_weights(module, tmp_path / "no", module="model", merge=True)


def test_the_folder_of_several_adapters_is_as_peft_saves_it(tmp_path: Path) -> None:
    """``default`` is at its top, and others are in folders of their own."""
    model = peft.get_peft_model(llama.LlamaForCausalLM(llama.config()), lora())
    model.add_adapter("other", lora(r=2, target_modules=["v_proj"]))
    with torch.no_grad():
        for index, param in enumerate(p for name, p in model.named_parameters() if "lora_B" in name):
            param.normal_(generator=torch.Generator().manual_seed(index))
    checkpoint = tmp_path / "x.ckpt"
    export_weights(model, checkpoint)
    model.save_pretrained(tmp_path / "saved")
    for name, folder in (("default", tmp_path / "saved"), ("other", tmp_path / "saved" / "other")):
        chosen = deepcopy(model)
        chosen.set_adapter(name)
        done = CliRunner().invoke(app, ["export", str(checkpoint), str(tmp_path / name), "--merge", str(folder)])
        assert done.exit_code == 0, done.output
        same(tmp_path / name, by_peft(chosen))
    shutil.copytree(tmp_path / "saved" / "other", tmp_path / "renamed")
    export_weights(checkpoint, tmp_path / "by values", merge=tmp_path / "renamed")
    same(tmp_path / "by values", by_peft(chosen))
    (tmp_path / "renamed" / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapters 'default', 'other', and none has the name of the folder .* or the values"):
        export_weights(checkpoint, tmp_path / "no", merge=tmp_path / "renamed")


@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids=" and ".join)
def test_a_copy_of_a_tied_weight_is_no_longer_tied(saved: list[str], tmp_path: Path) -> None:
    """The other use of the weight keeps the base's values, and needs a name of its own in the
    result.
    """
    directory = llama.save(tmp_path / "weights", tied=True)
    module = trained(directory, lora(modules_to_save=saved), tmp_path, dtype=torch.float32)
    export_weights(module, tmp_path / "of model", module="model", merge=True)
    export_weights(tmp_path / "x.ckpt", tmp_path / "of file", module="model", merge=tmp_path / "adapter")
    for source, path in (("store", tmp_path / "store"), ("base", directory)):
        with pytest.raises((UnsupportedError, ConfigError), match=r"head is tied|If it is a head that is tied to the embedding"):
            export_weights(path, tmp_path / source, module="model" if source == "store" else "", merge=tmp_path / "adapter")
    expected = by_peft(module.model)
    same(tmp_path / "of model", expected)
    same(tmp_path / "of file", expected)


@pytest.mark.parametrize("in_memory", [False, True])
def test_an_adapter_on_a_tied_head_is_refused_with_the_remedy(in_memory: bool, tmp_path: Path) -> None:
    directory = llama.save(tmp_path / "weights", tied=True)
    model = peft.get_peft_model(llama.LlamaForCausalLM.from_pretrained(directory), lora(target_modules=["lm_head"]))
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"for 'lm_head.*', which the model does not have.*tied to the embedding.*merge_and_unl"):
        export_weights(model if in_memory else directory, tmp_path / "out", merge=in_memory or tmp_path / "adapter")


@pytest.mark.parametrize("change", ["width", "rank"])
def test_an_adapter_of_other_shapes_is_refused_by_name(change: str, tmp_path: Path) -> None:
    directory = llama.save(tmp_path / "weights")
    other = llama.config()
    other.hidden_size = 32 if change == "width" else other.hidden_size
    other.head_dim = llama.config().head_dim
    peft.get_peft_model(llama.LlamaForCausalLM(other), lora()).save_pretrained(tmp_path / "adapter")
    if change == "rank":
        peft.get_peft_model(llama.LlamaForCausalLM(other), lora(r=2)).save_pretrained(tmp_path / "two")
        (tmp_path / "two" / "adapter_config.json").replace(tmp_path / "adapter" / "adapter_config.json")
    with pytest.raises(ConfigError, match=r"adapter '.*adapter' has 'lora_[AB].weight' of shape \(\d+, \d+\) for 'model.layers"):
        export_weights(directory, tmp_path / "out", merge=tmp_path / "adapter")


# ---- in memory -----------------------------------------------------------------------------------


def merging(kind: str, strategy: Any, root: Path, *, inside: bool) -> State:
    """The weights of the merged model, merged as training ends or after it."""
    found: State = {}

    class Merges(Lit):
        def on_train_end(self) -> None:
            if inside:
                with torch.no_grad():
                    found.update(by_peft(self.model))

    torch.manual_seed(3)
    module = Merges(lambda: peft.get_peft_model(llama.LlamaForCausalLM(llama.config()), CONFIGS[kind]()))
    quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=root).fit(module, llama.batches())
    with torch.no_grad():
        return found if inside else by_peft(module.model)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@pytest.mark.parametrize("plan", ["host", "disk", "device", "parked"])
def test_merge_and_unload_gives_the_same_weights_under_every_plan(
    plan: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plan == "parked":  # the model stays on disk after the fit
        monkeypatch.setattr(Session, "_fits_memory", lambda session: False)

    def strategy() -> Any:
        if plan == "device":
            return HeteroOffloadStrategy("disk", device=EmulatedDevice(memory="8MiB"))
        return HeteroOffloadStrategy("disk" if plan == "parked" else plan)

    for inside in (True, False):
        expected = merging(kind, "auto", tmp_path, inside=inside)
        got = merging(kind, strategy(), tmp_path, inside=inside)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_merging_on_a_device_outside_no_grad_is_refused_with_the_remedy(tmp_path: Path) -> None:
    class Merges(Lit):
        def on_train_end(self) -> None:
            self.model.merge_and_unload()

    module = Merges(lambda: peft.get_peft_model(llama.LlamaForCausalLM(llama.config()), lora()))
    strategy = HeteroOffloadStrategy("disk", device=EmulatedDevice(memory="8MiB"))
    with pytest.raises(OffloadedAccessError, match=r"under torch.no_grad\(\)"):
        quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=tmp_path).fit(module, llama.batches())
