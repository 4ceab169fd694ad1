"""Brings a model's weights into blocks: from memory, files, initializers or another fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lightning_hetero._native import PartGeometry
from lightning_hetero.handles.offloaded_parameter import OffloadedParameter, materialize, restore
from lightning_hetero.runtime import quantizing
from lightning_hetero.runtime.announcement import placing
from lightning_hetero.runtime.block_moves import close_parts, open_cut_parts
from lightning_hetero.runtime.construction import Construction
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.initialize import Content, Initializer, in_order_of_construction, params_of
from lightning_hetero.runtime.kept_steps import KeptSteps
from lightning_hetero.runtime.parameter_objects import ParameterObjects
from lightning_hetero.runtime.placement import Placement
from lightning_hetero.store.format.in_place import InPlace, SourceFile, TensorPlace, in_place
from lightning_hetero.store.live.blocks import WHOLE, Block, Part, Slice, back_to_meta, bind, parts_of, replace_everywhere, split
from lightning_hetero.store.live.geometry import own_versions
from lightning_hetero.store.live.native_parts import close_native, open_native, reset_native
from lightning_hetero.store.live.shared_memory import SharedFile
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.partition import BlockCls, partition
from lightning_hetero.store.raw_memory import set_data
from lightning_hetero.units import format_bytes

log = logging.getLogger(__name__)


class ModelSetup:
    """Cuts a model into blocks, and brings their weights to the tiers of the first plan.

    Args:
        block_cls: Classes of the blocks; see ``HeteroOffloadStrategy``.
        content: Weights in files for parameters on the meta device.
        built: The model's construction, if part of it is in a file.
        alignment_bytes: Each parameter starts at a multiple of it in its part.
        own: The slice of each part that this process has.
        file: The memory of the ranks of this host; ``None``: this process has memory of its own.
        share: See :class:`Initializer`.

    Raises:
        ConfigError: Something on the meta device cannot be set.
    """

    def __init__(
        self,
        root: nn.Module,
        block_cls: BlockCls | None,
        content: Content | None,
        built: Construction | None = None,
        *,
        alignment_bytes: int,
        own: Slice = WHOLE,
        file: SharedFile | None = None,
        share: Callable[[Tensor], object] | None = None,
    ) -> None:
        self._root, self._built, self._file = root, built, file
        self._initializer = Initializer(root, content, share)
        if built is not None:
            _take_given(root, self._initializer, built)
        self._initializer.check()
        specs = partition(root, block_cls)
        self._made_on_meta = frozenset(n for s in specs for n, p in s.params.items() if p.is_meta)
        self._unset = {s.name for s in specs if not self._made_on_meta.isdisjoint(s.params)}
        self._elsewhere = {id(p) for s in specs for p in s.params.values() if isinstance(p, OffloadedParameter)}
        for spec in specs:  # as a whole: a small parameter in a block's memory would use a huge page
            if built is not None and any(p in built for p in spec.params.values()):
                self._elsewhere |= {id(p) for p in spec.params.values() if not p.is_meta}
        self.blocks: list[Block] = bind(
            root, specs, away=lambda p: id(p) in self._elsewhere, alignment_bytes=alignment_bytes, own=own, file=file
        )
        self.objects = ParameterObjects(root, self.blocks)

    def is_set(self, block: Block) -> bool:
        """Whether the block's memory has content."""
        return block.name not in self._unset and not any(id(p) in self._elsewhere for p in block.params())

    def had_memory(self, block: Block) -> bool:
        """Whether any parameter of the block had content before the runtime came."""
        return not self._made_on_meta.issuperset(block.spec.params)

    def cut(self, owners: Mapping[int, int], parked: Executor | None, whole: Collection[int] = ()) -> bool:
        """Cuts parts so that each has parameters of one optimizer only. Returns whether it cut any.

        ``owners`` has optimizers' numbers by the parameter's ``id``; parameters without one stay
        with those of the first. The weights of a ``parked`` session may be on disk. Of the
        optimizers ``whole`` each parameter lies in one rank's slice.
        """
        was_cut = False

        def has_whole(part: Part, group: Sequence[int]) -> bool:
            return any(owners.get(id(part.params[i])) in whole for i in group)

        for block in self.blocks:
            rows = [(part, _by_owner(part, owners)) for part in block.parts]
            found = [(part, groups) for part, groups in rows if len(groups) > 1 or has_whole(part, groups[0])]
            if found and parked is not None:
                close_parts(parked, block, [part for part, _ in found])
            for part, groups in found:
                split(
                    part, groups, moves=lambda p: id(p) not in self._elsewhere, copies=self.is_set(block), file=self._file,
                    by_parameter=[has_whole(part, group) for group in groups],
                )  # fmt: skip
            if found and parked is not None:
                open_cut_parts(parked, block)
            was_cut |= bool(found)
        return was_cut

    def find_in_place(self) -> Collection[SourceFile]:
        """Finds the frozen parts that files have as they are: these are not copied to the store.

        Of several ranks each reads its slice of them. Weights that are read after the setter of a
        module has run are copied. Returns the files of the whole parts.
        """
        if self._unset:
            self._initializer.read_buffers()
        known: dict[str, SourceFile] = {}
        copied: dict[str, int] = {}
        for block in self.blocks:
            first = block.name in self._unset and self._initializer.reads_first(block.rest or block, self._made_on_meta)
            for part in block.parts:
                if part.slots > 1:
                    continue
                if block.name not in self._unset:
                    part.copied = "they were in memory when training began"
                    continue
                places = {n: self._initializer.place(n) for n in part.names if n in self._made_on_meta}
                found = [place for place in places.values() if place is not None]
                has_all = first and all(map(self._initializer.has, part.names))
                why = "files do not have all of them" if not has_all else "their files are not local safetensors files"
                if has_all and len(found) == len(part.params):
                    why = _differs(part, found)
                if not why:
                    rows = zip(part.offsets, found, part.params, strict=True)
                    width = part.dtype.itemsize
                    whole = in_place({offset * width: (place, p.nbytes) for offset, place, p in rows}, known)
                    part.in_place = whole.cut(*part.slice_range)
                else:
                    part.copied = why
                if why and (found or has_all):
                    copied[why] = copied.get(why, 0) + part.weight_bytes
        size = sum(part.weight_bytes for block in self.blocks for part in block.parts if part.in_place is not None)
        if size:
            log.info("%s of frozen weights are read in place, from %s.", format_bytes(size), ", ".join(sorted(known)))
        for why, num_bytes in copied.items():
            log.info("%s of frozen weights are copied to one slot, or kept in memory: %s.", format_bytes(num_bytes), why)
        return known.values()

    def adopt_places(self, places: Sequence[InPlace | None]) -> None:
        """A store is resumed: its last record says which weights are read in place."""
        for part, place in zip(parts_of(self.blocks), places, strict=False):  # another model is refused later
            part.in_place = place if part.slots == 1 else None
            part.copied = "they are in the store already" if place is None else ""

    def bring(self, store: TierStore, executor: Executor, placement: Placement, *, resumed: KeptSteps | None) -> None:
        """Opens files block by block and writes the weights. Memory keeps what fits the budget."""
        used, later = quantizing.reading_bytes(self._root), list[tuple[str, nn.Parameter]]()
        self._initializer.read_buffers()
        for block in placing(in_order_of_construction(self._root, self.blocks)):
            if self._needs_content(block) and not self._initializer.read(block, self._made_on_meta):
                later += [(n, params_of(block)[n]) for n in self._initializer.set(block, self._made_on_meta)]
            is_read = block.name in self._unset and resumed is None
            self._take_over(block, read=resumed is None)
            executor.residency.bring(block, force=not block.weights_on_disk)  # a parked model's weights are on disk
            if executor.slices is not None:
                executor.slices.share(block)
            for part in block.parts:
                if resumed is not None:
                    resumed.adopt(part, placement.geometries.get(part))
                else:
                    _open(store, part, placement.geometries.get(part), is_read=is_read)
            if block.weights_on_disk:
                size = sum(p.slice_bytes for p in block.parts)
                if executor.slices is not None:
                    executor.slices.release(block)()
                executor.residency.parameters.hide(block)
                if used + size <= placement.cache_bytes:
                    used += size
                else:
                    executor.residency.weights.release(block)
                    for part in block.parts:
                        store.barrier(part)
            elif executor.slices is not None and executor.device is None and executor.residency.is_away(block):
                executor.residency.parameters.hide(block)
                executor.slices.release(block)()
            elif executor.slices is not None and resumed is not None:
                executor.residency.bring(block, force=True)  # all of it, where ranks have slices
        self._initializer.set_buffers()
        if later and resumed is None:  # [Note: Meta initialization]
            with nullcontext() if executor.slices is None else executor.slices.alike(store, self.blocks):
                for name, param in later:
                    self._initializer.fill(name, param)
            self._initializer.read_buffers()
        self._unset = set()

    def _needs_content(self, block: Block) -> bool:
        """Whether the block is initialized now; a trained part is with the rest, before it."""
        halves = (block, block.trained) if block.rest is None else ()
        return any(half is not None and half.name in self._unset for half in halves)

    def _take_over(self, block: Block, *, read: bool) -> None:
        """Moves weights from the construction's file or another Trainer's into the block.

        Without ``read`` a store gives the weights, and the other disk may be gone.
        """
        for part in block.parts:
            for i, param in enumerate(part.params):
                if id(param) in self._elsewhere:
                    memory = part.memory(i)
                    if read:
                        memory.copy_(materialize(param))
                    if self._built is not None:
                        self._built.release(param.detach())
                    restore([param])
                    set_data(param, memory)
                    self._elsewhere.discard(id(param))

    def restore(self, block: Block) -> None:
        """Makes parameters ordinary again, unless they are still on another Trainer's disk."""
        restore(param for param in block.params() if id(param) not in self._elsewhere)

    def undo(self) -> None:
        """Undoes a refused start: leaves no memory that was never initialized."""
        for block in self.blocks:
            self.restore(block)
            back_to_meta(self._root, block, self._made_on_meta)


def _take_given(root: nn.Module, files: Initializer, built: Construction) -> None:
    """Parameters on the meta device to which code has given values get them.

    Those that files have too are read from there, if the files have the same values. An adapter has
    other ones of the modules that it trains as copies, and may have an embedding of its own.
    """
    for name, param in list(root.named_parameters()):
        if files.has(name) and built.lost_as(param, partial(files.fill, name)):
            continue
        values = built.given(name, param)
        if values is not None and not (files.has(name) and _has_same(files, name, values)):
            replace_everywhere(root, param, values.contiguous())
    built.forget_given()


def _has_same(files: Initializer, name: str, values: Tensor) -> bool:
    theirs = torch.empty_like(values, memory_format=torch.contiguous_format)
    files.fill(name, theirs)
    return torch.equal(theirs, values)


def _by_owner(part: Part, owners: Mapping[int, int]) -> list[list[int]]:
    """The positions of a part's parameters by optimizer; the first list has the rest, too."""
    groups: dict[int, list[int]] = {}
    for index, param in enumerate(part.params):
        if id(param) in owners:
            groups.setdefault(owners[id(param)], []).append(index)
    rest = [index for index, param in enumerate(part.params) if id(param) not in owners]
    first, *others = groups.values() or [[]]
    return [sorted([*first, *rest]), *others]


def _differs(part: Part, found: Sequence[TensorPlace]) -> str:
    """Why a part is not in files as it is; empty if it is."""
    if any(place.dtype != part.dtype for place in found):
        return f"they are {part.dtype}, in the files {next(p.dtype for p in found if p.dtype != part.dtype)}"
    if not all(param.is_contiguous() for param in part.params):
        return "their memory is in another order than in the files"
    return "" if any(param.numel() for param in part.params) else "they are empty"


def _open(store: TierStore, part: Part, geometry: PartGeometry | None, *, is_read: bool) -> None:
    """Opens the part with its weights in memory, which may just have been read, and no state."""
    if part.in_place is not None:
        part.in_place.check()
        part.mirrored_versions = own_versions(part) if is_read else -1
    if part.native is not None and geometry is not None and replace(part.native.geometry, id=geometry.id) == geometry:
        reset_native(store, part)
    else:
        if part.native is not None:
            close_native(store, part)
        if geometry is not None:
            open_native(store, part, replace(geometry, id=store.files.free_id(geometry.id)))
    if part.native is not None:
        part.dirty &= part.in_place is None or not is_read
        store.flush(part)
