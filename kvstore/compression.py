"""Lossless compression of one block, and back into memory that the caller has.

A block that does not shrink by 5 % is stored as it is. So what is stored is compressed exactly when it is shorter than
the block, and nothing beside it has to say so.

Both libraries release the GIL while they compress and decompress; lz4 then copies what it made with the GIL held. What
is copied here holds it for 64 KiB at a time, or for a block below 1 MiB that is stored as it is.
"""

from typing import Literal, get_args

from kvstore.errors import ConfigError

try:
    import lz4.block as lz4_block
except ImportError:
    lz4_block = None
try:
    import zstandard
except ImportError:
    zstandard = None  # type: ignore[assignment]

CodecName = Literal["none", "lz4", "zstd"]
CODECS: tuple[CodecName, ...] = get_args(CodecName)

WORTH_IT = 0.95  # of the block's bytes; above that, decompressing costs more than it saves
ZSTD_LEVEL = 1
MAX_BLOCK_BYTES = 1 << 30  # lz4 takes no 2 GiB
PIECE_BYTES = 64 << 10


def check_codec(codec: CodecName) -> None:
    """Raise ConfigError when there is no such codec, or when its library is not installed."""
    if codec not in CODECS:
        raise ConfigError(f"compression must be one of {', '.join(CODECS)}, not {codec!r}")
    library = {"none": True, "lz4": lz4_block, "zstd": zstandard}[codec]
    if library is None:
        raise ConfigError(f"compression {codec!r} needs a package: pip install 'cairn-kv[compression]'")


def compress(codec: CodecName, block: memoryview) -> bytes:
    """What to store for a block: shorter than it by 5 % at least, or its own bytes.

    block: contiguous, of any format, 0 to 1 GiB.

    Raises ConfigError as `check_codec` does, ValueError for a block that is too large or not contiguous.
    """
    check_codec(codec)
    raw = _as_bytes(block)
    if raw.nbytes > MAX_BLOCK_BYTES:
        raise ValueError(f"a block to compress has at most {MAX_BLOCK_BYTES:,} bytes, not {raw.nbytes:,}")
    packed: bytes | None = None
    if codec == "lz4" and raw.nbytes:
        packed = lz4_block.compress(raw, store_size=False)
    elif codec == "zstd" and raw.nbytes:
        packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw)
    if packed is not None and len(packed) <= WORTH_IT * raw.nbytes:
        return packed
    return b"".join([raw])  # which, unlike bytes(), lets go of the GIL from 1 MiB on


def decompress(codec: CodecName, stored: bytes | memoryview, target: memoryview) -> None:
    """Fill `target`, whose size is the block's, with what `compress` made of the block.

    The caller checks the block's checksum after: not every damage can be seen here. At most `target.nbytes` bytes
    are allocated, whatever `stored` says of itself. `target` has undefined content after an error.

    Raises ConfigError as `check_codec` does; ValueError when `stored` is damaged, does not give `target.nbytes`
    bytes, or `target` is read-only or not contiguous.
    """
    check_codec(codec)
    place = _as_bytes(target)
    if place.readonly:
        raise ValueError("the target is read-only")
    source = _as_bytes(memoryview(stored))
    if source.nbytes == place.nbytes:
        _copy(place, source)
    elif source.nbytes > WORTH_IT * place.nbytes or codec == "none":
        raise ValueError(f"{source.nbytes:,} bytes are stored of a block of {place.nbytes:,}")
    elif codec == "lz4":
        _copy(place, memoryview(_unpack_lz4(source, place.nbytes)))
    else:
        _copy(place, memoryview(_unpack_zstd(source, place.nbytes)))


def _unpack_lz4(stored: memoryview, size: int) -> bytes:
    try:
        block: bytes = lz4_block.decompress(stored, uncompressed_size=size)
    except lz4_block.LZ4BlockError as error:
        raise ValueError(f"damaged lz4 block: {error}") from error
    if len(block) != size:
        raise ValueError(f"an lz4 block of {len(block):,} bytes, not {size:,}")
    return block


def _unpack_zstd(stored: memoryview, size: int) -> bytes:
    try:
        promised = zstandard.frame_content_size(stored)
        if promised != size:  # zstandard would allocate what the frame promises
            raise ValueError(f"a zstd frame of {promised:,} bytes, not {size:,}")
        block: bytes = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"damaged zstd frame: {error}") from error
    if len(block) != size:
        raise ValueError(f"a zstd frame of {len(block):,} bytes, not {size:,}")
    return block


def _as_bytes(block: memoryview) -> memoryview:
    if not block.c_contiguous:
        raise ValueError("a block must be contiguous")
    return block.cast("B")


def _copy(target: memoryview, source: memoryview) -> None:
    for start in range(0, source.nbytes, PIECE_BYTES):  # so that other threads get the GIL between
        target[start : start + PIECE_BYTES] = source[start : start + PIECE_BYTES]
