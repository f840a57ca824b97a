"""The use ring: what a client reports, and what a hostile one can make the node believe."""

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.published import UseRing, ident, ring_bytes
from kvstore.types import BlockKey

ENTRIES = 8
HEAD_LIMIT = 2**64 - 1


def rings(entries: int = ENTRIES) -> tuple[bytearray, UseRing, UseRing]:
    """The memory, the client's side and the node's."""
    memory = bytearray(ring_bytes(entries))
    return memory, UseRing(memory), UseRing(memory)  # type: ignore[arg-type]


def name(number: int) -> bytes:
    return ident(1, BlockKey(number.to_bytes(16, "little")))


def set_head(memory: bytearray, head: int) -> None:
    memory[:8] = struct.pack("<Q", head)


def test_the_ring_is_drawn_as_in_the_protocol() -> None:
    memory, client, _ = rings()
    client.report(name(3), 17)
    client.report(name(4), 18)
    assert len(memory) == 64 + 24 * ENTRIES
    assert memory[:64] == struct.pack("<Q", 2) + bytes(56)
    assert memory[64:112] == name(3) + struct.pack("<I", 17) + name(4) + struct.pack("<I", 18)


def test_reports_are_drained_once_and_in_order() -> None:
    _, client, node = rings()
    assert node.drain() == []
    client.report(name(1), 5)
    client.report(name(2), 6)
    assert node.drain() == [(name(1), 5), (name(2), 6)]
    assert node.drain() == []
    client.report(name(3), 7)
    assert node.drain() == [(name(3), 7)]


@pytest.mark.parametrize("reports", [ENTRIES - 1, ENTRIES, ENTRIES + 1, 5 * ENTRIES + 3])
@pytest.mark.parametrize("before", [0, 1, ENTRIES - 1, ENTRIES])
def test_of_an_overrun_ring_the_last_ringful_is_left(before: int, reports: int) -> None:
    _, client, node = rings()
    for number in range(before):
        client.report(name(number), 1)
    node.drain()
    for number in range(reports):
        client.report(name(number), number)
    expected = [(name(number), number) for number in range(reports)][-ENTRIES:]
    assert node.drain() == expected


def test_a_client_that_maps_the_ring_late_goes_on_where_it_is() -> None:
    memory, client, node = rings()
    client.report(name(1), 1)
    again = UseRing(memory)  # type: ignore[arg-type]
    again.report(name(2), 2)
    assert node.drain() == [(name(1), 1), (name(2), 2)]


def test_a_head_that_goes_back_means_nothing_and_later_reports_count() -> None:
    memory, client, node = rings()
    for number in range(6):
        client.report(name(number), 1)
    node.drain()
    set_head(memory, 2)
    assert node.drain() == []
    set_head(memory, 3)
    assert node.drain() == [(name(2), 1)]


@pytest.mark.parametrize("head", [ENTRIES + 1, 2**32, 2**63, HEAD_LIMIT])
def test_a_huge_head_is_a_ringful_at_most(head: int) -> None:
    memory, _, node = rings()
    set_head(memory, head)
    assert len(node.drain()) == ENTRIES
    assert node.drain() == []
    set_head(memory, 0)
    assert node.drain() == []
    set_head(memory, 1)
    assert len(node.drain()) == 1


def test_a_client_at_the_last_head_goes_on() -> None:
    memory, _, _ = rings()
    set_head(memory, HEAD_LIMIT)
    client, node = UseRing(memory), UseRing(memory)  # type: ignore[arg-type]
    client.report(name(1), 1)
    assert node.drain() == []
    client.report(name(2), 2)
    assert node.drain() == [(name(2), 2)]


@given(st.lists(st.tuples(st.integers(0, HEAD_LIMIT), st.integers(0, 2**32)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_hostile_client_costs_a_ringful_each_time(heads: list[tuple[int, int]]) -> None:
    memory, _, node = rings()
    for head, seed in heads:
        memory[:] = random.Random(seed).randbytes(len(memory))
        set_head(memory, head)
        drained = node.drain()
        assert len(drained) <= ENTRIES
        assert all(len(told) == 20 and 0 <= blocks < 2**32 for told, blocks in drained)


@given(st.lists(st.one_of(st.just(-1), st.integers(0, 40)), max_size=60), st.integers(1, 9))
@settings(deadline=None)
def test_whatever_is_reported_and_drained_is_what_a_bounded_queue_would_give(steps: list[int], entries: int) -> None:
    _, client, node = rings(entries)
    queue: list[tuple[bytes, int]] = []
    for step in steps:
        if step >= 0:
            client.report(name(step), step)
            queue.append((name(step), step))
        else:
            assert node.drain() == queue[-entries:]
            queue.clear()
    assert node.drain() == queue[-entries:]
