"""Everything of torch and Lightning that the package replaces, or uses although it is private.

Neither torch nor Lightning promises that these names stay. ``tests/unit/test_borrowed.py`` looks up
each of them in the installed versions, and fails for a private name that is used without a row
here. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Borrowed:
    """One name.

    Attributes:
        path: Where it is. ``lightning:`` stands for either namespace, ``fabric:`` for its Fabric,
            ``trainer:`` for a new Trainer's attributes, and any other word before a colon for an
            object that the test makes.
        why: What the package needs it for.
        takes: The names of its parameters, if the package calls it, or is called in its place.
    """

    path: str
    why: str
    takes: tuple[str, ...] | None = None


# Methods and attributes of single objects that are replaced, and put back when a fit ends.
REPLACED = (
    Borrowed(
        "lightning:plugins.precision.Precision.backward",
        "The runtime has gradients to itself inside it, between the hooks before and after backward.",
        ("self", "tensor", "model", "optimizer", "args", "kwargs"),
    ),
    Borrowed(
        "lightning:plugins.precision.Precision.optimizer_step",
        "A batch that comes here ends in a step, so its updates may run during backward.",
        ("self", "optimizer", "model", "closure", "kwargs"),
    ),
    Borrowed(
        "lightning:plugins.precision.Precision.clip_grad_by_norm",
        "Norms are taken during backward; with pipelines the norm is over all stages.",
        ("self", "optimizer", "clip_val"),
    ),
    Borrowed(
        "lightning:plugins.precision.Precision.clip_grad_by_value",
        "With pipelines some gradients are sharded and others are not.",
        ("self", "optimizer", "clip_val"),
    ),
    Borrowed(
        "torch.amp.GradScaler._unscale_grads_",
        "Gradients are divided by the loss's scale block by block during backward.",
        ("self", "optimizer", "inv_scale", "found_inf", "allow_fp16"),
    ),
    Borrowed("torch.optim.Optimizer.step", "It hands the update over to the runtime.", ("self", "closure")),
    Borrowed("torch.optim.Optimizer.zero_grad", "It waits for updates first.", ("self", "set_to_none")),
    Borrowed("torch.optim.Optimizer.load_state_dict", "State goes to where it lives.", ("self", "state_dict")),
    Borrowed(
        "trainer:_checkpoint_connector.resume_start",
        "An elastic run loads its newest step, and then not the ckpt_path that began it.",
        ("self", "checkpoint_path", "weights_only"),
    ),
    Borrowed(
        "lightning:LightningModule.on_train_batch_end",
        "A step is kept when its last hook has run. Lightning has no hook after the module's.",
    ),
    Borrowed("lightning:LightningModule.on_train_epoch_start", "The epoch's iterator exists when it has run."),
    Borrowed("lightning:LightningModule.on_validation_end", "Ranks compare what comes next on each of them."),
    Borrowed("lightning:LightningModule.log", "A batch that begins again logs once."),
    Borrowed(
        "lightning:callbacks.Callback.on_train_batch_end",
        "With the other hooks of callbacks that average weights, where ranks share a model: weights are whole inside.",
    ),
    Borrowed(
        "lightning:strategies.Strategy.checkpoint_io",
        "LocalFirst learns which strategy gets it, and makes that save on all ranks.",
    ),
    Borrowed(
        "trainer:fit_loop.epoch_loop.automatic_optimization._on_before_zero_grad",
        "Memory that ends in the hooks before gradients are zeroed is named, also in a batch without a step.",
        ("self", "optimizer"),
    ),
    Borrowed(
        "lightning:callbacks.ProgressBar.get_metrics",
        "OffloadMonitor adds its texts, which the module's own metrics cannot hold.",
        ("self", "trainer", "pl_module"),
    ),
    Borrowed("trainer:fit_loop._data_fetcher", "Its combined loader is replaced by one that counts batches."),
)

# Attributes of classes that are replaced for a moment, or for as long as a parameter is offloaded.
RETYPED = (
    Borrowed("torch.nn.Parameter", "`param.__class__` is OffloadedParameter while its weights may be elsewhere."),
    Borrowed("torch.nn.Parameter.__new__", "Parameters are noted as they are made, while a model is built."),
    Borrowed("torch._C.TensorBase.data", "Reading and setting `data` of such a parameter."),
    Borrowed("torch.nn.Parameter.data", "Writes through it count in the parameter's version counter."),
    Borrowed("torch.nn.Parameter.set_", "It sets `data`: parametrizations such as `weight_norm` assign with it."),
)

# Private names of torch that are used as they are.
TORCH = (
    Borrowed("torch.utils._pytree", "Finds the tensors in batches and in what modules return."),
    Borrowed("torch.utils._python_dispatch", "TorchDispatchMode sees every operator."),
    Borrowed("torch._ops.OpOverload", "The type of the operators that it sees."),
    Borrowed("torch._C._DisableTorchDispatch", "Samples tensors unseen by modes that count operators."),
    Borrowed("torch._C.DisableTorchFunction", "Reads a parameter past the handle that it is."),
    Borrowed("torch._C.DisableTorchFunctionSubclass", "The same for subclasses."),
    Borrowed("torch._C._disabled_torch_function_impl", "The same for one function."),
    Borrowed("torch._C._storage_Use_Count", "Whether memory has another owner and must not move."),
    Borrowed("torch._C._to_dlpack", "Gives a run of weights a storage of its own, on renamed devices too."),
    Borrowed("torch._C._current_graph_task_id", "Which backward a hook runs in."),
    Borrowed("torch.autograd.Variable._execution_engine", "Calls back as a backward of the user's loop ends."),
    Borrowed("torch.nn.parallel.DistributedDataParallel._get_active_ddp_module", "Whether a loop's forward runs in one."),
    Borrowed("torch._C._set_grad_enabled", "Switches gradients at an anchor without a Python frame."),
    Borrowed("torch._C._autograd._top_saved_tensors_default_hooks", "Whether others save tensors."),
    Borrowed("torch.autograd.grad_mode._unsafe_preserve_version_counter", "A tensor without memory counts writes."),
    Borrowed("torch._utils._rebuild_parameter", "The format of torch.save."),
    Borrowed("torch._utils._rebuild_parameter_with_state", "The same."),
    Borrowed("torch._utils._rebuild_tensor_v2", "The same."),
    Borrowed("torch._utils._rebuild_tensor_v3", "The same."),
    Borrowed("torch.storage._new_dtypes", "The same."),
    Borrowed("torch.serialization._open_zipfile_writer", "Writes a checkpoint tensor by tensor."),
    Borrowed("torch.serialization._get_storage_alignment", "The same."),
    Borrowed("torch._foreach_mul", "What torch's optimizers compute with."),
    Borrowed("torch._foreach_mul_", "The same."),
    Borrowed("torch._foreach_clamp_min_", "The same, for clipping by value."),
    Borrowed("torch._foreach_clamp_max_", "The same."),
    Borrowed("torch._foreach_norm", "What torch's clipping by norm computes with."),
    Borrowed("torch._foreach_copy_", "Many copies in one call."),
    Borrowed("torch._C._accelerator_getAllocatorSettings", "What the user has chosen for torch's allocator."),
    Borrowed("torch._C._accelerator_setAllocatorSettings", "Its pieces grow, unless the user has chosen."),
    Borrowed("torch._fused_adam_", "torch's own update, on a device."),
    Borrowed("torch._fused_adamw_", "The same."),
    Borrowed("torch._neg_view", "Rebuilds a view that autograd has saved."),
    Borrowed("torch._amp_foreach_non_finite_check_and_unscale_", "What a GradScaler computes with."),
    Borrowed("torch.nn.modules.batchnorm._NormBase", "Which modules count batches."),
    Borrowed("torch.nn.modules.batchnorm._BatchNorm", "The same."),
    Borrowed("torch.utils.data._DatasetKind", "Whether an iterator draws indices."),
    Borrowed("torch.distributed.checkpoint.filesystem._StorageInfo", "The format of checkpoints."),
    Borrowed("torch.distributed.checkpoint._traverse", "The same."),
    Borrowed("torch.distributed.distributed_c10d._get_default_store", "A rank tells other nodes there why it ends."),
)

# Private names of Lightning that are used as they are.
LIGHTNING = (
    Borrowed("lightning:trainer.call._call_callbacks_state_dict", "A kept step has callbacks' state."),
    Borrowed("lightning:trainer.call._call_lightning_datamodule_hook", "It has the datamodule's."),
    Borrowed("lightning:loops.training_epoch_loop._Stateful", "Which dataloaders know their place."),
    Borrowed("lightning:loops.fit_loop._set_sampler_epoch", "Samplers learn the epoch on a resume."),
    Borrowed("lightning:utilities.combined_loader._shutdown_workers_and_reset_iterator", "A resume."),
    Borrowed("lightning:loops.optimization.automatic.ClosureResult", "The loss of a repeated batch."),
    Borrowed("lightning:loops.evaluation_loop.RestartStage", "A validation that was due on a resume."),
    Borrowed("fabric:utilities.imports._IS_INTERACTIVE", "Whether there is a script to run again for further ranks."),
    Borrowed("lightning strategy:_start_method", "How further ranks start."),
    Borrowed("fabric:utilities.device_dtype_mixin._DeviceDtypeModuleMixin", "What a module says of its device."),
    Borrowed("trainer:_accelerator_connector", "Devices and processes before there is a strategy."),
    Borrowed("trainer:_val_check_time_interval", "Whether each rank validates by its own clock."),
    Borrowed("trainer:_active_loop", "Whether a batch that is evaluated is the last one."),
    Borrowed("trainer:fit_loop._can_stop_early", "Whether should_stop ends training now."),
    Borrowed("trainer:fit_loop._combined_loader", "The training data's iterators."),
    Borrowed("trainer:fit_loop._data_source", "The training data before a plan is made."),
    Borrowed("trainer:fit_loop._restarting", "A resume in the middle of an epoch."),
    Borrowed("trainer:fit_loop._last_train_dl_reload_epoch", "When data was loaded."),
    Borrowed("trainer:fit_loop.epoch_loop._should_check_val_fx", "Whether a validation is due."),
    Borrowed("trainer:fit_loop.epoch_loop._should_check_val_epoch", "The same."),
    Borrowed("trainer:fit_loop.epoch_loop._num_ready_batches_reached", "Whether the epoch is over."),
    Borrowed("trainer:fit_loop.epoch_loop._batches_that_stepped", "A resume counts on, and loggers put numbers of the run there."),
    Borrowed("trainer:fit_loop.epoch_loop.val_loop._restart_stage", "A validation that was due."),
    Borrowed("trainer:fit_loop.epoch_loop.val_loop._combined_loader", "Validation's iterators."),
    Borrowed("trainer:fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch", "When data was loaded."),
)

# Private attributes of objects that torch, Lightning and others make.
ATTRIBUTES = (
    Borrowed("torch.UntypedStorage._cdata", "Which tensors share memory."),
    Borrowed("storage:_untyped_storage", "The format of torch.save."),
    Borrowed("torch.TypedStorage._pickle_storage_type", "The same."),
    Borrowed("torch.Tensor._version", "Whether a tensor was changed in place."),
    Borrowed("torch.Tensor._make_subclass", "Another tensor that shares that count."),
    Borrowed("torch.Tensor._make_wrapper_subclass", "A handle is a tensor without memory."),
    Borrowed("module:_modules", "Modules by their own names, wrappers of PEFT among them."),
    Borrowed("module:_parameters", "A module's own parameters, also as it is built."),
    Borrowed("module:_buffers", "A module's own buffers, which a repeated forward sets back."),
    Borrowed("module:_non_persistent_buffers_set", "Which buffers a checkpoint has."),
    Borrowed("module:_backward_hooks", "Whether code sees a block's gradients in backward."),
    Borrowed("module:_backward_pre_hooks", "The same."),
    Borrowed("torch.Tensor._backward_hooks", "The same, of a parameter."),
    Borrowed("torch.Tensor._post_accumulate_grad_hooks", "The same."),
    Borrowed("torch.nn.Module._compiled_call_impl", "Whether a module is compiled."),
    Borrowed("torch.nn.MultiheadAttention._reset_parameters", "Its initialization has no public name."),
    Borrowed("torch.ops.aten.add.Tensor._schema", "What an operator changes in place."),
    Borrowed("torch.ops.aten.add.Tensor._overloadpacket", "An operator whatever its types are."),
    Borrowed("torch.ops.aten._to_copy", "Casts to 16 bits."),
    Borrowed("torch.ops.aten._foreach_div_", "Operators on gradients that are on the host."),
    Borrowed("torch.ops.aten._foreach_zero_", "The same."),
    Borrowed("torch.ops.aten._scaled_dot_product_flash_attention", "FLOP of attention."),
    Borrowed("torch.ops.aten._scaled_dot_product_flash_attention_backward", "The same."),
    Borrowed("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", "The same."),
    Borrowed("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "The same."),
    Borrowed("optimizer:_optimizer_step_pre_hooks", "A hook may change gradients before the step."),
    Borrowed("optimizer:_optimizer_step_post_hooks", "A hook may change weights after the step."),
    Borrowed("optimizer:_step_supports_amp_scaling", "Whether the optimizer divides by the loss's scale."),
    Borrowed("scheduled step:_wrapped_by_lr_sched", "Whether a scheduler has replaced the step, or other code."),
    Borrowed("schedulers:_schedulers", "The schedulers inside another one."),
    Borrowed("iterator:_sampler_iter", "It is replaced by one that notices when random numbers are drawn."),
    Borrowed("iterator:_dataset_kind", "Whether an iterator draws indices."),
    Borrowed("lightning fetcher:_batch", "A batch that a training step takes by itself."),
    Borrowed("lightning fetcher:_batch_idx", "The same."),
    Borrowed("lightning fetcher:_dataloader_idx", "The same."),
    Borrowed("lightning fetcher:_combined_loader", "Where that batch comes from."),
    Borrowed("lightning loader:_flattened", "The dataloaders of one iterator, of which a resume replaces some."),
    Borrowed("lightning loader:_iterator", "Their iterators."),
    Borrowed("lightning loader:_state_dicts", "The states of dataloaders that have one."),
    Borrowed("lightning strategy:_layer_sync", "Whether layers are exchanged for synchronized ones."),
    Borrowed("lightning strategy:_timeout", "How long ranks wait for each other."),
    Borrowed("lightning strategy:_process_group_backend", "Whether the user has chosen how ranks exchange."),
    Borrowed("lightning module:_trainer", "Whether a module is attached, without an error if it is not."),
    Borrowed("lightning module:_hparams_name", "Under which name a checkpoint has hyper-parameters."),
    Borrowed("lightning optimizer:_optimizer", "The optimizer inside Lightning's."),
    Borrowed("trainer:_accelerator_connector._num_nodes_flag", "Nodes before there is a strategy."),
    Borrowed("trainer:_accelerator_connector._parallel_devices", "The same of devices."),
    Borrowed("scaler:_scale", "The scale of the loss on its device; ``get_scale`` waits for that."),
    Borrowed("metric:_defaults", "The states of a metric, which a repeated batch sets back."),
    Borrowed("transformers.PreTrainedModel._init_weights", "How a model's modules are initialized."),
    Borrowed("transformers.PreTrainedModel._no_split_modules", "The classes of its blocks."),
    Borrowed("peft layer:_caches", "Norms that unmerging DoRA needs, which no state has."),
    Borrowed("random._inst", "Whether a generator is Python's global one."),
    Borrowed("numpy.random.mtrand._rand", "Whether it is NumPy's."),
)

TABLE = (*REPLACED, *RETYPED, *TORCH, *LIGHTNING, *ATTRIBUTES)
