"""Children that kill themselves: forked from a process that has imported everything, since that
takes longer than they live.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.scripts import output_of, result_of


def in_child(call: Callable[[], object]) -> bool:
    """Forks and runs ``call`` there; whether that killed itself."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "see above"
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def around(
    owner: Any, name: str, *, before: Callable[..., object] = lambda *_: None, after: Callable[..., object] = lambda *_: None
) -> None:
    """Has a function of a class or a module call others before and after itself, with its
    arguments.
    """
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        before(*arguments)
        result = original(*arguments, **options)
        after(*arguments)
        return result

    setattr(owner, name, call)


Report = dict[str, Any]
"""What became of each case that a script of kills has run, by the case's name."""


def report_of(script: str, factory: pytest.TempPathFactory) -> Report:
    """Runs a script of kills: all of them in one process that forks."""
    folder = factory.mktemp(Path(script).stem)
    found: Report = result_of(output_of(Path(script), folder, cwd=folder))
    return found


def kill_all(
    root: Path, cases: Iterable[Any], die_at: Callable[[Path, Any], object], resume: Callable[[Path, Path, Any], object],
    **more: object,
) -> None:  # fmt: skip
    """Lets a child die in each case and another one go on from its store, and prints the report.

    ``resume`` writes what it finds to the file that it gets: ``resumed_at`` and ``difference``. The
    report has ``more`` too.
    """
    report, file = dict(more), root / "case.json"
    for case in cases:
        killed = in_child(partial(die_at, root, case))
        in_child(partial(resume, root, file, case))
        report[case.name] = {"killed": killed, **json.loads(file.read_text())}
        shutil.rmtree(root / "store")
    print(json.dumps(report))


def assert_nothing_lost(found: Any, resumes: Iterable[int]) -> None:
    """The case of a report was killed, and went on from one of these steps to the same bits."""
    assert found["killed"], "the point was never reached"
    assert found["resumed_at"] in resumes
    assert not found["difference"]


def all_on_disk(executor: Any) -> None:
    """Waits until everything that parts have submitted is on the disk."""
    from lightning_hetero._native import DONE

    for part in [part for block in executor.blocks for part in block.parts]:
        for ticket in filter(None, [part.last_write, part.updated, *(m.ticket for m in part.mirrors.values())]):
            ticket.wait(DONE)
