"""The layers of a module, and parameters whose values are on other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.parallel.pipeline.module import first_tensor


class Layers:
    """The layers of a module, and their parameters.

    Attributes:
        module: The whole module.
        names: The names of the layers.
        modules: The layers, in the order of forward.
        tied: Parameters that several layers use: their name, and these layers, ascending.
    """

    def __init__(self, module: nn.Module) -> None:
        """Reads the layers.

        Raises:
            ConfigError: A hook is missing or has a wrong result; a parameter is in no layer, or its
                values are elsewhere.
            UnsupportedError: A layer depends on other samples of its batch.
        """
        for hook in ("stage_layers", "loss_sum"):
            if not callable(getattr(module, hook, None)):
                raise ConfigError(
                    f"{type(module).__name__} has no {hook}(); pipelines need stage_layers() and loss_sum(output, batch), see "
                    "lightning_hetero.parallel.StagedSteps. A mean loss could not be added up over unequal groups."
                )
        hooks: Any = module
        found = hooks.stage_layers()
        if not isinstance(found, nn.ModuleDict) or not len(found):
            raise ConfigError(f"stage_layers() gave {type(found).__name__}; expected a torch.nn.ModuleDict of layers in order.")
        self.module = module
        self.names, self.modules = tuple(found), tuple(found.values())
        users: dict[str, list[int]] = {name: [] for name in dict(module.named_parameters())}
        for index in range(len(self.names)):
            for name in self.parameters(index):
                users[name].append(index)
        self.tied = {name: tuple(own) for name, own in users.items() if len(own) > 1}
        self._check([name for name, own in users.items() if not own])

    def _check(self, outside: list[str]) -> None:
        if outside:
            raise ConfigError(f"parameter {outside[0]!r} is in no layer of stage_layers(); every parameter must be in one.")
        for name, layer in zip(self.names, self.modules, strict=True):
            for inner in layer.modules():
                if isinstance(inner, _BatchNorm):
                    raise UnsupportedError(
                        f"layer {name!r} has a {type(inner).__name__}, whose statistics depend on how batches are divided. "
                        "Use LayerNorm, GroupNorm or RMSNorm."
                    )
        for name, parameter in self.module.named_parameters():
            if parameter.is_meta:
                raise ConfigError(f"parameter {name!r} is on the meta device; build the module in host memory.")
            if is_elsewhere(parameter):
                raise ConfigError(
                    f"the values of parameter {name!r} are on another rank since an earlier fit; use a new module and a checkpoint."
                )

    def __len__(self) -> int:
        return len(self.modules)

    def parameters(self, layer: int) -> dict[str, nn.Parameter]:
        """A layer's parameters by their names in the module; the first name of two counts."""
        return self._own(dict(self.module.named_parameters()), self.modules[layer].parameters())

    def entries(self, layer: int) -> dict[str, Tensor]:
        """A layer's parameters and buffers in the module's state dict, under all of their names."""
        modules = self.modules[layer]
        every = {k: v for k, v in self.module.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
        return self._own(every, (*modules.parameters(), *modules.buffers()))

    def elsewhere(self, own: range) -> set[str]:
        """Names in the module's state dict of layers outside ``own``."""
        here = {id(t) for index in own for t in _tensors(self.modules[index])}
        others = {id(t) for layer in self.modules for t in _tensors(layer)} - here
        return {name for name, value in self.module.state_dict(keep_vars=True).items() if id(value) in others}

    @staticmethod
    def _own(names: dict[str, Any], tensors: Iterable[Tensor]) -> dict[str, Any]:
        own = {id(tensor) for tensor in tensors}
        return {name: tensor for name, tensor in names.items() if id(tensor) in own}

    def repeated(self, count: int | None = None) -> range:
        """The layers that a plan counts: the longest run of one class, or a run of a given length.

        Raises:
            ConfigError: There is no such run, or more than one.
        """
        if count == len(self):
            return range(count)
        runs, begin = [], 0
        for _, run in groupby(self.modules, key=type):
            size = len(list(run))
            runs.append(range(begin, begin + size))
            begin += size
        wanted = max(map(len, runs)) if count is None else count
        fitting = [run for run in runs if len(run) == wanted]
        if len(fitting) != 1:
            kinds = ", ".join(f"{len(run)} x {type(self.modules[run.start]).__name__}" for run in runs)
            raise ConfigError(
                f"stage_layers() has {kinds}; the plan has {wanted} repeated layers, which must be one run of a class, or all."
            )
        return fitting[0]

    def stage_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """The input of the first layer."""
        own: Any = getattr(self.module, "stage_inputs", None)
        found = first_tensor(batch) if own is None else own(batch)
        return found if isinstance(found, tuple) else (found,)

    def keep(self, layers: range, device: torch.device) -> None:
        """Moves some layers to a device and frees the others.

        Their parameters keep shape and identity.
        """
        for index in layers:
            self.modules[index].to(device)
        kept = {id(t) for index in layers for t in _tensors(self.modules[index])}
        for index in range(len(self)):
            for tensor in _tensors(self.modules[index]):
                if id(tensor) not in kept:
                    tensor.data = elsewhere(tensor)


def _tensors(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(), *layer.buffers()]


def elsewhere(tensor: Tensor) -> Tensor:
    """A stand-in for a tensor on another rank: one expanded element, NaN if the dtype has it."""
    fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), fill, dtype=tensor.dtype).expand(tensor.shape)


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether :func:`elsewhere` made it."""
    return tensor.dim() > 0 and not any(tensor.stride())
