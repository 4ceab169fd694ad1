"""The options that several commands share. They describe one model on one machine."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lightning_hetero.cli.output import working
from lightning_hetero.cli.planning import OPTIONS
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan

_MODEL, _MACHINE = "The model", "The machine"

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ModelFile = Annotated[
    Path | None, typer.Option("--model-profile", metavar="FILE", help="A model profile (JSON).", rich_help_panel=_MODEL)
]
PresetModel = Annotated[
    str | None,
    typer.Option(
        "--preset-model", metavar="NAME", help='A known model, or "gpt:..." / "llama:..."; see docs.', rich_help_panel=_MODEL
    ),
]
ModelConfig = Annotated[
    Path | None,
    typer.Option("--model", metavar="PATH", help="A Hugging Face model's config.json, or its folder.", rich_help_panel=_MODEL),
]
LoraText = Annotated[
    str | None,
    typer.Option("--lora", metavar="TEXT", help="Adapters, such as r=16,targets=q,v or all-linear.", rich_help_panel=_MODEL),
]
Dora = Annotated[bool, typer.Option("--dora", help="Adapters with magnitudes (DoRA).", rich_help_panel=_MODEL)]
Quantize = Annotated[
    Literal["nf4", "nf4-double", "int8"] | None,
    typer.Option(help="How frozen weights are stored, as bitsandbytes does.", rich_help_panel=_MODEL),
]
ChunkedHead = Annotated[
    bool, typer.Option("--chunked-head", help="Head and loss in chunks: chunked_head=True.", rich_help_panel=_MODEL)
]
Batch = Annotated[int | None, typer.Option(min=1, metavar="N", help="Sequences per step and device.", rich_help_panel=_MODEL)]
Sequence = Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens per sequence.", rich_help_panel=_MODEL)]
Precision = Annotated[
    Literal["16", "32"] | None,
    typer.Option(help="Bits of the weights in compute.  [default: 16]", rich_help_panel=_MODEL),
]
HardwareFile = Annotated[
    Path | None, typer.Option("--hardware-profile", metavar="FILE", help="A hardware profile (JSON).", rich_help_panel=_MACHINE)
]
Machine = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A machine of a paper, or a box such as 4x-rtx4090.", rich_help_panel=_MACHINE),
]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="A known device, such as rtx4090.", rich_help_panel=_MACHINE)]
HostMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="Host memory, such as 256GiB.", rich_help_panel=_MACHINE)]
Disk = Annotated[str | None, typer.Option(metavar="NAME", help="Known drives, such as p5510x12.", rich_help_panel=_MACHINE)]
Devices = Annotated[int | None, typer.Option(min=1, metavar="N", help="Devices that train together.", rich_help_panel=_MACHINE)]
Link = Annotated[str | None, typer.Option(metavar="NAME", help="Its link to the host, such as pcie5.", rich_help_panel=_MACHINE)]
Peers = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What connects devices: pcie4, nvlink4, or bytes/s.", rich_help_panel=_MACHINE),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One model on one machine, as the options give it. ``None``: not given.

    Attributes:
        model_profile: File of a model profile.
        preset_model: Name of a known model.
        model_config: A Hugging Face model's ``config.json``, or its folder: ``--model``.
        lora: Adapters of that model, such as ``"r=16,targets=q,v"``.
        quantize: How its frozen weights are stored.
        chunked_head: 1: its head and loss are computed in chunks.
        batch: Sequences per step and device, for ``preset_model`` or ``model_config``.
        sequence: Tokens per sequence, for the same.
        precision: Bits of a weight, ``"16"`` or ``"32"``, for the same.
        hardware_profile: File of a hardware profile. If no option names a machine, it is this one,
            as ``profile`` measured it.
        machine: Name of a paper's machine.
        device: Name of a known device.
        host_memory: Host memory of the machine with that device, or instead of the paper's.
        disk: Its drives.
        devices: How many devices train together.
        link: Its link to the host.
        peers: What connects several devices.
    """

    model_profile: Path | None = None
    preset_model: str | None = None
    model_config: Path | None = None
    lora: str | None = None
    quantize: str | None = None
    chunked_head: int | None = None
    batch: int | None = None
    sequence: int | None = None
    precision: str | None = None
    hardware_profile: Path | None = None
    machine: str | None = None
    device: str | None = None
    host_memory: str | None = None
    disk: str | None = None
    devices: int | None = None
    link: str | None = None
    peers: str | None = None

    @classmethod
    def of(cls, *, dora: bool, lora: str | None, chunked_head: bool, **others: Any) -> Request:
        """The request that the options of a command give."""
        if dora:
            if lora is None:
                raise ConfigError("--dora says how adapters are made; give --lora too, such as --lora r=16,targets=q,v.")
            lora += ",dora=true"
        return cls(lora=lora, chunked_head=1 if chunked_head else None, **others)

    def given(self) -> str:
        """The options that are given, as one writes them; empty without any."""
        return _flags(f.name for f in fields(self) if getattr(self, f.name) is not None)

    @classmethod
    def from_origin(cls, origin: Any, *, folder: Path) -> Request:
        """Reads the request that :meth:`origin` wrote into a plan file in ``folder``.

        Raises:
            ConfigError: It holds an unknown key, or a value of the wrong type.
        """
        wrong = {k: v for k, v in origin.items() if not isinstance(v, int if k in _COUNTS else str)}
        if wrong or (wrong := {k: v for k, v in origin.items() if k not in {f.name for f in fields(cls)}}):
            raise ConfigError(f"the plan's origin has {wrong!r}; allowed keys: {', '.join(f.name for f in fields(cls))}.")
        return cls(**{k: folder / v if k in _FILES else v for k, v in origin.items()})

    def origin(self, *, folder: Path) -> dict[str, str | int]:
        """The request as stored in a plan file in ``folder``.

        Paths are relative, so the files can move together.
        """
        out: dict[str, str | int] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None:
                out[f.name] = os.path.relpath(value, folder) if isinstance(value, Path) else value
        return out

    def or_else(self, other: Request) -> Request:
        """This request, completed from ``other``.

        A file replaces the whole model or machine, other options single keys.
        """
        values: dict[str, Any] = {}
        for file, *names in (_MODEL_KEYS, _MACHINE_KEYS):
            if getattr(self, file) is not None:
                values |= {k: getattr(self, k) for k in (file, *names)}
            elif self._names(names):
                values |= {k: getattr(other, k) if getattr(self, k) is None else getattr(self, k) for k in names}
            else:
                values |= {k: getattr(other, k) for k in (file, *names)}
        if self.machine is not None:  # a paper's machine and a device exclude each other
            values |= {"device": self.device, "link": self.link, "peers": self.peers}
        elif self.device is not None:
            values["machine"] = None
        if self.model_config is not None:  # and so do two models
            values["preset_model"] = None
        elif self.preset_model is not None:
            values |= {"model_config": None, **{key: getattr(self, key) for key in _OF_CONFIG}}
        return Request(**values)

    def _names(self, keys: Iterable[str]) -> bool:
        return any(getattr(self, key) is not None for key in keys)

    def profiles(self) -> tuple[ModelProfile, HardwareProfile]:
        """The model and the machine.

        Raises:
            ConfigError: Options are missing or contradict each other, a file cannot be read, a name
                is unknown.
        """
        self._check()
        hardware = self.hardware()
        if self.model_profile is not None and self._names(("machine", "device")):
            typer.echo(
                "note: compute is as fast as on the machine that --model-profile was measured on: its seconds are not scaled to "
                f"{hardware.name}. For times of that device, use a --preset-model.",
                err=True,
            )
        if self.model_config is not None:
            from lightning_hetero.profiling import presets

            if note := presets.unreadable(self.model_config):
                typer.echo(f"note: {note}", err=True)
        return self.model(hardware), hardware

    def _check(self) -> None:
        given = [key for key in _MODELS if getattr(self, key) is not None]
        if len(given) != 1:
            raise _which_model(_flags(given) or "none")
        if self.model_profile is None:
            self._shape(given[0])
        if self.model_profile is not None and self._names(_MODEL_KEYS[1:]):
            raise ConfigError(
                "--model-profile was measured at one batch; --batch, --sequence, --precision go with --preset-model or --model."
            )
        if self.model_config is None and self._names(_OF_CONFIG):
            raise ConfigError(f"{_flags(_OF_CONFIG)} go with --model: the config.json of a Hugging Face model, or its folder.")
        _, *parts = _MACHINE_KEYS
        if self.hardware_profile is not None and self._names(parts):
            raise ConfigError(f"--hardware-profile is a whole machine; {_flags(parts)} go without it.")
        if self.machine is not None and self._names(("device", "link", "peers")):
            raise ConfigError(f"--machine {self.machine} has its device and its links; --device, --link and --peers go without it.")
        if self.machine is None and self._names(parts) and (self.device is None or self.host_memory is None):
            raise ConfigError("a machine needs --device and --host-memory, such as --device rtx4090 --host-memory 256GiB.")

    def _shape(self, key: str) -> tuple[int, int]:
        """The batch and the sequence of a model that has none of its own."""
        if self.batch is None or self.sequence is None:
            raise ConfigError(f"{_flags([key])} {getattr(self, key)} needs --batch and --sequence, such as 8 and 1024.")
        return self.batch, self.sequence

    def hardware(self) -> HardwareProfile:
        """The machine; if none is named, this one, as ``profile`` measured it."""
        if self.hardware_profile is not None:
            return HardwareProfile.load(self.hardware_profile)
        from lightning_hetero.profiling import presets

        if self.machine is not None:
            return presets.paper_machine(self.machine, host_memory=self.host_memory, disk=self.disk, count=self.devices)
        if self.device is None or self.host_memory is None:
            return _this_machine()
        return presets.machine(
            device=self.device, host_memory=self.host_memory, disk=self.disk, count=self.devices or 1, link=self.link,
            peers=self.peers,
        )  # fmt: skip

    def model(self, hardware: HardwareProfile) -> ModelProfile:
        """The model. A preset has the times of the machine's device."""
        if self.model_profile is not None:
            return ModelProfile.load(self.model_profile)
        from lightning_hetero.profiling import presets

        itemsize = int(self.precision or 16) // 8
        if self.model_config is not None:
            batch, sequence = self._shape("model_config")
            tuning = presets.Tuning.parse(lora=self.lora, quantize=self.quantize, chunked_head=bool(self.chunked_head))
            return presets.from_config(
                self.model_config, tuning, batch=batch, sequence=sequence, hardware=hardware, itemsize=itemsize
            )
        if self.preset_model is None:
            raise _which_model("none")
        batch, sequence = self._shape("preset_model")
        return presets.model(self.preset_model, batch=batch, sequence=sequence, hardware=hardware, itemsize=itemsize)

    def with_chunked_head(self, hardware: HardwareProfile) -> ModelProfile | None:
        """The model with its head in chunks; ``None`` if it has that already, or cannot have it."""
        if self.model_config is None or self.chunked_head:
            return None
        try:
            return replace(self, chunked_head=1).model(hardware)
        except ConfigError:
            return None

    def model_alone(self) -> ModelProfile:
        """The model without a machine.

        A preset has the times of an arbitrary device; its FLOP and bytes are exact.

        Raises:
            ConfigError: Options are missing or contradict each other, a file cannot be read, a name
                is unknown.
        """
        from lightning_hetero.profiling import presets

        self._check()
        return self.model(presets.machine(device="a100-80", host_memory="1GiB"))


# The options of a request, in the order of `--help`.
_OPTIONS: dict[str, Any] = {
    "model_profile": ModelFile,
    "preset_model": PresetModel,
    "model_config": ModelConfig,
    "lora": LoraText,
    "dora": Dora,
    "quantize": Quantize,
    "chunked_head": ChunkedHead,
    "batch": Batch,
    "sequence": Sequence,
    "precision": Precision,
    "hardware_profile": HardwareFile,
    "machine": Machine,
    "device": Device,
    "host_memory": HostMemory,
    "disk": Disk,
    "devices": Devices,
    "link": Link,
    "peers": Peers,
}


def options_of_a_request(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of a request in the place of its parameter ``request``.

    typer reads a command's options from its signature, so this decorator writes a signature.
    """

    @functools.wraps(command)
    def with_request(**given: Any) -> None:
        request = Request.of(**{name: given.pop(name) for name in _OPTIONS})
        command(request=request, **given)

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name != "request":
            parameters.append(parameter)
            continue
        for name, kind in _OPTIONS.items():
            default = False if kind in (Dora, ChunkedHead) else None
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    vars(with_request)["__signature__"] = inspect.Signature(parameters)
    with_request.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_request


def _which_model(got: str) -> ConfigError:
    return ConfigError(f"which model? Got {got} of {_flags(_MODELS)}; give one of them.")


def _this_machine() -> HardwareProfile:
    from lightning_hetero.profiling.hardware import measure

    with working("measuring this machine, once"):
        return measure()


_COUNTS = ("batch", "sequence", "devices", "chunked_head")
_MODELS = ("model_profile", "preset_model", "model_config")
_OF_CONFIG = ("lora", "quantize", "chunked_head")
_MODEL_KEYS = (*_MODELS, *_OF_CONFIG, "batch", "sequence", "precision")
_FILES = ("model_profile", "hardware_profile", "model_config")
_MACHINE_KEYS = ("hardware_profile", "machine", "device", "host_memory", "disk", "devices", "link", "peers")


def _flags(keys: Iterable[str]) -> str:
    return ", ".join("--model" if key == "model_config" else "--" + key.replace("_", "-") for key in keys)


def load_plan(path: Path, request: Request) -> tuple[Plan, Request]:
    """A plan file, and the request completed with the plan's own origin.

    Raises:
        ConfigError: The file is not a plan, or neither it nor the options name the model.
    """
    plan = Plan.load(path)
    origin = {key: value for key, value in plan.origin.items() if key != OPTIONS}
    complete = request.or_else(Request.from_origin(origin, folder=path.absolute().parent))
    if not complete._names(_MODELS):
        raise ConfigError(f"{path} does not name its model; give --model-profile, --preset-model or --model.")
    return plan, complete
