"""Sets adapters of PEFT that were made on the meta device.

See [Note: Adapters on the meta device] in ``runtime.initialize``. PEFT is not imported: its layers
are recognized by their attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from lightning_hetero.errors import ConfigError
from lightning_hetero.untyped import Function, Value

# Encoders of prompts that begin as torch's layers do: prompt tuning, p-tuning, prefix tuning.
_PROMPTS = ("PromptEmbedding", "PromptEncoder", "PrefixEncoder")

Setters = dict[int, list[Callable[[], object]]]


def adapter_setters(root: nn.Module) -> tuple[dict[int, str], Setters]:
    """By the module's ``id``: why an adapter cannot be set, and the functions that set one."""
    refused: dict[int, str] = {}
    setters: Setters = {}

    def note(part: nn.Module, why: str, found: list[Callable[[], object]]) -> None:
        setters.setdefault(id(part), []).extend(found)
        if why:
            refused[id(part)] = why

    def visit(module: nn.Module, configs: Mapping[str, object]) -> None:
        known = getattr(module, "peft_config", None)
        configs = known if isinstance(known, Mapping) else configs
        children = dict(module.named_children())  # asked as anyone does: a test's mock has no modules of its own
        for key, child in children.items():
            if "base_layer" in children and key != "base_layer":
                for adapter, inner in _by_adapter(child):
                    why, found = _setter(module, key, adapter, configs)
                    for part in inner.modules():
                        note(part, why, found)
            elif key == "prompt_encoder" and known is not None:
                for adapter, encoder in child.named_children():
                    for part in encoder.modules():
                        note(part, *_prompt_setter(encoder, part, adapter, configs))
            else:
                visit(child, configs)

    visit(root, {})
    return refused, setters


def copy_setters(root: nn.Module) -> Setters:
    """By the ``id`` of a module in ``modules_to_save``: what sets it as the module it replaces.

    PEFT copies that module when it wraps it, with its values.
    """
    setters: Setters = {}
    for wrapper in root.modules():
        copies, original = wrapper._modules.get("modules_to_save"), wrapper._modules.get("original_module")
        if copies is None or original is None:
            continue
        for copied in copies.children():
            for part, first in zip(copied.modules(), original.modules(), strict=False):
                setters.setdefault(id(part), []).append(partial(_copy, first, part))
    return setters


def refuse_parts_of_prompts(root: nn.Module, given: Callable[[str, Tensor], object]) -> None:
    """Refuses prompts on the meta device that were loaded without the layers that make them.

    PEFT saves the vectors that those layers of p-tuning make. In memory they begin at random too.

    Args:
        root: The model, of which no checkpoint is loaded.
        given: The values that code has given a parameter on the meta device; ``None`` if none.

    Raises:
        ConfigError: Names such a prompt.
    """
    for name, encoder in root.named_modules():
        if type(encoder).__name__ not in _PROMPTS or ".prompt_encoder." not in f".{name}":
            continue
        on_meta = {n: p for n, p in encoder.named_parameters(name) if p.is_meta}
        new = [n for n, p in on_meta.items() if given(n, p) is None]
        if 0 < len(new) < len(on_meta):
            raise ConfigError(
                f"the prompt {name!r} was loaded on the meta device without {new[0]!r}: PEFT saves the vectors that these layers "
                f"make, not the layers, which would begin at random. Train such a prompt on from a checkpoint or a store "
                f"(ckpt_path=). For predict, load it by PeftModel.from_pretrained without is_trainable."
            )


def refuse_trained_ranks(root: nn.Module) -> None:
    """Refuses AdaLoRA on the meta device, if the rank of an adapter became a parameter that trains.

    PEFT moves a new adapter to the device of its base layer. That turns the frozen ranks, in a
    ``ParameterDict``, into parameters that train, and plain training of a model in memory has none.

    Raises:
        ConfigError: Names such a rank.
    """
    for name, module in root.named_modules():
        ranks = module._modules.get("ranknum")
        for adapter, rank in ({} if ranks is None else ranks._parameters).items():
            if rank is not None and rank.is_meta and rank.requires_grad:
                raise ConfigError(
                    f"PEFT has made {f'{name}.ranknum.{adapter}'!r}, a rank of AdaLoRA, a parameter that trains: it does so on the "
                    f"meta device. Build a model with AdaLoRA in memory, or use LoRA."
                )


def number_tokens(root: nn.Module) -> None:
    """Sets the numbers of virtual tokens, which PEFT keeps in a dictionary, on the CPU."""
    for module in root.modules():
        tokens: Value = getattr(module, "prompt_tokens", None)
        if "prompt_encoder" in module._modules and isinstance(tokens, dict):
            tokens.update({adapter: torch.arange(numbers.numel()) for adapter, numbers in tokens.items() if numbers.is_meta})


def _by_adapter(container: nn.Module) -> list[tuple[str, nn.Module]]:
    """Each adapter's module in a container of a layer. A ``ParameterDict`` is the module of all."""
    if isinstance(container, nn.ModuleDict):
        return list(container.items())
    return [(name, container) for name in container._parameters]


def _prompt_setter(
    encoder: nn.Module, part: nn.Module, adapter: str, configs: Mapping[str, object]
) -> tuple[str, list[Callable[[], object]]]:
    """As PEFT makes them: by the constructors of torch's layers."""
    config, kind = configs.get(adapter), type(encoder).__name__
    if kind not in _PROMPTS:
        return f"adapter {adapter!r} has a {kind}, whose start is not known here", []
    for option, known in (("prompt_tuning_init", "RANDOM"), ("init_weights", True)):
        how = getattr(config, option, None)
        if how is not None and how != known:
            return f"adapter {adapter!r} has {option}={getattr(how, 'value', how)!r}, which needs values in memory", []
    reset: Callable[[], object] | None = getattr(part, "reset_parameters", None)
    return "", [] if reset is None else [reset]


def _setter(layer: nn.Module, key: str, adapter: str, configs: Mapping[str, object]) -> tuple[str, list[Callable[[], object]]]:
    kind, how = type(layer).__name__, getattr(configs.get(adapter), "init_lora_weights", None)
    if key == "ia3_l" and getattr(configs.get(adapter), "init_ia3_weights", None) is True:
        ones: Function | None = getattr(layer, "reset_ia3_parameters", None)
        return "", [] if ones is None else [partial(ones, adapter)]
    reset: Function | None = getattr(layer, "reset_lora_parameters", None)
    if reset is None:
        return f"adapter {adapter!r} is of {kind}, whose start is not known here", []
    if how is not True and how != "gaussian":
        return f"adapter {adapter!r} has init_lora_weights={how!r}, which needs the base weights in memory", []
    if key == "lora_magnitude_vector":
        return "", [partial(_set_magnitudes, layer, adapter)]
    if key not in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
        return f"adapter {adapter!r} has {key} in {kind}, whose start is not known here", []
    return "", [partial(reset, adapter, how)]


@torch.no_grad()
def _copy(original: nn.Module, part: nn.Module) -> None:
    for mine, its in zip(part.parameters(recurse=False), original.parameters(recurse=False), strict=True):
        mine.copy_(its)


@torch.no_grad()
def _set_magnitudes(layer: Value, adapter: str) -> None:
    """DoRA's magnitudes are the norms of the base weights, to which LoRA adds nothing yet.

    Source: PEFT, ``DoraLinearLayer.update_layer``.
    """
    vector, base = layer.lora_magnitude_vector[adapter], layer.get_base_layer()
    nothing = torch.zeros((), dtype=base.weight.dtype)  # broadcast, because an embedding's matrix is turned
    vector.weight.copy_(vector.get_weight_norm(base.weight, nothing, layer.scaling[adapter]))
