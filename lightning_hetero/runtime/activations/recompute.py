"""Runs a block's forward once more, for the saved tensors that it has dropped.

[Note: Recomputation]
A use that drops tensors keeps its arguments, saved as the plan's ``boundary`` says, the state of
the random generators and of autocast, the content of the buffers that its forward changes, and
plain attributes ([Note: Surroundings]). The first tensor that backward misses runs the module
again, on detached arguments. A pack hook counts the tensors that autograd saves: the n-th one
equals the n-th of forward, and samples are compared to be sure ([Note: Samples]). The run stops
once all missing tensors have been met. Its graph is thrown away, and backward goes on in the first
graph.

This is torch's non-reentrant checkpointing, built from public parts. torch has a form for hooks
(``torch.utils.checkpoint._checkpoint_without_reentrant_generator``, which
``torch.distributed._composable.checkpoint`` uses), but that drops *every* tensor that is saved
inside it: none could be kept, swapped, or refer to weights. Its private parameters are positional
and change from release to release.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_hetero.errors import HeteroError, UnsupportedError
from lightning_hetero.runtime.activations.buffers import Buffers
from lightning_hetero.runtime.activations.operators import ForwardRecord, RandomState, Spare
from lightning_hetero.runtime.activations.samples import differ, sample
from lightning_hetero.runtime.activations.saved import ChangedInPlaceError, Packed, SavedTensor, maker_of
from lightning_hetero.runtime.activations.surroundings import Surroundings


class RecomputationError(HeteroError):
    """A block's forward did not do the same thing when it was run again."""

    @classmethod
    def of(cls, block: str, what: str) -> RecomputationError:
        """That of a block, by its name."""
        return cls(
            f"{block} was recomputed and did something else than in forward: {what}. Recomputation needs a forward that repeats "
            f"itself: no weights that torch.func has replaced, nothing that forwards change outside of buffers, numbers in "
            f"attributes and random generators; and blocks that are compiled one by one, if at all. Else give the block "
            f"saved='keep' or a swap in the plan."
        )


class _AllThere(Exception):  # noqa: N818  # no error
    """Ends a recomputation early. An ``Exception``, so that ``always_call`` hooks run."""


@dataclass(frozen=True, slots=True)
class _Argument:
    packed: Packed
    requires_grad: bool


class Rerun:
    """What one forward needs to be run again; see [Note: Recomputation].

    Args:
        save: Saves a tensor among the arguments as the plan says.
        allocated: Called with the storage of each recomputed tensor (:meth:`Lanes.allocated`).
        compared: Called on devices other than the CPU with a boolean there: whether a recomputed
            tensor has other values than that of forward.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        save: Callable[[Tensor], Packed],
        buffers: Buffers,
        surroundings: Surroundings,
        device: torch.device,
        allocated: Callable[[torch.UntypedStorage], None],
        compared: Callable[[Tensor], None],
    ) -> None:
        self._name, self._module, self._allocated, self._compared = name, module, allocated, compared
        flat, spec = tree_flatten((args, kwargs))
        self._inputs = [(leaf, leaf._version) for leaf in flat if isinstance(leaf, Tensor)]
        saved = [_Argument(save(x), x.requires_grad) if isinstance(x, Tensor) else x for x in flat]
        self._arguments: tuple[list[object], TreeSpec] | None = (saved, spec)
        self._random = RandomState.now(device)
        self._autocast = [_autocast_now(kind) for kind in dict.fromkeys((device.type, "cpu"))]
        self._buffers, self._surroundings = buffers.now(), surroundings.now()
        self.record = ForwardRecord()
        self._dropped: dict[int, _Dropped] = {}  # the tensors that the forward has dropped, by their numbers

    def drop(self, saved: SavedTensor, tensor: Tensor) -> None:
        """The forward drops a tensor."""
        self._dropped[saved.number] = _Dropped(weakref.ref(saved), sample(tensor))

    def copies(self) -> list[torch.UntypedStorage]:
        """The storages of the buffers that were copied for the recomputation."""
        return self._buffers.copies()

    def forward_ended(self) -> None:
        """Refuses a forward that cannot be run again.

        Raises:
            UnsupportedError: Forward has changed its arguments in place, or buffers that were not
                copied.
        """
        inputs, self._inputs = self._inputs, []
        self._surroundings.forward_ended()
        if not self._dropped:
            self._buffers.forget()
            self._surroundings.forget()
            return
        if any(leaf._version != version for leaf, version in inputs):
            raise UnsupportedError(
                f"{self._name} changes its input in place, so it cannot be recomputed from it. Give the block saved='keep' or a "
                f"swap in the plan, or use the out-of-place operation."
            )
        self._buffers.forward_ended()

    def run(self, inside: Callable[[], AbstractContextManager[Callable[[], bool]]]) -> None:
        """Brings back all dropped tensors that somebody still needs.

        The block's own hooks do nothing in the context ``inside``. It gives a function that says
        whether the block itself runs, not a block in it.

        Raises:
            RecomputationError: The forward did something else than the first time.
        """
        alive = {number: (dropped.saved(), dropped.sample) for number, dropped in self._dropped.items()}
        pending = {number: (saved, then) for number, (saved, then) in alive.items() if saved is not None and saved.tensor is None}
        if self._arguments is None:
            raise RecomputationError(f"{self._name}: what forward had dropped was recomputed already, and has been given up since.")
        leaves, spec = self._arguments
        try:
            args, kwargs = tree_unflatten([_given(leaf) for leaf in leaves], spec)
        except ChangedInPlaceError as error:
            raise ChangedInPlaceError(f"{self._name} cannot be recomputed, because its input has changed: {error}") from error
        collector = _Collector(self._name, pending, self._allocated, self._compared)
        with ExitStack() as stack:
            stack.enter_context(self._random.resumed())
            for autocast in self._autocast:
                stack.enter_context(autocast)
            stack.enter_context(self._surroundings.as_they_were())
            stack.enter_context(self._buffers.as_they_were())
            stack.enter_context(torch.enable_grad())
            is_inside = stack.enter_context(inside())
            stack.enter_context(saved_tensors_hooks(collector.collect, itself))
            if self.record.spared:
                stack.enter_context(Spare(self.record, inside=is_inside))
            with suppress(_AllThere):
                self._module(*args, **kwargs)
        collector.check()
        self._arguments = None  # every tensor that somebody can still ask for is there
        self._buffers.forget()
        self._surroundings.forget()


@dataclass(frozen=True, slots=True)
class _Dropped:
    """A tensor that a forward has dropped."""

    saved: weakref.ref[SavedTensor]
    sample: Tensor  # see [Note: Samples]


class _Collector:
    """Counts the tensors that a recomputation saves, and takes those that are missing."""

    def __init__(
        self,
        name: str,
        pending: dict[int, tuple[SavedTensor, Tensor]],
        allocated: Callable[[torch.UntypedStorage], None],
        compared: Callable[[Tensor], None],
    ) -> None:
        self._name, self._pending, self._number = name, pending, 0
        self._allocated, self._compared = allocated, compared

    def collect(self, tensor: Tensor) -> Tensor:
        number, self._number = self._number, self._number + 1
        made_by = maker_of(tensor)
        tensor = tensor.detach()  # a saved tensor must not hold the graph that made it
        saved, then = self._pending.pop(number, (None, tensor))
        if saved is not None:
            was = f"{tuple(saved.layout.size)} {saved.layout.dtype} of {saved.made_by or 'no node'}"
            now = f"{tuple(tensor.shape)} {tensor.dtype} of {made_by or 'no node'}"
            if was != now:
                raise self._error(f"saved tensor {number} was {was} and is {now}")
            differs = differ(sample(tensor), then) if tensor.stride() == saved.layout.stride else False  # the same places
            if isinstance(differs, Tensor):
                self._compared(differs)
            elif differs:
                raise self._error(f"saved tensor {number}, {was}, has other values")
            self._allocated(tensor.untyped_storage())
            saved.fill(tensor)
            if not self._pending:
                raise _AllThere
        return tensor

    def check(self) -> None:
        if self._pending:
            raise self._error(f"it saved {self._number} tensors and {len(self._pending)} are still missing")

    def _error(self, what: str) -> RecomputationError:
        return RecomputationError.of(self._name, what)


def _autocast_now(device_type: str) -> torch.autocast:
    """A context with autocast as it is now."""
    return torch.autocast(
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


def _given(leaf: object) -> object:
    if not isinstance(leaf, _Argument):
        return leaf
    tensor = leaf.packed.view().detach()
    return tensor.requires_grad_() if leaf.requires_grad else tensor


def itself(tensor: Tensor) -> Tensor:
    """The unpack hook for tensors that are saved as they are."""
    return tensor
