"""Activations of a model's blocks: what becomes of every tensor that autograd saves in a forward.

[Note: What is saved]
A pack hook decides about every tensor that autograd saves while a block's forward runs:

- In weight memory: autograd gets a reference, because that memory is reused before backward.
- A 16-bit cast of a weight: autograd gets a reference ([Note: Casts of weights]).
- A parameter or buffer, a tensor below 4 KiB, on another device, sparse, or of a tensor class of
  its own: it is kept.
- In an argument of the block: the plan's ``boundary`` decides.
- Made by an operator with a policy of its own: the plan's ``operators`` decides.
- Any other: the plan's ``saved`` decides.

*Kept* means what autograd would do. *Dropped* tensors come back by recomputation ([Note:
Recomputation]). *Swapped* tensors leave by storage, so a storage moves once, however often it was
saved ([Note: Hops]). A storage that several uses of blocks save stays on the device, because the
later use needs it before the earlier one brings it back. The output of a block belongs to the block
that takes it as its argument. Backward finds in-place changes when it asks for a tensor, as
autograd does. A swapped tensor that changes after it has left comes back as it was saved.

Only autograd's saved tensors keep alive what they need. If a graph is thrown away, its host memory
is freed too.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.ir.plan import BlockPlan, Saved
from lightning_hetero.ir.schedule import Lane, Op, OpKind
from lightning_hetero.lanes.base import Event, OpEvent
from lightning_hetero.lanes.contract import Lanes
from lightning_hetero.runtime.activations.autocast import WeightCasts
from lightning_hetero.runtime.activations.buffers import Buffers
from lightning_hetero.runtime.activations.files import SwapFiles
from lightning_hetero.runtime.activations.names import OperatorNames, ParameterAddresses, has_storage
from lightning_hetero.runtime.activations.operators import Watch
from lightning_hetero.runtime.activations.recompute import RecomputationError, Rerun, itself
from lightning_hetero.runtime.activations.saved import Packed, SavedStorage, SavedTensor, StayingTensor
from lightning_hetero.runtime.activations.surroundings import Surroundings
from lightning_hetero.runtime.activations.swaps import Swap, Swapper
from lightning_hetero.runtime.anchors import tensors_in

SMALL_BYTES = 4096
"""Smaller storages stay where they are: moving them costs more than they take."""

_SWAPPED = frozenset({Saved.SWAP_HOST, Saved.SWAP_DISK})

_Hop = tuple[OpKind, Lane]

# Hops that come before each hop of a forward.
_BEFORE: dict[_Hop, set[_Hop]] = {
    (OpKind.SWAP_OUT, Lane.D2H): set(),
    (OpKind.SWAP_OUT, Lane.DISK_WRITE): {(OpKind.SWAP_OUT, Lane.D2H)},
    (OpKind.SWAP_IN, Lane.DISK_READ): {(OpKind.SWAP_OUT, Lane.DISK_WRITE)},
    (OpKind.SWAP_IN, Lane.H2D): {(OpKind.SWAP_OUT, Lane.D2H)},
}


class SavedWatcher(Protocol):
    """Observes what happens to the tensors that forwards save."""

    def recomputing(self, block: int) -> AbstractContextManager[None]:
        """A context in which a block's forward runs once more."""

    def leaves(self, storage: torch.UntypedStorage) -> None:
        """A storage that was saved will leave the device."""

    def set_aside(self, storage: torch.UntypedStorage) -> None:
        """The runtime made a storage: for a swap that comes back, or for a recomputation."""


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
    """

    def __init__(
        self,
        lanes: Lanes,
        *,
        weights: Callable[[Tensor], Packed | None],
        casts: WeightCasts | None = None,
        files: SwapFiles | None = None,
        poison: bool = False,
    ) -> None:
        self.lanes, self.weights, self.casts = lanes, weights, casts
        self.swapper = Swapper(lanes, files, poison=poison, made=self.set_aside)
        self.watcher: SavedWatcher | None = None  # the observer of a profile, if there is one
        # The forwards that are under way, the innermost one last; with ``None``, its saved tensors
        # are autograd's own.
        self.running: list[tuple[BlockActivations, Use | Inner | None]] = []
        self.storages: dict[int, weakref.ref[SavedStorage]] = {}  # that may leave, by address
        self._blocks: list[BlockActivations] = []
        # Recomputed tensors of the last batch and of the one before it: their blocks, and whether
        # they have other values than in forward, on the device.
        self._compared: tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]] = ([], [])

    def block(
        self, name: str, module: nn.Module, rules: BlockPlan, *, index: int = 0, weights_move: bool = True
    ) -> BlockActivations:
        """The activations of one block; see :class:`BlockActivations`."""
        block = BlockActivations(self, f"block {name!r}", module, rules, index=index, weights_move=weights_move)
        self._blocks.append(block)
        return block

    def begin_batch(self) -> None:
        """A batch begins: operators are counted anew, and ops refer to its forwards.

        Raises:
            RecomputationError: A recomputation of the batch before the last made other values.
        """
        while self.running:
            _, use = self.running.pop()
            if use is not None:
                use.end()
        self.storages.clear()
        for block in self._blocks:
            block.begin_batch()
        self.swapper.sweep()
        self.swapper.trim()
        last, earlier = self._compared
        self._compared = ([], last)
        if earlier and torch.stack([differs for _, differs in earlier]).any():  # the host waits once
            name = next(name for name, differs in earlier if differs)
            raise RecomputationError.of(name, "what it had saved two batches ago has other values")

    def compared(self, name: str, differs: Tensor) -> None:
        """A block has made a tensor again; ``differs``: its values are others than in forward."""
        self._compared[0].append((name, differs))

    def close(self) -> None:
        """Frees unused host memory and files; the lanes are at rest.

        Raises:
            RecomputationError: A recomputation of the last two batches made other values.
        """
        try:
            for _ in self._compared:
                self.begin_batch()
        finally:
            self.swapper.close()

    def set_aside(self, storage: torch.UntypedStorage) -> None:
        """A storage was made for the runtime."""
        if self.watcher is not None:
            self.watcher.set_aside(storage)

    def known(self, storage: torch.UntypedStorage) -> SavedStorage | None:
        """What is known of a storage that a forward of this batch has saved."""
        ref = self.storages.get(storage._cdata)
        saved = None if ref is None else ref()
        return saved if saved is not None and saved.is_for(storage) else None

    def note(self, storage: torch.UntypedStorage) -> SavedStorage:
        """Remembers a storage that may leave."""
        saved = SavedStorage(weakref.ref(storage))
        self.storages[storage._cdata] = weakref.ref(saved)
        return saved


class BlockActivations:
    """The activations of one block. Module hooks call :meth:`enter` and :meth:`leave`.

    Args:
        name: The block's name, for errors.
        rules: Its row of the resolved plan.
        index: Its place among the blocks, as ops name it.
        weights_move: The memory of its weights may be reused before backward. If not, a block that
            keeps everything needs no hooks.
    """

    def __init__(
        self, model: Activations, name: str, module: nn.Module, rules: BlockPlan, *, index: int, weights_move: bool
    ) -> None:
        self.name, self.module, self.index, self.rules = name, module, index, rules
        # The policies of operators that differ from ``rules.saved``.
        self.operators = {operator: policy for operator, policy in rules.operators.items() if policy is not rules.saved}
        self.unmet = set(self.operators)  # those of them whose tensors no forward has saved yet
        self.recomputes = Saved.RECOMPUTE in (rules.saved, *self.operators.values())  # some of its saved tensors are dropped
        self.names = OperatorNames()  # names its operators in this batch
        self.buffers, self.surroundings = Buffers(name, module), Surroundings(module)
        self._model, self._device_type = model, model.lanes.device_type
        self._params = list(module.named_parameters())
        self._buffers = [(m, name) for m in module.modules() for name, _ in m.named_buffers(recurse=False)]
        self.keeps = rules.saved is Saved.KEEP and rules.boundary is Saved.KEEP and not self.operators
        self._is_idle = self.keeps and not weights_move
        self._forwards: list[_Forward] = []

    def begin_batch(self) -> None:
        """A batch begins. Warns of rules without effect, once."""
        if self.unmet and any(forward.saves for forward in self._forwards):
            missing, self.unmet = sorted(self.unmet), set()
            warnings.warn(
                f"{self.name}: the plan has rules for operators of which its forward saves nothing: {', '.join(missing)}. They "
                f"have no effect; make the plan anew for this model and batch.",
                stacklevel=2,
            )
        self._forwards.clear()
        self.names = OperatorNames()

    def enter(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """A forward begins; the block's parameters are where they will be during it."""
        running = self._model.running
        if self._is_idle and not running:
            return
        around = next((use for _, use in reversed(running) if isinstance(use, Rerunning)), None)
        use: Use | Inner | None = None
        if around is not None:
            use = around.forward_of(self)
        elif torch.is_grad_enabled() and not self._is_idle:
            self._model.swapper.sweep()
            use = Use(self._model, self)
            self._forwards.append(_Forward(use))
        else:
            self._forwards.append(_Forward(None))
        running.append((self, use))  # if an error follows, `leave` removes it
        if use is not None:
            use.begin(args, kwargs)

    def leave(self, output: object) -> None:
        """A forward ends, maybe by an exception."""
        running = self._model.running
        if not running or running[-1][0] is not self:
            return  # an exception ended it before it had begun
        _, use = running.pop()
        if use is not None:
            use.end()
        if isinstance(use, Use):
            use.returned(output)

    def swap(self, op: Op, after: Sequence[Event] = ()) -> OpEvent:
        """Submits a hop of the latest forward that is ready for it: uses of one block nest.

        Returns its end. If no forward is ready for it, it moves nothing.
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

    def policy(self, operator: str) -> Saved:
        """What becomes of the tensors that an operator saves."""
        return self.operators.get(operator, self.rules.saved)

    def fixed(self) -> set[int]:
        """The storages of parameters and buffers as they are now."""
        tensors = [param for _, param in self._params] + [getattr(module, name) for module, name in self._buffers]
        return {t.untyped_storage()._cdata for t in tensors if has_storage(t, self._device_type)}

    def addresses(self) -> ParameterAddresses:
        """Where the parameters are now."""
        return ParameterAddresses((name, param) for name, param in self._params if has_storage(param, self._device_type))


class _Forward:
    """One forward of a block in this batch, and the hops that were issued for it."""

    __slots__ = ("hops", "saves", "use")

    def __init__(self, use: Use | None) -> None:
        self.saves = use is not None
        self.use: Callable[[], Use | None] = (lambda: None) if use is None else weakref.ref(use)
        self.hops: set[_Hop] = set()


class Use:
    """One forward of a block, and what it has saved. The tensors that it saved hold it."""

    def __init__(self, model: Activations, block: BlockActivations) -> None:
        self._model, self._block, self._weights, self._casts = model, block, model.weights, model.casts
        self._stays = block.keeps and not model.lanes.counts  # what it saves, unless another use moves it
        self._device_type = model.lanes.device_type
        self._key = object()  # what owned storages name: they must not keep the use alive
        self._number = 0
        self._inputs: set[int] = set()
        self._fixed: set[int] = set()
        self._storages: list[weakref.ref[SavedStorage]] = []
        self._swap: weakref.ref[Swap] | None = None
        self._rerun: Rerun | None = None
        self._contexts: list[AbstractContextManager[object]] = []  # while the forward runs: they hold this use
        self._watch: Watch | None = None

    def begin(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """The forward begins."""
        model, block, lanes = self._model, self._block, self._model.lanes
        try:
            self._enter(saved_tensors_hooks(self.pack, _view))
        except RuntimeError as error:
            raise UnsupportedError(
                f"{block.name}: activations cannot be followed here: {error}. Blocks that run under torch.func need saved='keep' "
                f"and weights on 'device' in the plan."
            ) from error
        if not self._stays:  # else all storages are treated alike
            self._fixed = block.fixed()
            tensors = (leaf for leaf in tensors_in((args, kwargs)) if has_storage(leaf, self._device_type))
            self._inputs = {leaf.untyped_storage()._cdata for leaf in tensors} - self._fixed
        if block.recomputes:
            self._rerun = Rerun(
                block.name, block.module, args, kwargs, save=lambda argument: model.weights(argument) or self._save(argument, None),
                buffers=block.buffers, surroundings=block.surroundings, device=lanes.device, allocated=lanes.allocated,
                compared=lambda differs: model.compared(block.name, differs),
            )  # fmt: skip
            for storage in self._rerun.copies():
                model.set_aside(storage)
        if block.operators:
            self._watch = Watch(
                names=block.names, addresses=block.addresses(), policy=block.policy, device=lanes.device,
                device_type=self._device_type, inside=lambda: model.running[-1][1] is self,
                record=None if self._rerun is None else self._rerun.record,
            )  # fmt: skip
            self._enter(self._watch)

    def _enter(self, context: AbstractContextManager[object]) -> None:
        context.__enter__()
        self._contexts.append(context)

    def end(self) -> None:
        """The forward has ended."""
        self._watch = None
        while self._contexts:
            self._contexts.pop().__exit__(None, None, None)

    def returned(self, output: object) -> None:
        """The block's output is its successor's to swap."""
        for leaf in tensors_in(output) if self._storages else ():
            if has_storage(leaf, self._device_type):
                known = self._model.known(leaf.untyped_storage())
                if known is not None and known.owner is self._key:
                    known.owner = None
        if self._rerun is not None:
            self._rerun.forward_ended()

    def pack(self, tensor: Tensor) -> Packed:
        """The pack hook; see [Note: What is saved]."""
        number, self._number = self._number, self._number + 1
        casts = self._casts
        cast = casts.reference(tensor) if casts is not None and casts.entered else None
        found = cast or self._weights(tensor)
        if found is None and self._stays and not self._model.storages:  # nothing needs to know its storage
            return StayingTensor(self._block.name, number, tensor.detach())
        return found or self._save(tensor, number)

    def recompute(self) -> None:
        """Brings back the tensors that were dropped."""
        watcher = self._model.watcher
        if self._rerun is not None:
            with nullcontext() if watcher is None else watcher.recomputing(self._block.index):
                self._rerun.run(self._rerunning)

    def _save(self, tensor: Tensor, number: int | None) -> Packed:
        """Saves a tensor for autograd, or an argument of the forward (``number=None``)."""
        model, block = self._model, self._block
        if not has_storage(tensor, self._device_type) or tensor.is_conj() or tensor.is_neg():
            return _Kept(tensor.detach())
        storage = tensor.untyped_storage()
        known = model.known(storage)
        if known is not None and known.owner is not None and known.owner is not self._key:
            known.stay(tensor)
        key = storage._cdata
        made = None if self._watch is None else self._watch.of(storage)
        if key in self._fixed or storage.nbytes() < SMALL_BYTES:
            policy = Saved.KEEP
        elif key in self._inputs:
            policy = block.rules.boundary
        else:
            policy = block.rules.saved if made is None else block.policy(made.operator)
        if made is not None:
            block.unmet.discard(made.operator)
        if policy is Saved.RECOMPUTE and self._rerun is not None and number is not None:
            saved = SavedTensor(self.recompute, block.name, number, tensor, dropped=True)
            self._rerun.drop(saved, tensor)
            return saved
        home = None
        if policy in _SWAPPED and (known is None or not known.shared):
            home = known or model.note(storage)
            if home.owner is None:
                home.owner, home.to_disk = self._key, policy is Saved.SWAP_DISK
                if model.watcher is not None:
                    model.watcher.leaves(storage)
                self._storages.append(weakref.ref(home))
        if key not in self._fixed:
            model.lanes.allocated(storage)
        again, name = (None, f"the input of {block.name}") if number is None else (self.recompute, block.name)
        saved = SavedTensor(again, name, number or 0, tensor.detach(), dropped=False, home=home)
        if made is not None and made.saved is None and saved.version == 0:
            made.saved = weakref.ref(saved)
        return saved

    def hop(self, op: Op, after: Sequence[Event]) -> OpEvent | None:
        """Submits one hop of the storages that leave; ``None`` if none does."""
        if (op.kind, op.lane) == (OpKind.SWAP_OUT, Lane.D2H):
            leaving = [s for s in (ref() for ref in self._storages) if s is not None and s.owner is self._key]
            if not leaving:
                return None
            swap = Swap(self._model.swapper, self._block.index, leaving, op, after)
            self._swap = weakref.ref(swap)
            return swap.out
        found = None if self._swap is None else self._swap()
        if found is None:
            return None
        move = {Lane.DISK_WRITE: found.write, Lane.DISK_READ: found.read, Lane.H2D: found.bring}[op.lane]
        return move(op, after)

    @contextmanager
    def _rerunning(self) -> Iterator[Callable[[], bool]]:
        """The block's own hooks do nothing, and blocks in it save nothing."""
        rerunning = Rerunning(self._block)
        running, depth = self._model.running, len(self._model.running)
        running.append((self._block, rerunning))
        try:
            yield lambda: running[-1][1] in (rerunning, rerunning.own)
        finally:
            del running[depth:]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A saved tensor that stays, whatever the plan says, because it has no ordinary memory."""

    tensor: Tensor

    def view(self) -> Tensor:
        return self.tensor


class Inner:
    """A forward inside a recomputation. Its saved tensors are thrown away with the graph.

    If it ``saves``, it is the forward that is repeated: the recomputation counts its tensors.
    """

    def __init__(self, *, saves: bool) -> None:
        self._hooks = nullcontext() if saves else saved_tensors_hooks(Tensor.detach, itself)

    def begin(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """The forward begins."""
        self._hooks.__enter__()

    def end(self) -> None:
        """The forward ends."""
        self._hooks.__exit__(None, None, None)


class Rerunning(Inner):
    """A recomputation that is under way."""

    def __init__(self, block: BlockActivations) -> None:
        super().__init__(saves=True)
        self._block = block
        self.own: Inner | None = None

    def forward_of(self, block: BlockActivations) -> Inner:
        """A block's forward begins inside. The first of the block itself is the repeated one."""
        if self.own is None and block is self._block:
            self.own = Inner(saves=True)
            return self.own
        return Inner(saves=False)


# Gives autograd what was packed; no Python frame of its own.
_view: Callable[[Packed], Tensor] = methodcaller("view")
