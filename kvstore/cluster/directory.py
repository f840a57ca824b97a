"""A home's part of the directory: which nodes have which blocks of its partitions, as far as they have told.

A hint, and never more: whoever reads a block at a holder checks its key, size and checksum. Each stream of batches
that a node begins has a number here. What a node that is gone has told stays under a number that nobody has any more:
answers leave it out at once, and `sweep` takes it away in small steps.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kvstore.cluster.batches import NAMES_MOST, TIER_INDICES, element, elements, numbers, pack, unpack
from kvstore.cluster.naming import PARTITIONS
from kvstore.errors import InvalidRequest, StaleLease
from kvstore.wire_cluster import HOLDING, STRIPE, Announce, Announced, Locate, Located

HOLDERS_MOST = 64  # of one block that an answer names
SOLE_MOST = 4096  # names that one answer tells its node
SOLE_KEPT_MOST = 1 << 16  # names that wait to be told to a node; it does not hear of more
GONE = 0  # a number that nobody ever has
_NOTHING: "Mapping[int, Holding]" = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Holding:
    """Which numbers have a block, each with its tiers, ascending. All blocks of which this is true share one."""

    pairs: tuple[tuple[int, int], ...]
    blocks: int = 0


@dataclass(slots=True)
class Tally:
    """Of what a node has in a partition."""

    blocks: int = 0
    count: int = 0  # of elements
    xor: int = 0  # of elements


@dataclass(slots=True)
class Holder:
    """A node that has begun a stream."""

    node: str
    epoch: int
    number: int
    sequence: int
    tallies: dict[int, Tally] = field(default_factory=dict)  # by partition
    sole: dict[int, int] = field(default_factory=dict)  # name -> partition: to be told
    told: tuple[bytes, bytes, bytes] = (b"", b"", b"")  # sole, shared and differing of the last answer


class Step(NamedTuple):
    """What becomes of a holding when a node says something of a block."""

    after: Holding | None
    changed: int  # tiers, as bits
    gained: int  # blocks that the node has more: -1, 0 or 1
    added: int  # elements that the node has more
    left: int | None  # who is the only one that has it since
    is_shared: bool  # the node has it, and others too


Steps = dict[tuple[Holding | None, int], Step]


class Directory:
    """What the holders have told of the partitions whose home this is."""

    def __init__(self) -> None:
        self._partitions: dict[int, dict[int, Holding]] = {}  # partition -> name -> holding
        self._holdings: dict[tuple[tuple[int, int], ...], Holding] = {}
        self._nodes: dict[str, Holder] = {}
        self._holders: dict[int, Holder] = {}  # by number
        self._last_number = 0
        self._unswept: set[int] = set()  # partitions in which numbers are that nobody has
        self._sweeping: tuple[int, list[int]] = (0, [])  # a partition, and its names that are left to look at

    @property
    def blocks(self) -> int:
        """Blocks that are known here, with those that wait to be swept."""
        return sum(map(len, self._partitions.values()))

    @property
    def holdings(self) -> int:
        """Pairs of a block and a living holder."""
        return sum(tally.blocks for holder in self._holders.values() for tally in holder.tallies.values())

    def apply(self, batch: Announce) -> Announced:
        """Take in a batch; one that was applied before changes nothing. Raises InvalidRequest if it makes no sense,
        StaleLease if a later start of that node has been heard of; neither changes anything."""
        records = unpack(batch)
        known = self._nodes.get(batch.node)
        if known is not None and batch.epoch < known.epoch:
            raise StaleLease(f"{batch.node}: epoch {batch.epoch} is over, {known.epoch} is here")
        if known is not None and known.epoch == batch.epoch and batch.sequence <= known.sequence:
            told = known.told if batch.sequence == known.sequence else (b"", b"", b"")
            return Announced(batch.id, known.sequence, False, *told)
        if batch.is_first:
            holder = self._begin(batch)
        elif known is None or known.epoch != batch.epoch:
            return Announced(batch.id, 0, is_gap=True)
        elif batch.sequence != known.sequence + 1:
            return Announced(batch.id, known.sequence, is_gap=True)
        else:
            holder = known
        holder.sequence = batch.sequence
        self._reset(holder, records.resets)
        shared = self._write(holder, records.partitions, records.names, records.tiers)
        differing = [
            partition
            for partition, count, xor in records.digests
            if _sums(holder.tallies.get(partition)) != (count, xor)
        ]
        holder.told = (pack("Q", self._take_sole(holder)), pack("Q", shared), pack("H", differing))
        return Announced(batch.id, holder.sequence, False, *holder.told)

    def locate(self, request: Locate) -> Located:
        """Who has these blocks; at most `HOLDERS_MOST` of each. Raises InvalidRequest if lengths do not agree."""
        names = numbers("Q", request.names)
        if len(names) > NAMES_MOST or len(request.stripes) % STRIPE.size:
            raise InvalidRequest("names: more than an answer can number, or a part of a stripe")
        found: list[Holding | None] = []
        start = 0
        for partition, count in STRIPE.iter_unpack(request.stripes):
            if partition >= PARTITIONS:
                raise InvalidRequest(f"partition {partition}: there are {PARTITIONS}")
            found += map(self._partitions.get(partition, _NOTHING).get, names[start : start + count])
            start += count
        if start != len(names):
            raise InvalidRequest(f"{len(names)} names in stripes of {start}")
        nodes: dict[str, int] = {}
        packed: list[bytes] = []
        which: dict[Holding | None, int] = {None: 0}
        for holding in dict.fromkeys(found):
            if holding is not None:
                told = self._told(holding, nodes)
                which[holding] = len(packed) + 1 if told else 0
                packed += [told] if told else []
        return Located(request.id, tuple(nodes), tuple(packed), pack("H", [which[holding] for holding in found]))

    def keep(self, is_mine: Callable[[int], bool]) -> None:
        """Drop the partitions that have another home now."""
        for partition in [partition for partition in self._partitions if not is_mine(partition)]:
            for holding in self._partitions.pop(partition).values():
                holding.blocks -= 1
                if not holding.blocks:
                    del self._holdings[holding.pairs]
            self._unswept.discard(partition)
            for holder in self._holders.values():
                holder.tallies.pop(partition, None)

    def forget(self, node: str, epoch: int) -> None:
        """This start of a node, or an earlier one, is gone. Answers leave it out from here on."""
        known = self._nodes.get(node)
        if known is not None and known.epoch <= epoch:
            self._end(known)

    def sweep(self, most: int) -> bool:
        """Look at `most` blocks for what is forgotten, and take it away. Whether there are more to look at."""
        while most > 0 and (self._sweeping[1] or self._unswept):
            if not self._sweeping[1]:
                partition = self._unswept.pop()
                self._sweeping = (partition, list(self._partitions.get(partition, ())))
            partition, waiting = self._sweeping
            some = waiting[-most:]
            del waiting[-most:]
            self._strip(partition, some)
            most -= max(1, len(some))
        return bool(self._sweeping[1] or self._unswept)

    def problems(self) -> Iterator[str]:
        """What in here does not agree, a sentence each."""
        uses: Counter[Holding] = Counter()
        tallies: dict[tuple[int, int], Tally] = {}
        for partition, blocks in self._partitions.items():
            uses.update(blocks.values())
            for name, holding in blocks.items():
                for number, tiers in holding.pairs:
                    tally = tallies.setdefault((number, partition), Tally())
                    tally.blocks += 1
                    tally.count += tiers.bit_count()
                    for bit in TIER_INDICES:
                        tally.xor ^= element(name, bit) if tiers >> bit & 1 else 0
                    if number not in self._holders and not self._will_sweep(partition):
                        yield f"block {name:x}: number {number} is gone, and nothing will take it away"
        for holding in uses.keys() | set(self._holdings.values()):
            is_known = self._holdings.get(holding.pairs) is holding
            if holding.blocks != uses[holding] or not holding.blocks or not is_known:
                yield f"holding {holding.pairs}: counts {holding.blocks} blocks, of {uses[holding]}"
            if not holding.pairs or list(holding.pairs) != sorted(dict(holding.pairs).items()):
                yield f"holding {holding.pairs}: not in order"
        for number, holder in self._holders.items():
            if self._nodes.get(holder.node) is not holder:
                yield f"{holder.node}: number {number} is not that of the node"
            counted = {partition for owner, partition in tallies if owner == number}
            for partition in counted | holder.tallies.keys():
                tally = holder.tallies.get(partition, Tally())
                found = tallies.get((number, partition), Tally())
                if tally != found:
                    yield f"{holder.node}, partition {partition}: counts {tally}, and has {found}"

    def _will_sweep(self, partition: int) -> bool:
        swept, waiting = self._sweeping
        return partition in self._unswept or (partition == swept and bool(waiting))

    def _begin(self, batch: Announce) -> Holder:
        """A stream of a node, whose earlier ones are forgotten."""
        known = self._nodes.get(batch.node)
        self._last_number += 1
        holder = Holder(batch.node, batch.epoch, self._last_number, batch.sequence)
        if known is not None:
            if known.epoch == batch.epoch:
                holder.sole = known.sole
            self._end(known)
        self._nodes[holder.node] = self._holders[holder.number] = holder
        return holder

    def _end(self, holder: Holder) -> None:
        del self._nodes[holder.node], self._holders[holder.number]
        self._unswept.update(partition for partition, tally in holder.tallies.items() if tally.blocks)

    def _reset(self, holder: Holder, partitions: Iterable[int]) -> None:
        """Forget what the node has told of these."""
        for partition in partitions:
            tally = holder.tallies.get(partition)
            if tally is not None and tally.blocks:
                blocks = self._partitions[partition].items()
                names = [name for name, holding in blocks if any(pair[0] == holder.number for pair in holding.pairs)]
                self._write(holder, [partition] * len(names), names, bytes(len(names)))

    def _write(self, holder: Holder, partitions: Sequence[int], names: Sequence[int], tiers: bytes) -> list[int]:
        """The node has these blocks in these tiers, and in no other. Returns the names of those that others have."""
        steps: Steps = {}
        shared: list[int] = []
        words = np.array(names, np.uint64)
        xors: dict[int, list[int]] = {}  # of each name's elements, by tiers
        for position, (partition, name, told) in enumerate(zip(partitions, names, tiers, strict=True)):
            blocks = self._partitions.get(partition)
            if blocks is None:
                blocks = self._partitions[partition] = {}
            before = blocks.get(name)
            step = steps.get((before, told))
            if step is None:
                step = steps[before, told] = self._step(before, holder.number, told)
            if step.after is not before:
                self._trade(blocks, name, before, step.after)
            if step.changed:
                if step.changed not in xors:
                    xors[step.changed] = elements(words, step.changed).tolist()
                tally = holder.tallies.get(partition)
                if tally is None:
                    tally = holder.tallies[partition] = Tally()
                tally.blocks += step.gained
                tally.count += step.added
                tally.xor ^= xors[step.changed][position]
            if step.left is not None:
                self._is_left(step.left, name, partition)
            if step.is_shared:
                shared.append(name)
        self._settle(steps)
        return shared

    def _step(self, before: Holding | None, number: int, tiers: int) -> Step:
        """What a holding becomes when this number has the block in `tiers`; what nobody has any more goes too."""
        pairs = before.pairs if before is not None else ()
        had = dict(pairs).get(number, 0)
        others = [pair for pair in pairs if pair[0] != number and pair[0] in self._holders]
        after = self._shared(tuple(sorted([*others, (number, tiers)] if tiers else others)))
        return Step(
            after=after,
            changed=had ^ tiers,
            gained=bool(tiers) - bool(had),
            added=tiers.bit_count() - had.bit_count(),
            left=_only(before, after),
            is_shared=bool(tiers and others),
        )

    def _strip(self, partition: int, names: Iterable[int]) -> None:
        """Take away the numbers that nobody has."""
        steps: Steps = {}
        blocks = self._partitions.get(partition, {})
        for name in names:
            before = blocks.get(name)
            if before is None:
                continue
            step = steps.get((before, 0))
            if step is None:
                step = steps[before, 0] = self._step(before, GONE, 0)
            if step.after is not before:
                self._trade(blocks, name, before, step.after)
            if step.left is not None:
                self._is_left(step.left, name, partition)
        self._settle(steps)

    def _shared(self, pairs: tuple[tuple[int, int], ...]) -> Holding | None:
        """The one of these pairs; None of none."""
        if not pairs:
            return None
        holding = self._holdings.get(pairs)
        if holding is None:
            holding = self._holdings[pairs] = Holding(pairs)
        return holding

    @staticmethod
    def _trade(blocks: dict[int, Holding], name: int, before: Holding | None, after: Holding | None) -> None:
        if before is not None:
            before.blocks -= 1
        if after is None:
            del blocks[name]
        else:
            after.blocks += 1
            blocks[name] = after

    def _settle(self, steps: Steps) -> None:
        """Drop the holdings that are of no block since these steps."""
        touched = {step.after for step in steps.values()} | {before for before, _ in steps}
        for holding in touched:
            if holding is not None and not holding.blocks:
                del self._holdings[holding.pairs]

    def _is_left(self, number: int, name: int, partition: int) -> None:
        sole = self._holders[number].sole
        if len(sole) < SOLE_KEPT_MOST:
            sole[name] = partition

    def _take_sole(self, holder: Holder) -> list[int]:
        """Names to tell the node now: those of which it is the only holder still."""
        some = list(islice(holder.sole.items(), SOLE_MOST))
        for name, _ in some:
            del holder.sole[name]
        found = []
        for name, partition in some:
            holding = self._partitions.get(partition, _NOTHING).get(name)
            numbers = [number for number, _ in holding.pairs if number in self._holders] if holding is not None else []
            if numbers == [holder.number]:
                found.append(name)
        return found

    def _told(self, holding: Holding, nodes: dict[str, int]) -> bytes:
        """Its living holders as HOLDING each, by their places in `nodes`, which grows."""
        living = (pair for pair in holding.pairs if pair[0] in self._holders)
        return b"".join(
            HOLDING.pack(nodes.setdefault(self._holders[number].node, len(nodes)), tiers)
            for number, tiers in islice(living, HOLDERS_MOST)
        )


def _only(before: Holding | None, after: Holding | None) -> int | None:
    """Who has it alone since others have it no more."""
    if before is None or after is None or len(before.pairs) == 1 or len(after.pairs) > 1:
        return None
    return after.pairs[0][0]


def _sums(tally: Tally | None) -> tuple[int, int]:
    return (tally.count, tally.xor) if tally is not None else (0, 0)
