"""Whole tensors of which each rank has a slice, for a checkpoint that the first rank writes.

[Note: The first rank reads]
Which tensors a checkpoint has, and in which order they are written, only the code knows that writes
it, on the first rank. So that rank asks for one tensor at a time, and the others send their pieces
of it until it has ended. A tensor is whole on the first rank alone, and nothing else has to be in
memory: each piece arrives where it belongs in the tensor.

After a fit each rank keeps its slices of optimizer state in memory, for a checkpoint that is saved
then (:class:`KeptState`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hetero.errors import HeteroError, OffloadedAccessError
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
from lightning_hetero.ir.schedule import NO_BLOCK
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.optim import adam
from lightning_hetero.runtime.optimizers import OptimizerBinding
from lightning_hetero.runtime.tensor_sources import StateSource
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import WEIGHTS
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.raw_memory import own_memory

_READ, _ENDED, _FAILED = range(3)


class _SliceReads(ABC):
    """One rank's side of reading whole tensors."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._answered = False  # the other ranks answer

    @contextmanager
    def by_first(self) -> Iterator[None]:
        """In the context the first rank can read all handles. All ranks enter it.

        The others answer before their context begins. See [Note: The first rank reads].

        Raises:
            HeteroError: A rank is elsewhere or has died; on the others, the first one has failed.
        """
        self._collectives.meet("CHECKPOINT", NO_BLOCK)
        if self._collectives.rank:
            self._answer()
            yield
            return
        self._answered = True
        try:
            yield
        except BaseException:
            with suppress(HeteroError):  # the first error says why
                self._tell(_FAILED)
            raise
        finally:
            self._answered = False
        self._tell(_ENDED)

    @abstractmethod
    def _own(self, number: int, array: int, index: int) -> Tensor:
        """What this rank has of a tensor, flat."""

    def _read(self, key: tuple[int, int, int], spans: Sequence[tuple[int, int]], dtype: torch.dtype) -> Tensor:
        """A tensor, flat; ``spans``: the first element that each rank has, and how many."""
        self._tell(_READ, *key)
        flat = own_memory(sum(length for _, length in spans), dtype)
        for rank, (first, length) in enumerate(spans):
            piece = flat[first : first + length]
            if rank:
                self._collectives.receive(piece, rank)
            else:
                piece.copy_(self._own(*key))
        return flat

    def _answer(self) -> None:
        told = torch.empty(4, dtype=torch.int64)
        while True:
            self._collectives.broadcast(told)
            what, *key = told.tolist()
            if what == _FAILED:
                raise HeteroError("the first rank could not write the checkpoint. Its own error says why.")
            if what == _ENDED:
                return
            self._collectives.send(self._own(*key), 0)

    def _tell(self, what: int, number: int = 0, array: int = 0, index: int = 0) -> None:
        self._collectives.broadcast(torch.tensor([what, number, array, index]))


class SliceReads(_SliceReads):
    """Reads weights and state while a session has them.

    Args:
        collectives: Those of the ranks that share the model.
        store: The rank's slices of state.
        blocks: The model; all ranks have the same parts in the same order.
        settle: Waits until a part's weights are final.
    """

    def __init__(self, collectives: Collectives, store: TierStore, blocks: Sequence[Block], settle: Callable[[Part], None]) -> None:
        super().__init__(collectives)
        self._store, self._settle = store, settle
        self._parts = [part for block in blocks for part in block.parts]
        self._numbers = {part: number for number, part in enumerate(self._parts)}

    @contextmanager
    def by_first(self) -> Iterator[None]:
        """See the base class."""
        with super().by_first():
            self._store.read_spread = self._read_part if self._answered else None
            try:
                yield
            finally:
                self._store.read_spread = None

    def _read_part(self, part: Part, array: int, index: int) -> Tensor:
        return self._read((self._numbers[part], array, index), part.spans(index), part.dtype if array == WEIGHTS else torch.float32)

    def _own(self, number: int, array: int, index: int) -> Tensor:
        part = self._parts[number]
        if array == WEIGHTS:
            self._settle(part)
            return part.own_weights(index)
        return self._store.read_piece(part, array, index)


class KeptState(_SliceReads):
    """The rank's slices of optimizer state after a fit; no update is under way when it is made.

    From then on the optimizers have handles of these.
    """

    def __init__(self, collectives: Collectives, bindings: Sequence[OptimizerBinding]) -> None:
        super().__init__(collectives)
        self._pieces: list[Tensor] = []
        for binding in bindings:
            for param in binding.params():
                state = binding.optimizer.state.get(param, {})
                for name in adam.state_names(param.dtype):
                    handle = state.get(name)
                    if isinstance(handle, OffloadedTensor) and isinstance(handle.source, StateSource):
                        source = handle.source
                        spans, stride = tuple(source.part.spans(source.index)), tuple(handle.stride())
                        kept = _Kept(self, len(self._pieces), source.name, source.shape, stride, spans)
                        self._pieces.append(source.take_piece())
                        state[name] = OffloadedTensor(kept, stride=stride)

    def read(self, kept: _Kept) -> Tensor:
        """A whole tensor.

        Raises:
            OffloadedAccessError: No checkpoint is being saved.
        """
        if not self._answered:
            raise OffloadedAccessError(
                f"{kept.name!r} is spread over {self._collectives.ranks} ranks. It can be saved: all ranks call "
                f"trainer.save_checkpoint(path)."
            )
        return self._read((kept.number, 0, 0), kept.spans, kept.dtype).as_strided(kept.shape, kept.stride)

    def _own(self, number: int, array: int, index: int) -> Tensor:
        return self._pieces[number]


@dataclass(frozen=True, slots=True)
class _Kept:
    """The source of a handle of state of which this rank has kept a slice."""

    home: KeptState
    number: int
    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    dtype = torch.float32
    address = None

    def read(self) -> Tensor:
        return self.home.read(self)

    def write(self, value: Tensor) -> None:
        raise OffloadedAccessError(f"{self.name!r} is what the fit has left, and can be saved alone.")
