"""What a gateway passes on of a stream, what it leaves out, and how a broken stream goes on."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.gateway.asked import CHAT, COMPLETIONS, Asked
from server.gateway.events import document, events, payload, with_cached, without_ids
from server.gateway.transcript import Transcript, is_continuable

PROMPT = [1, 2, 3]


def asked(path: str = COMPLETIONS, most_tokens: int | None = None, **more: Any) -> Asked:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": PROMPT}
    body = {"model": "m", "stream": True, "max_tokens": 10, **prompt, **more}
    return Asked(id="r", path=path, body=body, tenant="default", tokens=PROMPT, most_tokens=most_tokens)


def said(text: str, ids: list[int], finish_reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, "token_ids": ids, **more}
    return b"data: " + json.dumps({"id": "first", "model": "m", "choices": [choice]}).encode() + b"\n\n"


def broken(wanted: Asked, *raw: bytes) -> Transcript:
    transcript = Transcript(wanted)
    for each in raw:
        transcript.take(each, None, is_apart=False)
    return transcript


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    async def found() -> list[bytes]:
        async def chunks():
            begin = 0
            for place in [*sorted(places), len(stream)]:
                if stream[begin:place]:
                    yield stream[begin:place]
                begin = place

        return [event async for event in events(chunks())]

    return asyncio.run(found())


@given(st.lists(st.integers(0, 60)))
def test_events_are_the_same_however_their_bytes_come(places):
    stream = b"data: one\n\n: comment\r\n\r\ndata: two\r\ndata: more\n\ndata: [DONE]\n\nhalf"
    found = cut(stream, places)
    assert b"".join(found) + b"half" == stream
    assert [payload(event) for event in found] == [b"one", b"", b"two\nmore", b"[DONE]"]


@pytest.mark.parametrize(
    "text", ["plain", ',"token_ids":[1,2]', 'a,"prompt_token_ids":[3]', '\\",\\"token_ids\\":[4]', ","]
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_ids_are_left_out_and_text_that_looks_like_them_is_not(text, separators):
    wanted = {"choices": [{"text": text, "index": 0}], "model": "m"}
    choice = {"text": text, "token_ids": [5, 6], "index": 0, "prompt_token_ids": None}
    raw = json.dumps({"choices": [choice], "prompt_token_ids": [7], "model": "m"}, separators=separators)
    assert json.loads(without_ids(raw.encode())) == wanted


def test_a_continuation_has_the_tokens_whose_text_was_sent():
    wanted = asked(temperature=0, stream_options={"include_usage": True})
    transcript = broken(wanted, said("a", [11]), said("", [12]), said("b", [13]), said("", [14]))
    following = transcript.continuation()
    assert following is not None
    assert following.path == COMPLETIONS
    assert following.body["prompt"] == following.tokens == [1, 2, 3, 11, 12, 13]  # 14 may be half a character
    assert following.body["max_tokens"] == 7
    assert following.body["temperature"] == 0
    assert following.body["stream_options"] == {"include_usage": True}


def test_the_engines_own_prompt_tokens_count():
    transcript = broken(asked(), said("a", [11], prompt_token_ids=[8, 9]))
    following = transcript.continuation()
    assert following is not None
    assert following.tokens == [8, 9, 11]


def test_token_ids_whose_text_had_not_come_are_told_once_however_often_a_stream_breaks():
    transcript = Transcript(asked(return_token_ids=True))
    told: list[int] = []

    def take(*raw: bytes) -> None:
        for each in raw:
            found = document(transcript.take(each, None, is_apart=False))
            assert found is not None
            told.extend(found["choices"][0].get("token_ids") or ())

    take(said("x", [10]), said("", [200]), said("", [201]))
    for again in ([said("", [200])], [said("", [200]), said("", [201]), said("é", [202]), said("z", [13], "length")]):
        following = transcript.continuation()
        assert following is not None
        assert following.tokens == [1, 2, 3, 10]
        take(*again)
    assert told == [10, 200, 201, 202, 13]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_without_a_limit_goes_on_for_as_long_as_there_is_room(path):
    count = 1 if path == CHAT else 20  # of completions more than their default: the engine has another
    raw = said("a", list(range(count)))
    following = broken(asked(path, 100, max_tokens=None), raw).continuation()
    assert following is not None
    assert following.body["max_tokens"] == 100 - len(PROMPT) - count

    transcript = broken(asked(path, max_tokens=None), raw)
    following = transcript.continuation()
    assert following is not None
    assert following.output_tokens is None
    transcript.learn(50)
    following = transcript.continuation()
    assert following is not None
    assert following.body["max_tokens"] == 50 - len(PROMPT) - count
    transcript.learn(len(PROMPT) + count)
    rest = transcript.ending()
    assert rest is not None
    assert b'"length"' in rest


def test_a_continued_chat_looks_like_one_stream():
    wanted = asked(CHAT, max_completion_tokens=10)
    first = {"id": "first", "object": "chat.completion.chunk", "created": 5, "model": "m"}
    choice = {"index": 0, "delta": {"content": "a"}, "token_ids": [11]}
    event = b"data: " + json.dumps(first | {"choices": [choice]}).encode() + b"\n\n"
    transcript = broken(wanted, event)
    following = transcript.continuation()
    assert following is not None
    assert "messages" not in following.body
    assert "max_completion_tokens" not in following.body
    told = document(transcript.take(said("b", [12], "length"), None, is_apart=False))
    assert told is not None
    assert told["id"] == "first"
    assert told["object"] == "chat.completion.chunk"
    assert told["choices"][0]["delta"] == {"content": "b"}
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    last = document(
        transcript.take(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n", 2, is_apart=True)
    )
    assert last is not None
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 2)
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize(
    ("raw", "ending"),
    [
        ([said("a", [11], "stop")], [{"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}]),
        ([said("a", list(range(10)))], ["length", {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}]),
        ([said("a", [11])], None),
    ],
    ids=["finished", "at its limit", "in the middle"],
)
def test_a_stream_that_broke_at_its_end_only_lacks_that(raw, ending):
    transcript = broken(asked(stream_options={"include_usage": True}), *raw)
    transcript.continuation()
    rest = transcript.ending()
    if ending is None:
        assert rest is None
        return
    assert rest is not None
    found = [event for event in cut(rest, []) if payload(event) != b"[DONE]"]
    told = [document(event) for event in found]
    assert [each.get("usage") or each["choices"][0]["finish_reason"] for each in told if each] == ending
    assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "more",
    [
        *({"stop": ["x"]}, {"logprobs": 0}, {"presence_penalty": 0.5}, {"response_format": {"type": "json_object"}}),
        *({"n": 2}, {"echo": True}, {"tools": [{}]}, {"min_tokens": 2}, {"stream": False}, {"logit_bias": {"5": 1}}),
    ],
)
def test_what_an_engine_remembers_beside_tokens_cannot_go_on_elsewhere(more):
    assert not is_continuable(asked(**more))


@pytest.mark.parametrize(
    "more", [{}, {"presence_penalty": 0}, {"stop": None}, {"echo": False}, {"seed": 3, "temperature": 0.7}]
)
def test_what_depends_on_the_tokens_alone_can(more):
    assert is_continuable(asked(**more))


@pytest.mark.parametrize(
    "raw",
    [
        said("a", []),
        b'data: {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "token_ids": [4]}]}\n\n',
    ],
    ids=["text without tokens", "text that was parsed"],
)
def test_a_stream_whose_tokens_are_not_known_does_not_go_on(raw):
    assert broken(asked(), raw).continuation() is None


def test_the_cached_tokens_are_the_prefills_or_nobodys():
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 9}}
    assert with_cached(usage, 4)["prompt_tokens_details"] == {"cached_tokens": 4}
    assert with_cached(usage, None)["prompt_tokens_details"] is None
    assert with_cached({"prompt_tokens": 9}, None) == {"prompt_tokens": 9}
