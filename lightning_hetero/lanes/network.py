"""A network of set speed among ranks, for tests and benchmarks."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from lightning_hetero.clock import now_s
from lightning_hetero.errors import ConfigError

ENVIRONMENT = "LIGHTNING_HETERO_NETWORK"
"""Names the network of ranks whose devices are the host's own CPU: bytes a second, latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedNetwork:
    """What a rank sends takes its time: collectives really happen, and then the caller sleeps.

    Attributes:
        bytes_per_s: What a rank sends in a second; ``None``: no limit.
        latency_s: Time that every collective takes in addition.

    Raises:
        ConfigError: A value is out of range.
    """

    bytes_per_s: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s={self.bytes_per_s!r} of a network; allowed: a positive number, or None for no limit.")
        if not self.latency_s >= 0:
            raise ConfigError(f"latency_s={self.latency_s!r} of a network; allowed: seconds, at least 0.")

    def carry(self, num_bytes: float, since_s: float) -> None:
        """Returns when a collective that began then has sent its bytes."""
        seconds = self.latency_s + (0.0 if self.bytes_per_s is None else num_bytes / self.bytes_per_s)
        rest = since_s + seconds - now_s()
        if rest > 0:
            time.sleep(rest)


def network_of_environment() -> EmulatedNetwork | None:
    """The network that :data:`ENVIRONMENT` names, such as ``1e9,5e-5``; ``None`` if it is not set.

    Raises:
        ConfigError: It is set to something else.
    """
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return None
    try:
        rate, latency = (float(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{ENVIRONMENT}={text!r}; allowed: bytes a second and seconds of latency, such as 1e9,5e-5. Or do not set it."
        ) from None
    return EmulatedNetwork(bytes_per_s=rate, latency_s=latency)
