"""Five real nodes that are killed, hung, cut off, slowed, restarted, left without etcd: no wrong bytes, no hang."""

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count, cycle
from pathlib import Path

import pytest

from engine_client.blocking import BlockingClient
from kvstore.errors import StoreError
from tests.system import net
from tests.system.cluster import DEADLINE_S, NAMES, PATIENCE_S, Cluster, Prompts, etcd_or_skip
from tests.system.net import Net
from tests.system.nodes import pause, until

SLACK_S = 2.0  # on a machine that is busy with other things
FOUND_AGAIN_S = 3.0
RECORDED_S = 0.3  # a block is on a disk once its record is: 0.05 s later, on a machine that is busy with nothing else
SLOW_MBIT = 10
NVME = {
    "tiers.nvme.capacity": "128MiB",
    "tiers.nvme.slab": "1MiB",
    "tiers.nvme.admission": "all",
    "tiers.nvme.write": "through",
}
prompts = count(1)


def nvme_of(folder: Path, names: Sequence[str]) -> dict[str, dict[str, str]]:
    return {name: {**NVME, "tiers.nvme.path": str(folder / f"{name}-nvme")} for name in names}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """n5 has a tier on a disk."""
    etcd_or_skip()
    network = None if net.why_not() else Net([*NAMES, "etcd"])
    folder = tmp_path_factory.mktemp("faults")
    cluster = Cluster(folder, network, own=nvme_of(folder, ["n5"]))
    try:
        yield cluster.start()
        cluster.heal()
        cluster.empty()
    finally:
        cluster.close()


@pytest.fixture
def cluster(whole: Cluster) -> Iterator[Cluster]:
    """Whole at the start of a test, whatever the one before has done; nothing is broken after it."""
    whole.heal()
    yield whole
    whole.hang_up()
    whole.heal()
    whole.assert_sound()


@pytest.fixture
def network(cluster: Cluster) -> Net:
    if cluster.net is None:
        pytest.skip(net.why_not())
    return cluster.net


def put_where_all_know(cluster: Cluster, source: str, prompt: int) -> None:
    """Others are asked: the node itself knows what it has before the directory does."""
    assert cluster.at(source, "load").put(prompt) == 8
    other = cluster.at(next(name for name in cluster.alive if name != source), "load")
    until(lambda: other.holders(prompt) == [{source}] * 8, f"the directory to know what {source} has")


def got_in_time(at: Prompts, prompt: int) -> int:
    """How many blocks come within a call's deadline."""
    began = time.monotonic()
    found = at.get(prompt)
    took_s = time.monotonic() - began
    assert took_s < DEADLINE_S + SLACK_S, f"{took_s:.1f} s for a get of {DEADLINE_S} s"
    return found


class Load:
    """Clients in threads, at one node each, that put and get until `end`; a client whose node is away tries the next.

    What each put is got again later, by the same client; `lost` counts blocks that were not there any more.
    """

    def __init__(self, cluster: Cluster, clients: int, names: Sequence[str] = NAMES) -> None:
        self.rounds = self.lost = self.refused = 0
        self.slowest_s = 0.0
        self._failures: list[BaseException] = []
        self._cluster = cluster
        self._is_enough = threading.Event()
        orders = [names[number % len(names) :] + names[: number % len(names)] for number in range(clients)]
        self._threads = [threading.Thread(target=self._run, args=(order,)) for order in orders]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Fails the test for a client that read wrong bytes."""
        self._is_enough.set()
        for thread in self._threads:
            thread.join(DEADLINE_S * 4)
            assert not thread.is_alive(), "a client hangs"
        if self._failures:
            raise self._failures[0]

    def _run(self, names: Sequence[str]) -> None:
        try:
            for name in cycle(names):
                with self._cluster.client(name) as client:
                    self._use(client)
                if self._is_enough.is_set():
                    return
        except BaseException as failure:
            self._failures.append(failure)

    def _use(self, client: BlockingClient) -> None:
        mine: list[int] = []
        try:
            at = Prompts(client, "pool", block_bytes=4096)
            while not self._is_enough.is_set():
                began = time.monotonic()
                mine = [*mine[-3:], next(prompts)]
                at.put(mine[-1])
                self.lost += 8 - at.get(mine[0])
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                self.rounds += 1
                pause(0.02)
        except StoreError:
            self.refused += 1
            pause(0.05)


def test_what_only_a_killed_node_had_is_a_miss_in_time(cluster: Cluster) -> None:
    prompt = next(prompts)
    put_where_all_know(cluster, "n1", prompt)
    readers = [cluster.at(name, "load") for name in NAMES[1:]]
    cluster.nodes["n1"].kill()
    assert [got_in_time(reader, prompt) for reader in readers] == [0] * 4


def test_what_two_nodes_had_is_served_by_the_one_that_lives(cluster: Cluster) -> None:
    prompt = next(prompts)
    put_where_all_know(cluster, "n1", prompt)
    cluster.at("n2", "load").assert_has(prompt)
    readers = [cluster.at(name, "load") for name in NAMES[2:]]
    until(lambda: readers[0].holders(prompt) == [{"n1", "n2"}] * 8, "the directory to know of the copy")
    cluster.nodes["n1"].kill()
    for reader in readers:
        until(lambda reader=reader: got_in_time(reader, prompt) == 8, "the copy", DEADLINE_S)


def test_each_node_is_killed_in_turn_and_the_others_go_on(cluster: Cluster) -> None:
    for victim in NAMES:
        others = [name for name in NAMES if name != victim]
        load = Load(cluster, 4, others)
        try:
            until(lambda load=load: load.rounds >= 20, "clients to be busy")
            cluster.nodes[victim].kill()
            so_far = load.rounds
            until(lambda load=load, so_far=so_far: load.rounds >= so_far + 40, "clients to go on")
        finally:
            load.end()
        assert load.refused == 0, "a node failed that was not killed"
        assert load.slowest_s < DEADLINE_S + SLACK_S
        cluster.start_nodes([victim])
    cluster.until_whole()


def test_a_hung_holder_holds_up_nobody_beyond_the_deadline(cluster: Cluster) -> None:
    theirs, other = next(prompts), next(prompts)
    put_where_all_know(cluster, "n2", theirs)
    put_where_all_know(cluster, "n3", other)
    reader, bystander = cluster.at("n1", "load"), cluster.at("n4", "load")
    cluster.nodes["n2"].freeze()
    assert got_in_time(reader, theirs) == 0
    until(lambda: got_in_time(bystander, other) == 8, "what a healthy node has", DEADLINE_S)
    until(lambda: "n2" not in cluster.members_seen_by("n1"), "the hung node to be no member")
    began = time.monotonic()
    reader.get(theirs)
    assert time.monotonic() - began < SLACK_S, "a get waits for a node that is no member"
    cluster.nodes["n2"].thaw()
    cluster.until_whole()
    until(lambda: reader.has(theirs), "what the node still had")


def test_every_node_hangs_for_a_moment_and_nothing_is_lost(cluster: Cluster) -> None:
    kept = [next(prompts) for _ in NAMES]
    for name, prompt in zip(NAMES, kept, strict=True):
        put_where_all_know(cluster, name, prompt)
    for name in NAMES:
        cluster.nodes[name].freeze()
        pause(0.3)
        cluster.nodes[name].thaw()
    cluster.until_whole()
    reader = cluster.at("n3", "load")
    for name, prompt in zip(NAMES, kept, strict=True):
        until(lambda prompt=prompt: reader.has(prompt), f"what {name} had", DEADLINE_S)


def test_nodes_that_cannot_reach_each_other_go_on_and_converge_when_they_can(cluster: Cluster, network: Net) -> None:
    before = next(prompts)
    put_where_all_know(cluster, "n1", before)
    left, beside, right = (cluster.at(name, "load") for name in ("n1", "n2", "n3"))
    network.part(["n1", "n2"], ["n3", "n4", "n5"])
    assert got_in_time(right, before) in (0, 8)
    near = next(prompt for prompt in prompts if left.home(prompt, NAMES) in ("n1", "n2"))
    far = next(prompt for prompt in prompts if left.home(prompt, NAMES) not in ("n1", "n2"))
    inside = [near, far, next(prompts)]
    assert (left.put(near), left.put(far), right.put(inside[2])) == (8, 8, 8)
    for prompt in inside:
        got_in_time(right, prompt)
    until(lambda: got_in_time(beside, near) == 8, "a node of one's own side, by a home of one's own side")
    assert got_in_time(beside, far) in (0, 8)
    network.heal()
    cluster.until_whole()
    for at, prompt in ((right, before), (right, near), (right, far), (left, inside[2])):
        until(lambda at=at, prompt=prompt: at.has(prompt), "the other side's blocks")


@pytest.mark.parametrize(("source", "target"), [("n1", "n2"), ("n2", "n1")])
def test_a_link_that_carries_one_way_only_costs_a_deadline_at_most(
    cluster: Cluster, network: Net, source: str, target: str
) -> None:
    prompt = next(prompts)
    put_where_all_know(cluster, "n1", prompt)
    reader, bystander = cluster.at("n2", "load"), cluster.at("n4", "load")
    network.cut(source, target)
    got_in_time(reader, prompt)
    until(lambda: got_in_time(bystander, prompt) == 8, "what can be reached", DEADLINE_S)
    network.heal()
    cluster.until_whole()
    until(lambda: reader.has(prompt), "n2 to reach n1 again")


def test_a_node_that_is_cut_off_from_all_serves_what_it_has_and_comes_back(cluster: Cluster, network: Net) -> None:
    theirs, its = next(prompts), next(prompts)
    put_where_all_know(cluster, "n1", theirs)
    put_where_all_know(cluster, "n5", its)
    alone, other = cluster.at("n5", "load"), cluster.at("n2", "load")
    network.part(["n5"], ["n1", "n2", "n3", "n4", "etcd"])
    until(lambda: "n5" not in cluster.members_seen_by("n2"), "the others to miss it")
    assert got_in_time(alone, its) == 8
    assert got_in_time(alone, theirs) == 0
    assert got_in_time(other, theirs) == 8
    assert cluster.roster("n5").trouble
    network.heal()
    cluster.until_whole()
    until(lambda: alone.has(theirs), "the others' blocks")
    until(lambda: other.has(its), "its blocks")


def test_the_faster_of_two_holders_is_read_from(cluster: Cluster, network: Net) -> None:
    shape = {"blocks": 32}  # 2 MiB: 1.7 s over the slow link
    slow, fast, reader = (cluster.at(name, "speed", **shape) for name in ("n1", "n2", "n3"))
    wanted = [prompt for prompt in (next(prompts) for _ in range(16)) if slow.home(prompt, NAMES) != "n1"][:6]
    for prompt in wanted:
        slow.put(prompt)
        until(lambda prompt=prompt: fast.has(prompt), "a copy")
    until(lambda: all({"n1", "n2"} <= held for held in reader.holders(wanted[-1])), "the directory to know both")
    network.rate("n1", SLOW_MBIT)
    late = 0
    for number, prompt in enumerate(wanted):
        began = time.monotonic()
        found = reader.get(prompt, load_s=DEADLINE_S)
        took_s = time.monotonic() - began
        if took_s > 1.0:
            late += 1  # how fast a path is shows when it is used
            assert number < 4
        else:
            assert found == 32, f"number {number}: {found} after {took_s:.2f} s"
    assert late <= 2


def test_a_slow_link_holds_up_nobody_else(cluster: Cluster, network: Net) -> None:
    """But who needs the directory of the slow node, whose answer is behind what fills its link: that may be a miss."""
    slow, shape = next(prompts), {"blocks": 96}  # 6 MiB: 5 s
    assert cluster.at("n1", "bulk", **shape).put(slow) == 96
    reader = cluster.at("n3", "load")
    wanted = [next(prompts) for _ in range(12)]
    for prompt in wanted:
        put_where_all_know(cluster, "n2", prompt)
    network.rate("n1", SLOW_MBIT)
    busy = cluster.at("n3", "bulk", **shape)
    puller = threading.Thread(target=busy.get, args=(slow,))
    puller.start()
    missed, slowest_s = [], 0.0
    for prompt in wanted:
        began = time.monotonic()
        if reader.get(prompt) < 8:
            missed.append(reader.home(prompt, NAMES))
        slowest_s = max(slowest_s, time.monotonic() - began)
    puller.join()
    assert set(missed) <= {"n1"}
    assert slowest_s < 1.0, slowest_s


def test_without_etcd_the_nodes_go_on_and_say_so(cluster: Cluster) -> None:
    before = next(prompts)
    put_where_all_know(cluster, "n1", before)
    cluster.kill_etcd()
    until(lambda: all(cluster.roster(name).trouble for name in NAMES), "every node to say that etcd is away")
    assert cluster.members_seen_by("n2") == set(NAMES)
    during = next(prompts)
    put_where_all_know(cluster, "n4", during)
    for name in NAMES:
        reader = cluster.at(name, "load")
        reader.assert_has(before)
        reader.assert_has(during)
    cluster.start_etcd()
    cluster.until_whole()


def test_a_hung_etcd_is_no_more_than_one_that_is_away(cluster: Cluster) -> None:
    prompt = next(prompts)
    put_where_all_know(cluster, "n1", prompt)
    cluster.etcd.stop()
    try:
        until(lambda: all(cluster.roster(name).trouble for name in NAMES), "every node to say that etcd hangs")
        assert got_in_time(cluster.at("n3", "load"), prompt) == 8
    finally:
        cluster.etcd.go_on()
    cluster.until_whole()


def test_a_node_that_dies_while_etcd_is_away_costs_a_deadline_at_most(cluster: Cluster) -> None:
    """What it was the home of is a miss until etcd is back: nobody can say that it is a member no more."""
    reader = cluster.at("n3", "load")
    its = next(prompts)
    others = [next(prompts) for _ in range(8)]
    put_where_all_know(cluster, "n1", its)
    for prompt in others:
        put_where_all_know(cluster, "n2", prompt)
    cluster.kill_etcd()
    cluster.nodes["n1"].kill()
    assert got_in_time(reader, its) == 0
    missed = {reader.home(prompt, NAMES) for prompt in others if got_in_time(reader, prompt) < 8}
    assert missed <= {"n1"}
    cluster.start_etcd()
    for prompt in others:
        until(lambda prompt=prompt: reader.has(prompt), "what n2 has")


def test_what_is_on_a_disk_is_found_again_soon_after_a_kill(cluster: Cluster) -> None:
    kept = [next(prompts) for _ in range(8)]
    its = cluster.at("n5", "load")
    for prompt in kept:
        assert its.put(prompt) == 8
    other = cluster.at("n1", "load")
    until(lambda: all("n5" in held for held in other.holders(kept[-1])), "the directory to know")
    with cluster.client("n5") as client:
        client.demote(its.space)
    pause(RECORDED_S)
    node = cluster.nodes["n5"]
    node.kill()
    cluster.start_nodes(["n5"])
    readers = cycle(cluster.at(name, "load") for name in NAMES[:4])
    for prompt in kept:
        reader = next(readers)
        left_s = node.ready_at + FOUND_AGAIN_S + SLACK_S - time.monotonic()
        until(lambda reader=reader, prompt=prompt: reader.has(prompt), f"prompt {prompt}", max(left_s, 0.1))


def test_the_directory_is_whole_again_soon_after_most_homes_are_killed(cluster: Cluster) -> None:
    """Nodes that live announce anew what the dead were home of."""
    kept = [next(prompts) for _ in range(8)]
    for prompt in kept:
        put_where_all_know(cluster, "n1", prompt)
    for name in ("n3", "n4", "n5"):
        cluster.nodes[name].kill()
    reader = cluster.at("n2", "load")
    began = time.monotonic()
    for prompt in kept:
        until(lambda prompt=prompt: reader.has(prompt), f"prompt {prompt}")
    took_s = time.monotonic() - began
    assert took_s < FOUND_AGAIN_S + SLACK_S + 3.0, f"{took_s:.1f} s, of which members may take 3 to be missed"


def test_a_drained_node_can_be_killed_and_nothing_is_lost(cluster: Cluster) -> None:
    kept = [next(prompts) for _ in range(6)]
    its, reader = cluster.at("n2", "load"), cluster.at("n1", "load")
    for prompt in kept:
        assert its.put(prompt) == 8
    with cluster.client("n4") as admin:
        drained = admin.drain("", node="n2")
        assert drained.left == 0
        assert drained.blocks >= 8 * len(kept)
        conditions = {row["name"]: row["condition"] for row in admin.nodes().rows}
    assert conditions["n2"] == "draining"
    cluster.nodes["n2"].kill()
    for prompt in kept:
        until(lambda prompt=prompt: reader.has(prompt), f"prompt {prompt}", DEADLINE_S + 3)


def test_a_rolling_restart_of_drained_nodes_loses_nothing(cluster: Cluster) -> None:
    kept = {name: next(prompts) for name in NAMES}
    for name, prompt in kept.items():
        put_where_all_know(cluster, name, prompt)
    cluster.hang_up()
    for name, other in zip(NAMES, NAMES[1:] + NAMES[:1], strict=True):
        with cluster.client(other) as admin:
            assert admin.drain("", node=name).left == 0
        cluster.nodes[name].stop()
        cluster.start_nodes([name])
        cluster.until_whole()
    assert {row["condition"] for row in cluster.roster("n1").rows} == {"serving"}
    for name, prompt in kept.items():
        reader = cluster.at(name, "load")
        until(lambda reader=reader, prompt=prompt: reader.has(prompt), f"what {name} put", DEADLINE_S)


@pytest.mark.parametrize("victim", NAMES)
def test_with_two_replicas_a_single_kill_loses_nothing(cluster: Cluster, victim: str) -> None:
    kept = {name: next(prompts) for name in NAMES}
    for name, prompt in kept.items():
        with cluster.client(name) as client:
            assert Prompts(client, "safe", replicas=2, through=True).put(prompt) == 8
    cluster.nodes[victim].kill()
    reader = cluster.at("n1" if victim != "n1" else "n2", "safe")
    for name, prompt in kept.items():
        until(lambda prompt=prompt: reader.has(prompt), f"what {name} put", DEADLINE_S + 3)


def test_a_power_cut_of_all_keeps_what_is_on_disks(cluster: Cluster) -> None:
    prompt = next(prompts)
    its = cluster.at("n5", "load")
    its.put(prompt)
    its.client.demote(its.space)
    pause(RECORDED_S)
    for name in NAMES:
        cluster.nodes[name].kill()
    cluster.start_nodes(NAMES)
    reader = cluster.at("n1", "load")
    until(lambda: reader.has(prompt), "what n5 has on its disk")


def test_behind_a_link_with_delay_and_loss_blocks_still_come(tmp_path: Path) -> None:
    etcd_or_skip()
    cluster = Cluster(tmp_path, behind=["n1"])
    try:
        cluster.start(NAMES[:3])
        prompt = next(prompts)
        put_where_all_know(cluster, "n1", prompt)
        cluster.proxies["n1"].delay_s = 0.02
        cluster.proxies["n1"].loss = 0.05
        slow, other = cluster.at("n2", "load"), cluster.at("n3", "load")
        until(lambda: got_in_time(slow, prompt) == 8, "a slow path's blocks")
        cluster.proxies["n1"].silence()
        again = next(prompts)
        cluster.at("n1", "load").put(again)
        got_in_time(other, again)
        cluster.proxies["n1"].heal()
        cluster.proxies["n1"].break_all()
        cluster.until_whole()
        until(lambda: other.has(again), "n1 to be reached again", PATIENCE_S)
        cluster.hang_up()
        cluster.assert_sound()
    finally:
        cluster.close()


def test_a_rolling_restart_under_load_loses_nothing_that_is_on_disks(tmp_path: Path) -> None:
    etcd_or_skip()
    cluster = Cluster(tmp_path, own=nvme_of(tmp_path, NAMES))
    try:
        cluster.start()
        kept = {name: next(prompts) for name in NAMES}
        for name, prompt in kept.items():
            put_where_all_know(cluster, name, prompt)
        load = Load(cluster, 8)
        try:
            for name in NAMES:
                so_far = load.rounds
                until(lambda so_far=so_far: load.rounds >= so_far + 20, "clients to be busy")
                cluster.nodes[name].stop()
                cluster.nodes[name].start()
                cluster.until_whole()
        finally:
            load.end()
        assert load.slowest_s < DEADLINE_S * 2 + SLACK_S
        readers = cycle(cluster.at(name, "load") for name in NAMES[1:] + NAMES[:1])
        for name, prompt in kept.items():
            reader = next(readers)
            until(lambda reader=reader, prompt=prompt: reader.has(prompt), f"what {name} put")
        cluster.hang_up()
        cluster.assert_sound()
        cluster.empty()
    finally:
        cluster.close()
