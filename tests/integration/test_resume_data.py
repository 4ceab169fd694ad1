"""A resume trains on the batches that the run would have had, however its data is loaded, and says where it cannot."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, outcome, quiet_trainer
from support.resuming import Ends, EndsAt, after
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_hetero.errors import ConfigError
from lightning_hetero.strategies import HeteroOffloadStrategy

SIZE, STEPS = 10, 12  # samples of a dataset; batches have two, so an epoch has five
RECIPE = Recipe(shape=Shape(layers=1, width=8, dropout=0.1))


def row(index: int, shift: float = 0.0) -> Tensor:
    """A sample that tells which one it is, and what was drawn for it."""
    return torch.arange(6) * (index + 1) % 31 + int(5 * shift)


class Rows(Dataset[Tensor]):
    def __init__(self, draw: Callable[[], float] = lambda: 0.0, size: int = SIZE) -> None:
        self.draw, self.size = draw, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return row(index, self.draw())


def torch_draw() -> float:
    return float(torch.rand(()))


class Stream(IterableDataset[Tensor]):
    """Has no length, and draws its samples."""

    def __init__(self, draw: Callable[[int], int], size: int = SIZE) -> None:
        self.draw, self.size = draw, size

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.size):
            yield row(self.draw(SIZE))


class Own(Sampler[int]):
    """Shuffles with whatever it is given."""

    def __init__(self, generator: Any, draw: Callable[[Any], int]) -> None:
        self.rng, self.draw = generator, draw

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield self.draw(self.rng)


class Counts(Sampler[int]):
    """Counts epochs by itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter([(i * self.epoch + self.epoch) % SIZE for i in range(SIZE)])


class Told(Rows):
    """A dataset that is told the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Tensor:
        return row(index + self.epoch)


class Permutes(Counts):
    """Has its memory in a list, and a ``state_dict`` for it."""

    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(SIZE))

    def __iter__(self) -> Iterator[int]:
        self.order[:] = self.order[3:] + self.order[2::-1]
        return iter(list(self.order))

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order[:] = state["order"]


class CountingStream(IterableDataset[Tensor]):
    """Goes on over epochs, with a ``state_dict``."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(SIZE):
            self.given += 1
            yield row(self.given)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Positioned(IterableDataset[Tensor]):
    """Its ``state_dict`` is its position in the epoch, also when that is over."""

    def __init__(self) -> None:
        self.epoch, self.given, self.is_loaded = 0, 0, False

    def __iter__(self) -> Iterator[Tensor]:
        self.given = self.given if self.is_loaded else 0
        self.is_loaded = False
        while self.given < SIZE:
            self.given += 1
            yield row(self.given)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given, self.is_loaded = state["given"], True


class Stateful(DataLoader[Any]):
    """Goes on from its ``state_dict`` with the next ``iter``, as torchdata's StatefulDataLoader does."""

    def __init__(self, *, sized: bool = True) -> None:
        super().__init__(Rows(), batch_size=2)
        self.sized, self.epoch, self.given, self.is_loaded = sized, 0, 0, False

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError
        return SIZE // 2

    def __iter__(self) -> Any:
        self.epoch, self.given = (self.epoch, self.given) if self.is_loaded else (self.epoch + 1, 0)
        self.is_loaded = False
        return self._batches()

    def _batches(self) -> Iterator[Tensor]:
        while self.given < SIZE // 2:
            self.given += 1
            yield torch.stack([row(self.epoch * self.given), row(self.given)])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.given, self.is_loaded = state["epoch"], state["given"], True


class Batches:
    """Is no dataloader of torch's."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(5):
            yield torch.stack([row(random.randrange(SIZE)), row(0)])


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(SIZE))


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Rows(), batch_size=2, **options)


def shuffled(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return loader(dataset, shuffle=True, **options)


SHARED = torch.Generator()


def shares_a_generator() -> Any:
    SHARED.manual_seed(5)
    return [shuffled(generator=SHARED), shuffled(Rows(size=6), generator=SHARED)]


def drawing_dataset(generator: Any, draw: Callable[[Any], float], **options: Any) -> Any:
    def draws() -> float:
        return draw(generator)

    return shuffled(Rows(draws), **options)


@dataclass(frozen=True)
class Case:
    """A way to load data."""

    make: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    stops: tuple[tuple[int, ...], ...] = ((2,), (3, 8))  # steps at which one run after the other ends
    validation: Callable[[], Any] | None = None


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
    "no loader": Case(lambda: {"a": Batches()}),
}


class Tells(LitModel):
    """Trains on whatever it gets, and notes what it was; draws random numbers where a resume could lose them."""

    def __init__(self) -> None:
        super().__init__(RECIPE)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.trained(batch)

    def trained(self, batch: Any) -> Tensor:
        several = list(batch.values()) if isinstance(batch, dict) else batch if isinstance(batch, list) else [batch]
        found = [one for one in several if one is not None]
        self.losses.append(torch.cat([b.reshape(-1) for b in found]))
        return sum((self.loss([b]) for b in found), torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(batch.clone())

    def on_train_epoch_start(self) -> None:
        torch.rand(3)
        if isinstance(dataset := getattr(self.trainer.train_dataloader, "dataset", None), Told):
            dataset.set_epoch(self.trainer.current_epoch)

    def on_train_batch_end(self, *_: Any) -> None:
        torch.rand(2)
        random.random()
        torch.rand(1, generator=SHARED)


def fit(
    root: Path, case: Case, strategy: Any, *, stop: int | None = None, ckpt_path: Path | None = None, model: Any = Tells,
    callbacks: Any = (),
) -> Any:  # fmt: skip
    """One fit, to the end or to step ``stop``."""
    torch.manual_seed(7)
    random.seed(7)
    module = model()

    def made() -> Any:
        return case.make()

    module.train_dataloader = made
    torch.manual_seed(11)
    validation = None if case.validation is None else case.validation()
    options = {"max_steps": STEPS, "limit_val_batches": 0 if validation is None else 2, **case.options}
    callbacks = [*callbacks, *([] if stop is None else [EndsAt(stop)])]
    trainer = quiet_trainer(**options, strategy=strategy, default_root_dir=root, callbacks=callbacks)
    try:
        trainer.fit(module, val_dataloaders=validation, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    except Ends:
        return None
    return outcome(trainer, module)


def offload(root: Path) -> Any:
    return HeteroOffloadStrategy("host", disk_path=root / "store")


def killed(root: Path, case: Case, stops: tuple[int, ...], *, begin: Path | None = None, **options: Any) -> Outcome:
    """What the last of several runs leaves, each of which goes on where the one before ended."""
    path = begin
    for stop in (*stops, None):
        got = fit(root, case, offload(root), stop=stop, ckpt_path=path, **options)
        path = root / "store"
    assert isinstance(got, Outcome)
    return got


def check(got: Outcome, plain: Outcome) -> None:
    assert 0 < len(got.losses) < len(plain.losses)
    assert_same(got, after(plain, len(got.losses)))


@pytest.mark.parametrize("name", CASES)
def test_it_goes_on_with_the_same_batches(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    plain = fit(tmp_path, case, "auto")
    for number, stops in enumerate(case.stops):
        root = tmp_path / str(number)
        check(killed(root, case, stops), plain)


# ---- what is counted are the iterator's batches --------------------------------------------------------------------------------


class Saves(pl.Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("name", ["persistent", "several", "distributed", "a stream", "workers that draw", "a loader with a state"])
@pytest.mark.parametrize("saved", [2, 8])
def test_a_run_that_began_in_the_middle_of_an_epoch_goes_on(name: str, saved: int, tmp_path: Path) -> None:
    case, checkpoint = CASES[name], tmp_path / "some.ckpt"
    fit(tmp_path, case, "auto", callbacks=[Saves(checkpoint, saved)])
    plain = fit(tmp_path, case, "auto", ckpt_path=checkpoint)
    for number, stops in enumerate([(saved + 1,), (saved + 2, saved + 3)]):
        check(killed(tmp_path / str(number), case, stops, begin=checkpoint), plain)


class Takes(Tells):
    """Takes batches from the iterator by itself."""

    counts = (1,)

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        count = self.counts[self.trainer.global_step % len(self.counts)]
        batches = [batch for batch, _, _ in itertools.islice(dataloader_iter, count)]
        return sum((self.trained(batch) for batch in batches), self.model.head.weight.sum() * 0)


class TakesMore(Takes):
    counts = (2, 1)


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
    for number, stops in enumerate([(2,), (1, 6)]):
        check(killed(tmp_path / str(number), case, stops, model=model), plain)


# ---- what cannot be replayed is said -------------------------------------------------------------------------------------------


def test_batches_that_a_training_step_keeps_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Case(shuffled, {"max_steps": 3}), offload(tmp_path), model=TakesAhead)
    assert "training_step has taken 3 batches of dataloader_iter in 2 calls" in caplog.text


class Shifts(Sampler[int]):
    """Changes a list over epochs, and does not say so."""

    def __init__(self) -> None:
        self.order = list(range(SIZE))

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(list(self.order))


class GoesOn(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(SIZE):
            self.given += 1
            yield row(self.given)


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
