"""The package's modules: no import leads back to where it began, no two files of a room have one
name, and no two public classes of the package.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import lightning_hetero

PACKAGE = Path(lightning_hetero.__file__).parent
WITHOUT_TORCH = ["ir", "lowering", "cost", "sim", "planners", "_native"]
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file())


def modules(root: Path) -> dict[str, Path]:
    """The files of a package by the names under which they are imported."""
    found = {}
    for path in root.rglob("*.py"):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: set[str]) -> set[str]:
    """The modules of the package that a file imports anywhere, inside functions and for type
    checkers too.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {full if (full := f"{node.module}.{name.name}") in known else node.module for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found & known


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that import each other, directly or through others."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = graph[ahead.pop()] - seen
            seen |= new
            ahead += new
        return seen

    reached = {module: reach(module) for module in graph}
    found = {frozenset(m for m in seen if module in reached[m]) for module, seen in reached.items() if module in seen}
    return [set(circle) for circle in found]


@cache
def circles_of_package() -> list[set[str]]:
    known = modules(PACKAGE)
    return circles({name: imports(path, set(known)) - {name} for name, path in known.items()})


@pytest.mark.parametrize("room", ROOMS)
def test_imports_make_no_circle(room: str) -> None:
    prefix = f"{PACKAGE.name}.{room}"
    assert [c for c in circles_of_package() if any(m == prefix or m.startswith(prefix + ".") for m in c)] == []


def test_only_the_table_of_public_names_mentions_parallel_training() -> None:
    """Neither the runtime nor offloading needs to know of it: no import, no name of a module in a
    text.
    """
    below = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("cli", "parallel")]
    mention = re.compile(rf"{PACKAGE.name}\.parallel|\bparallel[./](strategies|pipeline|planner|recovery|elastic|replicas|shares)")
    found = {str(path.relative_to(PACKAGE)) for path in below if mention.search(path.read_text(encoding="utf-8"))}
    assert found == {"strategies/__init__.py"}


def test_a_circle_is_found_inside_functions_and_for_type_checkers(tmp_path: Path) -> None:
    root = tmp_path / "package"
    (root / "room").mkdir(parents=True)
    (root / "room" / "__init__.py").write_text("")
    (root / "room" / "first.py").write_text("def f():\n    from package.room import second\n")
    (root / "room" / "second.py").write_text("if TYPE_CHECKING:\n    from package.third import Third\n")
    (root / "third.py").write_text("import package.room.first\n")
    known = modules(root)
    graph = {name: imports(path, set(known)) for name, path in known.items()}
    assert circles(graph) == [{"package.room.first", "package.room.second", "package.third"}]


@pytest.mark.parametrize("room", ["runtime", "store", "strategies"])
def test_no_two_files_have_one_name(room: str) -> None:
    names = Counter(path.name for path in (PACKAGE / room).rglob("*.py") if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


@cache
def classes_and_asserts() -> tuple[dict[str, list[str]], list[str]]:
    """The files of each public class, and the places of asserts that something is not ``None``."""
    classes: dict[str, list[str]] = {}
    asserts = []
    for path in PACKAGE.rglob("*.py"):
        where = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(where)
            elif isinstance(node, ast.Assert) and any(isinstance(inner, ast.IsNot) for inner in ast.walk(node.test)):
                asserts.append(f"{where}:{node.lineno}")
    return classes, asserts


def test_no_two_public_classes_have_one_name() -> None:
    classes, _ = classes_and_asserts()
    assert {name: paths for name, paths in classes.items() if len(paths) > 1} == {}


def test_files_stay_short() -> None:
    """Below 600 lines, and those of tests below 500: what outgrows that holds a second idea."""
    root = Path(__file__).parents[2]
    lines = {
        str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines())
        for folder in ("lightning_hetero", "tests", "benchmarks", "examples", "native")
        for path in (root / folder).rglob("*.*")
        if path.suffix in (".py", ".cc", ".h")
    }
    assert {path: count for path, count in lines.items() if count >= (500 if path.startswith("tests") else 600)} == {}


def test_few_asserts_say_that_something_exists() -> None:
    """An object is whole once it is made, so its attributes need no such assert."""
    _, asserts = classes_and_asserts()
    assert len(asserts) <= 5, asserts


def test_few_lines_hide_something_from_mypy() -> None:
    """Calls of three functions that torch has no types for, and one model that torch types as a
    module.
    """
    ignores = [path for path in PACKAGE.rglob("*.py") for _ in re.findall(r"#.*type: ignore", path.read_text(encoding="utf-8"))]
    casts = [path for path in PACKAGE.rglob("*.py") for _ in re.findall(r"[^.\w]cast\(", path.read_text(encoding="utf-8"))]
    assert len(ignores) <= 3, ignores
    assert len(casts) <= 1, casts
