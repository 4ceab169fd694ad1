"""Plain loops whose model computes in DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import averaged_loops
from support.plain_loops import plans
from support.ranks import start

from lightning_hetero.errors import UnsupportedError


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ranks_on_the_host_have_the_bits_that_they_have_alone(tmp_path: Path) -> None:
    for output in start(Path(averaged_loops.__file__), cwd=tmp_path, world=2):
        assert output.split()[-1] == "equal"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("overlap", "where", "knob"),
    [("none", "device", "device="), ("forward", "device", "device="), ("backward", "host", 'overlap="forward"')],
)
@pytest.mark.parametrize("loop", averaged_loops.LOOPS)
def test_gradients_that_leave_before_they_are_averaged_are_refused(
    loop: str, overlap: str, where: str, knob: str, tmp_path: Path
) -> None:
    """The first micro-batch of an accumulation was lost on a device, without a word."""
    with pytest.raises(UnsupportedError, match=f"DistributedDataParallel.*{knob}"):
        averaged_loops.check(averaged_loops.LOOPS[loop], overlap, **plans(tmp_path)[where])
