"""Which options make a group with tiers, and what such a group refuses."""

from __future__ import annotations

import pickle
import weakref
from pathlib import Path
from typing import Any

import jsonargparse
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import Strategy

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError, UnsupportedError
from lightning_hetero.lanes import EmulatedDevice
from lightning_hetero.parallel import replicas
from lightning_hetero.parallel.elastic import Elastic
from lightning_hetero.parallel.strategies.hetero_parallel_offload import held_once
from lightning_hetero.strategies import (
    HeteroParallelFsdpStrategy,
    HeteroParallelOffloadStrategy,
    HeteroParallelStrategy,
    parallel_class,
    parallel_offload_class,
)

DISK = {"plan": "disk", "host_memory": "4GiB"}


def placed(strategy: Any, rank: int, names: tuple[str, ...]) -> Any:
    """The options of one rank, once all have met."""

    class World:
        def global_rank(self) -> int:
            return rank

        def world_size(self) -> int:
            return len(names)

        def local_rank(self) -> int:
            return 0

    strategy.cluster_environment, strategy.parallel_devices = World(), [torch.device("cpu")]
    strategy.uneven.names = names
    strategy._check_names()
    return strategy._own()


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_offload_makes_the_class_with_tiers_and_nothing_else_does(namespace: str) -> None:
    plain, tiered = parallel_class(namespace), parallel_offload_class(namespace)
    assert type(plain(offload=True)) is type(pickle.loads(pickle.dumps(plain(offload=DISK)))) is tiered
    assert type(plain()) is type(plain(offload=None)) is type(plain(offload=False)) is plain
    assert isinstance(plain(offload=True), plain)


def test_configurations_may_name_ranks_and_nodes() -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--strategy", type=Strategy)
    options = {"offload": {"small": DISK, 1: {"plan": "host"}}, "speeds": [1, 2, 2]}
    given = {"class_path": "lightning_hetero.strategies.HeteroParallelStrategy", "init_args": options}
    strategy = parser.instantiate(parser.parse_object({"strategy": given})).strategy
    assert type(strategy) is HeteroParallelOffloadStrategy
    assert strategy.uneven.speeds == [1, 2, 2]
    names = ("big", "big", "small")
    plans = [placed(strategy, rank, names).options.plans[0].__name__ for rank in range(3)]
    assert plans == ["resident", "host", "disk"]
    assert placed(strategy, 2, names).options.host_memory == 4 << 30


def test_ranks_of_one_node_share_its_resources(tmp_path: Path) -> None:
    strategy = HeteroParallelStrategy(offload={"plan": "disk", "disk_path": tmp_path})
    first, second = (placed(strategy, rank, ("node", "node")).options for rank in range(2))
    assert (first.disk_path, second.disk_path) == (tmp_path / "rank-0", tmp_path / "rank-1")
    assert first.sharers == 2
    assert first.engine.update_threads == max(1, strategy.options.engine.threads() // 2)
    assert not first.wants_steps


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"offload": {}}, ConfigError, "offload={}"),
        ({"offload": 3}, ConfigError, "offload=3"),
        ({"offload": {0: "disk"}}, ConfigError, "for a rank"),
        ({"offload": {"plna": "disk"}}, ConfigError, "plna"),
        ({"offload": {0: {"plan": "nothing"}}}, ConfigError, "'nothing'"),
        ({"offload": {"plan": "disk", "verify": 1}}, UnsupportedError, "verify=1"),
        ({"offload": {"a": {"plan": "disk", "keep_every": 2}}}, UnsupportedError, "keep_every=2"),
        ({"offload": True, "plan": "auto"}, UnsupportedError, "plan='auto'"),
        ({"offload": True, "ddp_comm_hook": print}, UnsupportedError, "ddp_comm_hook"),
        ({"offload": True, "sped": 1}, ConfigError, "no option .sped.. Did you mean .speeds."),
    ],
)
def test_options_that_a_group_does_not_have_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HeteroParallelStrategy(**options)


def test_ranks_and_nodes_that_are_not_there_are_refused_unless_nodes_may_come(tmp_path: Path) -> None:
    for offload in ({2: DISK}, {-1: DISK}, {"elsewhere": DISK}):
        with pytest.raises(ConfigError, match="offload names"):
            placed(HeteroParallelStrategy(offload=offload), 0, ("a", "b"))
    elastic = HeteroParallelStrategy(offload={"elsewhere": DISK}, elastic=Elastic(tmp_path))
    assert placed(elastic, 0, ("a", "b")).options.plans[0].__name__ == "resident"


def test_other_strategies_and_subclasses_say_that_they_have_no_tiers() -> None:
    class Own(parallel_class("lightning.pytorch")):  # type: ignore[misc]
        pass

    with pytest.raises(ConfigError, match="HeteroParallelOffloadStrategy"):
        Own(offload=True)
    with pytest.raises(UnsupportedError, match="offload=True"):
        HeteroParallelFsdpStrategy(offload=True)


class Manual(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("offload", "module", "options", "message"),
    [
        ({"plan": "disk"}, Manual(), {}, "automatic optimization"),
        ({"plan": "resident", "device": EmulatedDevice(memory="16MiB")}, None, {}, "updates run on the CPU"),
        ({"device": EmulatedDevice(memory="16MiB")}, None, {}, "planner 'holistic'"),
        ({"plan": "host"}, None, {"sync_batchnorm": True}, "sync_batchnorm"),
    ],
)
def test_a_fit_that_cannot_keep_ranks_equal_is_refused(
    offload: dict[str, Any], module: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=HeteroParallelStrategy(offload=offload), logger=False, max_steps=1,
        default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=message):
        trainer.fit(module or BoringModel())


def trained(strategy: Any, folder: Path) -> dict[str, Any]:
    """The weights after a fit of one process."""
    torch.manual_seed(0)
    model = Adam()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, max_steps=3, gradient_clip_val=0.1, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model)
    return model.state_dict()


def test_one_rank_trains_bit_for_bit_as_plain_lightning(tmp_path: Path) -> None:
    tiers = trained(HeteroParallelStrategy(offload={"plan": "disk", "disk_path": tmp_path / "files"}), tmp_path)
    plain = trained("auto", tmp_path)
    assert all(torch.equal(value, plain[name]) for name, value in tiers.items())


def test_a_rank_puts_an_earlier_run_aside_only_if_it_is_asked_to(tmp_path: Path) -> None:
    """A group keeps no steps; what a run of one process has kept where a rank's files go stays all
    the same.
    """
    store = tmp_path / "files" / "rank-0"
    trained(HeteroOffloadStrategy("disk", disk_path=store), tmp_path)
    offload = {"plan": "disk", "disk_path": tmp_path / "files"}
    with pytest.raises(ConfigError, match=r"holds step 3 of an earlier run.*new_run=True"):
        trained(HeteroParallelStrategy(offload=offload), tmp_path)
    trained(HeteroParallelStrategy(offload={**offload, "new_run": True}), tmp_path)
    assert (tmp_path / "files" / "rank-0.earlier-1" / "MANIFEST").is_file()


def test_buckets_of_gradients_are_in_the_account_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    sizes = []
    make = replicas._Bucket.of.__func__  # type: ignore[attr-defined]

    def of(kind: Any, *arguments: Any) -> Any:
        bucket = make(kind, *arguments)
        alive.extend([weakref.ref(bucket.flat)] if bucket.is_copy else [])
        sizes.append(sum(flat.nbytes for ref in alive if (flat := ref()) is not None))
        return bucket

    monkeypatch.setattr(replicas._Bucket, "of", classmethod(of))
    needed, counted, most = {}, {}, {}
    one, several = 25, 1 / 1024  # MiB: all gradients in one bucket, or the small ones in several of 1 KiB
    for cap in (one, several):
        sizes.clear()
        options: dict[str, Any] = {"plan": "host", "host_memory": "1KiB"}
        with pytest.raises(OutOfMemoryBudgetError, match="buckets in which ranks average gradients") as refused:
            trained(HeteroParallelStrategy(offload=options, bucket_cap_mb=cap), tmp_path)
        needed[cap] = refused.value.needed_bytes
        strategy = HeteroParallelStrategy(offload={**options, "host_memory": needed[cap]}, bucket_cap_mb=cap)
        trained(strategy, tmp_path)
        counted[cap], most[cap] = strategy.memory_report()["bucket_bytes"], max(sizes)
    assert most[one] == counted[one]
    assert 0 < most[several] <= counted[several] < counted[one]
    assert needed[one] - counted[one] == needed[several] - counted[several]


def test_ranks_that_train_other_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = []  # of the ranks that have met

    def gather(found: list[Any], own: Any) -> None:
        rows.append(own)
        found[:] = rows

    monkeypatch.setattr(replicas.dist, "get_world_size", lambda: len(rows) + 1)
    monkeypatch.setattr(replicas.dist, "all_gather_object", gather)
    replicas.check_same(Adam())
    replicas.check_same(Adam())
    frozen = Adam()
    frozen.layer[0].requires_grad_(False)
    with pytest.raises(ConfigError, match="they train others"):
        replicas.check_same(frozen)


class Adam(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)), torch.nn.Linear(32, 2))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, fused=True)


def test_alike_ranks_of_one_machine_are_told_to_hold_the_model_once() -> None:
    cpu, everywhere = torch.device("cpu"), HeteroOffloadStrategy("host").run.choices
    assert "devices=3" in held_once(["a"] * 3, everywhere, cpu)
    assert not held_once(["a", "b"], everywhere, cpu)
    assert not held_once(["a", "a"], None, cpu)
    assert not held_once(["a", "a"], everywhere, torch.device("cuda", 0))
    assert not held_once([], everywhere, cpu)
