"""A resume trains on the batches that the run would have had, however its data is loaded, and says
where it cannot.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.loading import (
    SHARED,
    SIZE,
    Batches,
    Case,
    CountingStream,
    Counts,
    Endless,
    GoesOn,
    Own,
    Permutes,
    Positioned,
    Rows,
    Stateful,
    Stream,
    Takes,
    TakesMore,
    Told,
    check,
    drawing_dataset,
    fit,
    killed,
    loader,
    offload,
    row,
    shares_a_generator,
    shuffled,
    torch_draw,
)
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_hetero.errors import ConfigError

WORKERS = {"num_workers": 1}
PERSISTENT = {"num_workers": 1, "persistent_workers": True}
CASES = {
    "persistent": Case(lambda: shuffled(**PERSISTENT), stops=((2,), (7,), (4,), (5,), (1, 3, 11))),
    "persistent, limited": Case(lambda: shuffled(**PERSISTENT), {"limit_train_batches": 3}, stops=((2,), (5,))),
    "persistent, drawing in its first epoch": Case(
        lambda: shuffled(Rows(torch_draw), **PERSISTENT), {"max_epochs": 1}, ((1,), (2, 3))
    ),
    "persistent, with a generator": Case(lambda: shuffled(**PERSISTENT, generator=torch.Generator().manual_seed(3))),
    "persistent, beside a short one": Case(
        lambda: {"a": shuffled(**PERSISTENT), "b": shuffled(Rows(size=4), **PERSISTENT)}, stops=((3,), (8, 9))
    ),
    "persistent, made anew": Case(lambda: shuffled(**PERSISTENT), {"reload_dataloaders_every_n_epochs": 2}, stops=((2,), (8,))),
    "persistent validation": Case(
        lambda: shuffled(), {"val_check_interval": 2}, ((3,), (6, 7)), lambda: shuffled(Rows(size=4), **PERSISTENT)
    ),
    "workers that draw": Case(lambda: shuffled(Rows(torch_draw), num_workers=2)),
    "drawing datasets": Case(lambda: shuffled(Rows(torch_draw))),
    "seeds drawn with the first batch": Case(lambda: loader(sampler=SubsetRandomSampler(range(SIZE)))),
    "weights": Case(lambda: loader(sampler=WeightedRandomSampler([1.0] * SIZE, SIZE))),
    "replacement": Case(lambda: loader(sampler=RandomSampler(Rows(), replacement=True, num_samples=SIZE))),
    "distributed": Case(lambda: loader(sampler=DistributedSampler(Rows(size=20), 2, 0))),
    "accumulated": Case(lambda: [shuffled(), shuffled(Rows(size=4))], {"accumulate_grad_batches": 2}, ((1,), (4,), (2, 5))),
    "several": Case(lambda: {"a": shuffled(Rows(torch_draw)), "b": shuffled(Rows(torch_draw, 4))}),
    "several with workers": Case(lambda: [shuffled(**WORKERS), shuffled(Rows(size=4), **WORKERS)], stops=((4,), (8,))),
    "shortest": Case(lambda: CombinedLoader([shuffled(), shuffled(Rows(size=6))], "min_size")),
    "longest": Case(lambda: CombinedLoader([shuffled(), shuffled(Rows(size=6))], "max_size")),
    "made anew": Case(lambda: shuffled(), {"reload_dataloaders_every_n_epochs": 2}, ((2,), (5, 8), (10,))),
    "overfit": Case(lambda: shuffled(), {"overfit_batches": 3}),
    "python's generator": Case(lambda: loader(sampler=Own(random.Random(1), lambda r: r.randrange(SIZE)))),
    "numpy's generator": Case(lambda: loader(sampler=Own(np.random.default_rng(1), lambda r: int(r.integers(SIZE))))),
    "numpy's old generator": Case(lambda: loader(sampler=Own(np.random.RandomState(1), lambda r: r.randint(SIZE)), **WORKERS)),
    "torch's generator": Case(
        lambda: loader(sampler=Own(torch.Generator().manual_seed(1), lambda g: int(torch.randint(SIZE, (), generator=g))))
    ),
    "a dataset's generator": Case(lambda: drawing_dataset(random.Random(1), lambda r: r.random())),
    "a dataset's generator below": Case(
        lambda: loader(Subset(drawing_dataset(np.random.default_rng(2), lambda r: r.random()).dataset, range(8)))
    ),
    "a dataset's generator in workers": Case(
        lambda: drawing_dataset(random.Random(1), lambda r: r.random(), **WORKERS), stops=((7,),)
    ),
    "a sampler that counts": Case(lambda: loader(sampler=Counts())),
    "a dataset that is told the epoch": Case(lambda: shuffled(Told(), **WORKERS), stops=((8,),)),
    "a stream, limited": Case(lambda: loader(Stream(lambda n: int(torch.randint(n, ())))), {"limit_train_batches": 3}),
    "a generator of several": Case(
        lambda: shares_a_generator(), {"val_check_interval": 2}, validation=lambda: shuffled(generator=SHARED)
    ),
    "a sampler with a state": Case(lambda: loader(sampler=Permutes(), **WORKERS)),
    "a dataset with a state": Case(lambda: loader(CountingStream())),
    "a dataset with a position": Case(lambda: loader(Positioned())),
    "a stream": Case(lambda: loader(Stream(lambda n: int(torch.randint(n, ()))))),
    "a stream in a worker": Case(lambda: loader(Stream(random.randrange), **WORKERS)),
    "an endless sampler": Case(lambda: loader(Rows(torch_draw), sampler=Endless()), stops=((2,), (3, 11))),
    "a loader with a state": Case(lambda: Stateful()),
    "a loader with a state and no length": Case(lambda: Stateful(sized=False)),
    "one loader with a state": Case(lambda: [Stateful(), shuffled()]),
    "a list of tensors": Case(lambda: shuffled([row(i) for i in range(SIZE)])),
    "a list of arrays": Case(lambda: shuffled(Listed())),
    "no loader": Case(lambda: {"a": Batches()}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_continues_with_the_same_batches(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    plain = fit(tmp_path, case, "auto")
    for number, stops in enumerate(case.stops):
        root = tmp_path / str(number)
        check(killed(root, case, stops), plain)


# ---- what is counted are the iterator's batches --------------------------------------------------


class Saves(pl.Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("name", ["persistent", "several", "distributed", "a stream", "workers that draw", "a loader with a state"])
@pytest.mark.parametrize("saved", [2, 8])
def test_a_run_that_began_in_the_middle_of_an_epoch_continues(name: str, saved: int, tmp_path: Path) -> None:
    case, checkpoint = CASES[name], tmp_path / "some.ckpt"
    fit(tmp_path, case, "auto", callbacks=[Saves(checkpoint, saved)])
    plain = fit(tmp_path, case, "auto", ckpt_path=checkpoint)
    check(killed(tmp_path, case, (saved + 1, saved + 3), begin=checkpoint), plain)


class TakesAhead(Takes):
    """Keeps a batch for the next step."""

    ahead: Any = None

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch = self.ahead if self.ahead is not None else next(dataloader_iter)[0]
        self.ahead = next(dataloader_iter, (None,))[0]
        return self.trained(batch)


@pytest.mark.parametrize("name", ["persistent", "several", "drawing datasets", "a stream", "torch's generator"])
@pytest.mark.parametrize("model", [Takes, TakesMore])
def test_batches_that_training_steps_take_by_themselves_are_counted(name: str, model: Any, tmp_path: Path) -> None:
    case = CASES[name]
    plain = fit(tmp_path, case, "auto", model=model)
    check(killed(tmp_path, case, (2, 6), model=model), plain)


# ---- what cannot be replayed is said -------------------------------------------------------------


def test_batches_that_a_training_step_keeps_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Case(shuffled, {"max_steps": 3}), offload(tmp_path), model=TakesAhead)
    assert "training_step has taken 3 batches of dataloader_iter in 2 calls" in caplog.text


class Listed(Rows):
    """Has its samples in a list of arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.items = [row(i).numpy() for i in range(SIZE)]

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.items[index])


class Shifts(Sampler[int]):
    """Changes a list over epochs, and does not say so."""

    def __init__(self) -> None:
        self.order = list(range(SIZE))

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(list(self.order))


class Reads(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.lines = iter(range(1000))

    def __getitem__(self, index: int) -> Tensor:
        return row(next(self.lines))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: shuffled(**PERSISTENT), "the training DataLoader has persistent_workers=True"),
        (lambda: loader(num_workers=2, in_order=False), "has in_order=False"),
        (lambda: loader(sampler=Shifts()), "dataloader 0: sampler.order of Shifts changes as the training data is iterated"),
        (lambda: loader(GoesOn()), "dataloader 0: dataset.given of GoesOn changes as the training data is iterated"),
        (lambda: loader(GoesOn()), "the training dataset GoesOn is an IterableDataset without state_dict"),
        (lambda: loader(Reads()), "dataloader 0: dataset.lines of the training data is an iterator (range_iterator)"),
        (
            lambda: loader(Stream(random.randrange, 60)),
            "the training data's dataset Stream choose samples with the global random numbers again and again",
        ),
    ],
    ids=["persistent", "in_order", "order", "counter", "stream", "iterator", "global"],
)
def test_data_that_cannot_be_replayed_is_named(
    make: Callable[[], Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, Case(make, {"max_steps": 25}), offload(tmp_path))
    assert said in caplog.text


@pytest.mark.parametrize("name", ["drawing datasets", "several", "distributed", "a sampler that counts", "a sampler with a state"])
def test_data_that_is_replayed_is_not_warned_of(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, CASES[name], offload(tmp_path))
    assert [r.message for r in caplog.records if r.name.startswith("lightning_hetero") and r.levelname == "WARNING"] == []


def test_other_generators_are_refused(tmp_path: Path) -> None:
    fit(tmp_path, CASES["python's generator"], offload(tmp_path), stop=3)
    with pytest.raises(ConfigError, match=r"dataloader 0: generator; those of the store: dataloader 0: sampler\.rng"):
        fit(tmp_path, CASES["persistent, with a generator"], offload(tmp_path), ckpt_path=tmp_path / "store")


class Pairs(BatchSampler):
    """A class of its own."""


def pairs() -> DataLoader[Tensor]:
    return DataLoader(Rows(), batch_sampler=Pairs(SequentialSampler(Rows()), 2, drop_last=False))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DataLoader(Rows(), batch_size=1, shuffle=True), ["number of batches 5 -> 10", "batch_size 2 -> 1"]),
        (lambda: shuffled(Rows(size=14)), ["dataset length 10 -> 14", "number of batches 5 -> 7"]),
        (lambda: loader(), ["sampler RandomSampler -> SequentialSampler"]),
        (lambda: shuffled(drop_last=True), ["drop_last False -> True"]),
        (lambda: [shuffled(), shuffled()], ["number of dataloaders 1 -> 2"]),
        (pairs, ["batch sampler BatchSampler -> Pairs", "sampler RandomSampler -> SequentialSampler"]),
        (lambda: loader(Stream(random.randrange)), ["dataset length 10 -> None"]),
        (lambda: shuffled(), []),
    ],
    ids=["batch_size", "length", "shuffle", "drop_last", "number", "batch sampler", "stream", "same"],
)
def test_data_that_has_changed_in_the_middle_of_an_epoch_is_named(
    make: Callable[[], Any], said: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, Case(lambda: shuffled()), offload(tmp_path), stop=2)
    fit(tmp_path, Case(make), offload(tmp_path), ckpt_path=tmp_path / "store")
    changed = [r.message for r in caplog.records if "the training data has changed in the middle of an epoch" in r.message]
    assert len(changed) == bool(said)
    assert all(what in text for text in changed for what in said)


def test_an_epoch_that_begins_may_have_other_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Case(lambda: shuffled()), offload(tmp_path), stop=5)
    fit(tmp_path, Case(lambda: loader(Rows(size=20))), offload(tmp_path), ckpt_path=tmp_path / "store")
    assert "has changed" not in caplog.text
