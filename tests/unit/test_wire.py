"""The control protocol's messages and frames: what is said is understood, and what is not said is refused."""

import random
import struct
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import ERRORS, ProtocolError, Rejected, StoreError
from kvstore.packed import pack_keys, pack_u64, unpack_keys, unpack_u64
from kvstore.prefix import Namespace
from kvstore.types import BlockKey

NAMESPACE = Namespace(model="m", dtype="bfloat16", layout="hnd", block_tokens=16, layers=30, block_bytes=0)
NAMESPACES = [
    NAMESPACE,
    msgspec.structs.replace(NAMESPACE, parts=4, hash="sha256", adapter="a", weights_epoch=7, block_bytes=1 << 20),
]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
VERBS = {**wire.REQUESTS, **wire.REPLIES}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may have."""
    if get_origin(hint) in (Union, UnionType):
        return st.one_of(*map(values, get_args(hint)))
    if get_origin(hint) is tuple and get_args(hint)[-1] is not Ellipsis:
        return st.tuples(*map(values, get_args(hint)))
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=4).map(tuple)
    if get_origin(hint) is list:
        return st.lists(values(get_args(hint)[0]), max_size=3)
    if get_origin(hint) is dict:
        _, of = get_args(hint)
        return st.dictionaries(st.text(max_size=4), ANYTHING if of is Any else values(of), max_size=3)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**64 - 1),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=64),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
        Namespace: st.sampled_from(NAMESPACES),
        NoneType: st.none(),
    }
    if hint not in plain:  # a struct in a message
        return st.builds(hint, **{field.name: values(field.type) for field in msgspec.structs.fields(hint)})
    return plain[hint]


def messages(verb: str) -> st.SearchStrategy[wire.Message]:
    cls = VERBS[verb]
    return st.builds(cls, **{field.name: values(field.type) for field in msgspec.structs.fields(cls)})


def decode(verb: str, body: bytes) -> Any:
    return wire.decode_request(body) if verb in wire.REQUESTS else wire.decode_reply(body)


def body_of(frame: bytes) -> bytes:
    return frame[wire.HEADER.size :]


any_message = st.sampled_from(sorted(VERBS)).flatmap(messages)


# Verbs.


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


def test_every_message_is_a_request_or_a_reply_under_a_tag_of_its_own() -> None:
    assert not wire.REQUESTS.keys() & wire.REPLIES.keys()
    assert set(VERBS.values()) == subclasses(wire.Message) - {wire.Message}
    assert len(set(VERBS.values())) == len(VERBS)
    for verb, cls in VERBS.items():
        assert cls.__struct_config__.tag == verb
        assert msgspec.structs.fields(cls)[0].name == "id"


@pytest.mark.parametrize("verb", sorted(VERBS))
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_what_is_said_is_understood(verb: str, data: st.DataObject) -> None:
    message = data.draw(messages(verb))
    frame = wire.encode(message, payload_bytes=5)
    header = wire.parse_header(frame[: wire.HEADER.size], 1 << 20)
    assert header == (len(frame) - wire.HEADER.size, 5)
    understood = decode(verb, body_of(frame))
    assert type(understood) is type(message)
    assert understood == message
    with pytest.raises(ProtocolError):
        (wire.decode_reply if verb in wire.REQUESTS else wire.decode_request)(body_of(frame))


def test_a_frame_is_drawn_as_in_the_protocol() -> None:
    frame = wire.encode(wire.Release(7, 300), payload_bytes=(1 << 40) + 2)
    body = b"\x94\xa7release\x07\xcd\x01\x2c\xc4\x00"
    assert frame == struct.pack("<I4sQ", len(body), b"CVK1", (1 << 40) + 2) + body


def test_fields_that_a_newer_peer_adds_are_passed_over() -> None:
    body = msgspec.msgpack.encode(["release", 7, 300, b"", "new", {"and": ["more"]}])
    assert wire.decode_request(body) == wire.Release(7, 300)


def test_fields_that_have_a_default_may_be_left_out() -> None:
    body = msgspec.msgpack.encode(["acquire", 7, 1, b"", 500])
    assert wire.decode_request(body) == wire.Acquire(7, 1, b"", 500)


# What is no message.


@given(st.binary(max_size=80))
@settings(max_examples=150, deadline=None)
def test_garbage_is_refused(body: bytes) -> None:
    for decode_any in (wire.decode_request, wire.decode_reply):
        try:
            assert isinstance(decode_any(body), wire.Message)
        except ProtocolError:
            continue


@given(any_message, st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_damaged_message_is_refused_or_another_message(message: wire.Message, seed: int) -> None:
    chance = random.Random(seed)
    body = bytearray(body_of(wire.encode(message)))
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(body))
        cut, put = chance.choice([(1, 1), (0, 1), (chance.randint(1, 4), 0)])
        body[at : at + cut] = chance.randbytes(put)
        if not body:
            break
    for decode_any in (wire.decode_request, wire.decode_reply):
        try:
            assert isinstance(decode_any(body), wire.Message)
        except ProtocolError:
            continue


@given(any_message, st.data())
@settings(max_examples=80, deadline=None)
def test_a_message_that_is_cut_off_or_goes_on_is_refused(message: wire.Message, data: st.DataObject) -> None:
    body = body_of(wire.encode(message))
    verb = str(message.__struct_config__.tag)
    with pytest.raises(ProtocolError):
        decode(verb, body[: data.draw(st.integers(0, len(body) - 1))])
    with pytest.raises(ProtocolError):
        decode(verb, body + b"\0")


@pytest.mark.parametrize(
    "said",
    [
        [],
        ["release"],
        ["release", 7],
        ["unheard_of", 7],
        [7, 7],
        {"release": 7},
        "release",
        ["release", "7", 300],
        ["release", 7, None],
        ["release", 7, 3.5],
        ["match", 7, 1, "text"],
        ["match", 7, 1, [1, 2, 3]],
        ["open", 7, "name", ["too few"]],
        ["open", 7, "name", {"model": "m"}],
        ["evict", 7, 1, b"", 1],
        ["attach", 7, b"", [1, "2"]],
    ],
    ids=str,
)
def test_what_makes_no_message_is_refused(said: Any) -> None:
    with pytest.raises(ProtocolError, match="not a request"):
        wire.decode_request(msgspec.msgpack.encode(said))


def test_a_namespace_that_makes_no_sense_is_refused() -> None:
    fields = msgspec.structs.asdict(NAMESPACE)
    assert wire.decode_request(msgspec.msgpack.encode(["open", 7, "name", fields])).namespace == NAMESPACE
    body = msgspec.msgpack.encode(["open", 7, "name", fields | {"block_tokens": 0}])
    with pytest.raises(ProtocolError):
        wire.decode_request(body)


@pytest.mark.parametrize("inner", [b"\x91", b"\x81\xa1a", b"\x81\x91"], ids=["arrays", "maps", "arrays as keys"])
def test_a_body_that_is_nested_without_end_is_refused(inner: bytes) -> None:
    nested = inner * 100_000 + b"\x01"
    with pytest.raises(ProtocolError):
        wire.decode_request(b"\x94\xa7release\x01\x02" + nested)
    with pytest.raises(ProtocolError):
        wire.decode_reply(b"\x93\xa5stats\x01" + nested)


@pytest.mark.parametrize("header", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"], ids=["array", "map", "text", "bytes"])
def test_a_count_that_the_body_does_not_have_takes_no_memory(header: bytes) -> None:
    huge = header + b"\xff\xff\xff\xfe" + b"\x01" * 20
    for verb in ("attach", "checked", "stats", "listed"):
        tag = msgspec.msgpack.encode(verb)
        body = b"\x94" + tag + b"\x01" + (b"\xc4\x00" if verb == "attach" else b"") + huge
        with pytest.raises(ProtocolError):
            decode(verb, body)


# Frames.


@pytest.mark.parametrize("size", [0, 1, 15, 17, 64])
def test_a_header_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError):
        wire.parse_header(wire.encode(wire.Stat(1)).ljust(64, b"\0")[:size], 1 << 20)


def test_a_body_over_the_limit_is_refused_before_it_comes() -> None:
    at_limit = wire.HEADER.pack(1000, wire.MAGIC, 2**64 - 1)
    assert wire.parse_header(at_limit, 1000) == (1000, 2**64 - 1)
    with pytest.raises(ProtocolError, match="a frame of 1000 bytes is over the limit of 999"):
        wire.parse_header(at_limit, 999)


@given(st.binary(min_size=16, max_size=16))
@settings(deadline=None)
def test_what_does_not_begin_like_a_frame_is_refused(header: bytes) -> None:
    if header[4:8] == b"CVK1":
        return
    with pytest.raises(ProtocolError):
        wire.parse_header(header, 2**32)


def test_a_request_of_another_protocol_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not a frame of this protocol"):
        wire.parse_header(b"GET / HTTP/1.1\r\nHost: x"[:16], 1 << 20)


# Packed fields.


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40))
@settings(deadline=None)
def test_numbers_are_packed_as_u64(numbers: list[int]) -> None:
    packed = pack_u64(numbers)
    assert packed == b"".join(number.to_bytes(8, "little") for number in numbers)
    assert unpack_u64(packed) == tuple(numbers)


@given(st.sampled_from([16, 18]), st.integers(0, 40), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_keys_are_packed_one_after_the_other(key_bytes: int, count: int, chance: random.Random) -> None:
    keys = [BlockKey(chance.randbytes(key_bytes)) for _ in range(count)]
    assert pack_keys(keys) == b"".join(keys)
    assert unpack_keys(pack_keys(keys), key_bytes) == keys


@pytest.mark.parametrize("size", [1, 7, 9, 15, 17, 35])
def test_packed_fields_of_a_broken_length_are_refused(size: int) -> None:
    with pytest.raises(ProtocolError):
        unpack_u64(bytes(size))
    for key_bytes in (16, 18):
        with pytest.raises(ProtocolError):
            unpack_keys(bytes(size), key_bytes)


# Errors.


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_an_error_comes_out_as_it_went_in(code: str) -> None:
    cls = ERRORS[code]
    error = Rejected("too much", 2.5) if issubclass(cls, Rejected) else cls("too much")
    reply = wire.decode_reply(body_of(wire.encode(wire.failed(9, error))))
    assert reply.id == 9
    raised = wire.to_error(reply)
    assert type(raised) is cls
    assert str(raised) == "too much"
    if isinstance(raised, Rejected):
        assert raised.retry_after_s == 2.5


def test_codes_are_one_to_one_with_classes() -> None:
    assert set(ERRORS.values()) == subclasses(StoreError)
    assert all(cls.code == code for code, cls in ERRORS.items())


def test_an_error_that_this_client_does_not_know_is_the_protocols() -> None:
    raised = wire.to_error(wire.Failed(1, "brand_new", "what now"))
    assert type(raised) is ProtocolError
    assert "brand_new" in str(raised)
    assert "what now" in str(raised)
