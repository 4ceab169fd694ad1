"""The README's figures: what `plan` predicts for models and machines, and a measured comparison.

    # prints them
    python benchmarks/readme.py
    # writes them into README.md and docs/images
    python benchmarks/readme.py --write

Predictions are those of the default planner. It may search for longer than on the command line, so
that a busy machine prints the same. The picture's figures are read from a file in
benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tempfile
from pathlib import Path

from peers.publish import bars, written
from typer.testing import CliRunner

from lightning_hetero.cli.app import app
from lightning_hetero.cli.options import Request
from lightning_hetero.cli.planning import DEFAULT, planners, run
from lightning_hetero.units import GIB

ROOT = Path(__file__).parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "images" / "peers.svg"
MEASURED = ROOT / "benchmarks" / "results" / "adapters_2-cores_2026-11-23.md"
PATIENT = {"seconds": 600.0}

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
CONFIGS = {"Llama 3 8B": LLAMA_8B, "Llama 3 70B": LLAMA_70B}
LORA = "r=16,targets=all-linear"
WAYS = {"all weights": {}, "LoRA": {"lora": LORA}, "QLoRA": {"lora": LORA, "quantize": "nf4-double"}}
MODELS = [("Llama 3 8B", "all weights"), ("Llama 3 8B", "LoRA"), ("Llama 3 70B", "QLoRA")]
MACHINES = {
    "laptop: RTX 4060, 8 GiB; 32 GiB": {"device": "rtx4060-laptop", "host_memory": "32GiB", "batch": 1},
    "desktop: RTX 4090, 24 GiB; 64 GiB": {"device": "rtx4090", "host_memory": "64GiB", "batch": 4},
    "server: A100, 80 GiB; 256 GiB": {"device": "a100-80", "host_memory": "256GiB", "batch": 8},
}
EVERYWHERE = {"sequence": 2048, "disk": "nvme-gen4"}
LANES = {
    "compute": "compute", "disk": "the SSD", "disk_read": "the SSD", "disk_write": "the SSD", "h2d": "the link", "d2h": "the link",
    "cpu": "CPU updates",
}  # fmt: skip

CASES = [
    "plan --preset-model llama-3-8b --batch 4 --sequence 2048 --device rtx4090 --host-memory 64GiB --disk nvme-gen4",
    "plan --preset-model llama-3-8b --batch 1 --sequence 2048 --device rtx4060-laptop --host-memory 32GiB --disk nvme-gen4",
]
SHOWN = ("model", "machine", "iteration", "forward", "backward", "device memory", "host memory", "disk space", "disk wear")


def table() -> str:
    """Model by machine: tokens per second and what bounds backward, or what is missing."""
    head = ["predicted", *MACHINES]
    rows = [head, ["---"] * len(head)]
    with tempfile.TemporaryDirectory() as folder:
        for name, config in CONFIGS.items():
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for model, way in MODELS:
            request = {"model_config": Path(folder) / model, **EVERYWHERE, **WAYS[way]}
            rows.append([f"{model}, {way}", *(cell(Request(**request, **machine)) for machine in MACHINES.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cell(request: Request) -> str:
    """One model on one machine."""
    model, hardware = request.profiles()
    (outcome,) = run(planners(DEFAULT), model, hardware, PATIENT)
    if outcome.plan is None:
        short = getattr(outcome.error, "shortfall_bytes", 0)
        return f"no: {short / GIB:.0f} GiB missing on the {getattr(outcome.error, 'tier', '')}"
    predicted = outcome.plan.require_predicted()
    speed = float(f"{model.tokens / predicted.iteration_s:.2g}")  # a prediction has no more digits
    return f"{speed:,.0f} tokens/s, {LANES[predicted.bottleneck['backward']]}"


def case(command: str) -> str:
    """A command with the lines of its output that matter most."""
    patient = [text for key, value in PATIENT.items() for text in ("--option", f"{key}={value:g}")]
    result = CliRunner().invoke(app, [*shlex.split(command), *patient], env={"COLUMNS": "200"})
    if result.exit_code:
        raise RuntimeError(result.stderr)
    lines = [line.rstrip() for line in result.stdout.splitlines() if line.strip().startswith(SHOWN)]
    return "\n".join([f"$ lightning-hetero {command}", *lines])


def picture() -> str:
    """The seconds of a step of three programs that read the same weights, as bars."""
    text = MEASURED.read_text(encoding="utf-8")

    def turns(name: str) -> tuple[list[float], list[float]]:
        (row,) = re.findall(rf"^\| {name}[^|]*\|([\d., ]+)\|([\d., ]+)\|", text, re.MULTILINE)
        theirs, ours = ([float(value) for value in cell.split(",")] for cell in row)
        return theirs, ours

    slow, beside_slow = turns("airllm")
    fast, beside_fast = turns("accelerate")
    mine = beside_slow + beside_fast
    means = [("hetero_offload", sum(mine) / len(mine)), ("accelerate", sum(fast) / len(fast)), ("airllm", sum(slow) / len(slow))]
    title = "LoRA of a 7 B model, ours in 2 GiB, others in 4 GiB: seconds of a step, means of turns"
    return bars(title, {"": [(name, seconds, name == "hetero_offload") for name, seconds in means]})


def cases() -> str:
    """Both commands as the README shows them."""
    return "```console\n" + "\n\n".join(map(case, CASES)) + "\n```"


def parts() -> dict[str, str]:
    """The texts between the README's markers, by the marker's name."""
    return {"cases": cases(), "table": table()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write README.md and the picture")
    args = parser.parse_args()
    made = parts()
    if args.write:
        README.write_text(written(README.read_text(encoding="utf-8"), made, "benchmarks/readme.py"), encoding="utf-8")
        PICTURE.write_text(picture(), encoding="utf-8")
    print(*made.values(), sep="\n\n")
    print(json.dumps({"readme": str(README.relative_to(ROOT)), "is_written": args.write}))


if __name__ == "__main__":
    main()
