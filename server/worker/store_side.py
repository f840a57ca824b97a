"""The worker's connections to the store node beside it. What the store does wrong costs speed, never an answer."""

import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine_client.blocking import BlockingClient
from engine_client.decode import DecodeClient
from engine_client.prefill import PrefillClient
from engine_client.steps import OpenSpace
from kvstore.errors import StoreError
from kvstore.prefix import Namespace

log = logging.getLogger("cairn.worker")

LOADS = 4  # prefixes that are on their way at a time


class StoreSide:
    """Opens what it needs when it is needed first, and again later where that failed. For many threads."""

    def __init__(self, address: str, token: str, space_name: str, namespace: Namespace, name: str) -> None:
        self._space_name = space_name
        self._namespace = namespace
        self._idle: queue.SimpleQueue[BlockingClient] = queue.SimpleQueue()
        self._loading = [BlockingClient(address, token, name=f"{name} loads {number}") for number in range(LOADS)]
        for client in self._loading:
            self._idle.put(client)
        self._loads: dict[BlockingClient, DecodeClient] = {}
        self._storing = BlockingClient(address, token, name=f"{name} stores")
        self._store: PrefillClient | None = None
        self._space: OpenSpace | None = None
        self._opening = threading.Lock()
        self.node_name = ""

    @contextmanager
    def loading(self) -> Iterator[DecodeClient | None]:
        """A client to load one prefix with; None while the store cannot be reached."""
        client = self._idle.get()
        try:
            yield self._decode_client(client)
        finally:
            self._idle.put(client)

    def storing(self) -> PrefillClient | None:
        """Where new blocks go; None while the store cannot be reached."""
        with self._opening:
            if self._store is None:
                try:
                    self.node_name = self._storing.connect().node
                    self._space = self._storing.open(self._space_name, self._namespace)
                except StoreError as error:
                    log.warning("the store takes nothing: %s", error)
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

    def _decode_client(self, client: BlockingClient) -> DecodeClient | None:
        found = self._loads.get(client)
        if found is None:
            try:
                found = DecodeClient(client, client.open(self._space_name, self._namespace))
            except StoreError as error:
                log.warning("the store gives nothing: %s", error)
                return None
            self._loads[client] = found
        return found
