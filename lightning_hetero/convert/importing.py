"""Weights of files as the content of a model on the meta device.

[Note: Adapters]
PEFT wraps layers of a pretrained model. The wrapped layer is the wrapper's ``base_layer`` or
``original_module``, ``modules_to_save`` has a trained copy of it for each adapter, and the whole
model is ``base_model.model``. The files have none of these names, so ``X.base_layer.weight`` is the
file's ``X.weight``. A copy of a tied weight begins with the weight that it was tied to. All other
parameters of a layer with a ``base_layer``, and those of a ``prompt_encoder``, belong to the
adapter: files of the pretrained model do not have them, and they are initialized as PEFT does it.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from lightning_hetero.convert.safetensors import StoredTensor, WeightFiles
from lightning_hetero.convert.saved_tensors import PickledTensor, open_weights
from lightning_hetero.errors import ConfigError
from lightning_hetero.store.format.in_place import TensorPlace

log = logging.getLogger(__name__)

_EXPERTS_JOINED = (
    "The files have each expert by itself, and transformers joins the experts of a layer when it loads them. Load the model once "
    "with from_pretrained, save it with save_pretrained(folder, save_original_format=False), and give that folder."
)

Weights = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]


class ModelWeights:
    """Maps stored tensors to parameters and persistent buffers of a model.

    The names in a directory are relative to the module that was saved. Its place inside ``root`` is
    where most names are found: a model of Hugging Face is often the attribute ``model`` of a
    LightningModule. Modules outside it are not affected. Tied parameters need only one of their
    names.

    Args:
        root: The model. Parameters that files have must be on the meta device.
        weights: A safetensors file or directory, or one of ``torch.save``; or several by the name
            of the module inside ``root`` that each belongs to.
        strict: Whether to refuse tensors that only one side has. Adapters are not missing; see
            [Note: Adapters]. If false, a warning names both kinds, and missing tensors are
            initialized. Frozen weights of a model with adapters never are, because training cannot
            correct them, unless a copy in ``modules_to_save`` trains in their place.
        reads: Whether to read more than headers. If not, :meth:`fill` leaves its target to another
            process, which reads the same files.

    Raises:
        ConfigError: The files are damaged or do not fit the model. Names missing and unexpected
            tensors, other shapes, other dtypes.
    """

    def __init__(self, root: nn.Module, weights: Weights, *, strict: bool = True, reads: bool = True) -> None:
        self._stored: dict[str, StoredTensor] = {}
        self._reads = reads
        targets = _targets(root)
        self._adapters = adapter_names(root)
        given = weights if isinstance(weights, Mapping) else {None: weights}
        for prefix, path in given.items():
            files = open_weights(path)
            self._match(targets, files, _prefix(targets, files) if prefix is None else prefix, strict=strict)
        held = [name for name in self._stored if isinstance(targets[name], nn.Parameter) and not targets[name].is_meta]
        if held:
            raise ConfigError(
                f"weights={weights!r} are for a model without memory, but {_some(held)} already has content. Build the model in "
                f"configure_model under torch.device('meta'), or under trainer.init_module(empty_init=True); or leave weights out."
            )

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __len__(self) -> int:
        return len(self._stored)

    def fill(self, name: str, memory: Tensor) -> None:
        """Reads a parameter or buffer into a CPU tensor of its shape, converting the dtype.

        Args:
            name: Its name inside the model.
            memory: The target.
        """
        if self._reads:
            with torch.no_grad():
                self._stored[name].read_into(memory)

    def place(self, name: str) -> TensorPlace | None:
        """Where a parameter or buffer is; ``None`` if it is not in a local safetensors file."""
        stored = self._stored[name]
        local = None if isinstance(stored, PickledTensor) else stored.path.local
        return None if local is None else TensorPlace(os.path.realpath(local), stored.dtype, stored.start)

    def _match(self, targets: Mapping[str, Tensor], files: WeightFiles, prefix: str, *, strict: bool) -> None:
        begin = f"{prefix}." if prefix else ""
        mine = {name.removeprefix(begin): target for name, target in targets.items() if name.startswith(begin)}
        if not mine:
            raise ConfigError(f"weights for {prefix!r}: the model has no such module with parameters. Name one of its modules.")
        mine = {name: target for name, target in mine.items() if target.is_meta or not _is_copy(name)}  # loaded with an adapter
        where = f"{str(files.path)!r} for {f'module {prefix!r}' if prefix else 'the model'}"
        aliases: dict[int, list[str]] = {}
        for name, target in mine.items():
            aliases.setdefault(id(target), []).append(name)
        missing = []
        in_files = {name: found for name in mine if (found := _in_files(name, files)) is not None}
        for name in mine.keys() - in_files.keys():
            if (tied := next((n for n in aliases.get(id(mine.get(_original(name))), ()) if n in in_files), None)) is not None:
                in_files[name] = in_files[tied]
        for names in aliases.values():
            stored = [files.tensors[in_files[n]] for n in names if n in in_files]
            if not stored:
                missing += names[:1]
                continue
            for other in stored:
                _check(other, mine[names[0]], where)
            if self._reads:
                _check_equal(stored, where)
            self._stored |= {begin + name: stored[0] for name in names}
        missing = [name for name in missing if mine[name].is_meta and begin + name not in self._adapters]
        unexpected = sorted(set(files.tensors).difference(in_files.values()))
        lacks = f"{_some(missing) or 'none'} missing, {_some(unexpected) or 'none'} unexpected"
        if strict and (missing or unexpected):
            raise ConfigError(
                f"weights in {where} do not fit: {lacks}. "
                + (
                    _EXPERTS_JOINED
                    if _has_experts(missing) and _has_experts(unexpected)
                    else "Give the weights of this model, name the module that they belong to (weights={'model': path}), or set "
                    "strict_loading = False in the LightningModule: then missing weights are initialized, and the others ignored."
                )
            )
        replaced = _replaced(targets)
        base = [name for name in missing if not mine[name].requires_grad and begin + name not in replaced]
        if self._adapters and base:
            raise ConfigError(
                f"weights in {where} do not fit: {lacks}. The model has adapters, and {_some(base)} would be random and stay so, "
                f"because they are frozen. Give the weights of the model that the adapters are for."
            )
        if missing or unexpected:
            log.warning(
                "Weights in %s: %s. Missing weights are initialized, the others ignored (strict_loading=False).", where, lacks
            )


def _has_experts(names: Iterable[str]) -> bool:
    return any(".experts." in name for name in names)


def _targets(root: nn.Module) -> dict[str, Tensor]:
    """Parameters under all their names, and persistent buffers."""
    out: dict[str, Tensor] = dict(root.named_parameters(remove_duplicate=False))
    for prefix, module in root.named_modules(remove_duplicate=False):
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                out[f"{prefix}.{key}" if prefix else key] = buffer
    return out


def adapter_names(root: nn.Module) -> set[str]:
    """The names of parameters of adapters; see [Note: Adapters]."""
    found = set()
    for prefix, module in root.named_modules():
        if isinstance(module._modules.get("base_layer"), nn.Module):
            names = [name for name, _ in module.named_parameters() if not name.startswith("base_layer.")]
        elif "prompt_encoder" in module._modules and hasattr(module, "peft_config"):
            names = [name for name, _ in module.named_parameters() if name.startswith("prompt_encoder.")]
        else:
            continue
        found |= {f"{prefix}.{name}" if prefix else name for name in names}
    return found


def refuse_random_base(root: nn.Module, given: Callable[[str, Tensor], object]) -> None:
    """Refuses a model with adapters whose frozen weights would begin at random, and stay so.

    Args:
        root: The model, of which no files are read and no checkpoint is loaded.
        given: The values that code has given a parameter on the meta device; ``None`` if none.

    Raises:
        ConfigError: Names the first of the weights.
    """
    if adapters := adapter_names(root):
        named = dict(root.named_parameters())
        kept = adapters | _replaced(named)
        base = [n for n, p in named.items() if p.is_meta and not p.requires_grad and n not in kept and given(n, p) is None]
        if base:
            raise ConfigError(
                f"the model has adapters, and its frozen weights are on the meta device and in no file: {_some(base)} would be "
                f"random and stay so. Name the folder of the model that the adapters are for, as weights='folder', or pass a "
                f"checkpoint that has its weights as ckpt_path."
            )


def check_begun(root: nn.Module, known: Container[str], seen: Callable[[str, Tensor], bool]) -> None:
    """Refuses adapters whose values were loaded on the meta device, which keeps none.

    [Note: Adapters that nobody saw begin]
    Whoever observes how adapters are made and loaded knows their values. Of others, how often they
    were written tells. PEFT makes a matrix of LoRA in memory and moves it to the meta device, or
    writes it twice there, in the constructor of the layer and in its own; anything else it writes
    once there, as loading does. ``low_cpu_mem_usage=True`` loads in memory and moves the result to
    the meta device. That looks like a new adapter, so a warning says what is assumed.

    Args:
        root: The model, of which no checkpoint is loaded.
        known: The names of what files have.
        seen: Whether a parameter was made, or loaded, where its values are known.

    Raises:
        ConfigError: Names them.
    """
    named = dict(root.named_parameters())
    own = adapter_names(root) | set(filter(_is_copy, named))
    unseen = {n: p for n, p in named.items() if n in own and p.is_meta and n not in known and not seen(n, p)}
    written = [n for n, p in unseen.items() if p._version not in ((0, 2) if ".lora_A." in n or ".lora_B." in n else (0,))]
    how = "Make and load adapters in configure_model, or within the context of a loop; or build them in memory."
    if written:
        raise ConfigError(
            f"values that were loaded into adapters before the fit are lost on the meta device, which keeps none: "
            f"{_some(written)}. {how} New ones of this kind are made without torch.device('meta') around PEFT."
        )
    if moved := [n for n, p in unseen.items() if p._version == 0]:
        log.warning(
            "Adapters on the meta device begin anew: %s. If saved ones were loaded into them there, as low_cpu_mem_usage=True "
            "does, their values are lost. %s",
            _some(moved), how,
        )  # fmt: skip


def _is_copy(name: str) -> bool:
    """Whether a parameter is that of a module in ``modules_to_save``."""
    return ".modules_to_save." in name


def _replaced(targets: Mapping[str, Tensor]) -> set[str]:
    """The names of weights in whose place a copy of ``modules_to_save`` trains, as a new head's."""
    return {_original(name) for name, target in targets.items() if target.requires_grad} - {""}


def _without_wrappers(name: str) -> str:
    """A parameter's name without the attributes that PEFT's wrappers add."""
    parts, kept = iter(name.split(".")), list[str]()
    for part in parts:
        if part == "modules_to_save":
            next(parts, None)  # the adapter
        elif part not in ("base_layer", "original_module"):
            kept.append(part)
    return ".".join(kept)


def _original(name: str) -> str:
    """The name of the weight of which PEFT has made this copy; it may be tied."""
    before, found, after = name.partition(".modules_to_save.")
    return f"{before}.original_module.{after.partition('.')[2]}" if found else ""


def _in_files(name: str, files: WeightFiles) -> str | None:
    """A parameter's name in the files; ``None`` if they lack it."""

    def candidates() -> Iterator[str]:
        yield name
        yield (plain := _without_wrappers(name))
        yield plain.removeprefix("base_model.model.")

    return next((candidate for candidate in candidates() if candidate in files.tensors), None)


def _prefix(targets: Collection[str], files: WeightFiles) -> str:
    """The module under which most of the files' names are names of the model."""
    found: Counter[str] = Counter()
    for name in dict.fromkeys(known for target in targets for known in (target, _without_wrappers(target))):
        parts = name.split(".")
        for cut in range(len(parts)):
            if ".".join(parts[cut:]) in files.tensors:
                found[".".join(parts[:cut])] += 1
    if not found:
        raise ConfigError(
            f"weights in {str(files.path)!r} hold {_some(files.tensors)}; the model's parameters are {_some(targets)}: none of "
            f"them. Give the weights of this model."
        )
    best = max(found.values())
    candidates = sorted((p for p, n in found.items() if n == best), key=len)
    if len(candidates) > 1:
        raise ConfigError(
            f"weights in {str(files.path)!r} fit modules {', '.join(map(repr, candidates))} equally well. Say which: "
            f"weights={{{candidates[0]!r}: path}}."
        )
    return candidates[0]


def _check(stored: StoredTensor, target: Tensor, where: str) -> None:
    what = f"weights in {where}: {stored.name!r}"
    if stored.shape != target.shape:
        raise ConfigError(
            f"{what} is {tuple(stored.shape)} in {stored.path.name}, {tuple(target.shape)} in the model. Give the weights of this "
            f"model, or build it with the configuration that they were saved with."
        )
    if stored.dtype != target.dtype and not (stored.dtype.is_floating_point and target.dtype.is_floating_point):
        raise ConfigError(
            f"{what} is {stored.dtype} in {stored.path.name}, {target.dtype} in the model; allowed: the same dtype, or one "
            f"floating-point dtype for another. Convert the file."
        )


def _check_equal(stored: list[StoredTensor], where: str) -> None:
    """Refuses tied names whose contents in the files differ."""
    for other in stored[1:]:
        if not torch.equal(stored[0].read(), other.read()):
            raise ConfigError(
                f"weights in {where}: {stored[0].name!r} and {other.name!r} differ, and are one parameter in the model. Build "
                f"it without tying them (tie_word_embeddings=False)."
            )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
