"""A card of 24 GB with a frozen model that is larger: an emulated device with its proportions.

Which tokens of a step make compute the limit is asked of the planner: for a Llama with 30 billion
parameters in 16 bit on an RTX 4090. There the upload of a layer takes a share of the layer's
forward, and a share of the layers stays on the card. The emulated device has both shares. Its
layers last a set time, in forward and in backward; what they really compute is a small part of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from adapted import Adapted, Setting
from contestants import Baton, Contestant
from gpt2 import make_trainer
from paced import lasting
from step import TakesTurns
from torch import Tensor

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy
from lightning_hetero.ir.plan import Tier
from lightning_hetero.planners import PLANNERS
from lightning_hetero.profiling import presets
from lightning_hetero.units import MIB

CARD, HOST = "rtx4090", "128GiB"
LARGE = Setting(layers=60, hidden=6656, vocabulary=32000, rank=16, targets=("q_proj", "v_proj"), batch=1, seq=0)
SMALL = replace(LARGE, layers=12, hidden=256, vocabulary=256, seq=16)
TOKENS = (2048, 4096, 8192, 16384, 32768)
STREAMED = 3  # layers that have room beside those that stay
ROOM = 8 * MIB  # for activations, adapters, their state and what is outside the layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The large model on the card.

    Attributes:
        tokens: Of the smallest step in which compute is the limit.
        upload_share: Seconds of a layer's upload over those of its forward, at so many tokens.
        resident_share: Layers that stay on the card, over all.
    """

    tokens: int
    upload_share: float
    resident_share: float


def card() -> Card:
    """Asks the planner."""
    machine = presets.machine(device=CARD, host_memory=HOST)
    tuning = presets.Tuning.parse(lora=f"r={LARGE.rank},targets={','.join(LARGE.targets)}", quantize=None, chunked_head=True)
    for tokens in TOKENS:
        with tempfile.TemporaryDirectory() as folder:
            LARGE.config().save_pretrained(folder)
            model = presets.from_config(Path(folder), tuning, batch=1, sequence=tokens, hardware=machine)
        plan = PLANNERS["holistic"](model, machine)
        limits = plan.require_predicted().bottleneck
        print(f"{CARD}, {tokens} tokens: forward bound by {limits['forward']}, backward by {limits['backward']}", flush=True)
        if {limits["forward"], limits["backward"]} == {"compute"}:
            layers = [block for block in model.blocks if not block.pinned]
            places = plan.resolve(block.name for block in model.blocks).blocks
            upload_s = model.weight_bytes(layers[0]) / machine.link_h2d_bytes_per_s
            stay = [place.weights is Tier.DEVICE for place, block in zip(places, model.blocks, strict=True) if not block.pinned]
            return Card(tokens=tokens, upload_share=upload_s / layers[0].forward_s, resident_share=sum(stay) / len(stay))
    raise SystemExit(f"compute is the limit at none of {TOKENS} tokens")


# ---- layers that last ----------------------------------------------------------------------------


class _Ends(torch.autograd.Function):
    """Around a layer: backward of its output sets its end, backward of its input waits for that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, end: list[float], layer_s: float, first: bool) -> Tensor:
        ctx.end, ctx.layer_s, ctx.first = end, layer_s, first
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        if ctx.first:
            time.sleep(max(0.0, ctx.end[0] - time.monotonic()))
        else:
            ctx.end[0] = time.monotonic() + ctx.layer_s
        return grad, None, None, None


class Paced(Adapted):
    """The small model; its layers last ``layer_s`` in forward and in backward."""

    def __init__(self, layer_s: float) -> None:
        super().__init__(SMALL)
        self.layer_s = layer_s

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            with torch.device("cpu"):
                from transformers import AutoModelForCausalLM

                self.model = self.setting.adapted(AutoModelForCausalLM.from_config(self.setting.config(), dtype=torch.bfloat16))
            self.model.enable_input_require_grads()
            for layer in self.model.base_model.model.model.layers:
                layer.forward = partial(_lasting_forward, layer, self.layer_s)


def _lasting_forward(layer: Any, layer_s: float, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    end = [0.0]
    with lasting(layer_s):
        x: Tensor = _Ends.apply(hidden_states, end, layer_s, True)  # type: ignore[no-untyped-call]
        y = type(layer).forward(layer, x, *args, **kwargs)
        result: Tensor = _Ends.apply(y, end, layer_s, False)  # type: ignore[no-untyped-call]
    return result


def train(baton: Baton, directory: Path, device: EmulatedDevice, layer_s: float) -> dict[str, Any]:
    """Trains on the device."""
    strategy = HeteroOffloadStrategy(device=device)
    trainer = make_trainer(strategy=strategy, callbacks=[TakesTurns(baton)], default_root_dir=directory)
    module = Paced(layer_s)
    trainer.fit(module, module.loader())
    shown = strategy.plan
    return {
        "losses": module.losses,
        "plan": None if shown is None else shown.name,
        "predicted_s": None if shown is None or shown.predicted is None else shown.predicted.iteration_s,
        "prediction_error": strategy.prediction_error(),
        "device_peak_bytes": strategy.memory_report()["device_peak_bytes"],
    }


def measure(args: argparse.Namespace, directory: Path) -> None:
    """A device with the card's shares beside one with room for all; prints one line of JSON."""
    found = card()
    layer = next(iter(SMALL.base().model.layers))
    layer_bytes = sum(param.numel() * 2 for param in layer.parameters())
    link = layer_bytes / (found.upload_share * args.layer_s)
    room = round(found.resident_share * SMALL.layers) + STREAMED
    small = EmulatedDevice(memory=room * layer_bytes + ROOM, h2d_bytes_per_s=link, d2h_bytes_per_s=link)
    large = replace(small, memory=4 * (SMALL.layers * layer_bytes + ROOM))
    seconds: dict[str, list[float]] = {"streams": [], "resident": []}
    with (
        Contestant(train, directory, small, args.layer_s) as streams,
        Contestant(train, directory, large, args.layer_s) as resident,
    ):
        both = {"streams": streams, "resident": resident}
        for number in range(args.rounds + 1):
            for name in list(both) if number % 2 else reversed(both):
                turn = both[name].turn(args.steps if number else args.warm_up)
                if number:
                    seconds[name].append(statistics.median(turn.seconds))
                    print(f"round {number}, {name}: {seconds[name][-1]:.3f} s/step", flush=True)
        results = {name: process.finish() for name, process in both.items()}
    speed = [a / b for a, b in zip(seconds["resident"], seconds["streams"], strict=True)]
    common = min(len(result["losses"]) for result in results.values())
    error = results["streams"]["prediction_error"].get("step_time_error")
    print(json.dumps({
        "benchmark": "adapters", "device": "emulated",
        "speed_vs_resident": statistics.median(speed), "prediction_error": error,
        "within": {"speed_vs_resident": statistics.median(speed) >= 0.9, "prediction_error": error is not None and error <= 0.05},
        "tokens": found.tokens, "upload_share": found.upload_share, "resident_share": found.resident_share, "card": CARD,
        "same_losses": results["streams"]["losses"][:common] == results["resident"]["losses"][:common],
        "layers_bytes": SMALL.layers * layer_bytes, "device_memory_bytes": small.memory, "link_bytes_per_s": round(link),
        "plan": results["streams"]["plan"], "predicted_s": results["streams"]["predicted_s"],
        "device_peak_bytes": results["streams"]["device_peak_bytes"],
        "seconds_per_step": {name: statistics.median(values) for name, values in seconds.items()},
        "rounds": args.rounds, "steps": args.steps, "torch": torch.__version__,
    }))  # fmt: skip
