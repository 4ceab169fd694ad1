"""Activations of a model's blocks: hooks say which forward of which block runs.

What is done with every tensor that autograd saves meanwhile: [Note: What is saved].
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_hetero.ir.plan import BlockPlan, Saved
from lightning_hetero.ir.schedule import Lane, Op, OpKind
from lightning_hetero.runtime.activations.autocast import WeightCasts
from lightning_hetero.runtime.activations.names import OperatorNames, ParameterAddresses, has_storage
from lightning_hetero.runtime.activations.recompute import Buffers
from lightning_hetero.runtime.activations.saved import Packed, SavedStorage
from lightning_hetero.runtime.activations.swaps import SwapFiles, Swapper
from lightning_hetero.runtime.activations.uses import Aside, Rerunning, Use
from lightning_hetero.runtime.anchors import eager
from lightning_hetero.runtime.lanes.base import Event, Lanes


class SavedWatcher(Protocol):
    """Who looks on at what becomes of what forwards save."""

    def recomputing(self, block: int) -> AbstractContextManager[None]:
        """A context in which a block's forward runs once more."""

    def leaves(self, storage: torch.UntypedStorage) -> None:
        """A storage that was saved goes elsewhere."""

    def set_aside(self, storage: torch.UntypedStorage) -> None:
        """The runtime made a storage: for a swap that comes back, or for a recomputation."""


class Activations:
    """The activations of one model.

    Contract: one thread computes; it alone calls, and autograd's threads while it waits for
    backward. A forward may be left by any exception; :meth:`begin_batch` clears up what it has left
    open.

    Args:
        lanes: What moves bytes.
        weights: Says what stands for a tensor that lies in weight memory; ``None`` for one that
            does not.
        casts: 16-bit casts of weights; ``None`` where nobody follows them.
        files: Files for what goes to the disk.
        poison: Fill memory with NaN when it is given up (tests).

    Attributes:
        watcher: Who looks on, if anybody does.
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
        self.lanes, self.weights, self.casts = lanes, weights, casts
        self.watcher: SavedWatcher | None = None
        self.swapper = Swapper(lanes, files, poison=poison, made=self.set_aside)
        self.stack: list[tuple[BlockActivations, Use | Aside | None]] = []  # running forwards
        self._blocks: list[BlockActivations] = []
        self._storages: dict[int, weakref.ref[SavedStorage]] = {}

    def block(
        self, name: str, module: nn.Module, rules: BlockPlan, *, index: int = 0, weights_move: bool = True
    ) -> BlockActivations:
        """The activations of one block.

        Args:
            name: Its name.
            module: The block.
            rules: Its row of the resolved plan.
            index: Its place among the blocks, as ops name it.
            weights_move: Its weights' memory may be another's in backward; else a block that keeps
                everything needs no hooks.
        """
        block = BlockActivations(self, name, module, rules, index=index, weights_move=weights_move)
        self._blocks.append(block)
        return block

    def set_aside(self, storage: torch.UntypedStorage) -> None:
        """A storage was made for the runtime."""
        if self.watcher is not None:
            self.watcher.set_aside(storage)

    def begin_batch(self) -> None:
        """A batch begins: operators are counted anew, and ops speak of its forwards."""
        while self.stack:
            _, use = self.stack.pop()
            if use is not None:
                use.end()
        self._storages.clear()
        for block in self._blocks:
            block.begin_batch()
        self.sweep()
        self.swapper.trim()

    def close(self) -> None:
        """Gives up host memory and files that are free; the lanes are at rest."""
        self.begin_batch()
        self.swapper.close()

    @property
    def recomputing(self) -> bool:
        """Whether a forward that runs now is a recomputation, so that none of its anchors count."""
        return any(isinstance(use, Rerunning) for _, use in self.stack)

    def sweep(self, waited: Sequence[Event] = ()) -> None:
        """Lets go of the device memory of what has left.

        Args:
            waited: SWAP_OUTs that compute has been made to wait for; those that have passed are
                known.
        """
        self.swapper.sweep(waited)

    def known(self, storage: torch.UntypedStorage) -> SavedStorage | None:
        """What is known of a storage that a forward of this batch has saved."""
        ref = self._storages.get(storage._cdata)
        saved = None if ref is None else ref()
        return saved if saved is not None and saved.is_for(storage) else None

    def note(self, storage: torch.UntypedStorage) -> SavedStorage:
        """A storage that may leave."""
        saved = SavedStorage(storage)
        self._storages[storage._cdata] = weakref.ref(saved)
        return saved


class BlockActivations:
    """The activations of one block. Module hooks call ``enter`` and ``leave`` around forwards.

    Attributes:
        rules: What becomes of what it saves.
        buffers: The module's.
    """

    def __init__(
        self, owner: Activations, name: str, module: nn.Module, rules: BlockPlan, *, index: int, weights_move: bool
    ) -> None:
        self.owner, self.name, self.module, self.rules, self.index = owner, f"block {name!r}", module, rules, index
        others = {operator: policy for operator, policy in rules.operators.items() if policy is not rules.saved}
        self.operators = others
        self.recomputes = Saved.RECOMPUTE in (rules.saved, *others.values())
        self._is_idle = not (weights_move or others or rules.saved is not Saved.KEEP or rules.boundary is not Saved.KEEP)
        self.names = OperatorNames()
        self.buffers = Buffers(self.name, module)
        self._params = list(module.named_parameters())
        self._buffers = [(m, name) for m in module.modules() for name, _ in m.named_buffers(recurse=False)]
        self._uses: list[_Slot] = []
        self._unmet = set(others)

    def attach(self) -> list[RemovableHandle]:
        """Registers the hooks, for owners that have none of their own."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.enter(args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.leave(output)

        return [
            self.module.register_forward_pre_hook(eager(before), prepend=True, with_kwargs=True),
            self.module.register_forward_hook(eager(after), always_call=True),
        ]

    def begin_batch(self) -> None:
        """A batch begins."""
        if self._unmet and any(slot.saved for slot in self._uses):
            missing, self._unmet = sorted(self._unmet), set()
            warnings.warn(
                f"{self.name}: the plan has rules for operators of which its forward saves nothing: {', '.join(missing)}. They "
                f"have no effect; make the plan anew for this model and batch.",
                stacklevel=2,
            )
        self.names = OperatorNames()
        self._uses.clear()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward begins; the block's parameters are where they will be during it.

        Raises:
            UnsupportedError: Saved-tensors hooks cannot be used here (``torch.func``).
        """
        stack = self.owner.stack
        around = next((use for _, use in reversed(stack) if isinstance(use, Rerunning)), None)
        use: Use | Aside | None = None
        if around is not None:
            use = around.forward_of(self)
        elif torch.is_grad_enabled() and not self._is_idle:
            self.owner.sweep()
            use = Use(self)
            self._uses.append(_Slot(use))
        else:
            self._uses.append(_Slot(None))
        stack.append((self, use))  # whatever happens now, `leave` takes it away
        if use is not None:
            use.begin(args, kwargs)

    def leave(self, output: Any) -> None:
        """A forward ends, maybe by an exception."""
        stack = self.owner.stack
        if not stack or stack[-1][0] is not self:
            return  # it was left by an exception before it had begun
        _, use = stack.pop()
        if use is not None:
            use.end()
        if isinstance(use, Use):
            use.returned(output)

    def swap(self, op: Op, after: Sequence[Event] = ()) -> Event:
        """Submits a hop of the latest forward that has it before it: uses of one block nest.

        Args:
            op: SWAP_OUT on ``d2h`` or ``disk_write``, or SWAP_IN on ``disk_read`` or ``h2d``.
            after: Events that it waits for.

        Returns:
            Its end. Where reality has overtaken the op it does nothing.
        """
        hop = op.kind, op.lane
        for slot in reversed(self._uses):
            if hop not in slot.hops and slot.hops >= _BEFORE[hop]:
                slot.hops.add(hop)
                use = slot.use()
                event = None if use is None else use.hop(op, after)
                if event is not None:
                    return event
                break
        return self.owner.lanes.submit(replace(op, num_bytes=0), tuple, after)

    @property
    def moved_bytes(self) -> int:
        """Bytes that its latest forward has sent out of the device."""
        use = self._uses[-1].use() if self._uses else None
        return 0 if use is None else use.moved_bytes

    def met(self, operator: str) -> None:
        """An operator's output has been saved."""
        self._unmet.discard(operator)

    def policy(self, operator: str) -> Saved:
        """What becomes of what an operator saves."""
        return self.operators.get(operator, self.rules.saved)

    def fixed(self) -> set[int]:
        """The storages of parameters and buffers as they are now."""
        tensors = [param for _, param in self._params] + [getattr(module, name) for module, name in self._buffers]
        return {t.untyped_storage()._cdata for t in tensors if has_storage(t, self.owner.lanes.device_type)}

    def addresses(self) -> ParameterAddresses:
        """Where the parameters are now."""
        device_type = self.owner.lanes.device_type
        return ParameterAddresses((name, param) for name, param in self._params if has_storage(param, device_type))


_BEFORE: dict[tuple[OpKind, Lane], set[tuple[OpKind, Lane]]] = {
    (OpKind.SWAP_OUT, Lane.D2H): set(),
    (OpKind.SWAP_OUT, Lane.DISK_WRITE): {(OpKind.SWAP_OUT, Lane.D2H)},
    (OpKind.SWAP_IN, Lane.DISK_READ): {(OpKind.SWAP_OUT, Lane.DISK_WRITE)},
    (OpKind.SWAP_IN, Lane.H2D): {(OpKind.SWAP_OUT, Lane.D2H)},
}


class _Slot:
    """One forward of a block in this batch, and the hops that were issued for it."""

    __slots__ = ("hops", "saved", "use")

    def __init__(self, use: Use | None) -> None:
        self.saved = use is not None
        self.use: Callable[[], Use | None] = (lambda: None) if use is None else weakref.ref(use)
        self.hops: set[tuple[OpKind, Lane]] = set()
