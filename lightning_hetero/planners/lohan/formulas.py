"""LoHan's formulas: the time of a step by its swapped bytes, one function for each equation.

Equation numbers and sections are those of "LoHan: Low-Cost High-Performance Framework to Fine-Tune
100B Model on a Consumer GPU". What the paper leaves open is marked [inferred] and discussed in
docs/planners/lohan.md.

[Note: Layers]
What the paper calls a layer is an operator with a saved output
(:class:`lightning_hetero.ir.model.OperatorProfile`): its output is swapped whole, or computed
again. The paper's ``2P`` is the bytes of all weights, or of all gradients, and ``12P`` those of the
optimizer state, as the profile gives them: sums over blocks, which may differ, be frozen, or
compute in fp32.

[Note: Inter-block activations]
A block is recomputed from its input, so a plan swaps the inputs of all blocks whatever else it
swaps. ``inter_block="first"``, the default, counts them so: A begins at their bytes, and they spare
no recomputation, as in the authors' code. ``"amount"`` is Algorithm 1 as printed: layers alone make
up A, and they have to reach the inputs' bytes. A then leaves the inputs out, which leave the device
beside it; this reading is kept to compare with the paper. See
docs/adr/0012-lohan-swaps-inputs-first.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile

InterBlock = Literal["amount", "first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One operator's saved output; see [Note: Layers].

    Attributes:
        block: The block's name.
        operator: The operator's name in the block.
        flop: FLOP that recomputing it costs.
        num_bytes: Bytes of the output.
    """

    block: str
    operator: str
    flop: float
    num_bytes: int

    @property
    def name(self) -> str:
        """``"block.operator"``."""
        return f"{self.block}.{self.operator}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantities:
    """The symbols of equations 1 to 7, from the profiles.

    Attributes:
        forward_flop: F, FLOP of one forward of all blocks.
        weight_bytes: 2P, bytes of all weights as they compute.
        gradient_bytes: 2P, bytes of all gradients.
        read_bytes: 14P, what one step's updates read from disk: state and weights, bytes.
        written_bytes: 14P, what they write, bytes.
        flop_per_s: THP, FLOP/s.
        upload_bytes_per_s: BW_G of the direction host to device, bytes/s.
        download_bytes_per_s: BW_G of the direction device to host, bytes/s.
        disk_read_bytes_per_s: BW_S2M, bytes/s.
        disk_write_bytes_per_s: BW_M2S, bytes/s.
        disk_duplex: Reads and writes overlap; the paper's disks are simplex, so that their times
            add.
        host_bytes: MEM, host memory left for activations, bytes.
        boundary_bytes: A_interBlock, the inputs of all blocks that may swap, bytes.
        swapped_first_bytes: Bytes that are swapped before any layer is: 0 or ``boundary_bytes``.
        kept_flop: FLOP of one forward of pinned blocks, which backward never repeats.
        copies: Slices that cross the link of one of several devices for each of its own: all of
            them do [inferred].
    """

    forward_flop: float
    weight_bytes: float
    gradient_bytes: float
    read_bytes: float
    written_bytes: float
    flop_per_s: float
    upload_bytes_per_s: float
    download_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    disk_duplex: bool
    host_bytes: float
    boundary_bytes: float
    swapped_first_bytes: float = 0.0
    kept_flop: float = 0.0
    copies: int = 1

    @property
    def dropped_flop(self) -> float:
        """F_r without swaps: FLOP of one forward of all that backward may have to repeat."""
        return self.forward_flop - self.kept_flop

    def disk_s(self, read_bytes: float, written_bytes: float) -> float:
        """Seconds of reads and writes, which share the disk unless it is duplex [inferred]."""
        read, write = read_bytes / self.disk_read_bytes_per_s, written_bytes / self.disk_write_bytes_per_s
        return max(read, write) if self.disk_duplex else read + write


def quantities(
    model: ModelProfile, hardware: HardwareProfile, *, host_bytes: float, inter_block: InterBlock = "first"
) -> Quantities:
    """The formulas' symbols.

    On a machine whose device is its host, copies take no time and nothing can overflow: links and
    MEM are infinite.

    Args:
        model: The model.
        hardware: The machine.
        host_bytes: MEM, host memory left for activations, bytes.
        inter_block: See [Note: Inter-block activations].
    """
    shape, shared = model.shape(), hardware.shared_memory
    trained = [b for b in shape.blocks if b.num_trainable_params]
    state = float(sum(b.state_bytes for b in shape.blocks))
    weights = float(sum(b.weight_bytes for b in shape.blocks))
    boundary = float(sum(b.boundary_bytes for b in shape.blocks if not b.pinned))
    return Quantities(
        forward_flop=sum(b.forward_flop for b in model.blocks),
        weight_bytes=weights,
        gradient_bytes=float(sum(b.gradient_bytes for b in shape.blocks)),
        read_bytes=state + weights,
        written_bytes=state + sum(b.weight_bytes for b in trained),
        flop_per_s=hardware.device_flop_per_s,
        upload_bytes_per_s=math.inf if shared else hardware.link_h2d_bytes_per_s,
        download_bytes_per_s=math.inf if shared else hardware.link_d2h_bytes_per_s,
        disk_read_bytes_per_s=hardware.disk_read_bytes_per_s,
        disk_write_bytes_per_s=hardware.disk_write_bytes_per_s,
        disk_duplex=hardware.disk_duplex,
        host_bytes=math.inf if shared else max(0.0, host_bytes),
        boundary_bytes=boundary,
        swapped_first_bytes=boundary if inter_block == "first" else 0.0,
        kept_flop=sum(b.forward_flop for b in model.blocks if b.pinned),
        copies=hardware.ranks,
    )


def spilled_bytes(swapped_bytes: float, host_bytes: float) -> float:
    """Swapped bytes that exceed host memory and go to disk: ``max(0, A - MEM)``, bytes.

    Source: eq. 3, which has no clamp [inferred].
    """
    return max(0.0, swapped_bytes - host_bytes)


def forward_s(q: Quantities, swapped_bytes: float) -> float:
    """Seconds of the forward stage: compute, swap-outs, uploads and the disk overlap.

    ``max(F/THP, A/BW_G, 2P/BW_G, 2P/BW_S2M + spill/BW_M2S)``. Source: eqs. 2 and 4.
    """
    return max(
        q.forward_flop / q.flop_per_s,
        swapped_bytes / q.download_bytes_per_s,
        q.copies * q.weight_bytes / q.upload_bytes_per_s,
        q.disk_s(q.weight_bytes, spilled_bytes(swapped_bytes, q.host_bytes)),
    )


def backward_s(q: Quantities, swapped_bytes: float, recomputed: float) -> float:
    """Seconds of the backward stage, updates included.

    ``max((2F + F_r)/THP, 2P/BW_G, (2P + A)/BW_G, (14P + spill)/BW_S2M + 14P/BW_M2S)``. Source: eq.
    5.

    Args:
        q: The symbols.
        swapped_bytes: A, bytes.
        recomputed: F_r, FLOP.
    """
    return max(
        (2 * q.forward_flop + recomputed) / q.flop_per_s,
        q.copies * q.gradient_bytes / q.download_bytes_per_s,
        (q.copies * q.weight_bytes + swapped_bytes) / q.upload_bytes_per_s,
        q.disk_s(q.read_bytes + spilled_bytes(swapped_bytes, q.host_bytes), q.written_bytes),
    )


def iteration_s(q: Quantities, swapped_bytes: float, recomputed: float) -> float:
    """Seconds of one step: ``T_f + T_b``. Source: eq. 1."""
    return forward_s(q, swapped_bytes) + backward_s(q, swapped_bytes, recomputed)


def offloading_benefit(flop: float, num_bytes: float) -> float:
    """FLOP spared by a byte swapped, ``OB = FLOP_layer / A_layer``. Source: eq. 6."""
    return flop / num_bytes


def swap_order(model: ModelProfile) -> tuple[Layer, ...]:
    """All layers of the unpinned blocks, the greatest offloading benefit first.

    Equal ones come operator by operator, each of all blocks, as in the authors' code: so every
    block swaps about as much.
    """
    layers = [
        (-offloading_benefit(operator.flop, operator.bytes), place, index, operator)
        for index, block in enumerate(model.blocks)
        for place, operator in enumerate(block.operators)
        if operator.bytes and not block.pinned  # without bytes: not swapped
    ]
    return tuple(
        Layer(block=model.blocks[index].name, operator=operator.name, flop=operator.flop, num_bytes=operator.bytes)
        for _, _, index, operator in sorted(layers, key=lambda layer: layer[:3])
    )


def recomputed_flop(q: Quantities, layers: Sequence[Layer], swapped_bytes: float) -> float:
    """F_r if ``swapped_bytes`` are swapped in the order of ``layers``, linear inside a layer.

    ``F - sum_{m<=i} FLOP_m - FLOP_{i+1} (A - sum_{n<=i} A_n) / A_{i+1}``. Source: eq. 7.
    """
    left, rest = q.dropped_flop, swapped_bytes - q.swapped_first_bytes
    for layer in layers:
        if rest <= 0:
            break
        left -= layer.flop * min(1.0, rest / layer.num_bytes)
        rest -= layer.num_bytes
    return max(0.0, left)
