"""Breaks each wait, event and mark of the lanes, one at a time, and says what finds it: a table for
docs/devices.md.

``PYTHONPATH=$PWD:$PWD/tests:$PWD/benchmarks python tests/broken_waits.py``. Each break is made in a
child, which runs programs and trainings in a setting:

- ``emulated``: on the emulated device, poisoned and with random delays; what finds a break are
  wrong results and errors.
- ``delays``: on streams that are threads with random delays, poisoned; the same.
- ``order``: on streams whose uses of memory have to be ordered (``support.checker``): what finds a
  break is the checker, or it ``fails``, which is another error.
- ``foreign``: on the tests' own device, whose memory the host cannot touch, late by random times.
- ``tests``: the tests of lanes.

The waits of lane ``net`` need several ranks, so they have settings of their own:

- ``ranks``: trainings of two ranks, poisoned and with random delays.
- ``order_ranks``: trainings whose uses of memory have to be ordered (``support.checked_ranks``).
- ``tests_ranks``: the tests of lane ``net``.

A child that does not end in time has found it, too. ``--only TEXT`` takes the breaks whose name has
the text, ``--listed`` those that the page lists, ``--ranks`` those of lane ``net``, ``--others``
the rest, ``--settings A B`` only some settings, and ``--say`` what was found. Exits with 1 if no
setting finds a break.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import NAME, native
from foreign.lanes import ForeignBackend
from scratch import free_port
from support import ordered_ranks
from support.broken_waits import LISTED, RANKS, Break, every_other
from support.checker import UnorderedError
from support.cuda import stand_in
from support.lane_kinds import lanes_of
from support.lanes import MEMORY_BYTES, Program
from support.models import Outcome, Recipe, assert_same
from support.ordered_runs import RUNS, everything
from support.streams import FakeCuda

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.lanes import EmulatedDevice, EmulatedLanes, Lanes
from lightning_hetero.lanes.backends import BACKENDS
from lightning_hetero.lanes.streams import StreamLanes
from lightning_hetero.runtime.activations import block as activations

PATIENCE_S = 120.0
SEEDS = (1, 2)


def emulated(expected: dict[str, Outcome], folder: Path) -> None:
    _values("emulated", lambda seed: EmulatedLanes(EmulatedDevice(MEMORY_BYTES, seed=seed), poison=True), expected, folder)


def delays(expected: dict[str, Outcome], folder: Path) -> None:
    def make(seed: int) -> Lanes:
        return StreamLanes("cpu", backend=FakeCuda(seed=seed), memory_bytes=MEMORY_BYTES, staging_bytes=1024, poison=True)

    _values("streams", make, expected, folder)


def _values(kind: str, make: Callable[[int], Lanes], expected: dict[str, Outcome], folder: Path) -> None:
    os.environ["LIGHTNING_HETERO_POISON"] = "1"
    for seed in SEEDS:
        _check_program(make(seed), seed)
    for name, one in RUNS.items():
        with lanes_of(kind):
            assert_same(one.train(folder / name), expected[name])


def _check_program(lanes: Lanes, seed: int) -> None:
    program = Program(lanes, seed)
    program.run(40)
    assert program.equal(), "a program has other results"
    lanes.close()


def order(expected: dict[str, Outcome], folder: Path) -> None:
    everything(folder)


def tests(expected: dict[str, Outcome], folder: Path) -> None:
    _passes("test_lanes.py", "test_lanes_streams.py", "test_lane_net.py")


def _passes(*names: str) -> None:
    files = [str(Path(__file__).parent / "unit" / name) for name in names]
    code = pytest.main(["-q", "-x", "-n0", "--timeout=30", "-p", "no:cacheprovider", *files])
    assert code == 0, "a test fails"


def foreign(expected: dict[str, Outcome], folder: Path) -> None:
    native()
    native().set_delay(0, 200)
    row = BACKENDS[NAME] = ForeignBackend(NAME)
    activations.SMALL_BYTES = 64  # the models are small, and what they save shall leave
    os.environ["LIGHTNING_HETERO_POISON"] = "1"
    for seed in SEEDS:
        lanes = StreamLanes(f"{NAME}:0", backend=row, memory_bytes=MEMORY_BYTES, staging_bytes=1024, poison=True)
        _check_program(lanes, seed)
    for name, one in RUNS.items():
        options = one.options | ({"disk_path": folder / name / "store"} if one.kept else {})
        strategy = HeteroOffloadStrategy(one.plan, device_memory="4MiB", **options)
        got = one.trained_by(strategy, folder / name, without_dropout(one.recipe), accelerator=stand_in(NAME), devices=1)
        assert_same(got, expected[f"{name}, without dropout"])


def without_dropout(recipe: Recipe) -> Recipe:
    """The foreign device draws other numbers than the host."""
    return replace(recipe, shape=replace(recipe.shape, dropout=0.0))


def ranks(expected: dict[str, Outcome], folder: Path) -> None:
    _ranks(folder, "is_as_in_one_process")


def order_ranks(expected: dict[str, Outcome], folder: Path) -> None:
    _ranks(folder, "is_ordered", "is_ordered_on_disk")


def _ranks(folder: Path, *scenarios: str) -> None:
    """Two ranks, which are forks of this process, so that they have its break."""
    context, port = multiprocessing.get_context("fork"), free_port()
    ends = [context.Pipe(duplex=False) for _ in range(2)]
    children = [
        context.Process(target=_rank, args=(rank, port, scenarios, folder, ends[rank][1]), daemon=False) for rank in range(2)
    ]  # fmt: skip
    try:
        for child in children:
            child.start()
        said = [here.recv() if here.poll(0.4 * PATIENCE_S) else "does not end" for here, _ in ends]
    finally:
        for child in children:
            child.kill()
            child.join()
    unordered = [one for one in said if one.startswith(UnorderedError.__name__)]
    if unordered:
        raise UnorderedError(unordered[0])
    assert not any(said), said


def _rank(number: int, port: int, scenarios: Sequence[str], folder: Path, said: Any) -> None:
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        "LIGHTNING_HETERO_POISON": str(int(scenarios[0] not in vars(ordered_ranks))),
    }  # fmt: skip
    found = ""
    try:
        for scenario in scenarios:
            module = ordered_ranks if scenario in vars(ordered_ranks) else importlib.import_module("support.shared_model")
            vars(module)[scenario](folder)
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"
    said.send(found)
    os._exit(0)


def tests_ranks(expected: dict[str, Outcome], folder: Path) -> None:
    _passes("test_lane_net.py")


SETTINGS = {setting.__name__: setting for setting in (emulated, delays, order, foreign, tests)}
OF_RANKS = {setting.__name__: setting for setting in (ranks, order_ranks, tests_ranks)}


def attempt(broken: Break | None, setting: Any, expected: dict[str, Outcome], said: Any) -> None:
    """In a child: tells the parent what was found."""
    found = ""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, ExitStack() as stack:
        stack.enter_context(redirect_stdout(nowhere))
        stack.enter_context(redirect_stderr(nowhere))
        if broken is not None:
            stack.enter_context(broken.made())
        try:
            setting(expected, Path(folder))
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        said.send(found)
    os._exit(0)


def finds(broken: Break | None, setting: Any, expected: dict[str, Outcome]) -> str:
    """What a setting finds; empty if nothing."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=attempt, args=(broken, setting, expected, there))  # it may have children
    child.start()
    there.close()
    try:
        return str(here.recv()) if here.poll(PATIENCE_S) else "does not end"
    except EOFError:
        return "dies"
    finally:
        child.kill()
        child.join()


def references(folder: Path) -> dict[str, Outcome]:
    """What the trainings end with. A child makes them: after a backward, torch's engine knows no
    device that comes later.
    """

    def make() -> None:
        found = {name: one.trained_by("auto", folder) for name, one in RUNS.items()}
        plain = {
            f"{name}, without dropout": one.trained_by("auto", folder, without_dropout(one.recipe)) for name, one in RUNS.items()
        }
        found |= plain
        torch.save(found, folder / "expected")

    child = multiprocessing.get_context("fork").Process(target=make)
    child.start()
    child.join()
    found: dict[str, Outcome] = torch.load(folder / "expected", weights_only=False)
    return found


def word(setting: str, said: str) -> str:
    """The table's word for what was found."""
    is_other = setting.startswith("order") and not said.startswith("UnorderedError")
    return "missed" if not said else "fails" if is_other else "found"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--settings", nargs="*", choices=[*SETTINGS, *OF_RANKS])
    parser.add_argument("--listed", action="store_true")
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--say", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    every = not (options.listed or options.ranks or options.others)
    of_one = [*(LISTED if every or options.listed else ()), *(every_other() if every or options.others else ())]
    groups = ((of_one, SETTINGS), (RANKS if every or options.ranks else (), OF_RANKS))
    missed = 0
    for breaks, settings in groups:
        chosen = [name for name in settings if not options.settings or name in options.settings]
        if breaks := [broken for broken in breaks if options.only in broken.name]:
            missed += rows(breaks, {name: settings[name] for name in chosen}, say=options.say)
    return int(missed > 0)


def rows(breaks: Sequence[Break], settings: dict[str, Any], *, say: bool) -> int:
    """Prints a table; returns how many breaks nothing finds."""
    expected: dict[str, Outcome] = {}
    if settings.keys() & SETTINGS.keys():
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            expected = references(Path(folder))
    print(f"| Broken | {' | '.join(settings)} |\n|---|{'---|' * len(settings)}", flush=True)
    missed = 0
    for broken in breaks:
        with broken.made():  # it can be made
            pass
    for name, setting in settings.items():
        whole = finds(None, setting, expected)
        assert not whole, f"{name} finds something though nothing is broken: {whole}"
    for broken in breaks:
        row = {name: finds(broken, setting, expected) for name, setting in settings.items()}
        print(f"| {broken.name} | {' | '.join(word(name, said) for name, said in row.items())} |", flush=True)
        if say:
            print("\n".join(f"    {name}: {' '.join(said.split())[:300]}" for name, said in row.items() if said), flush=True)
        missed += not any(row.values())
    return missed


if __name__ == "__main__":
    sys.exit(main())
