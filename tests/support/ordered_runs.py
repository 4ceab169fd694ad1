"""Programs on lanes, and trainings, of which every use of memory has to be ordered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier, UpdateLane
from lightning_hetero.ir.schedule import Lane, OpKind
from lightning_hetero.lanes import streams
from lightning_hetero.lanes.base import All
from lightning_hetero.lanes.emulated import EmulatedLanes
from lightning_hetero.lanes.streams import StreamLanes
from lightning_hetero.strategies import HeteroOffloadStrategy
from support.checked_streams import checked_devices, checking
from support.checker import Checker
from support.cuda import MIXED, RESIDENT
from support.lanes import MEMORY_BYTES, Program, doing, op
from support.models import LitModel, Outcome, Recipe, Shape, run

SHAPE = Shape(layers=4, dropout=0.2, counting=False)
BORROWED = BlockPlan(name="model.blocks.*", weights=Tier.HOST, state=Tier.HOST, update=UpdateLane.DEVICE)


@dataclass(frozen=True)
class Run:
    """One training."""

    plan: Any
    recipe: Recipe
    options: dict[str, Any] = field(default_factory=dict)
    kept: bool = False  # every step
    on_host: bool = False  # the device is the host
    forwards: int = 0  # that the model believes to have made: each odd one leaves the last block out, if it ``skips``

    def train(self, folder: Path) -> Outcome:
        options = self.options | ({"disk_path": folder / "store"} if self.kept else {})
        device = None if self.on_host else EmulatedDevice("4MiB", seed=1)
        return self.trained_by(HeteroOffloadStrategy(self.plan, device=device, **options), folder)

    def trained_by(self, strategy: Any, folder: Path, recipe: Recipe | None = None, **trainer: Any) -> Outcome:
        """Trains with a strategy, ``"auto"`` for plain Lightning, and maybe another recipe."""

        def prepare(module: LitModel) -> None:
            module.model.forwards = self.forwards

        return run(recipe or self.recipe, strategy, folder, prepare=prepare, **trainer)


LEFT_OUT = Shape(frozen=(0, 1, 2), counting=False, skips=True)
BELOW = Plan(name="below", blocks=(BlockPlan(name="model.blocks.*", weights=Tier.HOST), RESIDENT), prefetch_depth=3)
RUNS = {
    "resident": Run("resident", Recipe(shape=SHAPE, steps=2)),
    "host": Run("host", Recipe(shape=SHAPE)),
    "mixed": Run(MIXED, Recipe(shape=SHAPE), {"trace": True}),
    "mixed, clipped": Run(MIXED, Recipe(shape=SHAPE, steps=2, accumulate=2, clip=0.3)),
    "mixed, kept": Run(MIXED, Recipe(shape=SHAPE, steps=2), kept=True),
    "another order than foreseen": Run(MIXED, Recipe(shape=replace(SHAPE, early_norm=True), steps=2)),
    # Training leaves out a block whose weights are on their way, and validation uses it.
    "a block is left out": Run(BELOW, Recipe(shape=LEFT_OUT, steps=2, validate=True), forwards=1),
    "state comes and goes": Run(Plan(name="borrowed", blocks=(BORROWED, RESIDENT)), Recipe(shape=SHAPE)),
}


ON_HOST = {
    "disk": Run("disk", Recipe(shape=SHAPE, steps=2, validate=True), on_host=True),
    "host, clipped": Run("host", Recipe(shape=SHAPE, steps=2, accumulate=2, clip=0.3), kept=True, on_host=True),
}
"""Where the device is the host."""
WITHOUT_STREAMS = ("mixed, clipped", "state comes and goes", *ON_HOST)


def training(name: str, folder: Path, *, prompt: bool = False) -> tuple[Outcome, Checker]:
    """Trains one of :data:`RUNS` on a device with streams."""
    with checked_devices(prompt=prompt) as checker:
        got = RUNS[name].train(folder)
    return got, checker


def training_without_streams(name: str, folder: Path, *, prompt: bool = False) -> tuple[Outcome, Checker]:
    """Trains one of :data:`RUNS` on the emulated device, or one of :data:`ON_HOST`."""
    with checking(prompt=prompt) as checker:
        got = (RUNS | ON_HOST)[name].train(folder)
    return got, checker


@contextmanager
def checked_lanes(*, prompt: bool = False) -> Iterator[tuple[StreamLanes, Checker]]:
    """Lanes that are closed, and what they did is checked."""
    with checking(prompt=prompt) as checker:
        lanes = StreamLanes("cpu", backend=checker.cuda, memory_bytes=MEMORY_BYTES, staging_bytes=1024)
        try:
            yield lanes, checker
        finally:
            lanes.close()


@contextmanager
def checked_emulated_lanes(*, prompt: bool = False) -> Iterator[tuple[EmulatedLanes, Checker]]:
    """The same of an emulated device."""
    with checking(prompt=prompt) as checker:
        lanes = EmulatedLanes(EmulatedDevice(MEMORY_BYTES))
        try:
            yield lanes, checker
        finally:
            lanes.close()


def program(seed: int, *, prompt: bool = False, edges: bool = True, streams: bool = True) -> tuple[bool, Checker]:
    """Runs a random program; returns whether its results are right."""
    with (checked_lanes if streams else checked_emulated_lanes)(prompt=prompt) as (lanes, checker):
        one = Program(lanes, seed, edges=edges)
        one.run(40)
        return one.equal(), checker


def from_lane_to_lane() -> None:
    """One lane gives memory back, another takes it: no edge orders them."""
    with checked_lanes() as (lanes, _):
        memory = lanes.memory()
        memory.take(MEMORY_BYTES - 512, "the rest")
        old = memory.take(512, "old").fill_(1)
        back, source = lanes.host_buffer(512), lanes.host_buffer(512).fill_(2)

        def leave() -> None:
            lanes.copy(back, old)
            memory.give(old)

        lanes.submit(op(0, Lane.D2H), doing(leave), [lanes.mark()]).handed()
        lanes.submit(op(1, Lane.H2D), doing(lambda: lanes.copy(memory.take(512, "new"), source)), [])
        lanes.drain()


def a_failed_op() -> None:
    """An op fails after it has given work to its stream; then its memory belongs to compute."""
    with checked_lanes() as (lanes, _):
        memory, source = lanes.memory(), lanes.host_buffer(512).fill_(1)
        taken = memory.take(512, "weights")

        def fail() -> None:
            lanes.copy(taken, source)
            raise ValueError("half way")

        failed = lanes.submit(op(0, Lane.H2D), doing(fail), [lanes.mark()])
        for number in range(20):  # submissions forget ops that have ended
            lanes.submit(op(number + 1, Lane.CPU), doing(lambda: None), [])
        for wait in (failed.wait, lanes.drain):
            try:
                wait()
            except ValueError:
                continue
        memory.give(taken)
        memory.take(512, "other weights").fill_(2)


def an_early_end() -> None:
    """The lanes are closed behind a copy that nobody has waited for; the host's memory is freed."""
    with checked_lanes() as (lanes, _):
        source, target = torch.ones(512), lanes.memory().take(2048, "weights").view(torch.float32)
        lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(target, source)), [lanes.mark()]).handed()


def other_memory() -> None:
    """Other memory is set aside behind an op that nobody has waited for, and no edge orders the
    next one.
    """
    with checked_lanes() as (lanes, _):
        source = lanes.host_buffer(512).fill_(1)

        def pass_by() -> None:
            taken = lanes.memory().take(512, "weights")
            lanes.copy(taken, source)
            lanes.memory().give(taken)

        lanes.submit(op(0, Lane.H2D), doing(pass_by), []).handed()
        lanes.resize(4096)
        lanes.submit(op(1, Lane.H2D), doing(lambda: lanes.copy(lanes.memory().take(512, "new"), source)), [])
        lanes.drain()


def conversions() -> None:
    """Ops of both directions convert in staging memory and in tensors of their own."""
    with checked_lanes() as (lanes, _):
        held = torch.randn(37, 53)
        up, down = torch.empty(37, 53, dtype=torch.bfloat16), torch.empty(53, 37).t()
        first = lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(up, held)), [lanes.mark()])
        lanes.submit(op(1, Lane.D2H, OpKind.GRAD), doing(lambda: lanes.copy(down, up)), [first]).wait()
        assert torch.equal(down, held.bfloat16().float())
        lanes.drain()


def through_ops_without_work() -> None:
    """Compute waits for an op that had nothing to do itself, and came after a copy."""
    with checked_lanes() as (lanes, _):
        source, target = lanes.host_buffer(512).fill_(1), lanes.memory().take(512, "weights")
        copied = lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(target, source)), [lanes.mark()])
        lanes.compute_waits([All((copied,))])
        target.add_(1)
        lanes.drain()


def a_host_op_behind_compute() -> None:
    """An op on the host reads what compute has sent there."""
    with checked_lanes() as (lanes, _):
        sent, result = lanes.host_buffer(512), lanes.memory().take(512, "result")
        result.fill_(1)
        sent.copy_(result, non_blocking=True)
        lanes.submit(op(0, Lane.CPU, OpKind.UPDATE), doing(lambda: sent.add_(1)), [lanes.mark()])
        lanes.drain()


def a_source_that_only_its_copy_holds() -> None:
    """Compute waits for a copy; the host's memory lives until the copy has ended all the same."""
    with checked_lanes() as (lanes, _):
        source, target = torch.ones(512), lanes.memory().take(2048, "weights").view(torch.float32)
        sources = [source]
        copied = lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(target, sources.pop())), [lanes.mark()])
        del source
        lanes.compute_waits([copied])
        target.add_(1)
        lanes.drain()


def a_target_that_only_its_copy_holds() -> None:
    """Compute waits for a copy to the host, whose target nobody else has."""
    with checked_lanes() as (lanes, _):
        source, targets = lanes.memory().take(2048, "result").view(torch.float32).fill_(1), [torch.empty(512)]
        copied = lanes.submit(op(0, Lane.D2H, OpKind.GRAD), doing(lambda: lanes.copy(targets.pop(), source)), [lanes.mark()])
        lanes.compute_waits([copied])
        source.add_(1)
        lanes.drain()


def polls_in_place_of_waits() -> None:
    """Code on the host asks whether compute has come so far, and whether copies have ended."""
    with checked_lanes(prompt=True) as (lanes, _):
        sent, result, source = lanes.host_buffer(512), lanes.memory().take(512, "result"), lanes.host_buffer(512)
        result.fill_(1)
        sent.copy_(result, non_blocking=True)
        mark = lanes.mark()
        assert mark.done()
        sent.add_(1)
        copied = lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(result, source)), [mark])
        copied.handed()
        assert All((mark, copied)).done()
        source.add_(1)
        lanes.drain()


def another_origin() -> None:
    """Times count from a later origin as soon as compute's stream has come to it."""
    with checked_lanes() as (lanes, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_ORIGIN_S", -1.0)
        moments = [lanes.now(), lanes.now()]
        lanes.catch_up()
        moments.append(lanes.now())
        lanes.catch_up()
        assert None not in [moment() for moment in moments]


SCENES: tuple[Callable[[], None], ...] = (
    from_lane_to_lane, a_failed_op, an_early_end, other_memory, conversions, through_ops_without_work, a_host_op_behind_compute,
    a_source_that_only_its_copy_holds, a_target_that_only_its_copy_holds, polls_in_place_of_waits, another_origin,
)  # fmt: skip


def everything(folder: Path) -> None:
    """Runs all of it; raises what was found first."""
    for seed in range(4):
        assert program(seed)[0]
        assert program(seed, streams=False)[0]
    for scene in SCENES:
        scene()
    for name in RUNS:
        training(name, folder / name)
    for name in WITHOUT_STREAMS:
        training_without_streams(name, folder / f"{name}, without streams")
