"""A process that stores and evicts over few slots as fast as it goes, until its standard input ends.

    python -m tests.unit.churning_writer INDEX_FD SLOTS_FD

Says so once it is in full swing. Each payload is its key's number and its generation, over and over.
"""

import random
import select
import struct
import sys

from kvstore.copier import checksum
from kvstore.published import READABLE, PublishedIndex, ident, index_bytes
from kvstore.region import Region
from kvstore.types import BlockKey

ENTRIES, SLOTS, SLOT_BYTES, KEYS = 16, 6, 4096, 8
PATTERN = struct.Struct("<QQ")


def name_of(number: int) -> bytes:
    """All begin at the table's last bucket."""
    return ident(1, BlockKey((ENTRIES - 1).to_bytes(8, "little") + bytes([number]) * 8))


def payload_of(number: int, generation: int) -> bytes:
    return PATTERN.pack(number, generation) * (SLOT_BYTES // PATTERN.size)


def churn(index: PublishedIndex, slots: Region) -> None:
    stored: dict[int, int] = {}  # key's number: slot
    free = list(range(SLOTS))
    chance, generation = random.Random(3), 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(100):
            number = chance.randrange(KEYS)
            if number in stored:
                index.remove(name_of(number))
                free.append(stored.pop(number))
            elif free:
                generation += 1
                slot = stored[number] = free.pop()
                payload = payload_of(number, generation)
                slots.view(slot * SLOT_BYTES, SLOT_BYTES)[:] = payload
                place = (1, slot * SLOT_BYTES, SLOT_BYTES, checksum(payload), generation)
                index.publish(name_of(number), (READABLE, 1, 1), place)
                if generation == 1000:
                    print("in full swing", flush=True)


if __name__ == "__main__":
    index_fd, slots_fd = map(int, sys.argv[1:])
    memory = Region(index_fd, index_bytes(ENTRIES), writable=True, populate=True).memory
    churn(PublishedIndex(memory, ENTRIES, 1), Region(slots_fd, SLOTS * SLOT_BYTES, writable=True, populate=True))
