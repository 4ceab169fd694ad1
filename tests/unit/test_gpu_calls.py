"""What a call of ``tests/gpu/run`` finds is kept, whatever the GPU does to it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from gpu import calls, preflight
from gpu.calls import Call


def call(out: Path, **options: Any) -> Call:
    given: dict[str, Any] = {
        "call": "tests", "out": out, "before": None, "minutes": 9.0, "device": "emulated", "dir": out,
        "files": ("a.py", "b.py", "c.py"), "file_seconds": 100.0, "cap": "24GiB", "rest": [],
    }  # fmt: skip
    return Call(argparse.Namespace(**given | options))


def saved(out: Path) -> Any:
    return json.loads((out / "result.json").read_text())


def test_a_program_past_its_limit_is_killed_with_what_it_started(tmp_path: Path) -> None:
    child = "import time; time.sleep(100)"
    script = (
        f"import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True); time.sleep(100)"
    )
    begin = time.monotonic()
    status, output = call(tmp_path).run("hangs", sys.executable, "-c", script, limit_s=2.0)
    assert status is None
    assert time.monotonic() - begin < 50
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(output))
        while process.status() != psutil.STATUS_ZOMBIE:  # it has been killed, and goes when the kernel finds time
            assert time.monotonic() - begin < 50
            time.sleep(0.01)


def test_no_program_runs_longer_than_the_call(tmp_path: Path) -> None:
    nearly_over = call(tmp_path, minutes=11 / 60)  # ten seconds are for the results
    assert nearly_over.run("hangs", sys.executable, "-c", "import time; time.sleep(100)", limit_s=1000)[0] is None


def test_a_file_that_hangs_or_fails_hides_nothing_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "preflight": (0, 'noise\n{"system": {"cores": 2}}'),
        "a.py": (None, "..."),
        "b.py": (1, "..F\nFAILED tests/gpu/b.py::test_x - sticky\n1 failed, 2 passed in 3.0s"),
        "c.py": (0, "...\n3 passed, 1 skipped in 2.0s"),
    }
    monkeypatch.setattr(Call, "run", lambda self, name, *words, limit_s: answers[name])
    assert not calls.tests(call(tmp_path))
    found = saved(tmp_path)
    assert found["preflight"] == {"system": {"cores": 2}}
    assert {name: row["outcome"] for name, row in found["tests"].items()} == {
        "a.py": "out of time",
        "b.py": "status 1",
        "c.py": "passed",
    }
    assert found["tests"]["b.py"]["failures"] == ["FAILED tests/gpu/b.py::test_x - sticky"]
    assert found["tests"]["c.py"]["summary"] == "3 passed, 1 skipped in 2.0s"


def test_a_test_that_hangs_says_where_before_its_file_is_out_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def run(self: Call, name: str, *words: object, limit_s: float) -> tuple[int, str]:
        seen.extend(map(str, words))
        return 0, "{}"

    monkeypatch.setattr(Call, "run", run)
    calls.tests(call(tmp_path, files=("a.py",)))
    options = dict(word.split("=") for word in seen if "=" in word)
    assert options["--timeout-method"] == "thread"
    assert float(options["faulthandler_timeout"]) < float(options["--timeout"]) < calls.FILE_S


def test_the_preflight_finds_out_what_the_machine_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it cannot find out here is a reason, and hides nothing of the rest."""
    monkeypatch.setattr(sys, "argv", ["preflight", "--dir", str(tmp_path), "--device", "cpu", "--bytes", str(8 << 20)])
    preflight.main()
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"system", "gpu", "topology", "huge_pages", "numa", "disk", "copies_bytes_per_s", "page_lock", "seconds"}
    assert found["system"]["memlock_bytes"]
    alone = {f"{kind}_{way}" for kind in ("pinned", "pageable") for way in ("h2d", "d2h")}
    together = {"pinned_h2d_and_d2h", "pinned_d2h_and_pageable_h2d"}
    assert found["copies_bytes_per_s"].keys() == alone | together | {"host_to_host", "device_to_device"}
    assert (
        isinstance(found["disk"], str) or {"read_bytes_per_s", "write_bytes_per_s", "free_bytes", "mount"} == found["disk"].keys()
    )
    if not torch.cuda.is_available():
        assert "Error" in found["page_lock"]
    assert not list(tmp_path.iterdir())


def test_files_that_the_time_does_not_reach_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "run", lambda self, name, *words, limit_s: (0, "{}"))
    assert not calls.tests(call(tmp_path, minutes=0.1))
    assert {row["outcome"] for row in saved(tmp_path)["tests"].values()} == {"too late"}


def test_a_call_goes_on_from_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = tmp_path / "1"
    call(earlier).note("preflight", {"cores": 2})
    (earlier / "hardware-24GiB.json").write_text("{}")
    seen: list[str] = []

    def run(self: Call, name: str, *words: object, limit_s: float) -> tuple[int, str]:
        seen.extend(map(str, words))
        return 0, '{"benchmark": "gpu_step"}'

    monkeypatch.setattr(Call, "run", run)
    assert calls.perform(call(tmp_path / "2", call="steps", before=earlier, rest=["--model", "tiny"]))
    assert saved(tmp_path / "2") == {"preflight": {"cores": 2}, "steps": {"benchmark": "gpu_step"}}
    assert (tmp_path / "2" / "hardware-24GiB.json").exists()
    assert seen[-2:] == ["--model", "tiny"]
    assert "auto" not in seen
    assert not calls.perform(call(tmp_path / "2", call="auto", before=tmp_path / "2", wheels=None))  # no profile of a model
    assert saved(tmp_path / "2").keys() == {"preflight", "steps", "auto", "ablations"}


def test_our_planner_is_compared_with_what_was_measured_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"what": "fsdp2", "result": {}}, {"what": "zero_offload", "result": None}, {"what": "peak", "result": 0.1}]
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, lines)))
    seen: list[str] = []

    def run(self: Call, name: str, *words: object, limit_s: float) -> tuple[int, str]:
        seen.extend(map(str, words))
        return 0, "{}"

    monkeypatch.setattr(Call, "run", run)
    calls.perform(call(tmp_path, call="auto", wheels=None))
    begin = seen.index("--only") + 1
    assert seen[begin : seen.index("--profiles")] == ["auto", "peak", "fsdp2"]


def test_a_trial_runs_the_tests_on_a_device_of_their_own(tmp_path: Path) -> None:
    assert call(tmp_path).env["GPU_TESTS_ON"] == "foreign"
    assert "GPU_TESTS_ON" not in call(tmp_path, device="cuda").env


def test_every_file_of_tests_is_in_a_call() -> None:
    assert set(calls.FILES) == {file.name for file in Path(calls.__file__).parent.glob("test_*.py")}


def test_hidden_packages_cannot_be_imported(tmp_path: Path) -> None:
    hiding = call(tmp_path)
    hiding.hide(["colorsys"], tmp_path)
    script = "import importlib.util as u, wave; print(u.find_spec('colorsys'), bool(wave))"
    assert hiding.run("hidden", sys.executable, "-c", script, limit_s=60) == (0, "None True\n")


@pytest.mark.parametrize(("hidden", "names"), [("cvxpy", ["auto"]), ("highspy", [])])
def test_our_planner_needs_highspy_and_no_cvxpy(hidden: str, names: list[str], tmp_path: Path) -> None:
    one = call(tmp_path)
    one.hide([hidden], tmp_path)
    script = (
        "import sys; sys.path.insert(0, 'benchmarks'); import argparse, gpt2, gpu_step, importlib.util; "
        f"assert importlib.util.find_spec({hidden!r}) is None; "
        "args = argparse.Namespace(size=gpt2.SIZES['tiny'], variants=None, plan=None, only=['auto']); "
        "print(sorted(gpu_step.contestants(args)))"
    )
    status, output = one.run("contestants", sys.executable, "-c", script, limit_s=100)
    assert status == 0, output
    assert output.splitlines()[-1] == str(names)
