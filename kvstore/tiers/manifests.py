"""What the manifests in a bucket say: all of a root's at first, then those that came since."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.clock import Clock
from kvstore.compression import CODECS, CodecName, check_codec
from kvstore.errors import ConfigError
from kvstore.tiers.bucket import Requests, together
from kvstore.tiers.pack_map import PackMap
from kvstore.tiers.packs import MAX_INDEX_BYTES, folder, made_ms, manifest_name, parse_index, parse_name

MAX_ROOTS = 1024
AT_ONCE = 16  # manifests fetched


@dataclass(slots=True)
class Progress:
    """How far the manifests of one root were read."""

    newest_ms: int = 0  # by the clocks of their writers
    looked_at_s: float | None = None
    looking: "asyncio.Task[None] | None" = None


class Manifests:
    """Fills `known`. What it counts: `damaged` manifests, and `unread_listings` that the bucket did not answer."""

    def __init__(
        self,
        requests: Requests,
        known: PackMap,
        counts: Counter[str],
        refresh_s: float,
        overlap_s: float,
        *,
        clock: Clock,
        wall: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._known = known
        self._counts = counts
        self._refresh_s = refresh_s
        self._overlap_ms = int(overlap_s * 1000)
        self._clock = clock
        self._wall = wall
        self._roots: dict[bytes, Progress] = {}
        self._readable = [codec for codec in CODECS if _is_installed(codec)]

    async def open(self, root: bytes) -> None:
        """Read all that are not known, and forget the packs that are gone. Raises OSError."""
        before = self._known.identifiers(root)
        progress = self._progress(root)
        progress.newest_ms = 0
        there = await self._learn(root, progress)
        for identifier in before - there:
            self._known.drop(root, identifier)

    async def refresh(self, root: bytes) -> None:
        """Read those that came since, if none were within `refresh_s`; one reading for all who ask meanwhile."""
        progress = self._progress(root)
        if progress.looking is None:
            last = progress.looked_at_s
            if last is not None and self._clock.now() - last < self._refresh_s:
                return
            progress.looking = asyncio.create_task(self._look(root, progress))
        looking = progress.looking
        await asyncio.wait([looking])
        if not looking.cancelled():
            looking.result()

    async def put(self, root: bytes, identifier: str, index: bytes) -> None:
        """Make a pack known to all. Raises FileExistsError when another has that name, OSError."""
        name = manifest_name(root, identifier)
        try:
            await self._requests.put(name, memoryview(index))
        except FileExistsError:  # from a try of ours whose answer was lost, perhaps
            try:
                there = await self._requests.get(name, 0, len(index) + 1)
            except FileNotFoundError:
                there = memoryview(b"")
            if there != index:
                raise

    async def aclose(self) -> None:
        looking = [progress.looking for progress in self._roots.values() if progress.looking]
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)

    def _progress(self, root: bytes) -> Progress:
        if root not in self._roots and len(self._roots) >= MAX_ROOTS:
            idle = next((known for known, progress in self._roots.items() if progress.looking is None), None)
            if idle is not None:
                del self._roots[idle]
                self._known.drop_root(idle)
        return self._roots.setdefault(root, Progress())

    async def _look(self, root: bytes, progress: Progress) -> None:
        try:
            await self._learn(root, progress)
        except OSError:
            self._counts["unread_listings"] += 1
        finally:
            progress.looking = None

    async def _learn(self, root: bytes, progress: Progress) -> set[str]:
        """The ids of the manifests that are there, from the overlap before the newest that was read on."""
        progress.looked_at_s = self._clock.now()
        start_ms = min(progress.newest_ms, int(self._wall() * 1000)) - self._overlap_ms
        after = manifest_name(root, f"{start_ms:012x}") if start_ms > 0 else ""
        listed = await self._requests.listing(f"{folder(root)}m/", after)
        sizes = {name.pack_id: item.size_bytes for item in listed if (name := parse_name(item.name))}
        fresh = [identifier for identifier in sizes if not self._known.knows(root, identifier)]
        for start in range(0, len(fresh), AT_ONCE):
            await together(self._fetch(root, name, sizes[name]) for name in fresh[start : start + AT_ONCE])
        progress.newest_ms = max([progress.newest_ms, *map(made_ms, sizes)])
        return set(sizes)

    async def _fetch(self, root: bytes, identifier: str, size: int) -> None:
        index = None
        if 0 < size <= MAX_INDEX_BYTES:
            try:
                manifest = await self._requests.get(manifest_name(root, identifier), 0, size)
            except FileNotFoundError:
                return  # deleted since it was listed
            index = parse_index(manifest, root, identifier)
        if self._known.knows(root, identifier):
            return
        if index is None:
            self._counts["damaged"] += 1
            self._known.add(root, identifier, 0, [])  # so that it is not fetched again
        else:
            readable = [block for block in index.blocks if block.codec in self._readable]
            self._known.add(root, identifier, index.pack_bytes, readable)


def _is_installed(codec: CodecName) -> bool:
    try:
        check_codec(codec)
    except ConfigError:
        return False
    return True
