"""What an engine tells of its KV cache, in vLLM's and SGLang's words, as blocks of ours in the index.

    batch   [time, [event...], rank]  or the same as a map with "events" and "data_parallel_rank"
    event   a map with "type", or [type, field...]: BlockStored, BlockRemoved, AllBlocksCleared

An engine has hashes of its own. Ours are computed from the tokens of the event and the key of its parent, so a block
whose parent or tokens are not known has no place. Engines tell of the same block several times, for each rank and each
group of layers: it is gone when it was removed as often as it was stored.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvstore.prefix import chain
from kvstore.types import KEY_BYTES, BlockKey
from scheduler.index import PrefixIndex
from scheduler.requests import names_of
from server.conductor.chains import Scheme

log = logging.getLogger("cairn.conductor.engines")

MOST_BLOCKS: Final = 2_000_000  # of one engine, at some 250 bytes: 32 M tokens in blocks of 16
MOST_RANKS: Final = 1024
MOST_CHANGES: Final = 65_536  # that the index is not told of yet
TIERS: Final = 3
MEDIA: Final[dict[object, int]] = {
    **dict.fromkeys((None, "GPU"), 0),
    **dict.fromkeys(("CPU", "CPU_PINNED"), 1),
    **dict.fromkeys(("STORAGE", "DISK", "EXTERNAL"), 2),
}
FIELDS: Final[dict[object, tuple[str, ...]]] = {  # of the older form, in which an event is a list
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
}
FOREIGN_FIELDS: Final = ("lora_id", "lora_name", "cache_salt")  # set: no plain prompt has these blocks
HASH_MASK: Final = 2**64 - 1

_decode = msgspec.msgpack.Decoder().decode


class GarbledError(ValueError):
    """A batch, or an event in it, is not what an engine sends."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow one another. `plain`: how many of them, from the first, plain prompts may have."""

    hashes: list[int]
    keys: list[bytes]  # the hashes as they came, where they were bytes
    parent: int | None
    tokens: Sequence[Any]
    block_tokens: int
    tier: int
    plain: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Once less each, of what may never have been stored."""

    hashes: list[int]
    tier: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Of this rank nothing is left."""


Event = Stored | Removed | Cleared


@dataclass(slots=True)
class Counts:
    """Blocks: placed ones came into the index; the others did not, because

    unplaced: their parent or tokens were not known; foreign: they are of an adapter, a salt, or an image; odd_size:
    they have another size than the engine's first; left_out: there were too many. garbled: batches and events.
    """

    placed: int = 0
    unplaced: int = 0
    foreign: int = 0
    odd_size: int = 0
    left_out: int = 0
    garbled: int = 0


def decode_batch(payload: bytes) -> tuple[int, list[Any]]:
    """The rank, and the events as they came. Raises GarbledError."""
    try:
        batch = _decode(payload)
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
        raise GarbledError(f"no MessagePack: {error}") from error
    if isinstance(batch, Mapping):
        events, rank = batch.get("events"), batch.get("data_parallel_rank")
    elif isinstance(batch, list) and len(batch) >= 2:
        events, rank = batch[1], batch[2] if len(batch) > 2 else None
    else:
        raise GarbledError("a batch is a list or a map")
    if not isinstance(events, list) or not isinstance(rank, int | None):
        raise GarbledError("a batch has a list of events, and a number as its rank")
    return rank or 0, events


def decode_event(raw: Any) -> Event | None:
    """None for an event of a type or medium that is not known. Raises GarbledError."""
    if isinstance(raw, Mapping):
        fields, kind = raw, raw.get("type")
    elif isinstance(raw, list) and raw and isinstance(raw[0], str):
        kind = raw[0]
        fields = dict(zip(FIELDS.get(kind, ()), raw[1:], strict=False))
    else:
        raise GarbledError("an event is a list or a map")
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind not in ("BlockStored", "BlockRemoved"):
        return None
    medium, raw_hashes = fields.get("medium"), fields.get("block_hashes")
    if not isinstance(raw_hashes, list) or not isinstance(medium, str | None):
        raise GarbledError(f"{kind} has no list of hashes, or a medium that is no text")
    if medium not in MEDIA:
        return None
    hashes = [_hash(each) for each in raw_hashes]
    return Removed(hashes, MEDIA[medium]) if kind == "BlockRemoved" else _stored(fields, raw_hashes, hashes)


def _stored(fields: Mapping[Any, Any], raw_hashes: list[Any], hashes: list[int]) -> Stored:
    parent, tokens, block_tokens = (fields.get(name) for name in ("parent_block_hash", "token_ids", "block_size"))
    extra_keys = fields.get("extra_keys")
    if not isinstance(tokens, list | None) or not isinstance(extra_keys, list | None):
        raise GarbledError("token_ids and extra_keys are lists")
    if type(block_tokens) is not int or not 1 <= block_tokens <= 65_536:
        raise GarbledError(f"a block_size of {block_tokens!r}")
    plain = 0 if any(fields.get(name) not in (None, "") for name in FOREIGN_FIELDS) else len(hashes)
    for position, extra in enumerate(extra_keys or ()):
        if extra:
            plain = min(plain, position)
    return Stored(
        hashes,
        [each for each in raw_hashes if isinstance(each, bytes)],
        None if parent is None else _hash(parent),
        tokens or (),
        block_tokens,
        MEDIA[fields.get("medium")],
        plain,
    )


def _hash(raw: Any) -> int:
    """64 bits of it: what an engine has at a time collides in them once in a million runs."""
    if isinstance(raw, bytes) and len(raw) >= 8:
        return int.from_bytes(raw[:8], "little")
    if type(raw) is int:
        return raw & HASH_MASK
    raise GarbledError(f"a hash is bytes or a number, not {type(raw).__name__}")


class EngineBlocks:
    """One engine's blocks, by our keys. `take` what it sends; `tell_index` after some of it.

    scheme: how prompts are named for it; its block size gives way to that of the first event, as `block_tokens`.
    hashes_are_keys: the hashes are our keys already, 16 bytes each, and events need no tokens.
    `is_complete`: what it has is known, from its beginning on.
    """

    def __init__(
        self,
        index: PrefixIndex,
        holder: int,
        scheme: Scheme,
        *,
        hashes_are_keys: bool = False,
        most_blocks: int = MOST_BLOCKS,
    ) -> None:
        self.counts = Counts()
        self.block_tokens = scheme.block_tokens
        self.is_complete = False
        self._index = index
        self._holder = holder
        self._scheme = scheme
        self._hashes_are_keys = hashes_are_keys
        self._most_blocks = most_blocks
        self._keys: dict[int, BlockKey] = {}  # of what is in any tier of any rank
        self._ranks: dict[int, tuple[dict[int, int], ...]] = {}  # for each tier: hash -> how often it was stored
        self._has_size = False
        self._changes: dict[tuple[int, BlockKey], bool] = {}  # untold: the last word on each block

    def __len__(self) -> int:
        return len(self._keys)

    def forget(self) -> None:
        """It has nothing, and from here on all is told."""
        self._clear_all()
        self._has_size = False
        self.is_complete = True

    def missed(self) -> None:
        """Something was not told, or not understood."""
        self.is_complete = False

    def take(self, payload: bytes) -> None:
        """One batch. What is garbled in it counts as missed; the rest is taken."""
        try:
            rank, events = decode_batch(payload)
        except GarbledError as error:
            self._garbled(error)
            return
        for raw in events:
            try:
                event = decode_event(raw)
            except GarbledError as error:
                self._garbled(error)
                continue
            if event is not None:
                self._apply(rank, event)
        if len(self._changes) >= MOST_CHANGES:
            self.tell_index()

    def tell_index(self) -> None:
        """What the batches since the last time have changed: the index is quicker with many blocks at once."""
        changes, self._changes = self._changes, {}
        for tier in range(TIERS):
            for is_stored, tell in ((False, self._index.removed), (True, self._index.stored)):
                keys = [key for (where, key), what in changes.items() if where == tier and what is is_stored]
                if keys:
                    tell(self._holder, tier, names_of(b"".join(keys)))

    def _garbled(self, error: GarbledError) -> None:
        if not self.counts.garbled:
            log.warning("events of an engine are not understood: %s", error)
        self.counts.garbled += 1
        self.missed()

    def _apply(self, rank: int, event: Event) -> None:
        if rank not in self._ranks:
            if len(self._ranks) == MOST_RANKS:
                self._garbled(GarbledError(f"more than {MOST_RANKS} ranks"))
                return
            self._ranks[rank] = tuple({} for _ in range(TIERS))
        if isinstance(event, Stored):
            self._store(self._ranks[rank], event)
        elif isinstance(event, Removed):
            for hashed in event.hashes:
                self._remove(self._ranks[rank], event.tier, hashed)
        else:
            self._clear(rank)

    def _store(self, tiers: tuple[dict[int, int], ...], event: Stored) -> None:
        self.counts.foreign += len(event.hashes) - event.plain
        hashes = event.hashes[: event.plain]
        keys = self._place(hashes, event)
        if not keys:
            return
        if len(self._keys) + sum(hashed not in self._keys for hashed in hashes) > self._most_blocks:
            self.counts.left_out += len(keys)
            self.missed()
            return
        times = tiers[event.tier]
        for hashed, key in zip(hashes, keys, strict=True):
            key = self._keys.setdefault(hashed, key)
            times[hashed] = times.get(hashed, 0) + 1
            self._changes[event.tier, key] = True
        self.counts.placed += len(keys)

    def _place(self, hashes: list[int], event: Stored) -> list[BlockKey]:
        """Their keys; none if they cannot be placed."""
        if self._hashes_are_keys:
            keys = [BlockKey(key) for key in event.keys if len(key) == KEY_BYTES][: len(hashes)]
            self.counts.unplaced += len(hashes) - len(keys)
            return keys if len(keys) == len(hashes) else []
        if all(hashed in self._keys for hashed in hashes):
            return [self._keys[hashed] for hashed in hashes]
        parent = BlockKey(self._scheme.root) if event.parent is None else self._keys.get(event.parent)
        size = event.block_tokens
        if parent is None or len(event.tokens) != size * len(event.hashes):
            self.counts.unplaced += len(hashes)
            return []
        if not self._has_size:
            self._has_size, self.block_tokens = True, size
        if size != self.block_tokens:
            self.counts.odd_size += len(hashes)
            return []
        try:
            return chain(event.tokens[: size * len(hashes)], size, parent, self._scheme.hash)
        except ValueError:  # pairs of tokens, as speculative decoding caches them
            self.counts.unplaced += len(hashes)
            return []

    def _remove(self, tiers: tuple[dict[int, int], ...], tier: int, hashed: int) -> None:
        """One that is not known is of those that were not placed."""
        times = tiers[tier].get(hashed, 0)
        if times > 1:
            tiers[tier][hashed] = times - 1
        elif times:
            del tiers[tier][hashed]
            self._gone(tier, hashed)

    def _gone(self, tier: int, hashed: int) -> None:
        """A rank has it no more in this tier; perhaps others have."""
        if not any(hashed in tiers[tier] for tiers in self._ranks.values()):
            self._changes[tier, self._keys[hashed]] = False
            if not any(hashed in times for tiers in self._ranks.values() for times in tiers):
                del self._keys[hashed]

    def _clear(self, rank: int) -> None:
        if not any(times for other, tiers in self._ranks.items() if other != rank for times in tiers):
            self._clear_all()
            self.is_complete = True  # whatever was missed is gone too
            return
        for tier, times in enumerate(self._ranks[rank]):
            while times:
                self._gone(tier, times.popitem()[0])
        del self._ranks[rank]

    def _clear_all(self) -> None:
        self._keys.clear()
        self._ranks.clear()
        self._changes.clear()
        self._index.forget(self._holder)
