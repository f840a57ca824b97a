"""Blocks in a bucket that nodes share: S3, Google Cloud Storage, Azure, a local folder, or memory.

A block put by one node can be got by another. Blocks are written in packs; a pack exists for others once its manifest
does, which is written after it. What a pack is made of: `kvstore.tiers.packs`.

Errors of the store end here: reads miss, everything else raises OSError.
"""

import asyncio
import errno
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Any

from kvstore.clock import Clock
from kvstore.compression import CodecName, check_codec
from kvstore.copier import Copier
from kvstore.errors import ConfigError
from kvstore.tiers.bucket import LIST_LIMIT, Bucket, Listed, Patience, Requests, together
from kvstore.tiers.manifests import Manifests
from kvstore.tiers.pack_map import Location, Pack, PackMap
from kvstore.tiers.packing import Offered, assemble, groups, take_out
from kvstore.tiers.packs import (
    NODE,
    Span,
    encode_index,
    folder,
    manifest_name,
    pack_id,
    pack_name,
    parse_name,
    spans,
)
from kvstore.tiers.trimming import plan_trim

try:
    import obstore
    import obstore.exceptions
    import obstore.store
except ImportError:
    obstore = None  # type: ignore[assignment]

AT_ONCE = 16  # objects deleted
RENAMES = 3  # ids that a pack tries
BEYOND_THE_RANGE = re.compile(r"\b416\b|invalid range|range was invalid", re.IGNORECASE)
CLIENT_OPTIONS = {"allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes", "root_certificate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSpec:
    """What the tier is made of; sizes in bytes.

    node: this writer's name, for people; random digits beside it keep nodes apart that share one.
    capacity_bytes: of all packs in the bucket, of all nodes; 0: no limit.
    overlap_s: how late a manifest may appear, by clocks that differ and uploads that take their time.
    """

    node: str
    capacity_bytes: int
    codec: CodecName = "none"
    pack_bytes: int = 64 << 20
    multipart_bytes: int = 16 << 20
    part_bytes: int = 8 << 20
    gap_bytes: int = 256 << 10
    span_bytes: int = 16 << 20
    reads_at_once: int = 8
    writes_at_once: int = 2
    refresh_s: float = 1.0
    overlap_s: float = 600.0
    max_blocks: int = 500_000
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        if not NODE.fullmatch(self.node):
            raise ConfigError(f"a node's name in a bucket is {NODE.pattern}, not {self.node!r}")
        if self.capacity_bytes < 0:
            raise ConfigError(f"the capacity of object storage must not be negative: {self.capacity_bytes}")
        check_codec(self.codec)


def open_bucket(url: str, options: Mapping[str, str]) -> Bucket:
    """The bucket, or folder of it, at `url`: s3://, gs://, az://, file:/// or memory:///. Asks it nothing.

    options: by obstore's names, such as "endpoint" or "access_key_id"; obstore itself looks at AWS_* and the like in
    the environment for what they lack.

    Raises ConfigError without obstore, for a URL or option that it does not know.
    """
    if obstore is None:
        raise ConfigError("object storage needs a package: pip install 'cairn-kv[object]'")
    try:
        if url.startswith("file:"):
            if options:
                raise ConfigError(f"a folder takes no options, not {', '.join(options)}")
            return ObstoreBucket(obstore.store.from_url(url, mkdir=True))
        if url.startswith("memory:"):
            return ObstoreBucket(obstore.store.MemoryStore())
        client = {name: _client_option(name, options[name]) for name in CLIENT_OPTIONS & options.keys()}
        config: Any = {name: value for name, value in options.items() if name not in client}
        patient: Any = {**client, "timeout": timedelta(hours=1), "connect_timeout": timedelta(seconds=5)}
        store = obstore.store.from_url(url, config=config, client_options=patient, retry_config={"max_retries": 0})
    except (obstore.exceptions.BaseError, ValueError, OSError) as error:
        raise ConfigError(f"object storage at {url!r}: {_first_line(error)}") from error
    return ObstoreBucket(store)


def _client_option(name: str, value: str) -> str | bool:
    return value == "true" if name.startswith("allow_") else value


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


@contextmanager
def _errors_of_the_store() -> Iterator[None]:
    try:
        yield
    except obstore.exceptions.AlreadyExistsError as error:
        raise FileExistsError(_first_line(error)) from error
    except (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError) as error:
        raise PermissionError(_first_line(error)) from error
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise OSError(_first_line(error)) from error


class ObstoreBucket:
    """A bucket as obstore reaches it, which repeats nothing by itself and whose time limits are the caller's."""

    def __init__(self, store: "obstore.store.ObjectStore") -> None:
        self._store = store

    async def put(self, name: str, body: memoryview, *, part_bytes: int) -> None:
        with _errors_of_the_store():
            if part_bytes:
                await obstore.put_async(self._store, name, body, use_multipart=True, chunk_size=part_bytes)
            else:
                await obstore.put_async(self._store, name, body, use_multipart=False, mode="create")

    async def get(self, name: str, start: int, end: int) -> memoryview:
        try:
            with _errors_of_the_store():
                return memoryview(await obstore.get_range_async(self._store, name, start=start, end=end))
        except FileNotFoundError:
            raise
        except OSError as error:
            if BEYOND_THE_RANGE.search(str(error).replace(name, "")):
                return memoryview(b"")
            raise

    async def listing(self, prefix: str, after: str) -> AsyncGenerator[list[Listed], None]:
        with _errors_of_the_store():
            async for page in obstore.list(self._store, prefix, offset=after or None, chunk_size=1000):
                yield [Listed(item["path"], item["size"], item["last_modified"].timestamp()) for item in page]

    async def delete(self, name: str) -> None:
        with _errors_of_the_store():
            await obstore.delete_async(self._store, name)


class ObjectTier:
    """Blocks by root and key. `clock` is monotonic, `wall` the time of day in seconds, `random` for ids and waits.

    A root is a namespace of one tenant, 16 bytes. Whatever a cancelled call leaves behind is whole packs, or packs
    without a manifest, which `trim` removes after a day. Memory that a caller gave is not touched after the call.
    """

    def __init__(
        self,
        bucket: Bucket,
        spec: ObjectSpec,
        copier: Copier,
        *,
        clock: Clock,
        wall: Callable[[], float],
        random: Random,
    ) -> None:
        self.spec = spec
        self._copier = copier
        self._clock = clock
        self._wall = wall
        self._requests = Requests(bucket, spec.patience, clock=clock, random=random)
        self.reading = self._requests.reading
        """How fast blocks come, as measured."""
        self._map = PackMap(spec.max_blocks)
        self._nonce = random.getrandbits(32)
        self._number = 0
        self._writing: set[tuple[bytes, bytes]] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._reads = asyncio.Semaphore(spec.reads_at_once)
        self._writes = asyncio.Semaphore(spec.writes_at_once)
        self.counts: Counter[str] = Counter()
        self._manifests = Manifests(
            self._requests, self._map, self.counts, spec.refresh_s, spec.overlap_s, clock=clock, wall=wall
        )

    # Which blocks there are

    async def open(self, root: bytes) -> None:
        """Read all manifests of a root that are not known, and forget the packs that are gone.

        Raises OSError when the bucket does not answer; what was learned until then stays.
        """
        await self._manifests.open(root)

    async def refresh(self, root: bytes) -> None:
        """Read the manifests that came since, at most each `refresh_s`; all of them the first time.

        When the bucket does not answer, what is known stays.
        """
        await self._manifests.refresh(root)

    def may_load(self) -> bool:
        """Whether the bucket would be asked now: it is not away, or it is time to try it again."""
        return self._requests.may_ask()

    def may_store(self) -> bool:
        return self._requests.may_ask()

    def has(self, root: bytes, key: bytes) -> bool:
        """Whether the bucket has it, as far as is known here."""
        return self._map.find(root, key) is not None

    def raw_size(self, root: bytes, key: bytes) -> int | None:
        """Bytes of the block; None when it is not known."""
        location = self._map.find(root, key)
        return None if location is None else location.raw_bytes

    def forget(self, root: bytes, keys: Iterable[bytes]) -> int:
        """Miss these blocks from now on, on this node; they may be written anew. How many of them were known."""
        return self._map.forget(root, keys)

    # Blocks

    async def write(self, root: bytes, blocks: Sequence[tuple[bytes, bytes | None, int, int, memoryview]]) -> int:
        """Store (key, parent, depth, checksum, block) that are not known to be there; how many were stored.

        A block without its checksum is left out and counted. The blocks must not change meanwhile. Raises OSError
        when the bucket does not take them; packs stored until then stay. ValueError for a key or block of a bad size.
        """
        fresh: dict[bytes, Offered] = {}
        for block in map(Offered._make, blocks):
            block.check()
            if self._map.find(root, block.key) is None and (root, block.key) not in self._writing:
                fresh[block.key] = block
        mine = {(root, key) for key in fresh}
        self._writing |= mine
        self._is_idle.clear()
        try:
            return sum([await self._write_pack(root, group) for group in groups(fresh.values(), self.spec.pack_bytes)])
        finally:
            self._writing -= mine
            if not self._writing:
                self._is_idle.set()

    async def read(self, root: bytes, wanted: Sequence[tuple[bytes, memoryview]]) -> list[int | None]:
        """Fill each (key, target), whose size is the block's; for each the checksum that its bytes were found to have.

        None is a miss: not known, gone, damaged, of another size, or the bucket does not answer. The target has
        undefined content then.
        """
        found: list[int | None] = [None] * len(wanted)
        packs: dict[Pack, list[tuple[int, Location]]] = {}
        for which, (key, target) in enumerate(wanted):
            location = self._map.find(root, key)
            if location is not None and location.raw_bytes == target.nbytes:
                packs.setdefault(location.pack, []).append((which, location))
        async with asyncio.TaskGroup() as group:
            for pack, members in packs.items():
                self._map.touch(pack, self._wall())
                places = dict(members)
                where = ((place.offset, place.stored_bytes, which) for which, place in members)
                for span in spans(where, self.spec.gap_bytes, self.spec.span_bytes):
                    group.create_task(self._read_span(pack, span, places, wanted, found))
        misses = found.count(None)
        self.counts["hits"] += len(found) - misses
        self.counts["misses"] += misses
        return found

    # Room

    async def trim(self) -> int:
        """Over the capacity, delete the packs that were not used for longest; and what dead nodes left. Bytes freed.

        Looks at all packs in the bucket, of all roots. Raises OSError when the bucket does not answer.
        """
        used_s = {(pack.root, pack.identifier): pack.used_s for pack in self._map.all_packs()}
        listed = await self._requests.listing("v1/")
        plan = plan_trim(listed, used_s, now_s=self._wall(), capacity_bytes=self.spec.capacity_bytes)
        if len(listed) < LIST_LIMIT:
            for root, identifier in used_s.keys() - plan.sizes.keys():
                self._map.drop(root, identifier)
        freed = 0
        for root, identifier in plan.victims:
            await self._requests.delete(manifest_name(root, identifier))
            self._map.drop(root, identifier)
            await self._requests.delete(pack_name(root, identifier))
            self.counts["trimmed"] += 1
            freed += plan.sizes[root, identifier]
        await self._delete_all(plan.orphans)
        return freed

    async def delete(self, root: bytes) -> None:
        """Delete all packs of a root, manifests first. Writes on their way, of any node, may come after.

        Raises OSError when the bucket does not answer; then some may be left.
        """
        listed = await self._requests.listing(folder(root))
        names = [item.name for item in listed if parse_name(item.name)]
        await self._delete_all([name for name in names if "/m/" in name])
        self._map.drop_root(root)
        await self._delete_all([name for name in names if "/p/" in name])

    async def drain(self) -> None:
        """Wait until no write is on its way."""
        await self._is_idle.wait()

    async def aclose(self) -> None:
        """Wait for writes, give up listings. Nothing may be asked after."""
        await self._manifests.aclose()
        await self.drain()

    def describe(self) -> dict[str, Any]:
        known, asked = self._map, self._requests
        return {
            "state": "up" if asked.health.is_well else "away",
            "reason": asked.health.reason,
            "capacity_bytes": self.spec.capacity_bytes,
            "bytes": known.size_bytes,
            "blocks": known.blocks,
            "packs": known.packs,
            "compression_ratio": known.raw_bytes / known.stored_bytes if known.stored_bytes else 1.0,
            "requests": dict(asked.asked),
            "retries": asked.retries,
            "errors": asked.errors,
            "bytes_read": asked.bytes_read,
            "bytes_written": asked.bytes_written,
            **{name: self.counts[name] for name in ("hits", "misses", "damaged", "gone", "trimmed")},
        }

    async def _write_pack(self, root: bytes, offered: Sequence[Offered]) -> int:
        async with self._writes:
            packed = await self._copier.run(lambda: assemble(self.spec.codec, offered))
            self.counts["damaged"] += len(offered) - len(packed.blocks)
            if not packed.blocks:
                return 0
            for _ in range(RENAMES):
                begun_s = self._clock.now()
                self._number += 1
                identifier = pack_id(int(self._wall() * 1000), self._nonce, self.spec.node, self._number)
                index = encode_index(root, identifier, packed.blocks)
                body = packed.sealed(index)
                parts = self.spec.part_bytes if body.nbytes > self.spec.multipart_bytes else 0
                try:
                    await self._requests.put(pack_name(root, identifier), body, part_bytes=parts)
                    if self._clock.now() - begun_s > self.spec.overlap_s / 2:
                        raise OSError(errno.ETIMEDOUT, "storing the pack took so long that others would not see it")
                    await self._manifests.put(root, identifier, index)
                except FileExistsError:
                    continue
                if not self._map.knows(root, identifier):
                    self._map.add(root, identifier, body.nbytes, packed.blocks)
                return len(packed.blocks)
            raise FileExistsError(errno.EEXIST, f"{RENAMES} names of packs were taken")

    async def _read_span(
        self,
        pack: Pack,
        span: Span,
        places: Mapping[int, Location],
        wanted: Sequence[tuple[bytes, memoryview]],
        found: list[int | None],
    ) -> None:
        async with self._reads:
            try:
                body = await self._requests.get(pack_name(pack.root, pack.identifier), span.start, span.end)
            except FileNotFoundError:
                self.counts["gone"] += 1
                self._map.shed(pack)
                return
            except OSError:
                return
            pairs = [(places[which], wanted[which][1]) for which in span.members]
            taken = await self._copier.run(lambda: [take_out(body, span.start, *pair) for pair in pairs])
        for which, is_whole in zip(span.members, taken, strict=True):
            if is_whole:
                found[which] = places[which].checksum
            else:
                self.counts["damaged"] += 1
                self._map.forget(pack.root, [wanted[which][0]], pack)

    async def _delete_all(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), AT_ONCE):
            await together(self._requests.delete(name) for name in names[start : start + AT_ONCE])
