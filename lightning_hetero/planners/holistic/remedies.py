"""The error if nothing fits: the tightest tier, what it lacks, and remedies, cheapest first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count, takewhile

from lightning_hetero.errors import PlanError, RateError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Tier
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.planners.holistic.block_choices import placements
from lightning_hetero.planners.holistic.evaluator import Evaluator
from lightning_hetero.planners.holistic.relaxation import Relaxation
from lightning_hetero.planners.holistic.search import Search, Start
from lightning_hetero.planners.micro_batches import split
from lightning_hetero.units import MIB, format_bytes

_CHEAPEST_FIRST = {Tier.DISK: "disk", Tier.HOST: "host memory", Tier.DEVICE: "device memory"}
_CAPACITIES = {Tier.DISK: "disk_capacity_bytes", Tier.HOST: "host_memory_bytes", Tier.DEVICE: "device_memory_bytes"}
_UPDATING = ("device_update_params_per_s", "cpu_update_params_per_s", "link_h2d_bytes_per_s", "link_d2h_bytes_per_s")
_ANY_RATE = 1e9  # bytes/s of a disk to be added; its size is what counts
_ATTEMPTS = 5  # at making whole blocks fit, each with what the one before lacked on top
_MOST_PARTS = 1024  # what Plan.micro_batches allows
_LEAST = Start(slots=1)


def check_rates(model: ModelProfile, hardware: HardwareProfile) -> None:
    """Refuses a machine that cannot update some block, wherever it is placed.

    Raises:
        RateError: Names the block and the rates.
    """
    unable = next((b.name for b in model.blocks if not placements(b, hardware)), None)
    if unable is not None:
        rates = {key: getattr(hardware, key) for key in _UPDATING}
        raise RateError(
            f"{hardware.name!r} cannot update block {unable!r} of model {model.name!r}, wherever it lies: "
            f"{', '.join(f'{key}={rate:g}' for key, rate in rates.items())}. Measure or give the rates that are 0: an update on "
            f"the device, or one on the CPU and both links to it."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What was asked for.

    Attributes:
        model: The model at the whole batch.
        hardware: The machine.
        parts: Micro-batches of one step.
        updates: When updates may run.
    """

    model: ModelProfile
    hardware: HardwareProfile
    parts: int
    updates: Updates

    def search(self) -> Search:
        """A search that simulates nothing: it only says what fits."""
        count = 1 if self.hardware.shared_memory else self.parts
        return self._search(Relaxation(split(self.model, self.parts), self.hardware, micro_batches=count), self.hardware)

    def _search(self, relaxation: Relaxation, hardware: HardwareProfile) -> Search:
        evaluator = Evaluator(relaxation.model, hardware, updates=self.updates, evaluations=0)
        return Search(relaxation=relaxation.resized(hardware), evaluator=evaluator, bound_s=0.0)

    def fits(self) -> bool:
        """Whether there is a plan."""
        search = self.search()
        return any(True for _ in search.frugal()) or search.start(_LEAST) is not None

    def lacking(self, tier: Tier) -> int | None:
        """Bytes to add on one tier so that a plan fits; ``None`` if none suffice."""
        h = self.hardware
        if tier is Tier.DEVICE and h.shared_memory:
            return None
        if tier is Tier.DISK and not h.disk_capacity_bytes:
            h = replace(h, disk_capacity_bytes=1, disk_read_bytes_per_s=_ANY_RATE, disk_write_bytes_per_s=_ANY_RATE)
        search = replace(self, hardware=h).search()
        least = search.relaxation.lacking(tier, _LEAST.practice(1))
        if least is None:
            return None
        size, relaxed = max(least[0], MIB), least[1]
        for attempt in range(_ATTEMPTS):
            search = self._search(search.relaxation, replace(h, **{_CAPACITIES[tier]: getattr(h, _CAPACITIES[tier]) + size}))
            if any(True for _ in search.frugal()):
                return size
            found = search.start(_LEAST) if attempt else search.whole(relaxed, _LEAST, 1)
            if found is not None:
                return size
            refusal = search.evaluator.refusal
            size += refusal.shortfall_bytes if refusal is not None else MIB
        return None

    def may_split(self, times: int) -> bool:
        """Whether a plan may compute the batch in ``times`` as many micro-batches.

        Each of them has whole sequences, if the model's profile says how many there are.
        """
        parts = times * self.parts
        return not self.hardware.shared_memory and parts <= _MOST_PARTS and self._units % parts == 0

    @property
    def _units(self) -> int:
        """What a batch can be divided into: sequences, or else tokens."""
        return self.model.batch or self.model.tokens

    def _smaller(self, times: int) -> SearchRequest:
        return replace(self, parts=times * self.parts) if self.may_split(times) else replace(self, model=split(self.model, times))

    def smaller(self) -> int | None:
        """The factor, a power of two, by which the batch has to shrink; ``None`` if none helps."""
        powers = takewhile(lambda n: n * self.parts <= self._units, (2**k for k in count(1)))
        searches = {n: self._smaller(n).search() for n in powers}
        enough = next((n for n, search in searches.items() if any(True for _ in search.frugal())), None)
        if enough is None and searches and searches[max(searches)].start(_LEAST) is not None:
            enough = next(n for n, search in searches.items() if search.start(_LEAST) is not None)
        return enough


def infeasible(request: SearchRequest) -> PlanError:
    """Why nothing fits, and what would change that, cheapest first.

    The tightest tier is the one that lacks least, were it alone to grow; of equals the cheaper one.
    Smaller micro-batches cost nothing, then come disk, host memory and device memory. Each remedy
    is one with which a plan was found.
    """
    model, hardware = request.model, request.hardware
    lacking = {tier: size for tier in _CHEAPEST_FIRST if (size := request.lacking(tier)) is not None}
    each = f" for each of {hardware.ranks} devices" if hardware.ranks > 1 else ""
    remedies = [f"{format_bytes(size)} more {_CHEAPEST_FIRST[tier]}{each}" for tier, size in lacking.items()]
    smaller = request.smaller()
    if smaller is not None:
        what = f"micro_batches=[{smaller * request.parts}], micro-batches" if request.may_split(smaller) else "a batch"
        remedies.insert(0, f"{what} {smaller} times smaller")
    if lacking:
        tier = min(lacking, key=lambda t: lacking[t])
        short = lacking[tier]
    else:
        tier, short = _least_short(request)
    return PlanError(
        f"no plan fits model {model.name!r} on {hardware.name!r}, not with everything on the lowest tier and all activations "
        f"recomputed: {_CHEAPEST_FIRST[tier]} lacks {format_bytes(short)}{each}. Cheapest remedy: "
        f"{'; else '.join(remedies) if remedies else 'smaller blocks'}.",
        tier=tier.value,
        shortfall_bytes=short,
    )


def _least_short(request: SearchRequest) -> tuple[Tier, int]:
    """The tier that the plan which takes least memory lacks most of, and how much."""
    search = request.search()
    for _ in search.frugal():
        pass
    refusal = search.evaluator.refusal
    return (Tier(refusal.tier), refusal.shortfall_bytes) if refusal is not None else (Tier.DEVICE, 0)
