"""A channel over the double: bytes arrive in order, nobody is overrun, and a bad peer breaks its own channel only."""

import random
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import PeerLost, ProtocolError
from kvstore.transport.rdma.channel import CHANNEL_BYTES, HEADER, MESSAGE_BYTES, MESSAGES, OWED, Channel
from kvstore.transport.rdma.verbs import SUCCESS, Completion, Send
from tests.channel_pair import Channels, RawPeer, message, soft_channels
from tests.soft_verbs import SoftFabric, SoftQueuePair

ROOM = MESSAGE_BYTES - HEADER.size


@pytest.fixture
def fabric() -> SoftFabric:
    return SoftFabric()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def both(fabric: SoftFabric, stack: ExitStack) -> Channels:
    return soft_channels(fabric, stack)


@pytest.fixture
def raw(fabric: SoftFabric, stack: ExitStack) -> RawPeer:
    return RawPeer(fabric, stack)


def read(channel: Channel, most: int = 1 << 30) -> bytes:
    buffer = bytearray(min(most, CHANNEL_BYTES))
    size = channel.read_into(memoryview(buffer))
    return bytes(buffer[:size])


def soft(channel: Channel) -> SoftQueuePair:
    assert isinstance(channel._pair, SoftQueuePair)
    return channel._pair


def send(channel: Channel, data: bytes) -> None:
    channel.write(data)
    channel.flush()


# Bytes.


@given(
    sizes=st.tuples(*[st.lists(st.integers(0, 20_000), max_size=12)] * 2),
    seed=st.integers(0, 2**32),
    shuffled=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_pieces_of_any_size_arrive_in_order_both_ways(
    sizes: tuple[list[int], list[int]], seed: int, shuffled: bool
) -> None:
    chance = random.Random(seed)
    fabric = SoftFabric(seed if shuffled else None)
    with ExitStack() as stack:
        both = soft_channels(fabric, stack)
        ways = [
            (source, target, [chance.randbytes(size) for size in way], bytearray())
            for (source, target), way in zip((both[:2], both[1::-1]), sizes, strict=True)
        ]
        for source, _, pieces, _ in ways:
            for piece in pieces:
                source.write(piece)
                if chance.random() < 0.5:
                    source.flush()
        for _ in range(2000):
            if all(len(got) == sum(map(len, pieces)) for *_, pieces, got in ways):
                break
            for _, target, _, got in ways:
                target.progress()
                got += read(target, chance.choice([500, 9000, 1 << 20]) + chance.randrange(500))
        for source, _, pieces, got in ways:
            assert got == b"".join(pieces)
            for _ in range(2):  # the first may give credits
                source.progress()
            assert source.is_sent
            assert source.pending_bytes == 0
            assert source.late_completions == 0


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_10_mb_go_both_ways_at_once(seed: int | None, stack: ExitStack) -> None:
    both = soft_channels(SoftFabric(seed), stack)
    data = [random.Random(at).randbytes(10_000_000) for at in range(2)]
    got = [bytearray(), bytearray()]
    for channel, mine in zip(both[:2], data, strict=True):
        send(channel, mine)
    while any(len(mine) < 10_000_000 for mine in got):
        before = sum(map(len, got))
        for channel, mine in zip(both[:2], got, strict=True):
            channel.progress()
            mine += read(channel)
        assert sum(map(len, got)) > before
    assert got[::-1] == data


def test_what_is_pending_is_not_copied_and_what_is_not_may_change(both: Channels) -> None:
    data = bytearray(b"a" * (20 * ROOM))
    both.one.write(memoryview(data))
    assert both.one.pending_bytes == len(data)
    both.one.flush()
    assert both.one.pending_bytes == len(data) - (MESSAGES - 1) * ROOM
    got = b""
    while both.one.pending_bytes:
        both.other.progress()
        got += read(both.other)
        both.one.progress()
    data[:] = b"b" * len(data)
    both.other.progress()
    assert got + read(both.other) == b"a" * len(data)


def test_small_messages_go_inline_and_large_ones_do_not(both: Channels, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, sends = soft(both.one), list[Send]()
    monkeypatch.setattr(pair, "post_send", sends.append)
    for size in (1, pair.inline_bytes - HEADER.size, pair.inline_bytes - HEADER.size + 1):
        send(both.one, b"x" * size)
    assert [request.inline for request in sends] == [True, True, False]


# Back-pressure.


def test_a_peer_that_does_not_read_is_sent_no_more_than_it_has_room_for(both: Channels) -> None:
    data = random.Random(0).randbytes(1 << 20)
    send(both.one, data)
    for _ in range(5):
        both.one.progress()
        both.other.progress()
    assert len(soft(both.other).receives) == 1, "for the peer's credits"
    assert not soft(both.one).posted, "nothing has to wait for a receive"
    assert both.one.pending_bytes == len(data) - (MESSAGES - 1) * ROOM
    assert not both.one.is_sent
    got = b""
    while len(got) < len(data):
        both.other.progress()
        got += read(both.other)
        both.one.progress()
    assert got == data


def test_an_end_that_does_not_read_goes_on_sending(both: Channels) -> None:
    send(both.other, bytes(1 << 20))
    data = random.Random(0).randbytes(3_000_000)
    send(both.one, data)
    got = bytearray()
    while len(got) < len(data):
        before = len(got)
        both.one.progress()
        both.other.progress()
        got += read(both.other)
        assert len(got) > before
        assert not soft(both.one).posted
        assert not soft(both.other).posted
    assert got == data


def test_credits_that_come_before_the_completions_are_not_sent_on(
    both: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, held = soft(both.one), list[Completion]()
    poll = pair.poll

    def poll_receives(limit: int) -> list[Completion]:
        found = poll(limit)
        held.extend(done for done in found if not done.is_receive)
        return [done for done in found if done.is_receive]

    monkeypatch.setattr(pair, "poll", poll_receives)
    send(both.one, bytes(1 << 20))
    send(both.other, bytes(1 << 20))
    for _ in range(10):
        for channel in both[:2]:
            channel.progress()
            read(channel)
    assert len(both.one._sending) == MESSAGES
    assert both.one._credits > 1, "it may send, and has no slot"
    assert both.one._owed >= OWED
    monkeypatch.undo()
    for done in held:
        pair.inject(done)
    got = 0
    while both.one.pending_bytes or not both.one.is_sent:
        for channel in both[:2]:
            channel.progress()
            got += len(read(channel))
    assert both.one.error is both.other.error is None
    assert got


def test_credits_alone_are_rare(fabric: SoftFabric, both: Channels) -> None:
    for _ in range(20 * MESSAGES):
        send(both.one, b"x")
        both.other.progress()
        read(both.other)
        both.one.progress()
    alone = fabric.counts["sends"] - 20 * MESSAGES
    assert alone <= 20 * MESSAGES // OWED
    fabric.counts.clear()
    for _ in range(100):
        for source, target in (both[:2], both[1::-1]):
            send(source, b"x")
            target.progress()
            read(target)
    assert fabric.counts["sends"] == 200, "answers carry them"


# Ends.


def test_what_came_before_the_peer_was_lost_can_be_read(fabric: SoftFabric, both: Channels) -> None:
    send(both.other, b"last words" * 2000)
    both.other._pair.fail()
    send(both.one, b"hello?")
    fabric.expire()
    both.one.progress()
    assert isinstance(both.one.error, PeerLost)
    assert "RETRY_EXC_ERR" in str(both.one.error)
    assert soft(both.one).state() == "RESET"
    assert read(both.one) == b"last words" * 2000
    assert not both.one.is_readable
    assert (both.one.pending_bytes, both.one.is_sent) == (0, False)
    both.one.write(b"nobody")
    both.one.flush()
    assert both.one.pending_bytes == 0


@pytest.mark.parametrize("how", ["killed", "cut"])
def test_a_peer_that_answers_no_more_is_lost_once_the_nic_gives_up(
    fabric: SoftFabric, both: Channels, how: str
) -> None:
    if how == "killed":
        both.ends[1].verbs.kill()  # type: ignore[attr-defined]
    else:
        fabric.cut(*(end.verbs.gid("soft0") for end in both.ends))  # type: ignore[attr-defined]
    send(both.one, bytes(1 << 20))
    both.one.progress()
    assert both.one.error is None
    fabric.expire()
    both.one.progress()
    assert isinstance(both.one.error, PeerLost)
    assert both.one.pending_bytes == 0


@pytest.mark.parametrize("call", ["progress", "flush", "read"])
def test_a_device_that_vanishes_loses_the_peer(both: Channels, call: str) -> None:
    send(both.other, b"x" * (ROOM + 1))
    both.one.progress()
    both.ends[0].verbs.vanish()  # type: ignore[attr-defined]
    if call == "progress":
        both.one.progress()
    elif call == "flush":
        send(both.one, b"x")
    assert read(both.one) == b"x" * (ROOM + 1)
    assert isinstance(both.one.error, PeerLost)
    both.one.close()
    both.ends[0].verbs.is_gone = False  # type: ignore[attr-defined]  # for the ends to be closed


def test_a_message_that_cannot_be_posted_loses_the_peer(fabric: SoftFabric, both: Channels) -> None:
    fabric.refused_posts = 1
    send(both.one, b"x")
    assert isinstance(both.one.error, PeerLost)
    assert both.one.pending_bytes == 0


def test_after_close_nothing_comes_and_nothing_goes(fabric: SoftFabric, both: Channels) -> None:
    send(both.other, b"unread")
    both.one.progress()
    send(both.one, bytes(1 << 20))
    fabric.pause()
    send(both.other, b"under way")
    for _ in range(2):
        both.one.close()
    before = bytes(both.ends[0].map)
    fabric.resume()
    assert bytes(both.ends[0].map) == before
    both.one.write(b"x")
    both.one.progress()
    assert (both.one.pending_bytes, both.one.is_readable, read(both.one)) == (0, False, b"")
    assert soft(both.one).state() == "RESET"


def test_completions_that_came_before_or_twice_are_counted_and_never_believed(both: Channels) -> None:
    for wr_id in (0, 1, 33, 1 << 40):
        soft(both.one).inject(Completion(wr_id, SUCCESS, bool(wr_id & 1), HEADER.size + 1))
    send(both.other, b"x")
    both.one.progress()
    assert both.one.error is None
    assert both.one.late_completions == 4, "whichever of the two completions of the first receive comes last"
    assert read(both.one) == b"x"


# Bad peers.


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"1234567",
        message(),
        HEADER.pack(2, 0) + b"x",
        HEADER.pack(0, 0) + b"x",
        HEADER.pack(1 << 31, 0),
        HEADER.pack(MESSAGE_BYTES, 0) + bytes(ROOM),
        message(b"x", 1),
        message(credits_=1),
        message(credits_=1 << 31),
    ],
    ids=["nothing", "short", "empty", "longer", "shorter", "huge", "whole slot", "credits", "credits alone", "many"],
)
def test_what_is_no_message_breaks_the_channel(raw: RawPeer, bad: bytes) -> None:
    raw.say(message(b"before"))
    raw.say(bad)
    raw.channel.progress()
    assert isinstance(raw.channel.error, ProtocolError)
    assert read(raw.channel) == b"before"
    raw.channel.write(b"x")
    raw.channel.progress()
    assert raw.heard() == []


def test_credits_are_taken_for_what_was_sent_and_for_no_more(raw: RawPeer) -> None:
    for _ in range(3):
        send(raw.channel, b"x")
    raw.say(message(credits_=3))
    raw.channel.progress()
    assert raw.channel.error is None
    raw.say(message(credits_=1))
    raw.channel.progress()
    assert isinstance(raw.channel.error, ProtocolError)


def test_a_message_over_the_slot_breaks_the_channel_and_nothing_behind_it(raw: RawPeer) -> None:
    raw.say(b"x" * (MESSAGE_BYTES + 1))
    raw.channel.progress()
    assert isinstance(raw.channel.error, PeerLost)
    assert "LOC_LEN_ERR" in str(raw.channel.error)
    assert raw.other.map[:] == bytes(CHANNEL_BYTES)


def test_a_peer_that_floods_fills_its_slots_and_no_more(fabric: SoftFabric, raw: RawPeer) -> None:
    for _ in range(2 * MESSAGES - 1):
        raw.say(message(b"x"))
    raw.channel.progress()
    assert len(raw.channel._inbox) == MESSAGES
    fabric.expire()
    raw.channel.progress()
    assert len(raw.channel._inbox) == MESSAGES
    assert raw.end.pair.state() == "ERR", "its own NIC gives up"
    assert read(raw.channel) == b"x" * MESSAGES


def test_a_peer_that_gives_credits_one_by_one_is_bounded_by_what_it_was_sent(raw: RawPeer) -> None:
    for _ in range(MESSAGES - 1):
        send(raw.channel, b"x")
    for _ in range(MESSAGES - 1):
        raw.say(message(credits_=1))
        raw.channel.progress()
    assert raw.channel.error is None
    assert sum(credits_ for _, credits_, _ in raw.heard()) == OWED, "and these cost it its own credits"
