"""The snippets of the README and the documentation, and what they find when a test runs them.

Whoever adds a snippet need do nothing: it is found, and run. Where it names a path, a size or a
device that no test has, ``REPLACED`` says what stands for it; where it goes on from something,
``PREPARED`` makes that; where it cannot run, ``NOT_RUN`` says why.
"""

from __future__ import annotations

import ast
import importlib
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy, HeteroParallelStrategy, LocalFirst

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELLS = {"bash", "sh", "console"}
DATA = {"json", "yaml", ""}  # not run: files, and what programs print

WIDTH, WORDS, PAD = 16, 60, 0

# Text of snippets, and what stands for it here. A page that no longer has it fails a test.
REPLACED = {
    "/mnt/ssd/": "ssd/",
    "/nvme/": "nvme/",
    "/dev/shm/my-run": "memory/my-run",
    "s3://bucket/": "bucket/",
    'accelerator="cuda", devices=1, strategy="hetero_offload"': (
        'devices=1, strategy=HeteroOffloadStrategy(device=EmulatedDevice(memory="64MiB"))'
    ),
    "    devices=4,": "    devices=2,",
    'accelerator="gpu", devices=3': 'accelerator="cpu", devices=2',
    '"small-node"': repr(socket.gethostname()),
    '0: {"plan": "disk"}, 3: True': '0: {"plan": "disk"}, 1: True',
    "global_batch_size=512": "global_batch_size=8",
    "class Model(StagedSteps, L.LightningModule)": "class Model(StagedSteps, Staged)",  # what the snippet leaves out of it
    "devices=..., num_nodes=...": "devices=2, num_nodes=1",
    "devices=4, num_nodes=2": "devices=2, num_nodes=1",  # test_nodes.py has two
    "/ssd0/": "ssd/0/",
    "/ssd1/": "ssd/1/",
    "--host-memory 64GiB --disk p5510x4 --planner protrain": "--host-memory 1GiB --disk p5510x4 --planner protrain",
    "lm_head.weight=model.embed_tokens.weight": "head.weight=embed.weight",
    "--preset-model lohan-13b --batch 16 --sequence 1024": "--preset-model gpt2 --batch 1 --sequence 64",
    "--preset-model llama-3-8b --batch 4 --sequence 2048": "--preset-model gpt2 --batch 1 --sequence 64",
    "--preset-model llama-3-8b --batch 1 --sequence 2048": "--preset-model gpt2 --batch 1 --sequence 64",
}

# Why a snippet is not run, by its page and how it begins. At most ten.
NOT_RUN = {
    ("README.md", 'python3 -m venv .venv && . .venv/bin/activate && pip install torch==2.13.0 && pip install ".[examples]"'): (
        "installs packages; test_examples.py runs its script"
    ),
    ("README.md", 'python3 -m venv .venv && . .venv/bin/activate && pip install torch==2.13.0 && pip install ".[test,'): (
        "installs packages and runs all tests"
    ),
    ("docs/index.md", "pip install torch==2.13.0"): "installs packages",
    ("docs/cli.md", "lightning-hetero plan --model Llama-3.1-8B --lora r=16,targets=q,v --quantize nf4-double --batch 1 "): (
        "test_models.py runs it with the model's config, and compares what it prints"
    ),
    ("docs/cli.md", "lightning-hetero plan --model Llama-3.1-8B --lora r=16,targets=q,v --quantize nf4-double --batch 4 "): (
        "test_models.py runs it with the model's config, and compares the refusal"
    ),
    ("docs/comparison.md", "python benchmarks/peers --dir"): (
        "installs other libraries and measures for minutes; test_peers.py runs it at its smallest"
    ),
    ("docs/parallel.md", "lightning-hetero launch plan.json --rendezvous head:29400 --steps"): (
        "two nodes that run until they are killed; test_elastic.py trains with them"
    ),
}


@dataclass(frozen=True)
class Snippet:
    """One fenced block: its page, from the root; its language; its text as the page has it."""

    page: str
    language: str
    text: str

    @property
    def name(self) -> str:
        """Its page and first line that is no import, for people and for ``NOT_RUN``."""
        lines = [line.removeprefix("$ ") for line in self.text.splitlines() if line.strip()]
        said = [line for line in lines if not line.startswith(("import ", "from "))] or lines
        return f"{self.page}: {said[0]}"

    @property
    def reason(self) -> str:
        """Why it is not run; empty if it is."""
        page, _, first = self.name.partition(": ")
        return next((why for (where, begin), why in NOT_RUN.items() if where == page and first.startswith(begin)), "")

    @property
    def source(self) -> str:
        """Its text for a test."""
        text = self.text
        for there, here in REPLACED.items():
            text = text.replace(there, here)
        return text

    @property
    def commands(self) -> list[tuple[str, int]]:
        """Of a shell snippet: each command, and the exit status that it shows or 0."""
        lines = self.source.splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            status = re.findall(r"^\$ (.*)\n(?:(?!\$ ).*\n)*?(?=\$ echo \$\?\n(\d+))", self.source + "\n", re.MULTILINE)
            codes = {command: int(code) for command, code in status}
            return [(line, codes.get(line, 0)) for line in lines if line != "echo $?"]
        return [(line.partition("  #")[0].strip(), 0) for line in lines if line.strip() and not line.startswith("#")]


def snippets() -> list[Snippet]:
    """All of Python and shell, page by page.

    Raises:
        ValueError: A block would be overlooked: it is indented, or in a language that nobody knows
            here.
    """
    found = []
    for page in PAGES:
        where = str(page.relative_to(ROOT))
        blocks = re.findall(r"^([ ]*)```([^\n`]*)\n(.*?)^[ ]*```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        for indent, language, text in blocks:
            if indent or language not in {"python", *SHELLS, *DATA}:
                raise ValueError(
                    f"{where}: {indent}```{language}: begin it in the first column, with a language known to {__name__}."
                )
            if language not in DATA:
                found.append(Snippet(where, language, text))
    return found


# ---- what snippets find --------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x).relu()


class Net(nn.Module):
    """The names that snippets use: ``layers``, with an ``mlp`` each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def lit(namespace: str) -> type[Any]:
    """A LightningModule around :class:`Net`."""
    pl = importlib.import_module(namespace)

    class Lit(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.model(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Lit


def data() -> DataLoader[Any]:
    return DataLoader(torch.randn(16, WIDTH), batch_size=2)


# ---- what stands before a snippet ----------------------------------------------------------------


def a_fit(names: dict[str, Any]) -> None:
    """``strategy`` has trained ``module``, with a trace."""
    names["strategy"] = HeteroOffloadStrategy(plan="host", trace=True)
    names["L"].Trainer(strategy=names["strategy"]).fit(names["module"], data())


def a_store(names: dict[str, Any]) -> None:
    """An earlier run of the same model has kept steps at ``run/store``."""
    trainer = names["L"].Trainer(strategy=HeteroOffloadStrategy(disk_path="run/store"), max_steps=2)
    trainer.fit(names["model"], data())


def an_offloading_trainer(names: dict[str, Any]) -> None:
    names["trainer"] = names["L"].Trainer(strategy=HeteroOffloadStrategy(plan="disk"))
    names["made"].append(names["trainer"])  # to be trained with


def saved_weights(names: dict[str, Any]) -> None:
    """A Hugging Face directory, and what the text around the snippet has imported."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from support import llama

    llama.save(Path("weights"))
    names |= {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}


def a_lora_fit(names: dict[str, Any]) -> None:
    """The adapters of the page's first snippet have been trained: ``module``; ``Lit`` is its
    class.
    """
    saved_weights(names)
    page = next(s for s in snippets() if s.page == "docs/adapters.md" and "class Lit" in s.text)
    exec(compile(page.source, page.name, "exec"), names)
    lit = Whole(names.pop("Lit"))
    names["L"].Trainer(strategy=names["strategy"], max_steps=2).fit(lit, words())
    names |= {"module": lit, "Lit": type(lit), "data": words(), "made": []}


def a_config(names: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    names["module"].model.config = LlamaConfig()


def words() -> DataLoader[Any]:
    """Batches of token ids."""
    return DataLoader(torch.randint(0, WORDS, (16, 5)), batch_size=2)


class Staged(importlib.import_module("lightning.pytorch").LightningModule):  # type: ignore[misc, name-defined]
    """What a module of layers has beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def a_cluster_plan(names: dict[str, Any]) -> None:
    """One pipeline of two stages with two layers each."""
    from support.training.pipelines import cluster_plan

    Path("plan.json").write_text(cluster_plan((2, (2, 2))).to_json())
    words = torch.randint(1, WORDS, (16, 5))
    names |= {"Staged": Staged, "data": DataLoader(TensorDataset(words, words), batch_size=2)}


# By a name that the snippet uses; the first that fits.
PREPARED: dict[str, Callable[[dict[str, Any]], None]] = {
    "strategy.trace": a_fit,
    "strategy.materialize": a_fit,
    'ckpt_path="run/store"': a_store,
    "trainer.init_module": an_offloading_trainer,
    'ckpt_path="run/lora"': a_lora_fit,
    "PeftModel": a_lora_fit,
    ".generate(": a_lora_fit,
    "AutoModelForCausalLM": saved_weights,
    "config.save_pretrained": a_config,
    "stage_layers": a_cluster_plan,
}


def names_for(snippet: Snippet) -> dict[str, Any]:
    """What the text around snippets has introduced."""
    namespace = "pytorch_lightning" if '"pytorch_lightning"' in snippet.text else "lightning.pytorch"
    pl, made = importlib.import_module(namespace), lit(namespace)
    shown: dict[str, Any] = {
        "L": pl, "torch": torch, "nn": nn, "data": data(), "model": made(), "module": made(), "MyModel": made,
        "ModelCheckpoint": ModelCheckpoint, "EmulatedDevice": EmulatedDevice, "HeteroOffloadStrategy": HeteroOffloadStrategy,
        "HeteroParallelStrategy": HeteroParallelStrategy, "LocalFirst": LocalFirst,
        "ColwiseParallel": ColwiseParallel, "RowwiseParallel": RowwiseParallel, "F": functional, "PAD": PAD, "made": [],
    }  # fmt: skip
    for text, prepare in PREPARED.items():
        if text in snippet.text:
            prepare(shown)
            break
    return shown


# ---- running -------------------------------------------------------------------------------------


def run(snippet: Snippet) -> None:
    """Executes a snippet of Python in this process, and trains with every strategy and Trainer that
    it makes and does not use.
    """
    names = names_for(snippet)
    tree = ast.parse(snippet.source)
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
        if isinstance(value, ast.Call) and ast.unparse(value.func).endswith(("Strategy", "Trainer", ")")):
            statement.value = ast.Call(ast.Name("keep", ast.Load()), [value], [])
    made = names["made"]
    names["keep"] = lambda value: made.append(value) or value
    exec(compile(ast.fix_missing_locations(tree), snippet.name, "exec"), names)
    module, batches = names["model"], names["data"]
    if "Lit" in names:
        module, batches = Whole(names["Lit"]), DataLoader(torch.randint(0, WORDS, (16, 5)), batch_size=2)
    trainers = [value for value in made if hasattr(value, "fit")]
    for strategy in (value for value in made if not hasattr(value, "fit")):
        if not any(trainer.strategy is strategy for trainer in trainers):
            trainers.append(importlib.import_module(strategy.namespace).Trainer(strategy=strategy))
    for trainer in trainers:
        if not trainer.global_step:
            trainer.fit(module, batches)
        assert trainer.global_step > 0
    if "tensor_parallel" in names:
        assert names["tensor_parallel"](None, None)


def Whole(shown: type[Any]) -> Any:
    """A LightningModule of which a snippet shows only how it is built."""

    class Whole(shown):  # type: ignore[misc]
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return self.model(input_ids=batch, labels=batch, use_cache=False).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Whole()
