"""The position in the training data: what a commit record says of it, and how a resume restores it.

[Note: Data]
docs/durability.md says how a dataloader without ``state_dict`` is replayed. The global random
generators are set back wherever they chose batches: when the iterator was made, when a sampler drew
its seed, when a short dataloader began again beside a long one. These are the record's *moments*,
at most ``_MOMENTS``. Persistent workers draw a base seed once, when they start, so a record says at
which moment they were started, and at which the epoch began. The count is of batches that the
iterator has given, which Lightning's progress does not say.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import random
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import BatchSampler

from lightning_hetero.errors import ConfigError, DataEndedError
from lightning_hetero.strategies import loader_state
from lightning_hetero.strategies.namespaces import lightning_of
from lightning_hetero.untyped import Loader, Options, Trainer, Value

_MOMENTS = 16
_BEGIN = -1  # the position of a moment before the iterator is made
_MISSING = "the store's record of the training data is not one of this version"


RandomStates = Options  # of torch, Python, and NumPy and the accelerators if they are there


def random_state() -> RandomStates:
    """The states of the global random generators."""
    state: RandomStates = {"torch": torch.get_rng_state(), "python": loader_state.python_state(random)}
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = numpy.random.get_state()
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        own = torch.get_device_module(device)
        state[device.type] = [own.get_rng_state(index) for index in range(torch.accelerator.device_count())]
    return state


def set_random_state(state: RandomStates) -> None:
    """Sets the states that :func:`random_state` returned.

    Raises:
        ConfigError: They do not fit this process.
    """
    try:
        loader_state.set_python_state(random, state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            importlib.import_module("numpy").random.set_state(state["numpy"])
        device = torch.accelerator.current_accelerator(check_available=True)
        for index, own in enumerate([] if device is None else state.get(device.type, ())):
            torch.get_device_module(device).set_rng_state(own, index)
    except (KeyError, ValueError, TypeError, RuntimeError, struct.error) as error:
        raise ConfigError(f"the random numbers of the commit record do not fit this process: {error}.") from error


def begin_apart(rank: int) -> None:
    """Goes on with random numbers of a rank's own, from the state that another rank has as well."""
    seed = (int(torch.randint(2**31, ())) + rank) % 2**32
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def _same(one: RandomStates, other: RandomStates) -> bool:
    """Whether two states of the host's global random generators are equal."""
    if one["python"] != other["python"] or not torch.equal(one["torch"], other["torch"]) or one.keys() != other.keys():
        return False
    if "numpy" not in one:
        return True
    (kind, words, *rest), (other_kind, other_words, *other_rest) = one["numpy"], other["numpy"]
    return bool(kind == other_kind and rest == other_rest and (words == other_words).all())


@dataclass(slots=True)
class _Moment:
    """Random generators before an iterator was made, or before it gave a batch."""

    at: int  # batches given before, or `_BEGIN`
    random: RandomStates
    generators: Options
    drawn_by: set[int]  # the dataloaders that have drawn from them since

    def to_dict(self) -> dict[str, object]:
        return {"at": self.at, "random": self.random, "generators": self.generators, "drawn_by": sorted(self.drawn_by)}


class TrainingData:
    """Follows the iterator of one fit's training data; warns of what cannot be replayed."""

    def __init__(self, trainer: Trainer, warn: Callable[[str], None]) -> None:
        self._trainer, self._warn = trainer, warn
        self._stateful_type = lightning_of(trainer).module("loops.training_epoch_loop")._Stateful
        self._made: list[Loader] = []  # dataloaders whose iterator is made next
        self._started: _Moment | None = None  # persistent workers were started
        self._moments: list[_Moment] = []
        self._loader_state = loader_state.LoaderState(())
        self._memory: Options = {}
        self._generators: Options = {}
        self._loaders: list[Options] = []
        self._samplers_know_epoch = False
        self._drawn = self._calls = 0
        self._is_lost = False
        # Of the latest batch:
        self._latest: _Moment | None = None
        self._after: RandomStates | None = None  # while batches can be replayed from the last moment
        self._states: list[Value] | None = None
        self._iterators: list[int] = []  # ids; references would keep the workers alive
        self._is_settled = False

    # ---- Lightning's hooks -------------------------------------------------------------------

    def loader_made(self, loader: Loader) -> None:
        """A training dataloader was made. The iterator over all of them is made next."""
        self._made.append(loader)
        self._loader_state, self._generators = loader_state.LoaderState(self._made), loader_state.generators(self._made)
        for text in loader_state.early_warnings(self._made):
            self._warn(text)
        self._begin(None)

    def follow(self) -> None:
        """Follows the iterator that Lightning has made, and later ones of the same dataloaders.

        Called after all ``on_train_start`` hooks and after all ``on_train_epoch_start`` hooks.
        """
        fetcher = self._trainer.fit_loop._data_fetcher
        if fetcher is None or isinstance(fetcher._combined_loader, _Followed):
            return
        self._made = []
        self._follow(fetcher)
        self._drawn = fetcher.fetched  # more than were used, if the length is not known

    def _follow(self, fetcher: Loader) -> None:
        followed = fetcher._combined_loader
        if not isinstance(followed, _Followed):
            followed = fetcher._combined_loader = _Followed(followed, self)
        fetcher.iterator = followed
        self._loaders = loader_state.described(followed.loader.flattened)
        self._started = self._moments[0] if any(map(loader_state.has_persistent_workers, followed.loader.flattened)) else None
        self._look(followed.loader)
        self._settle(followed.loader)

    def batch_ended(self) -> None:
        """A training batch has ended."""
        self._calls += 1

    # ---- an iterator -------------------------------------------------------------------------

    def _moment(self, at: int) -> _Moment:
        return _Moment(at, random_state(), loader_state.take_generators(self._generators), set())

    def _begin(self, combined: Loader) -> None:
        """An iterator is made next."""
        self._memory = self._loader_state.take(self._warn)
        self._moments = [self._moment(_BEGIN)]
        if combined is not None:
            self._moments[0].drawn_by = set(range(len(combined.flattened)))
        self._samplers_know_epoch = combined is not None
        self._drawn = self._calls = 0
        self._is_lost = self._is_settled = False
        self._latest = self._after = self._states = None

    def make(self, combined: Loader) -> None:
        """Makes the iterator."""
        self._begin(combined)
        iter(combined)
        self._look(combined)
        self._after = random_state()
        self._settle(combined)

    def draw(self, combined: Loader) -> Value:
        """The iterator's next batch."""
        if self._is_settled or self._is_lost:
            batch = next(combined)
            self._drawn += 1
            return batch
        before = self._moment(self._drawn)
        if self._fetches_ahead:
            self._states = copy.deepcopy(combined._state_dicts())
        last = self._moments[-1] if self._after is not None and _same(before.random, self._after) else None
        batch = next(combined)
        self._after = random_state()
        self._latest = before
        drew = self._look(combined, changed=not _same(before.random, self._after))
        if last is self._moments[-1]:  # a replay from there reaches this batch with the same random state
            last.drawn_by |= drew
        elif drew:
            before.drawn_by = drew
            self._moments.append(before)
        else:
            self._after = None  # later batches cannot be replayed from the last moment
        self._drawn += 1
        self._settle(combined)
        return batch

    def _look(self, combined: Loader, *, changed: bool = False) -> set[int]:
        """Dataloaders that have used the global generators, or begun again, since the last call.

        If the generators have ``changed``, dataloaders without indices may have used them.
        """
        iterators, drew = combined._iterator.iterators, set()
        for number, iterator in enumerate(iterators):
            known = self._iterators[number] if number < len(self._iterators) else None
            begins = id(iterator) != known
            indices = _indices(iterator)
            if indices is not None and not isinstance(indices, _Indices):
                iterator._sampler_iter = indices = _Indices(indices, is_simple=_is_simple(combined.flattened[number]))
                begins = True
            if begins:
                for moment in self._moments[1:]:  # its earlier draws no longer matter
                    moment.drawn_by.discard(number)
            if begins or (changed if indices is None else indices.take_drew()):
                drew.add(number)
        self._iterators = [id(iterator) for iterator in iterators]
        self._moments[1:] = [moment for moment in self._moments[1:] if moment.drawn_by]
        return drew

    @property
    def _fetches_ahead(self) -> bool:
        """Whether Lightning holds batches that no step has used."""
        fetcher = self._trainer.fit_loop._data_fetcher
        return fetcher is not None and (fetcher.length is None or hasattr(fetcher, "_batch"))

    def _settle(self, combined: Loader) -> None:
        """Finds whether no later batch can need a moment, or whether there are too many moments."""
        if len(self._moments) > _MOMENTS:
            self._is_lost = True
            names = [_name(combined.flattened[number]) for number in sorted(self._moments[-1].drawn_by)]
            del self._moments[1:]
            self._warn(
                f"the training data's {' and '.join(names)} choose samples with the global random numbers again and again, which "
                f"cannot be replayed: a resume trains on other samples of the epoch. Give them a generator of their own, or "
                f"state_dict and load_state_dict, or, for a dataset, num_workers=1"
            )
        indices = [_indices(iterator) for iterator in combined._iterator.iterators]
        alone = len(indices) == 1 and isinstance(indices[0], _Indices) and indices[0].is_done
        self._is_settled = alone and not self._fetches_ahead

    # ---- records -----------------------------------------------------------------------------

    def state(self) -> dict[str, object]:
        """The record's entry as a training batch ends."""
        fetcher = self._trainer.fit_loop._data_fetcher
        loop = self._trainer.fit_loop
        held = len(getattr(fetcher, "batches", ()))
        moments = list(self._moments)
        if self._latest is not None and self._fetches_ahead and self._latest.at > moments[-1].at:
            moments.append(self._latest)  # to repeat a batch that Lightning holds
        if hasattr(fetcher, "_batch") and self._calls > 1 and self._drawn % self._calls:
            self._warn(
                f"training_step has taken {self._drawn} batches of dataloader_iter in {self._calls} calls: those that it keeps for "
                f"later are not kept with the steps, and a resume leaves them out"
            )
        return {
            "started": None if self._started is None or self._started is self._moments[0] else self._started.to_dict(),
            "samplers_know_epoch": self._samplers_know_epoch,
            "moments": [moment.to_dict() for moment in moments],
            "memory": self._memory,
            "generators": loader_state.take_generators(self._generators),
            "drawn": self._drawn,
            "calls": self._calls,
            "fetched": fetcher.fetched,
            "held": held,
            "done": fetcher.done,
            "is_lost": self._is_lost,
            "loaders": self._loaders,
            "reloaded": [_epoch(loop._last_train_dl_reload_epoch), _epoch(loop.epoch_loop.val_loop._last_val_dl_reload_epoch)],
        }

    def loader_states(self, states: list[Value]) -> list[Value]:
        """States of dataloaders that offer one, from before the batches that Lightning holds."""
        fetcher = self._trainer.fit_loop._data_fetcher
        return states if self._states is None or not getattr(fetcher, "batches", ()) else self._states

    # ---- resumes -----------------------------------------------------------------------------

    def go_on(self, data: Options, ready: int, most: float) -> None:
        """Restores the position of a record that had ``ready`` batches; the epoch has ``most``."""
        loop = self._trainer.fit_loop
        try:
            # Lightning's loop adds the epoch's ready batches to those that are fetched.
            fetched, held, done = data["fetched"] - ready, data["held"], data["done"]
            reloaded, drawn, now = data["reloaded"], data["drawn"], data["generators"]
            moments = [_Moment(m["at"], m["random"], m["generators"], set(m["drawn_by"])) for m in data["moments"]]
            started = None if data["started"] is None else _Moment(**{**data["started"], "drawn_by": set()})
            drawn = int(min(drawn, most))
            self._memory, self._samplers_know_epoch = data["memory"], data["samplers_know_epoch"]
            self._calls, self._is_lost = data["calls"], data["is_lost"]
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{_MISSING} (it lacks {error}). Go on with the version that wrote it.") from error
        loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch = map(_from_epoch, reloaded)
        fetcher, combined = loop._data_fetcher, loop._combined_loader
        if "loaders" in data and not loop.epoch_loop.batch_progress.is_last_batch:  # absent in old stores
            self._compare(data["loaders"], loader_state.described(combined.flattened))
        self._made = []
        if self._is_lost:
            self._warn(
                "samples of this epoch were chosen with global random numbers that are not kept; training goes on with others"
            )
        batches: list[Value] = []
        if not all(isinstance(loader, self._stateful_type) for loader in combined.flattened):
            batches = self._replay(combined, moments, started, drawn, held)
            loader_state.set_generators(self._generators, now)  # others may have used them too
            fetcher.reset()
            fetcher.fetched, fetcher.done = fetched, done
            if held:
                fetcher.batches = batches[-held:]
            elif batches and hasattr(fetcher, "_batch"):
                fetcher._batch, fetcher._batch_idx, fetcher._dataloader_idx = batches[-1]
        self._moments, self._drawn = moments, drawn
        self._follow(fetcher)
        if started is not None:
            self._started = started

    def _compare(self, kept: list[Options], now: list[Options]) -> None:
        """Warns if an epoch continues with other data."""
        changed = [f"number of dataloaders {len(kept)} -> {len(now)}"] if len(kept) != len(now) else []
        for number, (before, after) in enumerate(zip(kept, now, strict=False)):
            where = f"dataloader {number}: " if len(kept) > 1 else ""
            changed += [f"{where}{key} {before[key]} -> {after[key]}" for key in after if before.get(key) != after[key]]
        if changed:
            self._warn(
                f"the training data has changed in the middle of an epoch (in the store -> now): {'; '.join(changed)}. As many "
                f"batches as had been used are left out, so samples of this epoch may be seen twice or never; the next epoch is "
                f"whole. To finish the epoch as it began, resume with the data of the store"
            )

    def _replay(self, combined: Loader, moments: list[_Moment], started: _Moment | None, drawn: int, held: int) -> list[Value]:
        shut_down = lightning_of(self._trainer).module("utilities.combined_loader")._shutdown_workers_and_reset_iterator
        made = combined._iterator.iterators
        stateful = {n: made[n] for n, loader in enumerate(combined.flattened) if isinstance(loader, self._stateful_type)}
        if stateful and held:
            raise ConfigError(
                "some training dataloaders have state_dict and others have not, and their length is not known: they cannot be "
                "brought to where they were. Give all of them state_dict and load_state_dict, or none."
            )
        for number, loader in enumerate(combined.flattened):
            if number not in stateful:
                shut_down(loader)
        if started is not None:
            self._set(started)
            _iterate(combined, stateful)
        self._loader_state.set(self._memory)
        try:
            batches = self._draw_again(combined, stateful, moments, drawn, held)
        except DataEndedError as error:
            if error.batches or not self._loader_state.forget():
                raise
            self._warn(
                "what samplers or datasets return as state_dict before an epoch begins stands for the end of the one before: the "
                "epoch is replayed from the state with which they were made"
            )
            batches = self._draw_again(combined, stateful, moments, drawn, held)
        for number, iterator in stateful.items():
            combined._iterator.iterators[number] = iterator
        combined._iterator.iterables = combined.flattened
        return batches

    def _draw_again(
        self, combined: Loader, stateful: dict[int, Value], moments: list[_Moment], drawn: int, held: int
    ) -> list[Value]:
        """Makes the iterator, draws the batches that it had given, and returns the last ones."""
        if self._samplers_know_epoch:
            set_sampler_epoch(self._trainer)
            self._loader_state.set_attributes(self._memory)
        self._set(moments[0])
        _iterate(combined, stateful)
        if not self._samplers_know_epoch:
            set_sampler_epoch(self._trainer)
        at = {moment.at: moment for moment in moments[1:]}
        batches: list[Value] = []
        for number in range(drawn):
            if number in at:
                self._set(at[number])
            try:
                batches = [*batches[-held:], next(combined)] if held else [next(combined)]
            except StopIteration:
                raise DataEndedError(
                    f"the dataloader ends after {number} batches; {drawn} had been used when the last step was committed. Resume "
                    f"with the data that training began with.",
                    number,
                ) from None
        return batches

    def _set(self, moment: _Moment) -> None:
        loader_state.set_generators(self._generators, moment.generators)
        set_random_state(moment.random)


def set_sampler_epoch(trainer: Trainer) -> None:
    """Tells samplers the epoch before an iterator may read ahead, earlier than Lightning does."""
    loop = trainer.fit_loop
    set_epoch = lightning_of(trainer).module("loops.fit_loop")._set_sampler_epoch
    for loader in loop._combined_loader.flattened:
        set_epoch(loader, loop.epoch_progress.current.processed)


def validation_state(trainer: Trainer) -> dict[str, object] | None:
    """The record's entry of validation's dataloaders; ``None`` before the first validation."""
    loader = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    if loader is None:
        return None
    started = [loader_state.has_persistent_workers(one) and one._iterator is not None for one in loader.flattened]
    return {"generators": loader_state.take_generators(loader_state.generators(loader.flattened)), "started": started}


def restore_validation(trainer: Trainer, state: Options) -> None:
    """Restores validation's dataloaders to the result of :func:`validation_state`.

    Persistent workers start now: the next validation must draw no base seed for them.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    if loop._combined_loader is None:
        trainer.validating = True
        loop.setup_data()
        trainer.training = True
    loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
    for loader, started in zip(loaders, state["started"], strict=False):
        if started and loader_state.has_persistent_workers(loader) and loader._iterator is None:
            iter(loader)
    loader_state.set_generators(loader_state.generators(loaders), state["generators"])


class _Followed:
    """Replaces Lightning's combined loader, and counts the batches that it gives."""

    def __init__(self, loader: Loader, data: TrainingData) -> None:
        self.loader, self._data = loader, data

    def __iter__(self) -> _Followed:
        self._data.make(self.loader)
        return self

    def __next__(self) -> Value:
        return self._data.draw(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Value:
        return getattr(self.loader, name)


class _Indices:
    """A sampler's iterator, which notices when the sampler uses the global random generators.

    A simple sampler uses them with its first sample, or never.
    """

    def __init__(self, indices: Iterator[object], *, is_simple: bool) -> None:
        self._indices, self._is_simple = indices, is_simple
        self._drew = self.is_done = False

    def __iter__(self) -> _Indices:
        return self

    def __next__(self) -> Value:
        if self.is_done:
            return next(self._indices)
        before = random_state()
        try:
            return next(self._indices)
        finally:
            self._drew |= not _same(before, random_state())
            self.is_done = self._is_simple

    def take_drew(self) -> bool:
        """Whether it has used them since the last call."""
        drew, self._drew = self._drew, False
        return drew


class _Given:
    """Replaces a dataloader that its own state has restored, while others are replayed."""

    def __init__(self, iterator: Iterator[object]) -> None:
        self.iterator = iterator

    def __iter__(self) -> Iterator[object]:
        return itertools.repeat(None)


def _iterate(combined: Loader, stateful: dict[int, Value]) -> None:
    """Makes the iterators of all dataloaders except the stateful ones."""
    loaders = combined._flattened
    combined._flattened = [_Given(stateful[n]) if n in stateful else loader for n, loader in enumerate(loaders)]
    try:
        iter(combined)
    finally:
        combined._flattened = loaders


def _indices(iterator: object) -> Value:
    """The indices that choose the samples of a torch dataloader's iterator, if any do."""
    from torch.utils.data import _DatasetKind

    if getattr(iterator, "_dataset_kind", None) != _DatasetKind.Map:
        return None
    return getattr(iterator, "_sampler_iter", None)


def _is_simple(loader: Loader) -> bool:
    """Whether its samplers are torch's own, which draw only with the first sample."""
    samplers = [loader.sampler, loader.batch_sampler]
    if isinstance(loader.batch_sampler, BatchSampler):
        samplers.append(loader.batch_sampler.sampler)
    own = ("torch.utils.data.sampler", "torch.utils.data.distributed")
    return all(sampler is None or type(sampler).__module__ in own for sampler in samplers)


def _name(loader: Loader) -> str:
    for part in ("batch_sampler", "sampler", "dataset"):
        value = getattr(loader, part, None)
        if value is not None and not type(value).__module__.startswith("torch."):
            return f"{part} {type(value).__name__}"
    return type(loader).__name__


def _epoch(value: float) -> int | None:
    return None if value == float("-inf") else int(value)


def _from_epoch(value: int | None) -> float:
    return float("-inf") if value is None else value
