"""A TCP proxy with toxics: delay, loss as TCP shows it (stalls), a rate, silence, and connections that break."""

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

PIECE_BYTES = 64 << 10
PIECES_ON_THE_WAY = 64  # of each direction; then the sender waits, as for a full window
RETRANSMIT_S = 0.2  # what a lost packet costs, with Linux's shortest timeout
START_S = 10.0

Address = tuple[str, int]


class ToxicProxy:
    """Carries connections to `address` on to `target`, from a thread of its own. Its attributes may be set at any time
    and hold for what comes after; `seed` decides which pieces are lost.

    inside: a context in which both its sockets and its thread are opened, for another network namespace.
    """

    def __init__(
        self,
        target: Address,
        listen: Address = ("127.0.0.1", 0),
        inside: Callable[[], AbstractContextManager[None]] = nullcontext,
        seed: int = 1,
    ) -> None:
        self.delay_s = 0.0  # each way
        self.loss = 0.0  # share of pieces that come one retransmission later, and all behind them
        self.bytes_per_s = 0.0  # of each connection and direction; 0: no limit
        self.target = target
        self._random = random.Random(seed)
        self._connections: set[asyncio.Task[None]] = set()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(listen, inside), name="toxic proxy", daemon=True)
        self._thread.start()
        assert self._started.wait(START_S), "the proxy does not start"
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> "ToxicProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def silence(self) -> None:
        """Nothing arrives any more, and no connection is broken, until `heal`."""
        self._call(lambda: self._is_open.clear())

    def heal(self) -> None:
        """No toxics. What was on its way in silence arrives now."""
        self.delay_s = self.loss = self.bytes_per_s = 0.0
        self._call(lambda: self._is_open.set())

    def break_all(self) -> None:
        """Close every connection; new ones are served."""
        self._call(lambda: [task.cancel() for task in self._connections])

    def close(self) -> None:
        """Close everything. Idempotent."""
        if self._thread.is_alive():
            self._call(self._end.set)
            self._thread.join(START_S)
            assert not self._thread.is_alive(), "the proxy does not end"

    def _call(self, work: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(work)

    def _run(self, listen: Address, inside: Callable[[], AbstractContextManager[None]]) -> None:
        try:
            with inside():
                asyncio.run(self._serve(listen))
        except BaseException as error:
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self, listen: Address) -> None:
        self._loop, self._end, self._is_open = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._is_open.set()
        server = await asyncio.start_server(self._accepted, *listen)
        host, port = server.sockets[0].getsockname()[:2]
        self.address: Address = (host, port)
        self._started.set()
        await self._end.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The proxy's own task, so that its end is nobody's error."""
        task = asyncio.ensure_future(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            await self._is_open.wait()
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, far_writer))
                both.create_task(self._carry(far_reader, writer))
        except* OSError:
            pass  # one side is gone: close the other
        finally:
            for each in writers:
                each.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until it ends: pieces in order, each with the time when it is due."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES_ON_THE_WAY)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._take(reader, on_the_way))
            both.create_task(self._give(on_the_way, writer))

    async def _take(self, reader: asyncio.StreamReader, on_the_way: asyncio.Queue[tuple[float, bytes]]) -> None:
        due = clear_at = 0.0
        piece = b"first"
        while piece:
            piece = await reader.read(PIECE_BYTES)
            now = self._loop.time()
            if self.bytes_per_s:
                now = clear_at = max(clear_at, now) + len(piece) / self.bytes_per_s
            late_s = RETRANSMIT_S if self._random.random() < self.loss else 0.0
            due = max(due, now + self.delay_s + late_s)
            await on_the_way.put((due, piece))

    async def _give(self, on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        piece = b"first"
        while piece:
            due, piece = await on_the_way.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await self._is_open.wait()
            if piece:
                writer.write(piece)
                await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
