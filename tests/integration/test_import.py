"""Models on the meta device whose weights come from safetensors, block by block, to where the plan
puts them.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import Outcome, assert_same, outcome, quiet_trainer
from torch import Tensor, nn

from lightning_hetero import EmulatedDevice, export_weights
from lightning_hetero.checkpoint import files
from lightning_hetero.convert import safetensors
from lightning_hetero.errors import ConfigError
from lightning_hetero.strategies import HeteroOffloadStrategy

pytest.importorskip("transformers")
from support import llama


def fit(module: Any, strategy: Any, root: Path, *, steps: int = 3, **options: Any) -> Outcome:
    trainer = quiet_trainer(strategy=strategy, max_steps=steps, default_root_dir=root, limit_val_batches=0, **options)
    trainer.fit(module, llama.batches())
    return outcome(trainer, module)


def hetero(**options: Any) -> Any:
    return HeteroOffloadStrategy(**{"plan": "disk", **options})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return llama.save(tmp_path / "weights")


@pytest.mark.parametrize("plan", ["resident", "host", "disk"])
def test_training_goes_as_if_transformers_had_loaded_the_model(plan: str, directory: Path, tmp_path: Path) -> None:
    expected = fit(llama.from_directory(directory), "auto", tmp_path)
    assert_same(fit(llama.on_meta(), hetero(plan=plan, weights=directory), tmp_path), expected)


def test_weights_reach_a_device(directory: Path, tmp_path: Path) -> None:
    expected = fit(llama.from_directory(directory), "auto", tmp_path)
    strategy = hetero(plan="host", weights=directory, device=EmulatedDevice(memory="64MiB"))
    assert_same(fit(llama.on_meta(), strategy, tmp_path), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_shards_in_bfloat16_become_float32_parameters(tied: bool, tmp_path: Path) -> None:
    directory = llama.save(tmp_path / "weights", tied=tied, dtype=torch.bfloat16, max_shard_size="10kB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    expected = fit(llama.from_directory(directory), "auto", tmp_path)
    module = llama.on_meta(tied=tied)
    assert_same(fit(module, hetero(weights=str(directory)), tmp_path), expected)
    assert (module.model.lm_head.weight is module.model.model.embed_tokens.weight) is tied


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_sixteen_bit_training_starts_from_the_rounded_weights(stored: torch.dtype, tmp_path: Path) -> None:
    directory = llama.save(tmp_path / "weights", dtype=stored)
    expected = fit(llama.from_directory(directory), hetero(plan="resident"), tmp_path, precision="bf16-true")
    assert_same(fit(llama.on_meta(), hetero(weights=directory), tmp_path, precision="bf16-true"), expected)


def test_weights_are_read_once_and_not_again_by_later_runs(directory: Path, tmp_path: Path) -> None:
    module, strategy = llama.on_meta(), hetero(weights=directory)
    trainer = quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=tmp_path, limit_val_batches=1)
    trainer.validate(module, llama.batches(), verbose=False)
    trainer.fit(module, llama.batches())
    trained = {n: v.clone() for n, v in module.state_dict().items()}
    trainer.validate(module, llama.batches(), verbose=False)
    assert all(torch.equal(v, trained[n]) for n, v in module.state_dict().items())
    assert not torch.equal(trained["model.lm_head.weight"], load_file(directory / "model.safetensors")["lm_head.weight"])


class Stack(llama.LitLlama):
    def loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(torch.ones(2, 256)).mean()
        return loss


def on_meta(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        with torch.device("meta"):
            return build()

    return built


def stack() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(256, 2048, bias=False), nn.Linear(2048, 256, bias=False)) for _ in range(12)]
    return nn.Sequential(*layers)


def test_memory_never_holds_more_than_the_budget_and_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "0")  # what is poisoned is in memory
    shapes = {n: p.shape for n, p in on_meta(stack)().named_parameters()}
    save_file({n: torch.ones(s, dtype=torch.bfloat16) for n, s in shapes.items()}, tmp_path / "model.safetensors")
    block_bytes = 4 * sum(s.numel() for n, s in shapes.items() if n.startswith("0."))
    strategy: Any = hetero(weights=tmp_path, host_memory=8 * block_bytes)
    held = []
    read_into = safetensors.StoredTensor.read_into

    def counted(stored: safetensors.StoredTensor, memory: Tensor) -> None:
        read_into(stored, memory)
        arenas = [part.arena for block in strategy.session.blocks for part in block.parts]
        held.append(sum(pages_in_memory(a.address, a.num_bytes) for a in arenas) * 4096)

    monkeypatch.setattr(safetensors.StoredTensor, "read_into", counted)
    trainer = quiet_trainer(strategy=strategy, default_root_dir=tmp_path, limit_val_batches=1)
    trainer.validate(Stack(on_meta(stack)), llama.batches(), verbose=False)
    assert len(held) == 24
    assert block_bytes <= max(held) <= 9 * block_bytes < 12 * block_bytes


def pages_in_memory(address: int, num_bytes: int) -> int:
    pages = -(-num_bytes // 4096)
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), found) == 0
    return sum(byte & 1 for byte in found)


# ---- what files lack, and what they have beside the model ----------------------------------------


def rewritten(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def refused(words: list[str], root: Path, module: Any, **options: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        fit(module, hetero(**options), root)
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)
    assert not list(root.glob("lightning-hetero-*"))


NORM = "model.layers.1.input_layernorm.weight"


def test_a_missing_and_an_unexpected_tensor_are_refused(directory: Path, tmp_path: Path) -> None:
    rewritten(directory, lambda t: t.update({"extra": t.pop(NORM)}))
    refused([f"'{NORM}' missing", "'extra' unexpected", "strict_loading"], tmp_path, llama.on_meta(), weights=directory)


def test_experts_that_transformers_joins_are_refused_and_the_remedy_works(tmp_path: Path) -> None:
    """Transformers 5 saves experts one by one, as their authors have published them."""
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = MixtralConfig(
        vocab_size=llama.WORDS, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    model = MixtralForCausalLM(shape)
    model.save_pretrained(tmp_path / "one by one")
    model.save_pretrained(tmp_path / "joined", save_original_format=False)

    def train(folder: str) -> Any:
        module = llama.LitLlama(on_meta(lambda: MixtralForCausalLM(shape)))
        return fit(module, hetero(weights=tmp_path / folder), tmp_path, steps=1)

    with pytest.raises(ConfigError, match=r"experts.*from_pretrained.*save_original_format=False"):
        train("one by one")
    train("joined")


def test_without_strict_loading_missing_weights_are_initialized(directory: Path, tmp_path: Path) -> None:
    rewritten(directory, lambda t: t.update({"extra": t.pop(NORM)}))
    stored = load_file(directory / "model.safetensors")
    module = llama.on_meta()
    module.strict_loading = False
    trainer = quiet_trainer(strategy=hetero(weights=directory), default_root_dir=tmp_path, limit_val_batches=1)
    trainer.validate(module, llama.batches(), verbose=False)
    weights = module.model.state_dict()
    assert torch.equal(weights.pop(NORM), torch.ones(24))
    assert len(weights) == len(stored) - 1
    assert all(torch.equal(v, stored[n]) for n, v in weights.items())


def test_another_shape_is_refused(directory: Path, tmp_path: Path) -> None:
    rewritten(directory, lambda t: t.update({NORM: torch.ones(25)}))
    words = [f"'{NORM}' is (25,) in model.safetensors, (24,) in the model", "configuration"]
    refused(words, tmp_path, llama.on_meta(), weights=directory)


def test_integers_are_no_weights(directory: Path, tmp_path: Path) -> None:
    rewritten(directory, lambda t: t.update({NORM: torch.ones(24, dtype=torch.int8)}))
    refused([f"'{NORM}' is torch.int8", "torch.float32 in the model"], tmp_path, llama.on_meta(), weights=directory)


def test_weights_of_another_model_are_refused(directory: Path, tmp_path: Path) -> None:
    rewritten(directory, lambda t: [t.update({f"other.{n}.x": t.pop(n)}) for n in list(t)])
    refused(["none of them", "'other.lm_head.weight.x'"], tmp_path, llama.on_meta(), weights=directory)


def test_a_model_with_content_is_refused(directory: Path, tmp_path: Path) -> None:
    refused(["already has content", "torch.device('meta')"], tmp_path, llama.from_directory(directory), weights=directory)


def test_values_that_the_model_ties_must_be_equal(tmp_path: Path) -> None:
    directory = llama.save(tmp_path / "weights", tied=False)
    refused(["'lm_head.weight'", "differ", "one parameter"], tmp_path, llama.on_meta(tied=True), weights=directory)


class Twins(llama.LitLlama):
    def configure_model(self) -> None:
        if self.model is None:
            self.model, self.teacher = self.build(), self.build().requires_grad_(False)


def test_two_modules_that_fit_have_to_be_named(directory: Path, tmp_path: Path) -> None:
    refused(["'model', 'teacher'", "weights={'model': path}"], tmp_path, Twins(llama.on_meta().build), weights=directory)
    refused(["no such module", "'student'"], tmp_path, Twins(llama.on_meta().build), weights={"student": directory})
    module = Twins(llama.on_meta().build)
    teacher = llama.save(tmp_path / "teacher", dtype=torch.bfloat16)
    fit(module, hetero(weights={"model": directory, "teacher": teacher}), tmp_path)
    stored = load_file(teacher / "model.safetensors")
    assert all(torch.equal(v, stored[n].float()) for n, v in module.teacher.state_dict().items())


def test_modules_outside_the_weights_are_initialized(directory: Path, tmp_path: Path) -> None:
    """Names of the body alone: the head is initialized by the model of Hugging Face that it belongs
    to.
    """
    rewritten(directory, lambda t: [t.update({n.removeprefix("model."): t.pop(n)}) for n in list(t)] and t.pop("lm_head.weight"))
    stored = load_file(directory / "model.safetensors")
    module = llama.on_meta()
    trainer = quiet_trainer(strategy=hetero(weights=directory), default_root_dir=tmp_path, limit_val_batches=1)
    trainer.validate(module, llama.batches(), verbose=False)
    assert all(torch.equal(v, stored[n]) for n, v in module.model.model.state_dict().items())
    assert 0.01 < module.model.lm_head.weight.std() < 0.03  # initializer_range, not the linear layer's own


def test_weights_and_checkpoints_go_to_and_come_from_urls(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[int] = []

    class Notes(files._Pieces):
        def __init__(self, stream: Any) -> None:
            write = stream.write
            stream.write = lambda view: (largest.append(len(view)), write(view))[1]
            super().__init__(stream)

    monkeypatch.setattr(files, "_Pieces", Notes)
    for module in (files, safetensors):
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    url = f"memory://{tmp_path.name}/weights"
    written = export_weights(directory, url, max_shard_size="10kB")
    assert all(str(name).startswith(f"{url}/model") for name in written)
    assert len(written) > 1
    assert 0 < max(largest) <= 1000

    def two_fits(weights: Any, checkpoint: str) -> Outcome:
        options: dict[str, Any] = {"default_root_dir": tmp_path, "limit_val_batches": 0}
        trainer = quiet_trainer(strategy=hetero(weights=weights), max_steps=2, **options)
        trainer.fit(llama.on_meta(), llama.batches())
        trainer.save_checkpoint(checkpoint)
        module = llama.on_meta()
        trainer = quiet_trainer(strategy=hetero(), max_steps=3, **options)
        trainer.fit(module, llama.batches(), ckpt_path=checkpoint, weights_only=True)
        return outcome(trainer, module)

    expected = two_fits(directory, str(tmp_path / "last.ckpt"))
    assert_same(two_fits(url, f"memory://{tmp_path.name}/last.ckpt"), expected)
    assert not list(Path(tempfile.gettempdir()).glob("lightning-hetero-copy-*"))


def test_a_store_is_resumed_and_the_files_are_not_read_again(directory: Path, tmp_path: Path) -> None:
    expected = fit(llama.from_directory(directory), "auto", tmp_path)
    store = tmp_path / "store"
    fit(llama.on_meta(), hetero(weights=directory, disk_path=store), tmp_path, steps=2)
    module = llama.on_meta()
    strategy = hetero(plan="host", weights=directory, disk_path=store)
    trainer = quiet_trainer(strategy=strategy, max_steps=3, default_root_dir=tmp_path, limit_val_batches=0)
    trainer.fit(module, llama.batches(), ckpt_path=str(store))
    got = outcome(trainer, module)
    assert_same(got, Outcome(expected.losses[-1:], expected.weights, expected.state))
