"""Models by name: well-known ones, those of the papers' tables, and others by dimensions."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from lightning_hetero.errors import ConfigError, did_you_mean
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.profiling.presets.figures import find
from lightning_hetero.profiling.presets.llama_family import Llama
from lightning_hetero.profiling.presets.transformers import Architecture, Gpt, profile

_FAMILIES: dict[str, type[Gpt] | type[Llama]] = {"gpt": Gpt, "llama": Llama}


def _opt(layers: int, hidden: int, heads: int) -> Gpt:
    """OPT (Zhang et al. 2022, table 1), with extra positions and padded vocabulary."""
    return Gpt(layers=layers, hidden=hidden, heads=heads, vocabulary=50272, positions=2048, extra_positions=2, activation="relu")


def _lohan(layers: int, hidden: int, heads: int) -> Gpt:
    """LoHan, table IV.

    We infer that only some logits exist at once: at batch 64 not all fit 24 GB.
    """
    return Gpt(layers=layers, hidden=hidden, heads=heads, head_tokens=1024)


def _autohete(layers: int, hidden: int) -> Gpt:
    """AutoHete, tables 1 and 2.

    The paper gives no heads and no vocabulary; here 128 elements per head, GPT-2's vocabulary.
    """
    return Gpt(layers=layers, hidden=hidden, heads=hidden // 128)


def _dos(layers: int, hidden: int, heads: int) -> Gpt:
    """Deep Optimizer States, table 2: 12 h² per layer, so GPT blocks; LLaMA-2's vocabulary."""
    return Gpt(layers=layers, hidden=hidden, heads=heads, vocabulary=32000)


_KNOWN: dict[str, Architecture] = {
    # Radford et al. 2019; Brown et al. 2020, table 2.1.
    "gpt2": Gpt(layers=12, hidden=768, heads=12, positions=1024),
    "gpt2-medium": Gpt(layers=24, hidden=1024, heads=16, positions=1024),
    "gpt2-large": Gpt(layers=36, hidden=1280, heads=20, positions=1024),
    "gpt2-xl": Gpt(layers=48, hidden=1600, heads=25, positions=1024),
    "gpt3-6.7b": Gpt(layers=32, hidden=4096, heads=32, positions=2048),
    "gpt3-175b": Gpt(layers=96, hidden=12288, heads=96, positions=2048),
    "opt-125m": _opt(12, 768, 12),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    # Touvron et al. 2023; the Llama 2 and Llama 3 papers; Rozière et al. 2023; Jiang et al. 2023.
    "llama-7b": Llama(layers=32, hidden=4096, heads=32),
    "llama-13b": Llama(layers=40, hidden=5120, heads=40),
    "llama-30b": Llama(layers=60, hidden=6656, heads=52),
    "llama-65b": Llama(layers=80, hidden=8192, heads=64),
    "llama-2-70b": Llama(layers=80, hidden=8192, heads=64, intermediate=28672, kv_heads=8),
    "llama-3-8b": Llama(layers=32, hidden=4096, heads=32, vocabulary=128256, intermediate=14336, kv_heads=8),
    "llama-3-70b": Llama(layers=80, hidden=8192, heads=64, vocabulary=128256, intermediate=28672, kv_heads=8),
    "llama-3-405b": Llama(layers=126, hidden=16384, heads=128, vocabulary=128256, intermediate=53248, kv_heads=8),
    "codellama-34b": Llama(layers=48, hidden=8192, heads=64, intermediate=22016, kv_heads=8),
    "mistral-7b": Llama(layers=32, hidden=4096, heads=32, intermediate=14336, kv_heads=8),
    # Allal et al. 2025.
    "smollm2-135m": Llama(layers=30, hidden=576, heads=9, vocabulary=49152, intermediate=1536, kv_heads=3, tied=True),
    "smollm2-360m": Llama(layers=32, hidden=960, heads=15, vocabulary=49152, intermediate=2560, kv_heads=5, tied=True),
    "smollm2-1.7b": Llama(layers=24, hidden=2048, heads=32, vocabulary=49152, intermediate=8192, tied=True),
}

_LOHAN = {
    "6b": (28, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
    "135b": (88, 11264, 88),
    "175b": (96, 12288, 96),
    "276b": (112, 14336, 112),
    "412b": (128, 16384, 128),
}

_AUTOHETE = {
    "2b": (42, 2048),
    "4b": (21, 4096),
    "6b": (32, 4096),
    "8b": (42, 4096),
    "10b": (34, 5120),
    "12b": (30, 6144),
    "14b": (35, 6144),
    "16b": (40, 6144),
    "24b": (80, 5120),
    "32b": (108, 5120),
    "40b": (94, 6144),
    "48b": (82, 7168),
    "56b": (75, 8192),
    "70b": (92, 8192),
    "80b": (84, 9216),
    "100b": (84, 10240),
    "120b": (100, 10240),
    "140b": (80, 12288),
    "160b": (92, 12288),
}

# ProTrain, table 2 of appendix C.1, models of the transformers library; the 1B of its table 4 is
# inferred: 32 blocks, some 1e9 parameters.
_PROTRAIN: dict[str, Architecture] = {
    "gpt2-1b": Gpt(layers=32, hidden=1536, heads=24),
    "gpt2-10b": Gpt(layers=48, hidden=4096, heads=32),
    "gpt2-15b": Gpt(layers=18, hidden=8192, heads=64),
    "gpt2-20b": Gpt(layers=24, hidden=8192, heads=64),
    "gpt2-30b": Gpt(layers=36, hidden=8192, heads=64),
    "gpt2-40b": Gpt(layers=50, hidden=8192, heads=64),
    "mistral-7b": _KNOWN["mistral-7b"],
    "opt-13b": _KNOWN["opt-13b"],
    "opt-30b": _KNOWN["opt-30b"],
    "llama-13b": _KNOWN["llama-13b"],
    "llama-34b": _KNOWN["codellama-34b"],
}

# Table 2 prints 48 layers for 20B; the bytes beside it are those of 44, as GPT-NeoX has them. Here
# as printed.
_DOS = {"7b": (32, 4096, 32), "8.3b": (72, 3072, 24), "10b": (50, 4096, 32), "13b": (40, 5120, 40), "20b": (48, 6144, 64)}

MODELS: dict[str, Architecture] = {
    **_KNOWN,
    **{f"lohan-{size}": _lohan(*row) for size, row in _LOHAN.items()},
    **{f"autohete-{size}": _autohete(*row) for size, row in _AUTOHETE.items()},
    **{f"protrain-{name}": architecture for name, architecture in _PROTRAIN.items()},
    **{f"dos-{size}": _dos(*row) for size, row in _DOS.items()},
}


def model(name: str, *, batch: int, sequence: int, hardware: HardwareProfile, itemsize: int = 2) -> ModelProfile:
    """A model by name, or by its dimensions.

    Args:
        name: A name of :data:`MODELS`, or a family with the arguments of :class:`Gpt` or
            :class:`Llama`, such as ``"gpt:layers=40,hidden=5120,heads=40"`` or
            ``"llama:layers=22,hidden=2048,heads=32,kv_heads=4,tied=false"``.
        batch: Sequences of one micro-batch on one device.
        sequence: Tokens of each sequence.
        hardware: The machine; its device's FLOP/s give the times.
        itemsize: 2 for 16 bit, 4 for fp32.

    Raises:
        ConfigError: The name or a dimension is unknown, or a number is out of range.
    """
    family, colon, dimensions = name.partition(":")
    architecture = _from_text(family, dimensions) if colon else find("model", MODELS, name)
    return profile(name, architecture, batch=batch, sequence=sequence, hardware=hardware, itemsize=itemsize)


def gpt(
    layers: int,
    hidden: int,
    heads: int,
    vocabulary: int = 50257,
    *,
    batch: int,
    sequence: int,
    hardware: HardwareProfile,
    itemsize: int = 2,
    name: str = "",
    **options: Any,
) -> ModelProfile:
    """A GPT from its dimensions; ``options`` are other fields of :class:`Gpt`.

    Raises:
        ConfigError: A number is out of range.
    """
    architecture = Gpt(layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, **options)
    known = name or f"gpt:layers={layers},hidden={hidden},heads={heads}"
    return profile(known, architecture, batch=batch, sequence=sequence, hardware=hardware, itemsize=itemsize)


def llama(
    layers: int,
    hidden: int,
    heads: int,
    vocabulary: int = 32000,
    *,
    batch: int,
    sequence: int,
    hardware: HardwareProfile,
    itemsize: int = 2,
    name: str = "",
    **options: Any,
) -> ModelProfile:
    """A LLaMA from its dimensions; ``options`` are other fields of :class:`Llama`.

    Raises:
        ConfigError: A number is out of range.
    """
    architecture = Llama(layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, **options)
    known = name or f"llama:layers={layers},hidden={hidden},heads={heads}"
    return profile(known, architecture, batch=batch, sequence=sequence, hardware=hardware, itemsize=itemsize)


def _from_text(family: str, dimensions: str) -> Architecture:
    """``"layers=4,hidden=64,heads=4"`` as an architecture of the family."""
    make = find("model family", _FAMILIES, family)
    kinds = {f.name: f.default for f in fields(make)}
    values: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in dimensions.split(","))):
        key, equals, text = (p.strip() for p in part.partition("="))
        if not equals or key not in kinds:
            raise ConfigError(f"{family}: {part!r}; allowed: key=value with a key of {', '.join(kinds)}.{did_you_mean(key, kinds)}")
        values[key] = _value(text)
    if missing := [key for key, default in kinds.items() if default is MISSING and key not in values]:
        raise ConfigError(f"{family} needs {', '.join(missing)}, such as 'gpt:layers=24,hidden=2048,heads=16'.")
    return make(**values)


def _value(text: str) -> int | bool | str:
    words: dict[str, bool] = {"true": True, "false": False}
    return int(text) if text.isdecimal() else words.get(text.lower(), text)
