"""An extension of griffe: roles in docstrings become links of the API's page, or code.

Docstrings name other objects by Sphinx's roles, such as :class:`~lightning_hetero.Plan`, and the
Markdown of the site does not know these. What has an entry on the page becomes a link.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import griffe

API = Path(__file__).parents[1] / "docs" / "api.md"
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`([^`]+)`")
ENTRY = re.compile(r"^::: ([\w.]+)(?:\n    options:\n      heading: (\w+)$)?", re.MULTILINE)


def _entries() -> dict[str, tuple[str, str]]:
    """Where the page has an object, and under which heading; by last name and by heading."""
    found = {}
    for path, heading in ENTRY.findall(API.read_text(encoding="utf-8")):
        last = path.rpartition(".")[2]
        found |= dict.fromkeys(filter(None, (last, heading)), (path, heading or last))
    return found


class DocstringRoles(griffe.Extension):
    """Rewrites the docstrings of a package once it is loaded."""

    def __init__(self) -> None:
        self._entries = _entries()

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrites all of them."""
        todo: list[griffe.Object | griffe.Alias] = [pkg]
        while todo:
            obj = todo.pop()
            if obj.is_alias:
                continue
            if obj.docstring is not None:
                obj.docstring.value = ROLE.sub(lambda role, obj=obj: self._written(role[1], obj), obj.docstring.value)
            todo += obj.members.values()

    def _written(self, name: str, obj: griffe.Object | griffe.Alias) -> str:
        """A link, or code if the page lacks the object.

        Args:
            name: As the role has it; with ``~`` only the last name is shown.
            obj: The docstring's object, whose scope the name is in.
        """
        path = name.lstrip("~.")
        shown = path.rpartition(".")[2] if name[0] in "~." else path
        if path.rpartition(".")[2] in self._entries:
            path, shown = self._entries[path.rpartition(".")[2]]
        else:
            with suppress(griffe.NameResolutionError):  # a name of another package
                path = obj.resolve(path)
        return f'<autoref optional identifier="{path}"><code>{shown}</code></autoref>'
