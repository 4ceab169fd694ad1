"""Every class of edges that lowering emits is there for a reason: a rule of the checker, or a run
that goes wrong without it.

A class is what waits, and for which kind of op: ``UPDATE@cpu after GRAD@d2h``, ``anchor F carried
UPDATE``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.covers import paired
from support.models import Outcome, Recipe, Shape, assert_same, run

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier, UpdateLane
from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError, ScheduleError
from lightning_hetero.ir.model import BlockShape, ModelShape, OperatorProfile
from lightning_hetero.ir.plan import Saved, UpdateOrder
from lightning_hetero.ir.schedule import Anchor, Op, Schedule, StepSignature, Updates
from lightning_hetero.lowering import DeviceRoom, check, lower
from lightning_hetero.runtime import step
from lightning_hetero.strategies import HeteroOffloadStrategy


def _of_anchor(schedule: Schedule, anchor: Anchor) -> tuple[dict[int, str], dict[tuple[Any, int], str]]:
    who = f"anchor {anchor.phase.value}"
    needs = {i: f"{who} needs {_name(schedule.ops[i])}" for i in anchor.needs}
    return needs, {edge: f"{who} carried {edge[0].value}" for edge in anchor.carried}


def _of_op(schedule: Schedule, op: Op) -> tuple[dict[int, str], dict[tuple[Any, int], str]]:
    after = {i: f"{_name(op)} after {_name(schedule.ops[i])}" for i in op.after}
    return after, {edge: f"{_name(op)} carried {edge[0].value}" for edge in op.carried}


def _name(op: Op) -> str:
    return f"{op.what}@{op.lane.value}"


def classes(schedule: Schedule) -> Iterator[str]:
    """The classes of all edges of a schedule."""
    rows = [_of_anchor(schedule, a) for a in schedule.anchors] + [_of_op(schedule, op) for op in schedule.ops]
    for of_step, carried in rows:
        yield from of_step.values()
        yield from carried.values()


def without(schedule: Schedule, left_out: str) -> Schedule:
    """The schedule without the edges of one class."""

    def kept(edges: dict[Any, str]) -> tuple[Any, ...]:
        return tuple(edge for edge, name in edges.items() if name != left_out)

    anchors, ops = [], []
    for anchor in schedule.anchors:
        needs, carried = _of_anchor(schedule, anchor)
        anchors.append(replace(anchor, needs=kept(needs), carried=kept(carried)))
    for op in schedule.ops:
        after, carried = _of_op(schedule, op)
        ops.append(replace(op, after=kept(after), carried=kept(carried)))
    return replace(schedule, anchors=tuple(anchors), ops=tuple(ops))


# ---- what the checker says -----------------------------------------------------------------------


def _layer(name: str, num_params: int, *, pinned: bool = False) -> BlockShape:
    operators = (OperatorProfile(name="attn", flop=1.0, bytes=30), OperatorProfile(name="mlp", flop=1.0, bytes=50))
    return BlockShape(
        name=name, num_params=num_params, num_trainable_params=num_params, weight_bytes=2 * num_params,
        gradient_bytes=2 * num_params, state_bytes=12 * num_params, pinned=pinned, activation_bytes=100, boundary_bytes=20,
        operators=operators,
    )  # fmt: skip


CAPACITY_BYTES = 400  # two layers' weights


def _plans(root: Tier) -> Iterator[Plan]:
    """Blocks of one kind each, beside one whose state and weights are on the host."""
    for weights, state, update, saved, order, priority in itertools.product(
        Tier, Tier, UpdateLane, (Saved.KEEP, Saved.SWAP_DISK), (UpdateOrder.OVERLAPPED, UpdateOrder.NAIVE), (True, False)
    ):
        try:
            rest = BlockPlan(name="rest", weights=root, state=state, update=update)
            layers = BlockPlan(name="layers.*", weights=weights, state=state, update=update, saved=saved)
        except ConfigError:
            continue
        on_host = BlockPlan(name="layers.1", weights=Tier.HOST if weights is Tier.DISK else weights, state=Tier.HOST)
        yield Plan(
            name="p", blocks=(rest, on_host, layers), update_order=order, priority=priority, gradient_depth=1, prefetch_depth=1
        )


def _lowered(plan: Plan, model: ModelShape, updates: Updates, *, on_device: bool) -> Schedule:
    """The second step of a plan."""
    signature = StepSignature(order=tuple(range(len(model.blocks))), training=True, updates=updates)
    device = DeviceRoom(capacity_bytes=CAPACITY_BYTES) if on_device else None
    first = lower(plan, model, signature, resident=frozenset(), capacity_bytes=CAPACITY_BYTES, device=device)
    device = None if device is None else replace(device, resident=first.device_after)
    return lower(plan, model, signature, resident=first.resident_after, capacity_bytes=CAPACITY_BYTES, device=device)


def _order(schedule: Schedule) -> list[int]:
    """For each op, and then for each anchor, all ops of the step that it comes after, as a bit
    set.
    """
    behind: list[int] = []
    for op in schedule.ops:
        behind.append(1 << op.id | sum_of(behind, op.after))
    waited = itertools.accumulate((sum_of(behind, anchor.needs) for anchor in schedule.anchors), int.__or__)
    return [*behind, *waited]


def sum_of(behind: list[int], ops: tuple[int, ...]) -> int:
    found = 0
    for op in ops:
        found |= behind[op]
    return found


@dataclass(frozen=True)
class Case:
    plan: Plan
    model: ModelShape
    schedule: Schedule

    @property
    def options(self) -> tuple[Any, ...]:
        plan, layers, updates = self.plan, self.plan.blocks[-1], self.schedule.signature.updates
        placed = layers.weights, layers.state, layers.update
        return self.model.kept_every, placed, layers.saved, plan.update_order, plan.priority, updates

    @property
    def edges(self) -> set[tuple[str, int, Any]]:
        return {(name, *option) for name in classes(self.schedule) for option in enumerate(self.options)}


def _cases(model: ModelShape, *, on_device: bool) -> Iterator[Case]:
    for kept_every, plan, updates in itertools.product((0, 1), _plans(Tier.DEVICE if on_device else Tier.HOST), Updates):
        sized = replace(model, kept_every=kept_every)
        plan = plan.resolve(block.name for block in model.blocks)
        try:
            yield Case(plan, sized, _lowered(plan, sized, updates, on_device=on_device))
        except (ConfigError, OutOfMemoryBudgetError):  # the machine has no such plan
            continue


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_the_checker_refuses_a_schedule_without_any_class_of_edges(on_device: bool) -> None:
    found: defaultdict[str, set[str]] = defaultdict(set)
    model = ModelShape(name="m", blocks=(_layer("rest", 1000, pinned=True), *(_layer(f"layers.{i}", 100) for i in range(6))))
    for case in paired(_cases(model, on_device=on_device), lambda case: case.options, lambda case: case.edges):
        plan, sized, schedule = case.plan, case.model, case.schedule
        order = _order(schedule)
        for name in set(classes(schedule)):
            lacks = without(schedule, name)
            if "carried" not in name and _order(lacks) == order:
                found[name].add("implied")
                continue
            try:
                check(
                    lacks, plan, sized, capacity_bytes=CAPACITY_BYTES, device_capacity_bytes=CAPACITY_BYTES if on_device else None
                )
                found[name].add("allowed")
            except ScheduleError:
                found[name].add("refused")
    assert len(found) > 30
    assert not {name for name, verdicts in found.items() if "allowed" in verdicts}
    assert not {name for name, verdicts in found.items() if verdicts == {"implied"}}  # lowering emits no class for nothing


# ---- what runs -----------------------------------------------------------------------------------

SLOW = 4e5  # bytes per second of the disk: transfers take longer than compute, so what does not wait for them meets the old bytes
ON_DISK = BlockPlan(name="model.blocks.*", weights=Tier.DISK, state=Tier.DISK)
STATE_ON_DISK = BlockPlan(name="*", state=Tier.DISK)
SMALL = {"host_cache_bytes": 24 * 1024}


def _on_host(folder: Path) -> Any:
    plan = Plan(name="host", blocks=(ON_DISK, STATE_ON_DISK), prefetch_depth=1, **SMALL)
    strategy = HeteroOffloadStrategy(plan)
    engine = replace(strategy.options.engine, emulated_bytes_per_s=SLOW)
    strategy.run.options = replace(strategy.options, poison=True, engine=engine)
    return strategy


def _on_device(plan: Plan) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        device = EmulatedDevice(memory="16MiB", seed=1, h2d_bytes_per_s=2e6, d2h_bytes_per_s=2e6, disk_bytes_per_s=4 * SLOW)
        strategy = HeteroOffloadStrategy(plan, device=device)
        strategy.run.options = replace(strategy.options, poison=True)
        return strategy

    return make


OF_DISK = _on_device(
    Plan(
        name="disk",
        blocks=(ON_DISK, replace(STATE_ON_DISK, weights=Tier.DEVICE)),
        device_cache_bytes=24 * 1024,
        prefetch_depth=1,
        **SMALL,
    )
)
BORROWED = _on_device(
    Plan(
        name="borrowed",
        blocks=(BlockPlan(name="*", weights=Tier.HOST, state=Tier.HOST, update=UpdateLane.DEVICE),),
        device_cache_bytes=24 * 1024,
    )
)


def _trained(make: Callable[[Path], Any] | str, recipe: Recipe, folder: Path) -> Outcome:
    return run(recipe, make if isinstance(make, str) else make(folder), folder)


@pytest.mark.parametrize(
    ("make", "clip", "name"),
    [
        (_on_host, None, "anchor F carried UPDATE"),
        (_on_host, None, "anchor F needs FETCH@disk_read"),
        (_on_host, 0.3, "anchor B needs FETCH@disk_read"),
        (OF_DISK, None, "anchor F needs UPLOAD@h2d"),
        (OF_DISK, None, "anchor B needs UPLOAD@h2d"),
        (OF_DISK, None, "UPLOAD@h2d carried UPDATE"),
        (OF_DISK, None, "UPLOAD@h2d after FETCH@disk_read"),
        (OF_DISK, None, "UPDATE@cpu after GRAD@d2h"),
        (OF_DISK, None, "RELEASE@disk_read after UPLOAD@h2d"),
        (BORROWED, None, "UPDATE@compute after SWAP_IN state@h2d"),
        (BORROWED, None, "UPDATE@compute after UPLOAD@h2d"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_without_a_class_of_edges_training_goes_wrong(
    make: Callable[[Path], Any], clip: float | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but edges orders what a schedule foresees."""
    recipe = Recipe(shape=Shape(layers=5), steps=5, clip=clip)
    expected = _trained("auto", recipe, tmp_path)
    left_out = []

    def lacking(*args: Any, **kwargs: Any) -> Schedule:
        schedule = lower(*args, **kwargs)
        left_out.append(name in classes(schedule))
        return without(schedule, name)

    monkeypatch.setattr(step, "lower", lacking)
    with pytest.raises(Exception):  # noqa: B017, PT011  # another result, or whatever its cause makes of it
        assert_same(_trained(make, recipe, tmp_path), expected)
    assert any(left_out)


@pytest.mark.parametrize("make", [_on_host, OF_DISK, BORROWED], ids=["host", "disk", "borrowed"])
def test_with_all_edges_it_does_not(make: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedules are made anew here as well, so nothing but the missing edges makes training go
    wrong above.
    """
    monkeypatch.setattr(step, "lower", lambda *args, **kwargs: without(lower(*args, **kwargs), "no class of edges"))
    recipe = Recipe(shape=Shape(layers=5), steps=5)
    assert_same(_trained(make, recipe, tmp_path), _trained("auto", recipe, tmp_path))
