"""The safetensors format: what the reference package writes is read, what we write it reads, and
nothing else is believed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_hetero.checkpoint.files import Place
from lightning_hetero.convert.safetensors import (
    DTYPES,
    INDEX,
    TensorToWrite,
    WeightFiles,
    read_header,
    write_directory,
    write_file,
)
from lightning_hetero.errors import ConfigError

reference = pytest.importorskip("safetensors.torch")


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    out = {}
    for kind, dtype in DTYPES.items():
        raw = torch.randint(0, 2 if dtype == torch.bool else 100, (3, 5, dtype.itemsize), dtype=torch.uint8, generator=generator)
        out[f"a.{kind}"] = raw.view(dtype).squeeze(-1)
    return out | {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "odd": torch.ones(7, dtype=torch.uint8)}


def to_write(named: dict[str, Tensor], log: list[str] | None = None) -> list[TensorToWrite]:
    def read(name: str) -> Tensor:
        if log is not None:
            log.append(name)
        return named[name]

    return [TensorToWrite(n, t.dtype, t.shape, lambda n=n: read(n)) for n, t in named.items()]


def same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def test_files_of_the_reference_package_are_read(tmp_path: Path) -> None:
    named = tensors()
    reference.save_file(named, tmp_path / "x.safetensors", metadata={"format": "pt"})
    files = WeightFiles.open(tmp_path)
    assert files.metadata == {"format": "pt"}
    assert files.tensors.keys() == named.keys()
    assert all(same(files.tensors[n].read(), t) for n, t in named.items())


def test_the_reference_package_reads_our_files(tmp_path: Path) -> None:
    named = tensors()
    write_file(tmp_path / "x.safetensors", to_write(named))
    read = reference.load_file(tmp_path / "x.safetensors")
    assert read.keys() == named.keys()
    assert all(same(read[n], t) for n, t in named.items())


@pytest.mark.parametrize("memory", [torch.empty(3, 5), torch.empty(5, 3).t(), torch.empty(3, 5, dtype=torch.bfloat16)])
def test_values_are_converted_as_copy_does(memory: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetero.convert.safetensors.PIECE_BYTES", 16)  # several pieces, the last one shorter
    value = torch.randn(3, 5, dtype=torch.float64)
    reference.save_file({"x": value}, tmp_path / "x.safetensors")
    WeightFiles.open(tmp_path).tensors["x"].read_into(memory)
    assert torch.equal(memory, torch.empty_like(memory).copy_(value))


def test_shards_keep_to_their_size_and_an_index_finds_tensors(tmp_path: Path) -> None:
    named = {f"t{i}": torch.full((10,), float(i)) for i in range(7)} | {"large": torch.ones(50)}
    read: list[str] = []
    files = write_directory(tmp_path / "out", to_write(named, read), max_shard_bytes=100)
    assert sorted(read) == sorted(named)
    assert [f.name for f in files] == [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 4 * 120}
    assert all(torch.equal(reference.load_file(tmp_path / "out" / index["weight_map"][n])[n], t) for n, t in named.items())
    opened = WeightFiles.open(tmp_path / "out")
    assert opened.files == files
    assert all(torch.equal(opened.tensors[n].read(), t) for n, t in named.items())
    with pytest.raises(ConfigError, match="already holds"):
        write_directory(tmp_path / "out", to_write(named), max_shard_bytes=100)


def test_nothing_is_left_of_a_file_that_fails(tmp_path: Path) -> None:
    def fail() -> Tensor:
        raise OSError("the tier failed")

    with pytest.raises(OSError, match="the tier failed"):
        write_file(tmp_path / "x.safetensors", [TensorToWrite("x", torch.float32, torch.Size([2]), fail)])
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="complex128"):
        write_file(tmp_path / "x.safetensors", to_write({"x": torch.ones(2, dtype=torch.complex128)}))


# ---- what is not believed ------------------------------------------------------------------------


def file_of(path: Path, header: Any, data: bytes = b"\0" * 8) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"x": entry(dtype="F31")}, "F31"),
        ({"x": entry(dtype=["F32"])}, "dtype"),
        ({"x": entry(shape=[3])}, "has 8 bytes"),
        ({"x": entry(shape=[-2])}, "shape"),
        ({"x": entry(shape=[2.0])}, "shape"),
        ({"x": entry(shape=[True, 2])}, "shape"),
        ({"x": entry(shape=[2**62, 2**62])}, "has 8 bytes"),
        ({"x": entry(data_offsets=[8, 0])}, "data_offsets"),
        ({"x": entry(data_offsets=[0, 8, 9])}, "data_offsets"),
        ({"x": entry(more=1)}, "no dtype"),
        ({"x": entry(), "y": entry()}, "overlap"),
        ({"x": entry(data_offsets=[4, 12])}, "gap"),
        ({"x": entry(data_offsets=[0, 4], shape=[1])}, "end at byte"),
        ({"x": entry(shape=[2**40], data_offsets=[0, 2**42])}, "end at byte"),
        ({"x": entry(), "__metadata__": {"a": 1}}, "metadata"),
        ([entry()], "JSON object"),
        (b'{"x": 1, "x": 2}', "twice"),
        (b"[" * 5000, ""),
        (b"\xff\xfe", ""),
        (b"", ""),
    ],
)
def test_a_wrong_header_is_refused(header: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        read_header(Place.of(file_of(tmp_path / "x.safetensors", header)))


@given(st.data())
def test_damage_is_refused_or_leaves_tensors_inside_the_file(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        header = {"x": entry(), "y": entry(dtype="U8", data_offsets=[8, 10])}
        path = file_of(Path(folder, "x.safetensors"), header, b"\1" * 10)
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
        try:
            tensors, _ = read_header(Place.of(path))
        except ConfigError:
            return
        for tensor in tensors.values():
            tensor.read()  # which raises where the file has ended


def test_a_file_that_has_become_shorter_is_an_error(tmp_path: Path) -> None:
    path = file_of(tmp_path / "x.safetensors", {"x": entry()})
    (tensor,) = read_header(Place.of(path))[0].values()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"ends at byte .* inside 'x'"):
        tensor.read()


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "", "..", 3])
def test_an_index_names_only_files_beside_it(name: Any, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ConfigError, match="not an index"):
        WeightFiles.open(tmp_path)


def two_files(folder: Path) -> None:
    for name in ("a", "b"):
        file_of(folder / f"{name}.safetensors", {name: entry()})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "no safetensors file"),
        (two_files, "a.safetensors, b.safetensors"),
        (lambda folder: folder.rmdir(), "neither a file nor a directory"),
        (
            lambda folder: (two_files(folder), (folder / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}')),
            "where it is not",
        ),
        (lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": "c.safetensors"}}'), "not a complete safetensors file"),
    ],
)
def test_the_error_of_a_directory_names_missing_files(make: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    make(folder)
    with pytest.raises(ConfigError, match=words):
        WeightFiles.open(folder)
