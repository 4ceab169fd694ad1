"""The rate of collectives among the ranks of this machine, alone and beside other work.

[Note: Ranks are measured in turns and together]
What ranks share, they share equally: they do the same at the same time. So one rank measures the
machine with the threads of all of them, while the others wait, and each has its part of the result;
ranks that measured at once would each see what happens to run beside it. Collectives need all
ranks. They begin each measurement together, and stop together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from lightning_hetero.clock import now_s
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.lanes.decisions import Decisions
from lightning_hetero.profiling.timing import Load, Measured, rates
from lightning_hetero.units import MIB

_WHOLE_BYTES = 8 * MIB  # far more than what a meeting takes, and far less than a second
_SECONDS, _REPETITIONS, _MEETINGS = 0.15, 3, 20
_IDLE_S = 0.001


class Exchange(Load):
    """Gathers and reduces a block among all ranks; units: bytes that this rank sends on its node.

    In host memory or, with ``device``, in that of the ranks' devices, which exchange themselves.

    What goes between nodes takes its time, too, and lowers the rate.

    All ranks run it at the same time. Before each step they tell whether they go on, so that all
    have as many.

    Args:
        decisions: How they tell.
        collectives: Those of the same ranks.
        device: Where this rank has the block.
    """

    def __init__(self, decisions: Decisions, collectives: Collectives, device: torch.device | None = None) -> None:
        self._decisions, self._collectives, self._over = decisions, collectives, False
        self.name, self._device = "net" if device is None else "peer", device
        elements = _WHOLE_BYTES // 4 // decisions.ranks * decisions.nodes
        self._own = torch.ones(elements, dtype=torch.float32, device=device or "cpu")
        self._whole, self._received = self._own.repeat(decisions.shards), self._own.repeat(decisions.shards)
        self._total = torch.empty(elements, dtype=torch.float64, device=device or "cpu")

    def step(self) -> float:
        """One all-gather and one reduce-scatter, or nothing once a rank has stopped."""
        if self._over or self._tells(stops=False):
            time.sleep(_IDLE_S)
            return 0.0
        if self._device is None:
            self._collectives.gather(self._whole, self._own)
            self._collectives.reduce(self._own, self._whole, self._received, divisor=self._decisions.ranks)
        else:
            self._between(self._collectives, self._device)
        return 2.0 * (self._whole.nbytes - self._own.nbytes)

    def _between(self, collectives: Collectives, device: torch.device) -> None:
        collectives.gather_on_devices(self._whole, self._own)
        collectives.reduce_on_devices(self._own, self._whole, self._received, self._total, divisor=self._decisions.ranks)
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()

    def settle(self) -> None:
        """Tells the others to stop, unless they have stopped."""
        if not self._over:
            self._tells(stops=True)
        self._over = False

    def _tells(self, *, stops: bool) -> bool:
        self._over = any(row[0] for row in self._decisions.numbers(stops))
        return self._over


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What is measured of the collectives.

    Attributes:
        bytes_per_s: What one rank sends, in host memory.
        peer_bytes_per_s: What its device sends to the others; 0: they do not exchange.
        meeting_s: Seconds until all have met.
        contention: As in ``HardwareProfile``, of ``"net"``, ``"peer"`` and each other kind of work.
        text: How it was measured.
    """

    bytes_per_s: float
    peer_bytes_per_s: float
    meeting_s: float
    contention: dict[str, float]
    text: str


def measure(decisions: Decisions, beside: Mapping[str, Load], device: torch.device | None = None) -> Network:
    """Measures the collectives of ranks, which all call this.

    Args:
        decisions: Those of the ranks.
        beside: Loads of this rank beside which they are measured, one after the other, by their
            kind in ``HardwareProfile.contention``.
        device: That of this rank, if it has memory of its own.
    """
    collectives = Collectives(decisions.group, decisions.network, decisions.mesh, decisions.peers)
    collectives.notes = decisions.notes
    meetings = []
    for _ in range(_MEETINGS):
        begin_s = now_s()
        collectives.agree([0.0])
        meetings.append(now_s() - begin_s)
    exchanges = {one.name: one for one in _exchanges(decisions, collectives, device)}
    loads: dict[str, Load] = {**exchanges, **beside}
    alone: dict[str, list[float]] = {kind: [] for kind in loads}
    slower: dict[str, list[float]] = {}
    for _ in range(_REPETITIONS):
        for kind, load in loads.items():
            alone[kind].append(_together(decisions, [load])[load.name])
        for (net, exchange), (kind, load) in product(exchanges.items(), beside.items()):
            found = _together(decisions, [exchange, load])
            for mine, other in ((net, kind), (kind, net)):
                factor = max(1.0, alone[mine][-1] / max(found[loads[mine].name], 1.0))
                slower.setdefault(f"{mine}|{other}", []).append(factor)
    rate = Measured.of(alone["net"])
    return Network(
        bytes_per_s=rate.value,
        peer_bytes_per_s=Measured.of(alone["peer"]).value if "peer" in alone else 0.0,
        meeting_s=statistics.median(meetings),
        contention={pair: statistics.median(factors) for pair, factors in slower.items()},
        text=f"gathers and sums of {_WHOLE_BYTES // MIB} MiB among {decisions.ranks} processes; {rate}",
    )


def _exchanges(decisions: Decisions, collectives: Collectives, device: torch.device | None) -> Iterator[Exchange]:
    yield Exchange(decisions, collectives)
    if decisions.peers is not None and device is not None:
        yield Exchange(decisions, collectives, device)


def _together(decisions: Decisions, loads: Sequence[Load]) -> dict[str, float]:
    """The rates of loads that all ranks begin at the same time."""
    decisions.numbers(0.0)
    return rates(loads, _SECONDS)
