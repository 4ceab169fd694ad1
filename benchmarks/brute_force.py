"""Brute force over all plans of a small model, to compare a search with, and small models.

This enumeration shares no code with the planners. It makes the product of every block's choices,
lets the lowering refuse plans, and skips only plans that cannot be the fastest by a bound of its
own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.planners.evaluation import evaluated

MOST_PLANS = 20_000
RATES = ("cpu_update_params_per_s", "device_update_params_per_s", "link_h2d_bytes_per_s", "link_d2h_bytes_per_s")
_UPDATE_BYTES = 28  # of host memory that an update on the CPU moves for each parameter
_SAVED = (
    (Saved.KEEP, Saved.KEEP),
    (Saved.RECOMPUTE, Saved.KEEP),
    (Saved.SWAP_HOST, Saved.SWAP_HOST),
    (Saved.SWAP_DISK, Saved.SWAP_DISK),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallCase:
    """A model of few blocks, a machine, and when updates may run (``updates``)."""

    name: str
    model: ModelProfile
    hardware: HardwareProfile
    updates: Updates


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """What trying all plans gave.

    Attributes:
        plan: The fastest one with its prediction; ``None`` if none fits.
        seconds: Its step; infinite without one.
        plans: All plans of the product.
        simulated: Those that were lowered, checked and simulated; the others are refused, or cannot
            be faster.
    """

    plan: Plan | None
    seconds: float
    plans: int
    simulated: int


# ---- the product ---------------------------------------------------------------------------------


def rules(block: BlockProfile, hardware: HardwareProfile) -> list[BlockPlan]:
    """Every rule for one block.

    A rule gives tiers of weights and state, where the update runs, and how activations are kept.

    What a rule says of a block does not matter where the runtime does not ask it: pinned blocks
    keep what they save, and their weights stay on a device with memory of its own; what is not
    trained has no state.
    """
    saved = _SAVED[:1] if block.pinned or hardware.shared_memory else _SAVED if hardware.disk_capacity_bytes else _SAVED[:3]
    tiers = [t for t in Tier if t is not Tier.DISK or hardware.disk_capacity_bytes]
    found = []
    for weights, state, update, (inner, boundary) in product(tiers, tiers, UpdateLane, saved):
        if block.pinned and (weights is Tier.DISK or (weights is not Tier.DEVICE and hardware.copies_weights)):
            continue
        if not block.num_trainable_params and (state, update) != (Tier.HOST, UpdateLane.CPU):
            continue
        if not hardware.shared_memory and (state, update) == (Tier.DEVICE, UpdateLane.CPU):
            continue  # the CPU updates what is in host memory
        if hardware.ranks > 1 and hardware.shared_memory and (state is Tier.DEVICE or update is UpdateLane.DEVICE):
            continue  # such ranks update their slices on the CPU
        if hardware.ranks > 1 and weights is Tier.DISK and not hardware.gathers_in_place:
            continue  # whole weights of which ranks have copies stay in memory
        both = (weights, state) == (Tier.DEVICE, Tier.DEVICE)
        if not hardware.copies_weights and Tier.DEVICE in (weights, state) and not both:
            continue  # one memory, by another name
        with suppress(ConfigError):
            found.append(BlockPlan(name=block.name, weights=weights, state=state, update=update, saved=inner, boundary=boundary))
    return found


def least_s(rows: tuple[BlockPlan, ...], model: ModelProfile, hardware: HardwareProfile) -> float:
    """A lower bound of a plan's seconds: the work of its busiest lane, less what caches may save.

    Infinite where a rate is missing.
    """
    work = dict.fromkeys(("compute", "device", "cpu", "up", "down", "read", "write"), 0.0)
    alone = not hardware.shared_memory
    for block, row in zip(model.blocks, rows, strict=True):
        weights, state = block.num_params * model.compute_itemsize, block.num_trainable_params * model.state_itemsize
        trained = block.num_trainable_params > 0
        on_cpu, on_device = trained and row.update is UpdateLane.CPU, trained and row.update is UpdateLane.DEVICE
        work["compute"] += block.forward_s + block.backward_s + (row.saved is Saved.RECOMPUTE) * block.forward_s
        work["device"] += on_device * block.num_trainable_params
        work["cpu"] += on_cpu * block.num_trainable_params
        swapped = block.activation_bytes * (row.saved in (Saved.SWAP_HOST, Saved.SWAP_DISK))
        moves = alone and on_device and row.state is Tier.HOST
        gradients = block.num_trainable_params * model.compute_itemsize
        work["up"] += alone * on_cpu * weights + swapped + moves * state
        work["down"] += alone * on_cpu * gradients + swapped + moves * state
        to_disk = block.activation_bytes * (row.saved is Saved.SWAP_DISK)
        work["read"] += state * (row.state is Tier.DISK) + to_disk
        stored = state * (row.state is Tier.DISK) + weights * (row.weights is Tier.DISK)
        work["write"] += trained * stored + to_disk
    rates = {
        "compute": 1.0,
        "device": hardware.device_update_params_per_s if alone else hardware.cpu_update_params_per_s,
        "cpu": hardware.cpu_update_params_per_s,
        "up": hardware.link_h2d_bytes_per_s,
        "down": hardware.link_d2h_bytes_per_s,
        "read": hardware.disk_read_bytes_per_s,
        "write": hardware.disk_write_bytes_per_s,
    }
    if any(amount and not rates[lane] for lane, amount in work.items()):
        return float("inf")
    seconds = {lane: amount / rates[lane] if amount else 0.0 for lane, amount in work.items()}
    host = sum(work[lane] for lane in ("up", "down", "read", "write")) + _UPDATE_BYTES * work["cpu"]
    seconds["compute"] += seconds.pop("device")
    seconds["dram"] = host / hardware.host_dram_bytes_per_s
    if not hardware.disk_duplex:
        seconds["disk"] = seconds["read"] + seconds["write"]
    return max(seconds.values())


USUAL = (Plan(name="usual", blocks=()), Plan(name="usual", blocks=(), priority=False))
LEAST = (  # what needs less memory: fewer gradients that wait, or state in the place of activations
    *(replace(plan, prefetch_depth=1, gradient_depth=1) for plan in USUAL),
    Plan(name="least", blocks=(), update_order=UpdateOrder.AFTER_BACKWARD, priority=False),
)


def fastest(case: SmallCase) -> Fastest:
    """Tries plans by increasing lower bound, until no other one can be faster than the best.

    If no plan fits with the usual order and depths, those that need less memory are tried.
    """
    found = _fastest(case, USUAL)
    return found if found.plan is not None else _fastest(case, LEAST)


def _fastest(case: SmallCase, kinds: Sequence[Plan]) -> Fastest:
    """The fastest plan with the order and the depths of one of these."""
    model, hardware = case.model, case.hardware
    choices = [rules(b, hardware) for b in model.blocks]
    ordered = sorted(((least_s(rows, model, hardware), i, rows) for i, rows in enumerate(product(*choices))), key=lambda r: r[:2])
    best, best_s, simulated = None, float("inf"), 0
    for bound_s, _, rows in ordered:
        if bound_s >= best_s:
            break
        for kind in kinds:
            try:
                found = evaluated(replace(kind, blocks=rows), model, hardware, updates=case.updates)
            except (ConfigError, PlanError):
                continue
            simulated += 1
            assert found.predicted is not None
            seconds = found.predicted.iteration_s
            assert bound_s <= seconds * (1 + 1e-9), f"{case.name}: {rows} takes less than its bound"
            if seconds < best_s:
                best, best_s = found, seconds
    return Fastest(plan=best, seconds=best_s, plans=len(kinds) * len(ordered), simulated=simulated)


# ---- cases ---------------------------------------------------------------------------------------


def small_cases(
    count: int, seed: int, *, most_plans: int = MOST_PLANS, zero_rates: bool = False, unified: bool = False, ranks: bool = False,
    devices: bool = False,
) -> Iterator[SmallCase]:  # fmt: skip
    """Models of 1 to 3 blocks, mostly large ones, on random machines, within a number of plans.

    With ``unified`` the device of each machine is in the host's memory. With ``ranks`` model and
    machine are those of one of 2 to 4 ranks, which compute on the host's own CPU, or with
    ``devices`` on devices with memory of their own.
    """
    number = attempt = 0
    while number < count:
        rng = random.Random(f"small {seed} {attempt}")
        attempt += 1
        model = _model(rng)
        hardware = _machine(rng, model)
        if unified:
            hardware = _in_one_memory(rng, hardware, model)
        if ranks:
            model, hardware = _of_one_rank(rng, model, hardware, devices=devices)
        if zero_rates:
            hardware = replace(hardware, **dict.fromkeys(rng.sample(RATES, rng.randint(1, 2)), 0.0))
        if 2 * prod(len(rules(b, hardware)) for b in model.blocks) > most_plans:
            continue
        updates = rng.choice((Updates.IN_BACKWARD, Updates.IN_BACKWARD, Updates.AFTER_VERDICT, Updates.SPECULATIVE))
        yield SmallCase(name=f"small {seed}/{attempt - 1}", model=model, hardware=hardware, updates=updates)
        number += 1


def _model(rng: random.Random) -> ModelProfile:
    params, seconds, saved = 10 ** rng.uniform(7, 9.5), 10 ** rng.uniform(-2.5, 0), 10 ** rng.uniform(7, 9.7)
    even = rng.random() < 0.4
    ends = rng.random() < 0.3

    def block(name: str, *, pinned: bool = False) -> BlockProfile:
        size, step, kept = (int(params * _scale()), seconds * _scale(), int(saved * _scale()))
        trained = 0 if rng.random() < 0.05 else size
        return BlockProfile(
            name=name, num_params=size, num_trainable_params=trained, forward_s=step, backward_s=2 * step, forward_flop=step * 1e13,
            activation_bytes=kept, boundary_bytes=kept // 8, transient_bytes=kept // 4, pinned=pinned,
        )  # fmt: skip

    def _scale() -> float:
        return 1.0 if even else 10 ** rng.uniform(-0.7, 0.5)

    count = 1 if ends else rng.randint(1, 3)
    blocks = [block(f"layers.{i}") for i in range(count)]
    if ends:
        blocks = [block("embedding", pinned=True), *blocks, block("head", pinned=True)][: rng.randint(2, 3)]
    return ModelProfile(
        name="small", tokens=8, compute_itemsize=rng.choice((2, 2, 4)), constant_device_bytes=0, constant_host_bytes=0,
        blocks=tuple(blocks),
    )  # fmt: skip


def _of_one_rank(
    rng: random.Random, model: ModelProfile, hardware: HardwareProfile, *, devices: bool
) -> tuple[ModelProfile, HardwareProfile]:
    """One rank's slices, and its share of a machine that has about what ranks need beside them."""
    number, shapes = rng.randint(2, 4), model.shape().blocks
    weights, gradients = sum(b.weight_bytes for b in shapes), max(b.gradient_bytes for b in shapes)
    saved = sum(b.activation_bytes + b.transient_bytes for b in model.blocks)
    own = sum(b.weight_bytes + b.gradient_bytes + b.state_bytes for b in model.slice_of(number).shape().blocks)
    host = int(rng.uniform(0.6, 1.4) * (own + weights + 3 * gradients + saved))
    share = replace(
        hardware, ranks=number, collective_bytes_per_s=10 ** rng.uniform(8.5, 10.5), meeting_s=10 ** rng.uniform(-5, -3),
        gathers_in_place=rng.random() < 0.5, host_memory_bytes=host,
    )  # fmt: skip
    if not devices:
        share = replace(
            share, shared_memory=True, device_memory_bytes=host, link_h2d_bytes_per_s=0.0, link_d2h_bytes_per_s=0.0
        )  # fmt: skip
    return model.slice_of(number), share


def _in_one_memory(rng: random.Random, hardware: HardwareProfile, model: ModelProfile) -> HardwareProfile:
    """The machine with one memory, which mostly has less than all that the model could use."""
    states = sum(b.weight_bytes + b.gradient_bytes + b.state_bytes for b in model.shape().blocks)
    both = int(rng.uniform(0.4, 1.3) * (states + sum(b.activation_bytes + b.transient_bytes for b in model.blocks)))
    link = hardware.link_h2d_bytes_per_s or hardware.host_dram_bytes_per_s / 2
    return replace(
        hardware, shared_memory=False, unified_memory=True, host_memory_bytes=both,
        device_memory_bytes=int(rng.uniform(0.6, 1) * both), link_h2d_bytes_per_s=link, link_d2h_bytes_per_s=link,
    )  # fmt: skip


def _machine(rng: random.Random, model: ModelProfile) -> HardwareProfile:
    states = sum(b.weight_bytes + b.gradient_bytes + b.state_bytes for b in model.shape().blocks)
    saved = sum(b.activation_bytes + b.transient_bytes for b in model.blocks)
    shared, has_disk = rng.random() < 0.15, rng.random() < 0.6
    link, disk = 10 ** rng.uniform(8.5, 11), 10 ** rng.uniform(8.5, 10.5)
    host = int(rng.uniform(0.4, 2) * states) + 2 * 10**8 + (saved if shared else 0)
    return HardwareProfile(
        name="small", device_memory_bytes=host if shared else int(rng.uniform(0.35, 1.2) * (states + saved)),
        host_memory_bytes=host, disk_capacity_bytes=int(rng.uniform(1, 4) * (states + saved)) * has_disk, device_flop_per_s=1e13,
        link_h2d_bytes_per_s=0.0 if shared else link, link_d2h_bytes_per_s=0.0 if shared else link * rng.uniform(0.5, 1),
        disk_read_bytes_per_s=disk * has_disk, disk_write_bytes_per_s=disk * rng.uniform(0.4, 1) * has_disk,
        disk_duplex=rng.random() < 0.3, host_dram_bytes_per_s=10 ** rng.uniform(10, 11.5),
        cpu_update_params_per_s=10 ** rng.uniform(8, 10), device_update_params_per_s=10 ** rng.uniform(8.5, 11),
        cpu_downcast_params_per_s=10 ** rng.uniform(9, 10), shared_memory=shared,
        contention={"compute|update": rng.uniform(1, 1.5), "update|compute": rng.uniform(1, 1.5)} if rng.random() < 0.3 else {},
    )  # fmt: skip
