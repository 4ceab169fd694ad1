"""``Trainer(strategy="hetero_offload")``: Lightning's lifecycle around a runtime session."""

from __future__ import annotations

import importlib
import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_hetero import callbacks
from lightning_hetero.checkpoint import release_pages
from lightning_hetero.convert.importing import ModelWeights, Weights
from lightning_hetero.errors import ConfigError, HeteroError, UnsupportedError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.runtime.device.executor import DeviceExecutor
from lightning_hetero.runtime.lanes import Device, EmulatedDevice
from lightning_hetero.runtime.lanes.cuda_device import CudaDevice
from lightning_hetero.runtime.placement import SessionOptions, StepRules
from lightning_hetero.runtime.session import Session
from lightning_hetero.store.options import EngineOptions
from lightning_hetero.store.partition import BlockCls
from lightning_hetero.strategies.autoplan import Autoplan
from lightning_hetero.strategies.checkpoints import Checkpoints
from lightning_hetero.strategies.choices import check_keeping, count, drift, one_of, planner, planner_name, steps
from lightning_hetero.strategies.devices import chosen, move_rest, optimizers_to_host
from lightning_hetero.strategies.machine import Machine
from lightning_hetero.strategies.recovery import Recovery
from lightning_hetero.strategies.reports import Reports
from lightning_hetero.strategies.resume import load_buffers
from lightning_hetero.strategies.rules import step_rules
from lightning_hetero.strategies.steps import Steps
from lightning_hetero.strategies.training_state import TrainingState
from lightning_hetero.strategies.verdicts import Verdicts
from lightning_hetero.strategies.verification import Verifier
from lightning_hetero.units import parse_bytes

log = logging.getLogger(__name__)


class HeteroOffload(Steps, Checkpoints, Reports):
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
        device_memory: Memory of the GPU, or of the emulated device, for all of training. Default: what is free there.
        device: An emulated device with memory of its own, to try plans for accelerators without one.
        disk_path: A directory for the disk tier, private to this run. Default: a temporary one under the Trainer's root directory.
        disk_capacity: Most bytes on disk.
        allow_tmpfs: Accept a ``disk_path`` in memory.
        allow_rotational: Accept a ``disk_path`` on a rotating disk.
        io_backend: ``"auto"``, ``"io_uring"`` or ``"pool"``.
        io_threads: Threads of the ``"pool"`` back end.
        update_threads: Threads that run updates; default half of the processors that the process may use.
        durability: What a committed step survives: ``"process"`` (``kill -9``), ``"power"`` (a crash of the system), ``"none"``.
        keep_every: Of a run that keeps its steps, keep one of so many: the others cost nothing, and at a crash as many are lost.
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
        keep_every: int = 1,
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
        autoplan = None
        if (name := planner_name(plan)) is not None:
            autoplan = Autoplan(name, Machine(hardware_profile).profile, drift=drift(replan_drift))
        options = SessionOptions(
            plans=(planner(plan),) if autoplan is None else autoplan.provisional(on_device=device is not None),
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
            keep_every=count("keep_every", keep_every, most=10**6),
            poison=os.environ.get("LIGHTNING_HETERO_POISON") == "1",
            engine=EngineOptions(
                io_backend=one_of("io_backend", io_backend, ("auto", "io_uring", "pool")),
                io_threads=count("io_threads", io_threads),
                update_threads=0 if update_threads is None else count("update_threads", update_threads),
                durability=one_of("durability", durability, ("none", "process", "power")),
                verify_digests=verify_digests,
                emulated_bytes_per_s=0.0 if device is None else device.disk_bytes_per_s or 0.0,
            ),
        )
        check_keeping(options, link_checkpoints=link_checkpoints)
        super().__init__(options, autoplan, "cpu", accelerator, checkpoint_io, precision_plugin)
        self._device = device
        self._verify = steps("verify", verify)
        self._weights = weights
        self._link_checkpoints = link_checkpoints
        self._failed = False

    # ---- setup ------------------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Finds the device that the fit computes on; refuses what there are no lanes for, and several of them."""
        module = self.lightning_module
        assert module is not None
        self._root_device = chosen(module.trainer, self.accelerator, self.strategy_name)
        super().setup_environment()
        device: Device | None = self._device
        if self._root_device.type != "cpu":
            if device is not None:
                raise ConfigError(
                    f"device={device!r} is an emulated device, made of the host's memory, but the Trainer computes on "
                    f'{self._root_device}. Pass accelerator="cpu", or leave device out.'
                )
            device = CudaDevice.of(self._root_device, self.options.device_memory)
            self._root_device = device.device
            if self._verify:
                raise UnsupportedError(
                    f"verify={self._verify} repeats steps on the CPU, whose bits are others than those of {self._root_device}. "
                    f'Verify with accelerator="cpu"; a device=EmulatedDevice(...) runs the same plans there.'
                )
        plans = self.options.plans if self.autoplan is None else self.autoplan.provisional(on_device=device is not None)
        self.options = replace(self.options, device=device, plans=plans)
        if self.session is not None:
            self.session.options = self.options

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
        if self.root_device.type != "cpu":
            move_rest(self.lightning_module, self.root_device, self.namespace)
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
        device = torch.device("meta" if empty_init else "cpu")  # what the plan puts on another device goes there in `setup`
        with device, self.precision_plugin.tensor_init_context():
            yield

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
        if self.root_device.type != "cpu" and self.lightning_module is not None:
            move_rest(self.lightning_module, torch.device("cpu"), self.namespace)
            optimizers_to_host(self.optimizers)
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

    def __getstate__(self) -> dict[str, Any]:
        absent = dict.fromkeys(("session", "_recovery", "_imported", "_verifier"))
        return {**super().__getstate__(), **absent}
