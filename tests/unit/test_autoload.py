"""Registration with Lightning, each case in a fresh interpreter because import order is what is
tested.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_hetero

PACKAGE_PARENT = str(Path(lightning_hetero.__file__).parent.parent)

# The strategies module that factories call, replaced: what is tested is that it is reached, late,
# with the right namespace.
STUB = """
import sys, types
stub = types.ModuleType("lightning_hetero.strategies")
stub.make = lambda namespace, **options: ("made", namespace, options)
stub.make_parallel = lambda namespace, **options: ("parallel", namespace, options)
stub.make_parallel_fsdp = lambda namespace, **options: ("fsdp", namespace, options)
def put_stub():
    import lightning_hetero
    sys.modules["lightning_hetero.strategies"] = stub
    lightning_hetero.strategies = stub
    of_fabric = types.ModuleType("lightning_hetero.loops.fabric")
    of_fabric.make = lambda namespace, **options: ("fabric", namespace, options)
    sys.modules["lightning_hetero.loops.fabric"] = of_fabric
"""


def _python(code: str, tmp_path: Path, **env: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{PACKAGE_PARENT}", **env}
    done = subprocess.run(
        [sys.executable, "-c", STUB + code],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _entry_point(tmp_path: Path, target: str = "lightning_hetero._autoload:install") -> None:
    """What an installed wheel leaves behind: a dist-info directory on the path."""
    info = tmp_path / "hetero_under_test-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hetero-under-test\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\nhetero_under_test = {target}\n")


BOTH = """
import json
import lightning.pytorch, pytorch_lightning
report = {"heavy": "lightning_hetero.strategies" in sys.modules}
put_stub()
names = ("hetero_offload", "hetero", "hetero_parallel", "hetero_parallel_fsdp")
registries = [module.strategies.StrategyRegistry for module in (lightning.pytorch, pytorch_lightning)]
report["made"] = [[registry.get(name) for name in names] for registry in registries]

from lightning.fabric.strategies import STRATEGY_REGISTRY
import lightning_fabric.strategies
fabrics = (STRATEGY_REGISTRY, lightning_fabric.strategies.STRATEGY_REGISTRY)
report["of_fabric"] = [[registry.get(name) for name in names[:2]] for registry in fabrics]
from lightning_hetero.errors import UnsupportedError
try:
    STRATEGY_REGISTRY.get("hetero_parallel")
except UnsupportedError as error:
    report["fabric"] = str(error)

import importlib, inspect
import lightning.pytorch.strategies as module
report["loader"] = type(module.__loader__).__name__
report["source"] = "StrategyRegistry" in inspect.getsource(module)
report["same"] = module.__spec__.loader is module.__loader__

from lightning_hetero import _autoload
_autoload.install()
importlib.reload(module)
report["reloaded"] = "hetero" in module.StrategyRegistry
report["finders"] = sum(isinstance(finder, _autoload._Finder) for finder in sys.meta_path)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one interpreter with both Lightnings says: importing them takes seconds."""
    folder = tmp_path_factory.mktemp("both")
    _entry_point(folder)
    result: dict[str, Any] = json.loads(_python(BOTH, folder))
    return result


def test_the_names_are_registered_without_importing_the_package(report: dict[str, Any]) -> None:
    """By each namespace with a factory of its own."""
    assert not report["heavy"]
    for namespace, made in zip(("lightning.pytorch", "pytorch_lightning"), report["made"], strict=True):
        assert made == [[kind, namespace, {}] for kind in ("made", "made", "parallel", "fsdp")]


def test_fabric_has_its_own_strategy(report: dict[str, Any]) -> None:
    assert report["of_fabric"] == [[["fabric", namespace, {}]] * 2 for namespace in ("lightning.pytorch", "pytorch_lightning")]


def test_fabric_is_refused_by_name_where_it_has_none(report: dict[str, Any]) -> None:
    assert "Use Trainer(" in report["fabric"]


def test_loaders_are_not_replaced(report: dict[str, Any]) -> None:
    assert (report["loader"], report["source"], report["same"]) == ("SourceFileLoader", True, True)


def test_reloading_registers_again_and_installing_twice_adds_no_finder(report: dict[str, Any]) -> None:
    assert (report["reloaded"], report["finders"]) == (True, 1)


def test_importing_the_package_after_lightning_registers_at_once(tmp_path: Path) -> None:
    code = """
import lightning.pytorch
registry = lightning.pytorch.strategies.StrategyRegistry
assert "hetero" not in registry
import lightning_hetero
put_stub()
print(registry.get("hetero"))
"""
    assert _python(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "('made', 'lightning.pytorch', {})"


def test_imports_bring_nothing_that_is_not_needed_yet(tmp_path: Path) -> None:
    """The package brings neither torch nor Lightning; a strategy brings no simulator."""
    code = """
before = set(sys.modules)
import lightning_hetero
with_package = {name.split(".")[0] for name in set(sys.modules) - before} & {"torch", "lightning", "numpy", "cvxpy", "ctypes"}
import lightning.pytorch
before = set(sys.modules)
lightning_hetero.HeteroOffloadStrategy()
new = set(sys.modules) - before
assert "lightning_hetero.runtime.session" in new
late = "sim cost planners.evaluation planners.holistic cli report parallel monitors loops ir.cluster_plan".split()
ours = [name for name in new if name.startswith(tuple(f"lightning_hetero.{each}" for each in late))]
others = {name.split(".")[0] for name in new} & set("psutil cvxpy highspy scipy rich typer transformers peft".split())
print(sorted(with_package), sorted(ours), sorted(others))
"""
    assert _python(code, tmp_path) == "[] [] []"


def test_a_registry_of_another_shape_warns_and_never_breaks_the_import(tmp_path: Path) -> None:
    package = tmp_path / "pytorch_lightning"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "strategies.py").write_text("StrategyRegistry = None\n")
    code = "import lightning_hetero, pytorch_lightning.strategies; print('imported')"
    assert _python(code, tmp_path) == "imported"
    assert _python("import warnings; warnings.simplefilter('error')\n" + code, tmp_path) == "imported"


def test_an_error_in_lightning_itself_is_not_swallowed(tmp_path: Path) -> None:
    package = tmp_path / "pytorch_lightning"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "strategies.py").write_text("raise ImportError('their own')\n")
    code = """
import lightning_hetero
try:
    import pytorch_lightning.strategies
except ImportError as error:
    print(error)
"""
    assert _python(code, tmp_path) == "their own"


def test_a_missing_lightning_is_still_missing(tmp_path: Path) -> None:
    code = """
import lightning_hetero, importlib.util
print(importlib.util.find_spec("lightning_fabric_that_is_not_there"))
from lightning_hetero._autoload import _Finder
sys.meta_path[:] = [f for f in sys.meta_path if isinstance(f, _Finder)]
print(sys.meta_path[0].find_spec("lightning_fabric.strategies"))
"""
    assert _python(code, tmp_path).split() == ["None", "None"]
