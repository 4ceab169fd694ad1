"""One rank of a test of options and optimizers on several devices: a script.

See ``tests/integration/test_shared_options.py`` and ``support.shared_model``, which has the model
and the reference.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from support.shared_model import RANK, batches, model, reference, run_scenarios, same, trainer

_TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


def trains_16_bit_weights(out: Path) -> None:
    """fp32 masters in slices: the bits of the reference with masters on whole tensors."""
    cases = [
        ("bf16-true", "", 1, None), ("bf16-true", "rare tied", 2, 0.3),
        ("16-true", "frozen", 1, 0.3), ("16-true", "skips", 1, None),
    ]  # fmt: skip
    for precision, kind, accumulate, clip in cases:
        shared = model(kind, seed=5 + RANK)
        flags = {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
        trainer(out, **flags).fit(shared, batches())
        assert next(shared.parameters()).dtype is _TRUE[precision]
        same(shared, reference(kind, accumulate, clip, dtype=_TRUE[precision]))


def _states(run: Any, path: Path) -> Any:
    run.save_checkpoint(path)
    return torch.load(path)["optimizer_states"]


def _same_states(got: Any, wanted: Any) -> None:
    wanted = {key: state for key, state in wanted.items() if len(state) > 1}  # of frozen weights the reference has masters
    assert got.keys() == wanted.keys()
    for key, state in wanted.items():
        assert got[key].keys() == state.keys(), (key, got[key].keys(), state.keys())
        for name, value in state.items():
            assert torch.equal(got[key][name], value) if isinstance(value, torch.Tensor) else got[key][name] == value, (key, name)


def goes_on_with_16_bit_weights(out: Path) -> None:
    """Checkpoints have whole masters. If one of plain Lightning has none, they are the weights."""
    shared = model("frozen")
    run = trainer(out, precision="bf16-true", callbacks=[ModelCheckpoint(out, "half")], enable_checkpointing=True)
    run.fit(shared, batches())
    wanted = reference("frozen", dtype=torch.bfloat16)
    for states in (torch.load(out / "half.ckpt")["optimizer_states"], _states(run, out / "after.ckpt")):
        _same_states(states[0]["state"], wanted.__dict__["made"].state_dict()["state"])
    for name in ("half", "after", "bare"):
        begin = torch.load(out / "half.ckpt")
        if name == "bare":
            for state in begin["optimizer_states"][0]["state"].values():
                state.pop("master_param")
            if RANK == 0:
                torch.save(begin, out / "bare.ckpt")
            torch.distributed.barrier() if torch.distributed.is_initialized() else None
        again = model("frozen", seed=9 + RANK)
        trainer(out, precision="bf16-true", max_epochs=2).fit(again, batches(), ckpt_path=out / f"{name}.ckpt")
        same(again, reference("frozen", dtype=torch.bfloat16, begin=begin))


def skips_steps_that_overflow(out: Path) -> None:
    """A loss that overflows on one rank lets all ranks skip the step, and lower the same scale."""
    for options, clip in [({}, None), ({"fused": False}, 0.3)]:
        make = partial(torch.amp.GradScaler, "cpu", init_scale=2.0**12, growth_interval=2)
        scalers = [make(), make()]
        shared = model("overflows", **options)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scalers[0])
        trainer(out, plugins=[plugin], gradient_clip_val=clip).fit(shared, batches())
        same(shared, reference("overflows", clip=clip, mixed=True, scaler=scalers[1]))
        scales = [scaler.get_scale() for scaler in scalers]
        assert scales == [2.0**12] * 2, scales


if __name__ == "__main__":
    run_scenarios(globals())
