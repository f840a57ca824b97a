"""What this node knows of the packs in a bucket: root -> key -> where the block lies.

At most 200 bytes a block, the key included. Pure: no I/O, no clock.
"""

import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvstore.compression import CodecName
from kvstore.tiers.packs import CODEC_NAMES, CODEC_NUMBERS, PackedBlock

ENTRY = struct.Struct("<IQIIQB")  # number of the pack, offset, bytes stored, of the block, checksum, codec
MAX_PACKS = 100_000
"""About 500 bytes each; beyond, what was not used for longest is not known any more."""


class Pack:
    """A pack that is known. `keys` is empty when its blocks are not, to stay within the limit, or it has none."""

    __slots__ = ("identifier", "keys", "number", "root", "size_bytes", "used_s")

    def __init__(self, number: int, root: bytes, identifier: str, size_bytes: int) -> None:
        self.number = number
        self.root = root
        self.identifier = identifier
        self.size_bytes = size_bytes
        self.keys: tuple[bytes, ...] = ()
        self.used_s = 0.0  # wall clock of the last read by this node; 0: none yet


class Location(NamedTuple):
    """Where a block lies, and what it must be."""

    pack: Pack
    offset: int
    stored_bytes: int
    raw_bytes: int
    checksum: int
    codec: CodecName


class PackMap:
    """At most `max_blocks` blocks: beyond, those of the packs that were not used for longest are forgotten."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._roots: dict[bytes, dict[bytes, bytes]] = {}
        self._packs: dict[bytes, dict[str, Pack]] = {}
        self._by_use: OrderedDict[int, Pack] = OrderedDict()
        self._next = 0
        self.blocks = 0
        self.size_bytes = 0
        self.stored_bytes = 0
        self.raw_bytes = 0

    @property
    def packs(self) -> int:
        return len(self._by_use)

    def knows(self, root: bytes, identifier: str) -> bool:
        return identifier in self._packs.get(root, ())

    def identifiers(self, root: bytes) -> set[str]:
        return set(self._packs.get(root, ()))

    def roots(self) -> list[bytes]:
        return list(self._packs)

    def all_packs(self) -> Iterator[Pack]:
        return iter(self._by_use.values())

    def add(self, root: bytes, identifier: str, size_bytes: int, blocks: Iterable[PackedBlock]) -> Pack:
        """Know a pack that was not known; of several that hold a key, the last one added is read."""
        assert not self.knows(root, identifier), identifier
        pack = Pack(self._next, root, identifier, size_bytes)
        self._next = (self._next + 1) % (1 << 32)
        self._by_use[pack.number] = pack
        self._packs.setdefault(root, {})[identifier] = pack
        self.size_bytes += size_bytes
        entries = self._roots.setdefault(root, {})
        keys = []
        for block in blocks:
            self._remove(entries, block.key)
            code = CODEC_NUMBERS[block.codec]
            sizes = (block.stored_bytes, block.raw_bytes)
            entries[block.key] = ENTRY.pack(pack.number, block.offset, *sizes, block.checksum, code)
            self._count(*sizes, by=1)
            keys.append(block.key)
        pack.keys = tuple(keys)
        self._keep_limits()
        return pack

    def find(self, root: bytes, key: bytes) -> Location | None:
        entry = self._roots.get(root, {}).get(key)
        if entry is None:
            return None
        number, offset, stored, raw, checksum, code = ENTRY.unpack(entry)
        return Location(self._by_use[number], offset, stored, raw, checksum, CODEC_NAMES[code])

    def touch(self, pack: Pack, used_s: float) -> None:
        """A block of it was read. Nothing if it is not known any more."""
        if pack.number in self._by_use:
            pack.used_s = used_s
            self._by_use.move_to_end(pack.number)

    def forget(self, root: bytes, keys: Iterable[bytes], pack: Pack | None = None) -> int:
        """Do not know these blocks any more, of `pack` only if one is given; how many were known."""
        entries = self._roots.get(root, {})
        gone = 0
        for key in keys:
            if key in entries and (pack is None or ENTRY.unpack(entries[key])[0] == pack.number):
                gone += self._remove(entries, key)
        return gone

    def shed(self, pack: Pack) -> None:
        """Forget its blocks, and go on knowing that there is such a pack."""
        self.forget(pack.root, pack.keys, pack)
        pack.keys = ()

    def drop(self, root: bytes, identifier: str) -> None:
        """The pack is gone. Nothing if it was not known."""
        pack = self._packs.get(root, {}).get(identifier)
        if pack is None:
            return
        self.shed(pack)
        self.size_bytes -= pack.size_bytes
        del self._by_use[pack.number]
        del self._packs[root][identifier]
        if not self._packs[root]:
            del self._packs[root]
            self._roots.pop(root, None)

    def drop_root(self, root: bytes) -> None:
        for identifier in list(self._packs.get(root, ())):
            self.drop(root, identifier)

    def _remove(self, entries: dict[bytes, bytes], key: bytes) -> int:
        entry = entries.pop(key, None)
        if entry is None:
            return 0
        _, _, stored, raw, _, _ = ENTRY.unpack(entry)
        self._count(stored, raw, by=-1)
        return 1

    def _count(self, stored: int, raw: int, *, by: int) -> None:
        self.blocks += by
        self.stored_bytes += by * stored
        self.raw_bytes += by * raw

    def _keep_limits(self) -> None:
        while len(self._by_use) > MAX_PACKS:
            oldest = next(iter(self._by_use.values()))
            self.drop(oldest.root, oldest.identifier)
        if self.blocks > self._max_blocks:
            for pack in [pack for pack in self._by_use.values() if pack.keys]:
                self.shed(pack)
                if self.blocks <= self._max_blocks * 0.9:  # so that the next packs find room without a search
                    break
