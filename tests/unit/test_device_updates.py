"""Updates on the device against the native engine, bit by bit, and the way of the state between the
two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.device import Fleeting, World, emulated, give_gradients, run, world
from support.properties import examples
from torch import Tensor, nn

from lightning_hetero.errors import DeviceMemoryError, HeteroError
from lightning_hetero.handles.offloaded_parameter import materialize
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
from lightning_hetero.ir.plan import BlockPlan, Tier, UpdateLane
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.lanes import EmulatedLanes, Event
from lightning_hetero.optim.reference import MasterWeightOptimizer
from lightning_hetero.runtime.device import DeviceSide, device_updates

KNOWN_TORCH = "2.13"
KEPT = BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE)
BORROWED = BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.HOST, update=UpdateLane.DEVICE)
ON_CPU = BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.HOST, update=UpdateLane.CPU)

same_bits_as_the_engine = pytest.mark.skipif(
    not torch.__version__.startswith(KNOWN_TORCH), reason=f"the native kernels promise the bits of torch {KNOWN_TORCH}"
)


@dataclass(frozen=True)
class Case:
    """One training run."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    decoupled: bool = True
    maximize: bool = False
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    scale: float = 1.0
    groups: bool = False
    clip_value: float | None = None
    steps: int = 3
    seed: int = 0


CASES = st.builds(
    Case,
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    decoupled=st.booleans(),
    maximize=st.booleans(),
    lr=st.floats(1e-5, 0.1),
    betas=st.tuples(st.sampled_from([0.0, 0.5, 0.6, 0.9]), st.sampled_from([0.0, 0.9, 0.999])),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.just(0.0) | st.floats(1e-3, 0.5),
    scale=st.just(1.0) | st.floats(1e-3, 4.0),
    groups=st.booleans(),
    clip_value=st.none() | st.floats(0.1, 1.0),
    steps=st.integers(1, 4),
    seed=st.integers(0, 1000),
)


class Layer(nn.Module):
    """Parameters of any shapes."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(case.seed)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator).to(case.dtype) for shape in case.shapes)


def make_optimizer(case: Case, root: nn.Module) -> Any:
    params: Any = list(root.parameters())
    if case.groups and len(params) > 1:
        params = [{"params": params[:1], "lr": case.lr / 3, "weight_decay": 0.0}, {"params": params[1:]}]
    kind = torch.optim.AdamW if case.decoupled else torch.optim.Adam
    return kind(
        params, lr=case.lr, betas=case.betas, eps=case.eps, weight_decay=case.weight_decay, maximize=case.maximize, fused=True
    )


@contextmanager
def made(case: Case) -> Iterator[World]:
    root = Layer(case)
    with world(root, make_optimizer(case, root), clip_value=case.clip_value) as net:
        yield net


def train(net: World, case: Case, *, begin: int = 0, before: Any = None, after: Any = None) -> None:
    """Steps with the same gradients for every world of a case."""
    for step in range(begin, begin + case.steps):
        give_gradients(net.root.parameters(), case.seed + step)
        net.updater.scale = case.scale
        for function in (before, net.step, after):
            if function is not None:
                function()


def outcome(net: World) -> dict[str, Tensor]:
    """Weights and state, wherever they are."""
    found = {name: param.detach().clone() for name, param in net.root.named_parameters()}
    for number, state in net.binding.optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": materialize(value).clone() for key, value in state.items()}
    return found


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].shape == value.shape
        assert torch.equal(got[name], value) or (got[name].isnan() == value.isnan()).all() & torch.equal(
            got[name].nan_to_num(), value.nan_to_num()
        ), name


def native(case: Case) -> dict[str, Tensor]:
    with made(case) as net:
        train(net, case)
        return outcome(net)


class Swaps:
    """The state's way to the device and back around every update."""

    def __init__(self, net: World, lanes: EmulatedLanes, side: DeviceSide) -> None:
        self.net, self.lanes, self.side = net, lanes, side
        self.returned: list[Event] = []

    def before(self) -> None:
        events = [run(self.lanes, Lane.H2D, partial(self.side.updates.swap_in, block), self.returned) for block in self.net.blocks]
        self.lanes.compute_waits(events)

    def after(self) -> None:
        self.returned = []
        for block in self.net.blocks:
            event = run(self.lanes, Lane.D2H, partial(self.side.updates.swap_out, block), [self.lanes.mark()])
            self.side.updates.returning(block, event)
            self.returned.append(event)


# ---- the same bits -------------------------------------------------------------------------------


@same_bits_as_the_engine
@examples(40)
@given(case=CASES)
def test_state_on_the_device_gives_the_bits_of_the_native_engine(case: Case) -> None:
    with made(case) as net, emulated() as lanes:
        net.on(lanes, KEPT)
        train(net, case)
        assert_same(outcome(net), native(case))


@same_bits_as_the_engine
@examples(15)
@given(case=CASES)
def test_state_that_comes_and_goes_gives_the_bits_of_the_native_engine(case: Case) -> None:
    with made(case) as net, emulated() as lanes:
        side = net.on(lanes, BORROWED)
        swaps = Swaps(net, lanes, side)
        resident = lanes.memory().used_bytes
        train(net, case, before=swaps.before, after=swaps.after)
        assert_same(outcome(net), native(case))
        assert lanes.memory().used_bytes == resident
        assert lanes.memory().peak_bytes > resident


def test_a_way_back_may_end_while_it_is_noted() -> None:
    with made(Case(shapes=((3,),), dtype=torch.float32)) as net, emulated() as lanes:
        side = net.on(lanes, BORROWED)
        (block,) = net.blocks[:1]
        run(lanes, Lane.H2D, partial(side.updates.swap_in, block)).wait()
        side.updates._states = Fleeting(side.updates._states)
        side.updates.returning(block, lanes.mark())
        assert all(part in side.updates._returning for part in block.parts)


@same_bits_as_the_engine
@examples(15)
@given(case=CASES)
def test_gradients_that_left_the_device_give_the_native_update_its_bits(case: Case) -> None:
    with made(case) as net, emulated() as lanes:
        side = net.on(lanes, ON_CPU)

        def leave() -> None:
            for block in net.blocks:
                side.gradients.sent(block, run(lanes, Lane.D2H, side.gradients.take(block), [lanes.mark()]))
            for block in net.blocks:
                side.gradients.wait(block)

        def renew() -> None:
            lanes.compute_waits([run(lanes, Lane.H2D, partial(side.weights.upload, block)) for block in net.blocks])
            assert not any(id(p) in side.gradients.ids() for p in net.root.parameters())

        train(net, case, before=leave, after=renew)
        assert_same(outcome(net), native(case))


@same_bits_as_the_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_converted_a_chunk_at_a_time_give_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(shapes=((7, 9), (200,), (3,), (61,)), dtype=dtype, scale=0.3)
    expected = native(case)
    calls: list[int] = []
    plain = torch._fused_adamw_
    monkeypatch.setattr(device_updates, "_CHUNK_ELEMENTS", 64)
    monkeypatch.setattr(torch, "_fused_adamw_", lambda p, *a, **k: calls.append(sum(t.numel() for t in p)) or plain(p, *a, **k))
    with made(case) as net, emulated() as lanes:
        net.on(lanes, KEPT)
        train(net, case)
        assert_same(outcome(net), expected)
    assert len(calls) >= 3 * case.steps
    assert max(calls) <= 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_updates_on_the_device_equal_those_of_the_reference(dtype: torch.dtype) -> None:
    case = Case(shapes=((5, 7), (11,)), dtype=dtype, steps=1)
    plain = Layer(case)
    factory = partial(torch.optim.AdamW, lr=case.lr, betas=case.betas, eps=case.eps, weight_decay=case.weight_decay, fused=True)
    optimizer = MasterWeightOptimizer(plain.parameters(), factory)
    with made(case) as net, emulated() as lanes:
        net.on(lanes, KEPT)
        for step in range(4):
            for o in (optimizer, net.binding.optimizer):
                o.param_groups[0]["lr"] = case.lr / (1 + step)
            give_gradients(plain.parameters(), case.seed + step)
            optimizer.step()
            train(net, case, begin=step)
        assert all(torch.equal(p, q) for p, q in zip(net.root.parameters(), plain.parameters(), strict=True))


def test_a_graph_that_holds_updated_weights_is_refused() -> None:
    case = Case(shapes=((4, 4),), dtype=torch.float32)
    with made(case) as net, emulated() as lanes:
        net.on(lanes, KEPT)
        (weight,) = net.root.parameters()
        loss = (torch.randn(4, 4, requires_grad=True) @ weight).sum()
        train(net, case)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---- the state -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_on_the_device_is_saved_and_loaded_like_any_other(dtype: torch.dtype) -> None:
    case = Case(shapes=((5, 3), (6,)), dtype=dtype, groups=True)
    with made(case) as net, emulated() as lanes:
        side = net.on(lanes, KEPT)
        train(net, case)
        saved = net.binding.optimizer.state_dict()
        assert type(saved["state"][0]["exp_avg"]) is OffloadedTensor
        plain = {n: {k: materialize(v).clone() for k, v in s.items()} for n, s in saved["state"].items()}
        weights = [p.detach().clone() for p in net.root.parameters()]
        train(net, case, begin=case.steps)
        expected = outcome(net)
        assert side.updates.read(net.parts[0], 0, 0).ne(0).any()
    for plan in (KEPT, BORROWED):
        with made(case) as net, emulated() as lanes:
            side = net.on(lanes, plan)
            with torch.no_grad():
                for param, value in zip(net.root.parameters(), weights, strict=True):
                    param.copy_(value)
            net.binding.optimizer.load_state_dict({**saved, "state": plain})
            swaps = Swaps(net, lanes, side)
            around = {} if plan is KEPT else {"before": swaps.before, "after": swaps.after}
            train(net, case, begin=case.steps, **around)
            assert_same(outcome(net), expected)


def test_state_moves_to_the_device_and_back_between_steps() -> None:
    case = Case(shapes=((5, 3), (600,)), dtype=torch.bfloat16, steps=2)
    with made(case) as net, emulated() as lanes:
        train(net, case)
        side = net.on(lanes, KEPT)
        for part in net.parts:  # its pages have been given back, as far as they are whole
            assert part.state_home is side.updates
        train(net, case, begin=2)
        for block in net.blocks:
            side.weights.withdraw(block)
            for part in block.parts:
                side.updates.withdraw(part)
                assert part.state_home is None
        assert lanes.memory().used_bytes == 0
        net.updater.device = None
        train(net, case, begin=4)
        got = outcome(net)
        source = net.binding.optimizer.state[next(net.root.parameters())]["exp_avg"].source
        assert torch.equal(source.take(), source.read())
    with made(case) as net:
        train(net, Case(**{**vars(case), "steps": 6}))
        assert_same(got, outcome(net))


def test_state_that_is_away_is_read_where_it_is() -> None:
    case = Case(shapes=((5, 3),), dtype=torch.float32, steps=1)
    with made(case) as net, emulated() as lanes:
        swaps = Swaps(net, lanes, net.on(lanes, BORROWED))
        train(net, case, before=swaps.before)
        lanes.drain()
        state = net.binding.optimizer.state[next(net.root.parameters())]
        here = state["exp_avg"].clone()
        assert here.ne(0).any()
        swaps.after()
        assert torch.equal(state["exp_avg"].clone(), here)
        state["exp_avg"].zero_()
        swaps.before()
        lanes.drain()
        assert state["exp_avg"].clone().eq(0).all()


def test_16_bit_weights_that_were_written_become_the_master() -> None:
    case = Case(shapes=((5, 3),), dtype=torch.bfloat16, lr=0.0, weight_decay=0.0)
    with made(case) as net, emulated() as lanes:
        side = net.on(lanes, KEPT)
        train(net, case)
        (weight,) = net.root.parameters()
        with torch.no_grad():
            weight.fill_(0.75)
        train(net, case, begin=3)
        assert weight.eq(0.75).all()
        assert side.updates.read(net.parts[0], 0, 0).eq(0.75).all()


def test_a_write_through_the_door_reaches_the_master_of_weights_in_host_memory() -> None:
    case = Case(shapes=((5, 3),), dtype=torch.bfloat16, lr=0.0, weight_decay=0.0)
    with made(case) as net, emulated() as lanes:
        side = net.on(lanes, ON_CPU)
        (part,) = net.parts
        from lightning_hetero.runtime.tensor_sources import WeightSource

        WeightSource(net.store, part, 0, lambda _: None, side.weights).write(torch.full((5, 3), 0.75, dtype=torch.bfloat16))
        give_gradients(net.root.parameters(), 1)
        for block in net.blocks:
            run(lanes, Lane.D2H, side.gradients.take(block), [lanes.mark()]).wait()
        net.step()
        assert part.memory(0).eq(0.75).all()


# ---- what is refused -----------------------------------------------------------------------------


def test_an_update_without_its_state_is_refused() -> None:
    case = Case(shapes=((5, 3),), dtype=torch.float32)
    with made(case) as net, emulated() as lanes:
        net.on(lanes, BORROWED)
        with pytest.raises(HeteroError, match="SWAP_IN comes before the UPDATE"):
            train(net, case)


def test_state_that_came_for_no_update_stays_until_it_is_given_back_and_too_little_memory_is_named() -> None:
    case = Case(shapes=((50, 30),), dtype=torch.float32)
    with made(case) as net, emulated(10240) as lanes:
        side = net.on(lanes, BORROWED)
        with pytest.raises(DeviceMemoryError, match="optimizer state of weights"):
            side.updates.swap_in(net.blocks[0])
        give = lanes.memory()
        assert give.used_bytes == 6144
    with made(case) as net, emulated() as lanes:
        side = net.on(lanes, BORROWED)
        empty = lanes.memory().used_bytes
        side.updates.swap_in(net.blocks[0])
        held = lanes.memory().used_bytes
        side.updates.swap_in(net.blocks[0])
        assert lanes.memory().used_bytes == held > empty
        side.updates.give_back()
        assert lanes.memory().used_bytes == empty
