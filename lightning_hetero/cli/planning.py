"""Runs planners by name, with options from the command line, and keeps the outcome of each."""

from __future__ import annotations

import importlib
import inspect
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_hetero.errors import ConfigError, HeteroError, PlanError, UnsupportedError, did_you_mean
from lightning_hetero.ir.codec import parse_object
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Updates

DEFAULT = "holistic"
ALL = "all"
OPTIONS = "options"  # key of a plan's origin: the planner's options as JSON text
# What an option of a type may be, and in words. Planners check options of other types.
_SIMPLE: dict[Any, tuple[tuple[type, ...], str]] = {
    float: ((float, int), "a number"),
    int: ((int,), "a whole number"),
    bool: ((bool,), "true or false"),
    NoneType: ((NoneType,), "null"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one planner: a plan, or the reason why there is none.

    Attributes:
        planner: Its name.
        plan: The plan, with ``predicted``.
        error: The reason.
        planning_s: Seconds of planning, without the import of the solver.
        kept: The plan was made for another model or machine and is kept.
    """

    planner: str
    plan: Plan | None = None
    error: HeteroError | None = None
    planning_s: float = 0.0
    kept: bool = False

    @property
    def iteration_s(self) -> float:
        """Predicted seconds of one step; infinite without a plan."""
        return self.plan.predicted.iteration_s if self.plan is not None and self.plan.predicted is not None else float("inf")

    def to_json(self) -> dict[str, Any]:
        """The outcome as ``--json`` prints it."""
        if self.plan is None:
            return {"planner": self.planner, "planning_s": self.planning_s, **described(self.error)}
        return {
            "planner": self.planner,
            "objective_s": self.plan.objective_s,
            "decisions": self.plan.decisions,
            "predicted": self.plan.predicted,
            "planning_s": self.planning_s,
        }


def described(error: Exception | None) -> dict[str, Any]:
    """An error as JSON: its text; for a plan that does not fit, also the tier and missing bytes."""
    out: dict[str, Any] = {"error": str(error)}
    if isinstance(error, PlanError) and error.tier:
        out |= {"tier": error.tier, "shortfall_bytes": error.shortfall_bytes}
    return out


def parse_options(texts: Iterable[str]) -> dict[str, Any]:
    """``["k=3", "mode=fast"]`` as ``{"k": 3, "mode": "fast"}``: values are JSON, or else text.

    Raises:
        ConfigError: An option without ``=``.
    """
    out: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigError(f"--option {text!r}; allowed: KEY=VALUE, such as --option fragmentation=1.1.")
        try:
            out[key] = json.loads(value)
        except json.JSONDecodeError:
            out[key] = value
    return out


def micro_batch(model: ModelProfile, plan: Plan) -> ModelProfile:
    """The model at the batch of one forward: the whole batch, or one micro-batch of the plan."""
    if plan.micro_batches == 1:
        return model
    from lightning_hetero.planners.micro_batches import split

    return split(model, plan.micro_batches)


def stored_options(plan: Plan) -> dict[str, Any]:
    """The options that a plan was made with.

    Raises:
        ConfigError: Its origin has no options there.
    """
    return parse_object(str(plan.origin.get(OPTIONS, "{}")), what="planner's options", source=f"the origin of plan {plan.name!r}")


def planners(name: str) -> dict[str, Callable[..., Plan]]:
    """The planner of that name, or all of them.

    Raises:
        ConfigError: There is no such planner.
    """
    from lightning_hetero.planners import PLANNERS

    if name == ALL:
        return dict(PLANNERS)
    if name not in PLANNERS:
        hint = f' plan="auto" of the strategy is {DEFAULT!r}.' if name == "auto" else did_you_mean(name, [*PLANNERS, ALL])
        raise ConfigError(f"--planner {name!r}; allowed: {', '.join(sorted(PLANNERS))}, {ALL}.{hint}")
    return {name: PLANNERS[name]}


def run(
    chosen: Mapping[str, Callable[..., Plan]], model: ModelProfile, hardware: HardwareProfile, options: Mapping[str, Any]
) -> list[Outcome]:
    """Runs planners one after the other; each takes the options that it knows.

    Raises:
        ConfigError: None of them knows one of the options.
    """
    known = {name: _options_of(name, planner) if options else {} for name, planner in chosen.items()}
    if strangers := sorted(set(options).difference(*known.values())):
        allowed = "; ".join(f"{name}: {', '.join(sorted(keys)) or 'none'}" for name, keys in known.items())
        keys = set().union(*known.values())
        hints = "".join(did_you_mean(stranger, sorted(keys)) for stranger in strangers)
        raise ConfigError(f"unknown planner options {strangers}; allowed: {allowed}.{hints}")
    return [
        run_one(name, planner, model, hardware, {k: _typed(k, v, known[name][k]) for k, v in options.items() if k in known[name]})
        for name, planner in chosen.items()
    ]


def fits(
    chosen: Mapping[str, Callable[..., Plan]], model: ModelProfile, hardware: HardwareProfile, options: Mapping[str, Any]
) -> bool:
    """Whether one of the planners has a plan; where a search is among them, it does not search."""
    if DEFAULT in chosen:
        from lightning_hetero.planners.holistic.remedies import SearchRequest
        from lightning_hetero.planners.one_rank import one_rank

        model, hardware = one_rank(model, hardware)
        parts = max(options.get("micro_batches", [1]))
        updates = Updates(options.get("updates", Updates.IN_BACKWARD))
        return SearchRequest(model=model, hardware=hardware, parts=parts, updates=updates).fits()
    return any(outcome.plan is not None for outcome in run(chosen, model, hardware, options))


def run_one(
    name: str, planner: Callable[..., Plan], model: ModelProfile, hardware: HardwareProfile, options: Mapping[str, Any]
) -> Outcome:
    """Runs one planner, as training does: of several devices that hold a model together, for one.

    An impossible request is an outcome; any other error is a fault and is raised.
    """
    from lightning_hetero.planners.one_rank import one_rank

    if name == DEFAULT:
        from lightning_hetero.planners.holistic.solvers import load_solver

        load_solver()
    start = time.perf_counter()
    try:
        plan = planner(*one_rank(model, hardware), **options)
    except (PlanError, ConfigError, UnsupportedError) as error:
        return Outcome(planner=name, error=error, planning_s=time.perf_counter() - start)
    return Outcome(planner=name, plan=plan, planning_s=time.perf_counter() - start)


def _options_of(name: str, planner: Callable[..., Plan]) -> dict[str, Any]:
    """The options that a planner has, and their types."""
    function: Callable[..., Plan] = getattr(planner, "func", planner)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        function = importlib.import_module(f"lightning_hetero.planners.{name}").plan  # imported when it plans
    types, bound = get_type_hints(function), getattr(planner, "keywords", {})
    parameters = inspect.signature(function).parameters.values()
    return {p.name: types.get(p.name) for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in bound}


def _typed(key: str, value: Any, kind: Any) -> Any:
    """An option's value in its planner's type: text becomes a member of an enumeration."""
    if get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        known = {str(member.value if isinstance(member, Enum) else member): member for member in get_args(kind) or kind}
        if str(value) in known:
            return known[str(value)]
        raise ConfigError(f"--option {key}={value}; allowed: {', '.join(known)}.{did_you_mean(value, known)}")
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if set(kinds) <= set(_SIMPLE) and type(value) not in {allowed for one in kinds for allowed in _SIMPLE[one][0]}:
        raise ConfigError(f"--option {key}={json.dumps(value)}; allowed: {' or '.join(_SIMPLE[one][1] for one in kinds)}.")
    return value
