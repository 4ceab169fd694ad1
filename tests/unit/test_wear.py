"""What drives are rated for, and how long they last under a run's writes."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from lightning_hetero.profiling import wear
from lightning_hetero.profiling.presets.disks import DISKS
from lightning_hetero.profiling.wear import Drive, Wear, drive_of, drives_under, together

TERA = 1e12


def nvme(used_percent: int, units: int) -> dict[str, object]:
    """What ``smartctl -j -A`` prints for an NVMe drive, shortened."""
    return {"nvme_smart_health_information_log": {"percentage_used": used_percent, "data_units_written": units, "power_cycles": 9}}


def block_device(root: Path, model: str, terabytes: float) -> Path:
    place = root / "nvme0n1"
    (place / "device").mkdir(parents=True)
    (place / "device" / "model").write_text(f"{model}   \n")
    (place / "size").write_text(f"{int(terabytes * TERA / 512)}\n")
    return place


def test_a_known_model_has_the_rating_of_its_datasheet(tmp_path: Path) -> None:
    place = block_device(tmp_path, "Samsung SSD 980 PRO 2TB", 2.0)
    found = drive_of(place, nvme(used_percent=50, units=10**6))
    assert found == Drive(
        name="Samsung SSD 980 PRO 2TB",
        rated_bytes=pytest.approx(1200 * TERA),
        written_bytes=10**6 * 512_000,
        source=DISKS["980pro"].rated_bytes.source,
    )


def test_a_rating_grows_with_the_size_of_the_drive(tmp_path: Path) -> None:
    found = drive_of(block_device(tmp_path, "Samsung SSD 980 PRO 1TB", 1.0), {})
    assert found.rated_bytes == pytest.approx(600 * TERA)
    assert found.source.endswith("by its size")


@pytest.mark.parametrize(("percent", "rated"), [(0, 0.0), (4, 0.0), (20, 512 * TERA)], ids=["new", "too new to say", "used"])
def test_the_rating_of_an_unknown_model_follows_from_what_smart_calls_used(percent: int, rated: float, tmp_path: Path) -> None:
    found = drive_of(block_device(tmp_path, "ACME Fast", 1.0), nvme(percent, units=200 * 10**6))
    assert found.rated_bytes == pytest.approx(rated)
    assert found.written_bytes == pytest.approx(102.4 * TERA)


@pytest.mark.parametrize("said", ['{"smartctl": {"exit_status": 2}}', "no JSON", "[]"], ids=["not allowed", "text", "a list"])
def test_a_smartctl_that_cannot_read_says_nothing(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "smartctl"
    program.write_text(f"#!/bin/sh\necho '{said}'\nexit 2\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for drive in drives_under(tmp_path):
        assert drive.written_bytes == 0.0


def test_smartctl_is_asked_for_the_drive_under_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = block_device(tmp_path, "ACME Fast", 1.0)
    program = tmp_path / "smartctl"
    program.write_text(f'#!/bin/sh\n[ "$*" = "-j -A /dev/nvme0n1" ] && echo \'{json.dumps(nvme(50, 10**6))}\'\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(wear, "disks_under", lambda path: (place,))
    (found,) = drives_under(tmp_path)
    assert (found.written_bytes, found.rated_bytes) == (10**6 * 512_000, 2 * 10**6 * 512_000)


def test_several_drives_are_rated_together_if_each_is() -> None:
    one, other = (Drive(name=name, rated_bytes=TERA, written_bytes=1.0, source="sheet") for name in "ab")
    assert together([one, other]) == Drive(name="a, b", rated_bytes=2 * TERA, written_bytes=2.0, source="sheet")
    both = together([one, Drive(name="unknown")])
    assert both is not None
    assert both.rated_bytes == 0.0
    assert together([]) is None


def test_a_forecast_divides_what_is_left_by_what_a_second_writes() -> None:
    drive = Drive(name="980pro", rated_bytes=1200 * TERA, written_bytes=336 * TERA, source="its datasheet")
    found = Wear(step_bytes=50e9, step_s=5.0, drive=drive)
    assert found.left_s == pytest.approx(86_400)  # 864 TB at 10 GB/s
    assert str(found) == (
        "50 GB written a step, 36 TB an hour; 980pro is rated for 1.2 PB, 336 TB of it used (its datasheet): 24 hours of training"
    )


def test_a_forecast_says_what_it_does_not_know() -> None:
    assert str(Wear(step_bytes=1e9, step_s=1.0)) == "1 GB written a step, 3.6 TB an hour"
    unknown = Wear(step_bytes=1e9, step_s=1.0, drive=Drive(name="vda"))
    assert unknown.left_s is None
    assert str(unknown).endswith("; what vda is rated for is not known")
    worn = Wear(step_bytes=1e9, step_s=1.0, drive=Drive(name="old", rated_bytes=TERA, written_bytes=2 * TERA, source="sheet"))
    assert worn.left_s == 0.0
