"""Decoders of the LLaMA family from their dimensions, without a ``config.json``.

Their blocks are those of ``families``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_hetero.errors import ConfigError, HeteroError
from lightning_hetero.ir.model import BlockProfile
from lightning_hetero.profiling.presets.families import Config, layout
from lightning_hetero.profiling.presets.rows import Layout
from lightning_hetero.profiling.presets.transformers import Shape, check_dimensions, embedding, head
from lightning_hetero.profiling.presets.tuning import TunedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """A decoder of the LLaMA family.

    It has RMSNorms, no biases, rotary positions, and a gated MLP of three products.

    Attributes:
        layers: Transformer blocks.
        hidden: h.
        heads: Heads of the queries.
        vocabulary: Number of tokens.
        intermediate: i; ``None``: 8/3 of h rounded up to a multiple of 256, as in LLaMA.
        kv_heads: Heads of keys and values; ``None``: as many as of the queries.
        tied: Whether the head shares the embedding's weights.
        flash: Whether attention is fused: no tensor of size s x s is kept.
        head_tokens: Tokens whose logits exist at once; ``None``: all, as with torch's cross
            entropy.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 32000
    intermediate: int | None = None
    kv_heads: int | None = None
    tied: bool = False
    flash: bool = True
    head_tokens: int | None = None

    def __post_init__(self) -> None:
        check_dimensions("a LLaMA", self.layers, self.hidden, self.heads, self.vocabulary)
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ConfigError(f"kv_heads={self.kv_heads!r}; allowed: a divisor of heads={self.heads}.")

    def blocks(self, shape: Shape, flop_per_s: float) -> tuple[BlockProfile, ...]:
        """The embedding, the transformer blocks, the head."""
        h = self.hidden
        (layer,) = TunedModel(layout=self._layer(shape)).blocks(shape, flop_per_s)
        layers = (replace(layer, name=f"layers.{i}") for i in range(self.layers))
        last = head(h, self.vocabulary, h + (0 if self.tied else self.vocabulary * h), shape, self.head_tokens)
        first = embedding(self.vocabulary * h, shape.tokens, mask_bytes=0)
        return (first, *layers, last.at("head", flop_per_s, pinned=True))

    def _layer(self, shape: Shape) -> Layout:
        """One transformer block."""
        values = {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads if self.kv_heads is None else self.kv_heads,
            "intermediate_size": -(-8 * self.hidden // (3 * 256)) * 256 if self.intermediate is None else self.intermediate,
            "vocab_size": self.vocabulary,
        }
        known = layout(Config(values, "a LLaMA"))
        if known is None:
            raise HeteroError("the families have no LLaMA.")
        rows = known.blocks[1]
        if not self.flash:  # attention keeps a square tensor for each head, and its backward holds two
            square = self.heads * shape.sequence  # elements of one token
            attention = sum(o.width for o in rows.operators if o.name in _ATTENTION)
            rows = replace(
                rows,
                operators=tuple(replace(o, width=o.width + square) if o.pair_flop else o for o in rows.operators),
                transient_width=max(rows.transient_width, self.hidden + attention + 2 * square),
            )
        return Layout(blocks=(rows,))


_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn")
