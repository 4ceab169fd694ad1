"""Batches cut by the speed of the ranks, for any of Lightning's strategies that trains replicas."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.parallel.elastic import Elastic, elastic_from, node_name
from lightning_hetero.parallel.shares import SharedBatches, Taken, cut
from lightning_hetero.parallel.stopwatch import Stopwatch
from lightning_hetero.parallel.strategies import elastic_callback
from lightning_hetero.runtime.method_patches import Patches
from lightning_hetero.strategies.console import speak
from lightning_hetero.strategies.data import set_sampler_epoch
from lightning_hetero.strategies.namespaces import callbacks_of, lightning_of, module_of
from lightning_hetero.strategies.precision import around
from lightning_hetero.strategies.resume import end_batch

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ParallelStrategy

log = logging.getLogger(__name__)

Speeds = Sequence[float] | Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenOptions:
    """The options that strategies with uneven batches have in common.

    Attributes:
        speeds: Relative speed of each part, or of each node by its name; ``None``: equal.
        rebalance_every: Training batches between two comparisons of speeds; 0: ``speeds`` stay.
        rebalance_drift: New shares come into force if they shorten a step by more than this ratio.
        global_batch_size: Samples of a step, of all ranks; ``None``: by the loader's batch size.
        elastic: Where steps are committed.

    Raises:
        ConfigError: A value is out of range.
    """

    speeds: Speeds | None
    rebalance_every: int
    rebalance_drift: float
    global_batch_size: int | None
    elastic: str | os.PathLike[str] | Elastic | None

    def __post_init__(self) -> None:
        speeds, batch, every, drift = self.speeds, self.global_batch_size, self.rebalance_every, self.rebalance_drift
        numbers = speeds.values() if isinstance(speeds, Mapping) else speeds or ()
        if not all(isinstance(s, int | float) and 0 < s < float("inf") for s in numbers):
            raise ConfigError(f"speeds={speeds!r}; allowed: a positive number for each rank, or for each node by its name.")
        if batch is not None and not (_is_whole(batch) and batch > 0):
            raise ConfigError(f"global_batch_size={batch!r}; allowed: a whole number of samples, at least one for each rank.")
        if not _is_whole(every) or every < 0:
            raise ConfigError(f"rebalance_every={every!r}; allowed: a whole number of batches, 0 for never.")
        if not isinstance(drift, int | float) or not 0 <= drift < float("inf"):
            raise ConfigError(f"rebalance_drift={drift!r}; allowed: a number of at least 0.")


class UnevenBatches:
    """Cuts a strategy's batches by speed and weighs gradients by samples; the strategy calls it.

    Attributes:
        speeds: The option, or those of a plan.
        global_batch: Samples of a step, if they were given or saved with a step.
        elastic: Where steps are committed, if the run is elastic.
        names: The nodes of the ranks, once the ranks have met.
        batches: The batches of the training data, once there is some.
        stopwatch: Times training batches, if speeds are measured.
        step_batches: Batches of the loader's size that make one step, if a plan says so.
    """

    def __init__(self, strategy: ParallelStrategy, name: str, options: UnevenOptions) -> None:
        self._strategy, self._name = strategy, name
        self.speeds, self.global_batch = options.speeds, options.global_batch_size
        self.elastic = elastic_from(options.elastic)
        self._callback: elastic_callback.ElasticCallback | None = None
        self.names: tuple[str, ...] = ()
        self._known: dict[str, float] = {}  # seconds of one sample by node, measured before a restart
        self._every, self._drift = options.rebalance_every, float(options.rebalance_drift)
        self.batches: SharedBatches | None = None
        self._taken = Taken(1, 1.0)
        self._since = 0  # training batches since the last comparison
        self.stopwatch: Stopwatch | None = None
        self.step_batches: int | None = None
        self._patches = Patches()

    @property
    def shares(self) -> tuple[int, ...] | None:
        """Samples of each part in a full batch; ``None`` before training has begun."""
        return None if self.batches is None else self.batches.shares

    # ---- what subclasses may change --------------------------------------------------------------

    def parts(self) -> tuple[int, int]:
        """The number of parts of a batch, and this rank's."""
        return self._strategy.world_size, self._strategy.global_rank

    def part_names(self) -> tuple[str, ...]:
        """The node of each part of a batch."""
        return self.names

    def watch(self, stopwatch: Stopwatch) -> None:
        """Lets a batch end with its last gradient: gradients are reduced after that."""
        stopwatch.watch_gradients(self.module.parameters())

    # ---- setup and teardown ----------------------------------------------------------------------

    @property
    def module(self) -> pl.LightningModule:
        """The LightningModule, once the Trainer has connected it."""
        return module_of(self._strategy)

    def ranks_met(self) -> None:
        """The ranks are connected and exchange node names. An elastic fit gets its callback."""
        speak(lightning_of(self._strategy))
        names = [""] * self._strategy.world_size
        torch.distributed.all_gather_object(names, node_name())
        self.names = tuple(names)
        if self.elastic is not None and self.is_fit():
            trainer = self.module.trainer
            self._callback = elastic_callback.class_for(lightning_of(trainer))(self, self.elastic)
            callbacks_of(trainer).append(self._callback)

    def fit_set_up(self) -> None:
        """Weighs backward, and times it if speeds are measured, from the setup of a fit on."""
        plugin = self._strategy.precision_plugin
        self._patches.replace(plugin, "backward", around(plugin, "backward", self._backward))
        if self._every:
            self.stopwatch = Stopwatch(self._strategy.root_device, window=max(self._every // 2, 1))
            self.watch(self.stopwatch)

    def end(self) -> None:
        """Takes all hooks off, and handles the signal no longer."""
        if self.stopwatch is not None:
            self.stopwatch.stop_watching()
        self._patches.restore()
        self.end_elastic()

    def end_elastic(self) -> None:
        """Ends an elastic fit, also after an exception."""
        callback, self._callback = self._callback, None
        if callback is None:
            return
        callback.end()
        trainer = self.module._trainer
        if trainer is not None and callback in callbacks_of(trainer):
            callbacks_of(trainer).remove(callback)

    # ---- data ------------------------------------------------------------------------------------

    def sampler_options(self) -> dict[str, int]:
        """In training one sampler over all samples, equal on all ranks; else one for each part."""
        parts, part = self.parts()
        return {"num_replicas": 1, "rank": 0} if self.is_training() else {"num_replicas": parts, "rank": part}

    def cut(self, dataloader: Any) -> Any:
        """Cuts the batches of the training data by the shares. Other data stays as it is.

        Raises:
            UnsupportedError: The data is an iterable dataset, or its batches are made by the user.
            ConfigError: ``speeds`` has not one number for each rank.
        """
        if not self.is_training():
            return dataloader
        self.check(dataloader)
        parts, part = self.parts()
        self.batches = SharedBatches(
            dataloader.sampler,
            batch=self.global_batch or dataloader.batch_size * (self.step_batches or parts),
            seconds=self.seconds(),
            rank=part,
            drop_last=dataloader.drop_last,
        )
        return with_batches(dataloader, self.batches)

    def seconds(self) -> tuple[float, ...]:
        """Seconds of one sample on each part, or proportional values: measured, given, or equal."""
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

    # ---- training --------------------------------------------------------------------------------

    def train_starts(self) -> None:
        """Continues an epoch after the checkpoint's batches; Lightning would begin it anew.

        Raises:
            UnsupportedError: There are several loaders at once: each would have its own shares.
        """
        trainer: Any = self.module.trainer
        loader: Any = trainer.train_dataloader
        if not isinstance(loader, DataLoader):
            self._refuse(f"{type(loader).__name__} of loaders as training data", "Pass one torch DataLoader.")
        batches = train_batches(trainer)
        loop = trainer.fit_loop
        done = loop.epoch_loop.batch_progress.current.processed
        if loop.restarting and 0 < done < trainer.num_training_batches:
            set_sampler_epoch(trainer)
            batches.begin_at(done)
            iter(loop._data_fetcher)
            # Lightning warns that the data begins anew. It does not.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
        if self._callback is not None and self._callback.resumed is not None:
            end_batch(trainer)

    def batch_begins(self) -> None:
        """Takes this rank's share of the batch, and compares speeds from time to time."""
        batches = train_batches(self.module.trainer)
        self.check_order(batches)
        self._taken = batches.next_taken()
        self._since += 1
        if self.stopwatch is not None and self._since > self._every:
            self._since = 0
            self._rebalance(batches, self.stopwatch)

    def check_order(self, batches: SharedBatches) -> None:
        """Compares the ranks' first batches of an epoch: samplers may draw other random numbers.

        Raises:
            UnsupportedError: The ranks have other samples.
        """
        order, ranks = batches.take_order(), self._strategy.world_size
        if order is None or ranks == 1:
            return
        orders = [0] * ranks
        torch.distributed.all_gather_object(orders, order)
        if len(set(orders)) > 1:
            raise UnsupportedError(
                "ranks have the samples of an epoch in different orders: their samplers do not agree, so some samples would be "
                "trained on twice and others never. Leave use_distributed_sampler on, or seed the sampler alike on all ranks."
            )

    def step_begins(self) -> None:
        """The time of a training batch begins."""
        if self.stopwatch is not None:
            self.stopwatch.start()

    def _backward(self, plain: Callable[..., object], loss: Tensor, *args: object, **kwargs: object) -> None:
        """Weighs the loss by this rank's share of the samples ([Note: Weights] in shares.py)."""
        weight = self._taken.weight
        plain(loss if weight == 1 else loss * weight, *args, **kwargs)
        if self.stopwatch is not None:
            self.stopwatch.stop(self._taken.samples)

    def _rebalance(self, batches: SharedBatches, stopwatch: Stopwatch) -> None:
        """Exchanges speeds, and changes the shares if that makes a step faster.

        All ranks call it at the same batch.
        """
        own = stopwatch.seconds_per_sample()
        parts, part = self.parts()
        report = torch.tensor([own or 0.0, batches.given, part], dtype=torch.float64, device=self._strategy.root_device)
        reports = [torch.empty_like(report) for _ in range(self._strategy.world_size)]
        torch.distributed.all_gather(reports, report)
        if not all(float(r[0]) for r in reports):  # a rank has not measured enough yet
            return
        seconds = [max(float(r[0]) for r in reports if int(r[2]) == p) for p in range(parts)]
        before, batch = batches.shares, batches.batch
        after = cut(batch, seconds, least=1)
        slowest_before = max(n * s for n, s in zip(before, seconds, strict=True))
        slowest_after = max(n * s for n, s in zip(after, seconds, strict=True))
        if after == before or slowest_after > (1 - self._drift) * slowest_before:
            return
        # Loaders read ahead: the change begins with the first batch that no rank has begun to load.
        batches.change(seconds, start=max(int(r[1]) for r in reports))
        stopwatch.reset()
        if self._strategy.is_global_zero:
            log.info("Batches of %d samples are shared out anew: %s instead of %s.", batch, after, before)

    # ---- states ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a restart continues with: the samples of a step, and the speeds of the nodes."""
        if self.batches is None:
            return {"global_batch_size": self.global_batch, "seconds": self._known}
        measured = dict(zip(self.part_names(), self.batches.seconds, strict=True)) if self._every else {}
        return {"global_batch_size": self.batches.batch, "seconds": self._known | measured}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues with the state before the restart."""
        if self.global_batch is None:
            self.global_batch = state["global_batch_size"]
        self._known = dict(state["seconds"])

    def is_fit(self) -> bool:
        """Whether there is a Trainer, and it fits."""
        trainer = getattr(self._strategy.lightning_module, "_trainer", None)
        return trainer is not None and lightning_of(trainer).is_fit(trainer)

    def is_training(self) -> bool:
        """Whether the Trainer makes dataloaders for training now."""
        return self.is_fit() and bool(self.module.trainer.training)


def whole_numbers_as_reals(tensor: Any, reduce_op: object) -> Any:
    """The tensor to reduce. A mean of whole numbers, such as uneven batch sizes, is not rounded."""
    if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
        return tensor.double()
    return tensor


def train_batches(trainer: pl.Trainer) -> SharedBatches:
    """The batches of the training data, which has been cut."""
    loader: Any = trainer.train_dataloader
    batches: SharedBatches = loader.batch_sampler
    return batches


def with_batches(dataloader: Any, batches: SharedBatches) -> Any:
    """The same loader with other batches."""
    copied = copy.copy(dataloader)
    vars(copied)["batch_sampler"] = batches  # DataLoader itself forbids it, since workers may run; a copy has none
    return copied


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
