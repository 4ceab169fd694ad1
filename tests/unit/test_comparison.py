"""What the pages show of the comparison with other libraries is what its results say."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from peers import publish
from peers.entrants import ENTRANTS

RESULTS = sorted((publish.ROOT / "benchmarks" / "results").glob("peers_*.json"))


def found(seconds: list[float], losses: list[float], difference: float, **more: Any) -> dict[str, Any]:
    return {
        "seconds_per_step": seconds[0], "seconds_of_rounds": seconds, "tokens_per_s": 128 / seconds[0], "bytes_per_step": 0,
        "disk_bytes": 0, "peak_rss_bytes": 2_345_000_000, "losses": losses, "loss_difference": difference, **more,
    }  # fmt: skip


def contestant(name: str, **more: Any) -> dict[str, Any]:
    entrant = ENTRANTS[name]
    return {"title": entrant.title, "keeps": entrant.keeps, "lines_changed": entrant.lines_changed, "version": "1.2", **more}


RESULT: dict[str, Any] = {
    "benchmark": "peers", "model": "gpt2-124m", "parameters": 124e6, "batch": 1, "seq": 128, "steps": 2, "rounds": 2, "threads": 2,
    "torch": "2.13.0", "machine": "a machine with two cores, 24 GiB and a virtual disk, idle", "taken": "2026-01-02",
    "contestants": {
        "plain": contestant("plain", set_up={"with_compiling_s": 1.4, "without_compiling_s": 0.6}),
        "disk": contestant("disk"),
        "zero_infinity": contestant("zero_infinity", skipped="pip wheel: no such package"),
        "torchao": contestant("torchao"),
    },
    "measured": {
        "32-true": {
            "plain": found([1.0, 1.5], [11.0, 10.5, 10.25], 0.0),
            "disk": found([1.25, 1.2], [11.0, 10.5], 0.0, disk_bytes=3_000_000_000, bytes_per_step=2_500_000_000),
            "torchao": {"skipped": "AssertionError: only CUDA"},
        },
        "bf16-true": {
            "plain": found([0.5], [11.0, 10.0], 0.0), "disk": {"skipped": "killed"},
            "torchao": {"skipped": "AssertionError: only CUDA"},
        },
    },
}  # fmt: skip


def cells(part: str, first: str) -> list[str]:
    (row,) = [line for line in part.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_tables_show_what_was_measured_and_who_was_not() -> None:
    pages = publish.parts_of(RESULT, "peers_x.json")
    page, readme = pages[publish.PAGE], pages[publish.README]
    fp32, bf16 = page["figures"].split("### bf16")
    ours = ["lightning-hetero, `disk`", "disk", "**1.25** (1.20 to 1.25)", "102", "2.35 GB", "3.00 GB", "2.50 GB", "10.50000", "0"]
    assert cells(fp32, "lightning-hetero, `disk`") == ours
    assert "loss of step 2" in fp32
    assert "torchao" not in fp32
    assert "disk" not in cells(bf16, "plain Lightning")
    assert "lightning-hetero" not in bf16
    assert cells(page["missing"], ENTRANTS["zero_infinity"].title)[1] == "`pip wheel: no such package`"
    assert cells(page["missing"], ENTRANTS["disk"].title)[1] == "`killed (in bf16 only)`"
    assert cells(page["missing"], ENTRANTS["torchao"].title)[1] == "`AssertionError: only CUDA`"
    assert cells(page["set-up"], "plain Lightning") == ["plain Lightning", "1.2", "0", "1 s", "1 s"]
    assert ENTRANTS["torchao"].title not in page["set-up"]
    assert cells(readme["measured"], "**lightning-hetero, `disk`**")[1:5] == ["1.25", "", "2.35 GB", ""]
    assert "(../benchmarks/results/peers_x.json)" in page["setting"]
    prose = [line for part in (*page.values(), *readme.values()) for line in part.splitlines() if not line.startswith("|")]
    assert max(map(len, prose)) <= 100


def test_the_picture_has_a_bar_for_each_and_marks_ours() -> None:
    said: list[str] = []
    widths: list[tuple[str, float]] = []

    class Reader(HTMLParser):
        def handle_data(self, data: str) -> None:
            said.append(data)

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "rect":
                given = dict(attrs)
                widths.append((str(given["class"]), float(str(given["width"]))))

    Reader().feed(publish.picture(RESULT))
    assert {"fp32", "bf16", "1.00 s", "1.25 s", "0.50 s"} <= set(said)
    assert [of_bar for of_bar, _ in widths] == ["t", "o", "t"]
    assert widths[0][1] == pytest.approx(2 * widths[2][1])
    assert widths[1][1] == max(width for _, width in widths)


def test_one_command_writes_all_pages(tmp_path: Path) -> None:
    for page in (publish.PAGE, publish.README):
        copy = tmp_path / page.relative_to(publish.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "docs" / "images").mkdir()
    result = tmp_path / "peers_x.json"
    result.write_text(json.dumps(RESULT))
    publish.publish(result, root=tmp_path)
    for page, parts in publish.parts_of(RESULT, result.name).items():
        text = (tmp_path / page.relative_to(publish.ROOT)).read_text(encoding="utf-8")
        assert all(part in text for part in parts.values())
    assert (tmp_path / publish.PICTURE.relative_to(publish.ROOT)).read_text() == publish.picture(RESULT)


def test_a_page_without_the_places_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for 'setting'"):
        publish.written("# another", {"setting": ""}, "benchmarks/peers")


@pytest.mark.skipif(not RESULTS, reason="no result in benchmarks/results has been published yet")
def test_the_pages_show_a_result_that_is_in_the_repository() -> None:
    (name,) = set(re.findall(r"\(\.\./benchmarks/results/(peers_\S+\.json)\)", publish.PAGE.read_text(encoding="utf-8")))
    result = json.loads((publish.ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    for page, parts in publish.parts_of(result, name).items():
        text = page.read_text(encoding="utf-8")
        assert publish.written(text, parts, "benchmarks/peers") == text, page
    assert publish.PICTURE.read_text(encoding="utf-8") == publish.picture(result)
