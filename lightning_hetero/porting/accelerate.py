"""accelerate's configuration file, and the arguments of its ``Accelerator``, as ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from lightning_hetero.errors import ConfigError
from lightning_hetero.porting import deepspeed, fsdp
from lightning_hetero.porting.expressions import is_call, parse_call
from lightning_hetero.porting.settings import NoteKind, Ported, Porting, flat

EXAMPLE = "a YAML file, or \"Accelerator(mixed_precision='bf16', gradient_accumulation_steps=4)\""

_PROCESSES = "the Trainer sets up its processes, and needs no launcher."
YOURS = {
    "log_with": "pass Trainer(logger=...).",
    "project_dir": "pass Trainer(default_root_dir=...).",
    "project_config": "pass Trainer(default_root_dir=...).",
    "dataloader_config": "the DataLoader is used as it is.",
    "kwargs_handlers": "the handlers' options are those of the Trainer.",
    "dynamo_config.*": "call torch.compile on your modules.",
    "dynamo_backend": "call torch.compile on your modules.",
    "dynamo_plugin": "call torch.compile on your modules.",
    "gradient_accumulation_plugin": "pass Trainer(accumulate_grad_batches=...).",
    "deepspeed_plugin": "run from-deepspeed with its configuration file.",
    "deepspeed_plugins": "run from-deepspeed with its configuration file.",
    "fsdp_plugin": "run from-fsdp with its arguments.",
    "deepspeed_config.deepspeed_moe_layer_cls_names": "block_cls names the modules that are moved as one.",
    "megatron_lm_config.*": "HeteroParallelStrategy(plan=...) runs pipelines and tensor parallelism of a cluster plan.",
    "megatron_lm_plugin": "HeteroParallelStrategy(plan=...) runs pipelines and tensor parallelism of a cluster plan.",
    "parallelism_config.*": "HeteroParallelStrategy(plan=...) runs pipelines and tensor parallelism of a cluster plan.",
    "parallelism_config": "HeteroParallelStrategy(plan=...) runs pipelines and tensor parallelism of a cluster plan.",
    "torch_tp_plugin": "HeteroParallelStrategy(plan=...) runs tensor parallelism of a cluster plan.",
}
NONE = {
    "num_processes": "devices=1 is one process. With devices=N, N processes of one machine hold one model together.",
    "deepspeed_config.zero3_init_flag": "build the model in configure_model, or on the meta device.",
    "deepspeed_config.zero3_save_16bit_model": (
        "checkpoints always have all weights. export_weights(module, path, dtype=torch.bfloat16) writes 16-bit safetensors."
    ),
    "device_placement": "the Trainer moves batches.",
    "split_batches": "each process gets whole batches.",
    "rng_types": "each process has generators of its own.",
    "step_scheduler_with_optimizer": "schedulers step as configure_optimizers says.",
    "fp8_config.*": 'there is no fp8; use precision="bf16-mixed".',
    "ipex_config.*": "nothing of it is used.",
    "debug": "shapes are not compared; ranks that use other blocks than the rest end with an error.",
}
_LAUNCHING = (
    "compute_environment", "distributed_type", "downcast_bf16", "enable_cpu_affinity", "gpu_ids", "machine_rank",
    "main_process_ip", "main_process_port", "main_training_function", "num_machines", "rdzv_backend", "same_network",
    "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone", "tpu_vm", "commands", "command_file",
    "mpirun_config.*", "deepspeed_config.deepspeed_multinode_launcher", "deepspeed_config.deepspeed_hostfile",
    "deepspeed_config.deepspeed_inclusion_filter", "deepspeed_config.deepspeed_exclusion_filter",
)  # fmt: skip
NONE |= dict.fromkeys(_LAUNCHING, _PROCESSES)
KNOWN = ("mixed_precision", "gradient_accumulation_steps", "use_cpu", "cpu", "deepspeed_config.deepspeed_config_file")

# accelerate's keys, by those of DeepSpeed.
_DEEPSPEED = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
}
# accelerate's keys without "fsdp_", by those of FSDP.
_FSDP = {
    "offload_params": "cpu_offload",
    "transformer_layer_cls_to_wrap": "wrapped",
    "backward_prefetch_policy": "backward_prefetch",
}


def from_accelerate(source: str) -> Ported:
    """Ports a configuration.

    Args:
        source: A YAML (or JSON) file that ``accelerate config`` has written, or a call of
            ``Accelerator``.

    Raises:
        ConfigError: It is neither, or a value has a wrong type.
    """
    if is_call(source):
        name, arguments = parse_call(source, allowed=EXAMPLE)
        if name != "Accelerator":
            raise ConfigError(f"{source!r} calls {name}. Allowed: {EXAMPLE}.")
        return _ported(Porting(source=source, settings=arguments))
    path = Path(source)
    try:
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{source!r} cannot be read: {error.strerror}. Allowed: {EXAMPLE}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source!r} is not YAML: {error}.") from error
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source!r} is a YAML {type(table).__name__}; accelerate's configuration is a mapping.")
    settings = {key: value for key, value in flat(table).items() if value is not None}
    return _with_engine(Porting(source=source, settings=settings), folder=path.parent)


def _with_engine(porting: Porting, *, folder: Path) -> Ported:
    """The settings of accelerate, over those of the engine that it starts."""
    kind, mixed = porting.settings.get("distributed_type"), str(porting.settings.get("mixed_precision", "no"))
    if kind == "DEEPSPEED":
        return _merged(_deepspeed(porting, folder, mixed), _ported(porting))
    if kind == "FSDP":
        return _merged(_fsdp(porting, mixed), _ported(porting))
    return _ported(porting)


def _deepspeed(porting: Porting, folder: Path, mixed: str) -> Ported:
    porting.settings.pop("mixed_precision", None)
    settings: dict[str, object] = {}
    shown: dict[str, str] = {}
    file = porting.settings.pop("deepspeed_config.deepspeed_config_file", None)
    if file is not None:
        path = Path(str(file))
        settings = flat(deepspeed.read(path if path.exists() or path.is_absolute() else folder / path))
    for key, name in _DEEPSPEED.items():
        value = porting.settings.pop(f"deepspeed_config.{key}", None)
        if value is not None and value != "none":
            settings[name] = value
            shown[name] = f"deepspeed_config.{key}"
    for key, dtype in (("bf16.enabled", "bf16"), ("fp16.enabled", "fp16")):
        if settings.get(key, "auto") == "auto":
            settings[key] = mixed == dtype
    return deepspeed.ported(porting.source, settings, shown=shown)


def _fsdp(porting: Porting, mixed: str) -> Ported:
    porting.settings.pop("mixed_precision", None)
    settings: dict[str, object] = {}
    shown: dict[str, str] = {}
    for key in porting.below("fsdp_config."):
        short = key.removeprefix("fsdp_")
        name = _FSDP.get(short, short)
        settings[name] = porting.settings.pop(f"fsdp_config.{key}")
        shown[name] = f"fsdp_config.{key}"
    if mixed in ("bf16", "fp16"):
        settings["mixed_precision"] = mixed
    return fsdp.ported(porting.source, settings, shown=shown)


def _ported(porting: Porting) -> Ported:
    mixed = porting.text("mixed_precision", "no")
    precisions = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
    if mixed in precisions:
        porting.trainer["precision"] = precisions[mixed]
    elif mixed == "fp8":
        porting.note("mixed_precision", NoteKind.NONE, 'there is no fp8; use precision="bf16-mixed".')
    elif mixed != "no":
        raise ConfigError(f"{porting.source}: mixed_precision is {mixed!r}; allowed: no, fp16, bf16, fp8.")
    steps = porting.count("gradient_accumulation_steps")
    if steps and steps > 1:
        porting.trainer["accumulate_grad_batches"] = steps
    if porting.flag("use_cpu") | porting.flag("cpu"):
        porting.trainer["accelerator"] = "cpu"
    if porting.settings.get("num_processes") in (0, 1):
        del porting.settings["num_processes"]
    return porting.ported(YOURS, NONE, KNOWN)


def _merged(engine: Ported, ours: Ported) -> Ported:
    return replace(
        engine,
        trainer={**ours.trainer, **engine.trainer},
        strategy={**ours.strategy, **engine.strategy},
        notes=(*engine.notes, *ours.notes),
    )
