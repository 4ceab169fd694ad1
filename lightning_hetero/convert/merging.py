"""Merges adapters of PEFT into the weights of their layers, one layer at a time.

[Note: PEFT merges]
Names tell which layers have adapters. For these alone a tree of modules is made on the meta device,
into which PEFT injects the adapters of a configuration: it finds ranks, scales and patterns as in
the whole model. A layer gets its tensors when one of its results is written, is merged by PEFT's
own code, and goes back to the meta device. So the bits are those of ``merge_and_unload()``, and the
memory is that of one layer.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_hetero.checkpoint.files import Place
from lightning_hetero.convert.adapter_settings import wrapped_models
from lightning_hetero.convert.merges import Merges
from lightning_hetero.convert.safetensors import TensorToWrite, WeightFiles
from lightning_hetero.errors import ConfigError, UnsupportedError

log = logging.getLogger(__name__)

_CONTAINERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "ia3_l")
_KINDS = {"LORA": "lora_", "IA3": "ia3_"}  # PEFT's types that can be merged here, and how their tensors are named
_KEEP_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")  # init_lora_weights that do not change the base weights
_WRAPPER = "base_model.model."  # where a wrapped model is in a PeftModel
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class _Config(Protocol):
    """A configuration of PEFT."""

    peft_type: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter to merge.

    Attributes:
        config: PEFT's configuration.
        name: Its name in the model; empty if a folder has it.
        tensors: Those of a folder or a store, by their names in the model that was wrapped.
        where: Its folder, its store or its name, for messages.
    """

    config: _Config
    name: str
    tensors: Mapping[str, TensorToWrite]
    where: str


def of_folder(folder: str | os.PathLike[str]) -> Adapter:
    """An adapter as ``save_pretrained`` writes it. It may have its configuration alone.

    Raises:
        ConfigError: There is no configuration.
        UnsupportedError: PEFT is not installed, or cannot merge this kind.
    """
    place = Place.of(folder)
    if not (place / _CONFIG).is_file():
        raise ConfigError(f"{str(place)!r} is no folder of an adapter: it has no {_CONFIG}. Give the folder that PEFT has saved.")
    config: _Config = _peft("merge an adapter").PeftConfig.from_pretrained(str(place))
    tensors = {}
    if (place / _WEIGHTS).is_file():
        for stored in WeightFiles.open(place / _WEIGHTS).tensors.values():
            name = stored.name.removeprefix(_WRAPPER)
            tensors[name] = TensorToWrite(name, stored.dtype, stored.shape, stored.read)
    return Adapter(_checked(config, str(place)), "", tensors, repr(str(place)))


def of_store(configs: Mapping[str, Mapping[str, object]], where: str) -> Adapter:
    """The adapter of a store, without its tensors; see :func:`with_tensors`.

    Args:
        configs: The configurations of adapters in the store, by name.
        where: The store, for messages.

    Raises:
        ConfigError: It has none.
        UnsupportedError: It has several, PEFT is not installed, or cannot merge this kind.
    """
    if not configs:
        raise ConfigError(
            f"store {where!r} does not say how its adapters were configured. Give the folder that PEFT's save_pretrained() has "
            f"written; its configuration is enough."
        )
    if len(configs) > 1:
        raise UnsupportedError(
            f"store {where!r} has adapters {', '.join(map(repr, configs))}; one is merged at a time. Give the folder of one."
        )
    ((name, values),) = configs.items()
    config: _Config = _peft("merge an adapter").PeftConfig.from_peft_type(**values)
    return Adapter(_checked(config, where), name, {}, repr(where))


def with_tensors(
    adapter: Adapter, tensors: Iterable[TensorToWrite], models: Sequence[str], trained: Collection[str]
) -> Adapter:  # fmt: skip
    """An adapter of a store, to be merged into other weights than those of the store.

    Its tensors are its own and those of the base that trained with it, such as biases.

    Args:
        adapter: The adapter.
        tensors: Those of the store.
        models: The names of the models that have adapters.
        trained: The names of tensors that were trained.

    Raises:
        UnsupportedError: It is not known which model's adapter is meant.
    """
    if len(models) != 1:
        has = f"has adapters of the models {', '.join(map(repr, models))}" if models else "does not say which model has the adapter"
        raise UnsupportedError(f"store {adapter.where} {has}. Give the folder that PEFT's save_pretrained() has written of one.")
    begin, own = f"{models[0]}." if models[0] else "", {}
    for tensor in tensors:
        owner, known = _owner(tensor.name.removeprefix(begin))
        if tensor.name.startswith(begin) and (owner == adapter.name or (not owner and tensor.name in trained)):
            own[known] = replace(tensor, name=known)
    return replace(adapter, tensors=own)


def of_model(root: nn.Module, name: str = "") -> Adapter:
    """The active adapter of a model of PEFT inside a module.

    Args:
        root: The module.
        name: The module inside it that is exported; empty for all of it.

    Raises:
        ConfigError: There is none.
        UnsupportedError: There are several, or it is of a kind that is not merged here.
    """
    models = wrapped_models(root, name)
    if not models:
        raise ConfigError("the model has no adapters of PEFT to merge. Leave merge out.")
    if len(models) > 1:
        raise UnsupportedError(
            f"{', '.join(map(repr, models))} have adapters of their own; those of one model are merged at a time. Name it with "
            f"module=, such as module={next(iter(models))!r}."
        )
    (model,) = models.values()
    configs, active = vars(model)["peft_config"], getattr(model, "active_adapters", None)
    names = active() if callable(active) else active
    wanted = [*configs] if names is None else [names] if isinstance(names, str) else list(names)
    if len(wanted) != 1:
        raise UnsupportedError(
            f"adapters {', '.join(map(repr, wanted))} are active; one is merged at a time. Choose it with set_adapter()."
        )
    return Adapter(_checked(configs[wanted[0]], wanted[0]), wanted[0], {}, repr(wanted[0]))


def merged(tensors: Sequence[TensorToWrite], adapter: Adapter, done: Merges, *, ties_known: bool = True) -> list[TensorToWrite]:
    """The weights of a model with an adapter merged into them; names are those without PEFT.

    Args:
        tensors: Those of the model, wrapped by PEFT or not.
        adapter: The adapter.
        done: The adapters that layers have merged already.
        ties_known: Whether the tensors say which weights are tied to others.

    Raises:
        ConfigError: An adapter has no tensors, or its layers are not in the model.
        UnsupportedError: A layer is of a kind that cannot be merged here, or has another adapter
            merged.
    """
    source = _Source(tensors, ties_known=ties_known)
    name, chosen = _chosen(source, adapter)
    rows = {_owner(layer)[1]: set(merge["adapters"]) for layer, merge in done.items()}
    own = {layer for layer, kind, _ in map(_cut, chosen) if kind}  # other adapters may have other layers
    there = set().union(*rows.values())
    if there and (there != {name} or not all(rows.get(layer) for layer in own)):
        raise UnsupportedError(
            f"the layers of the model have the adapter {', '.join(map(repr, sorted(there)))} merged, and not all that have "
            f"{name!r} exactly this one. Call unmerge_adapter() before they are saved or exported."
        )
    source.apply(adapter, chosen, in_layers=bool(there))
    return source.base()


class _Source:
    """The tensors of a model, divided into those of the base and those of adapters."""

    def __init__(self, tensors: Sequence[TensorToWrite], *, ties_known: bool) -> None:
        self._base: dict[str, TensorToWrite] = {}
        self._ties: dict[str, str] = {}  # further names of weights of the base
        self._ties_known = ties_known
        self.adapters: dict[str, dict[str, TensorToWrite]] = {}  # by adapter, then by name without it
        for tensor in tensors:
            first = ""
            for full in (tensor.name, *tensor.ties):
                adapter, name = _owner(full)
                if adapter:
                    self.adapters.setdefault(adapter, {})[name] = tensor
                elif first:
                    self._ties[name] = first
                else:
                    self._base[name], first = replace(tensor, name=name), name

    def base(self) -> list[TensorToWrite]:
        """The weights as they are now."""
        return list(self._base.values())

    def apply(self, adapter: Adapter, tensors: Mapping[str, TensorToWrite], *, in_layers: bool) -> None:
        """Merges one adapter; ``in_layers``: layers have it already, but not what it replaces."""
        rows = [(*_cut(name), name, tensor) for name, tensor in tensors.items()]
        for _, kind, _, name, tensor in rows:
            if not kind:
                self._copy(adapter, name.replace(".base_layer.", "."), tensor)
        weights = [known.removesuffix(".weight") for known in self._base if known.endswith(".weight")]
        layers: dict[str, dict[str, TensorToWrite]] = {}
        for layer, kind, rest, _, tensor in rows:
            if kind and not in_layers:
                if kind == "lora_magnitude_vector":
                    rest = ".weight"  # which PEFT leaves out in files
                layers.setdefault(self._named(layer, weights), {})[f"{kind}{rest}"] = tensor
        for layer, made in _layers(adapter, layers, self._base, casts=tensors is adapter.tensors).items():
            for key in ("weight", "bias"):
                if (old := self._base.get(f"{layer}.{key}")) is not None:
                    self._base[old.name] = replace(old, read=partial(made.read, key))

    def _copy(self, adapter: Adapter, name: str, tensor: TensorToWrite) -> None:
        """Takes a weight that the adapter has whole.

        One of ``modules_to_save`` is no longer tied to others, which keep the base's. Others are
        base weights that PEFT has saved with the adapter.
        """
        known = [*self._base, *self._ties]
        if _is_saved(adapter.config, name) and not any(one == name or one.endswith(f".{name}") for one in known):
            raise ConfigError(
                f"adapter {adapter.where} has its own {name!r}, which these weights do not have. If it is a head that is tied to "
                f"the embedding in the base, merge a checkpoint of the run, or in memory, with merge_and_unload(). Otherwise give "
                f"the weights that the adapter was trained for."
            )
        target = self._named(name, known)
        old = self._base[self._ties.get(target, target)]
        if old.shape != tensor.shape:
            raise ConfigError(
                f"adapter {adapter.where} has {target!r} of shape {tuple(tensor.shape)}, the model {tuple(old.shape)}. Give the "
                f"model that it was trained for."
            )
        if not _is_saved(adapter.config, name):
            self._base[old.name] = replace(tensor, name=old.name, dtype=old.dtype)
            return
        if not self._ties_known and _embeds(target) and sum(one.shape == old.shape for one in self._base.values()) == 1:
            raise UnsupportedError(
                f"adapter {adapter.where} has its own {target!r}, and these weights do not say whether the model's head is tied to "
                f"the base's. Give a checkpoint of the run, or merge in memory, with merge_and_unload()."
            )
        for tied in [tied for tied, first in self._ties.items() if target in (tied, first)]:
            del self._ties[tied]
            self._base[tied] = replace(old, name=tied)
        self._base[target] = replace(tensor, name=target)

    def _named(self, name: str, names: Sequence[str]) -> str:
        """Which of the model's names an adapter means."""
        found = [known for known in names if known == name or known.endswith(f".{name}")]
        if name in found:
            return name
        if len(found) != 1:
            why = "which the model does not have" if not found else f"which may be {found[0]!r} or {found[1]!r}"
            raise ConfigError(
                f"the adapter is for {name!r}, {why}. Give the weights that it was trained for, all of them, and with module= the "
                f"model that was wrapped. If it is a head that is tied to the embedding, merge in memory, with merge_and_unload()."
            )
        return found[0]


@dataclass(eq=False, slots=True)
class _Layer:
    """A layer of PEFT on the meta device, and its tensors.

    Attributes:
        module: The layer.
        name: The adapter's name in it.
        base: Its weight and, if it has one, its bias, before the merge.
        tensors: The adapter's.
        casts: Whether 16-bit adapters are computed in fp32, as ``PeftModel.from_pretrained`` does
            with those of a folder.
    """

    module: nn.Module
    name: str
    base: dict[str, TensorToWrite]
    tensors: dict[str, TensorToWrite]
    casts: bool

    def read(self, key: str) -> Tensor:
        """The merged weight or bias."""
        # Copies, because a model in memory gives its own weights, and PEFT merges in place.
        state = {f"base_layer.{name}": tensor.read().clone() for name, tensor in self.base.items()}
        for name, tensor in self.tensors.items():
            kind, dot, rest = name.partition(".")
            value = tensor.read()
            state[f"{kind}.{self.name}{dot}{rest}"] = value.float() if self.casts and value.dtype.itemsize == 2 else value
        with torch.no_grad():
            self.module.load_state_dict(state, assign=True)
            del state
            merge = getattr(self.module, "merge")  # noqa: B009  # a module's attributes have no types
            merge(adapter_names=[self.name])
            out = self.module.get_submodule("base_layer").get_parameter(key).detach()
        self.module.to("meta")
        getattr(self.module, "merged_adapters").clear()  # noqa: B009
        return out


def _layers(
    adapter: Adapter, found: Mapping[str, dict[str, TensorToWrite]], base: Mapping[str, TensorToWrite], *, casts: bool
) -> dict[str, _Layer]:
    """PEFT's layers, by name."""
    if not found:
        return {}
    name = adapter.name or "default"
    others = _other_matrices(found, base) if casts else set()  # in a model, PEFT has given adapters to all that it names
    tree = nn.Module()
    for layer in sorted({*found, *others}):  # a module comes before those inside it
        own = {key: base[f"{layer}.{key}"] for key in ("weight", "bias") if f"{layer}.{key}" in base}
        turned = bool(getattr(adapter.config, "fan_in_fan_out", False))
        _put(tree, layer, _plain(layer, own, found.get(layer, ()), turned=turned))
    inject = _peft("merge an adapter").inject_adapter_in_model
    inject(adapter.config, tree, name, low_cpu_mem_usage=True)
    _warn_of_bare([layer for layer, module in tree.named_modules() if layer in others and "base_layer" in module._modules], adapter)
    made = {}
    for layer, tensors in found.items():
        module = tree.get_submodule(layer)
        own = {key: base[f"{layer}.{key}"] for key in ("weight", "bias") if f"{layer}.{key}" in base}
        wanted = {f"base_layer.{key}" for key in own} | {_with(name, key) for key in tensors}
        if (known := set(module.state_dict())) != wanted:
            odd = sorted(known ^ wanted)[0]
            where = "by its configuration" if odd in known else "in its tensors"
            raise ConfigError(
                f"adapter {adapter.where}: {layer!r} has {odd!r} {where} only. Give configuration and tensors of one adapter."
            )
        for key, tensor in tensors.items():
            if (shape := module.state_dict()[_with(name, key)].shape) != tensor.shape:
                raise ConfigError(
                    f"adapter {adapter.where} has {key!r} of shape {tuple(tensor.shape)} for {layer!r}; its configuration and the "
                    f"model's weight, {tuple(base[f'{layer}.weight'].shape)}, need {tuple(shape)}. Give the model that it was "
                    f"trained for."
                )
        made[layer] = _Layer(module, name, own, tensors, casts=casts)
    return made


def _other_matrices(found: Collection[str], base: Mapping[str, TensorToWrite]) -> set[str]:
    """The layers of the base that an adapter could be for, without those that it is for."""
    matrices = {name for name, tensor in base.items() if len(tensor.shape) == 2 and tensor.dtype.is_floating_point}
    return {name.removesuffix(".weight") for name in matrices if name.endswith(".weight")}.difference(found)


def _warn_of_bare(layers: Sequence[str], adapter: Adapter) -> None:
    """Names layers with an adapter by the configuration and none in the folder, as PEFT does."""
    if layers:
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        log.warning(
            "Adapter %s has no tensors for %s%s, which its configuration names: they keep the base's weights. The adapter may be "
            "for another model.", adapter.where, ", ".join(map(repr, layers[:3])), more,
        )  # fmt: skip


def _plain(layer: str, own: Mapping[str, TensorToWrite], tensors: Iterable[str], *, turned: bool) -> nn.Module:
    """The layer that PEFT has wrapped, on the meta device."""
    weight = own["weight"]
    if not weight.dtype.is_floating_point or len(weight.shape) != 2:
        raise UnsupportedError(
            f"{layer!r} has a weight of {weight.dtype} and shape {tuple(weight.shape)}; only matrices that are not quantized are "
            f"merged. Merge into the folder of the base, which has them as they were: `lightning-hetero export BASE MERGED --merge "
            f"ADAPTER`, with the store of the run or a folder of PEFT as ADAPTER. Or merge in memory, with merge_and_unload()."
        )
    rows, columns = weight.shape
    if any(name.startswith("lora_embedding") for name in tensors):
        return nn.Embedding(rows, columns, device="meta", dtype=weight.dtype)
    if turned:
        conv: nn.Module = importlib.import_module("transformers.pytorch_utils").Conv1D(columns, rows).to("meta", weight.dtype)
        return conv
    return nn.Linear(columns, rows, bias="bias" in own, device="meta", dtype=weight.dtype)


def _put(tree: nn.Module, path: str, leaf: nn.Module) -> None:
    *parents, last = path.split(".")
    for name in parents:
        if name not in tree._modules:
            tree.add_module(name, nn.Module())
        tree = tree.get_submodule(name)
    tree.add_module(last, leaf)


def _owner(full: str) -> tuple[str, str]:
    """The adapter of a tensor, empty for one of the base, and its name without it."""
    parts = full.replace(_WRAPPER, "", 1).split(".")
    kind = next((i for i, part in enumerate(parts) if part in _CONTAINERS or part.startswith(tuple(_KINDS.values()))), None)
    if kind is not None and kind + 1 < len(parts):
        return parts[kind + 1], ".".join([*parts[: kind + 1], *parts[kind + 2 :]])
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        return parts[at + 1], ".".join([*parts[:at], *parts[at + 2 :]])
    return "", ".".join(part for part in parts if part not in ("base_layer", "original_module"))


def _is_saved(config: _Config, name: str) -> bool:
    """Whether a tensor is in one of the configuration's ``modules_to_save``."""
    parts = name.split(".")
    modules = [".".join(parts[:end]) for end in range(1, len(parts))]
    return any(module.endswith(saved) for saved in getattr(config, "modules_to_save", None) or () for module in modules)


def _embeds(name: str) -> bool:
    """Whether a weight is that of a token embedding, by its name in models of transformers."""
    return any(word in part for part in name.split(".")[-2:] for word in ("embed", "wte", "shared"))


def _cut(name: str) -> tuple[str, str, str]:
    """A tensor's layer, its kind, and what follows; without a kind it is a copy of a weight."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.startswith(tuple(_KINDS.values()))), None)
    if at is None:
        return name, "", ""
    return ".".join(parts[:at]), parts[at], "".join(f".{part}" for part in parts[at + 1 :])


def _with(adapter: str, key: str) -> str:
    kind, dot, rest = key.partition(".")
    return f"{kind}.{adapter}{dot}{rest}"


def _chosen(source: _Source, adapter: Adapter) -> tuple[str, Mapping[str, TensorToWrite]]:
    """An adapter's name and tensors: those in the model count before those in its folder."""
    known = source.adapters
    if not known:
        if not adapter.tensors:
            raise ConfigError(
                f"adapter {adapter.where} has no {_WEIGHTS}, and the weights have no adapters. Give one that has been saved."
            )
        begins = getattr(adapter.config, "init_lora_weights", True)
        if begins not in _KEEP_BASE:
            raise UnsupportedError(
                f"adapter {adapter.where} began with init_lora_weights={begins!r}, which changes the base weights, and these files "
                f"have them as they were before. Give a store or a checkpoint of the run, or convert the adapter: PEFT's "
                f"save_pretrained(..., path_initial_model_for_weight_conversion=...)."
            )
        return "", adapter.tensors
    folder = os.path.basename(os.path.normpath(adapter.where.strip("'")))
    said = next((name for name in (adapter.name, folder) if name in known), None)
    name = said or (next(iter(known)) if len(known) == 1 else _with_values(known, adapter))
    if (other := _other(known[name], adapter)) is not None:
        raise ConfigError(
            f"the weights have an adapter of their own, and {adapter.where} has other values, such as of {other!r}. To merge those "
            f"of the folder, give the base weights, such as those that weights= named. To merge those of the source, save its "
            f"adapter, or give a folder with the {_CONFIG} alone."
        )
    return name, known[name]


def _with_values(known: Mapping[str, Mapping[str, TensorToWrite]], adapter: Adapter) -> str:
    """The one of several that a folder has: PEFT saves ``default`` beside the others' folders."""
    saved = {name for name in adapter.tensors if _cut(name)[1]}
    for name, tensors in known.items():
        if saved and all(_stored(tensors, own) is not None for own in saved) and _other(tensors, adapter) is None:
            return name
    raise ConfigError(
        f"the weights have the adapters {', '.join(map(repr, sorted(known)))}, and none has the name of the folder "
        f"{adapter.where}, or the values in it. Give the folder of one of them, as PEFT names it or with the weights that it saved."
    )


def _other(found: Mapping[str, TensorToWrite], adapter: Adapter) -> str | None:
    """A tensor of which an adapter's folder has other values than a source."""
    for name, tensor in adapter.tensors.items():
        own = _stored(found, name)
        if own is not None and not torch.equal(own.read().float(), tensor.read().float()):
            return name
    return None


def _stored(found: Mapping[str, TensorToWrite], name: str) -> TensorToWrite | None:
    """A source's tensor of the name that a folder gives it."""
    whole = f"{name}.weight" if name.endswith("lora_magnitude_vector") else name
    return next((tensor for known, tensor in found.items() if known == whole or known.endswith(f".{whole}")), None)


def _checked(config: _Config, where: str) -> _Config:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind not in _KINDS:
        raise UnsupportedError(
            f"adapter {where!r} is of type {kind}; merged are {', '.join(_KINDS)} (with rsLoRA and DoRA). Load the model in memory "
            f"and call merge_and_unload(), if PEFT can merge it."
        )
    for option in ("trainable_token_indices", "target_parameters", "layer_replication"):
        if getattr(config, option, None):
            raise UnsupportedError(
                f"adapter {where!r} has {option}, which is merged in memory only: load the model and call merge_and_unload()."
            )
    return config


def _peft(purpose: str) -> ModuleType:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise UnsupportedError(f"to {purpose}, peft is needed, and it is not installed. Install it: pip install peft.") from error
