"""What engines tell of their blocks: every form they use, counted references, and what is not understood."""

import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.prefix import chain
from kvstore.types import BlockKey
from scheduler.index import PrefixIndex
from scheduler.requests import names_of
from server.conductor.chains import Scheme
from server.conductor.engine_blocks import EngineBlocks

ROOT = BlockKey(bytes(range(16)))
SIZE = 4
TOKENS = list(range(100, 100 + 8 * SIZE))
KEYS = chain(TOKENS, SIZE, ROOT)


def hash_of(block: int, salt: int = 0) -> bytes:
    return random.Random(block * 1000 + salt).randbytes(32)


def stored(first: int, stop: int, **changes: Any) -> dict[str, Any]:
    """As vLLM tells of blocks [first, stop) of TOKENS."""
    return {
        "type": "BlockStored",
        "block_hashes": [hash_of(block) for block in range(first, stop)],
        "parent_block_hash": hash_of(first - 1) if first else None,
        "token_ids": TOKENS[first * SIZE : stop * SIZE],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | changes


def removed(*blocks: int, medium: str | None = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [hash_of(block) for block in blocks], "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


class Engine:
    """Its blocks, and the index that they are in."""

    def __init__(self, **options: Any) -> None:
        self.index = PrefixIndex()
        self.holder = self.index.holder("engine:here")
        self.blocks = EngineBlocks(self.index, self.holder, Scheme(SIZE, "xxh3", ROOT), **options)
        self.blocks.forget()

    def take(self, *events: Any, rank: int | None = None) -> "Engine":
        self.blocks.take(msgspec.msgpack.encode([1.0, list(events), rank]))
        self.blocks.tell_index()
        return self

    @property
    def tiers(self) -> list[int]:
        """Of TOKENS' blocks from the first on: in hbm, in hbm or dram, anywhere."""
        return self.index.prefixes(names_of(b"".join(KEYS)))[self.holder].tolist()


def test_blocks_get_our_names_through_their_parents():
    engine = Engine().take(stored(0, 3)).take(stored(3, 8))
    assert engine.tiers == [8, 8, 8]
    assert engine.index.blocks == len(engine.blocks) == engine.blocks.counts.placed == 8
    assert engine.blocks.is_complete


@pytest.mark.parametrize(
    "number",
    [
        lambda hashed: int.from_bytes(hashed[:8], "big", signed=True),
        lambda hashed: int.from_bytes(hashed[:8], "big"),
    ],
)
def test_hashes_may_be_numbers(number):
    event = stored(0, 4)
    event["block_hashes"] = [number(hashed) for hashed in event["block_hashes"]]
    later = stored(4, 8)
    later["parent_block_hash"] = event["block_hashes"][-1]
    assert Engine().take(event, later).tiers == [8, 8, 8]


def test_a_batch_may_be_a_map_and_an_event_a_list():
    engine = Engine()
    event = ["BlockStored", [hash_of(0), hash_of(1)], None, TOKENS[: 2 * SIZE], SIZE, None]
    engine.blocks.take(msgspec.msgpack.encode({"ts": 1.0, "events": [event], "data_parallel_rank": 3}))
    engine.blocks.tell_index()
    assert engine.tiers == [2, 2, 2]
    engine.take(["BlockRemoved", [hash_of(1)]], rank=3)
    assert engine.tiers == [1, 1, 1]
    engine.take(["AllBlocksCleared"], rank=3)
    assert engine.tiers == [0, 0, 0]


@pytest.mark.parametrize(
    ("medium", "tiers"),
    [
        (None, [2, 2, 2]),
        ("GPU", [2, 2, 2]),
        ("CPU", [0, 2, 2]),
        ("CPU_PINNED", [0, 2, 2]),
        ("STORAGE", [0, 0, 2]),
        ("DISK", [0, 0, 2]),
        ("EXTERNAL", [0, 0, 2]),
        ("TAPE", [0, 0, 0]),
    ],
)
def test_media_are_tiers(medium, tiers):
    assert Engine().take(stored(0, 2, medium=medium)).tiers == tiers


def test_a_known_block_that_goes_to_another_tier_needs_no_tokens():
    engine = Engine().take(stored(0, 2)).take(stored(0, 2, medium="CPU", token_ids=[])).take(removed(0, 1))
    assert engine.tiers == [0, 2, 2]


def test_a_block_is_gone_when_it_was_removed_as_often_as_it_was_stored():
    engine = Engine().take(stored(0, 1), stored(0, 1, group_idx=1))
    assert engine.take(removed(0)).tiers == [1, 1, 1]
    assert engine.take(removed(0)).tiers == [0, 0, 0]
    assert engine.take(removed(0), stored(0, 1)).tiers == [1, 1, 1]


def test_ranks_are_counted_apart_and_cleared_apart():
    engine = Engine().take(stored(0, 2), rank=0).take(stored(0, 4), rank=1)
    assert engine.take(removed(0, 1), rank=0).tiers == [4, 4, 4]
    engine.take(stored(0, 2), rank=0)
    assert engine.take(CLEARED, rank=1).tiers == [2, 2, 2]
    assert engine.take(CLEARED, rank=0).tiers == [0, 0, 0]
    assert engine.index.blocks == len(engine.blocks) == 0


def test_blocks_without_a_known_parent_or_tokens_are_counted_and_removing_them_is_nothing():
    engine = Engine().take(stored(2, 4)).take(stored(0, 1, token_ids=[])).take(removed(2, 3, 0))
    assert engine.blocks.counts.unplaced == 3
    assert engine.tiers == [0, 0, 0]
    assert engine.blocks.is_complete


@pytest.mark.parametrize(
    "change",
    [
        {"lora_id": 1},
        {"lora_name": "mine"},
        {"cache_salt": "secret"},
        {"extra_keys": [["image"], None]},
    ],
)
def test_blocks_that_no_plain_prompt_has_are_left_out_with_all_after_them(change):
    engine = Engine().take(stored(0, 2, **change)).take(stored(2, 4))
    assert engine.tiers == [0, 0, 0]
    assert (engine.blocks.counts.foreign, engine.blocks.counts.unplaced) == (2, 2)


def test_blocks_before_an_image_are_plain():
    engine = Engine().take(stored(0, 4, extra_keys=[None, None, [["image", 0]], None]))
    assert engine.tiers == [2, 2, 2]
    assert engine.blocks.counts.foreign == 2


def test_the_engines_block_size_is_that_of_its_first_event():
    engine = Engine()
    hashes = [hash_of(block) for block in range(4)]
    engine.take(stored(0, 4, block_hashes=hashes, token_ids=TOKENS, block_size=2 * SIZE))
    assert engine.blocks.block_tokens == 2 * SIZE
    keys = chain(TOKENS, 2 * SIZE, ROOT)
    assert engine.index.prefixes(names_of(b"".join(keys)))[engine.holder].tolist() == [4, 4, 4]
    engine.take(stored(0, 2, block_hashes=[hash_of(90), hash_of(91)]))
    assert engine.blocks.counts.odd_size == 2


def test_our_own_keys_need_no_tokens():
    engine = Engine(hashes_are_keys=True)
    engine.take(stored(0, 8, block_hashes=list(KEYS), token_ids=[]))
    assert engine.tiers == [8, 8, 8]
    engine.take({"type": "BlockRemoved", "block_hashes": KEYS[4:], "medium": "GPU"})
    assert engine.tiers == [4, 4, 4]


def test_too_many_blocks_are_left_out_and_the_view_is_not_complete():
    engine = Engine(most_blocks=5).take(stored(0, 4)).take(stored(4, 8))
    assert engine.tiers == [4, 4, 4]
    assert engine.blocks.counts.left_out == 4
    assert not engine.blocks.is_complete
    assert engine.take(CLEARED).blocks.is_complete


GARBAGE = [
    b"",
    b"\xc1",
    b"\x91" * 5000,
    msgspec.msgpack.encode(7),
    msgspec.msgpack.encode([1.0]),
    msgspec.msgpack.encode([1.0, 5]),
    msgspec.msgpack.encode([1.0, [], "rank"]),
    b"\x81\x91\x01\x02",
    *(
        msgspec.msgpack.encode([1.0, [event]])
        for event in (
            7,
            [],
            [[1]],
            {"type": "BlockStored"},
            stored(0, 1, block_size="4"),
            stored(0, 1, block_size=0),
            stored(0, 1, block_hashes=[None]),
            stored(0, 1, block_hashes=[b"short"]),
            stored(0, 1, token_ids="text"),
            stored(0, 1, extra_keys=5),
            removed(0) | {"block_hashes": 5},
            removed(0) | {"medium": ["GPU"]},
        )
    ),
]


@pytest.mark.parametrize("payload", GARBAGE)
def test_garbage_is_counted_and_the_rest_goes_on(payload):
    engine = Engine()
    engine.blocks.take(payload)
    assert engine.blocks.counts.garbled == 1
    assert not engine.blocks.is_complete
    assert engine.take(7, stored(0, 2)).tiers == [2, 2, 2]


@pytest.mark.parametrize("tokens", [[-1] * SIZE, [2**32] * SIZE, [[1, 2]] * SIZE, [None] * SIZE, [1.5] * SIZE])
def test_tokens_that_are_none_have_no_place(tokens):
    engine = Engine().take(stored(0, 1, token_ids=tokens))
    assert engine.blocks.counts.unplaced == 1
    assert engine.take({"type": "SomethingNew"}).blocks.is_complete


happenings = st.tuples(
    st.sampled_from(["stored", "stored", "removed", "cleared"]),
    st.integers(0, 7),
    st.integers(0, 2),
    st.integers(0, 1),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(happenings, max_size=6), max_size=12))
def test_the_index_has_what_a_plain_count_says(batches):
    """All blocks have the root as their parent here, so that each can come and go alone."""
    engine, counts = Engine(), Counter()
    media = ("GPU", "CPU", "DISK")
    alone = [chain([block] * SIZE, SIZE, ROOT)[0] for block in range(8)]
    for batch in batches:
        for rank in (0, 1):
            events: list[Any] = []
            for what, block, tier, whose in batch:
                if whose != rank:
                    continue
                if what == "stored":
                    tokens = [block] * SIZE
                    parts = {"parent_block_hash": None, "token_ids": tokens, "medium": media[tier]}
                    events.append(stored(block, block + 1, **parts))
                    counts[rank, tier, block] += 1
                elif what == "removed":
                    events.append(removed(block, medium=media[tier]))
                    counts[rank, tier, block] = max(0, counts[rank, tier, block] - 1)
                else:
                    events.append(CLEARED)
                    counts = Counter({at: count for at, count in counts.items() if at[0] != rank})
            engine.take(*events, rank=rank)
        for block, key in enumerate(alone):
            there = [any(counts[rank, tier, block] for rank in (0, 1)) for tier in range(3)]
            expected = np.logical_or.accumulate(there).astype(int).tolist()
            assert engine.index.prefixes(names_of(key))[engine.holder].tolist() == expected
        assert engine.index.check() == []
        assert len(engine.blocks) == len({at[2] for at, count in counts.items() if count})
