"""AutoHete's formulas: time and memory of three counts, one function for each equation.

Equation numbers and sections are those of "AutoHete: An Automatic and Efficient Heterogeneous
Training System for LLMs". What the paper leaves open is marked [inferred] and discussed in
docs/planners/autohete.md.

[Note: Which blocks]
Checkpointing goes to the first ``c`` blocks (insight 1), the CPU optimizer to the last ``o``
(insight 2). Only a block whose optimizer runs on the CPU can have its weights offloaded (``p <=
o``), so these are the first ``p`` of the last ``o`` [inferred]. Blocks that are both checkpointed
and parameter-offloaded are then ``v = min(p, max(0, c - (L - o)))``: a function of all three
counts, as the paper says it is (docs/adr/0006-autohete-blocks-in-both-sets.md).

[Note: Blocks that differ]
Where the paper multiplies a count by a block's figure, the sum over those blocks stands here. Where
it adds one more block's memory (``L - c + 1``), the largest block's stands; where it adds one
block's time (``t_fp``, ``t_bp + t_d2h``), the last block's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile


class PerBlock:
    """One figure per block in forward order, with sums over runs of blocks in constant time.

    Args:
        values: The figures.
    """

    def __init__(self, values: Iterable[float]) -> None:
        self.values = tuple(values)
        self.largest = max(self.values)
        self._ends = tuple(accumulate(self.values, initial=0))

    def sum(self, start: int, stop: int) -> float:
        """Sum over blocks ``start`` to ``stop - 1``."""
        return self._ends[stop] - self._ends[start]

    def __getitem__(self, index: int) -> float:
        return self.values[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The three decisions.

    Attributes:
        checkpoint: c, blocks that are recomputed in backward.
        offload_params: p, blocks whose weights leave the device between uses.
        offload_optimizer: o, blocks that the CPU updates.
    """

    checkpoint: int
    offload_params: int
    offload_optimizer: int


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The symbols of equations 1 to 6.

    Attributes:
        forward_s: t_fp, seconds.
        backward_s: t_bp, seconds.
        upload_s: t_h2d, seconds for a block's weights.
        download_s: t_d2h, seconds for a block's gradients.
        cpu_update_s: t_cpu, seconds.
        device_update_s: t_gpu, seconds.
        weight_bytes: 2 M_p.
        state_bytes: 12 M_p.
        activation_bytes: 2 M_a.
        boundary_bytes: 2 M_a', what a checkpointed block still saves.
        constant_device_bytes: M_gc.
        constant_host_bytes: M_cc.
        device_memory_bytes: M_gpu.
        host_memory_bytes: M_cpu.
        least_offloaded: Fewest blocks that the CPU must update: all that are trained, where the
            device cannot.
        most_offloaded: Most blocks that the CPU can update: none, where it or the link cannot.
        copies: Slices of a block that a device has, each of another rank's; the host has one.
    """

    forward_s: PerBlock
    backward_s: PerBlock
    upload_s: PerBlock
    download_s: PerBlock
    cpu_update_s: PerBlock
    device_update_s: PerBlock
    weight_bytes: PerBlock
    state_bytes: PerBlock
    activation_bytes: PerBlock
    boundary_bytes: PerBlock
    constant_device_bytes: int
    constant_host_bytes: int
    device_memory_bytes: int
    host_memory_bytes: int
    least_offloaded: int
    most_offloaded: int
    copies: int = 1

    @property
    def num_blocks(self) -> int:
        """L."""
        return len(self.forward_s.values)

    @cached_property
    def stall_s(self) -> PerBlock:
        """``max(t_h2d - t_bp, 0)``, seconds."""
        return PerBlock(max(up - back, 0.0) for up, back in zip(self.upload_s.values, self.backward_s.values, strict=True))

    @cached_property
    def recomputed_stall_s(self) -> PerBlock:
        """``max(t_h2d - t_fp - t_bp, 0)``, seconds."""
        return PerBlock(
            max(stall - forward, 0.0) for stall, forward in zip(self.stall_s.values, self.forward_s.values, strict=True)
        )


def costs(model: ModelProfile, hardware: HardwareProfile) -> Costs:
    """The formulas' symbols from the profiles. If the device is the host, copies take no time."""
    shape, shared = model.shape(), hardware.shared_memory

    def seconds(amounts: Iterable[int], rate: float) -> PerBlock:  # rate 0: excluded by the counts' bounds
        return PerBlock(amount / rate if rate else 0.0 for amount in amounts)

    trained = [b.num_trainable_params for b in shape.blocks]
    first_trained = next((i for i, params in enumerate(trained) if params), len(trained))
    copies = 1 if shared else hardware.ranks  # slices of several ranks, all of which a device has whole [inferred]
    linked = shared or (hardware.link_h2d_bytes_per_s > 0 and hardware.link_d2h_bytes_per_s > 0)
    return Costs(
        forward_s=PerBlock(b.forward_s for b in model.blocks),
        backward_s=PerBlock(b.backward_s for b in model.blocks),
        upload_s=seconds((copies * b.weight_bytes for b in shape.blocks), 0.0 if shared else hardware.link_h2d_bytes_per_s),
        download_s=seconds((copies * b.gradient_bytes for b in shape.blocks), 0.0 if shared else hardware.link_d2h_bytes_per_s),
        cpu_update_s=seconds(trained, hardware.cpu_update_params_per_s),
        device_update_s=seconds(trained, hardware.device_update_params_per_s),
        weight_bytes=PerBlock(copies * b.weight_bytes for b in shape.blocks),
        state_bytes=PerBlock(b.state_bytes for b in shape.blocks),
        activation_bytes=PerBlock(b.activation_bytes for b in shape.blocks),
        boundary_bytes=PerBlock(b.boundary_bytes for b in shape.blocks),
        constant_device_bytes=model.constant_device_bytes,
        constant_host_bytes=model.constant_host_bytes,
        device_memory_bytes=hardware.device_memory_bytes,
        host_memory_bytes=hardware.host_memory_bytes,
        least_offloaded=0 if hardware.device_update_params_per_s and hardware.ranks == 1 else len(trained) - first_trained,
        most_offloaded=len(trained) if linked and hardware.cpu_update_params_per_s else 0,
        copies=copies,
    )


def device_bytes(k: Costs, n: Counts) -> int:
    """Peak device memory, which is where forward turns into backward, bytes.

    ``2 M_a' c + 2 M_a (L - c + 1) + 2 M_p (L - p + 1) + 12 M_p (L - o) + M_gc``; see [Note: Blocks
    that differ]. Source: eq. 1.
    """
    last, first_offloaded = k.num_blocks, k.num_blocks - n.offload_optimizer
    activations = k.boundary_bytes.sum(0, n.checkpoint) + k.activation_bytes.sum(n.checkpoint, last) + k.activation_bytes.largest
    offloaded = k.weight_bytes.sum(first_offloaded, first_offloaded + n.offload_params)
    weights = k.weight_bytes.sum(0, last) - offloaded + k.weight_bytes.largest
    return int(activations + weights + k.state_bytes.sum(0, first_offloaded)) + k.constant_device_bytes


def host_bytes(k: Costs, offload_optimizer: int) -> int:
    """Host memory: ``14 M_p o + M_cc``, bytes. Source: eq. 2.

    Weights and gradients of a block share their place.
    """
    first, last = k.num_blocks - offload_optimizer, k.num_blocks
    return int(k.weight_bytes.sum(first, last) / k.copies + k.state_bytes.sum(first, last)) + k.constant_host_bytes


def forward_s(k: Costs, offload_optimizer: int) -> float:
    """Seconds of forward: ``max(t_fp L, t_h2d o + t_fp)``. Source: eq. 3.

    Every block that the CPU updates is uploaded once.
    """
    last = k.num_blocks
    return max(k.forward_s.sum(0, last), k.upload_s.sum(last - offload_optimizer, last) + k.forward_s[last - 1])


def both(k: Costs, n: Counts) -> int:
    """v, blocks that are both checkpointed and parameter-offloaded; see [Note: Which blocks]."""
    return min(n.offload_params, max(0, n.checkpoint - (k.num_blocks - n.offload_optimizer)))


def sync_s(k: Costs, n: Counts) -> float:
    """Seconds for which backward waits for weights that are fetched one block ahead.

    ``v max(t_h2d - t_fp - t_bp, 0) + (p - v) max(t_h2d - t_bp, 0)``. Source: eq. 4.
    """
    first = k.num_blocks - n.offload_optimizer
    v = both(k, n)
    return k.recomputed_stall_s.sum(first, first + v) + k.stall_s.sum(first + v, first + n.offload_params)


def backward_s(k: Costs, n: Counts) -> float:
    """Seconds of backward: the device's work and its waiting, or the CPU's work.

    ``max(t_bp L + t_fp c + t_gpu (L - o) + t_sync, t_bp + t_d2h + t_cpu o)``. Source: eq. 5.
    """
    last, first = k.num_blocks, k.num_blocks - n.offload_optimizer
    device = k.backward_s.sum(0, last) + k.forward_s.sum(0, n.checkpoint) + k.device_update_s.sum(0, first) + sync_s(k, n)
    return max(device, k.backward_s[last - 1] + k.download_s[last - 1] + k.cpu_update_s.sum(first, last))


def iteration_s(k: Costs, n: Counts) -> float:
    """Seconds of one step: ``T_fwd + T_bwd``. Source: eq. 6."""
    return forward_s(k, n.offload_optimizer) + backward_s(k, n)
