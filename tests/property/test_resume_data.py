"""A resume trains on the batches that the run would have had: random dataloaders, options of the
Trainer, and ends of processes.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.loading import (
    SIZE,
    STEPS,
    Case,
    Counts,
    Own,
    Permutes,
    Rows,
    Stream,
    Takes,
    Tells,
    check,
    fit,
    killed,
    loader,
    torch_draw,
)
from support.properties import examples
from torch.utils.data import RandomSampler, SubsetRandomSampler


def drawn(generator: Any) -> int:
    return int(torch.randint(SIZE, (), generator=generator))


SAMPLERS = {
    "order": lambda size: None,
    "shuffled": lambda size: RandomSampler(range(size)),
    "of a seed": lambda size: RandomSampler(range(size), generator=torch.Generator().manual_seed(size)),
    "replacement": lambda size: RandomSampler(range(size), replacement=True),
    "subset": lambda size: SubsetRandomSampler(range(size)),
    "counts": lambda size: Counts(size),
    "permutes": lambda size: Permutes(size),
    "own": lambda size: Own(random.Random(size), lambda r: r.randrange(size), size),
    "torch's": lambda size: Own(torch.Generator().manual_seed(size), lambda g: drawn(g) % size, size),
}


@dataclass(frozen=True)
class One:
    """One dataloader."""

    size: int
    sampler: str
    draws: bool  # the dataset draws random numbers for each sample
    workers: int
    persistent: bool

    def make(self) -> Any:
        # What is drawn in workers that live on is not carried after their first epoch.
        draws = self.draws and not (self.workers and self.persistent)
        options = {"num_workers": self.workers, "persistent_workers": bool(self.workers) and self.persistent}
        return loader(Rows(torch_draw if draws else lambda: 0.0, self.size), sampler=SAMPLERS[self.sampler](self.size), **options)


@dataclass(frozen=True)
class Flow:
    """A stream of unknown length."""

    size: int
    workers: int

    def make(self) -> Any:
        return loader(Stream(random.randrange if self.workers else lambda n: 3, self.size), num_workers=self.workers)


ONES = st.builds(
    One,
    size=st.sampled_from([4, 6, 7, 10]),
    sampler=st.sampled_from(sorted(SAMPLERS)),
    draws=st.booleans(),
    workers=st.sampled_from([0, 0, 0, 1, 2]),
    persistent=st.booleans(),
)
FLOWS = st.builds(Flow, size=st.sampled_from([5, 10]), workers=st.sampled_from([0, 1]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    flows = draw(st.integers(0, 5)) == 0
    loaders = draw(st.lists(FLOWS if flows else ONES, min_size=1, max_size=3))
    mode = draw(st.sampled_from(["max_size_cycle", "max_size_cycle", "min_size", "max_size"]))
    options: dict[str, Any] = {
        "accumulate_grad_batches": draw(st.sampled_from([1, 1, 2])),
        "reload_dataloaders_every_n_epochs": draw(st.sampled_from([0, 0, 1, 2])),
        "max_steps": STEPS // 2,
    }
    if draw(st.booleans()):
        options["limit_train_batches"] = draw(st.sampled_from([1, 2, 3]))
    stops = tuple(sorted(draw(st.sets(st.integers(1, STEPS // 2 - 1), min_size=1, max_size=3))))

    def make() -> Any:
        made = [one.make() for one in loaders]
        return made[0] if len(made) == 1 and mode == "min_size" else CombinedLoader(made, mode)

    return Case(make, options, (stops,))


@examples(4)
@given(cases(), st.booleans())
def test_a_resume_has_the_same_batches(case: Case, takes: bool) -> None:
    model = Takes if takes and case.options["accumulate_grad_batches"] == 1 else Tells
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        plain = fit(root, case, "auto", model=model)
        check(killed(root, case, *case.stops, model=model), plain)
