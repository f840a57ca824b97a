"""Where a node is and how to be let in: parsed addresses, and what can be found on this host."""

import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvstore.errors import ConfigError, ConnectFailed
from kvstore.transport.blocking import left_s

TOKEN_FILE = "token"
SOCKET_NAME = "node.sock"
VARIABLES = ("CAIRN_ADDRESS", "CAIRN_TOKEN", "CAIRN_RUN_DIR")


@dataclass(frozen=True, slots=True)
class Address:
    """`path` of a Unix socket, or `host` and `port` with or without TLS."""

    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"


def parse_address(text: str) -> Address:
    """`unix:///run/cairn/node.sock`, `/run/cairn/node.sock`, `tcp://host:7401` or `tls://host:7401`.

    Raises ConfigError.
    """
    if text.startswith("/"):
        return Address(path=text)
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{text!r} is no address: {error}") from error
    if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
        return Address(path=parts.path)
    if parts.scheme in ("tcp", "tls") and parts.hostname and port and not parts.path.strip("/"):
        return Address(host=parts.hostname, port=port, tls=parts.scheme == "tls")
    raise ConfigError(f"{text!r} is no address: unix:///path, tcp://host:port or tls://host:port")


def tls_context(ca_file: str) -> ssl.SSLContext:
    """Trusts the system's authorities, or only those in `ca_file`. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise ConfigError(f"{ca_file}: {error.strerror or error}") from error


def open_stream(address: Address, tls: ssl.SSLContext | None, deadline: float) -> socket.socket:
    """A blocking connection to `address` by `deadline` (time.monotonic). Raises ConnectFailed."""
    stream: socket.socket | None = None
    try:
        timeout_s = left_s(deadline)
        if address.path:
            stream = socket.socket(socket.AF_UNIX)
            stream.settimeout(timeout_s)
            stream.connect(address.path)
            return stream
        stream = socket.create_connection((address.host, address.port), timeout_s)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return stream if tls is None else tls.wrap_socket(stream, server_hostname=address.host)
    except OSError as error:  # TimeoutError and ssl.SSLError are among them
        if stream is not None:
            stream.close()
        raise ConnectFailed(f"{address}: {error.strerror or str(error) or 'no answer in time'}") from error


def discover(environ: Mapping[str, str]) -> tuple[str, str]:
    """(address, token) of the node to talk to, by CAIRN_ADDRESS, CAIRN_TOKEN and the run directory.

    A node on this host that has no configured tenants keeps its token there, for its own user.
    """
    if environ.get("CAIRN_RUN_DIR"):
        run_dir = Path(environ["CAIRN_RUN_DIR"])
    elif environ.get("XDG_RUNTIME_DIR"):
        run_dir = Path(environ["XDG_RUNTIME_DIR"], "cairn")
    else:
        run_dir = Path(environ.get("HOME", "/"), ".cairn")
    token = environ.get("CAIRN_TOKEN", "") or read_token(run_dir)
    return environ.get("CAIRN_ADDRESS", "") or f"unix://{run_dir / SOCKET_NAME}", token


def read_token(run_dir: Path) -> str:
    """The token of a node without configured tenants; "" when there is none to be read."""
    try:
        return (run_dir / TOKEN_FILE).read_text().split()[0]
    except (OSError, IndexError):
        return ""
