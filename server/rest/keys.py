"""Namespaces, keys and tokens as they stand in paths and bodies of the REST interface."""

from kvstore.catalogue import OpenNamespace
from kvstore.errors import InvalidRequest
from kvstore.packed import unpack_keys
from kvstore.prefix import chain, part_key, split_part
from kvstore.types import KEY_BYTES, BlockKey
from server.rest.models import ByKeys, ByTokens
from server.rest.problems import Problem
from server.session import Session


def find_namespace(session: Session, name: str) -> OpenNamespace:
    """Raises NotFound."""
    return session.store.catalogue.find(session.tenant, name)


def to_key(space: OpenNamespace, digits: str) -> BlockKey:
    """Of hex digits. Raises Problem (409) when no block of this namespace can have such a key."""
    key = BlockKey(bytes.fromhex(digits))
    if len(key) != space.key_bytes:
        expected = 2 * space.key_bytes
        message = f"keys of this namespace have {expected} hex digits, not {len(digits)}"
        raise Problem(409, message, code="namespace_mismatch")
    part = split_part(key)[1]
    if part >= space.namespace.parts:
        message = f"part {part} of a namespace of {space.namespace.parts} parts"
        raise Problem(409, message, code="namespace_mismatch")
    return key


def parent_of(space: OpenNamespace, digits: str | None) -> bytes:
    """The key before a chain's first; empty where it begins with it."""
    return to_key(space, digits) if digits else b""


def to_keys(session: Session, space: OpenNamespace, keys: list[str]) -> list[BlockKey]:
    """Raises InvalidRequest for more than may come at once."""
    _check_batch(session, len(keys))
    if space.key_bytes == KEY_BYTES and set(map(len, keys)) == {2 * KEY_BYTES}:  # nearly always, and fast
        return unpack_keys(bytes.fromhex("".join(keys)), KEY_BYTES)
    return [to_key(space, digits) for digits in keys]


def chain_of(session: Session, space: OpenNamespace, tokens: list[int]) -> list[BlockKey]:
    """The keys of a prompt's blocks, without part numbers."""
    namespace = space.namespace
    _check_batch(session, len(tokens) // namespace.block_tokens)
    try:
        return chain(tokens, namespace.block_tokens, space.root, namespace.hash)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def first_parts(session: Session, space: OpenNamespace, body: ByKeys | ByTokens) -> list[BlockKey]:
    """One key per block: as given, or of the prompt's blocks, of each its first part."""
    if isinstance(body, ByKeys):
        return to_keys(session, space, body.keys)
    keys = chain_of(session, space, body.tokens)
    return keys if space.namespace.parts == 1 else [part_key(key, 0) for key in keys]


def all_parts(session: Session, space: OpenNamespace, body: ByKeys | ByTokens) -> list[BlockKey]:
    """As given, or of the prompt's blocks, of each all parts."""
    if isinstance(body, ByKeys):
        return to_keys(session, space, body.keys)
    keys = chain_of(session, space, body.tokens)
    if space.namespace.parts == 1:
        return keys
    _check_batch(session, len(keys) * space.namespace.parts)
    return [part_key(key, part) for key in keys for part in range(space.namespace.parts)]


def _check_batch(session: Session, blocks: int) -> None:
    if blocks > session.store.limits.batch_blocks:
        raise InvalidRequest(f"{blocks} blocks in one request; batch_blocks is {session.store.limits.batch_blocks}")
