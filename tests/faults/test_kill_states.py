"""``kill -9`` after every kind of call that writes a large training state: a resume finds the last
kept step, bit for bit.

Kills where slots and records are written are in test_kill_points.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.children import around, in_child
from support.scripts import output_of, result_of

AT, STEPS = 2, 4  # steps before the one that dies, and in all
CALLS = ("remove", "open", "fallocate", "write", "fdatasync", "sync", "commit")  # in this order


def test_a_kill_at_any_write_of_a_large_state_loses_no_committed_step(tmp_path: Path) -> None:
    """All kills run in one process that forks: importing torch takes longer than training."""
    report = result_of(output_of(Path(__file__), tmp_path, cwd=tmp_path))
    assert report == {call: {"killed": True, "resumed_at": AT + (call == "commit"), "difference": "", "left": []} for call in CALLS}


def main(root: Path) -> None:
    """Every kill; an assertion that fails ends the process."""
    import support.heavy  # once for all children
    import torch

    import lightning_hetero.strategies  # noqa: F401

    in_child(lambda: torch.save(support.heavy.train(root, "auto", max_steps=STEPS), root / "plain.pt"))
    report, file = {}, root / "case.json"
    for call in CALLS:
        killed = in_child(lambda call=call: die_after(root, call))
        in_child(lambda: resume(root, file))
        report[call] = {"killed": killed, **json.loads(file.read_text())}
        shutil.rmtree(root / "store")
    print(json.dumps(report))


# ---- what children do ----------------------------------------------------------------------------


def die_after(root: Path, call: str) -> None:
    """Trains until a step has made its first call of that kind, and kills itself."""
    from support.heavy import offload, train

    from lightning_hetero.runtime.executor import Executor
    from lightning_hetero.store.format import state_files
    from lightning_hetero.store.format.directory import StoreDirectory

    step, strategy = [0], offload(root / "store", durability="power")

    def die(name: str) -> Callable[..., None]:
        def called(*_: Any) -> None:
            if (name, step[0]) == (call, AT):
                if name == "commit":
                    strategy.session.store.files.wait_for_commit()
                os.kill(os.getpid(), signal.SIGKILL)

        return called

    made = StoreDirectory.new_file

    @contextmanager
    def new_file(directory: Any, name: str) -> Iterator[Any]:
        with made(directory, name) as inner:
            die("open")()
            yield Writes(inner, die("write"))

    StoreDirectory.new_file = new_file  # type: ignore[method-assign, assignment]
    around(StoreDirectory, "remove_file", after=die("remove"))
    around(StoreDirectory, "sync", after=die("sync"))
    around(state_files.os, "posix_fallocate", after=die("fallocate"))
    around(state_files.os, "fdatasync", after=die("fdatasync"))
    around(Executor, "commit", after=die("commit"))
    train(root, strategy, begins=lambda trainer: step.__setitem__(0, trainer.global_step), max_steps=STEPS)


class Writes:
    """A file that tells of its writes."""

    def __init__(self, inner: Any, then: Callable[[], None]) -> None:
        self._inner, self._then = inner, then

    def fileno(self) -> int:
        return self._inner.fileno()

    def write(self, content: Any) -> None:
        self._inner.write(content)
        self._then()


def resume(root: Path, file: Path) -> None:
    """Goes on from the store, and compares with a run under plain Lightning that nobody killed."""
    import torch
    from support.heavy import offload, state_files, train
    from support.models import difference

    steps, left = list[int](), list[set[str]]()
    strategy = offload(root / "store", verify_digests=True)

    def begins(trainer: Any) -> None:
        steps.append(trainer.global_step)
        left.append(state_files(root / "store") - set(strategy.session.store.files.states.kept))

    got = train(root, strategy, root / "store", begins=begins, max_steps=STEPS)
    expected = torch.load(root / "plain.pt", weights_only=False)
    expected.losses = expected.losses[steps[0] :]
    file.write_text(json.dumps({"resumed_at": steps[0], "difference": difference(got, expected), "left": sorted(left[0])}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
