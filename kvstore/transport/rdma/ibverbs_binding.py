"""Verbs by the PyPI package `ibverbs`, which loads the system's libibverbs."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ibverbs as ib

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

NO_RDMA = (errno.ENOSYS, errno.ENOENT, errno.ENODEV)
READ, SEND = int(ib.WROpcode.RDMA_READ), int(ib.WROpcode.SEND)
SIGNALED, INLINE = int(ib.SendFlags.SIGNALED), int(ib.SendFlags.INLINE)
RECEIVE_BIT = 128  # of a completion's opcode
STATES: dict[int, str] = {int(state): state.name for state in ib.QPState}
QP_STATE, RESET, ERR = int(ib.QPAttrMask.STATE), int(ib.QPState.RESET), int(ib.QPState.ERR)
HOP_LIMIT = 64
Work, Element = ib.SendWR, ib.SGE
ERRORS = (ib.VerbsError, OSError, ValueError, OverflowError)


@contextmanager
def translated(what: str) -> Iterator[None]:
    try:
        yield
    except ERRORS as error:
        raise VerbsError(_number(error), f"{what}: {error}") from error


def _number(error: Exception) -> int:
    return getattr(error, "errno", None) or errno.EIO


class IbVerbs:
    name = "ibverbs"

    def devices(self) -> list[str]:
        try:
            return [_text(device.name) for device in ib.get_device_list()]
        except (ib.VerbsError, OSError) as error:
            if _number(error) in NO_RDMA:
                return []
            raise VerbsError(_number(error), f"no list of devices: {error}") from error

    def open(self, device: str) -> "IbContext":
        with translated(f"cannot open {device}"):
            for found in ib.get_device_list():
                if _text(found.name) == device:
                    return IbContext(device, found.open())
        raise VerbsError(errno.ENODEV, f"there is no RDMA device {device}")


class IbContext:
    def __init__(self, device: str, context: Any) -> None:
        self.device = device
        self.handle: Any = context

    def ports(self) -> list[Port]:
        with translated(f"{self.device}: cannot be queried"):
            return [self._port(number) for number in range(1, self.handle.query_device().phys_port_cnt + 1)]

    def _port(self, number: int) -> Port:
        found = self.handle.query_port(number)
        is_ethernet = int(found.link_layer) == 2

        def query(at: int) -> bytes:
            with translated(f"{self.device}: GID {at}"):
                return bytes(self.handle.query_gid(number, at).raw)

        link_layer = "ethernet" if is_ethernet else "infiniband"
        gids = tuple(read_gids(self.device, number, link_layer, found.gid_tbl_len, query))
        is_active = int(found.state) == int(ib.PortState.ACTIVE)
        return Port(number, is_active, 128 << int(found.active_mtu), int(found.lid), link_layer, gids)

    def domain(self) -> "IbDomain":
        with translated(f"{self.device}: no protection domain"):
            return IbDomain(self, self.handle.alloc_pd())

    def close(self) -> None:
        if self.handle is not None:
            with translated(f"{self.device}: cannot be closed"):
                self.handle.close()
            self.handle = None


class IbDomain:
    def __init__(self, context: IbContext, pd: Any) -> None:
        self.context = context
        self.pd: Any = pd

    def register(self, address: int, size: int, access: Access) -> "IbRegion":
        if address <= 0 or size <= 0:
            raise VerbsError(errno.EINVAL, f"a region of {size} bytes at {address}")
        with translated(f"{self.context.device}: cannot register {size} bytes"):
            return IbRegion(self.pd.reg_mr(address, size, int(access)))

    def register_dmabuf(self, fd: int, offset: int, size: int, address: int, access: Access) -> "IbRegion":
        with translated(f"{self.context.device}: cannot register a dma-buf of {size} bytes"):
            return IbRegion(self.pd.reg_dmabuf_mr(offset, size, address, fd, int(access)))

    def queue_pair(self, limits: QueueLimits) -> "IbQueuePair":
        with translated(f"{self.context.device}: no queue pair"):
            return IbQueuePair(self.context.handle, self.pd, limits)

    def close(self) -> None:
        if self.pd is not None:
            with translated(f"{self.context.device}: a protection domain cannot be closed"):
                self.pd.close()
            self.pd = None


class IbRegion:
    def __init__(self, region: Any) -> None:
        self._region: Any = region
        self.lkey, self.rkey = int(region.lkey), int(region.rkey)

    def close(self) -> None:
        if self._region is not None:
            with translated("memory cannot be taken back from the NIC"):
                self._region.close()
            self._region = None


class IbQueuePair:
    def __init__(self, context: Any, pd: Any, limits: QueueLimits) -> None:
        self._channel: Any = context.create_comp_channel()
        self.fd = int(self._channel.fd)
        os.set_blocking(self.fd, False)
        self._cq: Any = context.create_cq(limits.sends + limits.receives + 1, self._channel)
        self._qp: Any
        try:
            self._qp = self._create(pd, limits)
        except ERRORS:  # some devices refuse to make one that is asked for more inline than they have
            self._qp = self._create(pd, limits._replace(inline_bytes=0))
        self.number = int(self._qp.qp_num)
        self.inline_bytes = min(limits.inline_bytes, int(self._qp.query()[1].max_inline_data))
        self._state = "RESET"

    def _create(self, pd: Any, limits: QueueLimits) -> Any:
        wanted = ib.QPInitAttr(
            send_cq=self._cq,
            recv_cq=self._cq,
            qp_type=ib.QPType.RC,
            max_send_wr=limits.sends,
            max_recv_wr=max(limits.receives, 1),
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=limits.inline_bytes,
            sq_sig_all=False,
        )
        return pd.create_qp(wanted)

    def prepare(self, port: int) -> None:
        if self._state != "RESET":
            self.reset()
        with translated("to INIT"):
            self._qp.to_init(port, int(Access.REMOTE_READ | Access.LOCAL_WRITE))
        self._state = "INIT"

    def connect(self, own: Own, remote: Remote) -> None:
        if self._state not in ("RESET", "INIT"):
            self.reset()
        if self._state == "RESET":
            self.prepare(own.port)
        timers = own.timers
        mtu = (own.mtu_bytes // 128).bit_length() - 1
        with translated(f"cannot connect to queue pair {remote.number}"):
            theirs = ib.QPInfo(remote.number, remote.psn, remote.lid, remote.gid, own.port, mtu)
            self._state = "RTR"  # unless RTS follows, it is reset first
            self._qp.to_rtr(theirs, own.gid_number, mtu=mtu, hop_limit=HOP_LIMIT, min_rnr_timer=timers.min_rnr_timer,
                            max_dest_rd_atomic=timers.reads, traffic_class=own.traffic_class)  # fmt: skip
            self._qp.to_rts(own.psn, timeout=timers.timeout, retry_cnt=timers.retries,
                            rnr_retry=timers.rnr_retries, max_rd_atomic=timers.reads)  # fmt: skip
        self._state = "RTS"

    def reset(self) -> None:
        with translated("to RESET"):
            self._qp.modify(QP_STATE, qp_state=RESET)
        self._state = "RESET"

    def fail(self) -> None:
        with translated("to ERR"):
            self._qp.modify(QP_STATE, qp_state=ERR)
        self._state = "ERR"

    def state(self) -> str:
        with translated("its state"):
            return STATES[int(self._qp.query()[0]["qp_state"])]

    def post_reads(self, reads: Sequence[Read]) -> None:
        try:
            self._qp.post_send(
                [
                    Work(wr_id, [Element(address, size, lkey)], READ, SIGNALED if signaled else 0, remote_address, rkey)
                    for wr_id, address, lkey, size, remote_address, rkey, signaled in reads
                ]
            )
        except ERRORS as error:
            raise VerbsError(_number(error), f"READs were not posted: {error}") from error

    def post_send(self, send: Send) -> None:
        flags = (SIGNALED if send.signaled else 0) | (INLINE if send.inline else 0)
        with translated("a message was not posted"):
            self._qp.post_send(Work(send.wr_id, [Element(send.address, send.size, send.lkey)], SEND, flags))

    def post_receive(self, receive: Receive) -> None:
        with translated("a receive was not posted"):
            self._qp.post_recv(ib.RecvWR(receive.wr_id, [Element(receive.address, receive.size, receive.lkey)]))

    def arm(self) -> None:
        events = 0
        try:
            try:
                while True:
                    self._channel.get_cq_event()
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
            found = self._cq.poll(limit)
        except ERRORS as error:
            raise VerbsError(_number(error), f"completions: {error}") from error
        return [
            Completion(done.wr_id, int(done.status), bool(int(done.opcode) & RECEIVE_BIT), done.byte_len)
            for done in found
        ]

    def close(self) -> None:
        if self._qp is CLOSED:
            return
        with translated("a queue pair cannot be closed"):
            for part in (self._qp, self._cq, self._channel):
                part.close()
        self._qp = self._cq = self._channel = CLOSED


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode()


def load() -> IbVerbs:
    return IbVerbs()
