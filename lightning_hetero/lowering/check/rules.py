"""The rules for each kind of machine: the device is the host, or has memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_hetero.ir.schedule import Anchor, Lane, Op, OpKind, Payload
from lightning_hetero.lowering.check import collectives, commit, gradients, residency, structure, swaps, updates
from lightning_hetero.lowering.check.history import History

What = tuple[OpKind, Payload, Lane]
OpRule = Callable[[History, Op, Anchor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of a kind of machine, in the order in which they are applied.

    Attributes:
        begin: Before the first op.
        ops: For each kind of op that the machine runs; it runs no other.
        anchors: For each anchor that computes, once it has waited for its ops.
        end: After the last op.
    """

    begin: tuple[Callable[[History], None], ...]
    ops: Mapping[What, tuple[OpRule, ...]]
    anchors: tuple[Callable[[History, int, Anchor], None], ...]
    end: tuple[Callable[[History], None], ...]


_WEIGHTS, _STATE = Payload.WEIGHTS, Payload.STATE

HOST = Rules(
    begin=(residency.host_begins, structure.first_anchor),
    ops={
        (OpKind.FETCH, _WEIGHTS, Lane.DISK_READ): (residency.fetch,),
        (OpKind.FETCH, _STATE, Lane.DISK_READ): (updates.open_state,),
        (OpKind.RELEASE, _WEIGHTS, Lane.DISK_READ): (residency.release, residency.release_unused),
        (OpKind.UPDATE, _STATE, Lane.CPU): (updates.update,),
        (OpKind.UPDATE, _STATE, Lane.COMPUTE): (updates.update,),
        (OpKind.STORE, _WEIGHTS, Lane.DISK_WRITE): (commit.store,),
        (OpKind.STORE, _STATE, Lane.DISK_WRITE): (commit.store,),
        (OpKind.MIRROR, _WEIGHTS, Lane.DISK_WRITE): (commit.mirror,),
        (OpKind.MIRROR, _STATE, Lane.DISK_WRITE): (commit.mirror,),
        (OpKind.COMMIT, Payload.NONE, Lane.DISK_WRITE): (commit.commit,),
    },
    anchors=(residency.host_anchor_begins, gradients.host_anchor_begins),
    end=(updates.ends, commit.ends, residency.host_ends),
)

_BYTES = structure.moves_its_payload
_UPDATE = (updates.update, gradients.update_follows, residency.update_of_copy, updates.is_there, _BYTES)

DEVICE = Rules(
    begin=(*HOST.begin, residency.device_begins),
    ops={
        (OpKind.FETCH, _WEIGHTS, Lane.DISK_READ): (residency.fetch, _BYTES),
        (OpKind.FETCH, _STATE, Lane.DISK_READ): (updates.open_state, _BYTES),
        (OpKind.RELEASE, _WEIGHTS, Lane.DISK_READ): (residency.release, _BYTES),
        (OpKind.UPLOAD, _WEIGHTS, Lane.H2D): (residency.upload, _BYTES),
        (OpKind.RELEASE, _WEIGHTS, Lane.H2D): (residency.device_release, _BYTES),
        (OpKind.GRAD, Payload.GRADIENTS, Lane.D2H): (gradients.grad, _BYTES),
        (OpKind.UPDATE, _STATE, Lane.CPU): _UPDATE,
        (OpKind.UPDATE, _STATE, Lane.COMPUTE): _UPDATE,
        (OpKind.SWAP_IN, _STATE, Lane.H2D): (updates.state_goes_up, _BYTES),
        (OpKind.SWAP_OUT, _STATE, Lane.D2H): (updates.goes_back, _BYTES),
        (OpKind.SWAP_OUT, _WEIGHTS, Lane.D2H): (updates.goes_back, _BYTES),
        (OpKind.STORE, _WEIGHTS, Lane.DISK_WRITE): (commit.store, _BYTES),
        (OpKind.STORE, _STATE, Lane.DISK_WRITE): (commit.store, _BYTES),
        (OpKind.MIRROR, _WEIGHTS, Lane.D2H): (commit.mirror_leaves_device,),
        (OpKind.MIRROR, _STATE, Lane.D2H): (commit.mirror_leaves_device,),
        (OpKind.MIRROR, _WEIGHTS, Lane.DISK_WRITE): (commit.mirror,),
        (OpKind.MIRROR, _STATE, Lane.DISK_WRITE): (commit.mirror,),
        (OpKind.COMMIT, Payload.NONE, Lane.DISK_WRITE): (commit.commit,),
        **{(kind, Payload.ACTIVATIONS, lane): (swaps.hop,) for kind in (OpKind.SWAP_OUT, OpKind.SWAP_IN) for lane in Lane},
    },
    anchors=(residency.device_anchor_begins, gradients.device_anchor_begins, swaps.anchor_begins),
    end=(*HOST.end, gradients.device_ends, updates.all_gone_back, residency.device_ends, swaps.all_back),
)

_SHARED: Mapping[What, tuple[OpRule, ...]] = {  # of ranks that share a model
    (OpKind.UPDATE, _STATE, Lane.CPU): (*_UPDATE, collectives.verdict),
    (OpKind.COMMIT, Payload.NONE, Lane.DISK_WRITE): (commit.commit, collectives.verdict),
}
_OF_DEVICES: Mapping[What, tuple[OpRule, ...]] = {  # of ranks whose devices have memory of their own
    **DEVICE.ops,
    (OpKind.UPDATE, _STATE, Lane.COMPUTE): (*_UPDATE, collectives.verdict),
    (OpKind.SWAP_IN, Payload.GRADIENTS, Lane.H2D): (updates.slices_go_up, _BYTES),
    **_SHARED,
}

RANKS = Rules(
    begin=DEVICE.begin,
    ops={
        **{what: rules for what, rules in DEVICE.ops.items() if what in HOST.ops and what[2] is not Lane.COMPUTE},
        (OpKind.GATHER, _WEIGHTS, Lane.NET): (residency.upload, _BYTES),
        (OpKind.RELEASE, _WEIGHTS, Lane.NET): (residency.device_release, _BYTES),
        (OpKind.REDUCE, Payload.GRADIENTS, Lane.NET): (gradients.grad, _BYTES),
        (OpKind.AGREE, Payload.NONE, Lane.NET): (collectives.agree,),
        **_SHARED,
    },
    anchors=(residency.device_anchor_begins, gradients.device_anchor_begins),
    end=(*HOST.end, gradients.device_ends, residency.device_ends),
)
"""Of ranks whose devices are the host's own CPU."""

DEVICES = Rules(
    begin=DEVICE.begin,
    ops={
        **_OF_DEVICES,
        (OpKind.GATHER, _WEIGHTS, Lane.NET): (residency.gather, _BYTES),
        (OpKind.UPLOAD, _WEIGHTS, Lane.H2D): (residency.upload, residency.upload_whole, _BYTES),
        (OpKind.RELEASE, _WEIGHTS, Lane.NET): (residency.leave, _BYTES),
        (OpKind.RELEASE, _WEIGHTS, Lane.DISK_READ): (residency.release, residency.release_shared, _BYTES),
        (OpKind.REDUCE, Payload.GRADIENTS, Lane.NET): (gradients.reduce, _BYTES),
        (OpKind.AGREE, Payload.NONE, Lane.NET): (collectives.agree,),
    },
    anchors=DEVICE.anchors,
    end=DEVICE.end,
)
"""Of ranks whose devices have memory of their own."""

PEERS = Rules(
    begin=DEVICE.begin,
    ops={
        **_OF_DEVICES,
        (OpKind.UPLOAD, _WEIGHTS, Lane.H2D): (residency.upload_slice, _BYTES),
        (OpKind.GATHER, _WEIGHTS, Lane.PEER): (residency.gather_uploaded, _BYTES),
        (OpKind.REDUCE, Payload.GRADIENTS, Lane.PEER): (gradients.reduce_there, _BYTES),
        (OpKind.GRAD, Payload.GRADIENTS, Lane.D2H): (gradients.slice_leaves, _BYTES),
        (OpKind.AGREE, Payload.NONE, Lane.PEER): (collectives.agree,),
    },
    anchors=DEVICE.anchors,
    end=DEVICE.end,
)
"""Of ranks whose devices exchange weights and gradients themselves."""
