"""Two channels that are connected, over the double or over a real device."""

import mmap
from contextlib import ExitStack
from typing import NamedTuple

from kvstore.copier import address_of
from kvstore.transport.rdma.channel import CHANNEL_BYTES, CHANNEL_LIMITS, HEADER, MESSAGE_BYTES, Channel
from kvstore.transport.rdma.topology import choose_gid
from kvstore.transport.rdma.verbs import Access, Context, Own, QueuePair, Receive, Remote, Send, Timers, Verbs
from tests.soft_verbs import SoftFabric, SoftVerbs

TIMERS = Timers(timeout=15, retries=3)


class End:
    """A queue pair with memory for a channel; `channel` is made before it is connected."""

    def __init__(self, verbs: Verbs, stack: ExitStack) -> None:
        self.verbs = verbs
        self.context: Context = verbs.open(verbs.devices()[0])
        self.port = self.context.ports()[0]
        domain = self.context.domain()
        self.map = mmap.mmap(-1, CHANNEL_BYTES)
        self.address = address_of(memoryview(self.map))
        region = domain.register(self.address, CHANNEL_BYTES, Access.LOCAL_WRITE)
        self.lkey = region.lkey
        self.pair: QueuePair = domain.queue_pair(CHANNEL_LIMITS)
        self.pair.prepare(self.port.number)
        for close in (self.context.close, domain.close, region.close, self.pair.close):
            stack.callback(close)

    def connect(self, other: "End", psns: tuple[int, int]) -> None:
        own = Own(psns[0], self.port.number, choose_gid(self.port).number, self.port.mtu_bytes, TIMERS)
        gid = choose_gid(other.port).raw
        self.pair.connect(own, Remote(other.pair.number, psns[1], gid, other.port.lid))

    def make_channel(self) -> Channel:
        return Channel(self.pair, self.address, self.lkey)


class Channels(NamedTuple):
    one: Channel
    other: Channel
    ends: tuple[End, End]


def connect(one: End, other: End) -> None:
    one.connect(other, (1000, 2000))
    other.connect(one, (2000, 1000))


def channels(verbs: tuple[Verbs, Verbs], stack: ExitStack) -> Channels:
    one, other = (End(each, stack) for each in verbs)
    made = one.make_channel(), other.make_channel()
    connect(one, other)
    return Channels(*made, (one, other))


def soft_channels(fabric: SoftFabric, stack: ExitStack) -> Channels:
    """Of two hosts."""
    return channels((SoftVerbs(fabric), SoftVerbs(fabric)), stack)


class RawPeer:
    """An end that says what it likes to the channel at the other end."""

    def __init__(self, fabric: SoftFabric, stack: ExitStack) -> None:
        self.end = End(SoftVerbs(fabric), stack)
        self.other = other = End(SoftVerbs(fabric), stack)
        self.channel = other.make_channel()
        for slot in range(16):
            self._receive(slot)
        connect(self.end, other)
        self.sent = 0
        self._heard: list[tuple[int, int, bytes]] = []

    def _receive(self, slot: int) -> None:
        address = self.end.address + slot * MESSAGE_BYTES
        self.end.pair.post_receive(Receive(slot, address, self.end.lkey, MESSAGE_BYTES))

    def say(self, message: bytes) -> None:
        """As one message, from where nothing is received."""
        at = CHANNEL_BYTES // 2
        self.end.map[at : at + len(message)] = message
        self.end.pair.post_send(Send(self.sent, self.end.address + at, self.end.lkey, len(message), True, False))
        self.sent += 1
        self._listen()

    def heard(self) -> list[tuple[int, int, bytes]]:
        """(payload bytes, credits, payload) of what came since it was asked."""
        self._listen()
        heard, self._heard = self._heard, []
        return heard

    def _listen(self) -> None:
        """Slots are received into again."""
        while got := self.end.pair.poll(32):
            for done in got:
                if done.is_receive and not done.status:
                    at = done.wr_id * MESSAGE_BYTES
                    size, credits_ = HEADER.unpack_from(self.end.map, at)
                    self._heard.append((size, credits_, self.end.map[at + HEADER.size : at + HEADER.size + size]))
                    self._receive(done.wr_id)


def message(payload: bytes = b"", credits_: int = 0) -> bytes:
    return HEADER.pack(len(payload), credits_) + payload
