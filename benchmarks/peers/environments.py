"""An environment for each contestant, and how long it takes to get one.

[Note: Set-up]
A fresh environment has torch and Lightning and what they need. Packages that the environment of
this process has as well count as installed, and torch stays the one that all contestants use.
Set-up ends when a tiny model has been trained for two steps in a new process. What is compiled then
is kept: *without compiling* is the installation of a wheel that is there, and the same two steps
once more.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import scratch
from contestants import Contestant, ProcessFailedError
from gpt2 import find_size
from scratch import scratch as temporary

from peers.entrants import Entrant
from peers.process import compete

ROOT = Path(__file__).parents[2]


class NotInstalledError(Exception):
    """A contestant's packages cannot be had."""


class Place:
    """Where a contestant runs.

    Args:
        name: The contestant's.
        entrant: What it is.
        directory: Of its environment; ``None``: that of this process.
    """

    def __init__(self, name: str, entrant: Entrant, directory: Path | None) -> None:
        self.name, self.entrant = name, entrant
        self.directory = None if directory is None else directory / name
        if self.directory is None and not entrant.is_installed:
            raise NotInstalledError(f"{entrant.module} is not installed here")

    def begin(self, args: argparse.Namespace, directory: Path) -> Contestant:
        """The contestant's process, ready for its first turn; its files are below ``directory``."""
        directory.mkdir(parents=True, exist_ok=True)
        variables = dict(self.entrant.environment)
        if self.directory is None:
            new = None if scratch.FORKS else variables
            return Contestant(compete, self.entrant, args, directory, environment=new)
        programs = [str(self.directory / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        variables |= {"PATH": os.pathsep.join(programs), "TORCH_EXTENSIONS_DIR": str(self.directory / "extensions")}
        return Contestant(compete, self.entrant, args, directory, build=self._packages, environment=variables)

    def set_up(self, args: argparse.Namespace) -> dict[str, float] | None:
        """Installs what is not there yet; how many seconds that has taken then: see [Note: Set-up].

        Raises:
            NotInstalledError: Pip cannot.
        """
        if self.directory is None:
            return None
        record = self.directory / "set-up.json"
        if not record.exists():
            seconds = {**self._install(), "compiled": self._first_steps(args), "again": self._first_steps(args)}
            record.write_text(json.dumps(seconds), encoding="utf-8")
        found: dict[str, float] = json.loads(record.read_text(encoding="utf-8"))
        return {
            "with_compiling_s": found["wheels"] + found["install"] + found["compiled"],
            "without_compiling_s": found["install"] + found["again"],
        }

    def version(self) -> str:
        """Of its package."""
        path = sys.path if self.directory is None else [str(self._packages), *sys.path]
        name = self.entrant.packages[0].partition("==")[0] if self.entrant.packages else "torch"
        return next((found.version for found in importlib.metadata.distributions(name=name, path=path)), "")

    @property
    def _packages(self) -> Path:
        assert self.directory is not None
        return self.directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    def _install(self) -> dict[str, float]:
        assert self.directory is not None
        venv.create(self.directory, clear=True, with_pip=False, symlinks=True)
        ours = [path for path in sys.path if Path(path).name == "site-packages"]
        (self._packages / "base.pth").write_text("\n".join(ours), encoding="utf-8")
        if not self.entrant.packages:
            return {"wheels": 0.0, "install": 0.0}
        names = [str(ROOT)] if self.entrant.from_source else list(self.entrant.packages)
        wheels, torch = self.directory / "wheels", self.directory / "constraints.txt"
        torch.write_text(f"torch=={sys.modules['torch'].__version__}\n", encoding="utf-8")
        begin = time.perf_counter()
        self._pip("wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", wheels, *names)
        between = time.perf_counter()
        # This library may be installed beside torch as well; it is installed here all the same.
        again = ["--ignore-installed", "--no-deps"] if self.entrant.from_source else []
        self._pip("install", "--constraint", torch, "--find-links", wheels, *again, *wheels.glob("*.whl"))
        return {"wheels": between - begin, "install": time.perf_counter() - between}

    def _pip(self, command: str, *arguments: str | Path) -> None:
        assert self.directory is not None
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--python", self.directory / "bin" / "python", command, "--quiet", *arguments],
            env={**os.environ, **self.entrant.environment}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise NotInstalledError(f"pip {command}: {last_line(done.stderr)}")

    def _first_steps(self, args: argparse.Namespace) -> float:
        small = argparse.Namespace(**{**vars(args), "size": find_size("tiny"), "batch": 1, "seq": 16})
        begin = time.perf_counter()
        try:
            with temporary(args.dir) as directory, self.begin(small, directory) as process:
                process.turn(1)
                return time.perf_counter() - begin
        except ProcessFailedError:  # the run proper says why
            return 0.0


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
