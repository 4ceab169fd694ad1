"""Gives parts the mirrors that they need where they are, and writes them before a commit."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero._native import NativePart, Ticket
from lightning_hetero.ir.schedule import NO_BLOCK, OpKind, Payload, urgency
from lightning_hetero.store.live import mirrors
from lightning_hetero.store.live.blocks import Mirror, Part
from lightning_hetero.store.live.geometry import may_differ, own_versions
from lightning_hetero.store.live.own_slots import bytes_at, differs, is_written_once, with_two_slots
from lightning_hetero.store.live.tier_store import TierStore

_FIRST = urgency(OpKind.MIRROR, Payload.STATE, NO_BLOCK, lowest_first=False)


def arrange_mirrors(store: TierStore, part: Part) -> list[NativePart]:
    """Opens the mirrors that the part needs now; :func:`write_mirrors` and a commit must follow.

    Returns:
        Mirrors that it does not need any more, to be closed after that commit.
    """
    wanted = mirrors.spans(part)
    gone = {kind: m for kind, m in part.mirrors.items() if kind not in wanted or not mirrors.is_current(part, kind)}
    for kind in gone:
        del part.mirrors[kind]
    for kind, (address, num_bytes) in wanted.items():
        if kind in part.mirrors:
            continue
        if part.in_place is not None and part.slots == 1:
            geometry = mirrors.geometry_of_mirror(0, num_bytes, part.slots)
            part.mirrors[kind] = Mirror(store.files.open_in_place(geometry, address, part.in_place), part.native)
        else:
            geometry = mirrors.geometry_of_mirror(store.files.next_id(), num_bytes, part.slots)
            part.mirrors[kind] = Mirror(store.files.open_part(geometry, address), part.native)
            part.mirrored_versions = -1
            part.in_place = None
    return [m.native for m in gone.values()]


def write_mirrors(store: TierStore, part: Part, *, after: Sequence[Ticket] = ()) -> list[Ticket]:
    """Writes the part's mirrors if their content may have changed. Mirrors keep the tickets.

    Args:
        store: The tiers.
        part: The part.
        after: What the writes wait for, beside what last wrote the part.
    """
    if not part.mirrors or not may_differ(part):
        return []
    store.files.before_write()
    part.mirrored_versions = own_versions(part)
    tickets = []
    after = [*after, *([part.updated] if part.updated is not None else [])]
    for kind, mirror in part.mirrors.items():
        if kind == mirrors.STATE and not part.stepped:
            continue
        if part.slots == 1 and is_written_once(store.files, mirror.native):
            address, num_bytes = mirrors.spans(part)[kind]
            for ticket in after:
                ticket.wait()
            found = differs(store.engine, mirror.native, bytes_at(part.arena, address, num_bytes))
            if not store.files.on_any_rank(found):
                continue
            mirror.native, part.in_place = with_two_slots(store.files, mirror.native, address), None
            part.slots = mirror.native.geometry.num_slots
        mirror.ticket = store.engine.store(
            mirror.native, [], weights_from_memory=True, step=store.files.step + 1, priority=_FIRST, after=after
        )
        store.unrecorded.mirrored = True
        tickets.append(mirror.ticket)
    return tickets
