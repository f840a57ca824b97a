"""What the other tests here take for granted of the guest: its devices, limits and delays."""

import os
import resource
import socket
import subprocess
import time
from contextlib import ExitStack

import pytest

from kvstore.transport.rdma.topology import choose_gid
from kvstore.transport.rdma.verbs import SUCCESS, Read, Verbs
from tests.verbs_contract import VerbsContract, completions, connect

pytestmark = pytest.mark.skipif("CAIRN_VM" not in os.environ, reason="not in the guest: make vm")
DELAY_MS = 50


def test_there_are_two_devices_with_addresses_of_their_own(verbs: Verbs) -> None:
    assert sorted(verbs.devices()) == ["rxe0", "rxe1"]
    for number, device in enumerate(("rxe0", "rxe1")):
        with ExitStack() as stack:
            context = verbs.open(device)
            stack.callback(context.close)
            gid = choose_gid(context.ports()[0])
            assert gid.kind == "roce v2"
            assert socket.inet_ntop(socket.AF_INET6, gid.raw) == f"::ffff:10.99.{number}.1"


@pytest.mark.parametrize("device", ["rxe0", "rxe1"])
def test_each_device_reads_from_itself(verbs: Verbs, device: str) -> None:
    contract = VerbsContract()
    with ExitStack() as stack:
        context = verbs.open(device)
        stack.callback(context.close)
        domain = contract.another_domain(context, stack)
        one, other = contract.pair(domain, stack), contract.pair(domain, stack)
        connect(context, one, other)
        source, target = contract.place(domain, stack), contract.place(domain, stack)
        source.fill(b"here")
        one.post_reads([Read(1, target.address, target.region.lkey, 4, source.address, source.region.rkey, True)])
        assert completions(one, 1)[0].status == SUCCESS
        assert target.bytes(4) == b"here"


def test_any_amount_of_memory_may_be_pinned() -> None:
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def test_the_loopback_can_be_slowed_down() -> None:
    tc = ["tc", "qdisc"]
    netem = ["dev", "lo", "root", "netem", "delay", f"{DELAY_MS}ms"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        subprocess.run([*tc, "add", *netem], check=True)
        try:
            began = time.monotonic()
            socket.create_connection(server.getsockname(), timeout=20).close()
            took_ms = (time.monotonic() - began) * 1000
        finally:
            subprocess.run([*tc, "del", *netem], check=True)
    assert took_ms >= 2 * DELAY_MS  # SYN there, its answer back
