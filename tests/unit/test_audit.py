"""A store's files are read without the engine, and whatever is changed in them is found and
named.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import Recipe, Shape, run

from lightning_hetero.errors import ConfigError, StoreBusyError, StoreCorruptError
from lightning_hetero.store.format.audit import StoreFiles, crc32c
from lightning_hetero.strategies import HeteroOffloadStrategy

STEPS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store after three steps, with digests."""
    root = tmp_path_factory.mktemp("made")
    strategy: Any = HeteroOffloadStrategy(plan="disk", disk_path=root / "store", verify_digests=True)
    run(Recipe(steps=STEPS, shape=Shape(frozen=(1,)), precision="bf16-true"), strategy, root)
    return root / "store"


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    copy = tmp_path / "store"
    shutil.copytree(made, copy)
    copy.chmod(0o700)
    return copy


def faults(path: Path) -> list[str]:
    with StoreFiles(path) as files:
        return [str(fault) for fault in files.check()]


def change(path: Path, offset: int, *, value: int | None = None) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] = raw[offset] ^ 0x40 if value is None else value
    path.write_bytes(raw)


def test_checksums_are_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"6789", crc32c(b"12345")) == 0xE3069283


def test_a_whole_store_has_no_faults(made: Path) -> None:
    assert faults(made) == []
    with StoreFiles(made) as files:
        assert files.record is not None
        assert files.notes == []
        assert files.record.blocks
        assert max(block.step for block in files.record.blocks) <= files.record.step
        assert all((made / block.file).is_file() for block in files.record.blocks)


def test_every_byte_that_counts_is_watched(store: Path) -> None:
    """One byte of every kind: heads, weights, arrays, footers. A byte outside changes nothing."""
    with StoreFiles(store) as files:
        assert files.record is not None
        trained = [b for b in files.record.blocks if b.has_state]
        assert trained
        block = trained[0]
        with files.slot(block) as slot:
            state, footer = slot._state_start, slot._state_start + slot._footer_offset(0)
            weights = slot._head_bytes if slot.geometry.weights_on_disk_file else None
    path = store / block.file
    original = path.read_bytes()
    places = {0: "no stamp", 8: "another store", 24: "another rewrite", 40: "another place", 60: "checksum", 70: "checksum"}
    places |= {state + 17 * 64: "state differs", footer: "no stamp", footer + 48: "another place", footer + 64: "checksum"}
    if weights is not None:
        places[weights] = "weights differs"
    for offset, words in places.items():
        change(path, offset)
        (fault,) = faults(store)
        assert block.file in fault
        assert f"block {block.id}" in fault
        assert words in fault, (offset, fault)
        path.write_bytes(original)
    other = store / f"{path.name[:-1]}{'ab'[1 - block.slot]}"
    change(other, 0)
    assert faults(store) == []


def test_missing_and_exchanged_files_are_found(store: Path) -> None:
    with StoreFiles(store) as files:
        assert files.record is not None
        first, second = files.record.blocks[:2]
    one, two = store / first.file, store / second.file
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    assert "another place" in faults(store)[0]
    one.write_bytes(content[:-4096])
    assert "bytes, its geometry" in faults(store)[0]
    one.unlink()
    assert f"{first.file} at offset 0" in faults(store)[0]
    one.symlink_to(two)
    assert f"{first.file} at offset 0" in faults(store)[0]


def test_a_torn_record_is_noted_and_the_one_before_counts(store: Path) -> None:
    ring = store / "COMMIT"
    length = ring.stat().st_size // 16
    with StoreFiles(store) as files:
        assert files.record is not None
        newest = files.record.sequence
    change(ring, newest % 16 * length + 56)
    with StoreFiles(store) as files:
        assert files.record is not None
        assert files.record.sequence == newest - 1
        assert [note.what for note in files.notes] == ["the record's checksum differs"]
    for place in range(16):
        change(ring, place * length, value=0)
    assert all("no commit record" in fault for fault in faults(store))
    ring.write_bytes(bytes(ring.stat().st_size))
    assert ["no step was committed" in fault for fault in faults(store)] == [True]
    ring.write_bytes(b"")
    assert ["0 bytes" in fault for fault in faults(store)] == [True]
    ring.unlink()
    assert ["cannot be opened" in fault for fault in faults(store)] == [True]


def test_weights_are_read_from_a_slot(made: Path) -> None:
    with StoreFiles(made) as files:
        assert files.record is not None
        for block in files.record.blocks:
            with files.slot(block) as slot:
                if slot.geometry.weights_on_disk_file and slot.geometry.num_state:
                    whole = torch.empty(slot.geometry.num_elements, dtype=torch.bfloat16)
                    slot.read_weights(0, whole)
                    part = torch.empty(20, dtype=torch.bfloat16)
                    slot.read_weights(7, part)
                    assert torch.equal(whole[7:27], part)
                    assert whole.float().abs().sum() > 0
                    with pytest.raises(StoreCorruptError, match="the file ends here"):
                        slot.read_weights(1 << 40, part)


def _no_manifest(store: Path) -> None:
    (store / "MANIFEST").unlink()


def _another_version(store: Path) -> None:
    manifest = store / "MANIFEST"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 9'))


def _another_uuid(store: Path) -> None:
    manifest = store / "MANIFEST"
    manifest.write_text(manifest.read_text().replace('"uuid": "', '"uuid": "x'))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_no_manifest, "not a store"),
        (_another_version, "version"),
        (_another_uuid, "32 hexadecimal digits"),
        (shutil.rmtree, "cannot be opened"),
    ],
)
def test_a_directory_that_is_no_store_is_refused(spoil: Callable[[Path], object], words: str, store: Path) -> None:
    spoil(store)
    with pytest.raises(ConfigError, match=words):
        StoreFiles(store)


def test_a_store_in_use_is_refused(store: Path) -> None:
    with StoreFiles(store), pytest.raises(StoreBusyError):
        StoreFiles(store)
