"""Weights on disk go up to a GPU from page-locked buffers; the GPU is streams that are threads."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.cuda import StandIn, standing_in
from support.frozen import FROZEN, Change, by_hand, fit, loads_the_same, unfreezes
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, run
from support.streams import FakeCuda
from torch import Tensor

from lightning_hetero import BlockPlan, Plan, Tier
from lightning_hetero.convert.safetensors import TensorToWrite, write_directory
from lightning_hetero.ir.schedule import Lane, OpKind
from lightning_hetero.lanes.stream_device import StreamDevice
from lightning_hetero.lanes.streams import StreamLanes
from lightning_hetero.runtime.residency import HostWeights
from lightning_hetero.runtime.residency.fetch_buffers import FetchBuffers
from lightning_hetero.store.live.blocks import Part
from lightning_hetero.strategies import HeteroOffloadStrategy

RECIPE = Recipe(shape=Shape(layers=5, dropout=0.2, counting=False), steps=3)
STREAMED = Plan(name="streamed", blocks=(BlockPlan(name="*", weights=Tier.DISK, state=Tier.DISK),), device_cache_bytes=0)
BLOCK_BYTES = 12288  # whole pages


class Seen:
    """What UPLOADs read, and what the buffers had."""

    def __init__(self) -> None:
        self.uploads: list[bool] = []  # whether all of the source is page-locked
        self.most_bytes = 0
        self.made = 0
        self.buffers: set[FetchBuffers] = set()


@pytest.fixture
def seen(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen, copy, place, take = Seen(), StreamLanes.copy, HostWeights._place, FetchBuffers.take

    def copied(lanes: StreamLanes, target: Tensor, source: Tensor) -> None:
        op = lanes._current()
        if op is not None and op.op.kind is OpKind.UPLOAD and op.op.lane is Lane.H2D:
            start, end = source.data_ptr(), source.data_ptr() + source.nbytes
            seen.uploads.append(any(at <= start and end <= at + size for at, size in list(fake.registered.items())))
        copy(lanes, target, source)

    def placed(weights: HostWeights, part: Part, *, copies: bool) -> None:
        place(weights, part, copies=copies)
        seen.buffers.add(weights._buffers)
        seen.most_bytes = max(seen.most_bytes, weights._buffers.num_bytes)
        assert weights._buffers.num_bytes <= weights.capacity_bytes

    def taken(buffers: FetchBuffers, num_bytes: int, *, most_bytes: int) -> Tensor:
        seen.made += not any(memory.nbytes == num_bytes for memory in buffers._free)
        return take(buffers, num_bytes, most_bytes=most_bytes)

    monkeypatch.setattr(StreamLanes, "copy", copied)
    monkeypatch.setattr(HostWeights, "_place", placed)
    monkeypatch.setattr(FetchBuffers, "take", taken)
    return seen


def on_gpu(plan: Any, folder: Path, *callbacks: pl.Callback, **options: Any) -> Outcome:
    strategy = HeteroOffloadStrategy(plan, **options)
    return run(RECIPE, strategy, folder, accelerator=StandIn(), devices=1, callbacks=list(callbacks))


@pytest.mark.parametrize("cached", [None, 3], ids=["all fit", "three fit"])
def test_weights_on_disk_go_up_from_page_locked_memory(fake: FakeCuda, seen: Seen, tmp_path: Path, cached: int | None) -> None:
    plan = STREAMED if cached is None else replace(STREAMED, host_cache_bytes=cached * BLOCK_BYTES)
    assert_same(on_gpu(plan, tmp_path), run(RECIPE, "auto", tmp_path))
    assert len(seen.uploads) > RECIPE.shape.layers * RECIPE.steps
    assert all(seen.uploads)
    assert seen.most_bytes == BLOCK_BYTES * (RECIPE.shape.layers if cached is None else cached)
    assert seen.made == (RECIPE.shape.layers if cached is None else cached), "they are made once"
    assert not any(buffers.num_bytes for buffers in seen.buffers), "they end with the fit"
    gc.collect()
    assert not fake.registered


def test_a_driver_that_refuses_leaves_them_pageable_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeCuda(refuse=2)
    monkeypatch.setattr(StreamDevice, "of", standing_in(fake, 4 << 20))
    with caplog.at_level(logging.WARNING):
        assert_same(on_gpu(STREAMED, tmp_path), run(RECIPE, "auto", tmp_path))
    (said,) = [record.message for record in caplog.records if "stay pageable" in record.message]
    assert "refused to page-lock them (error 2)" in said
    fake.close()


class Switching(pl.Callback):
    """Goes on with another plan before each batch."""

    def __init__(self, *plans: Plan) -> None:
        self.plans, self.had = plans, []  # type: tuple[Plan, ...], list[int]

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        session: Any = trainer.strategy.session  # type: ignore[attr-defined]
        self.had.append(session.executor.residency.weights._buffers.num_bytes)
        session.replan(self.plans[index])
        assert not session.executor.residency.weights._buffers.num_bytes
        assert all(part.lent is None for block in session.blocks for part in block.parts)


def test_another_plan_ends_them(seen: Seen, tmp_path: Path) -> None:
    host = Plan(name="host", blocks=(BlockPlan(name="*", weights=Tier.HOST, state=Tier.HOST),), device_cache_bytes=0)
    switching = Switching(STREAMED, host, replace(STREAMED, host_cache_bytes=2 * BLOCK_BYTES))
    assert_same(on_gpu(STREAMED, tmp_path, switching), run(RECIPE, "auto", tmp_path))
    assert switching.had == [*[BLOCK_BYTES * RECIPE.shape.layers] * 2, 0]
    assert all(seen.uploads)


@pytest.mark.parametrize("change", [loads_the_same, by_hand, unfreezes])
def test_frozen_weights_are_read_from_their_file_into_them(seen: Seen, tmp_path: Path, change: Change) -> None:
    """Weights that change move to the store on the way."""
    torch.manual_seed(3)
    recipe = Recipe(steps=6, shape=Shape(layers=4, dropout=0.1, frozen=FROZEN, counting=False))
    content = {name: value.clone() for name, value in LitModel(recipe).model.state_dict().items()}
    rows = [TensorToWrite(name, value.dtype, value.shape, lambda value=value: value) for name, value in content.items()]
    write_directory(tmp_path / "weights", rows, max_shard_bytes=20_000)
    plan = replace(STREAMED, host_cache_bytes=2 * BLOCK_BYTES)
    strategy = HeteroOffloadStrategy(plan, weights={"model": tmp_path / "weights"})
    got = fit(tmp_path, strategy, recipe, change=change, at=(3,), device="meta", accelerator=StandIn(), devices=1)
    assert_same(got, fit(tmp_path, "auto", recipe, change=change, at=(3,), content=content))
    assert seen.uploads
    assert all(seen.uploads)


def test_buffers_of_other_sizes_make_room() -> None:
    made: list[int] = []

    def make(num_bytes: int) -> Tensor:
        made.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    buffers = FetchBuffers(make)
    first, second = buffers.take(4096, most_bytes=16384), buffers.take(8192, most_bytes=16384)
    buffers.give(first)
    assert buffers.take(4096, most_bytes=16384) is first
    assert made == [4096, 8192]
    buffers.give(first)
    buffers.take(8192, most_bytes=16384)
    assert (made, buffers.num_bytes) == ([4096, 8192, 8192], 16384), "the free one went"
    buffers.give(second)
    buffers.shrink(0)
    assert buffers.num_bytes == 8192, "what is lent stays"
