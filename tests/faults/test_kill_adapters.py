"""``kill -9`` of LoRA as most people write it: a base that is read in place, all parameters in the
optimizer, layers set free.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.children import Report, around, assert_nothing_lost, in_child, kill_all, report_of

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft, whose adapters are trained here, is missing")

STEPS, FREE, FREEZE = 7, 3, 5  # after step 3 a layer of the base is set free, after step 5 it is frozen again


@dataclass(frozen=True)
class Case:
    """Where a run dies.

    Attributes:
        step: In the batch after this many steps, or between it and the next one.
        point: ``batch``, as the batch begins; ``backward``, as its backward ends; ``moved``, as a
            part of the base has got files with state; ``record``, before the record of its step is
            written.
        resumes: Steps that the resume finds.
        plan: The plan; ``device``: on a device of its own, with the frozen weights on disk.
        second: The plan of the resume.
    """

    step: int
    point: str
    resumes: tuple[int, ...]
    plan: str = "disk"
    second: str = "disk"

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.plan}-{self.second}-{self.point}-{self.step}"


CASES = [
    Case(3, "moved", (2, 3)),
    Case(3, "moved", (2, 3), plan="host", second="disk"),
    Case(3, "record", (2,)),
    Case(4, "record", (3,), plan="host", second="host"),
    Case(5, "record", (4,)),
    Case(6, "backward", (5, 6)),
    Case(3, "record", (2,), plan="device", second="device"),
    Case(5, "backward", (4, 5), plan="device", second="disk"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(__file__, tmp_path_factory)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kill_of_lora_loses_no_committed_step(report: Report, case: Case) -> None:
    assert_nothing_lost(report[case.name], case.resumes)


def test_the_base_is_read_in_place_until_it_is_set_free(report: Report) -> None:
    assert report["parts"]["before"] > report["parts"]["after"] > 0


def main(root: Path) -> None:
    """Every case; an assertion that fails ends the process."""
    import peft  # noqa: F401  once for all children
    import support.llama  # noqa: F401

    import lightning_hetero.convert.safetensors
    import lightning_hetero.strategies  # noqa: F401

    file = root / "parts.json"
    in_child(partial(write_weights, root))
    in_child(partial(train_plain, root))
    in_child(partial(count_in_place, root, file))
    shutil.rmtree(root / "store")
    kill_all(root, CASES, die_at, resume, parts=json.loads(file.read_text()))


# ---- what children do ----------------------------------------------------------------------------


def build() -> Any:
    import peft
    import torch
    from support import llama

    torch.manual_seed(3)
    options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.2}
    return peft.get_peft_model(llama.LlamaForCausalLM(llama.config()), peft.LoraConfig(**options))


def build_on_meta() -> Any:
    import torch

    with torch.device("meta"):
        return build()


def write_weights(root: Path) -> None:
    """Also those of the adapters, so that plain Lightning begins with the same ones."""
    import torch

    from lightning_hetero.convert.safetensors import TensorToWrite, write_directory

    content = build().state_dict()
    with torch.no_grad():
        for name, value in content.items():
            if "lora_B" in name:
                value.normal_(std=0.1)
    torch.save(content, root / "content.pt")
    rows = [TensorToWrite(name, value.dtype, value.shape, lambda value=value: value) for name, value in content.items()]
    write_directory(root / "weights", rows, max_shard_bytes=20_000)


def train(
    root: Path, strategy: Any, begins: Callable[[int], object] = id, *, store: Path | None = None, stop: int | None = None
) -> Any:
    """Trains :data:`STEPS` steps."""
    import lightning.pytorch as pl
    import torch
    from support import llama
    from support.models import outcome, quiet_trainer
    from support.resuming import Ends, EndsAt

    class Frees(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if not trainer.global_step:
                torch.manual_seed(11)  # a model in memory has drawn other random numbers than one on the meta device

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            begins(trainer.global_step)

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            for name, param in pl_module.named_parameters():
                if "layers.1.mlp" in name:
                    param.requires_grad_(FREE <= trainer.global_step < FREEZE)

    def in_memory() -> Any:
        model = build()
        model.load_state_dict(torch.load(root / "content.pt"))
        return model

    module = llama.LitLlama(in_memory if strategy == "auto" else build_on_meta)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=STEPS, gradient_clip_val=0.5, default_root_dir=root,
        callbacks=[Frees(), *([] if stop is None else [EndsAt(stop)])],
    )  # fmt: skip
    try:
        trainer.fit(module, llama.batches(), ckpt_path=None if store is None else str(store))
    except Ends:
        return None
    return outcome(trainer, module)


def train_plain(root: Path) -> None:
    import torch

    torch.save(train(root, "auto"), root / "plain.pt")


def strategy_of(root: Path, plan: str) -> Any:
    from lightning_hetero import EmulatedDevice
    from lightning_hetero.strategies import HeteroOffloadStrategy

    device = EmulatedDevice(memory="8MiB", seed=3) if plan == "device" else None
    return HeteroOffloadStrategy(
        "disk" if device else plan, disk_path=root / "store", verify_digests=True, weights={"model": root / "weights"},
        device=device,
    )  # fmt: skip


def die_at(root: Path, case: Case) -> None:
    """Trains until the point, and kills itself."""
    from lightning_hetero.runtime import session
    from lightning_hetero.runtime.executor import Executor
    from lightning_hetero.runtime.kept_steps import KeptSteps

    at = [0]

    def die(point: str) -> None:
        if (point, at[0]) == (case.point, case.step):
            os.kill(os.getpid(), signal.SIGKILL)

    def begins(step: int) -> None:
        at[0] = step
        die("batch")

    def keeps(*_: Any) -> None:
        at[0] += 1
        die("record")

    def moved(*_: Any) -> None:
        at[0] += 1
        die("moved")
        at[0] -= 1

    around(Executor, "backward_ends", after=lambda *_: die("backward"))
    around(session, "reopen", after=moved)
    around(KeptSteps, "keep", before=keeps)
    train(root, strategy_of(root, case.plan), begins)


def resume(root: Path, file: Path, case: Case) -> None:
    """Goes on from the store, and compares with a run under plain Lightning that nobody killed."""
    import torch
    from support.models import difference

    begun: list[int] = []
    got = train(root, strategy_of(root, case.second), begun.append, store=root / "store")
    expected = torch.load(root / "plain.pt", weights_only=False)
    expected.losses = expected.losses[begun[0] :]
    file.write_text(json.dumps({"resumed_at": begun[0], "difference": difference(got, expected)}))


def count_in_place(root: Path, file: Path) -> None:
    from lightning_hetero.store.format.audit import StoreFiles
    from lightning_hetero.store.format.record import parse

    def count() -> int:
        with StoreFiles(root / "store") as files:
            assert files.record is not None
            return sum(entry.in_place is not None for entry in parse(files.record.user).parts)

    train(root, strategy_of(root, "disk"), stop=FREE - 1)
    before = count()
    train(root, strategy_of(root, "disk"), store=root / "store", stop=FREE + 1)
    file.write_text(json.dumps({"before": before, "after": count()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
