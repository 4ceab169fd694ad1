"""Checks the invariants of any schedule, lowered or edited by hand, before anything runs."""

from __future__ import annotations

from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Op, Phase, Schedule
from lightning_hetero.lowering.check import structure
from lightning_hetero.lowering.check.collectives import same_order
from lightning_hetero.lowering.check.history import History
from lightning_hetero.lowering.check.rules import DEVICE, DEVICES, HOST, PEERS, RANKS

__all__ = ["check", "same_order"]


def check(
    schedule: Schedule,
    plan: Plan,
    model: ModelShape,
    *,
    capacity_bytes: int,
    device_capacity_bytes: int | None = None,
) -> None:
    """Proves that a schedule is safe to run, or names the first broken rule.

    - *acyclic*: Ids count from 0. Edges lead to earlier ids. Anchors exist and issue ops in order.
    - *resident*: Weights that live on disk are in memory, and compute has waited for them, when a
      forward or backward begins. Weights in use are not released, nor weights with an open update.
    - *capacity*: Weights from disk never take more than ``capacity_bytes``. A FETCH waits for every
      RELEASE before it.
    - *order*: Ops on the same bytes run one after the other, within a step and across steps
      (``lowering.chains``).
    - *update*: Each trainable block is updated once, after its last backward, when the plan says,
      if the signature has updates.
    - *gradients*: At most ``plan.gradient_depth`` blocks wait for their update, unless all wait for
      the verdict.
    - *commit*: One COMMIT comes last, after the verdict, every STORE and every MIRROR. Each STORE
      and MIRROR waits for the COMMIT of the step before.

    If a step speculates ([Note: Speculation] in ``ir.schedule``):

    - *update*: Only blocks whose update can be revoked are updated before the verdict. If the
      verdict discards these updates, each is repeated once, with state that was read again.
    - *resident*: No op fetches or uploads weights that have no verdict, or that were discarded. A
      repeated update finds the old weights.

    On a device with memory of its own:

    - *resident*: The device holds a block's newest weights when its forward or backward begins.
    - *capacity*: Weights from below never take more than ``device_capacity_bytes``. State that
      comes for an update replaces state that has left.
    - *order*: An UPDATE on the CPU follows GRAD. An UPLOAD follows the UPDATE that makes the
      weights. Updated state and weights that live on the host go back there.
    - *gradients*: Gradients of at most two blocks for the CPU are on the device.
    - *activations*: Swapped activations leave, come back over the same hops, and compute has waited
      for them when their backward begins. Their memory on the way is bounded
      (``activation_moves.py``).

    Where several ranks share the model ([Note: Ranks] in ``ir.schedule``), whole weights take the
    place of the device's copies, GATHER that of UPLOAD, and REDUCE that of GRAD. So whole weights
    are gathered before their use and released once, and gradients are reduced once, after the last
    backward and before the UPDATE. And:

    - *commit*: STORE, its UPDATE, and MIRROR wait for an AGREE that follows the COMMIT of the step
      before.
    - *collectives*: Where updates wait for all gradients, an AGREE makes the verdict one. Across
      ranks: :func:`same_order`.

    If their devices have memory of their own, both hold: a GATHER comes before each UPLOAD, and a
    REDUCE after each GRAD.

    - *gradients*: Whole gradients of at most ``plan.gradient_depth`` blocks are on the host.

    Or such devices exchange themselves (``plan.gather``): a GATHER comes after each UPLOAD, and a
    REDUCE before each GRAD. UPLOAD and GRAD move slices.

    - *gradients*: Slices of sums of at most two blocks are on the device.
    - *collectives*: All of them are on lane ``peer``.

    Args:
        schedule: The schedule of one step.
        plan: The resolved plan it was lowered from.
        model: The blocks' sizes.
        capacity_bytes: Host bytes for weights that live on disk.
        device_capacity_bytes: Device bytes for weights that live below the device; ``None``: the
            device is the host's own CPU. On several ranks: bytes for whole weights.

    Raises:
        ScheduleError: The first broken invariant, with op, block, rule and the ops around it.
    """
    alone = HOST if device_capacity_bytes is None else DEVICE
    history = History(schedule, plan, model, capacity_bytes, device_capacity_bytes)
    together = RANKS if schedule.shared_memory else PEERS if history.on_devices else DEVICES
    rules = alone if schedule.ranks == 1 else together
    structure.anchors(history)
    structure.edges(history)
    for begin in rules.begin:
        begin(history)
    issued: dict[int, list[Op]] = {}
    for op in schedule.ops:
        issued.setdefault(op.at, []).append(op)
    for index, anchor in enumerate(schedule.anchors):
        for op in issued.get(index, []):
            structure.chain(history, op)
            op_rules = rules.ops.get((op.kind, op.payload, op.lane))
            if op_rules is None:
                what = f"{op.kind.value} {op.payload.value} on lane {op.lane.value!r}"
                history.fail("order", op, op.block, f"is a kind of op that this machine does not run: {what}")
            for rule in op_rules:
                rule(history, op, anchor)
            history.record(op)
        history.wait(anchor)
        if anchor.phase is not Phase.VERDICT:
            for anchor_rule in rules.anchors:
                anchor_rule(history, index, anchor)
    for end in rules.end:
        end(history)
