"""Keys of a DeepSpeed configuration without a line of their own here, and the reason.

The keys are those of DeepSpeed 0.19 and of its page "DeepSpeed Configuration JSON".
"""

from __future__ import annotations

# Values of "auto" in a configuration for transformers: the TrainingArguments, and their defaults.
AUTOS: dict[str, tuple[str, object]] = {
    "train_batch_size": ("per_device_train_batch_size x gradient_accumulation_steps x devices", None),
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", None),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "gradient_clipping": ("max_grad_norm", 1.0),
    "optimizer.params.lr": ("learning_rate", 5e-5),
    "optimizer.params.betas": ("adam_beta1, adam_beta2", [0.9, 0.999]),
    "optimizer.params.eps": ("adam_epsilon", 1e-8),
    "optimizer.params.weight_decay": ("weight_decay", 0.0),
    "scheduler.params.warmup_min_lr": ("no argument: 0", 0.0),
    "scheduler.params.warmup_max_lr": ("learning_rate", 5e-5),
    "scheduler.params.warmup_num_steps": ("warmup_steps", None),
    "bf16.enabled": ("bf16", False),
    "fp16.enabled": ("fp16", False),
}

_SENT = "devices=1 partitions, sends and reduces nothing. With devices=N, N ranks hold one model together."
_ENGINE = "the native engine chooses its own buffers, chunks and requests."
_PLAN = "a planner decides it for this model on this machine."
_OVERLAP = "reads, updates and writes always overlap."
_SCALER = (
    "torch's GradScaler begins at 2**16, doubles after 2000 good steps and halves after each overflow. To change that, pass "
    'Trainer(plugins=MixedPrecision("16-mixed", device=..., scaler=torch.amp.GradScaler(...))) instead of precision.'
)
_FP32 = "masters and optimizer state of 16-bit weights are fp32."
_EXACT = "every step has the bits of plain PyTorch, so nothing is delayed or approximated."
_MODEL = "it changes the model, not where it lives. Do it in your module."
_SAVES = "checkpoints are Lightning's own files; ModelCheckpoint and the Trainer write and read them."

YOURS = {
    "dataloader_drop_last": "pass drop_last=True to your DataLoader.",
    "compile.*": "call torch.compile on your modules.",
    "curriculum_learning.*": "choose the data in your sampler or collate function.",
    "data_efficiency.*": "choose the data in your sampler or collate function.",
    "tensorboard.*": "pass Trainer(logger=TensorBoardLogger(...)).",
    "wandb.*": "pass Trainer(logger=WandbLogger(...)).",
    "comet.*": "pass Trainer(logger=CometLogger(...)).",
    "csv_monitor.*": "pass Trainer(logger=CSVLogger(...)).",
    "monitor_config.*": "pass loggers to Trainer(logger=...).",
    "elasticity.*": "HeteroParallelStrategy(elastic=...) trains with nodes that come and go.",
    "pipeline.*": "HeteroParallelStrategy(plan=...) runs pipelines of a cluster plan.",
    "tensor_parallel.*": "HeteroParallelStrategy(plan=...) runs tensor parallelism of a cluster plan.",
    "zero_optimization.offload_param.max_in_cpu": (
        'host_memory="..." bounds weights, gradients, state and staging in host memory together, in bytes.'
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "update_threads=N sets the number of threads; half of the cores.",
    "zero_optimization.leaf_module.*": "block_cls names the modules that are moved as one.",
    "activation_checkpointing.number_checkpoints": (
        "on a GPU the plan decides block by block what is kept, recomputed or swapped. On the CPU call torch's checkpoint, or "
        "gradient_checkpointing_enable() of a transformers model."
    ),
    "optimizer.params.max_grad_norm": "DeepSpeed refuses it too: use gradient_clipping.",
}

NONE = {
    "zero_optimization.stage": (
        'the plan says what lives where, whatever the stage. plan="zero_offload" and plan="zero_infinity" are DeepSpeed\'s own '
        'placements; the default "auto" searches beyond them.'
    ),
    "zero_optimization.sub_group_size": _ENGINE,
    "zero_optimization.contiguous_gradients": _ENGINE,
    "zero_optimization.load_from_fp32_weights": _FP32,
    "zero_optimization.ignore_unused_parameters": "parameters without a gradient are left out, as in PyTorch.",
    "zero_optimization.override_module_apply": "models are built in configure_model, or on the meta device.",
    "zero_optimization.pipeline_loading_checkpoint": _SAVES,
    "zero_optimization.elastic_checkpoint": _SAVES,
    "zero_optimization.legacy_stage1": _SENT,
    "zero_optimization.grad_hooks": _OVERLAP,
    "zero_optimization.memory_efficient_linear": _PLAN,
    "zero_optimization.log_trace_cache_warnings": _PLAN,
    "zero_optimization.enable_sanity_checks": "verify=N compares the first N steps with plain PyTorch, bit for bit.",
    "zero_optimization.save_muon_momentum_buffer_in_memory": _PLAN,
    "zero_optimization.zenflow.*": _EXACT,
    "zero_optimization.cpu_offload_use_pin_memory": "host memory is page-locked where transfers gain from it.",
    "zero_optimization.offload_optimizer.pin_memory": "host memory is page-locked where transfers gain from it.",
    "zero_optimization.offload_param.pin_memory": "host memory is page-locked where transfers gain from it.",
    "zero_optimization.offload_optimizer.pipeline": _OVERLAP,
    "zero_optimization.offload_optimizer.pipeline_read": _OVERLAP,
    "zero_optimization.offload_optimizer.pipeline_write": _OVERLAP,
    "zero_optimization.offload_optimizer.fast_init": _ENGINE,
    "zero_optimization.offload_optimizer.buffer_count": _ENGINE,
    "zero_optimization.offload_param.buffer_count": _ENGINE,
    "zero_optimization.offload_param.buffer_size": _ENGINE,
    "zero_optimization.offload_optimizer.ratio": _PLAN,
    "zero_optimization.offload_optimizer.super_offload": _PLAN,
    "aio.*": "the native engine does its own I/O, with io_uring or threads (io_backend, io_threads).",
    "activation_checkpointing.partition_activations": _SENT,
    "activation_checkpointing.cpu_checkpointing": "on a GPU the plan decides block by block what is kept, recomputed or swapped.",
    "activation_checkpointing.contiguous_memory_optimization": _ENGINE,
    "activation_checkpointing.synchronize_checkpoint_boundary": _ENGINE,
    "activation_checkpointing.profile": "trace=True records what happened; stall_report() says what compute waited for.",
    "fp16.auto_cast": "inputs are cast by autocast.",
    "fp16.loss_scale": _SCALER,
    "fp16.initial_scale_power": _SCALER,
    "fp16.loss_scale_window": _SCALER,
    "fp16.hysteresis": _SCALER,
    "fp16.consecutive_hysteresis": _SCALER,
    "fp16.min_loss_scale": _SCALER,
    "fp16.fp16_master_weights_and_grads": _FP32,
    "bf16.immediate_grad_update": "gradients are used as soon as backward has made them.",
    "bf16.check_grad_overflow": "gradients of bf16 are not checked; detect_anomaly of the Trainer finds NaN.",
    "bf16.bf16_master_weights_and_grads": _FP32,
    "bf16.bf16_optimizer_states": _FP32,
    "amp.*": "precision is torch's autocast; apex is not used.",
    "torch_autocast.lower_precision_safe_modules": "autocast chooses the dtype by operator.",
    "data_types.grad_accum_dtype": "gradients accumulate in the dtype of their weights.",
    "data_types.*": "the precision of the Trainer sets it.",
    "optimizer.legacy_fusion": "Adam and AdamW run natively.",
    "zero_allow_untested_optimizer": "every optimizer of torch.optim may be used.",
    "zero_force_ds_cpu_optimizer": "Adam and AdamW run natively wherever the plan updates them.",
    "managed_gradient_accumulation": "the Trainer counts batches.",
    "sparse_gradients": "gradients are dense; an optimizer with sparse ones is refused.",
    "memory_breakdown": "strategy.memory_report() has the bytes of each tier.",
    "dump_state": "the log says as a fit begins what lives where and why.",
    "log_level": 'the logger "lightning_hetero" has the level of Lightning\'s.',
    "flops_profiler.*": "strategy.model_profile has FLOP, bytes and seconds of each block, after four batches.",
    "autotuning.*": 'plan="auto" measures and plans. Tuner(trainer).scale_batch_size finds a batch size.',
    "checkpoint.*": _SAVES,
    "nebula.*": _SAVES,
    "hybrid_engine.*": "generate() works within a fit.",
    "graph_harvesting": "no graphs of kernels are recorded.",
    "timers.*": "trace=True records what happened; stall_report() says what compute waited for.",
    "progressive_layer_drop.*": _MODEL,
    "eigenvalue.*": _MODEL,
    "quantize_training.*": _MODEL,
    "compression_training.*": _MODEL,
    "sparse_attention.*": _MODEL,
}
NONE |= {
    f"zero_optimization.{key}": _SENT
    for key in (
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "reduce_bucket_size",
        "round_robin_gradients", "use_multi_rank_bucket_allreduce", "zero_hpz_partition_size", "zero_quantized_weights",
        "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "zeropp_loco_param.*", "mics_shard_size",
        "mics_hierarchical_params_gather",
    )
}  # fmt: skip
_SENDING = (
    "communication_data_type", "seq_parallel_communication_data_type", "prescale_gradients", "gradient_predivide_factor",
    "gradient_allreduce_op", "disable_allgather", "comms_logger.*", "sequence_parallel_size", "expert_parallel.*",
    "use_data_before_expert_parallelism", "data_parallel_group", "autotp_size",
)  # fmt: skip
NONE |= dict.fromkeys(_SENDING, _SENT)
_GATHERED = "checkpoints always have all weights. export_weights(module, path, dtype=torch.bfloat16) writes 16-bit safetensors."
NONE |= {
    f"zero_optimization.{prefix}{key}": why
    for prefix in ("", "stage3_")
    for key, why in (
        ("prefetch_bucket_size", _PLAN),
        ("param_persistence_threshold", _PLAN),
        ("model_persistence_threshold", _PLAN),
        ("max_live_parameters", 'device_memory="..." bounds what is on the device; a planner decides the rest.'),
        ("max_reuse_distance", _PLAN),
        ("gather_16bit_weights_on_model_save", _GATHERED),
        ("gather_fp16_weights_on_model_save", _GATHERED),
        ("use_all_reduce_for_fetch_params", _SENT),
        ("allgather_sequential", _SENT),
        ("module_granularity_threshold", "block_cls names the modules that are moved as one."),
    )
}
# Keys that become something: named here to find mistyped ones.
KNOWN = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "steps_per_print",
    "wall_clock_breakdown", "optimizer.type", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps",
    "optimizer.params.weight_decay", "scheduler.type", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps", "scheduler.params.warmup_type", "scheduler.params.total_num_steps",
    "scheduler.params.warmup_min_ratio", "scheduler.params.cos_min_ratio", "fp16.enabled", "bf16.enabled", "amp.enabled",
    "torch_autocast.enabled", "torch_autocast.dtype", "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path", "zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param",
)  # fmt: skip
