"""The directory of a store: made, used again, refused, held by one process."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.errors import ConfigError, HeteroError, OutOfDiskError, StoreBusyError, StoreError
from lightning_hetero.store.format import directory as module
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.store.format.places import make_private
from lightning_hetero.store.volume import Volume

MODEL: dict[str, Any] = {"optimizer": "AdamW", "blocks": [{"name": "layers.0", "shapes": [[4, 4]], "dtype": "float32"}]}


NOBODY = 65534


ROOT = os.geteuid() == 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A private place for stores."""
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


def _open(path: Path | None, root: Path, **options: Any) -> StoreDirectory:
    known: dict[str, Any] = {"manifest": MODEL, "needed_bytes": 0}
    return StoreDirectory.create_or_adopt(path, default_root=root, **(known | options))


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_missing_path_is_made_private_with_its_parents(root: Path) -> None:
    store = _open(root / "a" / "b", root)
    assert [_mode(p) for p in (root / "a", root / "a" / "b", store.path / "MANIFEST")] == [0o700, 0o700, 0o600]
    assert store.path == root / "a" / "b"
    assert not store.temporary
    manifest = json.loads((store.path / "MANIFEST").read_text())
    assert (manifest["format"], manifest["version"], manifest["pid"]) == ("lightning-hetero-store", 2, os.getpid())
    assert manifest["geometry"] == MODEL
    assert bytes.fromhex(manifest["uuid"]) == store.uuid
    assert len(store.uuid) == 16
    store.close()


def test_privacy_does_not_depend_on_the_umask(root: Path) -> None:
    before = os.umask(0)
    try:
        store = _open(root / "open", root)
    finally:
        os.umask(before)
    assert (_mode(store.path), _mode(store.path / "MANIFEST")) == (0o700, 0o600)
    store.close()


def test_ranks_may_make_the_same_directory_at_the_same_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = os.mkdir

    def late(path: Path, mode: int) -> None:
        make(path, mode)  # another rank's
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", late)
    assert not make_private(root / "deep" / "disk")
    monkeypatch.undo()
    assert (root / "deep" / "disk").is_dir()
    assert make_private(root / "deep" / "other")


def test_the_users_directory_stays_and_can_be_used_again(root: Path) -> None:
    path = root / "mine"
    first = _open(path, root)
    (path / "block-00000.a").write_bytes(b"old")
    first.close()
    first.close()
    second = _open(path, root)
    assert second.uuid != first.uuid
    assert os.listdir(path) == ["MANIFEST"]
    second.close()


def test_taking_over_is_said_and_removes_only_names_of_ours(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = root / "mine"
    _open(path, root).close()
    for name in (
        "COMMIT",
        "block-00000.a",
        "block-00000.b",
        "block-100000.a",
        "state-" + "0" * 32,
        "MANIFEST." + "0" * 32,
        "notes.txt",
        "block-0.c",
    ):
        (path / name).write_bytes(b"x")
    with caplog.at_level(logging.INFO, logger=module.__name__):
        store = _open(path, root)
    assert "taken over" in caplog.text
    assert str(path) in caplog.text
    assert sorted(os.listdir(path)) == ["MANIFEST", "block-0.c", "notes.txt"]
    store.close(remove=True)
    assert sorted(os.listdir(path)) == ["block-0.c", "notes.txt"]


def test_close_with_remove_removes_its_own_files(root: Path) -> None:
    made = _open(root / "made", root)
    (made.path / "block-00003.b").touch()
    made.close(remove=True)
    existing = root / "existing"
    existing.mkdir(mode=0o700)
    _open(existing, root).close(remove=True)
    assert os.listdir(root) == ["existing"]
    assert os.listdir(existing) == []


def test_the_files_of_one_block_can_be_removed(root: Path) -> None:
    store = _open(root / "store", root)
    for name in ("block-00003.a", "block-00003.b", "block-00004.a"):
        (store.path / name).touch()
    store.remove_block(3)
    store.remove_block(3)
    assert sorted(os.listdir(store.path)) == ["MANIFEST", "block-00004.a"]
    store.close(remove=True)


def test_removal_does_not_follow_symbolic_links(root: Path) -> None:
    outside = root / "precious"
    outside.write_text("keep me")
    store = _open(root / "store", root)
    (store.path / "block-00000.a").symlink_to(outside)
    store.close(remove=True)
    assert outside.read_text() == "keep me"
    assert not (root / "store").exists()


def test_without_a_path_a_temporary_directory_comes_and_goes(root: Path) -> None:
    store = _open(None, root)
    assert store.temporary
    assert store.path.parent == root
    assert store.path.name.startswith("lightning-hetero-")
    assert _mode(store.path) == 0o700
    (store.path / "COMMIT").touch()
    store.close()
    assert os.listdir(root) == []


def test_a_temporary_directory_can_be_kept(root: Path) -> None:
    store = _open(None, root)
    store.close(remove=False)
    assert (store.path / "MANIFEST").exists()


def test_an_unclosed_temporary_directory_is_removed_with_its_process(root: Path) -> None:
    script = CHILD.replace("sys.stdin.read()", "")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    arguments = [sys.executable, "-c", script, "-", str(root), repr(MODEL)]
    output = subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment).stdout
    assert output.startswith(str(root))
    assert os.listdir(root) == []


def test_a_forked_child_does_not_remove_its_parents_store(root: Path) -> None:
    store = _open(None, root)
    child = os.fork()
    if child == 0:
        store.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (store.path / "MANIFEST").exists()
    with pytest.raises(StoreBusyError):
        _open(store.path, root)
    store.close()


# ---- refusals ------------------------------------------------------------------------------------


def _refused(message: str, path: Path, root: Path, error: type[HeteroError] = ConfigError, **options: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        _open(path, root, **options)
    assert str(path) in str(caught.value)


def test_a_file_is_refused(root: Path) -> None:
    (root / "file").touch()
    _refused("is not a directory; allowed", root / "file", root)


@pytest.mark.parametrize("target", ["target", "missing"])
def test_a_symbolic_link_is_refused(root: Path, target: str) -> None:
    (root / "target").mkdir(mode=0o700)
    (root / "link").symlink_to(root / target)
    _refused("is a symbolic link", root / "link", root)
    assert os.listdir(root / "target") == []


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_may_write_is_refused(root: Path, mode: int) -> None:
    path = root / "shared"
    path.mkdir()
    path.chmod(mode)
    _refused(f"has mode {mode:04o}.*chmod 700", path, root)


def test_a_directory_of_another_user_is_refused(root: Path) -> None:
    path = Path("/usr")
    if ROOT:
        path = root / "theirs"
        path.mkdir(mode=0o700)
        os.chown(path, NOBODY, NOBODY)
    _refused(f"belongs to user {path.stat().st_uid}", path, root)


@pytest.fixture
def own_readonly(root: Path) -> Iterator[Path]:
    """A directory without write permission, of a user whom permissions bind."""
    with tempfile.TemporaryDirectory() as above:
        path = Path(above) / "readonly"
        path.mkdir()
        if ROOT:
            os.chown(above, NOBODY, NOBODY)
            os.chown(path, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        path.chmod(0o500)
        try:
            yield path
        finally:
            if ROOT:
                os.seteuid(0)


def test_a_directory_that_cannot_be_written_is_refused(own_readonly: Path, root: Path) -> None:
    _refused("cannot be written", own_readonly, root)


def test_a_directory_that_cannot_be_made_is_refused(own_readonly: Path, root: Path) -> None:
    _refused("Permission denied", own_readonly / "below", root, error=StoreError)


def test_a_directory_with_other_files_is_refused_and_left_alone(root: Path) -> None:
    path = root / "home"
    path.mkdir(mode=0o700)
    for name in ("a", "b", "c", "d"):
        (path / name).touch()
    _refused("holds a, b, c and more and no MANIFEST", path, root)
    assert sorted(os.listdir(path)) == ["a", "b", "c", "d"]


def test_block_files_without_a_manifest_are_not_ours_to_remove(root: Path) -> None:
    path = root / "orphans"
    path.mkdir(mode=0o700)
    (path / "block-00000.a").touch()
    _refused(r"holds block-00000\.a", path, root)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "other"}', "[" * 100_000])
def test_a_manifest_of_something_else_is_refused(root: Path, content: str) -> None:
    path = root / "other"
    path.mkdir(mode=0o700)
    (path / "MANIFEST").write_text(content)
    _refused("MANIFEST that is not a store's", path, root)


def test_a_manifest_that_is_a_link_or_a_pipe_is_refused(root: Path) -> None:
    _open(root / "real", root).close()
    for name in ("link", "pipe"):
        (root / name).mkdir(mode=0o700)
    (root / "link" / "MANIFEST").symlink_to(root / "real" / "MANIFEST")
    os.mkfifo(root / "pipe" / "MANIFEST")
    _refused("cannot be opened", root / "link", root)
    _refused("not a store's", root / "pipe", root)


def test_a_changed_model_under_an_old_store_is_refused_with_the_first_difference(root: Path) -> None:
    path = root / "mine"
    _open(path, root).close()
    (path / "block-00000.a").touch()
    block = MODEL["blocks"][0]
    cases = {
        r"blocks\[0\]\.shapes\[0\]\[1\]: 4 in the store, 8 now": {"blocks": [block | {"shapes": [[4, 8]]}]},
        r"blocks: 1 in the store, 2 now": {"blocks": [block, block]},
        r"optimizer: 'AdamW' in the store, 'SGD' now": {"optimizer": "SGD"},
        r"world_size: None in the store, 2 now": {"world_size": 2},
    }
    for message, changes in cases.items():
        said = rf"changed model under an old store. First difference: {message}.*lightning-hetero export {path} DIRECTORY"
        _refused(said, path, root, manifest={"model": "Other"} | MODEL | changes)
    assert (path / "block-00000.a").exists()


def test_the_name_of_the_models_class_may_change(root: Path) -> None:
    path = root / "mine"
    for name in ("LV", "Boom", "LV"):
        _open(path, root, manifest=MODEL | {"model": name}).close()
    manifest = json.loads((path / "MANIFEST").read_text())
    (path / "MANIFEST").write_text(json.dumps(manifest | {"fingerprint": "0"}))
    _refused("its fingerprint does not match its contents", path, root, manifest=MODEL | {"model": "Boom"})


def test_another_version_is_refused(root: Path) -> None:
    path = root / "mine"
    _open(path, root).close()
    manifest = json.loads((path / "MANIFEST").read_text())
    (path / "MANIFEST").write_text(json.dumps(manifest | {"version": 7}))
    _refused("version: 7 in the store, 1 or 2 or 3 or 4 now", path, root)


def test_equal_models_written_as_tuples_or_lists_are_the_same_store(root: Path) -> None:
    _open(root / "mine", root, manifest={"blocks": ((1, 2),)}).close()
    _open(root / "mine", root, manifest={"blocks": [[1, 2]]}).close()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_a_file_system_in_memory_is_refused_unless_allowed(root: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as above:
        path = Path(above) / "store"
        _refused("is on tmpfs.*allow_tmpfs", path, root)
        assert not path.exists()
        with pytest.raises(ConfigError, match="is on tmpfs"):
            _open(None, Path(above))
        assert os.listdir(above) == []
        store = _open(path, root, allow_tmpfs=True)
        assert store.in_memory
        store.close(remove=True)


def _volume(**changes: Any) -> Volume:
    return Volume(**({"filesystem": "ext4", "source": "/dev/sda1", "rotational": False, "free_bytes": 1000} | changes))


def test_a_rotating_disk_is_refused_unless_allowed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Volume, "of", lambda path: _volume(rotational=True))
    _refused("is on /dev/sda1, a rotating disk.*allow_rotational", root / "a", root)
    _open(root / "a", root, allow_rotational=True).close()


def test_too_little_free_space_is_refused_before_anything_is_written(root: Path) -> None:
    _refused(r"needs 4\.0 TiB.*are free.*disk_path", root / "a", root, error=OutOfDiskError, needed_bytes=2**62 // 2**20)
    assert os.listdir(root) == []


def test_more_than_the_disk_capacity_is_refused(root: Path) -> None:
    message = r"needs 2\.0 KiB, disk_capacity allows 1\.0 KiB\. Raise disk_capacity"
    _refused(message, root / "a", root, error=OutOfDiskError, needed_bytes=2048, capacity_bytes=1024)


def test_files_that_a_takeover_removes_count_as_free(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _open(root / "mine", root).close()
    (root / "mine" / "block-00000.a").write_bytes(b"x" * 8192)
    monkeypatch.setattr(Volume, "of", lambda path: _volume(free_bytes=0))
    _refused("are free", root / "mine", root, error=OutOfDiskError, needed_bytes=2**30)
    assert (root / "mine" / "block-00000.a").exists()
    _open(root / "mine", root, needed_bytes=4096).close()


# ---- other processes -----------------------------------------------------------------------------


CHILD = """
import sys
from pathlib import Path
from lightning_hetero.store.format.directory import StoreDirectory
path, root, manifest = (None if sys.argv[1] == "-" else Path(sys.argv[1])), Path(sys.argv[2]), eval(sys.argv[3])
store = StoreDirectory.create_or_adopt(path, default_root=root, manifest=manifest, needed_bytes=0)
(store.path / "block-00000.a").write_bytes(b"x")
print(store.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def _hold(path: Path | None, root: Path, children: list[subprocess.Popen[str]]) -> Path:
    """Another process that holds a store until it is killed."""
    arguments = [sys.executable, "-c", CHILD, "-" if path is None else str(path), str(root), repr(MODEL)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    children.append(process)
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_a_store_held_by_a_living_process_is_refused_with_its_pid(root: Path, children: list[subprocess.Popen[str]]) -> None:
    path = _hold(root / "mine", root, children)
    _refused(f"is in use by process {children[0].pid}", path, root, error=StoreBusyError)
    assert (path / "block-00000.a").exists()


def test_a_store_whose_process_was_killed_is_taken_over(root: Path, children: list[subprocess.Popen[str]]) -> None:
    path = _hold(root / "mine", root, children)
    children[0].send_signal(signal.SIGKILL)
    children[0].wait()
    store = _open(path, root)
    assert os.listdir(path) == ["MANIFEST"]
    store.close()


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(root: Path, children: list[subprocess.Popen[str]]) -> None:
    dead, living = _hold(None, root, children), _hold(None, root, children)
    children[0].send_signal(signal.SIGKILL)
    children[0].wait()
    named = root / "lightning-hetero-mine"  # not temporary: the user's, however it is called
    _open(named, root).close()
    other = root / "lightning-hetero-other"
    other.mkdir(mode=0o700)
    (other / "MANIFEST").write_text("not a store")
    precious = root / "precious"
    precious.mkdir(mode=0o700)
    (precious / "block-00000.a").touch()
    (root / "lightning-hetero-link").symlink_to(precious)
    store = _open(None, root)
    assert not dead.exists()
    assert all(p.exists() for p in (living, named, other, precious / "block-00000.a", root / "lightning-hetero-link"))
    store.close()


def test_the_store_of_this_process_is_refused_too(root: Path) -> None:
    first = _open(root / "mine", root)
    _refused(f"in use by process {os.getpid()}", root / "mine", root, error=StoreBusyError)
    first.close()
