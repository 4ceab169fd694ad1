"""ProTrain: persistent chunks, buffers and interleaved policies, by exhaustive search.

Source: "ProTrain: Efficient LLM Training via Automatic Memory Management". The formulas are in
``formulas.py``, the configurations in ``search_space.py``, the search in ``search.py``; what the
paper leaves open is marked [inferred] there and discussed in docs/planners/protrain.md.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering.rank_rules import rules_of
from lightning_hetero.planners.evaluation import evaluated, with_paper_optimum
from lightning_hetero.planners.one_rank import all_ranks, one_rank
from lightning_hetero.planners.protrain import formulas
from lightning_hetero.planners.protrain.search import search
from lightning_hetero.planners.protrain.search_space import Configuration, Space
from lightning_hetero.units import format_bytes

_EVALUATIONS = 8  # refusals of the simulator that lead to another search


def plan(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    fragmentation: float = 1.0,
    chunk_interval: int = 1024,
    chunk_span: int = 32 * 2**20,
    updates: Updates = Updates.IN_BACKWARD,
) -> Plan:
    """ProTrain's plan: the fastest configuration by its estimators that the simulator finds to fit.

    Args:
        model: The model.
        hardware: The machine.
        fragmentation: Device memory that the allocator takes for one byte asked for (eq. 10), at
            least 1.
        chunk_interval: Grid of the search for the chunk size, elements.
        chunk_span: Its length, elements.
        updates: When updates may run: during backward, or only once all gradients are known.

    Raises:
        ConfigError: Several devices and no rate for collectives, or a fragmentation factor below 1.
        PlanError: No configuration fits; ProTrain has no disk tier.
    """
    if hardware.shared_memory:  # devices of their own update what persists there, which ranks cannot run
        model, hardware = one_rank(model, hardware)
    space = space_of(*all_ranks(model, hardware), fragmentation=fragmentation, chunk_interval=chunk_interval, chunk_span=chunk_span)
    refusal = first_refusal = optimum = None
    for _ in range(_EVALUATIONS):
        config = search(space)
        if config is None:
            break
        emitted = rules_of(hardware).nearest(emit(space, config))
        optimum = optimum or emitted
        try:
            return with_paper_optimum(evaluated(emitted, model, hardware, updates=updates), optimum, first_refusal)
        except PlanError as error:  # the runtime needs more than the estimators
            if hardware.shared_memory or not error.tier:  # no other configuration helps
                raise
            refusal, first_refusal, missing = error, first_refusal or error, max(error.shortfall_bytes, 1)
        if refusal.tier == Tier.DEVICE:
            space = replace(space, device_bytes_allowed=space.device_bytes(config) - missing)
        else:
            space = replace(space, host_bytes_allowed=space.host_bytes(config) - missing)
    raise refusal or infeasible(space)


def space_of(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    fragmentation: float = 1.0,
    chunk_interval: int = 1024,
    chunk_span: int = 32 * 2**20,
) -> Space:
    """The configurations to choose from; arguments and errors as for :func:`plan`."""
    if hardware.world_size > 1 and not hardware.between_devices_bytes_per_s:
        raise ConfigError(
            f"hardware profile {hardware.name!r} has world_size={hardware.world_size} and collective_bytes_per_s=0; ProTrain "
            f"shards over all devices. Measure or give collective_bytes_per_s, or set world_size=1."
        )
    if fragmentation < 1:
        raise ConfigError(f"fragmentation={fragmentation!r}; allowed: at least 1, what the allocator takes for one byte asked for.")
    chunk_params = formulas.best_chunk_params(formulas.weight_elements(model), interval=chunk_interval, span=chunk_span)
    return Space(
        model=model,
        hardware=hardware,
        chunk_params=chunk_params,
        device_bytes_allowed=int(hardware.device_memory_bytes / fragmentation),
        host_bytes_allowed=hardware.host_memory_bytes,
    )


def emit(space: Space, config: Configuration) -> Plan:
    """The configuration as a plan, before it is evaluated."""
    model = space.model
    kinds = dict(zip(space.layers, space.kinds(config), strict=True))
    persistent = {block for chunk in space.chunks[: config.persistent_chunks] for block in chunk}
    rows = []
    for index, block in enumerate(model.blocks):
        kind = kinds.get(index, Saved.KEEP)
        tier, lane = (Tier.DEVICE, UpdateLane.DEVICE) if index in persistent else (Tier.HOST, UpdateLane.CPU)
        boundary = Saved.SWAP_HOST if kind is Saved.SWAP_HOST else Saved.KEEP
        rows.append(BlockPlan(name=block.name, weights=tier, state=tier, update=lane, saved=kind, boundary=boundary))
    return Plan(
        name="protrain",
        blocks=tuple(rows),
        prefetch_depth=space.prefetch_depth,
        gradient_depth=space.gradient_depth(config),
        priority=False,  # eq. 2: the step ends when both updates have
        device_cache_bytes=None if space.hardware.shared_memory else config.chunk_buffers * space.buffer_bytes,
        objective_s=space.iteration_s(config),
        decisions={
            "chunk_params": space.chunk_params,
            "persistent_chunks": config.persistent_chunks,
            "chunk_buffers": config.chunk_buffers,
            "swap_blocks": config.swap_blocks,
            "swap_interval": space.swap_interval,
            "checkpoint_blocks": config.checkpoint_blocks,
        },
    )


def _least_missing(space: Space) -> tuple[int, int]:
    """Bytes of device and host memory that the cheapest configuration lacks."""
    counts = np.array(space.persistent_counts())
    states = np.array([0 if space.hardware.shared_memory else space.persistent_bytes[p] for p in counts])
    on_device = states + np.array([space.least_buffers(p) for p in counts]) * space.buffer_bytes
    on_host = np.array([space.least_host_bytes[p] for p in counts])
    rows = []
    for swap in range(space.most_swaps + 1):
        rooms, _ = space.rooms_and_order(swap)
        device = np.maximum(0, on_device - max(rooms))  # host: not affected
        host = np.maximum(0, on_host + space.swapped_bytes(swap) - space.host_bytes_allowed)
        best = np.lexsort((device + host, device > 0, (device > 0) & (host > 0)))[0]
        missing = int(device[best]), int(host[best])
        rows.append((all(missing), missing[0] > 0, sum(missing), missing))
    return min(rows)[-1]


def infeasible(space: Space) -> PlanError:
    """The error if nothing fits, for the configuration that needs the cheapest remedy."""
    device, host = _least_missing(space)
    name = f"no plan of ProTrain fits model {space.model.name!r} on {space.hardware.name!r}"
    if not device and not host:
        return PlanError(
            f"{name}: memory suffices, but the machine cannot update where the weights would live. Got "
            f"cpu_update_params_per_s={space.hardware.cpu_update_params_per_s:g}, "
            f"device_update_params_per_s={space.hardware.device_update_params_per_s:g}; measure or give the one that is 0."
        )
    if device >= host:
        return PlanError(
            f"{name}: the device needs at least {format_bytes(space.device_bytes_allowed + device)}, "
            f"{format_bytes(space.device_bytes_allowed)} are allowed, {format_bytes(device)} are missing. Cheapest remedy: a "
            f"smaller batch or sequence, which shrinks activations; then smaller blocks or a larger device.",
            tier=Tier.DEVICE.value,
            shortfall_bytes=device,
        )
    return PlanError(
        f"{name}: the host needs at least {format_bytes(space.host_bytes_allowed + host)}, "
        f"{format_bytes(space.host_bytes_allowed)} are allowed, {format_bytes(host)} are missing. Cheapest remedy: a planner that "
        f"uses the disk, such as 'lohan' or 'holistic'; ProTrain has none. Else raise host_memory by that much.",
        tier=Tier.HOST.value,
        shortfall_bytes=host,
    )
