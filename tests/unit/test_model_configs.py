"""Models from a config.json have the parameters and bytes that transformers and PEFT give them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.ir.model import ModelProfile, undivided
from lightning_hetero.ir.plan import TRAINED
from lightning_hetero.profiling import presets
from lightning_hetero.profiling.presets import Lora, Quantization, Tuning
from lightning_hetero.profiling.presets.families import KNOWN
from lightning_hetero.profiling.presets.rows import Kind, Module
from lightning_hetero.store.partition import partition

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

HARDWARE = presets.machine(device="rtx4090", host_memory="64GiB", disk="990pro")
BATCH, SEQUENCE = 2, 8
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
ROUTED = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-all-heads": ("llama", {"num_key_value_heads": None}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"head_dim": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen2-moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 40}),
    "qwen2-moe-every-second": (
        "qwen2_moe",
        {**MOE, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "qkv_bias": False},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", {**MOE, "head_dim": 16, "mlp_only_layers": [1]}),
    "gemma": ("gemma", {"head_dim": 12}),
    "gemma2": ("gemma2", {"head_dim": 12}),
    "gemma3": ("gemma3_text", {"head_dim": 12, "sliding_window": 4}),
    "gemma3-untied": ("gemma3_text", {"head_dim": 12, "tie_word_embeddings": False, "attention_bias": True}),
    "phi3": ("phi3", {}),
    "deepseek-v2": ("deepseek_v2", {**LATENT, "q_lora_rank": 20, "n_shared_experts": 2, "topk_method": "greedy"}),
    "deepseek-v2-lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "attention_bias": True, "mlp_bias": True}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 20}),
}
# Read by transformers: another layout, another decoder with experts, one without attention.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 16}),
    "gpt-neox": ("gpt_neox", {**SMALL, "num_key_value_heads": None}),
    "olmoe": ("olmoe", {**SMALL, "num_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("granite", SMALL),
    # transformers keeps routers in fp32, and builds one of these models with frozen parameters
    "glm4-moe": ("glm4_moe", {**SMALL, **ROUTED}),
    "dots1": ("dots1", {**SMALL, **ROUTED, "sliding_window": None, "max_window_layers": 3, "layer_types": ["full_attention"] * 3}),
    "ernie-moe": ("ernie4_5_moe", {**SMALL, "moe_intermediate_size": 24, "moe_num_experts": 4, "moe_k": 2}),
    "hy": ("hy_v3", {**SMALL, **ROUTED}),
    "solar": ("solar_open", {**SMALL, **ROUTED}),
}
MADE = [*CONFIGS, *OTHERS]


def _settings(name: str) -> Any:
    kind, values = (CONFIGS | OTHERS)[name]
    given = (SMALL | values) if name in CONFIGS else values
    return transformers.AutoConfig.for_model(kind, **{k: v for k, v in given.items() if v is not None or k == "q_lora_rank"})


def _built(name: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(_settings(name), dtype=dtype)


def _profile(name: str, tuning: Tuning, folder: Path, itemsize: int = 2) -> ModelProfile:
    _settings(name).save_pretrained(folder)
    return presets.from_config(folder, tuning, batch=BATCH, sequence=SEQUENCE, hardware=HARDWARE, itemsize=itemsize)


@dataclass(frozen=True)
class Sizes:
    """Elements and bytes of a block, of all and of what trains."""

    params: int
    num_bytes: int
    trained: int
    trained_bytes: int


def _of_profile(model: ModelProfile) -> dict[str, Sizes]:
    """By block; a trained part counts to its block."""
    found: dict[str, Counter[str]] = {}
    for block in model.blocks:
        row = found.setdefault(block.name.removesuffix(TRAINED), Counter())
        row["params"] += block.num_params
        row["num_bytes"] += model.weight_bytes(block)
        row["trained"] += block.num_trainable_params
        row["trained_bytes"] += model.gradient_bytes(block)
    return {name: Sizes(**{key: row[key] for key in Sizes.__dataclass_fields__}) for name, row in found.items()}


def _of_module(model: nn.Module, blocks: Mapping[str, Sizes], *, rest: str = "") -> dict[str, Sizes]:
    """The same of a built model, whose parameters belong to the block that their name begins with,
    or to ``rest``.
    """
    found = {name: Counter[str]() for name in blocks}
    for name, param in model.named_parameters():
        inner = name.removeprefix("base_model.model.")
        (block,) = [b for b in blocks if inner == b or inner.startswith(b + ".")] or [rest]
        own = {"params": param.numel(), "num_bytes": param.nbytes}
        found[block].update(own)
        if param.requires_grad:
            found[block].update({"trained": own["params"], "trained_bytes": own["num_bytes"]})
    return {name: Sizes(**{key: row[key] for key in Sizes.__dataclass_fields__}) for name, row in found.items()}


def test_every_known_family_is_tested() -> None:
    assert {kind for kind, _ in CONFIGS.values()} == set(KNOWN)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("name", MADE)
def test_blocks_have_the_names_and_sizes_of_the_built_model(name: str, itemsize: int, tmp_path: Path) -> None:
    model = _built(name, torch.bfloat16 if itemsize == 2 else torch.float32)
    found = _profile(name, Tuning(), tmp_path, itemsize)
    assert [(b.name, b.pinned) for b in found.blocks] == [(s.name, s.pinned) for s in partition(model)]
    assert _of_profile(found) == _of_module(model, _of_profile(found))
    assert found.num_params == sum(p.numel() for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(map(found.state_bytes, found.blocks)) == sum(p.numel() * (8 if p.itemsize == 4 else 12) for p in trained)


TARGETS: dict[str, tuple[str, list[str]]] = {
    "llama-biases": ("q,v", ["q_proj", "v_proj"]),
    "llama-tied": ("q_proj,embed_tokens", ["q_proj", "embed_tokens"]),
    "llama": ("down,lm_head", ["down_proj", "lm_head"]),
    "mistral": ("self_attn.o_proj", ["self_attn.o_proj"]),
    "qwen3": ("model.layers.1.self_attn.k_proj,gate", ["model.layers.1.self_attn.k_proj", "gate_proj"]),
    "phi3": ("qkv,gate_up", ["qkv_proj", "gate_up_proj"]),
    "deepseek-v3": ("q_a,kv_b,gate_proj,up,down", ["q_a_proj", "kv_b_proj", "gate_proj", "up_proj", "down_proj"]),
    "mixtral": ("q,w1,w3,w2,gate", ["q_proj", "w1", "w3", "w2", "gate"]),
    "qwen3-moe": ("o,down", ["o_proj", "down_proj"]),
    "qwen2-moe": ("down,shared_expert_gate", ["down_proj", "shared_expert_gate"]),
    "olmoe": ("gate_proj,up_proj", ["gate_proj", "up_proj"]),
    "gpt2": ("c_attn", ["c_attn"]),
}


EXPERTS = [
    *("mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3"),
    *("olmoe", "glm4-moe", "dots1", "ernie-moe", "solar"),
]
NO_DORA = {(n, "all-linear") for n in EXPERTS} | {(n, TARGETS[n][0]) for n in ("mixtral", "qwen3-moe", "deepseek-v3", "olmoe")}


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize(
    ("name", "text", "names"),
    [*((name, "all-linear", "all-linear") for name in MADE), *((name, *targets) for name, targets in TARGETS.items())],
)
def test_adapters_have_the_sizes_of_pefts(name: str, text: str, names: str | list[str], dora: bool, tmp_path: Path) -> None:
    settings = peft.LoraConfig(r=6, target_modules=names, use_dora=dora)
    tuning = Tuning.parse(lora=f"r=6,targets={text},dora={str(dora).lower()}", quantize=None)
    if dora and (name, text) in NO_DORA:
        with pytest.raises(ValueError, match="does not work with use_dora"):
            peft.get_peft_model(_built(name), settings)
        with pytest.raises(ConfigError, match="on which PEFT makes no DoRA"):
            _profile(name, tuning, tmp_path)
        return
    model = peft.get_peft_model(_built(name), settings)
    found = _of_profile(_profile(name, tuning, tmp_path))
    assert found == _of_module(model, found)
    assert sum(sizes.trained for sizes in found.values()) > 0


PATTERNS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("r=6,targets=q,v,rank_pattern=q_proj:3,alpha_pattern=q_proj:9", {"rank_pattern": {"q_proj": 3}}),
    "qwen3": (
        r"r=6,targets=q,v,rank_pattern=layers.1.*q_proj:2,q_proj:9",
        {"rank_pattern": {"layers.1.*q_proj": 2, "q_proj": 9}},
    ),
    "mistral": ("r=6,targets=q,v,modules_to_save=lm_head", {"modules_to_save": ["lm_head"]}),
    "llama-tied": ("r=6,targets=q,v,modules_to_save=embed_tokens,lm_head", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "llama-biases": (
        "r=6,targets=q,v,modules_to_save=input_layernorm,norm,v_proj",
        {"modules_to_save": ["input_layernorm", "norm", "v_proj"]},
    ),
    "gemma3": ("r=6,targets=q,v,modules_to_save=mlp,dora=true", {"modules_to_save": ["mlp"], "use_dora": True}),
    "gpt2": ("r=6,targets=c_attn,modules_to_save=lm_head,ln_f", {"modules_to_save": ["lm_head", "ln_f"]}),
}


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("name", PATTERNS)
def test_ranks_of_their_own_and_modules_that_are_saved_have_the_sizes_of_pefts(name: str, itemsize: int, tmp_path: Path) -> None:
    text, settings = PATTERNS[name]
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    targets = ["c_attn"] if name == "gpt2" else ["q_proj", "v_proj"]
    model = peft.get_peft_model(_built(name, dtype), peft.LoraConfig(r=6, target_modules=targets, **settings))
    profile = _profile(name, Tuning.parse(lora=text, quantize=None), tmp_path, itemsize)
    found, last = _of_profile(profile), profile.blocks[-1].name
    assert found == _of_module(model, found, rest=last)  # a tied head is part of the last block
    state = sum(profile.state_bytes(block) for block in profile.blocks)
    assert state == sum(p.numel() * (8 if p.itemsize == 4 else 12) for p in model.parameters() if p.requires_grad)
    # The two copies of a saved module outside of the layers are two blocks there, and one here.
    names = [
        s.name.removeprefix("base_model.model.").split(".original_module")[0].split(".modules_to_save")[0] for s in partition(model)
    ]
    known = [block.name for block in profile.blocks]
    assert known == [*dict.fromkeys(name if name in known else last for name in names)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("r=2,targets=q,modules_to_save=lm_haed", "Did you mean 'lm_head'"),
        ("r=2,target=q", "Did you mean 'targets'"),
        ("r=2,targets=q,rank_pattern=v_proj:3", "rank_pattern 'v_proj' fits no"),
        ("r=2,targets=q,rank_pattern=q_proj", "the rank 'q_proj'"),
        ("r=2,targets=q,modules_to_save=", "names nothing"),
    ],
)
def test_names_that_fit_nothing_are_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        _profile("llama", Tuning.parse(lora=text, quantize=None), tmp_path)


def test_an_unknown_quantization_is_refused_with_a_near_one() -> None:
    with pytest.raises(ConfigError, match=r"allowed: nf4, nf4-double, int8\. Did you mean 'nf4'"):
        Tuning.parse(lora="r=2,targets=q", quantize="nf5")


def test_saved_modules_that_are_quantized_are_refused(tmp_path: Path) -> None:
    tuning = Tuning.parse(lora="r=2,targets=q,modules_to_save=v_proj", quantize="nf4")
    with pytest.raises(ConfigError, match="v_proj is in modules_to_save, and quantized weights cannot train"):
        _profile("llama", tuning, tmp_path)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "deepseek-v3", "olmoe"])
@pytest.mark.parametrize("target", ["o_proj", "all-linear"])
def test_blocks_are_divided_as_in_training(name: str, target: str, tmp_path: Path) -> None:
    """One low-rank adapter is little of a layer, adapters on everything are not."""
    rank = 1 if target == "o_proj" else 8
    settings = peft.LoraConfig(r=rank, target_modules=target if target == "all-linear" else [target])
    found = _profile(name, Tuning.parse(lora=f"r={rank},targets={target}", quantize=None), tmp_path)
    blocks = [(s.name.removeprefix("base_model.model."), s.pinned) for s in partition(peft.get_peft_model(_built(name), settings))]
    assert [(b.name, b.pinned) for b in found.blocks] == blocks
    assert any(name.endswith(TRAINED) for name, _ in blocks) == (target == "o_proj")
    whole = undivided(found)
    assert not any(b.name.endswith(TRAINED) for b in whole.blocks)
    for size in (ModelProfile.weight_bytes, ModelProfile.gradient_bytes, ModelProfile.state_bytes):
        assert sum(size(whole, b) for b in whole.blocks) == sum(size(found, b) for b in found.blocks)


# ---- FLOP ----------------------------------------------------------------------------------------


def _counted_flop(name: str, tuning: Tuning) -> tuple[int, int]:
    """FLOP that torch counts in forward and in backward of the model, attention as plain
    products.
    """
    settings = _settings(name)
    settings._attn_implementation, settings._experts_implementation = "sdpa", "eager"
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    if (lora := tuning.lora) is not None:
        targets = "all-linear" if lora.targets == ("all-linear",) else list(lora.targets)
        model = peft.get_peft_model(model, peft.LoraConfig(r=lora.rank, target_modules=targets, use_dora=lora.dora))
        model.enable_input_require_grads()
    counter = FlopCounterMode(display=False)
    ids = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with counter:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        forward = counter.get_total_flops() - _rotary_flop(counter)
        with counter:
            loss.backward()
    return forward, counter.get_total_flops()


def _rotary_flop(counter: FlopCounterMode) -> int:
    """Angles of positions are a product in transformers; a profile leaves them out."""
    return sum(sum(row.values()) for module, row in counter.get_flop_counts().items() if module.endswith("rotary_emb"))


ATTENTION = "r=6,targets=k_proj,o_proj"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, None) for name in ("llama-biases", "gemma3", "mixtral", "qwen2-moe", "deepseek-v3")),
        *((name, "r=6,targets=all-linear") for name in ("llama-biases", "qwen3", "qwen2-moe", "mixtral", "deepseek-v3")),
        *((name, ATTENTION) for name in ("llama-biases", "mixtral", "qwen2-moe")),
        *((name, "r=6,targets=all-linear,dora=true") for name in ("llama-biases", "gemma3")),
    ],
)
def test_flop_are_those_that_torch_counts(name: str, text: str | None, tmp_path: Path) -> None:
    tuning = Tuning.parse(lora=text, quantize=None)
    model = _profile(name, tuning, tmp_path, itemsize=4)
    rate = HARDWARE.device_flop_per_s
    forward, backward = (sum(getattr(b, key) for b in model.blocks) * rate for key in ("forward_s", "backward_s"))
    assert (round(forward), round(backward)) == _counted_flop(name, tuning)


def test_a_frozen_product_has_half_the_backward(tmp_path: Path) -> None:
    frozen = _profile("llama", Tuning.parse(lora="r=1,targets=q", quantize=None), tmp_path)
    trained = _profile("llama", Tuning(), tmp_path)
    last = frozen.blocks[-1], trained.blocks[-1]
    assert last[0].backward_s == last[0].forward_s
    assert last[1].backward_s == 2 * last[1].forward_s


# ---- quantization --------------------------------------------------------------------------------


def _matrix(inputs: int, outputs: int) -> Module:
    return Module(name="m", kind=Kind.LINEAR, inputs=inputs, outputs=outputs)


SHAPES = [(64, 64), (96, 40), (33, 7), (256, 257), (1, 1)]


@pytest.mark.parametrize("sizes", SHAPES)
def test_quantized_bytes_are_those_of_bitsandbytes(sizes: tuple[int, int]) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    matrix, weight = _matrix(*sizes), torch.randn(sizes[1], sizes[0])
    for kind, double in ((Quantization.NF4, False), (Quantization.NF4_DOUBLE, True)):
        packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
        tensors = [packed, state.absmax, state.code]
        if double:
            tensors += [state.offset, state.state2.absmax, state.state2.code]
        assert kind.weight_bytes(matrix) == sum(t.nbytes for t in tensors)
    made = bnb.nn.Int8Params(weight, requires_grad=False).to("cpu")
    assert Quantization.INT8.weight_bytes(matrix) == made.nbytes + made.SCB.nbytes


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [
        # A matrix of 4096 x 4096, from bitsandbytes' documented layout: 2**23 bytes of pairs, 2**18
        # scales.
        (Quantization.NF4, 2**23 + 4 * 2**18 + 4 * 16),
        (Quantization.NF4_DOUBLE, 2**23 + 2**18 + 4 * 2**10 + 4 * 256 + 4 * 16 + 4),
        (Quantization.INT8, 2**24 + 4 * 4096),
    ],
)
def test_quantized_bytes_of_a_large_matrix(kind: Quantization, num_bytes: int) -> None:
    assert kind.weight_bytes(_matrix(4096, 4096)) == num_bytes


@pytest.mark.parametrize("name", ["llama-biases", "llama-tied", "mixtral", "qwen2-moe", "gpt2"])
def test_linear_layers_but_the_head_are_quantized(name: str, tmp_path: Path) -> None:
    """As transformers replaces them; biases, norms, embeddings and experts in one tensor keep their
    dtype.
    """
    plain = _profile(name, Tuning.parse(lora="r=4,targets=all-linear", quantize=None), tmp_path)
    small = _profile(name, Tuning.parse(lora="r=4,targets=all-linear", quantize="int8"), tmp_path)
    head = _built(name).get_output_embeddings()
    conv = transformers.pytorch_utils.Conv1D
    replaced = [m for m in _built(name).modules() if isinstance(m, nn.Linear | conv)]
    saved = sum(
        m.weight.numel() - 4 * (m.nf if isinstance(m, conv) else m.out_features)
        for m in replaced
        if m.weight.shape != head.weight.shape
    )
    assert sum(map(plain.weight_bytes, plain.blocks)) - sum(map(small.weight_bytes, small.blocks)) == saved
    assert small.num_params == plain.num_params


# ---- refusals ------------------------------------------------------------------------------------


def test_an_unknown_architecture_without_transformers_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"model_type='gpt2'.*transformers.*not installed.*pip install transformers"):
        presets.from_config(tmp_path, Tuning(), batch=1, sequence=8, hardware=HARDWARE)


@pytest.mark.parametrize("own_code", [False, True])
def test_an_architecture_that_nobody_knows_is_refused_in_few_words(own_code: bool, tmp_path: Path) -> None:
    config = {"model_type": "tomorrows"} | ({"auto_map": {"AutoConfig": "tomorrows.Config"}} if own_code else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = r"Code that the folder has for it \(auto_map\) is not run\. " if own_code else ""
    words = rf"transformers [\d.]+ cannot build model_type='tomorrows' .{{,120}}\. {own}Install a version.*--model-profile\.$"
    with pytest.raises(ConfigError, match=words):
        presets.from_config(tmp_path, Tuning(), batch=1, sequence=8, hardware=HARDWARE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("r=16", "targets=NAME"),
        ("targets=q", "r=N"),
        ("r=0,targets=q", "at least 1"),
        ("r=4,targets=q,alpha=3", "'alpha=3' is not understood"),
        ("q,v", "'q' is not understood"),
    ],
)
def test_adapters_that_cannot_be_read_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lora.parse(text)


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("phi3", "q", r"no module 'q'.*It has .*qkv_proj"),
        ("llama", "q_prj", r"Did you mean 'q_proj'"),
        ("qwen2-moe", "gate", r"model.layers.0.mlp.gate, which is no linear layer"),
        ("mixtral", "down_proj", r"no module 'down_proj'.*It has .*w1, w2, w3"),
        ("mixtral", "w1", r"w1 without w3.*all of these or none"),
        ("llama", "norm", r"model.norm, which is no linear layer"),
    ],
)
def test_targets_that_take_no_adapter_are_refused(name: str, target: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        _profile(name, Tuning.parse(lora=f"r=4,targets={target}", quantize=None), tmp_path)


def test_quantized_weights_do_not_train() -> None:
    with pytest.raises(ConfigError, match="Give --lora too"):
        Tuning.parse(lora=None, quantize="nf4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "big"}, "hidden_size='big'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"attention_bias": 3}, "attention_bias=3"),
        ({"vocab_size": None}, "vocab_size=None"),
    ],
)
def test_a_config_with_a_value_of_another_kind_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL, **change}))
    with pytest.raises(ConfigError, match=message):
        presets.from_config(tmp_path, Tuning(), batch=1, sequence=8, hardware=HARDWARE)
