"""One request of a client as the gateway keeps it, and what it refuses to begin with."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
LIMITS: Final = ("max_completion_tokens", "max_tokens")  # the first that is there counts
TEXT_LENGTH: Final = 256
MOST_PRIORITY: Final = 1000
MOST_DEADLINE_MS: Final = 86_400_000.0
MOST_OUTPUT: Final = 1 << 30
NOT_FOR_CLIENTS: Final = frozenset(
    {
        "priority",  # goes to the Conductor
        *("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"),  # where to fetch KV from
        *("rid", "request_id"),  # what engines call a request: another client's may be called so
    }
)


class Refused(Exception):
    """The client gets this instead of an answer, in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def document(self) -> dict[str, Any]:
        """{"error": {"message", "type", "param", "code"}}."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that is well formed as far as a route needs it; the rest is for the engine to check.

    body: what the engine gets, without the gateway's own fields. tokens: the prompt's, None when not known.
    most_tokens: of a prompt with its answer, as engines of this model say; None when not known.
    deadline_s: on the event loop's clock, when an answer that has not begun is of no use any more.
    """

    id: str
    path: str
    body: Mapping[str, Any]
    tenant: str
    session: str = ""
    priority: int = 0
    deadline_s: float | None = None
    tokens: list[int] | None = field(default=None, repr=False)
    most_tokens: int | None = None

    @property
    def model(self) -> str:
        return str(self.body["model"])

    @property
    def is_stream(self) -> bool:
        return self.body.get("stream") is True

    @property
    def is_one(self) -> bool:
        """One prompt, one answer, nothing said of the prompt: what prefill and decode can do apart."""
        body = self.body
        alone = all(body.get(name) in (None, 1) for name in ("n", "best_of"))
        return alone and not body.get("echo") and body.get("prompt_logprobs") is None and self.prompts == 1

    @property
    def prompts(self) -> int:
        """How many: a list of texts or of lists has as many as entries."""
        prompt = self.body.get("prompt")
        return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1

    @property
    def output_tokens(self) -> int | None:
        """How many are wanted at most; None: not said."""
        for name in LIMITS:
            most = self.body.get(name)
            if isinstance(most, int) and 1 <= most <= MOST_OUTPUT:
                return most
        return None

    def knowing(self, tokens: list[int] | None, most_tokens: int | None = None) -> "Asked":
        return replace(self, tokens=tokens, most_tokens=most_tokens)


def asked(path: str, body: Any, headers: Mapping[str, str], *, request_id: str, tenant: str, now: float) -> Asked:
    """What a client asks with this body and these headers (names in lower case). Raises Refused."""
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    model = body.get("model")
    if not isinstance(model, str) or not 1 <= len(model) <= TEXT_LENGTH or not _is_text(model):
        raise Refused(400, "a model must be named", param="model")
    needed = "messages" if path == CHAT else "prompt"
    if not isinstance(body.get(needed), list if path == CHAT else (list, str)) or body[needed] == []:
        raise Refused(400, f"there is no {needed}", param=needed)
    if not isinstance(body.get("stream"), bool | None):
        raise Refused(400, "stream is true or false", param="stream")
    if any(isinstance(body.get(name), bool) for name in LIMITS):
        raise Refused(400, "a number of tokens is a number", param=LIMITS[-1])
    priority = _number(headers.get("x-priority", body.get("priority")), "priority", MOST_PRIORITY)
    deadline_ms = _number(headers.get("x-deadline-ms"), "X-Deadline-Ms", MOST_DEADLINE_MS)
    session = headers.get("x-session-id") or body.get("prompt_cache_key") or ""
    return Asked(
        id=request_id,
        path=path,
        body={name: value for name, value in body.items() if name not in NOT_FOR_CLIENTS},
        tenant=tenant,
        session=session[:TEXT_LENGTH] if isinstance(session, str) and _is_text(session) else "",
        priority=int(priority or 0),
        deadline_s=None if deadline_ms is None else now + max(0.0, deadline_ms) / 1000,
    )


def _is_text(text: str) -> bool:
    """Not so where a half of a surrogate pair stands alone, which JSON can say and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(value: Any, name: str, most: float) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused(400, f"{name} is a number", param=name) from error
    if not -most <= number <= most:
        raise Refused(400, f"{name} is at most {most:g}", param=name)
    return number
