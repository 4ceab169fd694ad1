"""FSDP's arguments as ours: Lightning's strategies, and torch's own FSDP 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_hetero.errors import ConfigError, did_you_mean
from lightning_hetero.porting.expressions import Expression, is_call, parse_call
from lightning_hetero.porting.settings import NoteKind, Ported, Porting

EXAMPLE = '"fsdp_cpu_offload", or "FSDPStrategy(cpu_offload=True, auto_wrap_policy={Block})"'
_CALLS = ("FSDPStrategy", "ModelParallelStrategy", "FullyShardedDataParallel", "FSDP", "fully_shard")
_REGISTERED: dict[str, dict[str, object]] = {"fsdp": {}, "fsdp_cpu_offload": {"cpu_offload": True}}

_SENT = "devices=1 shards, gathers and reduces nothing. With devices=N, N ranks hold one model together."
_PROCESSES = "the Trainer sets up its processes."
_PLAN = "on a GPU the plan decides block by block what is kept, recomputed or swapped."
_CHECKPOINT = "a checkpoint is one ordinary file, written one tensor at a time. link_checkpoints=True makes links."

YOURS = {
    "accelerator": "pass it to the Trainer.",
    "checkpoint_io": "pass it to HeteroOffloadStrategy.",
    "precision_plugin": "pass plugins to the Trainer.",
    "param_init_fn": "build the model on the meta device; reset_parameters() of each module sets its parameters.",
    "min_num_params": 'block_cls="..." names the classes of modules that are moved as one; by default they are found.',
}
NONE = {
    "module": "the model is that of trainer.fit.",
    "cpu_offload": "the plan says what lives where, and offloads only what does not fit.",
    "offload_policy": "the plan says what lives where, and offloads only what does not fit.",
    "activation_checkpointing": _PLAN,
    "activation_checkpointing_policy": _PLAN,
    "state_dict_type": _CHECKPOINT,
    "state_dict_config": _CHECKPOINT,
    "optim_state_dict_config": _CHECKPOINT,
    "save_distributed_checkpoint": _CHECKPOINT,
    "use_orig_params": "parameters are always the model's own.",
    "ignored_modules": "every parameter has a place; modules that do not repeat stay in memory.",
    "ignored_states": "every parameter has a place; modules that do not repeat stay in memory.",
    "ignored_params": "every parameter has a place; modules that do not repeat stay in memory.",
    "sync_module_states": 'weights="folder" places weights directly where the plan has them.',
    "cpu_ram_efficient_loading": 'weights="folder" places weights directly where the plan has them.',
    "backward_prefetch": "the plan has prefetch_depth, which a planner chooses.",
    "forward_prefetch": "the plan has prefetch_depth, which a planner chooses.",
    "limit_all_gathers": "memory of the device is bounded by device_memory.",
    "tensor_parallel_size": "HeteroParallelStrategy(plan=...) runs tensor parallelism of a cluster plan.",
    "version": "there is one strategy for both.",
}
_SHARDING = (
    "sharding_strategy", "reshard_after_forward", "shard_placement_fn", "device_mesh", "mesh", "data_parallel_size",
    "process_group", "dp_mesh_dims",
)  # fmt: skip
NONE |= dict.fromkeys(_SHARDING, _SENT)
NONE |= dict.fromkeys(("parallel_devices", "cluster_environment", "process_group_backend", "timeout", "device_id"), _PROCESSES)
KNOWN = ("auto_wrap_policy", "mixed_precision", "mp_policy", "wrapped")


def from_fsdp(source: str) -> Ported:
    """Ports the arguments of FSDP.

    Args:
        source: A call of Lightning's ``FSDPStrategy`` or ``ModelParallelStrategy``, or of torch's
            ``FullyShardedDataParallel`` or ``fully_shard``; or a name in Lightning's registry.

    Raises:
        ConfigError: It is none of these, or a value has a wrong type.
    """
    if is_call(source):
        name, arguments = parse_call(source, allowed=EXAMPLE)
        if name not in _CALLS:
            raise ConfigError(f"{source!r} calls {name}; allowed: {', '.join(_CALLS)}.{did_you_mean(name, _CALLS)}")
        return ported(source, arguments)
    if source not in _REGISTERED:
        raise ConfigError(f"{source!r} is no strategy.{did_you_mean(source, _REGISTERED)} Allowed: {EXAMPLE}.")
    return ported(source, dict(_REGISTERED[source]))


def ported(source: str, settings: dict[str, object], *, shown: Mapping[str, str] | None = None) -> Ported:
    """Ports arguments by their names.

    Args:
        source: For people.
        settings: The arguments.
        shown: Other names of some of them, under which the user knows them.

    Raises:
        ConfigError: A value has a wrong type.
    """
    porting = Porting(source=source, settings=settings, shown=shown or {})
    convert(porting)
    return porting.ported(YOURS, NONE, KNOWN)


def convert(porting: Porting) -> None:
    """Takes the arguments that become something here."""
    for key in ("mixed_precision", "mp_policy"):
        if (policy := porting.take(key)) is not None:
            _precision(porting, key, policy)
    policy = porting.take("auto_wrap_policy")
    classes = tuple(porting.text("wrapped").replace(",", " ").split())
    if isinstance(policy, Expression):
        classes = policy.classes
    if classes:
        porting.strategy["block_cls"] = classes[0] if len(classes) == 1 else classes
    elif policy is not None:
        why = "blocks are found by the same rules: modules that transformers names, else classes that repeat."
        porting.note("auto_wrap_policy", NoteKind.NONE, f"{why} block_cls names others.")
    for key in ("cpu_offload", "offload_policy"):
        if not porting.settings.get(key, True):
            porting.note(key, NoteKind.NONE, 'plan="resident" offloads nothing.')
            del porting.settings[key]


def _precision(porting: Porting, key: str, policy: object) -> None:
    """Weights that FSDP casts for compute are autocast's; its own weights stay in fp32."""
    dtype = policy.argument("param_dtype", 0) if isinstance(policy, Expression) else policy
    names = {"bfloat16": "bf16-mixed", "bf16": "bf16-mixed", "float16": "16-mixed", "fp16": "16-mixed"}
    precision = names.get(str(dtype).rpartition(".")[2])
    if precision is not None:
        porting.trainer["precision"] = precision
        why = "FSDP casts weights, autocast casts the inputs of operators: norms and losses are computed in fp32."
        porting.note(key, NoteKind.NONE, why)
    elif dtype is not None and not str(dtype).endswith(("float32", "no")):
        raise ConfigError(f"{porting.source}: {key} is {dtype}; allowed: torch.bfloat16, torch.float16, torch.float32.")
