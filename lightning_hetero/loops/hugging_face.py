"""``Trainer(callbacks=[OffloadCallback(plan="disk")])`` of transformers, TRL's trainers included.

Imports transformers, which the package does not depend on.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.loops.plain import OffloadedLoop, Overlap, choices_of
from lightning_hetero.untyped import Value


class OffloadCallback(TrainerCallback):
    """Offloads the model of a transformers Trainer while it trains.

    >>> callbacks = [OffloadCallback(plan="disk", host_memory="8GiB")]
    >>> Trainer(model, args, train_dataset=data, callbacks=callbacks).train()

    Losses and weights are those of the Trainer alone. As training ends, the model is in memory
    again, if it fits ``host_memory``.

    Args:
        plan: As for :func:`lightning_hetero.offload`.
        overlap: The same, but ``"backward"``: the Trainer computes the norm of gradients between
            backward and step, even where it does not clip.
        options: Other options of :func:`lightning_hetero.offload`.
    """

    def __init__(self, plan: Value = "auto", *, overlap: Overlap = "forward", **options: Value) -> None:
        if overlap == "backward":
            raise UnsupportedError(
                'OffloadCallback got overlap="backward", but the Trainer uses gradients between backward and step. Pass '
                'overlap="forward".'
            )
        self._choices, self._overlap = choices_of(plan, **options), overlap
        self.loop: OffloadedLoop | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Places the model; the Trainer has made its optimizer and has not computed yet.

        Raises:
            UnsupportedError: The Trainer computes on a device of its own, or in several processes.
        """
        self._check(args)
        self._close(failed=True)  # a run before this one was interrupted
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        self.loop = OffloadedLoop(model, _inner(optimizer), self._choices, overlap=self._overlap)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Gives the model back."""
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        if self.loop is not None:
            self.loop.close(failed=failed)

    def _check(self, args: TrainingArguments) -> None:
        if args.world_size > 1 or args.device.type != "cpu":
            raise UnsupportedError(
                f"OffloadCallback got a Trainer on {args.device} in {args.world_size} processes; it computes in one, on the CPU. "
                f"Pass TrainingArguments(use_cpu=True), and start one process."
            )


def _inner(optimizer: Value) -> Optimizer:
    """The optimizer of torch in accelerate's wrapper."""
    found = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(found, Optimizer):
        raise UnsupportedError(f"OffloadCallback got {type(found).__name__} as optimizer; allowed: an optimizer of torch.")
    return found
