"""Private and replaced names of torch and Lightning: each exists as the table says, and none is missing there."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_hetero
from lightning_hetero.borrowed import TABLE, TORCH, Borrowed

FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
PACKAGE = Path(lightning_hetero.__file__).parent


def resolved(path: str) -> Any:
    """What a dotted path names: a module, or an attribute below one."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def places(row: Borrowed) -> Iterator[Any]:
    kind, colon, path = row.path.partition(":")
    if not colon:
        yield resolved(row.path)
        return
    for namespace, fabric in FABRIC.items():
        if kind == "trainer":
            found: Any = importlib.import_module(namespace).Trainer(
                accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, barebones=False
            )
            for name in path.split("."):
                found = getattr(found, name)
            yield found
        else:
            yield resolved(f"{namespace if kind == 'lightning' else fabric}.{path}")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.path)
def test_what_is_borrowed_is_there_and_takes_what_the_table_says(row: Borrowed) -> None:
    for found in places(row):
        if row.takes is not None:
            function = getattr(found, "__func__", found)
            assert tuple(inspect.signature(function).parameters) == row.takes


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an expression that is that; else nothing."""
    if isinstance(node, ast.Attribute):
        front = dotted(node.value)
        return f"{front}.{node.attr}" if front else ""
    return node.id if isinstance(node, ast.Name) else ""


def private_names_of_torch(tree: ast.AST) -> set[str]:
    """Dotted paths of torch that have a private part."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and (path := dotted(node)).startswith("torch."):
            found.add(path)
    return {path for path in found if any(map(private, path.split("."))) and not path.startswith("torch.ops.")}


def test_every_private_name_of_torch_that_the_package_uses_is_in_the_table() -> None:
    known = {row.path for row in TABLE}
    used: dict[str, str] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for path in private_names_of_torch(ast.parse(file.read_text(encoding="utf-8"))):
            # a.b of what is known as a, and what leads to a name that is known
            if not any(path == name or path.startswith(f"{name}.") or name.startswith(f"{path}.") for name in known):
                used[path] = str(file.relative_to(PACKAGE))
    assert used == {}


def test_every_private_name_of_torch_in_the_table_is_used() -> None:
    used: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        used |= private_names_of_torch(ast.parse(file.read_text(encoding="utf-8")))
    assert [row.path for row in TORCH if not any(path == row.path or path.startswith(f"{row.path}.") for path in used)] == []


def test_a_private_name_is_found_however_it_is_written() -> None:
    source = "from torch._a import b\nimport torch\ntorch._C._d()\nx = torch.e._f.g\ntorch.nn.h\nfrom torch.i import _j"
    assert private_names_of_torch(ast.parse(source)) >= {"torch._a.b", "torch._C._d", "torch.e._f.g", "torch.i._j"}
    assert "torch.nn.h" not in private_names_of_torch(ast.parse(source))
