"""The memory of ranks that train together, phase by phase."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from contestants import settle
from gpt2 import GPT2, Layer, Size, fit, make_trainer
from rank_groups import join_as
from scratch import free_port, process_context

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.runtime.process_memory import give_free_pages_back
from lightning_hetero.store.capacity import peak_resident_bytes

_REST = 10  # a sample costs the ranks time: so many times as long nothing is sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fit whose memory counts.

    Attributes:
        size: The model's size.
        batch: Sequences of one rank.
        seq: Their tokens.
        plan: A plan of ours, or ``"ddp"``.
        warm: Batches before the phase ``steps``.
        steps: Those in it.
        host_memory: The budget of all ranks together.
        directory: Its files: stores, and a checkpoint.
        checkpoint: Whether one is written after the fit.
    """

    size: Size
    batch: int
    seq: int
    plan: str
    warm: int
    steps: int
    host_memory: int | None = None
    directory: Path
    checkpoint: bool = False

    @property
    def store(self) -> Path:
        """Where what is on disk goes."""
        return self.directory / "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The most that the ranks of a fit have together, in bytes.

    Attributes:
        before: Proportional set sizes before there is a model.
        phases: The same in each phase: ``model`` until training begins, ``first_batches``,
            ``steps``, ``between_steps``, ``checkpoint``, ``end``. ``between_steps`` is a moment
            after the last step: no update is under way, and malloc has given back what is free.
        disk: Files of stores during training.
        peak_rss: Resident memory of the rank that had most, libraries and shared pages included.
    """

    before: int
    phases: dict[str, int]
    disk: int
    peak_rss: int

    def beside(self, phase: str) -> int:
        """Of a phase, beside what processes have without a model."""
        return self.phases[phase] - self.before


def pss_bytes(pid: int) -> int:
    """A process's proportional set size: a page that several processes map counts once."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def file_bytes(directory: Path) -> int:
    """What the files below a directory take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


class _Tells(pl.Callback):
    """Tells the phases of training."""

    def __init__(self, channel: Connection, work: Fit) -> None:
        self._channel, self._work = channel, work

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (0, self._work.warm):
            self._channel.send(("first_batches" if batch_idx < self._work.warm else "steps", 0))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self._work.warm + self._work.steps:
            if self._work.plan != "ddp":
                settle(trainer.strategy)
            give_free_pages_back()
            self._channel.send(("between_steps", 0))
            self._channel.recv()  # until the memory of all ranks has been counted


def _train(channel: Connection, rank: int, ranks: int, port: int, work: Fit) -> None:
    if ranks > 1:
        join_as(rank, ranks, port)
    gc.collect()  # writes to pages that it shares with the server of processes, as it will while it trains
    channel.send(("model", pss_bytes(os.getpid())))
    copies = work.plan == "ddp"
    strategy: Any = work.plan
    if not copies:
        store = None if work.plan == "host" else work.store
        strategy = HeteroOffloadStrategy(work.plan, block_cls=Layer, disk_path=store, host_memory=work.host_memory)
    told = _Tells(channel, work)
    trainer = make_trainer(
        strategy=strategy, devices=ranks, max_steps=work.warm + work.steps, callbacks=[told], default_root_dir=work.directory
    )
    fit(trainer, GPT2(work.size, meta=not copies), batch=work.batch, length=work.seq, seed=rank)
    if work.checkpoint:
        channel.send(("checkpoint", 0))
        trainer.save_checkpoint(work.directory / "last.ckpt")
    channel.send(("end", peak_resident_bytes()))
    channel.recv()  # until its memory has been counted once more


def held(ranks: int, work: Fit) -> Held | None:
    """What the ranks of a fit hold; ``None`` if a rank has ended with an error."""
    context, port, channels, processes = process_context(), free_port(), list[Connection](), list[Any]()
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_train, args=(theirs, rank, ranks, port, work)))
        processes[-1].start()
        theirs.close()
        channels.append(ours)
    try:
        found = _watch(channels, [process.pid for process in processes], work)
        for channel in channels:
            channel.send(None)
        for process in processes:
            process.join()
    except EOFError:
        print(f"plan {work.plan!r} on {ranks} ranks cannot be measured: see the error above", flush=True)
        return None
    else:
        return found
    finally:
        for process in processes:
            process.kill()


def _watch(channels: list[Connection], pids: list[int], work: Fit) -> Held:
    """Samples until all ranks have told their end. A phase begins when its first rank tells it."""
    before = [channel.recv()[1] for channel in channels]
    phase, phases, disk, peaks, waiting = "model", dict[str, int](), 0, list[int](), list[Connection]()
    while len(peaks) < len(channels):
        began_s = time.monotonic()
        phases[phase] = max(phases.get(phase, 0), sum(map(pss_bytes, pids)))
        if phase in ("first_batches", "steps"):
            disk = max(disk, file_bytes(work.store))
        for channel in wait(channels, timeout=_REST * (time.monotonic() - began_s)):
            assert isinstance(channel, Connection)
            told, peak = channel.recv()
            peaks += [peak] if told == "end" else []
            waiting += [channel] if told == "between_steps" else []
            phase = told if told != "between_steps" or len(waiting) == len(channels) else phase
        if len(waiting) == len(channels):
            phases[phase] = sum(map(pss_bytes, pids))
            for channel in waiting:
                channel.send(None)
            waiting, phase = [], "end"
    phases[phase] = max(phases.get(phase, 0), sum(map(pss_bytes, pids)))
    return Held(before=sum(before), phases=phases, disk=disk, peak_rss=max(peaks))


# ---- what is compared --------------------------------------------------------------------------


def compare(ranks: int, work: Fit, *, copies: bool) -> dict[str, Any]:
    """Ranks beside one process that has the same budget and trains the same global batch.

    One process with the batch of one rank shows what a batch adds: activations, which are as many
    bytes however many processes share them.
    """
    whole = replace(work, batch=work.batch * ranks)
    several, one, smaller = (_both_plans(number, each) for number, each in ((ranks, work), (1, whole), (1, work)))
    peaks = several["peak_ram"], one["peak_ram"], smaller["peak_ram"]
    activations = peaks[1] and peaks[2] and max(0, (peaks[1] - peaks[2]) // (ranks - 1))
    copied = held(ranks, replace(work, plan="ddp")) if copies else None
    return {
        **several, "one_process": one, "one_process_with_a_ranks_batch": smaller,
        "state_bytes_vs_one_process": {kind: ratio(several[kind], one[kind]) for kind in ("ram", "disk")},
        "peak_ram_vs_one_process": ratio(peaks[0], peaks[1]),
        "peak_ram_vs_one_process_with_a_ranks_batch": ratio(peaks[0], peaks[2]),
        "activation_bytes_of_a_ranks_batch": activations,
        "peak_bytes_per_rank": peaks[0] and peaks[1] and (peaks[0] - peaks[1]) // (ranks - 1),
        "copies_vs_one_process": ratio(copied and copied.beside("between_steps"), one["ram"]),
    }  # fmt: skip


def _both_plans(ranks: int, work: Fit) -> dict[str, int | None]:
    """RAM under plan ``host``, between steps and at its peak, and disk under plan ``disk``."""
    folder = work.directory / f"ranks-{ranks}-batch-{work.batch}"
    folder.mkdir()
    in_memory = held(ranks, work)
    on_disk = held(ranks, replace(work, plan="disk", directory=folder, host_memory=None))
    return {
        "ram": in_memory and in_memory.beside("between_steps"), "peak_ram": in_memory and in_memory.beside("steps"),
        "disk": on_disk and on_disk.disk,
    }  # fmt: skip


def ratio(one: float | None, other: float | None) -> float | None:
    """Rounded, for people; ``None`` if one of them is not known."""
    return round(one / other, 3) if one and other else None


def within_budget(ranks: int, work: Fit) -> dict[str, Any]:
    """The ranks' memory in each phase of a fit, beside its bound.

    The bound is the budget, and for each rank the most that one has which trains a single block of
    width 64.
    """
    assert work.host_memory is not None
    folder = work.directory / "one-block"
    folder.mkdir()
    tiny = replace(work.size, layers=1, width=64, heads=1, vocabulary=257)
    one_block = held(ranks, replace(work, size=tiny, directory=folder))
    found = held(ranks, work)
    bound = one_block and work.host_memory + ranks * one_block.peak_rss
    return {
        "host_memory_bytes": work.host_memory, "one_block_peak_rss_bytes": one_block and one_block.peak_rss, "bound_bytes": bound,
        "pss_bytes": found and found.phases, "disk_bytes": found and found.disk, "peak_rss_bytes": found and found.peak_rss,
        "most_vs_bound": ratio(found and max(found.phases.values()), bound),
    }  # fmt: skip
