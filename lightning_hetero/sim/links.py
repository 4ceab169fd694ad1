"""Links shared max-min fair among the work that runs at one moment, by progressive filling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.cost import Rates, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One user of links.

    Attributes:
        speed: Its maximum in units per second, without the limits of links.
        uses: Links, and the share of each that one unit takes.
    """

    speed: float
    uses: Mapping[str, float]


def max_min(flows: Sequence[Flow], capacity: Mapping[str, float]) -> list[float]:
    """Units per second of each flow.

    All rates rise together from 0. A flow stops at its own speed, or together with all other flows
    of a link when that link is full. So a flow never takes bandwidth from a slower flow that can
    use it: a CPU update that could fill the host's memory leaves a disk transfer its 2 GB/s and
    slows down by only that.

    Args:
        flows: The running flows; flows that share a link use the same unit.
        capacity: The capacity of each link per second.
    """
    rates = [0.0] * len(flows)
    room = dict(capacity)
    rising = set(range(len(flows)))
    while rising:
        load: dict[str, float] = {}
        for i in rising:
            for link, use in flows[i].uses.items():
                load[link] = load.get(link, 0.0) + use
        # How far each flow and each link lets all rates rise; the smallest stops a flow.
        own = {i: flows[i].speed - rates[i] for i in rising}
        common = {link: max(0.0, room[link]) / use for link, use in load.items()}
        rise = min([*own.values(), *common.values()])
        full = {link for link, most in common.items() if most <= rise}
        for i in rising:
            rates[i] += rise
        for link, use in load.items():
            room[link] -= rise * use
        rising = {i for i in rising if own[i] > rise and full.isdisjoint(flows[i].uses)}
    return rates


class SharedRates:
    """The rates of any set of simultaneous work on one machine; each set is computed once."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._known: dict[int, tuple[float, ...]] = {}

    def of(self, mask: int) -> tuple[float, ...]:
        """Units per second by kind of work, 0 for kinds that do not run.

        Args:
            mask: Bit ``work`` is set for each kind that runs.
        """
        found = self._known.get(mask)
        if found is None:
            running = [work for work in Work if mask >> work & 1]
            flows = [Flow(speed=self._rates.speed(w, running), uses=self._rates.demand(w).uses) for w in running]
            rates = dict(zip(running, max_min(flows, self._rates.capacity), strict=True))
            found = self._known[mask] = tuple(rates.get(work, 0.0) for work in Work)
        return found
