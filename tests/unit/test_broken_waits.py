"""The waits that ``tests/broken_waits.py`` breaks, and what its page says of them."""

from __future__ import annotations

from pathlib import Path

from support.broken_waits import LISTED, RANKS, every_other

PAGE = Path(__file__).resolve().parents[2] / "docs" / "devices.md"
EVERY = (*LISTED, *every_other(), *RANKS)


def rows() -> dict[str, list[str]]:
    """The page's tables of broken waits: what each setting says, by the break's name."""
    lines = PAGE.read_text(encoding="utf-8").split("\n## Waits\n")[1].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return {name.strip("`"): words for name, *words in cells if name != "Broken"}


def test_the_page_has_every_break_and_each_is_found() -> None:
    assert list(rows()) == [one.name for one in EVERY]
    assert not [name for name, words in rows().items() if "found" not in words]
    assert {word for words in rows().values() for word in words} <= {"found", "missed", "fails"}


def test_breaks_of_lane_net_can_be_made() -> None:
    for one in RANKS:  # those of devices are made in ``tests/integration/test_order_of_uses.py``
        with one.made():
            pass
