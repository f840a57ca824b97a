"""Clients of a simulated cluster: chains that share prefixes, put and read back, and what each finds wrong.

The bytes of a block are a function of its key, so whoever reads a block knows what it must say.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from random import Random

from kvstore import wire
from kvstore.cluster.naming import STRIPE_BLOCKS
from kvstore.errors import DeadlineExceeded, StoreError, TransportError
from kvstore.packed import pack_keys, unpack_u64
from kvstore.prefix import chain
from kvstore.types import DRAM, BlockKey, Slot
from kvstore.wire_cluster import Replicate
from kvstore.wire_operators import Pin, Unpin
from tests.sim.loop import Process
from tests.sim.node import SPACE, TENANT, SimulatedNode, World
from tests.sim.peers import Caller, connected, packed_sizes

REPLICATE_S = 60.0
MARGIN_S = 0.1  # that an answer may be late
WITHIN_S = 10.0  # for what has no time limit of its own
BLOCK_BYTES = 1000  # of each: with other sizes there may be no room for a block that all else is held for
DOCUMENTS, LEAST_BLOCKS, MOST_BLOCKS = 6, 1, 96
PUT_BLOCKS = 24
ROOT = SPACE.root(TENANT.name, TENANT.secret)
TOKENS = SPACE.block_tokens


def block_of(key: bytes) -> bytes:
    """What a block must say."""
    return (blake2b(key).digest() * (BLOCK_BYTES // 64 + 1))[:BLOCK_BYTES]


class Prompts:
    """Chains of keys: documents, of which each prompt has a beginning, and then goes its own way."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._known: dict[tuple[int, int, int], list[BlockKey]] = {}

    def some(self) -> list[BlockKey]:
        random = self._random
        document = min(int(random.expovariate(0.5)), DOCUMENTS - 1)
        shared = random.randrange(0, MOST_BLOCKS, 8)
        prompt = self._prompt(document, shared, random.randrange(3))
        return prompt[: random.randint(LEAST_BLOCKS, len(prompt))]

    def all(self) -> list[list[BlockKey]]:
        """Each that was made, in full."""
        return list(self._known.values())

    def _prompt(self, document: int, shared: int, tail: int) -> list[BlockKey]:
        found = self._known.get((document, shared, tail))
        if found is None:
            blocks = [document] * shared + [100 + 10 * document + tail] * (MOST_BLOCKS - shared)
            tokens = [number for number in blocks for _ in range(TOKENS)]
            found = self._known[document, shared, tail] = chain(tokens, TOKENS, ROOT)
        return found


class Client:
    """One that talks to one node, as an engine does: reads what there is of a prompt, and stores the rest.

    `wrongs` takes what must not be, a sentence each.
    """

    def __init__(self, world: World, name: str, node: SimulatedNode, prompts: Prompts, wrongs: list[str]) -> None:
        self.world = world
        self.name = name
        self.node = node
        self.hits = self.misses = self.failures = 0
        self._prompts = prompts
        self._wrongs = wrongs
        self._random = Random(world.random.random())
        self._process = Process(world.loop, name)
        self._number = 0

    async def live(self, until: float) -> None:
        """Until then, or until it dies, which is soon followed by its rebirth."""
        while self.world.loop.seconds < until:
            self._process = Process(self.world.loop, self.name)
            task = self._process.spawn(self._work(until))
            if self._random.random() < 0.3:
                died = self.world.loop.create_future()
                self._process.after(self._random.randrange(100, 5000), lambda died=died: self._die(died))
                await asyncio.wait([task, died], return_when=asyncio.FIRST_COMPLETED)
            else:
                await task
            if task.done():
                task.result()

    async def read_once(self, process: Process, prompt: Sequence[BlockKey], load_s: float) -> int:
        """How many of a prompt's blocks come to a process that connects for them."""
        caller, _ = await connected(self.world.network, process, self.node.name, TENANT.name)
        opened, _ = await caller.ask(lambda id: wire.Open(id, "s", SPACE), WITHIN_S)
        self._number = opened.number
        try:
            return await self.get(caller, prompt, load_s)
        finally:
            caller.close()

    def _die(self, died: "asyncio.Future[None]") -> None:
        self._process.kill()
        self.world.network.killed(self._process)
        if not died.done():
            died.set_result(None)

    async def _work(self, until: float) -> None:
        while self.world.loop.seconds < until:
            caller: Caller | None = None
            try:
                async with asyncio.timeout(WITHIN_S):
                    caller, _ = await connected(self.world.network, self._process, self.node.name, TENANT.name)
                opened, _ = await caller.ask(lambda id: wire.Open(id, "s", SPACE), WITHIN_S)
                self._number = opened.number
                while self.world.loop.seconds < until:
                    await self._something(caller)
                    await asyncio.sleep(self._random.expovariate(10.0))
            except (TransportError, TimeoutError):
                self.failures += 1
                await asyncio.sleep(0.2)
            finally:
                if caller is not None:
                    caller.close()

    async def _something(self, caller: Caller) -> None:
        kind = self._random.random()
        prompt = self._prompts.some()
        try:
            if kind < 0.75:
                found = await self.get(caller, prompt)
                if found < len(prompt) and self._random.random() < 0.8:
                    await self._put(caller, prompt, found)
            elif kind < 0.9:
                await self._hold(caller, prompt)
            elif kind < 0.95:
                await self._replicate(caller, prompt)
            else:
                await self._pin(caller, prompt)
        except TransportError:
            raise
        except StoreError:
            self.failures += 1  # a refusal

    async def get(self, caller: Caller, prompt: Sequence[BlockKey], load_s: float = 0.0) -> int:
        """How many of its blocks came."""
        load_s = load_s or self._random.choice((0.02, 0.2, 1.0, 5.0))
        reply, payload = await self._asked(caller, prompt, load_s, deliver=True)
        start = 0
        sizes = unpack_u64(reply.sizes)
        for key, size in zip(prompt, sizes, strict=False):
            self._look(key, payload[start : start + size], "delivered")
            start += size
        self.hits += len(sizes)
        self.misses += len(prompt) - len(sizes)
        return len(sizes)

    async def _asked(
        self, caller: Caller, prompt: Sequence[BlockKey], load_s: float, *, deliver: bool
    ) -> tuple[wire.Acquired, bytes]:
        keys, begun = pack_keys(prompt), self.world.loop.seconds
        try:
            return await caller.ask(
                lambda id: wire.Acquire(id, self._number, keys, 5000, load_ms=int(load_s * 1000), deliver=deliver),
                load_s + MARGIN_S,
            )
        except DeadlineExceeded:
            if self.node.upset_at < begun and not self.node.process.is_stopped:
                self._wrongs.append(f"{self.name}: no answer of {self.node.name} in {load_s} s + {MARGIN_S} s")
            raise

    async def _hold(self, caller: Caller, prompt: Sequence[BlockKey]) -> None:
        """Keep blocks where they are for a while, as a client that shares memory does."""
        reply, _ = await self._asked(caller, prompt, self._random.choice((0.02, 1.0)), deliver=False)
        if not reply.lease_id:
            return
        dram, epoch = self.node.store.dram, self.node.epoch
        for _ in range(2):
            if self.node.epoch == epoch and not caller.is_lost:
                for key, slab_id, offset, size in zip(
                    prompt, *map(unpack_u64, (reply.slab_ids, reply.offsets, reply.sizes)), strict=False
                ):
                    self._look(key, bytes(dram.view(Slot(DRAM, slab_id, offset, size, 0), size)), "held")
            await asyncio.sleep(self._random.uniform(0.0, 2.0))
        with suppress(StoreError):
            await caller.ask(lambda id: wire.Release(id, reply.lease_id), WITHIN_S)

    async def _put(self, caller: Caller, prompt: Sequence[BlockKey], start: int) -> None:
        while start < len(prompt):
            keys = prompt[start : start + self._random.randint(1, PUT_BLOCKS)]
            parent = bytes(prompt[start - 1]) if start else b""
            blocks = [block_of(key) for key in keys]
            sizes, checksums = packed_sizes(blocks)
            packed = pack_keys(keys)
            await caller.ask(
                lambda id, parent=parent, packed=packed, sizes=sizes, checksums=checksums: wire.Put(
                    id, self._number, packed, parent, sizes, checksums
                ),
                WITHIN_S,
                payload=b"".join(blocks),
            )
            start += len(keys)

    async def _replicate(self, caller: Caller, prompt: Sequence[BlockKey]) -> None:
        """Have two nodes hold what there is of it, after asking how much that is."""
        keys = pack_keys(prompt)
        await caller.ask(lambda id: wire.Match(id, self._number, keys), WITHIN_S)
        done, _ = await caller.ask(lambda id: Replicate(id, self._number, keys, False, 2), REPLICATE_S)
        if done.blocks > len(prompt):
            self._wrongs.append(f"{self.name}: {done.blocks} blocks replicated, of {len(prompt)}")

    async def _pin(self, caller: Caller, prompt: Sequence[BlockKey]) -> None:
        keys = pack_keys(prompt[:STRIPE_BLOCKS])
        pinned, _ = await caller.ask(
            lambda id: Pin(id, self._number, keys, self._random.random() < 0.5, 2000), WITHIN_S
        )
        await asyncio.sleep(self._random.uniform(0.0, 1.0))
        if pinned.pin_id:
            await caller.ask(lambda id: Unpin(id, pinned.pin_id), WITHIN_S)

    def _look(self, key: BlockKey, block: bytes, how: str) -> None:
        if block != block_of(key):
            self._wrongs.append(f"{self.name}: {self.node.name} {how} wrong bytes of {key.hex()}")
