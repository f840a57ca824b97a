"""A network in virtual time: connections between processes, each way with its latency and rate.

What is sent arrives in order, or not at all once the connection broke. While a way is cut, what was sent waits, as TCP
sends it again, and nobody is told. Bytes are copied when they are sent. A kernel answers for a stopped process: its
connections are made, and stay; a killed one's break, and nobody listens any more.
"""

import asyncio
import itertools
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from random import Random

from kvstore.errors import ConnectFailed
from tests.sim.loop import PROCESS, Process, SimulatedLoop, until

_NOBODY = Context()
LATENCY_S, BYTES_PER_S = 100e-6, 1.25e9  # of each way, unless told otherwise: a rack with 10 Gbit/s
AGAIN_S = 0.2  # what was lost is sent again after that long


@dataclass(slots=True)
class Way:
    """From one host to another. Shares are of messages, 0 to 1."""

    latency_s: float = LATENCY_S
    jitter_s: float = 0.0
    bytes_per_s: float = BYTES_PER_S
    is_cut: bool = False
    duplicated: float = 0.0
    late: float = 0.0  # those overtake nothing, but are overtaken; of messages that may be
    flipped: float = 0.0  # payloads in which a bit is another on arrival
    free_at: float = 0.0  # when all that was sent is through
    changes: dict[str, list[float]] = field(default_factory=dict)  # what each field was, and was changed to since


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message as it travels: `head` is a frame without its payload. Out of order it comes only if it `may_stray`."""

    head: bytes
    payload: bytes = b""
    may_stray: bool = False

    @property
    def size_bytes(self) -> int:
        return len(self.head) + len(self.payload)


class End:
    """One end of a connection, in `process` at `host`. `received` and `broken` are called there."""

    def __init__(self, network: "Network", host: str, process: Process) -> None:
        self.network = network
        self.host = host
        self.process = process
        self.other: End = self
        self.is_broken = False
        self.received: Callable[[Parcel], None] = lambda parcel: None
        self.broken: Callable[[], None] = lambda: None
        self._arrives_at = 0.0
        self._held: list[Parcel] = []  # sent while the way was cut

    def send(self, parcel: Parcel) -> None:
        """Nothing is raised when the connection is broken; `broken` was called, or will be."""
        if self.is_broken:
            return
        way = self.network.way(self.host, self.other.host)
        if way.is_cut or self._held:
            self._held.append(parcel)
        else:
            self._travel(parcel, way)

    def close(self) -> None:
        """Break it, for both ends; the other hears of it if the way is open."""
        if not self.is_broken:
            self._end()
            self.network.part(self)

    def send_held(self) -> None:
        """The way is open again."""
        held, self._held = self._held, []
        for parcel in held:
            self._travel(parcel, self.network.way(self.host, self.other.host))

    def _travel(self, parcel: Parcel, way: Way) -> None:
        network, random = self.network, self.network.random
        now = network.loop.seconds
        way.free_at = max(way.free_at, now) + parcel.size_bytes / way.bytes_per_s
        arrives_at = way.free_at + way.latency_s + way.jitter_s * random.random()
        if parcel.may_stray and random.random() < way.late:
            network.at(arrives_at + 10 * AGAIN_S * random.random(), self._arrive, parcel)
            return
        self._arrives_at = max(self._arrives_at, arrives_at)
        if parcel.payload and random.random() < way.flipped:
            parcel = Parcel(parcel.head, _flipped(parcel.payload, random))
        network.at(self._arrives_at, self._arrive, parcel)
        if parcel.may_stray and random.random() < way.duplicated:
            network.at(self._arrives_at + AGAIN_S * random.random(), self._arrive, parcel)

    def _arrive(self, parcel: Parcel) -> None:
        if self.network.way(self.host, self.other.host).is_cut or self._held:
            self._held.append(parcel)
        elif not self.other.is_broken:
            self.network.note(self.host, self.other.host, parcel)
            self.other.process.call(self.other.take, parcel)

    def take(self, parcel: Parcel) -> None:
        """In the process of this end."""
        if not self.is_broken:
            self.received(parcel)

    def _end(self) -> None:
        self.is_broken = True
        self._held.clear()
        self.network.ends.pop(self, None)
        self.process.call(self.broken)

    def hear_of_end(self) -> None:
        """The other end is gone, which this one knows now."""
        if not self.is_broken:
            self._end()


Listener = Callable[[End], None]


class Network:
    """Hosts and the ways between them. `trace` is told of each message that arrives."""

    def __init__(self, loop: SimulatedLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self.ends: dict[End, None] = {}
        self.messages = 0
        self.trace: Callable[[str], None] = lambda line: None
        self._ways: dict[tuple[str, str], Way] = {}
        self._listeners: dict[str, tuple[Process, Listener]] = {}
        self._parted: list[End] = []  # ended while their way was cut

    def way(self, source: str, target: str) -> Way:
        key = (source, target)
        if key not in self._ways:
            self._ways[key] = Way() if source != target else Way(latency_s=LATENCY_S / 10)
        return self._ways[key]

    def listen(self, host: str, process: Process, accept: Listener) -> None:
        """`accept` is called in the process, with its end of each connection."""
        self._listeners[host] = (process, accept)

    async def connect(self, host: str, process: Process | None = None) -> End:
        """From the calling process at `process.name`. Raises ConnectFailed where nobody listens; waits while the way
        is cut."""
        caller = process or PROCESS.get()
        assert caller is not None, "connections are made by processes"
        source = caller.name
        await until(lambda: not (self.way(source, host).is_cut or self.way(host, source).is_cut), AGAIN_S)
        await asyncio.sleep(self.way(source, host).latency_s + self.way(host, source).latency_s)
        listening = self._listeners.get(host)
        if listening is None or listening[0].is_killed:
            raise ConnectFailed(f"{host} refuses connections") from ConnectionRefusedError()
        here, there = End(self, source, caller), End(self, host, listening[0])
        here.other, there.other = there, here
        self.ends[here] = self.ends[there] = None
        listening[0].call(listening[1], there)
        return here

    def killed(self, process: Process) -> None:
        """Its connections break."""
        for end in [end for end in self.ends if end.process is process]:
            end.close()

    def break_between(self, one: str, other: str) -> None:
        for end in [end for end in self.ends if (end.host, end.other.host) == (one, other)]:
            end.close()

    def cut(self, source: str, target: str) -> None:
        """One way."""
        self.way(source, target).is_cut = True

    def mend(self, source: str, target: str) -> None:
        self.way(source, target).is_cut = False
        for end in [end for end in self.ends if (end.host, end.other.host) == (source, target)]:
            self.at(self.loop.seconds + AGAIN_S * self.random.random(), end.send_held)
        parted, self._parted = self._parted, []
        for end in parted:
            self.part(end)

    def part(self, end: End) -> None:
        """Tell the other end, as soon as the way is open."""
        way = self.way(end.host, end.other.host)
        if way.is_cut:
            self._parted.append(end)
        else:
            self.at(self.loop.seconds + way.latency_s, end.other.hear_of_end)

    def at(self, when: float, work: Callable[..., None], *arguments: object) -> None:
        """The network does that by itself, whoever asked for it."""
        self.loop.call_at(when, work, *arguments, context=_NOBODY)

    def note(self, source: str, target: str, parcel: Parcel) -> None:
        self.messages += 1
        self.trace(f"{self.loop.seconds:.6f} {source}>{target} {len(parcel.head)}+{len(parcel.payload)}")


def _flipped(payload: bytes, random: Random) -> bytes:
    changed = bytearray(payload)
    bit = random.randrange(8 * len(changed))
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def pairs(hosts: list[str]) -> list[tuple[str, str]]:
    """All ways between them."""
    return list(itertools.permutations(hosts, 2))
