"""Several machines that share one model, each of which runs its schedules in an order of its own.

On one of them ops of one kind are late: they go on when nothing else can.

A collective may start on a machine when it is the next one there and what it waits for has ended.
It ends once all machines have started it. So a schedule that lets ranks meet in another order, that
gathers slices of different versions, or that writes over a step which another rank may still need,
is a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import COLLECTIVES, NO_BLOCK, OpKind, Payload, Phase, Schedule
from support.machine import Machine, Run


class RankMachines:
    """Runs the schedules of all ranks.

    Args:
        plan: The resolved plan.
        model: One rank's slice of the model.
        schedules: Those of each rank.
        seed: Of the order of events.
    """

    def __init__(self, plan: Plan, model: ModelProfile, schedules: Sequence[Sequence[Schedule]], *, seed: int) -> None:
        self.random = Random(seed)
        self.machines = [Machine(plan, model, rows, seed=seed, ranks=len(schedules)) for rows in schedules]
        self.collectives: list[list[Run]] = []
        self.met = 0  # collectives that all ranks have ended
        self.sent: dict[int, int] = {}  # rank -> the version of the slice with which it is in a GATHER
        self.num_commits = [0] * len(schedules)
        self.late = self.random.randrange(len(schedules)), self.random.choice(list(OpKind))

    def run(self) -> None:
        """Runs everything to its end."""
        for machine in self.machines:
            machine.begin()
            self.collectives.append([run for run in machine.pending if self._is_collective(run)])
        while any(machine.pending for machine in self.machines):
            events = [(rank, run) for rank, machine in enumerate(self.machines) for run in machine.events() if self._may(rank, run)]
            assert events, f"ranks wait for each other; they have met {self.met} times"
            others = [(rank, run) for rank, run in events if run.op is None or (rank, run.op.kind) != self.late]
            rank, run = self.random.choice(others or events)
            if run.op is not None and not run.started and run.op.kind in (OpKind.STORE, OpKind.MIRROR):
                self._overwrites(rank, run)
            if self._is_collective(run) and not run.started and run.op is not None:
                place = "slice" if self.machines[rank].on_devices else "host"
                self.sent[rank] = self.machines[rank].value.get(("weights", place, run.op.block), 0)
            self._shares(rank, run)
            self._reads(rank, run)
            self.machines[rank].advance(run)
            if run.ended and run.op is not None:
                self.num_commits[rank] += run.op.kind is OpKind.COMMIT
            if self.met < len(self.collectives[0]) and all(runs[self.met].ended for runs in self.collectives):
                self.met += 1

    def _is_collective(self, run: Run) -> bool:
        if run.op is None or run.op.lane not in COLLECTIVES:
            return False
        machine = self.machines[0]
        in_place = machine.schedules[run.schedule].gathers_in_place
        meets = in_place and run.op.block != NO_BLOCK and machine.placed[run.op.block].on_disk
        return meets or run.op.kind is not OpKind.RELEASE

    def _shares(self, rank: int, run: Run) -> None:
        """As compute begins and ends, ranks that share memory have the same weights in it."""
        machine, anchor = self.machines[rank], run.anchor
        if anchor is None or anchor.phase is Phase.VERDICT or machine.schedules[run.schedule].copies:
            return
        place = "weights", "host", anchor.block
        if place not in machine.value and not machine.placed[anchor.block].below_device:  # nothing changes them
            return
        found = [one.value.get(place) for one in self.machines]
        assert set(found) == {machine.value["weights", "device", anchor.block]}, f"{run} computes with slices of versions {found}"

    def _reads(self, rank: int, run: Run) -> None:
        """An UPLOAD from memory that ranks share reads the slices of all of them."""
        machine, op = self.machines[rank], run.op
        shares = machine.schedules[run.schedule].gathers_in_place and not machine.on_devices
        if op is None or op.kind is not OpKind.UPLOAD or not shares:
            return
        place = "weights", "host", op.block
        others = [one for one in self.machines if one is not machine]
        for other in others:
            if run.started:
                other.at[place] -= 1
                continue
            got = other.value.get(place)
            assert got == machine.value["weights", "whole", op.block], f"{run} reads a slice of version {got} of another rank"
            assert other.at[place] >= 0, f"{run} reads a slice while its rank writes it"
            other.at[place] += 1

    def _may(self, rank: int, run: Run) -> bool:
        if not self._is_collective(run):
            return True
        theirs = [runs[self.met] for runs in self.collectives]
        if run is not theirs[rank]:
            return False
        if run.started and all(other.started for other in theirs):
            self._meet(theirs)
            return True
        return not run.started

    def _meet(self, theirs: Sequence[Run]) -> None:
        """All ranks are in the same collective, with data of the same version."""
        ops = [run.op for run in theirs]
        assert len({(op.kind, op.block, op.num_bytes) for op in ops if op is not None}) == 1, f"ranks meet in {ops}"
        op = ops[0]
        assert op is not None
        if op.payload is Payload.WEIGHTS:
            assert len(set(self.sent.values())) == 1, f"{op} gathers slices of versions {self.sent}"

    def _overwrites(self, rank: int, run: Run) -> None:
        """A slot of the step before the last may go once all ranks hold the last one."""
        before = self.machines[rank].schedules[: run.schedule]
        steps = sum(any(op.kind is OpKind.COMMIT for op in schedule.ops) for schedule in before)
        assert min(self.num_commits) >= steps, f"{run} writes over a step that other ranks may need: {self.num_commits} of {steps}"
