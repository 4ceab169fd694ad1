"""Debian's chromium, driven by selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def needed() -> tuple[str, str]:
    """The browser and its driver; skips the test where one of them, or selenium, is missing."""
    pytest.importorskip("selenium", reason="selenium is not installed: no browser is driven")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no chromium with chromedriver: apt-get install chromium chromium-driver")
    return browser, driver


@contextmanager
def opened(page: Path, *, dark: bool = False, width: int = 1200, height: int = 1000, is_phone: bool = False) -> Iterator[Any]:
    """A page in a browser without network."""
    browser, driver = needed()
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = browser
    # As root there is no sandbox, and containers have a small /dev/shm.
    arguments = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--window-size={width},{height}")
    for argument in arguments:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = webdriver.Chrome(options=options, service=Service(driver))
    try:
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        window.get(page.as_uri())
        yield window
    finally:
        window.quit()
