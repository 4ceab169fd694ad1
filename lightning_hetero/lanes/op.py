"""An op on its way through its lane: when it has ended, and its error."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from lightning_hetero._native import Ticket
from lightning_hetero._native.process import Owner
from lightning_hetero.clock import now_s
from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.schedule import Op
from lightning_hetero.lanes.base import Event, passed_at

DELAY_S = 2e-3
"""The longest random delay of an op, in tests."""

_TICKET_SLICE_S = 0.2  # how late the wait for a ticket notices that the lanes are closed

_T = TypeVar("_T")


class Failures:
    """The first error of any op, and whether the lanes are closing."""

    def __init__(self) -> None:
        self.closing = threading.Event()
        self.owner = Owner()  # whose threads serve the lanes
        self.first: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Remembers the first error, but no interruption and none of lanes that close."""
        if self.first is None and not self.closing.is_set() and not isinstance(error, KeyboardInterrupt):
            self.first = error


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False, repr=False, slots=True)
class QueuedOp:
    """An op on its way through its lane, and its end as an event."""

    op: Op
    run: Callable[[], Iterable[Ticket]]
    after: Sequence[Event]  # the events that it waits for
    number: int  # its place in the order of submission
    failures: Failures  # where its error is noted
    moment: torch.Event | None = None  # where on its stream the op ends; ``None`` if it ends on the host
    stream_times: Callable[[], tuple[float, float]] | None = None  # its start and end as the stream knows them
    keep: list[Tensor] = field(default_factory=list)  # they must live until the stream has passed the op
    submitted_s: float = field(default_factory=now_s)  # when it was submitted, in seconds of ``now_s``
    started_s: float = 0.0  # when it started; 0 before
    is_observed: bool = False  # its tickets are kept, in ``tickets``
    tickets: tuple[Ticket, ...] = ()
    error: BaseException | None = None  # its own, or that of an op that it depends on
    _ended_s: float = 0.0
    _has_returned: bool = False
    _running: threading.Lock = field(default_factory=_locked)  # until ``run`` has returned; made faster than an event
    _tickets: tuple[Ticket, ...] = ()
    _traceback: TracebackType | None = None

    def perform(self, work: Callable[[QueuedOp], Iterable[Ticket]]) -> None:
        """Does the op by ``work``, whose error becomes the op's; Ctrl-C is raised as well."""
        try:
            self._check_open()
            self._tickets = tuple(work(self))
            if self.is_observed:
                self.tickets = self._tickets
        except BaseException as error:
            self._fail(error)
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
        finally:
            self._ended_s = now_s()
            del self.run, self.after  # they may hold large things
            self._has_returned = True
            self._running.release()

    def handed(self) -> None:
        """Blocks until ``run`` has returned."""
        if not self._has_returned:
            self.failures.owner.check("the device's lane")
            with self._running:
                pass
        if self.error is not None:
            self._check()

    def issued(self) -> None:
        """Blocks until ``run`` has returned and its tickets have passed; streams may still work."""
        self.handed()
        if self._tickets:
            what = passed_at(self.op)
            for ticket in self._tickets if what else ():
                self.passes(ticket, what)
            self._tickets = ()

    def wait(self) -> None:
        """Blocks until the op has ended."""
        self.issued()
        if self.moment is not None:
            self._guarded(self.moment.synchronize)
            self.keep.clear()

    def done(self) -> bool:
        """Whether the op has ended."""
        if not self._has_returned:
            return False
        if self.error is not None:
            self._check()
        if self._tickets:
            what = passed_at(self.op)
            if what and not all(self._guarded(ticket.poll) >= what for ticket in self._tickets):
                return False
            self._tickets = ()
        if self.moment is not None and not self._guarded(self.moment.query):
            return False
        self.keep.clear()
        return True

    def ended(self) -> bool:
        """Whether the op has ended or failed; raises nothing of the op."""
        try:
            return self.done()
        except BaseException as error:
            if error is not self.error:
                raise
            return True

    def times(self) -> tuple[float, float] | None:
        """When the op started and ended."""
        if not self.ended() or self.error is not None:
            return None
        if self.moment is not None:
            return None if self.stream_times is None else self.stream_times()
        return self.started_s, self._ended_s

    def _fail(self, error: BaseException) -> BaseException:
        """The op's error from now on: this one, if there was none before."""
        if self.error is None:
            traceback.clear_frames(error.__traceback__)  # they hold tensors whose memory may be needed
            self.error, self._traceback = error, error.__traceback__
            self.failures.note(error)
        return self.error

    def _check(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(self._traceback)  # which every raise would lengthen

    def _guarded(self, call: Callable[[], _T]) -> _T:
        """Makes the error of a ticket or a stream the op's own."""
        try:
            return call()
        except TimeoutError:
            raise
        except Exception as error:
            raise self._fail(error) from None

    def passes(self, ticket: Ticket, what: int) -> None:
        """Blocks until one of its tickets has come so far."""
        while self._guarded(ticket.poll) < what:
            try:
                self._guarded(lambda: ticket.wait(what, _TICKET_SLICE_S))
            except TimeoutError:
                self._check_open()

    def _check_open(self) -> None:
        if self.failures.closing.is_set():
            op = self.op
            raise HeteroError(f"op {op.id} ({op.kind}, block {op.block}) has not ended: the lanes are closed. Create new ones.")
