"""Opens, exchanges and closes the native part that holds a part's weights and state."""

from __future__ import annotations

from dataclasses import replace

from lightning_hetero._native import InPlacePart, NativePart, PartGeometry
from lightning_hetero.errors import StoreCorruptError
from lightning_hetero.ir.plan import Tier
from lightning_hetero.store.format.record import PartEntry
from lightning_hetero.store.live import mirrors
from lightning_hetero.store.live.blocks import Mirror, Part
from lightning_hetero.store.live.geometry import geometry_of, has_file, has_master, own_versions, weights_on_file
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.raw_memory import zero_pages


def open_native(store: TierStore, part: Part, geometry: PartGeometry) -> None:
    """Opens a native part for the part; the next flush writes its file."""
    attach_native(store, part, new_native(store, part, geometry))


def new_native(store: TierStore, part: Part, geometry: PartGeometry) -> NativePart:
    """A native part for the part, beside the one that it may have."""
    if part.in_place is not None and geometry.num_slots == 1:
        return store.files.open_in_place(replace(geometry, id=0), part.slice_address, part.in_place)
    return store.files.open_part(geometry, part.slice_address)


def open_recorded(store: TierStore, part: Part, entry: PartEntry) -> None:
    """Opens the native parts that a record names, and reads what lives in memory."""
    tickets = []
    part.in_place = entry.in_place
    if entry.in_place is not None:
        entry.in_place.check()
        home = replace(geometry_of(part, 0, num_state=0, weights=Tier.DISK, state=Tier.DISK), num_slots=1)
        part.native, part.on_disk, part.dirty = new_native(store, part, home), True, False
        tickets.append(store.engine.fetch(part.native))
    if entry.home is not None:
        part.native = store.files.open_part(entry.home, part.slice_address)
        part.on_disk = has_file(entry.home)
        part.dirty = False
        if entry.home.weights_on_disk_file:
            tickets.append(store.engine.fetch(part.native))
    part.stepped = entry.stepped
    for kind, geometry in ((mirrors.WEIGHTS, entry.weights), (mirrors.STATE, entry.state)):
        if geometry is not None:
            address, num_bytes = mirrors.spans(part)[kind]
            if geometry.num_elements != num_bytes:
                raise StoreCorruptError(
                    f"block {geometry.id}: the commit record gives it {geometry.num_elements} bytes; {num_bytes} are needed "
                    f"for the {kind} of {part.names[0]!r}."
                )
            native = store.files.open_part(geometry, address)
            part.mirrors[kind] = Mirror(native, part.native)
            if kind == mirrors.WEIGHTS or entry.stepped:
                tickets.append(store.engine.fetch(native))
    for ticket in tickets:
        ticket.wait()
    store.master_is_current(part)
    part.mirrored_versions = own_versions(part)


def attach_native(store: TierStore, part: Part, native: NativePart) -> None:
    """The part, which has none, gets its native part."""
    part.native = native
    if not isinstance(native, InPlacePart):
        part.in_place = None
    if not part.params:
        store.blobs.append(part)
    part.on_disk = has_file(native.geometry)
    # Weights that live on disk, and fp32 masters, have to be written once before the block is
    # complete.
    part.dirty = bool(native.geometry.weights_on_disk_file) or has_master(part)


def detach_native(store: TierStore, part: Part) -> NativePart:
    """Detaches the native part, after everything of it is written and committed."""
    native = part.require_native()
    store.barrier(part)
    store.commit()
    store.files.wait_for_commit()
    store.forget(part)
    if part in store.blobs:
        store.blobs.remove(part)
    return native


def close_native(store: TierStore, part: Part) -> None:
    """Closes a native part, removes its files and drops its state. Its weights are in memory.

    The last record names these files, whether anything was written since or not. So another one
    comes first, which does not: it stands for no step, and the last step is pinned.
    """
    if part.on_disk:
        store.unrecorded.changed = True
        store.barrier(part)
        part.require_native().retire()
        store.commit(always=True)
    store.files.close_part(detach_native(store, part))


def reset_native(store: TierStore, part: Part) -> None:
    """Drops a part's state. Its weights are in memory, and the next flush writes them."""
    store.flush(part)
    geometry = part.require_native().geometry
    zeros = zero_pages(geometry.num_elements)
    runs = [(array, 0, zeros) for array in range(geometry.num_state)]
    if part.stepped:
        store.rewrite(part, runs, from_memory=False, state=True).wait()
    part.dirty = weights_on_file(part) or has_master(part)
