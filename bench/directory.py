"""The directory of a cluster, without a network: memory, how fast batches are taken in, and questions answered."""

import random
import time
import tracemalloc
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import cast

from bench.amplification import key_of, read_requests
from bench.measure import Figure, latency, without_collector
from kvstore.cluster.announcer import Announcer
from kvstore.cluster.batches import pack
from kvstore.cluster.directory import Directory
from kvstore.cluster.homes import Homes
from kvstore.cluster.naming import NAME_BITS, PARTITIONS, STRIPE_BLOCKS, names_of, partition_of
from kvstore.types import DRAM, BlockKey
from kvstore.wire_cluster import STRIPE, TIER_BITS, Locate

Block = tuple[int, int]  # partition, name
NODES = [f"node-{number}" for number in range(5)]
BATCH_BLOCKS = 4096
PROMPT_BLOCKS = 537
COPIES = 0.1  # the part of blocks that a second node holds
ROOT = bytes(range(16))
DRAM_TIERS = TIER_BITS[DRAM]


def run(wanted: set[str], trace: Path | None = None) -> Iterator[Figure]:
    """All figures, or those wanted; with a trace also the memory of its chains."""
    figures: dict[str, Callable[[], Figure]] = {
        "directory_memory": lambda: _memory("directory_memory", _random_stripes(1_000_000), "random chains"),
        "directory_apply": _apply,
        "directory_locate_108": lambda: _locate("directory_locate_108", NODES[:1], 60.0),
        "directory_locate_537": lambda: _locate("directory_locate_537", NODES, 300.0),
        "homes_1000": lambda: _homes("homes_1000", lambda names: Homes(names), 100_000.0),
        "homes_1000_leave": lambda: _homes("homes_1000_leave", Homes(_thousand()).changed, 5_000.0),
    }
    if trace is not None:
        figures["directory_memory_trace"] = lambda: _memory("directory_memory_trace", _trace_stripes(trace), trace.name)
    for name, figure in figures.items():
        if not wanted or name in wanted:
            yield figure()


def _memory(name: str, blocks: list[Block], what: str) -> Figure:
    """Bytes that a home has for each block and holder, when all is its own and some blocks are held twice."""
    chance = random.Random(1)
    held: dict[str, list[Block]] = {node: [] for node in NODES}
    for block in blocks:
        for node in chance.sample(NODES, 2 if chance.random() < COPIES else 1):
            held[node].append(block)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    directory = Directory()
    for node, some in held.items():
        _tell(directory, node, some)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    each = (after - before) / directory.holdings
    note = f"{directory.blocks:,} blocks of {what}, {directory.holdings:,} with their holders, at one home"
    return Figure(name, each, "bytes/block and holder", None, None, None, 100.0, is_ratio=False, note=note)


def _apply() -> Figure:
    """Microseconds a record, in full batches, a home's part alone."""
    blocks = _random_stripes(200_000)
    directory = Directory()
    spent_s = _tell(directory, "a", blocks) + _tell(directory, "b", blocks)
    value = spent_s / (2 * len(blocks)) * 1e6
    note = f"in batches of {BATCH_BLOCKS:,}; half of the blocks are held by another already"
    return Figure("directory_apply", value, "us/record", None, None, None, 2.0, is_ratio=False, note=note)


def _locate(name: str, homes: Sequence[str], most_us: float) -> Figure:
    """A prompt's share of blocks that each home has; all homes are asked one after the other."""
    directories = {home: Directory() for home in homes}
    shares = len(NODES)
    questions: list[tuple[Directory, Locate]] = []
    for directory in directories.values():
        blocks = _random_stripes(200_000)
        _tell(directory, "a", blocks)
        _tell(directory, "b", blocks[::2])
        asked = blocks[: -(-PROMPT_BLOCKS // shares)]
        stripes = [asked[start : start + STRIPE_BLOCKS] for start in range(0, len(asked), STRIPE_BLOCKS)]
        packed = b"".join(STRIPE.pack(stripe[0][0], len(stripe)) for stripe in stripes)
        questions.append((directory, Locate(0, packed, pack("Q", [block[1] for block in asked]))))
    asked_in_all = sum(len(question.names) // 8 for _, question in questions)
    note = f"{asked_in_all} names at {len(homes)} homes in this process, one after the other; no messages"
    return latency(
        name,
        lambda: [directory.locate(question) for directory, question in questions],
        None,
        most_us=most_us,
        note=note,
        runs=2000,
    )


def _homes(name: str, make: Callable[[list[str]], Homes], most_us: float) -> Figure:
    numbers = count()
    names = _thousand()

    def product() -> Homes:
        return make([*names[:-1], f"late-{next(numbers)}"])

    return latency(name, product, None, most_us=most_us, note="homes of 4,096 partitions among 1,000 members", runs=20)


def _thousand() -> list[str]:
    return [f"node-{number}" for number in range(1000)]


def _tell(directory: Directory, node: str, blocks: list[Block]) -> float:
    """A holder tells of all these; the seconds that the home needed."""
    home = "home"
    announcer = Announcer(node, 1)
    announcer.homes_changed(Homes([home]), {home: 1})
    spent_s = 0.0
    waiting = iter(blocks)
    with without_collector():
        while some := list(islice(waiting, BATCH_BLOCKS)):
            for block in some:
                announcer.note(block[0], block)
            batch = announcer.batch(home, _describe, BATCH_BLOCKS)
            assert batch is not None
            began = time.perf_counter()
            reply = directory.apply(batch)
            spent_s += time.perf_counter() - began
            announcer.answered(home, reply)
    return spent_s


def _describe(block: Hashable) -> tuple[int, int]:
    return cast(Block, block)[1], DRAM_TIERS


def _random_stripes(blocks: int) -> list[Block]:
    """Blocks of random names in whole stripes."""
    chance = random.Random(2)
    found: list[Block] = []
    while len(found) < blocks:
        partition = chance.randrange(PARTITIONS)
        found += [(partition, chance.getrandbits(NAME_BITS)) for _ in range(min(STRIPE_BLOCKS, blocks - len(found)))]
    return found


def _trace_stripes(trace: Path) -> list[Block]:
    """The distinct blocks of a trace's chains, each in the stripe that it had when it first came."""
    places: dict[int, Block] = {}  # of each block's id: its partition and how far into the stripe
    for ids in read_requests(trace):
        partition, position = 0, STRIPE_BLOCKS - 1
        for block in ids:
            if block not in places:
                if position == STRIPE_BLOCKS - 1:
                    places[block] = partition_of(ROOT, BlockKey(key_of(block))), 0
                else:
                    places[block] = partition, position + 1
            partition, position = places[block]
    names = names_of(ROOT, [key_of(block) for block in places])
    return [(partition, name) for (partition, _), name in zip(places.values(), names, strict=True)]
