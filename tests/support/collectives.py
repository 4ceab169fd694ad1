"""One rank of a test of collectives: a script; see ``tests/integration/test_collectives.py``."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_hetero.clock import now_s
from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.schedule import NO_BLOCK, Lane, Op, OpKind
from lightning_hetero.lanes import EmulatedDevice, EmulatedLanes
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.lanes.mesh import mesh_of
from lightning_hetero.lanes.peers import DeviceLinks

TIMEOUT_S = 20.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def gradients(rank: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Those of one rank, of sizes so different that the order of a sum shows, and that cancel."""
    generator = torch.Generator().manual_seed(7 + rank)
    values = torch.randn(num_elements, generator=generator, dtype=torch.float64)
    scale = torch.randint(-8, 9, (num_elements,), generator=generator).to(torch.float64).exp2()
    return (values * scale * (-1) ** rank).to(dtype)


def gathers(collectives: Collectives) -> None:
    """Whole weights are the slices in the order of the ranks; one may be in its place already."""
    for dtype in DTYPES:
        slices = [gradients(rank, 1003, dtype) for rank in range(collectives.ranks)]
        whole = torch.empty(collectives.ranks * 1003, dtype=dtype)
        collectives.gather(whole, slices[collectives.rank].clone())
        assert torch.equal(whole, torch.cat(slices))
        in_place = torch.zeros_like(whole)
        own = in_place.view(collectives.ranks, -1)[collectives.rank]
        own.copy_(slices[collectives.rank])
        collectives.gather(in_place, own)
        assert torch.equal(in_place, torch.cat(slices))


def reduces(collectives: Collectives) -> None:
    """A slice of the sum has the bits of the float64 sum in the order of the ranks, rounded once,
    also if it is longer than what is summed at a time.
    """
    for dtype, size in [(dtype, size) for dtype in DTYPES for size in (1, 1003, (1 << 18) + 5)]:
        every = [gradients(rank, collectives.ranks * size, dtype) for rank in range(collectives.ranks)]
        mine = every[collectives.rank].clone()
        own = torch.full((size,), torch.nan, dtype=dtype)
        for divisor in (1, collectives.ranks):
            collectives.reduce(own, mine, torch.empty_like(mine), divisor=divisor)
            total = every[0].double()
            for other in every[1:]:
                total = total + other.double()
            assert torch.equal(own, (total / divisor).to(dtype).view(collectives.ranks, -1)[collectives.rank])
        assert torch.equal(mine, every[collectives.rank])


def reduces_over_nodes(collectives: Collectives) -> None:
    """Each rank gets its slice of the same sum, whatever ranks are on a node; slices are gathered
    from its node alone.
    """
    for nodes in [number for number in range(1, collectives.ranks + 1) if not collectives.ranks % number]:
        on_nodes = Collectives(mesh=mesh_of(nodes, timedelta(seconds=TIMEOUT_S)))
        shards, size = on_nodes.shards, nodes * 1003
        assert (on_nodes.node, on_nodes.shard) == divmod(collectives.rank, shards)
        for dtype in DTYPES:
            every = [gradients(rank, shards * size, dtype) for rank in range(collectives.ranks)]
            pieces = every[collectives.rank].view(shards, nodes, -1).transpose(0, 1)  # rank by rank
            mine, own = pieces.reshape(-1), torch.full((size,), torch.nan, dtype=dtype)
            on_nodes.reduce(own, mine, torch.empty_like(mine), divisor=3)
            total = every[0].double()
            for other in every[1:]:
                total = total + other.double()
            mean = (total / 3).to(dtype)
            assert torch.equal(own, mean.view(shards, -1)[on_nodes.shard])
            whole = torch.empty_like(mean)
            on_nodes.gather(whole, own)
            assert torch.equal(whole, mean)
            other = torch.full((9,), float(on_nodes.rank), dtype=dtype)
            on_nodes.like_first_node(other)
            assert (other == on_nodes.shard).all()


def exchanges_between_devices(collectives: Collectives) -> None:
    """Devices make the same of slices and of gradients as the host, also piece by piece through it,
    and what they send takes the time of their links.
    """
    ranks = collectives.ranks
    slow = EmulatedDevice("1MiB", net_latency_s=9.0, peer_bytes_per_s=1e9, peer_latency_s=1e-3)
    for through_host in (False, True):
        links = DeviceLinks(dist.new_group(), slow.peer_links, through_host=through_host)
        between = Collectives(network=slow.network, peers=links)
        for dtype, size in [(dtype, size) for dtype in DTYPES for size in (1, 1003, (1 << 18) + 5)]:
            mine, own, wanted = gradients(between.rank, ranks * size, dtype), *torch.full((2, size), torch.nan, dtype=dtype)
            total, began_s = torch.empty(1 << 16, dtype=torch.float64), now_s()
            between.reduce_on_devices(own, mine, torch.empty_like(mine), total, divisor=3)
            assert 9.0 > now_s() - began_s > 1e-3 + 1e-9 * mine.nbytes * (1 - 1 / ranks)
            collectives.reduce(wanted, mine, torch.empty_like(mine), divisor=3)
            assert torch.equal(own, wanted)
            whole = torch.full_like(mine, torch.nan)
            whole.view(ranks, -1)[between.rank] = own
            between.gather_on_devices(whole, whole.view(ranks, -1)[between.rank])
            collectives.gather(mine, own)
            assert torch.equal(whole, mine)


def agrees(collectives: Collectives) -> None:
    """All ranks know the numbers of all of them, to the last bit."""
    rows = collectives.agree([collectives.rank, 0.1 + collectives.rank])
    assert rows == [[rank, 0.1 + rank] for rank in range(collectives.ranks)]
    assert collectives.agree([]) == [[]] * collectives.ranks


def runs_on_a_lane(collectives: Collectives) -> None:
    """Ops of lane ``net`` meet in the order of submission, however late a rank's others are."""
    lanes = EmulatedLanes(EmulatedDevice(memory="1MiB"), poison=False)
    own, whole = torch.zeros(64), torch.zeros(64 * collectives.ranks)
    seen: list[torch.Tensor] = []
    last = []
    for step in range(5):

        def update(step: int = step) -> None:
            time.sleep(0.01 * ((collectives.rank + step) % 3))
            own.fill_(10 * step + collectives.rank)

        def gather() -> None:
            collectives.gather(whole, own)
            seen.append(whole.clone())

        update_op = lanes.submit(_op(2 * step, OpKind.UPDATE, Lane.CPU), _doing(update), last)
        last = [lanes.submit(_op(2 * step + 1, OpKind.GATHER, Lane.NET), _doing(gather), [update_op])]
    lanes.drain()
    lanes.close()
    expected = [torch.cat([torch.full((64,), 10.0 * step + rank) for rank in range(collectives.ranks)]) for step in range(5)]
    assert all(torch.equal(got, wanted) for got, wanted in zip(seen, expected, strict=True))


def loses_a_rank(collectives: Collectives) -> None:
    """The last rank dies; the others say so, long before the group's timeout has passed twice."""
    if collectives.rank == collectives.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began_s, whole = now_s(), torch.empty(collectives.ranks * 4)
    try:
        while now_s() - began_s < 2 * TIMEOUT_S:
            collectives.gather(whole, torch.zeros(4))
    except HeteroError as error:
        print(str(error))
        os._exit(0)  # the group cannot be left in good order any more
    raise AssertionError("nothing failed")


def waits_for_a_rank(collectives: Collectives) -> None:
    """The last rank does not come; the others say so when the group's timeout has passed."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if collectives.rank == collectives.ranks - 1:
        time.sleep(4)
        os._exit(0)
    try:
        Collectives(group).agree([1.0])
    except HeteroError as error:
        print(str(error))
        os._exit(0)
    raise AssertionError("nothing failed")


def _op(number: int, kind: OpKind, lane: Lane) -> Op:
    return Op(id=number, kind=kind, block=NO_BLOCK, lane=lane, at=0)


def _doing(work: Callable[[], None]) -> Callable[[], tuple[()]]:
    def run() -> tuple[()]:
        work()
        return ()

    return run


SCENARIOS = {
    work.__name__: work
    for work in (
        gathers,
        reduces,
        reduces_over_nodes,
        exchanges_between_devices,
        agrees,
        runs_on_a_lane,
        loses_a_rank,
        waits_for_a_rank,
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    for name in sys.argv[1:]:
        SCENARIOS[name](Collectives())
    dist.destroy_process_group()
    print("ok")
