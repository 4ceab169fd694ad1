"""Small models whose activations are kept, recomputed or swapped, and the driver that plays the
runtime's part for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_hetero.ir.model import BlockProfile
from lightning_hetero.ir.plan import BlockPlan, Saved
from lightning_hetero.ir.schedule import Lane, Op, OpKind, Payload, Phase
from lightning_hetero.lanes import EmulatedDevice, EmulatedLanes, Event, Lanes, OpEvent
from lightning_hetero.profiling.memory import Observed, RecordedMemory
from lightning_hetero.profiling.operators import Addresses, OperatorRecorder, live_bytes, storages_in
from lightning_hetero.profiling.timeline import Mark, Timeline, attributed
from lightning_hetero.runtime.activations.block import Activations, BlockActivations, Rerunning
from lightning_hetero.runtime.activations.files import SwapFiles
from lightning_hetero.runtime.activations.names import ParameterAddresses
from lightning_hetero.runtime.anchors import eager
from support.lanes import InlineLanes

HOPS = {
    "out": (OpKind.SWAP_OUT, Lane.D2H),
    "write": (OpKind.SWAP_OUT, Lane.DISK_WRITE),
    "read": (OpKind.SWAP_IN, Lane.DISK_READ),
    "in": (OpKind.SWAP_IN, Lane.H2D),
}


class Layer(nn.Module):
    """A transformer layer: norm, attention, dropout, an MLP whose ReLU works in place,
    residuals.
    """

    def __init__(self, width: int = 32, heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(inplace=True), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.drop(self.proj(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(x))


class Driver:
    """Plays the runtime: issues the hops of every use where a schedule would, one use ahead in
    backward.

    Args:
        blocks: The blocks in forward order, by name.
        rules: What becomes of what they save.
        lanes: The lanes; inline ones with poison by default.
        files: Files for what goes to the disk.
        issue: Issue hops at all; else backward has to send for everything by itself.
        weights: As for ``Activations``.
    """

    def __init__(
        self,
        blocks: dict[str, nn.Module],
        rules: Callable[[str], BlockPlan],
        *,
        lanes: Lanes | None = None,
        files: SwapFiles | None = None,
        issue: bool = True,
        weights: Callable[[Tensor], Any] = lambda tensor: None,
    ) -> None:
        self.lanes: Lanes = InlineLanes(poison=True) if lanes is None else lanes
        self.activations = Activations(self.lanes, weights=weights, files=files, poison=True)
        self.blocks = {
            name: self.activations.block(name, module, rules(name), index=i) for i, (name, module) in enumerate(blocks.items())
        }
        self._modules, self._issue, self._op, self._outs = blocks, issue, 0, list[Event]()
        self._used: list[BlockActivations] = []
        self._moved: dict[str, int] = {}
        self.attach()

    def attach(self) -> None:
        self.handles = [handle for name, block in self.blocks.items() for handle in hooks(self._modules[name], block)]
        self.handles += [module.register_forward_hook(self._ended(name)) for name, module in self._modules.items()]

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()

    def moved(self, name: str) -> int:
        """Bytes that the last forward of a block has sent out of the device."""
        return self._moved.get(name, 0)

    def hop(self, block: BlockActivations, hop: str, after: Sequence[Event] = ()) -> OpEvent:
        kind, lane = HOPS[hop]
        self._op += 1
        op = Op(id=self._op, kind=kind, block=block.index, lane=lane, at=0, payload=Payload.ACTIVATIONS)
        return block.swap(op, after)

    @property
    def outs(self) -> list[Event]:
        """The SWAP_OUTs that nobody has waited for."""
        return self._outs

    @property
    def is_recomputing(self) -> bool:
        """Whether a forward that runs now is a recomputation, so that none of its anchors count."""
        return any(isinstance(use, Rerunning) for _, use in self.activations.running)

    def num_buffers(self) -> int:
        """Host buffers that exist and are free."""
        return len(self.activations.swapper.buffers._free)

    def begin(self) -> None:
        self._used.clear()
        self._outs.clear()
        self.activations.begin_batch()

    def out(self) -> None:
        """What was sent away has left when this returns."""
        self.lanes.compute_waits(self._outs)
        self.activations.swapper.sweep(self._outs)
        self._outs.clear()

    def come(self) -> None:
        """The schedule's part of backward: everything is sent for, the last use first."""
        for block in reversed(self._used):
            self.hop(block, "read")
            self.hop(block, "in")

    def step(self, forward: Callable[[], Tensor], *, come: bool = True) -> Tensor:
        """One forward and backward; returns the loss."""
        self.begin()
        loss = forward()
        self.out()
        if come and self._issue:
            self.come()
        loss.backward()
        return loss.detach()

    def _ended(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._issue or not torch.is_grad_enabled() or self.is_recomputing:
                return
            block = self.blocks[name]
            self._used.append(block)
            out = self.hop(block, "out")
            self._outs.append(out)
            self._moved[name] = out.op.num_bytes
            self.hop(block, "write")

        return hook

    def close(self) -> None:
        self.detach()
        self.activations.begin_batch()
        self.lanes.drain()
        self.activations.close()
        self.lanes.close()


def hooks(module: nn.Module, block: BlockActivations) -> list[RemovableHandle]:
    """Registers hooks that tell the block's activations of the module's forwards."""

    def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        block.enter(args, kwargs)

    def after(module: nn.Module, args: object, output: object) -> None:
        block.leave(output)

    return [
        module.register_forward_pre_hook(eager(before), prepend=True, with_kwargs=True),
        module.register_forward_hook(eager(after), always_call=True),
    ]


@contextmanager
def driving(*args: Any, **kwargs: Any) -> Iterator[Driver]:
    driver = Driver(*args, **kwargs)
    try:
        yield driver
    finally:
        driver.close()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """The gradients of a module's parameters, which are cleared."""
    found = {name: param.grad for name, param in module.named_parameters() if param.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def rule(saved: Saved = Saved.KEEP, boundary: Saved = Saved.KEEP, **operators: Saved) -> Callable[[str], BlockPlan]:
    """The same rule for every block; ``__`` in an operator's name stands for a dot."""
    names = {name.replace("__", "."): policy for name, policy in operators.items()}
    return lambda name: BlockPlan(name=name, saved=saved, boundary=boundary, operators=names)


def observation(recorder: OperatorRecorder, line: Timeline, saved: frozenset[int], inputs: dict[int, tuple[int, ...]]) -> Observed:
    """Everything that a recorder and a timeline have seen."""
    return Observed(
        stretches=tuple(attributed(line.stretches)), ran=tuple(recorder.ran), made=tuple(recorder.made),
        live_bytes=tuple(live_bytes(recorder)), saved_live_bytes=tuple(live_bytes(recorder, only=saved)), saved=saved,
        inputs=inputs,
    )  # fmt: skip


def profiled(net: nn.Module, blocks: dict[str, nn.Module], forward: Callable[[], Tensor]) -> list[BlockProfile]:
    """The blocks' operators and bytes as the profiler finds them, without a runtime."""
    rows = [SimpleNamespace(index=i, name=name, parts=()) for i, name in enumerate(blocks)]
    addresses = Addresses(())
    ParameterAddresses.__init__(addresses, ((n, p) for module in blocks.values() for n, p in module.named_parameters()))
    ticks = itertools.count()
    recorder = OperatorRecorder(addresses, lambda: float(next(ticks)))
    inputs: dict[int, tuple[int, ...]] = {}

    def mark() -> Mark:
        return Mark(seconds=float(next(ticks)), operators=len(recorder.ran), events=len(recorder.events))

    line = Timeline(mark, lambda block, tree: inputs.setdefault(block.index, tuple(dict.fromkeys(storages_in(recorder, tree)))))
    handles = []
    for row, module in zip(rows, blocks.values(), strict=True):
        handles.append(
            module.register_forward_pre_hook(lambda _, a, k, row=row: line.forward_begins(row, (a, k)), with_kwargs=True)
        )
        handles.append(module.register_forward_hook(lambda _, a, out, row=row: line.forward_ends(row)))
    with recorder, line.during(Phase.FORWARD):
        loss = forward()
    saved = recorder.alive()
    del loss
    for handle in handles:
        handle.remove()
    memory = RecordedMemory(observation(recorder, line, saved, inputs), len(blocks))
    return [
        BlockProfile(
            name=row.name, num_params=0, num_trainable_params=0, forward_s=1.0, backward_s=1.0,
            forward_flop=memory.forward_flop[row.index], activation_bytes=memory.activation_bytes[row.index],
            boundary_bytes=memory.boundary_bytes[row.index], transient_bytes=0, operators=memory.operators(row.index),
        )
        for row in rows
    ]  # fmt: skip


KEEP, RECOMPUTE, HOST, DISK = Saved.KEEP, Saved.RECOMPUTE, Saved.SWAP_HOST, Saved.SWAP_DISK


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Net(nn.Module):
    """Layers behind an operator of no block, as positions are added."""

    def __init__(self, layers: int = 2, make: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = x + 1
        for layer in self.layers:
            x = layer(x, *args)
        return self.head(x).square().mean()

    def blocks(self) -> dict[str, nn.Module]:
        return {f"layers.{i}": layer for i, layer in enumerate(self.layers)} | {"head": self.head}


def emulated() -> Lanes:
    return EmulatedLanes(EmulatedDevice(memory="1MiB", seed=1), poison=True)


def plain(net: nn.Module, forward: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss, gradients and the generator's state as they are without us."""
    torch.manual_seed(7)
    loss = forward()
    loss.backward()
    return loss.detach(), gradients(net), torch.get_rng_state()


def assert_same(net: nn.Module, driver: Driver, forward: Callable[[], Tensor], **options: Any) -> None:
    """Two steps with the driver's hooks give the bits of one without; to be called before anything
    else has run.
    """
    driver.detach()
    expected = plain(net, forward)
    driver.attach()
    for _ in range(2):  # buffers are lent again
        torch.manual_seed(7)
        loss = driver.step(forward, **options)
        found = gradients(net)
        assert torch.equal(loss, expected[0])
        assert found.keys() == expected[1].keys()
        for name, grad in expected[1].items():
            assert torch.equal(found[name], grad), name
        assert torch.equal(torch.get_rng_state(), expected[2])


RULES = {
    "keep": rule(),
    "recompute": rule(RECOMPUTE),
    "recompute from a swapped input": rule(RECOMPUTE, HOST),
    "swap": rule(HOST, HOST),
    "recompute but attention and qkv": rule(RECOMPUTE, HOST, qkv=HOST, **{ATTENTION: KEEP}),
    "keep but norms": rule(KEEP, KEEP, norm=RECOMPUTE, mlp__0=RECOMPUTE, qkv=HOST),
    "swap but a sum": rule(HOST, KEEP, add=RECOMPUTE, mlp__1=KEEP),
}


class Block(nn.Module):
    """A block whose forward is a function."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)
