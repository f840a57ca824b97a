"""Both bindings do on real verbs what the contract says, and what their libraries get wrong does not show."""

import errno
import fcntl
import logging
import os
import select
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.transport.rdma.topology import choose_gid
from kvstore.transport.rdma.verbs import (
    FLUSHED,
    Access,
    Context,
    Domain,
    Own,
    QueueLimits,
    Read,
    Receive,
    Remote,
    Timers,
    Verbs,
    VerbsError,
)
from tests.verbs_contract import PATIENCE_S, Ends, VerbsContract, connect

EVENTS = "anon_inode:[infinibandevent]"
THREADS, ROUNDS = 4, 25


class TestBindings(VerbsContract):
    """The fixture `verbs` is each binding in turn."""

    def test_queue_pairs_made_in_several_threads_have_a_channel_each(self, verbs: Verbs) -> None:
        deaf: list[int] = []

        def work() -> None:
            with ExitStack() as stack:
                context = verbs.open(verbs.devices()[0])
                stack.callback(context.close)
                domain = self.another_domain(context, stack)
                for _ in range(ROUNDS):
                    pair = domain.queue_pair(QueueLimits(8, 8))
                    pair.prepare(1)
                    pair.arm()
                    pair.post_receive(Receive(1, 4096, 1, 64))
                    pair.fail()
                    if os.get_blocking(pair.fd) or not select.select([pair.fd], [], [], PATIENCE_S)[0]:
                        deaf.append(pair.fd)
                    assert [done.status for done in pair.poll(8)] == [FLUSHED]
                    pair.close()

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not deaf

    def test_descriptors_do_not_go_to_programs_that_are_started(self, ends: Ends) -> None:
        opened = [
            int(name) for name in os.listdir("/proc/self/fd") if _link(name).startswith(("/dev/infiniband", EVENTS))
        ]
        assert {ends.one.fd, ends.other.fd} < set(opened)
        assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in opened)

    def test_a_connection_that_was_refused_half_way_can_be_made_again(self, ends: Ends) -> None:
        port = ends.context.ports()[0]
        gid = choose_gid(port)
        for pair in (ends.one, ends.other):
            pair.reset()
        never = Own(1, port.number, gid.number, port.mtu_bytes, Timers(timeout=99))
        with pytest.raises(VerbsError):
            ends.one.connect(never, Remote(ends.other.number, 2, gid.raw, port.lid))
        connect(ends.context, ends.one, ends.other)
        assert ends.one.state() == "RTS"

    def test_a_peer_that_tells_nonsense_is_a_refusal(self, ends: Ends) -> None:
        with pytest.raises(VerbsError):
            ends.one.connect(Own(1, 1, 1, 1024), Remote(1, 2, b"short", 0))
        for address, rkey in ((1 << 65, 1), (4096, 1 << 33), (-1, 1)):
            with pytest.raises(VerbsError):
                ends.other.post_reads([Read(1, 4096, 1, 64, address, rkey, True)])
        assert ends.other.poll(8) == []

    def test_what_is_in_use_is_not_closed(self, context: Context, domain: Domain) -> None:
        pair = domain.queue_pair(QueueLimits(1, 1))
        for parent in (domain, context):
            with pytest.raises(VerbsError):
                parent.close()
        assert pair.state() == "RESET"
        pair.close()
        for parent in (domain, context, domain, context):
            parent.close()

    def test_a_queue_pair_that_is_closed_refuses_to_work(self, domain: Domain) -> None:
        pair = domain.queue_pair(QueueLimits(1, 1))
        pair.close()
        for call in (pair.arm, pair.state, pair.reset, pair.fail, lambda: pair.poll(1), lambda: pair.prepare(1)):
            with pytest.raises(VerbsError):
                call()
        with pytest.raises(VerbsError):
            pair.post_reads([Read(1, 4096, 1, 64, 4096, 1, True)])
        with pytest.raises(VerbsError):
            pair.post_receive(Receive(1, 4096, 1, 64))

    def test_more_inline_than_the_device_has_is_cut_down(self, domain: Domain) -> None:
        pair = domain.queue_pair(QueueLimits(1, 1, inline_bytes=1 << 20))
        assert pair.inline_bytes < 1 << 20
        pair.close()

    def test_a_descriptor_that_is_no_dma_buf_is_refused(self, domain: Domain) -> None:
        with open("/proc/self/exe", "rb") as file, pytest.raises(VerbsError):
            domain.register_dmabuf(file.fileno(), 0, 4096, 0x10000, Access.REMOTE_READ)


def test_pyverbs_on_a_host_without_verbs_lists_no_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("pyverbs.device")
    from pyverbs.pyverbs_error import PyverbsRDMAError

    from kvstore.transport.rdma import pyverbs_binding

    def fail() -> None:
        raise PyverbsRDMAError("Failed to get devices list")

    monkeypatch.setattr(pyverbs_binding, "get_device_list", fail)
    with pytest.raises(VerbsError) as refused:
        pyverbs_binding.load().devices()
    assert refused.value.errno == errno.EIO
    monkeypatch.setattr(pyverbs_binding, "ABI_VERSION", tmp_path / "none")
    assert pyverbs_binding.load().devices() == []


def test_loading_pyverbs_leaves_the_programs_logging_alone() -> None:
    pytest.importorskip("pyverbs.device")
    script = (
        "import logging; from kvstore.transport.rdma.verbs import load_verbs; load_verbs('pyverbs');"
        "print(logging.root.handlers, logging.root.level)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"[] {logging.WARNING}\n"


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:  # the one that listed them
        return ""
