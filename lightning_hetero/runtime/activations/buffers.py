"""Buffers as a forward has found them, for when it runs once more: every forward counts once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_hetero.errors import UnsupportedError


class Buffers:
    """The buffers of a module, as its forwards change them.

    The first forward shows by version counters which buffers change in place. From then on only
    those are copied, and the running statistics of normalization, whose version counters do not
    count.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.changing = name, set[str]()
        self._module, self._known = module, False

    def now(self) -> FoundBuffers:
        """The buffers as a forward that begins now finds them."""
        rows = self.rows()
        for row in rows:
            owner = row.owner
            if row.buffer is not None:
                row.is_written = isinstance(owner, _NormBase) and owner.training and owner.track_running_stats
                if row.is_written or not self._known or row.name in self.changing:
                    row.content = row.buffer.detach().clone()
        self._known = True
        return FoundBuffers(self, rows)

    def rows(self) -> list[_Found]:
        """The buffers now, without copies."""
        return [
            _Found(owner, key, f"{prefix}.{key}".lstrip("."), buffer)
            for prefix, owner in self._module.named_modules()
            for key, buffer in owner._buffers.items()
        ]


@dataclass(slots=True)
class _Found:
    owner: nn.Module
    key: str  # its name there
    name: str
    buffer: Tensor | None  # ``None`` if the module has none yet
    content: Tensor | None = None
    version: int = field(init=False)
    is_written: bool = False  # it is changed in place

    def __post_init__(self) -> None:
        self.version = 0 if self.buffer is None else self.buffer._version

    @property
    def there(self) -> Tensor | None:
        """The module's buffer now."""
        return self.owner._buffers.get(self.key)

    @property
    def is_changed(self) -> bool:
        """Whether it was replaced or, by its version counter, changed in place."""
        return self.there is not self.buffer or (self.buffer is not None and self.buffer._version != self.version)


class FoundBuffers:
    """The buffers of a module as one forward has found them."""

    def __init__(self, buffers: Buffers, rows: list[_Found]) -> None:
        self._buffers, self._rows = buffers, rows

    def copies(self) -> list[torch.UntypedStorage]:
        """The storages of the copies."""
        return [row.content.untyped_storage() for row in self._rows if row.content is not None]

    def forget(self) -> None:
        """Nothing needs them any more."""
        self._rows.clear()

    def forward_ended(self) -> None:
        """Keeps the buffers that forward has changed, for a recomputation.

        Raises:
            UnsupportedError: It has changed a buffer in place that no forward had changed before,
                so that there is no copy.
        """
        for row in self._rows:
            row.is_written |= row.buffer is not None and row.buffer._version != row.version
        self._rows = [row for row in self._rows if row.is_written or row.there is not row.buffer]
        for row in self._rows:
            if not row.is_written:
                row.content = row.buffer  # the forward has put another buffer in its place
                continue
            self._buffers.changing.add(row.name)
            if row.content is None:
                raise UnsupportedError(
                    f"{self._buffers.name} changes its buffer {row.name!r} in forward, as its first forward did not, so it cannot "
                    f"be recomputed: the content of the buffer is lost. Give the block saved='keep' or a swap in the plan."
                )

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Inside, the module's buffers have the content that the forward found."""
        known: dict[int, Tensor] = {}  # several modules may share one buffer
        after = [(row, row.there) for row in self._rows]
        for row in self._rows:
            content = row.content
            row.owner._buffers[row.key] = None if content is None else known.setdefault(id(row.buffer), content)
        try:
            yield
        finally:
            for row, buffer in after:
                row.owner._buffers[row.key] = buffer

    def learn(self) -> None:
        """A batch has ended: from now on buffers that it has changed or replaced are copied."""
        self._buffers.changing |= {row.name for row in self._rows if row.is_changed}

    @torch.no_grad()
    def restore(self) -> bool:
        """Restores the content; false if one was replaced, or changed for the first time."""
        for row in self._rows:
            there = row.there
            if row.content is None and row.is_changed:
                return False
            if row.content is not None:
                if there is None or there.shape != row.content.shape:
                    return False
                there.copy_(row.content)
        return [row.name for row in self._rows] == [row.name for row in self._buffers.rows()]
