"""The README's figures are what its script prints."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import readme

TEXT = readme.README.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def between(name: str) -> str:
    (found,) = re.findall(rf"<!-- {name}: benchmarks/readme\.py -->\n(.*?)\n<!-- end of {name} -->", TEXT, re.DOTALL)
    return str(found)


def assert_alike(shown: str, made: str) -> None:
    """The same words, and figures within 5 %: a search may end with another plan as good."""
    figure = r"\d[\d,]*(?:\.\d+)?"
    assert re.split(figure, shown) == re.split(figure, made)
    figures = [[float(found.replace(",", "")) for found in re.findall(figure, text)] for text in (shown, made)]
    assert figures[0] == pytest.approx(figures[1], rel=0.05)


def test_the_table_of_models_and_machines_is_what_plan_predicts() -> None:
    """Nine searches take some seconds: a README is read by more people than any other page."""
    assert_alike(between("table"), readme.table())


def test_the_shortened_commands_print_what_is_shown() -> None:
    assert_alike(between("cases"), readme.cases())


def test_the_picture_is_drawn_from_the_measured_file() -> None:
    drawn = readme.picture()
    assert readme.PICTURE.read_text(encoding="utf-8") == drawn
    said: list[str] = []
    parser = HTMLParser()
    parser.handle_data = said.append  # type: ignore[method-assign]
    parser.feed(drawn)
    assert {"15.2 s", "19.9 s", "47.8 s"} <= set(said)


def test_a_readme_without_the_places_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for 'table'"):
        readme.written("# another", {"table": ""}, "benchmarks/readme.py")
    assert readme.written(TEXT, {"table": between("table")}, "benchmarks/readme.py") == TEXT


def test_same_bits_says_against_what_in_the_same_sentence() -> None:
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    sentences = re.split(r"(?<=[.:])\s", " ".join(prose.split()))
    claims = [s for s in sentences if re.search(r"same bits|bitwise|bit for bit", s)]
    assert claims
    for claim in claims:
        assert re.search(r"fused=True|slow reference|ckpt_path", claim), claim
