"""Every Python and shell snippet of the README and the documentation runs: see
support/snippets.py.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.cli import invoke
from support.models import LitModel, Recipe, Shape, quiet_trainer
from support.models import data as batches
from support.profiling import make_small
from support.ranks import start
from support.snippets import NOT_RUN, REPLACED, SHELLS, Snippet, run, snippets

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.profiling import hardware

ALL = snippets()
PYTHON = [s for s in ALL if s.language == "python" and not s.reason]
RANKS = ("HeteroParallelStrategy(", '"hetero_parallel"', "devices=4,")
GROUP = [s for s in PYTHON if any(words in s.text for words in RANKS)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; Trainers are short and quiet unless a snippet says otherwise."""
    monkeypatch.chdir(tmp_path)
    defaults = {"MAX_STEPS": 6, "LOGGER": False, "ENABLE_PROGRESS_BAR": False, "ENABLE_MODEL_SUMMARY": False, "ACCELERATOR": "cpu"}
    for option, value in defaults.items():
        monkeypatch.setenv(f"PL_TRAINER_{option}", str(value))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("ssd", "nvme", "memory", "bucket"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize("snippet", [s for s in PYTHON if s not in GROUP], ids=lambda s: s.name)
def test_python(snippet: Snippet, folder: Path) -> None:
    if "Auto" in snippet.text or "config.save_pretrained" in snippet.text:
        pytest.importorskip("transformers", reason="the snippet imports it")
    run(snippet)


@pytest.mark.parametrize("snippet", GROUP, ids=lambda s: s.name)
def test_python_of_two_processes(snippet: Snippet, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_DEVICES", "2")
    script = folder / "train.py"
    script.write_text(
        f"from support.snippets import run, snippets\nrun(next(s for s in snippets() if s.name == {snippet.name!r}))\n"
    )
    start(script, cwd=folder, world=2)


# ---- shell ---------------------------------------------------------------------------------------

SHELL = [s for s in ALL if s.language in SHELLS and not s.reason]

MODEL = """
import torch
from support.snippets import Staged

def model_and_batch():
    words = torch.randint(1, 9, (2, 5))
    return Measured(), (words, words)

class Measured(Staged):
    def stage_layers(self):
        blocks = {f"block{i}": block for i, block in enumerate(self.blocks)}
        return torch.nn.ModuleDict({"embedding": self.embedding, **blocks, "head": self.head})

    def loss_sum(self, output, batch):
        return output.square().sum(), len(output)
"""


CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/ssd"}, "sub_group_size": 20000000,
        "offload_param": {"device": "nvme", "nvme_path": "/mnt/ssd"}, "overlap_comm": True,
    },
    "aio": {"block_size": 8388608, "queue_depth": 16},
}  # fmt: skip

ACCELERATE = """
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 4
deepspeed_config:
  zero_stage: 2
  offload_optimizer_device: cpu
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  zero3_init_flag: true
"""


@pytest.fixture
def trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What commands read: a store, a checkpoint, tied weights, a config, a module; micro-benchmarks
    are short.
    """
    strategy: Any = HeteroOffloadStrategy(plan="disk", disk_path="store", verify_digests=True)
    trainer = quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=folder, limit_val_batches=0)
    trainer.fit(LitModel(Recipe(shape=Shape(tied=True))), batches())
    trainer.save_checkpoint("last.ckpt")
    (folder / "train.py").write_text(MODEL)
    (folder / "weights").mkdir()
    (folder / "weights" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "ds_config.json").write_text(json.dumps(DEEPSPEED))
    (folder / "default_config.yaml").write_text(ACCELERATE)
    assert hardware.measure.__kwdefaults__ is not None
    monkeypatch.setitem(hardware.measure.__kwdefaults__, "seconds", 0.2)
    make_small(monkeypatch, folder / "cache")
    return folder


@pytest.mark.parametrize("page", sorted({s.page for s in SHELL}))
def test_shell(page: str, trained: Path) -> None:
    """A page's commands run one after the other, each from what those before it have left."""
    for snippet in (s for s in SHELL if s.page == page):
        for command, code in snippet.commands:
            program, *arguments = shlex.split(command)
            assert program == "lightning-hetero", (
                f"{snippet.name}: {command}: list it in NOT_RUN, with the reason, or teach the test"
            )
            print(f"{snippet.name}\n$ {command}")  # who fails is the last one
            printed = invoke(*arguments, code=code).stdout
            if arguments[0].startswith("from-"):
                assert f"$ {command}\n{printed}" == snippet.text


# ---- the lists -----------------------------------------------------------------------------------


def test_snippets_that_do_not_run_are_listed_with_a_reason() -> None:
    assert len(NOT_RUN) <= 10
    listed = {s.name for s in ALL if s.reason}
    assert len(listed) == len(NOT_RUN), "each entry fits one snippet, and none is left over"
    assert all(reason for reason in NOT_RUN.values())


def test_every_replaced_text_is_still_there() -> None:
    text = "\n".join(s.text for s in ALL)
    assert [there for there in REPLACED if there not in text] == []


def test_no_two_snippets_have_one_name() -> None:
    assert len({s.name for s in ALL}) == len(ALL)
