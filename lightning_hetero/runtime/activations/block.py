"""Activations of a model's blocks: hooks say which forward of which block runs.

[Note: What is saved] says what happens to every tensor that autograd saves meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_hetero.ir.plan import BlockPlan, Saved
from lightning_hetero.ir.schedule import Lane, Op, OpKind
from lightning_hetero.runtime.activations.autocast import WeightCasts
from lightning_hetero.runtime.activations.files import SwapFiles
from lightning_hetero.runtime.activations.saved import Packed
from lightning_hetero.runtime.activations.uses import BlockSaves, Inner, ModelSaves, Rerunning, Use
from lightning_hetero.runtime.lanes.base import Event, OpEvent
from lightning_hetero.runtime.lanes.queue import Lanes

_Hop = tuple[OpKind, Lane]

# Hops that come before each hop of a forward.
_BEFORE: dict[_Hop, set[_Hop]] = {
    (OpKind.SWAP_OUT, Lane.D2H): set(),
    (OpKind.SWAP_OUT, Lane.DISK_WRITE): {(OpKind.SWAP_OUT, Lane.D2H)},
    (OpKind.SWAP_IN, Lane.DISK_READ): {(OpKind.SWAP_OUT, Lane.DISK_WRITE)},
    (OpKind.SWAP_IN, Lane.H2D): {(OpKind.SWAP_OUT, Lane.D2H)},
}


class Activations:
    """The activations of one model.

    Contract: the thread that computes makes all calls; autograd's threads make them while it waits
    for backward. Any exception may end a forward; :meth:`begin_batch` ends what it left open.

    Args:
        lanes: The lanes that move bytes.
        weights: Returns what autograd saves for a tensor in weight memory; ``None`` for others.
        casts: 16-bit casts of weights; ``None`` if nothing follows them.
        files: Files for swaps to the disk; ``None`` if there are none.
        poison: Fill memory with NaN when it is given up (tests).

    Attributes:
        saves: What the forwards of all blocks share, with the observer of a profile.
    """

    def __init__(
        self,
        lanes: Lanes,
        *,
        weights: Callable[[Tensor], Packed | None] = lambda tensor: None,
        casts: WeightCasts | None = None,
        files: SwapFiles | None = None,
        poison: bool = False,
    ) -> None:
        self.saves = ModelSaves(lanes, weights=weights, casts=casts, files=files, poison=poison)
        self._blocks: list[BlockActivations] = []

    def block(
        self, name: str, module: nn.Module, rules: BlockPlan, *, index: int = 0, weights_move: bool = True
    ) -> BlockActivations:
        """The activations of one block.

        Args:
            name: Its name.
            module: The block.
            rules: Its row of the resolved plan.
            index: Its place among the blocks, as ops name it.
            weights_move: The memory of its weights may be reused before backward. If not, a block
                that keeps everything needs no hooks.
        """
        block = BlockActivations(self.saves, name, module, rules, index=index, weights_move=weights_move)
        self._blocks.append(block)
        return block

    def begin_batch(self) -> None:
        """A batch begins: operators are counted anew, and ops refer to its forwards."""
        while self.saves.running:
            _, use = self.saves.running.pop()
            if use is not None:
                use.end()
        self.saves.storages.clear()
        for block in self._blocks:
            block.begin_batch()
        self.sweep()
        self.saves.swapper.trim()

    def close(self) -> None:
        """Frees unused host memory and files; the lanes are at rest."""
        self.begin_batch()
        self.saves.swapper.close()

    @property
    def recomputing(self) -> bool:
        """Whether a forward that runs now is a recomputation, so that none of its anchors count."""
        return any(isinstance(use, Rerunning) for _, use in self.saves.running)

    def sweep(self, waited: Sequence[Event] = ()) -> None:
        """Releases the device memory of storages that have left.

        Args:
            waited: SWAP_OUTs that compute has been made to wait for. Others count once they have
                passed.
        """
        self.saves.swapper.sweep(waited)


class BlockActivations:
    """The activations of one block. Module hooks call :meth:`enter` and :meth:`leave`.

    Attributes:
        index: Its place among the blocks.
    """

    def __init__(
        self, model: ModelSaves, name: str, module: nn.Module, rules: BlockPlan, *, index: int, weights_move: bool
    ) -> None:
        self.index = index
        self._model = model
        self._saves = BlockSaves(f"block {name!r}", module, index, rules, model.lanes.device_type)
        keeps = rules.saved is Saved.KEEP and rules.boundary is Saved.KEEP and not self._saves.operators
        self._is_idle = keeps and not weights_move
        self._forwards: list[_Forward] = []

    def begin_batch(self) -> None:
        """A batch begins."""
        self._saves.begin_batch(saved=any(forward.saves for forward in self._forwards))
        self._forwards.clear()

    def enter(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """A forward begins; the block's parameters are where they will be during it.

        Raises:
            UnsupportedError: Saved-tensors hooks cannot be used here (``torch.func``).
        """
        running = self._model.running
        around = next((use for _, use in reversed(running) if isinstance(use, Rerunning)), None)
        use: Use | Inner | None = None
        if around is not None:
            use = around.forward_of(self._saves)
        elif torch.is_grad_enabled() and not self._is_idle:
            self._model.swapper.sweep()
            use = Use(self._model, self._saves)
            self._forwards.append(_Forward(use))
        else:
            self._forwards.append(_Forward(None))
        running.append((self._saves, use))  # if an error follows, `leave` removes it
        if use is not None:
            use.begin(args, kwargs)

    def leave(self, output: object) -> None:
        """A forward ends, maybe by an exception."""
        running = self._model.running
        if not running or running[-1][0] is not self._saves:
            return  # an exception ended it before it had begun
        _, use = running.pop()
        if use is not None:
            use.end()
        if isinstance(use, Use):
            use.returned(output)

    def swap(self, op: Op, after: Sequence[Event] = ()) -> OpEvent:
        """Submits a hop of the latest forward that is ready for it: uses of one block nest.

        Args:
            op: SWAP_OUT on ``d2h`` or ``disk_write``, or SWAP_IN on ``disk_read`` or ``h2d``.
            after: Events that it waits for.

        Returns:
            Its end. If no forward is ready for it, it moves nothing.
        """
        hop = op.kind, op.lane
        for forward in reversed(self._forwards):
            if hop not in forward.hops and forward.hops >= _BEFORE[hop]:
                forward.hops.add(hop)
                use = forward.use()
                event = None if use is None else use.hop(op, after)
                if event is not None:
                    return event
                break
        return self._model.lanes.submit(replace(op, num_bytes=0), tuple, after)


class _Forward:
    """One forward of a block in this batch, and the hops that were issued for it."""

    __slots__ = ("hops", "saves", "use")

    def __init__(self, use: Use | None) -> None:
        self.saves = use is not None
        self.use: Callable[[], Use | None] = (lambda: None) if use is None else weakref.ref(use)
        self.hops: set[_Hop] = set()
