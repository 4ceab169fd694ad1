"""A script: one rank of a plain loop in DistributedDataParallel, alone and with the context."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import lightning_hetero
from support.models import Model, Shape
from support.plain_loops import Run, accumulating, adamw, assert_equal, clipped, outcome, plans


def averaged_once(run: Run) -> None:
    """Two micro-batches a step; only the second backward averages."""
    model: Any = run.model
    for number, batch in enumerate(run.batches(6)):
        with nullcontext() if number % 2 else model.no_sync():
            run.backward(batch)
        if number % 2:
            run.optimizer.step()
            run.optimizer.zero_grad()


LOOPS: dict[str, Callable[[Run], None]] = {"accumulating": accumulating, "averaged once": averaged_once, "clipped": clipped}


class Averaging:
    """A loop whose model computes in DistributedDataParallel, each rank with batches of its own."""

    def __init__(self, loop: Callable[[Run], None]) -> None:
        self.loop = loop

    def __call__(self, run: Run) -> None:
        given = list(run.batches(8))[torch.distributed.get_rank() :]
        averaged = Run(DistributedDataParallel(run.model), run.optimizers, run.losses)  # type: ignore[arg-type]
        averaged.batches = lambda count: iter(given[:count])  # type: ignore[method-assign]
        self.loop(averaged)


def check(loop: Callable[[Run], None], overlap: Any, **options: Any) -> None:
    """Trains alone and in the context, which has to change no bit.

    Raises:
        UnsupportedError: The context refuses it.
    """

    def context(model: Model, optimizers: Any) -> Any:
        return lightning_hetero.offload(model, optimizers, overlap=overlap, **options)

    expected, found = (outcome(Averaging(loop), adamw, one, Shape()) for one in (None, context))
    assert_equal(expected, found)


def main() -> None:
    """The ranks of a launcher."""
    torch.distributed.init_process_group("gloo")
    for loop in LOOPS.values():
        for overlap in ("none", "forward"):
            for where in ("host", "disk"):
                with tempfile.TemporaryDirectory() as folder:
                    check(loop, overlap, **plans(Path(folder))[where])
    torch.distributed.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main()
