"""Lightning's lifecycle around a runtime session, for a strategy of one process or of one among several."""

from __future__ import annotations

import importlib
import logging
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from lightning_hetero import callbacks
from lightning_hetero.convert.importing import ModelWeights
from lightning_hetero.errors import ConfigError, HeteroError
from lightning_hetero.runtime.construction import Construction
from lightning_hetero.runtime.lanes import Device
from lightning_hetero.runtime.lanes.cuda_device import CudaDevice
from lightning_hetero.runtime.options import StepRules, host_budget
from lightning_hetero.runtime.session import Session
from lightning_hetero.store.format.earlier_runs import make_way
from lightning_hetero.strategies.changes import Changes
from lightning_hetero.strategies.checkpoints import local_root
from lightning_hetero.strategies.devices import move_rest, optimizers_to_host
from lightning_hetero.strategies.recovery import Recovery
from lightning_hetero.strategies.reports import Reports
from lightning_hetero.strategies.resume import load_buffers
from lightning_hetero.strategies.rules import step_rules
from lightning_hetero.strategies.steps import Steps
from lightning_hetero.strategies.training_state import TrainingState
from lightning_hetero.strategies.verdicts import Verdicts
from lightning_hetero.strategies.verification import Verifier, reference_bytes

log = logging.getLogger(__name__)


class Lifecycle(Steps, Reports):
    """Places the model on its tiers as Lightning sets up, and gives it back at the end.

    Beside it a class says how many processes there are, and on which device this one computes.
    """

    _repeats_steps = True  # from their first batch, where a device's memory turns out to be too small

    # ---- setup ------------------------------------------------------------------------------------------------------------

    def _use_device(self, device: torch.device) -> torch.device:
        """Makes ready for the device that the fit computes on, which is given back with its number.

        Raises:
            ConfigError: An emulated device was asked for too.
        """
        lanes: Device | None = self._choices.device
        if device.type != "cpu":
            if lanes is not None:
                raise ConfigError(
                    f"device={lanes!r} is an emulated device, made of the host's memory, but the Trainer computes on "
                    f'{device}. Pass accelerator="cpu", or leave device out.'
                )
            lanes = CudaDevice.of(device, self.options.device_memory)
            device = lanes.device
        plans = self.options.plans if self.autoplan is None else self.autoplan.provisional(on_device=lanes is not None)
        self.options = replace(self.options, device=lanes, plans=plans)
        if self.session is not None:
            self.session.options = self.options
        return device

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
                session.make_way()
                session.unpark()
                self._leave_room_for_reference()
        else:
            self._drop_session()
            if fitting and not resuming and self.options.disk_path is not None:
                make_way(self.options.disk_path.absolute(), new_run=self.options.new_run)
            with nullcontext() if self._built is None else self._built.observed():
                self.model = self.precision_plugin.convert_module(self.model)
            if fitting:
                self._leave_room_for_reference()
            self.session = session = Session(self.lightning_module, self.options, self._content(), self._built)
        rules, changes, optimizers = StepRules(), None, None
        self._move_rest()  # before optimizers are made, as plain Lightning does it
        if fitting:
            self.setup_optimizers(trainer)
            optimizers = session.cut(self.optimizers)
            changes = Changes(self.lightning_module, optimizers, self._resumed, self.lr_scheduler_configs)
            changes.check()
            changes.to_model()
            rules = self._rules(trainer)
        self.setup_precision_plugin()
        root = local_root(trainer)
        verify = self._choices.verify
        device = self.root_device if isinstance(self.options.device, CudaDevice) else None
        self._verifier = Verifier(self.lightning_module, verify, device=device) if fitting and verify else None
        if fitting and self.autoplan is not None:
            self.autoplan.fit_begins(session)
            self._callback = callbacks.make(self.namespace, self.autoplan)
            trainer.callbacks.insert(0, self._callback)
        with changes.in_groups() if changes is not None else nullcontext():
            session.start(optimizers, rules, default_root=root, resume=resuming)
        if changes is not None and session.keeps_steps:
            self._state = TrainingState(trainer, self.namespace, changes)
            self._state.attach(self._batch_ends)
        if resuming and self._resumed is not None:
            load_buffers(self.lightning_module, self._resumed["buffers"])
        self._built = None
        self._move_rest()  # what had no content before
        if rules.speculates:
            self._verdicts = Verdicts(self.precision_plugin, self._running)
        self._imported = weakref.ref(self.lightning_module)
        self._recovery = None
        if fitting and self._repeats_steps and session.executor is not None and session.executor.device is not None:
            self._recovery = Recovery(
                session, namespace=self.namespace, module=self.lightning_module, forward=self._forward, backward=self._backward,
                on_demotion=self._abandon_profile,
            )  # fmt: skip
        if self._waiting_checkpoint is not None:
            (checkpoint, strict), self._waiting_checkpoint = self._waiting_checkpoint, None
            self.load_model_state_dict(checkpoint, strict)

    def _leave_room_for_reference(self) -> None:
        """Of a GPU, plans have what the reference of ``verify`` leaves them."""
        device = self.options.device
        if self._choices.verify and isinstance(device, CudaDevice) and self.lightning_module is not None:
            left = device.without(reference_bytes(self.lightning_module, apart=True), f"verify={self._choices.verify}")
            self.options = replace(self.options, device=left)
            if self.session is not None:
                self.session.options = self.options

    def _move_rest(self) -> None:
        if self.options.device is not None and self.lightning_module is not None:
            move_rest(self.lightning_module, self.root_device, self.namespace)

    def _rules(self, trainer: Any) -> StepRules:
        """How the fit uses gradients."""
        return step_rules(trainer, self.lightning_module, self.precision_plugin, self.namespace)

    def _content(self) -> ModelWeights | None:
        """What the model's first setup reads from files; later ones go on with what it has become."""
        module = self.lightning_module
        weights = self._choices.weights
        if weights is None or module is None or (self._imported is not None and self._imported() is module):
            return None
        return ModelWeights(module, weights, strict=module.strict_loading)

    def model_to_device(self) -> None:
        """The session has placed the model."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``empty_init`` parameters have no memory until ``setup`` initializes them block by block.

        Else those that take more than half of the budget wait in a file until ``setup`` places them.
        """
        device = torch.device("meta" if empty_init else "cpu")  # what the plan puts on another device goes there in `setup`
        if self._built is None:
            self._built = Construction(host_budget(self.options, 0) // 2, self.landing)
        with device, self.precision_plugin.tensor_init_context(), self._built.observed():
            yield

    # ---- teardown -----------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Remembers that teardown must not count on the engine."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Gives the model back, or leaves it on disk where it does not fit."""
        self._last_plan = self.offload_plan
        self.drop_links()
        if self._state is not None:
            self._state.detach()
        self._state = self._resumed = None
        self._evaluated.close()
        if self._verdicts is not None:
            self._verdicts.close()
            self._verdicts = None
        trainer: Any = None if self.lightning_module is None else self.lightning_module._trainer
        steps = None if self.session is None else self.session.steps
        if trainer is not None and not self._failed and steps is not None and steps.left_out_last:
            log.warning(
                "Training has ended with step %d, which is not kept (keep_every=%d): it was stopped when the batch after that step "
                "had begun. A resume goes on from the step that was kept before it. To lose none, pass keep_every=1, or save a "
                "checkpoint.", trainer.global_step, self.options.keep_every,
            )  # fmt: skip
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

    def __getstate__(self) -> dict[str, Any]:
        absent = dict.fromkeys(("session", "_recovery", "_imported", "_verifier", "_built"))
        return {**super().__getstate__(), **absent, "_evaluated": ExitStack()}
