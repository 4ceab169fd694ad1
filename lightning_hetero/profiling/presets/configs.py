"""A model from the ``config.json`` of a Hugging Face model, without reading its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.codec import parse_object, read_text
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.profiling.presets import families
from lightning_hetero.profiling.presets.transformers import profile
from lightning_hetero.profiling.presets.tuning import TunedModel, Tuning

_FILE = "config.json"
_ITEMSIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # of floating point dtypes in safetensors files
_EXPERT = re.compile(r"\.experts\.\d+\.")  # in the name of a tensor of one expert
_HEADER_BYTES_MAX = 100_000_000  # the safetensors package's limit


def from_config(
    path: Path, tuning: Tuning, *, batch: int, sequence: int, hardware: HardwareProfile, itemsize: int = 2
) -> ModelProfile:
    """The profile of a causal language model and its adapters.

    Families that ``families.KNOWN`` names are read from the file. Others are built by transformers
    on the meta device, without memory; their activations are estimated. Frozen weights that
    safetensors files beside the config have with this width are read in place.

    Args:
        path: A ``config.json``, or a folder that has one.
        tuning: What trains, and how the rest is stored.
        batch: Sequences of one micro-batch on one device.
        sequence: Tokens of each.
        hardware: The machine; its device's FLOP/s give the times.
        itemsize: 2 for 16 bit, 4 for fp32.

    Raises:
        ConfigError: A file cannot be read, a key is missing or out of range, a target names no
            module, or transformers does not know the architecture.
        UnsupportedError: The architecture is unknown and transformers is not installed.
    """
    file, config = _read(path)
    layout = families.layout(config)
    if layout is None:
        from lightning_hetero.profiling.presets import meta_models

        layout = meta_models.layout(config)
    name = file.absolute().parent.name if file.name == _FILE else file.stem
    model = TunedModel(layout=layout, tuning=tuning, copied=_difference(file.absolute().parent, itemsize))
    return profile(name or file.stem, model, batch=batch, sequence=sequence, hardware=hardware, itemsize=itemsize)


def unreadable(path: Path) -> str:
    """Why a run cannot read a folder's weights as they are, and what to do; empty if it can.

    Args:
        path: A ``config.json``, or a folder that has one.

    Raises:
        ConfigError: A file cannot be read.
    """
    file, config = _read(path)
    return " ".join(filter(None, (_quantized(file, config), _separate_experts(file.absolute().parent, config))))


def _quantized(file: Path, config: families.Config) -> str:
    found = config.values.get("quantization_config")
    if found is None:
        return ""
    method = found.get("quant_method") if isinstance(found, dict) else found
    return (
        f"{file} has a quantization_config ({method}), which is not followed: the figures are those of weights that are not "
        f"quantized, or quantized as --quantize says. A run, too, needs a folder whose weights are not quantized."
    )


def _separate_experts(folder: Path, config: families.Config) -> str:
    if not any(_EXPERT.search(name) for header in _headers(folder) for name in header):
        return ""
    if config.values.get("model_type") not in families.KNOWN:
        from lightning_hetero.profiling.presets import meta_models

        if not meta_models.experts_of(str(config.values.get("model_type"))):
            return ""
    return (
        f"{folder} has each expert by itself, and the model has the experts of a layer in one tensor. For a run, load the model "
        f"once with from_pretrained, save it with save_pretrained(folder, save_original_format=False), and give that folder. The "
        f"figures are those of that folder."
    )


def _read(path: Path) -> tuple[Path, families.Config]:
    file = path / _FILE if path.is_dir() else path
    values = parse_object(read_text(file, what="model config"), what="model config", source=str(file))
    return file, families.Config(values, str(file))


def _difference(folder: Path, itemsize: int) -> str:
    """Why a model of this width does not have its weights as the folder's files do, or ``""``."""
    dtypes = {dtype for header in _headers(folder) for dtype in header.values()}
    others = sorted(dtype for dtype in dtypes if _ITEMSIZES.get(dtype, itemsize) != itemsize)
    if others:
        return f"they have {8 * itemsize} bits, in the files they are {', '.join(others)}"
    return "" if dtypes else "no safetensors files are beside config.json"


def _headers(folder: Path) -> Iterator[dict[str, str]]:
    """The dtypes of a folder's tensors by name, file by file."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header: dict[str, dict[str, str]] = json.loads(opened.read(size if size <= _HEADER_BYTES_MAX else 0))
            yield {name: row["dtype"] for name, row in header.items() if name != "__metadata__"}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{str(file)!r} is not a safetensors file: its header cannot be read. Get the file again.") from error
