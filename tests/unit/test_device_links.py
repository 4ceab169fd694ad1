"""Devices that exchange weights and gradients themselves: what is set, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_hetero.errors import ConfigError, HeteroError, UnsupportedError
from lightning_hetero.ir.plan import BlockPlan, Gather, Plan
from lightning_hetero.lanes import EmulatedDevice
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.lanes.network import EmulatedNetwork
from lightning_hetero.runtime.placement import Placer
from lightning_hetero.strategies.devices import peers_of

PLAN = Plan(name="mine", blocks=(BlockPlan(name="*"),), gather=Gather.DEVICE)


def test_a_plan_says_where_devices_exchange_and_others_are_written_as_before() -> None:
    assert '"version": 2' in PLAN.to_json()
    assert Plan.from_json(PLAN.to_json()) == PLAN
    host = Plan(name="mine", blocks=PLAN.blocks)
    assert '"version": 1' in host.to_json()
    assert "gather" not in host.to_json()
    assert Plan.from_json(host.to_json().replace('"version": 1', '"version": 2')) == host
    with pytest.raises(ConfigError, match=r"gather='devise'; allowed: \['host', 'device'\]\. Did you mean 'device'"):
        Plan.from_json(PLAN.to_json().replace('"gather": "device"', '"gather": "devise"'))


def test_links_between_emulated_devices_have_a_set_speed() -> None:
    assert EmulatedDevice("1MiB").peer_links is None
    device = EmulatedDevice("1MiB", net_bytes_per_s=1e6, peer_bytes_per_s=1e9, peer_latency_s=1e-5)
    assert device.peer_links == EmulatedNetwork(bytes_per_s=1e9, latency_s=1e-5)
    with pytest.raises(ConfigError, match=r"bytes_per_s=-1\.0 of a network; allowed: a positive number"):
        EmulatedDevice("1MiB", peer_bytes_per_s=-1.0)


def test_devices_of_several_nodes_do_not_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers_of(EmulatedDevice("1MiB"), "gloo", 2, None) is None
    assert peers_of(None, "gloo", 1, None) is None
    placer = Placer.__new__(Placer)
    for nodes in (1, 2):
        monkeypatch.setattr(placer, "_options", SimpleNamespace(collectives=SimpleNamespace(nodes=nodes)), raising=False)
        if nodes == 1:
            placer._check_gather(PLAN)
            continue
        with pytest.raises(UnsupportedError, match=r"plan 'mine' has gather='device'.*within one node, and there are 2.*'host'"):
            placer._check_gather(PLAN)


def test_an_exchange_without_links_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives = Collectives.__new__(Collectives)
    monkeypatch.setattr(collectives, "peers", None, raising=False)
    with pytest.raises(HeteroError, match="nothing connects them"):
        collectives.gather_on_devices(torch.zeros(2), torch.zeros(1))
