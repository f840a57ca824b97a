"""What this store needs of RDMA verbs, and which binding there is: pyverbs of rdma-core, or the package `ibverbs`.

Nothing here blocks and nothing waits: a queue pair has a completion queue and a completion channel of its own, whose
descriptor becomes readable after `arm` once a completion is there. The queue is sized for all that can be posted, so it
cannot overflow. One thread uses an object at a time.
"""

import errno
from collections.abc import Callable, Sequence
from enum import IntFlag
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol

from kvstore.errors import ConfigError

BINDINGS: Final = ("pyverbs", "ibverbs")  # in this order; each is a module beside this one: <name>_binding
SUCCESS: Final = 0
FLUSHED: Final = 5  # IBV_WC_WR_FLUSH_ERR: the queue pair had failed before this one's turn
STATUSES: Final = (
    "SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR", "MW_BIND_ERR",
    "BAD_RESP_ERR", "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR", "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR", "REM_INV_RD_REQ_ERR", "REM_ABORT_ERR", "INV_EECN_ERR",
    "INV_EEC_STATE_ERR", "FATAL_ERR", "RESP_TIMEOUT_ERR", "GENERAL_ERR",
)  # fmt: skip
"""ibv_wc_status by number, without IBV_WC_."""


class VerbsError(OSError):
    """A verbs call was refused. `errno` is the system's where there is one."""


class Closed:
    """In place of a binding's objects that were closed: some crash the process when they are asked anything."""

    def __getattr__(self, name: str) -> Any:
        raise VerbsError(errno.EBADF, f"{name} of a queue pair that is closed")


CLOSED = Closed()


class Access(IntFlag):
    """Rights to a memory region: those of ibv_access_flags that are used here."""

    LOCAL_WRITE = 1
    REMOTE_READ = 4


class Gid(NamedTuple):
    """An entry of a port's table of global identifiers: 16 bytes; `kind` is "ib", "roce v1" or "roce v2"."""

    number: int
    raw: bytes
    kind: str


class Port(NamedTuple):
    """`link_layer` is "ethernet" (RoCE: a GID is needed) or "infiniband" (a LID does within a subnet)."""

    number: int
    is_active: bool
    mtu_bytes: int
    lid: int
    link_layer: str
    gids: tuple[Gid, ...]


class Timers(NamedTuple):
    """What a queue pair does about a peer that does not answer. A try takes 4.096 us * 2**timeout, or some times that.

    A retry count of 7 must not be used: for receiver-not-ready it means for ever, and some drivers take it so for all.
    """

    timeout: int = 16
    retries: int = 3
    rnr_retries: int = 6
    min_rnr_timer: int = 12
    reads: int = 16  # READs on their way at once, in either direction (max_rd_atomic)


class QueueLimits(NamedTuple):
    """How many requests may be posted and not completed; `inline_bytes` is asked for, less may be got."""

    sends: int
    receives: int
    inline_bytes: int = 0


class Remote(NamedTuple):
    """The queue pair at the other end."""

    number: int
    psn: int  # of its first packet, 24 bits
    gid: bytes
    lid: int


class Own(NamedTuple):
    """How this end connects. `psn` is this end's; `gid_number` is of this end's port."""

    psn: int
    port: int
    gid_number: int
    mtu_bytes: int  # the smaller of both ports'
    timers: Timers = Timers()
    traffic_class: int = 0


class Read(NamedTuple):
    """A one-sided READ of `size` bytes of a peer's memory. Where it is not `signaled`, only its failure completes."""

    wr_id: int  # 64 bits, comes back in its completion
    address: int
    lkey: int
    size: int
    remote_address: int
    rkey: int
    signaled: bool


class Send(NamedTuple):
    """A message into the peer's next receive. Inline, its bytes may change as soon as it is posted."""

    wr_id: int
    address: int
    lkey: int
    size: int
    signaled: bool
    inline: bool


class Receive(NamedTuple):
    """A place for one message of the peer."""

    wr_id: int
    address: int
    lkey: int
    size: int


class Completion(NamedTuple):
    """`status` is an index of STATUSES; but for `wr_id` and `status`, all is right only where it is SUCCESS."""

    wr_id: int
    status: int
    is_receive: bool
    size: int  # bytes received


class MemoryRegion(Protocol):
    """Registered memory. Whoever registers keeps it mapped until it is closed."""

    @property
    def lkey(self) -> int: ...

    @property
    def rkey(self) -> int: ...

    def close(self) -> None:
        """Peers' READs fail from now on. Idempotent."""


class QueuePair(Protocol):
    """A reliable connection (RC) with its own completion queue and channel. Begins in RESET."""

    @property
    def number(self) -> int: ...

    @property
    def fd(self) -> int:
        """To wait on, and for nothing else: readable when a completion came since `arm`."""

    @property
    def inline_bytes(self) -> int: ...

    def connect(self, own: Own, remote: Remote) -> None:
        """RESET, INIT, RTR, RTS. What is posted to receive before goes in between RESET and INIT. VerbsError."""

    def prepare(self, port: int) -> None:
        """RESET to INIT, where receives may be posted. `connect` goes on from there as well."""

    def reset(self) -> None:
        """To RESET: all that was posted is gone, and no memory is read or written for it any more. VerbsError."""

    def fail(self) -> None:
        """To ERR: all that was posted completes, FLUSHED. VerbsError."""

    def state(self) -> str:
        """RESET INIT RTR RTS SQD SQE ERR, as the device has it now."""

    def post_reads(self, reads: Sequence[Read]) -> None:
        """VerbsError: how many of them were posted is not known; `reset` it."""

    def post_send(self, send: Send) -> None: ...

    def post_receive(self, receive: Receive) -> None: ...

    def arm(self) -> None:
        """Take up what the channel has said so far, and let it speak at the next completion. Poll after it."""

    def poll(self, limit: int) -> list[Completion]:
        """At most `limit` (1 and more) completions, those of one direction in order."""

    def close(self) -> None:
        """Idempotent."""


class Domain(Protocol):
    """A protection domain: its queue pairs reach its memory and no other."""

    def register(self, address: int, size: int, access: Access) -> MemoryRegion:
        """Pins the pages: may take milliseconds. Writable memory even for REMOTE_READ. VerbsError."""

    def register_dmabuf(self, fd: int, offset: int, size: int, address: int, access: Access) -> MemoryRegion:
        """Memory of a device by its dma-buf; `address` is what work requests call its first byte. VerbsError."""

    def queue_pair(self, limits: QueueLimits) -> QueuePair: ...

    def close(self) -> None:
        """After all that was made of it. Idempotent."""


class Context(Protocol):
    """An open device."""

    @property
    def device(self) -> str: ...

    def ports(self) -> list[Port]: ...

    def domain(self) -> Domain: ...

    def close(self) -> None:
        """After its domains. Idempotent."""


class Verbs(Protocol):
    """A binding."""

    @property
    def name(self) -> str: ...

    def devices(self) -> list[str]:
        """Names of the RDMA devices of this host; none where the kernel has no RDMA. VerbsError for other reasons."""

    def open(self, device: str) -> Context:
        """VerbsError when it cannot be opened."""


def load_verbs(wanted: str = "") -> Verbs:
    """The binding named `wanted`, else the first of BINDINGS that can be imported.

    ConfigError says what to install when there is none.
    """
    missing = []
    for name in (wanted,) if wanted else BINDINGS:
        try:
            module = import_module(f"kvstore.transport.rdma.{name}_binding")
        except ImportError as error:
            missing.append(f"{name}: {error}")
            continue
        load: Callable[[], Verbs] = module.load
        return load()
    raise ConfigError(
        "no RDMA binding: install python3-pyverbs (Debian, Ubuntu) or `pip install cairn-kv[rdma]`; "
        + "; ".join(missing)
    )
