"""What may be written to a disk that wears out: blocks that were of use twice, within a budget of bytes per day."""

from kvstore.types import BlockKey

DAY_S = 86_400.0
BURST_S = 3600.0  # of the budget may be spent at once
SKETCH_BITS = 1 << 23  # 1 MiB for each of two; false answers stay under 1 % up to 800,000 keys
SKETCH_KEYS = 800_000  # remembered before the older half is forgotten
PROBES = 4


class Seen:
    """Two Bloom filters of keys, the older of which is forgotten when the newer is full."""

    def __init__(self, bits: int = SKETCH_BITS, keys: int = SKETCH_KEYS) -> None:
        assert bits & (bits - 1) == 0
        self._mask = bits - 1
        self._bits = bits
        self._keys = keys
        self._added = 0
        self._new = bytearray(bits // 8)
        self._old = bytearray(bits // 8)

    def add(self, key: BlockKey) -> None:
        if self._added >= self._keys:
            self._old, self._new, self._added = self._new, bytearray(self._bits // 8), 0
        self._added += 1
        for bit in self._places(key):
            self._new[bit >> 3] |= 1 << (bit & 7)

    def __contains__(self, key: BlockKey) -> bool:
        places = self._places(key)
        return any(all(bits[bit >> 3] & 1 << (bit & 7) for bit in places) for bits in (self._new, self._old))

    def _places(self, key: BlockKey) -> list[int]:
        """Keys are hashes already; a part's number is taken in as well."""
        first = int.from_bytes(key[:8], "little") + int.from_bytes(key[16:], "little")
        step = int.from_bytes(key[8:16], "little") | 1
        return [first + probe * step & self._mask for probe in range(PROBES)]


class Budget:
    """Bytes that may be written per day, as a bucket that fills steadily; 0 is no limit."""

    def __init__(self, bytes_per_day: int, now: float) -> None:
        self._rate = bytes_per_day / DAY_S
        self._left = self._rate * BURST_S
        self._at = now

    def take(self, size: int, now: float) -> bool:
        """Whether `size` bytes may be written now; they are counted then."""
        if not self._rate:
            return True
        self._left = min(self._left + self._rate * (now - self._at), self._rate * BURST_S)
        self._at = now
        if self._left < size:
            return False
        self._left -= size
        return True


class Admission:
    """With `everything` a block is admitted at once; else it must have been used, or have been here before."""

    def __init__(self, *, everything: bool, bytes_per_day: int, now: float) -> None:
        self._everything = everything
        self._seen = Seen()
        self._budget = Budget(bytes_per_day, now)
        self.admitted_bytes = 0
        self.unused_blocks = 0  # not admitted: used once
        self.over_budget_blocks = 0

    def admits_early(self, key: BlockKey, hits: int, size: int, now: float) -> bool:
        """Decide about a block that stays where it is for now."""
        is_of_use = self._everything or hits > 0 or key in self._seen
        return is_of_use and self._admits(size, now)

    def admits(self, key: BlockKey, hits: int, size: int, now: float) -> bool:
        """Decide about a block that is to leave the tier above, and remember that it was there."""
        if not self._everything and not hits and key not in self._seen:
            self._seen.add(key)
            self.unused_blocks += 1
            return False
        return self._admits(size, now)

    def affords(self, size: int, now: float) -> bool:
        """Decide about a block that somebody asks to have written, by the budget alone."""
        return self._admits(size, now)

    def _admits(self, size: int, now: float) -> bool:
        if not self._budget.take(size, now):
            self.over_budget_blocks += 1
            return False
        self.admitted_bytes += size
        return True
