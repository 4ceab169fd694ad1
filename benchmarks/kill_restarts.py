"""Kills ranks under torchrun, which starts all of them again; a part of ``kill_ranks.py``.

The training has as many legs as ``RANKS``, each with another number of ranks than the one before,
from whose stores it goes on. In each leg torchrun starts the ranks. A random one of them dies with
SIGKILL, then a random one of those that torchrun starts next, and so on. The last ones end the leg.
The same legs, which nobody kills, are forked from this process: they say what is right.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from kill import COMMITTED, LOSS, ROW, VARIANTS, Reports, fit, forked, rows_until_end
from rank_groups import join_as
from scratch import free_port

from lightning_hetero.strategies import HeteroOffloadStrategy

RANKS = (2, 3, 4, 2)
LEG_STEPS = 30
LEG_S = 600.0  # within which torchrun has to end a leg
Rows = list[tuple[bytes, int, float]]


class Ends(pl.Callback):
    """Ends the fit after so many steps, on all ranks; one of them dies first.

    Args:
        step: The last one.
        dies_at: The step in which this rank dies; 0: none.
    """

    def __init__(self, step: int, dies_at: int) -> None:
        self._step, self._dies_at = step, dies_at

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._dies_at and trainer.global_step >= self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= self._step


def train(root: Path, leg: int, rank: int, out: int, *, fresh: bool, dies_at: int = 0) -> None:
    """A rank of a leg."""

    def write(kind: bytes, step: int, value: float) -> None:
        os.write(out, ROW.pack(kind, step, value))

    store, last = root / "store", LEG_STEPS * (leg + 1)
    strategy = HeteroOffloadStrategy(("disk", "host")[leg % 2], disk_path=store, verify_digests=True)
    trainer, _ = fit(
        strategy, root, LEG_STEPS * len(RANKS), VARIANTS[0], None if fresh else store,
        lambda step, loss: write(LOSS, step, loss), Reports(write), Ends(last, dies_at), rank=rank, ranks=RANKS[leg],
    )  # fmt: skip
    trainer.save_checkpoint(root / "end.ckpt")


def as_started(root: Path, leg: int, kills: int, seed: int) -> None:
    """What a rank does that torchrun has started; it dies or not by the number of restarts."""
    rank, again = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    draw = random.Random(f"{seed} {leg} {again}")
    victim, after = draw.randrange(RANKS[leg]), draw.randint(2, LEG_STEPS // (kills + 1))
    dies_at = LEG_STEPS * leg + LEG_STEPS // (kills + 1) * again + after
    torch.set_num_threads(1)
    out = os.open(root / f"rows-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    train(root, leg, rank, out, fresh=not (leg or again), dies_at=dies_at if again < kills and rank == victim else 0)


def _expected(root: Path, leg: int) -> list[dict[int, float]]:
    """The losses of each rank of a leg that nobody kills."""
    port, started = free_port(), []

    def as_forked(rank: int, out: int) -> None:
        join_as(rank, RANKS[leg], port)
        train(root, leg, rank, out, fresh=not leg)

    for rank in range(RANKS[leg]):
        started.append(forked(partial(as_forked, rank), root / f"log-{rank}"))
    rows = [rows_until_end(reader) for _, reader in started]
    if any(os.waitpid(process, 0)[1] for process, _ in started):
        raise SystemExit("\n".join((root / f"log-{rank}").read_text()[-3000:] for rank in range(RANKS[leg])))
    return [losses(of_rank)[0] for of_rank in rows]


def losses(rows: Rows) -> tuple[dict[int, float], int, int]:
    """The losses of steps, how many had others as they were repeated, and how many were lost.

    A step is lost if it was repeated, and had been committed before.
    """
    found, committed, differ, lost = dict[int, float](), 0, 0, 0
    last = -1
    for kind, step, value in rows:
        if kind == COMMITTED:
            committed = max(committed, step)
        elif kind == LOSS:
            if step <= last:  # a restart
                lost += max(0, committed - step)
            differ += found.setdefault(step, value) != value
            last = step
    return found, differ, lost


def _torchrun(root: Path, leg: int, kills: int, seed: int) -> tuple[int | None, str]:
    """The exit code of torchrun, ``None`` if it hangs, and what it said."""
    paths = [path for path in sys.path if path and Path(path) != Path(__file__).parent]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS[leg]}"]
    command += [f"--max-restarts={kills}", "--monitor-interval=0.1", __file__, *map(str, (root, leg, kills, seed))]
    log = root / "torchrun.log"
    with log.open("w") as output:
        agent = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
        with suppress(subprocess.TimeoutExpired):
            agent.wait(LEG_S)
    if agent.poll() is None:
        agent.terminate()  # which ends its ranks
        with suppress(subprocess.TimeoutExpired):
            agent.wait(60)
    return agent.returncode if agent.returncode is not None and agent.returncode >= 0 else None, log.read_text()


def run(parent: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kills so many ranks under torchrun, in all legs together. Returns what became of them."""
    root, right = parent / "restarts", parent / "never-killed"
    counts = dict.fromkeys(("kills", "lost_steps", "wrong_resumes", "unreadable_stores", "hangs"), 0)
    failure = ""
    root.mkdir()
    right.mkdir()
    for leg, ranks in enumerate(RANKS):
        wanted = _expected(right, leg)
        here = kills // len(RANKS) + (leg < kills % len(RANKS))
        for file in root.glob("rows-*"):
            file.unlink()
        code, said = _torchrun(root, leg, here, seed)
        counts["kills"] += here
        counts["hangs"] += code is None
        counts["unreadable_stores"] += bool(code)
        if code != 0:
            failure = f"leg {leg} with {ranks} ranks under torchrun: {said[-4000:]}"
            break
        rows = [list(ROW.iter_unpack((root / f"rows-{rank}").read_bytes())) for rank in range(ranks)]
        got = [losses(of_rank) for of_rank in rows]
        counts["lost_steps"] += sum(lost for _, _, lost in got)
        if [found for found, _, _ in got] != wanted or any(differ for _, differ, _ in got) or not _same_end(root, right):
            counts["wrong_resumes"] += 1
            failure = f"leg {leg} with {ranks} ranks under torchrun: losses, weights or state differ"
            break
    shutil.rmtree(root)
    shutil.rmtree(right)
    return {**counts, "ranks": list(RANKS), "failure": failure}


def _same_end(one: Path, other: Path) -> bool:
    found = [torch.load(folder / "end.ckpt") for folder in (one, other)]
    flat = [torch.utils._pytree.tree_flatten((saved["state_dict"], saved["optimizer_states"])) for saved in found]
    (values, tree), (wanted, wanted_tree) = flat
    pairs = zip(values, wanted, strict=True)
    return tree == wanted_tree and all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


if __name__ == "__main__":
    as_started(Path(sys.argv[1]), *map(int, sys.argv[2:]))
