"""For all tests here: the models are small, and what they save shall leave a device all the
same.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.cuda import standing_in
from support.streams import FakeCuda

from lightning_hetero.lanes.stream_device import StreamDevice
from lightning_hetero.runtime.activations import block as activations


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALL_BYTES", 64)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A GPU of 4 MiB for ``Trainer(accelerator=StandIn())``; as on one, backward runs in a thread
    of autograd's.
    """
    fake = FakeCuda(seed=1)
    monkeypatch.setattr(StreamDevice, "of", standing_in(fake, 4 << 20))
    backward = torch.autograd._engine_run_backward

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as engine:
            return engine.submit(backward, *args, **kwargs).result()

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", elsewhere)
    yield fake
    fake.close()
    for _ in range(2):  # buffers go with the session, and that in a cycle; a graph that a frame holds goes before
        if fake.registered:
            gc.collect()
    assert not fake.registered, "page-locked memory is given back"
