"""Saves on several tiers: what is read from where, what counts as complete, and what happens to
damage and errors.
"""

from __future__ import annotations

import itertools
import logging
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.state_dict_loader import load as torch_load

from lightning_hetero.errors import CheckpointMissingError, CheckpointWriteError, ConfigError
from lightning_hetero.parallel.recovery import CheckpointTier, LayerMap, TieredCheckpoints
from lightning_hetero.parallel.recovery.layer_map import MAP, METADATA, checksums, layer_of, pieces_of, runs_of
from lightning_hetero.parallel.recovery.peers import Want, schedule
from lightning_hetero.parallel.recovery.writer import LayerWriter

PIECE = 1024


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {f"layers.{i}.weight": draw(32, 24) for i in range(3)} | {"norm.bias": draw(5).bfloat16()}
    moments = {name: {"step": torch.tensor(float(seed)), "exp_avg": draw(*w.shape)} for name, w in weights.items()}
    groups = [{"lr": 0.1 * seed, "params": list(weights)}]
    return {"state_dict": weights, "optimizer_0": {"state": moments, "param_groups": groups}}


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {"memory": tmp_path / "memory", "disk": tmp_path / "disk"}


def make(folders: dict[str, Path], **options: Any) -> TieredCheckpoints:
    return TieredCheckpoints(**folders, piece_bytes=PIECE, **options)  # type: ignore[arg-type]


def saved(folders: dict[str, Path], path: Any, *steps: int, **options: Any) -> LayerMap:
    checkpoints = make(folders, **options)
    for step in steps:
        checkpoints.save(state(step), str(path).format(step), step=step, rest=b"rest %d" % step, own=b"own")
    checkpoints.close()
    loaded = make(folders, **options).load(str(path).format(steps[-1]))
    assert loaded is not None
    return loaded.layer_map


def needed(layer_map: LayerMap, seed: int) -> dict[str, int]:
    """Bytes that a whole load reads of each file: the pieces with a number of a tensor, and all of
    what is no tensor.
    """
    pieces: dict[str, set[int]] = {}
    saved_state = state(seed)
    tensors = {f"state_dict.{name}": w for name, w in saved_state["state_dict"].items()}
    tensors |= {f"optimizer_0.state.{n}.{k}": t for n, of in saved_state["optimizer_0"]["state"].items() for k, t in of.items()}
    for name, tensor in tensors.items():
        layer = "norm" if "norm" in name else name[name.index("layers") :][:8]
        start = layer_map.starts[f"{name}@{','.join('0' * tensor.ndim)}"]
        pieces.setdefault(f"{layer}.0.distcp", set()).update(b // PIECE for b in range(start, start + tensor.nbytes))
    for name in layer_map.files.keys() - pieces.keys():
        pieces[name] = set(range(len(layer_map.files[name].crc32)))
    return {name: sum(min(PIECE, layer_map.files[name].bytes - p * PIECE) for p in found) for name, found in pieces.items()}


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


# ---- where things come from ----------------------------------------------------------------------


def test_everything_comes_from_memory_bit_for_bit(folders: dict[str, Path], tmp_path: Path) -> None:
    layer_map = saved(folders, tmp_path / "c.ckpt", 3)
    checkpoints = make(folders)
    loaded = checkpoints.load(tmp_path / "c.ckpt")
    assert loaded is not None
    assert_same(state(3), loaded.state)
    assert (loaded.rest, loaded.own, loaded.layer_map.step) == (b"rest 3", b"own", 3)
    assert checkpoints.bytes_read == {"memory": sum(needed(layer_map, 3).values()), "disk": 0, "peer": 0, "remote": 0}
    assert {"layers.0.0.distcp", "layers.2.0.distcp", "norm.0.distcp", "meta.pt"} <= layer_map.files.keys()


def test_a_damaged_piece_comes_from_the_next_tier(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer_map = saved(folders, tmp_path / "c.ckpt", 1)
    name = "layers.1.0.distcp"
    flip(folders["memory"] / layer_map.save / name, PIECE + 7)  # in the second piece
    flip(folders["disk"] / layer_map.save / name, PIECE + 8)
    (folders["memory"] / layer_map.save / "layers.2.0.distcp").unlink()
    checkpoints = make(folders)
    with caplog.at_level(logging.WARNING):
        loaded = checkpoints.load(tmp_path / "c.ckpt")
    assert loaded is not None
    assert_same(state(1), loaded.state)
    of_files = needed(layer_map, 1)
    missing = of_files["layers.2.0.distcp"]
    assert checkpoints.bytes_read == {
        "memory": sum(of_files.values()) - PIECE - missing,
        "disk": missing,
        "peer": 0,
        "remote": PIECE,
    }
    told = [r.getMessage() for r in caplog.records if name in r.getMessage()]
    assert len(told) == 2
    assert "memory" in told[0]
    assert "disk" in told[1]


def test_without_local_tiers_everything_is_remote(tmp_path: Path) -> None:
    layer_map = saved({}, "memory://recovery/{}.ckpt", 2)
    checkpoints = make({})
    loaded = checkpoints.load("memory://recovery/2.ckpt")
    assert loaded is not None
    assert_same(state(2), loaded.state)
    assert checkpoints.bytes_read == {"peer": 0, "remote": sum(needed(layer_map, 2).values())}


def test_missing_pieces_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    layer_map = saved(folders, tmp_path / "c.ckpt", 4)
    for root in (*folders.values(), tmp_path / "c.ckpt"):
        flip(root / layer_map.save / "norm.0.distcp", 100)
    with pytest.raises(CheckpointMissingError, match=r"step 4.*norm\.0\.distcp \(piece 0; tried memory.*disk.*remote.*damaged"):
        make(folders).load(tmp_path / "c.ckpt")


def test_a_part_of_the_state_reads_its_pieces_only(folders: dict[str, Path], tmp_path: Path) -> None:
    layer_map = saved(folders, tmp_path / "c.ckpt", 1)
    checkpoints = make(folders)
    target = {"state_dict": {"layers.1.weight": torch.zeros(32, 24)}}
    checkpoints.load(tmp_path / "c.ckpt", target)
    assert torch.equal(target["state_dict"]["layers.1.weight"], state(1)["state_dict"]["layers.1.weight"])
    begin = layer_map.starts["state_dict.layers.1.weight@0,0"]
    first, last = begin // PIECE, (begin + 32 * 24 * 4 - 1) // PIECE
    start, end = layer_map.span("layers.1.0.distcp", first, last)
    extra = layer_map.files["meta.pt"].bytes + layer_map.files["rank_0.pt"].bytes
    assert checkpoints.bytes_read["memory"] == end - start + extra


@pytest.mark.parametrize("sizes", [(), (7,), (6, 5), (4, 3, 5)])
def test_pieces_are_those_that_hold_a_byte_of_the_part(sizes: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(sizes).numel()).view(sizes)
    ranges = [[(o, n) for o in range(s) for n in range(1, s - o + 1)] for s in sizes]
    for part in itertools.islice(itertools.product(*ranges), 0, None, 7):
        offsets, lengths = [o for o, _ in part], [n for _, n in part]
        found = numbers[tuple(slice(o, o + n) for o, n in part)].flatten().tolist()
        expected = sorted({byte // 16 for n in found for byte in range(10 + 4 * n, 14 + 4 * n)})
        assert pieces_of(10, sizes, offsets, lengths, 4, 16) == expected
    assert pieces_of(0, [4, 4], [0, 0], [0, 4], 4, 16) == []
    assert runs_of([5, 1, 2, 9]) == [(1, 2), (5, 5), (9, 9)]


def test_checksums_do_not_depend_on_how_the_content_is_cut() -> None:
    content = bytes(range(256)) * 3
    assert checksums([content], 100) == checksums([content[:1], content[1:333], content[333:]], 100)
    assert checksums([content], 100)[-1] == zlib.crc32(content[700:])
    assert checksums([], 100) == ()


def test_layers_are_named_as_modules() -> None:
    assert layer_of("state_dict.model.layers.3.mlp.weight") == "model.layers.3"
    assert layer_of("optimizer_0.state.model.layers.3.mlp.weight.exp_avg") == "model.layers.3"
    assert layer_of("state_dict.embed.weight") == layer_of("optimizer_1.state.embed.weight.step") == "embed"
    assert layer_of("state_dict.weight") == "model"


def test_transfers_are_spread_over_all_senders() -> None:
    files = {n: {"bytes": 100, "crc32": [0], "ranks": [0]} for n in "ab"}
    fields = {"save": "s", "step": 1, "order": 1.0, "path": "p", "ranks": 3, "piece_bytes": 100}
    layer_map = LayerMap.decode(_encoded({**fields, "files": files, "starts": {}, "metadata_crc32": 0, "version": 1}))
    holders = {"a": [0, 1], "b": [0, 1]}
    wants = [{}, {}, {"a": Want((0,)), "b": Want((0,))}]
    assert schedule(wants, holders, layer_map).transfers == [(0, 2, "a", (0,)), (1, 2, "b", (0,))]
    asked = [{}, {}, {"a": Want((0,), (0,)), "b": Want((0,), (0, 1))}]
    assert schedule(asked, holders, layer_map).transfers == [(1, 2, "a", (0,))]


def _encoded(fields: dict[str, Any]) -> bytes:
    import json

    text = json.dumps(fields).encode()
    return b"%08x\n%s" % (zlib.crc32(text), text)


# ---- what counts ---------------------------------------------------------------------------------


def test_the_newest_complete_save_is_found(folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run" / "{}.ckpt"
    layer_map = saved(folders, path, 1, 2, keep=3)
    for root in (*folders.values(), tmp_path / "run" / "2.ckpt"):
        (root / layer_map.save / "layers.0.0.distcp").unlink()
    with caplog.at_level(logging.WARNING):
        loaded = make(folders).load(None)
    assert loaded is not None
    assert loaded.layer_map.step == 1
    assert_same(state(1), loaded.state)
    assert "step 2" in caplog.text
    assert "layers.0.0.distcp" in caplog.text
    with pytest.raises(CheckpointMissingError, match=r"no complete save of .*2\.ckpt"):
        make(folders).load(tmp_path / "run" / "2.ckpt")


def test_a_run_that_went_back_continues_from_what_it_saved_since(folders: dict[str, Path], tmp_path: Path) -> None:
    saved(folders, tmp_path / "run" / "{}.ckpt", *range(1, 6), keep=9)
    went_back = make(folders)
    went_back.load(tmp_path / "run" / "1.ckpt")
    went_back.save(state(2), tmp_path / "again.ckpt", step=2)
    went_back.close()
    loaded = make(folders).load(None)
    assert loaded is not None
    assert loaded.layer_map.path.endswith("again.ckpt")


def test_a_lost_machine_finds_the_remote_copies(folders: dict[str, Path], tmp_path: Path) -> None:
    saved(folders, tmp_path / "run" / "{}.ckpt", 1, 2)
    elsewhere = {"disk": tmp_path / "other machine"}
    loaded = make(elsewhere).load(None, folders=[tmp_path / "run"])
    assert loaded is not None
    assert loaded.layer_map.step == 2
    assert make(elsewhere).load(None, required=False) is None
    with pytest.raises(CheckpointMissingError, match="no complete save"):
        make(elsewhere).load(None)


def test_a_save_that_was_cut_short_does_not_count(folders: dict[str, Path], tmp_path: Path) -> None:
    layer_map = saved(folders, tmp_path / "run" / "{}.ckpt", 1, 2, keep=2)
    for root in (*folders.values(), tmp_path / "run" / "2.ckpt"):
        (root / layer_map.save / "map.json").unlink()  # it is written last
    loaded = make(folders).load(None, folders=[tmp_path / "run"])
    assert loaded is not None
    assert loaded.layer_map.step == 1


def test_a_damaged_map_is_as_none(folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layer_map = saved(folders, tmp_path / "c.ckpt", 1)
    flip(folders["memory"] / layer_map.save / "map.json", 50)
    flip(folders["disk"] / layer_map.save / ".metadata", 50)
    loaded = make(folders).load(tmp_path / "c.ckpt")
    assert loaded is not None
    assert_same(state(1), loaded.state)
    assert "map of save" in caplog.text


def test_the_last_saves_are_kept(folders: dict[str, Path], tmp_path: Path) -> None:
    saved(folders, tmp_path / "{}.ckpt", 1, 2, 3, 4, keep=2)
    for root in folders.values():
        assert sorted(int(p.name[:12]) for p in root.iterdir() if p.is_dir()) == [3, 4]
    assert [(tmp_path / f"{n}.ckpt" / "map.json").exists() or (tmp_path / f"{n}.ckpt").is_dir() for n in (1, 2, 3, 4)] == [True] * 4


def test_a_path_that_is_saved_to_again_holds_the_later_save(folders: dict[str, Path], tmp_path: Path) -> None:
    layer_map = saved(folders, tmp_path / "last.ckpt", 1, 2)
    assert [p.name for p in (tmp_path / "last.ckpt").iterdir() if p.is_dir()] == [layer_map.save]
    assert layer_map.step == 2


def test_a_run_that_went_back_counts_by_when_it_saved(folders: dict[str, Path], tmp_path: Path) -> None:
    saved(folders, tmp_path / "a" / "{}.ckpt", 7, keep=3)
    checkpoints = make(folders, keep=3)
    checkpoints.save(state(5), tmp_path / "b.ckpt", step=5)
    checkpoints.close()
    loaded = make(folders).load(None)
    assert loaded is not None
    assert loaded.layer_map.step == 5


def test_removing_removes_it_everywhere(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoints = make(folders, keep=3)
    for step in (1, 2):
        checkpoints.save(state(step), tmp_path / f"{step}.ckpt", step=step)
    checkpoints.remove(tmp_path / "1.ckpt")
    checkpoints.close()
    assert not (tmp_path / "1.ckpt").exists()
    for root in folders.values():
        assert [int(p.name[:12]) for p in root.iterdir() if p.is_dir()] == [2]


# ---- in the background ---------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [True, False])
def test_the_saved_state_is_that_of_the_call(copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the copy, the very same test finds the next step's values."""
    go_on, write = threading.Event(), LayerWriter.write_data

    def wait_and_write(self: LayerWriter, *arguments: Any) -> Any:
        assert go_on.wait(60)
        return write(self, *arguments)

    monkeypatch.setattr(LayerWriter, "write_data", wait_and_write)
    checkpoints = make({})
    if not copies:
        monkeypatch.setattr(DefaultStager, "stage", lambda _, state: state)
    training = state(1)
    checkpoints.save(training, tmp_path / "c.ckpt", step=1)
    for weight in training["state_dict"].values():
        weight.add_(1)  # the next optimizer step
    go_on.set()
    checkpoints.close()
    loaded = make({}).load(tmp_path / "c.ckpt")
    assert loaded is not None
    for name, weight in state(1)["state_dict"].items():
        assert torch.equal(loaded.state["state_dict"][name], weight) == copies


def test_an_error_of_the_writer_is_raised_at_the_next_save_and_at_the_end(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = CheckpointTier.publish

    def fail(self: CheckpointTier, name: str, content: Any) -> None:
        if name.endswith("norm.0.distcp") and self.name == "remote":
            raise OSError(28, "No space left on device")
        publish(self, name, content)

    monkeypatch.setattr(CheckpointTier, "publish", fail)
    checkpoints = make(folders)
    checkpoints.save(state(1), tmp_path / "1.ckpt", step=1)
    checkpoints.remove(tmp_path / "0.ckpt")
    with pytest.raises(CheckpointWriteError, match=r"step 1 to remote .*1\.ckpt.*No space left"):
        checkpoints.save(state(2), tmp_path / "2.ckpt", step=2)
    checkpoints.save(state(3), tmp_path / "3.ckpt", step=3)
    with pytest.raises(CheckpointWriteError, match="step 3"):
        checkpoints.close()
    loaded = make(folders).load(None)  # the local tiers have it
    assert loaded is not None
    assert loaded.layer_map.step == 3


@pytest.mark.parametrize("tier", ["memory", "disk", "remote"])
@pytest.mark.parametrize("file", [".distcp", METADATA, MAP])
def test_whatever_file_cannot_be_written_the_error_says_so(
    tier: str, file: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = CheckpointTier.publish

    def fail(self: CheckpointTier, name: str, content: Any) -> None:
        if name.endswith(file) and self.name == tier:
            raise OSError(28, "No space left on device")
        publish(self, name, content)

    monkeypatch.setattr(CheckpointTier, "publish", fail)
    checkpoints = make(folders)
    checkpoints.save(state(1), tmp_path / "1.ckpt", step=1)
    with pytest.raises(CheckpointWriteError, match=r"step 1 to remote .*1\.ckpt.*No space left") as raised:
        checkpoints.close()
    assert "Traceback" not in str(raised.value)


def test_a_checkpoint_outlives_its_successor_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = make({})
    checkpoints.save(state(1), tmp_path / "1.ckpt", step=1)
    checkpoints.wait()
    monkeypatch.setattr(CheckpointTier, "publish", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    checkpoints.save(state(2), tmp_path / "2.ckpt", step=2)
    checkpoints.remove(tmp_path / "1.ckpt")  # as Lightning does after each save
    with pytest.raises(CheckpointWriteError, match="gone"):
        checkpoints.close()
    monkeypatch.undo()
    assert make({}).load(tmp_path / "1.ckpt") is not None


# ---- others' formats -----------------------------------------------------------------------------


def test_torch_reads_the_remote_copy(folders: dict[str, Path], tmp_path: Path) -> None:
    saved(folders, tmp_path / "c.ckpt", 1)
    target = {"state_dict": {name: torch.zeros_like(w) for name, w in state(1)["state_dict"].items()}}
    torch_load(target, storage_reader=FileSystemReader(tmp_path / "c.ckpt"))
    assert_same(state(1)["state_dict"], target["state_dict"])


@pytest.mark.parametrize("options", [{"keep": 0}, {"piece_bytes": 0}, {"disk": "memory://x"}, {"memory": "a", "disk": "a"}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        TieredCheckpoints(**options)
