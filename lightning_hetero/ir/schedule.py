"""The schedule: *when* bytes move during one step, as ops on in-order lanes between anchors. No times and no callables.

[Note: Anchors]
Autograd executes compute; the runtime observes it. An anchor is the moment a block's forward (``F``) or backward (``B``)
begins, or the moment after backward when ``optimizer.step()`` knows all gradients (``V``, the verdict). An op is *issued*
when the anchor it names begins, in the order of ids, and *starts* once the ops in ``after`` (this step) and ``carried``
(earlier steps) are done.
The begin of an anchor also means that the anchor before it has ended: nodes of the autograd graph run in the
reverse order of their creation, so the gradient that reaches an earlier block has passed through the whole later one.

[Note: Devices]
Where the device is the host's own CPU, an op moves bytes between host and disk only. A device with memory of its own adds ops;
a transfer takes its target's memory as it starts, and gives its source's back as it ends where the bytes do not live there:

- ``UPLOAD weights`` on ``h2d``: weights that live below the device take device memory until ``RELEASE weights`` on ``h2d``
  (a RELEASE on ``disk_read`` gives host memory back). Weights that live on the device have their place there; an UPLOAD
  after the CPU's UPDATE brings the new ones.
- ``GRAD gradients`` on ``d2h``: a block's gradients take host memory until its CPU UPDATE has ended, and where that comes before
  the verdict until the verdict. In a micro-batch that accumulates no UPDATE follows; the next micro-batch's GRAD is added to what
  is there.
- ``SWAP_OUT activations`` on ``d2h``, of what goes to the disk a second one on ``disk_write``; ``SWAP_IN activations`` on
  ``disk_read``, then on ``h2d``. One per hop and per use of a block; uses of one block nest.
- ``SWAP_IN state`` on ``h2d`` before a device UPDATE of state that lives on the host, ``SWAP_OUT state`` on ``d2h`` after it.
  ``SWAP_OUT weights`` on ``d2h`` after a device UPDATE of weights that live on the host: their copy there is renewed.
- ``UPDATE`` on ``compute`` runs between the anchors; it is issued once the anchor before has ended.

[Note: Speculation]
With clipping by norm or loss scaling nobody knows what to update with before all gradients are there, but most of the time it is
the gradients as they are. A block whose old state stays on disk until the next COMMIT may be updated with them during backward, in
the hope that the verdict says so. If it does, the step goes on as if it had been known (``SPECULATIVE``). If it does not, what was
made is discarded as the verdict's anchor begins, and the block is updated again (``REDONE``); weights in memory that live on disk
are fetched first, over those that the update has made. Up to the verdict both schedules are the same, so the runtime goes over from
one to the other.
Blocks that cannot be taken back are updated after the verdict either way, and so are those that a device with memory of its own
updates. Such a device gets no weights on which there is no verdict.

[Note: Mirrors]
Where every step is kept (``ModelShape.kept_every`` is 1), what of a block lives in memory is written to the disk after the verdict,
once its UPDATE has ended, from where it lies: the block's next UPDATE waits for that, and so does the COMMIT.

[Note: Priorities]
Ops are issued in the order of ids, but the update threads, the disk and, with :attr:`Plan.priority`, the copies to the host take
what is most urgent of all that may start: first mirrors, then what compute may wait for, then what belongs to updates; of these
the lowest block first with ``Plan.priority`` (AutoHete), else in the order of issue. The executor and the simulator ask
:func:`urgency`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

NO_BLOCK = -1


class OpKind(StrEnum):
    """What an op does."""

    FETCH = "FETCH"  # disk -> host
    UPLOAD = "UPLOAD"  # host -> device
    RELEASE = "RELEASE"  # memory of weights given back
    SWAP_OUT = "SWAP_OUT"  # activations, or renewed state or weights, one tier down
    SWAP_IN = "SWAP_IN"  # activations or state one tier up
    GRAD = "GRAD"  # device -> host
    REDUCE = "REDUCE"  # collective
    UPDATE = "UPDATE"  # optimizer update
    STORE = "STORE"  # host -> disk, other slot
    MIRROR = "MIRROR"  # host -> disk, what lives in memory, so that the step is kept
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


class Payload(StrEnum):
    """Which of a block's bytes an op moves."""

    WEIGHTS = "weights"
    STATE = "state"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    NONE = "-"


class Phase(StrEnum):
    """What an anchor observes."""

    FORWARD = "F"
    BACKWARD = "B"
    VERDICT = "V"


class Updates(StrEnum):
    """When a step's updates are issued."""

    NONE = "none"  # evaluation, or a micro-batch that only accumulates
    IN_BACKWARD = "in_backward"  # each block's as soon as its backward has ended
    AFTER_VERDICT = "after_verdict"  # all of them in forward order, overlapping the next forward
    SPECULATIVE = "speculative"  # [Note: Speculation]; the verdict keeps what was updated
    REDONE = "redone"  # the same; the verdict discards it, and it is updated again


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSignature:
    """What decides the shape of a step.

    Attributes:
        order: Indices of the blocks in the order their forwards begin; a block used twice appears twice.
        training: Whether backward anchors follow.
        updates: When updates are issued.
    """

    order: tuple[int, ...]
    training: bool
    updates: Updates = Updates.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A moment that the runtime observes; ``needs`` and ``carried`` are the ops it waits for before compute goes on."""

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
        kind: What it does.
        block: The block it does it to; ``NO_BLOCK`` for COMMIT.
        lane: The resource it occupies.
        at: Index of the anchor whose begin issues it.
        payload: Which of the block's bytes it moves. A FETCH of ``STATE`` is an update that is *opened*: its state streams
            into staging ahead of the gradients.
        num_bytes: How many bytes it moves.
        after: Ids of ops of this step that it waits for.
        carried: Kind and block of ops of earlier steps that it waits for: the latest one of each, if there is any.
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
        """Its kind, and its payload where an op of the kind may move another one: ``"UPDATE"``, ``"SWAP_IN activations"``."""
        only = (OpKind.UPDATE, OpKind.STORE, OpKind.GRAD, OpKind.MIRROR)
        plain = self.payload in (Payload.WEIGHTS, Payload.NONE) or self.kind in only
        return self.kind.value if plain else f"{self.kind.value} {self.payload.value}"

    def __str__(self) -> str:
        edges = "".join(f" after={i}" for i in self.after) + "".join(f" carried={k.value}:{b}" for k, b in self.carried)
        block = "" if self.block == NO_BLOCK else f":{self.block}"
        what = f"{self.id} {self.kind.value}{block} {self.payload.value} {self.lane.value}"
        return f"{what} bytes={self.num_bytes} at={self.at}{edges}"


def urgency(kind: OpKind, payload: Payload, block: int, *, lowest_first: bool) -> int:
    """The place of an op among those that may start, the smallest first; equals go in the order of issue.

    Args:
        kind: The op's kind.
        payload: What it moves.
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
        signature: The step it is for.
        anchors: Anchors in the order they are expected.
        ops: Ops in the order they are issued; ``ops[i].id == i``.
        resident_before: Blocks with weights on disk whose weights are in memory as the step begins.
        resident_after: The same as it ends.
        device_before: Blocks with weights below the device of which the device holds a valid copy as the step begins.
        device_after: The same as it ends.
    """

    signature: StepSignature
    anchors: tuple[Anchor, ...]
    ops: tuple[Op, ...]
    resident_before: frozenset[int]
    resident_after: frozenset[int]
    device_before: frozenset[int] = frozenset()
    device_after: frozenset[int] = frozenset()

    def lane(self, lane: Lane) -> Iterator[Op]:
        """The ops of one lane, in order."""
        return (op for op in self.ops if op.lane is lane)

    def to_text(self) -> str:
        """One line per anchor and per op, in issue order: what golden tests compare and people read."""
        lines = self._held(self.resident_before, self.device_before)
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
