"""One forward of a block: what a pack hook does with every tensor that autograd saves in it.

[Note: What is saved]
A pack hook decides for every tensor that autograd saves while a block's forward runs:

- it lies in weight memory: a reference, because that memory is another's before backward comes;
- it is a 16-bit cast of a weight: a reference ([Note: Casts of weights]);
- it is a parameter or buffer, small (below 4 KiB), on another device, sparse, or of a tensor class
  of its own: kept;
- it lies in an argument of the block: as ``boundary`` says;
- an operator with a policy of its own has made it: as ``operators`` says;
- else as ``saved`` says.

*Kept* is what autograd would do. *Dropped* tensors come back by recomputation ([Note:
Recomputation]), *swapped* ones leave by storage, so a storage moves once however often it was saved
([Note: Hops]). A storage that several uses of blocks save stays on the device: the later one needs
it in backward before the earlier one brings it back. What a block returns is left to the block that
takes it as its argument. In-place changes are found when backward asks for a tensor, as autograd
finds them; a swapped one that changed after it had left is given back as it was saved.

What autograd holds keeps alive what it needs, and nothing else does: a graph that is thrown away
takes its host memory along.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.ir.plan import Saved
from lightning_hetero.ir.schedule import Lane, Op, OpKind
from lightning_hetero.runtime.activations.names import has_storage
from lightning_hetero.runtime.activations.operators import Watch
from lightning_hetero.runtime.activations.recompute import Rerun
from lightning_hetero.runtime.activations.saved import Packed, SavedStorage, SavedTensor
from lightning_hetero.runtime.activations.swaps import Swap
from lightning_hetero.runtime.lanes.base import Event

if TYPE_CHECKING:
    from lightning_hetero.runtime.activations.block import BlockActivations

SMALL_BYTES = 4096
"""Smaller storages stay where they are: moving them costs more than they take."""

_SWAPPED = frozenset({Saved.SWAP_HOST, Saved.SWAP_DISK})


class Use:
    """One forward of a block, and what it has saved. The tensors that it saved hold it.

    Args:
        block: The block.
    """

    def __init__(self, block: BlockActivations) -> None:
        self.block, self.name = block, block.name
        self._owner = block.owner
        self._device_type = block.owner.lanes.device_type
        self._key = object()  # what owned storages name: they must not keep the use alive
        self._number = 0
        self._inputs: set[int] = set()
        self._fixed: set[int] = set()
        self._storages: list[weakref.ref[SavedStorage]] = []
        self._swap: weakref.ref[Swap] | None = None
        self._rerun: Rerun | None = None
        self._hooks: saved_tensors_hooks | None = None
        self._watch: Watch | None = None

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward begins."""
        block = self.block
        hooks = saved_tensors_hooks(self.pack, _view)
        try:
            hooks.__enter__()
        except RuntimeError as error:
            raise UnsupportedError(
                f"{self.name}: activations cannot be followed here: {error}. Blocks that run under torch.func need saved='keep' "
                f"and weights on 'device' in the plan."
            ) from error
        self._hooks = hooks
        self._fixed = block.fixed()
        tensors = (leaf for leaf in _tensors((args, kwargs)) if has_storage(leaf, self._device_type))
        self._inputs = {leaf.untyped_storage()._cdata for leaf in tensors} - self._fixed
        lanes = self._owner.lanes
        if block.recomputes:
            self._rerun = Rerun(
                self.name, block.module, args, kwargs, save=self._save_input, buffers=block.buffers, device=lanes.device,
                allocated=lanes.allocated,
            )  # fmt: skip
            for storage in self._rerun.copies():
                self._owner.set_aside(storage)
        if block.operators:
            self._watch = Watch(
                names=block.names,
                addresses=block.addresses(),
                policy=block.policy,
                device=self._owner.lanes.device,
                device_type=self._device_type,
                inside=self._is_inside,
                record=None if self._rerun is None else self._rerun.record,
            )
            self._watch.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """The forward has ended."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)

    def returned(self, output: Any) -> None:
        """What the block returns is its successor's to swap."""
        for leaf in _tensors(output):
            if has_storage(leaf, self._device_type):
                known = self._owner.known(leaf.untyped_storage())
                if known is not None and known.owner is self._key:
                    known.owner = None
        if self._rerun is not None:
            self._rerun.forward_ended()

    # ---- saved tensors ---------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Packed:
        """The pack hook; see [Note: What is saved]."""
        number, self._number = self._number, self._number + 1
        casts = self._owner.casts
        cast = casts.reference(tensor) if casts is not None and casts.entered else None
        return cast or self._owner.weights(tensor) or self._save(tensor, number)

    def recompute(self) -> None:
        """Brings back what was dropped."""
        assert self._rerun is not None, "dropped"
        watcher = self._owner.watcher
        with nullcontext() if watcher is None else watcher.recomputing(self.block.index):
            self._rerun.run(self._rerunning)

    def _save_input(self, tensor: Tensor) -> Packed:
        return self._owner.weights(tensor) or self._save(tensor, None)

    def _save(self, tensor: Tensor, number: int | None) -> Packed:
        """Saves a tensor for autograd, or an argument of the use (``number=None``)."""
        if not has_storage(tensor, self._device_type) or tensor.is_conj() or tensor.is_neg():
            return _Kept(tensor)
        storage = tensor.untyped_storage()
        known = self._owner.known(storage)
        if known is not None and known.owner is not None and known.owner is not self._key:
            known.stay(tensor)
        key = storage._cdata
        made = None if self._watch is None else self._watch.of(storage)
        if key in self._fixed or storage.nbytes() < SMALL_BYTES:
            policy = Saved.KEEP
        elif key in self._inputs:
            policy = self.block.rules.boundary
        else:
            policy = self.block.rules.saved if made is None else self.block.policy(made.operator)
        if made is not None:
            self.block.met(made.operator)
        if policy is Saved.RECOMPUTE:
            assert self._rerun is not None
            assert number is not None
            saved = SavedTensor(self, number, tensor, held=False)
            self._rerun.dropped[number] = weakref.ref(saved)
            return saved
        home = None
        if policy in _SWAPPED and (known is None or not known.shared):
            home = known or self._owner.note(storage)
            if home.owner is None:
                home.owner, home.to_disk = self._key, policy is Saved.SWAP_DISK
                if self._owner.watcher is not None:
                    self._owner.watcher.leaves(storage)
                self._storages.append(weakref.ref(home))
        if key not in self._fixed:
            self._owner.lanes.allocated(storage)
        use = self if number is not None else _Arguments(f"the input of {self.name}")
        saved = SavedTensor(use, number or 0, tensor.detach(), held=True, home=home)
        if made is not None and made.saved is None and saved.version == 0:
            made.saved = weakref.ref(saved)
        return saved

    # ---- swaps -----------------------------------------------------------------------------------

    def hop(self, op: Op, after: Sequence[Event]) -> Event | None:
        """Submits one hop of what leaves; ``None`` if nothing does."""
        if (op.kind, op.lane) == (OpKind.SWAP_OUT, Lane.D2H):
            leaving = [s for s in (ref() for ref in self._storages) if s is not None and s.owner is self._key]
            if not leaving:
                return None
            swap = Swap(self._owner.swapper, self.block.index, leaving)
            self._swap = weakref.ref(swap)
            return swap.out(op, after)
        found = None if self._swap is None else self._swap()
        if found is None:
            return None
        move = {Lane.DISK_WRITE: found.write, Lane.DISK_READ: found.read, Lane.H2D: found.bring}[op.lane]
        return move(op, after)

    @property
    def moved_bytes(self) -> int:
        """Bytes that have been sent out of the device."""
        swap = None if self._swap is None else self._swap()
        return 0 if swap is None else swap.num_bytes

    # ---- details ---------------------------------------------------------------------------------

    def _is_inside(self) -> bool:
        return self._owner.stack[-1][1] is self

    @contextmanager
    def _rerunning(self) -> Iterator[Callable[[], bool]]:
        """The block's own hooks stand aside, and those of blocks in it save nothing."""
        rerunning = Rerunning(self.block)
        stack, depth = self._owner.stack, len(self._owner.stack)
        stack.append((self.block, rerunning))
        try:
            yield lambda: stack[-1][1] in (rerunning, rerunning.own)
        finally:
            del stack[depth:]


class _Kept:
    """A saved tensor that stays whatever the plan says: one without ordinary memory."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()

    def view(self) -> Tensor:
        """It."""
        return self._tensor


class _Arguments:
    """Who saves the arguments that a forward is run again with."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def recompute(self) -> None:
        """Arguments are never dropped."""
        raise AssertionError(self.name)


class Aside:
    """A forward inside a recomputation: what it saves is thrown away with the graph."""

    def __init__(self, *, own: bool) -> None:
        self._hooks = None if own else saved_tensors_hooks(_detached, _itself)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """It begins."""
        if self._hooks is not None:
            self._hooks.__enter__()

    def end(self) -> None:
        """It ends."""
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)


class Rerunning(Aside):
    """A recomputation that is under way."""

    def __init__(self, block: BlockActivations) -> None:
        super().__init__(own=True)
        self._block = block
        self.own: Aside | None = None

    def forward_of(self, block: BlockActivations) -> Aside:
        """The forward of a block begins inside: the first one is that of the block itself."""
        aside = Aside(own=self.own is None and block is self._block)
        if self.own is None and block is self._block:
            self.own = aside
        return aside


def _view(packed: Packed) -> Tensor:
    return packed.view()


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results, in containers and dataclasses too."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in fields(leaf)])
