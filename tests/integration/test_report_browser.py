"""The report in a browser: clicked and read, in light and dark, on a desk and on a phone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.browser import needed, opened
from support.cli import HARDWARE, MODEL, invoke
from support.models import LitModel, Recipe, data, quiet_trainer

from lightning_hetero import HeteroOffloadStrategy, TraceOnDemand


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that was planned: it has everything that a page can have."""
    needed()
    from support.machines import HARDWARE as HERE

    folder = tmp_path_factory.mktemp("run")
    tracer = TraceOnDemand(folder, steps=2, at_step=5)
    trainer = quiet_trainer(
        strategy=HeteroOffloadStrategy(hardware_profile=HERE), callbacks=[tracer], max_steps=8, default_root_dir=folder
    )
    trainer.fit(LitModel(Recipe()), data())
    out = folder / "report.html"
    invoke("report", tracer.written[0], "--out", out)
    return out


@pytest.fixture(scope="module")
def plan_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a plan with three tiers."""
    needed()
    folder = tmp_path_factory.mktemp("plan")
    (folder / "model.json").write_text(MODEL.to_json(), encoding="utf-8")
    (folder / "hardware.json").write_text(HARDWARE.to_json(), encoding="utf-8")
    plan = folder / "plan.json"
    files = ("--model-profile", folder / "model.json", "--hardware-profile", folder / "hardware.json")
    invoke("plan", *files, "--planner", "disk", "--out", plan)
    invoke("report", plan, "--out", folder / "report.html")
    return folder / "report.html"


def found(window: Any, selector: str) -> Any:
    return window.find_element("css selector", selector)


def all_of(window: Any, selector: str) -> list[Any]:
    return list(window.find_elements("css selector", selector))


def test_clicks_show_blocks_tensors_and_ops(page: Path) -> None:
    with opened(page) as window:
        assert [entry for entry in window.get_log("browser") if entry["level"] == "SEVERE"] == []
        cell = found(window, "[data-block='1']")
        cell.click()
        said = found(window, "#block").text
        assert cell.get_attribute("title").split(":")[0] in said
        assert "float32" in said
        assert "on" in cell.get_attribute("class").split()
        bar = max(all_of(window, "#lanes .k"), key=lambda one: one.size["width"])
        bar.click()
        detail = found(window, "#detail").text
        assert detail == bar.get_attribute("data-t")
        assert " from " in detail


def test_tiers_filter_and_the_timeline_zooms_in_its_own_box(plan_page: Path) -> None:
    with opened(plan_page) as window:
        cells = all_of(window, ".cell")
        on_disk = [cell for cell in cells if "t-disk" in cell.get_attribute("class")]
        assert 0 < len(on_disk) < len(cells)
        chip = found(window, "[data-tier=disk]")
        chip.click()
        assert chip.get_attribute("aria-pressed") == "true"
        assert [c for c in cells if "off" not in c.get_attribute("class").split()] == on_disk
        chip.click()
        assert not any("off" in c.get_attribute("class").split() for c in cells)
        before = found(window, "#lanes").size["width"]
        found(window, "[data-zoom='4']").click()
        assert found(window, "#lanes").size["width"] == pytest.approx(4 * before, rel=0.01)
        assert scrolls_sideways(window) is False
        found(window, "details summary").click()
        search = found(window, "#search")
        search.send_keys("layers.3")
        shown = [row.text for row in all_of(window, "#placement tbody tr") if row.is_displayed()]
        assert len(shown) == 1
        assert shown[0].startswith("layers.3")


def scrolls_sideways(window: Any) -> bool:
    return bool(window.execute_script("return document.documentElement.scrollWidth > window.innerWidth"))


@pytest.mark.parametrize("which", ["page", "plan_page"])
def test_a_phone_shows_it_without_sideways_scrolling(which: str, request: pytest.FixtureRequest) -> None:
    with opened(request.getfixturevalue(which), width=390, height=844, is_phone=True) as window:
        assert scrolls_sideways(window) is False
        assert window.execute_script("return getComputedStyle(document.body).fontSize") == "16px"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_its_background(dark: bool, page: Path) -> None:
    """At least 4.5 to 1, as WCAG asks for text."""
    with opened(page, dark=dark) as window:
        pairs = window.execute_script(
            "const see = e => { while (getComputedStyle(e).backgroundColor === 'rgba(0, 0, 0, 0)') e = e.parentElement;"
            " return getComputedStyle(e).backgroundColor; };"
            "return [...document.querySelectorAll('h1,h2,h3,p,dt,dd,li,th,td,figcaption,button,.lane span')]"
            ".filter(e => e.textContent.trim()).map(e => [getComputedStyle(e).color, see(e), e.textContent]);"
        )
    assert pairs
    is_dark = [luminance(back) < 0.2 for _, back, _ in pairs]
    assert all(is_dark) if dark else not any(is_dark)
    for colour, back, text in pairs:
        light, deep = sorted((luminance(colour), luminance(back)), reverse=True)
        assert (light + 0.05) / (deep + 0.05) >= 4.5, (text, colour, back)


def luminance(colour: str) -> float:
    """Source: WCAG 2.2, relative luminance."""
    channels = [float(value) / 255 for value in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_nothing_is_fetched(page: Path) -> None:
    with opened(page) as window:
        events = [json.loads(entry["message"])["message"] for entry in window.get_log("performance")]
    asked = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert asked <= {page.as_uri()}
