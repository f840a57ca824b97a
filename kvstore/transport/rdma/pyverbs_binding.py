"""Verbs by pyverbs, which comes with rdma-core: python3-pyverbs of the distribution."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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

NO_RDMA = (errno.ENOSYS, errno.ENOENT, errno.ENODEV)
RECEIVE_BIT = 128  # of a completion's opcode
HOP_LIMIT = 64
OPENED = "anon_inode:[infinibandevent]"


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
    return getattr(error, "error_code", None) or getattr(error, "errno", None) or errno.EIO


@contextmanager
def translated(what: str) -> Iterator[None]:
    try:
        yield
    except (PyverbsError, OSError, ValueError) as error:
        raise VerbsError(_number(error), f"{what}: {error}") from error


class PyVerbs:
    name = "pyverbs"

    def devices(self) -> list[str]:
        try:
            return [device.name.decode() for device in get_device_list()]
        except (PyverbsError, OSError) as error:
            if _number(error) in NO_RDMA:
                return []
            raise VerbsError(_number(error), f"no list of devices: {error}") from error

    def open(self, device: str) -> "PyContext":
        with translated(f"cannot open {device}"):
            return PyContext(device, Context(name=device))


class PyContext:
    def __init__(self, device: str, context: Any) -> None:
        self.device = device
        self.handle: Any = context

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
        handle, self.handle = self.handle, None
        if handle is not None:
            with translated(f"{self.device}: cannot be closed"):
                handle.close()


class PyDomain:
    def __init__(self, context: PyContext, pd: Any) -> None:
        self.context = context
        self.pd: Any = pd

    def register(self, address: int, size: int, access: Access) -> "PyRegion":
        if size <= 0:
            raise VerbsError(errno.EINVAL, f"a region of {size} bytes")
        with translated(f"{self.context.device}: cannot register {size} bytes"):
            return PyRegion(MR(self.pd, size, int(access), address=address))

    def register_dmabuf(self, fd: int, offset: int, size: int, address: int, access: Access) -> "PyRegion":
        with translated(f"{self.context.device}: cannot register a dma-buf of {size} bytes"):
            return PyRegion(DmaBufMR(self.pd, size, int(access), fd, offset, address))

    def queue_pair(self, limits: QueueLimits) -> "PyQueuePair":
        with translated(f"{self.context.device}: no queue pair"):
            return PyQueuePair(self.context.handle, self.pd, limits)

    def close(self) -> None:
        pd, self.pd = self.pd, None
        if pd is not None:
            with translated(f"{self.context.device}: a protection domain cannot be closed"):
                pd.close()


class PyRegion:
    def __init__(self, region: Any) -> None:
        self._region: Any = region
        self.lkey, self.rkey = int(region.lkey), int(region.rkey)  # asked of a closed region they crash

    def close(self) -> None:
        region, self._region = self._region, None
        if region is not None:
            with translated("memory cannot be taken back from the NIC"):
                region.close()


class PyQueuePair:
    """Work requests are closed after they were posted: pyverbs leaks those that are not."""

    def __init__(self, context: Any, pd: Any, limits: QueueLimits) -> None:
        self._channel: Any
        self._channel, self.fd = _open_channel(context)
        self._cq: Any = CQ(context, limits.sends + limits.receives + 1, None, self._channel, 0)
        cap = QPCap(
            max_send_wr=limits.sends,
            max_recv_wr=max(limits.receives, 1),
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=limits.inline_bytes,
        )
        self._qp: Any = QP(pd, QPInitAttr(qp_type=RC, scq=self._cq, rcq=self._cq, sq_sig_all=0, cap=cap))
        self.number = int(self._qp.qp_num)
        self.inline_bytes = limits.inline_bytes
        self._state = "RESET"
        self._is_closed = False

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
            self._step("RTR", wanted)
            self._step("RTS", wanted)
        self._state = "RTS"

    def _step(self, state: str, wanted: Any) -> None:
        wanted.qp_state = NUMBERS[state]
        self._qp.modify(wanted, MASKS[state])

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
        for wr_id, address, lkey, size, remote_address, rkey, signaled in reads:
            element = SGE(address, size, lkey)
            work = SendWR(wr_id=wr_id, opcode=READ, num_sge=1, sg=[element], send_flags=SIGNALED if signaled else 0)
            work.set_wr_rdma(rkey, remote_address)
            try:
                post(work)
            except (PyverbsError, OSError) as error:
                raise VerbsError(_number(error), f"READs were not posted: {error}") from error
            finally:
                work.close()
                element.close()

    def post_send(self, send: Send) -> None:
        element = SGE(send.address, send.size, send.lkey)
        flags = (SIGNALED if send.signaled else 0) | (INLINE if send.inline else 0)
        work = SendWR(wr_id=send.wr_id, opcode=SEND, num_sge=1, sg=[element], send_flags=flags)
        try:
            with translated("a message was not posted"):
                self._qp.post_send(work)
        finally:
            work.close()
            element.close()

    def post_receive(self, receive: Receive) -> None:
        element = SGE(receive.address, receive.size, receive.lkey)
        work = RecvWR(wr_id=receive.wr_id, num_sge=1, sg=[element])
        try:
            with translated("a receive was not posted"):
                self._qp.post_recv(work)
        finally:
            work.close()
            element.close()

    def arm(self) -> None:
        events = 0
        try:
            while True:
                self._channel.get_cq_event(self._cq)
                events += 1
        except (PyverbsError, OSError):  # EAGAIN: there is no other
            pass
        with translated("its completion queue"):
            if events:
                self._cq.ack_events(events)
            self._cq.req_notify()

    def poll(self, limit: int) -> list[Completion]:
        try:
            found = self._cq.poll(limit)[1]
        except (PyverbsError, OSError) as error:
            raise VerbsError(_number(error), f"completions: {error}") from error
        return [Completion(done.wr_id, done.status, bool(done.opcode & RECEIVE_BIT), done.byte_len) for done in found]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with translated("a queue pair cannot be closed"):
            for part in (self._qp, self._cq, self._channel):
                part.close()
        self._qp = self._cq = self._channel = CLOSED


def _masks() -> dict[str, int]:
    def mask(*names: str) -> int:
        return QP_STATE | sum(_enum(f"IBV_QP_{name}") for name in names)

    return {
        "RTR": mask("AV", "PATH_MTU", "DEST_QPN", "RQ_PSN", "MAX_DEST_RD_ATOMIC", "MIN_RNR_TIMER"),
        "RTS": mask("TIMEOUT", "RETRY_CNT", "RNR_RETRY", "SQ_PSN", "MAX_QP_RD_ATOMIC"),
    }


MASKS = _masks()


def _open_channel(context: Any) -> tuple[Any, int]:
    """A completion channel and its descriptor, which pyverbs before 50 does not tell. Never blocks."""
    before = _event_descriptors()
    channel = CompChannel(context)
    fd = channel.fd if hasattr(channel, "fd") else (_event_descriptors() - before).pop()
    os.set_blocking(fd, False)
    return channel, int(fd)


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == OPENED:
                found.add(int(name))
        except OSError:  # closed meanwhile
            continue
    return found


class Closed:
    """In place of what was closed."""

    def __getattr__(self, name: str) -> Any:
        raise VerbsError(errno.EBADF, f"{name} of a queue pair that is closed")


CLOSED = Closed()


def load() -> PyVerbs:
    return PyVerbs()
