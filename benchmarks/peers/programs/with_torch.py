"""Plain torch: the program that loops below differ from."""

import torch


def train(model, batches, report):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for tokens in batches:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(loss)
