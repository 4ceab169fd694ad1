"""State dicts as of one process: gathered on rank 0, or reduced to a rank's share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.parallel.pipeline.runtime import Pipelines
from lightning_hetero.parallel.pipeline.synchronise import like, local


def model_state(pipelines: Pipelines) -> dict[str, Any]:
    """The whole module's state dict on rank 0, on the CPU; empty on other ranks.

    All ranks call it.
    """
    layers = pipelines.layers
    found = _gathered(pipelines, lambda layer: {name: _whole(value) for name, value in layers.entries(layer).items()})
    if pipelines.rank:
        return {}
    own = layers.module.state_dict()
    return {name: found.get(name, value) for name, value in own.items()}


def optimizer_state(pipelines: Pipelines, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state dict of all parameters on rank 0; empty on other ranks.

    All ranks call it.
    """
    own = optimizer.state_dict()
    index = {id(p): i for i, p in enumerate(_parameters(optimizer))}

    def of(layer: int) -> dict[int, Any]:
        numbers = (index[id(p)] for p in pipelines.layers.parameters(layer).values() if id(p) in index)
        return {i: {k: _whole(v) for k, v in own["state"][i].items()} for i in numbers if i in own["state"]}

    found = _gathered(pipelines, of)
    return {} if pipelines.rank else {**own, "state": dict(sorted(found.items()))}


def load_model_state(pipelines: Pipelines, state: dict[str, Any], *, strict: bool) -> None:
    """Loads this rank's share of a state dict with all names.

    Values of other ranks may be on the meta device.
    """
    module = pipelines.layers.module
    held: dict[str, Any] = module.state_dict(keep_vars=True)
    elsewhere = pipelines.layers.elsewhere(pipelines.own)
    own = {name: _part(held.get(name), value) for name, value in state.items() if name not in elsewhere}
    result = module.load_state_dict(own, strict=False)
    missing = [name for name in result.missing_keys if name not in state]
    if strict and (missing or result.unexpected_keys):
        raise RuntimeError(f"the state dict lacks {missing} and has unexpected {result.unexpected_keys}.")


def load_optimizer_state(pipelines: Pipelines, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads this rank's share of a whole optimizer's state dict."""
    held = {id(p) for p in pipelines.parameters()}
    own = {}
    for i, parameter in enumerate(_parameters(optimizer)):
        if id(parameter) in held and i in state["state"]:
            own[i] = {k: _part(parameter, v) for k, v in state["state"][i].items()}
    optimizer.load_state_dict({**state, "state": own})


def own_model_state(pipelines: Pipelines) -> dict[str, Any]:
    """The module's state dict without entries that only other ranks have."""
    elsewhere = pipelines.layers.elsewhere(pipelines.own)
    return {name: value for name, value in pipelines.layers.module.state_dict().items() if name not in elsewhere}


def own_optimizer_state(pipelines: Pipelines, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state dict without parameters that only other ranks have."""
    whole = optimizer.state_dict()
    held = {id(p) for p in pipelines.parameters()}
    own = {i for i, p in enumerate(_parameters(optimizer)) if id(p) in held}
    return {**whole, "state": {i: state for i, state in whole["state"].items() if i in own}}


def places(pipelines: Pipelines) -> Callable[[str, Tensor], Tensor | None]:
    """The target of a saved tensor on this rank, by name and by a tensor of its shape and dtype.

    The target is ``None`` for tensors that only other ranks have. Of a sharded tensor each rank
    gets a tensor for its shard.
    """
    layers = pipelines.layers
    held, elsewhere = layers.module.state_dict(keep_vars=True), layers.elsewhere(pipelines.own)

    def place(name: str, saved: Tensor) -> Tensor | None:
        if name in elsewhere:
            return None
        parameter: Any = held.get(name)
        if hasattr(parameter, "to_local") and parameter.shape == saved.shape:
            return like(parameter, torch.empty_like(local(parameter), dtype=saved.dtype))
        return torch.empty_like(saved, device="cpu")

    return place


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _gathered(pipelines: Pipelines, of: Callable[[int], dict[Any, Any]]) -> dict[Any, Any]:
    """The state of rank 0's pipeline, layer by layer: at most one layer is in transfer."""
    layout, rank = pipelines.layout, pipelines.rank
    group = 0 if layout.slots[0] is None else layout.slots[0].group
    found: dict[Any, Any] = {}
    for layer in range(layout.num_layers):
        owners = layout.stage(group, layout.stage_of(group, layer))
        piece = of(layer) if rank in owners else {}
        if owners[0] == rank != 0:
            dist.send_object_list([piece], dst=0, device=pipelines.device)
        elif owners[0] != rank == 0:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=owners[0], device=pipelines.device)
            piece = received[0]
        for key, value in piece.items():
            found.setdefault(key, value)
    return found


def _whole(value: Any) -> Any:
    """A tensor assembled from its shards, on the CPU; other objects unchanged."""
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _part(parameter: Any, value: Any) -> Any:
    """This rank's part of a whole tensor, for a parameter of its shape."""
    if not isinstance(value, Tensor) or not hasattr(parameter, "to_local") or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)
