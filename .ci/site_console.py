"""A hook of mkdocs: in ``console`` blocks only lines that begin with ``$`` and a space are commands.

Pygments also takes ``#`` for a prompt, that of root, and our commands print lines that begin so.
"""

from __future__ import annotations

import re
from typing import Any

from pygments.lexers.shell import BashSessionLexer


def on_config(config: Any) -> None:
    """Sets the prompt for all pages."""
    BashSessionLexer._ps1rgx = re.compile(r"^(\$ )(.*\n?)")
