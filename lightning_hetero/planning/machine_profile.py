"""The hardware profile that a fit is planned with: the user's, or one measured on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.lanes import EmulatedDevice
from lightning_hetero.lanes.decisions import Decisions
from lightning_hetero.planners.one_rank import share_of
from lightning_hetero.planning.together import ALONE, Together
from lightning_hetero.profiling import loads
from lightning_hetero.profiling.collectives import Network, measure
from lightning_hetero.profiling.timing import Load
from lightning_hetero.runtime.session import Session
from lightning_hetero.units import MIB, format_bytes

ENVIRONMENT = "LIGHTNING_HETERO_HARDWARE"
_STATE_BYTES = 8
_NETWORK_PARAMS, _HIDDEN, _TOKENS = 1 << 20, 512, 64  # of what collectives are measured beside: 32 MiB
_COPIED_BYTES = 4 * MIB

log = logging.getLogger(__name__)


class Machine:
    """The machine that a strategy plans for.

    Args:
        given: Its profile, or the profile's file. ``None``: the file that the environment variable
            names, otherwise micro-benchmarks.

    Raises:
        ConfigError: The file cannot be read or is not a profile.
    """

    def __init__(self, given: str | os.PathLike[str] | HardwareProfile | None) -> None:
        self._given = given if given is None or isinstance(given, HardwareProfile) else HardwareProfile.load(Path(given))
        self._network: Network | None = None  # among ranks, once it has been measured

    @property
    def is_given(self) -> bool:
        """Whether the user has given a profile, so that nothing is measured."""
        return self._given is not None or ENVIRONMENT in os.environ

    def profile(self, session: Session, *, disk: bool = True, again: bool = False, together: Together = ALONE) -> HardwareProfile:
        """The profile, measured if none was given; of several ranks each one's share.

        Args:
            session: The model that trains.
            disk: Plans may use the disk.
            again: The measured profile is wrong. A given profile stays, with a warning.
            together: The ranks that share the model; see [Note: Ranks are measured in turns and
                together].

        Raises:
            ConfigError: The environment variable names no profile, the profile and the session have
                different kinds of devices, or the profile is of another number of devices.
            OutOfMemoryBudgetError: Too little memory is free to measure in.
        """
        found = self._given
        if found is None:
            file = os.environ.get(ENVIRONMENT)
            found = HardwareProfile.load(file) if file else None
        given = [bool(row[0]) for row in together.numbers(found is not None)]
        if any(given) != all(given):
            lacking = ", ".join(str(rank) for rank, has in enumerate(given) if not has)
            raise ConfigError(
                f"no hardware profile was given on ranks {lacking}, but one on the others. Pass it, or set {ENVIRONMENT}, on all."
            )
        if found is None:
            if together.decisions is not None:
                session.running.rest()  # so that the rank that measures has nothing to agree on with those that wait for it
            found = together.measured(lambda: _measured(session, disk=disk, again=again, ranks=together.shards))
        elif again:
            log.warning(
                "Steps take other times than hardware profile %r predicts. It was given, so the machine is not measured; pass "
                "another hardware_profile, or none.",
                found.name,
            )
        if together.decisions is not None and found.ranks == 1:
            found = self._shared(found, session, together.decisions, again=again)
        device = session.options.device
        if isinstance(device, EmulatedDevice) and found.shared_memory:
            found = emulated(found, device, session.options.engine.num_disks)
        if together.decisions is not None and together.decisions.peers is None:  # as those of several nodes
            found = replace(found, peer_bytes_per_s=0.0)
        if isinstance(device, EmulatedDevice):
            return found
        if found.shared_memory != (device is None):
            where = "the CPU" if device is None else str(device.device)
            own = "the host's own CPU as device" if found.shared_memory else "a device with memory of its own"
            raise ConfigError(
                f"hardware_profile {found.name!r} describes {own}, but training computes on {where}. Pass the profile that "
                f"`lightning-hetero profile` measures on this machine{' with --device cpu' if device is None else ''}, or none."
            )
        return found

    def _shared(self, machine: HardwareProfile, session: Session, decisions: Decisions, *, again: bool) -> HardwareProfile:
        """One rank's share of a machine, with the rates of collectives, measured if it has none."""
        ranks = decisions.shards
        if machine.world_size not in (1, ranks):
            raise ConfigError(
                f"hardware_profile {machine.name!r} has world_size={machine.world_size}, and {ranks} devices train together "
                f"on a node. Pass one of {ranks} devices, or of one, such as `lightning-hetero profile` measures."
            )
        if machine.world_size == 1:
            if self._network is None or again:
                self._network = _network(session, decisions)
            found = self._network
            keys = ["collective_bytes_per_s", "peer_bytes_per_s", "meeting_s", *(f"contention.{pair}" for pair in found.contention)]
            machine = replace(
                machine,
                world_size=ranks,
                collective_bytes_per_s=found.bytes_per_s,
                peer_bytes_per_s=found.peer_bytes_per_s,
                meeting_s=found.meeting_s,
                contention={**machine.contention, **found.contention},
                source={**machine.source, **dict.fromkeys(keys, found.text)},
            )
        return replace(share_of(machine), gathers_in_place=session.file is not None)


def _network(session: Session, decisions: Decisions) -> Network:
    """Measures collectives beside what else ranks do on the host."""
    executor = session.running
    executor.rest()
    device, cpu = session.options.device, torch.device("cpu")
    with loads.Update(_NETWORK_PARAMS, session.options.engine.threads()) as update:
        other: Load
        if device is None:
            other = loads.Compute(cpu, dtype=torch.float32, hidden=_HIDDEN, tokens=_TOKENS, cache_bytes=0, most_bytes=0)
        else:
            other = loads.Copy(device.device, to_device=True, num_bytes=_COPIED_BYTES)
        beside = {"update": update, "compute" if device is None else "copy": other}
        return measure(decisions, beside, None if device is None else device.device)


def emulated(host: HardwareProfile, device: EmulatedDevice, num_disks: int = 1) -> HardwareProfile:
    """A machine with an emulated device: the host's rates, and the device's own where it sets them.

    Without a set bandwidth copies run at half of the memory's, because they read and write memory.
    Set rates of updates are for fp32 weights with 8 bytes of state each. The set rate of a disk is
    that of each.
    """
    h2d, d2h = (rate or host.host_dram_bytes_per_s / 2 for rate in (device.h2d_bytes_per_s, device.d2h_bytes_per_s))
    disks = num_disks * (device.disk_bytes_per_s or 0.0)
    read, write = (disks or rate for rate in (host.disk_read_bytes_per_s, host.disk_write_bytes_per_s))
    on_cpu, on_device = (
        host.cpu_update_params_per_s / slowdown if rate is None else rate / _STATE_BYTES
        for rate, slowdown in ((device.cpu_update_bytes_per_s, 1.0), (device.device_update_bytes_per_s, device.compute_slowdown))
    )
    figures = ["device_memory_bytes", "link_h2d_bytes_per_s", "link_d2h_bytes_per_s", "device_update_params_per_s"]
    figures += ["disk_read_bytes_per_s", "disk_write_bytes_per_s", "disk_duplex"] if device.disk_bytes_per_s else []
    figures += ["cpu_update_params_per_s"] if device.cpu_update_bytes_per_s else []
    figures += ["collective_bytes_per_s"] if device.net_bytes_per_s else []
    figures += ["meeting_s"] if device.net_latency_s else []
    figures += ["peer_bytes_per_s"] if device.peer_bytes_per_s else []
    return replace(
        host,
        name=f"{host.name}, emulated device of {format_bytes(device.memory_bytes)}",
        shared_memory=False,
        unified_memory=device.unified,
        device_memory_bytes=device.memory_bytes,
        device_flop_per_s=host.device_flop_per_s / device.compute_slowdown,
        cpu_update_params_per_s=on_cpu,
        device_update_params_per_s=on_device,
        disk_read_bytes_per_s=read,
        disk_write_bytes_per_s=write,
        disk_duplex=host.disk_duplex or device.disk_bytes_per_s is not None,
        link_h2d_bytes_per_s=h2d,
        link_d2h_bytes_per_s=d2h,
        collective_bytes_per_s=device.net_bytes_per_s or host.collective_bytes_per_s,
        peer_bytes_per_s=device.peer_bytes_per_s or host.peer_bytes_per_s,
        meeting_s=device.net_latency_s or host.meeting_s,
        source={**host.source, **dict.fromkeys(figures, "the emulated device")},
    )


@contextmanager
def _alone(session: Session) -> Iterator[int | None]:
    """Between two batches: the machine may be measured in what the budget leaves."""
    device, executor = session.options.device, session.running
    with session.cleared() if device is not None and device.partitioned else nullcontext():
        if session.options.host_memory is None:
            yield None
            return
        executor.rest()
        for block in session.blocks:
            executor.residency.weights.release(block)  # cached weights come back when they are used
        yield executor.heap.room()


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """So many threads of torch compute in the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measured(session: Session, *, disk: bool, again: bool, ranks: int) -> HardwareProfile:
    """The machine, with the threads of all ranks."""
    with _threads(ranks * torch.get_num_threads()) if ranks > 1 else nullcontext():
        return _measured_alone(session, disk=disk, again=again, ranks=ranks)


def _measured_alone(session: Session, *, disk: bool, again: bool, ranks: int) -> HardwareProfile:
    from lightning_hetero.profiling import hardware

    device = session.options.device
    measure = partial(
        hardware.measure,
        device=device.device.type if device is not None else "cpu",
        update_threads=ranks * session.options.engine.threads(),
        disk=disk,
        refresh=again,
        alone=partial(_alone, session),
    )
    try:
        return measure(session.disk_roots())
    except ConfigError as error:  # for example a file system in memory, which is no tier
        log.info("planning without a disk: %s", error)
        found = measure(None)
        return replace(found, disk_capacity_bytes=0, disk_read_bytes_per_s=0.0, disk_write_bytes_per_s=0.0)
