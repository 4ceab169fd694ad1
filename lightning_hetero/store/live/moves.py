"""Moves a part between tiers: a new native part is complete before the old one goes.

[Note: Memory in transit]
State in memory is written from where it is. State in a file passes through a buffer. One rewrite
would need a buffer for all of the part's state, so beyond ``_IN_TRANSIT_BYTES`` there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from lightning_hetero._native import InPlacePart, NativePart, PartGeometry, Patch
from lightning_hetero.store.live.blocks import Part
from lightning_hetero.store.live.native_parts import attach_native, detach_native, new_native, open_native
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.raw_memory import own_memory, tensor_at
from lightning_hetero.units import MIB

_IN_TRANSIT_BYTES = 256 * MIB


def move(
    store: TierStore, part: Part, geometry: PartGeometry | None, arrived: Callable[[Part], list[NativePart]] = lambda _: []
) -> None:
    """Brings weights and state to where ``geometry`` has them; its ``id`` does not count.

    The weights are in memory before and after; no update of the part is running or open. If the
    process dies at any moment, the last record names either the old place or the new one, and that
    one is whole.

    Args:
        store: The tiers, with a directory if ``geometry`` has a section in a file.
        part: The part.
        geometry: The new one; ``None``: the engine has nothing to do with the part any more.
        arrived: Called once the part is whole in its new place, before that is committed; returns
            blocks to close after it.

    Raises:
        StoreError: A transfer failed, which stops the engine.
    """
    if part.native is not None and geometry is not None and replace(part.native.geometry, id=geometry.id) == geometry:
        return
    with store.unrecorded.moving():
        old = _exchange(store, part, geometry)
        store.barrier(part)
        gone = [n for n in (*arrived(part), old) if n is not None]  # mirrors lie over the old memory
        for native in gone:
            native.retire()
        store.commit()
        for native in gone:
            store.files.close_part(native)


def _exchange(store: TierStore, part: Part, geometry: PartGeometry | None) -> NativePart | None:
    """Gives the part its new native part with all content; returns the old one, still open."""
    if part.native is None:
        if geometry is not None:
            open_native(store, part, replace(geometry, id=store.files.next_id()))
            store.flush(part)
        return None
    if geometry is None:
        store.flush(part)
        same = part.mirrored_versions if isinstance(part.native, InPlacePart) else -1  # the same file is its mirror then
        old = detach_native(store, part)
        part.mirrored_versions = same
        return old
    store.flush(part)
    stepped = part.stepped
    # A full disk refuses this while the old one is whole.
    new = new_native(store, part, replace(geometry, id=store.files.next_id()))
    old = detach_native(store, part)
    attach_native(store, part, new)
    if stepped:
        part.dirty = False
        _copy_state(store, old, part)
        part.stepped = True
    else:
        store.flush(part)
    return old


def _copy_state(store: TierStore, old: NativePart, part: Part) -> None:
    new, length = part.require_native().geometry, part.slice_elements
    weights = new.weights_on_disk_file
    if not old.geometry.state_on_disk_file:
        runs = [(k, 0, tensor_at(old, old.state_memory(k), length, torch.float32)) for k in range(new.num_state)]
        store.rewrite(part, runs, from_memory=weights, state=True).wait()
        return
    for rows in _rewrites(new.num_state, length):
        values = [(k, start, own_memory(numel, torch.float32)) for k, start, numel in rows]
        store.engine.read(old, [Patch(start, v.numel(), v.data_ptr(), k) for k, start, v in values], keep=values).wait()
        store.rewrite(part, values, from_memory=weights, state=True).wait()


def _rewrites(num_arrays: int, length: int) -> Iterator[list[tuple[int, int, int]]]:
    """Runs ``(array, first element, elements)`` that cover all arrays, in steps."""
    step = max(1, _IN_TRANSIT_BYTES // (4 * num_arrays))
    for start in range(0, length, step):
        yield [(k, start, min(step, length - start)) for k in range(num_arrays)]
