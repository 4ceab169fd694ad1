"""`profile` and `doctor`: what the machine is and what is wrong with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.cli import HARDWARE, invoke, parsed

from lightning_hetero.cli import doctor, profile, system
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.units import GIB, MIB

# ---- profile -------------------------------------------------------------------------------------


def test_profile_shows_every_figure_with_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def measure(**options: Any) -> HardwareProfile:
        asked.append(options)
        return HARDWARE

    monkeypatch.setattr("lightning_hetero.profiling.hardware.measure", measure)
    text = invoke("profile", "--path", tmp_path, "--refresh", "--out", tmp_path / "here.json").stdout
    assert HardwareProfile.load(tmp_path / "here.json") == HARDWARE
    assert "measured on a Tuesday" in text
    assert "compute beside update" in text
    assert HardwareProfile.from_json(json.dumps(parsed("profile"))) == HARDWARE
    assert [(a["path"], a["refresh"]) for a in asked] == [(tmp_path, True), (None, False)]


def test_figures_have_their_units() -> None:
    rows = {name: value for name, value, _ in profile.rows(HARDWARE)}
    assert rows["device memory"] == "2.0 GiB"
    assert rows["disk read"] == "1.9 GiB/s"
    assert rows["cpu update"] == "1.00 Gparams/s"
    assert rows["device"] == "10.0 TFLOP/s"
    assert rows["collective"] == "none"
    assert rows["disk duplex"] == "no"
    assert rows["compute beside update"] == "1.25 x as long"


def test_without_a_machine_the_plan_is_for_this_one(monkeypatch: pytest.MonkeyPatch, profiles: list[str]) -> None:
    monkeypatch.setattr("lightning_hetero.profiling.hardware.measure", lambda: HARDWARE)
    here, named = (parsed("plan", *options, "--planner", "zero_offload") for options in (profiles[:2], profiles))
    assert here["predicted"] == named["predicted"]


# ---- doctor --------------------------------------------------------------------------------------


def test_doctor_finds_nothing_wrong_with_a_good_place(tmp_path: Path) -> None:
    report = doctor.examine(tmp_path)
    topics = {"versions", "processor", "native_library", "memory", "huge_pages", "torch", "device", "disk"}
    assert set(report.facts) == topics
    got = parsed("doctor", "--path", tmp_path, code=1 if report.problems else 0)
    assert topics | {"ok", "problems", "notes"} == set(got)
    assert got["ok"] == (not got["problems"])
    assert got["native_library"]["disk_io"] in ("io_uring", "pool")
    assert got["native_library"]["disk_io_reason"]
    assert got["memory"]["total_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert got["disk"]["path"] == str(tmp_path)
    assert got["disk"]["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
    text = invoke("doctor", "--path", tmp_path, code=1 if report.problems else 0).stdout
    assert "instruction set" in text


@pytest.mark.parametrize(("path", "problem"), [("/dev/shm", "host memory"), ("/nowhere", "cannot be looked at")])
def test_doctor_names_the_problem_of_a_path(path: str, problem: str) -> None:
    got = parsed("doctor", "--path", path, code=1)
    assert any(problem in text and path in text for text in got["problems"])
    assert "problem" in invoke("doctor", "--path", path, code=1).stdout


def test_doctor_names_a_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lightning_hetero._native import library

    monkeypatch.setenv(library.LIBRARY_ENV, str(tmp_path / "missing.so"))
    library.functions.cache_clear()
    try:
        got = parsed("doctor", "--path", tmp_path, code=1)
    finally:
        library.functions.cache_clear()
    assert any("missing.so cannot be used" in text for text in got["problems"])


def test_doctor_says_why_io_uring_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lightning_hetero.errors import UnsupportedError

    def backend(wanted: str) -> str:
        if wanted == "io_uring":
            raise UnsupportedError("io_uring_setup: Operation not permitted (a seccomp profile)")
        return "pool"

    monkeypatch.setattr(doctor, "_io_backend", backend)
    report = doctor.examine(tmp_path)
    assert report.facts["native_library"]["disk_io"] == "pool"
    assert "seccomp" in report.facts["native_library"]["disk_io_reason"]
    assert any("threads instead of io_uring" in note for note in report.notes)


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_doctor_warns_of_a_control_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lightning_hetero.store.capacity.available_memory_bytes", lambda: GIB)
    monkeypatch.setattr("lightning_hetero.store.capacity.total_memory_bytes", lambda: 2 * GIB)
    report = doctor.examine(tmp_path)
    assert report.facts["memory"]["control_group_limit_bytes"] == 2 * GIB
    assert any(note.startswith("A control group leaves 1.0 GiB of the ") for note in report.notes)


def test_huge_pages_are_read(tmp_path: Path) -> None:
    files = {
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "proc/meminfo": "MemTotal: 100 kB\nHugePages_Total:       8\nHugePages_Free:        5\nHugepagesize:       2048 kB\n",
    }
    assert system.huge_pages(_write(tmp_path, files)) == {
        "transparent": "madvise",
        "page_bytes": 2 * MIB,
        "reserved": 8,
        "free": 5,
    }
    assert system.huge_pages(tmp_path / "nothing")["transparent"] == "unavailable"


def test_direct_io_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    error = system.direct_io_error(tmp_path)
    assert isinstance(error, str)
    assert list(tmp_path.iterdir()) == []
    assert system.direct_io_error(tmp_path / "missing")
