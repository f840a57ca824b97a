"""Where blocks are in the directory, and what a node does that finds its own copy of one to be of no use."""

from collections.abc import Iterator

import pytest

from kvstore.cluster.locating import Place, place_of, places_of
from kvstore.cluster.naming import STRIPE_BLOCKS, partition_of
from kvstore.types import DRAM, NVME, Cause
from tests.faulty_file import FlipBit
from tests.peer_doubles import Chain, Make, clusters


@pytest.fixture
def make() -> Iterator[Make]:
    with clusters() as made:
        yield made


def places(chain: Chain) -> list[Place]:
    return places_of(chain.space.root, chain.keys, Place(partition_of(chain.space.root, chain.keys[0]), 0))


def placed(chain: Chain) -> list[Place]:
    replicas = [chain.space.dram.replicas[key] for key in chain.keys]
    return [Place(replica.partition, replica.position) for replica in replicas]


def test_blocks_of_a_whole_chain_have_their_place_though_some_of_it_went_before(make):
    node = make(dram=8)
    chain = Chain(node, STRIPE_BLOCKS + 3)
    node.store.put(chain.space, chain.keys, chain.blocks)
    node.store.call(lambda: node.store.store.discard(chain.space, chain.keys[3:6], Cause.DELETED, DRAM))
    node.store.put(chain.space, chain.keys, chain.blocks)

    assert placed(chain) == places(chain)
    assert node.cluster.holdings.adrift == 0


def test_what_hangs_on_a_block_that_is_not_here_is_adrift_and_misleads_nobody_who_asks_from_the_start(make):
    node = make()
    chain = Chain(node, 6)
    node.store.put(chain.space, chain.keys[4:], chain.blocks[4:], parent=chain.keys[3])

    assert node.cluster.holdings.adrift == 1
    assert place_of(chain.space, chain.keys, 5, None) == places(chain)[5]
    assert place_of(chain.space, chain.keys[5:], 0, chain.keys[4]) != places(chain)[5]


def test_a_block_that_is_damaged_on_the_disk_comes_from_another_node(make):
    node = make()
    chain = Chain(node, 3, "b")
    node.store.put(chain.space, chain.keys, chain.blocks)
    node.store.run(node.store.store.demotion.demote(chain.space, chain.keys, NVME, evict=True))
    node.store.faults.at[len(node.store.faults.operations)] = FlipBit(8 * 4096)

    assert node.get(chain.space, chain.keys) == chain.blocks
    assert node.store.store.counters.corrupt_blocks == 1
    assert "b" in node.peers.read_from
