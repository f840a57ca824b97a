"""What operators ask about the whole cluster, whichever node they ask."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.catalogue import OpenNamespace
from kvstore.cluster.locating import place_of
from kvstore.cluster.members import Member
from kvstore.cluster.service import Cluster
from kvstore.errors import NotFound, StoreError
from kvstore.message import Message
from kvstore.packed import pack_keys
from kvstore.types import DRAM, BlockKey
from kvstore.wire_cluster import TIER_BITS, Discard, Discarded, Examine, Vacate, Vacated

DISCARD_S = 2.0  # a client waits 5 s for the whole, however many members hang
EXAMINE_S = 20.0
VACATE_S = 3600.0


class Overview:
    """Asks this node's part of the cluster, and through it the others."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.replicate = cluster.replicate

    @property
    def me(self) -> str:
        return self._cluster.me.name

    @property
    def trouble(self) -> str:
        return self._cluster.trouble

    async def whereabouts(
        self, space: OpenNamespace, keys: Sequence[BlockKey], parent: BlockKey | None
    ) -> list[dict[str, list[str]]]:
        """For each block who has it, this node included, and in which tiers."""
        place = place_of(space, keys, 0, parent) if keys else None
        others = await self._cluster.locating.holders(space, keys, place) if place is not None else [{}] * len(keys)
        found = []
        for key, holders in zip(keys, others, strict=True):
            here = sum(
                TIER_BITS[tier.tier]
                for tier in space.spaces
                if self._cluster.store.table.readable(tier, key) is not None
            )
            tiers = {**({self._cluster.me.name: here} if here else {}), **holders}
            found.append(
                {node: [str(tier) for tier, bit in TIER_BITS.items() if bits & bit] for node, bits in tiers.items()}
            )
        return found

    async def drain(self, name: str) -> tuple[int, int]:
        """As `vacate`, of any member. NotFound."""
        if name == self._cluster.me.name:
            return await self._cluster.vacate()
        reply: Vacated = await self._cluster.links.ask(self._member(name), Vacate, VACATE_S)
        return reply.moved, reply.left

    def _member(self, name: str) -> Member:
        member = self._cluster.view.members.get(name)
        if member is None:
            raise NotFound(f"no member {name!r}; there are {', '.join(sorted(self._cluster.view.members)) or 'none'}")
        return member

    async def discard(self, space: OpenNamespace, keys: Sequence[BlockKey], *, whole: bool) -> tuple[int, int]:
        """Delete blocks at all other members: (blocks, bytes freed) of those that answered."""

        def request(number: int) -> Discard:
            return Discard(number, space.tenant.name, space.namespace, pack_keys(keys), whole)

        replies = await self._all(request, DISCARD_S)
        done = [reply for reply in replies.values() if isinstance(reply, Discarded)]
        return sum(reply.blocks for reply in done), sum(reply.freed_bytes for reply in done)

    async def check(self) -> list[str]:
        """Fsck of all members: a sentence for each problem, with the node that has it."""
        mine = await self._cluster.problems()
        found = [f"{self._cluster.me.name}: {problem}" for problem in mine]
        members = {name: member.epoch for name, member in self._cluster.view.members.items()}
        if self._cluster.me.name not in members and not mine:
            found.append(f"{self._cluster.me.name}: is no member itself")
        for name, reply in (await self._all(Examine, EXAMINE_S)).items():
            if isinstance(reply, StoreError):
                found.append(f"{name}: does not answer: {reply}")
                continue
            found += [f"{name}: {problem}" for problem in reply.problems]
            if reply.members != members:
                others = ", ".join(
                    sorted(f"{other} (epoch {epoch})" for other, epoch in reply.members.items() - members.items())
                )
                lacking = ", ".join(
                    sorted(f"{other} (epoch {epoch})" for other, epoch in members.items() - reply.members.items())
                )
                found.append(f"{name}: sees other members: {others or 'none'} more, {lacking or 'none'} less")
        return found

    async def _all(self, request: Callable[[int], Message], within_s: float) -> Mapping[str, Any]:
        """What each other member answers, or the error."""
        others = [
            member for name, member in sorted(self._cluster.view.members.items()) if name != self._cluster.me.name
        ]

        async def ask(member: Member) -> Any:
            try:
                return await self._cluster.links.ask(member, request, within_s)
            except StoreError as error:
                return error

        replies = await asyncio.gather(*map(ask, others))
        return {member.name: reply for member, reply in zip(others, replies, strict=True)}

    def roster(self) -> list[dict[str, Any]]:
        """A row for each member, for people."""
        rows = []
        for name, member in sorted(self._cluster.view.members.items()):
            route = self._cluster.routes.routes.get(name)
            _, said = self._cluster.rooms.get(name, (0, None))
            used_bytes, blocks = (said.used_bytes, said.blocks) if said is not None else (0, 0)
            if name == self._cluster.me.name:
                tier = self._cluster.store.table.tiers[DRAM]
                used_bytes, blocks = tier.used_bytes, tier.replicas
            rows.append(
                {
                    "name": name,
                    "epoch": member.epoch,
                    "address": member.address,
                    "rest": member.rest,
                    "condition": member.condition,
                    "labels": dict(member.labels),
                    "transports": list(member.transports),
                    "capacity_bytes": member.capacity_bytes,
                    "used_bytes": used_bytes,
                    "blocks": blocks,
                    "load": said.load if said is not None else 0.0,
                    "latency_ms": route.latency_s * 1000 if route is not None else 0.0,
                    "bytes_per_s": route.reading.bytes_per_s if route is not None else 0.0,
                    "read_bytes": route.reading.total_bytes if route is not None else 0,
                    "failures": route.health.failures if route is not None else 0,
                    "trouble": route.health.reason if route is not None else "",
                }
            )
        return rows

    def numbers(self) -> dict[str, Any]:
        """What is counted of the cluster here, for stat and metrics."""
        return {
            "members": len(self._cluster.view.members),
            "in_touch": not self._cluster.trouble,
            "draining": self._cluster.is_draining,
            "directory_blocks": self._cluster.directory.blocks,
            "directory_holdings": self._cluster.directory.holdings,
            "copies": self._cluster.holdings.copies,
            "copy_bytes": self._cluster.store.table.tiers[DRAM].copy_bytes,
            "adrift_blocks": self._cluster.holdings.adrift,
            "locates": self._cluster.locating.requests,
            "announced_batches": self._cluster.telling.batches,
            "repaired_partitions": self._cluster.telling.repaired_partitions,
            "pulled_bytes": self._cluster.pulling.reading.total_bytes,
            "pulled_bytes_per_second": self._cluster.pulling.reading.bytes_per_s,
            "retried_blocks": self._cluster.pulling.retried_blocks,
            "replicated_blocks": self._cluster.replicating.copied_blocks,
            "dropped_copies": self._cluster.replicating.dropped_copies,
            "short_blocks": self._cluster.replicating.short_blocks,
            "reads_per_second": self._cluster.replicating.reads_per_s,
        }
