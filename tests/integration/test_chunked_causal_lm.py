"""``chunked_head=True``: models of transformers compute the loss in chunks, with the same bits
under every plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import quiet_trainer
from torch import Tensor

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy
from lightning_hetero.errors import ConfigError
from lightning_hetero.nn import chunked_head
from lightning_hetero.nn.causal_lm import ChunkedCausalLMs

pytest.importorskip("transformers")
import transformers
from support import llama

STRATEGIES: dict[str, Callable[[], dict[str, Any]]] = {
    "resident": lambda: {"plan": "resident"},
    "disk": lambda: {"plan": "disk"},
    "device": lambda: {"plan": "zero_offload", "device": EmulatedDevice(memory="4MiB")},
    "auto": lambda: {"plan": "auto", "device": EmulatedDevice(memory="4MiB")},
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_head, "CHUNK_LOGITS", 5 * llama.WORDS)


class Module(llama.LitLlama):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)
        self.losses.append(self.model(input_ids=batch, use_cache=False).logits.sum().detach().cpu())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, fused=True)


@contextmanager
def chunked(module: Any) -> Iterator[None]:
    heads = ChunkedCausalLMs(module)
    try:
        yield
    finally:
        heads.remove()


def train(model: Any, root: Path, options: dict[str, Any] | None, **trainer: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    module = Module(lambda: model)
    module.configure_model()
    strategy = "auto" if options is None else HeteroOffloadStrategy(**options, chunked_head=True)
    fit = quiet_trainer(strategy=strategy, max_steps=6, val_check_interval=3, limit_val_batches=1, default_root_dir=root, **trainer)
    if options is None:
        with chunked(module):
            fit.fit(module, llama.batches(), llama.batches())
    else:
        fit.fit(module, llama.batches(), llama.batches())
    return {name: value.clone() for name, value in module.state_dict().items()}, [loss.cpu() for loss in module.losses]


def wrapped(kind: str) -> Any:
    torch.manual_seed(1)
    model = llama.LlamaForCausalLM(llama.config(tied=kind == "tied"))
    if kind in ("lora", "saved"):
        peft = pytest.importorskip("peft")
        more = {"modules_to_save": ["lm_head"]} if kind == "saved" else {}
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], **more))
    return model


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", ["own", "tied", "lora", "saved"])
def test_every_plan_has_the_bits_of_plain_lightning(kind: str, precision: str, tmp_path: Path) -> None:
    model = wrapped(kind)
    expected, losses = train(copy.deepcopy(model), tmp_path, None, precision=precision)
    for name, options in STRATEGIES.items():
        if precision != "32-true" and name in ("device", "auto"):
            continue  # plain Lightning has other arithmetic there
        weights, got = train(copy.deepcopy(model), tmp_path / name, options(), precision=precision)
        assert all(torch.equal(a, b) for a, b in zip(got, losses, strict=True)), name
        assert all(torch.equal(weights[key], value) for key, value in expected.items()), name


def test_the_loss_is_that_of_transformers() -> None:
    model = wrapped("own")
    tokens = torch.randint(0, llama.WORDS, (3, 9))
    labels = tokens.masked_fill(torch.rand(3, 9) < 0.4, -100)
    shifted = labels.roll(-1, 1)
    for more in ({}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(5)}, {"shift_labels": shifted}):
        plain = model(input_ids=tokens, labels=labels, **more).loss
        with chunked(model):
            torch.testing.assert_close(model(input_ids=tokens, labels=labels, **more).loss, plain, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(model(tokens, None, None, None, None, labels, **more).loss, plain, rtol=1e-6, atol=1e-6)
    assert model(input_ids=tokens, labels=labels).logits.shape == (3, 9, llama.WORDS)


def test_logits_are_computed_without_labels_and_refused_with_them() -> None:
    model = wrapped("own")
    tokens = torch.randint(0, llama.WORDS, (1, 4))
    with chunked(model):
        assert model(input_ids=tokens).logits.shape == (1, 4, llama.WORDS)
        output = model(input_ids=tokens, labels=tokens)
        uses: dict[str, Callable[[Any], object]] = {
            "argmax": lambda logits: logits.argmax(-1),
            "__truediv__": lambda logits: logits / 2,
            "__rsub__": lambda logits: 1 - logits,
            "__matmul__": lambda logits: logits @ torch.ones(llama.WORDS, 1),
            "__eq__": lambda logits: logits == tokens,
            "__neg__": lambda logits: -logits,
            "logsumexp": lambda logits: torch.logsumexp(logits, -1),
            "cross_entropy": lambda logits: torch.nn.functional.cross_entropy(logits, tokens),
            "stack": lambda logits: torch.stack([logits, logits]),
        }
        for name, use in uses.items():
            with pytest.raises(ConfigError, match=f"LlamaForCausalLM with labels .* no logits, but '{name}' .* without labels"):
                use(output.logits)


def test_a_model_that_only_arranges_its_logits_is_chunked() -> None:
    torch.manual_seed(4)
    config = transformers.OPTConfig(
        vocab_size=31, hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=1, word_embed_proj_dim=8, dropout=0.0
    )
    model, tokens = transformers.OPTForCausalLM(config), torch.randint(0, 31, (2, 6))
    plain = model(input_ids=tokens, labels=tokens).loss
    with chunked(model):
        torch.testing.assert_close(model(input_ids=tokens, labels=tokens).loss, plain, rtol=1e-6, atol=1e-6)


def gemma() -> Any:
    config = transformers.Gemma2Config(
        vocab_size=31, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=8, final_logit_softcapping=30.0,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


def test_a_model_that_caps_its_logits_is_refused() -> None:
    model, tokens = gemma(), torch.randint(0, 31, (1, 4))
    with chunked(model), pytest.raises(ConfigError, match="scales or caps"):
        model(input_ids=tokens, labels=tokens)


def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no causal language model"):
        ChunkedCausalLMs(torch.nn.Linear(2, 2))
    model = wrapped("own")
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(ConfigError, match="computes its loss with '<lambda>'"):
        ChunkedCausalLMs(model)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(wrapped("own"), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match=r"is a peft\.tuners\.lora\.layer\.Linear; only torch\.nn\.Linear"):
        ChunkedCausalLMs(adapted)
    with pytest.raises(ConfigError, match="chunked_head"):
        HeteroOffloadStrategy(chunked_head=3)  # type: ignore[arg-type]


def test_nothing_is_left_in_the_model_after_a_fit(tmp_path: Path) -> None:
    model = wrapped("own")
    before = set(vars(model)), set(vars(model.lm_head))
    train(model, tmp_path, STRATEGIES["disk"]())
    assert (set(vars(model)), set(vars(model.lm_head))) == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
