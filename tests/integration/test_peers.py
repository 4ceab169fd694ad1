"""The comparison with other libraries runs, in a tiny setting, with those that are installed here.
Its times mean nothing here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from contestants import Contestant, ProcessFailedError
from peers.entrants import ENTRANTS, Entrant, code
from support.contest import dies, fails, tells
from support.scripts import output_of, result_of

COMMAND = Path(__file__).parents[2] / "benchmarks" / "peers" / "__main__.py"
TINY = ("--no-install", "--model", "tiny", "--seq", "16", "--rounds", "1", "--steps", "2")
NATIVE = ("plain", "host", "disk", "fsdp2")


def compared(tmp_path: Path, *arguments: str) -> Any:
    (tmp_path / "disk").mkdir()
    output = output_of(COMMAND, *TINY, "--dir", tmp_path / "disk", *arguments, cwd=tmp_path)
    assert list((tmp_path / "disk").iterdir()) == []
    return result_of(output)


def test_contestants_train_the_same_and_those_that_are_not_installed_are_named(tmp_path: Path) -> None:
    save = tmp_path / "result.json"
    result = compared(tmp_path, "--precision", "32-true", "--save", str(save))
    assert json.loads(save.read_text()) == result
    assert result["contestants"].keys() == ENTRANTS.keys()
    absent = {name for name, entrant in ENTRANTS.items() if not entrant.is_installed}
    for name in absent:
        assert result["contestants"][name]["skipped"] == f"{ENTRANTS[name].module} is not installed here"
    measured, speedups = result["measured"]["32-true"], result["speedups"]["32-true"]
    assert speedups["host_speedup_vs_fsdp2"] == measured["fsdp2"]["seconds_per_step"] / measured["host"]["seconds_per_step"]
    assert [speedups["disk_speedup_vs_zero_infinity"], speedups["host_speedup_vs_torchao"]].count(None) == len(
        absent & {"zero_infinity", "torchao"}
    )
    assert measured.keys() == ENTRANTS.keys() - absent
    ran = {name: found for name, found in measured.items() if "skipped" not in found}
    assert ran.keys() >= set(NATIVE)
    for name, found in ran.items():
        assert found["seconds_per_step"] > 0, name
        assert found["tokens_per_s"] == pytest.approx(16 / found["seconds_per_step"]), name
        assert found["peak_rss_bytes"] > 0, name
        assert len(found["losses"]) >= 6, "two rounds of three steps"
    assert measured["plain"]["losses"][0] == pytest.approx(5.55, abs=0.3), "an untrained model is as good as guessing: ln 257"
    assert [measured[name]["loss_difference"] for name in NATIVE] == [0, 0, 0, 0]
    assert measured["plain"]["disk_bytes"] == 0
    assert measured["disk"]["disk_bytes"] >= 8 * 3 * 64 * 64, "both moments of some of the weights, at least"


def test_ours_begins_and_trains_in_16_bit_as_fsdp2_with_full_weights_does(tmp_path: Path) -> None:
    result = compared(tmp_path, "--precision", "bf16-true", "--contestants", *NATIVE)
    found = result["measured"]["bf16-true"]
    assert len({found[name]["losses"][0] for name in NATIVE}) == 1, "all begin with the same weights"
    assert found["host"]["losses"] == found["disk"]["losses"]
    assert found["fsdp2"]["loss_difference"] < 0.05


def test_lines_are_counted_without_comments_and_what_the_harness_hands_over() -> None:
    assert ENTRANTS["plain"].lines_changed == 0
    assert ENTRANTS["host"].lines_changed == ENTRANTS["disk"].lines_changed == 2
    assert ENTRANTS["bitsandbytes"].lines_changed == 2
    assert Entrant(title="", program="with_torch", config={"a": 1, "b": {"c": 2, "d": 3}}).lines_changed == 3
    programs = {entrant.program for entrant in ENTRANTS.values()}
    for name in programs:
        lines = code(COMMAND.parent / "programs" / f"{name}.py")
        assert lines, name
        assert not [line for line in lines if line.startswith(("#", "def train", '"""'))], name


def test_a_contestant_that_fails_says_the_last_line_of_its_error() -> None:
    with pytest.raises(ProcessFailedError, match=r"^last line$"):
        Contestant(fails)
    with pytest.raises(ProcessFailedError, match="exit code -9"):
        Contestant(dies)


def test_a_process_with_variables_of_its_own_starts_with_them() -> None:
    with Contestant(tells, "PEERS_TEST", environment={"PEERS_TEST": "huge"}) as process:
        assert process.finish()["found"] == "huge"
