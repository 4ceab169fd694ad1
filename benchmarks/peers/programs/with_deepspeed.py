"""DeepSpeed, with what its configuration says."""

import deepspeed


def train(model, batches, report, *, config):
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for tokens in batches:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        report(loss)
