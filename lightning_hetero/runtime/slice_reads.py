"""Whole tensors of which each rank has a slice, for a checkpoint that the first rank writes.

[Note: The first rank reads]
Which tensors a checkpoint has, and in which order they are written, only the code knows that writes
it, on the first rank. So that rank asks for one tensor at a time, and the others send their pieces
of it until it has ended. A tensor is whole on the first rank alone, and nothing else has to be in
memory: each piece arrives where it belongs in the tensor. Code that runs on all ranks can read
together: then each of them has the whole tensor.

[Note: Held pieces]
State that the engine does not have is held here: that of optimizers that run by their own code, and
after a fit all of it. Each rank holds its piece of a tensor, and the optimizer has a handle of the
whole. All ranks make the same handles in the same order, so a number names one on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_hetero.errors import HeteroError, OffloadedAccessError
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
from lightning_hetero.ir.schedule import NO_BLOCK
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.optim import adam
from lightning_hetero.runtime.optimizers import OptimizerBinding
from lightning_hetero.runtime.tensor_sources import StateSource, WeightSource
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import WEIGHTS
from lightning_hetero.store.live.moved_weights import weights_now
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.raw_memory import own_memory
from lightning_hetero.untyped import Options

_Key = tuple[int, int, int]
_Runs = Sequence[tuple[int, int]]  # the first element of each, and how many
_Way = Callable[[_Key, _Runs, torch.dtype, _Runs], Tensor]

_READ, _ENDED, _FAILED = range(3)
_HELD = -2  # in the place of an array of a part


@dataclass(eq=False, slots=True)
class SpreadTensor:
    """A tensor of which this rank holds a piece: the source of the handle of the whole.

    Attributes:
        home: Reads it.
        number: The same on all ranks.
        name: The parameter's name and the key of the state.
        shape: Of the whole.
        stride: Of the whole.
        spans: What each rank has of it in memory order: its first element, and how many.
        piece: This rank's piece, flat.
    """

    home: SliceReads
    number: int
    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    piece: Tensor
    address = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the whole."""
        return self.piece.dtype

    def read(self) -> Tensor:
        """The whole; see :meth:`SliceReads.by_first`."""
        return self.home.read(self)

    def write(self, value: Tensor) -> None:
        """Refuses: it would have to come to all ranks.

        Raises:
            OffloadedAccessError: Always.
        """
        raise OffloadedAccessError(
            f"{self.name!r} is spread over {len(self.spans)} ranks, and cannot be written. Give the optimizer another state on all "
            f"ranks, with load_state_dict()."
        )


Spread = SpreadTensor | WeightSource | StateSource
"""The source of a tensor of which each rank has a piece, also if it is of a part of one rank."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where weights and the engine's state are during a fit."""

    store: TierStore
    parts: list[Part]  # all ranks have the same in the same order
    settle: Callable[[Part], None]  # waits until a part's weights are final


class SliceReads:
    """One rank's side of reading whole tensors, during a fit and after it.

    Args:
        collectives: Those of the ranks that share the model.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._way: _Way | None = None  # how whole tensors are read now
        self._held: list[SpreadTensor] = []
        self._numbers: dict[str, int] = {}  # of what is held, by name
        self._place: _Place | None = None

    def attach(self, store: TierStore, blocks: Sequence[Block], settle: Callable[[Part], None]) -> None:
        """A fit begins.

        Args:
            store: The rank's slices of state.
            blocks: The model.
            settle: Waits until a part's weights are final.
        """
        self._place = _Place(store, [part for block in blocks for part in block.parts], settle)

    def detach(self, bindings: Sequence[OptimizerBinding]) -> None:
        """The fit is over, and no update is under way: holds the state that the engine has."""
        for binding in bindings:
            for param in binding.params():
                state = binding.optimizer.state.get(param, {})
                for name in adam.state_names(param.dtype):
                    handle = state.get(name)
                    if isinstance(handle, OffloadedTensor) and isinstance(source := handle.source, StateSource):
                        state[name] = self.hold(source.part, source.index, name, source.take_piece())
        self._place = None

    def hold(self, part: Part, index: int, key: str, piece: Tensor) -> OffloadedTensor:
        """A handle of state with the shape of a parameter; all ranks make it.

        Args:
            part: The parameter's part.
            index: Its position in it.
            key: The name of the state.
            piece: What this rank has of it, flat.
        """
        layout = part.layouts[index]
        return self._hold(f"{part.names[index]}.{key}", layout.shape, layout.stride, tuple(part.spans(index)), piece)

    def hold_of(self, owner: int, name: str, like: Tensor, piece: Tensor) -> OffloadedTensor:
        """A handle of state that one rank has whole; all ranks make it.

        Args:
            owner: The rank.
            name: The parameter's name and the key of the state.
            like: A contiguous tensor of its shape and dtype, on the meta device.
            piece: The state, flat, on the owner; else an empty tensor.
        """
        ranks, numel = self._collectives.shards, like.numel()
        spans = tuple((0 if rank <= owner else numel, numel if rank == owner else 0) for rank in range(ranks))
        return self._hold(name, like.shape, like.stride(), spans, piece)

    def _hold(
        self, name: str, shape: torch.Size, stride: tuple[int, ...], spans: tuple[tuple[int, int], ...], piece: Tensor
    ) -> OffloadedTensor:
        number = self._numbers.setdefault(name, len(self._held))
        held = SpreadTensor(self, number, name, shape, stride, spans, piece)
        self._held[number : number + 1] = [held]
        return OffloadedTensor(held, stride=stride)

    def tell_all(self, rows: dict[int, Options]) -> list[dict[int, Options]]:
        """What the owner of each slice says of the state that it has; all ranks call it."""
        self._collectives.meet("READ", NO_BLOCK)
        return self._collectives.tell_all(rows)[: self._collectives.shards]  # every node has the same

    @property
    def rank(self) -> int:
        """The slice that this rank owns."""
        return self._collectives.shard

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
        try:
            with self._reading(self._ask):
                yield
        except BaseException:
            with suppress(HeteroError):  # the first error says why
                self._tell(_FAILED)
            raise
        self._tell(_ENDED)

    @contextmanager
    def by_all(self) -> Iterator[None]:
        """In the context all ranks can read all handles, the same ones in the same order."""
        with self._reading(self._join):
            yield

    @contextmanager
    def _reading(self, way: _Way) -> Iterator[None]:
        before, self._way = self._way, way
        store = None if self._place is None else self._place.store
        read_before = None if store is None else store.read_spread
        if store is not None:
            store.read_spread = partial(self._read_part, way)
        try:
            yield
        finally:
            self._way = before
            if store is not None:
                store.read_spread = read_before

    def read(self, held: SpreadTensor) -> Tensor:
        """A whole tensor.

        Raises:
            OffloadedAccessError: The other ranks do not read it.
        """
        if self._way is None:
            raise OffloadedAccessError(
                f"{held.name!r} is spread over {self._collectives.shards} ranks. It can be saved: all ranks call "
                f"trainer.save_checkpoint(path). It can be read within `with strategy.materialize(module)`, on all ranks."
            )
        runs = [(0, held.shape.numel())]
        return self._way((held.number, _HELD, 0), held.spans, held.dtype, runs).as_strided(held.shape, held.stride)

    @property
    def _in_fit(self) -> _Place:
        if self._place is None:
            raise HeteroError("weights or the engine's state were read from ranks where no fit is under way.")
        return self._place

    def _read_part(self, way: _Way, part: Part, array: int, index: int, runs: _Runs) -> Tensor:
        """What ``TierStore.read_spread`` reads."""
        dtype = part.dtype if array == WEIGHTS else torch.float32
        return way((self._in_fit.parts.index(part), array, index), part.spans(index), dtype, runs)

    def span(self, source: Spread) -> tuple[int, int]:
        """What this rank has of a tensor: its first element in memory order, and how many."""
        spans = source.spans if isinstance(source, SpreadTensor) else source.part.spans(source.index)
        return spans[self.rank]

    def own(self, source: Spread) -> Tensor:
        """What this rank has of a tensor, flat. It may change with the next step."""
        if isinstance(source, SpreadTensor):
            return source.piece
        return self._own_of(source.part, WEIGHTS if isinstance(source, WeightSource) else source.array, source.index)

    def _own(self, number: int, array: int, index: int) -> Tensor:
        """The same, as ranks ask for it."""
        return self._held[number].piece if array == _HELD else self._own_of(self._in_fit.parts[number], array, index)

    def _own_of(self, part: Part, array: int, index: int) -> Tensor:
        place = self._in_fit
        if array == WEIGHTS:
            place.settle(part)
            if index in part.moved:
                return part.own_piece(index, part.flat(index, weights_now(part, index), part.dtype))[1]
            if part.block.resident:
                return part.own_weights(index)
        elif part.state_home is not None:
            return part.state_home.read(part, array, index)
        return place.store.read_piece(part, array, index)

    def _join(self, key: _Key, spans: _Runs, dtype: torch.dtype, runs: _Runs) -> Tensor:
        """As :meth:`_ask`, on all ranks together.

        Raises:
            HeteroError: Another rank reads something else.
        """
        self._collectives.meet("READ", NO_BLOCK)
        if len(set(map(tuple, self._collectives.agree(key)))) > 1:
            raise HeteroError("the ranks read other tensors. Within strategy.materialize() all read the same in the same order.")
        flat, own, at = own_memory(sum(length for _, length in runs), dtype), self._own(*key), 0
        for first, length in runs:
            for rank, (begin, here) in enumerate(spans):
                start, end = max(first, begin), min(first + length, begin + here)
                if start < end:
                    piece = flat[at + start - first : at + end - first]
                    if rank == self._collectives.rank:
                        piece.copy_(own[start - begin : end - begin])
                    self._collectives.broadcast(piece, rank)
            at += length
        return flat

    def _ask(self, key: _Key, spans: _Runs, dtype: torch.dtype, runs: _Runs) -> Tensor:
        """Runs of a tensor, joined; ``spans``: the runs that the ranks have."""
        self._tell(_READ, *key)
        flat = own_memory(sum(length for _, length in spans), dtype)
        for rank, (first, length) in enumerate(spans):
            piece = flat[first : first + length]
            if rank:
                self._collectives.receive(piece, rank)
            else:
                piece.copy_(self._own(*key))
        return torch.cat([flat[first : first + length] for first, length in runs]) if len(runs) > 1 else flat.narrow(0, *runs[0])

    def _answer(self) -> None:
        told = torch.empty(4, dtype=torch.int64)
        while True:
            self._collectives.broadcast(told)
            what, *key = told.tolist()
            if what == _FAILED:
                raise HeteroError("the first rank could not write the checkpoint. Its own error says why.")
            if what == _ENDED:
                return
            if self._collectives.node == 0:  # the first rank is there
                self._collectives.send(self._own(*key), 0)

    def _tell(self, what: int, number: int = 0, array: int = 0, index: int = 0) -> None:
        self._collectives.broadcast(torch.tensor([what, number, array, index]))
