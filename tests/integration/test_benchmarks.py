"""The benchmarks run, in tiny settings, and print the keys that their readers rely on. Their
figures mean nothing here.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import gpu_peers
import gpu_step
import prediction
import pytest
import scratch
import torch
from contestants import Baton, Contestant
from gpt2 import GPT2, SIZES
from larger_than_ram import check_space
from scratch import Log
from sharding import shortest_steps
from support.machines import HARDWARE
from support.scripts import output_of, result_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import lightning_hetero
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.planners.evaluation import simulation

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

TINY_STEP = ["--model", "tiny", "--seq", "16", "--rounds", "1", "--steps", "1", "--io-blocks", "1", "--io-chunks", "1"]


def run(script: str, *arguments: str | Path, cwd: Path) -> tuple[dict[str, Any], str]:
    """The JSON object that a benchmark prints last, and everything it printed."""
    output = output_of(BENCHMARKS / script, *arguments, cwd=cwd)
    return result_of(output), output


def test_update_prints_its_ratios(tmp_path: Path) -> None:
    result, _ = run("update.py", "--num-params", "65536", "--repeats", "3", cwd=tmp_path)
    for key in ("vs_torch_16bit", "vs_torch_fused", "vs_torch_foreach", "share_of_dram_limit"):
        assert result[key] > 0, key
    assert "vs_deepspeed" in result


def test_generation_reads_what_its_plan_says(tmp_path: Path) -> None:
    small = ("--layers", "24", "--hidden", "256", "--tokens", "3")
    result, _ = run("generation.py", *small, "--dir", tmp_path, cwd=tmp_path)
    assert result["same_tokens"] is True
    for key in ("vs_limit", "vs_compute", "speedup_vs_accelerate", "bandwidth_bytes_per_s"):
        assert result[key] > 0, key
    assert 1 <= result["bytes_vs_plan"] < 1.1, "whole pages are read, and each file of the weights begins within one"
    assert result["contestants"]["accelerate"]["on_disk"] > 0
    assert list(tmp_path.iterdir()) == []


def test_sharding_measures_ranks_beside_one_process_and_fsdp2(tmp_path: Path) -> None:
    small = ("--ranks", "2", "--layers", "2", "--width", "64", "--seq", "8", "--steps", "2", "--rounds", "1")
    paced = ("--paced-layers", "2", "--paced-width", "64", "--paced-step", "0.1", "--network", "1")
    small = (*small, "--headroom", "20")
    result, output = run("sharding.py", *small, *paced, "--dir", tmp_path, cwd=tmp_path)
    memory, step, paced = result["memory"]["ranks"]["2"], result["step"]["2"], result["paced"]["2"]
    assert memory["peak_ram"] > memory["ram"] > result["state_bytes"] > 12 * 2 * 12 * 64**2
    assert memory["state_bytes_vs_one_process"]["ram"] > 0
    assert step["step_vs_fsdp2"] > 0
    assert step["loss_difference"] < 1e-6, "both train the same"
    if "no network of its own" not in output:
        assert 0 < step["wire_bytes_per_parameter"] <= step["fsdp2_wire_bytes_per_parameter"]
    assert paced["speedup_over_one_rank"] > 0
    overlap = paced["overlap"]["1.0"]
    assert overlap["step_vs_busiest"] > 0
    assert overlap["step_vs_any_order"] >= overlap["step_vs_in_order"] > 0
    assert overlap["busy_s"]["compute"] > paced["compute_s"], "it takes its time"
    assert list(tmp_path.iterdir()) == []


def test_the_shortest_steps_follow_from_the_order_of_gradients() -> None:
    assert shortest_steps(8, 24.0, 0.0) == {"in_order": 24.0, "any_order": 24.0}
    assert shortest_steps(8, 24.0, 8.0) == {"in_order": 25.0, "any_order": 25.0}, "compute waits for the first block alone"
    assert shortest_steps(8, 24.0, 24.0) == {"in_order": 34.0, "any_order": 27.0}, "the network is idle in forward"
    assert shortest_steps(8, 24.0, 80.0) == {"in_order": 90.0, "any_order": 83.0}


def test_out_of_core_prints_its_shares(tmp_path: Path) -> None:
    result, _ = run("out_of_core.py", "--dir", tmp_path, "--blocks", "1", "--repetitions", "1", cwd=tmp_path)
    for key in ("share_of_io_limit", "share_of_io_limit_pool", "share_of_duplex_limit", "vs_naive"):
        assert result[key] > 0, key
    assert "share_of_io_limit_uring" in result
    assert list(tmp_path.iterdir()) == []


def test_step_compares_the_plans_and_names_missing_figures(tmp_path: Path) -> None:
    disk, trace = tmp_path / "disk", tmp_path / "trace.json"
    disk.mkdir()
    result, output = run("step.py", *TINY_STEP, "--dir", disk, "--trace", trace, cwd=tmp_path)
    assert result["seconds_per_step"].keys() == {"plain", "compute", "resident", "host", "disk", "device", "traced", "io"}
    assert all(seconds > 0 for seconds in result["seconds_per_step"].values())
    for key in (
        "resident_vs_plain",
        "host_vs_plain",
        "device_vs_plain",
        "traced_vs_host",
        "disk_vs_limit",
        "bandwidth_bytes_per_s",
    ):
        assert result[key] > 0, key
    # Adam in fp32: weights and both moments are written, both moments are read.
    assert result["bytes_per_step"] >= 20 * result["parameters"]
    assert json.loads((tmp_path / "trace-disk.json").read_text())["traceEvents"]
    assert "longest waits" in output
    assert list(disk.iterdir()) == []


def test_step_compares_two_builds_of_the_package(tmp_path: Path) -> None:
    build = tmp_path / "other"
    shutil.copytree(Path(lightning_hetero.__file__).parent, build / "lightning_hetero")
    result, _ = run("step.py", *TINY_STEP, "--plans", "kept", "--against", build, "--dir", tmp_path, cwd=tmp_path)
    assert result["seconds_per_step"].keys() == {"plain", "kept", "kept_before"}
    assert result["kept_vs_before"] > 0
    assert result["bytes_per_step_of"]["kept"] == result["bytes_per_step_of"]["kept_before"] > 0


def test_clipping_clips_as_often_as_it_says(tmp_path: Path) -> None:
    small = ("--model", "tiny", "--seq", "16", "--rounds", "1", "--steps", "2", "--rates", "0", "0.5")
    result, _ = run("clipping.py", *small, "--ways", "speculative", "after_everything", "--dir", tmp_path, cwd=tmp_path)
    assert result["same_bits"] is True
    assert result["speculative_vs_unclipped"] > 0
    assert {rate: row["clipped"] for rate, row in result["rates"].items()} == {"0": 0.0, "0.5": 0.5}
    never, often = (result["rates"][rate]["bytes_per_step"] for rate in ("0", "0.5"))
    assert often["speculative"] >= never["speculative"], "what was discarded in the middle of its way is written again"
    assert result["taken_back"]["speculative"] > 0 == result["taken_back"]["after_everything"]
    assert often["after_everything"] == pytest.approx(never["after_everything"], rel=0.01)
    assert list(tmp_path.iterdir()) == []


def test_larger_than_ram_reports_its_peak_and_cleans_up(tmp_path: Path) -> None:
    arguments = ["--model", "tiny", "--seq", "16", "--steps", "2", "--host-memory", "16MiB", "--dir", tmp_path]
    result, _ = run("larger_than_ram.py", *arguments, cwd=tmp_path)
    assert result["limit_bytes"] == 6 << 30
    assert result["within_limit"] == (result["peak_rss_bytes"] <= result["limit_bytes"])
    assert 0 < result["rss_before_bytes"] <= result["peak_rss_bytes"]
    assert result["parameters"] > 100_000
    assert result["seconds_per_step"] > 0
    assert len(result["losses"]) == 2
    assert result["losses"][0] == pytest.approx(5.55, abs=0.3), "an untrained model is as good as guessing: ln 257"
    assert result["disk_bytes"] >= 2 * 8 * result["parameters"], "two slots of at least both moments"
    assert list(tmp_path.iterdir()) == []


def test_weights_come_out_as_they_went_in(tmp_path: Path) -> None:
    result, _ = run("weights.py", "--model", "tiny", "--host-memory", "16MiB", "--dir", tmp_path, cwd=tmp_path)
    trained = {"train", "begin", "save", "resume_store", "resume_checkpoint"}
    assert result["phases"].keys() == {"import", "export", "weights"} | trained
    steps = {name: len(losses) for name, losses in result["losses"].items()}
    assert steps == {"train": 3, "begin": 1, "resume_store": 2, "resume_checkpoint": 2}
    assert result["resumed_the_same"] is True
    assert result["checkpoint_bytes"] > 12 * result["parameters"]
    allowed = result["host_memory_bytes"] + result["largest_block_bytes"]
    for phase in result["phases"].values():
        taken = phase["peak_rss_bytes"] - phase["rss_before_bytes"]
        assert taken >= 0
        assert phase["over_bytes"] == max(0, taken - allowed)
    assert result["within_limit"] == (not any(phase["over_bytes"] for phase in result["phases"].values()))
    assert result["ordinary_bytes"] >= 0
    assert result["exported_is_imported"] is True
    assert result["loss"] == pytest.approx(5.55, abs=0.3), "an untrained model is as good as guessing: ln 257"
    assert list(tmp_path.iterdir()) == []


def test_adapters_reads_what_does_not_fit_and_writes_what_trains(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = ["--layers", "12", "--hidden", "512", "--vocabulary", "256", "--rank", "4", "--seq", "8"]
    turns = ["--rounds", "1", "--steps", "2", "--warm-up", "1"]
    result, _ = run("adapters.py", *model, *turns, "--plan", "disk", "--host-memory", "64MiB", "--dir", tmp_path, cwd=tmp_path)
    assert result["same_losses"] is True
    assert result["within"].keys() == {"peak_rss_bytes", "bytes_read_per_step", "bytes_written_per_step", "extra_disk_bytes"}
    assert result["within"]["peak_rss_bytes"]
    assert result["within"]["extra_disk_bytes"]
    assert result["trained_state_bytes"] == 12 * 12 * 2 * 2 * 4 * 512
    assert 0 < result["kept_bytes"] < 2 * result["frozen_bytes"]
    # So small a state is read and written with as many bytes of footers, and with the record.
    assert 0 < result["bytes_read_per_step"] <= result["read_bound_bytes"] + 2 * result["trained_state_bytes"]
    assert 0.9 < result["written_ratio"] < 2
    assert result["vs_limit"] > 0
    assert [result[f"speedup_vs_{peer}"] for peer in ("accelerate", "airllm", "deepspeed")] == [None] * 3
    assert list(tmp_path.iterdir()) == []


def test_adapters_on_a_card_stream_what_does_not_stay_there(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    turns = ["--rounds", "1", "--steps", "1", "--warm-up", "5", "--layer-s", "0.002"]
    result, output = run("adapters.py", "--device", "emulated", *turns, "--dir", tmp_path, cwd=tmp_path)
    assert "8192 tokens: forward bound by compute, backward by compute" in output
    assert 0 <= result["resident_share"] < 1  # the planner may stream all of them: compute is the limit
    assert 0 < result["upload_share"] < 1
    assert result["device_peak_bytes"] <= result["device_memory_bytes"] < result["layers_bytes"]
    assert result["same_losses"] is True
    assert result["speed_vs_resident"] > 0
    assert list(tmp_path.iterdir()) == []


def test_chunked_head_prints_its_ratios(tmp_path: Path) -> None:
    result, output = run("chunked_head.py", "--vocabulary", "512", "--tokens", "32", "--hidden", "8", "--rounds", "1", cwd=tmp_path)
    for key in ("peak_ratio_frozen", "peak_ratio_trained", "time_ratio_frozen", "time_ratio_trained"):
        assert result[key] > 0, key
    assert output.count("MiB, loss") == 4


def takes_turns(baton: Baton) -> None:
    while baton.step_begins():
        pass


def test_a_contestant_that_is_no_longer_needed_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork has both ends of its pipe, so that it never sees the other one closed."""
    monkeypatch.setattr(scratch, "FORKS", True)
    with Contestant(takes_turns) as contestant:
        assert len(contestant.turn(2).seconds) == 2
    assert contestant._process.exitcode == 0, "-9: it was waited for, and killed"


def test_larger_than_ram_refuses_a_small_disk(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"free; needed: 1048576\.0 TiB"):
        check_space(tmp_path, 1 << 60)


def test_prediction_continues_with_what_was_measured_under_the_same_settings(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    Log(file, {"rounds": 3, "sizes": (1, 2)}).add("wide", "disk", {"error": 0.1})
    Log(file, {"rounds": 3, "sizes": (1, 2)}).add("wide", "host", {"error": 0.2})
    Log(file, {"rounds": 4, "sizes": (1, 2)}).add("wide", "host", {"error": 0.3})
    Log(None, {"rounds": 3}).add("wide", "host", {"error": 0.4})
    assert Log(file, {"rounds": 3, "sizes": (1, 2)}).results == {
        ("wide", "disk"): {"error": 0.1},
        ("wide", "host"): {"error": 0.2},
    }
    assert Log(file, {"rounds": 4, "sizes": (1, 2)}).results == {("wide", "host"): {"error": 0.3}}


def test_prediction_measures_a_device_whose_first_batch_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prediction.MODELS, "tiny", (prediction.Size(layers=4, width=64, heads=2, vocabulary=128), 2, 32))
    settings = argparse.Namespace(rounds=1, steps=1, dir=tmp_path, directory=tmp_path)
    found = prediction.small_device(settings, "tiny", HARDWARE)
    assert found["begun_again"] >= 1
    assert found["predicted_bytes"] <= found["device_bytes"]


def test_ablation_simulates_and_measures_the_same_variants(tmp_path: Path) -> None:
    directory, log = tmp_path / "disk", tmp_path / "log.jsonl"
    directory.mkdir()
    small = ("--layers", "2", "--compute-s", "0.05", "--steps", "1", "--continue", log)
    result, output = run("ablation.py", "--dir", directory, "--only", "priority", *small, cwd=tmp_path)
    found = result["experiments"]["priority"]
    assert result["same_bits"]
    assert (
        found["simulated_s"].keys() == found["measured_s"].keys() == found["spread"].keys() == {"without priority", "with priority"}
    )
    assert found["rounds"] == 1
    assert [row["measured, emulated"] > 0 for row in found["rows"]] == [True, True]
    assert found["rows"][1]["simulated, paper's machine"] > 1  # the direction of the paper's effect
    assert "| with priority | 1.24 |" in output
    assert list(directory.iterdir()) == []
    again, _ = run("ablation.py", "--dir", directory, "--only", "priority", *small, cwd=tmp_path)
    assert again == result  # nothing is measured twice


def test_gpu_step_trains_with_a_plan_that_was_made_elsewhere(tmp_path: Path) -> None:
    small = ("--model", "tiny", "--seq", "16", "--batch", "1", "--precision", "32-true", "--steps", "1", "--rounds", "1")
    directory, log, profiles = tmp_path / "disk", tmp_path / "log.jsonl", tmp_path / "profiles"
    directory.mkdir()
    common = ("--device", "emulated", *small, "--cap", "256MiB", "--continue", log, "--dir", directory)
    result, _ = run("gpu_step.py", *common, "--only", "zero_offload", "fsdp2", "--profiles", profiles, cwd=tmp_path)
    (at_cap,) = result["caps"]
    rows = at_cap["contestants"]
    assert rows.keys() == {"zero_offload", "fsdp2"}
    assert all(row["tokens_per_s"] > 0 for row in rows.values())
    assert 0 < rows["zero_offload"]["device_peak_bytes"] <= at_cap["cap_bytes"]
    assert rows["zero_offload"]["prediction_error"] is not None
    assert {"compute", "h2d"} <= {span[2] for span in rows["zero_offload"]["trace"]}
    assert rows["zero_offload"]["lanes_bytes_per_s"]["h2d"] > 0
    assert rows["zero_offload"]["stalls"][-1].startswith("step ")
    assert rows["fsdp2"]["flops_per_s"] > 0
    assert at_cap["peak_seconds_per_step"] is None
    model, machine = ModelProfile.load(profiles / "model.json"), HardwareProfile.load(profiles / "hardware-256MiB.json")
    assert machine.device_memory_bytes == at_cap["cap_bytes"]
    profiled = ("--model-profile", profiles / "model.json", "--hardware-profile", profiles / "hardware-256MiB.json")
    found, _ = run("ablation.py", "--only", "priority", "--plans", tmp_path / "plans", *profiled, cwd=tmp_path)
    plans = {plan.stem: Plan.load(plan) for plan in (tmp_path / "plans").iterdir()}
    assert plans.keys() == {f"priority, {name}" for name in found["simulated_s"]["priority"]}
    assert all(plan.predicted == simulation(plan, model, machine).prediction for plan in plans.values())
    plan = tmp_path / "plans" / "priority, with priority.json"
    result, _ = run("gpu_step.py", *common, "--only", "auto", "fsdp2", "--plan", plan, cwd=tmp_path)
    (again,) = result["caps"]
    assert again["contestants"]["fsdp2"] == rows["fsdp2"]  # the log has it
    assert again["contestants"]["auto"]["prediction_error"] is not None
    assert again["auto_vs_fsdp2"] > 0
    assert result["bars"]["auto_vs_fsdp2"]["reached"] == (again["auto_vs_fsdp2"] >= 1.5)
    assert result["bars"]["overhead"] == {"bar": 1.02, "value": None, "reached": None}
    assert list(directory.iterdir()) == []


def test_gpu_step_counts_the_matrix_products_of_forward_and_backward() -> None:
    size, batch, length = SIZES["tiny"], 2, 16
    module = GPT2(size)
    module.configure_model()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        module.training_step(torch.zeros(batch, length + 1, dtype=torch.long), 0).backward()
    masked = 6 * batch * length * size.layers * size.width * length  # torch counts the half that is masked, too
    counts = gpu_step.flops_per_step(argparse.Namespace(size=size, batch=batch, seq=length))
    assert counts == counted.get_total_flops() - masked


def test_the_peak_of_gpu_step_has_updates_by_fused_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: Any, name: str, target: Any, *arguments: Any) -> dict[str, Any]:
        assert (target, arguments[2]) == (gpu_step.plain, GPT2)
        return {"seconds_per_step": 1.0 + 0.5 * arguments[1]}

    monkeypatch.setattr(gpu_step, "run", run)
    assert gpu_step.peak_s(argparse.Namespace(size=SIZES["gpt-1.3b"])) == 1 + 0.5 * 24
    module = GPT2(SIZES["tiny"])
    module.configure_model()
    optimizer = module.configure_optimizers()
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"]


def test_contestants_on_a_gpu_say_how_often_its_allocator_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 512)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 3})
    assert gpu_peers.memory(argparse.Namespace(device="cuda")) == {"device_peak_bytes": 512, "allocator_retries": 3}


def test_virtual_cluster_measures_each_plan_beside_its_prediction(tmp_path: Path) -> None:
    cluster = "2x1 (5 layers) + 1x2"
    result, output = run("virtual_cluster.py", "--clusters", cluster, "--layer-s", "0.003", "--steps", "1", cwd=tmp_path)
    assert result["clusters"] == 1
    assert result["within_5_percent"] in (0, 1)
    (found,) = result["results"]
    ours, _, equal = found["plans"]
    assert [row["planner"] for row in found["plans"]] == ["asymmetric", "whale", "megatron"]
    assert ours["layout"] == "node0:2 > node0:2 > node1:4 x12"
    assert equal["speedup"] == 1
    for row in found["plans"]:
        # Sleeps of all micro-batches on the slowest stage are in the step.
        assert row["measured_s"] > 0.5 * row["predicted_s"] > 0
        assert row["layout"] in output


def test_recovery_reads_every_byte_from_the_nearest_place(tmp_path: Path) -> None:
    """Scenarios A to C: half of the groups lost, a node lost and TP 1 to 2, a group added."""
    figures, _ = run("recovery.py", "--dir", tmp_path, "--quick", cwd=tmp_path)
    assert figures["ok"] is True
    for scenario, sources in (("A", {"disk"}), ("B", {"disk", "remote"}), ("C", {"disk", "peer"})):
        found = figures[scenario]
        assert found["equal"]
        assert found["bytes_exact"]
        assert {source for source, size in found["bytes"].items() if size} == sources
        assert sum(found["bytes"].values()) == found["remote_only_bytes"]
