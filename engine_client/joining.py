"""How a connection comes by RDMA: queue pairs proposed over TCP, and connected anew when they fail."""

import time

from engine_client.remote import Rdma, Remote
from engine_client.steps import Call, Link, Operation
from kvstore import wire
from kvstore.errors import ConnectFailed, DeadlineExceeded, PeerLost, ProtocolError, StoreError
from kvstore.transport.rdma.verbs import VerbsError


def join(link: Link, rdma: Rdma, *, is_forced: bool) -> Operation[Remote | None]:
    """Queue pairs to the node, right after Hello; None where it has to go on over TCP.

    ConnectFailed when the node has left TCP and cannot be reached otherwise, or where RDMA is forced and cannot be had.
    The connection is of no more use then.
    """
    ports = link.welcome.ports
    if not ports or not rdma.health.may_try(time.monotonic()):
        if is_forced:
            raise ConnectFailed("the node offers no RDMA" if not ports else f"RDMA failed: {rdma.health.reason}")
        return None
    peer = rdma.peer()
    has_moved = False
    try:
        paths, channel = peer.propose(ports)
        mine = tuple(nic.described() for nic in rdma.nics)
        joined = yield Call(lambda number: wire.Join(number, mine, paths, channel))
        has_moved = True
        peer.settle(joined, range(len(paths)))
    except (StoreError, VerbsError) as error:
        peer.close()
        rdma.health.failed(str(error), time.monotonic())
        if has_moved or is_forced or isinstance(error, PeerLost | ProtocolError):
            raise ConnectFailed(f"no RDMA connection: {error}") from error
        if isinstance(error, DeadlineExceeded):
            raise
        return None
    except BaseException:
        peer.close()
        raise
    rdma.health.succeeded()
    return Remote(rdma, peer, ports)


def rejoin(link: Link) -> Operation[None]:
    """Connect paths anew that failed, where that is due. Those that cannot be stay down for a while."""
    assert link.remote is not None
    peer = link.remote.peer
    numbers = peer.paths.broken()
    if numbers:
        ends = peer.again(numbers)
        joined = yield Call(lambda number: wire.Join(number, (), ends))
        peer.settle(joined, numbers)


def may_join_later(link: Link, rdma: Rdma | None) -> bool:
    """Whether a connection over TCP that nobody uses should be made anew, since RDMA may work again."""
    if rdma is None or link.remote is not None or not link.welcome.ports or link.lent or rdma.health.is_well:
        return False
    return rdma.health.may_try(time.monotonic())
