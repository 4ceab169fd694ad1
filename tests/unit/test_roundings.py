"""Which weights of files a precision would round twice in memory."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_hetero.convert.importing import ModelWeights
from lightning_hetero.errors import ConfigError
from lightning_hetero.runtime.construction import refuse_roundings

BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)  # torch promotes them to no other dtype
WORDS = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("passed", WORDS)
@pytest.mark.parametrize("stored", BYTES + WORDS)
def test_what_the_dtype_before_rounds_is_refused(stored: torch.dtype, passed: torch.dtype, tmp_path: Path) -> None:
    count = 1 << 8 * min(2, stored.itemsize)
    bits = torch.arange(count, dtype=torch.int32).to(torch.uint8 if count == 256 else torch.uint16)
    values = bits.view(stored) if stored.itemsize < 4 else torch.linspace(-1, 1, count)
    there, back = values.float(), values.to(passed).float()
    is_rounded = not torch.equal(there.nan_to_num(1), back.nan_to_num(1))
    save_file({"weight": values.view(1, -1)}, path := tmp_path / "model.safetensors")
    target = torch.bfloat16 if passed == torch.float16 else torch.float16
    root = nn.Linear(count, 1, bias=False, device="meta", dtype=target)
    refusal: Any = pytest.raises(ConfigError, match=f"where it was {passed} before") if is_rounded else nullcontext()
    with refusal:
        refuse_roundings(root, {"weight": passed}, ModelWeights(root, path))
