"""A hook of mkdocs for ``console`` blocks: which lines are commands, and what the button copies.

Only lines that begin with ``$`` and a space are commands. Pygments also takes ``#`` for a prompt,
that of root, and our commands print lines that begin so.
"""

from __future__ import annotations

import re
from html import escape, unescape
from typing import Any

from pygments.lexers.shell import BashSessionLexer

BLOCK = re.compile(r'<div class="highlight">(<pre>.*?</pre></div>)', re.DOTALL)
PROMPT = '<span class="gp">$ </span>'


def on_config(config: Any) -> None:
    """Sets the prompt for all pages."""
    BashSessionLexer._ps1rgx = re.compile(r"^(\$ )(.*\n?)")


def on_page_content(html: str, **_: Any) -> str:
    """Gives the theme's button the commands alone, without prompts and output."""

    def marked(match: re.Match[str]) -> str:
        if PROMPT not in match[0]:
            return match[0]
        lines = unescape(re.sub(r"<[^>]+>", "", match[0])).splitlines()
        commands = "\n".join(line.removeprefix("$ ") for line in lines if line.startswith("$ ") and line != "$ echo $?")
        return f'<div data-copy="{escape(commands)}" class="highlight">{match[1]}'

    return BLOCK.sub(marked, html)
