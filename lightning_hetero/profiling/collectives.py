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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

    What goes between nodes takes its time, too, and lowers the rate.

    All ranks run it at the same time. Before each step they tell whether they go on, so that all
    have as many.

    Args:
        decisions: How they tell.
        collectives: Those of the same ranks.
    """

    name = "net"

    def __init__(self, decisions: Decisions, collectives: Collectives) -> None:
        self._decisions, self._collectives, self._over = decisions, collectives, False
        elements = _WHOLE_BYTES // 4 // decisions.ranks * decisions.nodes
        self._own = torch.ones(elements, dtype=torch.float32, device="cpu")
        self._whole, self._received = self._own.repeat(decisions.shards), self._own.repeat(decisions.shards)

    def step(self) -> float:
        """One all-gather and one reduce-scatter, or nothing once a rank has stopped."""
        if self._over or self._tells(stops=False):
            time.sleep(_IDLE_S)
            return 0.0
        self._collectives.gather(self._whole, self._own)
        self._collectives.reduce(self._own, self._whole, self._received, divisor=self._decisions.ranks)
        return 2.0 * (self._whole.nbytes - self._own.nbytes)

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
        bytes_per_s: What one rank sends.
        meeting_s: Seconds until all have met.
        contention: As in ``HardwareProfile``, of ``"net"`` and each other kind of work.
        text: How it was measured.
    """

    bytes_per_s: float
    meeting_s: float
    contention: dict[str, float]
    text: str


def measure(decisions: Decisions, beside: Mapping[str, Load]) -> Network:
    """Measures the collectives of ranks, which all call this.

    Args:
        decisions: Those of the ranks.
        beside: Loads of this rank beside which they are measured, one after the other, by their
            kind in ``HardwareProfile.contention``.
    """
    collectives = Collectives(decisions.group, decisions.network, decisions.mesh)
    collectives.notes = decisions.notes
    exchange = Exchange(decisions, collectives)
    meetings = []
    for _ in range(_MEETINGS):
        begin_s = now_s()
        collectives.agree([0.0])
        meetings.append(now_s() - begin_s)
    net, loads = exchange.name, {exchange.name: exchange, **beside}
    alone: dict[str, list[float]] = {kind: [] for kind in loads}
    slower: dict[str, list[float]] = {f"{a}|{b}": [] for kind in beside for a, b in ((net, kind), (kind, net))}
    for _ in range(_REPETITIONS):
        for kind, load in loads.items():
            alone[kind].append(_together(decisions, [load])[load.name])
        for kind, load in beside.items():
            found = _together(decisions, [exchange, load])
            for mine, other in ((net, kind), (kind, net)):
                slower[f"{mine}|{other}"].append(max(1.0, alone[mine][-1] / max(found[loads[mine].name], 1.0)))
    rate = Measured.of(alone[net])
    return Network(
        bytes_per_s=rate.value,
        meeting_s=statistics.median(meetings),
        contention={pair: statistics.median(factors) for pair, factors in slower.items()},
        text=f"gathers and sums of {_WHOLE_BYTES // MIB} MiB among {decisions.ranks} processes; {rate}",
    )


def _together(decisions: Decisions, loads: Sequence[Load]) -> dict[str, float]:
    """The rates of loads that all ranks begin at the same time."""
    decisions.numbers(0.0)
    return rates(loads, _SECONDS)
