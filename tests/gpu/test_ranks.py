"""Ranks that share a model, on one GPU: two of them through gloo, and nccl with a world of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import ranks

from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.strategies.devices import process_group_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")

SCRIPT = Path(ranks.__file__).with_name("shared_devices.py")


def test_two_ranks_on_one_gpu_have_the_bits_that_it_computes(tmp_path: Path) -> None:
    outputs = ranks.start(SCRIPT, tmp_path, "on_one_gpu", "trains_as_its_devices_compute", cwd=tmp_path, world=2)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 2


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A world of one whose devices talk through their own library."""
    device = torch.device("cuda", 0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(process_group_of([device]), store=store, rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_what_is_on_hosts_and_what_is_on_devices_goes_its_own_way() -> None:
    on_device = torch.arange(8.0, device="cuda")
    dist.all_reduce(on_device)
    assert torch.equal(on_device.cpu(), torch.arange(8.0))
    collectives = Collectives(dist.new_group(backend="gloo"))
    whole, own = torch.zeros(8), torch.arange(8.0)
    collectives.gather(whole, own)
    assert torch.equal(whole, own)
    collectives.reduce(own, whole, torch.empty(8))
    assert torch.equal(own, whole)
