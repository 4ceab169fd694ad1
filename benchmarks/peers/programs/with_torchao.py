"""torchao's optimizer with offloaded gradients and state."""

import torch
from torchao.optim import CPUOffloadOptimizer


def train(model, batches, report):
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=1e-4, fused=True)
    for tokens in batches:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(loss)
