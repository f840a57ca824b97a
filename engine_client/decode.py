"""The decode side: the longest stored prefix of a prompt that arrives in time, in place where memory is shared."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from engine_client.blocking import BlockingClient
from engine_client.codec import Codec, check_namespace
from engine_client.steps import Held, OpenSpace
from kvstore.copier import checksum
from kvstore.errors import StoreError

LEASE_S = 60.0
LEAST_S = 0.001  # for a call whose time is over
RELEASE_S = 1.0  # for a node that hangs; a connection that is given up releases as well


class DecodeClient:
    """Loads blocks of one namespace (and of this worker's part of it) through `client`.

    `verify` compares each block with its checksum before the engine sees it. Blocks come as they are stored: encoded
    by `codec`, which the engine decodes layer by layer. Raises ValueError when the namespace is of another one.
    `tokens_per_s` is how fast this engine computes a prompt (0: not known): what lower tiers would take longer to give
    is not waited for.
    """

    def __init__(
        self,
        client: BlockingClient,
        space: OpenSpace,
        *,
        verify: bool = True,
        codec: Codec | None = None,
        tokens_per_s: float = 0.0,
    ) -> None:
        check_namespace(space.namespace, codec)
        self._most_bytes = codec.most_bytes if codec is not None else space.namespace.block_bytes
        self._client = client
        self._space = space
        self.form = (space.namespace.codec, space.namespace.compaction)
        self._verify = verify
        self._tokens_per_s = tokens_per_s

    def load(self, tokens: Any, deadline_s: float) -> "LoadedPrefix":
        """The longest stored prefix of `tokens` that is here, or being written and complete within `deadline_s`.

        Never raises a StoreError: a store that fails, hangs or lies is a shorter prefix, perhaps none.
        """
        until = time.monotonic() + deadline_s
        keys = self._space.keys(tokens)
        if not keys:
            return LoadedPrefix(self._client, None, [], 0, "")
        try:
            if self._client.connect(deadline_s).ticket:
                return self._in_place(keys, until)
            return self._copied(keys, until)
        except StoreError as error:
            return LoadedPrefix(self._client, None, [], 0, f"{error.code}: {error}")

    def _in_place(self, keys: Sequence[Any], until: float) -> "LoadedPrefix":
        asked = time.monotonic()
        left_s = max(until - asked, LEAST_S)
        held = self._client.acquire(
            self._space,
            keys,
            lease_s=LEASE_S,
            wait_s=0.9 * left_s,
            load_s=0.9 * left_s,
            tokens_per_s=self._tokens_per_s,
            within_s=left_s,
        )
        if held is None:
            return LoadedPrefix(self._client, None, [], 0, "")
        good = len(held.blocks)
        if self._verify:
            pairs = zip(held.blocks, held.checksums, strict=True)
            good = next((at for at, (block, crc) in enumerate(pairs) if checksum(block) != crc), good)
        loaded = LoadedPrefix(
            self._client, held, held.blocks[:good], good * self._space.namespace.block_tokens, "", asked + held.lease_s
        )
        if good < len(held.blocks):
            loaded.failure = "a block was damaged"
            with suppress(StoreError):  # the next reader will find out too
                self._client.report(self._space, [keys[good]], within_s=max(until - time.monotonic(), LEAST_S))
        return loaded

    def _copied(self, keys: Sequence[Any], until: float) -> "LoadedPrefix":
        present = self._client.match(self._space, keys, within_s=max(until - time.monotonic(), LEAST_S))
        left_s = max(until - time.monotonic(), LEAST_S)
        wanted = keys[: max(present, 1)]
        buffers = [bytearray(self._most_bytes) for _ in wanted]
        got = self._client.get(
            self._space,
            wanted,
            buffers,
            wait_s=0.9 * left_s,
            load_s=0.9 * left_s,
            tokens_per_s=self._tokens_per_s,
            within_s=left_s,
        )
        blocks = [memoryview(buffer) for buffer in buffers[:got]]
        return LoadedPrefix(self._client, None, blocks, got * self._space.namespace.block_tokens, "")


class LoadedPrefix:
    """The blocks of a prompt's prefix, good until `close` as long as `is_intact()`.

    `tokens` that they stand for; `failure` says what cut it short, and is empty for a plain miss.
    """

    def __init__(
        self,
        client: BlockingClient,
        held: Held | None,
        blocks: list[memoryview],
        tokens: int,
        failure: str,
        good_until: float = float("inf"),
    ) -> None:
        self.tokens = tokens
        self.blocks = blocks
        self.failure = failure
        self._client = client
        self._held = held
        self._good_until = good_until

    @property
    def bytes(self) -> int:
        """Bytes of all its blocks."""
        return sum(map(len, self.blocks))

    def is_intact(self) -> bool:
        """Whether all that was read from `blocks` so far was theirs: ask after reading, not before."""
        is_held = self._held is None or self._held.link.is_open()
        return is_held and time.monotonic() < self._good_until

    def close(self) -> None:
        """Let go of the blocks. Idempotent."""
        held, self._held, self.blocks = self._held, None, []
        if held is not None:
            try:
                self._client.release(held, within_s=RELEASE_S)
            except StoreError:
                return  # the session is gone, and the node has released what it held
