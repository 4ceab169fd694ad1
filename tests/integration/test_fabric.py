"""``Fabric(strategy="hetero_offload")``: the bits of plain Fabric."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from support.models import Model, Shape
from torch import Tensor
from torch.nn import functional as F

from lightning_hetero.errors import HeteroError


def batches(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield torch.randint(0, 37, (4, 6), generator=generator)


def fit(fabric: Fabric, *, apart: bool = False, clip: float | None = None, accumulate: int = 1) -> dict[str, Any]:
    torch.manual_seed(3)
    model = Model(Shape(dropout=0.1))
    if apart:
        module = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=0.01, fused=True))
    else:
        module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    losses = []
    for number, tokens in enumerate(batches(10)):
        loss = F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        fabric.backward(loss / accumulate)
        losses.append(loss.item())
        if (number + 1) % accumulate == 0:
            if clip is not None:
                losses.append(float(fabric.clip_gradients(module, optimizer, max_norm=clip)))
            optimizer.step()
            optimizer.zero_grad()
    return {
        "losses": losses,
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "module": module,
        "optimizer": optimizer,
    }


def plain(precision: Any = "32-true", **options: Any) -> dict[str, Any]:
    return fit(Fabric(accelerator="cpu", devices=1, precision=precision), **options)


@pytest.mark.parametrize("options", [{}, {"clip": 0.05}, {"accumulate": 2, "clip": 0.05}, {"apart": True}])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_has_the_bits_that_it_has_alone(options: dict[str, Any], precision: Any) -> None:
    expected = plain(precision, **options)
    ours = fit(Fabric(accelerator="cpu", devices=1, strategy="hetero_offload", precision=precision), **options)
    assert ours["losses"] == expected["losses"]
    assert all(torch.equal(value, ours["weights"][name]) for name, value in expected["weights"].items())


def test_a_checkpoint_goes_both_ways(tmp_path: Path) -> None:
    from lightning_hetero.loops.fabric import HeteroOffloadFabricStrategy

    def after(strategy: Any, path: Path, *, save: bool) -> dict[str, Any]:
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        run = fit(fabric)
        state = {"model": run["module"], "optimizer": run["optimizer"]}
        if save:
            fabric.save(path, state)
        else:
            fabric.load(path, state)
        return {"model": run["module"].state_dict(), "optimizer": run["optimizer"].state_dict()}

    ours = after(HeteroOffloadFabricStrategy("disk"), tmp_path / "ours.ckpt", save=True)
    theirs = after("auto", tmp_path / "ours.ckpt", save=False)
    for name, value in theirs["model"].items():
        assert torch.equal(value, ours["model"][name].clone())
    again = after(HeteroOffloadFabricStrategy("disk"), tmp_path / "ours.ckpt", save=False)
    for name, value in theirs["model"].items():
        assert torch.equal(value, again["model"][name].clone())
    assert again["optimizer"]["state"].keys() == theirs["optimizer"]["state"].keys()


@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 1, "num_nodes": 2}])
def test_several_devices_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((HeteroError, RuntimeError)):
        Fabric(accelerator="cpu", strategy="hetero_offload", **options).launch()
