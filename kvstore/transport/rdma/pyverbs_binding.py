"""Verbs by pyverbs, which comes with rdma-core: python3-pyverbs of the distribution."""

# ruff: noqa: E402
import ctypes
import errno
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_logging = logging.root.handlers[:], logging.root.level

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR, DmaBufMR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from kvstore.transport.rdma.sysfs_gids import read_gids
from kvstore.transport.rdma.verbs import (
    CLOSED,
    Access,
    Completion,
    Own,
    Port,
    QueueLimits,
    Read,
    Receive,
    Remote,
    Send,
    VerbsError,
)

try:
    import pyverbs.enums as _enums
except ImportError:  # from rdma-core 50 on, as classes
    import pyverbs.libibverbs_enums as _enums

logging.root.handlers[:] = _logging[0]  # pyverbs sets logging up when it is imported: the application's to do
logging.root.setLevel(_logging[1])

ABI_VERSION = Path("/sys/class/infiniband_verbs/abi_version")  # of the kernel's verbs, where it has any
RECEIVE_BIT = 128  # of a completion's opcode
HOP_LIMIT = 64
OPENED = "anon_inode:[infinibandevent]"
ERRORS = (PyverbsError, OSError, ValueError, OverflowError)


def _enum(name: str) -> int:
    """A number of libibverbs by its C name, wherever this version of pyverbs keeps it."""
    value = getattr(_enums, name, None)
    for holder in vars(_enums).values():
        if value is not None:
            break
        value = getattr(holder, "__members__", {}).get(name)
    if value is None:
        raise ImportError(f"this pyverbs has no {name}")
    return int(value)


READ, SEND = _enum("IBV_WR_RDMA_READ"), _enum("IBV_WR_SEND")
SIGNALED, INLINE = _enum("IBV_SEND_SIGNALED"), _enum("IBV_SEND_INLINE")
STATES = {_enum(f"IBV_QPS_{name}"): name for name in ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")}
NUMBERS = {name: number for number, name in STATES.items()}
QP_STATE, RC, ACTIVE = _enum("IBV_QP_STATE"), _enum("IBV_QPT_RC"), _enum("IBV_PORT_ACTIVE")
ETHERNET = _enum("IBV_LINK_LAYER_ETHERNET")


def _number(error: Exception) -> int:
    """The system's number; EIO where pyverbs does not say it, which is None, 0 or -1."""
    number = getattr(error, "error_code", None) or getattr(error, "errno", None) or 0
    return number if number > 0 else errno.EIO


@contextmanager
def translated(what: str) -> Iterator[None]:
    try:
        yield
    except ERRORS as error:
        raise VerbsError(_number(error), f"{what}: {error}") from error


class PyVerbs:
    name = "pyverbs"

    def devices(self) -> list[str]:
        try:
            return [device.name.decode() for device in get_device_list()]
        except (PyverbsError, OSError) as error:  # without the system's number: pyverbs drops it here
            if not ABI_VERSION.exists():
                return []
            raise VerbsError(_number(error), f"no list of devices: {error}") from error

    def open(self, device: str) -> "PyContext":
        with translated(f"cannot open {device}"):
            return PyContext(device, Context(name=device))


class PyContext:
    def __init__(self, device: str, context: Any) -> None:
        self.device = device
        self.handle: Any = context
        self.domains = 0

    def ports(self) -> list[Port]:
        with translated(f"{self.device}: cannot be queried"):
            return [self._port(number) for number in range(1, self.handle.query_device().phys_port_cnt + 1)]

    def _port(self, number: int) -> Port:
        found = self.handle.query_port(number)
        is_ethernet = found.link_layer == ETHERNET

        def query(at: int) -> bytes:
            with translated(f"{self.device}: GID {at}"):
                return bytes.fromhex(str(self.handle.query_gid(number, at)).replace(":", ""))

        link_layer = "ethernet" if is_ethernet else "infiniband"
        gids = tuple(read_gids(self.device, number, link_layer, found.gid_tbl_len, query))
        return Port(number, found.state == ACTIVE, 128 << found.active_mtu, found.lid, link_layer, gids)

    def domain(self) -> "PyDomain":
        with translated(f"{self.device}: no protection domain"):
            return PyDomain(self, PD(self.handle))

    def close(self) -> None:
        if self.domains:
            raise VerbsError(errno.EBUSY, f"{self.device}: {self.domains} domains are not closed")
        if self.handle is not None:
            with translated(f"{self.device}: cannot be closed"):
                self.handle.close()
            self.handle = None


class PyDomain:
    """Counts what was made of it: pyverbs would close that along, and crash when it is used afterwards."""

    def __init__(self, context: PyContext, pd: Any) -> None:
        self.context = context
        self.pd: Any = pd
        self.parts = 0
        context.domains += 1

    def register(self, address: int, size: int, access: Access) -> "PyRegion":
        if address <= 0 or size <= 0:  # at 0, pyverbs would allocate memory of its own
            raise VerbsError(errno.EINVAL, f"a region of {size} bytes at {address}")
        with translated(f"{self.context.device}: cannot register {size} bytes"):
            return PyRegion(self, MR(self.pd, size, int(access), address=address))

    def register_dmabuf(self, fd: int, offset: int, size: int, address: int, access: Access) -> "PyRegion":
        if address != offset:
            raise VerbsError(
                errno.EOPNOTSUPP, "pyverbs addresses a dma-buf by its offset and no other way; the binding ibverbs does"
            )
        with translated(f"{self.context.device}: cannot register a dma-buf of {size} bytes"):
            return PyRegion(self, DmaBufMR(self.pd, size, int(access), fd, offset))

    def queue_pair(self, limits: QueueLimits) -> "PyQueuePair":
        with translated(f"{self.context.device}: no queue pair"):
            return PyQueuePair(self, limits)

    def close(self) -> None:
        if self.parts:
            raise VerbsError(errno.EBUSY, f"{self.context.device}: {self.parts} parts of a domain are not closed")
        if self.pd is not None:
            with translated(f"{self.context.device}: a protection domain cannot be closed"):
                self.pd.close()
            self.pd = None
            self.context.domains -= 1


class PyRegion:
    def __init__(self, domain: PyDomain, region: Any) -> None:
        self._domain = domain
        domain.parts += 1
        self._region: Any = region
        self.lkey, self.rkey = int(region.lkey), int(region.rkey)  # asked of a closed region they crash

    def close(self) -> None:
        if self._region is not None:
            with translated("memory cannot be taken back from the NIC"):
                self._region.close()
            self._region = None
            self._domain.parts -= 1


class PyQueuePair:
    """Work requests are closed after they were posted: pyverbs leaks those that are not."""

    def __init__(self, domain: PyDomain, limits: QueueLimits) -> None:
        context = domain.context.handle
        self._channel: Any
        self._channel, self.fd = _open_channel(context)
        self._cq: Any = CQ(context, limits.sends + limits.receives + 1, None, self._channel, 0)
        self._qp: Any
        try:
            self._qp, granted = self._create(domain.pd, limits)
        except ERRORS:
            self._qp, granted = self._create(domain.pd, limits._replace(inline_bytes=0))
        self.inline_bytes = min(limits.inline_bytes, granted)
        self.number = int(self._qp.qp_num)
        self._state = "RESET"
        self._domain = domain
        domain.parts += 1

    def _create(self, pd: Any, limits: QueueLimits) -> tuple[Any, int]:
        """A queue pair, and how many bytes it takes inline; some devices refuse to make one that is asked for more."""
        cap = QPCap(
            max_send_wr=limits.sends,
            max_recv_wr=max(limits.receives, 1),
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=limits.inline_bytes,
        )
        wanted = QPInitAttr(qp_type=RC, scq=self._cq, rcq=self._cq, sq_sig_all=0, cap=cap)
        return QP(pd, wanted), wanted.max_inline_data

    def prepare(self, port: int) -> None:
        if self._state != "RESET":
            self.reset()
        with translated("to INIT"):
            self._qp.to_init(self._attributes(port))
        self._state = "INIT"

    def connect(self, own: Own, remote: Remote) -> None:
        if self._state not in ("RESET", "INIT"):
            self.reset()
        if self._state == "RESET":
            self.prepare(own.port)
        wanted, timers = self._attributes(own.port), own.timers
        wanted.path_mtu = (own.mtu_bytes // 128).bit_length() - 1
        wanted.dest_qp_num, wanted.rq_psn, wanted.sq_psn = remote.number, remote.psn, own.psn
        wanted.max_rd_atomic = wanted.max_dest_rd_atomic = timers.reads
        wanted.timeout, wanted.retry_cnt, wanted.rnr_retry = timers.timeout, timers.retries, timers.rnr_retries
        wanted.min_rnr_timer = timers.min_rnr_timer
        with translated(f"cannot connect to queue pair {remote.number}"):
            text = ":".join(remote.gid[at : at + 2].hex() for at in range(0, 16, 2))
            route = GlobalRoute(
                dgid=GID(text), sgid_index=own.gid_number, hop_limit=HOP_LIMIT, traffic_class=own.traffic_class
            )
            wanted.ah_attr = AHAttr(gr=route, is_global=1, dlid=remote.lid, port_num=own.port)
            self._state = "RTR"  # unless RTS follows, it is reset first
            for state, mask in MASKS.items():
                wanted.qp_state = NUMBERS[state]
                self._qp.modify(wanted, mask)
        self._state = "RTS"

    def _attributes(self, port: int) -> Any:
        wanted = QPAttr(port_num=port)
        wanted.qp_access_flags = int(Access.LOCAL_WRITE | Access.REMOTE_READ)
        return wanted

    def reset(self) -> None:
        with translated("to RESET"):
            self._qp.modify(QPAttr(qp_state=NUMBERS["RESET"]), QP_STATE)
        self._state = "RESET"

    def fail(self) -> None:
        with translated("to ERR"):
            self._qp.modify(QPAttr(qp_state=NUMBERS["ERR"]), QP_STATE)
        self._state = "ERR"

    def state(self) -> str:
        with translated("its state"):
            return STATES[self._qp.query(QP_STATE)[0].qp_state]

    def post_reads(self, reads: Sequence[Read]) -> None:
        post = self._qp.post_send
        parts: list[Any] = []
        work = None
        try:
            for wr_id, address, lkey, size, remote_address, rkey, signaled in reversed(reads):
                element = SGE(address, size, lkey)
                parts.append(element)
                work = SendWR(wr_id, READ, 1, 0, [element], SIGNALED if signaled else 0, work)  # names the one after it
                parts.append(work)
                work.set_wr_rdma(rkey, remote_address)
            if work is not None:
                post(work)
        except ERRORS as error:
            raise VerbsError(_number(error), f"READs were not posted: {error}") from error
        finally:
            for part in parts:
                part.close()

    def post_send(self, send: Send) -> None:
        flags = (SIGNALED if send.signaled else 0) | (INLINE if send.inline else 0)
        parts: list[Any] = []
        try:
            parts.append(SGE(send.address, send.size, send.lkey))
            parts.append(SendWR(send.wr_id, SEND, 1, 0, parts[:], flags))
            self._qp.post_send(parts[1])
        except ERRORS as error:
            raise VerbsError(_number(error), f"a message was not posted: {error}") from error
        finally:
            for part in parts:
                part.close()

    def post_receive(self, receive: Receive) -> None:
        parts: list[Any] = []
        try:
            parts.append(SGE(receive.address, receive.size, receive.lkey))
            parts.append(RecvWR(receive.wr_id, 1, parts[:]))
            self._qp.post_recv(parts[1])
        except ERRORS as error:
            raise VerbsError(_number(error), f"a receive was not posted: {error}") from error
        finally:
            for part in parts:
                part.close()

    def arm(self) -> None:
        events = 0
        try:
            try:
                while True:
                    self._channel.get_cq_event(self._cq)
                    events += 1
            finally:
                if events:
                    self._cq.ack_events(events)
        except ERRORS as error:
            if _number(error) != errno.EAGAIN:  # that: there is no other
                raise VerbsError(_number(error), f"its channel: {error}") from error
        with translated("its completion queue"):
            self._cq.req_notify()

    def poll(self, limit: int) -> list[Completion]:
        try:
            found = self._cq.poll(limit)[1]
        except (PyverbsError, OSError) as error:
            raise VerbsError(_number(error), f"completions: {error}") from error
        return [Completion(done.wr_id, done.status, bool(done.opcode & RECEIVE_BIT), done.byte_len) for done in found]

    def close(self) -> None:
        if self._qp is CLOSED:
            return
        with translated("a queue pair cannot be closed"):
            for part in (self._qp, self._cq, self._channel):
                part.close()
        self._qp = self._cq = self._channel = CLOSED
        self._domain.parts -= 1


def _masks() -> dict[str, int]:
    def mask(*names: str) -> int:
        return QP_STATE | sum(_enum(f"IBV_QP_{name}") for name in names)

    return {
        "RTR": mask("AV", "PATH_MTU", "DEST_QPN", "RQ_PSN", "MAX_DEST_RD_ATOMIC", "MIN_RNR_TIMER"),
        "RTS": mask("TIMEOUT", "RETRY_CNT", "RNR_RETRY", "SQ_PSN", "MAX_QP_RD_ATOMIC"),
    }


MASKS = _masks()


def _open_channel(context: Any) -> tuple[Any, int]:
    """A completion channel and its descriptor. It never blocks: pyverbs would hold the interpreter meanwhile."""
    channel = CompChannel(context)
    fd = int(channel.fd) if hasattr(channel, "fd") else _hidden_fd(channel, context)
    os.set_blocking(fd, False)
    return channel, fd


def _hidden_fd(channel: Any, context: Any) -> int:
    """Pyverbs before 59 does not tell it. Which descriptor is new cannot be seen where other threads open some too.

    A CompChannel of those has the fields `ibv_comp_channel *cc; object context`, and ibv_comp_channel begins with
    `ibv_context *context; int fd`.
    """
    pointers = ctypes.sizeof(ctypes.c_void_p)
    words = (ctypes.c_size_t * (type(channel).__basicsize__ // pointers)).from_address(id(channel))
    at = list(words).index(id(context), 1)
    fd = ctypes.c_int.from_address(words[at - 1] + pointers).value
    if os.readlink(f"/proc/self/fd/{fd}") != OPENED:
        raise OSError(errno.ENOTSUP, "this pyverbs does not tell the descriptor of a completion channel")
    return fd


def load() -> PyVerbs:
    return PyVerbs()
