"""``Trainer(strategy="hetero_offload")``: Lightning's lifecycle around a runtime session."""

from __future__ import annotations

import importlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hetero import callbacks
from lightning_hetero.checkpoint import release_pages
from lightning_hetero.convert.importing import ModelWeights, Weights
from lightning_hetero.errors import ConfigError, HeteroError, UnsupportedError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile, ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.stalls import describe, stalls
from lightning_hetero.ir.trace import Trace
from lightning_hetero.planners import BUILTIN_PLANS, PLANNERS
from lightning_hetero.profiling.memory import OperatorMeasure
from lightning_hetero.profiling.model import BatchProfiler
from lightning_hetero.runtime.device.executor import DeviceExecutor
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.lanes import EmulatedDevice
from lightning_hetero.runtime.placement import SessionOptions, StepRules
from lightning_hetero.runtime.session import Session
from lightning_hetero.store.options import EngineOptions
from lightning_hetero.store.partition import BlockCls
from lightning_hetero.store.snapshots import bring
from lightning_hetero.strategies import checkpoint_io
from lightning_hetero.strategies.autoplan import Autoplan
from lightning_hetero.strategies.machine import Machine
from lightning_hetero.strategies.recovery import Recovery
from lightning_hetero.strategies.resume import as_checkpoint, check_use, go_on, is_store, load_buffers, read_state
from lightning_hetero.strategies.rules import step_rules
from lightning_hetero.strategies.training_state import TrainingState
from lightning_hetero.strategies.verdicts import Verdicts
from lightning_hetero.strategies.verification import Verifier
from lightning_hetero.units import parse_bytes

if TYPE_CHECKING:
    from lightning.pytorch.strategies import SingleDeviceStrategy as _Base
else:
    _Base = object  # the namespace's class comes second among the bases (strategies.factory)

log = logging.getLogger(__name__)

_AUTO = "holistic"  # the planner behind plan="auto"


class HeteroOffload(_Base):
    """Trains models that do not fit memory: weights and optimizer state on host or disk, updates in native threads.

    A plan changes speed and memory, never a bit of the result: in ``32-true`` it is that of ``torch.optim.AdamW(fused=True)`` under
    plain Lightning. 16-bit weights have fp32 masters.

    Args:
        plan: ``"auto"`` (the first batches are profiled, then the ``"holistic"`` planner decides), the name of another planner,
            ``"resident"`` (nothing offloaded), ``"host"`` (state in host memory, updates overlap with backward), ``"disk"``
            (state and the weights of repeated blocks on disk), the path of a plan file, or a :class:`~lightning_hetero.Plan`.
        block_cls: Classes (or their names) of the blocks that are moved as one, such as ``"LlamaDecoderLayer"``. Default: Hugging
            Face's ``_no_split_modules``, else modules that repeat.
        weights: A safetensors file or a Hugging Face directory that gives a model on the meta device its content, read block by
            block to where the plan puts it; or several, by the name of the module that each is for, such as ``{"model": path}``.
        host_memory: Host memory for weights, gradients, optimizer state and staging, such as ``"16GiB"``; activations come on top.
            Default: what is free, at most what a control group leaves; it holds activations too, once a batch has been profiled.
        device_memory: The same for the device tier.
        device: An emulated device with memory of its own, to try plans for accelerators without one.
        disk_path: A directory for the disk tier, private to this run. Default: a temporary one under the Trainer's root directory.
        disk_capacity: Most bytes on disk.
        allow_tmpfs: Accept a ``disk_path`` in memory.
        allow_rotational: Accept a ``disk_path`` on a rotating disk.
        io_backend: ``"auto"``, ``"io_uring"`` or ``"pool"``.
        io_threads: Threads of the ``"pool"`` back end.
        update_threads: Threads that run updates; default half of the processors that the process may use.
        durability: What a committed step survives: ``"process"`` (``kill -9``), ``"power"`` (a crash of the system), ``"none"``.
        verify: Compute so many optimizer steps a second time on a copy of the model in memory, and compare bit by bit; a difference
            raises :class:`~lightning_hetero.errors.VerificationError`.
        verify_digests: Check digests of everything read from disk.
        link_checkpoints: Checkpoints of a run that keeps its steps are directories of hard links to the store's last step. They
            take neither time nor space until it is written over, and ``ckpt_path`` takes them like a store.
        hardware_profile: What planners know of the machine: a profile or its file. Default: the file that the environment variable
            ``LIGHTNING_HETERO_HARDWARE`` names, else micro-benchmarks, which run once per machine.
        replan_drift: By how much, relatively, the batch, the budget or the time of a step may differ from what the plan was made
            for before a new one is made; ``None``: by anything.
        trace: Record what happens; see :attr:`trace`.
    """

    namespace = "lightning.pytorch"
    strategy_name = "hetero_offload"

    def __init__(
        self,
        plan: str | os.PathLike[str] | Plan = "auto",
        *,
        block_cls: BlockCls | None = None,
        weights: Weights | None = None,
        host_memory: str | int | None = None,
        device_memory: str | int | None = None,
        device: EmulatedDevice | None = None,
        disk_path: str | os.PathLike[str] | None = None,
        disk_capacity: str | int | None = None,
        allow_tmpfs: bool = False,
        allow_rotational: bool = False,
        io_backend: str = "auto",
        io_threads: int = 3,
        update_threads: int | None = None,
        durability: str = "process",
        verify: int = 0,
        verify_digests: bool = False,
        link_checkpoints: bool = False,
        hardware_profile: str | os.PathLike[str] | HardwareProfile | None = None,
        replan_drift: float | None = 0.5,
        trace: bool = False,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        self.autoplan: Autoplan | None = None
        if (name := planner_name(plan)) is not None:
            machine = Machine(hardware_profile)
            self.autoplan = Autoplan(name, machine.profile, drift=_drift(replan_drift))
        self.options = SessionOptions(
            plans=(planner(plan),) if self.autoplan is None else self.autoplan.provisional(on_device=device is not None),
            block_cls=block_cls,
            host_memory=parse_bytes(host_memory, name="host_memory"),
            device_memory=parse_bytes(device_memory, name="device_memory"),
            device=device,
            disk_path=None if disk_path is None else Path(disk_path),
            disk_capacity=parse_bytes(disk_capacity, name="disk_capacity"),
            allow_tmpfs=allow_tmpfs,
            allow_rotational=allow_rotational,
            trace=trace,
            on_patched=release_pages,
            poison=os.environ.get("LIGHTNING_HETERO_POISON") == "1",
            engine=EngineOptions(
                io_backend=_one_of("io_backend", io_backend, ("auto", "io_uring", "pool")),
                io_threads=_count("io_threads", io_threads),
                update_threads=0 if update_threads is None else _count("update_threads", update_threads),
                durability=_one_of("durability", durability, ("none", "process", "power")),
                verify_digests=verify_digests,
                emulated_bytes_per_s=0.0 if device is None else device.disk_bytes_per_s or 0.0,
            ),
        )
        self.session: Session | None = None
        self._verify = _steps("verify", verify)
        self._verifier: Verifier | None = None
        self._recovery: Recovery | None = None
        self._weights = weights
        self._imported: weakref.ref[nn.Module] | None = None  # the model that has got them
        self._may_use_disk = self.options.plans[-1] not in (BUILTIN_PLANS["resident"], BUILTIN_PLANS["host"])
        self._callback: Any = None
        self._last_plan: Plan | None = None
        self._verdicts: Verdicts | None = None
        self._began_s = self._step_s = 0.0
        self._stepped = False
        self._failed = False
        self._waiting_checkpoint: tuple[Mapping[str, Any], bool] | None = None
        self._state: TrainingState | None = None  # takes it for every step that is kept
        self._link_checkpoints = link_checkpoints
        self._snapshots: list[Path] = []  # to be made when the batch has ended
        self._step_ended = False
        self._resumed: dict[str, Any] | None = None  # the training state of the store that ckpt_path is
        self._last_trace = Trace(spans=())
        self._last_report: dict[str, int] = {}

    # ---- setup ------------------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Refuses what this version does not do: other accelerators, several processes."""
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        cpu = importlib.import_module(f"{self.namespace}.accelerators").CPUAccelerator
        if not isinstance(self.accelerator, cpu):
            raise UnsupportedError(
                f"strategy {self.strategy_name!r} got accelerator {type(self.accelerator).__name__}; this version computes on "
                f'the CPU. Pass Trainer(accelerator="cpu").'
            )
        devices = len(trainer._accelerator_connector._parallel_devices)
        nodes = trainer._accelerator_connector._num_nodes_flag  # trainer.num_nodes asks the strategy, which has one
        if devices > 1 or nodes > 1:
            raise UnsupportedError(
                f"strategy {self.strategy_name!r} got devices={devices}, num_nodes={nodes}; this version runs in one process. "
                f"Pass devices=1, num_nodes=1."
            )
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Places the model; in ``fit`` the optimizers are made between its reserved memory and its files."""
        assert self.accelerator is not None
        assert self.model is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._failed = False
        fitting = trainer.state.fn == importlib.import_module(f"{self.namespace}.trainer.states").TrainerFn.FITTING
        resuming = fitting and self._resumed is not None
        if resuming:
            self._drop_session()
        if self.session is not None and self.session.root is self.lightning_module and self.session.has_model():
            session = self.session  # parked: the model was too large to come back into memory
            if fitting:
                session.unpark()
        else:
            self._drop_session()
            self.model = self.precision_plugin.convert_module(self.model)
            self.session = session = Session(self.lightning_module, self.options, self._content())
        rules = StepRules()
        if fitting:
            self.setup_optimizers(trainer)
            rules = step_rules(trainer, self.lightning_module, self.precision_plugin, self.namespace)
        self.setup_precision_plugin()
        root = Path(trainer.default_root_dir)
        if "://" in str(trainer.default_root_dir):
            root = Path.cwd()  # a remote root holds checkpoints, not this process's scratch files
        self._verifier = Verifier(self.lightning_module, self._verify) if fitting and self._verify else None
        if fitting and self.autoplan is not None:
            self.autoplan.fit_begins(session)
            self._callback = callbacks.make(self.namespace, self.autoplan)
            trainer.callbacks.insert(0, self._callback)
        session.start(self.optimizers if fitting else None, rules, default_root=root, resume=resuming)
        if fitting and session.keeps_steps:
            self._state = TrainingState(trainer, self.namespace)
            self._state.attach(self._batch_ends)
        if resuming and self._resumed is not None:
            load_buffers(self.lightning_module, self._resumed["buffers"])
        if rules.speculates:
            self._verdicts = Verdicts(self.precision_plugin, self._running)
        self._imported = weakref.ref(self.lightning_module)
        self._recovery = None
        if fitting and isinstance(session.executor, DeviceExecutor):
            self._recovery = Recovery(
                session, namespace=self.namespace, module=self.lightning_module, forward=self._forward, backward=self._backward,
                on_demotion=self._abandon_profile,
            )  # fmt: skip
        if self._waiting_checkpoint is not None:
            (checkpoint, strict), self._waiting_checkpoint = self._waiting_checkpoint, None
            self.load_model_state_dict(checkpoint, strict)

    def _content(self) -> ModelWeights | None:
        """What the model's first setup reads from files; later ones go on with what it has become."""
        module = self.lightning_module
        if self._weights is None or module is None or (self._imported is not None and self._imported() is module):
            return None
        return ModelWeights(module, self._weights, strict=module.strict_loading)

    def model_to_device(self) -> None:
        """The session has placed the model."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``empty_init`` parameters have no memory until ``setup`` initializes them block by block."""
        device = torch.device("meta") if empty_init else self.root_device
        with device, self.precision_plugin.tensor_init_context():
            yield

    # ---- steps ------------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begins a batch that trains."""
        if self._verifier is not None and self.session is not None:
            self.session.drain()
            with self._plain_precision():
                self._verifier.batch_begins(self.lightning_module, self.optimizers[0], self.precision_plugin, args, kwargs)
        self._began_s = time.monotonic()
        if self._recovery is not None and isinstance(self._executor, DeviceExecutor):
            output = self._recovery.training_step(self._executor, args, kwargs)
        else:
            output = self._forward(*args, **kwargs)
        if self._verifier is not None:
            self._verifier.batch_ended(output)
        return output

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_step(training=True)
        with nullcontext() if self._profiler is None else self._profiler.forward():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begins a batch that only reads."""
        with self._evaluating():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begins a batch that only reads."""
        with self._evaluating():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begins a batch that only reads."""
        with self._evaluating():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._begin_step(training=False)
        try:
            yield
        finally:
            if self._executor is not None:
                self._executor.end_batch()

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs a backward."""
        if self._recovery is not None and isinstance(self._executor, DeviceExecutor):
            return self._recovery.backward(self._executor, closure_loss, optimizer, *args, **kwargs)
        return self._backward(closure_loss, optimizer, *args, **kwargs)

    def _backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> torch.Tensor:
        with nullcontext() if self._profiler is None else self._profiler.backward():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Lets the runtime know that backward begins."""
        if self._executor is not None:
            self._executor.backward_starts()
        super().pre_backward(closure_loss)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Lets the runtime know that backward has ended."""
        super().post_backward(closure_loss)
        if self._executor is not None:
            self._executor.backward_ends()
            self._executor.check_gradients()

    def process_dataloader(self, dataloader: object) -> object:
        """Takes note of a training dataloader before its iterator is made."""
        if self._state is not None and self._state.is_training:
            self._state.loader_seen(dataloader)
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        """Goes on where the store's last step ended."""
        super().on_train_start()
        if self._resumed is not None and self.lightning_module is not None:
            state, self._resumed = self._resumed, None
            go_on(self.lightning_module.trainer, state, self.namespace)
            if self._state is not None:
                self._state.resume(state["data"])

    def _batch_ends(self) -> None:
        """All hooks of a training batch have run: an optimizer step that it ended in is kept."""
        if self._step_ended and self._state is not None and self.session is not None:
            self._step_ended = False
            self.session.keep_step(self._state.take([b.books() for b in self.session.bindings]))
            paths, self._snapshots = self._snapshots, []
            for path in paths:
                self.session.snapshot(path)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Arms the updates: only the batch that ends in ``step`` comes through here, batches that only accumulate do not."""
        self._stepped = self._step_ended = True
        if self.session is None or self._executor is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._executor.arm(self.session.binding_of(optimizer))
        try:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._executor.arm(None)
            self._executor.end_batch()
            if self._recovery is not None:
                self._recovery.step_ended()
        if self._verifier is not None:
            began_s = time.monotonic()
            self.session.drain()
            with self._plain_precision():
                self._verifier.check(self.lightning_module, optimizer, self.precision_plugin)
            if not self._verifier.steps_left:
                self._verifier = None
            self._began_s += time.monotonic() - began_s  # no part of the step
        return output

    def _plain_precision(self) -> AbstractContextManager[None]:
        return nullcontext() if self._verdicts is None else self._verdicts.aside()

    def _abandon_profile(self, error: BaseException) -> None:
        if self.autoplan is not None:
            self.autoplan.demoted(error)

    def take_step_seconds(self) -> float | None:
        """As a training batch ends: seconds of the optimizer step's batches, loading them left out; ``None`` if none has ended."""
        self._step_s += time.monotonic() - self._began_s
        if not self._stepped:
            return None
        seconds, self._step_s, self._stepped = self._step_s, 0.0, False
        return seconds

    @property
    def _profiler(self) -> BatchProfiler | None:
        return None if self.autoplan is None else self.autoplan.profiler

    def _begin_step(self, *, training: bool) -> None:
        if self._executor is not None:  # steps may be called by hand after the Trainer has torn down
            self._executor.begin_step(training=training)

    # ---- checkpoints --------------------------------------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> Any:
        """Lightning's checkpoint IO, streaming while something lives on disk; one that the user gave stays."""
        base: Any = super().checkpoint_io
        plain = checkpoint_io.plain_class(self.namespace)
        if type(base) is plain:
            self._checkpoint_io = base = checkpoint_io.make(self.namespace)
        elif type(getattr(base, "checkpoint_io", None)) is plain:  # AsyncCheckpointIO and its like wrap another
            base.checkpoint_io = checkpoint_io.make(self.namespace)
        ours = getattr(base, "checkpoint_io", base)
        if hasattr(ours, "streams"):
            ours.streams = self._may_use_disk if self.session is None else self.session.on_disk  # ckpt_path is loaded before setup
        return base

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Writes a checkpoint file; with ``link_checkpoints``, where steps are kept, links the store's last step instead.

        Within a batch that ends in a step the links are made when its last hook has run.
        """
        if not self._link_checkpoints or self.session is None or not self.session.keeps_steps:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self._step_ended:
            self._snapshots.append(Path(filepath))
        else:
            self.session.snapshot(Path(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """A checkpoint file, or a store, whose weights and state stay where they are until :meth:`setup` takes them over."""
        self._resumed = None
        if not is_store(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        path, own = Path(checkpoint_path).absolute(), self.options.disk_path
        check_use(self.lightning_module, path, own, self.namespace)
        assert own is not None
        self._resumed = read_state(path)
        if not own.exists() or not path.samefile(own):
            bring(path, own.absolute())
        return as_checkpoint(self._resumed, self.precision_plugin)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights on disk appear as lazy tensors."""
        if self.session is not None:
            self.session.drain()
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Writes weights through to where they live; those of a model on the meta device once :meth:`setup` has given it memory."""
        assert self.lightning_module is not None
        if self._resumed is not None:
            return
        if self.session is None and any(p.is_meta for p in self.lightning_module.parameters()):
            self._waiting_checkpoint = (checkpoint, strict)
            return
        super().load_model_state_dict(checkpoint, strict=strict)
        if self.session is not None:
            self.session.commit()
        for value in checkpoint["state_dict"].values():
            if isinstance(value, torch.Tensor):
                release_pages(value)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """State goes to the tier that the plan chose; nothing is moved to a device."""
        if self._resumed is not None and self.session is not None:
            for binding, books in zip(self.session.bindings, checkpoint["optimizer_states"], strict=True):
                binding.take_over(books)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    # ---- what it offers ----------------------------------------------------------------------------------------------------

    @contextmanager
    def materialize(self, params: nn.Module | Sequence[nn.Parameter]) -> Iterator[None]:
        """The door to weights outside their block's forward: inside the context they are ordinary parameters in memory.

        Args:
            params: A module, or parameters.
        """
        assert self.session is not None, "materialize() works between the Trainer's setup and teardown"
        wanted = list(params.parameters()) if isinstance(params, nn.Module) else list(params)
        with self.session.materialized(wanted):
            yield

    @property
    def plan(self) -> Plan | None:
        """The plan in force, one rule per block, with its prediction if it was planned; ``None`` before the first setup."""
        return self._executor.plan if self._executor is not None else self._last_plan

    @property
    def model_profile(self) -> ModelProfile | None:
        """What the first batches have shown of the model, once there is a plan."""
        return None if self.autoplan is None else self.autoplan.model

    def operator_measures(self) -> tuple[OperatorMeasure, ...]:
        """Every operator of the recorded batch, forward and backward: seconds, FLOP, and memory before, during and after it."""
        return () if self.autoplan is None else self.autoplan.operators()

    def replan(self, *, host_memory: str | int | None = None) -> None:
        """Asks for a new plan: the next training batches are timed again, and the plan comes into force after them.

        Args:
            host_memory: A new budget, in force from then on; the plan then comes before the next batch, which raises a
                :class:`~lightning_hetero.errors.PlanError` if none fits.

        Raises:
            ConfigError: The strategy was given a plan instead of a planner.
        """
        if self.autoplan is None:
            raise ConfigError('replan() needs a planner, and this strategy was given a plan. Pass plan="auto".')
        budget = parse_bytes(host_memory, name="host_memory")
        if budget is not None:
            self.options = replace(self.options, host_memory=budget)
            if self.session is not None:
                self.session.options = self.options
        self.autoplan.request(budget=budget is not None)

    def prediction_error(self) -> dict[str, float]:
        """How far the plan's prediction is from its steps so far: ``step_time_error``, ``host_peak_error``.

        Mean absolute errors relative to what is measured; empty before there are any.
        """
        return {} if self._callback is None else self._callback.error.compute()

    @property
    def trace(self) -> Trace:
        """Spans of the latest steps, with ``trace=True``."""
        return self.session.recorder.trace() if self.session is not None else self._last_trace

    def stall_report(self) -> str:
        """For each of the latest steps a line that says what compute waited for, with ``trace=True``."""
        trace = self.trace
        found = stalls(trace)
        return "\n".join(describe(step, found) for step in sorted({span.step for span in trace.spans}))

    def memory_report(self) -> dict[str, int]:
        """``host_peak_bytes`` of the process, ``disk_bytes`` of files, ``bytes_read`` and ``bytes_written`` so far."""
        return self.session.memory_report() if self.session is not None else dict(self._last_report)

    # ---- teardown -----------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Remembers that teardown must not count on the engine."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Gives the model back, or leaves it on disk where it does not fit."""
        self._last_plan = self.plan
        if self._state is not None:
            self._state.detach()
        self._state = self._resumed = None
        if self._verdicts is not None:
            self._verdicts.close()
            self._verdicts = None
        trainer: Any = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is not None and self._callback in trainer.callbacks:
            trainer.callbacks.remove(self._callback)
        self._verifier = None
        if self.session is not None:
            try:
                parked = self.session.stop()
            except HeteroError:
                if not self._failed:
                    raise
                log.warning("The engine had failed; weights and optimizer state on disk are not brought back.")
                parked = False
                self.session.abandon()
            if not parked:
                self._forget_session()
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _drop_session(self) -> None:
        if self.session is not None:
            self.session.abandon()
            self._forget_session()

    def _forget_session(self) -> None:
        assert self.session is not None
        self._last_trace, self._last_report = self.session.recorder.trace(), self.session.memory_report()
        self.session = self._recovery = None

    def _running(self) -> Executor:
        assert self._executor is not None, "while a fit lasts there is an executor"
        return self._executor

    @property
    def _executor(self) -> Executor | None:
        return None if self.session is None else self.session.executor

    def __getstate__(self) -> dict[str, Any]:
        absent = dict.fromkeys(("session", "_recovery", "_imported", "_verifier"))
        return {**super().__getstate__(), **absent}


def planner_name(plan: str | os.PathLike[str] | Plan) -> str | None:
    """The planner that ``plan`` names, if it names one: plans that need no profile are none."""
    name = _AUTO if plan == "auto" else plan
    return name if isinstance(name, str) and name in PLANNERS and name not in BUILTIN_PLANS else None


def planner(plan: str | os.PathLike[str] | Plan) -> Callable[[ModelShape], Plan]:
    """What makes the plan once the model is known.

    Raises:
        ConfigError: Not a plan's name, and not a readable plan file.
    """
    if isinstance(plan, Plan):
        return partial(_given, plan)
    if isinstance(plan, str) and plan in BUILTIN_PLANS:
        return BUILTIN_PLANS[plan]
    if isinstance(plan, str) and not plan.endswith(".json") and not Path(plan).is_file():
        names = ", ".join(map(repr, dict.fromkeys(("auto", *BUILTIN_PLANS, *PLANNERS))))
        raise ConfigError(f"plan={plan!r}; allowed: {names}, the path of a plan file, or a Plan.")
    return partial(_given, Plan.load(Path(plan)))


def _given(plan: Plan, model: ModelShape) -> Plan:
    return plan


def _one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}; allowed: {', '.join(map(repr, allowed))}.")
    return value


def _count(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1024:
        raise ConfigError(f"{name}={value!r}; allowed: an integer from 1 to 1024.")
    return value


def _steps(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(
            f"{name}={value!r}; allowed: a number of steps. To check digests of what is read, pass verify_digests=True."
        )
    return value


def _drift(value: float | None) -> float | None:
    if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0):
        raise ConfigError(f"replan_drift={value!r}; allowed: a number above 0, or None.")
    return value
