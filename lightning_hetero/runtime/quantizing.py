"""Quantizes weights of bitsandbytes' layers that are on the meta device, as files are read.

[Note: Quantized as they are read]
On the meta device, a layer's weights have the shape that they have in the files. Before the model
is placed they get shape and dtype of their packed form. When a block is placed, its weights are
read one by one, and bitsandbytes' own code quantizes them. A resume reads and quantizes them again
for their scales, which must be those that the codes in the store belong to.

[Note: The dtype that is quantized]
In memory there are two orders. ``from_pretrained`` quantizes weights as it loads them, in the
model's dtype, and a precision plugin finds them packed. Layers that others make are converted by
the plugin first, and quantized in its dtype when Lightning moves the model. On the meta device both
come as floating-point layers. ``is_loaded_in_4bit``, without which PEFT does not know what it
adapts, tells them apart: a model that says so is quantized in ``config.dtype``, whatever dtype its
layers were made with or converted to. bitsandbytes makes its tables in torch's default dtype, which
is another one while such a plugin has ``configure_model`` run. So that dtype is set as well.

bitsandbytes' code makes several fp32 copies of what it quantizes. So it gets pieces of it: scales
are of rows or of short runs, and pieces are whole numbers of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.runtime import quantized
from lightning_hetero.runtime.initialize import Content
from lightning_hetero.store.format.in_place import TensorPlace
from lightning_hetero.store.raw_memory import own_memory
from lightning_hetero.untyped import Options, Value, Values

_UNREAD = "hetero_unread"  # attribute of a weight until it is read: an _Unread
_LOADED = ("is_loaded_in_4bit", "is_loaded_in_8bit")  # set by transformers, read by PEFT
_OPTIONS = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "has_fp16_weights")
_PIECE = 1 << 20  # elements
_FP32 = 4


class _Unread(NamedTuple):
    """What a packed weight was before, and what it is quantized from.

    Attributes:
        shape: Its shape in the layer.
        dtype: Its dtype there.
        source: The dtype that is quantized.
        default: Torch's default dtype meanwhile.
    """

    shape: torch.Size
    dtype: torch.dtype
    source: torch.dtype
    default: torch.dtype


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer whose weights are quantized as they are read."""

    module: nn.Module
    unread: _Unread

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """The layer, which is packed already."""
        return cls(module, vars(module._parameters["weight"])[_UNREAD])

    @property
    def shape(self) -> torch.Size:
        """The shape of the weights that are quantized."""
        return self.unread.shape

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that are quantized."""
        return self.shape.numel() * self.unread.source.itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of what will belong to the weights.

        Source: bitsandbytes 0.50, ``quantize_4bit``, ``QuantState`` and ``Int8Params``: an fp32
        scale for each row, or for a block of 4-bit weights with a table of 16 values; quantized
        scales are bytes with a table of 256 values, an offset, and a scale for 256 of them.
        """
        own = vars(self.module._parameters["weight"])
        if "blocksize" not in own:
            return _FP32 * self.shape[0]
        blocksize: int = own["blocksize"]
        scales = -(-self.shape.numel() // blocksize)
        nested: bool = own["compress_statistics"]
        return _FP32 * 16 + (scales + _FP32 * (-(-scales // 256) + 257) if nested else _FP32 * scales)

    def quantize(self, whole: Tensor, memory: Tensor) -> None:
        """Puts the packed weights into memory, and what belongs to them into the layer."""
        weight: Value = self.module._parameters["weight"]
        own: Value = vars(weight)
        with torch.device("cpu"), _default(self.unread.default), torch.no_grad(), _Pieces():
            made: Value = type(weight)(whole, requires_grad=False, **{k: v for k, v in own.items() if k in _OPTIONS}).to("cpu")
        if made.shape != memory.shape or made.dtype != memory.dtype:
            raise UnsupportedError(
                f"bitsandbytes packs {tuple(self.shape)} into {tuple(made.shape)} {made.dtype}, and {tuple(memory.shape)} "
                f"{memory.dtype} was expected. Build and quantize the model in memory."
            )
        memory.copy_(made.data)
        if "blocksize" in own:
            weight.quant_state, weight.bnb_quantized = made.quant_state, True
            vars(self.module)["quant_state"] = made.quant_state
        else:
            weight.CB, weight.SCB = memory, made.SCB
        own.pop(_UNREAD, None)


class QuantizedContent:
    """Weights in files, some of which are quantized as they are read.

    Args:
        root: The model. Its layers on the meta device that quantize their weights are packed.
        content: What files have; ``None``: there are none.
        kept: Digests of the scales that the weights of a resumed store belong to, by name.

    Raises:
        UnsupportedError: Files do not have the weights of a layer, or it packs them otherwise than
            into bytes.
    """

    def __init__(self, root: nn.Module, content: Content, kept: Mapping[str, str]) -> None:
        self._content, self._kept = content, kept
        self._layers = {name: _Layer.of(module) for name, module in _packed(root)}

    def __contains__(self, name: object) -> bool:
        return name in self._content

    def place(self, name: str) -> TensorPlace | None:
        """Where a tensor is as it was saved, with the dtype that it has there."""
        return self._content.place(name)

    def fill(self, name: str, memory: Tensor) -> None:
        """Reads a tensor into a CPU tensor; quantizes the weights of a layer.

        Raises:
            ConfigError: The files are others than those that the resumed store's weights are from.
        """
        layer = self._layers.get(name)
        if layer is None:
            self._content.fill(name, memory)
            return
        whole = own_memory(layer.shape.numel(), layer.unread.source).view(layer.shape)
        self._content.fill(name, whole)
        layer.quantize(whole, memory)
        quantized.check_scales({name: quantized.digest_of(layer.module)}, {n: d for n, d in self._kept.items() if n == name})


def refuse_other_dtypes(root: nn.Module) -> None:
    """Refuses models whose code has changed the dtype that their configurations name.

    In memory such a model is quantized before, so code can only mean that it be loaded otherwise.

    Raises:
        UnsupportedError: Names the layer, both dtypes and how to say which is meant.
    """
    for model in _loaded(root):
        found, meant = getattr(model, "dtype", None), vars(model)["config"].dtype
        if isinstance(found, torch.dtype) and found != meant and found.itemsize <= meant.itemsize:
            name = next((name for name, _ in _to_quantize(model)), None)
            if name is not None:
                raise UnsupportedError(
                    f"{name!r} is on the meta device, and its {type(model).__name__} is {found}, but {meant} by config.dtype, in "
                    f"which weights are quantized as they are read. Say which: from_config(config, dtype={found}) instead of a "
                    f"conversion, or no conversion."
                )


def content_of(
    root: nn.Module, content: Content | None, kept: Mapping[str, str], default: Callable[[nn.Module], torch.dtype] | None = None
) -> Content | None:
    """The content of a model whose layers on the meta device may quantize weights as they are read.

    Args:
        root: The model. Those layers get the shape and the dtype of packed weights.
        content: What files have.
        kept: Digests of the scales that the weights of a resumed store belong to, by name.
        default: Torch's default dtype while a module was built; ``None``: that of now.

    Raises:
        UnsupportedError: Files do not have a layer's weights, or these are not packed into bytes.
    """
    layers, now = list(_to_quantize(root)), torch.get_default_dtype()
    loaded = {
        id(module): (vars(model)["config"].dtype, now if default is None else default(model))
        for model in _loaded(root)
        for module in model.modules()
    }  # see [Note: The dtype that is quantized]
    for name, module in layers:
        if content is None or name not in content:
            raise UnsupportedError(
                f"the {type(module).__name__} {name.removesuffix('.weight')!r} is on the meta device, and quantizing needs its "
                f"values. Give files that have them (weights=), build the model in memory, or build it without quantization."
            )
        _pack(module, name, *loaded.get(id(module), (None, now)))
    return content if content is None or not layers else QuantizedContent(root, content, kept)


def unpack(root: nn.Module) -> None:
    """Gives layers that were packed, but not read, their shape again: a start was refused."""
    for _, module in _packed(root):
        weight: Value = module._parameters["weight"]
        own: Value = vars(weight)
        unread: _Unread = own.pop(_UNREAD)
        weight.data = torch.empty(unread.shape, dtype=unread.dtype, device="meta")


def coming_scale_bytes(root: nn.Module) -> int:
    """Bytes of what will belong to weights that are yet to be read."""
    return sum(_Layer.of(module).scale_bytes for _, module in _packed(root))


def reading_bytes(root: nn.Module) -> int:
    """Bytes of memory, beside the packed weights, to quantize those that are yet to be read."""
    sizes = [_Layer.of(module).num_bytes for _, module in _packed(root)]
    return 2 * max(sizes) + 16 * _PIECE if sizes else 0


def packed_names(root: nn.Module) -> set[str]:
    """The names of weights that are yet to be read and quantized."""
    return {name for name, _ in _packed(root)}


def _in_pieces(_: object, func: Value, types: object, args: Values = (), kwargs: Options | None = None) -> Value:
    """Has bitsandbytes quantize piece by piece; see the note above."""
    name = func.name()
    if kwargs or name not in ("bitsandbytes::quantize_4bit", "bitsandbytes::int8_vectorwise_quant"):
        return func(*args, **(kwargs or {}))
    whole, *options = args
    by_rows = name != "bitsandbytes::quantize_4bit"
    rest: Value = whole if by_rows else whole.reshape(-1)
    step = max(1, _PIECE // whole.shape[-1]) if by_rows else max(1, _PIECE // options[0]) * options[0]
    if len(rest) <= step or (by_rows and any(options)):  # a threshold looks at columns
        return func(*args)
    codes, scales, *others = zip(*(func(piece, *options) for piece in rest.split(step)), strict=True)
    return (torch.cat(codes), torch.cat(scales), *(of_all[0] for of_all in others))


_Pieces: Value = type("_Pieces", (TorchDispatchMode,), {"__torch_dispatch__": _in_pieces})  # torch has no types here


def _to_quantize(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers on the meta device that would quantize their weights, with the names of these."""
    for name, module, weight in quantized.weights_of(root):
        if weight.is_meta and quantized.is_to_quantize(weight):
            yield name, module


def _packed(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers that :func:`content_of` has packed, and whose weights have not been read."""
    for name, module, weight in quantized.weights_of(root):
        if _UNREAD in vars(weight):
            yield name, module


def _loaded(root: nn.Module) -> Iterator[nn.Module]:
    """Models that say that transformers has quantized them, and in which dtype it loads weights."""
    for model in root.modules():
        own = vars(model)
        if any(own.get(says) is True for says in _LOADED) and isinstance(getattr(own.get("config"), "dtype", None), torch.dtype):
            yield model


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _pack(module: nn.Module, name: str, source: torch.dtype | None, default: torch.dtype) -> None:
    weight: Value = module._parameters["weight"]
    own: Value = vars(weight)
    if own.get("quant_storage", torch.uint8) != torch.uint8:
        raise UnsupportedError(
            f"{name!r} is on the meta device, and its quant_storage is {own['quant_storage']}. Allowed there: torch.uint8. Build "
            f"and quantize the model in memory."
        )
    if getattr(vars(module).get("source_cls"), "__name__", "") == "Conv1D":
        raise UnsupportedError(
            f"{name!r} is on the meta device in the place of a Conv1D of transformers, whose files have the matrix turned. Build "
            f"and quantize the model in memory."
        )
    own[_UNREAD] = _Unread(weight.shape, weight.dtype, source or weight.dtype, default)
    four_bit = "blocksize" in own
    shape = ((weight.numel() + 1) // 2, 1) if four_bit else tuple(weight.shape)
    weight.data = torch.empty(shape, dtype=torch.uint8 if four_bit else torch.int8, device="meta")
