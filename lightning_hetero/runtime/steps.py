"""Keeps every step of a fit on disk: mirrors of what lives in memory, and the records that name everything.

[Note: What keeps steps]
A fit keeps its steps if it has a store with a name (``disk_path``), a ``durability`` that promises something, and optimizers
whose state the engine holds. Everything else is scratch: it goes with the process. The price of a kept step is the bytes of
mirrors, which the log names as fit begins.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_hetero._native import Block as NativeBlock
from lightning_hetero.errors import ConfigError
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule
from lightning_hetero.runtime.placement import SessionOptions
from lightning_hetero.store import record
from lightning_hetero.store.blocks import Block, Part
from lightning_hetero.store.keeping import adopt, arrange_mirrors, write_mirrors
from lightning_hetero.store.mirrors import entry_of, mirror_bytes
from lightning_hetero.store.tiers import TierStore
from lightning_hetero.units import KIB, MIB, format_bytes

log = logging.getLogger(__name__)

_NO_STEP = "no step has been committed yet"
_TWICE = (
    "its last step was interrupted after a block had been written a second time, or its weights were loaded and no step followed"
)


class KeptSteps:
    """What a session needs to keep its steps.

    Args:
        root: The model.
        blocks: Its blocks.
        bindings: The optimizers.
        options: The user's choices.

    Attributes:
        kept: Whether steps are kept.
    """

    def __init__(
        self, root: nn.Module, blocks: Sequence[Block], bindings: Sequence[OptimizerBinding], options: SessionOptions
    ) -> None:
        self._root, self._blocks, self._bindings = root, blocks, bindings
        self._parts = [part for block in blocks for part in block.parts]
        self._entries: dict[Part, str] = {}
        self._found: dict[Part, record.PartEntry] = {}
        self._retired: list[NativeBlock] = []
        self._state, self._why = "", _NO_STEP
        self._store: TierStore | None = None
        wanted = options.disk_path is not None and options.engine.durability != "none"
        obstacle = self._obstacle(options) if wanted else ""
        self.kept = wanted and not obstacle
        if obstacle:
            log.warning(
                "Steps are not kept: %s. A run that is killed cannot be resumed from its store; save checkpoints.", obstacle
            )

    def _obstacle(self, options: SessionOptions) -> str:
        for binding in self._bindings:
            if binding.capability is not Rule.NATIVE:
                return f"optimizer {type(binding.optimizer).__name__} runs by its own code, and its state is not in the store"
        if options.device is not None:
            return "the device has memory of its own, and what is updated there is not in the store"
        return ""

    def begin(self, store: TierStore, *, resume: bool) -> None:
        """The store is open; with ``resume`` its last record says where everything is.

        Raises:
            ConfigError: The record is of another partition of the model, or steps are not kept.
        """
        self._store = store
        if not self.kept:
            if resume:
                raise ConfigError(
                    "ckpt_path is the store at disk_path, but this run would not keep its steps. Train with the optimizer of the "
                    'store, and durability="process" or "power".'
                )
            return
        store.describe = self._describe
        if not resume:
            return
        found = record.parse(store.files.recovered)
        directory = store.files.directory
        assert directory is not None
        names = directory.layout["parts"]
        if names != part_names(self._blocks) or len(found.parts) != len(self._parts):
            raise ConfigError(
                f"store {str(directory.path)!r}: its parameters are grouped in another way, because others are frozen, or of "
                f"another dtype, than now. Resume with the model as it was when training began."
            )
        self._state, self._why = found.state, found.why
        self._found = dict(zip(self._parts, found.parts, strict=True))
        self._entries = {part: entry.to_json() for part, entry in self._found.items()}
        store.files.reserve_ids(block.id for entry in found.parts for block in entry.files)

    def adopt(self, part: Part) -> None:
        """Brings back what the store holds of a part."""
        assert self._store is not None
        adopt(self._store, part, self._found.pop(part))

    def settled(self, part: Part) -> list[NativeBlock]:
        """The part is whole where a plan wants it; the next record says so. Returns mirrors to close after that."""
        if not self.kept or self._store is None:
            return []
        gone = arrange_mirrors(self._store, part)
        write_mirrors(self._store, part)
        self._entries[part] = entry_of(part).to_json()
        return gone

    def reopened(self, part: Part) -> None:
        """The part has got a new home during a step, whose record says so."""
        if self.kept and self._store is not None:
            self._retired += arrange_mirrors(self._store, part)

    def placed(self) -> None:
        """All parts are where the plan wants them."""
        if not self.kept:
            return
        assert self._store is not None
        with self._store.moving():
            for part in self._parts:
                self._retired += self.settled(part)
        self._store.written = False
        size = sum(mirror_bytes(part, None if part.native is None else part.native.geometry) for part in self._parts)
        where = "" if self._store.files.directory is None else str(self._store.files.directory.path)
        log.info(
            "Every step is kept in %r: pass it as ckpt_path to go on from the last one. What the plan keeps in memory is written "
            'there too, %s in every step; durability="none" saves that, and keeps nothing.',
            where, format_bytes(size),
        )  # fmt: skip

    def keep(self, executor: Executor, state: str) -> None:
        """Commits the step that has just ended.

        Args:
            executor: The executor.
            state: The training state, see ``store.encoding``; empty if it cannot be kept.
        """
        store = executor.store
        for part in self._parts:
            store.refresh_master(part)  # the next update would do it, and a resume cannot know
            store.flush(part)
            write_mirrors(store, part)
            if part.mirrors or part.native is not None:
                self._entries[part] = entry_of(part).to_json()
        store.written = False
        self._state, self._why = state, "" if state else "its training state could not be kept (the log says why)"
        executor.commit(always=True)
        if self._retired:
            retired, self._retired = self._retired, []
            for native in retired:
                store.files.close_block(native)

    def _describe(self) -> bytes:
        assert self._store is not None
        if self._store.written:
            self._state, self._why = "", _TWICE if self._why != _NO_STEP else _NO_STEP
        return record.compose([self._entries.get(part, _NOWHERE) for part in self._parts], self._state, self._why)


_NOWHERE = record.PartEntry(None, stepped=False, weights=None, state=None).to_json()


def commit_ring(root: nn.Module, blocks: Sequence[Block], *, kept: bool) -> dict[str, int]:
    """``num_blocks`` and ``user_bytes`` of a new store's commit ring: room for unfreezing, moves, and a state that is kept."""
    buffers = sum(b.nbytes for b in root.buffers())
    num_parts = sum(len(b.parts) for b in blocks)
    if not kept:
        return {"num_blocks": 8 * num_parts + 64, "user_bytes": 256}
    return {"num_blocks": 16 * num_parts + 64, "user_bytes": 256 * KIB + 256 * num_parts + 2 * min(buffers, 4 * MIB)}


def part_names(blocks: Sequence[Block]) -> list[list[str]]:
    """The names of each part's parameters: what a record's entries count by."""
    return [list(part.names) for block in blocks for part in block.parts]


__all__: list[Any] = ["KeptSteps", "commit_ring", "part_names"]
