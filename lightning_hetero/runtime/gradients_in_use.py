"""Gradients that stay after a step, while updates read them: code that writes them is told.

Where updates wait for all gradients, ``param.grad`` stays after ``optimizer.step()``, as in
PyTorch, and updates run while the loop goes on. Code that writes gradients in place in the meantime
changes the update, sometimes. Autograd counts such writes, and a tensor without memory shares the
count. So they are noticed when something waits for the updates, as the next backward does, even if
the gradient was dropped since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError

_NO_MEMORY = torch.UntypedStorage()


class GradientsInUse:
    """The gradients of one model that updates under way read."""

    def __init__(self) -> None:
        self._read: list[tuple[str, Tensor, int]] = []  # parameters' names, and the count of writes then

    def follow(self, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        """A step has given these parameters' updates to the engine."""
        with torch._C.DisableTorchFunctionSubclass():  # for offloaded parameters these would be calls of Python
            read = [(name, p.grad) for name, p in params if p.grad is not None]
            counts = [torch.Tensor._make_subclass(Tensor, grad) for _, grad in read]
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(counts)):
                for count in counts:  # they would keep the gradients' memory
                    count.set_(_NO_MEMORY)
            self._read += [(name, count, count._version) for (name, _), count in zip(read, counts, strict=True)]

    def check(self) -> None:
        """Something waits for the updates, so that code may write gradients from then on.

        Raises:
            UnsupportedError: Code has written one of them in place before.
        """
        if self._read:
            with self.ending(failed=False):
                pass

    @contextmanager
    def ending(self, *, failed: bool) -> Iterator[None]:
        """A run ends in the context; then :meth:`check`, unless something has ``failed``."""
        read, self._read = self._read, []
        written = [name for name, count, before in read if count._version != before]
        yield
        if written and not failed:
            raise UnsupportedError(
                f"the gradient of {written[0]!r} was written in place after optimizer.step(), while its update may have read it. "
                f"Use optimizer.zero_grad(). Other changes belong before the step, as in on_before_optimizer_step of Lightning; in "
                f'a loop, pass overlap="none" to make them after it.'
            )
