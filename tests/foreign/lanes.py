"""The foreign device as a row of the table of backends, for lanes and for training."""

from __future__ import annotations

from foreign import native
from lightning_hetero.lanes.backends import Backend


class ForeignBackend(Backend):
    """Its streams and events are torch's neutral ones."""

    def page_lock(self, address: int, num_bytes: int) -> int:
        native().lock(address, num_bytes)
        return 0

    def page_unlock(self, address: int) -> None:
        native().unlock(address)
