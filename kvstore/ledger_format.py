"""What a ledger's folder must have before RocksDB may open it: a known format, and logs that it reads to their end.

RocksDB's logs, its write-ahead log and its MANIFEST, are blocks of 32 KiB, each full of pieces of records:

    |-- checksum u32 --|-- size u16 --|-- kind u8 --|-- size bytes --| ... zeros where no header fits

Kinds are 1 to 4, and 0 in space never written. RocksDB 9.8 reads damage to anything else well, but one flipped bit in
a kind can keep it in a loop for ever, and with it the whole process (facebook/rocksdb#13333). So they are read first.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from kvstore.durable import sync_folder
from kvstore.errors import ConfigError

FORMAT_VERSION = 1
FORMAT = "FORMAT"
"""The file that says what the folder is: made first, never changed."""

_MAGIC = "cairn ledger"
_BLOCK_BYTES, _HEADER_BYTES = 32 << 10, 7
_LAST_KIND = 4


def mark(folder: Path) -> None:
    write_durably(folder / FORMAT, f"{_MAGIC} {FORMAT_VERSION}\n")


def check(folder: Path) -> None:
    """ConfigError if it is not a ledger, or one of another version; OSError if its logs are damaged."""
    file = folder / FORMAT
    said = file.read_text(errors="replace").strip() if file.is_file() else ""
    magic, _, version = said.rpartition(" ")
    if magic != _MAGIC:
        why = f"{FORMAT} says {said!r}" if said else f"it has no {FORMAT}"
        raise ConfigError(f"{folder} is not a ledger: {why}")
    if version != str(FORMAT_VERSION):
        raise ConfigError(f"{folder}: format version {version} is not {FORMAT_VERSION}")
    for log in (*folder.glob("*.log"), *folder.glob("MANIFEST-*")):
        with log.open("rb") as blocks:
            while block := blocks.read(_BLOCK_BYTES):
                if max(_kinds(block), default=0) > _LAST_KIND:
                    raise OSError(errno.EIO, f"damaged in the {len(block)} bytes before {blocks.tell()}", str(log))


def _kinds(block: bytes) -> Iterator[int]:
    """Of the pieces in it. What RocksDB takes for a piece is among them: after damage it goes to the next block."""
    start = 0
    while start + _HEADER_BYTES <= len(block) and block[start + 6]:
        yield block[start + 6]
        start += _HEADER_BYTES + int.from_bytes(block[start + 4 : start + 6], "little")


def write_durably(file: Path, text: str) -> None:
    with file.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    sync_folder(file.parent)
