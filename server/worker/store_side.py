"""The worker's connections to the store node beside it. What the store does wrong costs speed, never an answer."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine_client.blocking import BlockingClient
from engine_client.decode import DecodeClient, LoadedPrefix
from engine_client.prefill import PrefillClient
from engine_client.steps import OpenSpace
from kvstore.errors import StoreError
from kvstore.prefix import Namespace

log = logging.getLogger("cairn.worker")

SLOW_S = 0.5  # that a prompt waits for a store that then gives nothing
REST_S, REST_MOST_S = 2.0, 30.0
LOADS = 4  # prefixes that are on their way at a time


class Watched:
    """Loads as `client` does, and tells `heard` since when, and whether it failed."""

    def __init__(self, client: DecodeClient, heard: Callable[..., None]) -> None:
        self._client = client
        self._heard = heard

    def load(self, tokens: Any, deadline_s: float) -> LoadedPrefix:
        began_s = time.monotonic()
        loaded = self._client.load(tokens, deadline_s)
        self._heard(began_s, is_well=not loaded.failure)
        return loaded


class StoreSide:
    """Opens what it needs when it is needed first, and again later where that failed. For many threads.

    After a failure that took SLOW_S nothing is asked of the store for a while: each prompt would wait for so long.
    """

    def __init__(self, address: str, token: str, space_name: str, namespace: Namespace, name: str) -> None:
        self._space_name = space_name
        self._namespace = namespace
        self._idle: queue.SimpleQueue[BlockingClient] = queue.SimpleQueue()
        self._loading = [BlockingClient(address, token, name=f"{name} loads {number}") for number in range(LOADS)]
        for client in self._loading:
            self._idle.put(client)
        self._loads: dict[BlockingClient, Watched] = {}
        self._storing = BlockingClient(address, token, name=f"{name} stores")
        self._store: PrefillClient | None = None
        self._space: OpenSpace | None = None
        self._opening = threading.Lock()
        self._rests_until_s = 0.0
        self._rest_s = REST_S
        self.node_name = ""

    @contextmanager
    def loading(self) -> "Iterator[Watched | None]":
        """A client to load one prefix with; None while the store cannot be reached."""
        client = self._idle.get()
        try:
            yield None if self._is_resting else self._decode_client(client)
        finally:
            self._idle.put(client)

    def storing(self) -> PrefillClient | None:
        """Where new blocks go; None while the store cannot be reached."""
        with self._opening:
            if self._is_resting:
                return None
            if self._store is None:
                began_s = time.monotonic()
                try:
                    self.node_name = self._storing.connect().node
                    self._space = self._storing.open(self._space_name, self._namespace)
                except StoreError as error:
                    log.warning("the store takes nothing: %s", error)
                    self._heard(began_s, is_well=False)
                    return None
                self._store = PrefillClient(self._storing, self._space)
            return self._store

    @property
    def root(self) -> str:
        """Hex of the namespace's root; empty until the store was reached."""
        return "" if self._space is None else self._space.root.hex()

    def close(self) -> None:
        """Nobody may be using it any more."""
        if self._store is not None:
            self._store.close()
        for client in (*self._loading, self._storing):
            client.close()

    @property
    def _is_resting(self) -> bool:
        return time.monotonic() < self._rests_until_s

    def _heard(self, began_s: float, *, is_well: bool) -> None:
        """How it went since then; each failure in a row lets it rest for twice as long."""
        took_s = time.monotonic() - began_s
        if is_well:
            self._rest_s = REST_S
        elif took_s >= SLOW_S and not self._is_resting:
            log.warning("the store is not asked for %g s: it took %.1f s, and failed", self._rest_s, took_s)
            self._rests_until_s = time.monotonic() + self._rest_s
            self._rest_s = min(2 * self._rest_s, REST_MOST_S)

    def _decode_client(self, client: BlockingClient) -> "Watched | None":
        found = self._loads.get(client)
        if found is None:
            began_s = time.monotonic()
            try:
                space = client.open(self._space_name, self._namespace)
                found = Watched(DecodeClient(client, space), self._heard)
            except StoreError as error:
                log.warning("the store gives nothing: %s", error)
                self._heard(began_s, is_well=False)
                return None
            self._loads[client] = found
        return found
