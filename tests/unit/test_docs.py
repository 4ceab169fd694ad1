"""What the documentation says is what the code does, as far as a test can see."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from lightning_hetero.ir.plan import Plan
from lightning_hetero.parallel.strategies.hetero_parallel import HeteroParallel
from lightning_hetero.strategies.hetero_offload import HeteroOffload
from lightning_hetero.strategies.option_checks import choices

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((ROOT / "docs").rglob("*.md"))
WRAPPED = sorted({*PAGES, *(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "tests").rglob("README.md")})
SCRIPTS = sorted({*(ROOT / "examples").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")})
PROGRAMS = ("python ", "pip ", "torchrun ", "lightning-hetero ")
OPTIONS = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
LIGHTNINGS_OWN = {"self", "accelerator", "checkpoint_io", "precision_plugin"}


def test_every_option_of_the_strategy_is_documented_and_no_other() -> None:
    without_plan_files = re.sub(r"### Plan files.*?\n## ", "", OPTIONS, flags=re.DOTALL)
    documented = set(re.findall(r"^\| `(\w+)` \|", without_plan_files, re.MULTILINE))
    assert documented == set(inspect.signature(HeteroOffload.__init__).parameters) - LIGHTNINGS_OWN


def test_documented_defaults_are_the_real_ones() -> None:
    parameters = inspect.signature(HeteroOffload.__init__).parameters
    for name, default in re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", OPTIONS, re.MULTILINE):
        assert parameters[name].default == ast.literal_eval(default), name


def test_options_of_loops_and_strategies_have_the_same_types_and_defaults() -> None:
    given = inspect.signature(HeteroOffload.__init__).parameters
    assert inspect.signature(choices).parameters == {name: p for name, p in given.items() if name not in LIGHTNINGS_OWN}


def test_the_options_of_the_parallel_strategy_are_documented_with_their_defaults() -> None:
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    documented = {name: ast.literal_eval(value) for name, value in re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.MULTILINE)}
    parameters = inspect.signature(HeteroParallel.__init__).parameters.values()
    assert documented == {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def test_the_documented_plan_file_is_a_plan() -> None:
    (text,) = re.findall(r"```json\n(.*?)```", OPTIONS, re.DOTALL)
    plan = Plan.from_json(text).resolve([f"model.layers.{i}" for i in range(6)] + ["model.embed_tokens"])
    assert [b.weights.value for b in plan.blocks] == ["host"] * 4 + ["disk"] * 2 + ["host"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_in_the_documentation_compiles_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for source in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(source, page.name, "exec")
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert "://" in link or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_sections_that_links_name_exist(page: Path) -> None:
    for link, section in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            target = page.parent / link if link else page
            assert section in sections(target), f"{link}#{section}"


def sections(page: Path) -> set[str]:
    """The anchors of a page's headings, by GitHub's rule."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", WRAPPED, ids=lambda p: str(p.relative_to(ROOT)))
def test_markdown_is_wrapped_at_100_columns(page: Path) -> None:
    """Tables and code blocks are not wrapped. Nothing is broken inside inline code or a link's
    address.
    """
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("|"):
            text = re.sub(r"^\s*([-*]|\d+\.) ", "", line)
            words = re.sub(r"`[^`]*`|\]\([^)]*\)", lambda m: m[0].replace(" ", "_"), text).split()
            assert len(line) <= 100 or len(words) == 1, f"line {number} has {len(line)} columns: {line}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_a_docstring_have_lines_of_their_own(script: Path) -> None:
    """A line of an indented block is a comment, a command, or the rest of the line before it."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    before = ""
    for line in re.findall(r"^    (.*)$", text, re.MULTILINE):
        begins = line.startswith(("# ", *PROGRAMS))
        assert begins or before.endswith("\\") or line.lstrip().startswith("["), line
        assert line.startswith("# ") or " # " not in line, line
        before = line


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    """Names with a folder, such as `lowering/lower.py`, are below the root, the package or the
    native library.
    """
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for name in re.findall(r"`((?:[\w.]+/)+[\w.]*)`", prose):
        if not name.startswith((".", "configs/")):
            assert any((ROOT / place / name).exists() for place in ("", "lightning_hetero", "native")), name
