"""``Trainer(strategy="hetero_offload")``: its options, in one process on one device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from lightning_hetero.convert.importing import Weights
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.lanes import EmulatedDevice
from lightning_hetero.store.partition import BlockCls
from lightning_hetero.strategies import offload_ranks
from lightning_hetero.strategies import option_checks as checked
from lightning_hetero.strategies.console import speak
from lightning_hetero.strategies.devices import chosen
from lightning_hetero.strategies.namespaces import Lightning, lightning_of
from lightning_hetero.strategies.offload import OffloadRun
from lightning_hetero.strategies.offloading import Offloading
from lightning_hetero.strategies.option_checks import DiskPath
from lightning_hetero.strategies.precision import compute_on

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class _Base(Offloading, SingleDeviceStrategy): ...
else:
    _Base = Offloading


class HeteroOffload(_Base):
    """Trains models that do not fit memory.

    Weights and optimizer state are on host or disk, and native threads run the updates.

    A plan changes speed and memory, never a bit of the result. In ``32-true`` the result is that of
    ``torch.optim.AdamW(fused=True)`` under plain Lightning. 16-bit weights have fp32 masters.

    Args:
        plan: ``"auto"`` (profiles the first batches, then runs the ``"holistic"`` planner), the
            name of another planner, ``"resident"`` (nothing offloaded), ``"host"`` (state in host
            memory, updates overlap with backward), ``"disk"`` (state and the weights of repeated
            blocks on disk), the path of a plan file, or a :class:`~lightning_hetero.Plan`.
        block_cls: Classes (or their names) of the blocks that are moved as one, such as
            ``"LlamaDecoderLayer"``. Default: Hugging Face's ``_no_split_modules``, otherwise
            modules that repeat.
        weights: A safetensors file or a Hugging Face directory with the content of a model on the
            meta device. It is read block by block to the tiers of the plan. Or several, by the name
            of the module that each is for, such as ``{"model": path}``.
        host_memory: Host memory for weights, gradients, optimizer state and staging, such as
            ``"16GiB"``. Activations come on top. Default: free memory, at most what a control group
            leaves; it includes activations, once a batch has been profiled. If a GPU shares this
            memory, it is for both.
        device_memory: Memory of the GPU, or of the emulated device, for all of training. Default:
            what is free there.
        device: An emulated device with memory of its own, to try plans for accelerators without
            one.
        disk_path: A directory for the disk tier, private to this run, or a list of one per disk.
            Default: a temporary one under the Trainer's root directory.
        disk_capacity: Maximum of bytes on all disks together.
        new_run: Start anew although ``disk_path`` holds kept steps of an earlier run. Its store is
            renamed, never removed. Without this such a fit is refused, unless ``ckpt_path`` is that
            store.
        allow_tmpfs: Accept a ``disk_path`` in memory.
        allow_rotational: Accept a ``disk_path`` on a rotating disk.
        io_backend: ``"auto"``, ``"io_uring"`` or ``"pool"``.
        io_threads: Threads of the ``"pool"`` back end.
        update_threads: Threads that run updates. Default: half of the processors that the process
            may use.
        durability: What a committed step survives: ``"process"`` (``kill -9``), ``"power"`` (a
            crash of the system), ``"none"``.
        keep_every: Keep every N-th step, and those before a validation or at the end of an epoch.
            The others cost nothing; a crash loses at most N steps.
        verify: Compute this many optimizer steps again on a copy of the model in memory, and
            compare all bits. A difference raises
            :class:`~lightning_hetero.errors.VerificationError`.
        verify_digests: Check digests of all data read from disk, not only in a resume.
        link_checkpoints: Checkpoints of a run that keeps its steps are directories of hard links to
            the store's last step. They take neither time nor space until it is written over, and
            ``ckpt_path`` accepts them like a store.
        exclude_frozen_parameters: Checkpoint files have no frozen weights that the model had when
            it was built (or read from ``weights``). To resume from one, or to evaluate it, build
            the model with the same weights; other weights are refused.
        hardware_profile: The planners' description of the machine: a profile or its file. Default:
            the file that the environment variable ``LIGHTNING_HETERO_HARDWARE`` names, otherwise
            micro-benchmarks, which run once per machine.
        replan_drift: Relative change in batch size, budget or step time that triggers a new plan;
            ``None``: no change does.
        chunked_head: Causal language models of transformers compute head and loss in chunks,
            without the logits of a whole batch. Losses differ by roundings from those of the
            unchunked head, and are the same under every plan.
        trace: Record events; see :attr:`trace`.
        timeout: For how long ranks that share a model wait for each other before they end with an
            error. Default: that of Lightning's ``DDPStrategy``, 30 minutes.
    """

    strategy_name = "hetero_offload"
    cluster_environment: ClusterEnvironment | None = None  # Lightning's, which it sets before the devices

    @checked.with_hints
    def __init__(
        self,
        plan: str | os.PathLike[str] | Plan = "auto",
        *,
        block_cls: BlockCls | None = None,
        weights: Weights | None = None,
        host_memory: str | int | None = None,
        device_memory: str | int | None = None,
        device: EmulatedDevice | None = None,
        disk_path: DiskPath | None = None,
        disk_capacity: str | int | None = None,
        new_run: bool = False,
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
        exclude_frozen_parameters: bool = False,
        hardware_profile: str | os.PathLike[str] | HardwareProfile | None = None,
        replan_drift: float | None = checked.REPLAN_DRIFT,
        chunked_head: bool = False,
        trace: bool = False,
        timeout: timedelta | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        choices = checked.choices(
            plan,
            block_cls=block_cls,
            weights=weights,
            host_memory=host_memory,
            device_memory=device_memory,
            device=device,
            disk_path=disk_path,
            disk_capacity=disk_capacity,
            new_run=new_run,
            allow_tmpfs=allow_tmpfs,
            allow_rotational=allow_rotational,
            io_backend=io_backend,
            io_threads=io_threads,
            update_threads=update_threads,
            durability=durability,
            keep_every=keep_every,
            verify=verify,
            verify_digests=verify_digests,
            link_checkpoints=link_checkpoints,
            exclude_frozen_parameters=exclude_frozen_parameters,
            hardware_profile=hardware_profile,
            replan_drift=replan_drift,
            chunked_head=chunked_head,
            trace=trace,
            timeout=timeout,
        )
        super(Offloading, self).__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        self.run = OffloadRun(self, choices)

    def setup_environment(self) -> None:
        """Finds the device that the fit computes on, which must be supported and the only one."""
        self._root_device = chosen(self.run.module.trainer, self.accelerator, self.strategy_name)
        super(Offloading, self).setup_environment()
        speak(lightning_of(self))
        self._root_device = self.run.use_device(self._root_device)
        compute_on(self.precision_plugin, self._root_device, self.run.module.trainer)

    @property
    def parallel_devices(self) -> None:
        """None: it has one device until Lightning says otherwise."""
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device] | None) -> None:
        if devices is not None and len(devices) > 1:
            offload_ranks.join_ranks(self, devices)

    @property
    def plan(self) -> Plan | None:
        """As ``offload_plan``."""
        return self.run.plan


def class_for(lightning: Lightning) -> type[HeteroOffload]:
    """The class for Trainers of a namespace."""
    return lightning.subclass(HeteroOffload, "strategies.SingleDeviceStrategy", name="HeteroOffloadStrategy")
