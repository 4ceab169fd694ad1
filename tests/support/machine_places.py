"""The places that ops and anchors read and write on a machine; see ``support.machine``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_hetero.ir.plan import Tier
from lightning_hetero.ir.schedule import NO_BLOCK, Anchor, Lane, Op, OpKind, Payload, Phase

if TYPE_CHECKING:
    from support.machine import Machine

Place = tuple[object, ...]


@dataclass
class Run:
    """One op or anchor of one schedule on its way."""

    schedule: int
    op: Op | None
    anchor: Anchor | None
    use: int = -1
    tried: bool = False  # before the verdict
    waits: list[Run] = field(default_factory=list)
    reads: list[Place] = field(default_factory=list)
    writes: list[Place] = field(default_factory=list)
    started: bool = False
    ended: bool = False

    def __str__(self) -> str:
        return f"schedule {self.schedule} {self.op or self.anchor}"


def find_places(machine: Machine, run: Run) -> None:
    """Which places a run reads and writes; both must be there."""
    if run.anchor is not None:
        if run.anchor.phase is Phase.VERDICT:
            return
        b = run.anchor.block
        run.reads = [("weights", "device", b)]
        act = ("activations", "device", run.schedule, run.use)
        run.writes = [act] if machine.swaps(run) else []
        if run.anchor.phase is Phase.BACKWARD:
            run.writes.append(("gradients", "device", b))
        return
    assert run.op is not None
    b, u, p = run.op.block, (run.schedule, run.use), machine.placed[run.op.block] if run.op.block != NO_BLOCK else None
    weights, state, gradients, act = (
        {t: (what, t, b) for t in ("device", "slice", "whole", "host", "file", "staging")}
        for what in ("weights", "state", "gradients", "-")
    )
    act, slices = {t: ("activations", t, *u) for t in ("device", "host", "file")}, ("slices", "device", b)
    match run.op.kind, run.op.payload, run.op.lane:
        case OpKind.FETCH, Payload.WEIGHTS, _:
            run.reads, run.writes = [weights["file"]], [weights["host"]]
        case OpKind.FETCH, Payload.STATE, _:
            run.reads, run.writes = [state["file"]], [state["staging"]]
        case OpKind.UPLOAD, _, _ if machine.on_devices:
            run.reads, run.writes = [weights["host"]], [weights["slice"]]
        case OpKind.GATHER, _, _ if machine.on_devices:
            run.writes = [weights["slice"], weights["device"]]
        case OpKind.GATHER, _, _ if machine.has_hops:
            run.reads, run.writes = [weights["host"]], [weights["whole"]]
        case ((OpKind.UPLOAD | OpKind.GATHER), _, _):
            run.reads, run.writes = [weights[machine.between]], [weights["device"]]
        case OpKind.RELEASE, _, Lane.NET if machine.has_hops:
            run.writes = [weights["whole"]]
        case OpKind.RELEASE, _, Lane.H2D | Lane.NET:
            run.writes = [weights["device"]]
        case OpKind.RELEASE, _, _:
            run.writes = [weights["host"]]
        case OpKind.REDUCE, _, _ if machine.on_devices:
            run.writes = [gradients["device"], gradients["slice"]]
        case OpKind.GRAD, _, _ if machine.on_devices:
            run.writes = [gradients["slice"], gradients["host"]]
        case OpKind.REDUCE, _, _ if machine.has_hops:
            run.writes = [gradients["whole"], gradients["host"]]
        case ((OpKind.GRAD | OpKind.REDUCE), _, _):
            run.writes = [gradients["device"], gradients[machine.between]]
        case OpKind.UPDATE, _, Lane.CPU:
            assert p is not None
            run.writes = [gradients["host"], state["staging" if p.plan.state is Tier.DISK else "host"], weights["staging"]]
            run.writes += [weights["host"]] if weights["host"] in machine.value else []
            run.writes += [weights["whole"]] if machine.has_hops else []
        case OpKind.UPDATE, _, _ if p is not None and p.slices_move:
            run.writes = [gradients["host"], state["device"], slices]
        case OpKind.UPDATE, _, _:
            run.writes = [gradients["device"], state["device"], weights["device"]]
        case OpKind.STORE, _, _:
            run.reads = [weights["staging"], state["staging"]]
            run.reads += [weights["host"]] if weights["host"] in machine.value else []
            run.writes = [weights["file"], state["file"]]
        case OpKind.SWAP_IN, Payload.STATE, _:
            run.reads, run.writes = [state["host"]], [state["device"]]
        case OpKind.SWAP_OUT, Payload.STATE, _:
            run.writes = [state["device"], state["host"]]
        case OpKind.SWAP_IN, Payload.GRADIENTS, _:
            run.reads, run.writes = [weights["host"], gradients["host"]], [slices]
        case OpKind.SWAP_OUT, Payload.WEIGHTS, _ if p is not None and p.slices_move:
            run.writes = [slices, weights["host"], weights["whole"]]
        case OpKind.SWAP_OUT, Payload.WEIGHTS, _:
            run.reads, run.writes = [weights["device"]], [weights["host"]]
        case OpKind.SWAP_OUT, Payload.ACTIVATIONS, Lane.D2H:
            run.writes = [act["device"], act["host"]]
        case OpKind.SWAP_OUT, Payload.ACTIVATIONS, _:
            run.writes = [act["host"], act["file"]]
        case OpKind.SWAP_IN, Payload.ACTIVATIONS, Lane.DISK_READ:
            run.writes = [act["file"], act["host"]]
        case OpKind.SWAP_IN, Payload.ACTIVATIONS, _:
            run.writes = [act["host"], act["device"]]
