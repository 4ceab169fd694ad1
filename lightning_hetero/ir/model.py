"""The planners' input about a model: its blocks in forward order, their sizes and costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.codec import Rows, check_format, check_keys, number, parse_object, read_text, to_text
from lightning_hetero.ir.plan import TRAINED

FORMAT = "lightning-hetero-model"
VERSION = 1

CHUNK_LOGITS = 1 << 25
"""Logits that a chunked head computes at a time: 128 MiB in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """One operator inside a block whose output backward needs.

    Attributes:
        name: Unique in its block, such as ``"attn.c_proj"``.
        flop: FLOP of one forward of the operator, the cost to recompute its output.
        bytes: Bytes of the saved output, the cost to keep or swap it.
    """

    name: str
    flop: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardOperator:
    """One backward operator that frees saved activations, with the device memory around it, bytes.

    Only ``freed_bytes`` counts activations that forward saves. No field counts weights and their
    gradients.

    Attributes:
        name: A display name.
        gap_peak_bytes: The peak since the previous operator of the profile, including everything
            that ran between the two.
        before_bytes: Memory when it begins.
        peak_bytes: The peak while it runs.
        after_bytes: Memory when it ends.
        freed_bytes: Saved activations that were freed since the previous operator.
    """

    name: str
    gap_peak_bytes: int
    before_bytes: int
    peak_bytes: int
    after_bytes: int
    freed_bytes: int

    def scaled(self, factor: float) -> BackwardOperator:
        """The same for a batch that is ``factor`` times as large, rounded up."""
        return replace(self, **{key: ceil(getattr(self, key) * factor) for key in _BACKWARD})


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The size of one block.

    Attributes:
        name: The block's module name inside the LightningModule, such as ``"model.layers.3"``. With
            ``":trained"`` behind it: the parameters that train in a block that is frozen otherwise.
        num_params: Elements of all its parameters, alignment padding included.
        num_trainable_params: Elements that have optimizer state, padding included.
        weight_bytes: Bytes of its weights in the compute dtype.
        gradient_bytes: Bytes of one full set of its gradients.
        state_bytes: Bytes of its optimizer state (16-bit weights: fp32 master included).
        pinned: Whether its weights must stay in memory: parameters outside repeated blocks, tied
            weights, and trained parts of frozen blocks.
        in_memory: Whether an optimizer updates it that reads and writes all weights and state at
            once: neither may be on disk.
        activation_bytes: As in :class:`BlockProfile`; 0 if it is not known.
        boundary_bytes: The same.
        transient_bytes: The same.
        cast_bytes: The same.
        operators: The same.
        in_place_bytes: The same.
        copied: The same.
    """

    name: str
    num_params: int
    num_trainable_params: int
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    pinned: bool = False
    in_memory: bool = False
    activation_bytes: int = 0
    boundary_bytes: int = 0
    transient_bytes: int = 0
    cast_bytes: int = 0
    operators: tuple[OperatorProfile, ...] = ()
    in_place_bytes: int = 0
    copied: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The blocks of one model in forward order.

    Attributes:
        name: A display name.
        blocks: The blocks, in the order of forward.
        kept_every: N if every N-th step is kept on disk, with everything that lives in memory; 0:
            no step is.
    """

    name: str
    blocks: tuple[BlockShape, ...]
    kept_every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The share of a block that the devices of one tensor-parallel group divide.

    Each of them holds and computes the rest.

    Attributes:
        num_params: Elements of the parameters that are sharded.
        num_trainable_params: Elements of sharded parameters that are optimized.
        forward_flop: FLOP of one forward that are divided.
        activation_bytes: Activations saved for backward on all shards together, bytes.
        traffic_bytes: Tensors that forward and backward of one micro-batch all-reduce, bytes.
        ways: The size of a group must divide this; 1: only groups of one device, 0: any size.
    """

    num_params: int
    num_trainable_params: int
    forward_flop: float
    activation_bytes: int
    traffic_bytes: int
    ways: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """One block: its compute, the time of it, and the activations that it saves for backward.

    Attributes:
        name: As in :class:`BlockShape`.
        num_params: Elements of all its parameters.
        num_trainable_params: Elements that are optimized.
        forward_s: Seconds of one forward of one micro-batch, nothing else running.
        backward_s: Seconds of its backward without recomputation.
        forward_flop: FLOP of one forward.
        activation_bytes: Everything that its forward saves for backward, its input included and
            ``cast_bytes`` not, bytes.
        boundary_bytes: Its input alone, from which the whole block is recomputed, bytes.
        transient_bytes: The peak of its temporary memory in forward or backward, saved activations
            not included, bytes.
        operators: Saved operator outputs, in the order of execution; their bytes sum to at most
            ``activation_bytes``.
        backward: Operators of its backward, in the order of execution; empty if they were not
            recorded.
        pinned: Whether its weights must stay in memory: parameters outside repeated blocks, tied
            weights, and trained parts of frozen blocks.
        sharding: The share that tensor parallelism divides; ``None``: everything that Megatron-LM
            divides.
        cast_bytes: 16-bit casts of its weights that forward saves under mixed precision, bytes. If
            the weights leave memory between uses, so do the casts.
        weight_bytes: Bytes of its weights where they are not those of the compute dtype: quantized
            ones with their scales, fp32 adapters of a 16-bit model; 0: those of the compute dtype.
        gradient_bytes: The same for one full set of its gradients.
        state_bytes: The same for its optimizer state.
        in_place_bytes: Bytes of its weights that safetensors files have as they are. They are read
            there, so they take no space in a store.
        copied: Why its other frozen weights take a slot of a store; empty: nobody knows.
    """

    name: str
    num_params: int
    num_trainable_params: int
    forward_s: float
    backward_s: float
    forward_flop: float
    activation_bytes: int
    boundary_bytes: int
    transient_bytes: int
    operators: tuple[OperatorProfile, ...] = ()
    backward: tuple[BackwardOperator, ...] = ()
    pinned: bool = False
    sharding: Sharding | None = None
    cast_bytes: int = 0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0
    in_place_bytes: int = 0
    copied: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """One model at one batch shape, for the planners and the simulator.

    Attributes:
        name: A display name.
        tokens: Tokens (or samples, if there are no tokens) of one micro-batch on one device.
        compute_itemsize: Bytes of one weight in compute: 4 for fp32, 2 for 16 bit (with fp32 master
            weights in the state).
        constant_device_bytes: Device memory that no plan changes: context, workspace, inputs,
            buffers.
        constant_host_bytes: The same for host memory.
        blocks: The blocks, in the order of forward.
        kept_every: N if every N-th step is kept on disk, with everything that lives in memory; 0:
            no step is.
        batch: Sequences that these tokens are, all of one length; 0: not known.
    """

    name: str
    tokens: int
    compute_itemsize: int
    constant_device_bytes: int
    constant_host_bytes: int
    blocks: tuple[BlockProfile, ...]
    kept_every: int = 0
    batch: int = 0

    @property
    def num_params(self) -> int:
        """Elements of all blocks."""
        return sum(b.num_params for b in self.blocks)

    @property
    def state_itemsize(self) -> int:
        """Bytes of Adam's state per trainable element, with the fp32 master of 16-bit weights."""
        return 8 if self.compute_itemsize == 4 else 12

    def weight_bytes(self, block: BlockProfile) -> int:
        """Bytes of a block's weights."""
        return block.weight_bytes or block.num_params * self.compute_itemsize

    def gradient_bytes(self, block: BlockProfile) -> int:
        """Bytes of one full set of a block's gradients."""
        return block.gradient_bytes or block.num_trainable_params * self.compute_itemsize

    def state_bytes(self, block: BlockProfile) -> int:
        """Bytes of a block's optimizer state."""
        return block.state_bytes or block.num_trainable_params * self.state_itemsize

    def shape(self) -> ModelShape:
        """The blocks' sizes, as lowering needs them."""
        return self._shape

    @cached_property
    def _shape(self) -> ModelShape:
        rows = (
            BlockShape(
                name=b.name,
                num_params=b.num_params,
                num_trainable_params=b.num_trainable_params,
                weight_bytes=self.weight_bytes(b),
                gradient_bytes=self.gradient_bytes(b),
                state_bytes=self.state_bytes(b),
                pinned=b.pinned,
                activation_bytes=b.activation_bytes,
                boundary_bytes=b.boundary_bytes,
                transient_bytes=b.transient_bytes,
                cast_bytes=b.cast_bytes,
                operators=b.operators,
                in_place_bytes=b.in_place_bytes,
                copied=b.copied,
            )
            for b in self.blocks
        )
        return ModelShape(name=self.name, blocks=tuple(rows), kept_every=self.kept_every)

    def slice_of(self, ranks: int) -> ModelProfile:
        """The profile of one of several ranks that share the model.

        It computes as before, with whole weights. It owns a slice of weights, gradients and state;
        each is rounded up, as ranks own slices of equal length.
        """
        blocks = [replace(b, **{key: -(-getattr(b, key) // ranks) for key in _OF_SLICES}) for b in self.blocks]
        return replace(self, blocks=tuple(blocks))

    def whole_of(self, ranks: int) -> ModelProfile:
        """The profile of the whole model, if this is that of one of several ranks."""
        blocks = [replace(b, **{key: getattr(b, key) * ranks for key in _OF_SLICES}) for b in self.blocks]
        return replace(self, blocks=tuple(blocks))

    def to_json(self) -> str:
        """The profile as JSON text, one block per line."""
        head = {"format": FORMAT, "version": VERSION} | {k: getattr(self, k) for k in _MODEL_KEYS}
        head |= {key: value for key in _MODEL_OPTIONAL if (value := getattr(self, key))}
        return to_text({**head, "blocks": Rows(_row(b) for b in self.blocks)})

    @classmethod
    def from_json(cls, text: str, *, source: str = "model profile") -> ModelProfile:
        """Reads :meth:`to_json`'s text.

        Args:
            text: The JSON text.
            source: A file name for errors.

        Raises:
            ConfigError: Not JSON, another format, a missing or unknown key, a value out of range.
        """
        data = parse_object(text, what="model profile", source=source)
        check_format(data, FORMAT, VERSION, what="model profile", source=source)
        check_keys(data, required=[*_MODEL_KEYS, "blocks"], optional=_MODEL_OPTIONAL, where=source)
        rows = data["blocks"]
        if not isinstance(rows, list) or not rows:
            raise ConfigError(f"{source}: 'blocks' must be a non-empty list of objects, got {rows!r}.")
        blocks = tuple(_block_from(row, f"{source}: blocks[{i}]") for i, row in enumerate(rows))
        if len({b.name for b in blocks}) < len(blocks):
            raise ConfigError(f"{source}: block names repeat; every block needs its own.")
        if data["compute_itemsize"] not in (2, 4):
            raise ConfigError(f"{source}: compute_itemsize={data['compute_itemsize']!r}; allowed: 2 (16 bit), 4 (fp32).")
        values: dict[str, Any] = {"name": _text(data, "name", source)}
        for key in _MODEL_KEYS[1:]:
            values[key] = number(data[key], key=key, where=source, positive=key == "tokens", whole=True)
        values |= {key: number(data.get(key, 0), key=key, where=source, whole=True) for key in _MODEL_OPTIONAL}
        model = cls(**values, blocks=blocks)
        for block in blocks:
            if block.in_place_bytes > (most := model.weight_bytes(block)):
                raise ConfigError(f"{source}: in_place_bytes={block.in_place_bytes} of {block.name!r}; allowed: at most {most}.")
        return model

    @classmethod
    def load(cls, path: str | Path) -> ModelProfile:
        """Reads a profile's file.

        Raises:
            ConfigError: The file cannot be read or is not a profile.
        """
        return cls.from_json(read_text(path, what="model profile"), source=str(path))


def undivided(model: ModelProfile) -> ModelProfile:
    """The same with the trained parts of frozen blocks back in their blocks.

    For planners that place whole layers.
    """
    parts = {b.name.removesuffix(TRAINED): b for b in model.blocks if b.name.endswith(TRAINED)}
    if not parts:
        return model
    blocks = tuple(_with(model, b, parts.get(b.name)) for b in model.blocks if not b.name.endswith(TRAINED))
    return replace(model, blocks=blocks)


def _with(model: ModelProfile, block: BlockProfile, part: BlockProfile | None) -> BlockProfile:
    if part is None:
        return block
    sums = {key: getattr(block, key) + getattr(part, key) for key in (*_SECONDS_AND_FLOP, "num_params", "num_trainable_params")}
    if block.weight_bytes or part.weight_bytes:
        sums["weight_bytes"] = model.weight_bytes(block) + model.weight_bytes(part)
    return replace(block, **sums, gradient_bytes=part.gradient_bytes, state_bytes=part.state_bytes)


_MODEL_KEYS = ("name", "tokens", "compute_itemsize", "constant_device_bytes", "constant_host_bytes")
_MODEL_OPTIONAL = ("kept_every", "batch")
_SECONDS_AND_FLOP = ("forward_s", "backward_s", "forward_flop")
_OF_SLICES = ("num_params", "num_trainable_params", "weight_bytes", "gradient_bytes", "state_bytes", "in_place_bytes")
_OWN_BYTES = ("cast_bytes", "weight_bytes", "gradient_bytes", "state_bytes", "in_place_bytes")
_OPTIONAL = ("operators", "backward", "pinned", "sharding", "copied", *_OWN_BYTES)
_BACKWARD = ("gap_peak_bytes", "before_bytes", "peak_bytes", "after_bytes", "freed_bytes")
_COUNTS = ("num_params", "num_trainable_params", "activation_bytes", "boundary_bytes", "transient_bytes")


def _row(block: BlockProfile) -> dict[str, Any]:
    row = asdict(block)
    if block.sharding is None:
        del row["sharding"]
    if not block.backward:
        del row["backward"]
    for key in (*_OWN_BYTES, "copied"):
        if not row[key]:
            del row[key]
    return row


def _block_from(row: Any, where: str) -> BlockProfile:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be an object, got {row!r}.")
    check_keys(row, required=("name", *_COUNTS, *_SECONDS_AND_FLOP), optional=_OPTIONAL, where=where)
    values: dict[str, Any] = {"name": _text(row, "name", where)}
    values |= {k: number(row[k], key=k, where=where, whole=True) for k in _COUNTS}
    values |= {k: number(row[k], key=k, where=where) for k in _SECONDS_AND_FLOP}
    values |= {k: number(row.get(k, 0), key=k, where=where, whole=True) for k in _OWN_BYTES}
    if values["num_trainable_params"] > values["num_params"]:
        raise ConfigError(f"{where}: num_trainable_params={values['num_trainable_params']}; allowed: at most num_params.")
    if values["boundary_bytes"] > values["activation_bytes"]:
        raise ConfigError(f"{where}: boundary_bytes={values['boundary_bytes']}; allowed: at most activation_bytes.")
    operators = row.get("operators", [])
    if not isinstance(operators, list):
        raise ConfigError(f"{where}: operators must be a list, got {operators!r}.")
    parsed = tuple(_operator_from(o, f"{where}: operators[{i}]") for i, o in enumerate(operators))
    if len({o.name for o in parsed}) < len(parsed):
        raise ConfigError(f"{where}: operator names repeat; every operator of a block needs its own.")
    backward = row.get("backward", [])
    if not isinstance(backward, list):
        raise ConfigError(f"{where}: backward must be a list, got {backward!r}.")
    values["backward"] = tuple(_backward_from(o, f"{where}: backward[{i}]") for i, o in enumerate(backward))
    pinned = row.get("pinned", False)
    if not isinstance(pinned, bool):
        raise ConfigError(f"{where}: pinned={pinned!r}; allowed: true, false.")
    values["copied"] = _text(row, "copied", where) if row.get("copied") != "" and "copied" in row else ""
    return BlockProfile(**values, operators=parsed, pinned=pinned, sharding=_sharding_from(row.get("sharding"), values, where))


def _sharding_from(row: Any, block: dict[str, Any], where: str) -> Sharding | None:
    if row is None:
        return None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: sharding must be an object, got {row!r}.")
    where = f"{where}: sharding"
    keys = ("num_params", "num_trainable_params", "forward_flop", "activation_bytes", "traffic_bytes")
    check_keys(row, required=keys, optional=("ways",), where=where)
    values: dict[str, Any] = {k: number(row[k], key=k, where=where, whole=k != "forward_flop") for k in keys}
    for key in keys[:-1]:
        if values[key] > block[key]:
            raise ConfigError(f"{where}: {key}={values[key]}; allowed: at most the block's, {block[key]}.")
    return Sharding(**values, ways=int(number(row.get("ways", 0), key="ways", where=where, whole=True)))


def _operator_from(row: Any, where: str) -> OperatorProfile:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be an object, got {row!r}.")
    check_keys(row, required=("name", "flop", "bytes"), optional=(), where=where)
    num_bytes = number(row["bytes"], key="bytes", where=where, whole=True)
    return OperatorProfile(name=_text(row, "name", where), flop=number(row["flop"], key="flop", where=where), bytes=int(num_bytes))


def _backward_from(row: Any, where: str) -> BackwardOperator:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be an object, got {row!r}.")
    check_keys(row, required=("name", *_BACKWARD), optional=(), where=where)
    counts: dict[str, Any] = {key: number(row[key], key=key, where=where, whole=True) for key in _BACKWARD}
    return BackwardOperator(name=_text(row, "name", where), **counts)


def _text(data: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(data[key], str) or not data[key]:
        raise ConfigError(f"{where}: {key}={data[key]!r}; expected text.")
    value: str = data[key]
    return value
