"""Which step the stores of several ranks hold in common, and when a rank may write the next one.

Ranks that share a model have a store each (docs/store-format.md). A store by itself survives a
kill; this module makes a set of them survive together. It decides, and neither reads nor writes:
who has the stores does what it says, as the test does that tries every kill.

[Note: Common steps]
Every commit of a run has a *number*, one more than the commit before, and the same on all ranks. A
rank writes commit ``n + 1`` over the slots of ``n - 1``. So:

1. A rank begins to write ``n + 1`` only when it knows that all ranks have the record of ``n``. They
   tell each other by the minimum over the ranks of their newest numbers (``Membership``).
2. Hence the newest records of a set are ``n`` and, on some ranks, ``n + 1``, and the slots of ``n``
   are whole on all of them. ``n`` is the common step (``common_step``).
3. A rank that has the record of ``n + 1`` *takes it back*: it writes a copy of the record of ``n``
   behind it, before anything else. Otherwise the old record would become valid again once another
   rank has written its own ``n + 1``, which may be that of another history.
4. After a resume all ranks tell each other their numbers before the first of them writes, although
   all of them hold ``n``: only then has every rank taken back what it had to.

The stores that the ranks of a run have made together are a *set*. Another number of ranks makes
another set, by copying the common step (``ir.shards``). A set counts once each of its stores has a
record, and of several that count the last one does. So:

5. Before a rank first writes, it removes what it has of other sets: of earlier ones, so that a
   resume that cannot see all of this set is refused instead of going back to a step long ago; of
   later ones that do not count, so that they never will, even if what is out of sight now returns.

[Note: Sets of several nodes]
Each node has the model once, in the stores of its ranks. The rules above are for the ranks of all
nodes. If a part of such a set is out of sight, the stores of one node are enough to go on from.
What goes on is another set then, since those out of sight may return, and are older.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_hetero.errors import ConfigError, StoreCorruptError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStore:
    """What one rank's store says of itself, by its manifest and its commit ring.

    Attributes:
        set_id: Names the set; random, and the same in all of its stores.
        set_number: Counts the sets of a run.
        ranks: How many stores the set has.
        rank: The place of this one among them.
        numbers: The numbers of its readable records, in the order in which they were written.
        nodes: How many times the set has the model; see [Note: Sets of several nodes].
    """

    set_id: str
    set_number: int
    ranks: int
    rank: int
    numbers: tuple[int, ...]
    nodes: int = 1

    @property
    def node(self) -> int:
        """The node of the rank."""
        return self.rank // (self.ranks // self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonStep:
    """The step from which the ranks of a set go on.

    Attributes:
        set_id: The set.
        set_number: Its number.
        ranks: How many stores it has.
        number: The number of the commit that all of them hold.
        taken_back: The ranks whose newest record is a later one.
        nodes: How many times the set has the model.
        is_whole: All stores of the set are there; else all of one node at least.
    """

    set_id: str
    set_number: int
    ranks: int
    number: int
    taken_back: frozenset[int]
    nodes: int = 1
    is_whole: bool = True

    def membership(self) -> Membership:
        """What a rank of the set knows once it has taken back what it had to."""
        return Membership(recorded=self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What one rank of a running set knows of the others.

    Attributes:
        recorded: The number of its own newest record, which is on its disk.
        held_by_all: A commit that all ranks have recorded, as far as it knows; -1: none.
    """

    recorded: int
    held_by_all: int = -1

    @property
    def may_write(self) -> bool:
        """Whether slots may be written that the newest record does not name.

        The first time, what this rank has of other sets is removed before; see rule 5.
        """
        return self.held_by_all >= self.recorded

    def after_record(self) -> Membership:
        """The record of the next commit is on the disk of this rank."""
        return replace(self, recorded=self.recorded + 1)

    def after_exchange(self, recorded: Sequence[int]) -> Membership:
        """All ranks have told the number of their newest record, this one among them."""
        return replace(self, held_by_all=min(recorded))


def common_step(stores: Iterable[RankStore]) -> CommonStep | None:
    """The newest step that all stores of a set hold, of the last set that counts.

    Args:
        stores: All stores of a run that any of its ranks can see, each once.

    Returns:
        The step; ``None`` if there is no store with a record.

    Raises:
        ConfigError: No set is complete; names the stores that are missing.
        StoreCorruptError: A store is there twice, or a set's records are further apart than a kill
            can leave them.
    """
    sets: dict[str, dict[int, RankStore]] = {}
    for store in stores:
        others = sets.setdefault(store.set_id, {})
        if store.rank in others:
            raise StoreCorruptError(
                f"there are two stores of rank {store.rank} of {store.ranks} in set {store.set_id}. One of them is a copy: "
                f"move it elsewhere, and resume again."
            )
        others[store.rank] = store
    newest_first = sorted(sets.values(), key=lambda found: -next(iter(found.values())).set_number)
    begun = [{rank: store for rank, store in found.items() if store.numbers} for found in newest_first]
    for found in filter(None, begun):
        some = next(iter(found.values()))
        if len(found) == some.ranks:
            return _common_step(found, some)
    for found in filter(None, begun):
        if copies := {rank: store for rank, store in found.items() if has_all_of(store.node, found.values())}:
            return _common_step(copies, next(iter(copies.values())))
    if not any(begun):
        return None
    found = max(begun, key=lambda found: len(found) / next(iter(found.values())).ranks if found else 0.0)
    some = next(iter(found.values()))
    missing = ", ".join(str(rank) for rank in range(some.ranks) if rank not in found)
    strange = [f"rank {s.rank} of {s.ranks}" for of_set in begun for s in of_set.values() if s.set_id != some.set_id]
    stray = f" The stores of {', '.join(strange)} are those of other runs." if strange else ""
    raise ConfigError(
        f"of a run on {some.ranks} ranks the stores of ranks {missing} are missing, or have no record.{stray} A step is divided "
        f"among all of them. Mount the disks that have them, or go on from a checkpoint."
    )


def has_begun(stores: Sequence[RankStore]) -> bool:
    """Whether a set may have gone on from the step that it began with.

    A rank has a second record only when all ranks have the first one. Without any second one, and
    with a first one missing, a kill has ended the set before it counted.
    """
    counts = bool(stores) and len(stores) == stores[0].ranks and all(store.numbers for store in stores)
    return counts or any(len(store.numbers) > 1 for store in stores)


def has_all_of(node: int, stores: Iterable[RankStore]) -> bool:
    """Whether all stores of a node are among those of its set."""
    there = [store for store in stores if store.node == node]
    return bool(there) and len(there) == there[0].ranks // there[0].nodes


def _common_step(found: dict[int, RankStore], some: RankStore) -> CommonStep:
    newest = {rank: store.numbers[-1] for rank, store in found.items()}
    oldest = min(newest, key=lambda rank: newest[rank])
    number = newest[oldest]
    for rank, store in found.items():
        if newest[rank] > number + 1 or number not in store.numbers:
            raise StoreCorruptError(
                f"rank {oldest} of {some.ranks} has recorded commit {number} last, and rank {rank} commit {newest[rank]}; a kill "
                f"leaves them at most one apart, with both records. The store of rank {oldest} is older than others: a copy, or "
                f"restored by itself. Put all stores of one moment in place, or go on from a checkpoint."
            )
    taken_back = frozenset(rank for rank, last in newest.items() if last > number)
    return CommonStep(
        set_id=some.set_id, set_number=some.set_number, ranks=some.ranks, number=number, taken_back=taken_back,
        nodes=some.nodes, is_whole=len(found) == some.ranks,
    )  # fmt: skip
