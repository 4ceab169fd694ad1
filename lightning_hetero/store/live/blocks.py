"""Blocks at run time: reserved memory at fixed addresses, and what is going on with it.

[Note: Fixed addresses]
A part's weights have one address for the whole run: reserved address space whose pages come and go.
FETCH reads into it, RELEASE gives its pages back, an update writes it in place. ``param.data`` is a
view made once, so nothing is ever rebound or resized, and everything that holds the parameter
(autograd, optimizers, user code) goes on holding it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_hetero._native import Arena, NativePart, Ticket
from lightning_hetero.errors import OffloadedAccessError
from lightning_hetero.ir.plan import BlockPlan, Tier
from lightning_hetero.ir.shards import by_parameter as shards_by_parameter
from lightning_hetero.store.format.in_place import InPlace
from lightning_hetero.store.live.shared_memory import SharedArena, SharedFile
from lightning_hetero.store.partition import ALIGNMENT_BYTES, BlockSpec, is_dense, laid_out
from lightning_hetero.store.raw_memory import PAGE, set_data, tensor_at
from lightning_hetero.units import round_up

_PARAMS = attrgetter("params")
_HOST = torch.device("cpu")


def lost(name: str) -> OffloadedAccessError:
    """The error for weights or state that are in no memory and no file any more."""
    return OffloadedAccessError(
        f"{name!r} is lost: its store has been closed by an error, or because the strategy went on to another model. Build "
        f"the model anew and load a checkpoint; next time save one before."
    )


class StateHome(Protocol):
    """Keeps the state arrays of parts in other memory than the engine's: that of a device."""

    def read(self, part: Part, array: int, index: int) -> Tensor:
        """A fresh flat fp32 CPU tensor with the part's own piece of a parameter in an array."""

    def write(self, part: Part, runs: Sequence[tuple[int, int, Tensor]]) -> None:
        """Overwrites runs ``(array, index, flat fp32 values)``."""


@dataclass(eq=False, slots=True)
class Mirror:
    """One mirror of a part; see [Note: Mirrors] in ``mirrors.py``.

    Attributes:
        native: The block of bytes.
        home: The part's native part when the mirror was made: state arrays move with it.
        ticket: The latest write; ``None`` if there was none.
    """

    native: NativePart
    home: NativePart | None
    ticket: Ticket | None = None


@dataclass(slots=True)
class Moved:
    """A parameter that is not in its part's memory.

    Attributes:
        own: A tensor in that memory.
        version: The parameter's version counter when it left.
        counts: The move has counted as a write in place.
    """

    own: Tensor
    version: int
    counts: bool = False


class Slice(NamedTuple):
    """Which of the equal slices of each part a rank owns; see [Note: Shards] in ``ir.shards``."""

    rank: int = 0
    ranks: int = 1


WHOLE = Slice()  # of one rank: all of it


class RunLayout(NamedTuple):
    """How a parameter lies in its part's memory: one run of elements in its memory order."""

    numel: int
    shape: torch.Size
    stride: tuple[int, ...]  # in elements


@dataclass(eq=False, slots=True)
class Part:
    """The parameters of one block with one dtype, trainability and optimizer: one run of memory.

    Attributes:
        block: The block it belongs to.
        names: Parameter names inside the LightningModule.
        params: The parameters, in the order of their offsets.
        offsets: First element of each parameter in the run.
        dtype: Dtype of all of them.
        num_elements: Length of the run in elements, padding included; equal slices of whole pages
            if several ranks share it.
        own: Which slice the native part has: updates and state are of that alone.
        is_whole: The memory has the newest weights of all ranks, not of this one's slice alone.
        arena: The reserved memory, whose addresses stay the same.
        lent: Memory in which the weights lie instead, from FETCH to RELEASE; see [Note: Buffers of
            FETCH] in ``runtime/residency/fetch_buffers.py``.
        slots: Files of each array on disk: two, or one as long as no parameter of the part trains
            and nothing has written it.
        in_place: Files of somebody else that have the weights, so that the store needs no copy.
        copied: Why there are none, if the weights are frozen.
        native: The native part; ``None`` while nothing is offloaded, and for parts that are updated
            in Python in host memory.
        last_write: The fetch or update that last wrote the weight memory; compute waits until it is
            READY.
        opened: An update whose state already streams towards the host.
        dirty: The weight memory was changed outside an update; the file has older weights.
        rewritten: User code has set weights in a way that no version counter sees.
        uncommitted: Rewrites of the file since the last commit.
        on_disk: The native part has files.
        stepped: The state is no longer all zeros.
        fresh: The state is what an optimizer begins with: moments of zeros, and a master equal to
            16-bit weights.
        versions: Sum of the parameters' version counters when the block's use began, or an update
            in Python ended.
        master_versions: The same when the fp32 master was last in step with 16-bit weights.
        patches: Writes (first element, values) that wait to be brought into the file together.
        state_home: Who has the state arrays, if not the engine.
        updated: The latest rewrite by the engine: of memory, or of the file from memory.
        mirrors: Slots on disk for what lives in memory, in a store that keeps every step.
        mirrored_versions: Sum of the version counters when the mirrors were last written; -1:
            anything may have changed.
        moved: Parameters, by position, that ``param.data = ...`` has moved out of the part's
            memory ([Note: Moved weights]).
        num_moves: How often weights have come back from there with other values.
        is_lent: Code may hold a ``param.data`` whose writes no version counter shows.
        place: The place of its first parameter among those of the module.
        alignment_bytes: A multiple at which each parameter starts.
        layouts: How each parameter lies in the run; none of it changes, whatever code does to the
            parameter.
        pieces: What of each parameter the native part has: the first element there, and how many.
    """

    block: Block
    names: list[str]
    params: list[nn.Parameter]
    offsets: list[int]
    dtype: torch.dtype
    num_elements: int
    arena: Arena
    lent: Tensor | None = None
    slots: int = 2
    in_place: InPlace | None = None
    copied: str = ""
    native: NativePart | None = None
    last_write: Ticket | None = None
    opened: Ticket | None = None
    dirty: bool = False
    rewritten: bool = False
    uncommitted: int = 0
    on_disk: bool = False
    stepped: bool = False
    fresh: bool = False
    versions: int = 0
    master_versions: int = -1
    patches: list[tuple[int, Tensor]] = field(default_factory=list)
    state_home: StateHome | None = None
    updated: Ticket | None = None
    mirrors: dict[str, Mirror] = field(default_factory=dict)
    mirrored_versions: int = -1
    moved: dict[int, Moved] = field(default_factory=dict)
    num_moves: int = 0
    is_lent: bool = False
    place: int = 0
    alignment_bytes: int = 0
    own: Slice = WHOLE
    is_whole: bool = True
    layouts: list[RunLayout] = field(init=False)
    pieces: list[tuple[int, int]] = field(init=False)
    _sizes: list[int] = field(init=False)  # of the parameters and, in between, of the padding behind each
    _own_run: Tensor | None = field(default=None, init=False)  # of the reserved memory

    def __post_init__(self) -> None:
        self.layouts, self._sizes = [RunLayout(p.numel(), p.shape, _strides(p)) for p in self.params], []
        ends = [*self.offsets[1:], self.num_elements]
        for start, end, layout in zip(self.offsets, ends, self.layouts, strict=False):  # a blob has no parameters
            self._sizes += layout.numel, end - start - layout.numel
        begin, self.pieces = self.own.rank * self.slice_elements, []
        for start, layout in zip(self.offsets, self.layouts, strict=False):
            first, last = max(start, begin), min(start + layout.numel, begin + self.slice_elements)
            self.pieces.append((first - begin, max(0, last - first)))

    def require_native(self) -> NativePart:
        """The native part.

        Raises:
            OffloadedAccessError: There is none: an error has closed the store, or another model
                took its place.
        """
        if self.native is None:
            raise lost((self.names or [self.block.name])[0])
        return self.native

    @property
    def slice_elements(self) -> int:
        """Elements that the native part has."""
        return self.num_elements // self.own.ranks

    @property
    def slice_range(self) -> tuple[int, int]:
        """Where they are among the bytes of the part: the first one, and how many."""
        size = self.slice_elements * self.dtype.itemsize
        return self.own.rank * size, size

    @property
    def slice_address(self) -> int:
        """Where they lie in host memory now, or come to."""
        return self.address + self.slice_range[0]

    @property
    def slice_bytes(self) -> int:
        """Bytes of these weights, whole pages."""
        return round_up(self.slice_elements * self.dtype.itemsize, PAGE)

    @property
    def has_old_state(self) -> bool:
        """Whether the state is neither zeros nor what an optimizer begins with."""
        return self.stepped and not self.fresh

    @property
    def is_filled_here(self) -> bool:
        """Whether this process brings the weights that training begins with into the memory."""
        return not isinstance(self.arena, SharedArena) or self.arena.is_filled_here

    @property
    def weight_bytes(self) -> int:
        """Bytes of weight memory, whole pages."""
        return round_up(self.num_elements * self.dtype.itemsize, PAGE)

    def has_its_params(self) -> bool:
        """Whether its parameters lie in its memory; another Trainer may have moved them."""
        return all(p.data_ptr() == self.fixed_address(i) for i, p in enumerate(self.params))

    @property
    def address(self) -> int:
        """Where the weights lie in host memory now, or come to."""
        return self.arena.address if self.lent is None else self.lent.data_ptr()

    @property
    def holder(self) -> object:
        """What keeps the memory at :attr:`address` alive."""
        return self.arena if self.lent is None else self.lent

    @property
    def run(self) -> Tensor:
        """The weight memory as one run of its dtype."""
        if self.lent is not None:
            return tensor_at(self.lent, self.address, self.num_elements, self.dtype)
        if self._own_run is None:
            self._own_run = tensor_at(self.arena, self.arena.address, self.num_elements, self.dtype)
        return self._own_run

    @property
    def slice_run(self) -> Tensor:
        """What the native part has of it."""
        begin = self.own.rank * self.slice_elements
        return self.run[begin : begin + self.slice_elements]

    def fixed_address(self, index: int) -> int:
        """An address that is parameter ``index``'s alone, wherever its weights are; 0 if empty."""
        return self.arena.address + self.offsets[index] * self.dtype.itemsize if self.params[index].numel() else 0

    def memory(self, index: int) -> Tensor:
        """Parameter ``index``'s weights as they lie in the weight memory: its shape and strides.

        Its storage is its own run alone: ``torch.save`` writes storages whole.
        """
        numel, shape, stride = self.layouts[index]
        if not numel:
            return torch.empty_strided(shape, stride, dtype=self.dtype)
        start = self.address + self.offsets[index] * self.dtype.itemsize
        return tensor_at(self.holder, start, numel, self.dtype).as_strided(shape, stride)

    def runs(self, flat: Tensor) -> Sequence[Tensor]:
        """The runs of the parameters in a flat tensor with the part's layout."""
        return flat.split_with_sizes(self._sizes)[::2]

    def own_runs(self, flat: Tensor) -> list[Tensor]:
        """The pieces of the parameters in a flat tensor with the layout of the native part."""
        return [flat[start : start + length] if length else flat[:0] for start, length in self.pieces]

    def own_piece(self, index: int, flat: Tensor) -> tuple[int, Tensor]:
        """Where the native part has its piece of a parameter, and that piece of a flat run."""
        if self.own.ranks == 1:
            return self.offsets[index], flat
        start, length = self.pieces[index]
        first = self.own.rank * self.slice_elements + start - self.offsets[index]
        return start, flat[first : first + length] if length else flat[:0]

    def own_weights(self, index: int) -> Tensor:
        """The weights of a parameter that the native part has, flat, as they lie in memory."""
        start, length = self.pieces[index]
        begin = self.own.rank * self.slice_elements + start
        return self.run[begin : begin + length] if length else self.run[:0]

    def spans(self, index: int) -> list[tuple[int, int]]:
        """What each rank has of a parameter: its first element in memory order, and how many."""
        first, numel, size = self.offsets[index], self.layouts[index].numel, self.slice_elements
        cuts = [min(max(rank * size - first, 0), numel) for rank in range(self.own.ranks + 1)]
        return [(begin, end - begin) for begin, end in pairwise(cuts)]

    def shaped(self, index: int, flat: Tensor) -> Tensor:
        """A flat run in the parameter's memory order as a tensor of its shape."""
        return flat.as_strided(self.layouts[index].shape, self.layouts[index].stride)

    def flat(self, index: int, value: Tensor, dtype: torch.dtype, *, device: torch.device = _HOST) -> Tensor:
        """A tensor as a flat run in the parameter's memory order, copied only if necessary."""
        numel, shape, stride = self.layouts[index]
        if value.dtype != dtype or value.stride() != stride or value.device.type != device.type:
            value = torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(value)
        return value.as_strided((numel,), (1,))


@dataclass(eq=False, slots=True)
class Block:
    """One block: the unit that is fetched, released and updated.

    Attributes:
        index: Position in the model; plans and schedules name blocks by it.
        spec: Name, module, parameters.
        parts: Its parameters' memory.
        plan: Where it lives.
        resident: The weights are in memory (or on their way, see ``last_write`` of the parts).
        uses: Anchors that are open now; the weights may not leave memory while there is one.
        grads_left: Parameters whose gradient this backward has not accumulated yet.
        trained: The block of the module's trained parameters, if this one has the frozen rest.
        rest: The block of the frozen rest, if this one has the trained parameters.
    """

    index: int
    spec: BlockSpec
    parts: list[Part] = field(default_factory=list)
    plan: BlockPlan = field(default_factory=lambda: BlockPlan(name="*"))
    resident: bool = True
    uses: int = 0
    grads_left: set[int] = field(default_factory=set)
    early_unsafe: bool = False
    trained: Block | None = None
    rest: Block | None = None

    @property
    def name(self) -> str:
        """The block's name: that of its module, or of the module's trained part."""
        return self.spec.name

    @property
    def module_name(self) -> str:
        """The name of the module whose parameters it has, alone or with its other half."""
        return self.name if self.rest is None else self.rest.name

    @property
    def weights_on_disk(self) -> bool:
        """Whether the weights live on disk between uses."""
        return self.plan.weights is Tier.DISK

    def params(self) -> Iterator[nn.Parameter]:
        """All parameters of the block."""
        return chain.from_iterable(map(_PARAMS, self.parts))


def bind(
    root: nn.Module,
    specs: Sequence[BlockSpec],
    away: Callable[[nn.Parameter], bool] = lambda _: False,
    *,
    alignment_bytes: int = ALIGNMENT_BYTES,
    own: Slice = WHOLE,
    file: SharedFile | None = None,
) -> list[Block]:
    """Moves every parameter into reserved memory; meta parameters get memory without content.

    Meta parameters are replaced by new parameters in the modules that hold them, so this comes
    before the optimizers. Parameters that are ``away`` (offloaded by somebody else) get memory that
    they do not use yet. Each parameter starts at a multiple of ``alignment_bytes``. The rank has
    its ``own`` slice of every part. If the ranks share a ``file``, its memory gets the content of
    the first one's parameters.
    """
    blocks: list[Block] = []
    trained: dict[int, Block] = {}  # by the spec of the rest
    for index, spec in enumerate(specs):
        block = Block(index=index, spec=spec)
        if spec.rest is not None:
            trained[id(spec.rest)] = block
        elif (half := trained.get(id(spec))) is not None:
            block.trained, half.rest = half, block
        groups: dict[tuple[torch.dtype, bool], list[str]] = {}
        for name, param in spec.params.items():
            groups.setdefault((param.dtype, param.requires_grad), []).append(name)
        for (dtype, _), names in groups.items():
            block.parts.append(_bind_part(root, block, names, dtype, away, alignment_bytes, own, file))
        blocks.append(block)
    return blocks


def modules_of(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """The blocks of each module: one, or its trained part and the rest."""
    for block in blocks:
        if block.rest is None:
            yield [block] if block.trained is None else [block.trained, block]


def parts_of(blocks: Iterable[Block]) -> list[Part]:
    """All parts, those of one module in the order of their first parameters.

    So the order does not depend on whether a module's parameters form one block or two.
    """
    return [p for own in modules_of(blocks) for p in sorted((p for b in own for p in b.parts), key=lambda part: part.place)]


def _reserve(
    block: Block, names: list[str], params: list[nn.Parameter], dtype: torch.dtype, *,
    place: int, alignment_bytes: int, own: Slice, file: SharedFile | None, by_parameter: bool = False,
) -> Part:  # fmt: skip
    """A part with memory of its own, which its parameters do not use yet."""
    numels, page = [param.numel() for param in params], PAGE // dtype.itemsize
    offsets, total = laid_out(numels, dtype.itemsize, alignment_bytes, own.ranks)
    if by_parameter:
        shards = shards_by_parameter(numels, own.ranks, multiple=page)
        offsets, total = list(shards.offsets), max(shards.num_elements, own.ranks * page)
    num_bytes = round_up(total * dtype.itemsize, PAGE)
    arena = Arena(num_bytes) if file is None else SharedArena(num_bytes, file)
    return Part(
        block=block, names=names, params=params, offsets=offsets, dtype=dtype, num_elements=total, arena=arena, place=place,
        alignment_bytes=alignment_bytes, own=own,
    )  # fmt: skip


def split(
    part: Part,
    groups: Sequence[Sequence[int]],
    *,
    moves: Callable[[nn.Parameter], bool],
    copies: bool,
    file: SharedFile | None = None,
    by_parameter: Sequence[bool],
) -> None:
    """Replaces a part of a block, which has no native part, by several with memory of their own.

    If ranks share a file, no other rank reads the part meanwhile.

    Args:
        part: The part; its weights are in memory.
        groups: For each new part, which parameters of the old one it gets.
        moves: Says of a parameter whether its data is in the part's memory. Other parameters stay
            where they are.
        copies: The memory has content. Without content nothing is copied, so the new memory takes
            no pages.
        file: The file that the ranks of this host share.
        by_parameter: For each new part, whether a parameter lies whole in one rank's slice.
    """
    parts = []
    for indices, whole in zip(groups, by_parameter, strict=True):
        names, params = [part.names[i] for i in indices], [part.params[i] for i in indices]
        new = _reserve(
            part.block, names, params, part.dtype, place=part.place, alignment_bytes=part.alignment_bytes, own=part.own, file=file,
            by_parameter=whole,
        )  # fmt: skip
        for index, param in enumerate(new.params):
            if moves(param):
                memory = new.memory(index)
                with torch.no_grad():
                    if copies and new.is_filled_here:
                        memory.copy_(param.data)
                    set_data(param, memory)
        parts.append(new)
    if isinstance(part.arena, SharedArena) and part.is_filled_here:
        part.arena.drop()
    position = part.block.parts.index(part)
    part.block.parts[position : position + 1] = parts


def _bind_part(
    root: nn.Module,
    block: Block,
    names: list[str],
    dtype: torch.dtype,
    away: Callable[[nn.Parameter], bool],
    alignment_bytes: int,
    own: Slice,
    file: SharedFile | None,
) -> Part:
    params = [block.spec.params[n] for n in names]
    place = list(block.spec.order or block.spec.params).index(names[0])
    part = _reserve(block, names, params, dtype, place=place, alignment_bytes=alignment_bytes, own=own, file=file)
    with torch.no_grad():
        for i, param in enumerate(params):
            memory = part.memory(i)
            if param.is_meta:
                part.params[i] = block.spec.params[names[i]] = replace_everywhere(root, param, memory)
            elif not away(param):
                if part.is_filled_here:
                    memory.copy_(param.data)
                set_data(param, memory)
    return part


def keep_apart(blocks: Iterable[Block]) -> None:
    """Ends the sharing of memory: what a rank writes is its own from now on."""
    for part in [part for block in blocks for part in block.parts]:
        if isinstance(part.arena, SharedArena):
            part.arena.keep_apart()


def back_to_meta(root: nn.Module, block: Block, names: Collection[str]) -> None:
    """Undoes :func:`bind` for parameters that were on the meta device and never got content."""
    for part in block.parts:
        for i, name in enumerate(part.names):
            if name in names and not part.params[i].is_meta:
                part.params[i] = replace_everywhere(root, part.params[i], torch.empty_like(part.params[i], device="meta"))


def replace_everywhere(root: nn.Module, old: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter with other memory in the place of one on the meta device, or the other way."""
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    new.__class__ = type(old)  # such as one of bitsandbytes
    new.__dict__.update(old.__dict__)
    for owner in root.modules():
        for key, param in owner._parameters.items():
            if param is old:
                owner._parameters[key] = new
    return new


def _strides(param: Tensor) -> tuple[int, ...]:
    if is_dense(param):
        return param.stride()
    return torch.empty(param.shape, device="meta").stride()
