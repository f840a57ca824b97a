"""The network between nodes: flows share the links of their source and target fairly."""

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.simulation.loop import Loop, Timer

UNLIMITED = float("inf")


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way. `limit` is what its producer makes, in bytes a second."""

    source: "Link"
    target: "Link"
    left_bytes: float
    limit: float
    done: Callable[[], None]
    rate: float = 0.0
    since_s: float = 0.0
    timer: Timer | None = None


@dataclass(slots=True, eq=False)
class Link:
    """One direction of one node's network cards, taken together."""

    rate: float
    flows: dict[Flow, None] = field(default_factory=dict)
    share: float = 0.0  # of a flow that wants more than it gets

    def divide(self) -> None:
        """Max-min on this link alone: who wants less than an even share gets that, the others divide the rest."""
        rest, count = self.rate, len(self.flows)
        for limit in sorted(flow.limit for flow in self.flows):
            if limit * count >= rest:
                break
            rest -= limit
            count -= 1
        self.share = rest / count if count else self.rate


class Network:
    """Any node to any other; the core between them is never full.

    A flow's rate is the least of its limit and its shares at source and target; what it leaves of a share because the
    other end is narrower stays unused until the next change. A change touches the flows of two links, no others.
    """

    def __init__(self, loop: Loop, rate: float, latency_s: float) -> None:
        self._loop = loop
        self._rate = rate
        self._latency_s = latency_s
        self._sends: dict[str, Link] = {}
        self._receives: dict[str, Link] = {}

    def send(
        self, source: str, target: str, nbytes: float, done: Callable[[], None], *, limit: float = UNLIMITED
    ) -> Flow:
        """Begin a flow; `done` is called when its last byte is there."""
        flow = Flow(self._link(self._sends, source), self._link(self._receives, target), nbytes, limit, done)
        flow.since_s = self._loop.now
        flow.source.flows[flow] = None
        flow.target.flows[flow] = None
        self._divide(flow.source, flow.target)
        return flow

    def cancel(self, flow: Flow) -> None:
        """No more bytes of it; `done` is never called. Nothing happens to one that is done."""
        if flow.timer is not None:
            flow.timer.cancel()
        if flow in flow.source.flows:
            del flow.source.flows[flow], flow.target.flows[flow]
            self._divide(flow.source, flow.target)

    def queued_bytes(self, node: str) -> float:
        """What a node still has to send."""
        now = self._loop.now
        return sum(
            max(0.0, flow.left_bytes - flow.rate * (now - flow.since_s)) for flow in self._link(self._sends, node).flows
        )

    def _link(self, links: dict[str, Link], node: str) -> Link:
        link = links.get(node)
        if link is None:
            link = links[node] = Link(self._rate)
        return link

    def _divide(self, source: Link, target: Link) -> None:
        source.divide()
        target.divide()
        for flow in source.flows | target.flows:
            rate = min(flow.limit, flow.source.share, flow.target.share)
            if rate != flow.rate:
                self._set_rate(flow, rate)

    def _set_rate(self, flow: Flow, rate: float) -> None:
        now = self._loop.now
        flow.left_bytes = max(0.0, flow.left_bytes - flow.rate * (now - flow.since_s))
        flow.rate, flow.since_s = rate, now
        if flow.timer is not None:
            flow.timer.cancel()
        flow.timer = self._loop.after(flow.left_bytes / rate, lambda: self._arrive(flow))

    def _arrive(self, flow: Flow) -> None:
        del flow.source.flows[flow], flow.target.flows[flow]
        self._divide(flow.source, flow.target)
        flow.timer = self._loop.after(self._latency_s, flow.done)
