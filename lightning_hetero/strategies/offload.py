"""Offloading behind one of Lightning's strategies, from setup to teardown."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from lightning_hetero import callbacks
from lightning_hetero.clock import now_s
from lightning_hetero.convert import adapter_settings, merges
from lightning_hetero.convert.importing import ModelWeights, check_begun, refuse_random_base
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.trace import Trace
from lightning_hetero.lanes.stream_device import StreamDevice
from lightning_hetero.nn.causal_lm import ChunkedCausalLMs
from lightning_hetero.optim import early_state
from lightning_hetero.planning.autoplan import Autoplan
from lightning_hetero.runtime import quantized, quantizing
from lightning_hetero.runtime.adapters import refuse_parts_of_prompts, refuse_trained_ranks
from lightning_hetero.runtime.announcement import summarize
from lightning_hetero.runtime.construction import Construction, refuse_roundings
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.options import SessionOptions, StepRules, host_budget
from lightning_hetero.runtime.session import Session
from lightning_hetero.runtime.slice_reads import SliceReads
from lightning_hetero.runtime.state_snapshot import StateSnapshot
from lightning_hetero.store.format.manifest import alignment_in
from lightning_hetero.strategies import rank_stores
from lightning_hetero.strategies.checkpoints import Checkpoints, local_root
from lightning_hetero.strategies.devices import move_rest, optimizers_to_host
from lightning_hetero.strategies.model_changes import ModelChanges, kept_scales
from lightning_hetero.strategies.namespaces import callbacks_of, lightning_of, module_of
from lightning_hetero.strategies.option_checks import Choices, on_lanes
from lightning_hetero.strategies.resume import State, go_on, load_buffers, read_places
from lightning_hetero.strategies.step_retry import OneAttempt, Retry, StepRetry
from lightning_hetero.strategies.training import Peers, Training
from lightning_hetero.strategies.training_state import TrainingState
from lightning_hetero.strategies.update_rules import step_rules
from lightning_hetero.strategies.verification import Verifier, reference_bytes

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy

_T = TypeVar("_T")

log = logging.getLogger(__name__)


class OffloadRun:
    """Places a strategy's model on its tiers in :meth:`setup`, gives it back in :meth:`teardown`.

    Args:
        strategy: Lightning's strategy, whose methods call those of this object.
        peers: The other ranks of a group.
    """

    def __init__(self, strategy: Strategy, choices: Choices, peers: Peers | None = None) -> None:
        self.strategy, self._peers = strategy, peers
        # From ``setup`` on. A model that is too large for memory keeps it after ``teardown``.
        self.session: Session | None = None
        self.training: Training | None = None  # the steps of the current fit
        self.kept: SliceReads | None = None  # reads the state that ranks have after a fit
        self._retry: Retry | None = None
        self._quantized: list[quantized.Removable] = []  # of layers of bitsandbytes, from setup to teardown
        self.built: Construction | None = None  # the model made in :meth:`building`, until it is placed
        self.checkpoints = Checkpoints(self)
        self._heads: ChunkedCausalLMs | None = None  # from setup to teardown
        self._callback: callbacks.PlanningCallback | None = None  # of the current or the last fit
        self._imported: weakref.ref[nn.Module] | None = None  # the model that got its weights from files
        self._began: tuple[float, int] | None = None  # when the first batch of the fit began, and the steps before it
        self._last_plan: Plan | None = None
        self._last_trace = Trace(spans=())
        self._last_report: dict[str, int] = {}
        self.has_failed = False  # the Trainer was interrupted
        self.choose(choices)

    def join(self, peers: Peers) -> None:
        """Says that this process is one of several, before :meth:`setup`."""
        self._peers = peers

    def choose(self, choices: Choices) -> None:
        """Says how this process trains, before :meth:`setup`."""
        self.choices = choices
        self.options = choices.options  # of the session; device and user change them

    @property
    def autoplan(self) -> Autoplan | None:
        """Makes the plan during training; ``None`` if the user gave a plan."""
        return self.choices.autoplan

    @property
    def module(self) -> pl.LightningModule:
        """The LightningModule; the Trainer connects it before it calls anything else."""
        return module_of(self.strategy)

    @property
    def trainer(self) -> pl.Trainer | None:
        """The module's Trainer, if there is one."""
        module = self.strategy.lightning_module
        return None if module is None else module._trainer

    @property
    def executor(self) -> Executor:
        """The executor while a session runs."""
        if self.session is None:
            raise RuntimeError("no session runs")
        return self.session.running

    # ---- setup -------------------------------------------------------------------------------

    def use_device(self, device: torch.device) -> torch.device:
        """Prepares for the device that the fit computes on, and returns it with its number.

        Raises:
            ConfigError: The user also asked for an emulated device. Or a callback would copy a
                model that has no weights yet.
        """
        self._check_averaging()
        lanes = self.choices.options.device
        if device.type != "cpu":
            if lanes is not None:
                raise ConfigError(
                    f"device={lanes!r} is an emulated device, made of the host's memory, but the Trainer computes on "
                    f'{device}. Pass accelerator="cpu", or leave device out.'
                )
            lanes = StreamDevice.of(device, self.options.device_memory)
            device = lanes.device
        self.change(on_lanes(self.options, self.autoplan, lanes))
        if self.options.is_unified:
            log.info("the memory of %s is the host's own. host_memory is for both together; the disk alone adds to it.", device)
        return device

    def _check_averaging(self) -> None:
        """Lightning's callbacks that average weights copy the whole model before it gets memory."""
        module, trainer = self.module, self.trainer
        if trainer is None or not lightning_of(trainer).is_fit(trainer):
            return
        kind = lightning_of(trainer).module("callbacks").WeightAveraging
        found = next((type(one).__name__ for one in callbacks_of(trainer) if isinstance(one, kind)), None)
        if found is not None and (self._reads_files or any(p.is_meta for p in module.parameters())):
            raise ConfigError(
                f"{found} copies the model as the fit begins, and a model on the meta device has no weights before the strategy "
                f"reads them. Build the model in memory and leave weights out, or average the weights in a callback that begins "
                f"in on_train_start."
            )

    def change(self, options: SessionOptions) -> None:
        """Sets other options, also those of the session under way."""
        self.options = options
        if self.session is not None:
            self.session.options = options

    @contextmanager
    def building(self, *, empty: bool) -> Iterator[None]:
        """A model is built in the context.

        With ``empty``, parameters have no memory until :meth:`setup` initializes them block by
        block. Otherwise those beyond half of the budget wait in a file until :meth:`setup` places
        them.
        """
        device = torch.device("meta" if empty else "cpu")  # `setup` moves weights to another device
        if self.built is None:
            self.built = Construction(host_budget(self.options, 0) // 2, self.checkpoints.landing)
        with device, self.strategy.precision_plugin.tensor_init_context(), self.built.observed():
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Places the model.

        In ``fit`` the optimizers are made after its memory is reserved, and before its files are
        written.
        """
        if self.strategy.accelerator is not None:
            self.strategy.accelerator.setup(trainer)
        self.has_failed, self.kept = False, None
        fits = lightning_of(trainer).is_fit(trainer)
        resumed = self.checkpoints.resumed if fits else None
        session = self._open(resumed, fits=fits)
        self._move_rest()  # before optimizers are made, as in plain Lightning
        if fits:
            self._start_fit(trainer, session, resumed)
        else:
            self.strategy.setup_precision_plugin()
            session.start(None, StepRules(), default_root=local_root(trainer))
            self._placed(session)
        self.checkpoints.placed(session)
        if self.choices.chunked_head and self._heads is None:
            self._heads = ChunkedCausalLMs(self.module)

    def _open(self, resumed: State | None, *, fits: bool) -> Session:
        """The session of the last fit, if it keeps the model on disk, or a new one."""
        module, session = self.module, self.session
        if resumed is not None:
            self.drop_session()
        elif session is not None and session.root is module and session.has_model():
            if fits:  # the model was too large to come back into memory
                session.make_way()
                session.unpark()
                self._leave_room_for_reference()
            return session
        else:
            self.drop_session()
            if fits and self.options.disk_path is not None:
                own, place = self.options.own, self.options.disk_path.absolute()
                member = rank_stores.begin(place, own, self.options.collectives, new_run=self.options.new_run)
                self.change(replace(self.options, member=member))
        if fits:
            self.measure_disks()
        strategy = self.strategy
        quantizing.refuse_other_dtypes(module)
        dtypes = {name: param.dtype for name, param in module.named_parameters() if param.is_meta}
        with nullcontext() if self.built is None else self.built.observed():
            strategy.model = strategy.precision_plugin.convert_module(strategy.model or module)
            quantized.quantize(module)
        if fits:
            self._leave_room_for_reference()
        quantizing.unpack(module)
        refuse_trained_ranks(module)
        default = None if self.built is None else self.built.default_dtype
        content, path = quantizing.content_of(module, self._content(), kept_scales(resumed), default), self._resumed_path
        if resumed is None and (self.trainer is None or self.trainer.ckpt_path is None):
            if self.choices.weights is None:
                refuse_random_base(module, lambda name, p: None if self.built is None else self.built.given(name, p))
            if self.built is not None:
                self.built.refuse_changes(module, content)
                refuse_parts_of_prompts(module, self.built.given)
            refuse_roundings(module, dtypes, content)
            check_begun(
                module, () if content is None else content, lambda name, p: self.built is not None and self.built.knows(name, p)
            )
        self.checkpoints.base.placed(content)
        alignment = None if resumed is None or path is None else alignment_in(path)
        self.session = session = Session(module, self.options, content, self.built, alignment)
        return session

    def measure_disks(self) -> None:
        """Measures several disks, once, so that blocks can be dealt to them."""
        if not self.options.disk_rates:
            self.change(replace(self.options, disk_rates=rank_stores.disk_rates(self.options)))

    @property
    def _resumed_path(self) -> Path | None:
        """The store that a resume goes on in; ``None`` if it begins a new one."""
        path = self.options.disk_path
        return None if path is None or self.checkpoints.source is not None else path.absolute()

    def _start_fit(self, trainer: pl.Trainer, session: Session, resumed: State | None) -> None:
        strategy, module = self.strategy, self.module
        with early_state.observed(module):
            strategy.setup_optimizers(trainer)
        optimizers = session.cut(strategy.optimizers)
        changes = ModelChanges(module, optimizers, resumed, strategy.lr_scheduler_configs)
        changes.check()
        if resumed is not None:
            adapter_settings.check(module, resumed.get(adapter_settings.KEY, {}), strict=module.strict_loading)
        changes.to_model()
        rules, source = step_rules(trainer, module, strategy.precision_plugin), self.checkpoints.source
        path = None if resumed is None else self._resumed_path
        if self._peers is not None:
            rules = self._peers.rules(rules)
        strategy.setup_precision_plugin()
        verifier = self._verifier(session)
        if self.autoplan is not None:
            self.autoplan.fit_begins(session)
            self._callback = callbacks.make(self, self.autoplan)
            callbacks_of(trainer).insert(0, self._callback)
        with changes.in_groups():
            session.start(
                optimizers, rules, default_root=local_root(trainer), resume=path is not None, with_state=changes.with_state(),
                in_place=() if path is None else read_places(path), source=source,
            )  # fmt: skip
        changes.placed()
        state = TrainingState(trainer, changes) if session.keeps_steps else None
        if resumed is not None:
            load_buffers(module, resumed["buffers"])
            merges.tell(module, resumed.get(merges.KEY, {}), strategy.root_device)
        self._placed(session)
        self.training = Training(
            session=session,
            executor=self.executor,
            module=module,
            precision=strategy.precision_plugin,
            speculates=rules.speculates,
            autoplan=self.autoplan,
            state=state,
            verifier=verifier,
            retry=self._retry,
            peers=self._peers,
            is_trial=lambda: self.checkpoints.tunes or bool(vars(trainer)["fast_dev_run"]),
            make_links=self.checkpoints.make_links,
        )

    def _placed(self, session: Session) -> None:
        """The session has started, and the model has its content."""
        self.built = None
        self._let_go_of_layers()  # of a parked model
        self._quantized = quantized.follow(self.module)
        self._retry = self._retries(session)
        self._move_rest()  # buffers that had no content before
        self._imported = weakref.ref(self.module)

    def _content(self) -> ModelWeights | None:
        """The files that the model's first setup reads. Later setups keep the trained weights."""
        module, weights = self.module, self.choices.weights
        if weights is None or not self._reads_files:
            return None
        return ModelWeights(module, weights, strict=module.strict_loading, reads=self.options.own.rank == 0)

    @property
    def _reads_files(self) -> bool:
        return self.choices.weights is not None and (self._imported is None or self._imported() is not self.module)

    def _verifier(self, session: Session) -> Verifier | None:
        steps = self.choices.verify
        device = self.strategy.root_device if isinstance(self.options.device, StreamDevice) else None
        outside = {id(p) for block in session.blocks if block.spec.pinned for p in block.params()}
        return Verifier(self.module, steps, device=device, collectives=self.options.collectives, outside=outside) if steps else None

    def _leave_room_for_reference(self) -> None:
        """Plans may use the GPU memory that the reference of ``verify`` leaves free."""
        device = self.options.device
        if self.choices.verify and isinstance(device, StreamDevice):
            left = device.without(reference_bytes(self.module, apart=True), f"verify={self.choices.verify}")
            self.change(replace(self.options, device=left))

    def _retries(self, session: Session) -> Retry | None:
        """Repeats steps on a device with memory of its own."""
        executor = self.executor
        if executor.device is None:
            return None
        if self._peers is not None:
            return OneAttempt(executor)
        return StepRetry(session, executor, module=self.module, on_demotion=self._demoted)

    def _demoted(self, error: BaseException) -> Callable[[Plan], Plan]:
        if self.autoplan is None or self.session is None or self.training is None:
            return lambda plan: plan
        self.autoplan.demoted(error, self.session.device_memory or 0)
        return partial(self.autoplan.lesser, self.session)

    def _move_rest(self) -> None:
        if self.options.device is not None:
            move_rest(self.module, self.strategy.root_device)

    # ---- while it runs -----------------------------------------------------------------------

    def loader_made(self, dataloader: object) -> None:
        """A dataloader was made. Its iterator is made next."""
        state = None if self.training is None else self.training.state
        if state is not None and state.is_training:
            state.data.loader_made(dataloader)

    def train_starts(self) -> None:
        """Continues where the store's last step ended."""
        state = None if self.training is None else self.training.state
        if state is not None:
            resumed, self.checkpoints.resumed = self.checkpoints.resumed, None
            if resumed is None:
                state.data.follow()
            else:
                go_on(self.module.trainer, resumed, state.data)
        self._began = now_s(), self.module.trainer.global_step

    def evaluate(self, plain: Callable[[], _T]) -> _T:
        """Runs a batch that only reads weights."""
        if self._peers is not None:
            self._peers.batch_begins(training=False)
        executor = None if self.session is None else self.session.executor
        if executor is None:  # after the Trainer's teardown
            return plain()

        def run() -> _T:
            executor.begin_step(training=False)
            try:
                return plain()
            finally:
                executor.end_batch()

        return run() if self._retry is None else self._retry.evaluate(run)

    def take_step_seconds(self) -> float | None:
        """As a batch ends: seconds of a step's batches, once they are known (``StepClock``)."""
        return None if self.training is None else self.training.take_step_seconds()

    def forget_step_seconds(self) -> None:
        """Another plan is in force: drops the times of steps under the one before."""
        if self.training is not None and self.training.clock is not None:
            self.training.clock.forget()

    def reading(self) -> AbstractContextManager[None]:
        """In the context ranks that share a model read its weights together."""
        executor = None if self.session is None else self.session.executor
        return nullcontext() if executor is None or executor.slices is None else executor.slices.reads.by_all()

    def snapshot_state(self) -> StateSnapshot | None:
        """Keeps the state readable for a background save; ``None`` if it is all in memory."""
        if self.session is not None:
            return self.session.snapshot_state()
        return None if self.kept is None or self.trainer is None else StateSnapshot(local_root(self.trainer), None, reads=self.kept)

    # ---- teardown ----------------------------------------------------------------------------

    def failed(self) -> None:
        """The Trainer was interrupted, so :meth:`teardown` must not rely on the engine."""
        self.has_failed = True

    def teardown(self) -> None:
        """Gives the model back, or leaves it on disk if it does not fit memory."""
        self._last_plan = self.plan
        if self._heads is not None:
            self._heads.remove()
            self._heads = None
        self.checkpoints.end(self.session)
        if self.training is not None:
            self.training.close()
            self.training = None
        self._retry = None
        trainer = self.trainer
        if trainer is not None:
            self._warn_of_lost_step(trainer)
            if self._callback is not None and self._callback in callbacks_of(trainer):
                callbacks_of(trainer).remove(self._callback)
        if self.session is not None and not self._parks(self.session):
            self._forget_session(self.session)
        if self.session is None:
            self._let_go_of_layers()
        self._summarize()
        strategy = self.strategy
        if strategy.root_device.type != "cpu" and strategy.lightning_module is not None:
            move_rest(strategy.lightning_module, torch.device("cpu"))
            optimizers_to_host(strategy.optimizers)
        strategy.precision_plugin.teardown()
        if strategy.accelerator is not None:
            strategy.accelerator.teardown()
        strategy.checkpoint_io.teardown()

    def _let_go_of_layers(self) -> None:
        for layer in self._quantized:
            layer.remove()
        self._quantized = []

    def _summarize(self) -> None:
        """Says what a fit has taken, unless it was interrupted."""
        began, self._began, plan, trainer = self._began, None, self._last_plan, self.trainer
        if began is None or plan is None or trainer is None or self.has_failed:
            return
        (begin_s, first), error = began, self.prediction_error().get("step_time_error")
        steps, seconds = trainer.global_step - first, now_s() - begin_s
        report, ranks = self.memory_report(), self.options.own.ranks
        log.info("%s", summarize(plan.name, steps=steps, seconds=seconds, report=report, error=error, ranks=ranks))

    def _warn_of_lost_step(self, trainer: pl.Trainer) -> None:
        steps = None if self.session is None else self.session.steps
        if not self.has_failed and steps is not None and steps.left_out_last:
            log.warning(
                "Training has ended with step %d, which is not kept (keep_every=%d): it was stopped when the batch after that step "
                "had begun. A resume goes on from the step that was kept before it. To lose none, pass keep_every=1, or save a "
                "checkpoint.", trainer.global_step, self.options.keep_every,
            )  # fmt: skip

    def _parks(self, session: Session) -> bool:
        """Stops the session. Returns whether it keeps the model on disk."""
        if self.has_failed and session.options.collectives is not None:  # other ranks are elsewhere
            session.abandon()
            return False
        try:
            return session.stop(failed=self.has_failed)
        except Exception as error:  # the error that interrupted the fit may come again, whatever its class
            if not self.has_failed:
                raise
            log.debug("Stopping the session failed.", exc_info=error)
            log.warning("The engine had failed; weights and optimizer state on disk are not brought back.")
            session.abandon()
            return False

    def drop_session(self) -> None:
        """Ends the session, because another object owns the model or its store from now on."""
        if self.session is not None:
            self.session.abandon()
            self._forget_session(self.session)
            self._let_go_of_layers()

    def _forget_session(self, session: Session) -> None:
        self._last_trace, self._last_report = session.recorder.trace(), session.memory_report()
        self.session, self.kept = None, session.kept_state

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), **dict.fromkeys(("session", "training", "_retry", "built", "_imported", "kept")), "_quantized": []}

    # ---- while there is a session, and after it -------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or that of the last session; ``None`` before the first setup."""
        executor = None if self.session is None else self.session.executor
        return self._last_plan if executor is None else executor.plan

    @property
    def trace(self) -> Trace:
        """Spans of the latest steps."""
        return self.session.recorder.trace() if self.session is not None else self._last_trace

    def memory_report(self) -> dict[str, int]:
        """Peaks of memory and bytes on disk, as the session counts them."""
        return self.session.memory_report() if self.session is not None else dict(self._last_report)

    def prediction_error(self) -> dict[str, float]:
        """Errors of the plan's prediction by name; empty before the first step."""
        return {} if self._callback is None else self._callback.error.compute()
