"""Compression: what comes back, what is stored as it is, and what damage and absent packages look like."""

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import compression
from kvstore.compression import CODECS, MAX_BLOCK_BYTES, CodecName, compress, decompress
from kvstore.errors import ConfigError

PACKING: list[CodecName] = ["lz4", "zstd"]
NOISE = np.random.default_rng(5).bytes(64 << 10)
TEXT = b"the same words again, " * 3000


def back(codec: CodecName, stored: bytes, size: int) -> bytes:
    target = bytearray(size)
    decompress(codec, stored, memoryview(target))
    return bytes(target)


@pytest.mark.parametrize("codec", CODECS)
@given(st.binary(max_size=3000), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_any_block_comes_back(codec: CodecName, piece: bytes, times: int) -> None:
    block = piece * times
    stored = compress(codec, memoryview(block))
    assert len(stored) == len(block) or len(stored) <= 0.95 * len(block)
    assert back(codec, stored, len(block)) == block


@pytest.mark.parametrize("codec", PACKING)
def test_a_block_that_shrinks_is_stored_smaller_and_noise_as_it_is(codec: CodecName) -> None:
    assert len(compress(codec, memoryview(TEXT))) < len(TEXT) / 20
    assert compress(codec, memoryview(NOISE)) == NOISE


@pytest.mark.parametrize("codec", PACKING)
def test_a_block_that_shrinks_by_too_little_is_stored_as_it_is(codec: CodecName) -> None:
    block = NOISE[:10_000] + bytes(300)
    assert compress(codec, memoryview(block)) == block


@pytest.mark.parametrize("codec", CODECS)
def test_elements_of_any_type_are_compressed_as_their_bytes(codec: CodecName) -> None:
    block = np.zeros((4, 100), np.float32)
    target = np.ones(200, np.float64)
    decompress(codec, compress(codec, block.data), target.data)
    assert target.tobytes() == block.tobytes()


@pytest.mark.parametrize("codec", PACKING)
def test_a_flipped_byte_is_an_error_or_other_bytes_and_never_more_of_them(codec: CodecName) -> None:
    block = (b"0123456789abcdef" * 8 + NOISE[:40]) * 3
    stored = compress(codec, memoryview(block))
    assert len(stored) < len(block)
    for place in range(len(stored)):
        for bit in range(8):
            damaged = bytearray(stored)
            damaged[place] ^= 1 << bit
            memory = bytearray(b"\xee" * (len(block) + 16))
            try:
                decompress(codec, bytes(damaged), memoryview(memory)[: len(block)])
            except ValueError:
                pass
            assert memory[len(block) :] == b"\xee" * 16


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [0, 1, len(TEXT) - 1, len(TEXT) + 1])
def test_a_target_of_another_size_is_refused(codec: CodecName, size: int) -> None:
    with pytest.raises(ValueError):
        back(codec, compress(codec, memoryview(TEXT)), size)


@pytest.mark.parametrize("codec", PACKING)
@pytest.mark.parametrize("cut", [0, 1, 10])
def test_what_was_cut_short_or_lengthened_is_refused(codec: CodecName, cut: int) -> None:
    stored = compress(codec, memoryview(TEXT))
    for damaged in (stored[:cut], stored[:-1], stored + b"x"):
        with pytest.raises(ValueError):
            back(codec, damaged, len(TEXT))


def test_a_frame_that_promises_a_terabyte_allocates_nothing() -> None:
    frame = b"\x28\xb5\x2f\xfd" + bytes([0b11000000, 0]) + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00"
    with pytest.raises(ValueError, match="1,099,511,627,776"):
        back("zstd", frame, len(TEXT))


def test_memory_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        compress("none", memoryview(TEXT)[::2])
    with pytest.raises(ValueError, match="read-only"):
        decompress("none", TEXT, memoryview(bytes(len(TEXT))))


def test_a_block_that_is_too_large_is_refused() -> None:
    block = np.broadcast_to(np.zeros(1, np.uint8), MAX_BLOCK_BYTES + 1)
    with pytest.raises(ValueError):
        compress("lz4", memoryview(block))


@pytest.mark.parametrize(("codec", "library"), [("lz4", "lz4_block"), ("zstd", "zstandard")])
def test_a_missing_package_is_named_with_its_extra(codec: CodecName, library: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(compression, library, None)
    with pytest.raises(ConfigError, match=r"cairn-kv\[compression\]"):
        compress(codec, memoryview(TEXT))
    with pytest.raises(ConfigError, match=r"cairn-kv\[compression\]"):
        back(codec, b"stored", 100)


def test_a_codec_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="none, lz4, zstd"):
        compress("gzip", memoryview(TEXT))  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", CODECS)
def test_python_goes_on_while_a_block_is_compressed(codec: CodecName) -> None:
    block = np.random.default_rng(1).integers(0, 4, 32 << 20, np.uint8)
    ticks, done = 0, threading.Event()

    def work() -> None:
        target = bytearray(block.nbytes)
        decompress(codec, compress(codec, block.data), memoryview(target))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        ticks += 1
    thread.join()
    assert ticks > 100
