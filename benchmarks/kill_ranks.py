"""Kills one of the ranks that share a model at random moments, and resumes all of them.

    python benchmarks/kill_ranks.py --dir DIR [--ranks 2 3 4] [--kills 200] [--restarts 10]
        [--steps 300] [--seed 0]

The model and its training are those of ``kill.py``. Two, three or four ranks train it together,
with a store each. One of them dies with SIGKILL: at a random moment after its first step or while
it starts, before or after a random call of ``POINTS`` (meetings, ops of the lane of collectives,
writes of slots and records), or a few milliseconds after it has handed a commit to the engine. The
others have to end by themselves, but for ranks that have just started: those may not have met yet,
and die as well. Then as many ranks go on from the stores. At last ``kill_restarts.py`` does so
under torchrun, which starts the ranks again, also as another number.

* ``lost_steps``: steps that all ranks had reported as committed, and that the next ranks did not
  find.
* ``ended_steps_lost``: the number of ended steps that had to be repeated, and how often.
* ``wrong_resumes``: resumes with a loss of a rank, or final weights and optimizer state, that
  differ from ranks that nobody killed, or with ranks that began at different steps.
* ``unreadable_stores``: stores that could not be resumed from.
* ``unclear_errors``: ranks that ended without saying that another rank has died.
* ``hangs``: ranks that had not ended after a minute.

``longest_end_s`` is how long the others lived at most, and ``kills_at`` where ranks were killed.
``not_reached`` counts ranks that had ended before they came to the call at which they were to die.
A point at which nobody died, however often it was tried, is a failure: ``never_reached``.
``restarts`` has the same counts of torchrun.
Ranks are forked: importing torch takes longer than training. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import kill_restarts
import torch
from kill import (
    COMMITTED,
    DONE,
    ENDED,
    ENDED_LOST_MOST,
    FAILED,
    LOSS,
    ROW,
    VARIANTS,
    Reports,
    fit,
    forked,
    rows_until_end,
)  # fmt: skip
from rank_groups import join_as
from scratch import free_port, scratch

from lightning_hetero._native import DONE as WRITTEN
from lightning_hetero._native import Engine
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.runtime.common_records import CommonRecords
from lightning_hetero.store.live.block_files import BlockFiles
from lightning_hetero.strategies import HeteroOffloadStrategy

SOME = Plan(
    name="some",
    blocks=(
        BlockPlan(name="blocks.0", state=Tier.DISK),
        BlockPlan(name="blocks.1", weights=Tier.DEVICE, state=Tier.DISK),
        BlockPlan(name="*"),
    ),
)
PLANS: tuple[Any, ...] = (SOME, "disk", "host")
DIES = b"K"  # a rank that kills itself; the number: whether a commit was being written
BOUND_S = 60.0  # within which the others have to end
FAILURES = ("lost_steps", "wrong_resumes", "unreadable_stores", "unclear_errors", "hangs")
TRIES = 5  # of a point, after which somebody should have died there
POINTS: dict[str, tuple[Any, str, str]] = {  # a function, and the kind of op if it is called for several
    "meeting": (Collectives, "_meet", ""),
    "between collectives": (Collectives, "on_lane", ""),
    "gather": (Collectives, "met", "GATHER"),
    "reduce": (Collectives, "met", "REDUCE"),
    "agree": (Collectives, "met", "AGREE"),
    "exchange of gradients": (Collectives, "reduce", ""),
    "exchange of commits": (CommonRecords, "_exchange", ""),
    "slot": (Engine, "arm_update", ""),
    "record": (BlockFiles, "wait_for_record", ""),
}
CALLS = 150  # of a function, at most, before somebody dies
SAYS_WHY = ("another rank has died", "Connection closed by peer", "Connection reset by peer")
Rows = list[tuple[bytes, int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Where a rank dies.

    Attributes:
        rank: Which one.
        at: ``"start"`` or ``"training"``: so many seconds after its start or its first loss; or the
            name of a method: at its call of this number.
        seconds: After that.
        call: The number of the call.
        ended: After the call, not before it.
    """

    rank: int
    at: str
    seconds: float = 0.0
    call: int = 0
    ended: bool = False

    @classmethod
    def draw(cls, draw: random.Random, ranks: int) -> Death:
        """A random one."""
        rank, kind = draw.randrange(ranks), draw.random()
        if kind < 0.3:
            return cls(rank=rank, at="training", seconds=draw.uniform(0, draw.choice((0.2, 0.5, 1.2))))
        if kind < 0.4:
            return cls(rank=rank, at="start", seconds=draw.uniform(0, 1.5))
        if kind < 0.8:
            return cls(rank=rank, at=draw.choice(list(POINTS)), call=draw.randrange(CALLS), ended=draw.random() < 0.5)
        return cls(rank=rank, at="commit", call=draw.randrange(30), ended=True, seconds=draw.uniform(0, 0.005))

    @property
    def at_call(self) -> bool:
        """Whether the rank kills itself."""
        return self.at not in ("start", "training")

    def arm(self, write: Callable[[bytes, int, float], None]) -> None:
        """In the rank: dies at the call, and writes just before whether a commit is written."""
        if not self.at_call:
            return
        owner, name, op = (BlockFiles, "commit", "") if self.at == "commit" else POINTS[self.at]
        original, left, commits = getattr(owner, name), iter(range(self.call, -1, -1)), [None]

        def die() -> None:
            write(DIES, int(commits[0] is not None and commits[0].poll() < WRITTEN), 0.0)
            os.kill(os.getpid(), signal.SIGKILL)

        def call(*arguments: Any, **options: Any) -> Any:
            counts = not op or arguments[1].what == op
            now = counts and next(left, -1) == 0
            if now and not self.ended:
                die()
            result = original(*arguments, **options)
            if now and self.seconds:
                commits[0] = result
                threading.Timer(self.seconds, die).start()
            elif now:
                die()
            return result

        setattr(owner, name, call)


def write_row(out: int, kind: bytes, step: int, value: float) -> None:
    """Tells the parent something."""
    os.write(out, ROW.pack(kind, step, value))


def child(root: Path, steps: int, plan: Any, store: Path | None, fresh: bool, rank: int, ranks: int, port: int, out: int) -> None:
    """A rank: trains until it is killed; the parent reads what it writes to ``out``."""
    write = partial(write_row, out)
    join_as(rank, ranks, port)
    strategy = HeteroOffloadStrategy(plan, disk_path=store, verify_digests=store is not None)
    callbacks = [] if store is None else [Reports(write)]
    try:
        trainer, _ = fit(
            strategy, root, steps, VARIANTS[0], None if fresh else store, lambda step, loss: write(LOSS, step, loss), *callbacks,
            rank=rank, ranks=ranks,
        )  # fmt: skip
    except ConfigError as error:
        if "no step has been committed yet" not in str(error) and "is not a file" not in str(error):
            raise
        write(FAILED, 0, 0.0)  # nothing to resume from
        return
    end = root / f"{'end' if store else 'reference'}-{ranks}.ckpt"
    trainer.save_checkpoint(end)
    if rank == 0:
        write(DONE, int(same(torch.load(end), torch.load(root / f"reference-{ranks}.ckpt"))), 0.0)


def same(one: Any, other: Any) -> bool:
    """Two checkpoints have the same weights and optimizer state, bit for bit."""
    flat = [torch.utils._pytree.tree_flatten((saved["state_dict"], saved["optimizer_states"])) for saved in (one, other)]
    (values, tree), (wanted, wanted_tree) = flat
    pairs = zip(values, wanted, strict=True)
    return tree == wanted_tree and all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@dataclass(slots=True)
class Rank:
    """A rank as the parent sees it."""

    process: int
    reader: int
    log: Path
    status: int | None = None

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.status is None:
            done, status = os.waitpid(self.process, os.WNOHANG)
            self.status = status if done else None
        return self.status is not None

    def kill(self) -> None:
        """Ends it, and its children, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        if self.status is None:
            self.status = os.waitpid(self.process, 0)[1]

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL has ended it."""
        return self.status is not None and os.WIFSIGNALED(self.status)

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self.status is not None and os.WIFEXITED(self.status) and os.WEXITSTATUS(self.status) != 0


def start(root: Path, steps: int, plan: Any, store: Path | None, fresh: bool, ranks: int, death: Death | None) -> list[Rank]:
    """Forks the ranks."""
    port, started = free_port(), []
    for rank in range(ranks):

        def run(out: int, rank: int = rank) -> None:
            if death is not None and death.rank == rank:
                death.arm(partial(write_row, out))
            child(root, steps, plan, store, fresh, rank, ranks, port, out)

        log = root / f"log-{rank}"
        started.append(Rank(*forked(run, log), log))
    return started


def await_end(ranks: list[Rank], seconds: float) -> int:
    """Waits for all of them, at most so long. Returns how many had to be killed."""
    deadline = time.monotonic() + seconds
    while sum(rank.poll() for rank in ranks) < len(ranks) and time.monotonic() < deadline:
        time.sleep(0.005)
    late = [rank for rank in ranks if not rank.poll()]
    for rank in late:
        rank.kill()
    return len(late)


class Harness:
    """Counts what happens."""

    def __init__(self, root: Path, numbers: list[int], steps: int, seed: int) -> None:
        self.root, self.numbers, self.steps, self.random = root, numbers, steps, random.Random(seed)
        names = (
            "kills",
            "runs",
            "finished",
            "steps",
            "lost_steps",
            "wrong_resumes",
            "unreadable_stores",
            "unclear_errors",
            "hangs",
        )
        self.counts = dict.fromkeys(names, 0)
        self.kills_at, self.not_reached = Counter[str](), Counter[str]()
        self.plans, self.ended_lost = Counter[str](), Counter[int]()
        self.longest_end_s, self.failure = 0.0, ""
        self.losses = {number: self._reference(number) for number in numbers}
        self._anew()

    def _reference(self, ranks: int) -> list[list[float]]:
        """The losses of each of these ranks, if nobody kills them; leaves their checkpoint."""
        started = start(self.root, self.steps, "host", None, True, ranks, None)
        rows = [rows_until_end(rank.reader) for rank in started]
        if await_end(started, BOUND_S) or any(rank.failed for rank in started):
            raise SystemExit("\n".join(rank.log.read_text()[-3000:] for rank in started))
        return [[value for kind, _, value in of_rank if kind == LOSS] for of_rank in rows]

    def _anew(self) -> None:
        shutil.rmtree(self.root / "store", ignore_errors=True)
        self.committed, self.ended, self.fresh, self.ranks = 0, 0, True, self.random.choice(self.numbers)

    def run(self) -> None:
        """One start of all ranks."""
        plan, death = self.random.choice(PLANS), Death.draw(self.random, self.ranks)
        started = start(self.root, self.steps, plan, self.root / "store", self.fresh, self.ranks, death)
        victim = started[death.rank]
        self._kill(victim, death, started)
        began_s = time.monotonic()
        if death.at == "start":  # they may not have met yet: then whoever has started them ends them
            for rank in started:
                rank.kill()
        late = await_end(started, BOUND_S)
        if victim.was_killed:
            self.longest_end_s = max(self.longest_end_s, time.monotonic() - began_s)
        self.counts["hangs"] += late
        self.counts["runs"] += 1
        self.counts["kills"] += victim.was_killed
        self.plans[f"{plan if isinstance(plan, str) else plan.name}, {self.ranks} ranks"] += 1
        rows = [rows_until_end(rank.reader) for rank in started]
        (self.kills_at if victim.was_killed else self.not_reached)[place_of(death, rows[death.rank])] += 1
        if late:
            self.failure = self._logs(started, f"{death}: {late} ranks have not ended")
        elif not victim.was_killed and any(rank.failed for rank in started):
            self.counts["unreadable_stores"] += 1
            self.failure = self._logs(started, f"{death}: a rank failed, and none was killed")
        else:
            self._check_errors(started, death)
            self._check(rows, plan)

    def _kill(self, victim: Rank, death: Death, started: list[Rank]) -> None:
        """Kills a rank at a time, or waits until it has killed itself, or all have ended."""
        begins = death.at != "training"
        deadline = time.monotonic() + death.seconds
        while not sum(rank.poll() for rank in started):
            if not begins and select.select([victim.reader], [], [], 0)[0]:
                begins, deadline = True, time.monotonic() + death.seconds
            if begins and death.at in ("start", "training") and time.monotonic() >= deadline:
                victim.kill()
            time.sleep(0.002)

    def _logs(self, started: list[Rank], what: str) -> str:
        return "\n".join([what, *(f"--- rank {i}\n{rank.log.read_text()[-2500:]}" for i, rank in enumerate(started))])

    def _check_errors(self, started: list[Rank], death: Death) -> None:
        if not any(rank.was_killed for rank in started):
            return
        for rank in [rank for rank in started if rank.failed]:
            if not any(text in rank.log.read_text() for text in SAYS_WHY):
                self.counts["unclear_errors"] += 1
                self.failure = self.failure or self._logs(started, f"{death}: an error does not say why")

    def _check(self, rows: list[Rows], plan: Any) -> None:
        losses = [[(step, value) for kind, step, value in of_rank if kind == LOSS] for of_rank in rows]
        self.counts["steps"] += sum(map(len, losses))
        if any(kind == FAILED for of_rank in rows for kind, *_ in of_rank):  # right if none had its first step on disk
            self.counts["lost_steps"] += self.committed
            self._goes_back_to(0)
            self._anew()
            return
        firsts = {of_rank[0][0] for of_rank in losses if of_rank}
        if firsts:
            first = min(firsts)
            self.counts["lost_steps"] += max(0, self.committed - first)
            self._goes_back_to(first)
            expected = zip(self.losses[self.ranks], losses, strict=True)
            wanted = [list(enumerate(row))[first : first + len(got)] for row, got in expected]
            if len(firsts) > 1 or losses != wanted:
                self.counts["wrong_resumes"] += 1
                self.failure = f"plan {plan}, {self.ranks} ranks: the losses from step {first} on differ"
        self.committed = max(self.committed, min(_last(of_rank, COMMITTED) for of_rank in rows))
        self.ended = max(self.ended, min(_last(of_rank, ENDED) for of_rank in rows))
        self.fresh = self.fresh and not any((self.root / "store").rglob("MANIFEST"))
        for equal in [equal for kind, equal, _ in rows[0] if kind == DONE]:
            self.counts["finished"] += 1
            self.counts["wrong_resumes"] += not equal
            self._anew()

    def _goes_back_to(self, step: int) -> None:
        if self.ended:
            self.ended_lost[max(0, self.ended - step)] += 1
        self.ended = step


def place_of(death: Death, rows: Rows) -> str:
    """Where a rank has died, for people."""
    if death.at == "commit":
        return "in a commit" if any(row[:2] == (DIES, 1) for row in rows) else "after a commit"
    return f"{death.at}, {'after' if death.ended else 'before'}" if death.at_call else death.at


def _last(rows: Rows, kind: bytes) -> int:
    return max([0, *(step for what, step, _ in rows if what == kind)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="where the stores go")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--restarts", type=int, default=10, help="kills under torchrun")
    parser.add_argument("--steps", type=int, default=300, help="of one training run")
    parser.add_argument("--seconds", type=float, default=2000, help="after which no rank is started any more")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.monotonic()
    with scratch(arguments.dir) as root:
        harness = Harness(root, arguments.ranks, arguments.steps, arguments.seed)
        while harness.counts["kills"] < arguments.kills and not harness.failure and time.monotonic() - begin < arguments.seconds:
            harness.run()
        restarts = kill_restarts.run(root, arguments.restarts, arguments.seed) if arguments.restarts else {}
        for failure in filter(None, (harness.failure, restarts.pop("failure", ""))):
            print(failure)
    never = [at for at, tries in harness.not_reached.items() if tries >= TRIES and at not in harness.kills_at]
    more: dict[str, Any] = {"plans": dict(harness.plans), "kills_at": dict(harness.kills_at)}
    more |= {"not_reached": dict(harness.not_reached), "never_reached": never, "longest_end_s": round(harness.longest_end_s, 2)}
    more |= {"ended_steps_lost": dict(sorted(harness.ended_lost.items())), "seconds": time.monotonic() - begin}
    print(json.dumps({"benchmark": "kill_ranks", **harness.counts, **more, "restarts": restarts}))
    too_many = max(harness.ended_lost, default=0) > ENDED_LOST_MOST
    wrong = any(counts.get(key) for counts in (harness.counts, restarts) for key in FAILURES)
    raise SystemExit(int(too_many or wrong or bool(never)))


if __name__ == "__main__":
    sys.exit(main())
