"""What people type, turned into what the store takes. Anything that cannot be is an InvalidRequest."""

import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from engine_client.steps import OpenSpace
from kvstore.errors import InvalidRequest
from kvstore.prefix import MAX_TOKEN
from kvstore.types import KEY_BYTES, BlockKey
from server.commands.output import count_text
from server.config import DURATIONS, SIZES, YEAR_S
from server.sources import quantity

PART_KEY_BYTES = KEY_BYTES + 2
MOST_BYTES = 1 << 50
TIERS = ("hbm", "dram", "nvme", "object")
SLABBED, BELOW = TIERS[:3], TIERS[2:]  # those that have slabs, and those under DRAM
WORDS = re.compile(r"[^\s,\[\]]+")
STDIN = "-"


def size(text: str) -> int:
    """Bytes: "2GiB", "64 MiB" or "4096"."""
    try:
        found = int(quantity(text, SIZES))
    except ValueError as error:
        raise InvalidRequest(f"expected a size like 64MiB, not {text!r}") from error
    if found > MOST_BYTES:
        raise InvalidRequest(f"expected at most {MOST_BYTES >> 40}TiB, not {text!r}")
    return found


def duration(text: str) -> float:
    """Seconds above 0, a year at most: "10m", "250ms" or "0.5"."""
    try:
        seconds = float(quantity(text, DURATIONS))
    except ValueError as error:
        raise InvalidRequest(f"expected a duration like 30s, not {text!r}") from error
    if not 0 < seconds <= YEAR_S:
        raise InvalidRequest(f"expected a duration above 0 and of a year at most, not {text!r}")
    return seconds


def share(text: str) -> float:
    """A number above 0 and at most 1."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise InvalidRequest(f"expected a number above 0 and at most 1, not {text!r}")
    return found


def tier(text: str, among: Sequence[str] = TIERS) -> str:
    """The name of a tier that something can be done with."""
    if text not in among:
        raise InvalidRequest(f"{text!r} is no tier for this: {', '.join(among)}")
    return text


def key(text: str) -> BlockKey:
    """32 hex digits, or 36 with the part's number."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) not in (KEY_BYTES, PART_KEY_BYTES) or len(text) != 2 * len(found):
        raise InvalidRequest(f"{text!r} is no key: 32 hex digits, or 36 with a part")
    return BlockKey(found)


def keys(texts: Sequence[str]) -> list[BlockKey]:
    """Keys, each a word of its own or several with commas between."""
    return [key(word) for text in texts for word in text.split(",") if word]


def part_of(found: Sequence[BlockKey], default: int = 0) -> int:
    """The part that keys of 18 bytes name; one for all of them."""
    parts = {int.from_bytes(one[KEY_BYTES:], "little") if len(one) > KEY_BYTES else default for one in found}
    if len(parts) > 1:
        raise InvalidRequest(f"keys of several parts: {', '.join(map(str, sorted(parts)))}")
    return parts.pop() if parts else default


def tokens(path: str, prompt_ids: str = "") -> list[int]:
    """Token ids of a file ("-": stdin), or of `prompt_ids`: numbers with spaces, commas or line ends between."""
    text = prompt_ids if not path else _text(path)
    found = [_token(word) for word in WORDS.findall(text)]
    if not found:
        raise InvalidRequest(f"{path or '--prompt-ids'}: no token ids")
    return found


def chain(space: OpenSpace, given: Sequence[BlockKey], ids: Sequence[int] = ()) -> list[BlockKey]:
    """Keys that fit the namespace: those given, else those of a prompt's full blocks, at least one."""
    if given:
        if any(len(one) != space.key_bytes for one in given):
            parts = count_text(space.namespace.parts, "part")
            raise InvalidRequest(f"blocks of {space.name} have {parts}: a key has {2 * space.key_bytes} hex digits")
        return list(given)
    if space.part >= space.namespace.parts:
        raise InvalidRequest(f"blocks of {space.name} have {count_text(space.namespace.parts, 'part')}, from 0")
    found = space.keys(ids)
    if not found:
        block = count_text(space.namespace.block_tokens, "token")
        raise InvalidRequest(f"{count_text(len(ids), 'token')} make no full block of {block}")
    return found


def packed(ids: Sequence[int]) -> bytes:
    """Token ids as the wire has them: u32 each."""
    return struct.pack(f"<{len(ids)}I", *ids)


def just_one(given: dict[str, object]) -> None:
    """Exactly one of these ways of saying it was used."""
    used = [name for name, value in given.items() if value]
    if len(used) != 1:
        names = ", ".join(given)
        raise InvalidRequest(f"give one of {names}" + (f", not {' and '.join(used)}" if used else ""))


def file_bytes(path: Path) -> int:
    """The size of a regular file."""
    try:
        if not path.is_file():
            raise InvalidRequest(f"{path}: {'not a regular file' if path.exists() else 'there is no such file'}")
        return path.stat().st_size
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from error


def read_stdin() -> bytes:
    return sys.stdin.buffer.read()


def read_piece(path: Path, start: int, size_bytes: int) -> bytes:
    """Bytes [start, start + size_bytes) of a file."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            piece = file.read(size_bytes)
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from error
    if len(piece) != size_bytes:
        raise InvalidRequest(f"{path}: became shorter while it was read")
    return piece


def _text(path: str) -> str:
    try:
        return (read_stdin() if path == STDIN else Path(path).read_bytes()).decode()
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path}: no text; token ids are written as numbers") from error


def _token(word: str) -> int:
    if not word.isdecimal() or not word.isascii() or len(word) > 10 or int(word) > MAX_TOKEN:
        raise InvalidRequest(f"{word[:40]!r} is no token id: a number from 0 to {MAX_TOKEN}")
    return int(word)
