"""``kill -9`` at random moments: the committed step is whole, bit for bit, and the next run finds
nothing in its way.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.scripts import output_of, result_of

STEPS, ROUNDS = 30, 4
ON_DISK = ("model.blocks.",)


@pytest.mark.slow
def test_a_killed_run_leaves_a_committed_step_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    report = result_of(output_of(Path(__file__), tmp_path, str(seed), cwd=tmp_path))
    assert len(report["recovered"]) == 2 + ROUNDS
    assert max(report["recovered"]) > 1, report


def test_killed_training_continues_bit_for_bit(tmp_path: Path) -> None:
    """The benchmark in small: kills while training starts, resumes, moves, trains and commits."""
    script = Path(__file__).parents[2] / "benchmarks" / "kill.py"
    seed = random.randrange(10**6)
    output = output_of(script, "--dir", tmp_path, "--kills", "8", "--steps", "120", "--seed", str(seed), cwd=tmp_path)
    report = result_of(output)
    assert report["kills"] == 8
    assert report["steps"] > 0
    assert report["lost_steps"] == report["wrong_resumes"] == report["unreadable_stores"] == 0
    assert max(map(int, report["ended_steps_lost"]), default=0) <= 1


def main(root: Path, seed: int) -> None:
    """Runs everything; an assertion that fails ends the process."""
    # Nothing may start a thread of torch before the forks.
    from support.models import Recipe, Shape

    recipe = Recipe(steps=STEPS, shape=Shape(layers=3, width=32))
    moments = random.Random(seed)
    temporary, own, file = root / "temporary", root / "own", root / "reference.pt"
    temporary.mkdir()
    in_child(lambda: reference(recipe, root, file))
    recovered = []
    for number in range(-2, ROUNDS):
        path = None if number % 2 else own
        steps, seconds, last = (moments.randint(1, STEPS // 2), moments.uniform(0, 0.02), STEPS) if number >= 0 else (0, 0.0, 0)
        acknowledged = kill_while(lambda out, path=path, last=last: train(recipe, temporary, path, last, out), steps, seconds)
        (store,) = [own] if path else temporary.glob("lightning-hetero-*")  # leftovers of earlier rounds are gone
        step = in_child(lambda store=store: check(recipe, store, file))
        assert acknowledged - 2 <= step <= acknowledged + 1, (acknowledged, step)
        recovered.append(step)
    assert recovered[:2] == [0, 0], "these were killed as their first batch began"
    in_child(lambda: finish(recipe, temporary, own, file))
    assert not list(temporary.glob("lightning-hetero-*"))
    print(json.dumps({"recovered": recovered}))


def in_child(call: Any) -> int:
    """Forks, runs ``call`` there, and returns its number; its exception ends us too."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writer, str(call() or 0).encode())
            code = 0
        finally:
            os._exit(code) if code == 0 else _show_and_exit()
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    assert os.waitpid(child, 0)[1] == 0
    return int(text)


def _show_and_exit() -> None:
    import traceback

    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def kill_while(call: Any, steps: int, seconds: float) -> int:
    """Kills a child that runs ``call`` with a pipe, some time after this step; the last step that
    it had told of there.

    The child says where it begins its first batch, and where each step ends. Step 0 is that
    beginning.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call(writer)
        finally:
            _show_and_exit()
    os.close(writer)
    for _ in range(steps + 1):
        os.read(reader, 1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    while text := os.read(reader, 4096):
        steps += len(text)
    os.close(reader)
    return steps


# ---- what children do ----------------------------------------------------------------------------


def fitted(recipe: Any, root: Path, strategy: Any, callback: Any) -> Any:
    import torch
    from support.models import LitModel, data, quiet_trainer

    torch.manual_seed(7)
    module = LitModel(recipe)
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=recipe.steps, limit_val_batches=0, default_root_dir=root, callbacks=[callback]
    )
    trainer.fit(module, data())
    return trainer, module


def callback_of(call: Any, begins: Any = id) -> Any:
    import lightning.pytorch as pl

    class AfterStep(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 0:
                begins(trainer)

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            call(trainer, module)

    return AfterStep()


def strategy_of(path: Path | None, **options: Any) -> Any:
    from lightning_hetero.strategies import HeteroOffloadStrategy

    return HeteroOffloadStrategy(plan="disk", disk_path=path, new_run=path is not None, verify_digests=True, **options)


def content(trainer: Any, module: Any) -> dict[str, Any]:
    """Weights and state by the names of ``support.store``."""
    values = {name: param.detach().clone() for name, param in module.named_parameters()}
    for (name, _), (_, state) in zip(
        module.named_parameters(), sorted(trainer.optimizers[0].state_dict()["state"].items()), strict=True
    ):
        values |= {f"{name}.{key}": value.clone() for key, value in state.items() if key != "step"}
    return values


def reference(recipe: Any, root: Path, file: Path) -> None:
    """Plain Lightning's weights and state after every step."""
    import torch

    steps: list[dict[str, Any]] = []
    fitted(recipe, root, "auto", callback_of(lambda trainer, module: steps.append(content(trainer, module))))
    torch.save(steps, file)


def train(recipe: Any, root: Path, path: Path | None, last: int, out: int) -> None:
    """Tells the parent of the first batch and of every step, and waits after step ``last`` to be
    killed.
    """

    def tell(trainer: Any, *_: Any) -> None:
        os.write(out, b".")
        if trainer.global_step == last:
            signal.pause()

    fitted(recipe, root, strategy_of(path), callback_of(tell, begins=tell))


def check(recipe: Any, store: Path, file: Path) -> int:
    """Compares what the store holds with the step of the reference that it says it is."""
    import torch
    from support.store import STATE, read_store

    step, values = read_store(store, ON_DISK)
    step -= 1  # the first commit is the layout of the store
    expected = torch.load(file)[step - 1] if step else None
    for name, value in values.items():
        if expected is None:
            assert not name.endswith(STATE) or not value.any(), f"{name} before the first step"
        else:
            assert torch.equal(value, expected[name]), f"{name} at step {step}"
    return step


def finish(recipe: Any, root: Path, path: Path, file: Path) -> None:
    """The same model begins anew and trains to the end; another run leaves no temporary directory
    behind.
    """
    import torch

    expected = torch.load(file)[-1]
    for where in (path, None):
        got = content(*fitted(recipe, root, strategy_of(where), callback_of(lambda *_: None)))
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], value) for name, value in expected.items())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
