"""What this node holds, as its homes are told: follows the table's changes, block by block."""

from array import array
from collections.abc import Callable, Iterator, Sequence

from kvstore.catalogue import Catalogue, OpenNamespace
from kvstore.cluster.announcer import Announcer
from kvstore.cluster.locating import Place, place_after, places_of
from kvstore.cluster.naming import name_of, partition_of
from kvstore.store import Store
from kvstore.table import Event, Replica
from kvstore.types import DRAM, KEY_BYTES, BlockKey, Change, State
from kvstore.wire_cluster import TIER_BITS

Block = tuple[int, BlockKey]  # number of its namespace, key
Telling = tuple[int, BlockKey, int]  # a block, and the partition in which it is told: it may have come back in another
SCAN_BLOCKS = 2048  # looked at between two turns of the event loop


class Holdings:
    """`note` hears of each change; `adrift` counts blocks whose place in their chain is not known here."""

    def __init__(self, store: Store, announcer: Announcer) -> None:
        self._store = store
        self._catalogue: Catalogue = store.catalogue
        self._announcer = announcer
        self._copies: dict[int, Block] = {}  # by name: blocks that others have too, and that go first
        self._restored = [
            replica
            for space in store.table.spaces()
            for replica in space.replicas.values()
            if replica.state is State.WRITTEN and replica.partition < 0
        ]
        self._begun: dict[Replica, Place] = {}  # of blocks that are being written, where it is known
        self.adrift = 0
        self.stored: Callable[[OpenNamespace, Replica], None] = lambda space, replica: None

    def note(self, events: Sequence[Event]) -> None:
        """What the table changed."""
        for event in events:
            if event.change is Change.COMMITTED:
                self._came(event.replica)
            elif event.change is Change.RESTORED:
                self._restored.append(event.replica)
            elif event.change is Change.REMOVED:
                self._begun.pop(event.replica, None)
                if event.replica.partition >= 0:
                    self._went(event.replica)

    def take_up_restored(self) -> Iterator[int]:
        """Announce what an earlier start left, or was here before this, a step at a time: parents are there by now."""
        restored, self._restored = self._restored, []
        for at, replica in enumerate(restored):
            if replica.state is State.WRITTEN and replica.partition < 0:
                self._came(replica)
            if at % SCAN_BLOCKS == SCAN_BLOCKS - 1:
                yield at
        yield len(restored)

    def note_again(self, partitions: set[int]) -> Iterator[int]:
        """Everything that is in these partitions is to be told anew; a step at a time."""
        seen = 0
        for space in list(self._catalogue.all()):
            for tier_space in space.spaces:
                for key in list(tier_space.replicas):
                    replica = tier_space.replicas.get(key)
                    if replica is not None and replica.partition in partitions and replica.state is State.WRITTEN:
                        self._announcer.note(replica.partition, (space.number, key, replica.partition))
                    seen += 1
                    if seen % SCAN_BLOCKS == 0:
                        yield seen
        yield seen

    def describe(self, telling: Telling) -> tuple[int, int]:
        """(Name, tiers that have it now, in that partition)."""
        number, key, partition = telling
        space = self._catalogue.of_number(number)
        assert space is not None, "namespaces are never closed"
        tiers = 0
        for tier_space in space.spaces:
            replica = tier_space.replicas.get(key)
            if replica is not None and replica.state is State.WRITTEN and replica.partition == partition:
                tiers |= TIER_BITS[tier_space.tier]
        return name_of(space.root, key), tiers

    # Copies.

    def pulled(self, replica: Replica, place: Place) -> None:
        """It comes from a node that has it, and is about to be committed."""
        space = self._catalogue.of_number(replica.space.number)
        assert space is not None, "namespaces are never closed"
        same = self._anywhere(space, replica.key)
        is_known = same is not None and same.partition >= 0
        replica.partition, replica.position = (same.partition, same.position) if same and is_known else place
        self.copied(replica)

    def copied(self, replica: Replica) -> None:
        """It was pulled from a node that has it."""
        space = self._catalogue.of_number(replica.space.number)
        assert space is not None, "namespaces are never closed"
        self._store.table.mark_copy(replica, is_copy=True)
        self._copies[name_of(space.root, replica.key)] = space.number, replica.key

    def shared(self, packed: bytes, told: dict[int, Block]) -> None:
        """Of the blocks that were just told others have these too: one of the two may go early. Not so the rest."""
        known = set(_names(packed))
        for name, block in told.items():
            replica = self._in_dram(block)
            if replica is None:
                continue
            if name not in known:
                self._copies.pop(name, None)
                self._store.table.mark_copy(replica, is_copy=False)
            elif not replica.is_copy and self._wants_one(replica):
                self.copied(replica)

    def sole(self, packed: bytes) -> None:
        """Nobody else has these any more."""
        for name in _names(packed):
            block = self._copies.pop(name, None)
            replica = self._in_dram(block) if block is not None else None
            if replica is not None:
                self._store.table.mark_copy(replica, is_copy=False)

    def keep(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> None:
        """These are to stay like blocks that were put here."""
        for key in keys:
            self._copies.pop(name_of(space.root, key), None)
            replica = self._in_dram((space.number, key))
            if replica is not None:
                self._store.table.mark_copy(replica, is_copy=False)

    @property
    def copies(self) -> int:
        return len(self._copies)

    def _wants_one(self, replica: Replica) -> bool:
        space = self._catalogue.of_number(replica.space.number)
        return space is not None and space.replicas < 2

    def _in_dram(self, block: Block) -> Replica | None:
        space = self._catalogue.of_number(block[0])
        return self._store.table.readable(space.dram, block[1]) if space is not None else None

    # Places.

    def begun(self, space: OpenNamespace, keys: Sequence[BlockKey], replicas: Sequence[Replica]) -> None:
        """These are being written, of a run of keys that begins its chain: so the place of each is known."""
        places = places_of(space.root, keys, Place(partition_of(space.root, keys[0]), 0))
        by_key = dict(zip(keys, places, strict=True))
        self._begun.update((replica, by_key[replica.key]) for replica in replicas)

    def _came(self, replica: Replica) -> None:
        space = self._catalogue.of_number(replica.space.number)
        assert space is not None, "namespaces are never closed"
        place = self._begun.pop(replica, None)
        if replica.partition < 0:
            self._place(space, replica, place)
        self._tell(space, replica)
        if replica.space.tier == DRAM:
            self.stored(space, replica)

    def _went(self, replica: Replica) -> None:
        space = self._catalogue.of_number(replica.space.number)
        assert space is not None, "namespaces are never closed"
        name = name_of(space.root, replica.key)
        index = TIER_BITS[replica.space.tier].bit_length() - 1
        self._announcer.toggle(replica.partition, name, index, is_there=False)
        self._announcer.note(replica.partition, (space.number, replica.key, replica.partition))
        if replica.space.tier == DRAM:
            self._copies.pop(name, None)

    def _place(self, space: OpenNamespace, replica: Replica, place: Place | None) -> None:
        """As in its other tiers, or at `place`; or by what is before it, up the chain to a block whose place is known,
        and down."""
        same = self._anywhere(space, replica.key)
        if same is not None and same.partition >= 0:
            place = Place(same.partition, same.position)
        if place is not None:
            replica.partition, replica.position = place
            return
        chain = [replica]
        known: Place | None = None
        while known is None and chain[-1].parent is not None:
            above = self._anywhere(space, chain[-1].parent)
            if above is None or len(chain) > self._store.limits.batch_blocks:
                self.adrift += 1
                break
            if above.partition >= 0:
                known = Place(above.partition, above.position)
            else:
                chain.append(above)
        for below in reversed(chain):
            key = BlockKey(below.key[:KEY_BYTES])
            known = place_after(known, space.root, key) if known else Place(partition_of(space.root, key), 0)
            below.partition, below.position = known
            if below is not replica and below.state is State.WRITTEN:
                self._tell(space, below)  # it was restored, and waits to be announced: that happens now

    def _tell(self, space: OpenNamespace, replica: Replica) -> None:
        index = TIER_BITS[replica.space.tier].bit_length() - 1
        self._announcer.toggle(replica.partition, name_of(space.root, replica.key), index, is_there=True)
        self._announcer.note(replica.partition, (space.number, replica.key, replica.partition))

    def _anywhere(self, space: OpenNamespace, key: BlockKey) -> Replica | None:
        found = None
        for tier_space in space.spaces:
            replica = tier_space.replicas.get(key)
            if replica is not None and replica.state is State.WRITTEN:
                if replica.partition >= 0:
                    return replica
                found = found or replica
        return found


def _names(packed: bytes) -> "array[int]":
    names = array("Q")
    names.frombytes(packed[: len(packed) // 8 * 8])
    return names
