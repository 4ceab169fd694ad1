"""Checks of the strategy's options.

A wrong value raises a ConfigError that says what is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from lightning_hetero._native import MAX_DISKS
from lightning_hetero.checkpoint import release_pages
from lightning_hetero.convert.importing import Weights
from lightning_hetero.errors import ConfigError, did_you_mean
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.lanes import Device, EmulatedDevice
from lightning_hetero.planners import BUILTIN_PLANS, PLANNERS
from lightning_hetero.planning.autoplan import Autoplan
from lightning_hetero.planning.machine_profile import Machine
from lightning_hetero.runtime.options import SessionOptions
from lightning_hetero.store.live.engine_options import EngineOptions
from lightning_hetero.store.partition import BlockCls
from lightning_hetero.units import format_bytes, parse_bytes

DiskPath = Sequence[str | os.PathLike[str]] | str | os.PathLike[str]  # in this order jsonargparse keeps lists

_Self = TypeVar("_Self")
_Options = ParamSpec("_Options")

REPLAN_DRIFT = 0.5  # the default
_AUTO = "holistic"  # the planner behind plan="auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The options of a strategy, checked."""

    options: SessionOptions
    autoplan: Autoplan | None = None  # makes the plan during training; ``None`` if the user gave a plan
    weights: Weights | None = None  # files with the model's initial weights
    verify: int = 0  # the number of steps that are computed twice
    link_checkpoints: bool = False  # checkpoints are links to the store
    exclude_frozen: bool = False  # checkpoint files have no frozen weights
    chunked_head: bool = False  # language models compute head and loss in chunks
    timeout: timedelta | None = None  # for which ranks wait for each other; ``None``: Lightning's


def on_lanes(options: SessionOptions, autoplan: Autoplan | None, device: Device | None) -> SessionOptions:
    """The options of a session that computes on a device, with the plans that begin there."""
    return replace(options, device=device, plans=options.plans if autoplan is None else autoplan.provisional(device))


def choices(
    plan: str | os.PathLike[str] | Plan = "auto",
    *,
    block_cls: BlockCls | None = None,
    weights: Weights | None = None,
    host_memory: str | int | None = None,
    device_memory: str | int | None = None,
    device: EmulatedDevice | None = None,
    disk_path: DiskPath | None = None,
    disk_capacity: str | int | None = None,
    new_run: bool = False,
    allow_tmpfs: bool = False,
    allow_rotational: bool = False,
    io_backend: str = "auto",
    io_threads: int = 3,
    update_threads: int | None = None,
    durability: str = "process",
    keep_every: int = 1,
    verify: int = 0,
    verify_digests: bool = False,
    link_checkpoints: bool = False,
    exclude_frozen_parameters: bool = False,
    hardware_profile: str | os.PathLike[str] | HardwareProfile | None = None,
    replan_drift: float | None = REPLAN_DRIFT,
    chunked_head: bool = False,
    trace: bool = False,
    timeout: timedelta | None = None,
) -> Choices:
    """Checks the options of ``HeteroOffloadStrategy``, which says what each of them means.

    Raises:
        ConfigError: A value is not allowed, or two do not go together.
    """
    device = emulated(device)
    autoplan, most_drift = None, drift(replan_drift)
    if (name := planner_name(plan)) is not None:
        autoplan = Autoplan(name, Machine(hardware_profile), drift=most_drift)
    else:
        check_planning(plan, hardware_profile=hardware_profile, replan_drift=most_drift)
    options = SessionOptions(
        plans=(planner(plan),) if autoplan is None else autoplan.provisional(device),
        block_cls=block_cls,
        host_memory=parse_bytes(host_memory, name="host_memory"),
        device_memory=parse_bytes(device_memory, name="device_memory"),
        device=device,
        disk_paths=(disk_paths := local_paths("disk_path", disk_path)),
        disk_capacity=parse_bytes(disk_capacity, name="disk_capacity"),
        new_run=flag("new_run", new_run),
        allow_tmpfs=flag("allow_tmpfs", allow_tmpfs),
        allow_rotational=flag("allow_rotational", allow_rotational),
        trace=flag("trace", trace),
        on_patched=release_pages,
        keep_every=count("keep_every", keep_every, most=10**6),
        poison=os.environ.get("LIGHTNING_HETERO_POISON") == "1",
        engine=EngineOptions(
            io_backend=one_of("io_backend", io_backend, ("auto", "io_uring", "pool")),
            io_threads=count("io_threads", io_threads),
            update_threads=0 if update_threads is None else count("update_threads", update_threads),
            durability=one_of("durability", durability, ("none", "process", "power")),
            verify_digests=flag("verify_digests", verify_digests),
            emulated_bytes_per_s=0.0 if device is None else device.disk_bytes_per_s or 0.0,
            num_disks=max(1, len(disk_paths)),
        ),
    )
    check_device_memory(options)
    check_keeping(options, link_checkpoints=link_checkpoints)
    check_excluding(exclude_frozen_parameters, link_checkpoints=link_checkpoints)
    return Choices(
        options=options,
        autoplan=autoplan,
        weights=sources(weights),
        verify=steps("verify", verify),
        link_checkpoints=flag("link_checkpoints", link_checkpoints),
        exclude_frozen=flag("exclude_frozen_parameters", exclude_frozen_parameters),
        chunked_head=flag("chunked_head", chunked_head),
        timeout=duration("timeout", timeout),
    )


def with_hints(init: Callable[Concatenate[_Self, _Options], None]) -> Callable[Concatenate[_Self, _Options], None]:
    """A constructor that names the nearest option if it gets one that it does not have."""
    known = list(signature(init).parameters)[1:]

    @wraps(init)
    def checked(self: _Self, /, *args: _Options.args, **options: _Options.kwargs) -> None:
        for name in options:
            if name not in known:
                kind = type(self).__name__
                raise TypeError(f"{kind} has no option {name!r}.{did_you_mean(name, known)} Options: {', '.join(known)}.")
        init(self, *args, **options)

    return checked


def check_names(kind: type, options: Iterable[str], *others: type) -> None:
    """Refuses options that the constructors of a class and of its bases do not have.

    Args:
        kind: The class.
        options: Names that were given.
        others: Classes that get what the bases leave over.

    Raises:
        ConfigError: It names the nearest option.
    """
    inits = [vars(each)["__init__"] for each in (*kind.__mro__, *others) if "__init__" in vars(each)]
    found = [one for init in inits for one in signature(init).parameters.values()]
    known = dict.fromkeys(one.name for one in found if one.name != "self" and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL))
    for name in options:
        if name not in known:
            raise ConfigError(f"{kind.__name__} has no option {name!r}.{did_you_mean(name, known)} Options: {', '.join(known)}.")


def planner_name(plan: str | os.PathLike[str] | Plan) -> str | None:
    """The planner that ``plan`` names, unless it names a built-in plan or a file."""
    name = _AUTO if plan == "auto" else plan
    return name if isinstance(name, str) and name in PLANNERS and name not in BUILTIN_PLANS else None


def planner(plan: str | os.PathLike[str] | Plan) -> Callable[[ModelShape], Plan]:
    """A function that makes the plan for a model.

    Raises:
        ConfigError: It is neither the name of a plan nor a readable plan file.
    """
    if isinstance(plan, Plan):
        return partial(_given, plan)
    if isinstance(plan, str) and plan in BUILTIN_PLANS:
        return BUILTIN_PLANS[plan]
    is_name = isinstance(plan, str) and not plan.endswith(".json") and not Path(plan).is_file()
    if is_name or not isinstance(plan, str | os.PathLike):
        from lightning_hetero.ir.cluster_plan import CLUSTER_PLANNERS

        names = dict.fromkeys(("auto", *BUILTIN_PLANS, *PLANNERS))
        allowed = ", ".join(map(repr, names))
        hint = did_you_mean(plan, names)
        if is_name and plan in CLUSTER_PLANNERS:
            hint = f" {plan!r} plans clusters: lightning-hetero plan-cluster --planner {plan}."
        raise ConfigError(f"plan={plan!r}; allowed: {allowed}, the path of a plan file, or a Plan.{hint}")
    return partial(_given, Plan.load(Path(plan)))


def _given(plan: Plan, model: ModelShape) -> Plan:
    return plan


def one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    """Checks a name."""
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}; allowed: {', '.join(map(repr, allowed))}.{did_you_mean(value, allowed)}")
    return value


def count(name: str, value: int, *, most: int = 1024) -> int:
    """Checks a number of at least one."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{name}={value!r}; allowed: an integer from 1 to {most}.")
    return value


def steps(name: str, value: int) -> int:
    """Checks a number of steps."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(
            f"{name}={value!r}; allowed: a number of steps. To check digests of what is read, pass verify_digests=True."
        )
    return value


def flag(name: str, value: bool) -> bool:
    """Checks a switch. The text ``"no"`` would be on."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}; allowed: True or False.")
    return value


def duration(name: str, value: timedelta | None) -> timedelta | None:
    """Checks a time."""
    if value is not None and (not isinstance(value, timedelta) or value <= timedelta()):
        raise ConfigError(f"{name}={value!r}; allowed: a datetime.timedelta above 0, such as timedelta(minutes=5), or None.")
    return value


def emulated(device: EmulatedDevice | None) -> EmulatedDevice | None:
    """Checks an emulated device."""
    if device is not None and not isinstance(device, EmulatedDevice):
        raise ConfigError(
            f"device={device!r}; allowed: an EmulatedDevice, or None. On which device training computes is the Trainer's choice, "
            f'such as Trainer(accelerator="gpu").'
        )
    return device


def check_device_memory(options: SessionOptions) -> None:
    """Refuses a budget that is larger than an emulated device: no plan could use it."""
    asked, device = options.device_memory, options.device
    if asked is not None and device is not None and asked > device.memory_bytes:
        raise ConfigError(
            f"device_memory={format_bytes(asked)} of an emulated device that has {format_bytes(device.memory_bytes)}; allowed: at "
            f"most that. Leave device_memory out, or give the EmulatedDevice more memory."
        )


def local_paths(name: str, value: DiskPath | None) -> tuple[Path, ...]:
    """Checks a directory on this machine, or one on each of several disks."""
    if value is None:
        return ()
    values = [value] if isinstance(value, str | os.PathLike) else list(value) if isinstance(value, list | tuple) else []
    if not values or not all(isinstance(one, str | os.PathLike) and os.fspath(one) for one in values):
        raise ConfigError(f"{name}={value!r}; allowed: a directory on a disk of this machine, a list of one per disk, or None.")
    for one in values:
        if "://" in os.fspath(one):
            raise ConfigError(f"{name}={os.fspath(one)!r} is a URL; allowed: a directory on a disk of this machine.")
    if len(values) > MAX_DISKS:
        raise ConfigError(f"{name} has {len(values)} directories; allowed: at most {MAX_DISKS}.")
    paths = tuple(Path(one).expanduser() for one in values)
    known: dict[str, Path] = {}
    for path in paths:
        other = known.setdefault(os.path.realpath(path), path)
        if other is not path:
            raise ConfigError(f"{name} names {str(path)!r} twice; allowed: one directory for each disk.")
    return paths


def sources(value: Weights | None) -> Weights | None:
    """Checks ``weights``."""
    paths: Iterable[object] = value.values() if isinstance(value, Mapping) else () if value is None else (value,)
    if not all(isinstance(path, str | os.PathLike) for path in paths):
        raise ConfigError(
            f"weights={value!r}; allowed: a safetensors file or a directory of them, or several of these by the name of the module "
            f'that each is for, such as {{"model": path}}.'
        )
    return value


def check_planning(plan: object, *, hardware_profile: object, replan_drift: float | None) -> None:
    """Refuses options of planners if the plan is given: nothing would read them."""
    given = {"hardware_profile": (hardware_profile, None), "replan_drift": (replan_drift, REPLAN_DRIFT)}
    for name, (value, default) in given.items():
        if value is not None and value != default:
            raise ConfigError(
                f'{name}={value!r} is for planners, and plan={plan!r} is a plan. Pass plan="auto" or the name of a planner, or '
                f"leave {name} out."
            )


def check_keeping(options: SessionOptions, *, link_checkpoints: bool) -> None:
    """Refuses options of stores without a store, and links to a step that may not be kept."""
    if options.new_run and options.disk_path is None:
        raise ConfigError(
            "new_run=True renames the store of an earlier run at disk_path, and there is no disk_path. Pass a disk_path, or leave "
            "new_run out."
        )
    durability, keep_every = options.engine.durability, options.keep_every
    given = {
        f"keep_every={keep_every}": keep_every > 1,
        "link_checkpoints=True": link_checkpoints,
        "durability='power'": durability == "power",
    }
    asked = [option for option, is_given in given.items() if is_given]
    if asked and (options.disk_path is None or durability == "none"):
        raise ConfigError(
            f"{asked[0]} is for runs that keep their steps; this one has disk_path={options.disk_path}, "
            f'durability={durability!r}. Pass a disk_path, and durability="process" or "power".'
        )
    if keep_every > 1 and link_checkpoints:
        raise ConfigError(
            f"link_checkpoints=True makes links to the last step, and with keep_every={keep_every} that may be one that "
            f"is not kept. Pass keep_every=1, or leave link_checkpoints out: checkpoints are then ordinary files."
        )


def check_excluding(excludes: bool, *, link_checkpoints: bool) -> None:
    """Refuses to leave weights out of links, which are of the whole store."""
    if excludes and link_checkpoints:
        raise ConfigError(
            "exclude_frozen_parameters=True with link_checkpoints=True: links to frozen weights take no space, and nothing can be "
            "left out of them. Leave one of the two out."
        )


def drift(value: float | None) -> float | None:
    """Checks a relative change."""
    if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0):
        raise ConfigError(f"replan_drift={value!r}; allowed: a number above 0, or None.")
    return value
