"""What the Conductor knows of an instance beside its registration."""

import pytest

from scheduler.fleet import Role
from server.conductor.instances import NETWORK_RATE, Registration, registered
from server.conductor.models import HeartbeatBody, InstanceBody


def beside_a_node(former: Registration | None = None, **more: object) -> Registration:
    fields: dict[str, object] = {"name": "a", "role": Role.PREFILL, "model": "m", "engine": "cairn", "node": "n"}
    body = InstanceBody(**(fields | {"address": "http://a:1"} | more))  # type: ignore[arg-type]
    return registered(body, former, 0.0)


def test_rates_follow_what_is_moved() -> None:
    found = beside_a_node()
    for _ in range(40):
        found.moved(1e9, is_pull=True)
    assert found.instance().tiers.network_rate == pytest.approx(1e9, rel=0.01)
    found.moved(3e9, is_pull=True)
    assert found.instance().tiers.network_rate == 3e9


def test_one_slow_move_is_not_believed() -> None:
    found = beside_a_node()
    found.moved(1e6, is_pull=True)
    assert found.instance().tiers.network_rate > 0.7 * NETWORK_RATE


def test_the_disk_and_the_network_are_told_apart() -> None:
    found = beside_a_node(nvme_rate=2e9)
    found.moved(9e9, is_pull=False)
    tiers = found.instance().tiers
    assert (tiers.nvme_rate, tiers.network_rate) == (9e9, NETWORK_RATE)


def test_a_rate_that_was_measured_counts_from_the_next_heartbeat_on() -> None:
    found = beside_a_node()
    beat = HeartbeatBody(prefill_tokens=0, decode_batch=0, decode_context=0)
    assert not found.heard(beat, 100.0)
    found.moved(2e10, is_pull=True)
    assert found.heard(beat, 101.0)


def test_an_instance_that_registers_again_keeps_what_was_measured_unless_it_says_otherwise() -> None:
    found = beside_a_node(network_rate=1e10)
    found.moved(2e10, is_pull=True)
    assert beside_a_node(found, network_rate=1e10).network_rate == 2e10
    assert beside_a_node(found, network_rate=5e9).network_rate == 5e9


def test_nothing_comes_from_others_to_a_node_in_no_cluster() -> None:
    found = beside_a_node()
    found.is_node_alone = True
    assert found.instance().tiers.network_rate == 0
