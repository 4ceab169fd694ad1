"""One rank of a test of lane ``net``: a script; see ``tests/integration/test_rank_lanes.py``."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.ir.model import BlockProfile, ModelProfile, ModelShape
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.ir.schedule import Schedule
from lightning_hetero.ir.trace import Span, Trace
from lightning_hetero.lanes.network import ENVIRONMENT
from lightning_hetero.lowering import CacheSizes
from lightning_hetero.runtime.slice_gradients import SliceGradients
from lightning_hetero.sim import simulate
from lightning_hetero.strategies import HeteroOffloadStrategy
from support.machines import HARDWARE
from support.shared_model import RANK, WORLD, batches, model, reference, same, trainer

FIRST = 2  # the first steps learn in which order blocks are used
MACHINE = replace(HARDWARE, ranks=WORLD, collective_bytes_per_s=1e9)


class Notes(pl.Callback):
    """Keeps the schedules."""

    def __init__(self) -> None:
        self.schedules: list[Schedule] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        executor = trainer.strategy.session.executor
        self.schedules.append(executor.schedule)
        self.model, self.plan = executor.model, executor.plan
        self.empty = {f"UPDATE {b.name}" for b in executor.blocks if not any(n for part in b.parts for _, n in part.pieces)}


class Slow(torch.autograd.Function):
    """A backward that takes its time."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(0.15)
        return grad


def traced(out: Path, plan: Plan, *, slow: bool = False, **flags: Any) -> tuple[Trace, Notes]:
    """A short training of all ranks."""
    notes, shared = Notes(), model()
    for layer in shared.layers:
        layer.rare.requires_grad_(False)  # it is not used, so backward might still change it
        if slow:
            layer.up.register_forward_hook(lambda _, __, y: Slow.apply(y) if len(notes.schedules) == FIRST else y)
    strategy = HeteroOffloadStrategy(plan, block_cls="Layer", trace=True, update_threads=1)
    trainer(out, strategy, callbacks=[notes], **flags).fit(shared, batches())
    return strategy.trace, notes


def profile(shape: ModelShape) -> ModelProfile:
    """Of one rank's slices."""
    rows = (
        BlockProfile(
            name=b.name, num_params=b.num_params, num_trainable_params=b.num_trainable_params, forward_s=1e-4, backward_s=2e-4,
            forward_flop=1.0, activation_bytes=0, boundary_bytes=0, transient_bytes=0, pinned=b.pinned,
        )
        for b in shape.blocks
    )  # fmt: skip
    return ModelProfile(
        name="m", tokens=1, compute_itemsize=4, constant_device_bytes=0, constant_host_bytes=0, blocks=tuple(rows),
        kept_every=shape.kept_every,
    )  # fmt: skip


def sees_what_is_simulated(out: Path) -> None:
    """Every lane sees the ops in the order that the simulator predicts, under any plan.

    The engine has no work for a block of which other ranks have all elements.
    """
    rows = []
    for seed in range(4):
        draw = random.Random(seed)
        on_device = draw.sample(range(4), draw.choice([0, 1]))
        plan = Plan(
            name=f"random-{seed}", prefetch_depth=draw.choice([1, 2]), gradient_depth=draw.choice([1, 2, 4]),
            blocks=(*(BlockPlan(name=f"layers.{i}", weights=Tier.DEVICE) for i in on_device), BlockPlan(name="*")),
        )  # fmt: skip
        trace, notes = traced(out, plan, gradient_clip_val=draw.choice([None, 0.3]))
        sizes = CacheSizes(host_cache_bytes=0, device_cache_bytes=1 << 20, staging_bytes=1 << 20, ranks=WORLD, shared_memory=True)
        for step in range(FIRST, len(notes.schedules)):
            schedules = [notes.schedules[step]]
            predicted = simulate(schedules, notes.plan, profile(notes.model), MACHINE, sizes=sizes, keep_trace=True).trace
            expected = {lane: [n for n in names if n not in notes.empty] for lane, names in predicted.issued(0).items()}
            rows.append((seed, {lane: list(names) for lane, names in trace.issued(step).items()}, expected))
    for seed, got, expected in rows:  # once all ranks have trained
        assert got == expected, (seed, got, expected)
        assert any(name.startswith("REDUCE ") for name in got["net"])


def computes_meanwhile(out: Path) -> None:
    """On a slow network a block is reduced while the one before it computes, and the one after it
    is updated.
    """
    os.environ[ENVIRONMENT] = "1e12,0.02"
    trace, _ = traced(out, Plan(name="host", blocks=(BlockPlan(name="*"),)), slow=True)
    spans = [span for span in trace.spans if span.step == FIRST and not span.is_wait]
    reduce, update, backward = (_find(spans, n) for n in ("REDUCE gradients layers.2", "UPDATE layers.3", "B layers.1"))
    assert reduce.start_s < backward.end_s
    assert backward.start_s < reduce.end_s
    assert update.start_s < reduce.end_s


def reduces_once_what_stays_whole(out: Path) -> None:
    """Of batches that accumulate, the last one alone reduces the embedding and the head."""
    trace, _ = traced(out, Plan(name="host", blocks=(BlockPlan(name="*"),)), accumulate_grad_batches=2)
    for block, times in (("embed", 1), ("layers.1", 2), ("head", 1)):
        assert sum(span.name == f"REDUCE gradients {block}" and span.step == 1 for span in trace.spans) == times


def waits_for_ranks_that_lack_gradients(out: Path) -> None:
    """What one rank knows to be complete and another does not is summed after backward; until then
    no update may take it for complete.
    """
    plain = SliceGradients._reduce_part

    def reduce_part(gradients: SliceGradients, part: Any, *rest: Any) -> None:
        assert not gradients.are_complete(part.block)
        plain(gradients, part, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SliceGradients, "_reduce_part", reduce_part)
        shared = model("rare", seed=5 + RANK)
        trainer(out).fit(shared, batches())
    same(shared, reference("rare"))


def goes_on_after_an_error(out: Path) -> None:
    """An error of all ranks ends the fit, and no thread is left in a collective."""

    def fail(layer: Any, _: Any) -> None:
        raise ValueError("a mistake in forward")

    shared = model()
    notes = Notes()
    shared.layers[2].register_forward_pre_hook(lambda *of: fail(*of) if len(notes.schedules) == FIRST else None)
    with pytest.raises(ValueError, match="a mistake in forward"):
        trainer(out, callbacks=[notes]).fit(shared, batches())
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning-hetero")]


def _find(spans: list[Span], name: str) -> Span:
    return next(span for span in spans if span.name == name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for word in sys.argv[2:]:
        globals()[word](Path(sys.argv[1]))
    print("ok", flush=True)
    dist.barrier()
    dist.destroy_process_group()
