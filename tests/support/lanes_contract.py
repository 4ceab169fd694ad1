"""The contract of all lanes: tests that a subclass runs on its own lanes."""

from __future__ import annotations

import random
import signal
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_hetero._native import DONE, READY
from lightning_hetero.errors import DeviceMemoryError, HeteroError, StoreError
from lightning_hetero.ir.schedule import Lane, Op, OpKind
from lightning_hetero.lanes import Event, Lanes
from lightning_hetero.lanes.base import All
from support.lanes import LANES, MEMORY_BYTES, PATIENCE_S, FakeTicket, Program, doing, nothing, op, raising, threads


class LanesContract:
    """Tests of :class:`~lightning_hetero.lanes.Lanes`. A subclass provides the fixture
    ``lanes``.
    """

    overlaps = True  # lanes run beside the calling thread
    on_host = True  # an op's copies are over when `run` returns

    @pytest.fixture
    def lanes(self) -> Iterator[Lanes]:
        raise NotImplementedError

    @pytest.fixture
    def gate(self, lanes: Lanes) -> Iterator[threading.Event]:
        """Opens at the latest when the test ends."""
        gate = threading.Event()
        if not self.overlaps:
            gate.set()
        yield gate
        gate.set()

    # ---- order -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("seed", range(6))
    def test_programs_give_the_results_of_sequential_execution(self, lanes: Lanes, seed: int) -> None:
        program = Program(lanes, seed)
        program.run(40)
        assert program.equal()

    def test_each_lane_runs_its_ops_in_the_order_of_submission(self, lanes: Lanes) -> None:
        chance = random.Random(0)
        ran: list[Op] = []
        ops = [op(i, chance.choice((*LANES, Lane.COMPUTE))) for i in range(60)]
        events: list[Event] = []
        for one in ops:
            after = chance.sample(events, min(len(events), 2))
            events.append(lanes.submit(one, doing(lambda one=one: ran.append(one)), after))
        lanes.drain()
        for lane in (*LANES, Lane.COMPUTE):
            assert [o.id for o in ran if o.lane is lane] == [o.id for o in ops if o.lane is lane]

    def test_host_ops_start_after_their_dependencies(self, lanes: Lanes, gate: threading.Event) -> None:
        ran: list[str] = []
        first = lanes.submit(op(0, Lane.CPU), doing(lambda: gate.wait(PATIENCE_S) and ran.append("first")), [])
        second = lanes.submit(op(1, Lane.DISK_WRITE), doing(lambda: ran.append("second")), [first])
        third = lanes.submit(op(2, Lane.DISK_READ), doing(lambda: ran.append("third")), [second, lanes.mark()])
        if self.overlaps:
            assert not first.done()
            assert not third.done()
        gate.set()
        third.wait()
        assert third.done()
        assert ran == ["first", "second", "third"]

    def test_lanes_do_not_hold_each_other_up(self, lanes: Lanes, gate: threading.Event) -> None:
        if not self.overlaps:
            pytest.skip("ops run when they are submitted")
        held = lanes.submit(op(0, Lane.H2D), doing(lambda: gate.wait(PATIENCE_S)), [])
        for number, lane in enumerate(LANES[1:], 1):
            lanes.submit(op(number, lane), nothing, []).wait()
        assert not held.done()

    def test_compute_waits_for_copies(self, lanes: Lanes) -> None:
        source = lanes.host_buffer(4096).fill_(7)
        memory = lanes.memory().take(4096, "weights")
        # Compute has taken the memory, and fills it with NaN where it is poisoned.
        copied = lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(memory, source)), [lanes.mark()])
        lanes.compute_waits([copied])
        doubled = memory * 2
        back = lanes.host_buffer(4096)
        lanes.submit(op(1, Lane.D2H, OpKind.GRAD), doing(lambda: lanes.copy(back, doubled)), [lanes.mark()]).wait()
        assert back.eq(14).all()

    def test_ops_know_their_times(self, lanes: Lanes) -> None:
        started = time.monotonic()
        lanes.timed = True
        before = time.monotonic()
        first = lanes.submit(op(0, Lane.H2D), nothing, [])
        second = lanes.submit(op(1, Lane.CPU), nothing, [first])
        second.wait()
        one, two = first.times(), second.times()
        assert one is not None
        assert two is not None
        # The device has its own clock; what it shows as times begin to be taken was read at some
        # moment of these.
        slack = 0.0 if self.on_host else 0.05 + before - started
        assert before - slack <= one[0] <= one[1] <= two[0] + slack
        assert two[0] <= two[1] <= time.monotonic()

    # ---- tickets ---------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("kind", "what"),
        [(OpKind.FETCH, READY), (OpKind.UPDATE, READY), (OpKind.STORE, DONE), (OpKind.RELEASE, DONE), (OpKind.COMMIT, DONE)],
    )
    def test_an_op_has_passed_once_its_tickets_have(self, lanes: Lanes, kind: OpKind, what: int) -> None:
        ticket = FakeTicket()
        event = lanes.submit(op(0, Lane.CPU, kind), lambda: [ticket], [])
        for reached in range(what):
            ticket.move(reached)
            assert not event.done()
            assert not event.ended()
            assert not All((event,)).done()
        ticket.move(what)
        event.wait()
        assert event.done()
        assert All((event,)).done()

    def test_only_edges_wait_for_tickets(self, lanes: Lanes) -> None:
        ticket, ran = FakeTicket(), []
        fetch = lanes.submit(op(0, Lane.DISK_READ, OpKind.FETCH), lambda: [ticket], [])
        lanes.submit(op(1, Lane.DISK_READ), doing(lambda: ran.append("behind")), []).wait()
        assert ran == ["behind"]
        threading.Timer(0.02, ticket.move, [READY]).start()
        upload = lanes.submit(op(2, Lane.H2D), doing(lambda: ran.append(ticket.reached)), [fetch])
        upload.wait()
        assert ran == ["behind", READY]

    def test_a_ticket_that_fails_is_the_ops_error(self, lanes: Lanes) -> None:
        ticket, ran = FakeTicket(), []
        fetch = lanes.submit(op(0, Lane.DISK_READ, OpKind.FETCH), lambda: [ticket], [])
        error = StoreError("the disk is gone")
        ticket.move(0, error)
        upload = lanes.submit(op(1, Lane.H2D), doing(lambda: ran.append(1)), [fetch])
        with pytest.raises(StoreError) as caught:
            upload.wait()
        assert caught.value is error
        assert not ran
        with pytest.raises(StoreError):
            fetch.done()

    # ---- errors and the end ----------------------------------------------------------------------

    @pytest.mark.parametrize("lane", [*LANES, Lane.COMPUTE])
    def test_errors_reach_only_dependent_ops(self, lanes: Lanes, lane: Lane) -> None:
        error, ran = ValueError("broken"), []
        broken = lanes.submit(op(0, lane), raising(error), [])
        hit = lanes.submit(op(1, Lane.D2H), doing(lambda: ran.append("hit")), [broken])
        hit_again = lanes.submit(op(2, Lane.CPU), doing(lambda: ran.append("hit again")), [hit])
        spared = lanes.submit(op(3, lane), doing(lambda: ran.append("spared")), [])
        spared.wait()
        for event in (broken, hit, hit_again):
            for wait in (event.wait, lambda event=event: lanes.compute_waits([event])):
                with pytest.raises(ValueError, match="broken") as caught:
                    wait()
                assert caught.value is error
            with pytest.raises(ValueError, match="broken"):
                event.done()
        assert ran == ["spared"]

    def test_drain_raises_the_first_error_once(self, lanes: Lanes) -> None:
        first = lanes.submit(op(0, Lane.H2D), raising(ValueError("first")), [])
        with pytest.raises(ValueError, match="first"):
            first.wait()
        lanes.submit(op(1, Lane.CPU), raising(KeyError("second")), [])
        ran: list[int] = []
        lanes.submit(op(2, Lane.DISK_WRITE), doing(lambda: ran.append(2)), [])
        with pytest.raises(ValueError, match="first"):
            lanes.drain()
        assert ran == [2]
        lanes.drain()
        lanes.submit(op(3, Lane.H2D), doing(lambda: ran.append(3)), []).wait()
        assert ran == [2, 3]

    def test_drain_waits_for_tickets(self, lanes: Lanes) -> None:
        ticket = FakeTicket()
        lanes.submit(op(0, Lane.DISK_WRITE, OpKind.STORE), lambda: [ticket], [])
        threading.Timer(0.02, ticket.move, [DONE]).start()
        lanes.drain()
        assert ticket.reached == DONE

    def test_an_error_holds_no_memory(self, lanes: Lanes) -> None:
        alive: list[weakref.ref[Tensor]] = []

        def run() -> tuple[()]:
            tensor = torch.empty(8)
            alive.append(weakref.ref(tensor))
            raise ValueError

        event = lanes.submit(op(0, Lane.H2D), run, [])
        with pytest.raises(ValueError):  # noqa: PT011
            event.wait()
        assert alive[0]() is None

    def test_close_cancels_ops_that_have_not_begun(self, lanes: Lanes) -> None:
        if not self.overlaps:
            pytest.skip("ops run when they are submitted")
        ran: list[int] = []
        begun = threading.Event()

        def run() -> tuple[()]:
            begun.set()
            assert lanes._failures.closing.wait(PATIENCE_S)  # type: ignore[attr-defined]
            time.sleep(0.02)  # close is waiting for it now
            return ()

        running = lanes.submit(op(0, Lane.H2D), run, [])
        behind = lanes.submit(op(1, Lane.H2D), doing(lambda: ran.append(1)), [])
        elsewhere = lanes.submit(op(2, Lane.CPU), doing(lambda: ran.append(2)), [behind])
        assert begun.wait(PATIENCE_S)
        lanes.close()
        assert running.done()
        for event in (behind, elsewhere):
            with pytest.raises(HeteroError, match="closed"):
                event.wait()
        assert not ran
        assert not threads()

    def test_close_does_not_wait_for_tickets(self, lanes: Lanes) -> None:
        if not self.overlaps:
            pytest.skip("ops run when they are submitted")
        never = lanes.submit(op(0, Lane.DISK_READ, OpKind.FETCH), lambda: [FakeTicket()], [])
        waits = lanes.submit(op(1, Lane.H2D), nothing, [never])
        lanes.close()
        with pytest.raises(HeteroError, match="closed"):
            waits.wait()
        assert not threads()

    def test_closing_twice_is_closing_once(self, lanes: Lanes) -> None:
        lanes.submit(op(0, Lane.H2D), nothing, []).wait()
        lanes.close()
        lanes.close()
        with pytest.raises(HeteroError, match="closed"):
            lanes.submit(op(1, Lane.H2D), nothing, [])
        assert not threads()

    def test_ctrl_c_leaves_nothing_behind(self, lanes: Lanes) -> None:
        never = lanes.submit(op(0, Lane.DISK_READ, OpKind.FETCH), lambda: [FakeTicket()], [])
        main = threading.main_thread().ident
        assert main is not None

        def wait() -> None:
            threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGINT]).start()
            never.wait()

        with pytest.raises(KeyboardInterrupt):
            wait()
        lanes.close()
        assert not threads()

    # ---- copies and memory -----------------------------------------------------------------------

    @pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("layout", ["flat", "transposed", "different", "gaps"])
    def test_copies_convert_as_torch_does(self, lanes: Lanes, held: torch.dtype, wanted: torch.dtype, layout: str) -> None:
        values = torch.randn(37, 53, generator=torch.Generator().manual_seed(0)).to(held)
        source, shape = values, values.shape
        if layout == "transposed":
            source = values.t().contiguous().t()
        if layout == "gaps":
            source = torch.stack([values, values], dim=-1)[..., 0]
        down = torch.empty(shape, dtype=wanted) if layout != "transposed" else torch.empty(shape[::-1], dtype=wanted).t()
        if layout == "different":
            down = torch.empty(shape[::-1], dtype=wanted).t()
        up = torch.empty_strided(source.shape, source.stride(), dtype=held, device=lanes.device)
        first = lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(up, source)), [lanes.mark()])
        lanes.submit(op(1, Lane.D2H), doing(lambda: lanes.copy(down, up)), [first]).wait()
        assert torch.equal(down, values.to(wanted))
        again = torch.empty(shape, dtype=wanted, device=lanes.device)
        lanes.compute_waits([lanes.submit(op(2, Lane.H2D), doing(lambda: lanes.copy(again, source)), [lanes.mark()])])
        assert torch.equal(again.cpu(), values.to(wanted))
        outside = torch.empty(shape, dtype=wanted, device=lanes.device)
        lanes.copy(outside, source)
        assert torch.equal(outside.cpu(), values.to(wanted))

    def test_ops_run_without_gradients(self, lanes: Lanes) -> None:
        modes: list[bool] = []
        for lane in (Lane.COMPUTE, Lane.CPU):
            lanes.submit(op(0, lane), doing(lambda: modes.append(torch.is_grad_enabled())), []).wait()
        assert modes == [False, False]

    def test_nothing_keeps_an_op_alive_that_has_ended(self, lanes: Lanes) -> None:
        source = torch.zeros(16)
        target = torch.empty(16, device=lanes.device)
        alive = weakref.ref(source)
        event = lanes.submit(op(0, Lane.H2D), doing(lambda source=source: lanes.copy(target, source)), [lanes.mark()])
        event.wait()
        lanes.drain()
        del source
        deadline = time.monotonic() + PATIENCE_S
        while alive() is not None and time.monotonic() < deadline:  # the lane's thread lets go between two ops
            time.sleep(0.001)
        assert alive() is None

    def test_host_buffers_have_their_exact_size(self, lanes: Lanes) -> None:
        for num_bytes in (0, 1, 4096, 5000):
            buffer = lanes.host_buffer(num_bytes)
            assert buffer.dtype is torch.uint8
            assert buffer.shape == (num_bytes,)
            assert buffer.is_cpu
        view = lanes.host_buffer(4096)[8:16].view(torch.float32)
        view.fill_(3.0)
        assert view.tolist() == [3.0, 3.0]

    def test_device_memory_is_taken_and_given_back(self, lanes: Lanes) -> None:
        memory = lanes.memory()
        assert memory.capacity_bytes == MEMORY_BYTES
        a, b = memory.take(1000, "a"), memory.take(512, "b")
        assert a.device == lanes.device
        assert (a.dtype, a.shape) == (torch.uint8, (1000,))
        assert a.data_ptr() % 512 == b.data_ptr() % 512 == 0
        assert memory.used_bytes == memory.peak_bytes == 1024 + 512
        memory.give(a)
        assert memory.used_bytes == 512
        with pytest.raises(DeviceMemoryError, match="layer 7") as caught:
            memory.take(MEMORY_BYTES - 512, "layer 7")
        assert caught.value.largest_gap_bytes == MEMORY_BYTES - 1536
        assert caught.value.free_bytes == MEMORY_BYTES - 512
        memory.give(b)
        memory.give(memory.take(MEMORY_BYTES, "everything"))
        assert memory.used_bytes == 0
        assert memory.peak_bytes == MEMORY_BYTES
