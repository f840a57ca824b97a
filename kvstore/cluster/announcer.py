"""A holder's side of the directory: what is to be told to which home, batch by batch.

Knows no sockets and no table. The caller says which elements come and go (`toggle`), of which blocks there is
something to tell (`note`), sends the batches, and notes anew the blocks of the partitions that it is given back.
"""

import struct
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from kvstore.cluster.batches import element, pack
from kvstore.cluster.homes import Homes
from kvstore.cluster.naming import PARTITIONS
from kvstore.errors import ProtocolError
from kvstore.wire_cluster import DIGEST, Announce, Announced

WAITING_MOST = 1 << 20  # blocks that wait for one home
Describe = Callable[[Hashable], tuple[int, int]]


@dataclass(slots=True)
class Stream:
    """To one start of a home."""

    epoch: int
    waiting: dict[Hashable, int] = field(default_factory=dict)  # block -> partition, the longest waiting first
    resets: set[int] = field(default_factory=set)
    unanswered: Announce | None = None
    sequence: int = 0  # of the last batch; 0 before the first
    late: set[int] = field(default_factory=set)  # partitions that there was no room for: told anew when there is

    @property
    def has_more(self) -> bool:
        """Whether there is anything to tell that is in no batch yet."""
        return bool(self.waiting or self.resets or self.late or not self.sequence)

    def leave_out(self, partitions: set[int]) -> None:
        """They have another home now."""
        self.waiting = {block: partition for block, partition in self.waiting.items() if partition not in partitions}
        self.resets -= partitions
        self.late -= partitions

    def begin_anew(self) -> None:
        """What waits stays, for the first batch and those after it."""
        self.resets.clear()
        self.late.clear()
        self.unanswered = None
        self.sequence = 0


class Announcer:
    """Of one start of a node. Bounded: of no more than `WAITING_MOST` blocks that wait for a home. The partitions of
    others are late: nothing of them is taken in until there is room, and then they are told anew."""

    def __init__(self, node: str, epoch: int) -> None:
        self.node = node
        self.epoch = epoch
        self._homes = Homes(())
        self._streams: dict[str, Stream] = {}
        self._counts = [0] * PARTITIONS  # of elements
        self._xors = [0] * PARTITIONS
        self._last_sequence = 0  # of all streams: one that begins goes on from there, so late batches are told apart

    def toggle(self, partition: int, name: int, bit: int, *, is_there: bool) -> None:
        """A block came into a tier (the index of its bit in `TIER_BITS`), or left it."""
        self._counts[partition] += 1 if is_there else -1
        assert self._counts[partition] >= 0, f"partition {partition}: more elements left than came"
        self._xors[partition] ^= element(name, bit)

    def note(self, partition: int, block: Hashable) -> None:
        """There is something to tell of this block. It waits once; without members it does not wait at all."""
        stream = self._streams.get(self._homes.home(partition))
        if stream is None or partition in stream.late:
            return
        if len(stream.waiting) < WAITING_MOST or block in stream.waiting:
            stream.waiting[block] = partition
        else:
            stream.late.add(partition)

    def homes_changed(self, homes: Homes, epochs: Mapping[str, int]) -> set[int]:
        """There are other members, or other starts of them. Returns the partitions of which each block is to be noted
        anew; digests wait until that is done."""
        before = self._homes
        known = {name for name, stream in self._streams.items() if stream.epoch == epochs.get(name)}
        started = homes.names - known
        moved = homes.moved(before)
        self._homes = homes
        self._streams = {
            name: Stream(epochs[name]) if name in started else self._streams[name] for name in sorted(homes.names)
        }
        for name in {before.home(partition) for partition in moved} & homes.names:
            self._streams[name].leave_out(set(moved))
        for partition in moved if homes.names else ():
            self._streams[homes.home(partition)].resets.add(partition)
        return set(moved).union(*map(homes.owned, started))

    def batch(self, home: str, describe: Describe, most: int, *, digest: bool = False) -> Announce | None:
        """What to send to a home next, with at most `most` blocks; None if there is nothing to tell. While it is not
        answered it is the same again: it may have arrived. `describe` gives a block's name and the tiers that have it
        now. With `digest`, and when everything has been told, the digests of the home's partitions."""
        stream = self._streams.get(home)
        if stream is None:
            return None
        if stream.unanswered is None and (digest or stream.has_more):
            told = () if stream.has_more else self._homes.owned(home)
            stream.unanswered = self._make(stream, describe, most, told)
        return stream.unanswered

    def answered(self, home: str, reply: Announced) -> set[int]:
        """What a home said to the batch. Returns the partitions of which each block is to be noted anew; digests
        wait until that is done. An answer to an earlier batch changes nothing. Raises ProtocolError if it makes no
        sense."""
        differing = _partitions(reply.differing)
        stream = self._streams.get(home)
        if stream is None or stream.unanswered is None:
            return set()
        sent = stream.unanswered.sequence
        if reply.sequence < sent and not reply.is_gap:
            return set()
        self._last_sequence = max(self._last_sequence, reply.sequence)
        if reply.is_gap or reply.sequence > sent:
            stream.begin_anew()
            return set(self._homes.owned(home))
        stream.unanswered = None
        anew = {partition for partition in differing if self._homes.home(partition) == home}
        anew |= self._take_late(stream)
        stream.late -= anew
        stream.resets |= anew
        return anew

    def waiting(self, home: str) -> int:
        """Blocks of which the home has not confirmed yet what it was or will be told."""
        stream = self._streams.get(home)
        if stream is None:
            return 0
        return len(stream.waiting) + (len(stream.unanswered.tiers) if stream.unanswered is not None else 0)

    def homes_waiting(self) -> list[str]:
        """Those to which there is a batch to send, by name."""
        return [name for name, stream in self._streams.items() if stream.unanswered is not None or stream.has_more]

    def _take_late(self, stream: Stream) -> set[int]:
        """Partitions that were late, as many as there is room for; one has room when nothing waits."""
        taken: set[int] = set()
        room = WAITING_MOST // 2 - len(stream.waiting)
        while stream.late and room >= 0:
            partition = stream.late.pop()
            taken.add(partition)
            room -= max(1, self._counts[partition])
        return taken

    def _make(self, stream: Stream, describe: Describe, most: int, told: Iterable[int]) -> Announce:
        """The next batch, with the digests of the partitions `told`."""
        blocks = list(islice(stream.waiting, most))
        partitions = [stream.waiting.pop(block) for block in blocks]
        described = [describe(block) for block in blocks]
        resets = sorted(stream.resets)
        stream.resets.clear()
        is_first = not stream.sequence
        stream.sequence = 1 + (self._last_sequence if is_first else stream.sequence)
        self._last_sequence = max(self._last_sequence, stream.sequence)
        return Announce(
            id=0,
            node=self.node,
            epoch=self.epoch,
            sequence=stream.sequence,
            is_first=is_first,
            resets=pack("H", resets),
            partitions=pack("H", partitions),
            names=pack("Q", [name for name, _ in described]),
            tiers=bytes(tiers for _, tiers in described),
            digests=b"".join(DIGEST.pack(number, self._counts[number], self._xors[number]) for number in told),
        )


def _partitions(packed: bytes) -> list[int]:
    if len(packed) % 2:
        raise ProtocolError("differing: a part of a partition")
    return [partition for (partition,) in struct.iter_unpack("<H", packed) if partition < PARTITIONS]
