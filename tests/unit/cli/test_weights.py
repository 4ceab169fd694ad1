"""``lightning-hetero inspect``, ``verify``, ``export``, ``import``: what is where, whether it is
whole, and in another format.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli import HARDWARE, MODEL, invoke, parsed
from support.models import LitModel, Recipe, quiet_trainer
from support.models import data as batches

from lightning_hetero.ir.plan import BlockPlan, Plan
from lightning_hetero.strategies import HeteroOffloadStrategy


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a store and the checkpoint of the same run."""
    root = tmp_path_factory.mktemp("trained")
    strategy: Any = HeteroOffloadStrategy(plan="disk", disk_path=root / "store", verify_digests=True)
    trainer = quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=root, limit_val_batches=0)
    trainer.fit(LitModel(Recipe()), batches())
    trainer.save_checkpoint(root / "x.ckpt")
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    """The same, to spoil."""
    shutil.copytree(trained, tmp_path / "copy")
    (tmp_path / "copy" / "store").chmod(0o700)
    return tmp_path / "copy"


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


# ---- inspect -------------------------------------------------------------------------------------


def test_inspect_shows_a_stores_step_blocks_and_parameters(trained: Path) -> None:
    got = parsed("inspect", trained / "store")
    assert got["kind"] == "store"
    assert got["facts"]["step"] > 0
    assert got["facts"]["global_step"] == 2, "Lightning's, whatever the commit's own number is"
    assert got["facts"]["model"] == "LitModel"
    assert {row["name"]: tuple(row["shape"]) for row in got["tensors"]}["model.blocks.0.up.weight"] == (51, 24)
    assert all(row["has_digests"] for row in got["blocks"])
    assert {row["weights"] for row in got["blocks"]} == {"float32", "bytes", None}  # bytes: of weights in memory
    assert {row["state_arrays"] for row in got["blocks"]} == {2, 0}
    assert {"model.blocks.0", "model.head (weights)"} <= {row["name"] for row in got["blocks"]}
    text = invoke("inspect", trained / "store").output
    assert "model.blocks.*.up.weight" in text
    assert "Blocks that the last record names" in text


def test_inspect_shows_a_checkpoint(trained: Path) -> None:
    got = parsed("inspect", trained / "x.ckpt")
    assert got["kind"] == "checkpoint"
    assert got["facts"]["global_step"] == 2
    rows = {(row["place"], row["name"]): row for row in got["tensors"]}
    assert rows["state_dict", "model.embed.weight"]["shape"] == [37, 24]
    assert rows["optimizer_states", "0/state/0/exp_avg"]["dtype"] == "float32"
    assert "global step" in invoke("inspect", trained / "x.ckpt").output


def test_inspect_shows_safetensors_and_plans(tmp_path: Path) -> None:
    save_file({f"h.{i}.w": torch.ones(3, dtype=torch.bfloat16) for i in range(4)}, tmp_path / "w.safetensors", metadata={"a": "b"})
    got = parsed("inspect", tmp_path)
    assert got["facts"] == {"files": ["w.safetensors"], "metadata": {"a": "b"}}
    assert got["tensors"][0] == {"name": "h.0.w", "dtype": "bfloat16", "shape": [3], "num_bytes": 6, "place": "w.safetensors"}
    assert "h.*.w" in invoke("inspect", tmp_path / "w.safetensors").output
    (tmp_path / "plan.json").write_text(Plan(name="mine", blocks=(BlockPlan(name="*"),)).to_json())
    assert parsed("inspect", tmp_path / "plan.json")["facts"]["plan"]["name"] == "mine"
    assert "mine" in invoke("inspect", tmp_path / "plan.json").output


class Trap:
    """Its unpickling would leave a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    torch.save({"state_dict": {"x": torch.ones(2)}, "trap": Trap(tmp_path / "sprung"), "n": Namespace()}, tmp_path / "x.ckpt")
    got = parsed("inspect", tmp_path / "x.ckpt")
    assert "argparse.Namespace" in got["facts"]["needs_to_execute"]
    report = parsed("verify", tmp_path / "x.ckpt")
    assert report["faults"] == []
    assert "argparse.Namespace" in report["notes"][0]
    assert "without executing" in parsed("export", tmp_path / "x.ckpt", tmp_path / "out", code=2)["error"]
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "neither a store"),
        (lambda path: path.write_text("text"), "no safetensors file, no checkpoint"),
        (lambda path: path.write_text('{"format": "other"}'), "format"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_unknown_kind_exits_2(command: str, make: Any, words: str, tmp_path: Path) -> None:
    make(tmp_path / "x")
    if command == "verify" and words == "format":
        assert words in parsed(command, tmp_path / "x", code=1)["faults"][0]
        return
    invoke(command, tmp_path / "x", code=2)
    assert words in parsed(command, tmp_path / "x", code=2)["error"]


# ---- verify --------------------------------------------------------------------------------------


def test_a_complete_file_has_no_faults(trained: Path, tmp_path: Path) -> None:
    assert parsed("verify", trained / "store") == {
        "kind": "store", "path": str(trained / "store"), "faults": [], "notes": [],
        "checked": parsed("verify", trained / "store")["checked"],
    }  # fmt: skip
    commit = parsed("inspect", trained / "store")["facts"]["step"]
    assert parsed("verify", trained / "store")["checked"].startswith(f"training step 2 (commit {commit}): stamps")
    assert "faults" in invoke("verify", trained / "store").output
    assert parsed("verify", trained / "x.ckpt")["faults"] == []
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors")
    assert parsed("verify", tmp_path)["faults"] == []


def test_a_changed_byte_of_a_store_is_named_with_its_place(root: Path) -> None:
    path = sorted((root / "store").glob("block-*"))[0]
    for slot in "ab":
        flip(path.with_suffix(f".{slot}"), 4096)
    (fault,) = parsed("verify", root / "store", code=1)["faults"]
    assert path.stem in fault
    assert fault.startswith("model")  # the block's name
    assert "offset 4096" in fault
    assert "differs" in fault
    assert "fault:" in invoke("verify", root / "store", code=1).output


def test_a_changed_byte_of_a_checkpoint_is_named_with_its_record(root: Path) -> None:
    flip(root / "x.ckpt", (root / "x.ckpt").stat().st_size // 2)
    (fault,) = parsed("verify", root / "x.ckpt", code=1)["faults"]
    assert "x.ckpt at offset" in fault
    assert "data/" in fault


@pytest.mark.parametrize("name", ["x.ckpt", "x.pt"])
@pytest.mark.parametrize("size", [0, 40, -100])
def test_a_truncated_checkpoint_is_a_fault(name: str, size: int, root: Path) -> None:
    raw = (root / "x.ckpt").read_bytes()[:size]
    path = root / name
    path.write_bytes(raw)
    if name == "x.pt" and not raw:  # nothing says what it was
        invoke("verify", path, code=2)
        return
    report = parsed("verify", path, code=1)
    assert report["kind"] == "checkpoint"
    assert name in report["faults"][0]
    invoke("inspect", path, code=2)


def test_profiles_and_cluster_plans_are_checked_by_their_own_rules(tmp_path: Path) -> None:
    for kind, value in (("model profile", MODEL), ("hardware profile", HARDWARE)):
        path = tmp_path / "x.json"
        path.write_text(value.to_json())
        report = parsed("verify", path)
        assert (report["kind"], report["faults"]) == (kind, [])
        path.write_text(value.to_json().replace('"name"', '"nom"', 1))
        assert "missing keys ['name']" in parsed("verify", path, code=1)["faults"][0]
    cluster = ["--preset-model", "gpt:layers=4,hidden=512,heads=8", "--batch", "1", "--sequence", "128", "--micro-batches", "6"]
    invoke("plan-cluster", "2xa100-80", *cluster, "--out", tmp_path / "c.json")
    assert parsed("verify", tmp_path / "c.json")["kind"] == "cluster plan"


def test_a_short_safetensors_file_is_a_fault(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors")
    raw = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(raw[:-1])
    assert "end at byte" in parsed("verify", tmp_path, code=1)["faults"][0]


# ---- export and import ---------------------------------------------------------------------------


def test_weights_go_to_safetensors_and_back(trained: Path, tmp_path: Path) -> None:
    expected = torch.load(trained / "x.ckpt", weights_only=True)["state_dict"]
    files = parsed("export", trained / "x.ckpt", tmp_path / "out", "--module", "model", "--max-shard-size", "10kB")["files"]
    assert len(files) > 1
    assert all(Path(f["path"]).stat().st_size == f["num_bytes"] for f in files)
    assert "Wrote" in invoke("import", tmp_path / "out", tmp_path / "y.ckpt", "--module", "model").output
    back = torch.load(tmp_path / "y.ckpt", weights_only=True)["state_dict"]
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[n], v) for n, v in expected.items())
    invoke("export", tmp_path / "y.ckpt", tmp_path / "half", "--dtype", "bfloat16")
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert half["model.embed.weight"].dtype == torch.bfloat16
    tied = ["--tie", "twin.weight=embed.weight", "--tie", "twin"]
    assert "--tie 'twin'" in parsed("import", tmp_path / "out", tmp_path / "z.ckpt", *tied, code=2)["error"]
    invoke("import", tmp_path / "out", tmp_path / "z.ckpt", *tied[:2])
    assert torch.equal(torch.load(tmp_path / "z.ckpt")["state_dict"]["twin.weight"], expected["model.embed.weight"])


def test_an_export_over_other_weights_exits_2(trained: Path, tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors")
    assert "already holds w.safetensors" in parsed("export", trained / "x.ckpt", tmp_path, code=2)["error"]
