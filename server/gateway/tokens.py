"""Finds the tokens of a request's prompt: they are there, or an engine or a local tokenizer makes them."""

import asyncio
import importlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from kvstore.errors import ConfigError, ConnectFailed, ProtocolError, TransportError
from server.gateway.asked import CHAT, Asked
from server.gateway.asking import Asking, Place
from server.gateway.settings import GatewaySettings
from server.gateway.upstream import Upstream, url_at

log = logging.getLogger("cairn.gateway")

ENGINES: Final = 2  # that are asked for one prompt's tokens
TEMPLATE_FIELDS: Final = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")
ADD_SPECIAL: Final = "add_special_tokens"  # by default texts get the tokenizer's own, and chats what the template has
MOST_TOKEN: Final = 2**32 - 1
LocalTokenizer = Callable[[Any, Any], list[int] | None]  # of a text, or of None and a body with messages


class Tokens:
    """Never fails a request: where there are no tokens to be had, it is routed without. `missed` counts those."""

    def __init__(
        self, upstream: Upstream, settings: GatewaySettings, asking: Asking, local: LocalTokenizer | None = None
    ) -> None:
        """local: in place of the engines."""
        self._upstream = upstream
        self._settings = settings
        self._asking = asking
        token = settings.engine_token
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._local = local
        self._thread = ThreadPoolExecutor(1, "tokenizer") if self._local else None
        self._most_tokens: dict[str, int] = {}  # by model
        self.missed = 0

    async def of(self, wanted: Asked) -> list[int] | None:
        """The prompt's tokens, the first prompt's where there are several; None when nobody says."""
        prompt = wanted.body.get("prompt") if wanted.path != CHAT else None
        if isinstance(prompt, list):
            prompt = prompt if isinstance(prompt[0], int) else prompt[0]
        if isinstance(prompt, list):
            found = _checked(prompt)
        elif self._local is not None:
            found = await self._locally(wanted, prompt)
        else:
            found = await self._from_engine(wanted, prompt)
        self.missed += found is None
        return found

    def most_known(self, model: str) -> int | None:
        """How many tokens a prompt of this model may have with its answer, if an engine has said so."""
        return self._most_tokens.get(model)

    async def most_of(self, model: str) -> int | None:
        """The same, asked of engines where it is not known; None when nobody says."""
        for place in self._asking.of_model(model)[:ENGINES]:
            if model in self._most_tokens:
                break
            document = await self._said(place, "GET", "/v1/models")
            cards = document.get("data") if isinstance(document, dict) else None
            for card in cards if isinstance(cards, list) else ():
                if isinstance(card, dict) and card.get("id") == model:
                    self._learn(model, card)
        return self.most_known(model)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _from_engine(self, wanted: Asked, prompt: Any) -> list[int] | None:
        body: dict[str, Any] = {"model": wanted.model}
        if wanted.path == CHAT:
            body |= {"messages": wanted.body["messages"], "add_generation_prompt": True}
            body |= {name: wanted.body[name] for name in (*TEMPLATE_FIELDS, "tools") if name in wanted.body}
        else:
            body["prompt"] = prompt
        if ADD_SPECIAL in wanted.body:
            body[ADD_SPECIAL] = wanted.body[ADD_SPECIAL]
        for place in self._asking.of_model(wanted.model)[:ENGINES]:
            document = await self._said(place, "POST", "/tokenize", body)
            tokens = document.get("tokens") if isinstance(document, dict) else None
            if isinstance(tokens, list) and (found := _checked(tokens)) is not None:
                self._learn(wanted.model, document)
                return found
        return None

    async def _said(self, place: Place, method: str, path: str, body: Any = None) -> Any:
        """The JSON that an engine answers; None when it does not."""
        url, timeout_s = url_at(place.address, path), self._settings.tokenize_timeout
        try:
            answer = await self._upstream.json(method, url, body, headers=self._headers, timeout_s=timeout_s)
            return answer.json() if answer.is_ok else None
        except TransportError as error:
            self._asking.suspect(place.name, is_down=isinstance(error, ConnectFailed))
        except ProtocolError:
            pass
        return None

    def _learn(self, model: str, told: Mapping[str, Any]) -> None:
        """Only of models that are served, so that there is an end to them."""
        most = told.get("max_model_len")
        models = set(self._asking.models)
        if type(most) is int and most > 0 and model in models:
            known = {name: tokens for name, tokens in self._most_tokens.items() if name in models}
            self._most_tokens = {**known, model: most}

    async def _locally(self, wanted: Asked, prompt: Any) -> list[int] | None:
        """In a thread: tokenizers let go of the GIL, and long prompts take their time."""
        encode = self._local
        assert encode is not None
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._thread, encode, prompt, wanted.body)
        await asyncio.wait([work], timeout=self._settings.tokenize_timeout)
        if not work.done():
            work.cancel()
            return None
        error = work.exception()  # whatever it is: a template raises what its author likes
        if error is not None:
            log.debug("no tokens for a prompt: %s", error)
            return None
        return work.result()


def _checked(tokens: list[Any]) -> list[int] | None:
    """Whether these can be tokens' numbers."""
    are = all(type(token) is int for token in tokens) and min(tokens, default=0) >= 0
    return tokens if are and max(tokens, default=0) <= MOST_TOKEN else None


def local_tokenizer(name: str) -> LocalTokenizer:
    """What transformers finds under this name or in this folder. Raises ConfigError."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError("gateway.tokenizer needs the extra `engine`: pip install 'cairn-kv[engine]'") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"gateway.tokenizer {name}: {str(error).splitlines()[0]}") from error

    def encode(prompt: Any, body: Any) -> list[int] | None:
        if isinstance(prompt, str):
            special = body.get(ADD_SPECIAL) is not False
            return _checked(list(tokenizer(prompt, add_special_tokens=special)["input_ids"]))
        more = body.get("chat_template_kwargs") or {}
        text = tokenizer.apply_chat_template(
            body["messages"],
            tools=body.get("tools"),
            add_generation_prompt=body.get("add_generation_prompt", True),
            tokenize=False,
            **more,
        )
        special = body.get(ADD_SPECIAL) is True
        return _checked(list(tokenizer(text, add_special_tokens=special)["input_ids"]))

    return encode
