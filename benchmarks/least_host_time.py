"""The least host time per block: what offloading cannot do without, in a loop that does no more.

* ``plain``: the model of ``small_blocks.py`` with one ``AdamW(fused=True)``.
* ``resident``: hooks before and after each forward, one per gradient, and an update per block.
* ``host``: the same, hooks on saved tensors, and a thread that copies weights before each use,
  copies gradients and updates. Nothing is checked, and nothing leaves memory.

Prints one line of JSON: the CPU time of the thread that trains and of the process per block, as a
multiple of that of ``plain``: medians of rounds in turns, each the difference between a model of 64
blocks and one of 16.

    python benchmarks/least_host_time.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from small_blocks import WIDTH, Block, SmallBlocks
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

KINDS = ("plain", "resident", "host")
MANY, FEW, WARM = 64, 16, 4
NUMBERS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False, "maximize": False}


class Lane:
    """A thread that does one thing after the other."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], object], threading.Lock] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def give(self, work: Callable[[], object]) -> threading.Lock:
        """Returns a lock that opens when it is done."""
        ends = threading.Lock()
        ends.acquire()
        self._waiting.put((work, ends))
        return ends

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _loop(self) -> None:
        torch.set_grad_enabled(False)
        while (one := self._waiting.get()) is not None:
            one[0]()
            one[1].release()


class Least:
    """The hooks of one model."""

    def __init__(self, model: SmallBlocks, lane: Lane | None) -> None:
        self._lane, self._step = lane, torch.ones(())
        self._left: dict[Block, int] = {}
        self._updating: dict[Block, threading.Lock] = {}
        self._in_backward_of: Block | None = None
        self._contexts: list[Any] = []
        for block in model.blocks:
            assert isinstance(block, Block)
            params = list(block.parameters())
            state = [[torch.zeros(WIDTH) for _ in params] for _ in range(3)]  # two moments, and gradients on the host
            weights = torch.zeros(2, len(params) * WIDTH)  # on the device, and on the host
            block.register_forward_pre_hook(self._before(block, weights), with_kwargs=True)
            block.register_forward_hook(self._after(block, weights, params, state), with_kwargs=True)
            for param in params:
                param.register_post_accumulate_grad_hook(lambda _, block=block: self._complete(block))

    def _before(self, block: Block, weights: Tensor) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._left[block] = 9
            if self._lane is not None:
                if (updated := self._updating.pop(block, None)) is not None:
                    updated.acquire()
                self._lane.give(lambda: weights[0].copy_(weights[1])).acquire()
                self._contexts.append(saved_tensors_hooks(Tensor.detach, lambda tensor: tensor))
                self._contexts[-1].__enter__()

        return hook

    def _after(self, block: Block, weights: Tensor, params: list[Tensor], state: list[list[Tensor]]) -> Callable[..., None]:
        def begins(_: Tensor) -> None:
            self.update()
            self._in_backward_of, self._due = block, (params, state)
            if self._lane is not None:
                self._lane.give(lambda: weights[0].copy_(weights[1])).acquire()

        def hook(module: Any, args: Any, kwargs: Any, output: Tensor) -> None:
            if self._lane is not None:
                self._contexts.pop().__exit__(None, None, None)
            output.register_hook(begins)

        return hook

    def _complete(self, block: Block) -> None:
        self._left[block] -= 1

    def update(self) -> None:
        """Updates the block whose backward has ended."""
        block, self._in_backward_of = self._in_backward_of, None
        if block is None:
            return
        params, (first, second, on_host) = self._due
        grads: list[Any] = [param.grad for param in params]
        if self._lane is None:
            self._fused(params, grads, first, second)
        else:
            self._lane.give(lambda: torch._foreach_copy_(on_host, grads))
            self._updating[block] = self._lane.give(lambda: self._fused([p.detach() for p in params], on_host, first, second))
        for param in params:
            param.grad = None

    @torch.no_grad()
    def _fused(self, params: list[Tensor], grads: list[Tensor], first: list[Tensor], second: list[Tensor]) -> None:
        torch._fused_adamw_(params, grads, first, second, [], [self._step] * len(params), **NUMBERS)  # type: ignore[call-overload]


def seconds(kind: str, num_blocks: int, steps: int) -> tuple[float, float]:
    """CPU seconds of a step: of the thread, and of the process."""
    torch.manual_seed(1)
    model, lane = SmallBlocks(num_blocks), Lane() if kind == "host" else None
    least = None if kind == "plain" else Least(model, lane)
    optimizer, batch = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), torch.randn(4, WIDTH)
    found = []
    for _ in range(WARM + steps):
        begin = time.thread_time(), time.process_time()
        model.training_step(batch, 0).backward()
        if least is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            least.update()
        found.append((time.thread_time() - begin[0], time.process_time() - begin[1]))
    if lane is not None:
        lane.close()
    thread, process = zip(*found[WARM:], strict=True)
    return statistics.median(thread), statistics.median(process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    rows: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in KINDS}
    for _ in range(args.rounds):
        for kind in KINDS:
            many, few = seconds(kind, MANY, args.steps), seconds(kind, FEW, args.steps)
            rows[kind].append(tuple((a - b) / (MANY - FEW) for a, b in zip(many, few, strict=True)))
    result = {}
    for index, clock in enumerate(("thread", "cpu")):
        ratios = {kind: [a[index] / b[index] for a, b in zip(rows[kind], rows["plain"], strict=True)] for kind in KINDS[1:]}
        result[f"{clock}_per_block_vs_plain"] = {kind: round(statistics.median(each), 2) for kind, each in ratios.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
