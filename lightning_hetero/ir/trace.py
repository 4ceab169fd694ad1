"""The trace of a step, op by op.

The runtime records it, and the simulator predicts it in the same form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.codec import parse_object
from lightning_hetero.ir.schedule import Lane

WAIT = "wait "  # prefix of the names of compute's waits; the anchor follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One interval on one lane.

    Attributes:
        step: The optimizer step it belongs to.
        name: The op or anchor with its block's name, such as ``"UPDATE model.layers.3"``.
        lane: The lane it ran on.
        start_s: Seconds on the process's monotonic clock.
        end_s: The same.
        num_bytes: Bytes moved.
        waited_for: The op that a wait of compute, or an op that did not start when it was issued,
            waited for; see :func:`lightning_hetero.ir.stalls.with_reasons`. Empty: it did not wait,
            or the op is not known.
        order: For ops, the place in the order of issue within the step, smaller first; -1 for
            anchors and waits.
        issued_s: For ops, when compute reached the anchor that issues them; ``None``: when they
            started.
        after: Names of the ops that must end before it starts.
    """

    step: int
    name: str
    lane: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    waited_for: str = ""
    order: int = -1
    issued_s: float | None = None
    after: tuple[str, ...] = ()

    @property
    def is_wait(self) -> bool:
        """Whether the span is a wait of compute."""
        return self.name.startswith(WAIT)

    @property
    def wait_s(self) -> float:
        """Seconds of waiting: the whole of a wait of compute.

        For an op from its issue to its start.
        """
        if self.is_wait:
            return self.end_s - self.start_s
        return 0.0 if self.issued_s is None else max(0.0, self.start_s - self.issued_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Spans in the order they were recorded."""

    spans: tuple[Span, ...]

    def to_chrome(self) -> str:
        """The trace in the Chrome trace event format, for Perfetto or ``chrome://tracing``."""
        lanes = {lane: i for i, lane in enumerate(dict.fromkeys(s.lane for s in self.spans))}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": lane}} for lane, tid in lanes.items()
        ]
        events += [
            {
                "ph": "X",
                "name": s.name,
                "pid": 0,
                "tid": lanes[s.lane],
                "ts": s.start_s * 1e6,
                "dur": (s.end_s - s.start_s) * 1e6,
                "args": {"step": s.step, "bytes": s.num_bytes}
                | ({"waited_for": s.waited_for, "waited_us": s.wait_s * 1e6} if s.waited_for else {}),
            }
            for s in self.spans
        ]
        return json.dumps({"traceEvents": events})

    @classmethod
    def from_chrome(cls, text: str, *, source: str = "trace") -> Trace:
        """Reads :meth:`to_chrome`'s text; orders of issue and dependencies are not in it.

        Raises:
            ConfigError: It is not such a text.
        """
        events = parse_object(text, what="trace", source=source).get("traceEvents")
        if not isinstance(events, list):
            raise ConfigError(f"{source} is not a trace: it has no list of 'traceEvents'.")
        try:
            lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
            return cls(spans=tuple(_span(event, lanes) for event in events if event["ph"] == "X"))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{source} is a trace of another program: {error!r} in one of its events. Give one that `simulate --trace` or "
                f"TraceOnDemand has written."
            ) from error

    def _repr_html_(self) -> str:
        """What a notebook shows. Drawn by a room above this one, which is loaded on demand."""
        shown: str = import_module("lightning_hetero.report").trace_fragment(self)
        return shown

    def save(self, path: str | Path) -> None:
        """Writes :meth:`to_chrome` to a file."""
        Path(path).write_text(self.to_chrome(), encoding="utf-8")

    def issued(self, step: int) -> dict[str, tuple[str, ...]]:
        """The names of one step's ops on each lane, in the order of issue."""
        ops = sorted((s for s in self.spans if s.step == step and s.order >= 0), key=lambda s: s.order)
        return {lane: tuple(s.name for s in ops if s.lane == lane) for lane in sorted({s.lane for s in ops})}

    def busy_s(self) -> dict[str, float]:
        """Seconds in which each lane had at least one span."""
        return {lane: _union_s((s.start_s, s.end_s) for s in self.spans if s.lane == lane) for lane in {s.lane for s in self.spans}}


def _span(event: Mapping[str, Any], lanes: Mapping[int, str]) -> Span:
    more = event["args"]
    begin_s, took_s, waited_s = (_seconds(us) for us in (event["ts"], event["dur"], more.get("waited_us", 0.0)))
    lane, step, num_bytes, waited_for = lanes[event["tid"]], more["step"], more["bytes"], more.get("waited_for", "")
    if not all(isinstance(text, str) for text in (event["name"], waited_for)):
        raise TypeError("a name that is no text")
    if not isinstance(step, int) or not isinstance(num_bytes, int) or num_bytes < 0:
        raise ValueError(f"{num_bytes!r} bytes in step {step!r}")
    is_op = not event["name"].startswith(WAIT) and waited_s > 0
    return Span(
        step=step,
        name=event["name"],
        lane=Lane(lane).value,
        start_s=begin_s,
        end_s=begin_s + took_s,
        num_bytes=num_bytes,
        waited_for=waited_for,
        issued_s=begin_s - waited_s if is_op else None,
    )


def _seconds(us: float) -> float:
    if not math.isfinite(us):
        raise ValueError(f"{us} µs")
    return us / 1e6


def _union_s(intervals: Iterable[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
