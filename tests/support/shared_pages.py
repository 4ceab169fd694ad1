"""One rank of a test of weights that ranks have in the same memory: a script, as
``shared_model.py``.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import weakref
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.runtime import slice_reads
from lightning_hetero.store.live.shared_memory import SharedArena
from support.shared_model import RANK, WORLD, batches, model, reference, run_scenarios, same, trainer

PIECE = 1 << 21  # elements of a large weight


class Calls(pl.Callback):
    """Calls a function as a batch ends."""

    def __init__(self, call: Callable[[pl.Trainer, Any], object], at: int = 1) -> None:
        self.call, self.at = call, at

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            self.call(trainer, module)


def pages_of_weights() -> int:
    """This process's share of the pages of the file that ranks map."""
    text = Path("/proc/self/smaps").read_text()
    return sum(1024 * int(size) for size in re.findall(r"memfd:lightning_hetero.*?\nPss:\s+(\d+) kB", text, re.DOTALL))


def all_told(number: float) -> list[float]:
    """What all ranks tell."""
    told: list[Any] = [None] * WORLD
    dist.all_gather_object(told, number)
    return told


def pages_exist_once(out: Path) -> None:
    """Before, in and after a fit the ranks have each page of weights once, until one writes it."""
    shared = model()
    shared.large = nn.Linear(32, PIECE // 32).requires_grad_(False)  # no batch uses it
    needed = 4 * PIECE

    def measure(*_: Any) -> None:
        dist.barrier()
        with run.strategy.materialize(shared):
            shared.large.weight.sum().item()
            dist.barrier()
            held.append(sum(all_told(pages_of_weights())))

    held: list[float] = []
    run = trainer(out, callbacks=[Calls(measure)])
    run.fit(shared, batches())
    assert needed <= held[0] <= 1.2 * needed, held
    weight = shared.large.weight
    before = weight.sum().item()
    dist.barrier()
    after = sum(all_told(pages_of_weights()))
    assert needed <= after <= 1.2 * needed, after
    if RANK == 0:
        with torch.no_grad():
            weight.zero_()
    dist.barrier()
    assert weight.sum().item() == (0.0 if RANK == 0 else before), "after the fit weights are a process's own"


class Mapped:
    """Counts the bytes of the tensors that are made here, for as long as anything uses them."""

    now = most = 0

    def make(self, numel: int, dtype: torch.dtype) -> Tensor:
        memory = mmap.mmap(-1, numel * dtype.itemsize)
        self.now += len(memory)
        self.most = max(self.most, self.now)
        weakref.finalize(memory, self._free, len(memory))
        return torch.frombuffer(memory, dtype=dtype)

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


def holds_one_tensor_as_it_saves(out: Path) -> None:
    """For a checkpoint the first rank has one whole tensor, and the others have none."""
    shared, mapped = model(), Mapped()

    def save(run: pl.Trainer, module: Any) -> None:
        with mock.patch.object(slice_reads, "own_memory", mapped.make):
            run.save_checkpoint(out / "whole.ckpt")

    trainer(out, callbacks=[Calls(save)]).fit(shared, batches())
    assert mapped.most == (0 if RANK else max(param.nbytes for param in shared.parameters()))
    assert torch.load(out / "whole.ckpt")["optimizer_states"][0]["state"]


def is_changed_in_materialize(out: Path) -> None:
    """What code writes within ``materialize`` is written once, by every rank to its slice."""
    shared, wanted = model(lr=0.0), model(lr=0.0)

    def change(run: pl.Trainer, module: Any) -> None:
        with run.strategy.materialize(module), torch.no_grad():
            norm = module.head.weight.norm()
            for param in module.parameters():
                param.mul_(0.5)
            module.head.weight.data = module.head.weight.data + 1.0
            dist.barrier()
            assert torch.equal((module.head.weight - 1.0).norm(), (0.5 * norm)), "it sees its own changes alone"

    trainer(out, callbacks=[Calls(change)]).fit(shared, batches())
    with torch.no_grad():
        for name, param in wanted.named_parameters():
            param.mul_(0.5).add_(float(name == "head.weight"))
    for (name, param), other in zip(shared.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(param, other), name


class Changes(nn.Module):
    """Changes its own weight as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(30, 30)

    def forward(self, x: Tensor, rarely: bool) -> Tensor:
        with torch.no_grad():
            self.inner.weight.mul_(0.5)
        return self.inner(x)


def refuses_other_changes(out: Path) -> None:
    """Weights that change elsewhere are named, whoever changes them."""
    inside = model()
    inside.layers[2] = Changes()
    with pytest.raises(UnsupportedError, match=r"changed weights of block 'layers.2.inner', such as 'layers.2.inner.weight'"):
        trainer(out).fit(inside, batches())
    between = model("frozen")  # with a frozen embedding, which is whole at all times

    def change(run: pl.Trainer, module: Any) -> None:
        with torch.no_grad():
            module.embed.weight.mul_(0.5)

    with pytest.raises(UnsupportedError, match=r"changed weights of block 'embed', such as 'embed.weight'"):
        trainer(out, callbacks=[Calls(change)]).fit(between, batches())


def leaves_a_child_its_own(out: Path) -> None:
    """A forked child reads weights, and what it writes reaches nobody."""
    shared = model()

    def fork(run: pl.Trainer, module: Any) -> None:
        parts = [part for block in run.strategy.session.blocks for part in block.parts]
        assert all(isinstance(part.arena, SharedArena) and part.arena.is_shared for part in parts)
        part = parts[1]
        before = part.run.clone()
        dist.barrier()
        child = os.fork()
        if child == 0:
            try:
                assert torch.equal(part.run, before)
                part.run.fill_(7.0)
                part.arena.close()
            except Exception:
                os._exit(int(not bool((part.run == 7.0).all())))
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        dist.barrier()
        assert torch.equal(part.run, before)

    trainer(out, callbacks=[Calls(fork)]).fit(shared, batches())
    same(shared, reference(""))


def does_without(out: Path) -> None:
    """Where a rank cannot open the memory of the first, a line says so, and weights are copied."""
    said, opens = StringIO(), os.open
    logging.getLogger("lightning_hetero").addHandler(logging.StreamHandler(said))

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if RANK == WORLD - 1 and re.fullmatch(r"/proc/\d+/fd/\d+", str(path)):
            raise PermissionError(13, "Permission denied", path)
        return opens(path, *args, **options)

    def look(run: pl.Trainer, module: Any) -> None:
        parts = [part for block in run.strategy.session.blocks for part in block.parts]
        assert not any(isinstance(part.arena, SharedArena) for part in parts)
        seen.append(any(not part.is_whole for part in parts))

    seen: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        for kind, accumulate in [("", 1), ("tied frozen", 2)]:
            shared = model(kind, seed=5 + RANK)
            trainer(out, callbacks=[Calls(look)], accumulate_grad_batches=accumulate).fit(shared, batches())
            same(shared, reference(kind, accumulate))
    lines = [line for line in said.getvalue().splitlines() if "do not share memory" in line]
    assert len(lines) == (2 if RANK == 0 else 0), lines
    assert all(f"rank {WORLD - 1} cannot open that of the first one (Permission denied)" in line for line in lines)
    assert all(seen), "a rank has slices"


if __name__ == "__main__":
    run_scenarios(globals())
