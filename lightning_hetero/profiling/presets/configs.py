"""A model from the ``config.json`` of a Hugging Face model, without its weights."""

from __future__ import annotations

from pathlib import Path

from lightning_hetero.ir.codec import parse_object, read_text
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.profiling.presets import families
from lightning_hetero.profiling.presets.transformers import profile
from lightning_hetero.profiling.presets.tuning import TunedModel, Tuning

_FILE = "config.json"


def from_config(
    path: Path, tuning: Tuning, *, batch: int, sequence: int, hardware: HardwareProfile, itemsize: int = 2
) -> ModelProfile:
    """The profile of a causal language model and its adapters.

    Families that ``families.KNOWN`` names are read from the file. Others are built by transformers
    on the meta device, without memory; their activations are estimated.

    Args:
        path: A ``config.json``, or a folder that has one.
        tuning: What trains, and how the rest is stored.
        batch: Sequences of one micro-batch on one device.
        sequence: Tokens of each.
        hardware: The machine; its device's FLOP/s give the times.
        itemsize: 2 for 16 bit, 4 for fp32.

    Raises:
        ConfigError: The file cannot be read, a key is missing or out of range, a target names no
            module, or transformers does not know the architecture.
        UnsupportedError: The architecture is unknown and transformers is not installed.
    """
    file = path / _FILE if path.is_dir() else path
    config = families.Config(parse_object(read_text(file, what="model config"), what="model config", source=str(file)), str(file))
    layout = families.layout(config)
    if layout is None:
        from lightning_hetero.profiling.presets import meta_models

        layout = meta_models.layout(config)
    name = file.absolute().parent.name if file.name == _FILE else file.stem
    model = TunedModel(layout=layout, tuning=tuning)
    return profile(name or file.stem, model, batch=batch, sequence=sequence, hardware=hardware, itemsize=itemsize)
