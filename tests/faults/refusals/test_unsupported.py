"""What this version does not do."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import SLURMEnvironment
from support.models import Outcome, Recipe, Shape
from support.refusals import RECIPE, assert_usable, fit, new_module, refused, tree

from lightning_hetero.errors import (
    ConfigError,
    OutOfMemoryBudgetError,
    UnsupportedError,
)
from lightning_hetero.strategies import HeteroOffloadStrategy
from lightning_hetero.strategies.offload_ranks import _unshared


class Other(Precision):
    """A precision plugin of somebody else."""

    precision: Any = "other"


@pytest.mark.parametrize(
    ("options", "flags", "words"),
    [
        ({}, {"plugins": Other()}, ["precision='other'", "'bf16-mixed'"]),
        ({}, {"sync_batchnorm": True}, ["sync_batchnorm=True"]),
    ],
)
def test_several_devices_refuse_by_name_before_processes_start(
    root: Path, options: dict[str, Any], flags: dict[str, Any], words: list[str]
) -> None:
    strategy = HeteroOffloadStrategy(**{"plan": "host", **options})
    with pytest.raises(UnsupportedError) as caught:
        Trainer(accelerator="cpu", devices=2, strategy=strategy, default_root_dir=root, **flags)
    assert all(word in str(caught.value) for word in ["devices=2", "devices=1", *words])


def test_the_remedy_for_weights_that_a_forward_changes_is_to_leave_max_norm_out() -> None:
    assert _unshared(torch.nn.Embedding(4, 2)) is None
    what, remedy = _unshared(torch.nn.Embedding(4, 2, max_norm=0.5)) or ("", "")
    assert "max_norm=0.5" in what
    assert remedy == "Leave max_norm out."


def test_the_remedy_for_adapters_that_replace_a_weight_in_forward_is_to_adapt_modules() -> None:
    peft = pytest.importorskip("peft", reason="peft, whose adapters of experts are refused, is missing")

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.ones(2, 3, 4))

    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": Experts()}), "q": torch.nn.Linear(2, 2)})
    on_modules = peft.inject_adapter_in_model(peft.LoraConfig(r=1, target_modules=["q"]), deepcopy(model))
    assert _unshared(on_modules) is None
    config = peft.LoraConfig(r=1, target_modules=[], target_parameters=["experts.gate_up_proj"])
    what, remedy = _unshared(peft.inject_adapter_in_model(config, model)) or ("", "")
    assert what == "the LoRA adapter of PEFT at 'mlp.experts', which replaces the weight 'gate_up_proj' in every forward,"
    assert remedy == "Leave target_parameters out of its LoraConfig: adapters of modules (target_modules) train there."


def test_two_nodes_with_a_device_each_are_refused(root: Path) -> None:
    refused_in(root, UnsupportedError, ["devices=1, num_nodes=2", "Pass devices=2 or more, or num_nodes=1"], num_nodes=2)


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_one_of_several_processes_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    variables = {
        "torchrun": {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "WORLD_SIZE": "2"},
        "srun": {
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_JOB_NAME": "train",
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "0",
        },
    }[launcher]
    for name, value in (variables | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    words = ["has started 2 processes", "a model of its own", "Pass devices=2 to train one model", "--nproc-per-node=1"]
    with pytest.raises(UnsupportedError) as caught:
        fit(new_module(), root, HeteroOffloadStrategy("disk"))
    assert all(word in str(caught.value) for word in words)


def test_a_slurm_that_names_no_number_of_processes_is_one_process(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SLURMEnvironment, "detect", lambda: True)
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    assert fit(new_module(), root, HeteroOffloadStrategy("disk")).global_step > 0


def test_more_host_memory_than_the_machine_has_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"host_memory=1000\.0 TiB; this machine.* has .*GiB. Give at most that"):
        fit(new_module(), root, HeteroOffloadStrategy("disk", host_memory="1000TiB"))


def test_a_plan_is_not_recommended_to_itself(root: Path) -> None:
    with pytest.raises(OutOfMemoryBudgetError, match="fewer weights outside repeated blocks") as caught:
        fit(new_module(), root, HeteroOffloadStrategy("disk", host_memory="100KiB"))
    assert "plan=" not in str(caught.value)
    with pytest.raises(OutOfMemoryBudgetError, match=r'weights on "disk" \(plan="disk"\)'):
        fit(new_module(Recipe(shape=Shape(layers=12, width=256))), root, HeteroOffloadStrategy("host", host_memory="100KiB"))


@pytest.mark.parametrize(("option", "typo", "meant"), [("plan", "dsik", "disk"), ("durability", "proces", "process")])
def test_a_mistyped_value_is_refused_with_the_one_that_was_meant(option: str, typo: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
        HeteroOffloadStrategy(**{option: typo})


def refused_in(root: Path, error: type[Exception], words: list[str], **options: Any) -> None:
    module = new_module()
    with pytest.raises(error) as caught:
        fit(module, root, HeteroOffloadStrategy(plan="disk"), **options)
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)
    assert tree(root) == {}


def test_an_accelerator_without_lanes_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.accelerators import MPSAccelerator as accelerator

    monkeypatch.setattr(accelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(accelerator, "auto_device_count", staticmethod(lambda: 1))
    monkeypatch.setattr(accelerator, "parse_devices", staticmethod(lambda devices: [0]))
    monkeypatch.setattr(accelerator, "get_parallel_devices", staticmethod(lambda devices: [torch.device("mps", 0)]))
    words = ["MPSAccelerator", "CUDA or ROCm GPU", 'accelerator="cpu"', 'accelerator="cuda"']
    refused_in(root, UnsupportedError, words, accelerator="mps", devices=1)


def test_lbfgs_is_refused(root: Path) -> None:
    module = new_module(Recipe(steps=1, optimizer=torch.optim.LBFGS))
    refused(UnsupportedError, ["LBFGS", "closure", "torch.optim.AdamW"], root, module)


def test_an_unknown_optimizer_on_disk_is_refused(root: Path, plain: Outcome) -> None:
    class Coupled(torch.optim.SGD):
        """An optimizer from elsewhere."""

    Coupled.__module__ = "elsewhere"
    module = new_module(Recipe(steps=1, optimizer=lambda groups: Coupled(groups, lr=0.1)))
    refused(UnsupportedError, ["Coupled", "hetero_blockwise = True", 'plan="host"'], root, module)
    module.recipe = RECIPE
    assert_usable(module, root, plain)


@pytest.mark.parametrize("plan", ["host", "disk"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_sparse_gradients_are_refused(root: Path, plan: str, clip: float | None) -> None:
    module = new_module()
    module.model.embed.sparse = True
    with pytest.raises(UnsupportedError) as caught:
        fit(module, root, HeteroOffloadStrategy(plan=plan), gradient_clip_val=clip)
    text = str(caught.value)
    assert not [w for w in ("model.embed.weight", "sparse", "sparse=False") if w not in text], text
    assert tree(root) == {}
