"""Memory, threads and caches that the process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_hetero.profiling.machine import _cache_bytes
from lightning_hetero.store import capacity
from lightning_hetero.store.capacity import available_cores, available_memory_bytes, total_memory_bytes
from lightning_hetero.store.live.engine_options import EngineOptions
from lightning_hetero.units import MIB


def _files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _proc(tmp_path: Path, line: str) -> Path:
    memory = f"MemTotal:  {500 * 1024} kB\nMemFree:  1024 kB\nMemAvailable:  {300 * 1024} kB\nHugePages_Total:  0\n"
    return _files(tmp_path / "proc", {"self/cgroup": line + "\n", "meminfo": memory})


def test_without_control_groups_memory_is_the_machines(tmp_path: Path) -> None:
    proc = _proc(tmp_path, "0::/")
    assert available_memory_bytes(proc=proc, cgroups=tmp_path) == 300 * MIB
    assert total_memory_bytes(proc=proc, cgroups=tmp_path) == 500 * MIB


@pytest.mark.parametrize("visible", [True, False], ids=["on the host", "in a container"])
def test_a_groups_limit_counts_and_pages_that_it_could_drop_are_free(tmp_path: Path, visible: bool) -> None:
    # In a container the path is the host's and only the container's own group is mounted, at the
    # root.
    place = "user/job/" if visible else ""
    root = _files(
        tmp_path / "groups",
        {
            f"{place}memory.max": f"{64 * MIB}\n",
            f"{place}memory.current": f"{50 * MIB}\n",
            f"{place}memory.stat": f"anon 1\ninactive_file {20 * MIB}\n",
        },
    )
    proc = _proc(tmp_path, "0::/user/job")
    assert available_memory_bytes(proc=proc, cgroups=root) == (64 - 30) * MIB
    assert total_memory_bytes(proc=proc, cgroups=root) == 64 * MIB


def test_the_tightest_group_above_the_process_counts(tmp_path: Path) -> None:
    root = _files(
        tmp_path / "groups",
        {
            "a/b/memory.max": "max\n",
            "a/b/memory.current": "5\n",
            "a/memory.max": f"{32 * MIB}\n",
            "a/memory.current": f"{40 * MIB}\n",
        },
    )
    proc = _proc(tmp_path, "0::/a/b")
    assert available_memory_bytes(proc=proc, cgroups=root) == 0, "a group over its limit leaves nothing"
    assert total_memory_bytes(proc=proc, cgroups=root) == 32 * MIB


def test_the_first_version_of_control_groups_counts_too(tmp_path: Path) -> None:
    root = _files(
        tmp_path / "groups",
        {
            "memory/job/memory.limit_in_bytes": str(48 * MIB),
            "memory/job/memory.usage_in_bytes": str(16 * MIB),
            "memory/job/memory.stat": f"total_inactive_file {6 * MIB}\n",
        },
    )
    assert available_memory_bytes(proc=_proc(tmp_path, "9:cpu,memory:/job"), cgroups=root) == 38 * MIB


@pytest.mark.parametrize(
    ("line", "name", "limit"),
    [("0::/job", "job/memory.max", "max"), ("4:memory:/job", "memory/job/memory.limit_in_bytes", "9223372036854771712")],
)
def test_a_group_without_a_limit_is_not_asked_what_it_uses(
    line: str, name: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = _files(tmp_path / "groups", {name: f"{limit}\n"})
    asked: list[str] = []
    monkeypatch.setattr(capacity, "_lines", lambda path, lines=capacity._lines: asked.append(path.name) or lines(path))
    assert available_memory_bytes(proc=_proc(tmp_path, line), cgroups=root) > 0
    assert {*asked} == {"cgroup", Path(name).name}


@pytest.mark.parametrize(
    ("line", "files", "cores"),
    [
        ("0::/user/job", {"user/job/cpu.max": "max 100000\n", "user/cpu.max": "250000 100000\n"}, 3),
        ("0::/user/job", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/user/job", {"cpu.max": "max 100000\n"}, 16),
        ("0::/user/job", {"cpu.max": "6400000 100000\n"}, 16),
        ("4:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "400000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 4),
        ("4:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 16),
        ("4:memory:/job", {"cpu/job/cpu.cfs_quota_us": "400000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 16),
    ],
)
def test_threads_keep_to_the_affinity_and_to_a_groups_quota(
    line: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert available_cores(proc=_proc(tmp_path, line), cgroups=_files(tmp_path / "groups", files)) == cores


def test_update_threads_are_half_of_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("lightning_hetero.store.live.engine_options.available_cores", lambda: 6)
    assert EngineOptions().threads() == 3
    assert EngineOptions(update_threads=5).threads() == 5


def test_the_last_level_of_caches_is_added_up_once_each(tmp_path: Path) -> None:
    rows = {"cpu0": ("0-1", "32768K"), "cpu1": ("0-1", "32768K"), "cpu2": ("2-3", "32768K"), "cpu3": ("2-3", "odd")}
    root = _files(
        tmp_path / "cpu",
        {f"{c}/cache/index3/{k}": v for c, row in rows.items() for k, v in zip(("shared_cpu_list", "size"), row, strict=True)},
    )
    assert _cache_bytes(root) == 64 * MIB
    assert _cache_bytes(tmp_path / "none") == 0
