"""Another node's dealings with this one about the cluster: what it announces, asks and wants."""

from kvstore import wire
from kvstore.cluster.service import Cluster
from kvstore.errors import InvalidRequest
from kvstore.metrics import Counters
from server.receipt import Receipt
from server.session import Answer


class ClusterSession:
    """As `Session` for its connection; it holds nothing."""

    holds_anything = False

    def __init__(self, cluster: Cluster, counters: Counters) -> None:
        self._cluster = cluster
        self._counters = counters

    def handle(self, request: wire.Message) -> Answer:
        self._counters.requests[str(request.__struct_config__.tag)] += 1
        return self._cluster.handle(request)

    def receive(self, request: wire.Message) -> Receipt:
        raise InvalidRequest(f"{type(request).__name__} has no payload")

    def received(self, receipt: Receipt) -> Answer:
        raise AssertionError("nothing is received here")

    def refuse(self, receipt: Receipt) -> None:
        raise AssertionError("nothing is received here")

    def end(self) -> None:
        """The other node hung up."""
