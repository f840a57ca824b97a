"""What a cache can do without, at a price: the middle of a long prefix, or some of its heads. Off unless asked for.

Both change what the engine computes. Each has a name, a term of the namespace's `compaction`, so that nobody meets
blocks of it who did not ask for it. Which is right when is in docs/codecs.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from engine_client.codec import Codec, codec_for
from engine_client.layout import KvLayout


@dataclass(frozen=True, slots=True)
class SinkWindow:
    """Of a stored prefix only its first `sink_tokens` and last `window_tokens` are loaded, rounded up to blocks.

    Tokens keep the positions they had: what is new attends to them across the gap.
    """

    sink_tokens: int
    window_tokens: int

    def __post_init__(self) -> None:
        if self.sink_tokens < 0 or self.window_tokens < 1:
            raise ValueError(f"{self.sink_tokens} sinks and a window of {self.window_tokens} tokens make no cache")

    @property
    def name(self) -> str:
        """The term in `compaction`."""
        return f"sink{self.sink_tokens}+window{self.window_tokens}"

    def kept_blocks(self, blocks: int, block_tokens: int) -> list[int]:
        """Which of the first `blocks` blocks of a prompt are loaded, ascending.

        blocks   0      sinks             from           blocks
                 |-kept-|--- left out ----|---- kept ----|
        """
        sinks = min(-(-self.sink_tokens // block_tokens), blocks)
        start = max(blocks - -(-self.window_tokens // block_tokens), sinks)
        return [*range(sinks), *range(start, blocks)]


class KeptHeads:
    """A codec that writes only some heads of each layer, and gives back zeros for the others.

    A head of zeros is not a head that is absent: its scores are 0, its output is drawn to 0. So this is right for
    heads whose output the model does not use, and for all others an approximation.

    kept: for each layer of the layout its KV heads that are written, ascending, equally many in each layer.

    Raises ValueError for heads that the layout does not have, and where it has no heads or only a part of them.
    """

    def __init__(self, name: str, layout: KvLayout, kept: Sequence[Sequence[int]]) -> None:
        if layout.kind != "gqa" or layout.head_parts != 1:
            raise ValueError("heads can be left out of blocks that have all heads of each layer")
        if len(kept) != layout.layers or len({len(heads) for heads in kept}) != 1:
            raise ValueError(f"{len(kept)} lists of heads for {layout.layers} layers, or not all of one length")
        for heads in kept:
            if not heads or list(heads) != sorted(set(heads)) or heads[0] < 0 or heads[-1] >= layout.kv_heads:
                raise ValueError(f"heads {list(heads)} are not ascending in [0, {layout.kv_heads})")
        count = len(kept[0])
        digest = blake2b(repr([list(map(int, heads)) for heads in kept]).encode(), digest_size=8).hexdigest()
        self.layout = layout
        self.name = name
        self.compaction = f"heads{count}-{digest}"
        self._kept = [np.array(heads) for heads in kept]
        self._inner: Codec = codec_for(name, replace(layout, kv_heads=count))
        self.block_bytes, self.most_bytes = self._inner.block_bytes, self._inner.most_bytes

    def encode_layer(self, layer: int, raw: memoryview, block: memoryview) -> None:
        few = np.empty(self._inner.layout.layer_bytes, np.uint8)
        pairs = zip(self._planes(raw, self.layout), self._planes(few.data, self._inner.layout), strict=True)
        for whole, kept in pairs:
            np.take(whole, self._kept[layer], axis=0, out=kept)
        self._inner.encode_layer(layer, few.data, block)

    def decode_layer(self, layer: int, block: memoryview, raw: memoryview) -> None:
        few = np.empty(self._inner.layout.layer_bytes, np.uint8)
        self._inner.decode_layer(layer, block, few.data)
        pairs = zip(self._planes(raw, self.layout), self._planes(few.data, self._inner.layout), strict=True)
        for whole, kept in pairs:
            whole[:] = 0
            whole[self._kept[layer]] = kept

    def size_of(self, block: memoryview) -> int:
        return self._inner.size_of(block)

    def _planes(self, raw: memoryview, layout: KvLayout) -> list[NDArray[np.uint8]]:
        """Keys and values of one layer, a row of bytes per head."""
        if raw.nbytes != layout.layer_bytes:
            raise ValueError(f"{raw.nbytes} bytes, where a layer has {layout.layer_bytes}")
        row = layout.block_tokens * layout.head_dim * layout.element_bytes
        both = np.frombuffer(raw, np.uint8)
        keys, values = both[: layout.kv_heads * row], both[layout.kv_heads * row :]
        return [keys.reshape(layout.kv_heads, -1), values.reshape(layout.kv_heads, -1)]


def compaction_terms(window: SinkWindow | None, codec: Codec | None) -> str:
    """The namespace's `compaction`: empty where nothing is left out."""
    terms = [window.name if window else "", codec.compaction if codec else ""]
    return "+".join(filter(None, terms))


def codec_of(layout: KvLayout, name: str, kept_heads: Sequence[Sequence[int]] | None) -> Codec | None:
    """What an engine writes its blocks with; None for blocks just as the layout has them."""
    if kept_heads is not None:
        return KeptHeads(name, layout, kept_heads)
    return None if name == "none" else codec_for(name, layout)
