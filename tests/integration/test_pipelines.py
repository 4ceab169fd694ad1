"""Six processes in pipelines of depth 3, 2 and 1 train as one process."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import start, train
from support.sources import bytes_by_source
from support.training.pipelines import NODES
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

EXAMPLES = Path(__file__).parents[2] / "examples"
Results = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What six ranks and one process left; and of three and one that go on from a checkpoint of the
    six.
    """
    out = tmp_path_factory.mktemp("pipelines")
    with ThreadPoolExecutor() as pool:
        for run in [pool.submit(train, "pipelines", cwd=out, world=world) for world in (6, 1)]:
            run.result()
        checkpoint = out / "plain-6" / "step=3.ckpt"
        three = pool.submit(train, "pipelines", checkpoint, cwd=out, world=3, nodes=("b", "a", "a"))
        train("pipelines", checkpoint, cwd=out, world=1)
        three.result()
    return out


def load(folder: Path, name: str) -> Results:
    found: Results = torch.load(folder / name, weights_only=False)
    return found


@pytest.fixture(scope="module")
def alone(folder: Path) -> Results:
    return load(folder, "world1-rank0.pt")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Results]:
    return [load(folder, f"world6-rank{r}.pt") for r in range(6)]


def assert_close(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert found
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scenario", ["plain", "clipped", "accumulated", "thawed", "sharded"])
def test_pipelines_train_as_one_process(scenario: str, alone: Results, ranks: list[Results]) -> None:
    expected = alone[scenario]
    for rank in ranks:
        assert_close(expected["weights"], rank[scenario]["weights"])
        assert len(rank[scenario]["gradients"]) == len(expected["gradients"])
        for a, b in zip(expected["gradients"], rank[scenario]["gradients"], strict=True):
            if b or scenario != "thawed":  # a stage may have none
                assert_close(a, b)
        torch.testing.assert_close(rank[scenario]["losses"], expected["losses"], rtol=1e-12, atol=1e-12)
        assert rank[scenario]["lr"] == expected["lr"]


def test_every_layer_is_held_once_by_each_group(alone: Results, ranks: list[Results]) -> None:
    everything = set(alone["plain"]["weights"])
    held = [set(rank["plain"]["weights"]) for rank in ranks]
    assert held[0] | held[1] | held[2] == everything
    assert held[0] & held[2] == {"embedding.tokens.weight", "head.out.weight"}  # tied
    assert held[3] | held[4] == everything
    assert held[5] == everything
    assert {n.split(".")[1] for n in held[1] if n.startswith("blocks")} == {"1", "2"}


def test_replicas_are_equal_bit_for_bit(ranks: list[Results]) -> None:
    whole = ranks[5]
    for scenario in ("plain", "clipped", "accumulated", "sharded", "dropout", "bf16"):
        for rank in ranks:
            assert all(torch.equal(value, whole[scenario]["weights"][name]) for name, value in rank[scenario]["weights"].items())


def test_validation_is_the_mean_over_all_items_on_all_ranks(alone: Results, ranks: list[Results]) -> None:
    for rank in ranks:
        found, expected = rank["plain"]["metrics"], alone["plain"]["metrics"]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-6, atol=0)  # alone, counts are fp32
        torch.testing.assert_close(rank["plain"]["val"][1:], alone["plain"]["val"][1:], rtol=1e-12, atol=0)
        assert rank["plain"]["best"] == ranks[0]["plain"]["best"]
        assert Path(rank["plain"]["best"]).name == Path(alone["plain"]["best"]).name


@pytest.mark.parametrize("name", ["plain-6", "sharded-6", "idle-3"])
def test_a_checkpoint_equals_that_of_one_process(name: str, folder: Path) -> None:
    found = load(folder, f"{name}/step=3.ckpt")
    expected = load(folder, f"{'plain' if name == 'plain-6' else 'clipped'}-1/step=3.ckpt")
    assert list(found["state_dict"]) == list(expected["state_dict"])
    assert_close(expected["state_dict"], found["state_dict"])
    (a,), (b,) = expected["optimizer_states"], found["optimizer_states"]
    assert a["param_groups"] == b["param_groups"]
    assert list(a["state"]) == list(b["state"])
    for index, state in a["state"].items():
        assert_close(state, b["state"][index])


@pytest.mark.parametrize("world", [3, 1])
def test_it_continues_with_another_number_of_ranks(world: int, folder: Path, alone: Results) -> None:
    for rank in range(world):
        found = load(folder, f"resumed{world}-rank{rank}.pt")["resumed"]
        assert len(found["losses"]) == 3
        assert_close(alone["plain"]["weights"], found["weights"])


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, torch.Tensor]:
    """What torch's own tool makes of what six ranks saved with LocalFirst, by name."""
    dcp_to_torch_save(folder / "layers-6" / "step=3.ckpt", folder / "layers.pt")
    return flatten_state_dict(load(folder, "layers.pt"))[0]


def test_with_local_first_every_rank_saves_its_layers(folder: Path, saved: Results, ranks: list[Results], alone: Results) -> None:
    remote = folder / "layers-6" / "step=3.ckpt"
    for number, rank in enumerate(ranks):
        held = {f"blocks.{name.split('.')[1]}.0.distcp" for name in rank["layers"]["weights"] if name.startswith("blocks")}
        (node,) = [p.parent for p in (folder / "nodes" / f"node{number}").glob("*3-*/map.json") if str(remote) in p.read_text()]
        assert {p.name for p in node.glob("blocks.*")} == held
        for name, value in rank["layers"]["weights"].items():
            assert torch.equal(saved[f"state_dict.{name}"], value)
    assert {p.name for p in remote.glob("*/blocks.*")} == {f"blocks.{i}.0.distcp" for i in range(6)}  # everything once
    assert {k for k in saved if k.startswith("state_dict")} == {f"state_dict.{name}" for name in alone["layers"]["weights"]}


@pytest.mark.parametrize("name", ["layers", "equal", "shared", "shards"])
def test_layers_continue_where_they_are_needed(name: str, folder: Path, alone: Results, saved: Results) -> None:
    """Pipelines, data parallelism and a stage of two ranks go on from pipelines; one process, from
    stages of two ranks.
    """
    world = 1 if name == "shards" else 3
    for rank in range(world):
        found = load(folder, f"resumed{world}-rank{rank}.pt")[name]
        assert len(found["losses"]) == 3
        assert found["lr"] == alone["layers"]["lr"]
        if (name, rank) == ("shared", 0):
            assert not found["weights"]  # it idles
            continue
        assert_close(alone["layers"]["weights"], found["weights"])
        trained = [key for key in found["weights"] if key not in ("embedding.scale", "head.out.weight")]  # a buffer, a tied weight
        assert len(found["began"]) == len(found["weights"]) + 3 * len(trained)
        if name != "shards":
            assert all(torch.equal(saved[key], value) for key, value in found["began"].items())


@pytest.mark.parametrize("name", ["layers", "equal", "shared"])
def test_ranks_saving_in_turn_write_the_checkpoint_of_one_process(name: str, folder: Path) -> None:
    dcp_to_torch_save(folder / f"{name}-3" / "step=6.ckpt", folder / f"{name}-3.pt")
    found, expected = load(folder, f"{name}-3.pt"), load(folder, "layers-1/step=6.ckpt")
    assert found["state_dict"].keys() == expected["state_dict"].keys()
    assert_close(expected["state_dict"], found["state_dict"])
    (optimizer,) = expected["optimizer_states"]
    groups = found["optimizer_0"]["param_groups"]
    names = [parameter for group in groups for parameter in group["params"]]
    assert found["optimizer_0"]["state"].keys() == set(names)
    for number, parameter in enumerate(names):
        assert_close(optimizer["state"][number], found["optimizer_0"]["state"][parameter])
    for one, other in zip(groups, optimizer["param_groups"], strict=True):
        assert {**one, "params": len(one["params"])} == {**other, "params": len(other["params"])}


def test_ranks_of_a_stage_continue_with_the_same_random_numbers(folder: Path) -> None:
    """A checkpoint of as many ranks has each rank's own."""
    idle, first, second = (load(folder, f"resumed3-rank{rank}.pt")["again"] for rank in range(3))
    assert len(first["losses"]) == 1
    assert torch.equal(first["random"], second["random"])
    assert not torch.equal(first["random"], idle["random"])


def test_bytes_come_from_the_nearest_place(folder: Path) -> None:
    nodes = [folder / "nodes" / node for node in NODES]
    for rank in range(3):
        found = load(folder, f"resumed3-rank{rank}.pt")["layers"]
        expected = bytes_by_source(folder / "layers-6" / "step=3.ckpt", nodes, rank, found["weights"])
        assert found["bytes"] == expected
        assert [source for source, size in expected.items() if not size] == (["memory", "remote"] if rank == 2 else [])


def test_mixed_precision_computes_in_16_bit(alone: Results, ranks: list[Results]) -> None:
    for rank in ranks:
        assert all(value.dtype == torch.float32 for value in rank["bf16"]["weights"].values())
        torch.testing.assert_close(rank["bf16"]["losses"], alone["bf16"]["losses"], rtol=2e-2, atol=0)
        assert rank["bf16"]["losses"] != rank["plain"]["losses"][:2]
        for name, value in rank["bf16"]["gradients"][0].items():
            torch.testing.assert_close(value, alone["bf16"]["gradients"][0][name], rtol=0.1, atol=0.05)


def test_ranks_of_one_stage_share_its_widest_layers(ranks: list[Results]) -> None:
    assert ranks[0]["sharded"]["local"]["blocks.0.up.weight"] == (16, 8)
    assert ranks[1]["sharded"]["local"]["blocks.0.down.weight"] == (8, 16)
    assert ranks[1]["sharded"]["local"]["blocks.0.norm.weight"] == (8,)


def test_a_rank_that_idles_holds_nothing(folder: Path, alone: Results) -> None:
    idle, first, second = (load(folder, f"resumed3-rank{rank}.pt")["idle"] for rank in range(3))
    assert not idle["weights"]
    assert_close(alone["clipped"]["weights"], first["weights"])
    assert_close(alone["clipped"]["weights"], second["weights"])
    assert idle["losses"] == first["losses"] == second["losses"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mean", "loss_sum is not additive"),
        ("samplers", "samples of an epoch in different orders"),
        ("datasets", "ranks of one pipeline loaded different batches"),
    ],
)
def test_a_mean_loss_and_other_samples_are_refused_on_all_ranks(name: str, said: str, folder: Path) -> None:
    assert all(said in load(folder, f"resumed3-rank{rank}.pt")["refused"][name] for rank in range(3))


def test_values_are_clipped_of_shards_too_and_where_there_are_none(folder: Path, alone: Results) -> None:
    idle, *shards = (load(folder, f"resumed3-rank{rank}.pt")["values"] for rank in range(3))
    for rank in shards:
        assert_close(alone["values"]["weights"], rank["weights"])
    assert not idle["weights"]


def test_a_checkpoint_is_evaluated_after_training(alone: Results, ranks: list[Results]) -> None:
    for rank in ranks:
        assert len(rank["plain"]["after"]) == 3  # of the validation data, and of two loaders with test data
        for found, expected in zip(rank["plain"]["after"], alone["plain"]["after"], strict=True):
            assert found.keys() == expected.keys()
            assert found == pytest.approx(expected, rel=1e-6)


def test_the_example_trains() -> None:
    outputs = start(EXAMPLES / "pipelines.py", "fit", "--config", "configs/pipelines.yaml", cwd=EXAMPLES, world=3)
    losses = [float(found) for found in re.findall(r"val_loss ([\d.]+)", outputs[0])]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 5.0  # log(256) = 5.5 nats untrained


def test_a_plan_is_made_for_the_ranks_that_are_there(folder: Path, alone: Results) -> None:
    found = [load(folder, f"resumed3-rank{r}.pt")["auto"] for r in range(3)]
    plan = found[0]["plan"]
    assert all(rank["plan"] == plan for rank in found)
    assert plan.micro_batches == 12
    assert max(len(group.stages) for group in plan.groups) > 1  # no rank has memory for all layers
    assert {stage.node for group in plan.groups for stage in group.stages} <= {"a", "b"}
    for rank in found:
        assert_close({n: v for g in alone["plain"]["gradients"][:1] for n, v in g.items()}, rank["gradients"][0])


def test_ranks_of_a_node_share_layers_if_that_is_faster(folder: Path, alone: Results) -> None:
    other, *pair = [load(folder, f"resumed3-rank{r}.pt")["together"] for r in range(3)]
    plan = other["plan"]
    assert plan.tensor_parallel == 2
    assert {stage.node for group in plan.groups for stage in group.stages} == {"a"}
    assert plan.idle == {"b": 1}
    assert not other["weights"]
    for rank in pair:
        assert rank["local"]["blocks.0.up.weight"] == (16, 8)
        assert_close(alone["clipped"]["weights"], rank["weights"])


def test_layers_that_do_not_run_on_shards_are_not_shared(folder: Path) -> None:
    for rank in range(3):
        assert load(folder, f"resumed3-rank{rank}.pt")["whole"]["plan"].tensor_parallel == 1


def test_if_the_model_fits_every_rank_the_plan_is_data_parallel(folder: Path) -> None:
    for rank in range(3):
        found = load(folder, f"resumed3-rank{rank}.pt")["fits"]
        assert [len(group.stages) for group in found["plan"].groups] == [1] * 3
        assert len(found["weights"]) == len(found["gradients"][0]) + 2  # everything is here: a tied name and a buffer more
