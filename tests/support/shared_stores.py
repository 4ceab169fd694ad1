"""Ranks that share a model and keep their steps, killed and started again: a script.

See ``tests/faults/test_kill_ranks.py``. The ranks are forked from one process that has imported
everything. What counts as right is what as many ranks do in one go with everything in memory.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from scratch import free_port
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero._native import Engine
from lightning_hetero.cli import verify
from lightning_hetero.cli.contents import contents_of
from lightning_hetero.convert.exporting import export_weights
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.lanes import EmulatedDevice
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.runtime.common_records import CommonRecords
from lightning_hetero.store.format import sets
from lightning_hetero.store.live.block_files import BlockFiles
from lightning_hetero.store.live.spread_step import SpreadStep
from lightning_hetero.strategies import HeteroOffloadStrategy
from support import shared_model
from support.children import around
from support.shared_devices import THERE

STEPS, BATCHES, PATIENCE_S = 6, 6, 120.0
STRIPED = ("moved", "some", "anew")  # runs on two disks
MIXED = Plan(
    name="mixed",
    blocks=(
        BlockPlan(name="layers.0", state=Tier.DISK),
        BlockPlan(name="layers.1", weights=Tier.DEVICE, state=Tier.DISK),
        BlockPlan(name="*"),
    ),
)
POINTS: dict[str, tuple[Any, str, str]] = {
    "as it writes a slot": (Engine, "arm_update", "before"),
    "before it writes a record": (Engine, "commit", "before"),
    "once its record is there": (BlockFiles, "wait_for_record", "after"),
    "before it tells its number": (CommonRecords, "_exchange", "before"),
    "once it knows the others' numbers": (CommonRecords, "_exchange", "after"),
    "in a collective": (Collectives, "reduce", "before"),
    "while parts come from other ranks": (SpreadStep, "bring", "after"),
    "before the earlier stores go": (SpreadStep, "close", "before"),
    "while the earlier stores go": (sets, "remove_store", "after"),
    "before a record is taken back": (sets, "repeat_record", "before"),
    "after a record is taken back": (sets, "repeat_record", "after"),
}


FAILED = Path("failed")  # with the rank: why it ended


class Kill(NamedTuple):
    """Rank ``rank`` (-1: all of them) dies at a point, as it comes there for the n-th time."""

    rank: int
    point: str
    nth: int


class Model(shared_model.Model):
    """Draws random numbers, and says what each batch's loss was; with "scaled" in ``kind`` that of
    the last rank's third one overflows.
    """

    def __init__(self, kind: str = "", *, drops: float = 0.1, **options: Any) -> None:
        super().__init__(kind, **options)
        self.told: dict[int, float] = {}
        self.drops = drops

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = self.embed(batch[:, :-1])
        for layer in self.layers:
            x = layer(F.dropout(x, self.drops), rarely=False)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())
        number = self.trainer.fit_loop.epoch_loop.total_batch_idx
        if "scaled" in self.kind and number == 2 and shared_model.RANK == shared_model.WORLD - 1:
            loss = loss * torch.inf
        self.told[number] = loss.item()
        return loss


class LosesDisk(pl.Callback):
    """After the third step nothing can be written any more."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


class Ends(pl.Callback):
    """Writes down after how many steps epochs end, on the first rank."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            with self.file.open("a") as file:
                file.write(f"{trainer.current_epoch} after {trainer.global_step}, ")


class Draws(pl.Callback):
    """Writes down a random number, which a rank that joins draws apart from the others."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_start(self, *_: Any) -> None:
        self.file.write_text(str(torch.randint(2**62, ()).item()))


class Tells(pl.Callback):
    """Writes down which steps have ended, before the next one begins."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.file.write_text(str(trainer.global_step))
        ops = getattr(trainer.strategy.session.running.lanes, "_ops", ())  # those of the host
        behind = [op.behind for op in ops if hasattr(op, "behind")]
        assert all(len(set(tickets)) == len(tickets) for tickets in behind), "an op waits for each ticket once"


def flags_of(kind: str) -> dict[str, Any]:
    """The Trainer's options for the words of a kind."""
    flags: dict[str, Any] = {"gradient_clip_val": 0.3} if "clipped" in kind else {}
    if "half" in kind:
        flags["precision"] = "bf16-true"
    if "scaled" in kind:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        flags["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    return {**flags, "accumulate_grad_batches": _accumulated(kind)}


def _accumulated(kind: str) -> int:
    return 2 if "accumulated" in kind else 1


def train(
    out: Path, rank: int, plan: Any, *, resume: bool | Path, store: bool = True, steps: int = STEPS,
    more: Sequence[pl.Callback] = (), place: str = "store", further: str = "more", batches: int = BATCHES,
    kind: str = "", drops: float = 0.1, used: int = 0, orders: Sequence[int] = range(4), **options: Any,
) -> None:  # fmt: skip
    """What a rank does; ``place``: the disk of its node; ``resume``: from there, or from a path;
    ``used``: the batches that are left out, as Lightning does not after a checkpoint; ``orders``:
    the seed of each rank's order of batches; ``kind``: words that choose precision and options.
    """
    torch.manual_seed(5)
    model = Model(kind, drops=drops)
    torch.manual_seed(11 + rank)
    disks = [out / place, *([out / further] if out.name in STRIPED else [])]
    given: dict[str, Any] = {"disk_path": disks} if store else {}
    if "devices" in kind:
        given["device"] = EmulatedDevice("1MiB", seed=rank)
    strategy = HeteroOffloadStrategy(plan, block_cls="Layer", update_threads=1, **given, **options)
    flags = {"max_steps": steps, "max_epochs": -1, "callbacks": [*more, Tells(out / f"ended-{rank}")], **flags_of(kind)}
    trainer = shared_model.trainer(out, strategy, **flags)
    generator = torch.Generator().manual_seed(3 + orders[rank])
    data = torch.randint(0, 13, (batches * 2, 7), generator=torch.Generator().manual_seed(21 + rank))
    loader = DataLoader(data, 2, shuffle=True, generator=generator)
    try:
        trainer.fit(
            model,
            DataLoader(list(loader)[used:], None) if used else loader,
            ckpt_path=out / place if resume is True else resume or None,
        )
    finally:
        (out / f"losses-{rank}").write_text(json.dumps({str(k): v for k, v in model.told.items()}))
    trainer.save_checkpoint(out / "end.ckpt", weights_only=False)


def run(world: int, call: Callable[[int], None], kill: Kill | None = None, *, nodes: int = 1) -> list[int]:
    """Forks the ranks, and waits for all of them; their statuses as ``os.waitpid`` has them."""
    port, children = str(free_port()), []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            _be(rank, world, port, call, kill, world // nodes)
        children.append(child)
    ends, found = time.monotonic() + PATIENCE_S, dict[int, int]()
    while len(found) < world:
        for child in children:
            if child not in found and (ended := os.waitpid(child, os.WNOHANG))[0]:
                found[child] = ended[1]
        if time.monotonic() > ends:
            for child in children:
                if child not in found:
                    os.kill(child, signal.SIGKILL)
            raise AssertionError("ranks wait for each other")
        time.sleep(0.005)
    return [found[child] for child in children]


def _be(rank: int, world: int, port: str, call: Callable[[int], None], kill: Kill | None, shards: int) -> None:
    code = 1
    try:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "NODE_RANK": str(rank // shards)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % shards), "GLOO_SOCKET_IFNAME": "lo"}
        shared_model.WORLD, shared_model.RANK, shared_model.SHARDS = world, rank, shards
        torch.set_num_threads(1)
        if kill is not None and kill.rank in (rank, -1):
            _arm(kill)
        call(rank)
        code = 0
    except BaseException as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        traceback.print_exc()
        sys.stderr.flush()
        FAILED.with_name(f"{FAILED.name}-{rank}").write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def _arm(kill: Kill) -> None:
    owner, name, when = POINTS[kill.point]
    left = [kill.nth]

    def die(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    around(owner, name, **{when: die})


def was_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def losses(out: Path, world: int) -> list[dict[str, float]]:
    return [json.loads((out / f"losses-{rank}").read_text()) for rank in range(world)]


def same_end(out: Path, other: Path) -> bool:
    """Whether two runs have ended with the same weights, state and loss scale."""
    mine, theirs = (torch.load(folder / "end.ckpt", weights_only=False) for folder in (out, other))
    pairs = [(mine["state_dict"][key], value) for key, value in theirs["state_dict"].items()]
    for key, state in theirs["optimizer_states"][0]["state"].items():
        pairs += [(mine["optimizer_states"][0]["state"][key][name], value) for name, value in state.items()]
    same = all(mine.get(name) == theirs.get(name) for name in ("global_step", "MixedPrecision"))
    return same and all(torch.equal(one, two) for one, two in pairs)


def ended(out: Path, world: int) -> int:
    files = [out / f"ended-{rank}" for rank in range(world)]
    return min(int(file.read_text()) if file.exists() else 0 for file in files)


def killed_and_resumed(root: Path, world: int, plan: Any, kills: Sequence[Kill], *, kind: str = "plain") -> dict[str, Any]:
    """Kills at one point after the other, and lets the last run end. Returns what became of it."""
    reference, out = root / f"reference-{world}-{kind}", root / f"killed-{kind}"
    reference.mkdir()
    assert not any(run(world, lambda rank: train(reference, rank, "host", resume=False, store=False, kind=kind)))
    out.mkdir()
    told: list[dict[str, float]] = [{} for _ in range(world)]
    resume, reached = False, 0
    for kill in [*kills, None]:
        before = ended(out, world)
        for file in out.glob("losses-*"):
            file.unlink()
        statuses = run(world, partial(train, out, plan=plan, resume=resume, kind=kind), kill)
        if kill is None:
            assert not any(statuses), "a resume has failed"
        else:
            reached += any(map(was_killed, statuses))
            assert all(was_killed(status) or status for status in statuses) or not any(map(was_killed, statuses)), (
                "a rank has gone on alone"
            )
        for rank in range(world):
            file = out / f"losses-{rank}"
            if file.exists():
                found = json.loads(file.read_text())
                first = min(map(int, found), default=before * _accumulated(kind)) // _accumulated(kind)
                assert not resume or first >= before - 1, f"resumed at {first}, and {before} steps had ended"
                told[rank] |= found
        resume = resume or ended(out, world) > 1
        if not resume:
            shutil.rmtree(out / "store", ignore_errors=True)
    wanted = losses(reference, world)
    differs = [rank for rank in range(world) if any(told[rank][key] != wanted[rank][key] for key in told[rank])]
    return {"reached": reached, "differs": differs, "same": same_end(out, reference)}


def random_kills(seed: int, world: int, number: int) -> list[Kill]:
    draw = random.Random(seed)
    points = list(POINTS)[:6]
    return [Kill(draw.choice([-1, *range(world)]), draw.choice(points), draw.randint(3, 12)) for _ in range(number)]


def moved(root: Path) -> dict[str, Any]:
    """What three ranks have kept goes to two, one, two and three, with kills on the way. Each time
    they train a step without dropout, as from a checkpoint of the step before.
    """
    out, last, whole = root / "moved", root / "moved-3", {"drops": 0.0, "batches": 8}
    out.mkdir()
    last.mkdir()
    assert not any(run(3, lambda rank: train(out, rank, "disk", resume=False, steps=3, **whole)))
    shutil.move(out / "end.ckpt", last / "end.ckpt")
    read = is_read_by_the_command(out, last)
    reached, same, further, elsewhere = 0, [], "more", "elsewhere"
    points = ("while parts come from other ranks", "before the earlier stores go", "while the earlier stores go")
    for used, (world, plan, orders, kills) in enumerate([
        (2, MIXED, (0, 1), [Kill(1, points[0], 2), Kill(0, points[1], 1), Kill(0, points[2], 1)]),
        (1, "disk", (0,), [Kill(0, points[0], 3), Kill(0, points[2], 2)]),
        (2, "host", (0, 0), [Kill(-1, points[1], 1)]),
        (3, "disk", (0, 0, 0), [Kill(2, points[0], 1)]),
    ], start=3):  # fmt: skip
        for kill in [*kills, None]:
            statuses = run(world, partial(_takes_a_step, out, plan, used, further=further, **whole), kill)
            reached += any(map(was_killed, statuses))
            assert kill is not None or not any(statuses), "a resume has failed"
        assert len({(out / f"drawn-{rank}").read_text() for rank in range(world)}) == world, "random numbers of their own"
        begin, last = last / "end.ckpt", root / f"moved-{used + 1}"
        last.mkdir()
        call = partial(train, last, plan="host", resume=begin, store=False, steps=used + 1, used=used, orders=orders, **whole)
        assert not any(run(world, call))
        same.append(same_end(out, last) and losses(out, world) == losses(last, world))
        if world == 2:  # the further disk is mounted elsewhere
            further, elsewhere = elsewhere, further
            shutil.move(out / elsewhere, out / further)
        assert len(sets.stores_in(out / "store")) == world, "earlier stores are gone"
    ends = [Ends(out / "epochs")]
    assert not any(run(2, lambda rank: train(out, rank, "disk", resume=True, steps=9, further=further, batches=2, more=ends)))
    same.append((out / "epochs").read_text() == "0 after 7, 1 after 9, ")  # seven batches had been used of the first
    return {"reached": reached, "differs": [], "same": all(same) and read}


def _takes_a_step(out: Path, plan: Any, used: int, rank: int, **options: Any) -> None:
    train(out, rank, plan, resume=True, steps=used + 1, more=[Draws(out / f"drawn-{rank}")], **options)


def is_read_by_the_command(out: Path, first: Path) -> bool:
    """The stores of ranks can be checked, looked at and exported, and what is wrong is named."""
    export_weights(out / "store", out / "exported.ckpt")
    wanted, found = (torch.load(path)["state_dict"] for path in (first / "end.ckpt", out / "exported.ckpt"))
    same = all(torch.equal(found[name], value) for name, value in wanted.items())
    shown, report = contents_of(out / "store"), verify._stores(out / "store")
    same &= (shown.facts["ranks"], shown.facts["global_step"], report.faults) == (3, 3, ())
    same &= report.checked.startswith("3 ranks have training step 3")
    damaged = out / "damaged"
    shutil.copytree(out / "store", damaged)
    statuses = run(2, lambda rank: train(out, rank, "disk", resume=True, steps=3, place="damaged"))
    why = FAILED.with_name(f"{FAILED.name}-1").read_text()
    same &= all(statuses) and "is a copy of" in why and f"pass ckpt_path={str((out / 'store').absolute())!r} and" in why
    for slot in damaged.glob("rank-1-of-3/block-*"):
        slot.write_bytes(slot.read_bytes()[:-1])
    same &= any("rank-1-of-3: " in fault for fault in verify._stores(damaged).faults)
    shutil.rmtree(damaged / "rank-2-of-3")
    same &= any("the stores of ranks 2 are missing" in fault for fault in verify._stores(damaged).faults)
    shutil.rmtree(damaged)
    return same


def loses_a_disk(root: Path) -> dict[str, Any]:
    """One rank's disk is full; all ranks say whose, and go on from the step that all have."""
    reference, out = root / "reference-2-plain", root / "loses"
    out.mkdir()
    run(2, lambda rank: train(out, rank, "disk", resume=False, more=[LosesDisk()] if rank else []))
    first, second = (FAILED.with_name(f"{FAILED.name}-{rank}").read_text() for rank in range(2))
    named = "rank 1 has ended with" in first and "rank-1-of-2" in first and "rank-1-of-2" in second
    assert not any(run(2, lambda rank: train(out, rank, "host", resume=True)))
    return {"reached": named, "differs": [first, second] if not named else [], "same": same_end(out, reference)}


def keeps_some(root: Path) -> dict[str, Any]:
    """With ``keep_every`` ranks go on from the last pin that all have."""
    reference, out = root / "reference-2-plain", root / "some"
    out.mkdir()
    reached = 0
    for resume, kill in [
        (False, Kill(1, "once it knows the others' numbers", 5)), (True, Kill(0, "before it writes a record", 3)),
        (True, Kill(1, "before it tells its number", 4)), (True, None),
    ]:  # fmt: skip
        statuses = run(2, lambda rank, resume=resume: train(out, rank, MIXED, resume=resume, keep_every=2), kill)
        reached += any(map(was_killed, statuses))
    assert not any(statuses), "a resume has failed"
    return {"reached": reached, "differs": [], "same": same_end(out, reference)}


def begins_anew(root: Path) -> dict[str, Any]:
    """Kept steps are written over by nobody: they are put aside, and can be gone on from."""
    reference, out = root / "reference-2-plain", root / "anew"
    out.mkdir()
    assert not any(run(2, partial(train, out, plan=MIXED, resume=False, steps=2)))
    statuses = run(2, partial(train, out, plan=MIXED, resume=False))
    words = f"holds step 2 of an earlier run.* pass ckpt_path={str(out / 'store')!r} to trainer.fit.* pass new_run=True"
    refused = all(re.search(words, FAILED.with_name(f"{FAILED.name}-{rank}").read_text()) for rank in range(2))
    same = []
    for resume, place, new_run in ((False, "store", True), (out / "store.earlier-1", "further", False)):
        assert not any(run(2, partial(train, out, plan=MIXED, resume=resume, place=place, new_run=new_run)))
        same.append(same_end(out, reference) and len(losses(out, 2)[0]) == (4 if resume else 6))
    return {"reached": all(statuses) and refused, "differs": [], "same": all(same)}


def starts_again(root: Path) -> dict[str, Any]:
    """torchrun starts the ranks again when one is killed, and they go on."""
    reference, out = root / "reference-2-plain", root / "torchrun"
    out.mkdir()
    paths = [path for path in sys.path if path and Path(path) != Path(__file__).parent]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command += ["--max-restarts=1"]
    done = subprocess.run([*command, __file__, str(out), "rank"], env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {"reached": (out / "restarted").exists(), "differs": [], "same": same_end(out, reference)}


def be_started(out: Path) -> None:
    """A rank that torchrun has started."""
    rank, again = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    torch.set_num_threads(1)
    if again:
        (out / "restarted").touch()
    elif rank == 1:
        _arm(Kill(1, "before it tells its number", 4))
    train(out, rank, MIXED, resume=again)


def main(root: Path) -> None:
    """Runs all cases, and prints what became of them."""
    os.chdir(root)
    report = {"moved": moved(root)}
    third = [Kill(1, "before it writes a record", 4), Kill(0, "before it writes a record", 2)]  # in it, and after it
    for world, plan, kind, kills in [
        (2, MIXED, "plain", random_kills(1, 2, 3)), (2, "host", "clipped accumulated", random_kills(2, 2, 3)),
        (3, "disk", "scaled", third), (2, THERE, "half devices", third),
    ]:  # fmt: skip
        report[kind] = killed_and_resumed(root, world, plan, kills, kind=kind)
    report |= {
        "torchrun": starts_again(root),
        "a full disk": loses_a_disk(root),
        "keep_every": keeps_some(root),
        "anew": begins_anew(root),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1])) if len(sys.argv) == 2 else be_started(Path(sys.argv[1]))
