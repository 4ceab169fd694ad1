"""Current decoders from their own ``config.json``: every module with weights, by family.

The names of modules, defaults of missing keys, and what has a bias are those of transformers 5.
A norm keeps its input, attention its queries, keys, values and output, as fused kernels do. The
routers of DeepSeek's experts are fp32 whatever the model's dtype, as they are since transformers
5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_hetero.errors import ConfigError
from lightning_hetero.profiling.presets.rows import BlockRows, Kind, Layout, Module, Operator, linear, norm


@dataclass(frozen=True, slots=True)
class Config:
    """A model's ``config.json``.

    Attributes:
        values: Its keys.
        where: Its file, for errors.
    """

    values: Mapping[str, object]
    where: str

    def size(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """The first of the keys that has a value: a whole number.

        Args:
            keys: Keys, the same thing under the names of several versions.
            default: The value if all are missing or null; ``None``: it is needed.
            least: The smallest value.

        Raises:
            ConfigError: It is missing, or no such number.
        """
        value = next((v for key in keys if (v := self.values.get(key)) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{self.where}: {keys[0]}={value!r}; allowed: a whole number of at least {least}.")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """A truth value.

        Raises:
            ConfigError: It is something else.
        """
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key}={value!r}; allowed: true, false.")
        return value

    def indices(self, key: str) -> frozenset[int]:
        """A list of whole numbers; empty if it is missing.

        Raises:
            ConfigError: It is something else.
        """
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
            raise ConfigError(f"{self.where}: {key}={value!r}; allowed: a list of whole numbers.")
        return frozenset(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """What one family has that others have not.

    Attributes:
        qkv_bias: Bias of queries, keys and values; ``None``: as ``attention_bias`` says.
        output_bias: Bias of attention's output; ``None``: the same.
        mlp_bias: Whether the key ``mlp_bias`` counts.
        head_dim: Default of ``head_dim``; 0: the hidden size over the heads.
        kv_heads: Default of ``num_key_value_heads``; 0: as many as of the queries.
        head_norms: Whether queries and keys have a norm each.
        four_norms: Whether attention's and the MLP's outputs have a norm too.
        fused: Whether queries, keys and values are one product, and so gate and up.
        tied: Default of ``tie_word_embeddings``.
        latent: Whether attention is DeepSeek's, through low ranks.
        experts: The layers that have experts; ``None``: none.
        expert_names: How PEFT names them: a key of ``adapters.EXPERTS``.
    """

    qkv_bias: bool | None = False
    output_bias: bool | None = False
    mlp_bias: bool = False
    head_dim: int = 0
    kv_heads: int = 0
    head_norms: bool = False
    four_norms: bool = False
    fused: bool = False
    tied: bool = False
    latent: bool = False
    experts: Callable[[Config], _Experts] | None = None
    expert_names: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    """The experts of a model.

    Attributes:
        number: Experts of one layer.
        used: Experts of one token.
        width: Intermediate size of one expert.
        shared: Intermediate size of the expert that every token goes through; 0: there is none.
        shared_name: Its module's name.
        shared_gate: Whether a gate scales its output.
        layers: The layers that have experts.
        router_itemsize: Bytes of one weight of the router, and of its output; 0: those of the
            compute dtype.
    """

    number: int
    used: int
    width: int
    layers: frozenset[int]
    shared: int = 0
    shared_name: str = "shared_experts"
    shared_gate: bool = False
    router_itemsize: int = 0


def _mixtral_experts(c: Config) -> _Experts:
    return _Experts(
        number=c.size("num_local_experts", "num_experts", default=8),
        used=c.size("num_experts_per_tok", default=2),
        width=c.size("intermediate_size", default=14336),
        layers=frozenset(range(c.size("num_hidden_layers"))),
    )


def _qwen_experts(c: Config, *, number: int, used: int, width: int, shared: int) -> _Experts:
    every, plain = c.size("decoder_sparse_step", default=1), c.indices("mlp_only_layers")
    return _Experts(
        number=c.size("num_experts", "num_local_experts", default=number),
        used=c.size("num_experts_per_tok", default=used),
        width=c.size("moe_intermediate_size", default=width),
        shared=c.size("shared_expert_intermediate_size", default=shared) if shared else 0,
        shared_name="shared_expert",
        shared_gate=True,
        layers=frozenset(i for i in range(c.size("num_hidden_layers")) if i not in plain and (i + 1) % every == 0),
    )


def _qwen2_experts(c: Config) -> _Experts:
    return _qwen_experts(c, number=60, used=4, width=1408, shared=5632)


def _qwen3_experts(c: Config) -> _Experts:
    return _qwen_experts(c, number=128, used=8, width=768, shared=0)


def _deepseek_experts(c: Config) -> _Experts:
    width = c.size("moe_intermediate_size")
    return _Experts(
        number=c.size("n_routed_experts", "num_experts", "num_local_experts"),
        used=c.size("num_experts_per_tok"),
        width=width,
        shared=width * c.size("n_shared_experts", default=1),
        layers=frozenset(range(c.size("first_k_dense_replace", default=0, least=0), c.size("num_hidden_layers"))),
        router_itemsize=4,
    )


_FAMILIES: dict[str, _Traits] = {
    "llama": _Traits(qkv_bias=None, output_bias=None, mlp_bias=True),
    "mistral": _Traits(kv_heads=8),
    "mixtral": _Traits(kv_heads=8, experts=_mixtral_experts, expert_names="mixtral"),
    "qwen2": _Traits(qkv_bias=True, kv_heads=32),
    "qwen2_moe": _Traits(qkv_bias=True, kv_heads=16, experts=_qwen2_experts),
    "qwen3": _Traits(qkv_bias=None, output_bias=None, head_dim=128, kv_heads=32, head_norms=True),
    "qwen3_moe": _Traits(
        qkv_bias=None, output_bias=None, kv_heads=4, head_norms=True, experts=_qwen3_experts, expert_names="qwen2_moe"
    ),
    "gemma": _Traits(qkv_bias=None, output_bias=None, head_dim=256, kv_heads=16, tied=True),
    "gemma2": _Traits(qkv_bias=None, output_bias=None, head_dim=256, kv_heads=4, four_norms=True, tied=True),
    "gemma3_text": _Traits(qkv_bias=None, output_bias=None, head_dim=256, kv_heads=4, head_norms=True, four_norms=True, tied=True),
    "phi3": _Traits(fused=True),
    "deepseek_v2": _Traits(mlp_bias=True, latent=True, experts=_deepseek_experts, expert_names="qwen2_moe"),
    "deepseek_v3": _Traits(latent=True, experts=_deepseek_experts, expert_names="qwen2_moe"),
}

KNOWN = tuple(_FAMILIES)


def layout(config: Config) -> Layout | None:
    """A causal language model: its blocks in the order of forward.

    Args:
        config: Its ``config.json``.

    Returns:
        The embedding, the layers, the last norm, the head; ``None`` if the architecture is unknown.
        A head that shares the embedding's weights is part of the norm's block, as it is at run
        time.

    Raises:
        ConfigError: A key is missing or out of range.
    """
    traits = _FAMILIES.get(str(config.values.get("model_type")))
    if traits is None:
        return None
    h, vocabulary = config.size("hidden_size"), config.size("vocab_size")
    experts = traits.experts(config) if traits.experts is not None else None
    tied = config.flag("tie_word_embeddings", default=traits.tied)
    table = Module(name="model.embed_tokens", kind=Kind.EMBEDDING, inputs=vocabulary, outputs=h, used=0)
    embedding = BlockRows(
        name=table.name,
        operators=(Operator(name="embed_tokens", width=h, kept=False, module=table),),
        boundary_width=0,
        pinned=True,
    )
    with_experts = experts.layers if experts is not None else ()
    layers = (_layer(config, traits, experts if i in with_experts else None, i) for i in range(config.size("num_hidden_layers")))
    blocks = (embedding, *layers, *_end(config, h, vocabulary, tied=tied))
    return Layout(blocks=blocks, experts=traits.expert_names)


def _end(config: Config, h: int, vocabulary: int, *, tied: bool) -> tuple[BlockRows, ...]:
    """The last norm and the head with the loss.

    torch's cross entropy keeps fp32 log-probabilities. Forward also holds the logits and an fp32
    copy, backward two gradients of these sizes.
    """
    last = BlockRows(name="model.norm", operators=(norm("norm", "model", h),), boundary_width=h, transient_width=h, pinned=True)
    module = Module(name="lm_head", kind=Kind.LINEAR, inputs=h, outputs=vocabulary, tied=tied, head=True)
    logits = [Operator(name="lm_head", width=vocabulary, itemsize=4, module=module, reads="norm" if tied else "")]
    if config.values.get("final_logit_softcapping") is not None:
        logits.append(Operator(name="softcapping", width=vocabulary))
    head = BlockRows(
        name="lm_head",
        operators=tuple(logits),
        boundary_width=h,
        transient_width=vocabulary,
        transient_fp32=vocabulary,
        pinned=True,
    )
    if not tied:
        return last, head
    return (
        BlockRows(
            name=last.name,
            operators=(*last.operators, *head.operators),
            boundary_width=h,
            transient_width=vocabulary,
            transient_fp32=vocabulary,
            pinned=True,
        ),
    )


def _layer(c: Config, traits: _Traits, experts: _Experts | None, index: int) -> BlockRows:
    prefix, h = f"model.layers.{index}", c.size("hidden_size")
    attention, attention_width = (_latent_attention if traits.latent else _attention)(c, traits, prefix)
    before_mlp = "pre_feedforward_layernorm" if traits.four_norms else "post_attention_layernorm"
    if experts is None:
        wide = c.size("intermediate_size")
        bias = traits.mlp_bias and c.flag("mlp_bias", default=False)
        mlp = _mlp("mlp", prefix, h, wide, reads=before_mlp, bias=bias, fused=traits.fused, kept=traits.four_norms)
        mlp_width = 3 * wide
    else:
        mlp = _mixture(experts, prefix, h, reads=before_mlp, bias=traits.mlp_bias and c.flag("mlp_bias", default=False))
        mlp_width = 3 * (experts.used * experts.width + experts.shared)
    outputs = (norm("post_attention_layernorm", prefix, h, kept=True),) if traits.four_norms else ()
    return BlockRows(
        name=prefix,
        operators=(
            norm("input_layernorm", prefix, h),
            *attention,
            *outputs,
            norm(before_mlp, prefix, h),
            *mlp,
            *((norm("post_feedforward_layernorm", prefix, h),) if traits.four_norms else ()),
        ),
        boundary_width=h,
        # Gradients in backward: of the residual and of an MLP's three wide tensors, or of
        # attention's outputs and inputs.
        transient_width=h + max(mlp_width, attention_width),
    )


def _attention(c: Config, traits: _Traits, prefix: str) -> tuple[list[Operator], int]:
    """Grouped-query attention, and the width of its queries, keys, values and output."""
    h, heads = c.size("hidden_size"), c.size("num_attention_heads")
    size = c.size("head_dim", default=traits.head_dim or h // heads)
    wide = heads * size
    narrow = c.size("num_key_value_heads", default=traits.kv_heads or heads) * size
    given = c.flag("attention_bias", default=False)
    bias = given if traits.qkv_bias is None else traits.qkv_bias
    if c.values.get("model_type") == "qwen2_moe":
        bias = c.flag("qkv_bias", default=True)
    reads = "input_layernorm"
    if traits.fused:
        inputs = [linear("self_attn.qkv_proj", prefix, h, wide + 2 * narrow, reads=reads)]
    else:
        inputs = [
            linear(f"self_attn.{name}_proj", prefix, h, width, reads=reads, bias=bias)
            for name, width in (("q", wide), ("k", narrow), ("v", narrow))
        ]
    if traits.head_norms:  # their inputs are kept, and their outputs, which attention reads
        inputs += [
            _head_norm("self_attn.q_norm", prefix, size, wide),
            _head_norm("self_attn.k_norm", prefix, size, narrow),
        ]
    output = linear(
        "self_attn.o_proj", prefix, wide, h, reads="self_attn", bias=given if traits.output_bias is None else traits.output_bias
    )
    pairs = Operator(name="self_attn", width=wide, pair_flop=4 * wide)
    return [*inputs, pairs, output], 2 * wide + 2 * narrow


def _head_norm(name: str, prefix: str, size: int, width: int) -> Operator:
    module = Module(name=f"{prefix}.{name}", kind=Kind.OTHER, inputs=1, outputs=size, used=0)
    return Operator(name=name, width=width, module=module)


def _latent_attention(c: Config, traits: _Traits, prefix: str) -> tuple[list[Operator], int]:
    """DeepSeek's attention: queries, and keys with values, pass through low ranks."""
    del traits
    h, heads = c.size("hidden_size"), c.size("num_attention_heads")
    rotary, plain, values = (
        c.size("qk_rope_head_dim", default=64),
        c.size("qk_nope_head_dim", default=128),
        c.size("v_head_dim", default=128),
    )
    rank, bias = c.size("kv_lora_rank", default=512), c.flag("attention_bias", default=False)
    key = rotary + plain
    low = c.values.get("q_lora_rank", 1536)
    if low is None:
        queries = [linear("self_attn.q_proj", prefix, h, heads * key, reads="input_layernorm")]
    else:
        between = c.size("q_lora_rank", default=1536)
        queries = [
            linear("self_attn.q_a_proj", prefix, h, between, reads="input_layernorm", bias=bias),
            norm("self_attn.q_a_layernorm", prefix, between),
            linear("self_attn.q_b_proj", prefix, between, heads * key, reads="self_attn.q_a_layernorm"),
        ]
    return [
        *queries,
        linear("self_attn.kv_a_proj_with_mqa", prefix, h, rank + rotary, reads="input_layernorm", bias=bias),
        norm("self_attn.kv_a_layernorm", prefix, rank),
        linear("self_attn.kv_b_proj", prefix, rank, heads * (plain + values), reads="self_attn.kv_a_layernorm"),
        Operator(name="self_attn.keys", width=heads * key),
        Operator(name="self_attn", width=heads * values, pair_flop=2 * heads * (key + values)),
        linear("self_attn.o_proj", prefix, heads * values, h, reads="self_attn", bias=bias),
    ], heads * (2 * key + 2 * values)


def _mlp(
    name: str, prefix: str, h: int, wide: int, *, reads: str, bias: bool = False, fused: bool = False, kept: bool = False
) -> list[Operator]:
    """A gated MLP. ``kept``: whether something keeps its output."""
    if fused:
        inputs = [linear(f"{name}.gate_up_proj", prefix, h, 2 * wide, reads=reads, bias=bias)]
    else:
        inputs = [linear(f"{name}.{part}_proj", prefix, h, wide, reads=reads, bias=bias) for part in ("gate", "up")]
    return [
        *inputs,
        Operator(name=f"{name}.act_fn", width=wide),
        Operator(name=f"{name}.gated", width=wide, kept=False),
        linear(f"{name}.down_proj", prefix, wide, h, reads=f"{name}.gated", bias=bias, kept=kept),
    ]


def _mixture(experts: _Experts, prefix: str, h: int, *, reads: str, bias: bool) -> list[Operator]:
    """A router, experts as two tensors, and perhaps an expert for all tokens.

    The outputs of experts are kept, because the router's weights multiply them.
    """
    e = experts
    router = Module(name=f"{prefix}.mlp.gate", kind=Kind.OTHER, inputs=h, outputs=e.number, itemsize=e.router_itemsize)
    inside = f"{prefix}.mlp.experts"
    up = Module(name=f"{inside}.gate_up_proj", kind=Kind.PARAMETER, inputs=h, outputs=2 * e.width, copies=e.number, used=e.used)
    down = Module(name=f"{inside}.down_proj", kind=Kind.PARAMETER, inputs=e.width, outputs=h, copies=e.number, used=e.used)
    rows = [
        Operator(name="mlp.gate", width=e.number, module=router, reads=reads, itemsize=e.router_itemsize),
        Operator(name="mlp.experts.inputs", width=e.used * h, kept=False),
        Operator(name="mlp.experts.gate_up_proj", width=2 * e.used * e.width, module=up, reads="mlp.experts.inputs"),
        Operator(name="mlp.experts.act_fn", width=e.used * e.width),
        Operator(name="mlp.experts.gated", width=e.used * e.width, kept=False),
        Operator(name="mlp.experts.down_proj", width=e.used * h, module=down, reads="mlp.experts.gated"),
    ]
    if e.shared:
        rows += _mlp(f"mlp.{e.shared_name}", prefix, h, e.shared, reads=reads, bias=bias, kept=e.shared_gate)
        if e.shared_gate:
            rows.append(linear("mlp.shared_expert_gate", prefix, h, 1, reads=reads))
    return rows
