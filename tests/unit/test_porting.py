"""What settings of DeepSpeed, FSDP and accelerate become, and that none is lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.cli import invoke, parsed

from lightning_hetero.errors import ConfigError
from lightning_hetero.porting import deepspeed
from lightning_hetero.porting.accelerate import from_accelerate
from lightning_hetero.porting.deepspeed import from_deepspeed
from lightning_hetero.porting.fsdp import from_fsdp
from lightning_hetero.porting.script import cli_yaml, python
from lightning_hetero.porting.settings import NoteKind, Ported

# Each key of the page "DeepSpeed Configuration JSON", section by section.
DOCUMENTED = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps communication_data_type prescale_gradients "
    "gradient_predivide_factor sparse_gradients gradient_clipping zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "steps_per_print wall_clock_breakdown dump_state",
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale",
    "bf16": "enabled",
    "amp": "enabled opt_level",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "zero_optimization": "stage allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size "
    "contiguous_gradients load_from_fp32_weights grad_hooks round_robin_gradients stage3_max_live_parameters "
    "stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold sub_group_size elastic_checkpoint "
    "stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold ignore_unused_parameters "
    "zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients log_trace_cache_warnings cpu_offload "
    "cpu_offload_params cpu_offload_use_pin_memory memory_efficient_linear",
    "zero_optimization.offload_param": "device nvme_path pin_memory buffer_count buffer_size max_in_cpu",
    "zero_optimization.offload_optimizer": "device nvme_path pin_memory ratio buffer_count fast_init pipeline_read pipeline_write",
    "aio": "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds",
    "activation_checkpointing": "partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints "
    "synchronize_checkpoint_boundary profile",
    "flops_profiler": "enabled profile_step module_depth top_modules detailed output_file",
    "autotuning": "enabled results_dir fast metric",
    "tensorboard": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "csv_monitor": "enabled output_path job_name",
    "elasticity": "enabled max_train_batch_size micro_batch_sizes",
    "comms_logger": "enabled verbose prof_all debug prof_ops",
    "compression_training": "layer_reduction weight_quantization",
    "data_efficiency": "enabled seed data_sampling",
    "curriculum_learning": "enabled curriculum_type",
    "progressive_layer_drop": "enabled theta gamma",
    "eigenvalue": "enabled verbose max_iter",
    "sparse_attention": "mode block",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write",
    "data_types": "grad_accum_dtype",
}
VALUES = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5,
    "steps_per_print": 10, "device": "nvme", "nvme_path": "/nvme", "dtype": "bfloat16",
}  # fmt: skip


def full() -> dict[str, Any]:
    """A configuration with every documented key."""
    config: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
    }
    for section, keys in DOCUMENTED.items():
        table = config
        for name in filter(None, section.split(".")):
            table = table.setdefault(name, {})
        table |= {key: VALUES.get(key, True) for key in keys.split()}
    return config


def read(config: dict[str, Any]) -> Ported:
    return deepspeed.ported("ds.json", config)


def noted(ported: Ported) -> dict[str, str]:
    return {note.key: note.why for note in ported.notes}


# ---- no key is lost ------------------------------------------------------------------------------


def test_every_documented_key_of_deepspeed_is_known() -> None:
    assert [note for note in read(full()).notes if note.kind is NoteKind.UNKNOWN] == []


# Those that are lines of the result, or say where something is offloaded, which a planner decides.
BECOME = {
    "train_batch_size", "gradient_accumulation_steps", "gradient_clipping", "steps_per_print", "bf16.enabled",
    "torch_autocast.dtype",
    "zero_optimization.cpu_offload", "zero_optimization.cpu_offload_params", "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path", "zero_optimization.offload_optimizer.device",
}  # fmt: skip


def test_a_documented_key_is_in_the_result_or_named_with_a_reason() -> None:
    named = noted(read(full()))
    for section, keys in DOCUMENTED.items():
        for key in keys.split():
            dotted = f"{section}.{key}" if section else key
            assert dotted in BECOME or named.get(dotted), dotted


def test_a_section_that_is_off_says_nothing() -> None:
    off = {"enabled": False}
    ported = read({"wandb": {**off, "project": "x"}, "fp16": {**off, "hysteresis": 2}, "flops_profiler": off})
    assert ported.notes == ()


def test_a_mistyped_key_is_named_with_the_nearest_one() -> None:
    ported = read({"gradient_cliping": 1.0, "zero_optimization": {"stage3_prefech_bucket_size": 1}, "entirely_new": 1})
    unknown = {note.key: note.why for note in ported.notes if note.kind is NoteKind.UNKNOWN}
    assert "gradient_clipping" in unknown["gradient_cliping"]
    assert "stage3_prefetch_bucket_size" in unknown["zero_optimization.stage3_prefech_bucket_size"]
    assert "entirely_new" in unknown
    assert "gradient_cliping: Did you mean" in python(ported)


# ---- what becomes what ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "trainer"),
    [
        ({"bf16": {"enabled": True}}, {"precision": "bf16-true"}),
        ({"fp16": {"enabled": True}}, {"precision": "16-mixed"}),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, {"precision": "bf16-mixed"}),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, {"precision": "16-mixed"}),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, {"precision": "16-mixed"}),
        ({"gradient_clipping": 0.5}, {"gradient_clip_val": 0.5}),
        ({"gradient_clipping": 0.0}, {}),
        ({"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 4}),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, {"accumulate_grad_batches": 8}),
        # Of four processes, each with two batches of four.
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            {"accumulate_grad_batches": 8},
        ),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, {"accumulate_grad_batches": 2}),
        ({"steps_per_print": 7}, {"log_every_n_steps": 7}),
        ({"steps_per_print": 1e20}, {}),
    ],
    ids=str,
)
def test_settings_of_deepspeed_become_arguments_of_the_trainer(config: dict[str, Any], trainer: dict[str, Any]) -> None:
    assert read(config).trainer == {"devices": 1, **trainer}


def test_the_batch_size_is_for_the_data_loader() -> None:
    assert (
        "batch_size=16" in noted(read({"train_batch_size": 32, "gradient_accumulation_steps": 2}))["train_micro_batch_size_per_gpu"]
    )


@pytest.mark.parametrize(
    ("zero", "strategy"),
    [
        ({"stage": 1}, {}),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {}),
        ({"stage": 2, "cpu_offload": True}, {}),
        ({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a"}}, {"disk_path": "/a/lightning-hetero"}),
        (
            {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
                "offload_param": {"device": "nvme", "nvme_path": "/a"},
            },
            {"disk_path": "/b/lightning-hetero"},
        ),
        ({"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/a"}}, {}),
    ],
    ids=str,
)
def test_only_the_place_on_disk_of_zero_is_an_option(zero: dict[str, Any], strategy: dict[str, Any]) -> None:
    assert read({"zero_optimization": zero}).strategy == strategy


ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}  # defaults of DeepSpeed, not of torch


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("Adam", {}, ("AdamW", ADAM)),  # adam_w_mode is true by default
        ("Adam", {"adam_w_mode": False, "lr": 0.1}, ("Adam", {**ADAM, "lr": 0.1})),
        ("AdamW", {"adam_w_mode": False, "betas": [0.8, 0.9]}, ("AdamW", {**ADAM, "betas": (0.8, 0.9)})),
        ("adamw", {"torch_adam": True, "lr": 0.1}, ("AdamW", {"lr": 0.1})),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True})),
        ("Adagrad", {}, ("Adagrad", {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0})),
        ("Lion", {"lr": 1e-4, "betas": [0.9, 0.99]}, ("AdamW", {"lr": 1e-4})),
        ("OneBitAdam", {"lr": 1e-4, "freeze_step": 4}, ("AdamW", {"lr": 1e-4})),
    ],
)
def test_an_optimizer_has_the_arguments_that_deepspeed_gives_it(
    kind: str, params: dict[str, Any], expected: tuple[str, dict[str, Any]]
) -> None:
    ported = read({"optimizer": {"type": kind, "params": params}})
    assert ported.optimizer is not None
    assert (ported.optimizer.class_path, ported.optimizer.arguments) == (f"torch.optim.{expected[0]}", expected[1])
    if kind in ("Lion", "OneBitAdam"):
        assert kind in noted(ported)["optimizer.type"]
        assert f"# stands for {kind}" in python(ported)


def test_bias_that_is_not_corrected_is_named() -> None:
    params = {"bias_correction": False, "freeze_step": 3}
    assert "corrects the bias" in noted(read({"optimizer": {"type": "Adam", "params": params}}))["optimizer.params.bias_correction"]


def test_auto_is_what_transformers_would_put_there_and_is_named() -> None:
    ported = read({
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    })  # fmt: skip
    assert ported.trainer == {"devices": 1, "gradient_clip_val": 1.0}
    assert ported.optimizer is not None
    assert ported.optimizer.arguments == {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert ported.schedule is not None
    assert ported.schedule.values == {"warmup": "2", "total": "self.trainer.estimated_stepping_batches", "least": "0.0"}
    assert "learning_rate of transformers' TrainingArguments; its default 5e-05" in noted(ported)["optimizer.params.lr"]
    assert "max_grad_norm" in noted(ported)["gradient_clipping"]


# ---- schedules -----------------------------------------------------------------------------------


def factors(ported: Ported, steps: int) -> list[float]:
    """The printed function's values, which is all that the learning rate depends on."""
    schedule = ported.schedule
    assert schedule is not None
    body = "\n".join(f"    {line}" for line in schedule.body)
    names: dict[str, Any] = {"math": math, **{name: eval(value) for name, value in schedule.values.items()}}
    exec(f"def factor(step):\n{body}", names)
    return [names["factor"](step) for step in range(steps)]


def scheduled(name: str, **params: Any) -> Ported:
    return read({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "scheduler": {"type": name, "params": params}})


LOG = [0.0, 0.0, *(math.log(n) / math.log(4) for n in (2, 3, 4))]


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("WarmupLR", {"warmup_num_steps": 4}, [0.5 * v for v in LOG] + [0.5, 0.5]),
        (
            "WarmupLR",
            {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_lr": 0.1, "warmup_max_lr": 0.3},
            [0.1, 0.1, 0.15, 0.2, 0.25, 0.3, 0.3],
        ),
        (
            "WarmupDecayLR",
            {"warmup_num_steps": 2, "total_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.2},
            [0.0, 0.0, 0.1, 0.2, 0.1, 0.0, 0.0],
        ),
        (
            "WarmupCosineLR",
            {"warmup_num_steps": 2, "total_num_steps": 4, "warmup_type": "linear", "warmup_min_ratio": 0.5, "cos_min_ratio": 0.2},
            [0.0, 0.25, 0.375, 0.5 * 0.6, 0.5 * 0.2, 0.5 * 0.2, 0.5 * 0.2],
        ),
    ],
)
def test_a_schedule_has_deepspeeds_learning_rates(name: str, params: dict[str, Any], expected: list[float]) -> None:
    """Computed by hand from DeepSpeed's formulas, whose index is one below the step's."""
    ported = scheduled(name, **params)
    assert ported.optimizer is not None
    rate = ported.optimizer.arguments["lr"]
    assert isinstance(rate, float)
    assert [rate * f for f in factors(ported, len(expected))] == pytest.approx(expected)


def test_schedules_that_torch_lacks_are_named() -> None:
    ported = read({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}})
    assert ported.schedule is None
    assert "OneCycleLR" in noted(ported)["scheduler.type"]
    assert "OneCycle" in noted(ported)["scheduler.params.cycle_min_lr"]


# ---- Lightning's strategies, FSDP, accelerate ----------------------------------------------------


def test_a_strategy_of_lightning_becomes_its_configuration() -> None:
    ported = from_deepspeed(
        'DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_optimizer_device="nvme", nvme_path="/nvme", '
        "sub_group_size=10, exclude_frozen_parameters=True, logging_level=10, ofload_parameters=True)"
    )
    assert ported.strategy == {"disk_path": "/nvme/lightning-hetero", "exclude_frozen_parameters": True}
    assert set(noted(ported)) == {"stage", "nvme_path", "sub_group_size", "logging_level", "ofload_parameters"}
    registered = from_deepspeed("deepspeed_stage_3_offload_nvme")
    assert registered.strategy == {"disk_path": "/local_nvme/lightning-hetero"}


def test_a_strategy_with_a_configuration_is_that(tmp_path: Path) -> None:
    (file := tmp_path / "ds.json").write_text(json.dumps({"gradient_clipping": 2.0}))
    assert from_deepspeed(f"DeepSpeedStrategy(config={str(file)!r}, stage=3)").trainer["gradient_clip_val"] == 2.0
    assert from_deepspeed("DeepSpeedStrategy(config={'gradient_clipping': 3.0})").trainer["gradient_clip_val"] == 3.0


def test_every_argument_of_lightnings_strategies_is_known() -> None:
    import inspect

    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

    for cls, port in ((DeepSpeedStrategy, from_deepspeed), (FSDPStrategy, from_fsdp), (ModelParallelStrategy, from_fsdp)):
        names = [n for n in inspect.signature(cls.__init__).parameters if n not in ("self", "kwargs", "config")]
        ported = port(f"{cls.__name__}({', '.join(f'{name}=True' for name in names if name != 'mixed_precision')})")
        assert [note for note in ported.notes if note.kind is NoteKind.UNKNOWN] == [], cls


def test_every_argument_of_torchs_fsdp_is_known() -> None:
    import inspect

    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    for name, target in (("FSDP", FullyShardedDataParallel.__init__), ("fully_shard", fully_shard)):
        names = set(inspect.signature(target).parameters) - {"self", "kwargs", "mixed_precision", "mp_policy"}
        ported = from_fsdp(f"{name}({', '.join(f'{n}=None' for n in names)})")
        assert [note for note in ported.notes if note.kind is NoteKind.UNKNOWN] == []


@pytest.mark.parametrize(
    ("call", "strategy", "trainer"),
    [
        ("FSDPStrategy(cpu_offload=True)", {}, {}),
        ("FSDPStrategy(auto_wrap_policy={Block})", {"block_cls": "Block"}, {}),
        ("FSDPStrategy(auto_wrap_policy=ModuleWrapPolicy({a.Block, Head}))", {"block_cls": ("Block", "Head")}, {}),
        (
            "FSDP(model, auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}))",
            {"block_cls": "LlamaDecoderLayer"},
            {},
        ),
        ("FSDPStrategy(auto_wrap_policy=size_based_auto_wrap_policy)", {}, {}),
        ("FSDPStrategy(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))", {}, {"precision": "bf16-mixed"}),
        ("fully_shard(m, mp_policy=MixedPrecisionPolicy(torch.float16))", {}, {"precision": "16-mixed"}),
        ("fully_shard(m, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32), offload_policy=CPUOffloadPolicy())", {}, {}),
        ("fsdp_cpu_offload", {}, {}),
    ],
)
def test_arguments_of_fsdp(call: str, strategy: dict[str, Any], trainer: dict[str, Any]) -> None:
    ported = from_fsdp(call)
    assert (ported.strategy, ported.trainer) == (strategy, {"devices": 1, **trainer})


ACCELERATE = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""


OF_DEEPSPEED = """
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config:
  gradient_accumulation_steps: 4
  offload_optimizer_device: nvme
  offload_optimizer_nvme_path: /nvme
  zero3_init_flag: true
  zero_stage: 3
"""
OF_FSDP = """
distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: GPTBlock,Head
  fsdp_use_orig_params: true
  fsdp_version: 2
"""
ALONE = "distributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 1\nuse_cpu: true\n"
FILE = "distributed_type: DEEPSPEED\nmixed_precision: 'no'\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"


@pytest.mark.parametrize(
    ("text", "strategy", "trainer"),
    [
        (ALONE, {}, {"precision": "bf16-mixed", "accelerator": "cpu"}),
        (
            ACCELERATE + OF_DEEPSPEED,
            {"disk_path": "/nvme/lightning-hetero"},
            {"precision": "bf16-true", "accumulate_grad_batches": 4},
        ),
        (ACCELERATE + FILE, {}, {"gradient_clip_val": 0.25}),
        (ACCELERATE + OF_FSDP, {"block_cls": ("GPTBlock", "Head")}, {"precision": "bf16-mixed"}),
    ],
    ids=["alone", "deepspeed", "deepspeed file", "fsdp"],
)
def test_configurations_of_accelerate(text: str, strategy: dict[str, Any], trainer: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"gradient_clipping": 0.25}))  # found beside the file that names it
    (file := tmp_path / "accelerate.yaml").write_text(text)
    ported = from_accelerate(str(file))
    assert (ported.strategy, ported.trainer) == (strategy, {"devices": 1, **trainer})
    assert [note for note in ported.notes if note.kind is NoteKind.UNKNOWN] == []


def test_arguments_of_an_accelerator() -> None:
    pytest.importorskip("accelerate")
    import inspect

    from accelerate import Accelerator

    ported = from_accelerate("Accelerator(mixed_precision='fp16', gradient_accumulation_steps=3, cpu=True)")
    assert ported.trainer == {"devices": 1, "precision": "16-mixed", "accumulate_grad_batches": 3, "accelerator": "cpu"}
    names = set(inspect.signature(Accelerator.__init__).parameters) - {"self", "mixed_precision"}
    every = from_accelerate(f"Accelerator({', '.join(f'{name}=1' for name in names)})")
    assert [note for note in every.notes if note.kind is NoteKind.UNKNOWN] == []


# ---- refusals, and the commands ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_clipping": "much"}, r"gradient_clipping is 'much'; allowed: a number"),
        ({"gradient_accumulation_steps": 0}, "allowed: a whole number above 0"),
        ({"bf16": {"enabled": "maybe"}}, "allowed: true, false"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "no multiple of 4 samples"),
        ({"optimizer": {"type": "AdmW"}}, "Did you mean 'AdamW'"),
        ({"optimizer": {"type": "SGD", "params": {"lr": "fast"}}}, "allowed: numbers"),
        ({"optimizer": {"type": "SGD", "params": {"lr=0); import os": 1}}}, "allowed: numbers"),
        ({"scheduler": {"type": "WarmUpLR"}}, "Did you mean 'WarmupLR'"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(config)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["from-deepspeed", "missing.json"], "'missing.json' cannot be read"),
        (["from-deepspeed", "deepspeed_stage_4"], "Did you mean 'deepspeed_stage_"),
        (["from-deepspeed", "FSDPStrategy()"], "calls FSDPStrategy"),
        (["from-deepspeed", "DeepSpeedStrategy(stage=)"], "is not Python"),
        (["from-fsdp", "FSDPStrategie()"], "Did you mean 'FSDPStrategy'"),
        (["from-fsdp", "fsdp_cpu"], "or 'fsdp_cpu_offload'"),
        (["from-fsdp", "FSDPStrategy(**options)"], "write them out"),
        (["from-fsdp", "FSDPStrategy(mixed_precision=MixedPrecision(param_dtype=torch.int8))"], "mixed_precision is torch.int8"),
        (["from-accelerate", "missing.yaml"], "'missing.yaml' cannot be read"),
        (["from-accelerate", "Accelerate()"], "calls Accelerate"),
    ],
)
def test_a_source_that_is_none_exits_2(arguments: list[str], reason: str) -> None:
    assert reason in parsed(*arguments, code=2)["error"]


def test_the_command_prints_python_yaml_or_json(tmp_path: Path) -> None:
    (file := tmp_path / "ds.json").write_text(json.dumps(full()))
    ported = from_deepspeed(str(file))
    assert invoke("from-deepspeed", file).stdout == python(ported)
    assert invoke("from-deepspeed", file, "--yaml").stdout == cli_yaml(ported)
    printed = parsed("from-deepspeed", file)
    assert printed["trainer"] == ported.trainer
    assert printed["optimizer"]["class_path"] == "torch.optim.AdamW"
    assert printed["scheduler"] == "WarmupLR"
    assert {"key": "dump_state", "kind": "none", "why": noted(ported)["dump_state"]} in printed["notes"]


def test_printed_lines_fit_100_columns_but_for_code() -> None:
    lines = python(read(full())).splitlines()
    assert [line for line in lines if line.startswith("#") and len(line) > 100] == []
