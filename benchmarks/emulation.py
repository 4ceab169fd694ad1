"""A small copy of a paper's machine: the proportions of its step, on an emulated device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from ablation_plans import Experiment
from gpt2 import Size

from lightning_hetero import EmulatedDevice
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import Tier
from lightning_hetero.planning.machine_profile import emulated
from lightning_hetero.profiling.presets import model as preset_model
from lightning_hetero.profiling.presets import paper_machine
from lightning_hetero.profiling.presets.transformers import Gpt, profile
from lightning_hetero.units import GIB

SEQUENCE = 1024  # of the papers' models
WIDTH = 64  # of the small one: its real compute is a small share of what it is made to take
VOCABULARY = 256
PRECISION, ITEMSIZE = "bf16-true", 2  # as in the papers, so that weights, gradients and state have their proportions
_LONGEST = 16  # attention takes no set time, so sequences stay short
_UNSET = 1e9  # parameters a second, bytes a second: what takes no time beside what is set


@dataclass(frozen=True, slots=True, kw_only=True)
class Proportions:
    """A step of a machine, relative to its compute: seconds per second of forward and backward.

    Attributes:
        upload: The weights' one way to the device.
        download: The gradients' one way from it.
        cpu_update: All updates on the CPU, with state in memory.
        device_update: The same on the device.
        disk: What all updates read from disk and write there.
    """

    upload: float
    download: float
    cpu_update: float
    device_update: float
    disk: float

    @classmethod
    def of(cls, model: ModelProfile, machine: HardwareProfile) -> Self:
        """Those of the repeated blocks of a model; one device's share of a machine with several."""
        blocks, compute = repeated(model), compute_s(model)
        shapes = [b for b in model.shape().blocks if not b.pinned]
        params = sum(b.num_trainable_params for b in blocks)
        stored = sum(b.state_bytes + b.weight_bytes for b in shapes)
        read, write = (stored / rate if rate else 0.0 for rate in (machine.disk_read_bytes_per_s, machine.disk_write_bytes_per_s))
        return cls(
            upload=sum(b.weight_bytes for b in shapes) / machine.link_h2d_bytes_per_s / compute,
            download=sum(b.gradient_bytes for b in shapes) / machine.link_d2h_bytes_per_s / compute,
            cpu_update=params / machine.cpu_update_params_per_s / compute,
            device_update=params / machine.device_update_params_per_s / compute,
            disk=(max(read, write) if machine.disk_duplex else read + write) / compute,
        )


def repeated(model: ModelProfile) -> list[BlockProfile]:
    """The blocks that are repeated."""
    return [b for b in model.blocks if not b.pinned]


def compute_s(model: ModelProfile) -> float:
    """Seconds of forward and backward, without anything else."""
    return sum(b.forward_s + b.backward_s for b in model.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """One experiment made small.

    Attributes:
        wanted: The paper's proportions.
        size: The small model.
        batch: Its sequences.
        sequence: Their tokens.
        flop_per_s: At what rate it computes.
        device: The emulated device, and the rates of what is beside it.
        model: The small model's profile, from its dimensions alone.
        machine: The emulated machine as planners and the simulator know it.
    """

    wanted: Proportions
    size: Size
    batch: int
    sequence: int
    flop_per_s: float
    device: EmulatedDevice
    model: ModelProfile
    machine: HardwareProfile

    @classmethod
    def of(cls, experiment: Experiment, *, compute_s: float, layers: int) -> Self:
        """An experiment in so many layers, whose compute takes so long.

        Activations are to weights as tokens are to the width, so the small model has the paper's
        tokens per width.
        """
        paper = paper_machine(experiment.machine)
        theirs = preset_model(experiment.model, batch=experiment.batch, sequence=SEQUENCE, hardware=paper)
        width = repeated(theirs)[0].boundary_bytes / theirs.compute_itemsize / theirs.tokens
        tokens = max(16, round(WIDTH * theirs.tokens / width))
        sequence = min(_LONGEST, tokens)
        batch = tokens // sequence
        flop_per_s = 3 * layers * 24 * batch * sequence * WIDTH**2 / compute_s
        wanted = Proportions.of(theirs, paper)
        gpt = Gpt(layers=layers, hidden=WIDTH, heads=2, vocabulary=VOCABULARY, dropout=False)
        machine = _machine(flop_per_s)
        model = profile("small", gpt, batch=batch, sequence=sequence, hardware=machine, itemsize=ITEMSIZE)
        device = _device(experiment, wanted, model, compute_s)
        return cls(
            wanted=wanted,
            size=Size(layers=layers, width=WIDTH, heads=2, vocabulary=VOCABULARY, context=max(64, sequence)),
            batch=batch,
            sequence=sequence,
            flop_per_s=flop_per_s,
            device=device,
            model=replace(model, constant_device_bytes=0, constant_host_bytes=0),
            machine=_with_rates(machine, device, model),
        )


def _machine(flop_per_s: float) -> HardwareProfile:
    """A host that is in nothing's way."""
    return HardwareProfile(
        name="emulated",
        device_memory_bytes=0,
        host_memory_bytes=4 * GIB,
        disk_capacity_bytes=100 * GIB,
        device_flop_per_s=flop_per_s,
        link_h2d_bytes_per_s=0.0,
        link_d2h_bytes_per_s=0.0,
        disk_read_bytes_per_s=_UNSET,
        disk_write_bytes_per_s=_UNSET,
        disk_duplex=True,
        host_dram_bytes_per_s=100 * _UNSET,
        cpu_update_params_per_s=_UNSET,
        device_update_params_per_s=_UNSET,
        cpu_downcast_params_per_s=_UNSET,
        shared_memory=True,
    )


def _with_rates(machine: HardwareProfile, device: EmulatedDevice, model: ModelProfile) -> HardwareProfile:
    """The emulated machine; set rates of updates are of state as it is in 16-bit training."""
    rates = {
        "cpu_update_params_per_s": device.cpu_update_bytes_per_s,
        "device_update_params_per_s": device.device_update_bytes_per_s,
    }
    set_rates = {key: rate / model.state_itemsize for key, rate in rates.items() if rate is not None}
    return replace(emulated(machine, device), device_flop_per_s=machine.device_flop_per_s, **set_rates)


def _device(experiment: Experiment, wanted: Proportions, model: ModelProfile, compute_s: float) -> EmulatedDevice:
    """The device with these proportions."""
    shapes = [b for b in model.shape().blocks if not b.pinned]
    weights, state = sum(b.weight_bytes for b in shapes), sum(b.state_bytes for b in shapes)
    saved = sum(b.activation_bytes + b.transient_bytes for b in model.blocks)
    held = sum(b.weight_bytes + b.state_bytes + b.gradient_bytes for b in model.shape().blocks)
    rates = {}
    if experiment.emulated_state is Tier.DISK:
        # The disk moves in each direction, in the time of the paper's updates, what those read and
        # write.
        seconds = wanted.disk if experiment.state is Tier.DISK else wanted.cpu_update
        rates["disk_bytes_per_s"] = (weights * (experiment.state is Tier.DISK) + state) / (seconds * compute_s)
    else:
        rates["cpu_update_bytes_per_s"] = state / (wanted.cpu_update * compute_s)
        rates["device_update_bytes_per_s"] = state / (wanted.device_update * compute_s)
    return EmulatedDevice(
        memory=4 * (saved + held),
        h2d_bytes_per_s=weights / (wanted.upload * compute_s),
        d2h_bytes_per_s=weights / (wanted.download * compute_s),
        **rates,
    )
