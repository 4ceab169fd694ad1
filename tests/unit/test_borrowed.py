"""Private and replaced names of torch and Lightning: each exists as the table says, and none is
missing there.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, StepLR
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

import lightning_hetero
from lightning_hetero.borrowed import ATTRIBUTES, TABLE, TORCH, Borrowed

# Names with an underscore that Python documents, and one that the package does without where it is
# missing.
NOT_BORROWED = {"_exit", "_fields", "_getframe", "_MODEL_TO_CONVERSION_PATTERN"}
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


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)


def a_scheduled_step() -> Any:
    optimizer = an_optimizer()
    StepLR(optimizer, 1)
    return optimizer.step


def adapted(model: torch.nn.Module) -> Any:
    return peft.inject_adapter_in_model(peft.LoraConfig(r=1, target_modules=["0"]), model)


MADE: dict[str, Callable[[], Any]] = {
    "storage": lambda: torch.TypedStorage(0, dtype=torch.float32, _internal=True),  # type: ignore[no-untyped-call]
    "module": torch.nn.Module,
    "optimizer": an_optimizer,
    "scheduled step": a_scheduled_step,
    "schedulers": lambda: ChainedScheduler([StepLR(an_optimizer(), 1)]),
    "iterator": lambda: iter(DataLoader([0])),
    "metric": SumMetric,
    "scaler": lambda: torch.amp.GradScaler("cpu"),
    "peft layer": lambda: adapted(torch.nn.Sequential(torch.nn.Linear(1, 1)))[0],
}


def made_by_lightning(kind: str, namespace: str) -> Any:
    def get(name: str) -> Any:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(f"{namespace}{module and '.'}{module}"), attribute)

    if kind == "module":
        module = get("LightningModule")()
        module.save_hyperparameters({"a": 1})
        return module
    if kind == "optimizer":
        return get("core.optimizer.LightningOptimizer")(an_optimizer())
    if kind == "loader":
        return get("utilities.combined_loader.CombinedLoader")([1])
    return get({"fetcher": "loops.fetchers._DataLoaderIterDataFetcher", "strategy": "strategies.DDPStrategy"}[kind])()


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
        elif kind.startswith("lightning "):
            yield getattr(made_by_lightning(kind.removeprefix("lightning "), namespace), path)
        elif kind in MADE:
            yield getattr(MADE[kind](), path)
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


@dataclass(frozen=True)
class Names:
    """Names in the package's files.

    Attributes:
        of_torch: Dotted paths of torch with a private part, by file.
        own: What files define: functions, classes, variables and attributes of ``self``.
        attributes: Private names behind a dot, or as the text that ``getattr`` or ``hasattr`` gets.
    """

    of_torch: dict[str, set[str]]
    own: set[str]
    attributes: set[str]


@cache
def names() -> Names:
    """Each file is parsed once, and none of the trees stays."""
    of_torch, own, attributes = {}, set(), set()
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        of_torch[str(file.relative_to(PACKAGE))] = private_names_of_torch(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute):
                attributes.add(node.attr)
                if isinstance(node.ctx, ast.Store) and dotted(node.value) in ("self", "cls"):
                    own.add(node.attr)
            elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr"):
                attributes |= {str(one.value) for one in node.args[1:2] if isinstance(one, ast.Constant)}
    return Names(of_torch, own, set(filter(private, attributes)))


def test_every_private_name_of_torch_that_the_package_uses_is_in_the_table() -> None:
    known = {row.path for row in TABLE}
    used: dict[str, str] = {}
    for file, paths in names().of_torch.items():
        for path in paths:
            # a.b of what is known as a, and what leads to a name that is known
            if not any(path == name or path.startswith(f"{name}.") or name.startswith(f"{path}.") for name in known):
                used[path] = file
    assert used == {}


def test_every_private_name_of_torch_in_the_table_is_used() -> None:
    used = set().union(*names().of_torch.values())
    assert [row.path for row in TORCH if not any(path == row.path or path.startswith(f"{row.path}.") for path in used)] == []


def test_every_private_attribute_of_others_is_in_the_table_and_used() -> None:
    known = {part for row in TABLE for part in row.path.replace(":", ".").split(".")}
    used = names().attributes
    assert used - names().own - known - NOT_BORROWED == set()
    assert {name for row in ATTRIBUTES for name in row.path.replace(":", ".").split(".") if private(name)} - used == set()


def test_a_private_name_is_found_however_it_is_written() -> None:
    source = "from torch._a import b\nimport torch\ntorch._C._d()\nx = torch.e._f.g\ntorch.nn.h\nfrom torch.i import _j"
    assert private_names_of_torch(ast.parse(source)) >= {"torch._a.b", "torch._C._d", "torch.e._f.g", "torch.i._j"}
    assert "torch.nn.h" not in private_names_of_torch(ast.parse(source))
