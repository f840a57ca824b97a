"""The simulated cluster: engines, their nodes' caches and the network, under a real Conductor."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from scheduler.conductor import Conductor
from scheduler.fleet import Instance, Load, Role
from scheduler.requests import Pull, Refusal, Request
from scheduler.simulation.caches import BlockCache, Change
from scheduler.simulation.decode import DecodeEngine
from scheduler.simulation.hardware import LLAMA3_70B_8XA800, Hardware
from scheduler.simulation.loop import Loop
from scheduler.simulation.network import Network
from scheduler.simulation.outcomes import LoadSample, Record, longest_mean_s
from scheduler.simulation.prefill import Job, Pipeline, PrefillEngine
from scheduler.tuning import Slo

DRAM: Final = 1  # the index's number of the tier that is simulated
DECODE_BATCH: Final = 256  # sequences at a time, the usual limit of an engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The cluster. Every prefill instance has a store node, on `pipeline_nodes` hosts' DRAM; decode keeps nothing.

    event_lag_s: from a change in a store to the Conductor's index. heartbeat_s: between what instances say of
    themselves.
    """

    prefill: int = 8
    decode: int = 8
    hardware: Hardware = LLAMA3_70B_8XA800
    pipeline_nodes: int = 1
    block_tokens: int = 512
    decode_batch: int = DECODE_BATCH
    heartbeat_s: float = 1.0
    event_lag_s: float = 0.0

    @property
    def cache_blocks(self) -> int:
        return self.hardware.dram_tokens * self.pipeline_nodes // self.block_tokens


@dataclass(slots=True)
class Host:
    """A prefill engine and the store node beside it."""

    engine: PrefillEngine
    cache: BlockCache
    holder: int


class Cluster:
    """Takes requests when their time comes; `records` has one for each, in the order of arrival."""

    def __init__(self, loop: Loop, conductor: Conductor, shape: Shape, slo: Slo) -> None:
        self.records: list[Record] = []
        self.loads: list[LoadSample] = []
        self._loop = loop
        self._conductor = conductor
        self._shape = shape
        self._slo = slo
        self._open: dict[str, Record] = {}
        self._to_come = 0
        tiers = shape.hardware.tiers
        self._network = Network(loop, tiers.network_rate, tiers.latency_s)
        self._hosts = {f"prefill-{number}": self._host(f"prefill-{number}") for number in range(shape.prefill)}
        self._decoders = {f"decode-{number}": self._decoder(f"decode-{number}") for number in range(shape.decode)}

    def replay(self, requests: Sequence[Request]) -> None:
        """All of them arrive; returns when all have ended."""
        self._to_come = len(requests)
        for request in requests:
            self._loop.at(request.arrived_s, partial(self._arrive, request))
        self._beat()
        self._loop.run()

    def _host(self, name: str) -> Host:
        shape = self._shape
        engine = PrefillEngine(
            self._loop,
            shape.hardware.prefill,
            Pipeline(shape.pipeline_nodes),
            self._cached,
            self._stream,
            self._prefilled,
        )
        self._register(name, Role.PREFILL)
        return Host(engine, BlockCache(shape.cache_blocks), self._conductor.index.holder(f"node:{name}"))

    def _decoder(self, name: str) -> DecodeEngine:
        self._register(name, Role.DECODE)
        hardware = self._shape.hardware
        return DecodeEngine(self._loop, hardware.decode, hardware.decode_tokens, self._shape.decode_batch, self._finish)

    def _register(self, name: str, role: Role) -> None:
        hardware = self._shape.hardware
        instance = Instance(
            name=name,
            role=role,
            model="",
            prefill=hardware.prefill,
            decode=hardware.decode,
            tiers=hardware.tiers,
            node=f"node:{name}" if role is Role.PREFILL else "",
            decode_tokens=hardware.decode_tokens,
            decode_batch=self._shape.decode_batch,
        )
        self._conductor.register(instance, self._loop.now)

    def _arrive(self, request: Request) -> None:
        self._to_come -= 1
        now = self._loop.now
        names: list[int] = request.chains[0].names.tolist()
        record = Record(
            id=request.id,
            arrived_s=now,
            tokens=request.tokens,
            output_tokens=request.output_tokens,
            blocks=len(names),
        )
        self.records.append(record)
        decision = self._conductor.route(request, now)
        if isinstance(decision, Refusal):
            record.reason = decision.reason.value
            return
        record.prefill, record.decode = decision.prefill, decision.decode
        self._open[request.id] = record
        job = Job(request, names, request.chains[0].block_tokens, decision, now)
        host = self._hosts[decision.prefill]
        host.engine.submit(job)
        if decision.pull is not None:
            self._pull(job, decision.pull)
        else:
            self._load(job)

    def _load(self, job: Job) -> None:
        """The prefix goes from the host's DRAM into the engine while the queue before it is computed."""
        host = self._hosts[job.route.prefill]
        job.held_blocks = host.cache.prefix(job.names)
        seconds = self._shape.hardware.tiers.load_seconds(job.held_blocks * job.block_tokens, 0)
        self._loop.after(seconds, lambda: host.engine.ready(job))

    def _pull(self, job: Job, pull: Pull) -> None:
        """What the source still has of it comes into the target's cache, and stays there."""
        source = self._hosts[_instance(pull.source)]
        target = self._hosts[job.route.prefill]
        names = job.names[: min(pull.stop, source.cache.prefix(job.names))]
        here = target.cache.prefix(names)
        if here == len(names):
            self._load(job)
            return
        self._publish(source, source.cache.use(names))
        nbytes = float((len(names) - here) * job.block_tokens * self._shape.hardware.kv_bytes)

        def arrived() -> None:
            self._publish(target, target.cache.use(names))
            job.held_blocks = len(names)
            target.engine.ready(job)

        self._network.send(_instance(pull.source), job.route.prefill, nbytes, arrived)

    def _cached(self, job: Job) -> int:
        """Of its prompt, that its engine need not compute; the last token it always must."""
        blocks = max(job.held_blocks, self._hosts[job.route.prefill].cache.prefix(job.names))
        job.cached_blocks = blocks
        return min(blocks * job.block_tokens, job.request.tokens - 1)

    def _stream(self, job: Job) -> None:
        """Layer by layer to the decode instance while the prefill computes; no faster than layers become ready."""
        if job.request.output_tokens <= 1:
            return
        nbytes = job.request.tokens * self._shape.hardware.kv_bytes

        def arrived() -> None:
            job.is_streamed = True
            self._decode(job)

        job.stream = self._network.send(
            job.route.prefill, job.route.decode, nbytes, arrived, limit=nbytes / job.prefill_s
        )

    def _prefilled(self, job: Job) -> None:
        """Its first token is there. Decode may still refuse it: then all of it was in vain."""
        now = self._loop.now
        host = self._hosts[job.route.prefill]
        self._publish(host, host.cache.use(job.names))
        record = self._open[job.request.id]
        record.cached_tokens, record.cached_blocks = job.cached_tokens, job.cached_blocks
        record.queue_s = job.begun_s - job.sent_s
        record.transfer_s = job.ready_s - job.sent_s
        record.prefill_s = job.prefill_s
        refusal = self._conductor.prefilled(job.request.id, now)
        if refusal is not None:
            record.reason = refusal.reason.value
            record.wasted_prefill_s = job.prefill_s
            if job.stream is not None:
                self._network.cancel(job.stream)
            del self._open[job.request.id]
            return
        record.ttft_s = now - record.arrived_s
        if job.request.output_tokens <= 1:
            record.tbt_s = 0.0
            self._end(job)
        else:
            self._decode(job)

    def _decode(self, job: Job) -> None:
        """All of its KV is there, and its first token."""
        if job.is_streamed and job.prefilled_s is not None:
            self._decoders[job.route.decode].submit(job)

    def _finish(self, job: Job) -> None:
        decoder = self._decoders[job.route.decode]
        record = self._end(job)
        record.tbt_s = longest_mean_s(decoder.intervals(job))

    def _end(self, job: Job) -> Record:
        now = self._loop.now
        self._conductor.finished(job.request.id, now)
        record = self._open.pop(job.request.id)
        record.finished_s = now
        return record

    def _publish(self, host: Host, change: Change) -> None:
        """The store's events reach the index, after their lag."""
        lag_s, index = self._shape.event_lag_s, self._conductor.index

        def tell() -> None:
            if change.removed:
                index.removed(host.holder, DRAM, np.array(change.removed, np.uint64))
            if change.stored:
                index.stored(host.holder, DRAM, np.array(change.stored, np.uint64))

        if lag_s > 0:
            self._loop.after(lag_s, tell)
        else:
            tell()

    def _beat(self) -> None:
        now = self._loop.now
        for name, host in self._hosts.items():
            self._conductor.heartbeat(name, Load(now, host.engine.waiting_tokens, 0, 0), now)
        for name, decoder in self._decoders.items():
            self._conductor.heartbeat(name, Load(now, 0, decoder.batch, decoder.context), now)
        self.loads.append(self._sample())
        if self._to_come or self._open:
            self._loop.after(self._shape.heartbeat_s, self._beat)

    def _sample(self) -> LoadSample:
        """Mean predicted TTFT of what waits and mean step time, by their SLOs."""
        prefill = [host.engine.waiting_s for host in self._hosts.values()]
        decode = [decoder.step_s for decoder in self._decoders.values()]
        return LoadSample(
            self._loop.now,
            sum(prefill) / max(1, len(prefill)) / self._slo.ttft_s,
            sum(decode) / max(1, len(decode)) / self._slo.tbt_s,
        )


def _instance(holder: str) -> str:
    return holder.removeprefix("node:")
