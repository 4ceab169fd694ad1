"""Blocks on several disks: the same bits, resumed wherever the directories are, else refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from support.models import Outcome, Recipe, Shape, assert_same, data, quiet_trainer
from support.recipes import MIXED
from support.resuming import Model, after, fit, train

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.cli.contents import contents_of
from lightning_hetero.cli.verify import run as verify
from lightning_hetero.errors import ConfigError, HeteroError, OutOfDiskError, StoreBusyError, StoreCorruptError, StoreError
from lightning_hetero.profiling import disks as measured
from lightning_hetero.store.format import stripes
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.directory import remove_store
from lightning_hetero.store.format.snapshots import Room, check_room, room_for, snapshot
from lightning_hetero.store.format.stripes import Balance

RECIPE = Recipe(shape=Shape(layers=3), steps=6)
STOP = 3


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("plain"), "auto", RECIPE)


@pytest.fixture(autouse=True)
def alike(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Disks that are equally fast, without measuring them; gives what does."""
    real = measured.measure_disks

    def measure(places: Sequence[Path], *_: Any, **__: Any) -> list[measured.DiskRate]:
        return [measured.DiskRate(path=place, read_bytes_per_s=1e9, write_bytes_per_s=1e9) for place in places]

    monkeypatch.setattr(measured, "measure_disks", measure)
    return real


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    return [tmp_path / name / "run" for name in ("ssd0", "ssd1", "ssd2")]


def striped(disks: list[Path], plan: Any = "disk", **options: Any) -> HeteroOffloadStrategy:
    return HeteroOffloadStrategy(plan, disk_path=disks, verify_digests=True, **options)


def blocks_on(disk: Path) -> list[Path]:
    return sorted(disk.rglob("block-*"))


def rest_of(plain: Outcome) -> Outcome:
    return after(plain, len(plain.losses) - STOP)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("plan", ["disk", "host", MIXED], ids=["disk", "host", "mixed"])
def test_a_striped_run_has_the_bits_of_plain_lightning_also_after_a_resume(
    plan: Any, number: int, disks: list[Path], plain: Outcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disks = disks[:number]
    train(tmp_path, striped(disks, plan), RECIPE, stop=STOP)
    names = [{file.name for file in blocks_on(disk)} for disk in disks]
    assert all(names), "a disk has no block"
    assert len(set[str]().union(*names)) == sum(map(len, names)), "a file is on two disks"
    assert all({slot.replace(".b", ".a") for slot in one} <= one for one in names), "slots of one block are on two disks"
    assert not verify(disks[0], as_json=True)
    assert "block-" in json.dumps(contents_of(disks[0]).blocks)
    capsys.readouterr()
    assert_same(train(tmp_path, striped(disks, plan), RECIPE, store=disks[0]), rest_of(plain))


def test_directories_may_be_mounted_elsewhere_and_in_another_order(disks: list[Path], plain: Outcome, tmp_path: Path) -> None:
    train(tmp_path, striped(disks), RECIPE, stop=STOP)
    shutil.move(disks[1].parent, tmp_path / "moved")
    with pytest.raises(StoreCorruptError, match=r"blocks in '.*ssd1.*stripe-.*not there.*has it in|blocks in '.*ssd1.*not there"):
        verify(disks[0], as_json=True)
    now = [disks[0], disks[2], tmp_path / "moved" / "run"]
    losses = quiet_trainer(strategy=striped(now), default_root_dir=tmp_path).validate(
        Model(RECIPE), data(2, seed=1), ckpt_path=disks[0], verbose=False
    )
    assert losses
    assert_same(train(tmp_path, striped(now), RECIPE, store=disks[0]), rest_of(plain))
    assert not verify(disks[0], as_json=True)


@pytest.mark.parametrize(
    ("raised", "error", "words"),
    [
        (
            OSError(errno.EROFS, os.strerror(errno.EROFS)),
            StoreError,
            r"blocks in .*ssd1.*are in .*moved.* now.*Read-only.*Make the directory writable",
        ),
        (StoreBusyError("in use by process 7"), StoreBusyError, "^in use by process 7$"),
    ],
    ids=["read-only", "busy"],
)
def test_a_store_that_cannot_say_where_its_disks_are_now_is_named(
    raised: OSError, error: type[StoreError], words: str, disks: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **options: Any) -> int:
        raise raised

    train(tmp_path, striped(disks), RECIPE, stop=STOP)
    shutil.move(disks[1].parent, tmp_path / "moved")
    monkeypatch.setattr(stripes, "put_manifest", fails)
    now = [disks[0], disks[2], tmp_path / "moved" / "run"]
    with pytest.raises(error, match=words):
        train(tmp_path, striped(now), RECIPE, store=disks[0])


def _lost(disks: list[Path]) -> list[Path]:
    shutil.rmtree(disks[1])
    return disks


def _primary_swapped(disks: list[Path]) -> list[Path]:
    return [disks[1], disks[0], disks[2]]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (_lost, StoreCorruptError, ("ssd1", "not there", "Mount the disk")),
        (lambda disks: disks[:2], ConfigError, ("3 directories", "ssd2", "Pass as many")),
        (lambda disks: [*disks, disks[0].with_name("more")], ConfigError, ("3 directories", "ckpt_path", "is copied")),
        (_primary_swapped, ConfigError, ("ssd1", "holds stripe-", "Choose another")),
    ],
    ids=["missing", "fewer", "more", "first-is-another"],
)
def test_other_directories_are_refused_by_name(
    change: Callable[[list[Path]], list[Path]], error: type[HeteroError], words: tuple[str, ...], disks: list[Path], tmp_path: Path
) -> None:
    train(tmp_path, striped(disks), RECIPE, stop=1)
    with pytest.raises(error) as caught:
        train(tmp_path, striped(change(list(disks))), RECIPE, store=disks[0])
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("how", ["older", "exchanged"])
def test_a_directory_with_another_content_is_named(how: str, disks: list[Path], tmp_path: Path) -> None:
    train(tmp_path, striped(disks[:2]), RECIPE, stop=1)
    (stripe,) = disks[1].iterdir()
    if how == "older":
        shutil.copytree(stripe, tmp_path / "older")
        train(tmp_path, striped(disks[:2]), RECIPE, stop=4, store=disks[0])
        shutil.rmtree(stripe)
        (tmp_path / "older").rename(stripe)
    else:
        train(tmp_path, striped([tmp_path / "other", disks[2]]), RECIPE, stop=1)
        (other,) = disks[2].iterdir()
        shutil.rmtree(stripe)
        other.rename(stripe)
    with pytest.raises(HeteroError, match=str(stripe)):
        train(tmp_path, striped(disks[:2]), RECIPE, store=disks[0])


def test_another_number_of_disks_goes_on_in_new_directories(disks: list[Path], plain: Outcome, tmp_path: Path) -> None:
    train(tmp_path, striped(disks[:1]), RECIPE, stop=STOP)
    more, one = [tmp_path / "more0", tmp_path / "more1"], [tmp_path / "one"]
    assert_same(train(tmp_path, striped(more), RECIPE, store=disks[0]), rest_of(plain))
    assert all(map(blocks_on, more))
    train(tmp_path, striped(disks[:2], new_run=True), RECIPE, stop=STOP)
    assert_same(train(tmp_path, striped(one), RECIPE, store=disks[0]), rest_of(plain))


def test_a_new_run_leaves_the_earlier_one_whole_on_all_disks(disks: list[Path], plain: Outcome, tmp_path: Path) -> None:
    train(tmp_path, striped(disks), RECIPE, stop=STOP)
    with pytest.raises(ConfigError, match="step 3 of an earlier run"):
        train(tmp_path, striped(disks), RECIPE)
    train(tmp_path, striped(disks, new_run=True), RECIPE, stop=1)
    earlier = disks[0].with_name("run.earlier-1")
    assert not verify(earlier, as_json=True)
    assert_same(train(tmp_path, striped([earlier, *disks[1:]]), RECIPE, store=earlier), rest_of(plain))


def test_pins_are_on_all_disks_and_go_with_them(disks: list[Path], plain: Outcome, tmp_path: Path) -> None:
    train(tmp_path, striped(disks, keep_every=3), RECIPE, stop=5)
    pins = [path for disk in disks for path in disk.rglob("kept-*")]
    assert {path.name for path in pins} == {pins[0].name}
    assert len(pins) == 3
    assert not verify(disks[0], as_json=True)
    got = train(tmp_path, striped(disks, keep_every=3), RECIPE, store=disks[0])
    assert_same(got, after(plain, len(plain.losses) - 4))  # the end of an epoch is kept


def test_links_as_checkpoints_are_copies_of_what_is_on_other_disks(disks: list[Path], plain: Outcome, tmp_path: Path) -> None:
    kept = tmp_path / "kept.ckpt"

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == STOP:
                trainer.save_checkpoint(kept)

    fit(tmp_path, striped(disks, link_checkpoints=True), RECIPE, Model, Saves(), stop=5)
    assert not verify(kept, as_json=True)
    for disk in disks:
        shutil.rmtree(disk.parent)
    assert_same(train(tmp_path, striped([tmp_path / "elsewhere"]), RECIPE, store=kept), rest_of(plain))


def test_a_copy_of_the_first_directory_is_refused_while_the_original_is_there(
    disks: list[Path], plain: Outcome, tmp_path: Path
) -> None:
    train(tmp_path, striped(disks), RECIPE, stop=STOP)
    copy = tmp_path / "copy"
    shutil.copytree(disks[0], copy)
    words = r"copy' is a copy of '.*ssd0/run'.*both would write.*new directories as disk_path"
    with pytest.raises(ConfigError, match=words):
        train(tmp_path, striped([copy, *disks[1:]]), RECIPE, store=copy)
    with pytest.raises(ConfigError, match=words):
        remove_store(copy)
    assert not verify(copy, as_json=True), "it can be read"
    new = [tmp_path / name for name in ("new0", "new1", "new2")]
    assert_same(train(tmp_path, striped(new), RECIPE, store=disks[0]), rest_of(plain))  # as the error says
    shutil.move(copy, copy.with_name("moved"))
    shutil.rmtree(disks[0])
    now = [copy.with_name("moved"), *disks[1:]]
    assert_same(train(tmp_path, striped(now), RECIPE, store=now[0]), rest_of(plain))  # it was moved by way of a copy


def test_the_room_for_links_is_that_on_each_disk(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        first, second = tmp_path / "run", Path(memory) / "run"
        train(tmp_path, striped([first, second], allow_tmpfs=True), RECIPE, stop=STOP)
        with StoreFiles(first) as store:
            names = [] if store.record is None else store.record.files
        ring = (first / "COMMIT").stat().st_size + 2 * (first / "MANIFEST").stat().st_size
        slots = [path for path in second.rglob("block-*") if path.name in names]
        there = sum(path.stat().st_size for path in slots)
        kept, disk = Path(memory) / "kept", second.stat().st_dev
        rooms = room_for(first, kept, names)
        assert rooms[disk].needed_bytes == ring + there + sum((first / n).stat().st_size for n in names if (first / n).exists())
        snapshot(first, kept, names)
        assert all(path.stat().st_nlink == 2 for path in slots), "they are links"
        assert room_for(first, tmp_path / "more", names)[disk].needed_bytes == there, (
            "fresh files there, of what has a link already"
        )
        assert disk not in room_for(first, tmp_path / "more", names, leaving=[kept])
        with pytest.raises(OutOfDiskError, match=r"'more' would take .* in '/dev/shm.*leave link_checkpoints out"):
            check_room(Path("more"), [room_for(first, tmp_path / "more", names), {disk: Room(second, 1 << 60)}])


def test_a_full_disk_is_named(disks: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_hetero.store.format import places
    from lightning_hetero.store.volume import Volume

    real, names = Volume.of, [disk.parent.name for disk in disks]

    def of(path: Path) -> Volume:
        found = real(path)
        return replace(found, free_bytes=0) if "ssd1" in str(path) else found

    monkeypatch.setattr(places.Volume, "of", of)
    monkeypatch.setattr(places, "_device", lambda path: [name in str(path) for name in names].index(True))
    with pytest.raises(OutOfDiskError, match=r"ssd1.*on all disks"):
        train(tmp_path, striped(disks), RECIPE)


def test_blocks_are_dealt_by_what_each_disk_moves(disks: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(places: Sequence[Path], *_: Any, **__: Any) -> list[measured.DiskRate]:
        each = zip(places, (3e9, 1e9), strict=True)
        return [measured.DiskRate(path=place, read_bytes_per_s=rate, write_bytes_per_s=rate) for place, rate in each]

    monkeypatch.setattr(measured, "measure_disks", measure)
    train(tmp_path, striped(disks[:2]), Recipe(shape=Shape(layers=8)), stop=1)
    fast, slow = (sum(file.stat().st_size for file in blocks_on(disk)) for disk in disks[:2])
    assert 2 <= fast / slow <= 4.5


def test_ranks_have_the_slices_of_one_block_on_different_disks() -> None:
    deals = [partial(Balance([1.0, 1.0], ahead=rank).deal, 100) for rank in range(4)]
    for _ in range(5):
        assert {deal() for deal in deals[:2]} == {deal() for deal in deals[2:]} == {0, 1}


def test_every_disk_is_measured(tmp_path: Path, alike: Callable[..., Any]) -> None:
    from lightning_hetero.store.live.engine_options import EngineOptions

    each = alike([tmp_path, tmp_path], EngineOptions(direct_io=False))
    assert all(disk.read_bytes_per_s > 0 and disk.write_bytes_per_s > 0 for disk in each)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "words"),
    [([], "a list of one per disk"), ([1], "a list of one per disk"), (["a", "a"], "names 'a' twice"), (["a", "s3://b"], "a URL")],
)
def test_bad_lists_are_refused(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HeteroOffloadStrategy(disk_path=value)


@pytest.mark.parametrize("value", ["/ssd0/run", ["/ssd0/run", "/ssd1/run"]], ids=["one", "two"])
def test_a_config_of_lightnings_command_line_may_list_disks(value: str | list[str], tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    strategy = {"class_path": "lightning_hetero.HeteroOffloadStrategy", "init_args": {"disk_path": value}}
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"trainer": {"accelerator": "cpu", "strategy": strategy}}))
    cli = LightningCLI(pl.LightningModule, run=False, args=["--config", str(config)], save_config_callback=None)
    paths = cli.trainer.strategy.run.options.disk_paths
    assert [str(path) for path in paths] == ([value] if isinstance(value, str) else value)
