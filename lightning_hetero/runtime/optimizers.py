"""Binds the user's optimizers to the runtime.

The object stays. Its ``step`` hands over to the runtime, and its state lives in the store.
``state_dict`` and ``load_state_dict`` use torch's format, so checkpoints go both ways between this
and plain Lightning.

[Note: What trains]
Many models pass ``self.parameters()`` to the optimizer and freeze most of them. A parameter trains
from the moment when an optimizer has it and it requires a gradient, has one, or has state, unless
that is early ([Note: Early state]). Only parameters that train have state, updates and two slots on
disk. One that is frozen later goes on to count: torch keeps its state for when it is set free
again. Records of kept steps have the members of optimizers, which is what a resume compares.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import is_, itemgetter
from types import MethodType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_hetero._native import Hyper
from lightning_hetero.errors import ConfigError
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
from lightning_hetero.optim import adam, blockwise
from lightning_hetero.optim.adam import MASTERED
from lightning_hetero.optim.early_state import fill, is_early, is_filled, without_early
from lightning_hetero.optim.subclasses import mapped, outlines, plain_tensors, put_together
from lightning_hetero.runtime.method_patches import Patches
from lightning_hetero.runtime.tensor_sources import StateSource, take_all, write_state
from lightning_hetero.store.live.blocks import Part
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.raw_memory import zero_pages
from lightning_hetero.untyped import Function, Options, Value

_NOTHING: Options = {}
_ADDRESS: Callable[[Tensor], int] = Tensor.data_ptr


class Rule(Enum):
    """Who computes an optimizer's update."""

    NATIVE = "native"  # the engine: torch's Adam and AdamW
    BLOCKWISE = "blockwise"  # the optimizer's own code, part by part
    WHOLE = "whole"  # the optimizer's own code, once for all its parameters


@dataclass(frozen=True, slots=True)
class _Seen:
    """The state of some parameters of a part when the optimizer last counted their step."""

    indices: list[int]
    params: list[nn.Parameter]
    values_of: Callable[[Value], tuple[object, ...]]  # the count and the handles in a parameter's state
    values: list[object]  # these, of all of them
    steps: list[Tensor]  # the counts: views of one run
    addresses: list[int]  # of the counts
    # In fp32 on the CPU: one addition counts a step of all parameters. It is numpy's, because each
    # operator of torch lets the threads of lanes have the interpreter, and waits for them.
    run: NDArray[np.float32]


def owners_of(bindings: Iterable[OptimizerBinding]) -> dict[int, OptimizerBinding]:
    """The optimizer of each parameter that trains, by the parameter's ``id``."""
    return {id(p): b for b in bindings for p in b.trained()}


class OptimizerBinding:
    """One of the user's optimizers.

    Args:
        optimizer: The optimizer. Its instance has other ``step``, ``zero_grad`` and
            ``load_state_dict`` until :meth:`unbind`.
        on_step: Called by ``step`` after the closure, to hand the update over.
        on_read: Waits for updates under way, before code reads state or zeroes gradients in place.
        on_touch: Waits until the store has all updates under way, before code reads or writes one
            tensor of state. With words: before they write what these say.
        on_load: Called before state is loaded: parameters may have joined the optimizer.
        on_save: Called before a state dict is made.
        with_state: The ``id``s of parameters that have state in the store.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        on_step: Callable[[OptimizerBinding, float], None],
        *,
        on_read: Callable[[], None],
        on_touch: Callable[[str], None],
        on_load: Callable[[OptimizerBinding], None],
        on_save: Callable[[OptimizerBinding], None],
        with_state: Collection[int] = (),
    ) -> None:
        blockwise.check_supported(optimizer)
        self.optimizer = optimizer
        # The rule that the optimizer allows wherever its state lives.
        if blockwise.steps_otherwise(optimizer):
            self.capability = Rule.WHOLE
        elif adam.supports(optimizer):
            self.capability = Rule.NATIVE
        else:
            self.capability = Rule.BLOCKWISE if blockwise.is_blockwise(optimizer) else Rule.WHOLE
        self.rule = self.capability  # of the plan; without a disk one that could run part by part runs whole
        self._on_step, self._on_read, self._on_touch, self._on_load, self._on_save = on_step, on_read, on_touch, on_load, on_save
        self._attached: dict[int, Options] = {}  # the handles of state in the store, by the parameter's ``id``
        self._seen: dict[Part, _Seen] = {}
        self._homes: dict[nn.Parameter, tuple[Part, int]] = {}
        self._has_empty = False
        self._patches = Patches()
        self._original: dict[str, Function] = {}  # methods that are replaced
        self._handle: RemovableHandle | None = None
        self._with_state = {id(p) for p, state in optimizer.state.items() if state and not is_early(state)}.union(with_state)
        self._members, self._trained = set[int](), set[int]()
        self.learn()

    def place(self, store: TierStore, homes: Iterable[tuple[nn.Parameter, Part, int]]) -> None:
        """Sets where the parameters live. State that the optimizer already has moves there."""
        self.choose(self.rule)
        self._store = store
        self._seen.clear()
        self._homes = {param: (part, index) for param, part, index in homes}
        self._has_empty = not all(param.numel() for param in self._homes)
        existing = {p: dict(s) for p, s in self.optimizer.state.items() if s and isinstance(p, nn.Parameter)}
        if self.rule is Rule.NATIVE and existing:
            self._import(existing)

    def check_params(self, known: Collection[int]) -> None:
        """Refuses parameters that the runtime would not update.

        Args:
            known: The ids of the model's parameters as the fit began.

        Raises:
            ConfigError: The optimizer has another parameter, and does not run whole.
        """
        unknown = [p for p in self.params() if p.requires_grad and id(p) not in known]
        if unknown and self.capability is not Rule.WHOLE:
            raise ConfigError(
                f"optimizer {type(self.optimizer).__name__} has {len(unknown)} parameters that were not the model's when the fit "
                f"began, the first of shape {tuple(unknown[0].shape)}; allowed: those in its named_parameters(). Make their module "
                f"in __init__, setup() or configure_model(), and an attribute of the LightningModule or an element of a ModuleList."
            )

    def choose(self, rule: Rule) -> None:
        """Sets the rule from the next step on. Once replaced, ``step`` stays replaced."""
        self.rule = rule
        self._fill(self._trained)
        if not self._original and (rule is not Rule.WHOLE or any(p.dtype in MASTERED for p in self.params())):
            self._intercept()

    def _intercept(self) -> None:
        optimizer = self.optimizer
        self._original = {name: getattr(optimizer, name) for name in ("zero_grad", "load_state_dict")}

        def step(_: Optimizer, closure: Callable[[], Value] | None = None) -> Value:
            return self._step(closure)

        ours: dict[str, Function] = {
            "step": Optimizer.profile_hook_step(step),  # runs the registered hooks of a step
            "zero_grad": lambda _, set_to_none=True: self._zero_grad(set_to_none),
            "load_state_dict": lambda _, state_dict: self._load_state_dict(state_dict),
        }
        for name, function in ours.items():
            self._patches.replace(optimizer, name, MethodType(function, optimizer))
        vars(ours["step"])["_wrapped_by_lr_sched"] = True  # `_step` sets what torch's wrapper would set
        self._handle = optimizer.register_state_dict_pre_hook(lambda _: self._saved())

    def _saved(self) -> None:
        self._on_read()
        self._on_save(self)

    def home_of(self, param: nn.Parameter) -> tuple[Part, int] | None:
        """The part of a parameter, and its position there."""
        return self._homes.get(param)

    def unbind(self, read: bool = True) -> None:
        """Gives the optimizer back as it was; ``read``: its state becomes ordinary tensors."""
        if self._handle is not None:
            self._handle.remove()
        self._patches.restore()
        if read:
            states = [(s, k, v) for s in self.optimizer.state.values() for k, v in s.items() if isinstance(v, Tensor)]
            inside = [tensor for _, key, value in states for tensor in plain_tensors(value, key).values()]
            away = [tensor for tensor in inside if isinstance(tensor, OffloadedTensor) and not is_filled(tensor)]
            found = dict(zip(map(id, away), take_all(away), strict=True))
            for state, key, value in states:
                state[key] = mapped(value, key, lambda _, inner: found.get(id(inner), inner))

    def books(self) -> Options:
        """The optimizer in a commit record: its groups, and step counts or state without tensors.

        Tensors of an optimizer that runs by its own code are in blobs (``runtime.state_blobs``).

        Raises:
            ConfigError: State is of a class that a record does not name.
        """
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        common = {
            "name": type(self.optimizer).__name__,
            "groups": groups,
            "sizes": [len(group["params"]) for group in self.optimizer.param_groups],
        }
        if self.rule is not Rule.NATIVE:
            states = [self.optimizer.state.get(p, {}) for p in self.params()]
            mine = set(map(id, self.params()))
            return common | {
                "state": [
                    {k: v for k, v in s.items() if k not in blockwise.tensors(s)} if s and not is_early(s) else None for s in states
                ],
                "subclasses": [outlines(s) for s in states],
                "others": {k: v for k, v in self.optimizer.state.items() if id(k) not in mine},
            }
        counts = [self.optimizer.state.get(p, {}).get("step") for p in self.params()]
        known = [c for c in counts if c is not None]
        steps = iter(torch.stack(known).tolist() if known else [])
        return common | {"steps": [None if c is None else next(steps) for c in counts]}

    def check(self, books: Options) -> None:
        """Refuses the books of another optimizer.

        Raises:
            ConfigError: It has another name, other groups or other state.
        """
        name = type(self.optimizer).__name__
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        if name != books["name"]:
            raise ConfigError(
                f"the optimizer is {name}, the store's {books['name']}. Resume with the optimizer that training began with."
            )
        if (self.rule is Rule.NATIVE) != ("steps" in books):
            ways = ("by its own code", "natively") if "steps" in books else ("natively", "by its own code")
            raise ConfigError(
                f"{name} runs {ways[0]} with its options, such as amsgrad, and the store's ran "
                f"{ways[1]}. Resume with the options that training began with."
            )
        if sizes != books["sizes"]:
            raise ConfigError(
                f"{name} has groups of {sizes} parameters, the store's optimizer {books['sizes']}. Resume with the optimizer that "
                f"training began with."
            )

    def take_over(self, books: Options) -> None:
        """Sets the optimizer to checked :meth:`books`. The store has its state already."""
        numbers = [group["params"] for group in self.optimizer.state_dict()["param_groups"]]
        groups = [{**group, "params": mine} for group, mine in zip(books["groups"], numbers, strict=True)]
        given = {p: dict(s) for p, s in self.optimizer.state.items()}  # from the store
        before = self.optimizer.param_groups
        self._original["load_state_dict"]({"state": {}, "param_groups": groups})
        for mine, loaded in zip(before, self.optimizer.param_groups, strict=True):  # a combined optimizer may share them
            mine.clear()
            mine.update(loaded)
        self.optimizer.param_groups = before
        if self.rule is not Rule.NATIVE:
            found = books.get("subclasses") or [{}] * len(books["state"])  # older stores have none
            for param, rest, of_param in zip(self.params(), books["state"], found, strict=True):
                if rest is not None:
                    plain = given.get(param, {})
                    whole = {key: put_together(key, outline, plain) for key, outline in of_param.items()}
                    self.optimizer.state[param] = {**plain, **rest, **whole}  # Adagrad has a step before its first one
                elif is_early(given.get(param, {})):
                    self.optimizer.state[param] = given[param]
            self.optimizer.state.update(books["others"])
            return
        for param, count in zip(self.params(), books["steps"], strict=True):
            if count is not None:
                state: Options = {}
                self._attach(state, *self._homes[param])
                state["step"] = torch.tensor(count, dtype=torch.float32)
                self.optimizer.state[param] = state

    def groups(self) -> dict[int, Options]:
        """Each parameter's group, by ``id``; read every step because schedulers change groups.

        A learning rate may be a tensor, which is read once: the host waits for a device with it.
        """
        groups = [adam.with_numbers(group) for group in self.optimizer.param_groups]
        return {id(p): group for group in groups for p in group["params"]}

    def params(self) -> list[nn.Parameter]:
        """The optimizer's parameters, in the order of its state dict."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def trained(self) -> list[nn.Parameter]:
        """The parameters that train; see [Note: What trains]."""
        return [p for p in self.params() if id(p) in self._trained]

    def learn(self) -> bool:
        """Notices members that are new or gone, or train from now on. Returns whether any are."""
        params, trained, known = self.params(), self._trained, self._with_state
        with torch._C.DisableTorchFunctionSubclass():  # for offloaded parameters these would be calls of Python
            begun = {
                id(p) for p in params if id(p) not in trained and (p.requires_grad or p.grad is not None or id(p) in known)
            }  # fmt: skip
        if begun:
            self._fill(begun)
        members = set(map(id, params))
        changed = bool(begun) or members != self._members
        self._members = members
        trained |= begun
        return changed

    def _fill(self, ids: Collection[int]) -> None:
        """If the optimizer's own ``step`` updates all parameters at once: fills early state."""
        if self.rule is Rule.WHOLE:
            for param in self.params():
                if id(param) in ids:
                    fill(self.optimizer.state.get(param, {}))

    def steps(self, part: Part, indices: Sequence[int]) -> NDArray[np.float32] | None:
        """The step counts of parameters whose state is as :meth:`advance` last saw it, or ``None``.

        Then none of them is new (:meth:`new_ones`). This runs for each block in each step.
        """
        seen = self._seen.get(part)
        if seen is None or seen.indices != indices:
            return None
        with torch._C.DisableTorchFunctionSubclass():  # handles would be hashed in Python
            states = list(map(self.optimizer.state.get, seen.params))
        try:
            same = all(map(is_, chain.from_iterable(map(seen.values_of, states)), seen.values))
        except (KeyError, TypeError):  # there is no count, or no state
            return None
        return seen.run if same and list(map(_ADDRESS, seen.steps)) == seen.addresses else None

    def advance(self, part: Part, indices: Sequence[int], steps: NDArray[np.float32] | None = None) -> list[float]:
        """Counts one more step of parameters that the engine is about to update; returns counts.

        ``steps``: what :meth:`steps` has just returned.
        """
        steps = self._find_steps(part, list(indices)) if steps is None else steps
        if steps is not None:
            steps += 1
            counts: list[float] = steps.tolist()
            return counts
        states = [self.optimizer.state[part.params[index]] for index in indices]
        for state in states:  # code has given it numbers
            state["step"] += 1
        return [float(state["step"]) for state in states]

    def _find_steps(self, part: Part, indices: list[int]) -> NDArray[np.float32] | None:
        """Looks at the state of parameters, of which those that are new get one.

        Their counts, tensors as in torch, come to lie in one run.
        """
        params = [part.params[index] for index in indices]
        with torch._C.DisableTorchFunctionSubclass():  # handles would be hashed in Python
            states = [self.optimizer.state[param] for param in params]
        for index, state in zip(indices, states, strict=True):
            if "step" not in state:
                self._attach(state, part, index)
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
        steps = [state["step"] for state in states]
        if not all(isinstance(step, Tensor) and step.is_cpu and step.dtype is torch.float32 and not step.ndim for step in steps):
            return None
        if len(set(map(id, steps))) < len(steps):  # code has given several parameters one count
            return None
        counts = torch.stack(steps)
        for step, count in zip(steps, counts.unbind(), strict=True):
            step.data = count
        run: NDArray[np.float32] = counts.numpy()
        values_of = itemgetter("step", *adam.state_names(part.dtype))
        values, addresses = list(chain.from_iterable(map(values_of, states))), list(map(_ADDRESS, steps))
        self._seen[part] = _Seen(indices, params, values_of, values, steps, addresses, run)
        return run

    def _advance_empty(self) -> None:
        """Counts a step of parameters without elements, as torch does; they have no update."""
        for param in self.params() if self._has_empty and self.rule is Rule.NATIVE else ():
            if not param.numel() and param.grad is not None:
                part, index = self._homes[param]
                self.advance(part, [index])

    def retreat(self, part: Part, indices: Iterable[int]) -> None:
        """Takes :meth:`advance` back: there was no update."""
        for index in indices:
            param = part.params[index]
            state = self.optimizer.state[param]
            state["step"] -= 1
            if not float(state["step"]):
                del self.optimizer.state[param]

    def new_ones(self, part: Part, indices: Iterable[int]) -> list[int]:
        """Those parameters of a part for which the store has other state than the optimizer.

        The optimizer has none, as after ``state.clear()``, or code has given it other tensors.
        """
        names, states, attached, found = adam.state_names(part.dtype), self.optimizer.state, self._attached, []
        with torch._C.DisableTorchFunctionSubclass():  # handles would be hashed in Python
            given = [(index, states.get(part.params[index], _NOTHING)) for index in indices]
        for index, state in given:
            is_new, ours = "step" not in state and part.has_old_state, attached.get(id(part.params[index]), _NOTHING)
            for name in names if "step" in state else ():
                is_new |= state.get(name) is not ours.get(name)
            if is_new:
                found.append(index)
        return found

    def changed_part(self, read: Iterable[tuple[Part, Sequence[int], Sequence[Hyper]]]) -> Part | None:
        """The first part whose state is not what :meth:`advance` left, or ``None``.

        ``read``: parts, the positions of their parameters, and numbers with what it returned.
        """
        for part, indices, numbers in read:
            steps = self.steps(part, indices)
            if steps is not None:
                counts = steps.tolist()
            elif self.new_ones(part, indices):
                return part
            else:
                counts = [float(self.optimizer.state[part.params[index]]["step"]) for index in indices]
            if counts != [number.step for number in numbers]:
                return part
        return None

    def renew(self, part: Part, indices: Iterable[int]) -> None:
        """Writes to the store what the optimizer has instead, or that it has nothing.

        ``indices``: the parameters that :meth:`new_ones` has found.

        Raises:
            ConfigError: State has another shape, or is missing.
        """
        runs: list[tuple[int, int, Tensor]] = []
        for index in indices:
            param = part.params[index]
            state = self.optimizer.state.get(param, _NOTHING)
            for array, name in enumerate(adam.state_names(part.dtype)):
                if "step" in state or name == adam.MASTER:
                    start = self._flat_state(part, index, name, state)
                else:
                    start = zero_pages(param.numel())
                runs.append((array, index, start))
            if "step" in state:
                self._attach(state, part, index)
        if runs:
            write_state(self._store, part, runs)

    def take_in(self) -> None:
        """Between two batches: writes to the store what code has put in the place of its state."""
        parts = dict.fromkeys(part for part, _ in self._homes.values()) if self.rule is Rule.NATIVE else ()
        for part in parts:
            mine = [i for i, p in enumerate(part.params) if p.numel() and "step" in self.optimizer.state.get(p, _NOTHING)]
            self.renew(part, self.new_ones(part, mine))

    @staticmethod
    def _flat_state(part: Part, index: int, name: str, state: Options) -> Tensor:
        """State that code has made or loaded, as a run for the store.

        Without a master, as plain Lightning writes state, it is the weights. What of them other
        ranks have may have any values: the store takes its own piece.
        """
        value = state.get(name)
        if value is None and name == adam.MASTER:
            here = part.block.resident and not part.is_whole
            return part.flat(index, part.memory(index) if here else part.params[index].detach(), torch.float32)
        if not isinstance(value, Tensor) or value.shape != part.params[index].shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else "nothing" if value is None else type(value).__name__
            raise ConfigError(
                f"optimizer state {name!r} of {part.names[index]!r}: got {got}, expected shape "
                f"{tuple(part.params[index].shape)}. A checkpoint with it belongs to another model or optimizer; load it "
                f"with ckpt_path of the model it was saved from."
            )
        return part.flat(index, value.detach(), torch.float32)

    def _attach(self, state: Options, part: Part, index: int) -> None:
        param = part.params[index]
        for array, name in enumerate(adam.state_names(part.dtype)):
            source = StateSource(self._store, part, index, array, name, self._on_touch)
            state[name] = OffloadedTensor(source, stride=param.stride()) if param.numel() else torch.zeros(param.shape)
        self._attached[id(param)] = {name: state[name] for name in adam.state_names(part.dtype)}

    # ---- what the user calls ---------------------------------------------------------------------

    def _step(self, closure: Callable[[], Value] | None = None) -> Value:
        optimizer = self.optimizer
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        vars(optimizer)["_opt_called"] = True  # schedulers read it to warn about a wrong order of steps
        # A scaler leaves unscaling to an optimizer with fused=True (torch.amp.GradScaler.step).
        found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if found_inf is None or not float(found_inf):
            self._advance_empty()
            self._on_step(self, 1.0 if scale is None else 1.0 / float(scale))
        return loss

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            self._on_read()
        elif self.capability is Rule.NATIVE:  # torch's own code; for handles each access would be a call of Python
            with torch._C.DisableTorchFunctionSubclass():
                self._original["zero_grad"](set_to_none=True)
            return
        self._original["zero_grad"](set_to_none=set_to_none)

    def _load_state_dict(self, state_dict: Options) -> None:
        self._on_read()
        self._on_touch("the optimizer's state")
        if self.rule is not Rule.NATIVE:
            rest, early = without_early(state_dict, self.optimizer)
            self._original["load_state_dict"](rest)
            self._keep_dtypes(rest)
            self._with_state.update(id(p) for p, state in self.optimizer.state.items() if state)
            self.optimizer.state.update(early)
            return
        # torch loads the groups only: it would cast the state and copy all of it.
        self._original["load_state_dict"]({**state_dict, "state": {}})
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        by_number = dict(zip(saved, self.params(), strict=True))
        states = {by_number[i]: state for i, state in state_dict["state"].items() if i in by_number}
        self._with_state.update(map(id, states))
        self._on_load(self)  # callbacks that unfreeze have added its groups again
        self._import(states)

    def _keep_dtypes(self, state_dict: Options) -> None:
        """Gives 16-bit parameters their loaded state once more: torch has cast it to 16 bits."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, self.params(), strict=True):
            if param.dtype in MASTERED and number in state_dict["state"]:
                given = state_dict["state"][number].items()
                self.optimizer.state[param].update({k: v for k, v in given if isinstance(v, Tensor) and v.is_floating_point()})

    def _import(self, states: dict[nn.Parameter, Options]) -> None:
        """Moves state in torch's format into the store, one write per part."""
        runs: dict[Part, list[tuple[int, int, Tensor]]] = {}
        for param, values in states.items():
            part, index = self._homes[param]
            state: Options = {}
            self._attach(state, part, index)
            state["step"] = torch.as_tensor(values["step"], dtype=torch.float32).detach().clone().cpu()
            self.optimizer.state[param] = state
            for array, name in enumerate(adam.state_names(part.dtype)):
                runs.setdefault(part, []).append((array, index, self._flat_state(part, index, name, values)))
        for part, of_part in runs.items():
            write_state(self._store, part, of_part)
            if {index for _, index, _ in of_part} == set(range(len(part.params))):
                self._store.master_is_current(part)  # the weights were loaded too
        self._store.commit()
