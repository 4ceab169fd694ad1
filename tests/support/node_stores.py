"""Two nodes that keep their steps, killed and started again: a script.

See ``tests/integration/test_nodes.py``. What counts as right is what as many ranks of one node do
in one go with everything in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_hetero.convert.exporting import export_weights
from lightning_hetero.store.format import sets
from support.shared_stores import FAILED, MIXED, Kill, run, same_end, train, was_killed

RANKS, NODES = 4, 2


def _trained(out: Path, nodes: int, kill: Kill | None, *, ranks: int = RANKS, shares: bool = False, **options: Any) -> bool:
    """Whether a rank was killed; then all have ended."""

    def call(rank: int) -> None:
        node = rank // (ranks // nodes)
        train(out, rank, MIXED, place="store" if shares else f"store-{node}", **options)

    statuses = run(ranks, call, kill, nodes=nodes)
    assert all(statuses) if any(map(was_killed, statuses)) else kill is not None or not any(statuses), statuses
    return any(map(was_killed, statuses))


def disks_apart(out: Path, reference: Path) -> dict[str, Any]:
    """Each node has a disk. A rank of one node dies in a step, and one of the other in a record."""
    reached = _trained(out, NODES, Kill(3, "as it writes a slot", 9), resume=False)
    reached &= _trained(out, NODES, Kill(0, "before it writes a record", 3), resume=True)
    assert not _trained(out, NODES, None, resume=True)
    numbers = set()
    for node in range(NODES):
        with sets.Stores(out / f"store-{node}") as stores:
            assert [member.rank // 2 for member, _ in stores.all] == [node] * 2
            numbers |= {store.records[-1].step for _, store in stores.all}
    same = same_end(out, reference) and len(numbers) == 1
    # The disk of a node is lost: one node goes on, and both do once its directory is copied.
    shutil.rmtree(out / "store-1")
    (out / "store-1").mkdir()  # a new one is there
    statuses = run(RANKS, lambda rank: train(out, rank, MIXED, place=f"store-{rank // 2}", resume=True), nodes=NODES)
    said = [FAILED.with_name(f"{FAILED.name}-{rank}").read_text() for rank in range(RANKS)]
    same &= all(statuses) and all("store-1'" in text for text in said)
    assert not _trained(out, 1, None, ranks=2, resume=True)
    same &= same_end(out, reference)
    shutil.copytree(out / "store-0", out / "store-1", dirs_exist_ok=True)
    assert not _trained(out, NODES, None, resume=True)
    same &= same_end(out, reference)
    counts = [len(sets.stores_in(out / "store-0"))]
    return {"reached": reached, "same": same and _begins_anew(out, shares=False), "counts": counts}


def one_directory(out: Path, _: Path) -> dict[str, Any]:
    """Both nodes have the same directory, then one node of as many ranks, and of half of them. Two
    take a step without dropout as from a checkpoint.
    """
    assert not _trained(out, NODES, None, shares=True, resume=False, steps=3)
    first = out / "first"
    first.mkdir()
    (out / "end.ckpt").rename(first / "end.ckpt")
    reached, same, counts = True, _is_exported(out, first), []
    for nodes, ranks, kills in [
        (1, 4, [Kill(1, "before the earlier stores go", 1)]), (2, 4, [Kill(2, "while parts come from other ranks", 2)]),
        (1, 2, [Kill(0, "while the earlier stores go", 2)]), (2, 4, []),
    ]:  # fmt: skip
        for kill in kills:
            reached &= _trained(out, nodes, kill, ranks=ranks, shares=True, resume=True, steps=3)
        assert not _trained(out, nodes, None, ranks=ranks, shares=True, resume=True, steps=3)
        same &= same_end(out, first)
        counts.append(len(sets.stores_in(out / "store")))
    going: dict[str, Any] = {"steps": 4, "drops": 0.0, "orders": (0, 1, 0, 1)}
    assert not _trained(out, NODES, None, shares=True, resume=True, **going)
    assert not any(run(RANKS, partial(train, first, plan="host", resume=first / "end.ckpt", store=False, used=3, **going)))
    same &= same_end(out, first) and _begins_anew(out, shares=True)
    return {"reached": reached, "same": same, "counts": counts}


def _begins_anew(out: Path, *, shares: bool) -> bool:
    """Whether a fit that begins is refused, or puts aside what is there, on all nodes."""
    places = ("store",) if shares else ("store-0", "store-1")
    statuses = run(RANKS, lambda rank: train(out, rank, MIXED, place=places[rank // 2 % len(places)], resume=False), nodes=NODES)
    refused = all("new_run=True" in FAILED.with_name(f"{FAILED.name}-{rank}").read_text() for rank in range(RANKS))
    kept = [len(sets.stores_in(out / place)) for place in places]
    assert not _trained(out, NODES, None, shares=shares, resume=False, steps=1, new_run=True)
    aside = [len(sets.stores_in(out / f"{place}.earlier-1")) for place in places]
    return all(statuses) and refused and aside == kept and sum(len(sets.stores_in(out / place)) for place in places) == RANKS


def _is_exported(out: Path, first: Path) -> bool:
    export_weights(out / "store", out / "exported.ckpt")
    wanted, found = (torch.load(path)["state_dict"] for path in (first / "end.ckpt", out / "exported.ckpt"))
    return all(torch.equal(found[name], value) for name, value in wanted.items())


def main(root: Path) -> None:
    """Runs all cases, and prints what became of them."""
    os.chdir(root)
    reference = root / "reference"
    reference.mkdir()
    assert not any(run(RANKS, lambda rank: train(reference, rank, "host", resume=False, store=False)))
    report = {}
    for case in (disks_apart, one_directory):
        out = root / case.__name__
        out.mkdir()
        report[case.__name__] = case(out, reference)
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
