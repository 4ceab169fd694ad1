"""Plans for a Hugging Face model and its adapters."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import HARDWARE, invoke, parsed

from lightning_hetero.cli.options import Request, load_plan
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import TRAINED, BlockPlan, Plan, Tier
from lightning_hetero.units import MIB

DOCS = Path(__file__).parents[3] / "docs" / "cli.md"
TINY = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
LORA = ["--lora", "r=8,targets=q,v"]
SHAPE: dict[str, Any] = {"batch": 8, "sequence": 64}


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    """Options of a tiny model; its folder has the model's name."""
    return ["--model", str(_written(tmp_path / "tiny", TINY)), "--batch", "8", "--sequence", "64"]


@pytest.fixture
def machine(tmp_path: Path) -> list[str]:
    return _machine(tmp_path, device_mib=2048)


def _machine(folder: Path, *, device_mib: int) -> list[str]:
    file = folder / f"{device_mib}.json"
    file.write_text(replace(HARDWARE, device_memory_bytes=device_mib * MIB).to_json(), encoding="utf-8")
    return ["--hardware-profile", str(file)]


def _written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_the_documented_example_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _written(tmp_path / "Llama-3.1-8B", LLAMA_8B)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    examples = re.findall(r"```console\n\$ lightning-hetero (plan --model .*)\n((?:.*\n)*?)```", DOCS.read_text(encoding="utf-8"))
    assert len(examples) == 2
    for command, shown in examples:
        fits = not shown.startswith("error")
        result = invoke(*shlex.split(command), code=0 if fits else 2)
        assert _lines(result.stdout if fits else result.stderr) == _lines(shown)


def _lines(text: str) -> list[str]:
    """Without the seconds that planning took, and the gap, which is the solver's rounding here."""
    return [line.rstrip() for line in text.strip().splitlines() if not line.startswith((" planned in", " gap"))]


def test_adapters_and_quantized_weights_need_less_memory(model: list[str], machine: list[str]) -> None:
    text = invoke("plan", *model, *machine, *LORA, "--quantize", "nf4-double").stdout
    assert re.search(r"tiny: [\d.]+ M parameters, [\d.]+ k trained", text)
    whole, frozen, small = (
        parsed("plan", *model, *machine, "--planner", "resident", *more)["predicted"]["device_peak_bytes"]
        for more in ([], LORA, [*LORA, "--quantize", "nf4"])
    )
    assert whole > frozen > small


def test_a_file_is_a_model_too(model: list[str], machine: list[str]) -> None:
    file = [model[0], model[1] + "/config.json", *model[2:]]
    got, other = (parsed("plan", *options, *machine, *LORA, "--planner", "host") for options in (file, model))
    assert got["predicted"] == other["predicted"]


def test_a_plan_remembers_its_model_and_adapters(model: list[str], machine: list[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    invoke("plan", *model, *machine, *LORA, "--dora", "--quantize", "int8", "--planner", "host", "--out", path)
    origin = Plan.load(path).origin
    assert origin["model_config"] == "tiny"
    assert origin["lora"] == "r=8,targets=q,v,dora=true"
    assert origin["quantize"] == "int8"
    _, request = load_plan(path, Request())
    assert request.model_config == tmp_path / "tiny"
    assert parsed("simulate", path)["predicted"]["iteration_s"] == Plan.load(path).require_predicted().iteration_s


def _with_weights(folder: Path, dtype: str, name: str = "model.norm.weight") -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, name: {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]}})
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())


def _stored(path: Path, *more: str) -> list[tuple[int, str]]:
    return [(row["slots"], row["why"]) for row in parsed("explain", path, *more)["frozen"]]


def test_explain_says_which_frozen_weights_take_a_slot(model: list[str], machine: list[str], tmp_path: Path) -> None:
    plan, folder = tmp_path / "plan.json", tmp_path / "tiny"
    rows = (BlockPlan(name=f"*{TRAINED}"), BlockPlan(name="model.layers.*", weights=Tier.DISK), BlockPlan(name="*"))
    plan.write_text(Plan(name="streams", blocks=rows).to_json(), encoding="utf-8")
    given = [*model, *machine, *LORA]
    alone = (1, "no safetensors files are beside config.json"), (0, "they stay in memory")
    assert sorted(_stored(plan, *given)) == sorted(alone)
    before = parsed("simulate", plan, *given)["predicted"]["disk_bytes"]
    _with_weights(folder, "BF16")
    in_place = "read in place from safetensors files"
    assert _stored(plan, *given) == [(0, in_place)]
    assert parsed("simulate", plan, *given)["predicted"]["disk_bytes"] == 0
    quantized = "they are quantized (nf4)"
    assert sorted(_stored(plan, *given, "--quantize", "nf4")) == [(0, in_place), (1, quantized)]
    wide = _stored(plan, *given, "--precision", "32")
    assert (1, "they have 32 bits, in the files they are BF16") in wide
    assert not any(why == in_place for _, why in wide)
    frozen = sum(
        b.num_params for b in Request(model_config=folder, **SHAPE).model_alone().blocks if b.name.startswith("model.layers.")
    )
    assert before == 2 * frozen
    profile = tmp_path / "profile.json"
    adapted = Request(model_config=folder, lora="r=8,targets=q,v", quantize="nf4", **SHAPE).model_alone()
    profile.write_text(adapted.to_json(), encoding="utf-8")
    assert ModelProfile.load(profile) == adapted
    assert sorted(_stored(plan, "--model-profile", profile, *machine)) == [(0, in_place), (1, quantized)]
    text = invoke("explain", plan, *given, "--quantize", "nf4").stdout
    assert "Frozen weights in the store" in text
    assert quantized in text


def test_a_file_that_is_no_safetensors_file_is_refused(model: list[str], machine: list[str], tmp_path: Path) -> None:
    (tmp_path / "tiny" / "model.safetensors").write_bytes(b"nothing like that")
    result = invoke("plan", *model, *machine, *LORA, code=2)
    assert "is not a safetensors file" in result.stderr


EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])  # read from the config, and by transformers
def test_a_folder_that_a_run_refuses_is_named_with_the_remedy(family: str, machine: list[str], tmp_path: Path) -> None:
    """As models with experts are saved: each expert by itself."""
    folder = _written(tmp_path / family, {**TINY, **EXPERTS, "model_type": family})
    given = ["plan", "--model", folder, "--batch", "1", "--sequence", "8", *machine, "--planner", "host"]
    names = ("model.layers.0.block_sparse_moe.experts.0.w1.weight", "model.layers.0.mlp.experts.gate_up_proj")
    shown = []
    for name in names:
        _with_weights(folder, "BF16", name)
        shown.append(invoke(*given).stderr)
    assert "has each expert by itself" in shown[0]
    assert "save_pretrained(folder, save_original_format=False)" in shown[0]
    assert "expert" not in shown[1]


@pytest.mark.parametrize("method", ["torchao", "bitsandbytes"])
def test_a_quantization_that_a_folder_has_is_not_followed_and_named(method: str, machine: list[str], tmp_path: Path) -> None:
    folder = _written(tmp_path / "folder", {**TINY, "quantization_config": {"quant_method": method}})
    given = ["plan", "--model", folder, "--batch", "1", "--sequence", "8", *machine, "--planner", "host"]
    assert f"has a quantization_config ({method}), which is not followed" in " ".join(invoke(*given).stderr.split())


def test_another_model_replaces_the_remembered_one() -> None:
    kept = Request(model_config=Path("a"), lora="r=1,targets=q", quantize="nf4", batch=2, sequence=8)
    assert Request().or_else(kept) == kept
    assert Request(batch=4).or_else(kept) == replace(kept, batch=4)
    assert Request(lora="r=2,targets=v").or_else(kept) == replace(kept, lora="r=2,targets=v")
    assert Request(preset_model="gpt2").or_else(kept) == Request(preset_model="gpt2", batch=2, sequence=8)
    known = Request(preset_model="gpt2", batch=2, sequence=8)
    assert Request(model_config=Path("a")).or_else(known) == Request(model_config=Path("a"), batch=2, sequence=8)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--dora"], "give --lora too"),
        (["--quantize", "nf4"], "quantized weights cannot train. Give --lora too"),
        (["--lora", "r=8"], "targets=NAME"),
        (["--lora", "r=8,targets=w1"], "no module 'w1'"),
        (["--preset-model", "gpt2"], "Got --preset-model, --model of"),
    ],
)
def test_options_that_make_no_model_are_refused(model: list[str], machine: list[str], more: list[str], message: str) -> None:
    assert message in parsed("plan", *model, *machine, *more, code=2)["error"]


def test_adapters_belong_to_a_hugging_face_model(machine: list[str]) -> None:
    refused = parsed("plan", "--preset-model", "gpt2", "--batch", "1", "--sequence", "8", *machine, *LORA, code=2)["error"]
    assert "--lora, --quantize, --chunked-head go with --model" in refused
    needs = parsed("plan", "--model", "x", *machine, code=2)["error"]
    assert "--model x needs --batch and --sequence" in needs


# ---- a head in chunks as a remedy ----------------------------------------------------------------


@pytest.fixture
def wordy(tmp_path: Path) -> list[str]:
    """A model whose logits take more memory than all else: 4 x 512 tokens, 65536 words."""
    config = {**TINY, "vocab_size": 65536}
    return ["--model", str(_written(tmp_path / "wordy", config)), "--batch", "4", "--sequence", "512", *LORA]


def test_logits_that_dominate_are_named_with_what_chunks_save(wordy: list[str], tmp_path: Path) -> None:
    machine = _machine(tmp_path, device_mib=8192)
    shown = " ".join(invoke("plan", *wordy, *machine, "--planner", "resident").stdout.split())
    found = re.search(r"head its logits take ([\d.]+) GiB; chunked_head=True saves ([\d.]+) (?:M|G)iB", shown)
    assert found is not None
    assert float(found[1]) == pytest.approx(2048 * 65536 * (4 + 4 + 2) / 2**30, abs=0.06)
    paths = tmp_path / "whole.json", tmp_path / "chunked.json"
    whole, less = (
        parsed("plan", *wordy, *machine, "--planner", "resident", *more, "--out", path)["predicted"]["device_peak_bytes"]
        for path, more in zip(paths, ([], ["--chunked-head"]), strict=True)
    )
    assert whole - less > 2**29
    assert load_plan(paths[1], Request())[1].chunked_head == Plan.load(paths[1]).origin["chunked_head"] == 1
    assert "logits" not in invoke("plan", *wordy, "--chunked-head", *machine, "--planner", "resident").stdout
    assert "its logits take" in " ".join(invoke("explain", paths[0]).stdout.split())


def test_small_logits_are_not_named(model: list[str], machine: list[str]) -> None:
    assert "logits" not in invoke("plan", *model, *machine, "--planner", "resident").stdout


def test_a_refusal_names_a_head_in_chunks(wordy: list[str], tmp_path: Path) -> None:
    options = [*wordy, *_machine(tmp_path, device_mib=1900), "--planner", "resident"]
    assert "chunked_head=True saves" in (refused := parsed("plan", *options, code=2)["error"])
    assert "and it fits" in refused
    parsed("plan", *options, "--chunked-head")
    tight = parsed("plan", *wordy, *_machine(tmp_path, device_mib=1030), "--planner", "resident", code=2)["error"]
    assert "chunked_head=True saves" in tight
    assert "and it fits" not in tight


@pytest.mark.parametrize(
    ("more", "why"),
    [({"final_logit_softcapping": 30.0, "model_type": "gemma2"}, "is followed by softcapping"), ({}, "has an adapter")],
)
def test_heads_that_cannot_be_cut_are_refused(more: dict[str, Any], why: str, tmp_path: Path) -> None:
    machine = _machine(tmp_path, device_mib=8192)
    folder = _written(tmp_path / "other", {**TINY, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 65536, **more})
    lora = LORA if more else ["--lora", "r=8,targets=q,lm_head"]
    options = ["--model", folder, "--batch", "4", "--sequence", "512", *lora, *machine, "--planner", "resident"]
    assert why in parsed("plan", *options, "--chunked-head", code=2)["error"]
    assert "chunked_head" not in invoke("plan", *options).stdout


# ---- a smaller batch as a remedy -----------------------------------------------------------------


@pytest.mark.parametrize("planner", ["holistic", "resident"])
def test_a_refusal_names_the_largest_batch_that_fits(planner: str, model: list[str], tmp_path: Path) -> None:
    options = [*model, *_machine(tmp_path, device_mib=1100), *LORA, "--planner", planner]
    refused = parsed("plan", *options, "--batch", "500", code=2)
    (batch,) = map(int, re.findall(r"A smaller batch: --batch (\d+) fits\.", refused["error"]))
    assert 1 < batch < 500
    assert refused["shortfall_bytes"] > 0
    assert parsed("plan", *options, "--batch", batch)["predicted"]["iteration_s"] > 0
    parsed("plan", *options, "--batch", batch + 1, code=2)


def test_a_refusal_says_so_if_no_batch_fits(model: list[str], tmp_path: Path) -> None:
    options = [*model, *_machine(tmp_path, device_mib=1024), *LORA, "--planner", "resident"]
    assert "No smaller batch fits, not even --batch 1." in parsed("plan", *options, code=2)["error"]
    assert "smaller batch" not in parsed("plan", *options, "--batch", "1", code=2)["error"]


def test_recommended_micro_batches_are_whole_sequences(model: list[str], tmp_path: Path) -> None:
    """A batch of 3 has none; a batch of 6 may be 2, 3 or 6."""
    options = [*model, *_machine(tmp_path, device_mib=1100), *LORA]
    for batch in (3, 6):
        refused = parsed("plan", *options, "--batch", batch, "--sequence", "20000", code=2)["error"]
        assert all(batch % int(parts) == 0 for parts in re.findall(r"micro_batches=\[(\d+)\]", refused))
