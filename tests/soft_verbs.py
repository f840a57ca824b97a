"""RDMA without a NIC: queue pairs in one process, deterministic, with faults on request.

A READ is a memmove between two addresses, after the checks that a NIC makes. A request is carried out when it is
posted, or when a test lets it go: `pause`, `step`, `resume`. Time does not pass by itself: what a NIC gives up after a
while, it gives up at `expire`, or when `later` calls back.

It is stricter than a NIC where a NIC leaves open what happens: the two keys of a region differ, a completion that is
not SUCCESS has nonsense in all but `wr_id` and `status`, a refused post has posted a part, and a completion queue that
overflows is an AssertionError.
"""

import ctypes
import errno
import os
import random
import select
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from kvstore.transport.rdma.verbs import (
    FLUSHED,
    STATUSES,
    SUCCESS,
    Access,
    Completion,
    Gid,
    Own,
    Port,
    QueueLimits,
    Read,
    Receive,
    Remote,
    Send,
    Timers,
    VerbsError,
)

LOC_LEN_ERR, LOC_PROT_ERR = STATUSES.index("LOC_LEN_ERR"), STATUSES.index("LOC_PROT_ERR")
REM_INV_REQ_ERR, REM_ACCESS_ERR = STATUSES.index("REM_INV_REQ_ERR"), STATUSES.index("REM_ACCESS_ERR")
REM_OP_ERR = STATUSES.index("REM_OP_ERR")
RETRY_EXC_ERR, RNR_RETRY_EXC_ERR = STATUSES.index("RETRY_EXC_ERR"), STATUSES.index("RNR_RETRY_EXC_ERR")
INLINE_BYTES = 64
PSNS = (1 << 24) - 1
NONSENSE = 0xDEADBEEF
LOCAL_WRITE, REMOTE_READ = int(Access.LOCAL_WRITE), int(Access.REMOTE_READ)  # IntFlag is slow
_move = ctypes.memmove

Method = TypeVar("Method", bound=Callable[..., Any])
Later = Callable[[float, Callable[[], None]], object]


def exclusive(method: Method) -> Method:
    """One thread at a time in the fabric of `self`: a node may run in another thread than its client."""

    @wraps(method)
    def locked(self: Any, *args: Any, **named: Any) -> Any:
        with self.turn:
            return method(self, *args, **named)

    return locked  # type: ignore[return-value]


class Inline(NamedTuple):
    """A message whose bytes were taken when it was posted."""

    send: Send
    data: bytes


class SoftFabric:
    """The network. `sloppy`: what a reset dropped is written all the same, when the test says `haunt`.

    `later(seconds, callback)`, where it is given, is how retries come to their end by themselves.
    """

    def __init__(self, seed: int | None = None, later: Later | None = None) -> None:
        self.turn = threading.RLock()
        self.pairs: dict[tuple[bytes, int], SoftQueuePair] = {}
        self.counts: Counter[str] = Counter()  # reads, read_bytes, sends, flushed, register
        self.registered_bytes = 0
        self.sloppy = False
        self.is_paused = False
        self.order = random.Random(seed) if seed is not None else None
        self.before_reads: dict[int, Callable[[], None]] = {}  # by number, from 1: called when it is that READ's turn
        self.flipped_reads: set[int] = set()  # by number, from 1: one bit of what they bring is wrong
        self.failing: deque[int] = deque()  # statuses of the next requests; SUCCESS moves nothing, and says it did
        self.refused_posts = 0
        self.refused_registrations = 0
        self.ghosts: list[tuple[int, bytes]] = []
        self.later = later
        self._cut: set[frozenset[bytes]] = set()
        self._numbers = 0x100
        self._keys = 0x1000
        self._hosts = 0

    @property
    def completions_waiting(self) -> int:
        """In the completion queues of all queue pairs that are there."""
        return sum(len(pair.completions) for pair in self.pairs.values())

    def pause(self) -> None:
        self.is_paused = True

    @exclusive
    def resume(self) -> None:
        self.is_paused = False
        self.kick()

    @exclusive
    def step(self, count: int = 1) -> int:
        """Carry out so many requests, each the first of its queue pair; how many there were to carry out."""
        done = 0
        while done < count:
            ready = [pair for pair in self.pairs.values() if pair.can_go_on()]
            if not ready:
                break
            done += (self.order.choice(ready) if self.order else ready[0]).carry_out()
        return done

    @exclusive
    def expire(self, pairs: "Iterable[SoftQueuePair] | None" = None) -> None:
        """Whatever waits for a peer that does not answer is given up."""
        for pair in list(self.pairs.values() if pairs is None else pairs):
            pair.give_up()

    @exclusive
    def haunt(self) -> None:
        for address, data in self.ghosts:
            _move(address, data, len(data))
        self.ghosts.clear()

    @exclusive
    def cut(self, one: bytes, other: bytes) -> None:
        """Nothing goes between these two GIDs."""
        self._cut.add(frozenset((one, other)))
        self.watch()

    @exclusive
    def heal(self) -> None:
        self._cut.clear()
        self.kick()

    def is_cut(self, one: bytes, other: bytes) -> bool:
        return frozenset((one, other)) in self._cut

    @exclusive
    def kick(self) -> None:
        """Something changed: carry out what can be."""
        if not self.is_paused:
            while self.step():
                pass
        self.watch()

    def watch(self) -> None:
        if self.later is not None:
            for pair in list(self.pairs.values()):
                pair.watch()

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def next_key(self) -> int:
        self._keys += 0x101
        return self._keys

    def next_host(self) -> int:
        self._hosts += 1
        return self._hosts


class SoftVerbs:
    """One host's devices."""

    name = "soft"

    def __init__(self, fabric: SoftFabric, devices: Sequence[str] = ("soft0",), mtu_bytes: int = 4096) -> None:
        self.fabric = fabric
        self.turn = fabric.turn
        self.mtu_bytes = mtu_bytes
        self.is_gone = False
        self.is_killed = False
        self.inactive: set[str] = set()
        host = fabric.next_host()
        self._gids = {device: bytes(10) + b"\xff\xff\x0a\x00" + bytes((host, at)) for at, device in enumerate(devices)}

    def devices(self) -> list[str]:
        self.check()
        return list(self._gids)

    def open(self, device: str) -> "SoftContext":
        self.check()
        if device not in self._gids:
            raise VerbsError(errno.ENODEV, f"no device {device}")
        return SoftContext(self, device)

    def gid(self, device: str) -> bytes:
        return self._gids[device]

    def check(self) -> None:
        if self.is_gone:
            raise VerbsError(errno.EIO, "the device is gone")

    @exclusive
    def vanish(self) -> None:
        """The devices are unplugged: every call fails but `close`, nothing is answered."""
        self.is_gone = self.is_killed = True
        self.fabric.watch()

    @exclusive
    def kill(self) -> None:
        """The process is gone, and its queue pairs with it; whoever asks them gets no answer."""
        self.is_killed = True
        for key, pair in list(self.fabric.pairs.items()):
            if pair.domain.context.verbs is self:
                del self.fabric.pairs[key]
        self.fabric.watch()


class SoftContext:
    def __init__(self, verbs: SoftVerbs, device: str) -> None:
        self.verbs = verbs
        self.device = device
        self.domains = 0
        self._is_closed = False

    def check(self) -> None:
        self.verbs.check()
        if self._is_closed:
            raise VerbsError(errno.EBADF, f"{self.device} is closed")

    def ports(self) -> list[Port]:
        self.check()
        gids = (Gid(0, b"\xfe\x80" + bytes(14), "roce v1"), Gid(1, self.verbs.gid(self.device), "roce v2"))
        is_active = self.device not in self.verbs.inactive
        return [Port(1, is_active, self.verbs.mtu_bytes, 0, "ethernet", gids)]

    def domain(self) -> "SoftDomain":
        self.check()
        return SoftDomain(self)

    def close(self) -> None:
        if self.domains:
            raise VerbsError(errno.EBUSY, f"{self.domains} domains are open")
        self._is_closed = True


class SoftDomain:
    """`regions` by lkey, `shared` by rkey: what there is for its queue pairs."""

    def __init__(self, context: SoftContext) -> None:
        self.context = context
        self.fabric = context.verbs.fabric
        self.turn = self.fabric.turn
        self.regions: dict[int, SoftRegion] = {}
        self.shared: dict[int, SoftRegion] = {}
        self.pairs = 0
        self._is_closed = False
        context.domains += 1

    def _check(self) -> None:
        self.context.check()
        if self._is_closed:
            raise VerbsError(errno.EBADF, "the domain is closed")

    @exclusive
    def register(self, address: int, size: int, access: Access) -> "SoftRegion":
        self._check()
        if self.fabric.refused_registrations:
            self.fabric.refused_registrations -= 1
            raise VerbsError(errno.ENOMEM, "cannot register memory")
        if size <= 0:
            raise VerbsError(errno.EINVAL, f"a region of {size} bytes")
        self.fabric.counts["register"] += 1
        return SoftRegion(self, address, size, access)

    def register_dmabuf(self, fd: int, offset: int, size: int, address: int, access: Access) -> "SoftRegion":
        return self.register(address, size, access)

    @exclusive
    def queue_pair(self, limits: QueueLimits) -> "SoftQueuePair":
        self._check()
        return SoftQueuePair(self, limits)

    @exclusive
    def close(self) -> None:
        if self._is_closed:
            return
        if self.pairs or self.regions:
            raise VerbsError(errno.EBUSY, f"{self.pairs} queue pairs, {len(self.regions)} regions")
        self._is_closed = True
        self.context.domains -= 1


class SoftRegion:
    def __init__(self, domain: SoftDomain, address: int, size: int, access: Access) -> None:
        self.turn = domain.turn
        self.lkey, self.rkey = domain.fabric.next_key(), domain.fabric.next_key()
        self._domain = domain
        self.start, self.end = address, address + size
        self.is_writable = bool(access & LOCAL_WRITE)
        domain.regions[self.lkey] = self
        if access & REMOTE_READ:
            domain.shared[self.rkey] = self
        domain.fabric.registered_bytes += size

    @exclusive
    def close(self) -> None:
        if self._domain.regions.pop(self.lkey, None) is not None:
            self._domain.shared.pop(self.rkey, None)
            self._domain.fabric.registered_bytes -= self.end - self.start


class SoftQueuePair:
    """`posted` are requests that are not carried out yet, in order.

    Of all requests ever posted, [freed, placed) take up the send queue: one leaves it when its completion, or that of
    one after it, is polled.
    """

    def __init__(self, domain: SoftDomain, limits: QueueLimits) -> None:
        self.domain = domain
        self.number = domain.fabric.next_number()
        self.inline_bytes = min(limits.inline_bytes, INLINE_BYTES)
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.posted: deque[Read | Send | Inline] = deque()
        self.receives: deque[Receive] = deque()
        self.completions: deque[tuple[Completion, int]] = deque()  # with the request's place, -1 for receives
        self.sq_psn = self.rq_psn = -1  # of the next request, and of the next that is expected
        self._state = "RESET"
        self._limits = limits
        self._capacity = limits.sends + limits.receives + 1
        self._timers = Timers()
        self._fabric = domain.fabric
        self.turn = domain.fabric.turn
        self._verbs = domain.context.verbs
        self._gid = self._verbs.gid(domain.context.device)
        self._key = self._gid, self.number
        self._remote: tuple[bytes, int] = (b"", 0)
        self._is_armed = False
        self._is_closed = False
        self._placed = self._freed = 0
        self._watched = -1
        domain.pairs += 1
        self._fabric.pairs[self._key] = self

    # As the interface has it.

    def state(self) -> str:
        self._check()
        return self._state

    @exclusive
    def prepare(self, port: int) -> None:
        self._check()
        if port != 1:
            raise VerbsError(errno.EINVAL, f"there is no port {port}")
        if self._state != "RESET":
            self.reset()
        self._state = "INIT"

    @exclusive
    def connect(self, own: Own, remote: Remote) -> None:
        self._check()
        if self._state not in ("RESET", "INIT"):
            self.reset()
        if not remote.gid or own.gid_number != 1 or own.port != 1:
            raise VerbsError(errno.EINVAL, "RoCE needs a GID, and a port that is there")
        if own.timers.retries > 6 or own.timers.rnr_retries > 6:
            raise VerbsError(errno.EINVAL, "that would be retried for ever")
        if not (0 <= own.psn <= PSNS and 0 <= remote.psn <= PSNS):
            raise VerbsError(errno.EINVAL, "a PSN has 24 bits")
        self._remote = remote.gid, remote.number
        self._timers = own.timers
        self.sq_psn, self.rq_psn = own.psn, remote.psn
        self._state = "RTS"
        self._fabric.kick()

    @exclusive
    def reset(self) -> None:
        self._check()
        self._drop()
        self._state = "RESET"

    @exclusive
    def fail(self) -> None:
        self._check()
        self._state = "ERR"
        self._flush()

    def post_reads(self, reads: Sequence[Read]) -> None:
        with self.turn:
            count = len(reads)
            room = self._room(count)
            self.posted.extend(reads if room >= count else reads[:room])
            self._placed += count if room >= count else room
            self._go()
            if room < count:
                raise VerbsError(errno.ENOMEM, f"{room} of {count} READs were posted")

    @exclusive
    def post_send(self, send: Send) -> None:
        if not self._room(1):
            raise VerbsError(errno.ENOMEM, "not posted")
        if send.inline and send.size > self.inline_bytes:
            raise VerbsError(errno.EINVAL, f"{send.size} bytes inline; {self.inline_bytes} fit")
        self.posted.append(Inline(send, ctypes.string_at(send.address, send.size)) if send.inline else send)
        self._placed += 1
        self._go()

    @exclusive
    def post_receive(self, receive: Receive) -> None:
        self._check()
        if self._state == "RESET":
            raise VerbsError(errno.EINVAL, "receives are posted from INIT on")
        if len(self.receives) >= self._limits.receives:
            raise VerbsError(errno.ENOMEM, f"{self._limits.receives} receives are posted")
        self.receives.append(receive)
        if self._state == "ERR":
            self._flush()
            return
        other = self._fabric.pairs.get(self._remote)
        if other is not None and other.posted:
            self._fabric.kick()

    @exclusive
    def arm(self) -> None:
        self._check()
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        self._is_armed = True

    def poll(self, limit: int) -> list[Completion]:
        with self.turn:
            self._check()
            if limit < 1:
                raise ValueError("poll for one and more")
            found: list[Completion] = []
            completions = self.completions
            while completions and len(found) < limit:
                completion, place = completions.popleft()
                if place >= self._freed:
                    self._freed = place + 1
                found.append(completion)
            return found

    @exclusive
    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.domain.pairs -= 1
            self._fabric.pairs.pop(self._key, None)
            self._drop()
            os.close(self.fd)
            self._fabric.watch()

    # For tests.

    @exclusive
    def inject(self, completion: Completion) -> None:
        """A completion that nothing was posted for."""
        self._complete(completion, -1)

    # The network's side.

    def _check(self) -> None:
        if self._verbs.is_gone:
            self._verbs.check()
        if self._is_closed:
            raise VerbsError(errno.EINVAL, "closed")

    def _room(self, count: int) -> int:
        """How many of `count` requests are posted before one is refused."""
        self._check()
        if self._state != "RTS" and self._state != "ERR":
            raise VerbsError(errno.EINVAL, f"nothing is sent in {self._state}")
        room = self._limits.sends - self._placed + self._freed
        if self._fabric.refused_posts:
            self._fabric.refused_posts -= 1
            return min(room, count // 2)
        return room

    def _drop(self) -> None:
        """Forget what was posted. What completed before stays, and frees nothing any more."""
        if self._fabric.sloppy:
            reads = [request for request in self.posted if isinstance(request, Read)]
            self._fabric.ghosts += [(read.address, b"\xdb" * read.size) for read in reads]
        self.posted.clear()
        self.receives.clear()
        self._freed = self._placed

    def _go(self) -> None:
        if self._state == "ERR":
            self._flush()
            return
        if self._fabric.order is not None:
            self._fabric.kick()
        elif not self._fabric.is_paused:
            while self.posted and self.carry_out():
                pass
        if self.posted:
            self.watch()

    def peer(self) -> "SoftQueuePair | None":
        """The other end, if it is there, connected to this one, and nothing is cut."""
        fabric = self._fabric
        other = fabric.pairs.get(self._remote)
        if (
            other is None
            or other._state != "RTS"
            or other._remote != self._key
            or other.rq_psn != self.sq_psn
            or other._verbs.is_killed
            or self._verbs.is_killed
            or (fabric._cut and fabric.is_cut(self._gid, self._remote[0]))
        ):
            return None
        return other

    def can_go_on(self) -> bool:
        if not self.posted or self._state != "RTS":
            return False
        other = self.peer()
        return other is not None and (type(self.posted[0]) is Read or bool(other.receives))

    def carry_out(self) -> bool:
        """The first of what is posted, if it can be."""
        fabric = self._fabric
        if fabric.before_reads and type(self.posted[0]) is Read:
            call = fabric.before_reads.pop(fabric.counts["reads"] + 1, None)
            if call is not None:
                call()
                if not self.posted:
                    return False
        other = self.peer()
        request = self.posted[0]
        is_read = request.__class__ is Read
        if other is None or self._state != "RTS" or not (is_read or other.receives):
            return False
        place = self._placed - len(self.posted)  # what is posted is [place, placed)
        self.posted.popleft()
        if fabric.failing:
            status = fabric.failing.popleft()
            message = _message(request)
            if status != SUCCESS:
                self._failed(place, message.wr_id, status)
            elif message.signaled:
                self._complete(Completion(message.wr_id, SUCCESS, False, message.size), place)
            return True
        self.sq_psn = other.rq_psn = self.sq_psn + 1 & PSNS
        if is_read:
            self._read(place, request, other)  # type: ignore[arg-type]
        else:
            self._send(place, request, other)  # type: ignore[arg-type]
        return True

    def _read(self, place: int, read: Read, other: "SoftQueuePair") -> None:
        wr_id, address, lkey, size, remote_address, rkey, signaled = read
        here = self.domain.regions.get(lkey)
        if here is None or not here.is_writable or address < here.start or address + size > here.end:
            self._failed(place, wr_id, LOC_PROT_ERR)
            return
        there = other.domain.shared.get(rkey)
        if there is None or remote_address < there.start or remote_address + size > there.end:
            self._failed(place, wr_id, REM_ACCESS_ERR)
            other.to_error()
            return
        fabric = self._fabric
        fabric.counts["reads"] += 1
        fabric.counts["read_bytes"] += size
        _move(address, remote_address, size)
        if fabric.flipped_reads and fabric.counts["reads"] in fabric.flipped_reads:
            ctypes.c_uint8.from_address(address + size // 2).value ^= 0x10
        if signaled:
            self._complete(Completion(wr_id, SUCCESS, False, size), place)

    def _send(self, place: int, request: Send | Inline, other: "SoftQueuePair") -> None:
        send = _message(request)
        here = self.domain.regions.get(send.lkey)
        if isinstance(request, Send) and (
            here is None or send.address < here.start or send.address + send.size > here.end
        ):
            self._failed(place, send.wr_id, LOC_PROT_ERR)
            return
        receive = other.receives.popleft()
        there = other.domain.regions.get(receive.lkey)
        if send.size > receive.size:
            theirs, ours = LOC_LEN_ERR, REM_INV_REQ_ERR
        elif (
            there is None
            or not there.is_writable
            or receive.address < there.start
            or receive.address + receive.size > there.end
        ):
            theirs, ours = LOC_PROT_ERR, REM_OP_ERR
        else:
            self._fabric.counts["sends"] += 1
            _move(receive.address, request.data if isinstance(request, Inline) else send.address, send.size)
            other._complete(Completion(receive.wr_id, SUCCESS, True, send.size), -1)
            if send.signaled:
                self._complete(Completion(send.wr_id, SUCCESS, False, NONSENSE), place)
            return
        other._complete(_failure(receive.wr_id, theirs), -1)
        other.to_error()
        self._failed(place, send.wr_id, ours)

    def _failed(self, place: int, wr_id: int, status: int) -> None:
        self._complete(_failure(wr_id, status), place)
        self.to_error()

    def to_error(self) -> None:
        if self._state == "RTS":
            self._state = "ERR"
            self._flush()

    def _flush(self) -> None:
        while self.posted:
            place = self._placed - len(self.posted)
            self._fabric.counts["flushed"] += 1
            self._complete(_failure(_message(self.posted.popleft()).wr_id, FLUSHED), place)
        while self.receives:
            self._complete(_failure(self.receives.popleft().wr_id, FLUSHED), -1)

    def give_up(self) -> None:
        """The retries are used up."""
        if self.posted and self._state == "RTS" and not self.can_go_on():
            status = RETRY_EXC_ERR if self.peer() is None else RNR_RETRY_EXC_ERR
            place = self._placed - len(self.posted)
            self._failed(place, _message(self.posted.popleft()).wr_id, status)

    def watch(self) -> None:
        """Where nothing answers the first of what is posted, give it up later, unless something does until then."""
        later = self._fabric.later
        place = self._placed - len(self.posted)
        if later is None or place == self._watched or not self.posted or self._state != "RTS" or self.can_go_on():
            return
        self._watched = place
        if self.peer() is None:
            seconds = 4.096e-6 * 2**self._timers.timeout * (self._timers.retries + 1)
        else:
            seconds = 1e-5 * 2 ** ((self._timers.min_rnr_timer or 32) / 2) * (self._timers.rnr_retries + 1)
        later(seconds, lambda: self._overdue(place))

    @exclusive
    def _overdue(self, place: int) -> None:
        if self._placed - len(self.posted) == place:
            self._watched = -1
            self.give_up()

    def _complete(self, completion: Completion, place: int) -> None:
        self.completions.append((completion, place))
        assert len(self.completions) <= self._capacity, "a completion queue overflowed"
        if self._is_armed:
            self._is_armed = False
            os.eventfd_write(self.fd, 1)


def _message(request: Read | Send | Inline) -> Read | Send:
    return request.send if isinstance(request, Inline) else request


def _failure(wr_id: int, status: int) -> Completion:
    return Completion(wr_id, status, False, NONSENSE)


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])
