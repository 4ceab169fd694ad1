"""The schedule: how bytes move during one step, as ops on in-order lanes between anchors.

A schedule has no times and no callables.

[Note: Anchors]
Autograd executes compute; the runtime observes it. An anchor is the moment a
block's forward (``F``) or backward (``B``) begins, or the moment after backward when
``optimizer.step()`` knows all gradients (``V``, the verdict). An op is *issued* when the anchor it
names begins, in the order of ids, and *starts* once the ops in ``after`` (this step) and
``carried`` (earlier steps) are done. When an anchor begins, the anchor before it has ended. The
reason: nodes of the autograd graph run in the reverse order of their creation, so the gradient that
reaches an earlier block has passed through the whole later one.

[Note: Devices]
If the device is the host's own CPU, ops move bytes between host and disk only. A
device with memory of its own has more ops. A transfer takes memory of its target when it starts.
When it ends, it frees the memory of its source, unless the bytes live there:

- ``UPLOAD weights`` on ``h2d``: weights that live below the device take device memory until
  ``RELEASE weights`` on ``h2d`` (a RELEASE on ``disk_read`` gives host memory back). Weights that
  live on the device have their place there; an UPLOAD after the CPU's UPDATE brings the new ones.
- ``GRAD gradients`` on ``d2h``: a block's gradients take host memory until its CPU UPDATE has
  ended. If the UPDATE comes before the verdict, they take it until the verdict. In a micro-batch
  that accumulates no UPDATE follows; the next micro-batch's GRAD is added to these gradients.
- ``SWAP_OUT activations`` on ``d2h``, and for the disk a second one on ``disk_write``;
  ``SWAP_IN activations`` on ``disk_read``, then on ``h2d``. There is one op per hop and per use of
  a block; uses of one block nest.
- ``SWAP_IN state`` on ``h2d`` before a device UPDATE of state that lives on the host,
  ``SWAP_OUT state`` on ``d2h`` after it. ``SWAP_OUT weights`` on ``d2h`` after a device UPDATE of
  weights that live on the host: it renews their copy there.
- ``UPDATE`` on ``compute`` runs between the anchors; it is issued when the previous anchor has
  ended.

[Note: Ranks]
``Schedule.ranks`` ranks share one model: each owns a slice of every part (``ir.shards``), and
weights, gradients and state live in slices on the tiers of the plan. All ranks have the same
schedule. So they enter their collectives, the ops on ``net`` or ``peer``, in one order, and a
collective ends when all ranks have entered it. A rank brings its own slice like any machine
(``FETCH``); then

- ``GATHER weights`` makes the whole weights of a block from all slices. They take memory until
  ``RELEASE weights`` on ``net``. Where the plan has weights on the device, whole weights have their
  place on each rank, and a GATHER after the UPDATE brings the new ones. Ranks of one host have
  whole weights in the same memory, where their slices are (``gathers_in_place``). Then these two
  move nothing, and whole weights take no memory of their own: GATHER says that all ranks have
  updated the block.
- ``REDUCE gradients`` sums a block's gradients over the ranks. Whole ones take memory from backward
  until then, and the rank's slice of the sum until its UPDATE, which changes the rank's own slice.
- On devices with memory of their own, collectives are on the host: a GATHER comes before each
  UPLOAD, and a REDUCE after each GRAD. ``RELEASE weights`` on ``h2d`` frees the device's memory.
  Devices of one host read the slices of all ranks. So before a rank gives its slice of weights on
  disk back, all of them meet: ``RELEASE weights`` on ``net``.
- An ``UPDATE`` on such a device is of the rank's slice. ``SWAP_IN gradients`` on ``h2d`` brings the
  slices of gradients and weights there after REDUCE, and ``SWAP_OUT weights`` on ``d2h`` takes the
  new weights to the host, whatever their tier, from where all devices get them.
- Or, if the plan says so (``Plan.gather``), such devices exchange weights and gradients themselves,
  on lane ``peer``. An UPLOAD brings the rank's slice to its place among whole weights, and the
  GATHER that follows fills the other places. A REDUCE leaves the slice of the sum on the device,
  and the GRAD that follows takes it to the host. No device reads what other ranks have on the host,
  so no RELEASE is on ``net``. All collectives of such a schedule are on ``peer``, AGREE too: one
  lane has one order, which all ranks have.
- ``AGREE`` moves a few numbers. By the first one of a step each rank knows that all of them have
  the record of the step before (``store.common_steps``), so MIRROR waits for it, and an UPDATE
  that a STORE follows: the engine writes as it updates. One at the verdict makes that the same on
  all ranks.

[Note: Speculation]
With clipping by norm or loss scaling, the final gradients are known only when
all gradients are there. Most of the time they are the gradients unchanged. A block whose old state
stays on disk until the next COMMIT may be updated with unchanged gradients during backward: the
update speculates. If the verdict confirms it, the step continues as if there had been no doubt
(``SPECULATIVE``). Otherwise the update is discarded when the verdict's anchor begins, and repeated
(``REDONE``). If the block's weights live on disk and are in memory, they are fetched first, over
the speculative ones. Up to the verdict both schedules are equal, so the runtime changes from one to
the other there. Blocks whose update cannot be discarded are updated after the verdict in both
cases, and so are blocks that a device with memory of its own updates. Weights are not uploaded to
such a device before the verdict on them.

[Note: Mirrors]
If every step is kept (``ModelShape.kept_every`` is 1), weights and state that live
in memory are written to the disk after the verdict, once the block's UPDATE has ended, directly
from their memory. The block's next UPDATE waits for that, and so does the COMMIT.

[Note: Priorities]
Ops are issued in the order of ids. The update threads, the disk and, with
:attr:`Plan.priority`, the copies to the host choose the most urgent op of all that may start: first
mirrors, then ops that compute may wait for, then ops of updates. Among the latter the lowest block
is first with ``Plan.priority`` (AutoHete); otherwise the order of issue decides. The executor and
the simulator use :func:`urgency`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

NO_BLOCK = -1


class OpKind(StrEnum):
    """The kind of an op."""

    FETCH = "FETCH"  # disk -> host
    UPLOAD = "UPLOAD"  # host -> device
    GATHER = "GATHER"  # collective: slices of all ranks -> whole weights on each
    RELEASE = "RELEASE"  # frees the memory of weights
    SWAP_OUT = "SWAP_OUT"  # activations, or renewed state or weights, one tier down
    SWAP_IN = "SWAP_IN"  # activations or state one tier up
    GRAD = "GRAD"  # device -> host
    REDUCE = "REDUCE"  # collective: gradients of all ranks -> a slice of the sum on each
    AGREE = "AGREE"  # collective of a few numbers
    UPDATE = "UPDATE"  # optimizer update
    STORE = "STORE"  # host -> disk, other slot
    MIRROR = "MIRROR"  # host -> disk: a copy of data in memory, so that the step is kept
    COMMIT = "COMMIT"  # one record makes the step's slots the valid ones


class Lane(StrEnum):
    """An in-order queue on one resource."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    CPU = "cpu"
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"
    NET = "net"
    PEER = "peer"


COLLECTIVES = (Lane.NET, Lane.PEER)
"""Lanes of collectives: in host memory, between devices. A schedule has all of its own on one."""


class Payload(StrEnum):
    """The data of a block that an op moves."""

    WEIGHTS = "weights"
    STATE = "state"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    NONE = "-"


class Phase(StrEnum):
    """The phase of an anchor."""

    FORWARD = "F"
    BACKWARD = "B"
    VERDICT = "V"


class Updates(StrEnum):
    """When a step's updates are issued."""

    NONE = "none"  # evaluation, or a micro-batch that only accumulates
    IN_BACKWARD = "in_backward"  # each block as soon as its backward has ended
    AFTER_VERDICT = "after_verdict"  # all of them in forward order, overlapping the next forward
    SPECULATIVE = "speculative"  # [Note: Speculation]; the verdict keeps the updates
    REDONE = "redone"  # the same; the verdict discards the update, and it is repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSignature:
    """The properties of a step that decide its schedule.

    Attributes:
        order: Indices of the blocks in the order their forwards begin; a block used twice appears
            twice.
        training: Whether backward anchors follow.
        updates: When updates are issued.
    """

    order: tuple[int, ...]
    training: bool
    updates: Updates = Updates.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A point that the runtime observes.

    ``needs`` and ``carried`` are the ops that compute waits for there.
    """

    phase: Phase
    block: int
    needs: tuple[int, ...] = ()
    carried: tuple[tuple[OpKind, int], ...] = ()

    def __str__(self) -> str:
        return "V" if self.phase is Phase.VERDICT else f"{self.phase.value}:{self.block}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op.

    Attributes:
        id: Its place in the order of issue.
        kind: Its kind.
        block: Its block; ``NO_BLOCK`` for COMMIT and AGREE.
        lane: The resource that it occupies.
        at: Index of the anchor whose begin issues it.
        payload: The data of the block that it moves. A FETCH of ``STATE`` is an update that is
            *opened*: its state streams into staging ahead of the gradients.
        num_bytes: Bytes that it moves.
        after: Ids of ops of this step that it waits for.
        carried: Kind and block of ops of earlier steps that it waits for: the latest op of each, if
            there is one.
    """

    id: int
    kind: OpKind
    block: int
    lane: Lane
    at: int
    payload: Payload = Payload.NONE
    num_bytes: int = 0
    after: tuple[int, ...] = ()
    carried: tuple[tuple[OpKind, int], ...] = ()

    @property
    def what(self) -> str:
        """Its kind; with its payload if that varies: ``"UPDATE"``, ``"SWAP_IN activations"``."""
        only = (OpKind.UPDATE, OpKind.STORE, OpKind.GRAD, OpKind.MIRROR)
        plain = self.payload in (Payload.WEIGHTS, Payload.NONE) or self.kind in only
        return self.kind.value if plain else f"{self.kind.value} {self.payload.value}"

    def __str__(self) -> str:
        edges = "".join(f" after={i}" for i in self.after) + "".join(f" carried={k.value}:{b}" for k, b in self.carried)
        block = "" if self.block == NO_BLOCK else f":{self.block}"
        what = f"{self.id} {self.kind.value}{block} {self.payload.value} {self.lane.value}"
        return f"{what} bytes={self.num_bytes} at={self.at}{edges}"


def urgency(kind: OpKind, payload: Payload, block: int, *, lowest_first: bool) -> int:
    """The priority of an op among those that may start.

    The smallest is first, equals are in the order of issue.

    Args:
        kind: The op's kind.
        payload: The data that it moves.
        block: Its block.
        lowest_first: ``Plan.priority``.
    """
    if kind is OpKind.MIRROR:
        return -1
    of_updates = kind in (OpKind.UPDATE, OpKind.GRAD, OpKind.STORE) or (kind, payload) == (OpKind.FETCH, Payload.STATE)
    if not of_updates:
        return 0
    return 1 + block if lowest_first else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The ops of one step.

    Attributes:
        signature: The step.
        anchors: Anchors in the expected order.
        ops: Ops in the order of issue; ``ops[i].id == i``.
        resident_before: Blocks with weights on disk whose weights are in memory when the step
            begins.
        resident_after: The same when it ends.
        device_before: Blocks with weights below the device of which the device holds a valid copy
            when the step begins.
        device_after: The same when it ends. With several ranks both are about whole weights.
        ranks: Ranks that share the model; see [Note: Ranks].
        shared_memory: The devices of several ranks are the host's own CPU.
        gathers_in_place: They have the same memory for weights.
    """

    signature: StepSignature
    anchors: tuple[Anchor, ...]
    ops: tuple[Op, ...]
    resident_before: frozenset[int]
    resident_after: frozenset[int]
    device_before: frozenset[int] = frozenset()
    device_after: frozenset[int] = frozenset()
    ranks: int = 1
    shared_memory: bool = False
    gathers_in_place: bool = False

    @property
    def copies(self) -> int:
        """How many slices need memory of their own on a rank that has whole weights."""
        return 0 if self.gathers_in_place and self.shared_memory else self.ranks

    def lane(self, lane: Lane) -> Iterator[Op]:
        """The ops of one lane, in order."""
        return (op for op in self.ops if op.lane is lane)

    def to_text(self) -> str:
        """One line per anchor and per op, in the order of issue; golden tests compare this text."""
        where = " in place" * self.gathers_in_place + " on devices" * (not self.shared_memory)
        lines = [f"ranks {self.ranks}{where}"] if self.ranks > 1 else []
        lines += self._held(self.resident_before, self.device_before)
        ops = iter(self.ops)
        op = next(ops, None)
        for index, anchor in enumerate(self.anchors):
            edges = "".join(f" needs={i}" for i in anchor.needs) + "".join(f" carried={k.value}:{b}" for k, b in anchor.carried)
            lines.append(f"@{index} {anchor}{edges}")
            while op is not None and op.at == index:
                lines.append(f"    {op}")
                op = next(ops, None)
        lines += self._held(self.resident_after, self.device_after)
        return "\n".join(lines) + "\n"

    def _held(self, resident: frozenset[int], device: frozenset[int]) -> list[str]:
        rows = {"resident": resident} | ({"device": device} if self.device_before or self.device_after else {})
        return [f"{name} {' '.join(map(str, sorted(blocks))) or '-'}" for name, blocks in rows.items()]
