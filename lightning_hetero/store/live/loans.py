"""Memory that user code has borrowed: copies of weights and state that live elsewhere."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.units import format_bytes


class Loans:
    """Counts copies that are alive, and refuses those that do not fit.

    Attributes:
        room: Bytes that all copies together may take now.
        num_bytes: Bytes of those that are alive.
    """

    def __init__(self) -> None:
        self.room: Callable[[], float] = lambda: math.inf
        self.num_bytes = 0

    def take(self, owner: Any, num_bytes: int, name: str) -> None:
        """A copy is about to be made, which lives as long as its owner.

        Raises:
            OutOfMemoryBudgetError: There is no room for it.
        """
        room = self.room()
        if self.num_bytes + num_bytes > room:
            raise OutOfMemoryBudgetError(
                f"a copy of {name!r} in memory needs {format_bytes(num_bytes)}; beside the plan there is room for "
                f"{format_bytes(max(int(room), 0))}, of which copies like it have {format_bytes(self.num_bytes)}. Write files "
                f"tensor by tensor with lightning_hetero.export_weights(module, path) or trainer.save_checkpoint(path), or raise "
                f"host_memory.",
                self.num_bytes + num_bytes,
            )
        self.num_bytes += num_bytes
        weakref.finalize(owner, self._give_back, num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
