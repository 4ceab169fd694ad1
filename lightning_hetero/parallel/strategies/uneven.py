"""Batches that are cut by the speed of the ranks, for any of Lightning's strategies that trains replicas in parallel."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.parallel.elastic import Elastic, elastic_from, node_name
from lightning_hetero.parallel.shares import SharedBatches, Taken, cut
from lightning_hetero.parallel.stopwatch import Stopwatch
from lightning_hetero.parallel.strategies import elastic_callback
from lightning_hetero.strategies.console import speak
from lightning_hetero.strategies.data import set_sampler_epoch
from lightning_hetero.strategies.namespaces import callbacks_of, lightning_of
from lightning_hetero.strategies.patches import Patches
from lightning_hetero.strategies.precision import around
from lightning_hetero.strategies.resume import end_batch

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ParallelStrategy

log = logging.getLogger(__name__)

Speeds = Sequence[float] | Mapping[str, float]


class UnevenBatches:
    """How a strategy cuts batches by speed and weighs gradients by samples; the strategy's methods call those of this object.

    Args:
        strategy: The strategy.
        name: Its name.
        speeds: Relative speed of each part, or of each node by its name.
        rebalance_every: Training batches between two looks at the speeds; 0: ``speeds`` stay.
        rebalance_drift: By how much, relatively, other shares must shorten a step before they come into force.
        global_batch_size: Samples of a step, of all ranks.
        elastic: Where steps are committed.

    Attributes:
        speeds: As given, or as a plan says.
        global_batch: Samples of a step, if they were given.
        names: Of the ranks' nodes, once the ranks have met.
        batches: The training data's, once there are some.
        stopwatch: Times training batches, where speeds are measured.
        step_batches: Batches of the loader's size that make one step, if a plan says so.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        name: str,
        *,
        speeds: Speeds | None,
        rebalance_every: int,
        rebalance_drift: float,
        global_batch_size: int | None,
        elastic: str | os.PathLike[str] | Elastic | None,
    ) -> None:
        numbers = speeds.values() if isinstance(speeds, Mapping) else speeds or ()
        if not all(isinstance(s, int | float) and 0 < s < float("inf") for s in numbers):
            raise ConfigError(f"speeds={speeds!r}; allowed: a positive number for each rank, or for each node by its name.")
        whole = isinstance(global_batch_size, int) and not isinstance(global_batch_size, bool) and global_batch_size > 0
        if global_batch_size is not None and not whole:
            raise ConfigError(
                f"global_batch_size={global_batch_size!r}; allowed: a whole number of samples, at least one for each rank."
            )
        if isinstance(rebalance_every, bool) or not isinstance(rebalance_every, int) or rebalance_every < 0:
            raise ConfigError(f"rebalance_every={rebalance_every!r}; allowed: a whole number of batches, 0 for never.")
        if not isinstance(rebalance_drift, int | float) or not 0 <= rebalance_drift < float("inf"):
            raise ConfigError(f"rebalance_drift={rebalance_drift!r}; allowed: a number of at least 0.")
        self._strategy, self._name = strategy, name
        self.speeds, self.global_batch = speeds, global_batch_size
        self.elastic = elastic_from(elastic)
        self._callback: elastic_callback.ElasticCallback | None = None
        self.names: tuple[str, ...] = ()
        self._known: dict[str, float] = {}  # seconds of one sample by node, as measured before a restart
        self._every, self._drift = rebalance_every, float(rebalance_drift)
        self.batches: SharedBatches | None = None
        self._taken = Taken(1, 1.0)
        self._since = 0  # training batches since the last look
        self.stopwatch: Stopwatch | None = None
        self.step_batches: int | None = None
        self._patches = Patches()

    # ---- what a strategy may have otherwise -------------------------------------------------------------------------------

    def parts(self) -> tuple[int, int]:
        """Into how many parts a batch is cut, and which one is this rank's."""
        return int(self._strategy.world_size), int(self._strategy.global_rank)

    def part_names(self) -> tuple[str, ...]:
        """The node of each part of a batch."""
        return self.names

    def micro_batches(self) -> int:
        """Batches of the loader's size that make one step."""
        return self.step_batches or self.parts()[0]

    def watch(self, stopwatch: Stopwatch) -> None:
        """Has the stopwatch end a batch with the last gradient: what reduces gradients comes behind it."""
        stopwatch.watch_gradients(self.module.parameters())

    # ---- setup and teardown -----------------------------------------------------------------------------------------------

    @property
    def module(self) -> pl.LightningModule:
        """The LightningModule, once the Trainer has connected it."""
        module = self._strategy.lightning_module
        assert module is not None, "the Trainer connects it before anything else"
        return module

    def num_ranks(self, expected: int) -> int:
        """Ranks that there will be: as many as torchrun starts, else as many as are expected."""
        environment = self._strategy.cluster_environment
        torchrun = lightning_of(self._strategy).module("plugins.environments").TorchElasticEnvironment
        return environment.world_size() if environment is not None and isinstance(environment, torchrun) else expected

    def ranks_met(self) -> None:
        """The ranks know each other: they say on which node they are; a fit that is elastic gets its callback."""
        speak(lightning_of(self._strategy))
        names: list[str] = [""] * int(self._strategy.world_size)
        torch.distributed.all_gather_object(names, node_name())
        self.names = tuple(names)
        if self.elastic is not None and self.is_fit():
            trainer = self.module.trainer
            self._callback = elastic_callback.make(lightning_of(trainer), self, self.elastic)
            callbacks_of(trainer).append(self._callback)

    def fit_set_up(self) -> None:
        """The strategy has set up the model of a fit: backward is weighted, and timed where speeds are measured."""
        plugin = self._strategy.precision_plugin
        self._patches.replace(plugin, "backward", around(plugin, "backward", self._backward))
        if self._every:
            self.stopwatch = Stopwatch(self._strategy.root_device, window=max(self._every // 2, 1))
            self.watch(self.stopwatch)

    def end(self) -> None:
        """Gives back hooks, the signal, and what stood replaced."""
        if self.stopwatch is not None:
            self.stopwatch.stop_watching()
        self._patches.restore()
        self.end_elastic()

    def end_elastic(self) -> None:
        """A fit is over, or has failed: Lightning calls no other hook then."""
        callback, self._callback = self._callback, None
        if callback is None:
            return
        callback.end()
        trainer = self.module._trainer
        if trainer is not None and callback in callbacks_of(trainer):
            callbacks_of(trainer).remove(callback)

    # ---- data -------------------------------------------------------------------------------------------------------------

    def sampler_options(self) -> dict[str, int]:
        """For training one sampler over everything, the same on all ranks; else one for each part."""
        parts, part = self.parts()
        return {"num_replicas": 1, "rank": 0} if self.is_training() else {"num_replicas": parts, "rank": part}

    def cut(self, dataloader: Any) -> Any:
        """Cuts the batches of the training data by the shares; other data stays.

        Raises:
            UnsupportedError: Their samples cannot be cut: an iterable dataset, batches of the user's own, several loaders.
            ConfigError: ``speeds`` are not one for each rank.
        """
        if not self.is_training():
            return dataloader
        self.check(dataloader)
        self.batches = SharedBatches(
            dataloader.sampler,
            batch=self.global_batch or dataloader.batch_size * self.micro_batches(),
            seconds=self.seconds(),
            rank=self.parts()[1],
            drop_last=dataloader.drop_last,
        )
        return with_batches(dataloader, self.batches)

    def seconds(self) -> tuple[float, ...]:
        """Of one sample on each part: as measured before, as given, or equal."""
        parts, _ = self.parts()
        if self.batches is not None and len(self.batches.seconds) == parts:
            return self.batches.seconds
        nodes = self.part_names()
        if self._known:
            new = sum(self._known.values()) / len(self._known)
            return tuple(self._known.get(name, new) for name in nodes)
        speeds = self.speeds or (1.0,) * parts
        if isinstance(speeds, Mapping):
            if strangers := sorted(set(nodes) - set(speeds)):
                raise ConfigError(f"speeds={dict(speeds)!r} lacks nodes {strangers}; give one for each node that may come.")
            speeds = [speeds[name] for name in nodes]
        if len(speeds) != parts:
            by_name = " Where ranks come and go, give them by the name of the node." if self.elastic is not None else ""
            raise ConfigError(f"speeds has {len(speeds)} numbers for {parts} ranks; give one for each.{by_name}")
        return tuple(1 / s for s in speeds)

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise UnsupportedError(f"strategy {self._name!r} got {what}; its batches cannot be cut by speed. {remedy}")

    def check(self, dataloader: object) -> None:
        """Refuses training data whose batches cannot be cut."""
        if not isinstance(dataloader, DataLoader):
            self._refuse(f"{type(dataloader).__name__} as training data", "Pass one torch DataLoader.")
        if isinstance(dataloader.dataset, IterableDataset):
            self._refuse("an IterableDataset", "Use a dataset with __getitem__ and __len__.")
        if type(dataloader.batch_sampler) is not BatchSampler:
            self._refuse(f"batch_sampler={type(dataloader.batch_sampler).__name__}", "Pass batch_size and, if need be, a sampler.")
        sampler = dataloader.sampler
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas != 1:
            self._refuse("a sampler for one of several ranks", "Pass one over all samples, or none.")

    # ---- training ---------------------------------------------------------------------------------------------------------

    def train_starts(self) -> None:
        """Begins with the first batch that the checkpoint has not seen, if there is one: Lightning would begin the epoch anew.

        Raises:
            UnsupportedError: There are several loaders at once: each would have its own shares.
        """
        trainer: Any = self.module.trainer
        loader: Any = trainer.train_dataloader
        if not isinstance(loader, DataLoader):
            self._refuse(f"{type(loader).__name__} of loaders as training data", "Pass one torch DataLoader.")
        batches: Any = loader.batch_sampler
        loop = trainer.fit_loop
        done = loop.epoch_loop.batch_progress.current.processed
        if loop.restarting and 0 < done < trainer.num_training_batches:
            set_sampler_epoch(trainer)
            batches.begin_at(done)
            iter(loop._data_fetcher)
            # Lightning warns that data begins anew; it does not.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
        if self._callback is not None and self._callback.resumed is not None:
            end_batch(trainer)

    def batch_begins(self) -> None:
        """Looks up what this rank has of the batch; every so often, looks at the speeds."""
        assert self.batches is not None, "the training data has been cut"
        self.check_order(self.batches)
        self._taken = self.batches.next_taken()
        self._since += 1
        if self._every and self._since > self._every:
            self._since = 0
            self._rebalance(self.batches)

    def check_order(self, batches: SharedBatches) -> None:
        """With the first batch of an epoch: a sampler of the user's own may draw other random numbers on each rank."""
        order, ranks = batches.take_order(), int(self._strategy.world_size)
        if order is None or ranks == 1:
            return
        orders: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(orders, order)
        if len(set(orders)) > 1:
            raise UnsupportedError(
                "ranks have the samples of an epoch in different orders: their samplers do not agree, so some samples would be "
                "trained on twice and others never. Leave use_distributed_sampler on, or seed the sampler alike on all ranks."
            )

    def step_begins(self) -> None:
        """A training batch is timed from here on."""
        if self.stopwatch is not None:
            self.stopwatch.start()

    def _backward(self, plain: Callable[..., object], loss: Tensor, *args: object, **kwargs: object) -> None:
        """The loss is weighted by this rank's part of the samples ([Note: Weights] in parallel/shares.py)."""
        weight = self._taken.weight
        plain(loss if weight == 1 else loss * weight, *args, **kwargs)
        if self.stopwatch is not None:
            self.stopwatch.stop(self._taken.samples)

    def _rebalance(self, batches: SharedBatches) -> None:
        """Asks all ranks for their speed, and cuts batches anew where that makes a step faster; all come here at the same batch."""
        assert self.stopwatch is not None, "speeds are measured"
        own = self.stopwatch.seconds_per_sample()
        parts, part = self.parts()
        report = torch.tensor([own or 0.0, batches.given, part], dtype=torch.float64, device=self._strategy.root_device)
        reports = [torch.empty_like(report) for _ in range(int(self._strategy.world_size))]
        torch.distributed.all_gather(reports, report)
        if not all(float(r[0]) for r in reports):  # somebody has not measured enough yet
            return
        seconds = [max(float(r[0]) for r in reports if int(r[2]) == p) for p in range(parts)]
        before, batch = batches.shares, batches.batch
        after = cut(batch, seconds, least=1)
        slowest_before = max(n * s for n, s in zip(before, seconds, strict=True))
        slowest_after = max(n * s for n, s in zip(after, seconds, strict=True))
        if after == before or slowest_after > (1 - self._drift) * slowest_before:
            return
        # Loaders read ahead: the first batch that no rank has begun to load.
        batches.change(seconds, start=max(int(r[1]) for r in reports))
        self.stopwatch.reset()
        if self._strategy.is_global_zero:
            log.info("Batches of %d samples are shared out anew: %s instead of %s.", batch, after, before)

    # ---- states -----------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a restart wants to know: the samples of a step, and how fast the nodes are."""
        if self.batches is None:
            return {"global_batch_size": self.global_batch, "seconds": self._known}
        measured = dict(zip(self.part_names(), self.batches.seconds, strict=True)) if self._every else {}
        return {"global_batch_size": self.batches.batch, "seconds": self._known | measured}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with what another incarnation knew."""
        if self.global_batch is None:
            self.global_batch = state["global_batch_size"]
        self._known = dict(state["seconds"])

    def is_fit(self) -> bool:
        """Whether there is a Trainer, and it fits."""
        module = self._strategy.lightning_module
        trainer = None if module is None else module._trainer
        return trainer is not None and lightning_of(trainer).is_fit(trainer)

    def is_training(self) -> bool:
        """Whether dataloaders that are made now are those of training."""
        return self.is_fit() and bool(self.module.trainer.training)


def whole_numbers_as_reals(tensor: Any, reduce_op: object) -> Any:
    """What to reduce: means of whole numbers are not rounded, since with uneven batches they need not divide evenly."""
    if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
        return tensor.double()
    return tensor


def with_batches(dataloader: Any, batches: SharedBatches) -> Any:
    """The same loader with other batches."""
    copied = copy.copy(dataloader)
    # DataLoader forbids to assign it, since workers may run; those of a copy do not.
    vars(copied)["batch_sampler"] = batches
    return copied
