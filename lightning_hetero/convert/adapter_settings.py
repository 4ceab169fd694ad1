"""The settings of PEFT's adapters that a state dict does not have, such as ``lora_alpha``.

They decide what a model computes with its adapters. So checkpoints and the steps of a store have
them, and a model that loads one must have the same. What begins an adapter, and which modules have
one, is not compared: the values and the names of its parameters are loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TypeGuard

from torch import nn

from lightning_hetero.errors import ConfigError
from lightning_hetero.store.format import value_shapes
from lightning_hetero.untyped import Value

log = logging.getLogger(__name__)

KEY = "adapter_settings"  # of a checkpoint, and of a step's training state

Settings = Mapping[str, Mapping[str, Mapping[str, object]]]  # by the model's name, then the adapter's

_SHAPE = value_shapes.DictOf(value_shapes.DictOf(value_shapes.DictOf(object)))

_ORIGIN = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config", "task_type"}
_START = {"corda_config", "eva_config", "lora_ga_config", "loftq_config", "tokenizer_kwargs", "tokenizer_name_or_path"}
_PLACES = {"exclude_modules", "layers_pattern", "layers_to_transform", "modules_to_save", "target_modules", "target_parameters"}


def wrapped_models(root: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """The models of PEFT that have weights of the module ``name``, by their names in ``root``."""
    found: dict[int, tuple[str, nn.Module]] = {}  # a wrapper and what it wraps share their configurations
    for path, module in root.named_modules():
        configs = vars(module).get("peft_config")
        if isinstance(configs, Mapping) and (_within(path, name) or _within(name, path)):
            found.setdefault(id(configs), (path.removesuffix("base_model").removesuffix("."), module))
    return dict(found.values())


def settings_of(root: nn.Module) -> Settings:
    """Those of all models of PEFT in a module. Values are of types that any checkpoint may have."""
    models = {name: vars(module)["peft_config"] for name, module in wrapped_models(root).items()}
    return {name: {adapter: _compared(config) for adapter, config in configs.items()} for name, configs in models.items()}


def configurations(root: nn.Module) -> dict[str, dict[str, object]]:
    """The configurations of a model's adapters by name, as PEFT's folders have them.

    Empty if several models in it have adapters that are configured in different ways.
    """
    models = [vars(module)["peft_config"] for module in wrapped_models(root).values()]
    found = [{name: _as_json(config.to_dict()) for name, config in configs.items()} for configs in models]
    return found[0] if found and all(one == found[0] for one in found) else {}


def check(root: nn.Module, saved: object, *, strict: bool) -> None:
    """Compares the settings of a model's adapters with those of what it loads.

    Another dropout does not change what the weights mean, so a warning names it.

    Args:
        root: The model.
        saved: The entry of what is loaded. Files of earlier versions have none.
        strict: Whether to refuse other differences; otherwise a warning names them, too.

    Raises:
        ConfigError: Names the settings that differ, with both values; or it is no entry of ours.
    """
    if not _is_table(saved):
        what = value_shapes.fault(saved, _SHAPE, KEY)
        raise ConfigError(f"an entry for adapters of PEFT is not of this package: {what}. Load what it has saved.")
    differences = list(_differences(settings_of(root), saved))
    refused = [text for name, text in differences if strict and not name.endswith("dropout")]
    if refused:
        raise ConfigError(
            f"adapters were trained with other settings: {'; '.join(refused)}. The same values would compute something else. Build "
            f"the model with the settings that it was trained with. To change them, set strict_loading = False in the "
            f"LightningModule; or begin a new run with PEFT's load of the saved adapter."
        )
    for _, text in differences:
        log.warning("Adapters were trained with other settings: %s. Training goes on with those of this model.", text)


def _differences(mine: Settings, saved: Settings) -> Iterator[tuple[str, str]]:
    """Names of settings, and what differs. A setting that one side lacks is of another version."""
    for model in mine.keys() & saved.keys():
        for adapter in mine[model].keys() & saved[model].keys():
            here, there = mine[model][adapter], saved[model][adapter]
            for name in sorted(here.keys() & there.keys()):
                if here[name] != there[name]:
                    yield name, f"{name} of {adapter!r} was {there[name]!r}, and is {here[name]!r} here"


def _compared(config: Value) -> dict[str, object]:
    return {
        name: value
        for name, value in _as_json(config.to_dict()).items()
        if name not in _ORIGIN | _START | _PLACES and "init" not in name.split("_") and _is_plain(value)
    }


def _as_json(config: Mapping[str, object]) -> dict[str, object]:
    return {key: _plain(value) for key, value in config.items()}


def _plain(value: object) -> object:
    """As JSON has it."""
    if isinstance(value, Enum):
        return value.value
    return sorted(value) if isinstance(value, set) else value


def _is_plain(value: object) -> bool:
    """Whether checkpoints may have a value that are read with ``weights_only=True``."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list) else value is None or isinstance(value, bool | int | float | str)


def _is_table(found: object) -> TypeGuard[Settings]:
    return not value_shapes.fault(found, _SHAPE, KEY)


def _within(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")
