"""Streaming checkpoints: the file is torch.save's, and never more than one offloaded tensor is in
memory.
"""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.checkpoint import StreamingIO, load, release_pages, save
from lightning_hetero.handles.offloaded_parameter import ParameterState, offload
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor


class MeteredSource:
    """Content whose copies are counted while they are alive."""

    live_bytes = 0
    peak_bytes = 0

    def __init__(self, content: Tensor, name: str = "weight") -> None:
        self.content = content
        self.name = name
        self.shape = content.shape
        self.dtype = content.dtype
        self.address = None
        self.reads = 0
        self.fails = False

    def read(self) -> Tensor:
        if self.fails:
            raise OSError(errno.EIO, "the tier failed")
        self.reads += 1
        out = self.content.clone()
        storage = out.untyped_storage()
        num_bytes = storage.nbytes()
        MeteredSource.live_bytes += num_bytes
        MeteredSource.peak_bytes = max(MeteredSource.peak_bytes, MeteredSource.live_bytes)
        weakref.finalize(storage, self._freed, num_bytes)
        return out

    @staticmethod
    def _freed(num_bytes: int) -> None:
        MeteredSource.live_bytes -= num_bytes

    def write(self, value: Tensor) -> None:
        self.content = value.detach().clone()


class StaticRecord:
    """A released parameter over a source."""

    def __init__(self, source: MeteredSource) -> None:
        self.name = source.name
        self.state = ParameterState.RELEASED
        self._source = source

    def wait(self) -> None: ...

    def source(self) -> MeteredSource:
        return self._source


def handle(content: Tensor) -> OffloadedTensor:
    return OffloadedTensor(MeteredSource(content), stride=content.stride())


def records(path: Path) -> dict[str, bytes]:
    """The records of a zip archive without the archive's own name."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None  # checksums
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def ordinary_checkpoint() -> dict[str, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    base = torch.randn(10)
    return {
        "state_dict": module.state_dict(),
        "parameter": module[0].weight,
        "optimizer_states": [optimizer.state_dict()],
        "shared": [base[2:], base.view(2, 5).t()],
        "dtypes": [torch.zeros(2, dtype=d) for d in (torch.bfloat16, torch.bool, torch.int64, torch.uint16, torch.complex64)],
        "odd": [torch.zeros(()), torch.zeros(0, 3), torch.arange(3).untyped_storage(), torch.zeros(2, device="meta")],
        "epoch": 3,
        "text": "x",
    }


def test_ordinary_objects_are_saved_byte_for_byte_as_torch_saves_them(tmp_path: Path) -> None:
    checkpoint = ordinary_checkpoint()
    save(checkpoint, tmp_path / "ours.ckpt")
    torch.save(checkpoint, tmp_path / "torchs.ckpt")
    ours, torchs = records(tmp_path / "ours.ckpt"), records(tmp_path / "torchs.ckpt")
    assert list(ours) == list(torchs)
    assert ours == torchs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint16])
def test_offloaded_tensors_are_saved_byte_for_byte_as_their_contents(tmp_path: Path, dtype: torch.dtype) -> None:
    contents = [
        (torch.arange(24) % 5).to(dtype).view(2, 3, 4),
        torch.ones((), dtype=dtype),
        torch.zeros(0, 3, dtype=dtype),
        (torch.arange(16) % 7).to(dtype).view(1, 4, 2, 2).to(memory_format=torch.channels_last),
    ]
    save({"list": [handle(content) for content in contents]}, tmp_path / "ours.ckpt")
    torch.save({"list": contents}, tmp_path / "torchs.ckpt")
    assert records(tmp_path / "ours.ckpt") == records(tmp_path / "torchs.ckpt")


def test_peak_is_one_tensor(tmp_path: Path) -> None:
    size_bytes = 4 * 1000
    sources = [MeteredSource(torch.full((1000,), float(i))) for i in range(20)]
    MeteredSource.live_bytes = MeteredSource.peak_bytes = 0
    save({str(i): OffloadedTensor(source) for i, source in enumerate(sources)}, tmp_path / "a.ckpt")
    gc.collect()
    assert MeteredSource.peak_bytes == size_bytes
    assert MeteredSource.live_bytes == 0
    assert [source.reads for source in sources] == [1] * 20
    loaded = load(tmp_path / "a.ckpt", weights_only=True)
    assert all(torch.equal(loaded[str(i)], source.content) for i, source in enumerate(sources))


class AheadSource(MeteredSource):
    """One that can be read ahead."""

    under_way = most_under_way = 0

    def begin(self) -> Callable[[], Tensor]:
        taken = [self.read()]
        AheadSource.under_way += 1
        AheadSource.most_under_way = max(AheadSource.under_way, AheadSource.most_under_way)

        def wait() -> Tensor:
            AheadSource.under_way -= 1
            return taken.pop()

        return wait


def test_the_next_tensors_are_read_ahead_in_the_memory_of_the_largest(tmp_path: Path) -> None:
    sizes = [100, 300, 50, 900, 400, 1000, 0, 20, 30, 40, 500, 600, 10]
    sources = [AheadSource(torch.full((size,), float(i))) for i, size in enumerate(sizes)]
    tensors = {str(i): OffloadedTensor(source) for i, source in enumerate(sources)} | {"here": torch.ones(2)}
    AheadSource.under_way = AheadSource.most_under_way = MeteredSource.live_bytes = MeteredSource.peak_bytes = 0
    save(tensors, tmp_path / "ours.ckpt")
    gc.collect()
    assert AheadSource.most_under_way == 5  # those of 0, 20, 30, 40 and 500
    assert MeteredSource.peak_bytes == 4 * max(sizes)
    assert MeteredSource.live_bytes == AheadSource.under_way == 0
    assert [source.reads for source in sources] == [1] * len(sizes)
    torch.save({name: t if name == "here" else sources[int(name)].content for name, t in tensors.items()}, tmp_path / "torchs.ckpt")
    assert records(tmp_path / "ours.ckpt") == records(tmp_path / "torchs.ckpt")


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    source = MeteredSource(torch.randn(4, 4))
    save({"a": OffloadedTensor(source), "b": OffloadedTensor(source).detach(), "c": torch.ones(1)}, tmp_path / "a.ckpt")
    assert source.reads == 1
    loaded = load(tmp_path / "a.ckpt")
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert torch.equal(loaded["a"], source.content)


def test_views_are_saved_as_ordinary_tensors(tmp_path: Path) -> None:
    content = torch.arange(12.0).view(3, 4)
    tensor = handle(content)
    save([tensor.t(), tensor[1], tensor.expand(2, 3, 4), tensor[:, ::2]], tmp_path / "a.ckpt")
    loaded = load(tmp_path / "a.ckpt")
    expected = [content.t(), content[1], content.expand(2, 3, 4), content[:, ::2]]
    assert all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))


def test_released_parameters_are_saved_as_parameters(tmp_path: Path) -> None:
    module = nn.Linear(4, 3)
    twin = nn.Linear(4, 3)
    twin.load_state_dict(module.state_dict())
    source = MeteredSource(module.weight.detach().clone())
    module.weight.data.fill_(float("nan"))
    offload([module.weight], {id(module.weight): StaticRecord(source)})
    save([module.weight, module.state_dict(keep_vars=True), module.state_dict()], tmp_path / "ours.ckpt")
    assert source.reads == 1
    torch.save([twin.weight, twin.state_dict(keep_vars=True), twin.state_dict()], tmp_path / "torchs.ckpt")
    assert records(tmp_path / "ours.ckpt") == records(tmp_path / "torchs.ckpt")


def test_plain_torch_loads_the_file_without_this_package(tmp_path: Path) -> None:
    content = torch.randn(5, 3)
    save({"state_dict": {"weight": handle(content)}, "epoch": 1}, tmp_path / "a.ckpt")
    torch.save(content, tmp_path / "expected.pt")
    script = (
        "import importlib.util, torch\n"
        "assert importlib.util.find_spec('lightning_hetero') is None\n"
        "weight = torch.load('a.ckpt', weights_only=True)['state_dict']['weight']\n"
        "assert type(weight) is torch.Tensor and torch.equal(weight, torch.load('expected.pt'))\n"
        "print('same')\n"
    )
    site = str(Path(torch.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-S", "-c", f"import sys; sys.path.append({site!r})\n{BLOCK_PACKAGE}{script}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.strip() == "same", done.stderr


# The package may be installed beside torch: hide it.
BLOCK_PACKAGE = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "lightning_hetero" else find_spec(name, *rest)
sys.modules["lightning_hetero"] = None
"""


class FullDisk:
    """Replaces ``open``: the file takes ``capacity_bytes`` and then fails."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes

    def __call__(self, path: Path, mode: str) -> FullDisk:
        with open(path, mode) as created:
            self.file = os.fdopen(os.dup(created.fileno()), "wb")
        return self

    def write(self, data: memoryview) -> int:
        self.capacity_bytes -= len(data)
        if self.capacity_bytes < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


@pytest.mark.parametrize("capacity_bytes", [0, 100, 5_000, 10_000])
def test_a_full_disk_is_reported_as_such_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity_bytes: int
) -> None:
    path = tmp_path / "a.ckpt"
    save({"a": torch.ones(3)}, path)
    monkeypatch.setattr("lightning_hetero.checkpoint.files.open", FullDisk(capacity_bytes), raising=False)
    with pytest.raises(OSError, match="No space left") as caught:
        save({"a": handle(torch.zeros(2000)), "b": handle(torch.zeros(2000))}, path)
    assert caught.value.errno == errno.ENOSPC
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
    assert torch.equal(load(path)["a"], torch.ones(3))


def test_a_failing_source_leaves_no_file(tmp_path: Path) -> None:
    bad = handle(torch.zeros(10))
    source = bad.source
    assert isinstance(source, MeteredSource)
    source.fails = True
    with pytest.raises(OSError, match="the tier failed"):
        save({"good": handle(torch.zeros(10)), "bad": bad}, tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_one_storage_with_two_dtypes_is_refused(tmp_path: Path) -> None:
    base = torch.zeros(4)
    with pytest.raises(RuntimeError, match=r"torch\.float32 and as torch\.int32.*clone"):
        save([base, base.view(torch.int32)], tmp_path / "a.ckpt")


def test_directories_are_made_and_unusual_names_work(tmp_path: Path) -> None:
    for path in (tmp_path / "new" / "dir" / "é π.ckpt", f"file://{tmp_path}/b.ckpt"):
        save({"a": handle(torch.ones(3))}, path)
        assert torch.equal(load(path)["a"], torch.ones(3))


def test_remote_file_systems_are_streamed() -> None:
    url = "memory://somewhere/a.ckpt"
    save({"a": handle(torch.ones(3))}, url)
    assert torch.equal(load(url, weights_only=True)["a"], torch.ones(3))
    StreamingIO().remove_checkpoint(url)
    with pytest.raises(FileNotFoundError):
        load(url)


def test_a_failed_remote_save_leaves_nothing() -> None:
    bad = handle(torch.zeros(10))
    source = bad.source
    assert isinstance(source, MeteredSource)
    source.fails = True
    with pytest.raises(OSError, match="the tier failed"):
        save({"bad": bad}, "memory://elsewhere/a.ckpt")
    with pytest.raises(FileNotFoundError):
        load("memory://elsewhere/a.ckpt")


def test_load_maps_zip_files_and_falls_back(tmp_path: Path) -> None:
    content = torch.randn(100_000)
    torch.save({"a": content}, tmp_path / "zip.pt")
    torch.save({"a": content}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    mapped = load(tmp_path / "zip.pt", lambda storage, location: storage, weights_only=True)["a"]
    assert torch.equal(mapped, content)
    assert torch.equal(load(tmp_path / "legacy.pt", "cpu", weights_only=True)["a"], content)
    mapped.zero_()  # private: the file keeps its content
    assert torch.equal(load(tmp_path / "zip.pt")["a"], content)
    with pytest.raises(FileNotFoundError, match=r"missing\.pt"):
        load(tmp_path / "missing.pt")


def test_weights_only_is_on_by_default(tmp_path: Path) -> None:
    save({"path": Path("x")}, tmp_path / "a.ckpt")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        load(tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt", weights_only=False) == {"path": Path("x")}


def resident_file_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssFile in /proc/self/status")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_release_pages_gives_mapped_memory_back_and_only_that(tmp_path: Path) -> None:
    content = torch.randn(4 << 20)
    save({"a": content}, tmp_path / "a.ckpt")
    mapped = load(tmp_path / "a.ckpt")["a"]
    before = resident_file_bytes()
    assert torch.equal(mapped, content)
    grown = resident_file_bytes() - before
    released = release_pages(mapped)
    assert content.nbytes - 2 * os.sysconf("SC_PAGESIZE") <= released <= content.nbytes
    if grown > content.nbytes // 2:  # where the kernel counts mapped pages
        assert resident_file_bytes() - before < content.nbytes // 2
    assert torch.equal(mapped, content)
    kept = content.clone()
    assert release_pages(content) == 0
    assert torch.equal(content, kept)
    assert release_pages(torch.zeros(0)) == release_pages(handle(content)) == 0


def test_checkpoint_io_has_lightnings_methods(tmp_path: Path) -> None:
    checkpoint_io = StreamingIO()
    path = tmp_path / "a.ckpt"
    checkpoint_io.save_checkpoint({"a": handle(torch.ones(2))}, path)
    assert torch.equal(checkpoint_io.load_checkpoint(path, weights_only=True)["a"], torch.ones(2))
    with pytest.raises(TypeError, match="storage_options"):
        checkpoint_io.save_checkpoint({}, path, storage_options={"x": 1})
    checkpoint_io.remove_checkpoint(path)
    checkpoint_io.remove_checkpoint(path)
    assert not path.exists()
