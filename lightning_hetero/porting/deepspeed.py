"""DeepSpeed's configuration, and Lightning's ``DeepSpeedStrategy``, as ours.

Optimizers and schedules are those that DeepSpeed 0.19 makes of the configuration
(``runtime/engine.py``, ``runtime/lr_schedules.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lightning_hetero.errors import ConfigError, did_you_mean
from lightning_hetero.porting import deepspeed_keys as keys
from lightning_hetero.porting.expressions import is_call, parse_call
from lightning_hetero.porting.settings import AUTO, LrSchedule, NoteKind, Optimizer, Ported, Porting, flat

EXAMPLE = 'a JSON file, "deepspeed_stage_3_offload", or "DeepSpeedStrategy(stage=3, offload_optimizer=True)"'


def from_deepspeed(source: str) -> Ported:
    """Ports a configuration.

    Args:
        source: A JSON file; the call of Lightning's ``DeepSpeedStrategy``; or the name of it in
            Lightning's registry.

    Raises:
        ConfigError: It is none of these, or a value has a wrong type.
    """
    if is_call(source):
        name, arguments = parse_call(source, allowed=EXAMPLE)
        if name != "DeepSpeedStrategy":
            raise ConfigError(f"{source!r} calls {name}. Allowed: {EXAMPLE}.")
        return _from_strategy(source, arguments)
    if source in _REGISTERED:
        return _from_strategy(source, dict(_REGISTERED[source]))
    if source.startswith("deepspeed"):
        raise ConfigError(f"{source!r} is no strategy of Lightning.{did_you_mean(source, _REGISTERED)} Allowed: {EXAMPLE}.")
    return ported(source, read(Path(source)))


def read(path: Path) -> Mapping[str, object]:
    """A configuration file.

    Raises:
        ConfigError: It cannot be read, or is no JSON object.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}. Allowed: {EXAMPLE}.") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {error}. Comments and trailing commas are not allowed.") from error
    if not isinstance(table, Mapping):
        raise ConfigError(f"{str(path)!r} is a JSON {type(table).__name__}; DeepSpeed's configuration is an object.")
    return table


def ported(source: str, table: Mapping[str, object], *, shown: Mapping[str, str] | None = None) -> Ported:
    """Ports a configuration that has been read.

    Args:
        source: For people.
        table: The configuration.
        shown: Other names of some of its keys, under which the user knows them.

    Raises:
        ConfigError: A value has a wrong type.
    """
    porting = Porting(source=source, settings=flat(table), autos=keys.AUTOS, shown=shown or {})
    for section in _SWITCHED:
        _leave_out_if_off(porting, section)
    _precision(porting)
    _batches(porting)
    _tiers(porting)
    _loop(porting)
    _optimizer(porting)
    _schedule(porting)
    return porting.ported(keys.YOURS, keys.NONE, keys.KNOWN)


_SWITCHED = (
    "fp16", "bf16", "amp", "torch_autocast", "flops_profiler", "autotuning", "comms_logger", "curriculum_learning",
    "data_efficiency", "tensorboard", "wandb", "comet", "csv_monitor", "elasticity", "nebula", "hybrid_engine", "timers",
    "progressive_layer_drop", "eigenvalue", "quantize_training",
)  # fmt: skip


def _leave_out_if_off(porting: Porting, section: str) -> None:
    """A section that is switched off says nothing."""
    if porting.settings.get(f"{section}.enabled") is False:
        for key in porting.below(f"{section}."):
            del porting.settings[f"{section}.{key}"]


def _precision(porting: Porting) -> None:
    dtype = porting.text("torch_autocast.dtype", "bfloat16").removeprefix("torch.")
    precisions = {
        "bf16": "bf16-true",
        "fp16": "16-mixed",
        "torch_autocast": "bf16-mixed" if dtype.startswith("bf") else "16-mixed",
        "amp": "16-mixed",
    }
    on = [section for section in precisions if porting.flag(f"{section}.enabled")]
    if on:
        porting.trainer["precision"] = precisions[on[0]]
    if on[:1] == ["fp16"]:
        why = "weights are fp32, are cast where they are used, and the loss is scaled: 2 bytes per parameter more."
        porting.note("fp16.enabled", NoteKind.NONE, why)
    for section in on[1:]:
        porting.note(f"{section}.enabled", NoteKind.NONE, f"{on[0]} is enabled too, and there is one precision.")


def _batches(porting: Porting) -> None:
    """The batch of an optimizer step stays as large as it was on all devices together."""
    whole, micro = porting.count("train_batch_size"), porting.count("train_micro_batch_size_per_gpu")
    accumulated = porting.count("gradient_accumulation_steps")
    if whole and not micro:
        micro = max(whole // (accumulated or 1), 1)
    if whole and micro:
        if whole % (micro * (accumulated or 1)):
            raise ConfigError(
                f"{porting.source}: train_batch_size {whole} is no multiple of {micro} samples in {accumulated or 1} accumulated "
                f"batches. DeepSpeed refuses it too; change one of them."
            )
        processes = whole // micro // (accumulated or 1)
        if accumulated and processes > 1:
            why = f"{processes} processes shared it; one process accumulates {whole // micro} batches for the same step."
            porting.note("train_batch_size", NoteKind.NONE, why)
        accumulated = whole // micro
    if accumulated and accumulated > 1:
        porting.trainer["accumulate_grad_batches"] = accumulated
    if micro:
        porting.note("train_micro_batch_size_per_gpu", NoteKind.YOURS, f"pass batch_size={micro} to your DataLoader.")


def _tiers(porting: Porting) -> None:
    """Offloading needs no word, because a planner decides it; but the place on disk does."""
    section = "zero_optimization"
    places = [(porting.text(f"{section}.{what}.device"), porting.text(f"{section}.{what}.nvme_path")) for what in _OFFLOADED]
    for key in ("cpu_offload", "cpu_offload_param", "cpu_offload_params"):  # as DeepSpeed once called it
        porting.flag(f"{section}.{key}")
    paths = [path for device, path in places if device == "nvme" and path]
    if paths:
        porting.strategy["disk_path"] = str(Path(paths[0]) / "lightning-hetero")
        kept = 'a run with a disk_path keeps every step and resumes after a crash; durability="none" switches that off.'
        porting.note(f"{section}.{_OFFLOADED[0]}.nvme_path", NoteKind.NONE, kept)
    if len(set(paths)) > 1:
        why = f"weights and state share one disk_path, {porting.strategy['disk_path']!r}."
        porting.note(f"{section}.{_OFFLOADED[1]}.nvme_path", NoteKind.NONE, why)


_OFFLOADED = ("offload_optimizer", "offload_param")


def _loop(porting: Porting) -> None:
    if clip := porting.number("gradient_clipping"):
        porting.trainer["gradient_clip_val"] = clip
    every = porting.number("steps_per_print")
    if every and every < 10**6:  # more is a way to say never
        porting.trainer["log_every_n_steps"] = max(int(every), 1)
    if porting.flag("wall_clock_breakdown"):
        porting.strategy["trace"] = True
        porting.note("wall_clock_breakdown", NoteKind.YOURS, "print(trainer.strategy.stall_report()) after the fit.")


# ---- optimizers ----------------------------------------------------------------------------------

_PARAMS = "optimizer.params."
# torch.optim's, by DeepSpeed's lower-case name where it has one of its own.
_TORCH = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    "SparseAdam",
)  # fmt: skip
_NOT_IN_TORCH = ("Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW", "MuSGD", "Lion", "Muon")
_OWN = {name.lower(): name for name in ("Adam", "AdamW", "Adagrad", *_NOT_IN_TORCH)}


def _optimizer(porting: Porting) -> None:
    given = porting.text("optimizer.type")
    if not given:
        return
    name = _OWN.get(given.lower(), given)
    if name in ("Adam", "AdamW"):
        porting.optimizer = _adam(porting, name)
    elif name in _TORCH:
        arguments = {key: _number_or_pair(porting, key) for key in porting.below(_PARAMS)}
        if name == "Adagrad":
            arguments = {"eps": 1e-10, "lr": 1e-2, "weight_decay": 0.0} | arguments
            arguments.pop("fp32_optimizer_states", None)
        porting.optimizer = Optimizer(class_path=f"torch.optim.{name}", arguments=arguments)
        if name in ("LBFGS", "SparseAdam"):
            porting.note(
                "optimizer.type", NoteKind.NONE, f"{name} cannot be divided into blocks, and is refused. Choose another one."
            )
    elif name in _NOT_IN_TORCH:
        porting.optimizer = _stand_in(porting, name)
    else:
        hint = did_you_mean(given, (*_TORCH, *_NOT_IN_TORCH))
        raise ConfigError(f"{porting.source}: optimizer.type is {given!r}; allowed: an optimizer of DeepSpeed or torch.{hint}")


def _adam(porting: Porting, name: str) -> Optimizer:
    """DeepSpeed's Adam is AdamW unless ``adam_w_mode`` is false, and decays by 0 unless told."""
    decoupled = porting.flag(f"{_PARAMS}adam_w_mode", True) or name == "AdamW"
    by_torch = porting.flag(f"{_PARAMS}torch_adam")
    defaults: dict[str, object] = {} if by_torch else {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    found = {key: _number_or_pair(porting, key) for key in ("lr", "betas", "eps", "weight_decay", "amsgrad") if _has(porting, key)}
    for key, why in _NOT_OF_ADAM.items():
        if _has(porting, key):
            value = porting.take(_PARAMS + key)
            if key != "bias_correction" or value is False:
                porting.note(_PARAMS + key, NoteKind.NONE, why)
    return Optimizer(class_path="torch.optim.AdamW" if decoupled else "torch.optim.Adam", arguments=defaults | found)


_NOT_OF_ADAM = {
    "bias_correction": "torch's Adam always corrects the bias.",
    "fp32_optimizer_states": "optimizer state is fp32.",
    "set_grad_none": "gradients are freed when an update has used them.",
    "fused": "updates are native, with the bits of fused=True.",
    "foreach": "updates are native, with the bits of fused=True.",
}


def _stand_in(porting: Porting, name: str) -> Optimizer:
    """AdamW with the learning rate of an optimizer that torch lacks."""
    found = {"lr": _number_or_pair(porting, "lr")} if _has(porting, "lr") else {}
    why = (
        f"torch has no {name}, so AdamW stands in its place. Make yours in configure_optimizers; hetero_blockwise = True in its "
        f"class says that it may run block by block."
    )
    if name in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb"):
        why = f"{name} compresses what processes send; nothing is compressed here. AdamW stands in its place."
    porting.note("optimizer.type", NoteKind.YOURS, why)
    for key in porting.below(_PARAMS):
        del porting.settings[_PARAMS + key]
        porting.note(_PARAMS + key, NoteKind.YOURS, f"it is an argument of {name}.")
    return Optimizer(class_path="torch.optim.AdamW", arguments=found, stands_for=name)


def _has(porting: Porting, key: str) -> bool:
    return _PARAMS + key in porting.settings


def _number_or_pair(porting: Porting, key: str) -> object:
    value = porting.take(_PARAMS + key)
    values = value if isinstance(value, list) else [value]
    if not key.isidentifier() or not all(isinstance(v, int | float | None) and v == v for v in values):
        raise ConfigError(f"{porting.source}: {_PARAMS}{key} is {value!r}; allowed: numbers, true, false.")
    return tuple(values) if isinstance(value, list) else value


# ---- schedules -----------------------------------------------------------------------------------

_STEPS = "scheduler.params."
_WARMUPS = {
    "log": "math.log(index + 1) / math.log(warmup)",
    "linear": "index / warmup",
}


def _schedule(porting: Porting) -> None:
    """DeepSpeed's first two steps have the same learning rate: it counts from minus one."""
    name = porting.text("scheduler.type")
    if name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        if porting.optimizer is None:
            porting.optimizer = Optimizer(class_path="torch.optim.AdamW", arguments={}, stands_for="your optimizer")
            porting.note("optimizer", NoteKind.YOURS, "the settings name none, so AdamW stands in its place.")
        porting.schedule = _warmup(porting, name, porting.optimizer)
    elif name:
        _other_schedule(porting, name)


def _warmup(porting: Porting, name: str, optimizer: Optimizer) -> LrSchedule:
    is_auto = porting.settings.get(f"{_STEPS}warmup_num_steps") == AUTO
    values = {"warmup": str(max(porting.count(f"{_STEPS}warmup_num_steps") or (0 if is_auto else 1000), 2))}
    if name != "WarmupLR":
        if porting.settings.get(f"{_STEPS}total_num_steps") == AUTO:  # transformers counts them too
            del porting.settings[f"{_STEPS}total_num_steps"]
        total = porting.count(f"{_STEPS}total_num_steps")
        values["total"] = "self.trainer.estimated_stepping_batches" if total is None else str(total)
    porting.take(f"{_STEPS}last_batch_iteration")
    warm = _WARMUPS.get(porting.text(f"{_STEPS}warmup_type", "log"), _WARMUPS["log"])
    if name == "WarmupCosineLR":
        values["least"] = repr(porting.number(f"{_STEPS}warmup_min_ratio", 0.0))
        values["last"] = repr(porting.number(f"{_STEPS}cos_min_ratio", 1e-4))
        body: tuple[str, ...] = (
            "if step == 0:",
            "    return 0.0",
            "index = step - 1",
            "if index < warmup:",
            f"    return least + (1 - least) * {warm}",
            "progress = min(1.0, (index - warmup + 1) / max(1, total - warmup))",
            "return max(0.0, last + (1 - last) * (1 + math.cos(math.pi * progress)) / 2)",
        )
        return LrSchedule(name=name, values=values, body=body)
    rate = optimizer.arguments.get("lr", 1e-3)
    own = float(rate) if isinstance(rate, int | float) else 1e-3
    most = porting.number(f"{_STEPS}warmup_max_lr", own if name == "WarmupLR" else 1e-3) or own
    porting.optimizer = replace(optimizer, arguments={"lr": most, **optimizer.arguments} | {"lr": most})
    values["least"] = repr((porting.number(f"{_STEPS}warmup_min_lr", 0.0) or 0.0) / most)
    later = "1.0" if name == "WarmupLR" else "max(0.0, (total - index) / max(1, total - warmup))"
    body = (
        "index = max(step - 1, 0)",
        f"gamma = {warm} if index < warmup else {later}",
        "return least + (1 - least) * gamma",
    )
    return LrSchedule(name=name, values=values, body=body)


def _other_schedule(porting: Porting, name: str) -> None:
    known = {
        "OneCycle": "torch.optim.lr_scheduler.OneCycleLR is near to it; its cycle has another shape. Make it in "
        "configure_optimizers.",
        "LRRangeTest": "Tuner(trainer).lr_find(model) of Lightning searches a learning rate.",
    }
    if name not in known:
        hint = did_you_mean(name, (*known, "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"))
        raise ConfigError(f"{porting.source}: scheduler.type is {name!r}; allowed: a scheduler of DeepSpeed.{hint}")
    porting.note("scheduler.type", NoteKind.YOURS, known[name])
    for key in porting.below(_STEPS):
        del porting.settings[_STEPS + key]
        porting.note(_STEPS + key, NoteKind.YOURS, f"it is an argument of {name}.")


# ---- Lightning's strategy ------------------------------------------------------------------------

# The arguments of DeepSpeedStrategy, by the key of the configuration that they become there.
_ARGUMENTS = {
    "stage": "zero_optimization.stage",
    "sub_group_size": "zero_optimization.sub_group_size",
    "contiguous_gradients": "zero_optimization.contiguous_gradients",
    "overlap_comm": "zero_optimization.overlap_comm",
    "allgather_partitions": "zero_optimization.allgather_partitions",
    "reduce_scatter": "zero_optimization.reduce_scatter",
    "allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "params_buffer_count": "zero_optimization.offload_param.buffer_count",
    "params_buffer_size": "zero_optimization.offload_param.buffer_size",
    "max_in_cpu": "zero_optimization.offload_param.max_in_cpu",
    "optimizer_buffer_count": "zero_optimization.offload_optimizer.buffer_count",
    "pin_memory": "zero_optimization.offload_optimizer.pin_memory",
    "block_size": "aio.block_size",
    "queue_depth": "aio.queue_depth",
    "single_submit": "aio.single_submit",
    "overlap_events": "aio.overlap_events",
    "thread_count": "aio.intra_op_parallelism",
    "loss_scale": "fp16.loss_scale",
    "initial_scale_power": "fp16.initial_scale_power",
    "loss_scale_window": "fp16.loss_scale_window",
    "hysteresis": "fp16.hysteresis",
    "min_loss_scale": "fp16.min_loss_scale",
    "partition_activations": "activation_checkpointing.partition_activations",
    "cpu_checkpointing": "activation_checkpointing.cpu_checkpointing",
    "contiguous_memory_optimization": "activation_checkpointing.contiguous_memory_optimization",
    "synchronize_checkpoint_boundary": "activation_checkpointing.synchronize_checkpoint_boundary",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
}
_PROCESSES = "the Trainer sets up its processes."
_NOT_OF_DEEPSPEED = {
    "accelerator": "pass it to the Trainer.",
    "precision_plugin": "pass plugins to the Trainer.",
    "parallel_devices": _PROCESSES,
    "cluster_environment": _PROCESSES,
    "process_group_backend": _PROCESSES,
    "timeout": _PROCESSES,
    "remote_device": 'weights="folder" places weights directly where the plan has them.',
    "load_full_weights": "checkpoints are Lightning's own files and always have all weights.",
    "logging_level": 'logging.getLogger("lightning_hetero").setLevel(...).',
    "logging_batch_size_per_gpu": "nothing is printed per sample.",
    "zero_optimization": "the plan says what lives where.",
}
_OFFLOAD: dict[str, object] = {"offload_optimizer": True}
_NVME: dict[str, object] = {"offload_optimizer_device": "nvme", "offload_params_device": "nvme"}
_REGISTERED: dict[str, dict[str, object]] = {
    "deepspeed": {},
    "deepspeed_stage_1": {"stage": 1},
    "deepspeed_stage_1_offload": {"stage": 1, **_OFFLOAD},
    "deepspeed_stage_2": {"stage": 2},
    "deepspeed_stage_2_offload": {"stage": 2, **_OFFLOAD},
    "deepspeed_stage_3": {"stage": 3},
    "deepspeed_stage_3_offload": {"stage": 3, **_OFFLOAD, "offload_parameters": True},
    "deepspeed_stage_3_offload_nvme": {"stage": 3, **_OFFLOAD, "offload_parameters": True, **_NVME},
}


def _from_strategy(source: str, arguments: dict[str, object]) -> Ported:
    config = arguments.pop("config", None)
    excluded = arguments.pop("exclude_frozen_parameters", False)
    settings = {_ARGUMENTS[key]: arguments.pop(key) for key in list(arguments) if key in _ARGUMENTS}
    nvme = arguments.pop("nvme_path", "/local_nvme")
    for what, switch, device in (
        ("offload_optimizer", "offload_optimizer", "offload_optimizer_device"),
        ("offload_param", "offload_parameters", "offload_params_device"),
    ):
        place = arguments.pop(device, "cpu")
        if arguments.pop(switch, False):
            settings[f"zero_optimization.{what}.device"] = place
            settings |= {f"zero_optimization.{what}.nvme_path": nvme} if place == "nvme" else {}
    if config is not None:  # Lightning then reads nothing else
        settings = dict(config) if isinstance(config, Mapping) else dict(read(Path(str(config))))
    shown = {key: name for name, key in _ARGUMENTS.items()} if config is None else {}
    shown |= {f"zero_optimization.{what}.nvme_path": "nvme_path" for what in _OFFLOADED} if config is None else {}
    result = ported(source, settings, shown=shown)
    rest = Porting(source=source, settings=arguments)
    notes = rest.ported({}, _NOT_OF_DEEPSPEED, _ARGUMENTS).notes
    strategy = dict(result.strategy) | ({"exclude_frozen_parameters": True} if excluded is True else {})
    return replace(result, strategy=strategy, notes=(*result.notes, *notes))
