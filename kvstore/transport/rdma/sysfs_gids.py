"""The addresses of a port by kind, which verbs of older libraries do not say: sysfs does."""

from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.transport.rdma.verbs import Gid

INFINIBAND = Path("/sys/class/infiniband")
MOST_UNUSED = 32  # in a row: tables have hundreds of entries, and each takes a call of the system
KINDS = {"IB/RoCE v1": "roce v1", "RoCE v2": "roce v2"}


def read_gids(device: str, port: int, link_layer: str, count: int, query: Callable[[int], bytes]) -> Iterator[Gid]:
    """Entries of the port's table that are in use. `query` gives the 16 bytes of one; it may raise OSError."""
    types = INFINIBAND / device / "ports" / str(port) / "gid_attrs" / "types"
    unused = 0
    for number in range(count):
        if unused == MOST_UNUSED:
            return
        unused += 1
        try:
            kind = (types / str(number)).read_text().strip()
            raw = query(number)
        except OSError:  # not in use
            continue
        if any(raw):
            unused = 0
            yield Gid(number, raw, KINDS.get(kind, kind) if link_layer == "ethernet" else "ib")
