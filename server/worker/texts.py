"""Text out of tokens while they come: whole characters only, and nothing that a stop string may begin in."""

from collections.abc import Callable, Sequence

from kvstore.errors import InvalidRequest

UNFINISHED = "\ufffd"
CONTEXT = 5  # tokens of the prompt that the first one's text may depend on


class ByteTokens:
    """The tokenizer of the `tiny` model, which has none: a token is a byte, and any other token one modulo 256."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token % 256 for token in tokens).decode("utf-8", "replace")

    def chat(self, messages: Sequence[dict[str, str]], *, with_answer: bool) -> list[int]:
        turns = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(turns) + ("assistant: " if with_answer else ""))


class Growing:
    """Decodes a sequence that grows; a token's text depends on those before it, so some of them are decoded again.

    With `stops` the text ends before the first of them, and `is_stopped` says so. `before`: the tokens before
    the first; in some vocabularies a token begins with a space except where nothing is before it.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._tokens = list(before[-CONTEXT:])
        if decode(self._tokens).endswith(UNFINISHED):
            self._tokens.clear()  # half a character, of which nothing is told
        self._start = 0  # tokens [start, read) were decoded; what follows is compared with them
        self._read = len(self._tokens)
        self._held = ""
        self.is_stopped = False

    def add(self, token: int) -> str:
        """The text that is certain now and was not before; perhaps none."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._start : self._read])
        text = self._decode(self._tokens[self._start :])
        if len(text) > len(before) and not text.endswith(UNFINISHED):
            self._held += text[len(before) :]
            self._start, self._read = self._read, len(self._tokens)
        return self._certain()

    def end(self) -> str:
        """What was held back, at the end."""
        if self.is_stopped:
            return ""
        before = self._decode(self._tokens[self._start : self._read])
        self._held += self._decode(self._tokens[self._start :])[len(before) :]
        self._start = self._read = len(self._tokens)
        certain = self._certain()
        held, self._held = self._held, ""
        return certain + held

    def _certain(self) -> str:
        places = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if places:
            certain, self._held = self._held[: min(places)], ""
            self.is_stopped = True
            return certain
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)


class ModelTokens:
    """The tokenizer that came with a model: `encode` and `decode` of transformers, and its chat template."""

    def __init__(
        self,
        encode: Callable[..., list[int]],
        decode: Callable[..., str],
        chat: Callable[..., str],
        refusals: tuple[type[Exception], ...] = (),
    ) -> None:
        """refusals: what a template raises for messages that it has no place for, beside what Python does."""
        self._encode = encode
        self._decode = decode
        self._chat = chat
        self._refusals: tuple[type[Exception], ...] = (ValueError, TypeError, KeyError, *refusals)

    def encode(self, text: str) -> list[int]:
        """Raises InvalidRequest for half a character, as a surrogate by itself is."""
        try:
            return list(self._encode(text, add_special_tokens=False))
        except (UnicodeError, TypeError) as error:
            raise InvalidRequest(f"the tokenizer refuses the text: {error}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        return self._decode(list(tokens), skip_special_tokens=True)

    def chat(self, messages: Sequence[dict[str, str]], *, with_answer: bool) -> list[int]:
        """Raises InvalidRequest when the template has no place for such messages."""
        try:
            rendered = self._chat(list(messages), add_generation_prompt=with_answer, tokenize=False)
        except self._refusals as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}") from error
        return self.encode(rendered)


Tokens = ByteTokens | ModelTokens
