"""The site in a browser that opens it from a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import browser

SHIM = Path(__file__).parents[2] / "docs" / "javascripts" / "iframe-worker.js"
PAGE = """<body><script src="iframe-worker.js"></script><script>
const worker = new Worker("worker.js");
worker.addEventListener("message", (event) => { document.title += event.data; });
worker.postMessage(1);
worker.postMessage(41);
</script></body>"""


def test_the_search_has_a_worker_without_a_server(tmp_path: Path) -> None:
    pytest.importorskip("selenium", reason="selenium is not installed: no browser is driven")
    from selenium.webdriver.support.ui import WebDriverWait

    shutil.copy(SHIM, tmp_path)
    (tmp_path / "page.html").write_text(PAGE)
    (tmp_path / "worker.js").write_text('self.addEventListener("message", (event) => self.postMessage(`<${event.data + 1}>`));')
    with browser.opened(tmp_path / "page.html") as window:
        WebDriverWait(window, 20).until(lambda _: window.title == "<2><42>")
