"""bitsandbytes' AdamW with paged state."""

import bitsandbytes


def train(model, batches, report):
    optimizer = bitsandbytes.optim.PagedAdamW32bit(model.parameters(), lr=1e-4)
    for tokens in batches:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(loss)
