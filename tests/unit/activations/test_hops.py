"""The copies between device, host and disk."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.activations import (
    DISK,
    HOPS,
    HOST,
    KEEP,
    RECOMPUTE,
    Block,
    Layer,
    Net,
    assert_same,
    driving,
    emulated,
    gradients,
    plain,
    rule,
)
from support.lanes import InlineLanes
from torch import Tensor, nn

from lightning_hetero._native import Engine
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.ir.schedule import Lane, Op, Payload
from lightning_hetero.lanes import EmulatedDevice, EmulatedLanes, Lanes
from lightning_hetero.runtime.activations.files import SwapFiles
from lightning_hetero.runtime.activations.saved import SavedStorage
from lightning_hetero.store.format.directory import StoreDirectory


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SwapFiles]:
    manifest = {"what": "activations"}
    directory = StoreDirectory.create_or_adopt(
        None, default_root=tmp_path, manifest=manifest, needed_bytes=1 << 20, allow_tmpfs=True
    )
    with Engine(staging_bytes=3 << 16, chunk_bytes_max=1 << 16) as engine:
        found = SwapFiles(engine, directory)
        yield found
        found.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lanes", [lambda: InlineLanes(poison=True), emulated], ids=["inline", "emulated"])
@pytest.mark.parametrize("issue", [True, False], ids=["issued", "on demand"])
@pytest.mark.parametrize("rules", [rule(DISK, DISK), rule(HOST, DISK, qkv=DISK), rule(RECOMPUTE, DISK, qkv=HOST)])
def test_activations_come_back_from_the_disk(
    x: Tensor, rules: Any, issue: bool, lanes: Callable[[], Lanes], files: SwapFiles
) -> None:
    net = Net()
    with driving(net.blocks(), rules, lanes=lanes(), files=files) as driver:
        assert_same(net, driver, lambda: net(x), come=issue)
        assert files.engine.stats().bytes_written > 0
        assert files.engine.stats().bytes_read > 0


def test_files_of_other_batches_are_lent_again_and_those_that_no_batch_needs_go(x: Tensor, files: SwapFiles) -> None:
    net = Net()

    def sizes() -> list[int]:
        return sorted(path.stat().st_size for path in files.directory.path.glob("block-*"))

    with driving(net.blocks(), rule(DISK, DISK), files=files) as driver:
        driver.step(lambda: net(x))
        first = sizes()
        assert len(first) == 3  # two layers and the head
        driver.step(lambda: net(x))
        assert sizes() == first
        for _ in range(18):  # a batch as long as the first one may come
            driver.step(lambda: net(x[:2]))
        assert len(sizes()) == 3
        assert not set(sizes()) & set(first)
    net.zero_grad()
    assert not sizes()


def test_batches_of_other_lengths_lock_no_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    net, made = Net(), []
    lanes = EmulatedLanes(EmulatedDevice(memory="64MiB"))
    buffer = lanes.host_buffer
    monkeypatch.setattr(lanes, "host_buffer", lambda num_bytes: made.append(num_bytes) or buffer(num_bytes))
    whole = torch.randn(2, 512, 32)
    with driving(net.blocks(), rule(HOST, HOST), lanes=lanes) as driver:
        for number in range(3):
            made.clear()
            for length in (300, 512, 64, 450, 511, 200, 128):
                driver.step(lambda x=whole[:, :length]: net(x))
            assert bool(made) == (number == 0)


@pytest.mark.parametrize("to", [HOST, DISK], ids=["host", "disk"])
def test_storages_come_back_as_aligned_as_an_allocator_has_them(to: Any, files: SwapFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries choose a kernel by the alignment of its arguments: another one may give other
    bits.
    """
    found: list[int] = []
    leave = SavedStorage.leave

    def leaves(storage: SavedStorage, *, poison: bool) -> None:
        found.extend([storage.moved[0], storage.shift_bytes])
        leave(storage, poison=poison)

    monkeypatch.setattr(SavedStorage, "leave", leaves)
    net, x = Net(), torch.randn(3, 13, 32)
    with driving(net.blocks(), rule(to, HOST), files=files, lanes=emulated()) as driver:
        driver.step(lambda: net(x))
    assert len(set(found)) > 2
    assert all(at % 512 == 0 for at in found)


def test_the_disk_is_refused_without_one(x: Tensor) -> None:
    net = Net()
    with driving(net.blocks(), rule(DISK)) as driver:
        driver.begin()
        loss = net(x)
        driver.come()
        with pytest.raises(UnsupportedError, match=r"to the disk, but there is no directory for them.*disk_path"):
            loss.backward()
        with pytest.raises(UnsupportedError):
            driver.lanes.drain()


def test_hops_of_a_block_that_is_used_twice_nest(x: Tensor) -> None:
    """The latest use comes back first; ops that find nothing do nothing."""
    layer = Layer()
    lanes = emulated()
    with driving({"b": layer}, rule(HOST, HOST), lanes=lanes, issue=False) as driver:
        block = driver.blocks["b"]
        driver.begin()
        driver.hop(block, "out").wait()  # before any forward
        first = layer(x)
        one = driver.hop(block, "out")
        second = layer(first[:2])
        small = driver.hop(block, "out")
        lanes.compute_waits([one, small])
        driver.activations.swapper.sweep()
        del second
        driver.hop(block, "in").wait()  # the second use's graph is gone
        driver.hop(block, "in").wait()
        driver.hop(block, "in").wait()
        first.sum().backward()
    assert all(grad.isfinite().all() for grad in gradients(layer).values())


def test_an_error_of_a_lane_reaches_backward(x: Tensor) -> None:
    net = Net()

    class Broken(InlineLanes):
        def copy(self, target: Tensor, source: Tensor) -> None:
            raise OSError("the link is down")

    with driving(net.blocks(), rule(HOST, HOST), lanes=Broken()) as driver:
        driver.begin()
        loss = net(x)
        with pytest.raises(OSError, match="link is down"):
            driver.out()
        with pytest.raises(OSError, match="link is down"):
            loss.backward()
        with pytest.raises(OSError, match="link is down"):
            driver.lanes.drain()


def test_a_copy_without_a_wait_is_detected(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison: memory that is given up before its bytes have left, as a schedule without the edge
    would.
    """
    net = Net()
    expected = plain(net, lambda: net(x))
    slow, gate = EmulatedLanes(EmulatedDevice(memory="1MiB", d2h_bytes_per_s=1.0), poison=True), threading.Event()
    monkeypatch.setattr(slow._links[Lane.D2H], "_sleep", lambda _: gate.wait(60))
    with driving(net.blocks(), rule(HOST, HOST), lanes=slow) as driver:
        torch.manual_seed(7)
        driver.begin()
        loss = net(x)
        driver.activations.swapper.sweep(driver.outs)  # a lie: compute has waited for none of them
        gate.set()
        loss.backward()
        found = gradients(net)
        assert not all(torch.equal(found[name], grad) for name, grad in expected[1].items())


def test_rules_without_effect_are_named(x: Tensor) -> None:
    net = Net(layers=1)
    with driving(net.blocks(), rule(KEEP, KEEP, norm=HOST, gelu=HOST)) as driver:
        driver.step(lambda: net(x))
        with pytest.warns(UserWarning, match="block 'layers.0': .* saves nothing: gelu"):
            driver.begin()
    net.zero_grad()


def test_ops_name_hops() -> None:
    with driving({"b": Layer()}, rule(HOST)) as driver:
        kind, lane = HOPS["in"]
        op = Op(id=3, kind=kind, block=0, lane=lane, at=0, payload=Payload.ACTIVATIONS)
        assert driver.blocks["b"].swap(op).done()  # reality has overtaken it


def test_held_tensors_are_the_needed_ones(x: Tensor) -> None:
    """A recomputed use keeps its arguments no longer than until it has been recomputed."""
    block = Block(lambda block, x: block.linear(x.sin()).sin(), linear=nn.Linear(32, 32))
    with driving({"b": block}, rule(RECOMPUTE)) as driver:
        driver.begin()
        given = x.clone()
        seen = weakref.ref(given.untyped_storage())
        out = block(given)
        del given
        assert seen() is not None
        out.sum().backward(retain_graph=True)
        assert seen() is None
    block.zero_grad()
