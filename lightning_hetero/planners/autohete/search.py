"""AutoHete's search for the three counts of least time, exact or as an integer programme.

Source: "AutoHete: An Automatic and Efficient Heterogeneous Training System for LLMs". The formulas
are in ``formulas.py``. What the paper leaves open is marked [inferred] and discussed in
docs/planners/autohete.md.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from lightning_hetero.planners.autohete.formulas import Costs, Counts, PerBlock, device_bytes, host_bytes, iteration_s

DEEPEST = 1024  # what Plan.prefetch_depth allows


def exact(k: Costs) -> Counts | None:
    """The counts of least T_iter that fit, by an exact search; ``None`` if nothing fits.

    One more checkpointed block never makes a step faster: its recomputation costs ``t_fp``, and
    hides at most as much waiting. So for each ``o`` and ``p`` the fewest checkpointed blocks that
    fit are best, and they become fewer as ``p`` grows: all pairs take time quadratic in L. Of
    equally fast counts the ones that offload least win.
    """
    best: tuple[float, Counts] | None = None
    for o in range(k.least_offloaded, min(k.num_blocks, k.most_offloaded) + 1):
        if host_bytes(k, o) > k.host_memory_bytes:
            break
        c = k.num_blocks
        for p in range(o + 1):
            if device_bytes(k, Counts(checkpoint=c, offload_params=p, offload_optimizer=o)) > k.device_memory_bytes:
                continue
            while c:
                fewer = Counts(checkpoint=c - 1, offload_params=p, offload_optimizer=o)
                if device_bytes(k, fewer) > k.device_memory_bytes:
                    break
                c -= 1
            counts = Counts(checkpoint=c, offload_params=p, offload_optimizer=o)
            seconds = iteration_s(k, counts)
            if best is None or seconds < best[0]:
                best = seconds, counts
    return best[1] if best else None


def relieved(k: Costs, n: Counts) -> Counts:
    """The counts with weights of more blocks offloaded, as long as eq. 6 gives the same time.

    Where weights are offloaded at all, memory that is free on the device serves to prefetch them;
    the formulas see no difference.
    """
    while n.offload_params and n.offload_params < n.offload_optimizer:
        more = replace(n, offload_params=n.offload_params + 1)
        if iteration_s(k, more) > iteration_s(k, n):
            break
        n = more
    return n


def milp(k: Costs) -> Counts | None:
    """The same optimum as an integer programme in cvxpy, solved by HiGHS; ``None`` if nothing fits.

    The paper's switches C, P, O of each block, ordered by insights 1 and 2 and ``P <= O``; its
    counts are their sums. Blocks in both C and P shorten the wait, so that a continuous V below
    both of them takes their product's value.

    Source: section 3.2.1 (switches), eqs. 1 to 6.
    """
    cp: Any = import_module("cvxpy")  # takes a second, and has no types

    blocks = k.num_blocks
    c, p, o = (cp.Variable(blocks, boolean=True) for _ in range(3))
    v, forward, backward = cp.Variable(blocks, nonneg=True), cp.Variable(), cp.Variable()
    # Bytes and seconds in units in which everything is near 1: solvers' tolerances are absolute.
    size, span = float(k.device_memory_bytes), k.forward_s.sum(0, blocks) + k.backward_s.sum(0, blocks)

    def total(column: PerBlock, switches: Any, unit: float) -> Any:
        return cp.sum(cp.multiply([value / unit for value in column.values], switches))

    device = total(k.boundary_bytes, c, size) + total(k.activation_bytes, 1 - c, size) + total(k.weight_bytes, 1 - p, size)
    device += total(k.state_bytes, 1 - o, size)
    slots = k.activation_bytes.largest + k.weight_bytes.largest + k.constant_device_bytes
    sync = total(k.recomputed_stall_s, v, span) + total(k.stall_s, p - v, span)
    computed = total(k.forward_s, c, span) + total(k.device_update_s, 1 - o, span) + sync
    one_block = k.backward_s[blocks - 1] + k.download_s[blocks - 1]
    constraints = [
        p <= o,
        v <= c,
        v <= p,
        device <= (k.device_memory_bytes - slots) / size,
        total(k.weight_bytes, o, size) + total(k.state_bytes, o, size) <= (k.host_memory_bytes - k.constant_host_bytes) / size,
        cp.sum(o) >= k.least_offloaded,
        cp.sum(o) <= min(blocks, k.most_offloaded),
        forward >= k.forward_s.sum(0, blocks) / span,
        forward >= total(k.upload_s, o, span) + k.forward_s[blocks - 1] / span,
        backward >= k.backward_s.sum(0, blocks) / span + computed,
        backward >= one_block / span + total(k.cpu_update_s, o, span),
    ]
    if blocks > 1:
        constraints += [c[:-1] >= c[1:], o[:-1] <= o[1:], p[1:] <= p[:-1] + 1 - o[:-1]]
    problem = cp.Problem(cp.Minimize(forward + backward), constraints)
    problem.solve(solver=cp.HIGHS, mip_rel_gap=1e-9)
    if problem.status != cp.OPTIMAL:
        return None
    checkpoint, offload_params, offload_optimizer = (round(float(x.value.sum())) for x in (c, p, o))
    return Counts(checkpoint=checkpoint, offload_params=offload_params, offload_optimizer=offload_optimizer)


METHODS = {"exact": exact, "milp": milp}


def prefetch_leads(k: Costs, n: Counts) -> tuple[int, ...]:
    """How many blocks ahead backward can launch each prefetch, in the order of backward.

    Memory over backward, as eq. 1 counts it: when a block's backward ends, its activations and its
    offloaded weights are free. Every prefetch starts one block ahead, as eq. 4 has it; then, in the
    order of backward, each is advanced for as long as its weights fit from there on, and never past
    the one before it, since one lane serves them all.

    Source: section 3.2.2, "we will advance a parameter prefetching operation if enough GPU memory
    is available before it".
    """
    last, first = k.num_blocks, k.num_blocks - n.offload_optimizer
    offloaded = range(first + n.offload_params - 1, first - 1, -1)  # in backward order
    fixed = device_bytes(k, n) - int(k.weight_bytes.largest) - _stored_bytes(k, n, last)
    used = [fixed + _stored_bytes(k, n, last - step) for step in range(last)]
    launched = {block: max(last - 2 - block, 0) for block in offloaded}
    for block, step in launched.items():
        for held in range(step, last - block):
            used[held] += int(k.weight_bytes[block])
    earliest = 0
    for block in offloaded:
        while launched[block] > earliest and used[launched[block] - 1] + k.weight_bytes[block] <= k.device_memory_bytes:
            launched[block] -= 1
            used[launched[block]] += int(k.weight_bytes[block])
        earliest = launched[block]
    return tuple(last - 1 - block - launched[block] for block in offloaded)


def _stored_bytes(k: Costs, n: Counts, blocks: int) -> int:
    """Activations that the first ``blocks`` blocks hold between forward and backward, bytes."""
    checkpointed = min(n.checkpoint, blocks)
    return int(k.boundary_bytes.sum(0, checkpointed) + k.activation_bytes.sum(checkpointed, blocks))


def prefetch_depth(k: Costs, n: Counts) -> int:
    """The depth at which every prefetch of backward fits.

    It is the least lead of the prefetches that memory keeps from starting with backward.
    """
    leads = prefetch_leads(k, n)
    top = n.offload_optimizer - n.offload_params  # before the first offloaded one
    limited = [lead for index, lead in enumerate(leads) if lead < top + index]
    return min(DEEPEST, max(1, min(limited, default=max(leads, default=1))))
