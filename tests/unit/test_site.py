"""The site of the documentation: every page is in it, and what pages promise exists."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pictures
import pytest
import yaml

from lightning_hetero import errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TESTS = ROOT / "tests"


class Loader(yaml.SafeLoader):
    """Reads mkdocs' own tags as nothing."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def pages_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(entry)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation_once() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=Loader)
    pages = {page for page in DOCS.rglob("*.md") if page.parent.name != "adr"}  # other pages link to decisions
    assert sorted(pages_of(config["nav"])) == sorted(str(page.relative_to(DOCS)) for page in pages)


def test_every_error_has_a_line_with_its_remedy() -> None:
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", page, re.MULTILINE))
    classes = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.HeteroError)}
    assert set(rows) == set(classes) - {"HeteroError"}
    for name, base in rows.items():
        assert base in {kind.__name__ for kind in classes[name].__mro__}, name


DOCSTRING = """Has a :class:`~lightning_hetero.Plan`; see :meth:`close`, :class:`~torch.nn.Linear` and :func:`other.f`."""


def test_roles_of_docstrings_become_links_or_code() -> None:
    griffe = pytest.importorskip("griffe", reason="the site's tools are missing: pip install '.[docs]'")
    extensions = griffe.load_extensions(str(ROOT / ".ci" / "docstring_roles.py"))
    code = f"class Box:\n    {DOCSTRING!r}\n    def close(self): ...\n"
    with griffe.temporary_visited_module(code, module_name="boxes", extensions=extensions) as module:
        extensions.call("on_package", pkg=module, loader=None)
        text = module["Box"].docstring.value
    assert ":class:" not in text
    assert "`" not in text
    assert re.findall(r'identifier="([\w.]+)"><code>([\w.]+)<', text) == [
        ("lightning_hetero.ir.plan.Plan", "Plan"),
        ("boxes.Box.close", "close"),
        ("torch.nn.Linear", "Linear"),
        ("other.f", "other.f"),
    ]


def test_no_other_role_is_in_a_docstring() -> None:
    """What the extension leaves would show as it is written."""
    known = re.search(r":\(\?:([\w|]+)\):", (ROOT / ".ci" / "docstring_roles.py").read_text(encoding="utf-8"))
    assert known is not None
    package = (path.read_text(encoding="utf-8") for path in (ROOT / "lightning_hetero").rglob("*.py"))
    roles = {role for text in package for role in re.findall(r":(\w+):`", text)}
    assert roles <= set(known[1].split("|"))


def test_output_that_begins_with_a_number_sign_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = pytest.importorskip("pygments.lexers.shell", reason="pygments, which colours the pages, is missing")
    monkeypatch.setattr(shell.BashSessionLexer, "_ps1rgx", shell.BashSessionLexer._ps1rgx)  # comes back
    runpy.run_path(str(ROOT / ".ci" / "site_console.py"))["on_config"](None)
    tokens = [(str(kind), text) for kind, text in shell.BashSessionLexer().get_tokens("$ launch plan.json\n# On node0\ntorchrun\n")]
    assert ("Token.Generic.Prompt", "$ ") in tokens
    assert "".join(text for kind, text in tokens if kind == "Token.Generic.Output") == "# On node0\ntorchrun\n"


def test_the_button_copies_commands_without_prompts_and_output() -> None:
    pytest.importorskip("pygments", reason="pygments, which colours the pages, is missing")
    shown = runpy.run_path(str(ROOT / ".ci" / "site_console.py"))["on_page_content"]
    begin, end = '<div class="highlight"><pre><span></span><code>', "</code></pre></div>"
    python, prompt = f"{begin}x = 1\n{end}", '<span class="gp">$ </span>'
    console = f"{begin}{prompt}plan <span>--batch</span> &lt;N&gt;\nerror: no\n{prompt}echo $?\n2\n{prompt}doctor\n{end}"
    copied = console.replace("<div ", '<div data-copy="plan --batch &lt;N&gt;\ndoctor" ')
    assert shown(f"{python}<p>then</p>{console}", page=None, config=None, files=None) == f"{python}<p>then</p>{copied}"


PAGE = (DOCS / "matrix.md").read_text(encoding="utf-8")
MATRIX = re.findall(r"`tests/((?:unit|integration|property|faults)/\w+\.py(?:::\w+)?)`", PAGE)


@pytest.mark.parametrize("name", MATRIX)
def test_tests_that_the_matrix_names_exist(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    assert function in names if function else names


def test_each_line_of_the_matrix_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    without = [row for row in rows if not any(name in row for name in MATRIX) and "Held by" not in row]
    assert MATRIX
    assert without == []


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_what_their_script_draws(name: str) -> None:
    drawn = pictures.PICTURES[name]()
    assert (pictures.IMAGES / f"{name}.svg").read_text(encoding="utf-8") == drawn
    assert any(f"images/{name}.svg" in page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))


def test_every_exported_name_is_in_the_reference() -> None:
    import lightning_hetero

    page = (DOCS / "api.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^::: [\w.]+\.(\w+)$|heading: (\w+)$", page, re.MULTILINE))
    names = {name for pair in described for name in pair}
    via = {"HeteroError": "errors"}  # as part of its module
    assert {via.get(name, name) for name in lightning_hetero.__all__} <= names
