"""The contract of lanes on a device whose memory the host cannot touch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.lanes import MEMORY_BYTES
from support.lanes_contract import LanesContract

from foreign import NAME
from foreign.lanes import ForeignBackend
from lightning_hetero.lanes.streams import StreamLanes


class TestForeignLanes(LanesContract):
    on_host = False

    @pytest.fixture(params=[False, True], ids=["plain", "poison"])
    def lanes(self, request: pytest.FixtureRequest) -> Iterator[StreamLanes]:
        lanes = StreamLanes(
            "foreign:0", backend=ForeignBackend(NAME), memory_bytes=MEMORY_BYTES, staging_bytes=1024, poison=request.param
        )
        yield lanes
        lanes.close()
