"""An error of any class that an op raises on its lane ends the fit, and leaves no thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.models import Recipe, Shape, run

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy
from lightning_hetero.runtime.updates import Updater


@pytest.mark.parametrize("error", [ValueError, AssertionError, MemoryError])
@pytest.mark.parametrize("plan", ["zero_offload", "disk"])
def test_an_error_on_a_lane_ends_the_fit_and_its_threads(
    plan: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_update, calls = Updater.run, []

    def fails(self: Updater, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 8:
            raise error("broken")
        return run_update(self, *args, **kwargs)

    monkeypatch.setattr(Updater, "run", fails)
    strategy = HeteroOffloadStrategy(plan, device=EmulatedDevice(memory="16MiB", seed=1))
    with pytest.raises(error, match="broken"):
        run(Recipe(shape=Shape(layers=3), steps=4), strategy, tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lightning-hetero")]
