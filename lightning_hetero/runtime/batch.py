"""What the executor and the handlers of ops know of the batch under way."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.runtime.optimizers import OptimizerBinding


@dataclass(slots=True)
class Batch:
    """The batch under way."""

    armed: OptimizerBinding | None = None  # the optimizer in whose ``step`` the batch ends, if it ends in one
    in_backward: bool = False  # Lightning's own backward runs. It leaves the gradients of the step
    probing: bool = False  # a device may be too small for the batch, so updates wait until the batch is over
    waits: bool = False  # updates of this batch wait for the verdict, although its schedule runs them before
    serial: bool = False  # compute waits for each op to end, to measure compute alone
    # ``optimizer.step()`` commits. If the training loop's state belongs to a step, the end of the
    # step commits instead.
    commits: bool = True
