"""``kill -9`` at the points that matter to updates before their verdict: a resume finds the last committed step, bit for bit.

Kills at random moments are in test_kill.py; here the process dies exactly where it is told to, with everything that was written
so far on the disk, so that nothing but the record decides.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.scripts import run_script

STEPS, AT = 4, 2  # the third step is the one that dies
CLIPS, KEEPS = 1e-2, 1e6
COMMITTED = "committed"  # the point after which the step counts
POINTS = {  # whether the step clips
    "tried": False,  # between a speculative update and its verdict
    "kept": False,  # between the verdict and the commit
    "discarded": True,  # what was tried has been taken back
    "redone": True,  # and has been updated again
    COMMITTED: False,
}
CASES = [("disk", point) for point in POINTS] + [("mixed", "tried"), ("mixed", "kept")]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All kills run in one process that forks: importing torch takes longer than training."""
    folder = tmp_path_factory.mktemp("kills")
    done = run_script(Path(__file__), folder, cwd=folder)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("plan", "point"), CASES, ids=[f"{plan}-{point}" for plan, point in CASES])
def test_a_kill_at_this_point_loses_no_committed_step(report: dict[str, Any], plan: str, point: str) -> None:
    found = report[f"{plan}-{point}"]
    assert found["killed"], "the point was never reached"
    assert found["tried"] > 0
    assert found["resumed_at"] == AT + (point == COMMITTED)
    assert found["same_bits"]


def main(root: Path) -> None:
    """Every case; an assertion that fails ends the process."""
    import support.models  # noqa: F401  once for all children
    import torch

    import lightning_hetero.strategies  # noqa: F401

    in_child(lambda: torch.save(train(root, "auto", None, lambda _: None), root / "reference.pt"))
    report = {}
    for plan, point in CASES:
        store, file = root / "store", root / "case.json"
        file.write_text('{"tried": 0}')
        killed = in_child(lambda store=store, file=file, plan=plan, point=point: die_at(root, store, file, plan, point))
        tried = json.loads(file.read_text())["tried"]
        in_child(lambda store=store, file=file, plan=plan, point=point: resume(root, store, file, plan, POINTS[point]))
        report[f"{plan}-{point}"] = {"killed": killed, "tried": tried, **json.loads(file.read_text())}
        shutil.rmtree(store)
    print(json.dumps(report))


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
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "see above"
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


# ---- what children do -------------------------------------------------------------------------------------------------------


def strategy_of(plan: str, store: Path) -> Any:
    from lightning_hetero import BlockPlan, Plan, Tier
    from lightning_hetero.runtime import speculation
    from lightning_hetero.strategies import HeteroOffloadStrategy

    speculation._BREAK_EVEN = 1.0  # every step tries
    rows = (BlockPlan(name="model.blocks.0"), BlockPlan(name="*", weights=Tier.DISK, state=Tier.DISK))
    mixed = Plan(name="mixed", blocks=rows)
    return HeteroOffloadStrategy(plan=mixed if plan == "mixed" else plan, disk_path=store, verify_digests=True)


def train(root: Path, strategy: Any, resume_from: Path | None, begins: Callable[[int], None], *, clips: bool = False) -> Any:
    """Trains to the end; losses, and weights and state as the last step leaves them. The step ``AT`` clips, or does not."""
    import lightning.pytorch as pl
    import torch
    from support.models import LitModel, Recipe, Shape, data, outcome, quiet_trainer

    class Clips(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            trainer.gradient_clip_val = CLIPS if clips and trainer.global_step == AT else KEEPS
            begins(trainer.global_step)

    torch.manual_seed(7)
    module = LitModel(Recipe(shape=Shape(layers=3)))
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=STEPS, gradient_clip_val=KEEPS, limit_val_batches=0, default_root_dir=root, callbacks=[Clips()]
    )
    trainer.fit(module, data(), ckpt_path=None if resume_from is None else str(resume_from))
    found = outcome(trainer, module)
    return found.losses, found.weights, found.state


def die_at(root: Path, store: Path, file: Path, plan: str, point: str) -> None:
    """Trains until the point, waits for everything that has been submitted, and kills itself."""
    from lightning_hetero._native import DONE
    from lightning_hetero.runtime.executor import Executor
    from lightning_hetero.runtime.speculation import Speculation

    strategy = strategy_of(plan, store)
    step, tickets = [0], list[Any]()

    def die(where: str) -> None:
        if (where, step[0]) != (point, AT):
            return
        executor = strategy.session.executor
        for ticket in [*tickets, *executor._in_flight, *filter(None, [executor.store.files.last_commit])]:
            ticket.wait(DONE)
        file.write_text(json.dumps({"tried": len(tickets)}))
        os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(owner: type, name: str, before: str = "", after: str = "") -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if before:
                die(before)
            result = original(self, *args, **kwargs)
            if name == "remember" and step[0] == AT:
                tickets.extend(args[1])
            if after:
                die(after)
            return result

        setattr(owner, name, call)

    wrapped(Speculation, "remember")
    wrapped(Speculation, "clip", before="tried")
    wrapped(Speculation, "discard", after="discarded")
    wrapped(Executor, "commit", before="redone" if POINTS[point] else "kept", after=COMMITTED)
    train(root, strategy, None, lambda now: step.__setitem__(0, now), clips=POINTS[point])


def resume(root: Path, store: Path, file: Path, plan: str, clips: bool) -> None:
    """Goes on from the store, and compares with a run under plain Lightning that nobody killed."""
    import torch

    steps: list[int] = []
    losses, weights, state = train(root, strategy_of(plan, store), store, steps.append, clips=clips)
    expected = train(root, "auto", None, lambda _: None, clips=True) if clips else torch.load(root / "reference.pt")
    same = len(losses) == STEPS - steps[0]
    same &= all(torch.equal(a, b) for a, b in zip(losses, expected[0][steps[0] :], strict=True))
    same &= all(torch.equal(weights[name], value) for name, value in expected[1].items())
    for number, entry in expected[2][0]["state"].items():
        same &= all(torch.equal(state[0]["state"][number][key], value) for key, value in entry.items())
    file.write_text(json.dumps({"resumed_at": steps[0], "same_bits": bool(same)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
