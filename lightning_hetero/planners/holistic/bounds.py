"""Lower bounds of any schedule: the work of a plan on each resource, in whole and in windows.

[Note: Bound]
A step takes at least as long as each resource works for it. Two windows say more. Let a cut part
the blocks into early and late ones, in forward order:

- *Updates.* From the end of the late blocks' backward until their next forward, compute has only
  the early blocks to do. In that window the early blocks' gradients leave, their updates run and
  their new weights come back, and outside of it compute does the late blocks. So a step takes at
  least late compute plus early update work, on each resource. The first late block's own update
  falls into that window too. Where updates wait for the verdict, all backwards come before the
  window.
- *Activations.* From the end of the early blocks' forward until their backward, compute has only
  the late blocks to do. In that window the late blocks' activations leave and come back. Their
  weights come for forward and for backward, except those in a cache. So a step takes at least early
  compute plus late transfers, on each resource.

Two phases add up, each as long as any resource works in it:

- *Forward*, from the end of the step before, with its compute, and with all passes of weights from
  below, except those that a cache held before it began. A cache holds no weights that the CPU
  updates: new ones go up in the order of forward.
- *Backward*, with its compute, the gradients' way down, another pass of weights, and all updates,
  except those whose gradients wait when it ends. These gradients take host memory meanwhile.

And where two kinds of work slow each other (``HardwareProfile.contention``), doing both takes
longer than the longer one.

All rows are linear in the work, so the least bound of all plans is a linear programme
(:mod:`.relaxation`), and the bound of one plan is its largest row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import product
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.cost import Rates, Work, backward_s, cpu_update_bytes, stored_bytes
from lightning_hetero.errors import RateError
from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Tier, UpdateLane
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering.needs import DEVICE_GRADIENTS

Vector = NDArray[np.float64]
_Key = TypeVar("_Key")


class Quantity(IntEnum):
    """What a block takes in one optimizer step. All values except the first two are bytes."""

    COMPUTE_S = 0  # seconds of forward and backward, of all micro-batches
    DEVICE_UPDATE = 1  # parameters; on shared memory bytes as for CPU_UPDATE
    CPU_UPDATE = 2  # host memory traffic of the update
    FRESH = 3  # new weights that the device fetches: the CPU has made them, or several ranks
    PASSED_CPU = 4  # such weights below the device, per pass
    PASSED_DEVICE = 5  # other weights below the device: updated there, or not at all
    GRADIENTS = 6  # to the host, once per micro-batch
    STATE_UP = 7  # with slices of gradients and weights, where a rank's device updates them
    STATE_DOWN = 8
    SWAPPED = 9  # activations, each way, once per micro-batch
    SWAPPED_DISK = 10  # of these to disk
    STATE_READ = 11
    STORED = 12
    PASSED_DISK = 13  # weights on disk, once per pass
    DEVICE_HELD = 14  # weights and state that live on the device
    DEVICE_SAVED = 15  # activations there as forward ends
    DEVICE_GRADIENTS = 16  # gradients there until the update after backward
    HOST_HELD = 17
    HOST_SAVED = 18
    DISK_HELD = 19
    FORWARD_S = 20  # seconds of one forward
    RENEWED = 21  # new weights of which ranks gather the slices
    GATHERED = 22  # whole weights of which a rank keeps a slice, per pass
    REDUCED = 23  # gradients of all ranks, once per micro-batch


class SpareMemory(IntEnum):
    """Memory for what comes and goes, bytes."""

    PASSED_CPU = 0  # device memory for weights of that kind
    PASSED_DEVICE = 1
    PASSED_DISK = 2  # host memory for weights that live on disk
    WAITING = 3  # host memory for gradients that wait for their update as forward begins
    GATHERED = 4  # host memory for whole weights of which a rank keeps a slice


def uses(block: BlockProfile, placed: BlockPlan, model: ModelProfile, hardware: HardwareProfile, micro_batches: int = 1) -> Vector:
    """What one block takes under one rule, by :class:`Quantity`.

    Args:
        block: The block.
        placed: Its rule.
        model: The block's model.
        hardware: The machine.
        micro_batches: Forwards and backwards of one step.
    """
    weights, gradients, ranks = model.weight_bytes(block), model.gradient_bytes(block), hardware.ranks
    in_place = hardware.gathers_in_place and hardware.shared_memory  # then a rank's share of whole weights is its slice
    whole, sent = weights if in_place else ranks * weights, ranks * weights * (ranks > 1 and not hardware.gathers_in_place)
    params, state = block.num_trainable_params, model.state_bytes(block)
    alone = not hardware.shared_memory
    on_cpu = params > 0 and placed.update is UpdateLane.CPU
    on_device = params > 0 and not on_cpu
    below, on_disk = alone and placed.weights is not Tier.DEVICE, placed.weights is Tier.DISK
    through_host = on_cpu or (params > 0 and ranks > 1)
    moves, slices_move = alone and on_device and placed.state is Tier.HOST, alone and on_device and through_host
    returns = alone and on_device and (slices_move or placed.weights is Tier.HOST)
    # Such an update writes the weights in host memory, whatever their tier.
    on_host = placed.weights is Tier.HOST or (alone and through_host and placed.weights is Tier.DEVICE)
    read, saved = placed.state is Tier.DISK, saved_bytes(block, placed, shared_memory=hardware.shared_memory)
    taken: dict[Quantity, float] = {  # in the order of Quantity
        Quantity.COMPUTE_S: micro_batches * (block.forward_s + backward_s(block, placed)),
        Quantity.DEVICE_UPDATE: on_device * (params if alone else cpu_update_bytes(params)),
        Quantity.CPU_UPDATE: on_cpu * cpu_update_bytes(params),
        Quantity.FRESH: (alone and through_host) * whole,
        Quantity.PASSED_CPU: (below and through_host) * whole,
        Quantity.PASSED_DEVICE: (below and not through_host) * whole,
        Quantity.GRADIENTS: (alone and through_host) * ranks * gradients,
        Quantity.STATE_UP: moves * state + slices_move * (weights + gradients),
        Quantity.STATE_DOWN: moves * state + returns * weights,
        Quantity.SWAPPED: saved.to_host + saved.to_disk,
        Quantity.SWAPPED_DISK: saved.to_disk,
        Quantity.STATE_READ: read * state,
        Quantity.STORED: stored_bytes(block, placed, model) if params else 0,
        Quantity.PASSED_DISK: on_disk * weights,
        Quantity.DEVICE_HELD: (placed.weights is Tier.DEVICE) * whole + (placed.state is Tier.DEVICE) * state,
        Quantity.DEVICE_SAVED: saved.kept,
        Quantity.DEVICE_GRADIENTS: (on_device and not through_host) * gradients,
        Quantity.HOST_HELD: on_host * weights + (placed.state is Tier.HOST) * state,
        Quantity.HOST_SAVED: saved.to_host,
        Quantity.DISK_HELD: on_disk * (2 if params else 1) * (weights - block.in_place_bytes) + 2 * read * state + saved.to_disk,
        Quantity.FORWARD_S: block.forward_s,
        Quantity.RENEWED: (params > 0) * sent,
        Quantity.GATHERED: (params > 0 and placed.weights is not Tier.DEVICE) * sent,
        Quantity.REDUCED: (params > 0 and ranks > 1) * ranks * gradients,
    }
    return np.fromiter(taken.values(), np.float64, len(Quantity))


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRow:
    """One lower bound of a step: a sum over all blocks, and over those before and after a cut.

    Attributes:
        resource: What is busy all that time.
        always: Seconds per unit of each use, for every block.
        early: The same for blocks before the cut alone.
        late: The same for blocks behind it.
        here: More of it for the first block behind it.
        rooms: Seconds per byte of each room: less than 0 where room saves work.
        constant_s: Seconds besides.
        whole: All that passes the resource in a step.
    """

    resource: str
    always: Mapping[Quantity, float] = field(default_factory=dict)
    early: Mapping[Quantity, float] = field(default_factory=dict)
    late: Mapping[Quantity, float] = field(default_factory=dict)
    here: Mapping[Quantity, float] = field(default_factory=dict)
    rooms: Mapping[SpareMemory, float] = field(default_factory=dict)
    constant_s: float = 0.0
    whole: bool = False


class _For(Enum):
    """What passes a resource, by when it has to."""

    UPDATE = 0  # between a block's backward and its next forward, once a step
    PASS = 1  # weights, for each pass of forward or backward unless they are cached
    SWAP = 2  # activations, between a block's forward and its backward in each micro-batch
    REST = 3  # any time, once a step


_Seconds = dict[Quantity, float]

SPARE_FOR = {
    Quantity.PASSED_CPU: SpareMemory.PASSED_CPU,
    Quantity.PASSED_DEVICE: SpareMemory.PASSED_DEVICE,
    Quantity.PASSED_DISK: SpareMemory.PASSED_DISK,
    Quantity.GATHERED: SpareMemory.GATHERED,
}
LANES: Mapping[str, tuple[Work, Mapping[_For, tuple[Quantity, ...]]]] = {
    "h2d": (
        Work.H2D,
        {
            _For.UPDATE: (Quantity.FRESH,),
            _For.PASS: (Quantity.PASSED_CPU, Quantity.PASSED_DEVICE),
            _For.SWAP: (Quantity.SWAPPED,),
            _For.REST: (Quantity.STATE_UP,),
        },
    ),
    "d2h": (Work.D2H, {_For.UPDATE: (Quantity.GRADIENTS,), _For.SWAP: (Quantity.SWAPPED,), _For.REST: (Quantity.STATE_DOWN,)}),
    "cpu": (Work.CPU_UPDATE, {_For.UPDATE: (Quantity.CPU_UPDATE,)}),
    "disk_read": (
        Work.DISK_READ,
        {_For.UPDATE: (Quantity.STATE_READ,), _For.PASS: (Quantity.PASSED_DISK,), _For.SWAP: (Quantity.SWAPPED_DISK,)},
    ),
    "disk_write": (Work.DISK_WRITE, {_For.SWAP: (Quantity.SWAPPED_DISK,), _For.REST: (Quantity.STORED,)}),
    "net": (Work.COLLECTIVE, {_For.UPDATE: (Quantity.RENEWED, Quantity.REDUCED), _For.PASS: (Quantity.GATHERED,)}),
    "peer": (
        Work.PEER,
        {_For.UPDATE: (Quantity.FRESH, Quantity.REDUCED), _For.PASS: (Quantity.PASSED_CPU, Quantity.PASSED_DEVICE)},
    ),
}
_EXCHANGES = (Work.COLLECTIVE, Work.PEER)
# What crosses the links of devices to the host in slices, where devices exchange the rest.
_IN_SLICES = (Quantity.FRESH, Quantity.PASSED_CPU, Quantity.PASSED_DEVICE, Quantity.GRADIENTS)
_WORKS = {lane: (work,) for lane, (work, _) in LANES.items()} | {"disk": (Work.DISK_READ, Work.DISK_WRITE)}


def _traffic(hardware: HardwareProfile) -> dict[str, dict[_For, _Seconds]]:
    """Seconds per byte on each resource. Host memory, and a simplex disk, serve several lanes."""
    rates = Rates(hardware)
    result: dict[str, dict[_For, _Seconds]] = {}
    dram: dict[_For, _Seconds] = {kind: {} for kind in _For}
    on_devices = hardware.gathers_on_devices and hardware.ranks > 1
    for lane, (work, table) in LANES.items():
        if work in _EXCHANGES and (hardware.ranks == 1 or on_devices is not (work is Work.PEER)):
            continue
        share = 1 - 1 / hardware.ranks if work in _EXCHANGES else 1.0  # a rank keeps its own part

        def units(use: Quantity, share: float = share, work: Work = work) -> float:
            return 1 / hardware.ranks if on_devices and work not in _EXCHANGES and use in _IN_SLICES else share

        result[lane] = {kind: {use: units(use) * unit_s(rates, work) for use in table.get(kind, ())} for kind in _For}
        for kind, members in table.items():
            for use in members if work not in _EXCHANGES else ():
                dram[kind][use] = dram[kind].get(use, 0.0) + units(use) / hardware.host_dram_bytes_per_s
    if not hardware.disk_duplex:
        read, write = result["disk_read"], result["disk_write"]
        result["disk"] = {kind: _total(read[kind], write[kind]) for kind in _For}
    return result | {"dram": dram}


def unit_s(rates: Rates, work: Work) -> float:
    """Seconds of one unit of work alone; 0 if the machine cannot do it."""
    try:
        return rates.alone_s(work, 1.0)
    except RateError:
        return 0.0


def _total(*tables: Mapping[_Key, float]) -> dict[_Key, float]:
    total: dict[_Key, float] = {}
    for table in tables:
        for key, seconds in table.items():
            total[key] = total.get(key, 0.0) + seconds
    return total


def _times(factor: float, table: Mapping[_Key, float]) -> dict[_Key, float]:
    return {key: factor * seconds for key, seconds in table.items()} if factor else {}


def rows(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    micro_batches: int = 1,
    staging_bytes: int = 0,
    updates: Updates = Updates.IN_BACKWARD,
) -> tuple[BoundRow, ...]:
    """All lower bounds; see [Note: Bound].

    Args:
        model: The model.
        hardware: The machine.
        micro_batches: Forwards and backwards of one step.
        staging_bytes: The most host memory through which state on disk may stream: so much of it is
            read before it is needed.
        updates: When updates may run.
    """
    traffic, m = _traffic(hardware), micro_batches
    on_device = {Quantity.DEVICE_UPDATE: unit_s(Rates(hardware), Work.DEVICE_UPDATE)}
    compute = BoundRow(resource="compute", always={Quantity.COMPUTE_S: 1.0, **on_device}, whole=True)
    found = [compute]
    update = _total(*(traffic[lane][_For.UPDATE] for lane in ("d2h", "cpu", "h2d")))
    swap = _times(m, _total(traffic["d2h"][_For.SWAP], traffic["h2d"][_For.SWAP]))
    found.append(BoundRow(resource="update", early={Quantity.COMPUTE_S: (m - 1) / m}, late={Quantity.COMPUTE_S: 1.0}, here=update))
    found.append(BoundRow(resource="swap", early={Quantity.COMPUTE_S: 1.0}, here=_total({Quantity.COMPUTE_S: 1.0}, swap)))
    for name, kinds in traffic.items():
        whole = _whole(name, kinds, m)
        found.append(whole)
        found += _updates(name, kinds[_For.UPDATE], m, staging_bytes, updates)
        swaps, passes = _times(m, kinds[_For.SWAP]), _times(2 * m, kinds[_For.PASS])
        before = {Quantity.COMPUTE_S: 1.0, **on_device}
        if swaps:
            found.append(BoundRow(resource=name, early=before, late=swaps))
        if passes:
            found.append(BoundRow(resource=name, early=before, late=_total(swaps, passes), rooms=_cached(passes)))
        found += _contended(compute, whole, hardware)
    return (*found, *_phases(traffic, model, m, staging_bytes))


def _updates(name: str, work: _Seconds, m: int, staging_bytes: int, updates: Updates) -> Iterator[BoundRow]:
    """The least update work of a resource from the late blocks' backward to their next forward."""
    early, ahead_s = _total({Quantity.COMPUTE_S: (m - 1) / m}, work), staging_bytes * work.get(Quantity.STATE_READ, 0.0)
    late = {Quantity.COMPUTE_S: 1.0}
    yield BoundRow(resource=name, late=late, early=early, constant_s=-ahead_s)
    if work:
        yield BoundRow(resource=name, late=late, early=early, here=work, constant_s=-ahead_s)
    after: _Seconds = {use: seconds for use, seconds in work.items() if use not in _PER_BACKWARD}
    if after and updates is Updates.AFTER_VERDICT:
        early = _total({Quantity.FORWARD_S: -1.0}, after)
        yield BoundRow(resource=name, always=late, early=early, constant_s=-ahead_s)
        yield BoundRow(resource=name, always=late, early=early, here=after, constant_s=-ahead_s)


def _whole(name: str, kinds: Mapping[_For, _Seconds], m: int) -> BoundRow:
    """All that passes a resource in a step."""
    # A pass whose weights the CPU has just made is not spared by a cache: FRESH counts it.
    passes = {use: seconds * (2 * m - (use in _RENEWED)) for use, seconds in kinds[_For.PASS].items()}
    always = _total(kinds[_For.UPDATE], kinds[_For.REST], _times(m, kinds[_For.SWAP]), passes)
    always |= {use: always[use] * m for use in _PER_BACKWARD if use in always}
    return BoundRow(resource=name, always=always, rooms=_cached(passes), whole=True)


_RENEWED = (Quantity.PASSED_CPU, Quantity.GATHERED)
_PER_BACKWARD = (Quantity.GRADIENTS, Quantity.REDUCED)


def _cached(passes: Mapping[Quantity, float]) -> dict[SpareMemory, float]:
    return {SPARE_FOR[use]: -seconds for use, seconds in passes.items()}


def _phases(traffic: Mapping[str, Mapping[_For, _Seconds]], model: ModelProfile, m: int, staging_bytes: int) -> Iterator[BoundRow]:
    """Bounds of forward and of the rest. All but the last of several backwards count as forward."""
    forward_s = sum(b.forward_s for b in model.blocks)
    first = [BoundRow(resource="compute", always={Quantity.COMPUTE_S: (m - 1) / m}, constant_s=forward_s)]
    second = [BoundRow(resource="compute", always={Quantity.COMPUTE_S: 1 / m}, constant_s=-forward_s)]
    for name, kinds in traffic.items():
        passes = _times(2 * m - 1, kinds[_For.PASS])
        if passes:
            cached = _cached(passes)
            for room in {SpareMemory.PASSED_CPU, SpareMemory.GATHERED} & cached.keys():  # the first forward's pass is never spared
                cached[room] *= (2 * m - 2) / (2 * m - 1)
            first.append(BoundRow(resource=name, always=passes, rooms=cached))
        if name != "dram":
            second.append(_after_forward(name, kinds, model, staging_bytes))
    for a, b in product(first, second):
        yield BoundRow(
            resource=b.resource if a.resource == "compute" else a.resource,
            always=_total(a.always, b.always),
            rooms=_total(a.rooms, b.rooms),
            constant_s=a.constant_s + b.constant_s,
        )


def _after_forward(name: str, kinds: Mapping[_For, _Seconds], model: ModelProfile, staging_bytes: int) -> BoundRow:
    """What passes a resource during the last backward, at least.

    Of updates all but those whose gradients are waiting then: in host memory, and those of two
    blocks on the device (``lowering.needs.DEVICE_GRADIENTS``).
    """
    trained = [(b, model.gradient_bytes(b)) for b in model.blocks if b.num_trainable_params]
    per_gradient: _Seconds = {
        Quantity.GRADIENTS: 0.0,
        Quantity.CPU_UPDATE: max((cpu_update_bytes(b.num_trainable_params) / size for b, size in trained), default=0.0),
        Quantity.STATE_READ: max((model.state_bytes(b) / size for b, size in trained), default=0.0),
        Quantity.STORED: max(((model.weight_bytes(b) + model.state_bytes(b)) / size for b, size in trained), default=0.0),
    }
    work = {use: seconds for use, seconds in _total(kinds[_For.UPDATE], kinds[_For.REST]).items() if use in per_gradient}
    waiting_s = sum(seconds * per_gradient[use] for use, seconds in work.items())
    on_device = DEVICE_GRADIENTS * max((size for _, size in trained), default=0)
    left_s = on_device * (waiting_s + work.get(Quantity.GRADIENTS, 0.0))
    staged_s = staging_bytes * max((s for u, s in work.items() if u in (Quantity.STATE_READ, Quantity.STORED)), default=0.0)
    passes = kinds[_For.PASS]
    rooms = _total({SpareMemory.WAITING: -waiting_s}, _cached(passes))
    return BoundRow(resource=name, always=_total(work, passes), rooms=rooms, constant_s=-left_s - staged_s)


def _contended(compute: BoundRow, other: BoundRow, hardware: HardwareProfile) -> Iterator[BoundRow]:
    """Compute and other work that slow each other, ``a`` and ``b`` times.

    In ``t`` seconds together they do ``t/a`` and ``t/b`` seconds' worth, of which there is ``C``
    and ``U``, so that ``T >= C + U - t (1/a + 1/b - 1)`` with ``t <= a C`` and ``t <= b U``.
    """
    rates = Rates(hardware)
    works = [work for work in _WORKS.get(other.resource, ()) if unit_s(rates, work)]
    if not works:
        return
    a = max(rates.slowdown(Work.COMPUTE, work) for work in works)
    b = min(rates.slowdown(work, Work.COMPUTE) for work in works)
    if a * b == 1.0:
        return
    alone = BoundRow(resource="compute", always={Quantity.COMPUTE_S: 1.0}) if hardware.shared_memory else compute
    for row, spared, factor in ((other, alone, a * (1 - 1 / b)), (alone, other, b * (1 - 1 / a))):
        if 1 / a + 1 / b < 1:
            factor = 1.0  # together they are slower than one after the other
        always = _total(row.always, _times(factor, spared.always))
        rooms = {**row.rooms, **_times(factor, spared.rooms)}
        yield BoundRow(resource=f"{alone.resource}|{other.resource}", always=always, rooms=rooms)


class Matrices:
    """The rows as matrices, for plans and for the programme.

    Args:
        found: The rows.
    """

    def __init__(self, found: Sequence[BoundRow]) -> None:
        self.rows = tuple(found)
        tables = ("always", "early", "late", "here")
        self.always, self.early, self.late, self.here = (_matrix([getattr(r, table) for r in found], Quantity) for table in tables)
        self.rooms = _matrix([r.rooms for r in found], SpareMemory)
        self.constant_s = np.array([r.constant_s for r in found])
        self.uncut = np.array([not (r.early or r.late or r.here) for r in found])
        self.single = np.array([bool(r.here) for r in found])

    def largest(self, taken: Vector, rooms: Vector) -> Vector:
        """The bounds of plans, seconds.

        Args:
            taken: What each block takes: plans x blocks x :class:`Quantity`.
            rooms: Bytes: plans x :class:`SpareMemory`.
        """
        total = taken.sum(axis=1)
        before, cut = np.zeros_like(total), np.full((len(taken), len(self.rows)), -np.inf)
        for place in range(taken.shape[1]):
            here = taken[:, place]
            cut = np.maximum(cut, before @ self.early.T + (total - before) @ self.late.T + here @ self.here.T)
            before = before + here
        seconds = total @ self.always.T + rooms @ self.rooms.T + self.constant_s + cut
        found: Vector = seconds.max(axis=1)
        return found


def _matrix(tables: Sequence[Mapping[Any, float]], columns: type[IntEnum]) -> Vector:
    matrix = np.zeros((len(tables), len(columns)))
    for index, table in enumerate(tables):
        for column, value in table.items():
            matrix[index, column] = value
    return matrix
