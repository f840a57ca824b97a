"""A node's part in the cluster, put together from its settings."""

import asyncio
import logging
from random import Random, SystemRandom
from typing import TYPE_CHECKING

from kvstore.cluster.members import Member
from kvstore.cluster.service import Cluster, Options
from server.config import coordinators, host_port, labels
from server.peers import Manner, PeerLinks
from server.rdma import OFF, options_of

if TYPE_CHECKING:
    from server.node import Node

log = logging.getLogger("cairn.cluster")

LOOK_S = 0.5


def make_cluster(node: "Node") -> Cluster:
    """Of a node that serves already: its addresses are known. Raises ConfigError without etcd's client."""
    from kvstore.cluster.etcd import EtcdCoordinator  # gRPC takes 0.1 s to import, and most nodes are alone

    config = node.config
    settings = config.cluster
    endpoints, prefix = coordinators(settings.coordinator)
    addresses = node.addresses
    member = Member(
        name=config.node.name,
        epoch=node.epoch,
        address=advertised(addresses["tcp"], settings.advertise or config.node.tcp_listen),
        rest=addresses.get("rest", ""),
        capacity_bytes=config.tiers.dram.capacity,
        transports=("tcp", "rdma") if node.rdma.ports else ("tcp",),
        labels=labels(settings.labels),
    )
    lost: list[Cluster] = []
    rdma = config.rdma
    manner = Manner(
        me=member.name,
        token=settings.token,
        ca_file=settings.ca_file,
        transport=settings.transport if rdma.devices != OFF else "tcp",
        rdma=options_of(rdma),
        verbs=node.verbs,
    )
    links = PeerLinks(manner, lambda name: lost[0].lost(name), node.crashed)
    cluster = Cluster(
        *(member, node.store, EtcdCoordinator(endpoints, prefix), links),
        tenant=node.doorkeeper.named,
        options=Options(settings.copies, settings.hot_copies, settings.hot_rate),
        random=Random(SystemRandom().getrandbits(64)).random,
        clock=node.store.clock,
        crashed=node.crashed,
    )
    lost.append(cluster)
    return cluster


def advertised(address: str, listen: str) -> str:
    """`address` of this node as others reach it: at the host of `listen`, and at its port unless that is 0."""
    host, port = host_port(listen)
    scheme, _, own = address.partition("://")
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port or own.rpartition(':')[2]}"


async def tell_of_trouble(cluster: Cluster) -> None:
    """Log what is wrong with membership when it begins and when it ends, until it is cancelled."""
    known = ""
    while True:
        trouble = cluster.trouble
        if bool(trouble) != bool(known):
            log.warning("%s", trouble or "in touch with the coordinator again")
        known = trouble
        await asyncio.sleep(LOOK_S)
