"""FSDP2 with parameters, gradients and optimizer state offloaded to the CPU."""

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


def train(model, batches, report, *, dtype):
    torch.distributed.init_process_group("gloo")
    options = {
        "mesh": torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for tokens in batches:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(loss)
    torch.distributed.destroy_process_group()
