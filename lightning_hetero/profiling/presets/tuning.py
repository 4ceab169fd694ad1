"""Blocks of a model as a profile: what trains and what is frozen, and what that costs.

[Note: Frozen weights]
A product whose weights are frozen has no gradient of them: its backward has the FLOP of its
forward, not twice as many, and needs no input. The gradient of its input is still computed, because
adapters in the layers before need it. Of the first layer PEFT skips that, unless inputs require
gradients, as they do with gradient checkpointing; it is counted.

A block in which little trains becomes two: ``store.partition`` says when and why. The block of the
frozen rest has the compute and the activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_hetero.errors import ConfigError, did_you_mean
from lightning_hetero.ir.model import CHUNK_LOGITS, BlockProfile, OperatorProfile
from lightning_hetero.ir.plan import TRAINED, is_divided
from lightning_hetero.profiling.presets import adapters
from lightning_hetero.profiling.presets.adapters import Lora
from lightning_hetero.profiling.presets.quantization import Quantization, is_quantized
from lightning_hetero.profiling.presets.rows import BlockRows, Layout, Module, Operator
from lightning_hetero.profiling.presets.transformers import Shape

_ID_BYTES = 8  # of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a model is trained.

    Attributes:
        lora: Its adapters; ``None``: all weights train.
        quantization: How its frozen weights are stored; ``None``: in the compute dtype.
        chunked_head: Whether head and loss are computed in chunks: the strategy's option.
    """

    lora: Lora | None = None
    quantization: Quantization | None = None
    chunked_head: bool = False

    def __post_init__(self) -> None:
        if self.quantization is not None and self.lora is None:
            raise ConfigError(f"--quantize {self.quantization}: quantized weights cannot train. Give --lora too.")

    @classmethod
    def parse(cls, *, lora: str | None, quantize: str | None, chunked_head: bool = False) -> Tuning:
        """Reads the command line's options.

        Raises:
            ConfigError: One of them says nothing that is known.
        """
        kinds = [kind.value for kind in Quantization]
        if quantize is not None and quantize not in kinds:
            raise ConfigError(f"--quantize {quantize!r}; allowed: {', '.join(kinds)}.{did_you_mean(quantize, kinds)}")
        return cls(
            lora=None if lora is None else Lora.parse(lora),
            quantization=None if quantize is None else Quantization(quantize),
            chunked_head=chunked_head,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedModel:
    """A model from its rows, as an ``Architecture``.

    Attributes:
        layout: The model.
        tuning: What trains.
        copied: Why frozen weights are not read in place from safetensors files; empty: they are,
            except quantized ones.
    """

    layout: Layout
    tuning: Tuning = Tuning()
    copied: str = "their files are not known"

    def blocks(self, shape: Shape, flop_per_s: float) -> tuple[BlockProfile, ...]:
        """The blocks in the order of forward; the trained part of a frozen block before the rest.

        Raises:
            ConfigError: A target names no module, or weights that are quantized would train.
        """
        lora = self.tuning.lora
        ranks = dict[str, int]() if lora is None else lora.adapted(self.layout)
        if lora is not None:
            lora.check_saved(self.layout)
        if self.tuning.chunked_head:
            _check_chunks(self.layout, ranks)
        tuned = (_Tuned(rows, shape, self.tuning, ranks, self.copied) for rows in self.layout.blocks)
        return tuple(profile for block in tuned for profile in block.profiles(flop_per_s))


@dataclass(frozen=True, slots=True)
class _Stored:
    """Parameters of one kind in a block, and their bytes."""

    num_params: int
    num_bytes: int
    state_bytes: int = 0
    in_place_bytes: int = 0
    copied: str = ""  # why the others take a slot, if they are frozen


class _Tuned:
    """One block with its adapters, at one batch shape."""

    def __init__(self, rows: BlockRows, shape: Shape, tuning: Tuning, ranks: Mapping[str, int], copied: str) -> None:
        self._rows, self._shape, self._tuning, self._copied = rows, shape, tuning, copied
        self._lora = tuning.lora
        self._adapted = [(m, ranks[m.name]) for m in rows.modules if m.name in ranks]
        self._ranks = {m.name: rank for m, rank in self._adapted}
        self._saved = [m for m in rows.modules if self._lora is not None and self._lora.saves(m)]
        if tuning.quantization is not None and (bad := next(filter(is_quantized, self._saved), None)) is not None:
            raise ConfigError(
                f"--quantize {tuning.quantization}: {bad.name} is in modules_to_save, and quantized weights cannot train."
            )

    def profiles(self, flop_per_s: float) -> Iterator[BlockProfile]:
        """The block, or its trained part and the rest; nothing if it has no parameters."""
        frozen, trained = self._stored()
        if not self._rows.pinned and is_divided(trained.num_params, frozen.num_bytes):
            yield self._trained_part(trained)
            yield self._whole(frozen, _NOTHING, flop_per_s)
        elif frozen.num_params + trained.num_params:
            yield self._whole(frozen, trained, flop_per_s)

    def _stored(self) -> tuple[_Stored, _Stored]:
        """Frozen and trained parameters."""
        modules, quantization = list(self._rows.modules), self._tuning.quantization
        base = self._trained(modules)
        if self._lora is None:
            fixed = self._trained([m for m in modules if m.frozen])
            own = 0 if self._copied else fixed.num_bytes
            frozen = _Stored(fixed.num_params, fixed.num_bytes, in_place_bytes=own, copied=self._copied if fixed.num_bytes else "")
            return frozen, self._trained([m for m in modules if not m.frozen])
        quantized = [] if quantization is None else [m for m in modules if is_quantized(m)]
        changed = 0 if quantization is None else sum(map(quantization.weight_bytes, quantized))
        as_it_is = base.num_bytes - sum(m.weight_params * self._itemsize(m) for m in quantized)
        reasons = [self._copied] if as_it_is else []
        reasons += [f"they are quantized ({quantization})"] if quantized else []
        frozen = _Stored(
            base.num_params,
            changed + as_it_is,
            in_place_bytes=0 if self._copied else as_it_is,
            copied="; ".join(filter(None, reasons)),
        )
        added = sum(self._lora.params(m, rank) for m, rank in self._adapted)
        copies = self._trained([replace(m, tied=False) for m in self._saved])
        trained = _Stored(
            copies.num_params + added,
            copies.num_bytes + added * adapters.ITEMSIZE,
            copies.state_bytes + added * _state_itemsize(adapters.ITEMSIZE),
        )
        return frozen, trained

    def _trained(self, modules: Sequence[Module]) -> _Stored:
        """The parameters of modules, with state."""
        sizes = [(m.num_params, self._itemsize(m)) for m in modules]
        return _Stored(
            sum(count for count, _ in sizes),
            sum(count * e for count, e in sizes),
            sum(count * _state_itemsize(e) for count, e in sizes),
        )

    def _itemsize(self, module: Module) -> int:
        return module.itemsize or self._shape.itemsize

    def _trained_part(self, trained: _Stored) -> BlockProfile:
        part = BlockProfile(
            name=self._rows.name + TRAINED,
            num_params=trained.num_params,
            num_trainable_params=trained.num_params,
            forward_s=0.0,
            backward_s=0.0,
            forward_flop=0.0,
            activation_bytes=0,
            boundary_bytes=0,
            transient_bytes=0,
            pinned=True,
        )
        return self._with_bytes(part, _NOTHING, trained)

    def _whole(self, frozen: _Stored, trained: _Stored, flop_per_s: float) -> BlockProfile:
        rows, tokens = self._rows, self._shape.tokens
        operators = tuple(filter(None, map(self._operator, rows.operators)))
        boundary = tokens * (rows.boundary_width * self._shape.itemsize or _ID_BYTES)
        forward, backward = self._flop()
        block = BlockProfile(
            name=rows.name,
            num_params=frozen.num_params + trained.num_params,
            num_trainable_params=trained.num_params,
            forward_s=forward / flop_per_s,
            backward_s=backward / flop_per_s,
            forward_flop=float(forward),
            activation_bytes=boundary + sum(o.bytes for o in operators),
            boundary_bytes=boundary,
            transient_bytes=self._transient_bytes(),
            operators=operators,
            pinned=rows.pinned,
        )
        return self._with_bytes(block, frozen, trained)

    def _with_bytes(self, block: BlockProfile, frozen: _Stored, trained: _Stored) -> BlockProfile:
        """The block with its own bytes, where they are not those of the compute dtype."""
        e, count = self._shape.itemsize, block.num_trainable_params
        usual = (block.num_params * e, count * e, count * _state_itemsize(e))
        own = (frozen.num_bytes + trained.num_bytes, trained.num_bytes, trained.state_bytes)
        weights, gradients, state = (size if size != other else 0 for size, other in zip(own, usual, strict=True))
        return replace(
            block, weight_bytes=weights, gradient_bytes=gradients, state_bytes=state, in_place_bytes=frozen.in_place_bytes,
            copied=frozen.copied,
        )  # fmt: skip

    def _operator(self, operator: Operator) -> OperatorProfile | None:
        """An operator with all that backward needs of it; ``None`` if that is nothing."""
        shape, kept = self._shape, operator.kept or self._is_read(operator.name)
        num_bytes = shape.tokens * operator.width * (operator.itemsize or shape.itemsize) if kept else 0
        module = operator.module
        if module is not None and self._is_chunked(module):
            num_bytes = shape.tokens * module.inputs * shape.itemsize  # the gradient of its input, from forward
        if self._lora is not None and module is not None and (rank := self._ranks.get(module.name)):
            num_bytes += self._lora.kept_bytes(module, rank, tokens=shape.tokens, itemsize=shape.itemsize)
        flop = self._forward_flop(operator)
        return OperatorProfile(name=operator.name, flop=float(flop), bytes=num_bytes) if num_bytes else None

    def _is_read(self, name: str) -> bool:
        """Whether the gradient of a weight needs an operator's output.

        Adapters in another dtype than the activations read a copy.
        """
        modules = (o.module for o in self._rows.operators if o.reads == name and o.module is not None)
        readers = (m for m in modules if not self._is_chunked(m))
        if self._lora is None:
            return any(True for _ in readers)
        same = self._shape.itemsize == adapters.ITEMSIZE
        return any(m in self._saved or (m.name in self._ranks and (same or adapters.is_tensor(m))) for m in readers)

    def _is_chunked(self, module: Module) -> bool:
        return module.head and self._tuning.chunked_head

    def _forward_flop(self, operator: Operator) -> int:
        tokens, module = self._shape.tokens, operator.module
        flop = operator.pair_flop * tokens * self._shape.sequence
        if module is not None:
            flop += module.flop * tokens
            if self._lora is not None and (rank := self._ranks.get(module.name)):
                lora = self._lora
                flop += lora.flop(module, rank) * tokens + lora.sum_flop(module, rank) + lora.forward_only_flop(module, rank)
        return flop

    def _flop(self) -> tuple[int, int]:
        """FLOP of forward and of backward: [Note: Frozen weights]."""
        forward = sum(map(self._forward_flop, self._rows.operators))
        if self._lora is None:
            return forward, 2 * forward
        summed = {m.name for m, _ in self._adapted if adapters.is_tensor(m)} | {m.name for m in self._saved}
        frozen = sum(m.flop for m in self._rows.modules if m.name not in summed) * self._shape.tokens
        once = sum(self._lora.forward_only_flop(m, rank) for m, rank in self._adapted)
        return forward, frozen + 2 * (forward - frozen - once)

    def _transient_bytes(self) -> int:
        rows, tokens, e = self._rows, self._shape.tokens, self._shape.itemsize
        held = tokens * (rows.transient_width * e + rows.transient_fp32 * 4)
        if (head := next(filter(self._is_chunked, rows.modules), None)) is not None:
            held = min(max(CHUNK_LOGITS, head.outputs), tokens * head.outputs) * (e + 4 * (e != 4))
        restored = max((m.weight_params * e for m in rows.modules if self._tuning.quantization and is_quantized(m)), default=0)
        lora = self._lora
        added = 0 if lora is None else max((lora.transient_bytes(m, tokens, e) for m, _ in self._adapted), default=0)
        return held + restored + added


_NOTHING = _Stored(0, 0)


def _check_chunks(layout: Layout, ranks: Mapping[str, int]) -> None:
    """Refuses what ``chunked_head=True`` of the strategy refuses."""
    rows, head = next(((rows, m) for rows in layout.blocks for m in rows.modules if m.head), (None, None))
    if rows is None or head is None:
        raise ConfigError("--chunked-head: the model has no linear head.")
    last = rows.operators[-1]
    if head.name in ranks or last.module is not head:
        why = "has an adapter" if head.name in ranks else f"is followed by {last.name}"
        raise ConfigError(f"--chunked-head: {head.name} {why}, so head and loss cannot be computed in chunks.")


def _state_itemsize(itemsize: int) -> int:
    """Bytes of Adam's state of one weight: 16-bit ones have an fp32 master."""
    return 8 if itemsize == 4 else 12
