"""Ways to load data that a resume could get wrong, and a model that notes what it was trained
on.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_hetero.strategies import HeteroOffloadStrategy
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, outcome, quiet_trainer
from support.resuming import Ends, EndsAt, after

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

    def __init__(self, generator: Any, draw: Callable[[Any], int], size: int = SIZE) -> None:
        self.rng, self.draw, self.size = generator, draw, size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield self.draw(self.rng)


class Counts(Sampler[int]):
    """Counts epochs by itself."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.epoch = size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter([(i * self.epoch + self.epoch) % self.size for i in range(self.size)])


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

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.order = list(range(size))

    def __iter__(self) -> Iterator[int]:
        self.order[:] = self.order[3:] + self.order[2::-1]
        return iter(list(self.order))

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order[:] = state["order"]


class GoesOn(IterableDataset[Tensor]):
    """Goes on over epochs, without a ``state_dict``."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(SIZE):
            self.given += 1
            yield row(self.given)


class CountingStream(GoesOn):
    """Goes on over epochs, with a ``state_dict``."""

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
    """Goes on from its ``state_dict`` with the next ``iter``, as torchdata's StatefulDataLoader
    does.
    """

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
    stops: tuple[tuple[int, ...], ...] = ((3, 8),)  # steps at which one run after the other ends; chains of runs
    validation: Callable[[], Any] | None = None


class Tells(LitModel):
    """Trains on whatever it gets, and notes what it was; draws random numbers where a resume could
    lose them.
    """

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


class Takes(Tells):
    """Takes batches from the iterator by itself."""

    counts = (1,)

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        count = self.counts[self.trainer.global_step % len(self.counts)]
        batches = [batch for batch, _, _ in itertools.islice(dataloader_iter, count)]
        return sum((self.trained(batch) for batch in batches), self.model.head.weight.sum() * 0)


class TakesMore(Takes):
    counts = (2, 1)


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
