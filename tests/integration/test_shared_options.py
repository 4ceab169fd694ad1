"""Precisions, optimizers and options of ``hetero_offload`` on several devices."""

from __future__ import annotations

from pathlib import Path

from support import ranks

SCRIPT = Path(ranks.__file__).with_name("shared_options.py")


def test_16_bit_weights_have_masters_in_slices(tmp_path: Path) -> None:
    run(tmp_path, "trains_16_bit_weights", "goes_on_with_16_bit_weights", "skips_steps_that_overflow", world=3)


def test_optimizers_by_element_update_slices_by_their_own_code(tmp_path: Path) -> None:
    run(tmp_path, "updates_by_element", "has_several_optimizers", "has_64_bits", world=3)


def run(folder: Path, *scenarios: str, world: int = 2) -> None:
    """Runs scenarios of the script on as many ranks."""
    outputs = ranks.start(SCRIPT, folder, *scenarios, cwd=folder, world=world)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * world
