"""A client that says whatever a test wants it to say: single frames over a plain socket."""

import socket
import ssl
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kvstore import wire
from kvstore.copier import checksum
from kvstore.packed import pack_keys, pack_u64, unpack_u64
from kvstore.prefix import Namespace
from kvstore.types import BlockKey
from tests.system.nodes import PATIENCE_S, NodeProcess


class WireClient:
    """One connection. `path` of a Unix socket, or a TCP `port` on this host; says Hello unless told not to."""

    def __init__(self, node: NodeProcess, *, tcp: bool = False, token: str | None = None, hello: bool = True,
                 receive_bytes: int = 0, context: ssl.SSLContext | None = None) -> None:  # fmt: skip
        self.socket = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(("127.0.0.1", node.port) if tcp else node.path)
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_hostname="127.0.0.1")
        self._number = 0
        self.welcome: Any = None
        self.payload = b""
        if hello:
            said = token if token is not None else (node.token if tcp else "")
            self.welcome = self.ask(wire.Hello(self.next(), wire.PROTOCOL, said, "wire client"))
            assert isinstance(self.welcome, wire.Welcome), self.welcome

    def __enter__(self) -> "WireClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def next(self) -> int:
        self._number += 1
        return self._number

    # Frames.

    def send(self, message: wire.Message, payload: bytes = b"", announced: int | None = None) -> None:
        self.socket.sendall(wire.encode(message, len(payload) if announced is None else announced) + payload)

    def ask(self, message: wire.Message, payload: bytes = b"", announced: int | None = None) -> Any:
        self.send(message, payload, announced)
        return self.receive()

    def receive(self) -> Any:
        """The next message; its payload is in `payload`. EOFError when the node hung up."""
        frame = wire.parse_header(self._exactly(wire.HEADER.size), 64 << 20)
        reply = wire.decode_reply(self._exactly(frame.body_bytes))
        self.payload = self._exactly(frame.payload_bytes)
        return reply

    def _exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            piece = self.socket.recv(min(size - len(received), 1 << 20))
            if not piece:
                raise EOFError(f"the node hung up after {len(received)} of {size} bytes")
            received += piece
        return bytes(received)

    def is_hung_up(self, within_s: float = PATIENCE_S) -> bool:
        """Whether the node ends the connection in time, whatever it still says."""
        deadline = time.monotonic() + within_s
        while (left_s := deadline - time.monotonic()) > 0:
            self.socket.settimeout(left_s)
            try:
                if not self.socket.recv(1 << 20):
                    return True
            except TimeoutError:
                return False
            except OSError:
                return True
        return False

    # Requests that tests often begin with.

    def open(self, name: str, namespace: Namespace) -> wire.Opened:
        opened = self.ask(wire.Open(self.next(), name, namespace))
        assert isinstance(opened, wire.Opened), opened
        return opened

    def place(self, number: int, keys: Sequence[BlockKey], sizes: Sequence[int], parent: bytes = b"") -> Any:
        return self.ask(wire.Put(self.next(), number, pack_keys(keys), parent, pack_u64(sizes)))

    def put(self, number: int, keys: Sequence[BlockKey], blocks: Sequence[bytes], parent: bytes = b"") -> Any:
        """With the blocks as payload."""
        crcs = pack_u64([checksum(block) for block in blocks])
        message = wire.Put(
            self.next(), number, pack_keys(keys), parent, pack_u64([len(block) for block in blocks]), crcs
        )
        return self.ask(message, b"".join(blocks))

    def get(self, number: int, keys: Sequence[BlockKey], wait_ms: int = 0) -> list[bytes]:
        reply = self.ask(wire.Acquire(self.next(), number, pack_keys(keys), 60_000, wait_ms, 0, True))
        assert isinstance(reply, wire.Acquired), reply
        blocks, at = [], 0
        for size, crc in zip(unpack_u64(reply.sizes), unpack_u64(reply.checksums), strict=True):
            blocks.append(self.payload[at : at + size])
            assert checksum(blocks[-1]) == crc
            at += size
        return blocks
