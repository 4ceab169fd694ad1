"""Peak memory and time of the chunked head of a language model, beside the unchunked one.

Each contestant runs forward and backward of head and loss in a process of its own, in turns. Its
peak is the process's high-water mark beyond inputs, weights and their gradients, which exist
before.

* ``unchunked``: ``cross_entropy(linear(hidden, weight).float(), targets)``.
* ``chunked``: ``lightning_hetero.nn.chunked_cross_entropy``.
* ``torch``: ``torch.nn.functional.linear_cross_entropy`` with its options, where torch has it.

Prints one line of JSON last: ``peak_ratio_*`` and ``time_ratio_*`` of the chunked head over the
unchunked one, for a head that is frozen and one that is trained; ratios of times are medians over
rounds.

    python benchmarks/chunked_head.py --vocabulary 131072 --tokens 4096 --hidden 2048
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from scratch import alone
from torch import Tensor
from torch.nn import functional as F

from lightning_hetero.nn import chunked_cross_entropy

WAYS = ("unchunked", "chunked", "torch")


def loss_of(way: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss, computed in one way."""
    if way == "chunked":
        return chunked_cross_entropy(hidden, weight, targets)
    if way == "torch":
        return F.linear_cross_entropy(hidden, weight, targets, options=torch.nn.LinearCrossEntropyOptions())
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def high_water() -> int:
    """The process's peak of resident memory, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(way: str, trained: bool, vocabulary: int, tokens: int, width: int) -> dict[str, float]:
    """Loss, seconds and peak bytes of one forward and backward."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width).bfloat16().requires_grad_()
    weight = torch.empty(vocabulary, width, dtype=torch.bfloat16).normal_(std=0.02).requires_grad_(trained)
    targets = torch.randint(0, vocabulary, (tokens,))
    for tensor in (hidden, weight) if trained else (hidden,):
        tensor.grad = torch.zeros_like(tensor).fill_(0.0)
    loss_of(way, hidden[:8], weight[:64], targets[:8] % 64).backward()  # libraries are loaded
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = high_water(), time.perf_counter()
    loss = loss_of(way, hidden, weight, targets)
    loss.backward()
    seconds = time.perf_counter() - begin
    return {"loss": loss.item(), "seconds": seconds, "peak_bytes": high_water() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:2])
    args = parser.parse_args()

    result: dict[str, object] = {"benchmark": "chunked_head", **vars(args), "torch": torch.__version__}
    for trained in (False, True):
        head = "trained" if trained else "frozen"
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(args.rounds):
            turn = {}
            for way in args.ways[:: 1 if number % 2 else -1]:
                turn[way] = found = alone(measure, way, trained, args.vocabulary, args.tokens, args.hidden)
                print(f"{head}, round {number + 1}, {way}: {found['seconds']:.2f} s, {found['peak_bytes'] / 2**20:.0f} MiB, "
                      f"loss {found['loss']:.5f}", flush=True)  # fmt: skip
            rounds.append(turn)
        for way in args.ways:
            if way != "unchunked" and "unchunked" in args.ways:
                name = head if way == "chunked" else f"{way}_{head}"
                result[f"peak_ratio_{name}"] = max(r[way]["peak_bytes"] / r["unchunked"]["peak_bytes"] for r in rounds)
                result[f"time_ratio_{name}"] = statistics.median(r[way]["seconds"] / r["unchunked"]["seconds"] for r in rounds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
