"""The invariants that every schedule keeps, whoever wrote it: proved on the data, before anything runs."""

from __future__ import annotations

from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Op, Phase, Schedule
from lightning_hetero.lowering.check import structure
from lightning_hetero.lowering.check.history import History
from lightning_hetero.lowering.check.rules import DEVICE, HOST


def check(
    schedule: Schedule,
    plan: Plan,
    model: ModelShape,
    *,
    capacity_bytes: int,
    device_capacity_bytes: int | None = None,
) -> None:
    """Proves that a schedule is safe to run, or says what is not.

    - *acyclic*: ids count from 0, edges lead to earlier ids, ops are issued in order by anchors that exist.
    - *resident*: weights that live on disk are in memory, and have been waited for, when a forward or backward begins;
      what is in use, or opened and not yet updated, is not released.
    - *capacity*: they never take more than ``capacity_bytes``, and no FETCH takes over memory before it is given back.
    - *order*: ops of one block are chained, within a step and across steps (state FETCH, UPDATE, STORE, MIRROR; carried STORE,
      UPDATE, MIRROR).
    - *update*: each trainable block is updated once, after its last backward, exactly if the signature has updates, and when the
      plan says.
    - *gradients*: no more blocks than ``plan.gradient_depth`` wait for their update, unless all gradients wait for the verdict.
    - *commit*: one COMMIT, last, after the verdict, every STORE and MIRROR; each of these follows the COMMIT of the step before.

    Of a step that speculates ([Note: Speculation] in ``ir.schedule``), moreover:

    - *update*: only blocks that can be taken back are updated before the verdict; where the verdict discards, all of these are
      updated once more, after it, with state that was read after it.
    - *resident*: nobody fetches or uploads weights on which there is no verdict, or that it has discarded; an update that is done
      again finds the old ones.

    For a device with memory of its own, moreover:

    - *resident*: the device holds the weights of a block, as its last update has made them, when its forward or backward begins.
    - *capacity*: those that live below it never take more than ``device_capacity_bytes``; state that comes for an update takes
      the place of no more than one block's on its way back.
    - *order*: each of a block's chains (``lowering.chains``); UPDATE on the CPU follows GRAD, an UPLOAD of weights follows the
      UPDATE that makes them; state and weights that the device has updated go back to the host.
    - *gradients*: no more than two blocks' for the CPU are on the device.
    - *activations*: what a plan swaps leaves, comes back over the same hops, and has been waited for when its backward begins;
      what is on its way keeps to its memory (``activation_moves.py``).

    Args:
        schedule: The schedule of one step.
        plan: The resolved plan it was lowered from.
        model: The blocks' sizes.
        capacity_bytes: Host bytes for weights that live on disk.
        device_capacity_bytes: Device bytes for weights that live below the device; ``None``: the device is the host's own CPU.

    Raises:
        ScheduleError: The first broken invariant, with op, block, rule and the ops around it.
    """
    rules = HOST if device_capacity_bytes is None else DEVICE
    history = History(schedule, plan, model, capacity_bytes, device_capacity_bytes)
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
