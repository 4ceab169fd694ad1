"""The command: sets contestants up, lets them take turns, and says what was measured."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from contestants import Contestant, ProcessFailedError, Turn
from gpt2 import add_model_options, find_size, num_params
from scratch import scratch

from peers.entrants import ENTRANTS
from peers.environments import NotInstalledError, Place
from peers.process import PRECISIONS
from peers.publish import publish

AGAINST = {"host": ("plain", "fsdp2", "zero_offload", "bitsandbytes", "torchao"), "disk": ("plain", "zero_infinity")}


def compete(args: argparse.Namespace, places: dict[str, Place], precision: str) -> dict[str, Any]:
    """What each contestant has measured in one precision, or why it has not.

    The first round fills caches and does not count.
    """
    settings = argparse.Namespace(**{**vars(args), "precision": precision})
    turns: dict[str, list[Turn]] = defaultdict(list)
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        processes: dict[str, Contestant] = {}
        for name, place in places.items():
            with given_up(name, results):
                processes[name] = stack.enter_context(place.begin(settings, args.directory / precision / name))
        for number in range(args.rounds + 1):
            order = [name for name in processes if name not in results]
            for name in order if number % 2 else reversed(order):  # drift cancels
                with given_up(name, results):
                    turn = processes[name].turn(args.steps if number else 2)
                    if number:
                        turns[name].append(turn)
                        print(f"{precision}, round {number}, {name}: {statistics.median(turn.seconds):.4f} s/step", flush=True)
        for name in [name for name in processes if name not in results]:
            with given_up(name, results):
                results[name] = figures(turns[name], processes[name].finish(), args)
    reference = results.get("plain", {}).get("losses")
    for found in results.values():
        if reference and "losses" in found:
            pairs = zip(found["losses"], reference, strict=False)
            found["loss_difference"] = max(abs(ours - plain) for ours, plain in pairs)
    return {name: results[name] for name in places}


@contextlib.contextmanager
def given_up(name: str, results: dict[str, Any]) -> Any:
    """A contestant whose process ends here is named with the last line of its error."""
    try:
        yield
    except ProcessFailedError as error:
        results[name] = {"skipped": str(error)}
        print(f"{name}: {error}", flush=True)


def figures(turns: list[Turn], result: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """One contestant's; seconds are medians of each round."""
    seconds = [statistics.median(turn.seconds) for turn in turns]
    typical = statistics.median(seconds)
    return {
        "seconds_per_step": typical,
        "seconds_of_rounds": seconds,
        "tokens_per_s": args.batch * args.seq / typical,
        "bytes_per_step": round(statistics.median(turn.num_bytes for turn in turns)),
        **result,
    }


def speedups(measured: dict[str, Any]) -> dict[str, float | None]:
    """Seconds of another over ours, median of the rounds; ``None`` where one did not run."""
    found = {}
    for ours, others in AGAINST.items():
        for other in others:
            rounds = [measured.get(name, {}).get("seconds_of_rounds") for name in (other, ours)]
            ratios = [a / b for a, b in zip(*rounds, strict=True)] if all(rounds) else []
            found[f"{ours}_speedup_vs_{other}"] = statistics.median(ratios) if ratios else None
    return found


def settle(args: argparse.Namespace) -> tuple[dict[str, Place], dict[str, Any]]:
    """Who can take part, and what the table says of each whatever the precision."""
    places, described = {}, {}
    for name in args.contestants:
        entrant = ENTRANTS[name]
        described[name] = {"title": entrant.title, "keeps": entrant.keeps, "lines_changed": entrant.lines_changed}
        try:
            place = Place(name, entrant, None if args.no_install else args.dir / "peers")
            described[name]["set_up"] = place.set_up(argparse.Namespace(**{**vars(args), "precision": PRECISIONS[0]}))
            described[name]["version"] = place.version()
        except NotInstalledError as error:
            described[name]["skipped"] = str(error)
            print(f"{name}: {error}", flush=True)
        else:
            places[name] = place
            print(f"{name}: {described[name]}", flush=True)
    return places, described


def parse_args(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="peers", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, model="gpt2-124m")
    parser.add_argument(
        "--contestants", nargs="+", choices=ENTRANTS, default=list(ENTRANTS), metavar="NAME", help=", ".join(ENTRANTS)
    )
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="one after the other")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of one turn")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each contestant")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk; environments stay in DIR/peers")
    parser.add_argument("--no-install", action="store_true", help="only what is installed here, without times of a set-up")
    parser.add_argument("--machine", default="", help="a few words that the tables show")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--publish", type=Path, metavar="FILE", help="write pages and picture from a result; measures nothing")
    return parser.parse_args()


def main(doc: str | None) -> None:
    args = parse_args(doc)
    if args.publish is not None:
        publish(args.publish)
        print(json.dumps({"benchmark": "peers", "published": str(args.publish)}))
        return
    args.size = find_size(args.model, args.layers)
    args.dir = args.dir.resolve()
    places, described = settle(args)
    with scratch(args.dir) as args.directory:
        measured = {precision: compete(args, places, precision) for precision in args.precision}
    result = {
        "benchmark": "peers",
        "model": args.model,
        "parameters": num_params(args.size),
        "batch": args.batch,
        "seq": args.seq,
        "steps": args.steps,
        "rounds": args.rounds,
        "machine": args.machine or f"{os.cpu_count()} cores",
        "taken": f"{datetime.now(UTC):%Y-%m-%d}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "contestants": described,
        "measured": measured,
        "speedups": {precision: speedups(found) for precision, found in measured.items()},
    }
    if args.save is not None:
        args.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
