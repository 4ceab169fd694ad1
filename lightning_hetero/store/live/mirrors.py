"""Mirrors: slots on disk for arrays that live in memory, so that every plan keeps whole steps.

[Note: Mirrors]
A mirror is a native part of plain bytes over the memory of a part's weights, or of its state
arrays. A commit writes it from there, without a copy, to the slot that the last record does not
name. Until it is written, no update may change that memory: the part's next update waits for the
ticket. Only a resume reads mirrors.
"""

from __future__ import annotations

from lightning_hetero._native import DONE, U8, InPlacePart, PartGeometry, Ticket
from lightning_hetero.store.format.record import BlobEntry, PartEntry
from lightning_hetero.store.live.blocks import Part
from lightning_hetero.store.raw_memory import PAGE
from lightning_hetero.units import KIB, round_up

WEIGHTS, STATE = "weights", "state"
_CHUNK = 4096 * KIB  # nothing is staged: it only cuts what one transfer and one digest cover


def spans(part: Part) -> dict[str, tuple[int, int]]:
    """The memory that needs a mirror, page-aligned: address and bytes by what it holds."""
    found = {}
    native = part.native
    if native is None or not native.geometry.weights_on_disk_file:
        found[WEIGHTS] = (part.slice_address, part.slice_bytes)
    if native is not None and native.geometry.num_state and not native.geometry.state_on_disk_file:
        first, last = native.state_memory(0), native.state_memory(native.geometry.num_state - 1)
        begin = first // PAGE * PAGE
        found[STATE] = (begin, round_up(last + 4 * native.geometry.num_elements, PAGE) - begin)
    return found


def geometry_of_mirror(identifier: int, num_bytes: int, slots: int) -> PartGeometry:
    """The native geometry of a mirror of ``num_bytes``, whole pages."""
    return PartGeometry(
        id=identifier, weight_dtype=U8, num_elements=num_bytes, num_state=0, weights_on_disk_file=True, state_on_disk_file=False,
        num_slots=slots, chunk_elements=min(_CHUNK, num_bytes),
    )  # fmt: skip


def mirror_bytes(part: Part, home: PartGeometry | None) -> int:
    """Mirrored bytes of a part with this home, written at every step, without heads."""
    weights = 0 if home is not None and home.weights_on_disk_file else part.slice_bytes
    state = 0 if home is None or home.state_on_disk_file else home.num_state * round_up(4 * home.num_elements, PAGE)
    return weights + state


def mirror_files(part: Part, home: PartGeometry | None) -> list[PartGeometry]:
    """The geometries of the mirrors of a part with this home; their ids mean nothing."""
    weights = 0 if home is not None and home.weights_on_disk_file else part.slice_bytes
    # The engine moves every array to an offset of its own, and a mirror has whole pages.
    state = 0 if home is None or home.state_on_disk_file else home.num_state * (round_up(4 * home.num_elements, PAGE) + PAGE)
    return [geometry_of_mirror(0, num_bytes, part.slots) for num_bytes in (weights, state) if num_bytes]


def is_current(part: Part, kind: str) -> bool:
    """Whether the part's mirror of this kind lies over the memory that it has now."""
    mirror = part.mirrors.get(kind)
    return mirror is not None and mirror.native.geometry.num_slots == part.slots and (kind == WEIGHTS or mirror.home is part.native)


def entry_of(part: Part, blobs: tuple[BlobEntry, ...] = ()) -> PartEntry:
    """Where the part's arrays are now, and state that the engine does not know."""
    mirror = part.mirrors.get(WEIGHTS)
    if isinstance(part.native, InPlacePart) or (mirror is not None and isinstance(mirror.native, InPlacePart)):
        return PartEntry(None, part.stepped, None, None, blobs, part.in_place)
    mirrors = {kind: mirror.native.geometry for kind, mirror in part.mirrors.items()}
    home = None if part.native is None else part.native.geometry
    return PartEntry(home, part.stepped, mirrors.get(WEIGHTS), mirrors.get(STATE), blobs)


def readers_of(part: Part) -> list[Ticket]:
    """The writes to disk that still read the part's weight memory: other writers wait for them."""
    tickets = [mirror.ticket for kind, mirror in part.mirrors.items() if kind == WEIGHTS]
    if part.native is not None and part.native.geometry.weights_on_disk_file:
        tickets.append(part.updated)
    return [ticket for ticket in tickets if ticket is not None and ticket.poll() != DONE]


def writes_of(part: Part) -> list[Ticket]:
    """Writes that still read the part's memory, maybe: its next change waits for them."""
    return [m.ticket for m in part.mirrors.values() if m.ticket is not None]
