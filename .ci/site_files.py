"""A hook of mkdocs: links of pages to files outside of docs/ lead to copies of them in the site.

Pages link to examples, results and source by their place in the repository. Files that such links
name become part of the site below ``repository/``; a folder has no page, so its link becomes text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)]*)?\)")


def _outside(link: str, page: Path) -> Path | None:
    """The file or folder of the repository that a link leads to, unless it is a page."""
    if "://" in link:
        return None
    target = (page.parent / link).resolve()
    is_ours = target.is_relative_to(DOCS) and target.suffix in (".md", ".png", ".svg")
    return target if not is_ours and target.is_relative_to(ROOT) and target.exists() else None


def on_files(files: Files, config: Any) -> Files:
    """Adds the files that pages link to."""
    found = set()
    for page in DOCS.rglob("*.md"):
        for _, link, _ in LINK.findall(page.read_text(encoding="utf-8")):
            if (target := _outside(link, page)) is not None and target.is_file():
                found.add(target)
    for target in sorted(found):
        # A page of its own would need a place in the navigation and links of its own.
        name = f"repository/{target.relative_to(ROOT)}" + (
            ".txt" if target.suffix in (".md", ".py", ".yaml", ".ipynb", ".cpp") else ""
        )
        files.append(File.generated(config, name, content=target.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites the links."""
    source = Path(page.file.abs_src_path)

    def rewritten(match: re.Match[str]) -> str:
        target = _outside(match[2], source)
        if target is None:
            return match[0]
        if target.is_dir():
            return match[1]
        up = "../" * (len(source.relative_to(DOCS).parts) - 1)
        name = next(f.src_uri for f in files if f.src_uri.startswith(f"repository/{target.relative_to(ROOT)}"))
        return f"[{match[1]}]({up}{name})"

    return LINK.sub(rewritten, markdown)
