"""The time of a step of pipelines, with its schedule simulated micro-batch by micro-batch.

[Note: Equation 1 and the schedule]
Equation 1 counts the slowest stage for every micro-batch and all other stages once. That is exact
if no stage overlaps with the slowest one's first or last micro-batch. Otherwise it is too long,
because a slow early stage continues with its next micro-batch while later ones compute. The search
uses equation 1, as the paper does: it is cheap, and monotone in every stage's time. The printed
prediction should equal the measurement, so it is simulated here.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.ir.cluster_plan import ClusterPlan

_FORWARD = 1 / 3  # of a stage's time for a micro-batch: backward takes twice as long as forward


def step_s(plan: ClusterPlan) -> float:
    """Seconds of one step: the slowest pipeline under 1F1B, and synchronisation.

    At most ``plan.iteration_s``.
    """
    groups = (([s.micro_batch_s for s in group.stages], group.micro_batches) for group in plan.groups)
    return max(one_f_one_b_s(stages_s, count) for stages_s, count in groups) + plan.sync_s


def one_f_one_b_s(stages_s: Sequence[float], micro_batches: int) -> float:
    """Seconds from the first forward to the last backward of one pipeline.

    Stage s of S does S - s forwards, then one backward and one forward in turns, then the remaining
    backwards. Each waits for the previous one on its stage; a forward also waits for the previous
    stage, a backward for the next stage. The order is that of
    ``torch.distributed.pipelining.Schedule1F1B``. Source: PipeDream-Flush (Narayanan et al. 2021,
    section 3.2).

    Args:
        stages_s: Forward and backward of one micro-batch on each stage, seconds.
        micro_batches: K.
    """
    depth = len(stages_s)
    ended: dict[tuple[bool, int, int], float] = {}  # keys: is a backward, stage, micro-batch
    left = [iter(_order(depth - s, micro_batches)) for s in range(depth)]
    heads = [next(ops) for ops in left]
    free = [0.0] * depth
    waiting = set(range(depth))
    while waiting:
        for s in sorted(waiting):
            while s in waiting:
                backward, k = heads[s]
                before = (backward, s + 1 if backward else s - 1, k)
                if 0 <= before[1] < depth and before not in ended:
                    break
                share = 1 - _FORWARD if backward else _FORWARD
                free[s] = ended[backward, s, k] = max(free[s], ended.get(before, 0.0)) + share * stages_s[s]
                if (head := next(left[s], None)) is None:
                    waiting.discard(s)
                else:
                    heads[s] = head
    return max(free)


def _order(ahead: int, micro_batches: int) -> list[tuple[bool, int]]:
    """The work of a stage as (is a backward, micro-batch); forwards are ``ahead`` of backwards."""
    ahead = min(ahead, micro_batches)
    ops = [(False, k) for k in range(ahead)]
    for k in range(micro_batches):
        ops.append((True, k))
        if ahead + k < micro_batches:
            ops.append((False, ahead + k))
    return ops
