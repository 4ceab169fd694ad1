"""``lightning-hetero profile --model``: measures the layers of a model, for a cluster plan."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from lightning_hetero.cli.output import console, count, percent, print_json, seconds, table, working, write_text
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.model import BlockProfile, ModelProfile, Sharding
from lightning_hetero.units import format_bytes

_NOTHING = Sharding(num_params=0, num_trainable_params=0, forward_flop=0.0, activation_bytes=0, traffic_bytes=0)


def run(target: str, *, out: Path | None, device: str | None, as_json: bool) -> None:
    """Measures, prints, and writes the profile to ``out``.

    Args:
        target: ``"FILE.py:FUNCTION"`` or ``"MODULE:FUNCTION"``; returns the module and one
            micro-batch.
        out: A file for the model's profile.
        device: ``"cpu"`` or the kind of an accelerator; ``None``: the accelerator if there is one.
        as_json: Print the profile and the times as JSON.

    Raises:
        ConfigError: There is no such function or device, it returns something else, or ``out``
            cannot be written.
        UnsupportedError: The module's layers cannot run in pipelines.
    """
    from lightning_hetero.parallel.pipeline.automatic import profile_layers
    from lightning_hetero.profiling.machine import device_of

    module, batch = _made(target)
    with working("measuring the model's layers"):
        profile, times = profile_layers(module, batch, device_of(device))
    if out is not None:
        write_text(out, profile.to_json())
    if as_json:
        print_json({"model": profile, "layer_times": times})
        return
    screen = console()
    columns = ("layer", "parameters", "forward", "saved for backward", "with tensor parallelism shared")
    screen.print(table(profile.name, columns, rows(profile), right=columns[1:4]))
    layers = ", ".join(f"{2**k}: {seconds(s)}" for k, s in enumerate(times.seconds))
    screen.print(f"Forward and backward of one micro-batch, by number of layers: {layers}.", markup=False)
    taken = ", ".join(f"{s:.3g}" for s in times.seconds)
    screen.print(f"In a cluster file: layer_times: [{{tensor_parallel: 1, seconds: [{taken}]}}]", markup=False)
    if out is not None:
        screen.print(f"Wrote the profile to {out}.", markup=False)


def rows(profile: ModelProfile) -> list[tuple[str, str, str, str, str]]:
    """A line for each layer."""
    return [
        (b.name, count(b.num_params), count(b.forward_flop, "FLOP"), format_bytes(b.activation_bytes), _shared(b))
        for b in profile.blocks
    ]


def _shared(block: BlockProfile) -> str:
    sharding = block.sharding or _NOTHING
    if sharding.ways == 1 or not sharding.num_params:
        return "nothing"
    of = {"parameters": (sharding.num_params, block.num_params), "FLOP": (sharding.forward_flop, block.forward_flop)}
    shares = ", ".join(f"{percent(part / whole)} of {what}" for what, (part, whole) in of.items() if whole)
    return f"{shares}; degrees that divide {sharding.ways}"


def _made(target: str) -> tuple[Any, Any]:
    """The function's result."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ConfigError(f"--model {target!r}; allowed: FILE.py:FUNCTION or MODULE:FUNCTION, such as train.py:model_and_batch.")
    function = getattr(_loaded(place), name, None)
    if not callable(function):
        raise ConfigError(f"--model {target!r}: there is no function {name!r} in {place}.")
    made = function()
    if not isinstance(made, tuple) or len(made) != 2:
        raise ConfigError(f"--model {target!r}: it gave {type(made).__name__}; expected (module, batch), one micro-batch of it.")
    return made


def _loaded(place: str) -> Any:
    sys.path.insert(0, str(Path(place).absolute().parent) if place.endswith(".py") else "")
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ConfigError(f"--model: there is no file {place!r}.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses and pickle look it up
        spec.loader.exec_module(module)
        return module
    except ModuleNotFoundError as error:
        if error.name != place:
            raise
        raise ConfigError(
            f"--model: there is no module {place!r}. Run it where the module can be imported, or name a file."
        ) from error
