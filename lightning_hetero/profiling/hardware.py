"""Measures this machine: the rate of each part alone, and how much the parts slow each other.

Micro-benchmarks run the work of a training step with the kernels, threads and kinds of transfers of
training, alone and beside each other (loads.py, timing.py). Together they take ``SECONDS`` on an
idle machine. The result is cached (cache.py); capacities are read again each time. The disk is not
measured if everything fits memory, because plans do not depend on it then.

[Note: A busy machine]
Rates that are measured beside other work are wrong once that work is over, and the other way round.
So the CPU share of other processes and the scatter of repeated readings are measured too. If either
is large, the profile and a warning say so, and the cache trusts the profile for an hour only. If
steps take another time than predicted, the strategy measures again.

[Note: Little memory]
The loads run beside a model that is being trained, so together they take at most three quarters of
the free memory, and what the caller's budget leaves. If their minimum does not fit the free memory,
nothing is measured, and an error says how much is missing. If it does not fit the budget, it comes
on top, which is said. Rates of loads that are not far larger than caches may be too high, so the
cache trusts such a profile for an hour only.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import combinations

from lightning_hetero.clock import now_s
from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError, StoreError, UnsupportedError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.profiling import cache, loads
from lightning_hetero.profiling.disks import measure_disks
from lightning_hetero.profiling.machine import MeasuredMachine, Paths
from lightning_hetero.profiling.timing import Load, Measured, Neighbours, Round, alone, progress, rounds, slowdown
from lightning_hetero.runtime.process_memory import give_free_pages_back
from lightning_hetero.store.capacity import available_memory_bytes
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.store.format.stripes import Balance
from lightning_hetero.units import MIB, format_bytes

SECONDS = 7.5
REPETITIONS = 6
# A machine is busy if others take this share of its CPUs, rates are this noisy (Measured.noise), or
# fewer rounds fit the time.
_BUSY_SHARE, _BUSY_NOISE, _LEAST_ROUNDS = 0.1, 0.25, 3

_PARAMS_BYTES = 16  # per updated parameter: fp32 weight, gradient and two moments
_LEAST_BYTES = 256 * MIB  # least data of a load, if memory allows: far more than most caches
_DISK_SHARE = 8  # a load takes at most this fraction of the free disk space
_SHARES = 6  # equal parts of the loads' memory beyond the least: compute, update, memory, both of the disk; downcast takes less
_LEAST_SHARE_BYTES = 4 * MIB
_DUPLEX = 1.5  # together, reads and writes reach 1 (one shared disk) to 2 times (two directions) the rate of one

# The kinds of work that HardwareProfile.contention names, and their loads.
_KINDS = {
    "compute": frozenset({"compute"}),
    "update": frozenset({"update"}),
    "disk": frozenset({"read", "write"}),
    "copy": frozenset({"h2d", "d2h"}),
}

log = logging.getLogger(__name__)


def measure(
    path: Paths | None = None,
    *,
    device: str | None = None,
    refresh: bool = False,
    seconds: float = SECONDS,
    update_threads: int | None = None,
    disk: bool = True,
    alone: Callable[[], AbstractContextManager[int | None]] = nullcontext,
) -> HardwareProfile:
    """The profile of this machine, measured now or earlier.

    A cached profile is valid if this user measured it on this machine in its current state
    (processor, cores, memory, disk, kernel, device, versions, threads) at most 30 days ago, or at
    most an hour ago if the machine was busy. Capacities are always the current ones.

    ``contention`` also has keys for several kinds beside one, such as ``"compute|disk+update"``:
    the factor with all of them at once.

    Args:
        path: A directory on the disk to measure, or one on each of several; ``None``: the working
            directory; if that cannot be a disk tier, a profile without a disk. Of several disks the
            profile has what they sustain together when blocks are dealt to them as in training, and
            what each does alone in ``source["disks"]``.
        device: ``"cpu"``, or the kind of an accelerator as torch names it; ``None``: the
            accelerator if there is one.
        refresh: Measure even if the profile is cached.
        seconds: Total time; more makes the medians steadier. At least one round is measured,
            however slow.
        update_threads: Threads that run updates; ``None``: half of the cores, the strategy's
            default.
        disk: Measure the disk too; otherwise the profile has none, unless the cached one has.
        alone: Makes the context to measure in, if the profile is not cached. It gives the bytes of
            host memory that the measurement may take; ``None``: what is free.

    Raises:
        ConfigError: ``path`` cannot be a disk tier, there is no such device, a number is not
            positive.
        OutOfMemoryBudgetError: Too little memory is free to measure in.
        StoreError: A transfer failed, or the disk is full.
    """
    if not seconds > 0:
        raise ConfigError(f"seconds={seconds!r}; allowed: more than 0, usually {SECONDS:g}.")
    machine = MeasuredMachine.of(path, device=device, update_threads=update_threads)
    known = None if refresh else _known(machine, disk=disk)
    if known is None:
        with cache.one_at_a_time():
            known = None if refresh else _known(machine, disk=disk)  # the process that we waited for has measured
            if known is None:
                with alone() as room:
                    known = _measured(machine if disk else machine.without_disk(), seconds, room)
    return with_capacities(known, machine)


def _measured(machine: MeasuredMachine, seconds: float, room: int | None) -> HardwareProfile:
    disks = f" and the disk under {', '.join(map(str, machine.paths))}" if machine.volumes else ""
    what = f"{machine.device.type}, host memory{disks}"
    log.info("measuring this machine (%s), for about %.0f s; kept in %s.", what, seconds, cache.cache_directory())
    begin_s = now_s()
    benchmarks = _Benchmarks(machine, room)
    if room is not None and (beyond := benchmarks.least_bytes - room) > 0:
        log.warning(
            "measuring this machine takes %s of memory, %s more than host_memory leaves. Measure it before, with `lightning-hetero "
            "profile`, or raise host_memory.", format_bytes(benchmarks.least_bytes), format_bytes(beyond),
        )  # fmt: skip
    found = benchmarks.run(seconds)
    give_free_pages_back()
    profile = found.profile
    log.info("this machine is measured after %.2g s: %s.", now_s() - begin_s, profile.source["noise"])
    if found.busy:
        log.warning(
            "The machine was busy while it was measured: %s. Plans may suit it badly, and predictions may be wrong. What was "
            "measured is trusted for an hour; `lightning-hetero profile --refresh` measures again.",
            profile.source["noise"],
        )
    cache.save(machine.fingerprint(), profile, busy=found.busy or benchmarks.load_bytes < benchmarks.wanted_bytes)
    return profile


def known(path: Paths | None = None, *, device: str | None = None) -> HardwareProfile | None:
    """The cached profile for the same arguments to :func:`measure`, or ``None``."""
    return _known(MeasuredMachine.of(path, device=device, update_threads=None))


def _known(machine: MeasuredMachine, *, disk: bool = True) -> HardwareProfile | None:
    profile = cache.load(machine.fingerprint())
    if not disk:
        return profile or cache.load(machine.without_disk().fingerprint())
    without_disk = profile is not None and profile.disk_read_bytes_per_s == 0
    return None if without_disk and machine.path_given else profile  # errors of a disk that the user named are reported


def with_capacities(profile: HardwareProfile, machine: MeasuredMachine) -> HardwareProfile:
    """The profile with the memory and the disk space that are free now."""
    host = available_memory_bytes()
    device = host if profile.shared_memory else machine.device_memory_bytes()
    disk = machine.disk_capacity_bytes() if machine.volumes and profile.disk_read_bytes_per_s > 0 else 0
    now = f"free on {_now()}"
    source = {
        **profile.source,
        "host_memory_bytes": f"{now}, control groups counted",
        "disk_capacity_bytes": now if disk else "none",
    }
    source["device_memory_bytes"] = "the host's memory" if profile.shared_memory else now
    return replace(profile, host_memory_bytes=host, device_memory_bytes=device, disk_capacity_bytes=disk, source=source)


def _now() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"


@dataclass(frozen=True, slots=True)
class _Measured:
    """A profile, and whether the machine had other work meanwhile."""

    profile: HardwareProfile
    busy: bool


@dataclass(frozen=True, slots=True)
class _Benchmarks:
    """All benchmarks of one machine."""

    machine: MeasuredMachine
    room: int | None = None  # bytes that all loads may take beside what is free
    how: dict[str, str] = field(default_factory=dict)  # what each load did, for the sources

    def run(self, seconds: float) -> _Measured:
        """Measures; capacities are the current ones."""
        begin_s, neighbours = now_s(), Neighbours()
        with ExitStack() as undo:
            made, without_disk = self._loads(undo)
            kinds = {kind: members for kind, members in _KINDS.items() if members <= set(made)}
            experiments = [[made[name] for name in sorted(names)] for names in _experiments(list(made), list(kinds.values()))]
            left_s = max(seconds / 2, seconds - (now_s() - begin_s))
            results = rounds(experiments, seconds=left_s, repetitions=REPETITIONS)
        share = neighbours.share()
        noise = max(alone(results, name).noise for name in made)
        profile = self._profile(results, kinds, without_disk)
        text = f"rounds: {len(results)}; readings lie {noise:.0%} from their median; other processes took {share:.0%} of the CPUs"
        profile = replace(profile, source={**profile.source, "noise": text})
        taken = self.machine.whole_cpus and share > _BUSY_SHARE
        return _Measured(profile, busy=taken or noise > _BUSY_NOISE or len(results) < _LEAST_ROUNDS)

    def _loads(self, undo: ExitStack) -> tuple[dict[str, Load], str]:
        """The loads by name, and the reason if there are none of a disk."""
        machine = self.machine
        room, num_bytes = self._share_bytes(), self.load_bytes
        params = num_bytes // _PARAMS_BYTES
        made: list[Load] = [
            machine.compute(room),
            undo.enter_context(loads.Update(params, machine.update_threads)),
            undo.enter_context(loads.MemoryTraffic(params, machine.cores)),
            loads.Downcast(params),
        ]
        self.how["compute"] = f"forward and backward of transformer blocks, {machine.compute_text()}"
        self.how["update"] = f"Adam in host memory, fp32, {machine.update_threads} threads, {params} parameters"
        self.how["memory"] = f"the bytes of an update moved by {machine.cores} threads"
        self.how["downcast"] = f"fp32 to bf16, {machine.torch_threads} threads"
        reason = "" if machine.volumes else "not measured: no plan was to use a disk, or there is none"
        try:
            if machine.volumes:
                made += self._disk_loads(min(_LEAST_BYTES, room), undo)
        except (ConfigError, StoreError, UnsupportedError) as error:
            if machine.path_given:
                raise
            reason = f"no disk tier: {error}"
        if not machine.shared_memory:
            made += machine.device_loads()
            self.how["h2d"] = "memory that training page-locks to device"
            self.how["d2h"] = "device to memory that training page-locks"
            self.how["device_update"] = "torch's fused AdamW on the device, fp32"
        return {load.name: load for load in made}, reason

    @property
    def least_bytes(self) -> int:
        """Bytes of all loads, none of which takes more than it must."""
        return self.machine.least_bytes() + _SHARES * _LEAST_SHARE_BYTES

    @property
    def wanted_bytes(self) -> int:
        """Bytes of a load that caches do not hold."""
        return max(_LEAST_BYTES, 4 * self.machine.cache_bytes)

    @property
    def load_bytes(self) -> int:
        """Bytes of a load."""
        return min(self.wanted_bytes, self._share_bytes())

    def _share_bytes(self) -> int:
        """The memory that each load may take beyond its minimum.

        Raises:
            OutOfMemoryBudgetError: The minimum does not fit the free memory.
        """
        free, least = available_memory_bytes(), self.least_bytes
        needed = least * 4 // 3
        if needed > free:
            raise OutOfMemoryBudgetError(
                f"measuring this machine needs {format_bytes(needed)} of free memory; {format_bytes(free)} are free. Free memory, "
                f"or pass hardware_profile=, or name its file in LIGHTNING_HETERO_HARDWARE (from `lightning-hetero profile`).",
                needed_bytes=needed,
            )
        most = free * 3 // 4 if self.room is None else min(free * 3 // 4, max(self.room, least))
        return _LEAST_SHARE_BYTES + (most - least) // _SHARES

    def _disk_loads(self, most_bytes: int, undo: ExitStack) -> tuple[loads.DiskTransfer, loads.DiskTransfer]:
        machine, balance, num_disks = self.machine, None, len(self.machine.paths)
        num_bytes = min(most_bytes, machine.disk_capacity_bytes() // _DISK_SHARE)
        if num_disks > 1:
            each = measure_disks(machine.paths, replace(machine.engine, num_disks=1))
            self.how["disks"] = "each alone: " + "; ".join(map(str, each))
            balance = Balance([disk.both_bytes_per_s for disk in each])
        directory = StoreDirectory.create_or_adopt(
            None, default_root=machine.paths[0], further=machine.paths[1:], balance=balance, manifest={"benchmark": "disk"},
            needed_bytes=loads.disk_bytes(num_bytes, num_disks),
        )  # fmt: skip
        undo.callback(directory.close)
        reads, writes = loads.disk_loads(directory, num_bytes, machine.engine, undo)
        how = f"{machine.disk_name()}, direct, {reads.backend}, {num_bytes // MIB} MiB of files"
        self.how["read"], self.how["write"] = f"sequential reads of {how}", f"sequential writes of {how}"
        return reads, writes

    def _profile(self, results: Sequence[Round], kinds: dict[str, frozenset[str]], without_disk: str) -> HardwareProfile:
        machine, when = self.machine, _now()
        no_copies = "nothing is copied: the device is the host"
        no_disk = without_disk or "none"
        source = {"disks": self.how["disks"]} if "disks" in self.how else {}
        source |= {
            "disk_duplex": no_disk,
            **dict.fromkeys(("collective_bytes_per_s", "peer_bytes_per_s", "meeting_s"), "one device"),
        }

        def rate(key: str, load: str, otherwise: str = "") -> float:
            if load not in self.how:
                source[key] = otherwise
                return 0.0
            found = alone(results, load)
            source[key] = f"measured {when}: {self.how[load]}; {found}"
            return found.value

        updates = "update" if machine.shared_memory else "device_update"
        contention = {}
        for mine, others, found in _contention(results, kinds):
            contention[f"{mine}|{others}"] = found.value
            source[f"contention.{mine}|{others}"] = f"measured {when}: {mine} beside {others}; {found}"
        duplex = False
        if "disk" in kinds:
            both = Measured.of(progress(done, kinds["disk"], kinds["disk"]) for done in results)
            duplex = both.value > _DUPLEX
            source["disk_duplex"] = (
                f"measured {when}: reads and writes at once reach {both.value:.2f} of their rates alone, added up (1: they share "
                f"the disk, 2: they do not); {both}"
            )
        return HardwareProfile(
            name=machine.name(),
            device_memory_bytes=available_memory_bytes() if machine.shared_memory else machine.device_memory_bytes(),
            host_memory_bytes=available_memory_bytes(),
            disk_capacity_bytes=0,
            device_flop_per_s=rate("device_flop_per_s", "compute"),
            link_h2d_bytes_per_s=rate("link_h2d_bytes_per_s", "h2d", no_copies),
            link_d2h_bytes_per_s=rate("link_d2h_bytes_per_s", "d2h", no_copies),
            disk_read_bytes_per_s=rate("disk_read_bytes_per_s", "read", no_disk),
            disk_write_bytes_per_s=rate("disk_write_bytes_per_s", "write", no_disk),
            disk_duplex=duplex,
            host_dram_bytes_per_s=rate("host_dram_bytes_per_s", "memory"),
            cpu_update_params_per_s=rate("cpu_update_params_per_s", "update"),
            device_update_params_per_s=rate("device_update_params_per_s", updates),
            cpu_downcast_params_per_s=rate("cpu_downcast_params_per_s", "downcast"),
            shared_memory=machine.shared_memory,
            unified_memory=machine.unified_memory,
            contention=contention,
            source=source,
        )


def _experiments(names: Sequence[str], kinds: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """Sets of loads to run together: each alone, kinds, pairs of kinds, all but compute, all."""
    groups = [frozenset({name}) for name in names] + list(kinds)
    groups += [a | b for a, b in combinations(kinds, 2)]
    for some in (kinds[1:], kinds):
        if len(some) > 2:
            groups.append(frozenset().union(*some))
    return list(dict.fromkeys(groups))


def _contention(results: Sequence[Round], kinds: dict[str, frozenset[str]]) -> Iterator[tuple[str, str, Measured]]:
    """Factors of each kind beside each other kind and beside all.

    Copies beside the other direction.
    """
    if (copies := kinds.get("copy")) is not None:
        slower = (max(1.0, len(copies) / progress(done, copies, copies)) for done in results)
        yield "copy", "copy", Measured.of(slower)
    for running in results[0]:
        together = [kind for kind, members in kinds.items() if members <= running]
        if len(together) < 2:
            continue
        for mine in together:
            others = sorted(set(together) - {mine})
            beside = frozenset[str]().union(*(kinds[kind] for kind in others))
            yield mine, "+".join(others), slowdown(results, kinds[mine], beside)
