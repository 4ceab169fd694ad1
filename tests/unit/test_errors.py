"""Errors that users see have public names."""

from __future__ import annotations

import ast
from pathlib import Path

import lightning_hetero
from lightning_hetero import errors

PACKAGE = Path(lightning_hetero.__file__).parent


def test_no_error_of_this_library_has_a_private_name() -> None:
    known = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.HeteroError)}
    assert "StoreCorruptError" in known
    private = [
        (file.name, found.name)
        for file in PACKAGE.rglob("*.py")
        for found in ast.walk(ast.parse(file.read_text()))
        if isinstance(found, ast.ClassDef) and found.name.startswith("_") and known & {ast.unparse(base) for base in found.bases}
    ]
    assert private == []
