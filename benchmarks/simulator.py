"""The simulated disk and updates against the native engine.

The disk is synthetic and duplex, compute sleeps, and the engine's tasks are real.

Keys of the JSON line: ``median_error`` and ``worst_error`` of the cases' step times, relative to
the measurement; ``hundred_blocks_s``: seconds to simulate one step of a model of 100 blocks, for
the slowest placement; ``deterministic``: whether a second simulation is equal to the last bit,
trace included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from scratch import scratch

from lightning_hetero import _native
from lightning_hetero._native import DONE, READY, Arena, Engine, Hyper, NativePart, PartGeometry, Segment, Store, Ticket
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.ir.schedule import Op, OpKind, Payload, Phase, Schedule, StepSignature, Updates
from lightning_hetero.lowering import cache_sizes, lower, steady
from lightning_hetero.planners import BUILTIN_PLANS
from lightning_hetero.sim import simulate

MIB, GIB = 2**20, 2**30
CHUNK = 2**18  # elements, as in store/live/geometry.py
HYPER = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0, _native.ADAMW)
STEPS = 3
REPETITIONS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    staging_bytes: int


class Driver:
    """Runs a schedule as ``runtime.Executor`` does, in fp32 with all state and weights on disk."""

    def __init__(self, path: Path, model: ModelProfile, hardware: HardwareProfile, staging_bytes: int) -> None:
        self.model, self.step, self.updates = model, 1, dict[int, Ticket]()
        self.store = Store(
            path, uuid=bytes(16), create=True, direct_io=False, durability=1, verify_digests=False,
            num_blocks=len(model.blocks), user_bytes=64,
        )  # fmt: skip
        self.engine = Engine(
            io_backend="synthetic", queue_depth=8, update_threads=1, staging_bytes=staging_bytes,
            chunk_bytes_max=12 * CHUNK + 16384, synthetic_read_bytes_per_s=hardware.disk_read_bytes_per_s,
            synthetic_write_bytes_per_s=hardware.disk_write_bytes_per_s,
        )  # fmt: skip
        self.blocks, self.gradients = [], []
        for index, block in enumerate(model.blocks):
            geometry = PartGeometry(
                id=index, weight_dtype=_native.F32, num_elements=block.num_params, num_state=2, weights_on_disk_file=True,
                state_on_disk_file=True, num_slots=2, chunk_elements=CHUNK,
            )  # fmt: skip
            weights = Arena(4 * block.num_params)
            self.blocks.append(NativePart(self.store, geometry, weights.address, keep=weights))
            self.gradients.append(Arena(4 * block.num_params))
        for ticket in [self.engine.store(block, [], weights_from_memory=True, step=1) for block in self.blocks]:
            ticket.wait(DONE)
        self.engine.commit(self.store, 1).wait(DONE)

    def close(self) -> None:
        self.engine.close()
        for block in self.blocks:
            block.close()
        self.store.close()

    def run(self, schedule: Schedule, steps: int) -> list[float]:
        """Seconds of each step but the last one, from first forward to first forward."""
        self.resident = set(schedule.resident_before)
        for index, block in enumerate(self.blocks):
            if index not in self.resident:
                self.engine.release(block).wait(DONE)
        begun = [self._step(schedule) for _ in range(steps + 1)]
        return [after - before for before, after in pairwise(begun)]

    def _step(self, schedule: Schedule) -> float:
        self.tickets: dict[int, Ticket] = {}
        self.opened: dict[int, Ticket] = {}
        self.releases: list[Ticket] = []
        begun = 0.0
        ops = iter(schedule.ops)
        op = next(ops, None)
        for index, anchor in enumerate(schedule.anchors):
            while op is not None and op.at <= index:
                self._issue(op)
                op = next(ops, None)
            for need in anchor.needs:
                self.tickets[need].wait(READY)
            if anchor.phase is Phase.VERDICT:
                self.step += 1
                self.committed = self.engine.commit(self.store, self.step, priority=-2)
                continue
            if anchor.block in self.updates:
                self.updates.pop(anchor.block).wait(READY)
            begun = begun or time.monotonic()
            block = self.model.blocks[anchor.block]
            time.sleep(block.forward_s if anchor.phase is Phase.FORWARD else block.backward_s)
        return begun

    def _issue(self, op: Op) -> None:
        match op.kind, op.payload:
            case OpKind.FETCH, Payload.WEIGHTS:
                after = [t for t in self.releases if not t.poll()]
                self.updates[op.block] = self.tickets[op.id] = self.engine.fetch(self.blocks[op.block], after=after)
                self.resident.add(op.block)
            case OpKind.RELEASE, _:
                self.releases.append(self.engine.release(self.blocks[op.block]))
                self.resident.discard(op.block)
            case OpKind.FETCH, Payload.STATE:
                self._open(op.block)
            case OpKind.UPDATE, _:
                if op.block not in self.opened:
                    self._open(op.block)
                ticket, gradients = self.opened.pop(op.block), self.gradients[op.block]
                segment = Segment(0, self.model.blocks[op.block].num_params, gradients.address, _native.F32, 0)
                self.engine.arm_update(ticket, [segment], [HYPER], step=self.step + 1, priority=1000 + op.block, keep=gradients)
                self.updates[op.block] = self.tickets[op.id] = ticket

    def _open(self, block: int) -> None:
        resident = block in self.resident
        self.opened[block] = self.engine.open_update(self.blocks[block], weights_resident=resident, priority=1000 + block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    num_blocks: int = 8
    chunks: int = 4
    forward_s: float
    read: float = 200e6
    write: float = 200e6
    cached: float = 1.0
    staging_mib: int = 40
    updates: Updates = Updates.IN_BACKWARD


CASES = {
    "state does not fit staging": Case(forward_s=0.03, staging_mib=10),
    "weights come and go": Case(forward_s=0.01, cached=0.3),
    "writes fall behind": Case(forward_s=0.03, cached=0.4, read=300e6, write=100e6),
    "updates overlap the next forward": Case(forward_s=0.03, updates=Updates.AFTER_VERDICT),
    "larger blocks": Case(num_blocks=4, chunks=16, forward_s=0.03, read=300e6, write=300e6, cached=0.5),
}


def compare(case: Case, path: Path) -> tuple[float, float]:
    """Simulated and measured seconds of a step."""
    block = BlockProfile(
        name="", num_params=case.chunks * CHUNK, num_trainable_params=case.chunks * CHUNK, forward_s=case.forward_s,
        backward_s=2 * case.forward_s, forward_flop=1.0, activation_bytes=0, boundary_bytes=0, transient_bytes=0,
    )  # fmt: skip
    blocks = tuple(replace(block, name=f"l{i}") for i in range(case.num_blocks))
    model = ModelProfile(name="m", tokens=1, compute_itemsize=4, constant_device_bytes=0, constant_host_bytes=0, blocks=blocks)
    plan = Plan(name="p", blocks=tuple(BlockPlan(name=b.name, weights=Tier.DISK, state=Tier.DISK) for b in blocks))
    hardware = HardwareProfile(
        name="h", device_memory_bytes=1, host_memory_bytes=1, disk_capacity_bytes=1, device_flop_per_s=1.0,
        link_h2d_bytes_per_s=0.0, link_d2h_bytes_per_s=0.0, disk_read_bytes_per_s=case.read, disk_write_bytes_per_s=case.write,
        disk_duplex=True, host_dram_bytes_per_s=2e10, cpu_update_params_per_s=7e8, device_update_params_per_s=0.0,
        cpu_downcast_params_per_s=0.0, shared_memory=True,
    )  # fmt: skip
    signature = StepSignature(order=tuple(range(len(blocks))), training=True, updates=case.updates)
    capacity, resident = int(case.cached * sum(4 * b.num_params for b in blocks)), frozenset[int]()
    for _ in range(4):
        schedule = lower(plan, model.shape(), signature, resident=resident, capacity_bytes=capacity)
        resident = schedule.resident_after
    simulation = simulate([schedule], plan, model, hardware, sizes=Staging(staging_bytes=case.staging_mib * MIB))
    driver = Driver(path, model, hardware, case.staging_mib * MIB)
    try:
        measured_s = statistics.median(driver.run(schedule, STEPS)[1:])
    finally:
        driver.close()
    return simulation.prediction.iteration_s, measured_s


def effort() -> tuple[float, bool]:
    """Seconds to simulate one step of 100 blocks, by the slowest placement.

    And whether every repetition gives the same.
    """
    block = BlockProfile(
        name="", num_params=7_000_000, num_trainable_params=7_000_000, forward_s=0.05, backward_s=0.1, forward_flop=1.0,
        activation_bytes=0, boundary_bytes=0, transient_bytes=0,
    )  # fmt: skip
    blocks = tuple(replace(block, name=f"l{i}") for i in range(100))
    model = ModelProfile(name="m", tokens=1, compute_itemsize=4, constant_device_bytes=0, constant_host_bytes=0, blocks=blocks)
    hardware = HardwareProfile(
        name="h", device_memory_bytes=60 * GIB, host_memory_bytes=60 * GIB, disk_capacity_bytes=1024 * GIB, device_flop_per_s=1.0,
        link_h2d_bytes_per_s=0.0, link_d2h_bytes_per_s=0.0, disk_read_bytes_per_s=2e9, disk_write_bytes_per_s=2e9,
        disk_duplex=True, host_dram_bytes_per_s=4e10, cpu_update_params_per_s=1e9, device_update_params_per_s=1e9,
        cpu_downcast_params_per_s=0.0, shared_memory=True,
    )  # fmt: skip
    slowest_s, same = 0.0, True
    for make in BUILTIN_PLANS.values():
        plan = make(model.shape()).resolve(b.name for b in blocks)
        space = cache_sizes(replace(plan, host_cache_bytes=GIB), model, hardware)
        schedules = steady(plan, model.shape(), sizes=space)
        seconds = []
        for _ in range(REPETITIONS):
            begin = time.perf_counter()
            simulation = simulate(schedules, plan, model, hardware, sizes=space)
            seconds.append((time.perf_counter() - begin) / len(simulation.iterations_s))
        slowest_s = max(slowest_s, statistics.median(seconds))
        traced = [simulate(schedules, plan, model, hardware, sizes=space, keep_trace=True) for _ in range(2)]
        same = same and traced[0] == traced[1]
    return slowest_s, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="any directory; 2 GB free")
    args = parser.parse_args()
    errors = {}
    with scratch(args.dir) as directory:
        for index, (name, case) in enumerate(CASES.items()):
            (path := directory / str(index)).mkdir()
            simulated, measured = compare(case, path)
            errors[name] = abs(simulated / measured - 1)
            print(f"{name:34} measured {measured:.3f} s, simulated {simulated:.3f} s ({errors[name]:.1%})", flush=True)
    figures = {"median_error": statistics.median(errors.values()), "worst_error": max(errors.values())}
    figures["hundred_blocks_s"], deterministic = effort()
    print(json.dumps({"benchmark": "simulator", **figures, "num_cases": len(errors), "deterministic": deterministic}))


if __name__ == "__main__":
    main()
