"""A connection to one etcd server, and what membership asks of it: leases, records of members, changes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from kvstore.cluster.members import DEAD_S, Member
from kvstore.errors import ConfigError

FAILURES: tuple[type[Exception], ...]
try:
    import grpc.aio  # type: ignore[import-untyped]
    from etcd3aio import EtcdError
    from etcd3aio.kv import KVService, prefix_range_end
    from etcd3aio.lease import LeaseService
    from etcd3aio.watch import WatchService

    FAILURES = (EtcdError, grpc.RpcError, OSError)
except ImportError:
    FAILURES = ()

CALL_S = 1.0  # for one call to etcd: less than DEAD_S, so that a hung server leaves time to ask another
CLAIMS = 3  # of a name whose key changes meanwhile
MAX_MESSAGE_BYTES = 64 << 20  # 100,000 members, listed in one answer
CHANNEL = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new connection does not wait for the pause of a broken one
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)


class Line:
    """A connection to one etcd server. Each call ends within `CALL_S`, or raises one of `FAILURES`."""

    def __init__(self, endpoint: str, prefix: str) -> None:
        self._prefix = prefix
        self._channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL)
        self._keys = KVService(self._channel, max_attempts=1)
        self._leases = LeaseService(self._channel, max_attempts=1)
        self._watches = WatchService(self._channel, max_attempts=1)

    def named(self, key: bytes) -> str:
        return key.decode(errors="replace").removeprefix(self._prefix)

    async def grant(self) -> int:
        return int((await self._leases.grant(round(DEAD_S), timeout=CALL_S)).ID)

    async def keep_alive(self, lease: int) -> bool:
        """Whether there is such a lease, which then is as new."""
        answers = self._leases.keep_alive(lease)
        try:
            async with asyncio.timeout(CALL_S):
                async for answer in answers:
                    return bool(answer.TTL > 0)
        finally:
            answers.cancel()
        raise ConnectionError("a heartbeat was not answered")

    async def revoke(self, lease: int) -> None:
        await self._leases.revoke(lease, timeout=CALL_S)

    async def members(self) -> tuple[int, dict[str, Member]]:
        """All that are there, and of which revision that is."""
        answer = await self._keys.get(self._prefix, prefix_range_end(self._prefix), timeout=CALL_S)
        named = ((self.named(held.key), held.value) for held in answer.kvs)
        listed = {name: member for name, value in named if (member := decoded(name, value)) is not None}
        return answer.header.revision, listed

    def changes(self, revision: int) -> AsyncIterator[Any]:
        """etcd's answers to a watch of all members from a revision on."""
        return self._watches.watch(self._prefix, prefix_range_end(self._prefix), revision)

    async def claim(self, member: Member, lease: int) -> int:
        """Put a member's record in place of an older start's, and say at which revision. ConfigError when another that
        is as new stands there."""
        key = self._prefix + member.name
        for _ in range(CLAIMS):
            held = await self._held(key)
            known = decoded(member.name, held.value) if held is not None else None
            if held is not None and held.lease != lease and known is not None and known.epoch >= member.epoch:
                where = f"at {known.address}, epoch {known.epoch}"
                raise ConfigError(f"a living node has the name {member.name}: {where}; this one has {member.epoch}")
            put = KVService.txn_op_put(key, msgspec.json.encode(member), lease=lease)
            answer = await self._keys.txn(_unchanged(key, held), [put], timeout=CALL_S)
            if answer.succeeded:
                return int(answer.header.revision)
        raise ConnectionError(f"others write {key} all the time")

    async def remove(self, name: str, epoch: int) -> None:
        """Delete a member's record, if it is of that start of it."""
        key = self._prefix + name
        held = await self._held(key)
        if held is not None and (known := decoded(name, held.value)) is not None and known.epoch == epoch:
            await self._keys.txn(_unchanged(key, held), [KVService.txn_op_delete(key)], timeout=CALL_S)

    async def close(self) -> None:
        await self._channel.close()

    async def _held(self, key: str) -> Any:
        return next(iter((await self._keys.get(key, timeout=CALL_S)).kvs), None)


def _unchanged(key: str, held: Any) -> list[Any]:
    """What a transaction compares: this very write of a key, or that there is none."""
    return [
        KVService.txn_compare_create_revision(key, held.create_revision if held is not None else 0),
        KVService.txn_compare_version(key, held.version if held is not None else 0),
    ]


def decoded(name: str, value: bytes) -> Member | None:
    """None for what is no record of that name: deleted, or written by something else."""
    try:
        member = msgspec.json.decode(value, type=Member)
    except msgspec.DecodeError:
        return None
    return member if member.name == name else None
