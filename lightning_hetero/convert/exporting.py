"""Writes weights as safetensors or as an ordinary Lightning checkpoint.

The source is a model, a store, a checkpoint or safetensors. At most one tensor is in memory at a
time.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.checkpoint import load, release_pages, save
from lightning_hetero.checkpoint.files import Place
from lightning_hetero.convert import merges
from lightning_hetero.convert.merging import Adapter, merged, of_folder, of_model, of_store, with_tensors
from lightning_hetero.convert.safetensors import TensorToWrite, WeightFiles, write_directory
from lightning_hetero.errors import ConfigError
from lightning_hetero.handles.offloaded_parameter import materialize
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.sets import last_step, stores_in
from lightning_hetero.store.format.stored_model import (
    stored_adapted,
    stored_adapters,
    stored_buffers,
    stored_merges,
    stored_weights,
)
from lightning_hetero.store.raw_memory import check_has_memory
from lightning_hetero.units import parse_bytes

log = logging.getLogger(__name__)

CHECKPOINT = ".ckpt"
SHARD_SIZE = "5GB"  # Hugging Face's default


def export_weights(
    source: nn.Module | str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    module: str = "",
    dtype: torch.dtype | None = None,
    max_shard_size: str | int = SHARD_SIZE,
    merge: bool | str | os.PathLike[str] = False,
) -> list[Path | str]:
    """Writes weights as a Hugging Face directory of safetensors, or as a Lightning checkpoint.

    The checkpoint has weights only, and says which adapters PEFT has merged into them. Safetensors
    cannot say that, so a warning does.

    Args:
        source: A model, also while it trains with weights on disk; or the path of a store that no
            process uses (its last kept step), of a Lightning checkpoint, or of safetensors. The
            latter two may be URLs.
        destination: A directory without weights, for safetensors; or a path that ends in ``.ckpt``.
            Also a URL of fsspec, such as ``"s3://bucket/model"``.
        module: Name of the module to export, such as ``"model"`` for a Hugging Face model inside a
            LightningModule; names in the files begin below it. Default: everything.
        dtype: Convert floating-point weights to it.
        max_shard_size: No safetensors file is larger, unless a single tensor is; such as ``"5GB"``.
        merge: Merge an adapter of PEFT (LoRA, rsLoRA, DoRA, IA3) into the weights, one layer at a
            time: the folder that PEFT has saved, or ``True`` for the active one of a model and the
            one of a store. A folder's own weights count if the source has no adapter. The result
            has the bits of ``merge_and_unload()``.

    Returns:
        The files written, remote ones as URLs. Tied weights are written once, under their first
        name.

    Raises:
        ConfigError: The source is of another kind, has no such module, or the destination already
            holds weights.
        UnsupportedError: The adapter cannot be merged here; or a weight consists of several
            tensors, as torchao quantizes.
        StoreError: The store is in use, or incomplete.
        OSError: A file cannot be written; none is left half written.
    """
    shard_bytes = parse_bytes(max_shard_size, name="max_shard_size")
    path = Place.of(destination)
    done = _merges(source, module)
    with ExitStack() as opened:
        adapter = None if merge is False else _adapter(source, module, merge, opened)
        tensors = _below(weights_of(source, opened), module)
        if adapter is not None:
            tensors, done = merged(tensors, adapter, done, ties_known=_says_ties(source)), {}
        if dtype is not None:
            tensors = [replace(t, dtype=dtype) if t.dtype.is_floating_point else t for t in tensors]
        if path.suffix == CHECKPOINT:
            _write_checkpoint(path, {t.name: t for t in tensors}, done)
            return [_named(path)]
        if any(row["adapters"] for row in done.values()):
            log.warning(
                "adapters are merged into the weights that %s gets, and its files cannot say so: whoever loads them with the "
                "adapters applies these twice. Export with merge=True, or call unmerge_adapter() first.",
                path,
            )
        return [_named(file) for file in write_directory(path, tensors, max_shard_bytes=shard_bytes)]


def import_weights(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    module: str = "",
    ties: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> Path | str:
    """Converts safetensors to a Lightning checkpoint with weights only.

    Args:
        source: A safetensors file or a directory of Hugging Face.
        destination: A path that ends in ``.ckpt``.
        module: Name of the module of the LightningModule that they belong to, such as ``"model"``.
        ties: Names of tied weights that the files lack, each with the name of the equal weight,
            such as ``{"lm_head.weight": "model.embed_tokens.weight"}``.
        dtype: Convert floating-point weights to it.

    Returns:
        The checkpoint.

    Raises:
        ConfigError: The files are damaged, a tie names no tensor, or the destination is no
            ``.ckpt``.
        OSError: The file cannot be written; no partial file is left.
    """
    path = Place.of(destination)
    if path.suffix != CHECKPOINT:
        raise ConfigError(f"{str(path)!r} is to be a Lightning checkpoint; allowed: a path that ends in {CHECKPOINT}.")
    stored = {t.name: t for t in _of_files(WeightFiles.open(source))}
    for name, content in (ties or {}).items():
        if content not in stored or name in stored:
            wrong = f"{content!r} is not in the files" if content not in stored else f"{name!r} is in the files itself"
            raise ConfigError(f"tie {name!r} to {content!r}: {wrong}. Name a missing weight, then one that {str(source)!r} has.")
        stored[name] = stored[content]
    if dtype is not None:
        converted = {id(t): replace(t, dtype=dtype) if t.dtype.is_floating_point else t for t in stored.values()}
        stored = {name: converted[id(t)] for name, t in stored.items()}
    begin = f"{module}." if module else ""
    _write_checkpoint(path, {begin + name: tensor for name, tensor in stored.items()}, {})
    return _named(path)


def _says_ties(source: nn.Module | str | os.PathLike[str]) -> bool:
    """Whether all names of tied weights are known, or no embedding is tied to the head."""
    if isinstance(source, nn.Module):
        return True
    path = Place.of(source)
    if not path.is_dir():
        return path.suffix != ".safetensors"
    if not (path / "config.json").is_file():
        return False
    with (path / "config.json").open() as file:
        return b'"tie_word_embeddings": false' in file.read()


def _adapter(
    source: nn.Module | str | os.PathLike[str], module: str, merge: str | os.PathLike[str] | bool, opened: ExitStack
) -> Adapter:
    if not isinstance(merge, bool):
        where = merge
    elif isinstance(source, nn.Module):
        return of_model(source, module)
    else:
        where = source
    if (path := _store_at(where)) is not None:
        is_source = not isinstance(source, nn.Module) and (own := _store_at(source)) is not None and own.samefile(path)
        with ExitStack() as read:
            stores = last_step(path, read)
            adapter = of_store(stored_adapters(stores[0]), str(path))
            if not is_source:  # which is opened again
                trained = {weight.name for weight in stored_weights(*stores) if weight.part.trained}
                adapter = with_tensors(adapter, _of_stores(stores), stored_adapted(stores[0]), trained)
                opened.enter_context(read.pop_all())
            return adapter
    if not isinstance(merge, bool):
        return of_folder(merge)
    raise ConfigError(
        f"merge=True is for a model in memory or a store; {os.fspath(where)!r} does not say how its adapters were configured. Give "
        f"the folder that PEFT's save_pretrained() has written; its configuration is enough if the source has the adapter."
    )


def _merges(source: nn.Module | str | os.PathLike[str], module: str) -> merges.Merges:
    """The adapters that layers of a source have merged, by their names below the module."""
    if isinstance(source, nn.Module):
        found: object = merges.merges_of(merges.layers_of(source))
    elif (store := _store_at(source)) is not None:
        with ExitStack() as opened:
            found = stored_merges(last_step(store, opened)[0])
    else:
        path = Place.of(source)
        checkpoint = {} if path.is_dir() or path.suffix == ".safetensors" else load_checkpoint(path)
        found = checkpoint.get(merges.KEY, {}) if isinstance(checkpoint, dict) else {}
    below = f"{module}." if module else ""
    return {name.removeprefix(below): row for name, row in merges.read(found).items() if name.startswith(below)}


def _store_at(path: str | os.PathLike[str]) -> Path | None:
    local = Place.of(path).local
    return local if local is not None and stores_in(local) else None


def _named(place: Place) -> Path | str:
    return place.local or str(place)


def weights_of(source: nn.Module | str | os.PathLike[str], opened: ExitStack) -> list[TensorToWrite]:
    """The weights of a source, each read on request; of tied weights only the first.

    Args:
        source: As for :func:`export_weights`.
        opened: Gets the files that must stay open while tensors are read.

    Raises:
        ConfigError: The path is of no known kind.
    """
    if isinstance(source, nn.Module):
        return list(_of_state(source.state_dict(keep_vars=True)))
    if (store := _store_at(source)) is not None:
        return list(_of_stores(last_step(store, opened)))
    path = Place.of(source)
    if path.is_dir() or path.suffix == ".safetensors":
        return list(_of_files(WeightFiles.open(path)))
    return list(_of_state(state_dict_of(path), mapped=True))


def state_dict_of(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The model's state in a checkpoint file, mapped into memory; nothing in the file is executed.

    Raises:
        ConfigError: It is not a checkpoint, or needs code of the file to be executed.
    """
    checkpoint = load_checkpoint(path)
    state = checkpoint.get("state_dict", checkpoint) if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or not any(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"{str(path)!r} has no state_dict of tensors. Give a checkpoint of Lightning, or a saved state_dict.")
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def load_checkpoint(path: str | os.PathLike[str]) -> Any:
    """A checkpoint file's content, mapped into memory; nothing in the file is executed.

    Raises:
        ConfigError: It does not exist, is not a checkpoint, or needs code of the file to be
            executed.
    """
    try:
        return load(path, "cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"checkpoint {str(path)!r} does not exist. Give the path of a saved checkpoint.") from error
    except Exception as error:  # torch.load raises any error for a broken file
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{str(path)!r} cannot be read as a checkpoint without executing code in it: {reason}. If you trust it, load it "
            f"with torch.load(path, weights_only=False) and save its state_dict."
        ) from error


def _of_state(state: Mapping[str, Any], *, mapped: bool = False) -> Iterator[TensorToWrite]:
    names: dict[Any, list[str]] = {}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}  # else a module's extra state
    for name, value in tensors.items():
        check_has_memory(name, value)
        identity = (value.data_ptr(), value.shape, value.stride(), value.dtype) if mapped else id(value)
        names.setdefault(identity if value.numel() else name, []).append(name)
    for name, *ties in names.values():
        value = tensors[name]
        yield TensorToWrite(name, value.dtype, value.shape, _Reader(value, mapped), tuple(ties))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Returns a tensor's content at the time of the call."""

    tensor: Tensor
    mapped: bool

    def __call__(self) -> Tensor:
        content = materialize(self.tensor).detach()
        if not self.mapped:
            return content.cpu()
        content = content.clone()
        release_pages(self.tensor)
        return content


def _of_files(files: WeightFiles) -> Iterator[TensorToWrite]:
    for stored in files.tensors.values():
        yield TensorToWrite(stored.name, stored.dtype, stored.shape, stored.read)


def _of_stores(stores: Sequence[StoreFiles]) -> Iterator[TensorToWrite]:
    for weight in stored_weights(*stores):
        yield TensorToWrite(weight.name, weight.dtype, weight.shape, weight.read)
    yield from _of_state(stored_buffers(stores[0]))


def _below(tensors: list[TensorToWrite], module: str) -> list[TensorToWrite]:
    if not module:
        return tensors
    found = []
    for tensor in tensors:
        below = [name.removeprefix(f"{module}.") for name in (tensor.name, *tensor.ties) if name.startswith(f"{module}.")]
        if below:
            found.append(replace(tensor, name=below[0], ties=tuple(below[1:])))
    if not found:
        names = ", ".join(sorted({t.name.partition(".")[0] for t in tensors})[:8])
        raise ConfigError(f"module={module!r}: no weights begin with it; they begin with {names}. Name one of the modules.")
    return found


@dataclass(frozen=True, eq=False, slots=True)
class _Source:
    """A tensor to write, as the content of a lazy tensor of a checkpoint.

    The same one for all its names.
    """

    tensor: TensorToWrite

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def address(self) -> None:
        return None

    def read(self) -> Tensor:
        return self.tensor.read().to(self.dtype).contiguous()

    def write(self, value: Tensor) -> None:
        raise AssertionError(f"{self.name}: files are read only")


def _write_checkpoint(path: Place, tensors: Mapping[str, TensorToWrite], done: merges.Merges) -> None:
    """The content of ``Trainer.save_checkpoint(path, weights_only=True)`` before the first step."""
    sources = {id(t): _Source(t) for t in tensors.values()}
    checkpoint: dict[str, object] = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": importlib.metadata.version("lightning"),
        "state_dict": {name: OffloadedTensor(sources[id(t)]) for name, t in tensors.items()},
    }
    if done:
        checkpoint[merges.KEY] = done
    save(checkpoint, path)
