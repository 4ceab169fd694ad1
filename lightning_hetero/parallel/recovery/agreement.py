"""The choice of the save to load: the newest with all files on the nodes or the remote tier."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hetero.parallel.recovery.layer_map import MAP, METADATA, LayerMap, is_save
from lightning_hetero.parallel.recovery.tiers import CheckpointTier

log = logging.getLogger(__name__)

Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class Agreed:
    """The save that all ranks load.

    Attributes:
        layer_map: The save's map.
        metadata: The bytes of its ``.metadata``.
        holders: For each file, the ranks that have it on a local tier.
        newest: The order of the newest known save, also if it is not loaded.
    """

    layer_map: LayerMap
    metadata: bytes
    holders: dict[str, list[int]]
    newest: float


@dataclass(frozen=True, slots=True)
class _FoundSave:
    layer_map: bytes
    metadata: bytes


def maps_in(tier: CheckpointTier) -> dict[str, LayerMap]:
    """The published saves of a tier by name.

    A save with a damaged map is left out, with a warning.
    """
    found = {}
    for save in filter(is_save, tier.list()):
        try:
            found[save] = LayerMap.decode(tier.read(f"{save}/{MAP}"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("The map of save %s in %s cannot be read: %s.", save, tier, error)
    return found


def agree(
    local: Sequence[CheckpointTier],
    remotes: Sequence[str],
    *,
    path: str | None,
    rank: int,
    gather: Gather,
    make: Callable[[str], CheckpointTier],
) -> Agreed | None:
    """Finds the newest complete save; all ranks call it and find the same.

    Args:
        local: The local tiers.
        remotes: URLs of checkpoints that may hold a save.
        path: Only saves of this URL count; ``None``: any URL.
        rank: This rank.
        gather: Gathers an object from every rank.
        make: Makes the remote tier for the URL of a checkpoint.

    Returns:
        ``None`` if there is none. A warning names newer incomplete ones.
    """
    own: dict[str, LayerMap] = {}
    for tier in local:
        own = maps_in(tier) | own
    if rank == 0:  # only rank 0 lists the remote store, because that is expensive
        for url in remotes:
            own = maps_in(make(url)) | own
    known: dict[str, LayerMap] = {}
    newest = 0.0
    wanted = {save: m for save, m in own.items() if path is None or m.path == path}
    for of_rank, last in gather((wanted, max((m.order for m in own.values()), default=0.0))):
        known |= of_rank
        newest = max(newest, last)
    for save, layer_map in sorted(known.items(), key=lambda item: -item[1].order):
        remote = make(layer_map.path)
        here = sorted({name for tier in local for name in tier.list(save)})
        listed = gather((here, remote.list(save) if rank == 0 else [], _offer(save, layer_map, [*local, remote])))
        present = {name for names, there, _ in listed for name in (*names, *there)}
        offered = next((offer for _, _, offer in listed if offer is not None), None)
        lacking = sorted(set(layer_map.files) - present)
        if not lacking and offered is not None:
            holders = {n: [r for r, (names, _, _) in enumerate(listed) if n in names] for n in layer_map.files}
            return Agreed(LayerMap.decode(offered.layer_map), offered.metadata, holders, newest)
        if rank == 0:
            lacks = ", ".join(lacking[:5]) or METADATA
            log.warning("Save %s of step %d (%s) is not complete anywhere: %s.", save, layer_map.step, layer_map.path, lacks)
    return None


def _offer(save: str, layer_map: LayerMap, tiers: Sequence[CheckpointTier]) -> _FoundSave | None:
    for tier in tiers:
        try:
            content = tier.read(f"{save}/{METADATA}")
            if zlib.crc32(content) == layer_map.metadata_crc32:
                return _FoundSave(layer_map.encode(), content)
        except OSError:
            continue
    return None
