"""How the layers of KV blocks are written smaller: quantised (int8, int4, fp8), compressed (lz4, zstd), or both.

A codec belongs to one layout and has a name, which is a field of the namespace: blocks of two codecs never meet under
one key. What it writes, every number little-endian:

    quantised block     layer 0 | layer 1 | ...                     all of one size, known from the layout
    quantised layer     u8 format | 7 zeros | parameters of K, of V | codes of K, of V | zeros to a multiple of 8
    compressed block    u8 format | 3 zeros | u32 end of each layer, from the block's start | layer 0 | layer 1 | ...
    compressed layer    what kvstore.compression makes of the layer, quantised or with its bytes sorted by significance

    codec  parameters of a group              groups                                           codes
    int8   f32 zero of each, f32 scale        K: a head's channel over the block's tokens      u8
    int4   f16 zero of each, f16 scale        V: a head's token over its channels              u4: n, and n + half above
    fp8    f32 scale                          a head's K, a head's V                           e4m3fn

A value is zero + code * scale; in fp8, code * scale. The latent of an mla cache is quantised like V (by token), its
rotary key like K. A layer can be decoded as soon as its own bytes are there. Values that are not finite, or whose range
a parameter cannot hold, are refused: such a block is not stored. numpy lets go of the GIL in all that takes time.
"""

import struct
from collections.abc import Sequence
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from engine_client.layout import KvLayout, Tensor, pack_layer, unpack_layer
from engine_client.quantise import LARGEST, Float8Code, IntegerCode, NotEncoded
from kvstore.compression import check_codec, compress, decompress
from kvstore.prefix import Namespace

QUANTISED: Final = ("int8", "int4", "fp8")
CODECS: Final = (
    "none",
    *QUANTISED,
    *("lz4", "int8+lz4", "int4+lz4", "fp8+lz4"),
    *("zstd", "int8+zstd", "int4+zstd", "fp8+zstd"),
)
"""All names. "none" writes a block as the layout has it, and is the empty codec of a namespace."""
COMPRESSED_FORMATS: Final = {"lz4": 0xC4, "zstd": 0xC5}  # the first byte of a block; see quantise.FORMATS
END: Final = struct.Struct("<I")


class Codec(Protocol):
    """How blocks of one `layout` are written. Of any one block the layers are encoded in order.

    block_bytes: of every encoded block; 0 where that depends on the values. most_bytes: of the largest.
    compaction: what it leaves out, as in the namespace.
    """

    @property
    def name(self) -> str: ...
    @property
    def compaction(self) -> str: ...
    @property
    def layout(self) -> KvLayout: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def most_bytes(self) -> int: ...

    def encode_layer(self, layer: int, raw: memoryview, block: memoryview) -> None:
        """Write `raw`, `layout.layer_bytes` long, into its place in `block`, `most_bytes` long.

        Raises ValueError for values that cannot be written, and then leaves that place undefined.
        """
        ...

    def decode_layer(self, layer: int, block: memoryview, raw: memoryview) -> None:
        """Fill `raw` from an encoded block; reads the bytes of that layer only. Raises NotEncoded."""
        ...

    def size_of(self, block: memoryview) -> int:
        """Bytes that a block takes whose last layer was encoded into `block`."""
        ...


def codec_for(name: str, layout: KvLayout) -> Codec:
    """The codec of a name of `CODECS` for blocks of this layout.

    Raises ValueError for another name and for a dtype that cannot be quantised, ConfigError when a library is missing.
    """
    if name not in CODECS:
        raise ValueError(f"codec {name!r} is not one of {', '.join(CODECS)}")
    parts = name.split("+")
    code: LayerCode
    if parts[0] in QUANTISED and layout.dtype not in LARGEST:
        raise ValueError(f"{parts[0]} needs one of {', '.join(LARGEST)}, not {layout.dtype}")
    if parts[0] == "int8":
        code = IntegerCode(layout, "int8", 255, np.dtype("<f4"))
    elif parts[0] == "int4":
        code = IntegerCode(layout, "int4", 15, np.dtype("<f2"))
    elif parts[0] == "fp8":
        code = Float8Code(layout)
    else:
        code = SortedBytes(1 if name == "none" else layout.element_bytes, layout.layer_bytes)
    if parts[-1] == "lz4":
        return CompressedBlocks(name, layout, code, "lz4")
    if parts[-1] == "zstd":
        return CompressedBlocks(name, layout, code, "zstd")
    return FixedBlocks(name, layout, code)


def check_namespace(namespace: Namespace, codec: Codec | None) -> None:
    """Raises ValueError unless blocks of `namespace` are what `codec` writes (None: as the engine has them)."""
    mine = "" if codec is None or codec.name == "none" else codec.name
    if namespace.codec != mine:
        raise ValueError(f"the namespace has codec {namespace.codec!r}, the client {mine!r}")
    heads = [part for part in namespace.compaction.split("+") if part.startswith("heads")]
    kept = [] if codec is None or not codec.compaction else [codec.compaction]
    if heads != kept:
        raise ValueError(f"the namespace keeps {heads or 'all heads'}, the client {kept or 'all heads'}")
    if codec is not None and namespace.block_bytes != codec.block_bytes:
        raise ValueError(f"the namespace has blocks of {namespace.block_bytes} bytes, the codec of {codec.block_bytes}")


def encode_block(codec: Codec, raw: memoryview, target: memoryview) -> int:
    """A whole block into `target`, `most_bytes` long; the bytes it took of it."""
    for layer in range(codec.layout.layers):
        start, stop = codec.layout.layer_range(layer)
        codec.encode_layer(layer, raw[start:stop], target)
    return codec.size_of(target)


def decode_block(codec: Codec, block: memoryview, target: memoryview) -> None:
    """A whole block into `target`, `layout.block_bytes` long. Raises NotEncoded."""
    for layer in range(codec.layout.layers):
        start, stop = codec.layout.layer_range(layer)
        codec.decode_layer(layer, block, target[start:stop])


def pack_encoded(
    codec: Codec,
    layer: int,
    blocks: Sequence[memoryview],
    starts: Sequence[int],
    key: Tensor,
    value: Tensor | None = None,
) -> None:
    """`pack_layer`, through a codec: `blocks` are encoded ones, `most_bytes` long."""
    one = codec.layout.one_layer()
    raw = _scratch(one.block_bytes)
    for block, start in zip(blocks, starts, strict=True):
        pack_layer(one, 0, [raw], [start], key, value)
        codec.encode_layer(layer, raw, block)


def unpack_encoded(
    codec: Codec,
    layer: int,
    blocks: Sequence[memoryview],
    starts: Sequence[int],
    key: Tensor,
    value: Tensor | None = None,
) -> None:
    """`unpack_layer`, through a codec: `blocks` are encoded ones. Raises NotEncoded."""
    one = codec.layout.one_layer()
    raw = _scratch(one.block_bytes)
    for block, start in zip(blocks, starts, strict=True):
        codec.decode_layer(layer, block, raw)
        unpack_layer(one, 0, [raw], [start], key, value)


# Blocks


class LayerCode(Protocol):
    """How one layer is written, always with the same number of bytes."""

    @property
    def layer_bytes(self) -> int: ...
    def encode(self, raw: memoryview, target: memoryview) -> None: ...
    def decode(self, source: memoryview, raw: memoryview) -> None: ...


class FixedBlocks:
    """A block whose layers lie one after the other, each at a place that the layout tells."""

    compaction = ""

    def __init__(self, name: str, layout: KvLayout, code: LayerCode) -> None:
        self.name = name
        self.layout = layout
        self.block_bytes = self.most_bytes = layout.layers * code.layer_bytes
        self._code = code

    def encode_layer(self, layer: int, raw: memoryview, block: memoryview) -> None:
        self._code.encode(_sized(raw, self.layout.layer_bytes), self._place(layer, block))

    def decode_layer(self, layer: int, block: memoryview, raw: memoryview) -> None:
        self._code.decode(self._place(layer, block), _sized(raw, self.layout.layer_bytes))

    def size_of(self, block: memoryview) -> int:
        return self.block_bytes

    def _place(self, layer: int, block: memoryview) -> memoryview:
        self.layout.layer_range(layer)  # which refuses a layer that there is not
        size = self._code.layer_bytes
        return _sized(block, self.block_bytes)[layer * size : (layer + 1) * size]


class CompressedBlocks:
    """A block whose layers are as long as they came out, with a table of their ends before them."""

    compaction = ""
    block_bytes = 0

    def __init__(self, name: str, layout: KvLayout, code: LayerCode, library: Literal["lz4", "zstd"]) -> None:
        check_codec(library)
        self.name = name
        self.layout = layout
        self.most_bytes = END.size * (1 + layout.layers) + layout.layers * code.layer_bytes
        if self.most_bytes >= 1 << 32:
            raise ValueError(f"a block of {self.most_bytes:,} bytes is too large to compress")
        self._code = code
        self._library = library

    def encode_layer(self, layer: int, raw: memoryview, block: memoryview) -> None:
        block = _sized(block, self.most_bytes)
        if layer == 0:
            block[: END.size] = bytes([COMPRESSED_FORMATS[self._library], 0, 0, 0])
        start = self._start(layer, block)
        written = _scratch(self._code.layer_bytes)
        self._code.encode(_sized(raw, self.layout.layer_bytes), written)
        packed = compress(self._library, written)
        stop = start + len(packed)
        np.copyto(np.frombuffer(block[start:stop], np.uint8), np.frombuffer(packed, np.uint8))
        END.pack_into(block, END.size * (1 + layer), stop)

    def decode_layer(self, layer: int, block: memoryview, raw: memoryview) -> None:
        start, written = self._start(layer, block), _scratch(self._code.layer_bytes)
        (stop,) = END.unpack_from(block, END.size * (1 + layer))
        if not start <= stop <= block.nbytes:
            raise NotEncoded(f"layer {layer} lies at [{start}, {stop}) of a block of {block.nbytes} bytes")
        try:
            decompress(self._library, block[start:stop], written)
        except ValueError as error:
            raise NotEncoded(f"layer {layer}: {error}") from error
        self._code.decode(written, _sized(raw, self.layout.layer_bytes))

    def size_of(self, block: memoryview) -> int:
        return self._start(self.layout.layers, block)

    def _start(self, layer: int, block: memoryview) -> int:
        """Where `layer` begins: where the one before it ends."""
        if not 0 <= layer <= self.layout.layers:
            raise ValueError(f"layer {layer} is not in [0, {self.layout.layers})")
        head = END.size * (1 + self.layout.layers)
        if block.nbytes < head or block[0] != COMPRESSED_FORMATS[self._library]:
            raise NotEncoded(f"a block of {block.nbytes} bytes does not begin as {self.name} does")
        start = int(END.unpack_from(block, END.size * layer)[0]) if layer else head
        if not head <= start <= self.most_bytes:
            raise NotEncoded(f"layer {layer} begins at {start}")
        return start


# Layers


class SortedBytes:
    """All first bytes of a layer's elements, then all second ones, ...: exponents together, for a compressor's sake."""

    def __init__(self, element_bytes: int, layer_bytes: int) -> None:
        self.layer_bytes = layer_bytes
        self._shape = (layer_bytes // element_bytes, element_bytes)

    def encode(self, raw: memoryview, target: memoryview) -> None:
        np.copyto(_bytes(target).reshape(self._shape[::-1]), _bytes(raw).reshape(self._shape).T)

    def decode(self, source: memoryview, raw: memoryview) -> None:
        np.copyto(_bytes(raw).reshape(self._shape), _bytes(source).reshape(self._shape[::-1]).T)


# Bytes


def _scratch(size: int) -> memoryview:
    return np.empty(size, np.uint8).data


def _bytes(buffer: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(buffer, np.uint8)


def _sized(buffer: memoryview, size: int) -> memoryview:
    if buffer.nbytes != size or not buffer.c_contiguous:
        raise ValueError(f"{buffer.nbytes} bytes, where the codec has {size} contiguous ones")
    return buffer.cast("B")
