"""The foreign device itself shows what memory of the host hides."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from foreign import NAME, native

DEVICE = torch.device(NAME, 0)


@pytest.fixture
def late() -> Iterator[None]:
    native().set_delay(0, 20_000)
    yield
    native().set_delay(0, 200)


def test_the_host_cannot_touch_its_memory() -> None:
    there = torch.ones(4, device=DEVICE)
    torch.accelerator.synchronize()
    child = multiprocessing.get_context("fork").Process(target=ctypes.string_at, args=(there.data_ptr(), 4))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGSEGV


def test_streams_run_behind_the_host(late: None) -> None:
    source, target = torch.ones(1 << 20).pin_memory(), torch.zeros(1 << 20, device=DEVICE)
    torch.accelerator.synchronize()
    stream = torch.Stream(DEVICE)
    busy = stream.record_event()
    for _ in range(20):
        with stream:
            target.copy_(source, non_blocking=True)
        done = stream.record_event()
    assert not done.query()
    done.synchronize()
    assert busy.query()
    assert bool((target == 1).all())


def test_memory_that_nobody_waited_for_has_old_bytes(late: None) -> None:
    target = torch.zeros(1 << 20, device=DEVICE)
    torch.accelerator.synchronize()
    stream = torch.Stream(DEVICE)
    seen = 0
    for _ in range(20):
        with stream:
            target.fill_(1)
        seen += int((target == 0).any())  # compute does not wait for the stream
        torch.accelerator.synchronize()
        target.zero_()
        torch.accelerator.synchronize()
    assert seen


def test_memory_ends() -> None:
    free, total = torch.accelerator.get_memory_info(0)
    with pytest.raises(torch.OutOfMemoryError, match="foreign out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device=DEVICE)
    kept = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    assert torch.accelerator.get_memory_info(0)[0] == free - kept.numel()
    del kept
    assert torch.accelerator.get_memory_info(0)[0] == free


def test_random_numbers_are_its_own() -> None:
    torch.manual_seed(1)
    there, again = torch.rand(8, device=DEVICE).cpu(), torch.rand(8, device=DEVICE).cpu()
    host = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(host, torch.get_rng_state()), "the host's numbers have not moved"
    assert torch.equal(torch.rand(8, device=DEVICE).cpu(), there)
    assert not torch.equal(there, again)
    assert not torch.equal(there, torch.rand(8))


def test_modules_compute_the_bits_of_the_host() -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))
    there = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))
    there.load_state_dict(here.state_dict())
    there.to(DEVICE)
    x = torch.randn(5, 8)
    for module, value in ((here, x), (there, x.to(DEVICE))):
        optimizer = torch.optim.AdamW(module.parameters())
        for _ in range(2):
            module(value).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(b.cpu(), a) for a, b in zip(here.parameters(), there.parameters(), strict=True))


def test_parameters_move_in_place() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.data = torch.ones(3, device=DEVICE)
    assert parameter.device == DEVICE
    assert parameter.detach().cpu().tolist() == [1, 1, 1]
