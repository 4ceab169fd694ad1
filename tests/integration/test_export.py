"""Weights go out as they are, from a model in training, a checkpoint or safetensors, one tensor at
a time.
"""

from __future__ import annotations

import os
import resource
import signal
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from support.children import in_child
from support.models import LitModel, Recipe, Shape, data, quiet_trainer
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_hetero import export_weights
from lightning_hetero.checkpoint.files import Place
from lightning_hetero.convert.exporting import import_weights, weights_of
from lightning_hetero.convert.safetensors import TensorToWrite, WeightFiles, write_directory
from lightning_hetero.errors import ConfigError, OutOfDiskError, StoreCorruptError, StoreError, UnsupportedError
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.volume import Volume
from lightning_hetero.strategies import HeteroOffloadStrategy

pytest.importorskip("transformers")
from support import llama


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(
        torch.equal(v, expected[n]) and v.dtype == expected[n].dtype for n, v in got.items()
    )


def read(directory: Path) -> dict[str, Tensor]:
    return {name: tensor.read() for name, tensor in WeightFiles.open(directory).tensors.items()}


class Exports(pl.Callback):
    """Exports after every step, while updates may be under way."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        export_weights(module, self.root / str(trainer.global_step), module="model")


def trained(tmp_path: Path, strategy: Any, *, tied: bool, root: Path) -> tuple[pl.Trainer, LitModel]:
    torch.manual_seed(7)
    module = LitModel(Recipe(shape=Shape(tied=tied)))
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=2, default_root_dir=tmp_path, limit_val_batches=0, callbacks=[Exports(root)]
    )  # fmt: skip
    trainer.fit(module, data())
    return trainer, module


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("plan", ["host", "disk"])
def test_a_model_in_training_is_exported_as_plain_lightning_has_it(plan: str, tied: bool, tmp_path: Path) -> None:
    trained(tmp_path, "auto", tied=tied, root=tmp_path / "plain")
    trained(tmp_path, HeteroOffloadStrategy(plan=plan), tied=tied, root=tmp_path / "ours")
    for step in ("1", "2"):
        ours = load_file(tmp_path / "ours" / step / "model.safetensors")
        assert same(ours, load_file(tmp_path / "plain" / step / "model.safetensors"))
        assert ("head.weight" in ours) is not tied


def test_a_checkpoint_is_exported_and_a_model_loads_it(tmp_path: Path) -> None:
    trainer, module = trained(tmp_path, HeteroOffloadStrategy(plan="disk"), tied=True, root=tmp_path / "ours")
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    files = export_weights(tmp_path / "x.ckpt", tmp_path / "out", module="model", max_shard_size="20kB")
    assert len(files) > 1
    tensors = read(tmp_path / "out")
    assert "head.weight" not in tensors
    assert same(tensors | {"head.weight": tensors["embed.weight"]}, dict(module.model.state_dict()))


def test_a_module_is_exported_with_the_weights_that_it_shares_with_others(tmp_path: Path) -> None:
    """Their first name may be outside of it."""
    root = torch.nn.ModuleDict({"encoder": torch.nn.Embedding(5, 3), "decoder": torch.nn.Linear(3, 5)})
    root["decoder"].weight = root["encoder"].weight
    export_weights(root, tmp_path / "model", module="decoder")
    torch.save({"state_dict": root.state_dict()}, tmp_path / "x.pt")
    export_weights(tmp_path / "x.pt", tmp_path / "file", module="decoder")
    for name in ("model", "file"):
        assert same(load_file(tmp_path / name / "model.safetensors"), dict(root["decoder"].state_dict()))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("plan", ["host", "disk"])
def test_a_stores_last_step_is_exported(plan: str, precision: str, tmp_path: Path) -> None:
    """Whatever the plan keeps in memory is in the store too."""

    class Permuted(LitModel):
        def __init__(self, recipe: Recipe) -> None:
            super().__init__(recipe)
            self.model.head.weight = torch.nn.Parameter(self.model.head.weight.detach().t().contiguous().t())

    strategy = HeteroOffloadStrategy(plan=plan, disk_path=tmp_path / "store")
    torch.manual_seed(7)
    module = Permuted(Recipe(shape=Shape(frozen=(1,))))
    trainer = quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=tmp_path, limit_val_batches=0, precision=precision)
    trainer.fit(module, data())
    export_weights(tmp_path / "store", tmp_path / "out", module="model")
    assert same(read(tmp_path / "out"), dict(module.model.state_dict()))
    export_weights(tmp_path / "store", tmp_path / "x.ckpt")
    assert same(torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"], dict(module.state_dict()))
    with StoreFiles(tmp_path / "store") as store:
        assert store.record is not None
        block = store.record.blocks[0]
        with store.slot(block) as slot:
            has_weights = slot.geometry.weights_on_disk_file
    if has_weights:
        content = bytearray((tmp_path / "store" / block.file).read_bytes())
        content[4096] ^= 1  # behind the head
        (tmp_path / "store" / block.file).write_bytes(content)
        with pytest.raises(StoreCorruptError, match=rf"{block.file} at offset 4096, block {block.id}: the digest of chunk 0"):
            export_weights(tmp_path / "store", tmp_path / "changed")


def test_weights_come_back_as_a_lightning_checkpoint(tmp_path: Path) -> None:
    directory = llama.save(tmp_path / "weights", tied=True, dtype=torch.bfloat16, max_shard_size="10kB")
    tie = {"lm_head.weight": "model.embed_tokens.weight"}
    path = import_weights(directory, tmp_path / "x.ckpt", module="model", ties=tie, dtype=torch.float32)
    module = llama.on_meta(tied=True)
    expected = llama.from_directory(directory)
    losses = []
    for each, options in ((module, {"ckpt_path": path, "weights_only": True}), (expected, {})):
        strategy = HeteroOffloadStrategy(plan="disk") if options else "auto"
        trainer = quiet_trainer(strategy=strategy, default_root_dir=tmp_path, limit_val_batches=2)
        trainer.validate(each, llama.batches(), verbose=False, **options)
        losses.append(each.losses)
    assert len(losses[0]) == 2
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert same(dict(module.state_dict()), dict(expected.state_dict()))


def test_transformers_loads_exported_weights(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    directory = llama.save(tmp_path / "weights", tied=True)
    module = llama.on_meta(tied=True)
    strategy = HeteroOffloadStrategy(plan="disk", weights=directory)
    trainer = quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=tmp_path, limit_val_batches=0)
    trainer.fit(module, llama.batches())
    export_weights(module, tmp_path / "out", module="model", max_shard_size="10kB")
    module.model.config.save_pretrained(tmp_path / "out")
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()(tokens).logits
        assert torch.equal(logits, module.model.eval()(tokens).logits)
        assert not torch.equal(logits, LlamaForCausalLM.from_pretrained(directory).eval()(tokens).logits)


def test_values_may_be_narrowed_and_integers_stay(tmp_path: Path) -> None:
    module = LitModel(Recipe())
    export_weights(module, tmp_path / "out", dtype=torch.bfloat16)
    expected = {n: v.bfloat16() if v.is_floating_point() else v for n, v in module.state_dict().items()}
    assert same(read(tmp_path / "out"), expected)


def test_one_tensor_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"state_dict": {f"t{i}": torch.full((300_000,), float(i)) for i in range(4)}}, tmp_path / "x.ckpt")
    released = []
    monkeypatch.setattr("lightning_hetero.convert.exporting.release_pages", lambda t: released.append(t.numel()))
    tensors = weights_of(tmp_path / "x.ckpt", ExitStack())
    for index, tensor in enumerate(tensors):
        assert len(released) == index
        assert torch.equal(tensor.read(), torch.full((300_000,), float(index)))
    assert len(released) == 4


# ---- refusals ------------------------------------------------------------------------------------


def test_a_full_disk_is_named_before_and_while_weights_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, before = LitModel(Recipe()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StoreError, match=r"out/model.safetensors' of .*KiB cannot be written: .*too large.*Make room"):
            export_weights(module, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*(tmp_path / "out").iterdir()] == []
    small = replace(Volume.of(tmp_path), free_bytes=4096)
    monkeypatch.setattr(Volume, "of", lambda _: small)
    with pytest.raises(OutOfDiskError, match=r"out' take .*KiB, and the disk has 4.0 KiB free. Make room"):
        export_weights(module, tmp_path / "out")
    assert [*(tmp_path / "out").iterdir()] == []


def test_what_a_killed_export_leaves_goes_with_the_next_one(tmp_path: Path) -> None:
    def dies() -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def export() -> None:
        last = TensorToWrite("last", torch.float32, torch.Size([2]), dies)
        write_directory(Place.of(tmp_path), [*weights_of(nn.Linear(300, 300), ExitStack()), last], max_shard_bytes=1 << 40)

    assert in_child(export)
    assert [path.stat().st_size > 300 * 300 * 4 for path in tmp_path.iterdir()] == [True]
    with Place.of(tmp_path / "other").appears_whole() as file:  # by a living process, another one as well
        file.write(b"of others")
        (tmp_path / ".of-nobody.partial").write_bytes(b"")
        export_weights(nn.Linear(2, 2), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "other", ".of-nobody.partial"}
    assert (tmp_path / "other").read_bytes() == b"of others"


def test_what_another_host_writes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On many shared file systems each host has locks of its own."""
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    with monkeypatch.context() as there:
        there.setattr("socket.gethostname", lambda: "another")
        file = Place.of(tmp_path / "other").appears_whole()
        file.__enter__().write(b"of others")
    export_weights(nn.Linear(2, 2), tmp_path)
    file.__exit__(None, None, None)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "other"}
    assert (tmp_path / "other").read_bytes() == b"of others"


def test_a_checkpoint_that_needs_execution_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"x": torch.ones(2)}, "notes": Namespace(by="anybody")}, tmp_path / "x.ckpt")
    with pytest.raises(ConfigError, match="without executing"):
        export_weights(tmp_path / "x.ckpt", tmp_path / "out")
    (tmp_path / "y.ckpt").write_bytes(b"PK\3\4 and so on")
    with pytest.raises(ConfigError, match="cannot be read as a checkpoint"):
        export_weights(tmp_path / "y.ckpt", tmp_path / "out")
    torch.save({"epoch": 1}, tmp_path / "z.ckpt")
    with pytest.raises(ConfigError, match="no state_dict"):
        export_weights(tmp_path / "z.ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begin with model"):
        export_weights(LitModel(Recipe()), tmp_path / "out", module="net")
    directory = llama.save(tmp_path / "weights")
    with pytest.raises(ConfigError, match="'nothing' is not in the files"):
        import_weights(directory, tmp_path / "x.ckpt", ties={"a": "nothing"})
    with pytest.raises(ConfigError, match="in the files itself"):
        import_weights(directory, tmp_path / "x.ckpt", ties={"lm_head.weight": "model.norm.weight"})
    with pytest.raises(ConfigError, match=r"ends in \.ckpt"):
        import_weights(directory, tmp_path / "x.pt")


@pytest.mark.parametrize("destination", ["out", "out.ckpt"])
def test_weights_of_several_tensors_are_refused_by_name(destination: str, tmp_path: Path) -> None:
    """They have no address; torchao's quantized weights are such."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"'0.weight' is a TwoTensor: its content is several tensors"):
        export_weights(model, tmp_path / destination)
    assert not (tmp_path / destination).exists()
