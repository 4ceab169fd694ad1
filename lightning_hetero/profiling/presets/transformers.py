"""Transformers from their dimensions: exact parameter counts, saved bytes and FLOP per operator.

[Note: What is counted]
T tokens (batch x sequence) of ``itemsize`` e bytes per element, hidden size h, intermediate size i,
sequence length s, a heads.

FLOP are those of matrix products, 2 for each multiply and add, with attention over the full square
of the sequence, as in ``torch.utils.flop_counter``. Norms, activations and embeddings count 0.

Saved bytes are the tensors that autograd keeps: the inputs of matrix products, norms and
activations, queries, keys and values, dropout's masks of 1 byte. With dropout, GELU and 16 bit that
is 34·T·h per block, and 5·a·s·T more if attention is not fused (Korthikanti et al. 2022, equation
1). LoHan's 213 GiB of the 13B model at batch 32 are these 34·T·h. Statistics of norms and of fused
attention (about 16 bytes per token) are left out.

An operator's bytes are those of its output, or of the tensor that backward needs instead. Its FLOP
are the cost to recompute it. An operator whose output is not saved, such as an MLP's last product
without dropout, is not in the profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile, OperatorProfile
from lightning_hetero.units import GIB

_ID_BYTES = 8  # a token's id
_CONTEXT_BYTES = 1 * GIB  # assumed: a device's context, libraries' workspaces, the allocator's slack
_PROCESS_BYTES = 2 * GIB  # assumed: Python, torch and its libraries


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of one micro-batch.

    Attributes:
        batch: Sequences on one device.
        sequence: Tokens of each sequence.
        itemsize: Bytes of a weight and of an activation: 2 for 16 bit, 4 for fp32.
    """

    batch: int
    sequence: int
    itemsize: int = 2

    def __post_init__(self) -> None:
        for key in ("batch", "sequence"):
            _positive("a batch", key, getattr(self, key))
        if self.itemsize not in (2, 4):
            raise ConfigError(f"itemsize={self.itemsize!r}; allowed: 2 (16 bit), 4 (fp32).")

    @property
    def tokens(self) -> int:
        """T."""
        return self.batch * self.sequence


class Architecture(Protocol):
    """An architecture: it gives blocks for a batch and a machine."""

    def blocks(self, shape: Shape, flop_per_s: float) -> tuple[BlockProfile, ...]:
        """The blocks in the order of forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt:
    """A decoder of the GPT-2 family.

    It has LayerNorms, biases, learned positions, an MLP of two products, and a tied head.

    Attributes:
        layers: Transformer blocks.
        hidden: h.
        heads: Attention heads.
        vocabulary: Number of tokens.
        positions: Rows of the table of positions; ``None``: the length of the sequence.
        extra_positions: Additional rows; OPT has two.
        activation: ``"relu"`` keeps its output only; ``"gelu"`` its input too.
        dropout: Dropout after attention, after the MLP and on the embeddings; and inside attention
            if it is not fused.
        flash: Whether attention is fused: no tensor of size s x s is kept.
        head_tokens: Tokens whose logits exist at once; ``None``: all, as with torch's cross
            entropy.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 50257
    positions: int | None = None
    extra_positions: int = 0
    activation: Literal["gelu", "relu"] = "gelu"
    dropout: bool = True
    flash: bool = True
    head_tokens: int | None = None

    def __post_init__(self) -> None:
        check_dimensions("a GPT", self.layers, self.hidden, self.heads, self.vocabulary)
        if self.activation not in ("gelu", "relu"):
            raise ConfigError(f"activation={self.activation!r}; allowed: 'gelu', 'relu'.")

    def blocks(self, shape: Shape, flop_per_s: float) -> tuple[BlockProfile, ...]:
        """The embedding, the transformer blocks, the head.

        Raises:
            ConfigError: The sequence is longer than the table of positions.
        """
        rows = shape.sequence if self.positions is None else self.positions
        if shape.sequence > rows:
            raise ConfigError(f"sequence={shape.sequence}; allowed: at most {rows}, the positions that the model has.")
        h, tokens, e = self.hidden, shape.tokens, shape.itemsize
        first = embedding((self.vocabulary + rows + self.extra_positions) * h, tokens, mask_bytes=tokens * h if self.dropout else 0)
        operators = self._operators(shape)
        block = Template(
            num_params=12 * h * h + 13 * h,
            operators=operators,
            flop=24 * tokens * h * h + 4 * tokens * shape.sequence * h,
            boundary_bytes=e * tokens * h,
            transient_bytes=max(e * tokens * (h + 2 * 4 * h), self._attention_transient(shape)),
        )
        last = head(h, self.vocabulary, 2 * h, shape, self.head_tokens)
        layers = (block.at(f"layers.{i}", flop_per_s) for i in range(self.layers))
        return (first, *layers, last.at("head", flop_per_s, pinned=True))

    def _operators(self, shape: Shape) -> tuple[OperatorProfile, ...]:
        h, tokens, e = self.hidden, shape.tokens, shape.itemsize
        hidden, wide, mask = e * tokens * h, e * tokens * 4 * h, tokens * h if self.dropout else 0
        square = 0 if self.flash else self.heads * shape.sequence * tokens * (2 * e + 1 if self.dropout else e)
        widening = 8 * tokens * h * h
        gelu = (("mlp.c_fc", widening, wide), ("mlp.act", 0, wide))
        return _operator_rows(
            (
                ("ln_1", 0, hidden),
                ("attn.c_attn", 6 * tokens * h * h, 3 * hidden),
                ("attn", 4 * tokens * shape.sequence * h, hidden + square),
                ("attn.c_proj", 2 * tokens * h * h, hidden + mask),  # the sum with the residual, which ln_2 keeps
                ("ln_2", 0, hidden),
                *(gelu if self.activation == "gelu" else (("mlp.act", widening, wide),)),
                ("mlp.c_proj", 8 * tokens * h * h, mask),
            )
        )

    def _attention_transient(self, shape: Shape) -> int:
        """Gradients in attention's backward: block and attention output, queries, keys, values."""
        square = 0 if self.flash else 2 * self.heads * shape.sequence * shape.tokens * shape.itemsize
        return 5 * shape.itemsize * shape.tokens * self.hidden + square


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A block before it has a name and a time."""

    num_params: int
    operators: tuple[OperatorProfile, ...]
    flop: int
    boundary_bytes: int
    transient_bytes: int

    def at(self, name: str, flop_per_s: float, *, pinned: bool = False) -> BlockProfile:
        """Its profile."""
        seconds = self.flop / flop_per_s
        return BlockProfile(
            name=name,
            num_params=self.num_params,
            num_trainable_params=self.num_params,
            forward_s=seconds,
            backward_s=2 * seconds,
            forward_flop=float(self.flop),
            activation_bytes=self.boundary_bytes + sum(o.bytes for o in self.operators),
            boundary_bytes=self.boundary_bytes,
            transient_bytes=self.transient_bytes,
            operators=self.operators,
            pinned=pinned,
        )


def _operator_rows(rows: Sequence[tuple[str, int, int]]) -> tuple[OperatorProfile, ...]:
    """Operators from name, FLOP and bytes; operators without saved bytes are left out."""
    return tuple(OperatorProfile(name=name, flop=float(flop), bytes=kept) for name, flop, kept in rows if kept)


def embedding(num_params: int, tokens: int, *, mask_bytes: int) -> BlockProfile:
    """The embedding: saves the ids and dropout's mask. Its output is the first block's boundary."""
    operators = _operator_rows((("drop", 0, mask_bytes),))
    template = Template(num_params=num_params, operators=operators, flop=0, boundary_bytes=_ID_BYTES * tokens, transient_bytes=0)
    return template.at("embedding", 1.0, pinned=True)


def head(h: int, vocabulary: int, num_params: int, shape: Shape, head_tokens: int | None) -> Template:
    """The last norm, the product with the vocabulary and the loss.

    torch's cross entropy saves fp32 log-probabilities; forward also holds the logits and an fp32
    copy, backward two gradients of these sizes. In chunks no tensor of the vocabulary's size is
    saved, but the gradient of the hidden states is.
    """
    tokens, e = shape.tokens, shape.itemsize
    hidden = e * tokens * h
    logits = vocabulary * (tokens if head_tokens is None else min(head_tokens, tokens))
    kept, copies = (4 * logits, 4) if head_tokens is None else (hidden, 8)
    flop = 2 * tokens * h * vocabulary
    return Template(
        num_params=num_params,
        operators=_operator_rows((("norm", 0, hidden), ("lm_head", flop, kept))),
        flop=flop,
        boundary_bytes=hidden,
        transient_bytes=(e + copies) * logits,
    )


def profile(
    name: str, architecture: Architecture, *, batch: int, sequence: int, hardware: HardwareProfile, itemsize: int = 2
) -> ModelProfile:
    """The profile of an architecture at one batch shape on one machine.

    Seconds are FLOP over ``hardware.device_flop_per_s``; backward takes twice forward.

    Args:
        name: A display name.
        architecture: The architecture.
        batch: Sequences of one micro-batch on one device.
        sequence: Tokens of each.
        hardware: The machine; its device's FLOP/s give the times.
        itemsize: 2 for 16 bit, 4 for fp32.

    Raises:
        ConfigError: A number is out of range.
    """
    shape = Shape(batch=batch, sequence=sequence, itemsize=itemsize)
    return ModelProfile(
        name=name,
        tokens=shape.tokens,
        compute_itemsize=itemsize,
        constant_device_bytes=0 if hardware.shared_memory else _CONTEXT_BYTES,
        constant_host_bytes=_PROCESS_BYTES,
        blocks=architecture.blocks(shape, hardware.device_flop_per_s),
        batch=batch,
    )


def _positive(what: str, key: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{what} with {key}={value!r}; allowed: a whole number of at least 1.")


def check_dimensions(what: str, layers: int, hidden: int, heads: int, vocabulary: int) -> None:
    """Refuses dimensions that no model has.

    Raises:
        ConfigError: One is no whole number of at least 1, or ``heads`` does not divide ``hidden``.
    """
    for key, value in (("layers", layers), ("hidden", hidden), ("heads", heads), ("vocabulary", vocabulary)):
        _positive(what, key, value)
    if hidden % heads:
        raise ConfigError(f"{what} with hidden={hidden} and heads={heads}; allowed: heads that divide hidden.")
