"""What a stream has told its client so far, and how another instance goes on from there."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from server.gateway.asked import CHAT, COMPLETIONS, Asked
from server.gateway.events import document, event, payload, with_cached, without_ids

KEPT_BYTES: Final = 8 << 20  # of one stream; a longer one cannot go on elsewhere
DEFAULT_OUTPUT_TOKENS: Final = 16  # of completions in OpenAI's API
LIMITS: Final = ("max_tokens", "max_completion_tokens")
# With these alone the next token depends on the tokens so far and on nothing that an engine remembers beside them, and
# all text of a token is sent once the token is.
PLAIN: Final = frozenset(
    {
        *("model", "prompt", "messages", "stream", "stream_options", *LIMITS),
        *("temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "user", "ignore_eos", "stop_token_ids"),
        *("return_token_ids", "prompt_cache_key", "cache_salt", "store", "metadata"),
        *("add_generation_prompt", "chat_template_kwargs", "add_special_tokens"),
    }
)
OF_THE_PROMPT: Final = frozenset(
    {"messages", "prompt", "add_generation_prompt", "chat_template_kwargs", "add_special_tokens", *LIMITS}
)


def is_continuable(wanted: Asked) -> bool:
    """Whether a stream that breaks could go on elsewhere, if its engine says which tokens it made."""
    known = all(name in PLAIN or _is_off(name, value) for name, value in wanted.body.items())
    return wanted.is_stream and wanted.is_one and known


def _is_off(name: str, value: Any) -> bool:
    """Whether this asks for nothing, as a penalty of 0 does. logprobs of 0 are still logprobs."""
    return value is None or value is False or (value in (0, [], {}, "") and name != "logprobs")


class Transcript:
    """Of one request over all instances that it is sent to.

    Events pass through `take` in the engine's form and come out as the client's. `continuation` is what to ask the
    next instance; what it answers has the form of completions, whatever the client asked for.
    """

    def __init__(self, wanted: Asked) -> None:
        self._wanted = wanted
        self._is_continuable = is_continuable(wanted)
        self._wants_ids = wanted.body.get("return_token_ids") is True
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._head: Mapping[str, Any] = {}  # the first event: id, created and model of all
        self._prompt: list[int] = []
        self._produced: list[int] = []  # tokens whose text the client has
        self._most_tokens = wanted.most_tokens
        self._told = 0  # token ids that the client has, where it wants them
        self._ahead = 0  # of those, whose text it has not: the next instance makes them again
        self._is_continued = False
        self.has_begun = False
        self.is_finished = False  # the client knows why the answer ended

    def take(self, raw: bytes, cached_tokens: int | None, *, is_apart: bool) -> bytes:
        """An event as the client is to have it. Of what is not JSON, nothing changes."""
        self.has_begun = True
        if self._is_continuable:
            self._keep(raw)
        if self._is_continued:
            return self._translated(raw, cached_tokens)
        if is_apart and b'"usage"' in raw and (found := document(raw)) and isinstance(found.get("usage"), dict):
            raw = event({**found, "usage": with_cached(found["usage"], cached_tokens)})
        return raw if self._wants_ids else without_ids(raw)

    def learn(self, most_tokens: int | None) -> None:
        """How many tokens a prompt may have with its answer."""
        self._most_tokens = most_tokens

    def continuation(self) -> Asked | None:
        """What to ask another instance. None when the stream cannot go on elsewhere.

        Without max_tokens where nobody has said how long the answer may get: a completion would then be cut short.
        """
        if not self._is_continuable or not self._read_kept():
            return None
        tokens = [*self._prompt, *self._produced]
        body = {name: value for name, value in self._wanted.body.items() if name not in OF_THE_PROMPT}
        body |= {"prompt": tokens, "return_token_ids": True}
        if (left := self._left()) is not None:
            body["max_tokens"] = left
        self._is_continued = True
        return replace(self._wanted, path=COMPLETIONS, body=body, tokens=tokens)

    def ending(self) -> bytes | None:
        """The events that still lack where no instance is needed any more; None where one is."""
        if not self.is_finished and not (self._left() == 0 and self._head):
            return None
        events = b"" if self.is_finished else event(self._piece("", "length"))
        options = self._wanted.body.get("stream_options")
        if self._head and isinstance(options, dict) and options.get("include_usage"):
            count, made = len(self._prompt), len(self._produced)
            usage = {"prompt_tokens": count, "completion_tokens": made, "total_tokens": count + made}
            events += event({**self._envelope(), "choices": [], "usage": usage})
        return events + b"data: [DONE]\n\n"

    def _keep(self, raw: bytes) -> None:
        self._kept.append(raw)
        self._kept_bytes += len(raw)
        if self._kept_bytes > KEPT_BYTES:
            self._is_continuable = False
            self._kept.clear()

    def _read_kept(self) -> bool:
        """Take in what was kept. False when it does not say which tokens made its text."""
        waiting: list[int] = []  # of tokens that have no text yet: they may be half a character
        for raw in self._kept:
            found = document(raw)
            if found is None:
                continue
            choice = next(iter(found.get("choices") or ()), None)
            self._head = self._head or found
            if not isinstance(choice, dict):
                continue
            delta = choice.get("delta") or {}
            if any(value for name, value in delta.items() if name not in ("role", "content")):
                return False  # reasoning, tools: what an engine parsed out of the text
            self._prompt = self._prompt or choice.get("prompt_token_ids") or found.get("prompt_token_ids") or []
            waiting += choice.get("token_ids") or ()
            self._told += 0 if self._is_continued else len(choice.get("token_ids") or ())
            if choice.get("text") or delta.get("content"):
                if not waiting:
                    return False
                self._produced += waiting
                waiting = []
            self.is_finished = self.is_finished or choice.get("finish_reason") is not None
        self._kept.clear()
        self._ahead = self._told - len(self._produced)
        self._prompt = self._prompt or self._wanted.tokens or []
        return bool(self._prompt)

    def _left(self) -> int | None:
        """How many tokens the answer may still have; None: not known."""
        most = self._wanted.output_tokens
        if most is None and self._wanted.path == COMPLETIONS and len(self._produced) < DEFAULT_OUTPUT_TOKENS:
            most = DEFAULT_OUTPUT_TOKENS
        if most is None and self._most_tokens is not None and self._prompt:
            most = self._most_tokens - len(self._prompt)  # what engines let a chat have
        return None if most is None else max(0, most - len(self._produced))

    def _translated(self, raw: bytes, cached_tokens: int | None) -> bytes:
        found = document(raw)
        if found is None or payload(raw) == b"[DONE]":
            return raw
        choice = next(iter(found.get("choices") or ()), None)
        told: dict[str, Any] = {**self._envelope(), "choices": []}
        if isinstance(choice, dict):
            told = self._piece(choice.get("text") or "", choice.get("finish_reason"))
            if self._wants_ids:
                told["choices"][0]["token_ids"] = self._untold(choice.get("token_ids") or [])
        if isinstance(found.get("usage"), dict):
            told["usage"] = self._usage(found["usage"], cached_tokens)
        return event(told)

    def _untold(self, token_ids: list[int]) -> list[int]:
        """Without those that the client has from an instance that failed."""
        known = min(self._ahead, len(token_ids))
        self._ahead -= known
        self._told += len(token_ids) - known
        return token_ids[known:]

    def _usage(self, usage: dict[str, Any], cached_tokens: int | None) -> dict[str, Any]:
        """Of the whole answer; the prompt of this instance had what was made before in it."""
        count, made = len(self._prompt), usage.get("completion_tokens", 0)
        before = usage.get("prompt_tokens", 0) - count
        told = {"prompt_tokens": count, "completion_tokens": made + before, "total_tokens": count + made + before}
        return with_cached({**usage, **told}, None if cached_tokens is None else min(cached_tokens, count))

    def _envelope(self) -> dict[str, Any]:
        return {name: self._head[name] for name in ("id", "object", "created", "model") if name in self._head}

    def _piece(self, text: str, finish_reason: Any) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        choice |= {"delta": {"content": text}} if self._wanted.path == CHAT else {"text": text}
        return {**self._envelope(), "choices": [choice]}
