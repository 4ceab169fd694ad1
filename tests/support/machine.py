"""A machine that runs schedules for a device with memory of its own, in any order that they allow,
and watches what happens.

Each op starts at some moment after what it waits for and ends at some later one. Meanwhile it reads
some places and writes others; a place that is written while another op is at it, or a version of
weights, state or gradients that is not the expected one, is a failure. Lanes are *not* in order
here, but for compute: edges alone must keep everything apart.

A verdict that discards waits for the updates that were tried, and takes back what they have done:
weights that a file has are lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan, Tier
from lightning_hetero.ir.schedule import Anchor, Lane, Op, OpKind, Payload, Phase, Schedule, Updates
from lightning_hetero.lowering.needs import DEVICE_GRADIENTS, DEVICE_STATES
from lightning_hetero.lowering.placed_blocks import gathers_on_devices, placements, speculates
from support.machine_places import Place, Run, find_places

_LOST = -1  # the version of what was tried and discarded


class Machine:
    """Runs schedules one after the other.

    Args:
        plan: The resolved plan.
        model: The model.
        schedules: All of them, in order; each begins with what the one before leaves.
        seed: Of the order of events.
        ranks: Machines that share the model, of which ``model`` is one's slice; see
            ``support.rank_machines``. Where devices are the host's own CPU, whole weights take the
            place of the device's copies; else they are between host and device, and so are whole
            gradients. Where devices exchange, slices are on them.
    """

    def __init__(self, plan: Plan, model: ModelProfile, schedules: Sequence[Schedule], *, seed: int, ranks: int = 1) -> None:
        self.plan, self.model, self.schedules, self.random, self.ranks = plan, model, schedules, Random(seed), ranks
        shared = any(schedule.shared_memory for schedule in schedules)
        self.on_devices = gathers_on_devices(plan, ranks, shared_memory=shared)
        self.has_hops = ranks > 1 and not shared and not self.on_devices
        self.between = "whole" if self.has_hops else "host"  # where UPLOAD and GRAD have their other end
        self.whole: set[int] = set()  # blocks whose gradients are between two hops
        self.next_compute = 0  # in self.compute
        self.placed = placements(plan, model.shape(), device=True, ranks=ranks)
        self.version = [0] * len(self.placed)  # updates that each block has seen, as the program says
        self.value: dict[Place, int] = {}
        self.at: Counter[Place] = Counter()  # readers; -1: a writer
        self.device, self.host, self.device_cache, self.host_cache = 0, 0, 0, 0
        self.peak_device = self.peak_host = self.peak_device_cache = self.peak_host_cache = 0
        self.latest: dict[tuple[OpKind, int], Run] = {}
        self.compute: list[Run] = []  # in order
        self.judged: set[int] = set()  # schedules whose verdict has been given
        self.tried: dict[int, set[int]] = {}  # schedule -> blocks whose gradients stay until its verdict
        self.pending: list[Run] = []
        for b, p in enumerate(self.placed):
            state = {Tier.DEVICE: "device", Tier.HOST: "host", Tier.DISK: "file"}[p.plan.state]
            self.value["state", state, b] = 0
            if p.on_disk:
                self.value["weights", "file", b] = 0
            if p.plan.weights is Tier.HOST or p.renewed:
                self.value["weights", "host", b] = 0
            if p.plan.weights is Tier.DEVICE and not p.renewed:
                self.value["weights", "device", b] = 0

    def run(self) -> None:
        """Runs everything to its end."""
        self.begin()
        while self.pending:
            events = self.events()
            assert events, f"nothing can go on; next on compute: {self.compute[self.next_compute]}"
            self.advance(self.random.choice(events))

    def begin(self) -> None:
        """All ops and anchors wait to start."""
        for number, schedule in enumerate(self.schedules):
            self._program(number, schedule)

    def events(self) -> list[Run]:
        """What may start or end now."""
        index = self.next_compute
        ready = [r for r in self.pending if not r.started and all(w.ended for w in r.waits)]
        if index < len(self.compute):
            ready = [r for r in ready if r not in self.compute or r is self.compute[index]]
        return ready + [r for r in self.pending if r.started and not r.ended]

    def advance(self, run: Run) -> None:
        """Starts what has not started, and ends what has."""
        if not run.started:
            self._start(run)
            return
        self._end(run)
        self.pending.remove(run)
        self.next_compute += self.next_compute < len(self.compute) and run is self.compute[self.next_compute]

    # ---- what waits for what ---------------------------------------------------------------------

    def _program(self, number: int, schedule: Schedule) -> None:
        runs: dict[int, Run] = {}
        issued: dict[tuple[OpKind, int], Run] = {}
        uses: dict[int, list[int]] = {}
        ops = list(schedule.ops)
        for index, anchor in enumerate(schedule.anchors):
            if anchor.phase is Phase.VERDICT:  # it discards before anything follows it
                tries = [r for r in runs.values() if r.tried and r.op is not None and r.op.kind is OpKind.UPDATE]
                redone = schedule.signature.updates is Updates.REDONE
                self._add_anchor(Run(number, None, anchor, waits=[*self.compute[-1:], *(tries if redone else ())]))
            before = self.compute[-1:]
            while ops and ops[0].at == index:
                op = ops.pop(0)
                run = Run(number, op, None, waits=[*before, *(runs[i] for i in op.after)])
                run.waits += [self.latest[e] for e in op.carried if e in self.latest]
                run.tried = speculates(self.plan, schedule.signature.updates) and anchor.phase is not Phase.VERDICT
                runs[op.id] = issued[op.kind, op.block] = run
                self.pending.append(run)
                if op.lane is Lane.COMPUTE:
                    self.compute.append(run)
                    before = [run]
                elif op.payload is Payload.ACTIVATIONS:
                    run.use = self._use_of(op, schedule, uses)
            if anchor.phase is Phase.VERDICT:
                continue
            waits = [*self.compute[-1:], *(runs[i] for i in anchor.needs)]
            run = Run(number, None, anchor, waits=waits + [self.latest[e] for e in anchor.carried if e in self.latest])
            run.use = index if anchor.phase is Phase.FORWARD else len(schedule.anchors) - 2 - index
            self._add_anchor(run)
        self.latest |= issued

    def _add_anchor(self, run: Run) -> None:
        self.pending.append(run)
        self.compute.append(run)

    @staticmethod
    def _use_of(op: Op, schedule: Schedule, uses: dict[int, list[int]]) -> int:
        """The use whose activations an op moves: the latest one of the block that has not yet taken
        that hop.
        """
        hop = hash((op.kind, op.lane))
        taken = uses.setdefault(hop, [])
        order = schedule.signature.order
        use = max(u for u, b in enumerate(order) if b == op.block and u < op.at and u not in taken)
        taken.append(use)
        return use

    # ---- what ops do -----------------------------------------------------------------------------

    def _start(self, run: Run) -> None:
        run.started = True
        find_places(self, run)
        for place in run.reads:
            assert self.at[place] >= 0, f"{run} reads {place} while it is written"
            self.at[place] += 1
        for place in run.writes:
            assert self.at[place] == 0, f"{run} writes {place} while it is used"
            self.at[place] = -1
        self._take(run)

    def _end(self, run: Run) -> None:
        run.ended = True
        for place in run.reads:
            self.at[place] -= 1
        for place in run.writes:
            self.at[place] = 0
        self._give(run)

    def swaps(self, run: Run) -> bool:
        assert run.anchor is not None
        return self.schedules[run.schedule].signature.training and self.placed[run.anchor.block].swaps

    def _take(self, run: Run) -> None:
        """Memory that a run takes as it starts, and what it has to find."""
        if run.anchor is not None:
            if run.anchor.phase is not Phase.VERDICT:
                self._compute_starts(run, run.anchor)
            return
        assert run.op is not None
        op, b = run.op, run.op.block
        match op.kind, op.payload, op.lane:
            case OpKind.FETCH, Payload.WEIGHTS, _:
                lost = self.value.get(("weights", "host", b)) == _LOST
                assert lost or ("weights", "host", b) not in self.value, f"{run}: the host has them"
                self._memory(host_cache=0 if lost else op.num_bytes)
            case OpKind.UPLOAD, _, _ if self.on_devices:
                assert ("weights", "host", b) in self.value, f"{run}: nothing to upload"
                if self.placed[b].below_device:
                    assert ("weights", "device", b) not in self.value, f"{run}: the device has them"
                    self._memory(device_cache=op.num_bytes * self.ranks)
            case OpKind.GATHER, _, _ if self.on_devices:
                assert ("weights", "slice", b) in self.value, f"{run}: nothing to gather"
            case OpKind.GATHER, _, _ if self.has_hops:
                assert ("weights", "host", b) in self.value, f"{run}: nothing to gather"
            case ((OpKind.UPLOAD | OpKind.GATHER), _, _):
                assert ("weights", self.between, b) in self.value, f"{run}: nothing to upload"
                if self.placed[b].below_device:
                    assert ("weights", "device", b) not in self.value, f"{run}: the device has them"
                    self._memory(device_cache=op.num_bytes)
            case OpKind.RELEASE, _, Lane.DISK_READ:
                assert self.value["weights", "file", b] == self.value["weights", "host", b], f"{run}: loses an update"
            case OpKind.REDUCE, _, _ if self.on_devices:
                assert self.value["gradients", "device", b] > 0, f"{run}: no gradients"
                self.whole.add(b)
                assert len(self.whole) <= DEVICE_GRADIENTS, f"{run}: the device has slices of sums of {self.whole}"
                self._memory(device=op.num_bytes // self.ranks)
            case OpKind.GRAD, _, _ if self.on_devices:
                assert ("gradients", "slice", b) in self.value, f"{run}: no gradients"
                self._memory(host=op.num_bytes * (("gradients", "host", b) not in self.value))
            case OpKind.REDUCE, _, _ if self.has_hops:
                assert self.value["gradients", "whole", b] > 0, f"{run}: no gradients"
                self._memory(host=op.num_bytes // self.ranks * (("gradients", "host", b) not in self.value))
            case OpKind.GRAD, _, _ if self.has_hops:
                assert self.value["gradients", "device", b] > 0, f"{run}: no gradients"
                assert b not in self.whole, f"{run}: they would be reduced together"
                self.whole.add(b)
                assert len(self.whole) <= self.plan.gradient_depth, f"{run}: the host has whole gradients of {self.whole}"
                self._memory(host=op.num_bytes)
            case ((OpKind.GRAD | OpKind.REDUCE), _, _):
                assert self.value["gradients", "device", b] > 0, f"{run}: no gradients"
                self._memory(host=op.num_bytes // self.ranks * (("gradients", "host", b) not in self.value))
            case OpKind.UPDATE, _, Lane.CPU:
                self._cpu_update_starts(run, b)
            case OpKind.UPDATE, _, _ if self.placed[b].slices_move:
                assert not self.placed[b].below_device or ("weights", "device", b) not in self.value, f"{run} outdates a copy"
                for what in ("state", "slices"):
                    assert self.value[what, "device", b] == self.version[b], f"{run}: {what} of another version"
            case OpKind.UPDATE, _, _:
                assert self.value["gradients", "device", b] == self._contributions(run.schedule, b), f"{run}: gradients are missing"
                for what in ("state", "weights"):
                    assert self.value[what, "device", b] == self.version[b], f"{run}: {what} of another version"
            case OpKind.STORE, _, _:
                assert self._is_discarded(run) or self.value["weights", "staging", b] == self.version[b]
            case OpKind.SWAP_IN, Payload.STATE, _:
                assert ("state", "device", b) not in self.value
                self._memory(device=op.num_bytes)
            case OpKind.SWAP_IN, Payload.GRADIENTS, _:
                assert self.value["gradients", "host", b] == self._contributions(run.schedule, b), f"{run}: gradients are missing"
                assert ("slices", "device", b) not in self.value
                assert sum(place[0] == "slices" for place in self.value) < DEVICE_STATES, f"{run}: the device has many slices"
                self._memory(device=op.num_bytes)
            case OpKind.SWAP_OUT, Payload.ACTIVATIONS, Lane.D2H:
                assert self.value["activations", "device", run.schedule, run.use] == 1
                self._memory(host=op.num_bytes)
            case OpKind.SWAP_IN, Payload.ACTIVATIONS, Lane.DISK_READ:
                self._memory(host=op.num_bytes)
            case OpKind.SWAP_IN, Payload.ACTIVATIONS, _:
                on_file = self.value.get(("activations", "file", run.schedule, run.use))
                assert on_file is None, f"{run}: some are still on disk"
                assert self.value["activations", "host", run.schedule, run.use] == 1
                self._memory(device=op.num_bytes)

    def _give(self, run: Run) -> None:
        """What a run leaves, and memory that it gives back as it ends."""
        if run.anchor is not None:
            if run.anchor.phase is not Phase.VERDICT:
                self._compute_ends(run, run.anchor)
            else:
                self._verdict_ends(run.schedule)
            return
        assert run.op is not None
        op, b, u = run.op, run.op.block, (run.schedule, run.use)
        match op.kind, op.payload, op.lane:
            case OpKind.FETCH, payload, _:
                place = "host" if payload is Payload.WEIGHTS else "staging"
                self.value[payload.value, place, b] = self.value[payload.value, "file", b]
            case OpKind.UPLOAD, _, _ if self.on_devices:
                self.value["weights", "slice", b] = self.value["weights", "host", b]
            case OpKind.GATHER, _, _ if self.on_devices:
                self.value["weights", "device", b] = self.value.pop(("weights", "slice", b))
            case OpKind.GATHER, _, _ if self.has_hops:
                self.value["weights", "whole", b] = self.value["weights", "host", b]
            case ((OpKind.UPLOAD | OpKind.GATHER), _, _):
                self.value["weights", "device", b] = self.value["weights", self.between, b]
            case OpKind.RELEASE, _, Lane.NET if self.has_hops:
                self.value.pop(("weights", "whole", b), None)
            case OpKind.RELEASE, _, Lane.H2D | Lane.NET:
                del self.value["weights", "device", b]
                self._memory(device_cache=-op.num_bytes)
            case OpKind.RELEASE, _, _:
                del self.value["weights", "host", b]
                self._memory(host_cache=-op.num_bytes)
            case OpKind.REDUCE, _, _ if self.on_devices:
                self.value["gradients", "slice", b] = self.value.pop(("gradients", "device", b))
                self._memory(device=-op.num_bytes)
            case OpKind.GRAD, _, _ if self.on_devices:
                self.whole.remove(b)
                added = self.value.get(("gradients", "host", b), 0) + self.value.pop(("gradients", "slice", b))
                self.value["gradients", "host", b] = added
                self._memory(device=-op.num_bytes)
            case OpKind.GRAD, _, _ if self.has_hops:
                self.value["gradients", "whole", b] = self.value.pop(("gradients", "device", b))
                self._memory(device=-op.num_bytes)
            case OpKind.REDUCE, _, _ if self.has_hops:
                added = self.value.get(("gradients", "host", b), 0) + self.value.pop(("gradients", "whole", b))
                self.whole.remove(b)
                self.value["gradients", "host", b] = added
                self._memory(host=-op.num_bytes)
            case ((OpKind.GRAD | OpKind.REDUCE), _, _):
                added = self.value.get(("gradients", "host", b), 0) + self.value.pop(("gradients", "device", b))
                self.value["gradients", "host", b] = added
                self._memory(device=-op.num_bytes)
            case OpKind.UPDATE, _, Lane.COMPUTE if self.placed[b].slices_move:
                self.version[b] += 1
                self.value.pop(("gradients", "host", b))
                self._memory(host=-self.placed[b].shape.gradient_bytes)
                self.value["state", "device", b] = self.value["slices", "device", b] = self.version[b]
            case OpKind.UPDATE, _, lane:
                self._update_ends(run, b, "host" if lane is Lane.CPU else "device")
            case OpKind.STORE, _, _ if self._is_discarded(run):  # it went to the other slot
                for what in ("weights", "state"):
                    self.value.pop((what, "staging", b), None)
            case OpKind.STORE, _, _:
                if self.placed[b].on_disk:
                    self.value["weights", "file", b] = self.value.pop(("weights", "staging", b))
                if self.placed[b].plan.state is Tier.DISK:
                    self.value["state", "file", b] = self.value.pop(("state", "staging", b))
            case OpKind.SWAP_IN, Payload.STATE, _:
                self.value["state", "device", b] = self.value["state", "host", b]
            case OpKind.SWAP_OUT, Payload.STATE, _:
                self.value["state", "host", b] = self.value.pop(("state", "device", b))
                self._memory(device=-op.num_bytes)
            case OpKind.SWAP_IN, Payload.GRADIENTS, _:
                self.value["slices", "device", b] = self.value["weights", "host", b]
            case OpKind.SWAP_OUT, Payload.WEIGHTS, _ if self.placed[b].slices_move:
                self.value["weights", "host", b] = self.value.pop(("slices", "device", b))
                self._memory(device=-op.num_bytes - self.placed[b].shape.gradient_bytes)
            case OpKind.SWAP_OUT, Payload.WEIGHTS, _:
                self.value["weights", "host", b] = self.value["weights", "device", b]
            case OpKind.SWAP_OUT, Payload.ACTIVATIONS, Lane.D2H:
                self.value["activations", "host", *u] = self.value.pop(("activations", "device", *u))
                self._memory(device=-op.num_bytes)
            case OpKind.SWAP_OUT, Payload.ACTIVATIONS, _:
                self.value["activations", "file", *u] = 1
                self._memory(host=-op.num_bytes)
            case OpKind.SWAP_IN, Payload.ACTIVATIONS, Lane.DISK_READ:
                del self.value["activations", "file", *u]
            case OpKind.SWAP_IN, Payload.ACTIVATIONS, _:
                self.value["activations", "device", *u] = self.value.pop(("activations", "host", *u))
                self._memory(host=-op.num_bytes)

    # ---- compute and updates ---------------------------------------------------------------------

    def _compute_starts(self, run: Run, anchor: Anchor) -> None:
        b, block = anchor.block, self.model.blocks[anchor.block]
        got = self.value.get(("weights", "device", b))
        assert got == self.version[b], f"{run} computes with version {got} of its weights, not {self.version[b]}"
        if anchor.phase is Phase.FORWARD:
            self._memory(device=block.activation_bytes + block.transient_bytes)
            return
        if self.placed[b].swaps:
            assert ("activations", "device", run.schedule, run.use) in self.value, f"{run} lacks its activations"
        new = self.placed[b].shape.gradient_bytes * self.ranks * (("gradients", "device", b) not in self.value)
        self._memory(device=self.placed[b].saved.recomputed + block.transient_bytes + new)

    def _compute_ends(self, run: Run, anchor: Anchor) -> None:
        b, block, saved = anchor.block, self.model.blocks[anchor.block], self.placed[anchor.block].saved
        if anchor.phase is Phase.BACKWARD:
            if self.placed[b].trainable:
                self.value["gradients", "device", b] = self.value.get(("gradients", "device", b), 0) + 1
            self.value.pop(("activations", "device", run.schedule, run.use), None)
            self._memory(device=-block.activation_bytes - block.transient_bytes)
        elif not self.schedules[run.schedule].signature.training:
            self._memory(device=-block.activation_bytes - block.transient_bytes)
        else:
            self._memory(device=-saved.recomputed - block.transient_bytes)
            if self.placed[b].swaps:
                self.value["activations", "device", run.schedule, run.use] = 1

    def _cpu_update_starts(self, run: Run, b: int) -> None:
        p = self.placed[b]
        assert self.value["gradients", "host", b] == self._contributions(run.schedule, b), f"{run}: gradients are missing"
        state = self.value["state", "staging" if p.plan.state is Tier.DISK else "host", b]
        assert state == self.version[b], f"{run}: state of version {state}"
        assert not p.below_device or ("weights", "device", b) not in self.value, f"{run} outdates what the device holds"
        if ("weights", "host", b) in self.value:
            assert self.value["weights", "host", b] == self.version[b], f"{run}: weights of another version"

    def _update_ends(self, run: Run, b: int, tier: str) -> None:
        p = self.placed[b]
        if self._is_discarded(run):
            self.tried.setdefault(run.schedule, set()).add(b)
            for place in (("weights", "host", b), ("weights", "staging", b), ("state", "staging", b)):
                if place in self.value or place[1] == "staging":
                    self.value[place] = _LOST
            return
        self.version[b] += 1
        self.value.pop(("gradients", tier, b))
        on_device = tier == "device"
        if run.tried and run.schedule not in self.judged:
            self.tried.setdefault(run.schedule, set()).add(b)
        else:
            self._memory(**{tier: -p.shape.gradient_bytes})
        self.value["state", "device" if on_device else "staging" if p.plan.state is Tier.DISK else "host", b] = self.version[b]
        if on_device or ("weights", "host", b) in self.value:
            self.value["weights", tier, b] = self.version[b]
        if p.stored:
            self.value["weights", "staging", b] = self.version[b]

    def _is_discarded(self, run: Run) -> bool:
        return run.tried and self.schedules[run.schedule].signature.updates is Updates.REDONE

    def _verdict_ends(self, number: int) -> None:
        self.judged.add(number)
        redone = self.schedules[number].signature.updates is Updates.REDONE
        for b in self.tried.pop(number, ()):
            if not redone:
                self._memory(host=-self.placed[b].shape.gradient_bytes)
            elif not self.placed[b].on_disk:  # from its copy
                self.value["weights", "host", b] = self.version[b]

    def _contributions(self, number: int, b: int) -> int:
        """Backwards of a block since its last update."""
        count = 0
        for index in range(number, -1, -1):
            signature = self.schedules[index].signature
            if index < number and signature.updates is not Updates.NONE:
                break
            count += signature.order.count(b) * signature.training
        return count

    def _memory(self, *, device: int = 0, host: int = 0, device_cache: int = 0, host_cache: int = 0) -> None:
        self.device += device
        self.host += host
        self.device_cache += device_cache
        self.host_cache += host_cache
        self.peak_device, self.peak_host = max(self.peak_device, self.device), max(self.peak_host, self.host)
        self.peak_device_cache = max(self.peak_device_cache, self.device_cache)
        self.peak_host_cache = max(self.peak_host_cache, self.host_cache)
