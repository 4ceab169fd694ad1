"""The model in the last record of an unused store: names of blocks, weights one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.errors import ConfigError, StoreCorruptError, UnsupportedError
from lightning_hetero.store.format.audit import StoreFiles, step_of_slot
from lightning_hetero.store.format.directory import STATE_FILE, slot_files
from lightning_hetero.store.format.manifest import layout_of
from lightning_hetero.store.format.pins import pins
from lightning_hetero.store.format.record import USER_BYTES_WITHOUT_STATE, PartEntry, parse, state_of
from lightning_hetero.store.format.stored_parts import WEIGHTS, StoredPart, stored_parts
from lightning_hetero.store.raw_memory import own_memory


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One parameter as the last step has it; handles read it as their source.

    Attributes:
        part: Its part; the stores that have it stay open while this is read.
        index: Its position in the part.
        dtype: Its dtype.
        shape: Its shape.
        stride: Its strides in elements.
    """

    part: StoredPart
    index: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.part.names[self.index]

    @property
    def address(self) -> None:
        """It is not in memory."""
        return

    def read(self) -> Tensor:
        """A fresh tensor with the content.

        Raises:
            StoreCorruptError: A file is not what the record says: names block, file, offset.
        """
        out = own_memory(self.shape.numel(), self.dtype)
        self.part.read(WEIGHTS, self.index, out)
        return out.as_strided(self.shape, self.stride).contiguous()

    def write(self, value: Tensor) -> None:
        """Refuses: a store that nobody trains with is only read.

        Raises:
            UnsupportedError: Always.
        """
        path = str(self.part.slices[0].store.path)
        raise UnsupportedError(f"{self.name!r} is in the store {path!r}, which is read only. Change a .clone() of it.")


def last_kept(store: StoreFiles, opened: ExitStack) -> StoreFiles:
    """The store, or its newest pin if its last record does not stand for a kept step.

    Args:
        store: The store, which stays open as long as the pin.
        opened: Closes the pin.
    """
    found = pins(store.path)
    if not found or (store.record is not None and parse(store.record.user).state):
        return store
    return opened.enter_context(StoreFiles(found[-1]))


def has_lost_records(store: StoreFiles) -> bool:
    """Whether the store has had commit records of steps, and none of them can be read.

    The ring alone does not say that: it may be missing, blank, or of another size. A process that
    dies before its first record has written its blocks with step 1 at most, has no state file, and
    leaves at most that one record torn.

    Raises:
        StoreError: A file cannot be read.
    """
    if store.record is not None:
        return False
    if len(store.notes) > 1 or pins(store.path):
        return True
    try:
        if layout_of(store.path, store.manifest)["user_bytes"] <= USER_BYTES_WITHOUT_STATE:
            return False  # a run that keeps no step
    except ConfigError:
        return False
    names = [name for place in store.places for name in os.listdir(place)]
    return any(map(STATE_FILE.fullmatch, names)) or any(step_of_slot(store, name) > 1 for name in slot_files(names))


def block_names(store: StoreFiles) -> dict[int, str]:
    """Names for a store's blocks, by the numbers of their files; as far as the store says them."""
    try:
        parts = _parts(store)
    except ConfigError:
        return {}
    owners = {name: row["block"] for row in store.manifest["geometry"]["blocks"] for name in row["params"]}
    out = {}
    for names, entry in parts:
        block = owners.get(names[0], "") if names else ""
        blobs = [(blob.geometry, " (state)") for blob in entry.blobs]
        for geometry, what in ((entry.home, ""), (entry.weights, " (weights)"), (entry.state, " (state)"), *blobs):
            if geometry is not None:
                out[geometry.id] = block + what
    return out


def stored_weights(*stores: StoreFiles) -> list[StoredWeight]:
    """All parameters of the last step, in the model's order; tied ones under their first name.

    Args:
        stores: All stores of a set by rank, each at the record that counts.

    Raises:
        ConfigError: The last record stands for no step, or weights are not in it.
    """
    out = []
    rows = {name: row for block in stores[0].manifest["geometry"]["blocks"] for name, row in block["params"].items()}
    for store in stores:
        _state(store, "version")
    for part in stored_parts(stores):
        for one in part.slices:
            one.check_weights(part.names[0])
        for index, name in enumerate(part.names):
            dtype, shape, *stride = rows[name]
            size = torch.Size(shape)
            strides = tuple(stride[0]) if stride else torch.empty(size, device="meta").stride()
            out.append(StoredWeight(part, index, getattr(torch, dtype.removeprefix("torch.")), size, strides))
    order = {name: place for place, name in enumerate(rows)}
    return sorted(out, key=lambda weight: order[weight.name])


def source_faults(store: StoreFiles) -> Iterator[str]:
    """What is wrong with the files from which weights of the last record are read in place."""
    try:
        entries = [entry for _, entry in _parts(store)]
    except ConfigError:
        return
    for file in sorted({file for e in entries if e.in_place is not None for file in e.in_place.files}, key=lambda f: f.path):
        try:
            file.check()
        except StoreCorruptError as error:
            yield str(error)


def stored_buffers(store: StoreFiles) -> dict[str, Tensor]:
    """The model's persistent buffers of the last step.

    Raises:
        ConfigError: The last record stands for no step.
        StoreCorruptError: They are in a file that is not what the record names.
    """
    buffers: dict[str, Tensor] = _state(store, "buffers")["buffers"]
    return buffers


def stored_adapters(store: StoreFiles) -> dict[str, dict[str, Any]]:
    """Configurations of PEFT's adapters by name. Stores of earlier versions have none.

    Raises:
        ConfigError: The last record stands for no step.
        StoreCorruptError: They are in a file that is not what the record names.
    """
    found = _state(store, "adapters").get("adapters", {})
    whole = isinstance(found, dict) and all(isinstance(config, dict) for config in found.values())
    return found if whole else {}


def stored_adapted(store: StoreFiles) -> list[str]:
    """The names of the models that PEFT has given adapters. Stores of earlier versions have none.

    Raises:
        ConfigError: The last record stands for no step.
        StoreCorruptError: They are in a file that is not what the record names.
    """
    found = _state(store, "adapter_settings").get("adapter_settings", {})
    return list(found) if isinstance(found, dict) else []


def stored_merges(store: StoreFiles) -> object:
    """What ``convert.merges`` has written of the last step; an empty dictionary if it has nothing.

    Raises:
        ConfigError: The last record stands for no step.
        StoreCorruptError: It is in a file that is not what the record names.
    """
    return _state(store, "merged_adapters").get("merged_adapters", {})


def _parts(store: StoreFiles) -> list[tuple[list[str], PartEntry]]:
    if store.record is None:
        raise _no_record(store)
    names = layout_of(store.path, store.manifest)["parts"]
    return list(zip(names, parse(store.record.user).parts, strict=False))


def _state(store: StoreFiles, field: str) -> dict[str, Any]:
    if store.record is None:
        raise _no_record(store)
    return state_of(parse(store.record.user), store.path, field)


def _no_record(store: StoreFiles) -> ConfigError:
    if has_lost_records(store):
        return ConfigError(
            f"store {str(store.path)!r} has no commit record that can be read: {'; '.join(map(str, store.notes))}. Its files are "
            f"there, but not which of them count. Bring COMMIT back from a copy of the store, or use a checkpoint."
        )
    return ConfigError(f"store {str(store.path)!r} has no commit record: no step was written. Start without it.")
