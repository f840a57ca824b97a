"""Requests and answers in the form of OpenAI's API: what is asked for, checked, and how tokens are answered."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.worker.problems import Refused, field_is_wrong

COMPLETION_TOKENS: Final = 16  # where a completion does not say how many, as OpenAI's
MOST_STOPS: Final = 4
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {  # fields that are not served, with the values that ask for nothing
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "use_beam_search": (False,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "cache_salt": ("",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request's fields, checked by themselves. `prompt` is text or tokens, `messages` those of a chat."""

    is_chat: bool
    prompt: str | list[int] | None
    messages: list[dict[str, str]]
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stops: list[str]
    is_stream: bool
    with_usage: bool
    with_token_ids: bool
    ignores_end: bool
    hands_over: bool  # its KV is for another worker
    takes_over: bool  # another worker has computed its prompt
    first_token: int | None  # that the other one gave


def asked(body: Any, *, is_chat: bool, model: str) -> Asked:
    """Raises Refused, with the field that is wrong or not served."""
    if not isinstance(body, dict):
        raise Refused(400, "the body is not a JSON object")
    if body.get("model", model) != model:
        message = f"the model {body['model']!r} is not served here, {model!r} is"
        raise Refused(404, message, param="model", code="model_not_found")
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and not any(value == allowed for allowed in neutral):
            raise Refused(400, f"{name}: {value!r} is not served here", param=name, code="unsupported_value")
    transfer = _transfer(body)
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = _number(body, limit, int, 1, 1 << 30)
    hands_over = transfer.get("do_remote_decode") is True
    if hands_over and max_tokens not in (None, 1):
        raise field_is_wrong(limit, "1 where another worker decodes")
    seed = _number(body, "seed", int, -(1 << 63), (1 << 63) - 1)
    options = _options(body)
    handed_seed = _number(transfer, "seed", int, -(1 << 63), (1 << 63) - 1)
    temperature = _number(body, "temperature", float, 0, 100)
    top_p = _number(body, "top_p", float, 0, 1)
    return Asked(
        is_chat=is_chat,
        prompt=None if is_chat else _prompt(body),
        messages=_messages(body) if is_chat else [],
        max_tokens=1 if hands_over else max_tokens if max_tokens is not None or is_chat else COMPLETION_TOKENS,
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        seed=handed_seed if seed is None else seed,
        stops=_stops(body),
        is_stream=_flag(body, "stream"),
        with_usage=_flag(options, "include_usage"),
        with_token_ids=_flag(body, "return_token_ids"),
        ignores_end=_flag(body, "ignore_eos"),
        hands_over=hands_over,
        takes_over=transfer.get("do_remote_prefill") is True,
        first_token=_number(transfer, "first_token_id", int, -1, 1 << 32),
    )


def _prompt(body: dict[str, Any]) -> str | list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise field_is_wrong("prompt", "a text, or a list of token ids; one prompt at a time")


def _messages(body: dict[str, Any]) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise field_is_wrong("messages", "a list with at least one message")
    found = []
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise field_is_wrong(place, "an object with a role and a content")
        found.append({"role": message["role"], "content": _content(message.get("content"), f"{place}.content")})
    return found


def _content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise field_is_wrong(place, "a text, or a list of parts of text")


def _stops(body: dict[str, Any]) -> list[str]:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(text, str) for text in stops):
        raise field_is_wrong("stop", f"a text, or a list of up to {MOST_STOPS}")
    if any(not text for text in stops):
        raise field_is_wrong("stop", "texts that are not empty")
    return stops


def _options(body: dict[str, Any]) -> dict[str, Any]:
    options = body.get("stream_options")
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise field_is_wrong("stream_options", "an object")
    if not body.get("stream"):
        raise Refused(400, "stream_options: only with stream", param="stream_options", code="invalid_value")
    return options


def _transfer(body: dict[str, Any]) -> dict[str, Any]:
    transfer = body.get("kv_transfer_params")
    if transfer is not None and not isinstance(transfer, dict):
        raise field_is_wrong("kv_transfer_params", "an object")
    return transfer or {}


def _number(body: dict[str, Any], name: str, kind: type, least: float, most: float) -> Any:
    value = body.get(name)
    if value is None:
        return None
    is_number = type(value) is int or (kind is float and type(value) is float)
    if not is_number or not least <= value <= most:
        what = "a whole number" if kind is int else "a number"
        raise field_is_wrong(name, f"{what} from {least:g} to {most:g}")
    return value


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise field_is_wrong(name, "true or false")
    return bool(value)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: the text of some tokens, and with the last why it ends."""

    text: str
    token_ids: Sequence[int]
    reason: str | None = None


class Answer:
    """What a request is answered with, whole or piece by piece."""

    def __init__(self, request_id: str, model: str, asked: Asked, prompt: Sequence[int]) -> None:
        self._asked = asked
        self._prompt = prompt
        self._model = model
        self._made_s = int(time.time())
        self._id = f"chatcmpl-{request_id}" if asked.is_chat else f"cmpl-{request_id}"
        self._is_begun = False

    def whole(self, pieces: Sequence[Piece], cached_tokens: int, transfer: dict[str, Any] | None) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        token_ids = [token for piece in pieces for token in piece.token_ids]
        choice: dict[str, Any] = {"index": 0, "finish_reason": pieces[-1].reason, "logprobs": None}
        if self._asked.is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        document = self._document("chat.completion" if self._asked.is_chat else "text_completion", [choice])
        if self._asked.with_token_ids or transfer is not None:
            choice["token_ids"] = token_ids
            (document if self._asked.is_chat else choice)["prompt_token_ids"] = list(self._prompt)
        document["usage"] = self._usage(len(token_ids), cached_tokens)
        if transfer is not None:
            document["kv_transfer_params"] = transfer
        return document

    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The documents of a stream that tell `piece`; none while there is nothing to tell."""
        is_first, self._is_begun = not self._is_begun, True
        with_ids = self._asked.with_token_ids
        if not (piece.text or piece.reason or with_ids or is_first):
            return
        choice: dict[str, Any] = {"index": 0, "finish_reason": piece.reason, "logprobs": None}
        if self._asked.is_chat:
            role = {"role": "assistant"} if is_first else {}
            choice["delta"] = {**role, "content": piece.text} if piece.text or is_first else {}
        else:
            choice["text"] = piece.text
        document = self._document("chat.completion.chunk" if self._asked.is_chat else "text_completion", [choice])
        if with_ids:
            choice["token_ids"] = list(piece.token_ids)
            if is_first:
                (document if self._asked.is_chat else choice)["prompt_token_ids"] = list(self._prompt)
        if self._asked.with_usage:
            document["usage"] = None
        yield document

    def last_event(self, tokens: int, cached_tokens: int) -> dict[str, Any] | None:
        """The document with the usage, where it is asked for."""
        if not self._asked.with_usage:
            return None
        kind = "chat.completion.chunk" if self._asked.is_chat else "text_completion"
        return self._document(kind, []) | {"usage": self._usage(tokens, cached_tokens)}

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._made_s, "model": self._model, "choices": choices}

    def _usage(self, tokens: int, cached_tokens: int) -> dict[str, Any]:
        prompt = len(self._prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
