"""Changes by callbacks: optimizers' groups, frozen parameters, modes of modules.

[Note: Changes]
A resume makes model and optimizers as they were when training began. Callbacks may have unfrozen
layers since then, and do not do it again: Lightning's own callbacks restore the optimizers' groups,
but leave the layers frozen. So a record carries the changes. The store is opened with the groups of
its record, because they say which parameters have state in it. Afterwards the optimizers have their
first groups, because hooks at the start of a fit expect them. When Lightning restores the
optimizers, they get the groups of the record.

A record also says how model and optimizers were made; docs/durability.md says what must be equal.
Step counts and options are kept by parameter numbers, so the parameters' order counts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetero.errors import ConfigError
from lightning_hetero.runtime import quantized
from lightning_hetero.runtime.quantizing import packed_names
from lightning_hetero.untyped import Options

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import LRSchedulerConfig

log = logging.getLogger(__name__)

_MODES = ("training", "track_running_stats")  # the second is what a frozen batch norm has off

_HOW = ("foreach", "fused")  # options that choose an implementation, not an algorithm
_NUMBER = "a number"  # an option that is neither a flag nor a tensor

Groups = list[list[list[int]]]  # per optimizer and group, the numbers of the parameters


class ModelChanges:
    """The changes since a fit began."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        found: Options | None,
        schedulers: Sequence[LRSchedulerConfig] = (),
    ) -> None:
        self._params = list(module.parameters())
        self._numbers = {id(param): number for number, param in enumerate(self._params)}
        self._modules = dict(module.named_modules())
        self._attributes = [vars(module) for module in self._modules.values()]
        self._optimizers = list(optimizers)
        self._made, self._trains, self._modes = self._ids(), self._trains_now(), self._modes_now()
        self._groups = self._groups_now()
        described = [_described(*row) for row in zip(optimizers, self._groups, strict=True)]
        self._made_as: Options = {"model": _digest(module), "optimizers": described}
        self._made_as["schedulers"] = [_scheduled(config) for config in schedulers]
        self._found = {} if found is None else found
        self._record = self._found.get("changes")  # absent in old stores
        self._root = module
        self._made_as["quantization"] = {}

    def placed(self) -> None:
        """The model has its weights, so that those of all quantized layers have scales."""
        self._made_as["quantization"] = quantized.digests(self._root)

    def take(self) -> dict[str, object]:
        """The record's entry; ``None`` for a kind without changes.

        Raises:
            ConfigError: An optimizer has parameters that the model lacks.
        """
        changes: Options = {"groups": None, "frozen": None, "modes": {}, "made": self._made_as}
        if self._ids() != self._made:  # quick, because every step comes here
            groups = self._groups_now()
            if any(-1 in group for of_one in groups for group in of_one):
                raise ConfigError("An optimizer has got parameters that were not the model's when the fit began.")
            changes["groups"] = {"made": _sizes(self._groups), "now": groups}
        if (trains := self._trains_now()) != self._trains:
            changes["frozen"] = _frozen(trains)
        if (modes := self._modes_now()) != self._modes:
            rows = zip(self._modules, modes, self._modes, strict=True)
            changes["modes"] = {name: list(now) for name, now, before in rows if now != before}
        return changes

    def check(self) -> None:
        """Refuses other optimizers or schedulers than training began with.

        Opening the store refuses another model.

        Raises:
            ConfigError: Names the first difference.
        """
        made = None if self._record is None else self._record.get("made")  # absent in old stores
        if made is None or made["model"] != self._made_as["model"]:
            return
        coming = packed_names(self._root)  # these are checked as they are read
        scales = {name: digest for name, digest in kept_scales(self._found).items() if name not in coming}
        quantized.check_scales(quantized.digests(self._root), scales)
        ours, theirs = self._made_as["optimizers"], made["optimizers"]
        if len(ours) != len(theirs):
            raise ConfigError(f"the model has {len(ours)} optimizers, the store {len(theirs)}. Resume with the same ones.")
        for mine, kept in zip(ours, theirs, strict=True):
            if difference := self._difference(mine, kept):
                raise ConfigError(f"{difference}. Resume with the optimizer that training began with.")
        if (schedulers := made.get("schedulers")) is not None:  # absent in old stores
            self._check_schedulers(schedulers)

    def _check_schedulers(self, kept: list[Options]) -> None:
        ours = self._made_as["schedulers"]
        mine, theirs = (", ".join(row["name"] for row in rows) or "none" for rows in (ours, kept))
        if mine != theirs:
            raise ConfigError(
                f"the model has other learning rate schedulers: {mine} (the store's: {theirs}). Resume with the schedulers that "
                f"training began with."
            )
        for now, before in zip(ours, kept, strict=True):
            for key in (key for key in now if now[key] != before.get(key)):
                log.warning(
                    "%s has %s=%s, in the store %s=%s: from now on it steps as this model says.",
                    now["name"], key, now[key], key, before.get(key),
                )  # fmt: skip

    def _difference(self, mine: Options, kept: Options) -> str:
        name = mine["name"]
        if name != kept["name"]:
            return f"the optimizer is {name}, the store's {kept['name']}"
        sizes, others = ([len(group) for group in row["params"]] for row in (mine, kept))
        if sizes != others:
            return f"{name} has groups of {sizes} parameters, the store's optimizer {others}"
        for number, (options, theirs) in enumerate(zip(mine["options"], kept["options"], strict=True)):
            for key in sorted({*options, *theirs}):
                ours, other = (row.get(key, _NUMBER) for row in (options, theirs))
                if ours != other:
                    return f"{name} has {key}={ours} in group {number}, the store's optimizer {key}={other}"
        if len(self._optimizers) > 1 and set().union(*mine["params"]) != set().union(*kept["params"]):
            return ""  # they have exchanged parameters; opening the store names which
        names = {number: name for number, (name, _) in enumerate(self._modules[""].named_parameters())}
        for number, (params, theirs) in enumerate(zip(mine["params"], kept["params"], strict=True)):
            for place, (ours, other) in enumerate(zip(params, theirs, strict=True)):
                if ours != other:
                    return (
                        f"parameter {place} of group {number} of {name} is {names.get(ours)!r}, that of the store's optimizer "
                        f"{names.get(other)!r}: it has other parameters, or in another order"
                    )
        return ""

    def to_model(self) -> None:
        """Freezes and unfreezes parameters, and sets modes of modules, as the record says.

        Raises:
            ConfigError: The record is of another model.
        """
        if self._record is None:
            return
        frozen = set(_frozen(self._trains) if self._record["frozen"] is None else self._record["frozen"])
        for number, param in enumerate(self._params):
            if param.requires_grad == (number in frozen):
                param.requires_grad_(number not in frozen)
        modes = dict(zip(self._modules, self._modes, strict=True))
        for name, values in {**modes, **self._record["modes"]}.items():
            if name not in self._modules:
                raise ConfigError(f"the store has a module {name!r}; this model has none of that name. Resume with the same model.")
            for mode, on in zip(_MODES, values, strict=True):
                if on is not None:
                    setattr(self._modules[name], mode, on)

    def with_state(self) -> set[int]:
        """The ``id``s of parameters with optimizer state in the record; they may be frozen now."""
        found: set[int] = set()
        for groups, books in zip(self._wanted(), self._found.get("optimizers", ()), strict=False):
            rows = books.get("steps") or books.get("state") or []
            numbers = [number for group in groups for number in group]
            found |= {id(self._params[number]) for number, row in zip(numbers, rows, strict=False) if row is not None}
        return found

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        """In the context the optimizers have the groups of the record."""
        made = [optimizer.param_groups for optimizer in self._optimizers]
        self._regroup()
        try:
            yield
        finally:
            for optimizer, groups in zip(self._optimizers, made, strict=True):
                if optimizer.param_groups is not groups:
                    optimizer.param_groups = groups

    def restore(self) -> None:
        """Sets model and optimizers to the record, whatever hooks have done since.

        Raises:
            ConfigError: Hooks have given an optimizer parameters that it lacked when the step was
                kept.
        """
        self.to_model()
        wanted = self._wanted()
        for number, (ours, theirs) in enumerate(zip(self._groups_now(), wanted, strict=True)):
            if more := set().union(*ours).difference(*theirs):
                raise ConfigError(
                    f"as the fit began, a hook has given {type(self._optimizers[number]).__name__} {len(more)} parameters that it "
                    f"had not when the store's last step was kept. Resume with the callbacks that training began with."
                )
        self._regroup()

    def _wanted(self) -> Groups:
        groups = None if self._record is None else self._record["groups"]
        if groups is None:
            return self._groups
        if groups["made"] != _sizes(self._groups):
            raise ConfigError(
                f"the optimizers were made with groups of {_sizes(self._groups)} parameters, those of the store with "
                f"{groups['made']}. Resume with the optimizers that training began with."
            )
        now: Groups = groups["now"]
        return now

    def _regroup(self) -> None:
        if self._record is None or self._groups_now() == (wanted := self._wanted()):
            return
        for optimizer, groups, books in zip(self._optimizers, wanted, self._found["optimizers"], strict=True):
            rows = zip(groups, books["groups"], strict=True)
            optimizer.param_groups = [{**row, "params": [self._params[number] for number in group]} for group, row in rows]

    def _groups_now(self) -> Groups:
        return [[[self._numbers.get(key, -1) for key in group] for group in of_one] for of_one in self._ids()]

    def _ids(self) -> list[list[list[int]]]:
        return [[list(map(id, group["params"])) for group in optimizer.param_groups] for optimizer in self._optimizers]

    def _trains_now(self) -> list[bool]:
        return [param.requires_grad for param in self._params]

    def _modes_now(self) -> list[tuple[object, object]]:
        training, statistics = _MODES
        return [(of_one.get(training), of_one.get(statistics)) for of_one in self._attributes]


def kept_scales(found: Options | None) -> dict[str, str]:
    """Digests of what belonged to quantized weights in the run of a training state, by their names.

    States of earlier versions have none.
    """
    changes = None if found is None else found.get("changes")
    scales: dict[str, str] = {} if changes is None else changes.get("made", {}).get("quantization", {})
    return scales


def _described(optimizer: Optimizer, groups: list[list[int]]) -> Options:
    """The properties in which optimizers must agree."""
    kind = type(optimizer)
    name = f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__qualname__
    options = []
    for group in optimizer.param_groups:
        known = {key: group[key] for key in optimizer.defaults if key in group and key not in _HOW}
        flags = {key: value for key, value in known.items() if isinstance(value, bool)}
        options.append(flags | {key: "a tensor" for key, value in known.items() if isinstance(value, Tensor)})
    return {"name": name, "options": options, "params": groups}


def _scheduled(config: LRSchedulerConfig) -> Options:
    """The properties in which schedulers must agree, and when Lightning steps it."""
    said = {"interval": str(config.interval), "frequency": int(config.frequency), "monitor": config.monitor}
    return {"name": _scheduler_name(config.scheduler), **said}


def _scheduler_name(scheduler: object) -> str:
    inner = getattr(scheduler, "_schedulers", None)  # of SequentialLR and ChainedScheduler
    names = f"({', '.join(map(_scheduler_name, inner))})" if isinstance(inner, list | tuple) else ""
    return type(scheduler).__qualname__ + names


def _digest(module: nn.Module) -> str:
    """A digest of a model's parameters as they were made."""
    rows = [(name, list(param.shape), param.requires_grad) for name, param in module.named_parameters()]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _frozen(trains: list[bool]) -> list[int]:
    return [number for number, does in enumerate(trains) if not does]


def _sizes(groups: Groups) -> list[list[int]]:
    return [[len(group) for group in of_one] for of_one in groups]
