"""The commands for clusters: what they print, write, remember and refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli import invoke, parsed

from lightning_hetero.cli import launch
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.cluster_plan import ClusterPlan, GroupPlan, StagePlan
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.parallel import elastic

MODEL = ["--preset-model", "gpt:layers=4,hidden=512,heads=8", "--batch", "1", "--sequence", "128", "--micro-batches", "6"]
CLUSTER = "2xa100-80+1xh800"


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """``profile --model`` adds to the path of its process."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    invoke("plan-cluster", CLUSTER, *MODEL, "--out", path)
    return path


def test_the_plan_is_printed_and_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    shown = invoke("plan-cluster", CLUSTER, *MODEL, "--out", path).stdout
    written = ClusterPlan.load(path)
    assert f"Wrote the plan to {path}." in shown.replace("\n", "")
    for word in ("node0 2x a100-80, node1 1x h800", "played through", "utilisation", "Pipelines", "Runner-ups", "micro-batches"):
        assert word in shown
    assert written.micro_batches == 6
    got = parsed("plan-cluster", CLUSTER, *MODEL)
    assert got["iteration_s"] == written.iteration_s
    assert 0 < got["schedule_s"] <= written.iteration_s * (1 + 1e-9)
    assert [g["micro_batches"] for g in got["groups"]] == [g.micro_batches for g in written.groups]
    assert got["world_size"] == written.world_size
    assert got["runner_ups"]


def test_a_hugging_face_model_is_planned_and_remembered(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = ["--batch", "1", "--sequence", "128", "--micro-batches", "6"]
    path = tmp_path / "plan.json"
    got = parsed("plan-cluster", CLUSTER, "--model", tmp_path, *shape, "--out", path)
    same = parsed("plan-cluster", CLUSTER, "--preset-model", "llama:layers=4,hidden=512,heads=8,intermediate=1536", *shape)
    assert [group["micro_batches"] for group in got["groups"]] == [group["micro_batches"] for group in same["groups"]]
    assert got["iteration_s"] == pytest.approx(same["iteration_s"], rel=0.02)
    assert ClusterPlan.load(path).origin["model_config"] == "."
    assert tmp_path.name in " ".join(invoke("explain", path).stdout.split())


MODULE = """
import torch
from torch import nn
from lightning_hetero.parallel import StagedSteps

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 60, bias=False), nn.Linear(60, 16, bias=False)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Net(StagedSteps, nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(5, 16), nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 3)
    def stage_layers(self):
        return nn.ModuleDict({"first": self.first, **{f"block{i}": b for i, b in enumerate(self.blocks)}, "head": self.head})
    def loss_sum(self, output, batch):
        return output.sum()

def make():
    return Net(), (torch.randn(6, 5), torch.randn(6, 3))

def alone():
    return Net()
"""


def test_a_profile_of_layers_says_which_weights_tensor_parallelism_divides(tmp_path: Path) -> None:
    """60 columns: ranks of a stage are two or four, and eight neither by default nor on request."""
    module, out = tmp_path / "train.py", tmp_path / "model.json"
    module.write_text(MODULE)
    got = parsed("profile", "--model", f"{module}:make", "--device", "cpu", "--out", out)
    profile = ModelProfile.load(out)
    assert [b.name for b in profile.blocks] == ["first", "block0", "block1", "block2", "block3", "head"]
    for block in profile.blocks[1:-1]:
        assert block.sharding is not None
        assert (block.sharding.num_params, block.num_params) == (2 * 16 * 60, 2 * 16 * 60 + 32)
        assert block.sharding.forward_flop == block.forward_flop == 2 * 2 * 6 * 16 * 60
        assert block.sharding.ways == 60
    assert profile.blocks[0].sharding is not None
    assert profile.blocks[0].sharding.num_params == 0
    assert len(got["layer_times"]["seconds"]) == 3
    shown = invoke("profile", "--model", f"{module}:make", "--device", "cpu").stdout
    assert "100 % of FLOP; degrees that divide 60" in " ".join(shown.split())  # however the column breaks
    request = ("plan-cluster", "8xa100-80", "--model-profile", out, "--micro-batches", "2")
    assert parsed(*request)["tensor_parallel"] in (1, 2, 4)
    assert parsed(*request, "--tensor-parallel", "4")["tensor_parallel"] == 4
    refused = parsed(*request, "--tensor-parallel", "8", code=2)
    assert "tensor_parallel=[8]; allowed: divisors of 60" in refused["error"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("train.py", "allowed: FILE.py:FUNCTION"),
        ("train.py:nothing", "there is no function 'nothing'"),
        ("train.py:alone", "it gave Net; expected"),
        ("elsewhere.py:make", "there is no file"),
        ("no_such_module_here:make", "there is no module"),
    ],
)
def test_a_function_that_gives_no_model_is_refused(
    target: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    assert message in parsed("profile", "--model", target, code=2)["error"]


def test_all_planners_stand_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    rows = parsed("plan-cluster", CLUSTER, *MODEL, "--planner", "all", "--out", path)
    assert [row["planner"] for row in rows] == ["asymmetric", "autohet", "balanced", "whale", "megatron"]
    assert ClusterPlan.load(path).iteration_s == min(row["iteration_s"] for row in rows)
    shown = invoke("plan-cluster", CLUSTER, *MODEL, "--planner", "all").stdout
    assert all(row["planner"] in shown for row in rows)


def test_a_cluster_file_is_remembered_with_the_plan_and_prices_are_shown(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(
        "name: lab\nnetwork_bytes_per_s: 50e9\nnodes:\n  - {name: left, device: a100-80, count: 2}\n"
        "  - {name: right, device: h800, count: 1}\n"
        "devices:\n  - {name: a100-80, price_per_hour: 1.5}\n  - {name: h800, price_per_hour: 4}\n"
    )
    shown = invoke("plan-cluster", tmp_path / "lab.yaml", *MODEL, "--tensor-parallel", "1", "--out", tmp_path / "plan.json").stdout
    assert "7.00 an hour" in shown  # 2 x 1.5 + 4
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("lab.yaml", "plan.json"):
        (tmp_path / name).rename(moved / name)
    assert ClusterPlan.load(moved / "plan.json").origin["cluster_file"] == "lab.yaml"
    assert "without left (2x a100-80)" in invoke("explain", moved / "plan.json").stdout


def test_explain_shows_the_binding_stage_and_other_clusters(plan_file: Path) -> None:
    plan = ClusterPlan.load(plan_file)
    got = parsed("explain", plan_file)
    binding = got["binding"]
    slow = plan.groups[binding["group"]]
    assert slow.seconds == max(g.seconds for g in plan.groups)
    assert binding["busy_s"] + binding["bubble_s"] + binding["sync_s"] == pytest.approx(plan.iteration_s)
    assert {row["name"] for row in got["planners"]} == {"asymmetric", "autohet", "balanced", "whale", "megatron"}
    speeds = {row["change"]: row["tokens_per_s"] for row in got["what_ifs"]}
    now = plan.tokens / plan.iteration_s
    assert speeds["without node0 (2x a100-80)"] < now < speeds["+1 node of 1x h800"]
    assert speeds["2x micro-batches"] > now
    shown = invoke("explain", plan_file).stdout
    for word in ("What binds", "What if", "The planners", "slowest stage"):
        assert word in shown


def test_explain_of_a_cluster_plan_refuses_options_of_other_plans(plan_file: Path) -> None:
    refused = invoke("explain", plan_file, "--batch", "16", "--host-memory", "4GiB", code=2).stderr
    assert "--batch, --host-memory would change nothing" in refused
    assert "plan-cluster" in refused


def test_explain_tries_the_degrees_that_the_plan_was_made_with(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made = parsed("plan-cluster", CLUSTER, *MODEL, "--tensor-parallel", "2", "--out", path)
    assert made["tensor_parallel"] == 2  # the node of one device idles
    got = parsed("explain", path)
    assert {row["tensor_parallel"] for row in got["planners"]} == {2}
    what_ifs = {row["change"]: row["iteration_s"] for row in got["what_ifs"]}
    assert what_ifs["without node0 (2x a100-80)"] is None
    assert what_ifs["without node1 (1x h800)"] == pytest.approx(made["iteration_s"])


def test_explain_of_a_plan_without_origin_names_the_missing_options(tmp_path: Path, plan_file: Path) -> None:
    data = json.loads(plan_file.read_text())
    del data["origin"]
    (bare := tmp_path / "bare.json").write_text(json.dumps(data))
    assert "does not name its cluster" in invoke("explain", bare, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["4xa100-80", *MODEL[:-2]], "--micro-batches"),
        (["4xa1000", *MODEL], "no device preset 'a1000'"),
        (["lab", *MODEL], "no cluster preset 'lab'"),
        (["missing.yaml", *MODEL], "cluster file 'missing.yaml' does not exist"),
        (["4xa100-80", "--micro-batches", "4"], "Got none of --model-profile, --preset-model, --model"),
        (["4xa100-80", *MODEL, "--planner", "oracle"], "--planner 'oracle'; allowed: asymmetric, "),
        (["4xa100-80", *MODEL, "--tensor-parallel", "8"], "allowed: 1 to 4"),
        (["1xrtx4080", "--preset-model", "llama-65b", *MODEL[2:]], "lacks "),
    ],
)
def test_a_wrong_request_exits_2_with_its_reason(arguments: list[str], reason: str) -> None:
    assert reason in invoke("plan-cluster", *arguments, code=2).stderr
    assert reason in parsed("plan-cluster", *arguments, code=2)["error"]


# ---- launch --------------------------------------------------------------------------------------


def _plan(*groups: tuple[str, ...], tensor_parallel: int = 1) -> ClusterPlan:
    return ClusterPlan(
        name="p",
        tensor_parallel=tensor_parallel,
        tokens=1,
        iteration_s=1.0,
        sync_s=0.0,
        utilisation=1.0,
        groups=tuple(
            GroupPlan(
                micro_batches=1,
                seconds=1.0,
                stages=tuple(StagePlan(node=n, device="d", layers=1, micro_batch_s=1.0, memory_bytes=1) for n in group),
            )
            for group in groups
        ),
    )


def test_every_node_runs_a_process_per_device_that_works() -> None:
    lines = launch.launch_lines(
        _plan(("a", "b"), ("a", "a"), tensor_parallel=2), ["t.py", "--lr", "1"], rendezvous="h:1", least_nodes=1, run_id="r"
    )
    commands = {node["node"]: node["command"] for node in lines["nodes"]}
    assert "--nproc-per-node=6" in commands["a"]
    assert "--nproc-per-node=2" in commands["b"]
    for command in commands.values():
        assert command[-3:] == ["t.py", "--lr", "1"]
        assert {"--nnodes=1:2", "--rdzv-endpoint=h:1", "--rdzv-id=r"} <= set(command)
        assert any("is_host=false" in word for word in command)  # no preemptible node holds the store
    assert lines["environment"] == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert [node["environment"] for node in lines["nodes"]] == [{"LIGHTNING_HETERO_NODE": "a"}, {"LIGHTNING_HETERO_NODE": "b"}]


def test_the_workers_are_told_where_steps_are_committed() -> None:
    lines = launch.launch_lines(_plan(("a",)), ["t.py"], rendezvous="h:1", least_nodes=1, run_id="r", steps="s3://b/steps")
    assert elastic.elastic_from(None, lines["environment"]) == elastic.Elastic("s3://b/steps")
    assert elastic.node_name(lines["nodes"][0]["environment"]) == "a"


def test_a_line_is_run_in_place_of_the_command(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(launch.os, "execvpe", lambda *arguments: ran.append(arguments))
    invoke("launch", plan_file, "--rendezvous", "h:1", "--steps", "/steps", "--run", "node0", "train.py")
    (program, command, environment), ran[:] = ran[0], []
    assert program == command[0] == "torchrun"
    assert command[-1] == "train.py"
    assert (environment["LIGHTNING_HETERO_STEPS"], environment["LIGHTNING_HETERO_NODE"]) == ("/steps", "node0")
    invoke("launch", plan_file, "--rendezvous", "h:1", "--run", "store", "train.py")
    assert ran[0][:2] == ("python", ["python", *ran[0][1][1:]])
    assert "TCPStore" in ran[0][1][2]
    refused = invoke("launch", plan_file, "--rendezvous", "h:1", "--run", "nobody", "train.py", code=2).stderr
    assert "--run 'nobody'; allowed: store, node0" in refused


def test_torchrun_understands_the_lines() -> None:
    from torch.distributed.run import config_from_args, get_args_parser

    lines = launch.launch_lines(_plan(("a", "b")), ["t.py", "--lr", "1"], rendezvous="h:29400", least_nodes=2, run_id="r")
    config, _, arguments = config_from_args(get_args_parser().parse_args(lines["nodes"][0]["command"][1:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.run_id) == (2, 2, 1, "r")
    assert config.rdzv_configs["is_host"] == "false"
    assert arguments[-3:] == ["t.py", "--lr", "1"]
    compile(lines["store"]["command"][2], "store", "exec")


def test_the_lines_are_printed_for_people_and_programs(plan_file: Path) -> None:
    arguments = ["launch", plan_file, "--rendezvous", "head:29400", "train.py", "--lr=1"]
    shown = invoke(*arguments).stdout
    assert "# On node0\nTORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 LIGHTNING_HETERO_NODE=node0 torchrun --nproc-per-node=" in shown
    lines = json.loads(invoke("launch", plan_file, "--rendezvous", "head:29400", "--json", "train.py").stdout)
    assert shown.count("train.py --lr=1") == len(lines["nodes"])


@pytest.mark.parametrize("own", [["--rendezvous", "h:1", "--json"], ["--json", "--rendezvous=h:1"]])
def test_words_after_the_script_belong_to_the_script(plan_file: Path, own: list[str]) -> None:
    script = ["train.py", "--steps", "100", "--run-id", "x", "--run=node0", "--json", "--help", "--", "y"]
    for arguments in ([plan_file, *own, *script], [*own, plan_file, *script], [*own, plan_file, "--", *script]):
        lines = json.loads(invoke("launch", *arguments).stdout)
        assert [node["command"][-len(script) :] for node in lines["nodes"]] == [script] * len(lines["nodes"])
        assert "LIGHTNING_HETERO_STEPS" not in lines["environment"]
    assert "least-nodes" in invoke("launch", "--help").stdout


def test_an_unknown_option_before_the_plan_is_refused(plan_file: Path) -> None:
    assert "--rendevous" in invoke("launch", "--rendevous", "h:1", plan_file, "train.py", code=2).stderr


@pytest.mark.parametrize("address", ["head", "head:", "head:99999", "head:port"])
def test_a_wrong_rendezvous_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="allowed: host:port"):
        launch.launch_lines(_plan(("a",)), ["t.py"], rendezvous=address, least_nodes=1, run_id="r")


def test_more_nodes_than_the_plan_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="--least-nodes 2; allowed: 1 to 1"):
        launch.launch_lines(_plan(("a", "a")), ["t.py"], rendezvous="h:1", least_nodes=2, run_id="r")
